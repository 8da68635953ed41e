"""`tool_choice` and schemas of answers: read alike in each API, enforced if the engine can, and recorded either way."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tapereel.agents import EmbeddedEngine, rollout
from tapereel.agents.engines import TeamEngine
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.gateway import Program, chat_protocol, messages_protocol, responses_protocol
from tapereel.agents.rendering import Renderer
from tapereel.agents.replay import replay
from tapereel.finetune import rows
from tapereel.finetune.inspect import requery_run
from tapereel.tapes import Sampling, Status, Tape
from tapereel.tapes.common.text import warn_once
from tapereel.tapes.records import Constraint

from ...toy_envs import Echo
from .lab import Told, served

CHARS = char_tokenizer()
RENDERER = Renderer(CHARS)
SCHEMA: Any = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string"}}},
    "required": ["words"],
    "additionalProperties": False,
}
PARAMETERS: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}
TOOL: Any = {"type": "function", "name": "add", "description": "adds", "parameters": PARAMETERS}
ITS_TOOL: Any = {"name": "add", "description": "adds", "input_schema": PARAMETERS}
ROUTES = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def body(api: str, **fields: Any) -> dict[str, Any]:
    said = [{"role": "user", "content": "go"}]
    return {
        "chat": {"messages": said},
        "responses": {"input": "go"},
        "messages": {"messages": said, "max_tokens": 200},
    }[api] | fields


def formed(api: str, schema: Any) -> dict[str, Any]:
    """The fields of a request whose content must match the schema."""
    named = {"type": "json_schema", "name": "it", "schema": schema, "strict": True}
    return {
        "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}},
        "responses": {"text": {"format": named}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }[api]


FORCED: dict[str, dict[str, Any]] = {
    "chat": {"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}},
    "responses": {"tools": [TOOL], "tool_choice": {"type": "function", "name": "add"}},
    "messages": {"tools": [ITS_TOOL], "tool_choice": {"type": "tool", "name": "add"}},
}
ANY: dict[str, dict[str, Any]] = {
    "chat": {"tools": [CHAT_TOOL], "tool_choice": "required"},
    "responses": {"tools": [TOOL], "tool_choice": "required"},
    "messages": {"tools": [ITS_TOOL], "tool_choice": {"type": "any"}},
}
FIELD = {"chat": "response_format", "responses": "text.format", "messages": "output_config.format"}


def embedded() -> EmbeddedEngine:
    return EmbeddedEngine(tiny_model(CHARS, "micro", context=1024), RENDERER, version="run:0", slots=8)


class Speaks(Told):
    """Answers with this text, as ids of this file's tokenizer."""

    @property
    def renderer(self) -> Any:
        return RENDERER


@pytest.mark.parametrize("api", ROUTES)
def test_each_api_demands_the_same(api: str):
    read = {"chat": chat_protocol, "responses": responses_protocol, "messages": messages_protocol}[api].read
    free, asked = read(body(api)), read(body(api, **formed(api, SCHEMA)))
    assert free.constraint is None
    assert (asked.constraint, asked.demanded_by) == (Constraint(json_schema=SCHEMA), FIELD[api])
    for forced in (FORCED, ANY):
        asked = read(body(api, **forced[api], **formed(api, SCHEMA)))
        assert (asked.constraint, asked.demanded_by) == (Constraint(tools=("add",)), "tool_choice")
    asked = read(body(api, **formed(api, SCHEMA), tools=FORCED[api]["tools"]))
    assert asked.constraint == Constraint(json_schema=SCHEMA, tools=("add",)), "it may call the tool first"
    if api != "messages":
        anything = {"type": "json_object"}
        fields: Any = {"response_format": anything} if api == "chat" else {"text": {"format": anything}}
        assert read(body(api, **fields)).constraint == Constraint(json_schema={"type": "object"})


def test_a_response_repeats_what_it_was_asked_for():
    fields: Any = FORCED["responses"] | formed("responses", SCHEMA)
    asked = responses_protocol.read(body("responses", **fields))
    answered: Any = responses_protocol.stream(asked).begin("0" * 24, 1).decode()
    assert json.dumps(fields["text"], separators=(",", ":")) in answered
    assert json.dumps(fields["tool_choice"], separators=(",", ":")) in answered


def posted(path: Path, engine: Any, *asked: tuple[str, dict[str, Any]], **options: Any) -> tuple[list[Any], Tape]:
    async def run() -> tuple[list[Any], Tape]:
        async with served(path / "run", engine, sampling=Sampling(max_tokens=120), **options) as gateway:
            tape, client = await gateway.begin()
            found = [await client("POST", ROUTES[api], body(api, **fields)) for api, fields in asked]
            await gateway.end(tape)
            return found, gateway.tape(tape)

    return asyncio.run(run())


def content(api: str, answer: Any) -> str:
    if api == "chat":
        return answer["choices"][0]["message"]["content"]
    return answer["output"][0]["content"][0]["text"] if api == "responses" else answer["content"][0]["text"]


