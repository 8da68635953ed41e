"""Learning-rate schedules count updates, whatever an update is made of: rates and steps of real runs against a plain
loop, and runs recorded when schedules counted optimiser steps."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import tapereel as tr
from tapereel.finetune.inspect import reproduce
from tapereel.finetune.loop.history import PREFIXES, SCHEDULES, VALUES
from tapereel.finetune.trainer import checkpoints
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store

from .rewrite import rewrite

LR = 1e-2


class EverySecond(tr.Environment):
    """Every second episode earns, whatever is said, so that each group has a gradient."""

    begun = 0

    async def reset(self, task: str) -> str:
        EverySecond.begun += 1
        self.earned = float(EverySecond.begun % 2)
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        return tr.Outcome(reward=self.earned, terminated=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tr.save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", alphabet="abcd", size="micro", seed=3)


class Even(tr.Environment):
    """All answers earn the same."""

    async def reset(self, task: str) -> str:
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        return tr.Outcome(reward=1.0, terminated=True)


def trained(path: Path, model: Path, recipe: str, updates: int, *, env: Any = EverySecond, **loop: Any) -> Path:
    settings: dict[str, Any] = {
        "loop.updates": updates,
        "loop.groups": 2,
        "loop.group_size": 2,
        "loop.max_lag": 0,
        "loop.sampling.max_tokens": 2,
        "loop.optimiser.lr": LR,
        "evaluation.fraction": 0,
        **{f"loop.{name.replace('__', '.')}": value for name, value in loop.items()},
    }
    tr.train(tr.ChatAgent(), env, ["a", "b"], model, recipe=recipe, out=path, settings=settings)
    return path


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def by_hand(schedule: dict[str, Any], k: int) -> float:
    """The factor in update k, from the words of the settings' page."""
    warmup, total, floor = schedule.get("warmup", 0), schedule.get("total"), schedule.get("floor", 0.0)
    if k < warmup:
        return (k + 1) / warmup
    if schedule["kind"] == "constant":
        return 1.0
    done = min(1.0, (k - warmup) / (total - warmup))
    return (
        1 - (1 - floor) * done
        if schedule["kind"] == "linear"
        else floor + (1 - floor) * (math.cos(math.pi * done) + 1) / 2
    )


def drawn(rng: random.Random, updates: int) -> dict[str, Any]:
    kind, warmup = rng.choice(["constant", "linear", "cosine"]), rng.randint(0, 2)
    total = {} if kind == "constant" else {"total": max(updates, warmup + 1) + rng.randint(0, 2)}
    return {"kind": kind, "warmup": warmup, "floor": rng.choice([0.0, 0.25]), **total}


@pytest.mark.ledger("F80")
@pytest.mark.parametrize("seed", range(30))
def test_rates_and_steps_are_those_of_a_plain_loop(seed: int, model: Path, tmp_path: Path) -> None:
    rng = random.Random(seed)
    updates, epochs, minibatches = rng.randint(2, 4), rng.randint(1, 2), rng.randint(1, 2)
    own, more = drawn(rng, updates), dict[str, Any]()
    values = seed % 2 == 1
    theirs, passes, first = drawn(rng, updates), rng.randint(1, 3), rng.randint(0, 2)
    if values:
        more = {"critic__optimiser__schedule": theirs, "critic__passes": passes, "critic__first": first}
    else:
        first, more = 0, {"changes": {"regulariser": [{"kind": "entropy", "coefficient": 0.05}]}}
    run = trained(
        tmp_path / "run",
        model,
        "ppo" if values else "grpo",
        updates,
        epochs=epochs,
        minibatches=minibatches,
        optimiser__schedule=own,
        checkpoint_every=100,
        **more,
    )
    rates, critic_rates, skipped, steps = [], [], [], 0
    for k in range(updates):
        for _ in range(epochs * minibatches):
            steps += k >= first
        rates.append(LR * by_hand(own, k - first) if k >= first else None)
        critic_rates.append(1e-3 * by_hand(theirs, k) if values else None)
        skipped.append(None if k >= first else "critic first")
    lines = lines_of(run)
    assert [line["lr"] for line in lines] == pytest.approx(rates)
    assert [line.get("value/lr") for line in lines] == pytest.approx(critic_rates)
    assert [line["skipped"] for line in lines] == skipped
    state: Any = checkpoints(run / "checkpoints")[-1].trainer_state()
    assert {int(s["step"]) for s in state["optimizer"]["state"].values()} == ({steps} if steps else set())
    assert state["updates"] == max(updates - first, 0)
    if values:
        assert (state["critic"]["updates"], state["critic"]["steps"]) == (
            updates,
            updates * epochs * minibatches * passes,
        )
    with Store.open(run) as store:
        weights = [stored.record.digest for stored in store.run_records("publish")]
    moved = [before != after for before, after in zip(weights[-updates - 1 :], weights[-updates:], strict=False)]
    assert moved == [rate is not None and rate > 0 for rate in rates], "each update with a rate trains the policy"


