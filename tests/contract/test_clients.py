"""Unmodified clients with their default settings are agents: one row, every sampled token, replayed with ids."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from array import array
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import Completion, rollout
from tapereel.agents.engines.embedded.embedded_engine import EmbeddedEngine
from tapereel.agents.engines.embedded.tiny_model import char_tokenizer, tiny_model
from tapereel.agents.gateway import Program, chat_protocol, messages_protocol, responses_protocol
from tapereel.agents.gateway.dialect import Answered
from tapereel.agents.rendering.renderer import Renderer
from tapereel.agents.replay.replayer import replay
from tapereel.envs import Environment, Outcome
from tapereel.finetune.data.rows import rows
from tapereel.tapes import Answer, Sampling, Status, Text

from ..agents.families import tokenizer
from ..agents.gateway.lab import Told
from .clients_env import DONE, PYTHON
from .clients_run import CLIENTS, PARSED

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]
SCRIPT = Path(__file__).with_name("clients_run.py")
RENDERER = Renderer(tokenizer("qwen3"))
CHARS = char_tokenizer()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
THOUGHT = "<think>\nI may write %s .\n</think>\n\n" % (CALL % (7, 8))
SAID = [
    f"{THOUGHT}I add.\n" + CALL % (1, 2),
    THOUGHT + CALL % (-1, 2),
    CALL % (3, 4) + "\n" + CALL % (5, 6),
    f"{THOUGHT}done",
]
"""A call, a call that fails, two at once, and the answer. Some come after a thought that quotes a call."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    if not DONE.exists():
        pytest.fail("the environment is not there: run python tests/contract/clients_env.py")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")


class Says(Told):
    """Answers the next of `SAID` in each conversation, as token ids."""

    def __init__(self) -> None:
        super().__init__(lambda messages: SAID[sum(message["role"] == "assistant" for message in messages)])

    @property
    def renderer(self) -> Any:
        return RENDERER

    def _completion(self, text: str, *, end: bool) -> Completion:
        ids = array("i", [*RENDERER._codec._raw(text), *RENDERER.end_ids[:1]])
        spans = (("run:0", 0, len(ids)),)
        return Completion(text=text, ids=ids, logprobs=array("f", [-0.5] * len(ids)), spans=spans, finish="stop")

    @property
    def context(self) -> int | None:
        return 100_000


class Adds(Environment[Answer]):
    async def reset(self, task: str) -> Text:
        return Text(text=task)

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=float(action.text == "done"), terminated=True)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_as_it_comes_is_one_row_and_is_replayed(client: str):
    agent = Program([str(PYTHON), str(SCRIPT), client])
    tape = asyncio.run(rollout(agent, Adds, "add", engine=Says(), sampling=Sampling(max_tokens=2000)))
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0), tape.cause
    assert [RENDERER.decode(call.completion) for call in tape.calls if call.completion] == SAID
    assert [call.split for call in tape.calls] == [None] * 4
    (row,) = rows(tape)
    assert len(row.own) == sum(len(call.completion or ()) for call in tape.calls)
    verdict = asyncio.run(replay(tape, agent, renderer=RENDERER))
    assert verdict.outcome == "verified", verdict


class Sums(Environment[Answer]):
    async def reset(self, task: str) -> Text:
        return Text(text=task)

    async def step(self, action: Answer) -> Outcome:
        found = json.loads(action.text)
        right = all(isinstance(word, str) for word in found["words"]) and isinstance(found["total"], int)
        return Outcome(reward=float(right), terminated=True)


@pytest.mark.parametrize("client", PARSED)
def test_a_clients_answer_with_fields_is_enforced_and_replayed(client: str):
    """The model is untrained, so it would never give such an answer by itself."""
    renderer = Renderer(CHARS)
    engine = EmbeddedEngine(tiny_model(CHARS, "micro", context=4096), renderer, version="run:0", slots=2)
    agent = Program([str(PYTHON), str(SCRIPT), "parsed", client])
    tape = asyncio.run(rollout(agent, Sums, "add", engine=engine, sampling=Sampling(max_tokens=300)))
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0), tape.cause
    assert [call.constraint and call.constraint.enforced for call in tape.calls] == [True]
    verdict = asyncio.run(replay(tape, agent, renderer=renderer))
    assert verdict.outcome == "verified", verdict


def test_the_official_models_parse_every_answer_and_every_event(tmp_path: Path):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    lines = list[Any]()
    shapes: list[Any] = [
        ("one two", "stop", None, (), "a thought"),
        ("", "length", None, (), "a thought"),
        ("i add", "tool_calls", None, (call,), "a thought"),
        ("", "tool_calls", None, (call,), "a thought"),
        ("one two", "stop", None, ()),
        ("", "stop", None, ()),
        ("one", "stop", "x", ()),
        ("one", "length", None, ()),
        ("", "tool_calls", None, (call, call)),
        ("i add", "tool_calls", None, (call,)),
    ]
    for text, finish, stopped, calls, *thought in shapes:
        answer = Answered("0" * 24, text, finish, stopped, calls, *thought, prompt_tokens=3, completion_tokens=2)
        function: Any = {"type": "function", "name": "add", "parameters": {}}
        body: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        for name, dialect, asked in (
            ("responses", responses_protocol, responses_protocol.read({"input": "hi", "tools": [function]})),
            ("messages", messages_protocol, messages_protocol.read(body)),
            ("chat", chat_protocol, chat_protocol.read({"messages": body["messages"]})),
        ):
            lines.append([name, dialect.body(asked, answer)])
            stream: Any = dialect.stream(asked)
            sent = stream.begin(answer.id, 7) + (stream.thought(thought[0][:3]) if thought else b"")
            sent += (stream.text(text[:2]) if text and not thought else b"") + stream.end(answer)
            data = [line[6:] for line in sent.decode().splitlines() if line.startswith("data: {")]
            lines += [[f"{name}-event", json.loads(event)] for event in data]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    done = subprocess.run([PYTHON, SCRIPT, "parse", file], env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