def called(api: str, answer: Any) -> tuple[str, Any]:
    if api == "chat":
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        return call["function"]["name"], json.loads(call["function"]["arguments"])
    (call,) = answer["output" if api == "responses" else "content"]
    return call["name"], json.loads(call["arguments"]) if api == "responses" else call["input"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_untrained_model_keeps_the_form_and_is_not_for_rl(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
):
    warn_once.cache_clear()
    asked = [(api, formed(api, SCHEMA)) for api in ROUTES] + [(api, ANY[api]) for api in ROUTES]
    asked += [("chat", FORCED["chat"] | formed("chat", SCHEMA) | {"tool_choice": "auto"})]
    streamed = [(api, fields | {"stream": True}) for api, fields in asked] if stream else asked
    with caplog.at_level(logging.WARNING):
        found, tape = posted(tmp_path, embedded(), *streamed)
    assert [status for status, _ in found] == [200] * 7
    for k, ((api, _), (_, answer)) in enumerate(zip(asked, found, strict=True)):
        if stream:
            continue
        if k < 3:
            jsonschema.validate(json.loads(content(api, answer)), SCHEMA)
        elif k < 6:
            name, arguments = called(api, answer)
            jsonschema.validate(arguments, PARAMETERS)
            assert name == "add"
    assert [call.constraint.enforced for call in tape.calls if call.constraint] == [True] * 7
    assert all(call.text and call.finish == "stop" and np.isfinite(call.logprobs or ()).all() for call in tape.calls)
    every = rows(tape)
    assert every
    assert all(np.isnan(row.old).all() for row in every), "they may be imitated, but have no ratio"
    told = [record.getMessage() for record in caplog.records if "RL" in record.getMessage()]
    assert len(told) == 1
    assert "enforces" in told[0]


def test_without_enforcement_the_demand_is_recorded_and_the_answer_is_for_rl(tmp_path: Path):
    found, tape = posted(tmp_path, Speaks(lambda _: "no"), *[(api, ANY[api]) for api in ROUTES])
    assert [status for status, _ in found] == [200] * 3
    assert content("chat", found[0][1]) == "no"
    assert [call.constraint for call in tape.calls] == [Constraint(tools=("add",))] * 3
    assert all(np.isfinite(row.old).all() for row in rows(tape))


def test_a_family_without_a_known_call_is_not_enforced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = embedded()
    assert engine.renderer is not None
    monkeypatch.setattr(engine.renderer, "format", chat_format_without_calls())
    _, tape = posted(tmp_path, engine, ("chat", ANY["chat"] | {"max_tokens": 5}), ("chat", formed("chat", SCHEMA)))
    assert [call.constraint and call.constraint.enforced for call in tape.calls] == [False, True]


def chat_format_without_calls() -> Any:
    from tapereel.agents.rendering.response_templates import FORMATS

    return FORMATS["glm"]


@pytest.mark.parametrize("api", ROUTES)
def test_a_schema_that_cannot_be_enforced_is_refused_by_field(tmp_path: Path, api: str):
    bad: Any = {"type": "array", "uniqueItems": True}
    (first, second), tape = posted(tmp_path, embedded(), (api, formed(api, bad)), (api, formed(api, SCHEMA)))
    assert (first[0], second[0]) == (400, 200)
    error = first[1]["error"]
    assert "uniqueItems" in error["message"]
    assert FIELD[api] in error["message"]
    if api != "messages":
        assert (error["param"], error["type"]) == (FIELD[api], "invalid_request_error")
    assert [call.finish for call in tape.calls] == ["error", "stop"]


def test_replay_model_compares_an_enforced_form_with_the_models_own_log_probs(tmp_path: Path):
    engine = embedded()
    posted(tmp_path, engine, ("chat", formed("chat", SCHEMA) | {"temperature": 0.7}))
    for seed, outcome in ((0, "verified"), (1, "diverged")):
        model = tiny_model(CHARS, "micro", context=1024, seed=seed)
        model.save_pretrained(tmp_path / f"model-{seed}")
        CHARS.save_pretrained(tmp_path / f"model-{seed}")
        (verdict,) = requery_run(tmp_path / "run", str(tmp_path / f"model-{seed}"))[0].verdicts
        assert verdict.outcome == outcome
        tokens = verdict.checked and verdict.checked["tokens"]
        assert tokens == engine.stats.sampled, "each token is compared"


async def asks(task: str, endpoint: Any, schema: Any = SCHEMA) -> str:
    """Asks for JSON, and goes on when its schema is refused."""
    from openai import AsyncOpenAI, BadRequestError

    said: Any = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
    async with AsyncOpenAI(**endpoint._asdict(), max_retries=0) as client:
        with pytest.raises(BadRequestError):
            await client.chat.completions.create(**said, **formed("chat", {"type": "nonsense"}))
        reply = await client.chat.completions.create(**said, **formed("chat", schema))
    json.loads(reply.choices[0].message.content or "")
    return task


def test_a_replay_compares_the_demand_and_repeats_a_refusal():
    options: Any = {"engine": embedded(), "sampling": Sampling(max_tokens=40)}
    tape = asyncio.run(rollout(Program(asks), Echo(), "abc", **options))
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0), tape.cause
    verdict = asyncio.run(replay(tape, Program(asks), renderer=RENDERER))
    assert verdict.outcome == "verified", verdict

    async def other(task: str, endpoint: Any) -> str:
        return await asks(task, endpoint, SCHEMA | {"required": []})

    verdict = asyncio.run(replay(tape, Program(other), renderer=RENDERER))
    assert verdict.divergence is not None
    assert verdict.divergence.field.startswith("constraint.json_schema")


def test_in_a_team_only_the_engine_that_can_gets_a_grammar(tmp_path: Path):
    told = Speaks(lambda _: "no")
    team = TeamEngine({"other": embedded(), "": told})
    assert "grammar" in team.can
    _, tape = posted(tmp_path, team, ("chat", formed("chat", SCHEMA)))
    assert [call.constraint and call.constraint.enforced for call in tape.calls] == [False]
    assert not told.requests[0].grammar
