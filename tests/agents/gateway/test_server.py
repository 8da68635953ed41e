"""The served gateway over HTTP: tapes that are ordinary, and what an OpenAI client is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from tapereel.agents import EngineError, Limits, Request
from tapereel.agents.engines import EngineStopped
from tapereel.agents.gateway import Bounds, Control
from tapereel.finetune import rows
from tapereel.tapes import Sampling, Tape
from tapereel.tapes.common.text import warn_once
from tapereel.tapes.store import Store, verify

from .lab import RENDERER, TOKEN, Client, Served, Told, books_close, embedded, served, until


def test_a_tape_through_the_gateway_is_an_ordinary_one(tmp_path: Path):
    async def scene() -> tuple[str, list[Any]]:
        async with served(tmp_path, embedded()) as there:
            tape, client = await there.begin(task={"public": "say a", "private": "a"}, group="g", attempt=3, seed=7)
            said, messages = [], []
            for text in ("one", "two"):
                messages.append({"role": "user", "content": text})
                status, answer = await client.ask(*messages, logprobs=True, return_token_ids=True)
                assert status == 200
                said.append(answer)
                messages.append(answer["choices"][0]["message"])
            await there.score(tape, right=1.0, polite=0.5)
            ended = await there.end(tape, answer="a")
            assert (ended["status"], ended["reward"], ended["calls"]) == ("finished", 1.5, 2)
            return tape, said

    name, said = asyncio.run(scene())
    books = books_close(tmp_path)
    assert verify(tmp_path).verdict == "holds"
    with Store.open(tmp_path) as store:
        tape = store.tape(name)
    assert (tape.begin.group, tape.begin.attempt, tape.begin.seed, tape.task) == ("g", 3, 7, "say a")
    assert [step.kind for step in tape] == ["text", "exchange", "exchange", "answer"]
    assert books.tokens["unused"] == sum(len(call.completion or ()) for call in tape.calls) == books.sampled
    for call, answer in zip(tape.calls, said, strict=True):
        choice = answer["choices"][0]
        assert choice["token_ids"] == list(call.completion or ())
        assert answer["prompt_token_ids"] == list(call.prompt)
        assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(list(call.logprobs or ()))
        assert answer["usage"]["completion_tokens"] == len(call.completion or ())
        assert call.spans == (("run:0", 0, len(call.completion or ())),)
    (row,) = rows(tape)
    assert list(row.input_ids[: len(said[0]["prompt_token_ids"])]) == said[0]["prompt_token_ids"]
    assert len(row.own) == books.sampled
    assert np.isfinite(row.old).all()


def test_the_official_client_streams_lists_models_and_reads_errors(tmp_path: Path):
    async def scene() -> None:
        async with served(tmp_path, Told(lambda messages: "two words\nand more")) as there:
            _, client = await there.begin(task="t")
            async with openai.AsyncOpenAI(base_url=there.gateway.url, api_key=client.key) as api:
                assert [model.id async for model in api.models.list()] == ["policy"]
                ask: Any = {"model": "gpt-4o", "messages": [{"role": "user", "content": "hi"}]}
                stream = await api.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ask)
                chunks = [chunk async for chunk in stream]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                assert text == "two words\nand more"
                assert chunks[-1].usage is not None
                assert chunks[-1].usage.completion_tokens == len(text) + 1
                with pytest.raises(openai.BadRequestError, match="n=2"):
                    await api.chat.completions.create(n=2, **ask)
            async with openai.AsyncOpenAI(base_url=there.gateway.url, api_key="sk-wrong") as api:
                with pytest.raises(openai.AuthenticationError, match="invalid_api_key"):
                    await api.chat.completions.create(**ask)

    asyncio.run(scene())
    books_close(tmp_path)


def test_what_is_asked_for_is_what_is_sampled_with(tmp_path: Path):
    engine = Told(lambda messages: "yes. no. maybe")

    async def scene() -> Any:
        async with served(tmp_path, engine, sampling=Sampling(max_tokens=9)) as there:
            tape, client = await there.begin(task="t", seed=5)
            answers = [
                await client.ask("a"),
                await client.ask("a", seed=1),
                await client.ask("a", seed=1),
                await client.ask("b", temperature=0.25, top_p=0.5, max_tokens=3),
                await client.ask("c", max_tokens=5000),
                await client.ask("d", stop=["zz", ". "]),
            ]
            assert [status for status, _ in answers] == [200] * 6
            await there.end(tape)
            return there.tape(tape), answers[-1][1]

    tape, stopped = asyncio.run(scene())
    asked = [request.sampling for request in engine.requests]
    assert (asked[3].temperature, asked[3].top_p, asked[3].max_tokens) == (0.25, 0.5, 3)
    assert [s.max_tokens for s in asked] == [9, 9, 9, 3, 9, 9]
    assert len({request.seed for request in engine.requests[:3]}) == 3
    assert stopped["choices"][0]["message"]["content"] == "yes"
    assert stopped["choices"][0]["finish_reason"] == "stop"
    last = tape.calls[-1]
    assert last.text == "yes"
    assert RENDERER.decode(last.completion) == "yes. "
    assert (len(last.logprobs), last.spans) == (5, (("run:0", 0, 5),))
    assert last.sampling.exact
    assert not tape.calls[3].sampling.exact


def test_tools_come_back_as_calls_and_go_on_in_the_same_row(tmp_path: Path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    said = iter(['i add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "done"])

    async def scene() -> Any:
        async with served(tmp_path, Told(lambda messages: next(said)), sampling=Sampling(max_tokens=99)) as there:
            tape, client = await there.begin(task="t")
            _, answer = await client.ask("go", tools=[tool])
            message = answer["choices"][0]["message"]
            assert answer["choices"][0]["finish_reason"] == "tool_calls"
            assert message["content"] == "i add."
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            _, answer = await client.ask("go", message, result, tools=[tool])
            assert answer["choices"][0]["finish_reason"] == "stop"
            await there.end(tape)
            return there.tape(tape)

    tape = asyncio.run(scene())
    first, second = tape.calls
    assert second.base == first.call
    assert second.keep == len(first.prompt) + len(first.completion)
    assert len(rows(tape)) == 1


def _compact(message: Any) -> Any:
    calls = message["tool_calls"]
    texts = (json.dumps(json.loads(call["function"]["arguments"]), separators=(",", ":")) for call in calls)
    written = (call["function"] | {"arguments": text} for call, text in zip(calls, texts, strict=True))
    return message | {"tool_calls": [c | {"function": f} for c, f in zip(calls, written, strict=True)]}


ECHOES: dict[str, Callable[[Any], Any]] = {
    "arguments as compact JSON": _compact,
    "a space after the text": lambda message: message | {"content": f" {message['content']} \n"},
    "a number as JavaScript writes it": lambda message: json.loads(json.dumps(message).replace("2.0", "2")),
    "another id": lambda message: message | {"tool_calls": [c | {"id": "client-1"} for c in message["tool_calls"]]},
    "no text beside the call": lambda message: message | {"content": None},
    "the agent's name": lambda message: message | {"name": "adder"},
    "all of them": lambda message: _compact(ECHOES["another id"](ECHOES["a space after the text"](message))),
}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
def test_an_answer_is_recognised_however_a_client_writes_it_back(echo: Callable[[Any], Any], tmp_path: Path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    answers = iter(
        [
            'i add. <tool_call>{"name": "add", "arguments": {"a": 1, "b": [2.0, 3]}}</tool_call>',
            'i add. <tool_call>{"name": "add", "arguments": {"b": [2.0, 3], "a": 1}}</tool_call>',
            " done \n",
            "yes",
        ]
    )

    async def scene() -> Tape:
        async with served(tmp_path, Told(lambda messages: next(answers)), sampling=Sampling(max_tokens=400)) as there:
            tape, client = await there.begin(task="t")
            said: list[Any] = ["go"]
            for _ in range(2):
                message = echo((await client.ask(*said, tools=[tool]))[1]["choices"][0]["message"])
                said += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}]
            _, answer = await client.ask(*said, tools=[tool])
            message = answer["choices"][0]["message"]
            said += [message | {"content": message["content"].strip()}, "sure?"]
            await client.ask(*said, tools=[tool])
            await there.end(tape)
            return there.tape(tape)

    tape = asyncio.run(scene())
    assert [call.split for call in tape.calls] == [None] * 4
    assert len(rows(tape)) == 1
    asked = tape.calls[-1].new_messages[-1:]
    assert asked == ({"role": "user", "content": "sure?"},)


def test_results_get_the_ids_that_were_sent(tmp_path: Path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    async def scene() -> tuple[str, Tape]:
        engine = Told(lambda messages: '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        async with served(tmp_path, engine, sampling=Sampling(max_tokens=400)) as there:
            tape, client = await there.begin(task="t")
            message = (await client.ask("go", tools=[tool]))[1]["choices"][0]["message"]
            sent = message["tool_calls"][0]["id"]
            result = {"role": "tool", "tool_call_id": "client-1", "content": "3"}
            await client.ask("go", ECHOES["another id"](message), result, tools=[tool])
            await there.end(tape)
            return sent, there.tape(tape)

    sent, tape = asyncio.run(scene())
    assert [message["tool_call_id"] for message in tape.calls[1].messages if message["role"] == "tool"] == [sent]


@pytest.mark.parametrize("way", ["as sent", "with other ids", "continued"])
def test_results_of_parallel_calls_are_read_in_the_order_of_the_calls(way: str, tmp_path: Path):
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    call = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'
    said = iter([call % 1 + call % 2, "done"])

    async def scene() -> Tape:
        async with served(tmp_path, Told(lambda messages: next(said)), sampling=Sampling(max_tokens=400)) as there:
            tape, client = await there.begin(task="t")
            user = {"role": "user", "content": "go"}
            _, answer = await client("POST", "/v1/responses", {"input": [user], "tools": [tool]})
            items = answer["output"]
            if way == "with other ids":
                items = [item | {"call_id": f"client-{k}"} for k, item in enumerate(items)]
            one, two = (
                {"type": "function_call_output", "call_id": item["call_id"], "output": text}
                for item, text in zip(items, ("one", "two"), strict=True)
            )
            more = {"input": [user, *items, two, one], "tools": [tool]}
            if way == "continued":
                more |= {"input": [two, one], "previous_response_id": answer["id"]}
            assert (await client("POST", "/v1/responses", more))[0] == 200
            await there.end(tape)
            return there.tape(tape)

    tape = asyncio.run(scene())
    asked = tape.calls[1].messages
    assert [message["content"] for message in asked if message["role"] == "tool"] == ["one", "two"]
    assert len(rows(tape)) == 1


def test_without_parallel_calls_only_the_first_is_answered(tmp_path: Path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = '<tool_call>{"name": "add", "arguments": {"a": %d}}</tool_call>'

    async def scene() -> list[list[str]]:
        engine = Told(lambda messages: call % 1 + call % 2)
        async with served(tmp_path, engine, sampling=Sampling(max_tokens=400)) as there:
            _, client = await there.begin(task="t")
            found = [await client.ask("go", tools=[tool], parallel_tool_calls=many) for many in (True, False)]
            messages = [answer["choices"][0]["message"] for _, answer in found]
            return [[call["function"]["arguments"] for call in message["tool_calls"]] for message in messages]

    assert asyncio.run(scene()) == [['{"a": 1}', '{"a": 2}'], ['{"a": 1}']]


def test_a_key_in_x_api_key_opens_the_tape(tmp_path: Path):
    async def scene() -> list[int]:
        async with served(tmp_path, Told()) as there:
            _, client = await there.begin(task="t")
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            address = f"{there.gateway.url}/chat/completions"
            found = []
            for key in (client.key, "sk-tape-of-nobody"):
                async with client.http.post(address, json=body, headers={"x-api-key": key}) as answer:
                    found.append(answer.status)
            return found

    assert asyncio.run(scene()) == [200, 401]


@pytest.mark.parametrize("follow", [True, False])
def test_a_gateway_may_keep_its_own_sampling(follow: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    warn_once.cache_clear()

    async def scene() -> Tape:
        async with served(tmp_path, Told(), follow=follow) as there:
            tape, client = await there.begin(task="t")
            await client.ask("hi", temperature=0, top_p=0.5)
            await there.end(tape)
            return there.tape(tape)

    (call,) = asyncio.run(scene()).calls
    assert (call.sampling.temperature, call.sampling.top_p) == ((0, 0.5) if follow else (1, 1))
    told = [one.getMessage() for one in caplog.records if "the gateway's follow" in one.getMessage()]
    assert len(told) == follow


def test_calls_are_served_by_the_formats_of_models_and_never_out_of_a_thought(tmp_path: Path):
    """Llama 3's `parameters` arrive; an answer in JSON stays an answer; a bad call is for the program to tell."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    said = {
        '{"name": "add", "parameters": {"a": 2, "b": 3}}': (None, [("add", '{"a": 2, "b": 3}')]),
        '{"name": "ada lovelace", "age": 36}': ('{"name": "ada lovelace", "age": 36}', None),
        '<think>i might <tool_call>{"name": "add"}</tool_call></think>no': ("no", None),
        'a <tool_call>{"name": "add", "arguments": {}}</tool_call> b': ("a\nb", [("add", "{}")]),
        '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "add", "arguments": oh}</tool_call>': (
            None,
            [("add", "{}"), ("add", ', "arguments": oh}')],
        ),
    }
    answers = iter(said)

    async def scene() -> list[Any]:
        async with served(tmp_path, Told(lambda messages: next(answers)), sampling=Sampling(max_tokens=400)) as there:
            tape, client = await there.begin(task="t")
            found = [await client.ask(f"{k}", tools=[tool]) for k in range(len(said))]
            await there.end(tape)
            return found

    for (status, body), (content, calls) in zip(asyncio.run(scene()), said.values(), strict=True):
        message = body["choices"][0]["message"]
        made = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
        assert (status, message["content"], made or None) == (200, content, calls)


