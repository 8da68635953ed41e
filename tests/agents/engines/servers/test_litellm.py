"""Hosted models through the real litellm, against a provider on this machine: what is answered, tried again, refused,
paid and recorded."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import ChatAgent, EngineError, PromptTooLong, ReplayEngine, Request, ScriptedEngine, rollout
from tapereel.agents.engines import EngineStopped
from tapereel.agents.engines.servers import LiteLLMEngine
from tapereel.agents.engines.servers.litellm_engine import HostedFailed
from tapereel.agents.engines.transport.proxies import past_proxies
from tapereel.agents.runs import judge_reward
from tapereel.cli import main
from tapereel.envs import Environment, Outcome, Rewards
from tapereel.envs.load_named import load_named
from tapereel.finetune import rows
from tapereel.tapes import Action, CauseType, Sampling, Status, Tape, Text, ToolCalls, ToolResult, ToolResults
from tapereel.tapes.common import HIDDEN
from tapereel.tapes.store import CONFIG, Store

from ....cli.lab import MICRO, SCENE, settings
from ....cli.world import EXAMPLE
from ....finetune.loop.lab import RENDERER
from ...faulty import cut_short, dropped, stuck
from ...hosted import NO_CHOICES, OneModel, Provider, refuses, says
from ...worlds import GuessNumber, Player

pytestmark = pytest.mark.timeout(120)

KEY = "mellon-4242-mellon"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PROVIDERS_KEY", KEY)


def ask(text: str = "hello", **sampling: Any) -> Request:
    return Request(messages=[{"role": "user", "content": text}], prompt=None, sampling=Sampling(**sampling), seed=7)


def using(provider: Provider, test: Callable[[LiteLLMEngine], Awaitable[Any]], **options: Any) -> Any:
    """What `test` gives with an engine of that provider."""

    async def whole(url: str) -> Any:
        engine = LiteLLMEngine(
            **{
                "model": "openai/gpt-4o-mini",
                "base_url": url,
                "seconds": 60.0,
                "backoff": 0.001,
                "key_variable": "SOME_PROVIDERS_KEY",
                **options,
            }
        )
        try:
            return await test(engine)
        finally:
            await engine.close()

    with provider.up():
        return asyncio.run(whole(provider.url))


def completed(provider: Provider, request: Request | None = None, **options: Any) -> Any:
    return using(provider, lambda engine: engine.complete(request or ask()), **options)


def test_an_answer_has_its_text_tokens_and_price() -> None:
    provider = Provider()
    found = completed(provider)
    assert (found.text, found.ids, found.logprobs, found.finish) == ("hello", None, None, "stop")
    assert found.usage.model_dump(exclude={"cost"}) == {"prompt_tokens": 10, "completion_tokens": 5, "cached_tokens": 4}
    assert found.usage.cost is not None
    assert 0 < found.usage.cost < 1e-4
    assert [attempt.error for attempt in found.attempts] == [None]
    assert provider.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_what_is_not_told_is_none_and_not_zero() -> None:
    silent = Provider(says=lambda body: {"content": "x", "usage": None})
    found = completed(silent)
    assert set(found.usage.model_dump().values()) == {None}
    unknown = completed(Provider(), model="openai/nobody-knows-this-model")
    assert (unknown.usage.completion_tokens, unknown.usage.cost) == (5, None)
    priced = completed(Provider(), model="openai/nobody-knows-this-model", prices=(1.0, 2.0))
    assert priced.usage.cost == pytest.approx(20e-6)


@pytest.mark.parametrize(
    ("said", "finish", "text"),
    [
        ({"content": "half", "finish_reason": "length"}, "length", "half"),
        ({"content": None, "finish_reason": "length"}, "length", ""),
        ({"content": "some", "finish_reason": "content_filter"}, "abort", "some"),
        ({"content": None}, "stop", ""),
    ],
)
def test_how_an_answer_ended_is_kept(said: dict[str, Any], finish: str, text: str) -> None:
    found = completed(Provider(says=lambda body: dict(said)))
    assert (found.finish, found.text) == (finish, text)


def test_an_answer_that_was_withheld_is_an_error() -> None:
    with pytest.raises(HostedFailed, match="filter"):
        completed(Provider(says=lambda body: {"finish_reason": "content_filter"}))


FAULTS = [
    (refuses(429, "slow down", Retry_After="0"), "RateLimitError", True),
    (refuses(500), "not now", True),
    (refuses(503), "not now", True),
    (dropped, "Connection error", True),
    (cut_short, "", True),
    (says('{"id": "x", "choi'), "", True),
    (says("<html>gateway</html>", "text/html"), "", True),
    (says(NO_CHOICES), "no 'choices'", True),
    (refuses(400, "bad field"), "bad field", False),
    (refuses(403, "your input was flagged by moderation"), "flagged", False),
]


@pytest.mark.parametrize(("fault", "match", "again"), FAULTS)
def test_what_goes_wrong_is_tried_again_where_that_helps_and_recorded_in_any_case(
    fault: Any, match: str, again: bool
) -> None:
    provider = Provider([fault, fault])
    if again:
        found = completed(provider)
        assert found.text == "hello"
        errors = [attempt.error for attempt in found.attempts]
    else:
        with pytest.raises(HostedFailed) as caught:
            completed(provider)
        assert not caught.value.retry, "the door would ask again what this engine has given up"
        errors = [*(attempt.error for attempt in caught.value.attempts), None]
    assert len(errors) == (3 if again else 2)
    assert errors[-1] is None
    assert all(error is not None and match in error for error in errors[:-1])
    assert len({json.dumps(body) for body in provider.asked}) == 1, "a retry is the same request"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (refuses(401, "who are you"), "key"),
        (refuses(403), "key"),
        (refuses(404, "no such model"), "model"),
        (refuses(402, "Insufficient Balance"), "budget"),
        (refuses(429, "You exceeded your current quota", "insufficient_quota"), "budget"),
        (refuses(400, "Your credit balance is too low"), "budget"),
    ],
)
def test_what_every_request_meets_stops_the_run_at_once(fault: Any, reason: str) -> None:
    provider = Provider([fault] * 9)
    with pytest.raises(EngineStopped) as stopped:
        completed(provider)
    assert stopped.value.reason == reason
    assert len(provider.asked) == len(stopped.value.attempts) == 1


@pytest.mark.parametrize("fault", [refuses(502), refuses(503), refuses(529), refuses(504), dropped, cut_short])
def test_a_provider_that_is_away_uses_up_no_retries(fault: Any) -> None:
    provider = Provider([fault] * 4)
    assert len(completed(provider, retries=0).attempts) == 5


def test_a_model_name_that_litellm_cannot_read_stops_the_run() -> None:
    async def asked() -> None:
        engine = LiteLLMEngine("no-such-provider")
        try:
            with pytest.raises(EngineStopped, match="LLM Provider NOT provided") as stopped:
                await engine.complete(ask("hi"))
            assert stopped.value.reason == "model"
        finally:
            await engine.close()

    asyncio.run(asked())


@pytest.mark.parametrize("model", ["openai/gpt-4o-mini", "gemini/gemini-2.0-flash", "anthropic/claude-sonnet-4-5"])
def test_a_key_that_nobody_set_is_not_waited_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.endswith(("_API_KEY", "_AUTH_TOKEN")):
            monkeypatch.delenv(name)

    async def asked() -> EngineStopped:
        engine = LiteLLMEngine(model, retries=3)
        try:
            with pytest.raises(EngineStopped, match=r"(?i)missing.*key|missing credentials") as found:
                await engine.complete(ask("hi"))
            assert found.value.reason == "key"
            return found.value
        finally:
            await engine.close()

    assert len(asyncio.run(asked()).attempts) == 1


def test_a_provider_that_sends_the_key_back_gets_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE_IT_IS", KEY)  # no name of a secret
    monkeypatch.delenv("SOME_PROVIDERS_KEY")
    with pytest.raises(EngineStopped, match="bad key") as caught:
        completed(Provider([refuses(401, f"bad key {KEY}")]), key_variable="WHERE_IT_IS")
    assert KEY not in str(caught.value) + str(caught.value.attempts)


@pytest.mark.parametrize("library", ["LiteLLM", "openai._base_client"])
def test_what_the_libraries_log_has_no_key(library: str) -> None:
    asyncio.run(LiteLLMEngine("openai/gpt-4o-mini").close())
    said: list[str] = []
    handler, logger = logging.Handler(), logging.getLogger(library)
    handler.emit = lambda record: said.append(handler.format(record))  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        raise ValueError(f"refused {KEY}")
    except ValueError:
        logger.critical("sent %s", KEY, exc_info=True)
    finally:
        logger.removeHandler(handler)
    assert said == [f"sent {HIDDEN} (ValueError: refused {HIDDEN})"]


def test_retries_and_patience_end() -> None:
    provider = Provider([refuses(500)] * 9)
    with pytest.raises(HostedFailed) as caught:
        completed(provider, retries=3)
    assert len(provider.asked) == len(caught.value.attempts) == 4
    provider = Provider([refuses(429, Retry_After="1000")] * 9)
    with pytest.raises(EngineStopped, match=r"0\.5 s.*engine\.patience") as stopped:
        completed(provider, patience=0.5)
    assert stopped.value.reason == "away"
    assert len(provider.asked) == 1, "the wait that was asked for is longer than the patience"


def test_a_rate_limit_holds_back_the_whole_engine() -> None:
    async def test(engine: LiteLLMEngine) -> None:
        for _ in range(2):
            with pytest.raises(EngineStopped, match=r"0\.5 s.*engine\.patience"):
                await engine.complete(ask())
        assert (engine.stats.requests, engine.stats.limited) == (1, 1)

    provider = Provider([refuses(429, "slow down", Retry_After="1000")])
    using(provider, test, patience=0.5)
    assert len(provider.asked) == 1, "the second was not even sent"


def test_a_provider_that_never_answers_is_given_up() -> None:
    with pytest.raises(EngineStopped, match=r"0\.2 s") as caught:
        completed(Provider([stuck] * 99), seconds=0.2, patience=1.0)
    assert len(caught.value.attempts) > 1


def test_a_prompt_too_long_is_one() -> None:
    full = refuses(400, "This model's maximum context length is 4096 tokens.", "context_length_exceeded")
    with pytest.raises(PromptTooLong, match="4096"):
        completed(Provider([full]))


def test_a_budget_ends_the_spending() -> None:
    provider = Provider()

    async def test(engine: LiteLLMEngine) -> None:
        for _ in range(2):
            await engine.complete(ask())
        assert engine.stats.spent == pytest.approx(40e-6)
        with pytest.raises(EngineStopped, match=r"3e-05.*engine\.budget"):
            await engine.complete(ask())

    using(provider, test, prices=(1.0, 2.0), budget=30e-6)
    assert len(provider.asked) == 2
    with pytest.raises(ValueError, match=r"nobody-knows-this-model.*prices="):
        LiteLLMEngine("openai/nobody-knows-this-model", budget=1.0)


def test_what_the_engine_sets_itself_is_refused() -> None:
    for options in ({"api_key": "x"}, {"extra_headers": {}}, {"mock_response": "x"}):
        with pytest.raises(ValueError, match="key_variable"):
            LiteLLMEngine("openai/m", options=options)
    with pytest.raises(ValueError, match="key_variable") as caught:
        LiteLLMEngine("openai/m", base_url="http://someone:opensesame@127.0.0.1:1/v1")
    assert "opensesame" not in str(caught.value)
    with pytest.raises(EngineError, match="stream"):
        completed(Provider(), ask(extra={"stream": True}))
    with pytest.raises(EngineStopped, match="NO_SUCH_VARIABLE"):
        completed(Provider(), key_variable="NO_SUCH_VARIABLE")


@pytest.mark.parametrize("spared", [None, "example.com"])
def test_a_server_on_this_machine_is_asked_past_the_proxy(spared: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        for written in (name, name.lower()):
            monkeypatch.setenv(written, "http://127.0.0.1:9")
            if name == "NO_PROXY":
                monkeypatch.delenv(written)
    if spared is not None:
        monkeypatch.setenv("NO_PROXY", spared)
    assert past_proxies("https://api.openai.com/v1") == {}
    assert completed(Provider(), retries=0).text == "hello"
    assert past_proxies("http://127.0.0.1:1") == {}, "it is spared now"
    assert os.environ["no_proxy"] == ("127.0.0.1" if spared is None else "example.com,127.0.0.1")
    assert past_proxies("http://[::1]:1/v1")["NO_PROXY"].endswith(",::1")


def test_cancelling_ends_the_request() -> None:
    provider = Provider([stuck])

    async def test(engine: LiteLLMEngine) -> None:
        asked = asyncio.create_task(engine.complete(ask()))
        while not provider.asked:  # noqa: ASYNC110  # the other side of a real connection
            await asyncio.sleep(0.001)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert (await engine.complete(ask())).text == "hello"

    using(provider, test)


def binary(body: dict[str, Any]) -> dict[str, Any]:
    """Guesses the number by what it was told."""
    low, high, guess = 1, 9, 5
    for message in body["messages"][2:]:
        if message["role"] == "assistant":
            guess = int(message["content"])
        else:
            low, high = (guess + 1, high) if message["content"] == "higher" else (low, guess - 1)
    return {"content": str((low + high) // 2)}


def test_an_episode_goes_through_faults_and_its_tape_can_be_replayed() -> None:
    provider = Provider([refuses(429, Retry_After="0"), dropped], binary)

    async def test(engine: LiteLLMEngine) -> Tape:
        return await rollout(Player(), GuessNumber(), task=7, engine=engine)

    tape = using(provider, test)
    assert (tape.status, tape.reward) == (Status.FINISHED, pytest.approx(0.9))
    assert [len(call.attempts) for call in tape.calls] == [3, 1]
    assert {call.engine for call in tape.calls} == {"litellm:openai/gpt-4o-mini"}
    assert all(call.usage.cost and call.completion is None for call in tape.calls)
    again = asyncio.run(rollout(Player(), GuessNumber(), task=7, engine=ReplayEngine(tape)))
    assert [entry.step for entry in again.entries] == [entry.step for entry in tape.entries]
    broken = using(Provider([refuses(400)] * 9), test)
    assert (broken.status, broken.cause.type) == (Status.ERROR, CauseType.MODEL)
    assert len(broken.calls[0].attempts) == 1


def test_a_hosted_judge_leaves_what_it_cost_and_what_failed_with_the_grade() -> None:
    tape = asyncio.run(rollout(Player(), GuessNumber(), task=5, engine=ScriptedEngine(["5"])))

    async def test(engine: LiteLLMEngine) -> Any:
        return (await Rewards([judge_reward(engine, "Is it right?")]).score(tape))[0]

    provider = Provider([refuses(429, "slow down", Retry_After="0")], lambda body: {"content": "Score: 9"})
    graded = using(provider, test, prices=(1.0, 2.0))
    (answer,) = graded.evidence["answers"]
    assert (graded.value, answer["usage"]["cost"], answer["usage"]["completion_tokens"]) == (0.9, 20e-6, 5)
    assert ["slow" in error for error in answer["failed"]] == [True]
    assert graded.evidence["judge"] == "litellm:openai/gpt-4o-mini"


class Pick(Action, kind="hosted_pick"):
    """Take a fruit."""

    fruit: str


class Market(Environment[Any]):
    """Looks fruits up until one is picked."""

    async def reset(self, task: Any) -> Text:
        return Text(text="Which is ripe?")

    async def step(self, action: Any) -> Outcome:
        if isinstance(action, Pick):
            return Outcome(reward=float(action.fruit == "pear"), terminated=True)
        found = [
            ToolResult(id=call.id, name=call.name, content=f"{call.arguments['key']}: ripe") for call in action.calls
        ]
        return Outcome(ToolResults(results=tuple(found)))


def shopping(body: dict[str, Any]) -> dict[str, Any]:
    """Looks two fruits up at once, then picks one."""

    def call(k: int, name: str, **arguments: str) -> dict[str, Any]:
        return {"id": f"c{k}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}

    if body["messages"][-1]["role"] == "tool":
        return {"tool_calls": [call(2, "hosted_pick", fruit="pear")]}
    return {"content": "Let me see.", "tool_calls": [call(0, "lookup", key="pear"), call(1, "lookup", key="plum")]}


LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}},
    },
}


def test_parallel_function_calls_go_there_and_back() -> None:
    provider = Provider(says=shopping)
    shopper = ChatAgent("Buy.", actions=[Pick, ToolCalls], tools=[LOOKUP])
    tape = using(provider, lambda engine: rollout(shopper, Market(), task=0, engine=engine))
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0), tape.cause
    first, second = provider.asked
    assert [tool["function"]["name"] for tool in first["tools"]] == ["hosted_pick", "lookup"]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "tool", "tool"]
    assert second["messages"][2]["tool_calls"][1]["function"]["arguments"] == '{"key": "plum"}'
    assert [message["tool_call_id"] for message in second["messages"][3:]] == ["c0", "c1"]
    assert [call.finish for call in tape.calls] == ["tool_calls", "tool_calls"]


def next_digit(body: dict[str, Any]) -> dict[str, Any]:
    return {"content": str((int(body["messages"][-1]["content"][-1]) + 1) % 10)}


def answers(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    code = main([*words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


def test_run_records_replays_and_audits_a_hosted_model_and_its_tapes_are_imitated_not_reinforced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, provider = str(tmp_path / "run"), Provider([refuses(429, Retry_After="0")], next_digit)
    with provider.up():
        engine = ["--model", "litellm:openai/gpt-4o-mini"]
        engine += settings(
            f"engine.base_url={provider.url}", "engine.key_variable=SOME_PROVIDERS_KEY", "engine.budget=1"
        )
        code, summary, err = answers(
            capsys, "run", *SCENE, "--attempts", "2", *engine, *settings("count=6", "split=demo"), "--out", run
        )
    assert (code, summary["reward"], summary["episodes"]) == (0, 1.0, 12), err
    assert {name: summary["tokens"][name] for name in ("sampled", "prompt", "completion")} == {
        "sampled": 0,
        "prompt": 12 * 10,
        "completion": 12 * 5,
    }
    assert "SOME_PROVIDERS_KEY" in (Path(run) / CONFIG).read_text()
    code, replayed, err = answers(capsys, "replay", "agent", run)
    assert (code, {one["outcome"] for one in replayed["verdicts"]}) == (0, {"verified"}), err
    code, audit, err = answers(capsys, "audit", run)
    assert code == 0, err
    assert "litellm:openai/gpt-4o-mini" in json.dumps(audit)
    with Store.open(run) as store:
        tapes = list(store.tapes())
    made = rows(tapes[0], renderer=RENDERER)
    assert len(made) == 1
    assert math.isnan(made[0].old[0]), "nobody knows how likely a provider's text was"
    folder = str(tmp_path / "model")
    load_named(f"{EXAMPLE}:save_model")(folder)
    imitate = settings(*MICRO, "loop.updates=1", f"warm.tapes={run}", "warm.updates=2", "warm.batch=8")
    code, trained, err = answers(capsys, "train", *SCENE, "--model", folder, *imitate, "--out", str(tmp_path / "sft"))
    assert (code, trained["books_close"]) == (0, True), err
    with Store.open(tmp_path / "sft") as store:
        assert any(call.engine.startswith("litellm") for tape in store.tapes(split="demo") for call in tape.calls)
    code, _, err = answers(capsys, "train", *SCENE, *engine, "--out", str(tmp_path / "train"))
    assert code == 64
    assert "warm.tapes=RUN" in err


def test_a_wrong_model_name_is_corrected_by_resuming_until_there_is_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    provider = OneModel(says=lambda body: {**next_digit(body), "usage": None})
    with provider.up():

        def run(model: str, *more: str) -> tuple[int, str, str]:
            engine = settings("engine.kind=litellm", f"engine.model=openai/{model}", "count=6")
            code = main(
                [
                    "run",
                    *SCENE,
                    *engine,
                    "--set",
                    f"engine.base_url={provider.url}",
                    "--out",
                    str(tmp_path / "run"),
                    *more,
                ]
            )
            return code, *capsys.readouterr()

        code, _, err = run("wrong")
        assert (code, "engine.model" in err, "--resume" in err) == (78, True, True), err
        code, out, err = run("right", "--resume", "--json")
        assert code == 0, err
        found = json.loads(out)
        assert (found["scored"], found["tokens"]["unknown"]) == (6, 6)
        assert "prompt" not in found["tokens"], "what nobody counted is not 0"
        recorded = (tmp_path / "run" / CONFIG).read_text()
        assert recorded.startswith("# engine.model was 'openai/wrong' until ")
        assert "model: openai/right" in recorded
        code, _, err = run("other", "--resume")
        assert (code, "engine.model" in err) == (64, True), err
        assert (tmp_path / "run" / CONFIG).read_text() == recorded
