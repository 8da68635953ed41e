"""Every span of version v on a tape is exact for v's weights over its full prefix, as rows(tape) gives it.

Whole episodes of several turns, an agent and its sub-agent, sampled through rollout from the embedded engine while
policies are published into the middle of completions; recomputed by one plain forward per version and row.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch

from tapereel.agents import LLM, Agent, EmbeddedEngine, Limits, delegate, rollout
from tapereel.envs import Environment, Outcome
from tapereel.finetune import Row, rows
from tapereel.tapes import Answer, Reasoning, Sampling, Tape, Text

from ...agents.embedded_lab import until
from .lab import RENDERER, model

EPISODES = 6
PUBLISHES = 6


class Talk(Environment[Answer]):
    """Three turns of observations of different lengths."""

    async def reset(self, task: int) -> Text:
        self.turn = 0
        return Text(text="abcd" * (1 + task % 3))

    async def step(self, action: Answer) -> Outcome:
        self.turn += 1
        return Outcome(Text(text="+-" * self.turn), reward=0.0, terminated=self.turn == 3)


class Helper(Agent):
    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        yield Reasoning(text=(await llm(tape, system="b", max_tokens=20)).text[:10])


class Asker(Agent):
    """Asks a sub-agent, then in a second conversation, then answers: three rows' worth of prefixes in an episode."""

    def __init__(self) -> None:
        self.helper = Helper()

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        async for step in delegate("helper", self.helper, tape, llm):
            yield step
        await llm(tape.now(), system="d", conversation="aside", max_tokens=12)
        yield Answer(text=(await llm(tape.now(), system="c")).text[:10])


def policies(n: int) -> dict[str, Any]:
    """Models with weights so wide that they disagree."""
    made = {}
    for k in range(n):
        made[f"v:{k}"] = policy = model(seed=k, context=1024)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.6 if parameter.ndim > 1 else 1.0)
    return made


def sampled(mode: Any, temperature: float, *, ends: bool) -> tuple[dict[str, Any], list[Tape]]:
    """Episodes through which every policy is published in turn. Without `ends` no answer ends but by its length."""
    models = policies(PUBLISHES + 1)
    engine = EmbeddedEngine(models["v:0"], RENDERER, version="v:0", slots=4, end_ids=None if ends else ())

    async def main() -> list[Tape]:
        jobs = [
            asyncio.ensure_future(
                rollout(
                    Asker(),
                    Talk,
                    task,
                    engine=engine,
                    seed=task,
                    limits=Limits(agent_seconds=None, system_seconds=None),
                    sampling=Sampling(temperature=temperature, max_tokens=66),
                )
            )
            for task in range(EPISODES)
        ]
        for k in range(1, PUBLISHES + 1):
            await until(lambda k=k: engine.stats.steps >= 17 * k + 3)
            await engine.sync_weights(models[f"v:{k}"].state_dict(), f"v:{k}", mode)
        return await asyncio.gather(*jobs)

    return models, asyncio.run(main())


@torch.no_grad()
def recomputed(policy: Any, row: Row) -> np.ndarray:
    """(n,) log-probs of the row's own tokens by one plain forward over the whole row."""
    logits = policy(input_ids=torch.from_numpy(row.input_ids.astype(np.int64))[None], use_cache=False).logits[0]
    at = torch.from_numpy(row.own.astype(np.int64))
    scaled = logits[at - 1] / torch.from_numpy(row.temperature)[:, None]
    token = torch.from_numpy(row.input_ids[row.own].astype(np.int64))[:, None]
    return scaled.log_softmax(-1).gather(1, token)[:, 0].numpy()


def errors(models: dict[str, Any], tapes: list[Tape]) -> dict[str, float]:
    """version -> the largest error of its tokens' recorded log-probs, over all rows."""
    worst: dict[str, float] = {}
    for tape in tapes:
        for row in rows(tape):
            for index, version in enumerate(row.versions):
                mine = row.version == index
                error = float(np.abs(recomputed(models[version], row) - row.old)[mine].max())
                worst[version] = max(worst.get(version, 0.0), error)
    return worst


@pytest.mark.ledger("F19", "P8", "T24", "X7")
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "cut"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_every_span_on_a_tape_is_exact_for_its_version(temperature: float, ends: bool) -> None:
    models, tapes = sampled("reprefill", temperature, ends=ends)
    worst = errors(models, tapes)
    assert set(worst) == set(models)
    assert max(worst.values()) < 1e-4, worst
    for tape in tapes:
        assert tape.status == "finished"
        for call in tape.calls:
            assert call.finish == ("length" if not ends else call.finish)
            assert [b - a for _, a, b in call.spans] == [b - a for _, a, b in call.spans if b > a]
    if not ends:
        longest = max((call for tape in tapes for call in tape.calls), key=lambda call: len(call.spans))
        assert len(longest.completion) >= 64
        assert len(longest.spans) >= 4, "at least three swaps inside one completion"
        long_rows = [row for tape in tapes for row in rows(tape) if longest.call in row.calls]
        assert apart(models, long_rows) > 0.1


def apart(models: dict[str, Any], found: list[Row]) -> float:
    """The least mean distance, in nats, of two policies' log-probs of the own tokens of these rows."""
    by_model = [np.concatenate([recomputed(policy, row) for row in found]) for policy in models.values()]
    return min(float(np.abs(a - b).mean()) for i, a in enumerate(by_model) for b in by_model[:i])


def test_the_same_test_fails_when_the_kv_of_older_weights_is_kept() -> None:
    models, tapes = sampled("stale_kv", 1.0, ends=False)
    worst = errors(models, tapes)
    assert worst.pop("v:0") < 1e-4
    assert min(worst.values()) > 1e-2, worst


def test_tokens_and_rows_cover_one_another() -> None:
    _, tapes = sampled("reprefill", 1.0, ends=True)
    for tape in tapes:
        made = rows(tape)
        own = sorted((row.calls[c], int(o)) for row in made for c, o in zip(row.call, row.offset, strict=True))
        assert own == sorted((call.call, k) for call in tape.calls for k in range(len(call.completion)))
        stamped = {
            (row.calls[c], int(o)): row.versions[v]
            for row in made
            for c, o, v in zip(row.call, row.offset, row.version, strict=True)
        }
        for call in tape.calls:
            for version, start, end in call.spans:
                assert {stamped[call.call, k] for k in range(start, end)} == {version}
