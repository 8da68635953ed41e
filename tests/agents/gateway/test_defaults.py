"""What clients send by default, and what a request may ask for beside a conversation: penalties and embeddings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tapereel.agents import Request
from tapereel.tapes import Sampling, Tape

from .lab import Told, embedded, served

USER = {"role": "user", "content": "hi"}
BEGUN = {"role": "assistant", "content": "the answer is"}


@pytest.mark.parametrize("follow", [True, False])
def test_penalties_shape_the_answer_and_keep_it_from_rl(tmp_path: Path, follow: bool):
    async def scene() -> Tape:
        async with served(tmp_path, embedded(), sampling=Sampling(max_tokens=12), follow=follow) as there:
            tape, client = await there.begin(task="t")
            for setting in ({"repetition_penalty": 2}, {"frequency_penalty": 2.0, "stop": "zz"}, {"top_k": 1}):
                status, body = await client.ask("a" * 20, temperature=1.0, **setting)
                assert status == 200, body
            status, _ = await client("POST", "/v1/messages", {"messages": [USER], "max_tokens": 5, "top_k": 1})
            assert status == 200
            await there.end(tape)
            return there.tape(tape)

    tape = asyncio.run(scene())
    assert [call.sampling.exact for call in tape.calls] == [not follow] * 4
    extras = [dict(call.sampling.extra) for call in tape.calls]
    assert [extra.pop("stop", None) for extra in extras] == [None, ["zz"], None, None]
    asked = [{"repetition_penalty": 2.0}, {"frequency_penalty": 2.0}, {}, {}] if follow else [{}] * 4
    assert extras == asked
    assert [call.sampling.top_k for call in tape.calls] == ([0, 0, 1, 1] if follow else [0] * 4)
    again = embedded().complete  # the recorded settings sample the recorded tokens
    for call in tape.calls:
        request = Request(messages=[], prompt=call.prompt, sampling=call.sampling, seed=call.seed or 0, cache_key="")
        assert asyncio.run(again(request)).ids == call.completion


BROWSER_USE: Any = {
    "model": "gpt-4.1-mini",
    "messages": [{"role": "system", "content": "add"}, {"role": "user", "content": "what is 1 + 2?"}],
    "frequency_penalty": 0.3,
    "max_completion_tokens": 4096,
    "response_format": {
        "json_schema": {
            "name": "agent_output",
            "strict": True,
            "schema": {
                "properties": {"total": {"type": "integer"}},
                "required": ["total"],
                "type": "object",
                "additionalProperties": False,
            },
        },
        "type": "json_schema",
    },
    "temperature": 0.2,
}
"""What `ChatOpenAI` of browser-use 0.13.14 sends. `tests/contract/test_clients.py` runs it."""
AGENCY_SWARM: Any = {
    "include": [],
    "input": [{"content": "what is 1 + 2?", "role": "user", "type": "message"}],
    "instructions": "Add with the tool.",
    "model": "gpt-4.1",
    "tools": [
        {
            "name": "add",
            "parameters": {
                "properties": {"a": {"title": "A", "type": "integer"}, "b": {"title": "B", "type": "integer"}},
                "required": ["a", "b"],
                "title": "add_args",
                "type": "object",
                "additionalProperties": False,
            },
            "strict": True,
            "type": "function",
            "description": "Add two numbers.",
        }
    ],
    "truncation": "auto",
}
"""What Agency Swarm 1.11.0 sends. The same file runs it."""


def test_what_browser_use_and_agency_swarm_send_by_default_is_answered(tmp_path: Path):
    async def scene() -> Any:
        async with served(tmp_path, Told()) as there:
            tape, client = await there.begin(task="t")
            answers = [
                await client("POST", "/v1/chat/completions", BROWSER_USE),
                await client("POST", "/v1/responses", AGENCY_SWARM),
            ]
            await there.end(tape)
            return answers, there.tape(tape).calls

    ((status, _), (again, response)), (first, second) = asyncio.run(scene())
    assert (status, again, response["truncation"]) == (200, 200, "auto")
    assert (first.sampling.temperature, first.sampling.extra) == (0.2, {"frequency_penalty": 0.3})
    assert (first.sampling.exact, second.sampling.exact) == (False, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER, BEGUN]}),
        ("/v1/responses", {"input": [USER, BEGUN]}),
        ("/v1/messages", {"messages": [USER, BEGUN], "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": [USER, BEGUN]}),
    ],
)
def test_an_answer_that_the_client_has_begun_is_refused_and_not_asked_anew(tmp_path: Path, path: str, body: Any):
    async def scene() -> None:
        engine = Told()
        async with served(tmp_path, engine) as there:
            tape, client = await there.begin(task="t")
            status, told = await client("POST", path, body)
            assert status == 400
            assert "the last message is the assistant's" in told["error"]["message"]
            await there.end(tape)
            assert engine.requests == []

    asyncio.run(scene())


def test_embeddings_come_from_the_server_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the-user's-own-key")
    heard: list[Any] = []

    async def embed(request: web.Request) -> web.Response:
        heard.append((request.headers["Authorization"], await request.json()))
        if heard[-1][1]["model"] == "none":
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        return web.json_response({"data": [{"embedding": [0.5], "index": 0}]})

    async def scene() -> list[Any]:
        app = web.Application()
        app.router.add_post("/v1/embeddings", embed)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        told: list[Any] = []
        for name, embeddings in (("with", url), ("without", None)):
            async with served(tmp_path / name, Told(), embeddings=embeddings) as there:
                tape, client = await there.begin(task="t")
                bodies = [{"model": model, "input": ["a"]} for model in ("m", "none", client.key)]
                told += [await client("POST", "/v1/embeddings", body) for body in bodies]
                await there.end(tape)
                told.append(await client("POST", "/v1/embeddings", {"model": "m", "input": ["a"]}))
        await runner.cleanup()
        return told

    made, missing, secret, late, unnamed, *_ = asyncio.run(scene())
    assert made == (200, {"data": [{"embedding": [0.5], "index": 0}]})
    assert [status for status, _ in (missing, secret, late, unnamed)] == [404, 400, 403, 404]
    assert "no such model" in missing[1]["error"]["message"]
    assert "--embeddings" in unnamed[1]["error"]["message"]
    bearer = "Bearer the-user's-own-key"
    assert heard == [(bearer, {"model": model, "input": ["a"]}) for model in ("m", "none")]