def test_requests_wait_while_weights_change_and_are_then_told_when_to_come_again(tmp_path: Path):
    engine = Told()

    async def scene() -> None:
        async with served(tmp_path, engine, bounds=Bounds(hold_seconds=0.0)) as there:
            _, client = await there.begin(task="t")
            engine.changing = True
            async with client.http.post(
                f"{there.gateway.url}/chat/completions",
                json={"model": "m", "messages": [{"role": "user", "content": "hi"}]},
                headers={"Authorization": f"Bearer {client.key}"},
            ) as answer:
                assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
                assert (await answer.json())["error"]["code"] == "weights_changing"
            engine.changing = False
            assert (await client.ask("hi"))[0] == 200
            assert await there.admin("POST", "/tapereel/pause") == (200, {"paused": True})
            assert (await client.ask("hi"))[0] == 429
            assert await there.admin("POST", "/tapereel/resume") == (200, {"paused": False})
            assert (await client.ask("hi"))[0] == 200
        async with served(tmp_path / "held", engine) as there:
            _, client = await there.begin(task="t")
            there.gateway.pause()
            asking = asyncio.ensure_future(client.ask("hi"))
            await until(lambda: any(session.held for session in there.gateway._sessions.values()))
            assert not asking.done()
            there.gateway.resume()
            assert (await asking)[0] == 200

    asyncio.run(scene())
    assert len(engine.requests) == 3


