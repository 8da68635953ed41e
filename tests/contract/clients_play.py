"""Plays planned conversations with the official clients. Run by the Python of `clients_env.py`.

python clients_play.py FILE      a JSON line for each conversation: `Talk` of tests/agents/gateway, url and key
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai

AT_ONCE = 8


def result(text: str, bad: bool) -> str:
    return f"Error: {text}" if bad else text


async def chat(api: openai.AsyncOpenAI, talk: Any) -> None:
    messages: list[Any] = [] if talk["system"] is None else [{"role": "system", "content": talk["system"]}]
    calls: list[Any] = []
    for heard in talk["heard"]:
        if isinstance(heard, str):
            messages.append({"role": "user", "content": heard})
        else:
            made = [(call.id, result(*one)) for call, one in zip(calls, heard, strict=True)]
            messages += [{"role": "tool", "tool_call_id": id, "content": text} for id, text in made]
        asked: Any = {"model": "gpt-5", "messages": messages, "tools": talk["tools"]}
        if talk["stream"]:
            async with api.chat.completions.stream(**asked) as events:
                answer: Any = await events.get_final_completion()
        else:
            answer = await api.chat.completions.create(**asked)
        messages.append(answer.choices[0].message)
        calls = answer.choices[0].message.tool_calls or []


async def responses(api: openai.AsyncOpenAI, talk: Any) -> None:
    items: list[Any] = []
    calls: list[Any] = []
    about: Any = {} if talk["system"] is None else {"instructions": talk["system"]}
    for heard in talk["heard"]:
        if isinstance(heard, str):
            items.append({"role": "user", "content": heard})
        else:
            made = [(call.call_id, result(*one)) for call, one in zip(calls, heard, strict=True)]
            items += [{"type": "function_call_output", "call_id": id, "output": text} for id, text in made]
        asked: Any = {"model": "gpt-5", "input": items, "tools": talk["tools"], **about}
        if talk["stream"]:
            async with api.responses.stream(**asked) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await api.responses.create(**asked)
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]


async def messages(api: anthropic.AsyncAnthropic, talk: Any) -> None:
    messages: list[Any] = []
    uses: list[Any] = []
    about: Any = {} if talk["system"] is None else {"system": talk["system"]}
    for heard in talk["heard"]:
        if not isinstance(heard, str):
            made = [(use.id, *one) for use, one in zip(uses, heard, strict=True)]
            heard = [{"type": "tool_result", "tool_use_id": id, "content": t, "is_error": bad} for id, t, bad in made]
        messages.append({"role": "user", "content": heard})
        asked: Any = {"model": "claude", "max_tokens": 9999, "messages": messages, "tools": talk["tools"], **about}
        if talk["stream"]:
            async with api.messages.stream(**asked) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await api.messages.create(**asked)
        messages.append({"role": "assistant", "content": answer.content})
        uses = [block for block in answer.content if block.type == "tool_use"]


PLAYERS: dict[str, Callable[[Any, Any], Awaitable[None]]] = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
}


async def main(talks: list[Any]) -> None:
    root = talks[0]["root"]
    left = asyncio.Semaphore(AT_ONCE)
    async with (
        openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="none", max_retries=0) as ours,
        anthropic.AsyncAnthropic(base_url=root, api_key="none", max_retries=0) as theirs,
    ):

        async def one(talk: Any) -> None:
            async with left:
                api = theirs if talk["api"] == "messages" else ours
                await PLAYERS[talk["api"]](api.with_options(api_key=talk["key"]), talk)

        await asyncio.gather(*map(one, talks))


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    asyncio.run(main([json.loads(line) for line in lines]))
