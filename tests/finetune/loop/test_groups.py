"""Groups: they always close and say how, none is used twice, flat ones are made up for within a bound, and nothing ever
waits for ever, whatever order things end in."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tapereel.agents import EpisodeSpec, Limits, ScriptedEngine, rollout, rollout_group
from tapereel.agents.runs.group import Closing, Group, fill
from tapereel.envs import Environment, Outcome
from tapereel.envs.rewards import relative
from tapereel.finetune.loop import Learner, NothingUsable
from tapereel.finetune.loop.history import Plan
from tapereel.finetune.loop.rollouts import Filled, Rollouts, Taken
from tapereel.finetune.recipes import get_recipe
from tapereel.tapes import Answer, Status, Tape, Text
from tapereel.tapes.common import stats
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store

from . import clock
from .lab import RENDERER, Letters, Speaker, assert_books_close, history_in, loop_in, model, run, settings_of, tasks
from .test_history import Gone, abandoned

ENDLESS = Limits(agent_seconds=None, system_seconds=None, environment_seconds=None)
"""Nothing but a group's deadline ends what hangs."""


class Fate(Environment[Answer]):
    """Ends as it is told: scored, broken, or not at all; after a while."""

    def __init__(self, ends: str, seconds: float = 1.0, reward: float = 1.0) -> None:
        self.ends, self.seconds, self.reward = ends, seconds, reward

    async def reset(self, task: Any) -> Text:
        return Text(text="a")

    async def step(self, action: Answer) -> Outcome:
        await asyncio.sleep(self.seconds)  # of the clock that jumps
        if self.ends == "hangs":
            await asyncio.Event().wait()
        if self.ends == "breaks":
            raise OSError("the world broke")
        return Outcome(reward=self.reward, terminated=True)


class Fates:
    """A factory of worlds whose ends are drawn in the order of their making."""

    def __init__(self, seed: int, ends: list[str]) -> None:
        self.rng, self.ends = random.Random(seed), ends

    def __call__(self) -> Fate:
        return Fate(self.rng.choice(self.ends), self.rng.random() * 10, float(self.rng.randrange(2)))


def one(ends: str, seconds: float = 1.0) -> Any:
    return rollout(Speaker(), Fate(ends, seconds), "t", engine=ScriptedEngine(lambda request: "a"), limits=ENDLESS)


# One group


def filled(ends: dict[tuple[int, int], str], *, until: float | None = 100.0, fresh: bool = True) -> Group:
    """A group of three whose tape number `again` of attempt `k` ends as `ends[k, again]` says, or is scored."""
    group = Group(0, "t", 3)
    clock.run(fill(group, lambda k, again: one(ends.get((k, again), "scored")), until=until, fresh=lambda: fresh))
    return group


@pytest.mark.parametrize(
    ("ends", "fresh", "closing", "tapes", "usable"),
    [
        ({}, True, Closing.COMPLETE, [1, 1, 1], 3),
        ({(1, 0): "breaks"}, True, Closing.COMPLETE, [1, 2, 1], 3),
        ({(1, 0): "breaks", (1, 1): "breaks"}, True, Closing.FAILED, [1, 2, 1], 2),
        ({(1, 0): "breaks"}, False, Closing.LATE, [1, 1, 1], 2),
        ({(2, 0): "hangs"}, True, Closing.DEADLINE, [1, 1, 0], 2),
        ({(0, 0): "breaks", (0, 1): "hangs"}, True, Closing.DEADLINE, [1, 1, 1], 2),
    ],
)
def test_a_group_closes_and_says_how(ends: Any, fresh: bool, closing: Closing, tapes: list[int], usable: int) -> None:
    group = filled(ends, fresh=fresh)
    assert group.closed is closing
    assert [len(group.tapes[k]) for k in range(3)] == tapes
    assert len(group.usable) == usable
    assert group.lost == Counter({"environment": broken} if (broken := list(ends.values()).count("breaks")) else {})


def test_a_group_of_one_s_own_closes_at_its_deadline_too() -> None:
    fates = iter(["scored", "hangs", "breaks", "scored", "breaks"])
    tapes = clock.run(
        rollout_group(
            Speaker(),
            lambda: Fate(next(fates)),
            EpisodeSpec.of("t", seed=1, limits=ENDLESS),
            n=4,
            deadline=50.0,
            engine=ScriptedEngine(lambda request: "a"),
        )
    )
    assert sorted(str(tape.status) for tape in tapes) == ["error", "error", "finished", "finished"]
    assert [tape.begin.attempt for tape in tapes] == [0, 2, 2, 3]