def test_who_waits_for_weights_has_not_left_the_tape_alone(tmp_path: Path):
    async def scene() -> None:
        async with served(tmp_path, Told()) as there:
            tape, client = await there.begin(task="t", budget={"idle": 1.0})
            there.gateway.pause()
            asking = asyncio.ensure_future(client.ask("hi"))
            await until(lambda: any(session.held for session in there.gateway._sessions.values()))
            await asyncio.sleep(2.0)  # longer than it may be idle
            there.gateway.resume()
            assert (await asking)[0] == 200
            assert (await there.end(tape))["calls"] == 1

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("budget", "limit", "code"),
    [
        ({"calls": 2}, "turns", "insufficient_quota"),
        ({"tokens": 6}, "tokens", "insufficient_quota"),
        ({"context": 60}, "context", "context_length_exceeded"),
    ],
)
def test_a_spent_budget_is_told_and_ends_the_tape_as_a_limit(
    tmp_path: Path, budget: dict[str, int], limit: str, code: str
):
    async def scene() -> Any:
        async with served(tmp_path, Told()) as there:
            tape, client = await there.begin(task="t", budget=budget)
            for k in range(8):
                status, answer = await client.ask("x" * (8 * k + 1))
                if status != 200:
                    break
            assert answer["error"]["code"] == code
            assert (await client.ask("again"))[1]["error"]["code"] == code
            assert (await there.admin("GET", f"/tapereel/tapes/{tape}"))[1]["status"] == "running"
            await there.score(tape, right=1.0)
            return await there.end(tape)

    ended = asyncio.run(scene())
    assert (ended["status"], ended["cause"]["type"], ended["reward"]) == ("limit", limit, 1.0)
    books_close(tmp_path)


