"""The content of a box on stdin, what the model says it is on stdout: an official client with one tool, streamed.

    python gateway_client.py responses|messages

Run by the Python of `tests/contract/clients_env.py`. Knows nothing of Tapereel: address and key are in the environment.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

MOST = 3
"""Maximum requests. A model that still calls tools then has no answer."""
QUESTION = "what is in the box?"
PARAMETERS: Any = {"type": "object", "properties": {}}
TOOL: Any = {"name": "look", "description": "look into it"}


def looked(name: str, content: str) -> tuple[str, bool]:
    """Return the tool's result, and whether it is an error. The model may call anything."""
    return (content, False) if name == TOOL["name"] else ("no such tool", True)


async def by_responses(content: str) -> str:
    import openai

    tools: Any = [{"type": "function", **TOOL, "parameters": PARAMETERS, "strict": False}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    async with openai.AsyncOpenAI(max_retries=0) as api:
        for _ in range(MOST):
            async with api.responses.stream(model="policy", input=items, tools=tools) as events:
                answer: Any = await events.get_final_response()
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            items += answer.output
            for call in calls:
                text, _ = looked(call.name, content)
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})
    return ""


async def by_messages(content: str) -> str:
    import anthropic

    tools: Any = [{**TOOL, "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    async with anthropic.AsyncAnthropic(max_retries=0) as api:
        for _ in range(MOST):
            asked: Any = {"model": "policy", "max_tokens": 100, "messages": messages, "tools": tools}
            async with api.messages.stream(**asked) as events:
                answer: Any = await events.get_final_message()
            uses = [block for block in answer.content if block.type == "tool_use"]
            if not uses:
                return "".join(block.text for block in answer.content if block.type == "text")
            made = [(use.id, *looked(use.name, content)) for use in uses]
            results = [{"type": "tool_result", "tool_use_id": id, "content": t, "is_error": bad} for id, t, bad in made]
            messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    return ""


CLIENTS = {"responses": by_responses, "messages": by_messages}

if __name__ == "__main__":
    print(asyncio.run(CLIENTS[sys.argv[1]](sys.stdin.read().strip())))
