"""FIRE: the first token at a temperature of its own, exactly recorded and exactly trained."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapereel.agents import (
    Capability,
    Completion,
    EmbeddedEngine,
    EngineError,
    PromptTooLong,
    ReplayEngine,
    Request,
    ScriptedEngine,
    rollout,
)
from tapereel.agents.episode import fire
from tapereel.finetune import rows
from tapereel.finetune.trainer import score
from tapereel.tapes import Call, Sampling, Tape
from tapereel.tapes.records import Usage

from ...finetune.loop.lab import RENDERER, Letters, Speaker, model, run, settings_of
from ..embedded_lab import recompute

LEDGER = json.loads((Path(__file__).parents[2] / "ledger" / "sampling.json").read_text("utf-8"))
HOT = Sampling(first_temperature=10.0, temperature=0.7, max_tokens=6)


class Parts:
    """Gives the parts of an answer one after the other, as an engine of tokens would."""

    name = "parts"
    renderer = RENDERER
    context = None
    can: frozenset[Capability] = frozenset()

    def __init__(self, *parts: list[int], end: int = 6) -> None:
        self.parts, self.end = list(parts), end
        self.asked: list[Request] = []

    async def complete(self, request: Request) -> Completion:
        self.asked.append(request)
        ids = array("i", self.parts.pop(0))
        n = len(ids)
        spans = (("v0", 0, n),) if n else ()
        return Completion(
            text=RENDERER.decode(ids),
            ids=ids,
            logprobs=array("f", [-0.5] * n),
            spans=spans,
            finish="stop" if n and ids[-1] == self.end else "length",
            usage=Usage(prompt_tokens=len(request.prompt or ()), completion_tokens=n),
        )

    def forget(self, cache_key: str) -> None:
        """Nothing is kept."""

    async def close(self) -> None:
        """Nothing is held."""


def ask(sampling: Sampling, on_partial: Callable[[Completion], None] | None = None) -> Request:
    messages = [{"role": "user", "content": "abcd"}]
    return Request(
        messages=messages,
        prompt=RENDERER.prompt(messages).ids,
        sampling=sampling,
        seed=5,
        cache_key="k",
        on_partial=on_partial,
    )


@pytest.mark.ledger("F16", "T41")
@pytest.mark.parametrize("case", LEDGER["fire"], ids=lambda case: case["name"])
def test_the_first_token_is_hot_and_the_rest_is_not(case: dict[str, Any]) -> None:
    engine = Parts(case["first"], case["rest"])
    request = ask(Sampling(first_temperature=10.0, max_tokens=case["max_tokens"]))
    found = asyncio.run(fire.complete(engine, request))
    asked = [[one.sampling.temperature, one.sampling.max_tokens] for one in engine.asked]
    assert asked == case["calls"]
    assert all(one.sampling.first_temperature is None for one in engine.asked)
    assert (list(found.ids or ()), found.finish) == (case["ids"], case["finish"])
    assert found.text == RENDERER.decode(case["ids"])
    assert found.spans == (("v0", 0, len(case["ids"])),)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(request.prompt or ()), len(case["ids"]))
    if len(engine.asked) == 2:
        first, second = engine.asked
        assert second.prompt == (request.prompt or array("i")) + array("i", case["first"])
        assert first.seed != second.seed, "both tokens would be drawn with one random number"
        assert (first.cache_key, second.cache_key) == ("k", "k")


def test_without_a_first_temperature_an_answer_is_one_call() -> None:
    engine = Parts([10, 11, 6])
    asyncio.run(fire.complete(engine, ask(Sampling())))
    assert [one.sampling for one in engine.asked] == [Sampling()]


def test_an_engine_of_texts_and_an_engine_asked_directly_refuse_it() -> None:
    with pytest.raises(EngineError, match=r"sampling\.first_temperature.*scripted"):
        asyncio.run(fire.complete(ScriptedEngine(["a"]), replace(ask(HOT), prompt=None)))
    engine = EmbeddedEngine(model(), RENDERER, version="v0", slots=2)
    with pytest.raises(EngineError, match=r"fire\.complete"):
        asyncio.run(engine.complete(ask(HOT)))


def test_weights_that_change_between_the_parts_are_two_spans() -> None:
    class Changing(Parts):
        async def complete(self, request: Request) -> Completion:
            found = await super().complete(request)
            return replace(found, spans=((f"v{len(self.asked)}", 0, len(found.ids or ())),))

    found = asyncio.run(fire.complete(Changing([10], [11, 6]), ask(HOT)))
    assert found.spans == (("v1", 0, 1), ("v2", 1, 3))


def test_a_first_token_that_fills_the_context_is_the_answer() -> None:
    class Full(Parts):
        async def complete(self, request: Request) -> Completion:
            if self.asked:
                raise PromptTooLong("no room")
            return await super().complete(request)

    found = asyncio.run(fire.complete(Full([10]), ask(HOT)))
    assert (list(found.ids or ()), found.finish) == ([10], "length")


@pytest.mark.parametrize("tells", [True, False])
def test_a_cancelled_answer_keeps_its_first_token(tells: bool) -> None:
    class Stuck(Parts):
        async def complete(self, request: Request) -> Completion:
            if not self.asked:
                return await super().complete(request)
            try:
                self.asked.append(request)
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if tells and request.on_partial is not None:
                    request.on_partial(
                        Completion(
                            text="b",
                            ids=array("i", [11]),
                            logprobs=array("f", [-0.5]),
                            spans=(("v0", 0, 1),),
                            finish="cancelled",
                        )
                    )
                raise
            raise AssertionError("unreachable")

    partial: list[Completion] = []

    async def test() -> None:
        engine = Stuck([10])
        asked = asyncio.create_task(fire.complete(engine, ask(HOT, partial.append)))
        while len(engine.asked) < 2:  # noqa: ASYNC110  # two turns of the loop
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(test())
    (left,) = partial
    assert (list(left.ids or ()), left.finish) == ([10, 11] if tells else [10], "cancelled")


def episode(sampling: Sampling = HOT) -> Tape:
    async def test() -> Tape:
        engine = EmbeddedEngine(model(), RENDERER, version="v0", slots=4)
        try:
            return await rollout(Speaker(), Letters(), task="abc", engine=engine, sampling=sampling)
        finally:
            await engine.close()

    return asyncio.run(test())


@pytest.mark.ledger("F16")
def test_every_log_prob_on_the_tape_is_that_of_its_own_temperature() -> None:
    tape = episode()
    assert tape.status == "finished", tape.cause
    policy = model()
    for call in tape.calls:
        assert call.completion is not None
        exact = torch.cat(
            [
                recompute(policy, call.prompt, call.completion, t)[part]
                for t, part in ((10.0, slice(0, 1)), (0.7, slice(1, None)))
            ]
        )
        torch.testing.assert_close(torch.tensor(call.logprobs), exact, rtol=0, atol=1e-4)
        assert call.sampling == HOT
        assert Call.model_validate_json(call.body()) == call
    assert b"first_temperature" not in episode(Sampling(max_tokens=2)).calls[0].body(), "old tapes keep their digests"


@pytest.mark.ledger("F16")
def test_training_scores_each_token_at_the_temperature_it_was_drawn_at() -> None:
    tape = episode()
    (row,) = rows(tape)
    for k in range(len(tape.calls)):
        own = row.temperature[row.call == k]
        assert own.tolist() == [10.0] + [np.float32(0.7)] * (len(own) - 1)
    scored = score(model(), [row]).logprob
    torch.testing.assert_close(scored.float(), torch.from_numpy(row.old), rtol=0, atol=1e-4)


def test_a_hot_answer_is_replayed_whole() -> None:
    tape = episode()
    again = asyncio.run(
        rollout(Speaker(), Letters(), task="abc", engine=ReplayEngine(tape, renderer=RENDERER), sampling=HOT)
    )
    assert [call.completion for call in again.calls] == [call.completion for call in tape.calls]


def test_the_loop_trains_on_what_fire_sampled(tmp_path: Path) -> None:
    """With max_lag 0 the loop itself refuses log-probs that are not the trainer's."""
    config = settings_of(updates=2, max_lag=0, sampling=Sampling(first_temperature=10.0, max_tokens=3))
    _, reports = run(tmp_path / "run", config)
    assert len(reports) == 2