def test_a_tape_that_takes_too_long_or_is_left_alone_ends_with_what_is_under_way(tmp_path: Path):
    async def until_ended(there: Served, tape: str) -> Any:
        await until(lambda: there.tape(tape).closed)
        return (await there.admin("GET", f"/tapereel/tapes/{tape}"))[1]

    async def scene() -> None:
        engine = Told()
        async with served(tmp_path, engine) as there:
            tape, _ = await there.begin(task="t", budget={"idle": 0.05})
            idle = await until_ended(there, tape)
            assert (idle["status"], idle["cause"]["type"]) == ("limit", "seconds")
            assert " 0.05 s" in idle["cause"]["message"]
            tape, client = await there.begin(task="t", budget={"agent_seconds": 0.05})
            late = await until_ended(there, tape)
            assert (late["status"], late["cause"]["type"]) == ("limit", "agent_seconds")
            assert (await client.ask("hi"))[1]["error"]["code"] == "tape_ended"
            engine.gate.clear()
            tape, client = await there.begin(task="t")
            asking = asyncio.ensure_future(client.ask("hi"))
            await engine.begun.wait()
            assert (await there.end(tape, status="error"))["status"] == "error"
            status, answer = await asking
            assert (status, answer["error"]["code"]) == (403, "tape_ended")
            (call,) = there.tape(tape).calls
            assert (call.finish, call.text) == ("cancelled", "ye")

    asyncio.run(scene())
    assert books_close(tmp_path).sampled == 2