RULES: dict[str, tuple[str, dict[str, Any], str]] = {
    "several steps on a schedule": ("grpo", {"epochs": 2, "optimiser__schedule": {"warmup": 3}}, "unverifiable"),
    "several steps at one rate": ("grpo", {"epochs": 2}, "diverged"),
    "one step on a schedule": ("grpo", {"optimiser__schedule": {"warmup": 3}}, "diverged"),
    "passes on a schedule": ("ppo", {"critic__optimiser__schedule": {"warmup": 3}}, "unverifiable"),
    "the critic first": ("ppo", {"critic__first": 1}, "unverifiable"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_run_whose_schedule_counted_steps_is_undecided_and_no_other(name: str, model: Path, tmp_path: Path) -> None:
    recipe, settings, outcome = RULES[name]

    def earlier(body: dict[str, Any]) -> dict[str, Any]:
        if body["t"] == "use":
            body["info"].get("on", {}).pop(SCHEDULES, None)
            if body["update"] == 1:
                body["info"]["lr"] = 0.5
        return body

    run = trained(tmp_path / "run", model, recipe, 2, **settings)
    assert reproduce(run).outcome == "verified"
    copy = shutil.copytree(run, tmp_path / "earlier" / "run")
    rewrite(copy, earlier)
    found = reproduce(copy)
    assert (found.outcome, found.difference is None) == (outcome, outcome == "unverifiable"), str(found)
    assert (SCHEDULES in str(found)) == (outcome == "unverifiable")


@pytest.mark.parametrize(("clip", "outcome"), [(0.2, "unverifiable"), (None, "diverged")])
def test_a_run_whose_new_critic_was_clipped_around_0_is_undecided(
    clip: float | None, outcome: str, model: Path, tmp_path: Path
) -> None:
    def earlier(body: dict[str, Any]) -> dict[str, Any]:
        if body["t"] == "use":
            body["info"].get("on", {}).pop(VALUES, None)
            body["info"]["grad_norm"] += body["update"]  # the critic has changed the second update
        return body

    run = trained(tmp_path / "run", model, "ppo", 2, critic__clip=clip)
    rewrite(run, earlier)
    assert reproduce(run).outcome == outcome


@pytest.mark.parametrize(("checkpointing", "outcome"), [(False, "unverifiable"), (True, "diverged")])
def test_a_run_that_shared_only_long_prefixes_is_undecided_if_prefixes_are_shared(
    checkpointing: bool, outcome: str, model: Path, tmp_path: Path
) -> None:
    def earlier(body: dict[str, Any]) -> dict[str, Any]:
        if body["t"] == "use":
            body["info"].get("on", {}).pop(PREFIXES, None)
            body["info"]["grad_norm"] += 1e-7
        return body

    run = trained(tmp_path / "run", model, "grpo", 1, optimiser__gradient_checkpointing=checkpointing)
    rewrite(run, earlier)
    assert reproduce(run).outcome == outcome


def test_a_schedule_that_ends_before_the_loop_is_refused_at_the_start(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"loop\.optimiser\.schedule\b.*\b2\b.*loop\.updates"):
        trained(tmp_path / "run", model, "grpo", 4, optimiser__schedule={"kind": "linear", "total": 2})
    assert not (tmp_path / "run").exists()
