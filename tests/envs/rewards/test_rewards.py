"""Rewards: what sources say becomes records; what they don't say, or fail to say, never becomes a zero."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tapereel.envs import Outcome, RewardFailed, Rewards, RewardSource
from tapereel.envs.rewards import Scored
from tapereel.tapes import Answer, Status, Step, Tape, Task, Text
from tapereel.tapes.common import REWARD_LIMIT
from tapereel.tapes.records import Begin, End, Identity, Parent, Reward, StepRecord
from tapereel.tapes.schema import parse_record
from tapereel.tapes.steps import role_of


def _record(step: Step) -> bytes:
    by = "env" if isinstance(step, Text) else "a"
    return StepRecord(tape="t", by=by, role=role_of(step), kind=step.kind, content=step, at=0.0).body()


def _begin(**options: Any) -> bytes:
    who = Identity(name="a")
    return Begin(tape="t", task=Task(), task_hash="", agent=who, env=who, env_seed=0, seed=0, at=0.0, **options).body()


STEPS = [Text(text="q"), Answer(text="one"), Text(text="more"), Answer(text="three")]
END = End(tape="t", status=Status.FINISHED, at=0.0).body()


def _tape(rewards: Sequence[Reward] = ()) -> Tape:
    return Tape.of([_begin(), *map(_record, STEPS), *(reward.body() for reward in rewards), END])


def _score(*sources: Any, **options: Any) -> list[Reward]:
    return asyncio.run(Rewards(sources).score(_tape(), **options))


def long(tape: Tape) -> float:
    return float(len(tape.actions))


async def parts(tape: Tape) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"a": 0.5, "b": -1}


def silent(tape: Tape) -> None:
    return None


def broken(tape: Tape) -> float:
    raise KeyError("no such column")


def test_sources_become_records_that_make_the_tapes_reward():
    turns = RewardSource(score=long, name="turns", weight=0)
    records = _score(long, RewardSource(score=parts, weight=0.1), turns, silent)
    assert [(r.name, r.value, r.weight, r.step) for r in records] == [
        ("long", 2.0, 1.0, None),
        ("parts/a", 0.5, 0.1, None),
        ("parts/b", -1.0, 0.1, None),
        ("turns", 2.0, 0.0, None),
    ]
    assert _tape(records).reward == pytest.approx(2.0 + 0.1 * 0.5 - 0.1)


def test_nothing_to_say_is_unscored_not_zero():
    assert _score(silent) == []
    assert _tape(_score(silent)).reward is None
    assert _tape(_score(lambda tape: {})).reward is None
    assert asyncio.run(Rewards([silent]).outcome(_tape())) == Outcome()


def test_a_source_per_step_scores_the_actions_in_order():
    def each(tape: Tape) -> list[float | dict[str, float] | None]:
        return [float(len(str(action))) if k else None for k, action in enumerate(tape.actions)]

    records = _score(RewardSource(score=each, per="step", weight=2.0), layer="again")
    assert [(r.name, r.step, r.value, r.weight, r.layer) for r in records] == [("each", 3, 5.0, 2.0, "again")]


def test_a_fork_scores_its_own_actions_and_leaves_the_parents_alone():
    parent = _tape().at_turn(1)
    cut = Parent(tape="t", digest=parent.digest, records=len(parent.bodies), turn=1)
    fork = Tape.of([_begin(parent=cut), *map(_record, STEPS[3:]), END], parent=parent)
    assert [type(step) for step in fork] == [type(step) for step in STEPS]
    each = RewardSource(score=lambda tape: [0.1, 0.2], name="each", per="step")
    assert [(r.step, r.value) for r in asyncio.run(Rewards([each]).score(fork))] == [(3, 0.2)]


FAILURES = [
    (broken, r"KeyError: 'no such column'"),
    (lambda tape: "1.0", r"BadArgument: .*'1\.0'"),
    (lambda tape: "True", "BadArgument: .*True"),
    (lambda tape: float("nan"), r"BadArgument: .*\bnan\b"),
    (lambda tape: 10**400, "BadArgument: .*integer"),
    (lambda tape: 2 * REWARD_LIMIT, r"BadArgument: .*\b2000000000000000\.0\b"),
    (lambda tape: -(10**9000), "BadArgument: .*integer"),
    (lambda tape: {"x": math.inf}, r"BadArgument: .*\bx\b.*\binf\b"),
    (lambda tape: Scored({"x": 1e10}, weights={"x": -1e10}), r"BadArgument: .*\bx\b.*10000000000\.0.*-1000"),
    (lambda tape: Scored({"x": 1.0}, weights={"x": math.nan}), r"BadArgument: .*\bx\b.*1\.0.*\bnan\b"),
    (RewardSource(score=lambda tape: 1e10, weight=1e10), r"BadArgument: .*10000000000\.0.*10000000000\.0"),
    (RewardSource(score=lambda tape: 1.0, per="step"), r"TypeError: .*\bstep\b.*\b1\.0\b"),
    (RewardSource(score=lambda tape: [1.0], per="step"), r"ValueError: .*\b1\b.*\b2\b"),
    (RewardSource(score=lambda tape: "ab", per="step"), r"TypeError: .*\bstep\b.*'ab'"),
]


@pytest.mark.parametrize(("source", "says"), FAILURES)
def test_a_failing_source_leaves_the_tape_unscored_with_its_cause(source: Any, says: str):
    records = _score(long, source, layer="judge")
    assert [r.weight for r in records] == [0.0, 0.0]
    assert records[0].value == 2.0
    assert math.isnan(records[1].value)
    assert isinstance(records[1].evidence, dict)
    assert re.search(says, str(records[1].evidence["failed"]))
    tape = _tape(records)
    assert tape.reward is None
    assert [parse_record(r.body()).body() for r in records] == [r.body() for r in records]


@pytest.mark.parametrize(("source", "says"), FAILURES[:10])
def test_in_an_environment_a_failing_source_raises(source: Any, says: str):
    with pytest.raises(RewardFailed, match=says):
        asyncio.run(Rewards([long, source]).outcome(_tape()))


def test_the_cause_names_the_line():
    (record,) = _score(broken)
    assert isinstance(record.evidence, dict)
    assert str(record.evidence["frame"]).endswith(" in broken")
    assert "test_rewards.py" in str(record.evidence["frame"])


def test_text_that_json_cannot_hold_is_escaped_in_the_cause():
    def torn(tape: Tape) -> float:
        raise ValueError("\ud800" + "x" * 5000)

    (record,) = _score(torn)
    assert len(record.body()) < 4000
    assert b"ud800" in record.body()


def test_a_source_out_of_time_failed_and_its_own_timeout_stays_its_own():
    async def forever(tape: Tape) -> float:
        await asyncio.Event().wait()
        return 1.0

    async def own(tape: Tape) -> float:
        raise TimeoutError("the judge is down")

    late, raised = _score(RewardSource(score=forever, timeout=0.01), RewardSource(score=own, timeout=60.0))
    assert isinstance(late.evidence, dict)
    assert isinstance(raised.evidence, dict)
    assert "0.01 s" in str(late.evidence["failed"])
    assert "TimeoutError: the judge is down" in str(raised.evidence["failed"])


def test_what_needs_the_world_runs_off_the_loop_and_what_is_pure_on_it():
    where: dict[str, int] = {}

    def here(tape: Tape) -> float:
        where["pure"] = threading.get_ident()
        return 0.0

    def there(tape: Tape) -> float:
        where["world"] = threading.get_ident()
        return 0.0

    _score(here, RewardSource(score=there, pure=False))
    assert where["pure"] == threading.get_ident() != where["world"]


def test_an_environment_scores_whatever_it_hands_over():
    rewards: Rewards[dict[str, float]] = Rewards(
        [
            RewardSource(score=lambda world: world["gold"], name="gold", weight=2.0),
            RewardSource(score=lambda world: {"x": 1.0}, name="place", weight=0),
        ]
    )
    outcome = asyncio.run(rewards.outcome({"gold": 3.0}))
    assert outcome == Outcome(reward={"gold": 6.0}, metrics={"place/x": 1.0})


def test_wrong_sources_are_refused_at_once():
    with pytest.raises(ValueError, match=r"'long'.*`name`"):
        Rewards([long, long])
    with pytest.raises(ValueError, match=r"'long'.*\bnan\b"):
        RewardSource(score=long, weight=math.nan)
    with pytest.raises(ValueError, match=r"'long'.*`step`"):
        asyncio.run(Rewards([RewardSource(score=long, per="step")]).outcome(_tape()))


def test_cancelling_the_scoring_is_not_a_failure_of_a_source():
    async def scored() -> None:
        started = asyncio.Event()

        async def slow(tape: Tape) -> float:
            started.set()
            await asyncio.Event().wait()
            return 1.0

        task = asyncio.ensure_future(Rewards([slow]).score(_tape()))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scored())