def test_a_client_that_vanishes_leaves_what_was_sampled(tmp_path: Path):
    engine = Told(lambda messages: "a long answer")

    async def scene() -> Any:
        async with served(tmp_path, engine) as there:
            tape, client = await there.begin(task="t")
            engine.gate.clear()
            asking = asyncio.ensure_future(client.ask("hi"))
            await engine.begun.wait()
            asking.cancel()
            await until(lambda: there.tape(tape).calls)
            engine.gate.set()
            assert (await client.ask("hi"))[0] == 200
            await there.score(tape, right=1.0)
            await there.end(tape)
            return there.tape(tape)

    tape = asyncio.run(scene())
    partial, whole = tape.calls
    assert (partial.finish, partial.text, len(partial.completion)) == ("cancelled", "a ", 2)
    assert whole.finish == "stop"
    assert [(label.call, label.use) for label in tape.layers] == [(partial.call, "discarded")]
    assert [row.calls for row in rows(tape)] == [(whole.call,)]
    books_close(tmp_path)


def test_an_engine_that_fails_is_told_and_may_be_asked_again(tmp_path: Path):
    class Failing(Told):
        async def complete(self, request: Request) -> Any:
            if len(self.requests) == 0:
                self.requests.append(request)
                raise EngineError("the server is on fire")
            return await super().complete(request)

    async def scene() -> Any:
        async with served(tmp_path, Failing()) as there:
            tape, client = await there.begin(task="t")
            status, answer = await client.ask("hi")
            assert (status, answer["error"]["code"]) == (502, "model_failed")
            assert "fire" in answer["error"]["message"]
            assert (await client.ask("hi"))[0] == 200
            status, answer = await client.ask({"role": "user", "content": "<|user|>" * 3})
            assert status == 200  # text of control tokens stays text
            return await there.end(tape)

    assert asyncio.run(scene())["status"] == "finished"
    with Store.open(tmp_path) as store:
        (tape,) = store.tapes()
    assert [call.finish for call in tape.calls] == ["error", "stop", "stop"]


def test_every_end_is_typed(tmp_path: Path):
    async def scene() -> list[Any]:
        async with served(tmp_path, Told(), limits=Limits(agent_seconds=60.0, system_seconds=60.0)) as there:
            ends = []
            for body in ({"status": "truncated"}, {"status": "error", "message": "it fell"}, {"status": "cancelled"}):
                tape, client = await there.begin(task="t")
                await client.ask("hi")
                await there.score(tape, right=0.5)
                ends.append(await there.end(tape, **body))
            status, told = await there.admin("POST", f"/tapereel/tapes/{tape}/rewards", {"rewards": {"late": 1}})
            assert (status, told["error"]["code"]) == (409, "tape_ended")
            await there.begin(task="left open when the gateway ends")
            return ends

    truncated, error, cancelled = asyncio.run(scene())
    assert (truncated["status"], truncated["reward"]) == ("truncated", 0.5)
    assert (error["status"], error["cause"]["type"], error["cause"]["message"]) == ("error", "agent", "it fell")
    assert (cancelled["status"], cancelled["reward"]) == ("cancelled", None)
    books = books_close(tmp_path)
    assert (books.begun, books.ended) == (4, 4)
    with Store.open(tmp_path) as store:
        assert [tape.status for tape in store.tapes()][-1] == "cancelled"