# A queue of groups: any order of ends, any failures


@dataclasses.dataclass
class Queue:
    """A queue of groups, and updates that take no time."""

    rollouts: Rollouts
    taken: list[Taken] = dataclasses.field(default_factory=list)

    async def work(self, updates: int) -> None:
        """So many updates; no deadlock, or the clock runs out."""
        async with asyncio.timeout(1e6), asyncio.TaskGroup() as jobs:
            feeder = jobs.create_task(self.rollouts.feed())
            for _ in range(updates):
                taken = await self.rollouts.take()
                self.taken.append(taken)
                await asyncio.sleep(3.0)
                self.rollouts.history.updates += 1
                self.rollouts.applied(tuple(tape.id for tape in taken.tapes), more=True)
            feeder.cancel()


def queue(store: Store, path: Path, env: Any, **changes: Any) -> Queue:
    async def durable() -> None:
        store.writer.sync()  # here and now: the clock would jump over what a thread has to say

    store.writer.durable = durable  # type: ignore[method-assign]
    config = settings_of(**{"group_deadline": 40.0, "limits": ENDLESS, **changes})
    history = history_in(store, path, config, policy=POLICY)
    engine: Any = ScriptedEngine(lambda request: "a", renderer=RENDERER)
    return Queue(
        Rollouts(
            config,
            learners=[Learner(history=history, engine=engine)],
            agent=Speaker(),
            env=env,
            tasks=tasks(),
            recipe=get_recipe(config.recipe, config.changes),
            seed=0,
        )
    )


