"""The estimators of `examples/estimators.py`: they agree with plain loops, and their runs are as good as any other."""

from __future__ import annotations

import dataclasses
import json
import secrets
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tapereel as tr
from tapereel.cli import main
from tapereel.finetune import Recipe
from tapereel.finetune.data.rows import Observations
from tapereel.finetune.objective import Context, read
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import get_recipe
from tapereel.tapes.store import Store, read_metrics

from ..finetune.build import episode, exact, row
from ..oracles.estimators import Attempt, Turn, gigpo, opo

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "estimators.py"
# Quarters add up exactly, so two sums of equal rewards are equal, and a flat set is flat in both readings.
REWARDS = st.sampled_from([-0.5, 0.0, 0.25, 1.0])
TURNS = st.builds(Turn, seen=st.sampled_from(["x", "y", "z", None]), tokens=st.integers(1, 3), reward=REWARDS)
ATTEMPTS = st.lists(
    st.builds(
        Attempt, group=st.sampled_from("gh"), turns=st.lists(TURNS, min_size=1, max_size=4), scored=st.booleans()
    ),
    min_size=1,
    max_size=7,
)


@pytest.fixture(scope="module", autouse=True)
def own_modules() -> Iterator[None]:
    """The example is imported as a user's module, and its name is free again for other tests."""
    yield
    sys.modules.pop(EXAMPLE.stem, None)


def recipe_of(name: str) -> Recipe:
    return get_recipe(f"{EXAMPLE}:{name}")


class Seen(Observations):
    """The observations of no tape, by their names."""

    def __init__(self, names: Iterable[str | None]) -> None:
        vars(self)["digests"] = tuple(names)


def advantages(recipe: Recipe, attempts: list[Attempt]) -> list[float]:
    """One number for each own token."""
    rows, episodes = [], []
    for i, one in enumerate(attempts):
        made = row(f"t{i}", one.group, turns=[turn.tokens for turn in one.turns])
        rows.append(dataclasses.replace(made, observations=Seen(turn.seen for turn in one.turns)))
        earned = [turn.reward for turn in one.turns] if one.scored else None
        episodes.append(episode(f"t{i}", one.group, reward=one.reward if one.scored else None, turn_rewards=earned))
    return objective.prepare(recipe, exact(rows, episodes), Context()).advantage.tolist()


@settings(max_examples=150, deadline=None)
@given(ATTEMPTS)
def test_opo_is_the_loop(attempts: list[Attempt]):
    by_hand = opo(attempts)
    want = [by_hand[i] for i, one in enumerate(attempts) for turn in one.turns for _ in range(turn.tokens)]
    assert advantages(recipe_of("opo"), attempts) == pytest.approx(want, rel=1e-9, abs=1e-12)


@settings(max_examples=150, deadline=None)
@given(ATTEMPTS, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0]))
def test_gigpo_is_the_loop(attempts: list[Attempt], weight: float, gamma: float):
    recipe = recipe_of("gigpo").but(baseline={"weight": weight, "gamma": gamma, "eps": 1e-4})
    by_hand = gigpo(attempts, weight, gamma, 1e-4)
    want = [
        a
        for one, row in zip(attempts, by_hand, strict=True)
        for turn, a in zip(one.turns, row, strict=True)
        for _ in range(turn.tokens)
    ]
    assert advantages(recipe, attempts) == pytest.approx(want, rel=1e-9, abs=1e-9)


def test_the_closed_forms():
    long, short = Attempt("g", [Turn("x", 3, 1.0)]), Attempt("g", [Turn("x", 1, 0.0)])
    assert advantages(recipe_of("opo"), [long, short]) == [0.25, 0.25, 0.25, -0.75]
    # Both attempts earn 1, so only the step groups tell them apart: at x, the return 0.5 against 1.
    late, early = Attempt("g", [Turn("x", 1, 0.0), Turn("y", 1, 1.0)]), Attempt("g", [Turn("x", 1, 1.0)])
    found = advantages(recipe_of("gigpo").but(baseline={"gamma": 0.5, "eps": 0.0}), [late, early])
    assert found == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5])


