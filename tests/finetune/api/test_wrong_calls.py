"""Wrong arguments of the public names: every error names the argument, and nothing raw comes from inside."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

import tapereel as tr
from tapereel.agents import check_engine
from tapereel.tapes import TapereelError, Video

from .wrong_calls import Echo, Unprintable, targets, wrong_calls

WITHOUT_ARGUMENTS = {"Action", "Agent", "Environment", "Observation", "ToolEnvironment"}
"""Base classes of the user's own: their constructors take what the user declares."""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a run without `out` is made here


def judged(n: int, seed: int, home: Path) -> Counter[str]:
    """How many calls were `named`, `returned` or failed; the failures by their call."""
    found = Counter[str]()
    for one in wrong_calls(n, seed, home):
        wrong = "raw" if one.raw else "unnamed" if not one.named else ""
        kind = "returned" if one.error is None else "named"
        found[f"{wrong} {one.call}({one.argument}={one.value}): {one.error!r:.200}" if wrong else kind] += 1
    return found


def test_every_public_name_and_every_method_of_a_run_is_called(tmp_path: Path) -> None:
    called = {target.name for target in targets(tmp_path)}
    assert {f"tr.{name}" for name in tr.__all__ if callable(getattr(tr, name))} - called == {
        f"tr.{name}" for name in WITHOUT_ARGUMENTS
    }
    public = {name: one for name, one in vars(tr.Run).items() if inspect.isfunction(one) and not name.startswith("_")}
    methods = {name for name, one in public.items() if len(inspect.signature(one).parameters) > 1}
    assert {f"run.{name}" for name in methods} <= called


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_argument_is_named(tmp_path: Path) -> None:
    found = judged(300, 3, tmp_path)
    assert set(found) == {"named", "returned"}
    assert found["named"] > found["returned"]


@pytest.mark.attack
@pytest.mark.filterwarnings("ignore")
def test_two_thousand_wrong_arguments_are_named(tmp_path: Path) -> None:
    assert set(judged(2000, 0, tmp_path)) == {"named", "returned"}


def _nested() -> list[object]:
    made: list[object] = []
    for _ in range(5000):
        made = [made]
    return made


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda run: tr.Tape.of(3), "bodies"),
        (lambda run: tr.Tape.of(run.tapes()[0].bodies, layers=[3]), "layers"),
        (lambda run: tr.Tape("log"), "log"),
        (lambda run: Video(frames=range(200_000), fps=1, indices=()), "frames"),
        (lambda run: Video(frames=(), fps=1, indices=range(2_000_000)), "indices"),
        (lambda run: Video.of(None, fps=1.0), "frames"),
        (lambda run: Video.of([], fps=1.0, indices=5), "indices"),
        (lambda run: Video.of([], fps=1.0, indices=range(2_000_000)), "no frames"),
        (lambda run: tr.Task(private=_nested()), "Task"),
        (lambda run: asyncio.run(tr.rollout(tr.ChatAgent(), Echo, "\ud800")), "item 0"),
        (lambda run: check_engine(tr.ScriptedEngine(["a"]), timeout=float("nan")), "timeout"),
        (lambda run: check_engine(tr.ScriptedEngine(["a"]), max_tokens=0), "max_tokens"),
        (lambda run: tr.check_env(Echo, [1], lambda seen, rng: "a", episodes=-1), "episodes=-1"),
        (lambda run: tr.check_env(Unprintable(), [1], lambda seen, rng: "a"), "Unprintable"),
        (lambda run: tr.Outcome(reward=Unprintable()), "reward"),
        (lambda run: tr.Outcome(metrics="x"), "metrics"),
        (lambda run: tr.Outcome(3), "observation"),
        (lambda run: tr.Taskset([1, 2]).split("a", "b"), "fractions"),
        (lambda run: tr.Taskset.load("a\0b"), "path"),
        (lambda run: tr.ChatAgent(misreads=-1), "misreads"),
        (lambda run: tr.save_tiny_model("tiny", size="huge"), "size"),
        (lambda run: tr.Store.open(run.path, durability="never"), "durability"),
        (lambda run: run.verify(pins=iter([5])), "pin '5'"),
        (lambda run: run.scores(k=iter(["a"])), "list_iterator"),
        (lambda run: tr.evaluate(tr.ChatAgent(), Echo, str(run.path), ["a"]), "--repo-type dataset"),
        (lambda run: run.branch(run.tapes()[0], 0, model=[]), "[]"),
        (lambda run: run.branch(run.tapes()[0], 0, n=10**30), str(10**30)),
    ],
)
def test_content_that_no_call_can_use_is_named(tmp_path: Path, call: Callable[[tr.Run], object], named: str) -> None:
    run = tr.run(tr.ChatAgent(), Echo, ["a"], ["a"], out=tmp_path / "run")
    with pytest.raises((TapereelError, ValidationError)) as caught:
        call(run)
    assert named in str(caught.value)
    if isinstance(caught.value, ValidationError):
        assert caught.value.error_count() == 1, "reading ends at the first wrong item"