def test_an_engine_of_texts_is_recorded_too(tmp_path: Path):
    async def scene() -> Any:
        async with served(tmp_path, Told(ids=False)) as there:
            tape, client = await there.begin(task="t")
            _, first = await client.ask("one", logprobs=True, return_token_ids=True)
            assert first["choices"][0]["logprobs"] is None
            assert "token_ids" not in first["choices"][0]
            await client.ask("one", first["choices"][0]["message"], "two")
            await there.end(tape)
            return there.tape(tape)

    tape = asyncio.run(scene())
    assert (tape.calls[1].base, tape.calls[1].keep_messages) == (tape.calls[0].call, 2)
    assert len(rows(tape, renderer=RENDERER)) == 1
    assert json.loads(tape.model_dump_json())["digest"] == tape.digest


def test_a_model_is_told_of_by_whatever_name_and_the_scheme_has_no_case(tmp_path: Path):
    async def scene() -> None:
        async with served(tmp_path, Told()) as there:
            _, client = await there.begin(task="t")
            async with openai.AsyncOpenAI(base_url=there.gateway.url, api_key=client.key) as api:
                assert (await api.models.retrieve("org/some-model")).id == "org/some-model"
            for scheme, status in (("bearer", 200), ("BEARER", 200), ("Basic", 401), ("", 401)):
                found, _ = await client("GET", "/v1/models/x", Authorization=f"{scheme} {client.key}".strip())
                assert found == status, scheme
            for scheme, status in (("bearer", 404), ("Basic", 401)):
                path = f"/tapereel/tapes/{'0' * 22}"
                assert (await there.admin("GET", path, Authorization=f"{scheme} {there.admin.key}"))[0] == status

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("host", "given", "expected"),
    [
        ("0.0.0.0", "gpu-7.local:{port}", "gpu-7.local:{port}"),
        ("0.0.0.0", "[fe80::1]:{port}", "[fe80::1]:{port}"),
        ("0.0.0.0", "10.0.0.7:{port}", "10.0.0.7:{port}"),
        ("0.0.0.0", "x/y?:{port}", None),
        ("0.0.0.0", "evil@there:{port}", None),
        ("0.0.0.0", "evil.example:{port}", None),
        ("0.0.0.0", "proxy:80", "proxy:80"),
        ("127.0.0.1", "localhost:80", "127.0.0.1:{port}"),
        ("127.0.0.1", "gpu-7.local:{port}", None),
    ],
)
def test_whoever_begins_a_tape_gets_an_address_by_which_they_came(
    tmp_path: Path, host: str, given: str, expected: str | None
):
    async def scene() -> None:
        with Store.create(tmp_path / "run") as store:
            gateway = Control(TOKEN, Told(), journal=store.writer, host=host)
            async with gateway.serving(), aiohttp.ClientSession() as http:
                names = {"port": gateway.port}
                assert gateway.url == f"http://127.0.0.1:{gateway.port}/v1"
                admin = Client(http, gateway.url.removesuffix("/v1"), TOKEN)
                status, told = await admin("POST", "/tapereel/tapes", {"task": "t"}, Host=given.format(**names))
                if expected is None:
                    assert status == 403
                else:
                    assert told["base_url"] == f"http://{expected.format(**names)}/v1"

    asyncio.run(scene())


def test_an_engine_that_can_answer_no_more_stops_the_gateway(tmp_path: Path):
    def gone(messages: Any) -> str:
        raise EngineStopped("the key is rejected", "key")

    async def scene() -> None:
        async with served(tmp_path, Told(gone)) as there:
            tape, client = await there.begin(task="t")
            assert (await client.ask("hi"))[0] >= 500
            await there.end(tape, status="error")
            stopped = await asyncio.wait_for(asyncio.shield(there.gateway.stopped), 60)
            assert stopped.reason == "key"

    asyncio.run(scene())
    books_close(tmp_path)