class Walk(tr.Environment):
    """Four turns to reach d: "b" is a step forward and earns, anything else is a step back."""

    async def reset(self, task: str) -> str:
        self.at, self.left = 0, 4
        return "a"

    async def step(self, action: tr.Action) -> tr.Outcome:
        forward = str(action).startswith("b")
        self.at = max(0, self.at + (1 if forward else -1))
        self.left -= 1
        over = self.at == 3 or not self.left
        return tr.Outcome(
            None if over else "abcd"[self.at], reward=float(self.at == 3) + 0.25 * forward, terminated=over
        )


def trained(folder: Path, name: str, updates: int, *, resume: bool = False) -> tr.Run:
    torch.set_num_threads(1)
    model = folder / "model" if resume else tr.save_tiny_model(folder / "model", alphabet="abcd", size="micro")
    own = {
        "loop.groups": 2,
        "loop.group_size": 6,
        "loop.max_lag": 0,
        "loop.sampling.max_tokens": 1,
        "loop.optimiser.lr": 1e-2,
        "loop.checkpoint_every": 2,
        "evaluation.fraction": 0,
    }
    return tr.train(
        tr.ChatAgent(),
        Walk,
        ["x", "y"],
        model,
        updates=updates,
        recipe=f"{EXAMPLE}:{name}",
        out=folder / "run",
        settings=own,
        resume=resume,
    )


def published(run: Path) -> dict[str, str]:
    """Version -> digest of the weights."""
    with Store.open(run) as store:
        return {stored.record.version: stored.record.digest for stored in store.run_records("publish")}


def attempt_of(tape: tr.Tape) -> Attempt:
    rewards = [0.0] * tape.turns
    for reward in tape.rewards:
        rewards[tape.entries[reward.step].turn if reward.step is not None else -1] += reward.value
    seen = [str(step) for step in tape.observations]
    tokens = [len(call.completion or ()) for call in tape.calls]
    return Attempt(tape.begin.group or "", [Turn(*one) for one in zip(seen, tokens, rewards, strict=True)])


@pytest.mark.parametrize("name", ["opo", "gigpo"])
def test_a_run_trains_resumes_reproduces_and_is_explained(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(secrets, "token_hex", lambda n: "00" * n)  # seeds follow from the lineage
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    run = trained(straight, name, 4)
    trained(stopped, name, 2)
    trained(stopped, name, 4, resume=True)
    assert published(straight / "run") == published(stopped / "run")
    assert len(set(published(straight / "run").values())) > 3, "the weights moved, also after the resumption"
    assert run.reproduce().outcome == "verified"
    recorded = json.loads((straight / "run" / "recipes.json").read_text())["rl"]
    assert recorded["baseline"]["kind"].startswith("estimators:")
    assert read(recorded) == recipe_of(name)
    if name == "gigpo":
        assert all("advantage/step" in line for line in read_metrics(straight / "run" / "metrics.jsonl"))
    with Store.open(straight / "run") as store:
        use = [stored.record for stored in store.run_records("use")][-1]
        attempts = [attempt_of(store.tape(tape)) for tape in use.info["tapes"]]
    capsys.readouterr()
    assert main(["explain", str(straight / "run"), *use.info["tapes"], "--json"]) == 0
    explained: list[Any] = json.loads(capsys.readouterr().out)["tapes"]
    by_turn = gigpo(attempts, 1.0, 0.95, 1e-6)
    by_episode = opo(attempts)
    for i, tape in enumerate(explained):
        found = [token["advantage"] for line in tape["rows"] for token in line["tokens"] if token["own"]]
        turns = by_turn[i] if name == "gigpo" else [by_episode[i]] * len(attempts[i].turns)
        want = [a for a, turn in zip(turns, attempts[i].turns, strict=True) for _ in range(turn.tokens)]
        assert found == pytest.approx(want, rel=1e-6, abs=1e-6)
    assert any(len({turn.seen for turn in one.turns}) > 1 for one in attempts)
