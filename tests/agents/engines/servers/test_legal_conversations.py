"""A hosted model gets conversations that its API accepts, whatever an agent made of the calls in an answer.

Each request is checked with the types of the provider's own SDK, and by the provider's rule for results: OpenAI wants a
message with the role `tool` for each call, Anthropic a block `tool_result` at the start of the next message.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from anthropic.types import MessageParam
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter

from tapereel.agents import LLM, Agent, ChatAgent, agent, delegate, rollout
from tapereel.agents.engines.servers import LiteLLMEngine
from tapereel.agents.engines.transport.wire import NOT_MADE
from tapereel.envs import Environment, Outcome
from tapereel.envs.adapters import ToolEnvironment
from tapereel.tapes import Action, Answer, Status, Tape, Task, ToolCalls

from ....finetune.loop.hosting import in_thread
from ...episode.shapes import Note, Steps, price, stock

OPENAI, ANTHROPIC = TypeAdapter(list[ChatCompletionMessageParam]), TypeAdapter(list[MessageParam])
Call = tuple[str, Any]
"""Name and arguments. A string is sent as it is."""


def openai_fault(messages: list[dict[str, Any]]) -> str | None:
    list(OPENAI.validate_python(messages))
    due: list[str] = []
    for k, message in enumerate(messages):
        if message["role"] == "tool":
            if message["tool_call_id"] not in due:
                return f"messages.[{k}]: 'tool' must be a response to a preceding message with 'tool_calls'"
            due.remove(message["tool_call_id"])
        elif due:
            return f"An assistant message with 'tool_calls' must be followed by tool messages for: {due}"
        due = due or [call["id"] for call in message.get("tool_calls") or ()]
    return f"no results for {due}" if due else None


def anthropic_fault(messages: list[dict[str, Any]]) -> str | None:
    list(ANTHROPIC.validate_python(messages))
    due: list[str] = []
    for k, message in enumerate(messages):
        blocks = message["content"]
        blocks = blocks if isinstance(blocks, list) else [{"type": "text", "text": blocks}]
        if any(block["type"] == "text" and not block["text"].strip() for block in blocks):
            return f"messages.{k}: text content blocks must be non-empty"
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if sorted(results) != sorted(due):
            return f"messages.{k}: `tool_use` ids {due} and `tool_result` ids {results}"
        if any(block["type"] != "tool_result" for block in blocks[: len(results)]):
            return f"messages.{k}: results must come first"
        due = [block["id"] for block in blocks if block["type"] == "tool_use"]
        if k and message["role"] == messages[k - 1]["role"]:
            return f"messages.{k}: roles must alternate"
    return f"no results for {due}" if due else None


class Strict:
    """A provider that answers with scripted calls or text, and refuses illegal conversations as the real ones do."""

    def __init__(self, script: list[list[Call] | str]) -> None:
        self.script, self.asked = script, list[Any]()
        self.refused: list[str] = []
        self.url = ""

    def _next(self, fault: str | None) -> list[Call] | str | web.Response:
        if fault is not None:
            self.refused.append(fault)
            error = {"type": "invalid_request_error", "message": fault}
            return web.json_response({"type": "error", "error": error}, status=400)
        return self.script[len(self.asked) - 1]

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body["messages"])
        said = self._next(openai_fault(body["messages"]))
        if isinstance(said, web.Response):
            return said
        calls = [
            {"id": f"c{len(self.asked)}{k}", "type": "function", "function": {"name": name, "arguments": text(values)}}
            for k, (name, values) in enumerate(said if isinstance(said, list) else [])
        ]
        message = {"role": "assistant", "content": said if isinstance(said, str) else None}
        message |= {"tool_calls": calls} if calls else {}
        choice = {"index": 0, "finish_reason": "tool_calls" if calls else "stop", "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        return web.json_response(body)

    async def messages(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body["messages"])
        said = self._next(anthropic_fault(body["messages"]))
        if isinstance(said, web.Response):
            return said
        blocks: list[dict[str, Any]] = [{"type": "text", "text": said}] if isinstance(said, str) else []
        for k, (name, values) in enumerate(said if isinstance(said, list) else []):
            given = values if isinstance(values, dict) else {"raw": values}
            blocks.append({"type": "tool_use", "id": f"c{len(self.asked)}{k}", "name": name, "input": given})
        usage = {"input_tokens": 1, "output_tokens": 1}
        body = {"id": "x", "type": "message", "role": "assistant", "model": "m", "content": blocks, "usage": usage}
        return web.json_response({**body, "stop_reason": "end_turn" if isinstance(said, str) else "tool_use"})

    @asynccontextmanager
    async def serving(self) -> Any:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/messages", self.messages)
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield
        await runner.cleanup()


def text(values: Any) -> str:
    return values if isinstance(values, str) else json.dumps(values)


class Guess(Action, kind="legal_guess"):
    """Guess the number."""

    number: int


class Game(Environment[Action]):
    """Says `lower` until 3."""

    async def reset(self, task: object) -> str:
        return "Guess."

    async def step(self, action: Action) -> Outcome:
        over = str(action) in ("3", "done") or getattr(action, "number", None) == 3
        return Outcome(None if over else "lower", reward=float(over), terminated=over)


class Shop(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__([price, stock])

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward=1.0, terminated=True)


@agent
async def takes_one(tape: Tape, llm: LLM) -> Steps:
    reply = await llm(tape, tools=[price, stock])
    if reply.tool_calls:
        yield Note(text="One will do.")
        yield ToolCalls(calls=reply.tool_calls[-1:])
    else:
        yield Answer(text=reply.text)


@agent
async def takes_none(tape: Tape, llm: LLM) -> Steps:
    await llm(tape, tools=[price, stock])
    yield Answer(text="done" if tape.turns else "again")


buyer = ChatAgent(name="buyer")


@agent
async def boss(tape: Tape, llm: LLM) -> Steps:
    """The sub-agent calls the tools; its calls and results are in the conversation of `boss` too."""
    await llm(tape, system="Should we buy?")
    async for step in delegate("buyer", buyer, tape, llm):
        yield step


guesser = ChatAgent(actions=[Guess])
PEAR, PLUM = {"fruit": "pear"}, {"fruit": "plum"}
BOTH: list[Call] = [("price", PEAR), ("stock", PLUM)]
CASES: dict[str, tuple[Agent, Callable[[], Any], list[list[Call] | str]]] = {
    "typed actions": (guesser, Game, [[("legal_guess", {"number": 9})], [("legal_guess", {"number": 3})]]),
    "invalid JSON": (guesser, Game, [[("legal_guess", "{not json")], [("legal_guess", {"number": 3})]]),
    "wrong arguments": (guesser, Game, [[("legal_guess", {"number": "x"})], [("legal_guess", {"number": 3})]]),
    "an unknown name": (guesser, Game, [[("nosuch", {})], [("legal_guess", {"number": 3})]]),
    "two calls for one action": (
        guesser,
        Game,
        [[("legal_guess", {"number": 1})] * 2, [("legal_guess", {"number": 3})]],
    ),
    "tools": (ChatAgent(), Shop, [BOTH, [("price", PEAR)], "Done."]),
    "tools, then an unknown name": (ChatAgent(), Shop, [[*BOTH, ("nosuch", {})], "Done."]),
    "a subset of the calls": (takes_one, Shop, [BOTH, BOTH, "Done."]),
    "none of the calls": (takes_none, Game, [BOTH, BOTH]),
    "a sub-agent's calls": (boss, Shop, ["Yes.", BOTH, "Yes.", "Done."]),
}


READ = {
    "typed actions": {"lower"},
    "tools": {"pear costs 50", "7 of plum"},
    "a subset of the calls": {NOT_MADE, "7 of plum"},
}
"""What the results say."""


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.parametrize("case", CASES)
def test_no_conversation_is_refused(case: str, provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    who, env, script = CASES[case]
    monkeypatch.setenv("STRICT_KEY", "k")
    strict = Strict(script)
    with in_thread(strict.serving):
        url = strict.url + ("/v1" if provider == "openai" else "")
        engine = LiteLLMEngine(model=f"{provider}/claude-m", base_url=url, key_variable="STRICT_KEY", seconds=60.0)
        tape = asyncio.run(rollout(who, env(), Task(public="Buy fruit."), engine=engine))
    assert strict.refused == []
    assert tape.status is Status.FINISHED, tape.cause
    assert len(strict.asked) > 1
    if provider == "openai":
        read = {m["content"] for messages in strict.asked for m in messages if m["role"] == "tool"}
        assert read >= READ.get(case, set())


def test_the_servers_refuse_what_the_providers_refuse() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": "{}"}}
    asks, user = {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "lower"}
    result = {"role": "tool", "tool_call_id": "c1", "content": "50"}
    assert openai_fault([user, asks, result, user]) is None
    for wrong in ([user, asks, user], [user, asks], [user, result], [user, asks, user, result]):
        assert openai_fault(wrong) is not None
    block = {"type": "tool_use", "id": "c1", "name": "price", "input": {}}
    uses, gives = (
        {"role": "assistant", "content": [block]},
        {"type": "tool_result", "tool_use_id": "c1", "content": "50"},
    )
    assert anthropic_fault([user, uses, {"role": "user", "content": [gives]}]) is None
    late = {"role": "user", "content": [{"type": "text", "text": "so"}, gives]}
    for wrong in ([user, uses, user], [user, uses], [user, uses, late], [user, user]):
        assert anthropic_fault(wrong) is not None
