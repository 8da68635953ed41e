"""Continuations of one tape at a turn, compared with each other: the value of a turn by Monte Carlo, in closed form.

The oracle says each letter of the alphabet equally often after every prompt, in turn, so that enough continuations are
all that can happen and a mean over them is the value itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from array import array
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tapereel.agents import Capability, Completion, EpisodeSpec, Request, rollout
from tapereel.finetune.loop.history import Plan
from tapereel.finetune.loop.loop_config import ForkConfig
from tapereel.tapes import Tape
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store

from .lab import (
    LETTERS,
    RENDERER,
    WORDS,
    Flaky,
    Letters,
    Speaker,
    assert_books_close,
    engine_of,
    history_in,
    loop_in,
    run,
    settings_of,
    tasks,
)
from .test_history import abandoned

MEAN = {"baseline": {"by": "fork", "kind": "mean"}}


class Oracle:
    """Says the letters in turn after each prompt; each is drawn with probability 1/4, then the answer ends for sure."""

    name, renderer, context = "oracle", RENDERER, None
    can: frozenset[Capability] = frozenset({"stats", "weights"})

    def __init__(self) -> None:
        self.asked: Counter[bytes] = Counter()
        self.version = "run:0"
        self.stats = SimpleNamespace(busy_seconds=0.0)
        self.changing = False

    async def complete(self, request: Request) -> Completion:
        assert request.prompt is not None
        key = request.prompt.tobytes()
        letter = LETTERS[self.asked[key] % len(LETTERS)]
        self.asked[key] += 1
        ids = array("i", [WORDS.convert_tokens_to_ids(letter), RENDERER.end_ids[0]])
        return Completion(
            text=letter, ids=ids, logprobs=array("f", [math.log(1 / 4), 0.0]), spans=((self.version, 0, 2),)
        )

    async def sync_weights(self, state: Any, version: str, mode: Any = "reprefill") -> None:
        self.version = version

    def forget(self, cache_key: str) -> None:
        pass

    async def close(self) -> None:
        pass


def value(left: int, turns: int) -> float:
    """Of having so many turns left of an episode that pays 1 / turns for each right letter."""
    return left / turns / len(LETTERS)


@pytest.mark.ledger("F32")
def test_the_advantage_of_what_follows_a_turn_is_its_return_less_the_value_there(tmp_path: Path) -> None:
    turns, path = 3, tmp_path / "run"
    config = settings_of(
        updates=1,
        groups=4,
        group_size=2,
        max_lag=0,
        sampler_tolerance=1e6,
        changes=MEAN,
        forks=ForkConfig(continuations=16),
    )
    with Store.create(path) as store:
        # No two tasks begin alike, so that after the cut nobody else asks what a continuation asks.
        loop = loop_in(
            history_in(store, path, config),
            config,
            engine=Oracle(),
            tasks=lambda k: ("abc", "bcd", "cda", "dab")[k % 4],
        )
        asyncio.run(loop.run())
    store = Store.open(path)
    history = history_in(store, tmp_path / "fresh", config)
    plan = Plan.of(next(iter(store.run_records("use"))).record)
    stats, _ = history.update(plan, history.from_store)
    stream = stats.stream
    right: dict[tuple[int, bool], list[float]] = {}
    for tape in map(store.tape, plan.tapes):
        parent = tape.begin.parent
        if parent is None:
            continue
        assert len(tape.calls) == turns - parent.turn, "the prefix is the parent's: context here"
        own = stats.advantage[stream.episode == stream.episodes.tape.index(tape.id)]
        assert len(own) == 2 * len(tape.calls)
        assert tape.reward is not None
        want = tape.reward - value(turns - parent.turn, turns)
        assert own.tolist() == pytest.approx([want] * len(own), abs=1e-12)
        asked = str(tape.begin.task.given)[parent.turn]
        right.setdefault((parent.turn, tape.actions[parent.turn].text == asked), []).append(want)  # type: ignore[attr-defined]
    assert {turn for turn, _ in right} == {1, 2}, "turns are drawn; both came"
    # Averaged over what may follow, the advantage of the turn's own letter: its value less that of the turn.
    for (_, hit), advantages in right.items():
        assert np.mean(advantages) == pytest.approx((3 / 4 if hit else -1 / 4) / turns)
    store.close()
    assert_books_close(path)


def test_attempts_from_the_beginning_are_compared_with_each_other(tmp_path: Path) -> None:
    path, config = tmp_path / "run", settings_of(updates=1, groups=2, changes=MEAN, forks=ForkConfig())
    run(path, config, tasks=tasks(2))
    store = Store.open(path)
    plan = Plan.of(next(iter(store.run_records("use"))).record)
    history = history_in(store, tmp_path / "fresh", config)
    stats, _ = history.update(plan, history.from_store)
    points: dict[str, list[str]] = {}
    for tape in map(store.tape, plan.tapes):
        parent = tape.begin.parent
        key = f"{parent.tape}/{parent.turn}" if parent else tape.begin.group or ""
        points.setdefault(key, []).append(tape.id)
    assert sorted(len(members) for members in points.values()) == [4, 4, 4, 4]
    for members in points.values():
        rewards = {name: store.tape(name).reward or 0.0 for name in members}
        for k, name in enumerate(stats.stream.episodes.tape):
            if name in rewards:
                own = stats.advantage[stats.stream.episode == k]
                mean = sum(rewards.values()) / len(rewards)
                assert own.tolist() == pytest.approx([rewards[name] - mean] * len(own), abs=1e-12)
    store.close()


def test_continuations_are_of_the_policy_that_is_trained_and_their_tokens_are_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    config = settings_of(
        updates=4,
        groups=2,
        group_size=2,
        max_lag=0,
        changes=MEAN,
        forks=ForkConfig(attempts=2, turns=2, continuations=3),
    )
    loop, reports = run(path, config, tasks=tasks(3))
    assert max(report.metrics["mismatch"] for report in reports) <= 1e-4, "prefixes are context to the token"
    assert {report.metrics["episodes"] for report in reports} == {2 * (2 + 2 * 2 * 3)}
    store = Store.open(path)
    for report, stored in zip(reports, store.run_records("use"), strict=True):
        whole = [store.tape(name) for name in stored.record.info["tapes"]]
        rewards = [tape.reward or 0.0 for tape in whole if tape.begin.parent is None]
        assert report.reward == pytest.approx(sum(rewards) / len(rewards)), "of whole episodes only"
    fresh = history_in(store, tmp_path / "fresh", config)
    assert fresh.restore() == 4
    store.close()
    assert_books_close(path)
    assert loop.rollouts.pacer.max_concurrent == 64 // 14


def test_a_world_that_can_t_be_restored_costs_the_continuations_only(tmp_path: Path) -> None:
    class Forgetful(Letters):
        async def restore(self, task: Any, tape: Tape) -> None:
            raise OSError("no way back")

    path, config = tmp_path / "run", settings_of(updates=2, groups=2, changes=MEAN, forks=ForkConfig())
    _, reports = run(path, config, env=Forgetful)
    assert sum(report.metrics.get("lost/environment", 0) for report in reports) >= 2 * 2 * 4 * 2
    assert {report.metrics["episodes"] for report in reports} == {8}
    assert_books_close(path)


def test_a_run_with_forks_goes_on_after_any_death(tmp_path: Path) -> None:
    path = tmp_path / "run"
    config = settings_of(updates=3, groups=2, group_size=2, changes=MEAN, forks=ForkConfig(continuations=2))
    Flaky.luck, rng = random.Random(1), random.Random(2)
    done, attempt = False, 0
    for attempt in range(60):
        store = Store.open(path, write=True) if attempt else Store.create(path)
        history = history_in(store, path, config)
        history.restore()
        done = abandoned(loop_in(history, config, env=Flaky, tasks=tasks(2)), rng.randint(2, 200))
        store.close() if done else store.abandon()
        if done:
            break
    assert done
    assert attempt > 2
    assert_books_close(path)
    store = Store.open(path)
    tries: Counter[Any] = Counter()
    for tape in store.tapes(split="train"):
        parent = tape.begin.parent
        assert (parent is not None) == (tape.begin.attempt >= 2)
        tries[tape.begin.group, tape.begin.attempt] += tape.trains
    assert max(tries.values()) == 1, "no attempt and no continuation twice"
    fresh = history_in(store, tmp_path / "fresh", config)
    assert fresh.restore() == 3
    store.close()


def test_what_is_flat_where_forks_are_compared_is_each_turn_s_continuations(tmp_path: Path) -> None:
    class Sure(Letters):
        """Pays the same for every turn, so that what is left to earn depends on the turn alone."""

        async def step(self, action: Any) -> Any:
            return dataclasses.replace(await super().step(action), reward=0.25)

    config = settings_of(
        updates=1, groups=1, max_lag=0, extra_groups=1, forks=ForkConfig(), changes={**MEAN, "select": {"flat": "drop"}}
    )
    _, reports = run(tmp_path / "run", config, env=Sure, tasks=tasks(2))
    assert (reports[0].metrics["groups"], reports[0].metrics["groups_aside"]) == (0, 2)
    store = Store.open(tmp_path / "run")
    tapes = list(store.tapes(split="train", closed=True))
    assert {tape.reward for tape in tapes} == {0.5, 0.25}, "a whole attempt earns more than its last turn"
    history = history_in(store, tmp_path / "fresh", config)
    plan = Plan(phase="rl", tapes=tuple(tape.id for tape in tapes if tape.begin.group == tapes[0].begin.group))
    stats, uses = history.update(plan, history.from_store)
    assert stats.skipped == "nothing to train on"
    assert stats.sums["episodes"] == 0
    assert {entry[0] for entry in uses[0].info["filtered"]} == set(plan.tapes)
    store.close()


def test_forks_and_a_recipe_that_compares_otherwise_are_refused(tmp_path: Path) -> None:
    config = settings_of(forks=ForkConfig())
    with Store.create(tmp_path / "run") as store, pytest.raises(UsageError, match=r"loop\.forks.*\{by: fork\}"):
        loop_in(history_in(store, tmp_path, config), config)


def test_a_fork_is_compared_by_hand_too(tmp_path: Path) -> None:
    """The same without a loop: roll out, cut, go on, and let the recipe compare."""

    async def main() -> list[Tape]:
        with Store.create(tmp_path / "run") as store:
            history = history_in(store, tmp_path, settings_of())
            options: Any = {"engine": engine_of(history), "journal": store.writer}
            root = await rollout(Speaker(), Letters(), EpisodeSpec.of("abc", seed=0, group="g"), **options)
            one = EpisodeSpec.of("abc", group="g", fork=root.at_turn(1))
            return [
                root,
                *[await rollout(Speaker(), Letters(), EpisodeSpec.of(one, seed=k), **options) for k in range(1, 4)],
            ]

    tapes = asyncio.run(main())
    store = Store.open(tmp_path / "run")
    history = history_in(store, tmp_path, settings_of(), changes=MEAN)
    plan = Plan(phase="rl", tapes=tuple(tape.id for tape in tapes))
    stats, _ = history.update(plan, history.from_store)
    assert stats.sums.mean("group/size") == 2.0, "one alone at the beginning, three at turn 1"
    assert stats.sums["group/single"] == 1
    store.close()
