"""Engines over HTTP, in unhappy circumstances: nothing is recorded that wasn't sampled, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents import Completion, EngineError, PromptTooLong, Request, rollout
from tapereel.agents.engines import EngineStopped
from tapereel.agents.engines.servers import Completions, Generate, LocalServer, RemoteEngine, SGLangGenerate
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.transport import BadAnswer, Server, ServerFailed
from tapereel.agents.engines.weights import PublishFailed
from tapereel.tapes import CauseType, Sampling, Status

from ....finetune.loop.lab import RENDERER, Letters, Speaker
from ...faulty import NAN, FaultyServer, changed, cut_short, dropped, no_json, status, streams, stuck
from ...served import Heard, servers

pytestmark = pytest.mark.timeout(60)


def ask(text: str = "abcd", seed: int = 1, on_partial: Any = None, **sampling: Any) -> Request:
    messages = [{"role": "user", "content": text}]
    return Request(
        messages=messages,
        prompt=RENDERER.prompt(messages).ids,
        seed=seed,
        on_partial=on_partial,
        sampling=Sampling(**{"max_tokens": 5, **sampling}),
        cache_key=text,
    )


def using(server: Any, test: Callable[[RemoteEngine], Awaitable[Any]], **options: Any) -> Any:
    """What `test` gives with an engine of that server."""

    async def whole() -> Any:
        async with server.up() as url:
            weights = options.pop("weights", True)
            engine = await connect(servers(url, **options), RENDERER, weights=weights)
            try:
                return await test(engine)
            finally:
                await engine.close()

    return asyncio.run(whole())


def completed(server: FaultyServer, request: Request | None = None, **options: Any) -> Completion:
    return using(server, lambda engine: engine.complete(request or ask()), **options)


def test_a_healthy_answer_is_a_completion() -> None:
    server = FaultyServer()
    found = completed(server)
    assert found.ids is not None
    assert found.logprobs is not None
    assert (len(found.ids), list(found.logprobs), found.finish) == (5, [-0.5] * 5, "length")
    assert found.spans == (("default", 0, 5),)
    (body,) = server.asked
    parameters = body["sampling_params"]
    assert {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
        "max_tokens",
        "stop_token_ids",
        "logprobs",
    } <= set(parameters), "the server's defaults would decide"
    assert set(RENDERER.end_ids) <= set(parameters["stop_token_ids"])


@pytest.mark.parametrize("code", [429, 503])
def test_a_server_that_is_full_or_paused_is_asked_again(code: int) -> None:
    server = FaultyServer([status(code, **{"Retry-After": "0"})] * 3)

    async def test(engine: RemoteEngine) -> int:
        await engine.complete(ask())
        return engine.stats.refused

    assert using(server, test) == 3
    assert len(server.asked) == 4
    assert len({json.dumps(body) for body in server.asked}) == 1, "a retry is the same request"


def test_patience_ends() -> None:
    with pytest.raises(EngineStopped, match="503") as stopped:
        completed(FaultyServer([status(503)] * 1000), patience=0.2)
    assert stopped.value.reason == "away"


@pytest.mark.parametrize(
    ("fault", "retry", "match"),
    [
        (status(500), True, "500"),
        (status(401), False, "401.*key_variable"),
        (status(404), False, "404.*route"),
        (status(409), False, "409"),
    ],
)
def test_what_goes_wrong_on_the_way_is_an_error_that_says_whether_to_try_again(
    fault: Any, retry: bool, match: str
) -> None:
    with pytest.raises(EngineError, match=match) as caught:
        completed(FaultyServer([fault]))
    assert caught.value.retry is retry


@pytest.mark.parametrize("fault", [status(502), status(503), status(504), dropped, cut_short, no_json])
def test_a_server_that_is_away_for_a_while_is_waited_for(fault: Any) -> None:
    server = FaultyServer([fault] * 4)

    async def test(engine: RemoteEngine) -> float:
        found = await engine.complete(ask())
        assert found.ids is not None
        assert len(found.ids) == 5
        return engine.absence.seconds

    assert using(server, test) > 0
    assert len(server.asked) == 5


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (status(401), "key"),
        (status(403), "key"),
        (status(404), "model"),
        (status(402), "budget"),
        (status(429, '{"error": {"code": "insufficient_quota"}}'), "budget"),
    ],
)
def test_what_every_request_meets_stops_the_run_at_once(fault: Any, reason: str) -> None:
    server = FaultyServer([fault] * 9)
    with pytest.raises(EngineStopped) as stopped:
        completed(server)
    assert stopped.value.reason == reason
    assert len(server.asked) == 1


def test_a_server_that_never_answers_is_given_up() -> None:
    with pytest.raises(ServerFailed, match=r"0\.2 s"):
        completed(FaultyServer([stuck]), seconds=0.2)


SIX = {"version": "default", "start": 0, "end": 6}


def one_more(*ids: int) -> dict[str, Any]:
    """A chunk of a stream with these ids in place of one."""
    return {"token_ids": list(ids), "logprobs": {"content": [{"token_id": id, "logprob": -0.5} for id in ids]}}


def choice(**changes: Any) -> Any:
    return changed(lambda found: found.update(changes))


def logprob(value: Any) -> Any:
    return changed(lambda found: found["logprobs"]["content"][2].update(logprob=value))


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (logprob(NAN), "log-prob 2 .*nan"),
        (logprob(-9999.0), "-9999"),
        (logprob(None), "None"),
        (logprob(0.5), "0.5"),
        (choice(logprobs=None), "`tapereel serve model`"),
        (choice(token_ids=None), "`tapereel serve model`"),
        (changed(lambda found: found["logprobs"]["content"].pop()), r"\[8, 9, 10, 11\].*\[8, 9, 10, 11, 8\]"),
        (changed(lambda found: found["logprobs"]["content"].reverse()), r"\[8, 11, 10, 9, 8\].*\[8, 9, 10, 11, 8\]"),
        (changed(lambda found: found["token_ids"].append(9)), r"\[8, 9, 10, 11, 8\].*\[8, 9, 10, 11, 8, 9\]"),
        (choice(finish_reason="error"), "'error'"),
        (choice(weight_versions=[{"version": "default", "start": 0, "end": 3}]), " 3 of 5 "),
        (choice(weight_versions=[{"version": "default", "start": 1, "end": 5}]), "'default', 1, 5.* 0 to 5"),
        (choice(weight_versions=[{"version": "x"}]), "'version': 'x'.*KeyError"),
        (choice(weight_versions=[{"version": "other", "start": 0, "end": 5}]), "'other'.*'default'"),
    ],
)
def test_an_answer_that_would_train_wrongly_is_refused(fault: Any, match: str) -> None:
    with pytest.raises(EngineError, match=match):
        completed(FaultyServer([fault]))


def sampled(*ids: int) -> Any:
    """Answers with these ids, each with a log-prob of its own."""
    entries = [{"token_id": id, "logprob": -0.5} for id in ids]
    spans = [{"version": "default", "start": 0, "end": len(ids)}]
    return choice(token_ids=list(ids), logprobs={"content": entries}, weight_versions=spans)


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (sampled(8, 9, 12), r"id 2 .* 12\b.* 11\b"),
        (sampled(2**31 - 1), "2147483647"),
        (sampled(8, 9, 10, 11, 8, 9), "6 tokens.* 5 "),
        (streams(lambda events: events[1]["choices"][0].update(**one_more(99))), "id 1 .* 99"),
        (streams(lambda events: events[4]["choices"][0].update(**one_more(8, 9), weight_versions=[SIX])), "6 tok.* 5 "),
    ],
)
def test_an_answer_that_no_model_of_this_size_gives_is_bad_and_asked_for_again(
    fault: Any, match: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 12}}')
    request = replace(ask(), listener=Heard()) if "streams" in fault.__qualname__ else ask()
    with pytest.raises(BadAnswer, match=match) as caught:
        completed(FaultyServer([fault]), request, model=tmp_path)
    assert caught.value.retry

    async def test(engine: RemoteEngine) -> Any:
        return await rollout(Speaker(), Letters(), task="ab", engine=engine, sampling=Sampling(max_tokens=5))

    tape = using(FaultyServer([sampled(12)]), test, model=tmp_path)
    assert tape.status == Status.FINISHED
    assert [len(call.attempts) for call in tape.calls] == [2, 1]


def heard(server: FaultyServer, heard: Heard, **options: Any) -> Completion:
    return completed(server, replace(ask(), listener=heard), **options)


def test_whoever_listens_is_told_and_the_answer_is_the_same() -> None:
    server, listener = FaultyServer(), Heard()
    found = heard(server, listener)
    assert found == completed(server)
    assert listener.ids == list(found.ids or ())
    assert [body["stream"] for body in server.asked] == [True, False], "a stream costs, so one is asked for only here"
    assert server.asked[0]["stream_options"] == {"include_usage": True}


def error(code: int) -> Any:
    return {"error": {"message": "not now", "type": "x", "code": code}}


def test_a_stream_that_says_it_is_busy_is_asked_for_again_and_what_was_told_is_void() -> None:
    def breaks(events: list[Any]) -> None:
        events[2:] = [error(503), "[DONE]"]

    server, listener = FaultyServer([streams(breaks), status(429, **{"Retry-After": "0"})]), Heard()
    found = heard(server, listener)
    assert (listener.ids, listener.void) == (list(found.ids or ()), 2)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("change", "retry", "match"),
    [
        (lambda events: events.insert(2, error(500)), True, "500: .*broke"),
        (lambda events: events.insert(0, error(400)), False, "400: .*broke"),
        (lambda events: events.insert(2, {"error": "no"}), True, 'broke.*"no"'),
        (lambda events: events.pop(), True, "before"),
        (lambda events: events.pop(-3), True, "before"),
        (lambda events: events[1]["choices"][0].update(token_ids=7), True, r"ids .*\bint\b"),
        (lambda events: events[1]["choices"][0].update(token_ids=["a"]), True, "stream .*'a'"),
        (lambda events: events[1]["choices"][0].update(token_ids=[]), True, r"\[8, 9, 10, 11, 8\].*\[8, 10, 11, 8\]"),
        (lambda events: events[1]["choices"][0].update(logprobs=None), True, r"\[8, 10, 11, 8\].*\[8, 9, 10, 11, 8\]"),
        (lambda events: events[1]["choices"][0]["logprobs"]["content"][0].update(logprob=NAN), True, "log-prob 1"),
        (lambda events: events[4]["choices"][0].update(weight_versions=[]), True, " 0 of 5 "),
        (lambda events: events.append("more"), True, "after.*'more'"),
        (lambda events: events.insert(1, {"choices": [{"index": 1, "token_ids": [8]}]}), True, "'index': 1"),
    ],
)
def test_a_stream_that_would_train_wrongly_is_refused(change: Any, retry: bool, match: str) -> None:
    with pytest.raises(EngineError, match=match) as caught:
        heard(FaultyServer([streams(change)]), Heard())
    assert caught.value.retry is retry


def test_a_server_that_knows_no_streams_is_no_answer() -> None:
    with pytest.raises(EngineError, match="before"):
        heard(FaultyServer([changed(lambda choice: None)]), Heard())


def test_where_tokens_name_no_versions_nothing_is_told() -> None:
    class Silent(FaultyServer):
        def answer(self, body: dict[str, Any], length: int = 5, finish: str = "length") -> dict[str, Any]:
            answer = super().answer(body, length, finish)
            del answer["choices"][0]["weight_versions"]
            return answer

    server, listener = Silent(), Heard()
    assert len(heard(server, listener).ids or ()) == 5
    assert (listener.pieces, [body["stream"] for body in server.asked]) == ([], [False])


def test_an_episode_goes_through_faults_and_its_tape_tells() -> None:
    server = FaultyServer([dropped, logprob(NAN), status(500), logprob(NAN)])

    async def test(engine: RemoteEngine) -> Any:
        return await rollout(Speaker(), Letters(), task="ab", engine=engine, sampling=Sampling(max_tokens=5))

    tape = using(server, test)
    assert tape.status == Status.ERROR
    assert tape.cause.type == CauseType.MODEL
    errors = [attempt.error for call in tape.calls for attempt in call.attempts]
    assert ["nan" in errors[0], "500" in errors[1], "nan" in errors[2]] == [True] * 3
    server = FaultyServer([status(500)])
    tape = using(server, test)
    assert tape.status == Status.FINISHED
    assert [len(call.attempts) for call in tape.calls] == [2, 1]


def test_cancelling_asks_the_server_for_what_it_has() -> None:
    server = FaultyServer()
    server.faults = [server.hang]
    partial: list[Completion] = []

    async def test(engine: RemoteEngine) -> None:
        asked = asyncio.create_task(engine.complete(ask(on_partial=partial.append)))
        while not server.pending:  # noqa: ASYNC110  # the other side of a real connection
            await asyncio.sleep(0.001)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    using(server, test)
    (left,) = partial
    assert left.ids is not None
    assert (len(left.ids), left.finish) == (2, "cancelled")


WEIGHTS = {"w": torch.zeros(2)}


@pytest.mark.ledger("X9")
def test_publishing_goes_step_by_step_and_tokens_carry_the_new_version(tmp_path: Path) -> None:
    server = FaultyServer()

    async def test(engine: RemoteEngine) -> Completion:
        await engine.sync_weights(WEIGHTS, "run:1")
        with pytest.raises(ValueError, match="'run:1'"):
            await engine.sync_weights(WEIGHTS, "run:1")
        return await engine.complete(ask())

    found = using(server, test, weights_folder=tmp_path)
    assert server.control == ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]
    assert found.spans == (("run:1", 0, 5),)
    assert (tmp_path / "run_1" / "model.safetensors").exists()


@pytest.mark.parametrize("step", ["/collective_rpc", "/reset_prefix_cache"])
def test_after_a_publish_that_failed_nothing_is_sampled(step: str) -> None:
    server = FaultyServer()

    async def test(engine: RemoteEngine) -> None:
        server.broken_step, server.faults = step, [server.hang]
        asked = asyncio.create_task(engine.complete(ask()))
        while not server.pending:  # noqa: ASYNC110  # the other side of a real connection
            await asyncio.sleep(0.001)
        with pytest.raises(PublishFailed, match="memory"):
            await engine.sync_weights(WEIGHTS, "run:1")
        assert server.control[-1] == "/resume", "it must not stay paused"
        server.pending.popitem()[1].set()
        for request in (asked, engine.complete(ask())):
            with pytest.raises(EngineError, match="'run:1'"):
                await request

    using(server, test)


def test_weights_that_change_under_a_silent_server_are_not_guessed() -> None:
    server = FaultyServer()

    async def hang_without_versions(request: Any, body: Any) -> Any:
        await server.hang(request, body)
        answer = server.answer(body, 2)
        del answer["choices"][0]["weight_versions"]
        from aiohttp import web

        return web.json_response(answer)

    async def test(engine: RemoteEngine) -> None:
        server.faults = [hang_without_versions]
        asked = asyncio.create_task(engine.complete(ask()))
        while not server.pending:  # noqa: ASYNC110  # the other side of a real connection
            await asyncio.sleep(0.001)
        await engine.sync_weights(WEIGHTS, "run:1")
        server.pending.popitem()[1].set()
        with pytest.raises(EngineError, match=r"--enable-scale-out.*drain"):
            await asked

    using(server, test)


@pytest.mark.ledger("X9")
def test_conversations_stay_with_their_server_until_it_dies() -> None:
    async def test() -> None:
        first, second = FaultyServer(), FaultyServer()
        async with second.up() as other:
            async with first.up() as url:
                engine = await connect(servers(url, other), RENDERER)
                for _ in range(3):
                    await engine.complete(ask("a"))
                homes = [len(first.asked), len(second.asked)]
                assert sorted(homes) == [0, 3]
                assert homes[0] == 3
            await engine.complete(ask("a"))
            engine.fleet.members[0].server.in_flight += 1  # as if its requests were still waiting for the dead one
            await engine.complete(ask("a"))
            assert len(second.asked) == 2
            await engine.close()

    asyncio.run(test())


def test_a_server_that_gives_raw_logprobs_serves_temperature_one_only() -> None:
    class Raw(FaultyServer):
        def answer(self, body: dict[str, Any], length: int = 5, finish: str = "length") -> dict[str, Any]:
            sampling = {**body["sampling_params"], "temperature": 1.0}
            return super().answer({**body, "sampling_params": sampling}, length, finish)

    async def test(engine: RemoteEngine) -> None:
        assert engine.capabilities.logprobs == "raw"
        await engine.complete(ask())
        with pytest.raises(EngineError, match="processed_logprobs"):
            await engine.complete(ask(temperature=0.5))

    using(Raw(), test)


def test_a_server_of_text_is_refused_when_connecting() -> None:
    class Text(FaultyServer):
        def answer(self, body: dict[str, Any], length: int = 5, finish: str = "length") -> dict[str, Any]:
            answer = super().answer(body, length, finish)
            answer["choices"][0]["token_ids"] = None
            return answer

    with pytest.raises(EngineError, match=r"missing.*`tapereel serve model`"):
        completed(Text())


def test_prompts_without_room_are_refused_before_they_are_sent() -> None:
    server = FaultyServer()
    with pytest.raises(PromptTooLong, match="64"):
        completed(server, ask("abcd" * 30))
    assert server.asked == []


def test_keys_are_in_no_message(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SOME_KEY", "sesame-sesame")
    with pytest.raises(EngineError) as caught:
        completed(FaultyServer([status(401)]), key_variable="SOME_KEY")
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(EngineError, match="SOME_KEY"):
        completed(FaultyServer(), key_variable="SOME_KEY")
    assert "sesame" not in str(caught.value) + repr(caught.value) + caplog.text


def test_servers_beyond_loopback_need_a_key_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"0\.0\.0\.0.*--key"):
        LocalServer("m", host="0.0.0.0")
    monkeypatch.setenv("SOME_KEY", "open-sesame-open-sesame")
    command = LocalServer("m", host="0.0.0.0", key_variable="SOME_KEY").command
    assert "--middleware" in command, "it asks for the key on every route"
    assert "sesame" not in " ".join(command)


def test_addresses_are_checked() -> None:
    with pytest.raises(ValueError, match=r"'127\.0\.0\.1:8000'.*http://"):
        Server("127.0.0.1:8000")


COMPLETION = {
    "choices": [
        {
            "token_ids": [8, 9],
            "prompt_token_ids": [4],
            "finish_reason": "stop",
            "stop_reason": None,
            "logprobs": {
                "tokens": ["a", "b"],
                "token_logprobs": [-0.5, -1.0],
                "top_logprobs": [],
                "text_offset": [0, 1],
            },
            "weight_versions": None,
        }
    ],
    "usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}},
}
SGLANG = {
    "text": "ab",
    "output_ids": [8, 9],
    "meta_info": {
        "id": "x",
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "weight_version": "r:2",
        "weight_versions": [{"version": "r:1", "start": 0, "end": 1}, {"version": "r:2", "start": 1, "end": 2}],
        "input_token_logprobs": [],
        "output_token_logprobs": [[-0.5, 8, None], [-1.0, 9, None]],
    },
}


def test_the_other_dialects_read_their_servers_shapes() -> None:
    found = Completions().parse(COMPLETION)
    assert (list(found.ids), list(found.logprobs), found.spans, found.finish) == ([8, 9], [-0.5, -1.0], None, "stop")
    assert (found.usage.prompt_tokens, found.usage.cached_tokens) == (1, 1)
    found = SGLangGenerate().parse(SGLANG)
    assert (list(found.ids), list(found.logprobs), found.finish) == ([8, 9], [-0.5, -1.0], "stop")
    assert found.spans == (("r:1", 0, 1), ("r:2", 1, 2))
    body = SGLangGenerate().body(ask(), model="m", request_id="x", stops=(2,))
    assert body["return_logprob"] is True
    assert body["sampling_params"]["max_new_tokens"] == 5
    with pytest.raises(BadAnswer, match=r"\[8, 9\].*\[9, 8\]"):
        SGLangGenerate().parse({**SGLANG, "output_ids": [9, 8]})
    with pytest.raises(BadAnswer, match="meta_info"):
        SGLangGenerate().parse({"error": {"message": "no"}})
    assert Generate().abort("x") == ("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-x"]})
