"""check_env: each way of breaking the contract is found, by its own check, in a sentence that names the remedy."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import threading
from traceback import FrameSummary
from typing import Any, ClassVar

import pytest

import tapereel as tr
from tapereel.envs import (
    BadTasks,
    Calculator,
    Environment,
    Finding,
    Outcome,
    Report,
    Stall,
    check_env,
)
from tapereel.envs.adapters import word_problems
from tapereel.envs.adapters.calculator import Problem, demonstrate, read_action
from tapereel.envs.checks.check_env import CHECKS
from tapereel.envs.checks.env_probe import Probe
from tapereel.tapes import Action, Observation, Tape
from tapereel.tapes.errors import UsageError


class Roll(Observation, kind="c_roll"):
    value: Any


class Press(Action, kind="c_press"):
    n: int


class Dice(Environment[Press]):
    """A sound one: rolls three times and sums up."""

    async def reset(self, task: int) -> Roll:
        await asyncio.sleep(0)
        self.sum = 0
        self.left = 3
        return Roll(value=task)

    async def step(self, action: Press) -> Outcome:
        await asyncio.sleep(0)
        self.left -= 1
        self.sum += self.rng.randrange(6)
        if self.left == 0:
            return Outcome(reward=self.sum / 15, terminated=True, metrics={"sum": self.sum})
        return Outcome(Roll(value=self.sum))


def test_random_numbers_in_the_constructor_are_refused_with_the_place_for_them() -> None:
    class Early(Dice):
        def __init__(self) -> None:
            self.sides = self.rng.randrange(6)

    with pytest.raises(UsageError, match="Early has no `rng` yet: it exists from `reset` on"):
        tr.run(tr.ChatAgent(), Early, [1], ["1"])
    assert not hasattr(Dice(), "rng")
    assert _check(Dice).ok


def press(seen: Observation, rng: random.Random) -> Press:
    return Press(n=rng.randrange(3))


def _check(factory: Any, **options: Any) -> Report:
    # On a machine with too much to do any thread may rest for a while; only the test of stalls asks for them.
    options.setdefault("stall", 60.0)
    return check_env(factory, options.pop("tasks", [1, 2, 3]), options.pop("actions", press), **options)


def test_a_sound_environment_passes_every_check():
    report = _check(Dice, reward_range=(0.0, 1.0))
    assert report.ok
    assert report.findings == ()
    assert report.checks == dict.fromkeys(CHECKS, "ok")
    assert (report.environment, report.episodes, report.turns) == ("Dice", 3, 9)
    assert report.rewards is not None
    assert 0 <= report.rewards[0] <= report.rewards[1] <= 1


def test_the_demo_environment_passes():
    class Demonstrator:
        """Keeps what it saw, which a policy of one episode at a time may."""

        def __call__(self, seen: Observation, rng: random.Random) -> Action:
            if isinstance(seen, Problem):
                self.question, self.results = seen.text, []
            else:
                self.results.append(str(seen))
            return read_action(demonstrate(self.question, self.results, rng))

    report = check_env(
        lambda: Calculator(scorer="basic_arithmetic"),
        word_problems(5),
        Demonstrator(),
        episodes=5,
        stall=60.0,
        reward_range=(0, 1),
    )
    assert report.findings == ()
    assert {k: v for k, v in report.checks.items() if v != "ok"} == {
        "cancellation": "skipped: no call waits, so none can be cancelled"
    }


class RaisesInStep(Dice):
    async def step(self, action: Press) -> Outcome:
        raise RuntimeError("the server is gone")


class RaisesInReset(Dice):
    async def reset(self, task: int) -> Roll:
        return [][task]


class ShadyScore(Dice):
    async def step(self, action: Press) -> Outcome:
        return Outcome(reward=math.nan)


class ChangedScore(Dice):
    async def step(self, action: Press) -> Outcome:
        outcome = Outcome(reward=0.5, terminated=True)
        object.__setattr__(outcome, "reward", 1e200)
        return outcome


class SyncStep(Dice):
    def step(self, action: Press) -> Outcome:
        return Outcome(reward=1.0, terminated=True)


class WrongReset(Dice):
    async def reset(self, task: int) -> Any:
        return 7


class WrongStep(Dice):
    async def step(self, action: Press) -> Any:
        return Roll(value=1), 1.0, True, {}


class Silent(Dice):
    async def step(self, action: Press) -> Outcome:
        outcome = await super().step(action)
        return Outcome(reward=outcome.reward, terminated=outcome.terminated)


class WrongFinish(Dice):
    async def finish(self, status: Any) -> Any:
        return 1.0


class WaitsForEver(Dice):
    async def step(self, action: Press) -> Outcome:
        await asyncio.Event().wait()
        return Outcome()


class OwnTimeout(Dice):
    async def step(self, action: Press) -> Outcome:
        raise TimeoutError("the tool took too long")


class CloseRaises(Dice):
    async def close(self) -> None:
        raise OSError("already closed")


class CloseNeedsReset(Dice):
    async def reset(self, task: int) -> Roll:
        self.sum, self.left = 0, 3
        return Roll(value=task)

    async def close(self) -> None:
        self.left = self.left + 1


class CloseHangs(Dice):
    async def close(self) -> None:
        await asyncio.Event().wait()


class HoldsASet(Dice):
    async def reset(self, task: int) -> Roll:
        self.sum, self.left = 0, 3
        return Roll(value={1, 2})


class HoldsAnObject(Dice):
    async def reset(self, task: int) -> Roll:
        self.sum, self.left = 0, 3
        return Roll(value=object())


class TooMuch(Dice):
    async def step(self, action: Press) -> Outcome:
        return Outcome(reward=7.0, terminated=True)


class GlobalRandom(Dice):
    async def step(self, action: Press) -> Outcome:
        return Outcome(Roll(value=random.random()), reward=1.0, terminated=True)


class RandomStart(Dice):
    async def reset(self, task: int) -> Roll:
        await super().reset(task)
        return Roll(value=random.random())


class RandomEnd(Dice):
    async def finish(self, status: Any) -> Outcome:
        return Outcome(metrics={"luck": random.random()})


class OnTheClass(Dice):
    """Never waits, so its instances meet only between their calls."""

    count: ClassVar[int] = 0

    async def reset(self, task: int) -> Roll:
        type(self).count = 0
        return Roll(value=task)

    async def step(self, action: Press) -> Outcome:
        type(self).count += 1
        return Outcome(Roll(value=self.count), reward=0.1, terminated=self.count == 3)


class ForgetsTheGenerator(Dice):
    async def restore(self, task: int, tape: Tape) -> None:
        await self.reset(task)
        self.left -= len(tape.actions)
        self.sum = tape.observations[-1].value


class RestoreRaises(Dice):
    async def restore(self, task: int, tape: Tape) -> None:
        raise KeyError("snapshot")


class SwallowsCancellation(Dice):
    async def step(self, action: Press) -> Outcome:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.left = 0
        return await super().step(action)


class MangledCancellation(Dice):
    async def reset(self, task: int) -> Roll:
        try:
            return await super().reset(task)
        except asyncio.CancelledError:
            raise RuntimeError("can't stop now") from None


BROKEN: dict[type[Dice], tuple[str, str, str | None]] = {
    RaisesInStep: ("raises", r"RaisesInStep\.step.*RuntimeError: the server is gone", "in step"),
    RaisesInReset: ("raises", r"RaisesInReset\.reset.*IndexError", "in reset"),
    ShadyScore: ("raises", r"'reward'.*\bnan\b", "in step"),
    ChangedScore: ("types", r"'reward'.*\b1e\+200\b", None),
    SyncStep: ("types", r"SyncStep\.step.*`async def step`", None),
    WrongReset: ("types", r"WrongReset\.reset.*\b7\b.*Observation.*\bstr\b", None),
    WrongStep: ("types", r"WrongStep\.step.*\(Roll\(value=1\), 1\.0, True, \{\}\).*Outcome", None),
    Silent: ("types", r"Silent\.step.*without an observation", None),
    WrongFinish: ("types", r"WrongFinish\.finish.*\b1\.0\b.*Outcome.*None", None),
    WaitsForEver: ("hangs", r"WaitsForEver\.step.*\b1 s\b", "in step"),
    OwnTimeout: ("raises", r"OwnTimeout\.step.*TimeoutError: the tool took too long", "in step"),
    CloseRaises: ("close", r"CloseRaises\.close.*OSError: already closed", "in close"),
    CloseNeedsReset: ("close", r"CloseNeedsReset\.close.*AttributeError", "in close"),
    CloseHangs: ("hangs", r"CloseHangs\.close.*\b1 s\b", "in close"),
    HoldsASet: ("records", r"Roll\(value=\{1, 2\}\).*Roll\(value=\[1, 2\]\)", None),
    HoldsAnObject: ("records", "'value'.*object", None),
    TooMuch: ("rewards", r"\b7\b.*\b0 to 1\b", None),
    GlobalRandom: ("determinism", r"\bturn 1\b.*Roll\(value=0\.", None),
    RandomStart: ("determinism", r"\breset\b.*Roll\(value=0\.", None),
    RandomEnd: ("determinism", r"\bfinish\b.*Outcome\(", None),
    OnTheClass: ("concurrency", "instances", None),
    ForgetsTheGenerator: ("restore", r"\b1 of 3\b", None),
    RestoreRaises: ("restore", r"RestoreRaises\.restore.*KeyError: 'snapshot'", "in restore"),
    SwallowsCancellation: ("cancellation", r"SwallowsCancellation\.step.*normally", None),
    MangledCancellation: ("cancellation", r"MangledCancellation\.reset.*RuntimeError", None),
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_each_fault_is_found_by_its_check_and_nothing_else_is_blamed(broken: type[Dice]):
    check, says, where = BROKEN[broken]
    report = _check(broken, timeout=1.0 if check == "hangs" else 10.0, reward_range=(0.0, 1.0))
    assert not report.ok
    assert {finding.check for finding in report.findings} == {check}
    assert any(re.search(says, finding.sentence) for finding in report.findings), str(report)
    assert report.checks[check] == "failed"
    frames = {finding.where for finding in report.findings}
    assert frames == {None} if where is None else all(f is not None and __file__ in f and where in f for f in frames)
    assert re.search(says, str(report))


def test_a_play_that_ends_badly_skips_what_can_no_longer_be_told():
    report = _check(RaisesInStep)
    assert report.episodes == 0
    assert report.rewards is None
    assert report.checks["determinism"] == report.checks["rewards"] == "skipped: no episode reached its end"
    assert _check(GlobalRandom).checks["restore"] == "skipped: episodes can't be compared while determinism fails"
    assert _check(WaitsForEver, timeout=1.0).checks["close"] == "skipped: a call never returned"


class Unscored(Dice):
    async def step(self, action: Press) -> Outcome:
        outcome = await super().step(action)
        return Outcome(outcome.observation, terminated=outcome.terminated)


class Empty(Dice):
    async def reset(self, task: int) -> Roll:
        await super().reset(task)
        return Blank(value="")


class Blank(Roll, kind="c_blank"):
    def __str__(self) -> str:
        return ""


@pytest.mark.parametrize(
    ("odd", "check", "says"),
    [
        (Unscored, "rewards", r"`finished`.*\b3\b"),
        (Empty, "records", r"str\(\).*Blank"),
    ],
)
def test_what_may_be_meant_is_a_warning(odd: type[Dice], check: str, says: str):
    report = _check(odd)
    assert report.ok
    assert {(f.check, f.severity) for f in report.findings} == {(check, "warning")}
    assert re.search(says, report.findings[0].sentence)
    assert report.checks[check] == "warned"


def test_the_policy_sees_the_newest_observation():
    seen: list[Any] = []

    def watch(observation: Observation, rng: random.Random) -> Press:
        seen.append(observation.value)
        return Press(n=0)

    class Counts(Dice):
        async def step(self, action: Press) -> Outcome:
            self.left -= 1
            return Outcome(Roll(value=self.left), reward=1.0, terminated=self.left == 0)

    _check(Counts, tasks=["start"], actions=watch)
    assert seen == ["start", 2, 1]


def test_an_episode_that_does_not_end_is_cut_and_scored_as_a_limit():
    asked: list[Any] = []

    class Endless(Dice):
        async def step(self, action: Press) -> Outcome:
            return Outcome(Roll(value=self.rng.random()))

        async def finish(self, status: Any) -> Outcome:
            asked.append(str(status))
            return Outcome(reward=0.25)

    report = _check(Endless, max_turns=5, tasks=[1])
    assert report.ok
    assert (report.turns, report.rewards) == (5, (0.25, 0.25))
    assert set(asked) == {"limit"}


def test_a_call_that_holds_the_loop_is_named(monkeypatch: pytest.MonkeyPatch):
    noticed = threading.Event()
    found = Probe.found

    def telling(self: Probe, check: str, sentence: str, where: str | None = None, **options: Any) -> None:
        found(self, check, sentence, where, **options)
        if check == "blocks" and "slow_tool" in (where or ""):
            noticed.set()

    monkeypatch.setattr(Probe, "found", telling)

    class Blocks(Dice):
        async def step(self, action: Press) -> Outcome:
            self.slow_tool()
            return await super().step(action)

        def slow_tool(self) -> None:
            noticed.wait(1.0)

    report = _check(Blocks, stall=0.02)
    assert {finding.check for finding in report.findings} == {"blocks"}
    (finding,) = [finding for finding in report.findings if "slow_tool" in (finding.where or "")]
    assert "Blocks.slow_tool" in finding.sentence
    assert "threading.py" in finding.sentence
    assert "`blocking = True`" in finding.sentence
    assert finding.where is not None
    assert finding.where.startswith(__file__)
    assert finding.where.endswith("in slow_tool")


def test_a_declared_blocking_environment_is_played_in_threads():
    threads: list[set[threading.Thread]] = []

    class Threaded(Dice):
        blocking = True

        def __init__(self) -> None:
            self.threads: set[threading.Thread] = set()
            threads.append(self.threads)

        async def step(self, action: Press) -> Outcome:
            self.threads.add(threading.current_thread())
            return await super().step(action)

    report = _check(Threaded)
    assert report.ok, str(report)
    assert report.checks["blocks"] == "skipped: the environment sets `blocking`, so it runs in a thread"
    assert report.checks["cancellation"] == "skipped: a call in a thread can't be cancelled"
    assert report.checks["concurrency"] == "ok"
    stepped = [one for one in threads if one]
    apart = stepped[: 3 + 3 + 3 + 1]  # first plays, again, beside each other, restored; the rest one after the other
    assert len(stepped) == len(apart) + 5
    assert all(len(one) == 1 for one in stepped)
    assert len(set.union(*apart)) == len(apart), "each instance has a thread of its own"
    assert threading.current_thread() not in set.union(*stepped)


@pytest.mark.parametrize("declared", [False, True])
def test_a_call_that_never_returns_does_not_hold_the_check(declared: bool):
    release = threading.Event()

    class Stuck(Dice):
        blocking = declared

        async def step(self, action: Press) -> Outcome:
            release.wait(60)
            return await super().step(action)

    try:
        report = _check(Stuck, timeout=0.5)
    finally:
        release.set()
        for thread in threading.enumerate():
            if thread.name == "check-Stuck":
                thread.join(60)
    (finding,) = report.findings
    assert finding.check == "hangs"
    assert "Stuck.step" in finding.sentence
    assert "0.75 s" in finding.sentence
    assert finding.where is not None
    assert finding.where.endswith("in step")
    assert report.checks["restore"] == "skipped: a call never returned"


def test_an_irreversible_environment_is_played_once():
    steps: list[int] = []

    class Sends(Dice):
        effect = "irreversible"

        async def step(self, action: Press) -> Outcome:
            steps.append(action.n)
            return await super().step(action)

    report = _check(Sends, tasks=[1, 2])
    assert len(steps) == report.turns == 6
    for check in ("determinism", "concurrency", "restore", "cancellation", "leaks"):
        assert report.checks[check] == "skipped: the environment is irreversible"


def test_the_callers_own_mistakes_are_raised():
    with pytest.raises(BadTasks, match="episodes="):
        _check(Dice, tasks=[])
    with pytest.raises(TypeError, match=r"3.*Roll"):
        _check(Dice, actions=lambda seen, rng: 3)
    with pytest.raises(TypeError, match="NoneType"):
        _check(lambda: None)
    one = Dice()
    with pytest.raises(TypeError, match="again"):
        _check(lambda: one)


def test_a_check_can_run_inside_a_loop_and_leaves_no_thread_behind():
    async def main() -> Report:
        return _check(Dice)

    before = threading.active_count()
    assert asyncio.run(main()).ok
    for thread in threading.enumerate():
        if thread.name.startswith(("check-Dice", "tapereel-loop-watch")):
            thread.join(60)
    assert threading.active_count() <= before


def test_the_report_is_json_and_text():
    report = _check(RaisesInStep)
    assert Report.model_validate_json(report.model_dump_json()) == report
    assert json.loads(report.model_dump_json())["findings"][0]["check"] == "raises"
    text = str(report)
    assert text.splitlines()[0].startswith("RaisesInStep: NOT OK (0 episodes, 0 turns, rewards none, ")
    assert all(name in text for name in CHECKS)
    assert "  failed  raises        no method raises" in text
    assert "  skipped restore       no episode reached its end" in text
    assert Finding(check="x", sentence="y").severity == "error"


@pytest.mark.parametrize(("waits_for_a_cpu", "blamed"), [(True, set()), (False, {"blocks"})])
def test_a_call_is_not_blamed_for_a_busy_machine(waits_for_a_cpu: bool, blamed: set[str]):
    probe = Probe(Dice, lambda seen, rng: Press(), max_turns=1, timeout=1.0, stall=0.25, seed=0)
    probe._files = {json.__file__}  # an environment from an installed package
    line = FrameSummary(json.__file__, 1, "step")
    probe._stalled(Stall(0.3, (line,), computed=0.01, waits=waits_for_a_cpu))
    assert {finding.check for finding in probe.findings} == blamed