POLICY = model()
DROP = {"select": {"flat": "drop"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("queues")
    return (base / str(k) for k in range(10**6))  # type: ignore[return-value]


@pytest.mark.ledger("F10", "F39", "T10", "X8")
@settings(max_examples=20, derandomize=True, phases=[Phase.generate])
@given(
    data=st.data(),
    lag=st.integers(0, 2),
    groups=st.integers(1, 3),
    size=st.integers(1, 3),
    extra=st.none() | st.integers(0, 4),
    drop=st.booleans(),
    seed=st.integers(0, 10**6),
    concurrent=st.integers(1, 12),
    ends=st.sampled_from([["scored"], ["scored", "scored", "breaks"], ["scored", "breaks", "hangs"]]),
)
def test_whatever_ends_in_whatever_order_updates_come_and_nothing_is_used_twice(
    folders: Any,
    data: Any,
    lag: int,
    groups: int,
    size: int,
    extra: int | None,
    drop: bool,
    seed: int,
    concurrent: int,
    ends: list[str],
) -> None:
    path = next(folders)
    with Store.create(path, durability="os", thread=False) as store:
        made = queue(
            store,
            path,
            Fates(seed, ends),
            max_lag=lag,
            groups=groups,
            group_size=size,
            extra_groups=extra,
            changes=DROP if drop else {},
            max_concurrent=concurrent,
        )
        clock.run(made.work(6))
    rollouts, taken = made.rollouts, made.taken
    assert len(taken) == 6
    used = [tape.id for one in taken for tape in one.tapes]
    assert len(used) == len(set(used))
    numbers = [group.number for one in taken for group in (*one.groups, *one.aside)]
    assert len(numbers) == len(set(numbers)), "no group in two updates"
    for one in taken:
        assert all(group.usable and group.closed for group in (*one.groups, *one.aside))
        assert [group.number for group in one.groups] == sorted(group.number for group in one.groups)
        rewards = [{tape.reward for tape in group.usable} for group in one.groups]
        assert not drop or all(len(of) > 1 for of in rewards), "flat ones are set aside"
        assert all(len({tape.reward for tape in group.usable}) == 1 for group in one.aside)
        lacking = groups - len(one.groups)
        assert len(one.aside) >= lacking + rollouts.pacer.extra if lacking else True
        assert (one.filled is Filled.SHORT) == (lacking > 0 and rollouts.pacer.extra > 0)
        if lag == 0:
            assert len(one.groups) + len(one.aside) <= groups + rollouts.pacer.extra, "the bound on extra groups"
    assert drop or not any(one.aside for one in taken)
    tries = Counter(
        (tape.begin.group, tape.begin.attempt)
        for tape in Store.open(path).tapes(closed=True)
        if tape.status is not Status.CANCELLED
    )
    assert max(tries.values()) <= 2, "sampled again once"
    if lag == 0:
        assert all(group.begun == k for k, one in enumerate(taken) for group in one.groups), "of the policy it trains"
    assert assert_books_close(path).open == 0


@pytest.mark.parametrize("lag", [0, 2])
def test_a_world_that_hangs_for_good_is_given_up(tmp_path: Path, lag: int) -> None:
    with Store.create(tmp_path / "run", durability="os", thread=False) as store:
        made = queue(store, tmp_path, Fates(0, ["hangs"]), max_lag=lag, groups=2)
        with pytest.raises(BaseExceptionGroup) as found:
            clock.run(made.work(1))
    assert found.group_contains(NothingUsable, match="deadline")
    assert assert_books_close(tmp_path / "run").tokens["cancelled"] == 0, "nobody sampled: the script wrote"


# In the loop


class Mixed(Letters):
    """Tasks that start with a, b or c earn the same whatever is said; the others earn by what is said."""

    async def step(self, action: Answer) -> Outcome:
        outcome = await super().step(action)
        own = self.rng.random() + random.Random(action.text).random()
        return dataclasses.replace(outcome, reward=0.5 if self.task[0] in "abc" else own)


@pytest.mark.ledger("F42", "T17")
@pytest.mark.parametrize("lag", [0, 1])
def test_flat_groups_are_made_up_for_until_the_update_has_its_batch(tmp_path: Path, lag: int) -> None:
    path, config = tmp_path / "run", settings_of(updates=4, groups=2, max_lag=lag, changes=DROP, extra_groups=40)
    _, reports = run(path, config, env=Mixed, tasks=tasks(2))
    lines = [report.metrics for report in reports]
    assert {line["filled"] for line in lines} == {"full"}
    assert {line["groups"] for line in lines} == {2}
    assert sum(line["groups_aside"] for line in lines) > 0, "there were flat ones, or this shows nothing"
    assert {line["skipped"] for line in lines} == {None}, "every update has something to train on"
    books = assert_books_close(path)
    assert books.tokens["filtered"] == sum(line["filtered_tokens"] for line in lines) > 0
    store = Store.open(path)
    for stored in store.run_records("use"):
        info = stored.record.info
        groups: dict[str, set[float | None]] = {}
        for name in info["tapes"]:
            tape = store.tape(name)
            groups.setdefault(tape.begin.group or "", set()).add(tape.reward)
        assert len(groups) == 2
        assert all(len(rewards) > 1 for rewards in groups.values())
        assert all(store.tape(name).reward is not None for name in info.get("aside", ()))
        assert not {item[0] for item in stored.record.items} & set(info.get("aside", ()))
    fresh = history_in(store, tmp_path / "fresh", config)
    assert fresh.restore() == 4, "and each is made again from the record, what was set aside included"
    store.close()


@pytest.mark.ledger("F42")
@pytest.mark.parametrize(("extra", "groups"), [(0, 4), (2, 6), (None, 16)])
def test_where_all_is_flat_the_bound_ends_it_and_says_so(
    tmp_path: Path,
    extra: int | None,
    groups: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Flat(Letters):
        async def step(self, action: Answer) -> Outcome:
            return dataclasses.replace(await super().step(action), reward=0.25)

    config = settings_of(updates=2, groups=4, group_size=2, max_lag=0, changes=DROP, extra_groups=extra)
    loop, reports = run(tmp_path / "run", config, env=Flat, tasks=tasks(1))
    for report in reports:
        line = report.metrics
        assert (line["groups"], line["groups_aside"]) == (0, groups)
        assert line["filled"] == ("full" if extra == 0 else "short")
        assert line["skipped"] == "nothing to train on"
        assert line["reward"] == 0.25, "of all that was sampled, not of what is left"
    assert ("loop.extra_groups" in caplog.text) == (extra != 0)
    assert loop.history.updates == 2
    with Store.open(tmp_path / "run") as store:
        assert history_in(store, tmp_path / "fresh", config).restore() == 2


@pytest.mark.ledger("X5", "X12")
@pytest.mark.parametrize("how", ["best", "spread"])
def test_of_many_attempts_a_few_are_kept_by_rule_and_the_others_booked(tmp_path: Path, how: str) -> None:
    class Graded(Letters):
        async def step(self, action: Answer) -> Outcome:
            return dataclasses.replace(await super().step(action), reward=Graded.scores.random())

    Graded.scores = random.Random(3)
    path = tmp_path / "run"
    config = settings_of(updates=2, groups=2, group_size=6, changes={"select": {"keep": 2, "keep_how": how}})
    run(path, config, env=Graded, tasks=tasks(1))
    store = Store.open(path)
    for stored in store.run_records("use"):
        kept = {item[0] for item in stored.record.items}
        left = {entry[0] for entry in stored.record.info["filtered"]}
        groups: dict[str, list[Tape]] = {}
        for name in stored.record.info["tapes"]:
            groups.setdefault(store.tape(name).begin.group or "", []).append(store.tape(name))
        for tapes in groups.values():
            ranked = sorted(tapes, key=lambda tape: -(tape.reward or 0.0))
            wanted = ranked[:2] if how == "best" else [ranked[0], ranked[-1]]
            assert {tape.id for tape in wanted} == kept & {tape.id for tape in tapes}
            assert {tape.id for tape in tapes} - kept <= left
    store.close()
    assert_books_close(path)


def test_a_hanging_attempt_costs_its_group_the_rest_of_its_time_and_no_more(tmp_path: Path) -> None:
    class Hanging(Letters):
        left = 2

        async def step(self, action: Answer) -> Outcome:
            if Hanging.left and self.turn == 1:
                Hanging.left -= 1
                await asyncio.Event().wait()
            return await super().step(action)

    path = tmp_path / "run"
    _, reports = run(path, settings_of(updates=2, groups=2, max_lag=0, group_deadline=1.0), env=Hanging, tasks=tasks(2))
    assert sum(report.metrics["closed/deadline"] for report in reports) >= 1
    assert min(report.metrics["episodes"] for report in reports) < 8
    books = assert_books_close(path)
    assert books.tokens["cancelled"] > 0


@pytest.mark.ledger("T11")
def test_groups_of_one_are_refused_where_attempts_are_compared(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"loop\.group_size is 1"):
        run(tmp_path / "run", settings_of(updates=1, group_size=1))


@pytest.mark.ledger("T10")
def test_a_resumed_run_uses_no_group_twice_those_set_aside_included(tmp_path: Path) -> None:
    path, config = tmp_path / "run", settings_of(updates=4, groups=2, group_size=2, changes=DROP, extra_groups=3)
    rng = random.Random(1)
    done, attempt = False, 0
    for attempt in range(60):
        store = Store.open(path, write=True) if attempt else Store.create(path)
        history = history_in(store, path, config)
        history.restore()
        done = abandoned(loop_in(history, config, env=Mixed, tasks=tasks(1)), rng.randint(2, 60))
        store.close() if done else store.abandon()
        if done:
            break
    assert done
    assert attempt >= 2
    store = Store.open(path)
    plans = [Plan.of(stored.record) for stored in store.run_records("use")]
    assert sum(len(plan.aside) for plan in plans) > 0
    taken = [name for plan in plans for name in plan.every]
    assert len(taken) == len(set(taken))
    groups = [{store.tape(name).begin.group for name in plan.every} for plan in plans]
    assert sum(map(len, groups)) == len(set.union(*groups))
    store.close()
    assert_books_close(path)


def test_attempts_with_rewards_beyond_the_limit_are_sampled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier version recorded them, and stopped before an update took their groups. With one of them in its batch
    an update would train on nothing."""

    class Huge(Mixed):
        async def step(self, action: Answer) -> Outcome:
            outcome = await super().step(action)
            return dataclasses.replace(outcome, reward=1e308 if outcome.reward else -1e308)

    path, config = tmp_path / "run", settings_of(updates=2, groups=2, group_size=4)
    with monkeypatch.context() as patch:
        for module in (stats, relative):
            patch.setattr(module, "REWARD_LIMIT", sys.float_info.max)
        store = Store.create(path)
        append = store.writer.append

        def until_an_update(body: bytes) -> None:
            if body.startswith(b'{"t":"use"'):
                raise Gone
            append(body)

        patch.setattr(store.writer, "append", until_an_update)
        with pytest.raises(Gone):
            asyncio.run(loop_in(history_in(store, path, config), config, env=Huge, tasks=tasks(1)).run())
        store.abandon()
    with Store.open(path, write=True) as store:
        huge = {tape.id for tape in store.tapes(closed=True) if tape.trains}
        assert huge
        assert not list(store.run_records("use"))
        reports: list[Any] = []
        history = history_in(store, path, config)
        history.restore()
        asyncio.run(loop_in(history, config, env=Mixed, tasks=tasks(1), on_update=reports.append).run())
        used = {name for stored in store.run_records("use") for name in Plan.of(stored.record).every}
    assert used
    assert not used & huge
    assert sum(report.metrics["trained_tokens"] for report in reports) > 0
    assert sum(report.metrics.get("lost/environment", 0) for report in reports) == len(huge)
    assert all(any(tape in record.getMessage() for record in caplog.records) for tape in huge)
    assert_books_close(path)
