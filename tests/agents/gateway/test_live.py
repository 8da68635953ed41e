"""Answers that are sent while they are sampled: what a client gets, whatever happens in the midst, and what is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from array import array
from pathlib import Path
from typing import Any

import openai
import pytest

from tapereel.agents import Completion, EngineError, Request, rollout
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.gateway import Bounds, Program
from tapereel.agents.replay import replay
from tapereel.tapes import Sampling, Tape

from ...toy_envs import Echo
from .lab import RENDERER, WORDS, Told, books_close, embedded, served, streamed, until

LONG = Sampling(max_tokens=300)


class Spelled(Told):
    """Samples a token whenever it may; each time it is asked what it says next, and `breaks` so far in each."""

    def __init__(self, *says: str, breaks: tuple[int, ...] = (), retry: bool = False) -> None:
        self.left = list(says)
        super().__init__(lambda messages: self.left.pop(0) if len(self.left) > 1 else self.left[0])
        self.breaks, self.retry = list(breaks), retry
        self.may = asyncio.Semaphore(0)
        self.sampled = 0

    def let(self, tokens: int = 1000) -> None:
        for _ in range(tokens):
            self.may.release()

    async def complete(self, request: Request) -> Completion:
        self.requests.append(request)
        text = self.say(list(request.messages))
        whole = self._completion(text, end=True)
        assert whole.ids is not None
        breaks, n = self.breaks.pop(0) if self.breaks else None, 0
        try:
            for id in whole.ids:
                await self.may.acquire()
                if n == breaks:
                    raise EngineError("the server is on fire", retry=self.retry)
                n += 1
                self.sampled += 1
                if request.listener is not None:
                    request.listener.tokens(array("i", [id]))
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            if request.on_partial is not None:
                request.on_partial(self._completion(text[:n], end=False))
            raise
        return whole


def asked(tape: Tape) -> list[Any]:
    """Its calls, without the answer that a client without one ends with."""
    return [call for call in tape.calls if call.engine != "authored"]


def test_the_first_piece_is_here_before_the_last_token_is_sampled(tmp_path: Path):
    async def scene() -> tuple[Tape, str]:
        engine = embedded()
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t", seed=2)
            async with streamed(
                client, "hi", stream_options={"include_usage": True}, logprobs=True, return_token_ids=True
            ) as stream:
                while engine.stats.sampled < 3:  # noqa: ASYNC110  # the engine tells nobody but the gateway
                    await asyncio.sleep(0)
                engine.freeze()
                assert (await stream.next())["choices"][0]["delta"] == {"role": "assistant", "content": ""}
                while not stream.text:
                    await stream.next()
                assert engine.stats.sampled < 10
                engine.thaw()
                *_, last, usage, done = await stream.rest()
            await there.end(tape)
            assert done == "[DONE]"
            found = there.tape(tape)
            (call,) = found.calls
            assert usage["usage"]["completion_tokens"] == len(call.completion or ())
            assert last["choices"][0]["token_ids"] == list(call.completion or ())
            assert last["prompt_token_ids"] == list(call.prompt)
            assert [entry["logprob"] for entry in last["choices"][0]["logprobs"]["content"]] == pytest.approx(
                list(call.logprobs or ())
            )
            assert stream.text == call.text
            return found, stream.text

    tape, text = asyncio.run(scene())
    assert len(text) > 3
    assert tape.layers == []
    books_close(tmp_path)


def test_a_tape_is_the_same_whether_its_answers_were_streamed_or_not(tmp_path: Path):
    async def scene(path: Path, stream: bool) -> Tape:
        async with served(path, embedded(), sampling=LONG) as there:
            tape, client = await there.begin(task="t", seed=7, group="g")
            said: list[Any] = []
            for text, more in (("one", {}), ("two", {"stop": ["e"]}), ("three", {"max_tokens": 5})):
                said.append({"role": "user", "content": text})
                if stream:
                    async with streamed(client, *said, **more) as answer:
                        await answer.rest()
                    said.append({"role": "assistant", "content": answer.text})
                else:
                    said.append((await client.ask(*said, **more))[1]["choices"][0]["message"])
            await there.end(tape)
            return there.tape(tape)

    def records(tape: Tape) -> str:
        """All of it but ids and times."""
        text = tape.model_dump_json().replace(tape.id, "tape")
        return re.sub(r'"(at|seconds|agent_seconds|queued|digest)":("\w+"|[\d.e-]+)', r'"\1":0', text)

    plain, live = (asyncio.run(scene(tmp_path / str(stream), stream)) for stream in (False, True))
    assert len(plain.calls) == 3
    assert records(live) == records(plain)


def test_the_official_client_reads_pieces_tools_and_stops(tmp_path: Path):
    tool: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    engine = Spelled(
        "two words",
        "yes. no.",
        'i add. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        "no call: <tool_ is one",
    )
    engine.let()

    async def scene() -> list[Any]:
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            found = []
            async with openai.AsyncOpenAI(base_url=there.gateway.url, api_key=client.key) as api:
                for k, more in enumerate(({}, {"stop": [". "]}, {"tools": [tool]}, {"tools": [tool]})):
                    said: Any = [{"role": "user", "content": f"{k}"}]
                    stream: Any = await api.chat.completions.create(
                        model="m", messages=said, stream=True, stream_options={"include_usage": True}, **more
                    )
                    found.append([chunk async for chunk in stream])
            await there.end(tape)
            return found

    def text(chunks: list[Any]) -> list[str]:
        return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]

    plain, stopped, called, not_called = asyncio.run(scene())
    assert len(text(plain)) > 1
    assert ["".join(text(chunks)) for chunks in (plain, stopped, called, not_called)] == [
        "two words",
        "yes",
        "i add.",
        "no call: <tool_ is one",
    ]
    (call,) = [call for chunk in called if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
    reasons = [chunks[-2].choices[0].finish_reason for chunks in (plain, stopped, called)]
    assert reasons == ["stop", "stop", "tool_calls"]
    for chunks in (plain, stopped, called, not_called):
        assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
        assert chunks[-1].usage.completion_tokens > 0
    books_close(tmp_path)


@pytest.mark.parametrize("retry", [False, True], ids=["fatal", "retried"])
def test_an_error_has_its_status_until_the_first_token_and_is_an_event_after_it(tmp_path: Path, retry: bool):
    async def scene() -> Tape:
        engine = Spelled("yes it is", breaks=(0, 4), retry=retry)
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            engine.let()
            if not retry:
                status, answer = await client.ask("hi", stream=True)
                assert (status, answer["error"]["code"]) == (502, "model_failed")
            async with streamed(client, "hi") as stream:
                *_, last = await stream.rest()
            assert stream.answer.status == 200
            if retry:  # the next tries said the same
                assert (stream.text, last) == ("yes it is", "[DONE]")
                assert len(engine.requests) == 3
            else:
                assert (stream.text, last["error"]["code"]) == ("yes", "model_failed")
                assert "fire" in last["error"]["message"]
                async with openai.AsyncOpenAI(base_url=there.gateway.url, api_key=client.key) as api:
                    engine.breaks = [2]
                    pieces: Any = await api.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": "x"}], stream=True
                    )
                    with pytest.raises(openai.APIError, match="fire"):
                        [piece async for piece in pieces]
            await there.end(tape)
            return there.tape(tape)

    tape = asyncio.run(scene())
    assert [call.finish for call in asked(tape)] == (["stop"] if retry else ["error"] * 3)
    books_close(tmp_path)


def test_an_answer_that_comes_otherwise_when_it_is_asked_again_is_nobodys(tmp_path: Path):
    async def scene() -> Tape:
        engine = Spelled("yes it is", "no it isnt", "fine", breaks=(4,), retry=True)
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            engine.let(4)
            async with streamed(client, "hi") as stream:
                await stream.until("yes")
                engine.let()
                (last,) = await stream.rest()
            assert (stream.text, last["error"]["code"]) == ("yes", "answer_changed")
            assert (await client.ask("hi"))[0] == 200
            await there.score(tape, right=1.0)
            await there.end(tape)
            return there.tape(tape)

    tape = asyncio.run(scene())
    changed, fine = tape.calls
    assert (changed.text, changed.finish, len(changed.attempts)) == ("no it isnt", "stop", 2)
    assert [(label.call, label.use) for label in tape.layers] == [(changed.call, "discarded")]  # type: ignore[attr-defined]
    assert fine.text == "fine"
    books_close(tmp_path)


def test_a_client_that_hangs_up_in_the_midst_leaves_what_was_sampled(tmp_path: Path):
    async def scene() -> Tape:
        engine = Spelled("a long answer")
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            engine.let(6)
            async with streamed(client, "hi") as stream:
                await stream.until("a long")
                stream.answer.close()
            await until(lambda: there.tape(tape).calls)
            engine.let()
            assert (await client.ask("on"))[0] == 200
            await there.end(tape)
            return there.tape(tape)

    tape = asyncio.run(scene())
    left, _ = tape.calls
    assert (left.finish, left.text, len(left.completion)) == ("cancelled", "a long", 6)
    assert [(label.call, label.use) for label in tape.layers] == [(left.call, "discarded")]  # type: ignore[attr-defined]
    assert books_close(tmp_path).sampled == 6 + len("a long answer") + 1


def test_a_client_that_hangs_up_before_the_first_token_is_recorded_too(tmp_path: Path):
    async def scene() -> Tape:
        engine = Spelled("a long answer")
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t")
            asking = asyncio.ensure_future(client.ask("hi", stream=True))
            await until(lambda: engine.requests)
            asking.cancel()
            await until(lambda: there.tape(tape).calls)
            await there.end(tape)
            return there.tape(tape)

    (call,) = asked(asyncio.run(scene()))
    assert (call.finish, len(call.completion)) == ("cancelled", 0)
    books_close(tmp_path)


def test_a_client_that_reads_nothing_is_let_go_and_holds_nobody_up(tmp_path: Path):
    engine = Spelled("x" * 9000)

    async def scene() -> Tape:
        async with served(tmp_path, engine, bounds=Bounds(write_seconds=0.2)) as there:
            slow, client = await there.begin(task="t")
            other, quick = await there.begin(task="t")
            with socket.socket() as lazy:
                lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                lazy.setblocking(False)
                await asyncio.get_running_loop().sock_connect(lazy, ("127.0.0.1", there.gateway.port))
                body = json.dumps(
                    {"model": "m" * 4000, "messages": [{"role": "user", "content": "hi"}], "stream": True}
                ).encode()
                head = (
                    f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {client.key}\r\n"
                    "Content-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n"
                )
                await asyncio.get_running_loop().sock_sendall(lazy, head.encode() + body)
                while not there.tape(slow).calls:
                    engine.let(1)
                    await asyncio.sleep(0)
            engine.left = ["fine"]
            engine.let()
            async with streamed(quick, "hi") as stream:
                assert (await stream.rest())[-1] == "[DONE]"
            for tape in (slow, other):
                await there.end(tape)
            return there.tape(slow)

    (call,) = asked(asyncio.run(scene()))
    assert call.finish == "cancelled"
    assert 0 < len(call.completion) < 9000
    books_close(tmp_path)


def test_a_client_that_does_not_read_a_whole_answer_is_let_go_and_its_call_stays(tmp_path: Path, caplog: Any):
    long = "x" * (8 << 20)

    async def scene() -> Tape:
        engine = Told(lambda messages: long if messages[-1]["content"] == "long" else "fine", ids=False)
        async with served(tmp_path, engine, bounds=Bounds(write_seconds=0.2)) as there:
            slow, client = await there.begin(task="t")
            _, quick = await there.begin(task="t")
            loop = asyncio.get_running_loop()
            with socket.socket() as lazy:
                lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                lazy.setblocking(False)
                await loop.sock_connect(lazy, ("127.0.0.1", there.gateway.port))
                body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "long"}]}).encode()
                head = (
                    f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {client.key}\r\n"
                    "Content-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n"
                )
                await loop.sock_sendall(lazy, head.encode() + body)
                await until(lambda: there.tape(slow).calls)
                assert (await quick.ask("short"))[0] == 200
                got = 0
                with contextlib.suppress(ConnectionResetError):
                    # Read only once it was let go: until then nothing is taken.
                    await until(lambda: " 0.2 s" in caplog.text)
                    while piece := await loop.sock_recv(lazy, 1 << 20):
                        got += len(piece)
                assert got < len(long)
            await there.end(slow)
            return there.tape(slow)

    with caplog.at_level("INFO", logger="tapereel.gateway"):
        tape = asyncio.run(scene())
    (call,) = asked(tape)
    assert (call.finish, call.text) == ("stop", long)
    assert [(label.call, label.use, label.reason) for label in tape.layers] == [  # type: ignore[attr-defined]
        (call.call, "discarded", "undelivered")
    ]
    books_close(tmp_path)


def test_while_nothing_comes_a_comment_says_that_it_lives(tmp_path: Path):
    async def scene() -> None:
        engine = Spelled('{"name": "add"')
        async with served(tmp_path, engine, bounds=Bounds(quiet_seconds=0.01)) as there:
            _, client = await there.begin(task="t")
            tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
            engine.let(1)
            async with streamed(client, "hi", tools=[tool]) as stream:
                assert (await stream.next())["choices"][0]["delta"]["role"] == "assistant"
                while stream.comments < 3:
                    line = await stream.answer.content.readline()
                    stream.comments += line == b":\n"
                engine.let()
                assert (await stream.rest())[-1] == "[DONE]"
                assert stream.text == '{"name": "add"'

    asyncio.run(scene())


def test_limits_that_are_reached_in_the_midst(tmp_path: Path):
    async def scene() -> None:
        engine = embedded()
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t", budget={"tokens": 6})
            async with streamed(client, "hi") as stream:
                *_, last, done = await stream.rest()
            assert (last["choices"][0]["finish_reason"], done) == ("length", "[DONE]")
            status, answer = await client.ask("again", stream=True)
            assert (status, answer["error"]["code"]) == (429, "insufficient_quota")
            await there.end(tape)
            tape, client = await there.begin(task="t")
            async with streamed(client, "hi") as stream:
                while not stream.text:
                    await stream.next()
                engine.freeze()
                await there.end(tape, status="truncated")
                *_, last = await stream.rest()
            assert last["error"]["code"] == "tape_ended"
            (call,) = asked(there.tape(tape))
            assert call.finish == "cancelled"
            assert (call.text or "").startswith(stream.text)
            assert len(call.completion or ()) > 0

    asyncio.run(scene())
    books_close(tmp_path)


def test_weights_that_change_in_the_midst(tmp_path: Path):
    async def scene() -> Any:
        engine = embedded()
        async with served(tmp_path, engine, sampling=LONG) as there:
            tape, client = await there.begin(task="t", seed=2)
            async with streamed(client, "hi") as stream:
                while not stream.text:
                    await stream.next()
                await engine.sync_weights(tiny_model(WORDS, "micro", seed=1).state_dict(), "run:1")
                assert (await stream.rest())[-1] == "[DONE]"
            await there.end(tape)
            (call,) = there.tape(tape).calls
            assert call.text == stream.text
            assert [version for version, _, _ in call.spans] == ["run:0", "run:1"]

    asyncio.run(scene())


def program(hang_up: bool) -> Program:
    """Asks twice, and hears the first answer only until it has some text."""

    async def ask(task: str, endpoint: Any) -> str:
        async with openai.AsyncOpenAI(**endpoint._asdict(), max_retries=0) as api:
            said, messages = "", list[Any]()
            for text in ("one", "two"):
                messages.append({"role": "user", "content": text})
                stream = await api.chat.completions.create(model="m", messages=messages, stream=True)
                heard = ""
                async for chunk in stream:
                    heard += chunk.choices[0].delta.content or ""
                    if heard and hang_up and text == "one":
                        heard = ""
                        break
                await stream.close()
                messages.append({"role": "assistant", "content": heard})
                said += heard
        return said

    return Program(ask)


@pytest.mark.parametrize(("hang_up", "tokens"), [(False, True), (False, False), (True, True)])
def test_a_streamed_tape_is_replayed(hang_up: bool, tokens: bool):
    """What was heard before the program hung up is on the tape as ids: that takes the tokenizer."""
    tape = asyncio.run(rollout(program(hang_up), Echo(), "abc", engine=embedded(), sampling=LONG, seed=3))
    assert sorted(call.finish for call in tape.calls) == sorted(["cancelled" if hang_up else "stop", "stop"])
    assert len(tape.calls[0].completion or ()) > 1
    verdict = asyncio.run(replay(tape, program(hang_up), renderer=RENDERER if tokens else None))
    assert verdict.outcome == "verified", verdict
