"""The loop at micro size: sampler and trainer agree, stale tokens are set aside, faults cost nothing but themselves."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import shutil
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tapereel.agents import Limits
from tapereel.envs import Outcome
from tapereel.finetune import History, Loop, OptimiserConfig, Row
from tapereel.finetune.loop import NothingUsable, SamplerMismatch, delivery, plan
from tapereel.finetune.trainer import copied_weights
from tapereel.tapes import Answer, Sampling, Status, Tape
from tapereel.tapes.audit import audit_run
from tapereel.tapes.store import Store
from tapereel.tapes.store.writer import SegmentWriter

from ...tapes.store.synced import Synced
from .lab import Flaky, Letters, assert_books_close, history_in, loop_in, model, run, settings_of, tasks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


class Shifted(Letters):
    """As ever; its rewards differ within a group, so that every update has something to train on."""

    async def step(self, action: Answer) -> Outcome:
        outcome = await super().step(action)
        return dataclasses.replace(outcome, reward=self.rng.random() + random.Random(action.text).random())


def test_in_synchronous_mode_sampler_and_trainer_agree_at_every_update(path: Path) -> None:
    config = settings_of(updates=8, max_lag=0, sampling=Sampling(max_tokens=3, temperature=1.3))
    loop, reports = run(path, config, env=Shifted, tasks=tasks(3))
    assert [report.update for report in reports] == list(range(1, 9))
    assert max(report.metrics["mismatch"] for report in reports) <= 1e-4
    assert {report.metrics["lag"] for report in reports} == {0.0}
    assert sum(report.metrics["stale_tokens"] for report in reports) == 0
    assert loop.store.path == path


def broken(how: str, row: Row) -> Row:
    """A row as a bug in the splice or the mask would give it."""
    if how == "splice":  # one prompt token is another one
        ids = row.input_ids.copy()
        ids[row.own[0] - 1] = (ids[row.own[0] - 1] + 1) % 10
        return dataclasses.replace(row, input_ids=ids)
    if how == "mask":  # labels are one token early
        return dataclasses.replace(row, own=row.own - 1)
    if how == "temperature":
        return dataclasses.replace(row, temperature=row.temperature * np.float32(1.1))
    assert how == "columns"  # log-probs of one completion are those of another order
    return dataclasses.replace(row, old=row.old[::-1].copy())


@pytest.mark.parametrize("how", ["splice", "mask", "temperature", "columns"])
def test_a_broken_splice_or_mask_stops_a_synchronous_run(path: Path, how: str) -> None:
    class Broken(Loop):
        def _plan(self, taken: Any) -> Any:
            converted = self.rollouts.converted
            for tape in taken.tapes:
                made, episode = converted[tape.id]
                converted[tape.id] = ([broken(how, row) for row in made], episode)
            return super()._plan(taken)

    config = settings_of(updates=3, max_lag=0)
    with pytest.raises(SamplerMismatch, match=r"loop\.sampler_tolerance="):
        run(path, config, cls=Broken, env=Shifted)
    with Store.open(path) as store:
        assert list(store.run_records("use")) == [], "what was found broken is not recorded as applied"
    run(path.with_name("unbroken"), config, env=Shifted)
    unchecked = config.model_copy(update={"sampler_tolerance": None})
    run(path.with_name("unchecked"), unchecked, cls=Broken, env=Shifted)


class Stale(Loop):
    """Pacing that starts far too much: only the check at use is left."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rollouts.pacer.max_lag = 6


def test_tokens_older_than_the_bound_are_context_and_booked_stale(path: Path) -> None:
    config = settings_of(updates=8, groups=2, max_lag=1, max_concurrent=64)
    _, reports = run(path, config, cls=Stale)
    stale = sum(report.metrics["stale_tokens"] for report in reports)
    assert stale > 0, "pacing alone let nothing through that was too old: the test shows nothing"
    books = assert_books_close(path)
    assert books.tokens["stale"] == stale
    store = Store.open(path)
    for stored in store.run_records("use"):
        use = stored.record
        oldest = use.update - config.max_lag
        for name, call, start, end, _ in use.items:
            assert min(versions_of(store.tape(name), call)[start:end]) >= oldest
        for name, call, start, end in use.info["stale"]:
            assert max(versions_of(store.tape(name), call)[start:end]) < oldest
    store.close()


def versions_of(tape: Tape, call: str) -> list[int]:
    """The number of the policy that sampled each token of a call."""
    return [int(version.rpartition(":")[2]) for version, a, b in tape.call(call).spans for _ in range(a, b)]


def test_without_the_check_at_use_the_stale_would_be_trained_on(path: Path) -> None:
    class Unchecked(Stale):
        def _plan(self, taken: Any) -> Any:
            return super()._plan(taken).model_copy(update={"oldest": None})

    run(path, settings_of(updates=8, groups=2, max_lag=1, max_concurrent=64), cls=Unchecked, env=Shifted)
    store = Store.open(path)
    found = [
        (use.update, versions_of(store.tape(name), call)[start])
        for use in (stored.record for stored in store.run_records("use"))
        for name, call, start, _, _ in use.items
    ]
    assert any(version < update - 1 for update, version in found)
    store.close()


@pytest.mark.parametrize("lag", [0, 2])
def test_an_environment_that_fails_costs_its_own_episodes_only(path: Path, lag: int) -> None:
    Flaky.luck = random.Random(5)
    loop, reports = run(path, settings_of(updates=6, max_lag=lag, groups=3), env=Flaky)
    assert reports[-1].update == 6
    books = assert_books_close(path)
    lost = {(end.status, end.cause): end for end in books.ends}
    assert lost["error", "environment"].episodes > 5
    store = Store.open(path)
    tries: dict[tuple[str, int], list[Tape]] = {}
    for tape in store.tapes(split="train"):
        tries.setdefault((tape.begin.group or "", tape.begin.attempt), []).append(tape)
    assert {len(found) for found in tries.values()} == {1, 2}, "sampled again once, never twice"
    for found in tries.values():
        assert all(not tape.trains for tape in found[:-1])
        assert len({tape.begin.seed for tape in found}) == len(found)
        assert len({tape.begin.env_seed for tape in found}) == 1
    used = {name for stored in store.run_records("use") for name in stored.record.info["tapes"]}
    assert all(store.tape(name).trains for name in used)
    assert loop.rollouts.pacer.updating == 0
    store.close()


def test_groups_without_a_usable_attempt_are_dropped_and_the_loop_goes_on(path: Path) -> None:
    class Sometimes(Letters):
        """Every second task can't be reset."""

        async def reset(self, task: str) -> Any:
            if task.startswith(("a", "b")):
                raise OSError("no such world")
            return await super().reset(task)

    loop, reports = run(path, settings_of(updates=4, groups=2, group_size=2), env=Sometimes)
    assert len(reports) == 4
    assert loop.rollouts.dropped > 0


def test_a_world_that_is_broken_for_good_stops_the_loop_with_its_cause(path: Path) -> None:
    class Gone(Letters):
        async def reset(self, task: str) -> Any:
            raise ConnectionError("the world is gone")

    with pytest.raises(NothingUsable, match="the world is gone"):
        run(path, settings_of(groups=2, group_size=2), env=Gone)
    books = assert_books_close(path)
    assert books.begun == books.ended > 0


def test_cancelled_rollouts_leave_books_that_close(path: Path) -> None:
    twice, under_way = asyncio.Event(), asyncio.Event()

    class Watched(Letters):
        async def step(self, action: Answer) -> Outcome:
            outcome = await super().step(action)
            if twice.is_set() and not outcome.terminated:
                under_way.set()
            return outcome

    with Store.create(path, durability="os") as store:
        history = history_in(store, path, settings_of())
        loop = loop_in(
            history,
            settings_of(updates=1000),
            env=Watched,
            tasks=tasks(6),
            on_update=lambda report: twice.set() if report.update == 2 else None,
        )

        async def main() -> None:
            job = asyncio.ensure_future(loop.run())
            await under_way.wait()
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job

        asyncio.run(main())
    books = assert_books_close(path)
    assert books.open == 0
    assert books.tokens["cancelled"] > 0
    assert any(end.status == "cancelled" for end in books.ends)


def test_limits_and_misreads_are_trained_on_and_unscored_ones_are_booked_so(path: Path) -> None:
    class Silent(Letters):
        """Says nothing about tasks that start with a or b."""

        async def step(self, action: Answer) -> Outcome:
            outcome = await super().step(action)
            return dataclasses.replace(outcome, reward=None) if self.task[0] in "ab" else outcome

    _, reports = run(path, settings_of(limits=Limits(turns=1), groups=8), env=Silent, tasks=tasks(3))
    assert {report.metrics["truncated"] for report in reports} == {1.0}
    books = assert_books_close(path)
    assert books.tokens["unscored"] > 0
    assert books.tokens["trained"] > 0


def weights_after(path: Path, env: Any, recipe: str = "grpo", **changes: Any) -> tuple[dict[str, Any], History]:
    policy = model()
    loop, _ = run(path, settings_of(updates=2, recipe=recipe, **changes), env=env, policy=policy)
    return copied_weights(policy), loop.history


class Flat(Letters):
    """Every episode of a group earns the same."""

    async def step(self, action: Answer) -> Outcome:
        return dataclasses.replace(await super().step(action), reward=0.25)


@pytest.mark.ledger("F38")
@pytest.mark.parametrize("recipe", ["grpo", "reinforce"])
def test_flat_groups_change_nothing_at_all(path: Path, recipe: str) -> None:
    before = copied_weights(model())
    after, history = weights_after(path, Flat, recipe)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert history.updates == 2
    store = Store.open(path)
    uses = [stored.record for stored in store.run_records("use")]
    assert [use.info["skipped"] for use in uses] == ["nothing to train on"] * 2
    assert [use.items for use in uses] == [(), ()]
    books = store.books()
    named = sum(b - a for use in uses for _, _, a, b in use.info["filtered"])
    assert (books.tokens["filtered"], books.tokens["trained"]) == (named, 0)
    assert named > 0
    store.close()
    moved, _ = weights_after(path.with_name("moved"), Shifted, recipe)
    assert not all(torch.equal(before[name], moved[name]) for name in before)


def test_what_a_recipe_leaves_out_is_booked_as_filtered(path: Path) -> None:
    _, reports = run(path, settings_of(updates=4, groups=4, changes={"select": {"flat": "drop"}}), tasks=tasks(1))
    books = assert_books_close(path)
    assert books.tokens["filtered"] == sum(report.metrics["filtered_tokens"] for report in reports) > 0


@pytest.mark.parametrize("where", ["within", "across"])
def test_shuffled_rewards_are_recorded_and_leave_the_tapes_alone(path: Path, where: str) -> None:
    run(path, settings_of(updates=3, shuffle_rewards=where), env=Shifted)
    store, kept = Store.open(path), []
    for stored in store.run_records("use"):
        info = stored.record.info
        own = [store.tape(name).reward for name in info["tapes"]]
        assert sorted(own) == sorted(info["rewards"])
        assert own != info["rewards"]
        kept += [sorted(own[k : k + 4]) == sorted(info["rewards"][k : k + 4]) for k in range(0, len(own), 4)]
    assert len(kept) >= 6
    assert all(kept) if where == "within" else not any(kept), "rewards are real numbers, all different"
    store.close()


def test_what_can_t_be_trained_on_is_refused_ahead(path: Path) -> None:
    for sampling in (Sampling(temperature=0.0), Sampling(top_p=0.9), Sampling(top_k=5)):
        with (
            Store.create(path / str(sampling.top_k) / str(sampling.top_p)) as store,
            pytest.raises(ValueError, match=r"temperature=0|top_p=0\.9|top_k=5"),
        ):
            loop_in(history_in(store, path, settings_of()), settings_of(sampling=sampling))


def test_threads_take_turns_more_often_while_the_loop_runs(path: Path) -> None:
    before, seen = sys.getswitchinterval(), list[float]()
    with Store.create(path, durability="os") as store:
        config = settings_of(updates=1)
        loop = loop_in(
            history_in(store, path, config), config, on_update=lambda report: seen.append(sys.getswitchinterval())
        )
        asyncio.run(loop.run())
    assert len(seen) == 1
    assert seen[0] < before == sys.getswitchinterval()


def test_every_version_is_published_once_with_the_digest_of_its_weights(path: Path) -> None:
    run(path, settings_of(updates=5, optimiser=OptimiserConfig(lr=1e-3)))
    store = Store.open(path)
    versions = [stored.record.version for stored in store.run_records("publish")]
    assert versions == [f"run:{k}" for k in range(1, 6)]
    sampled = {version for tape in store.tapes() for call in tape.calls for version, _, _ in call.spans}
    assert sampled <= {"run:0", *versions}
    assert {tape.status for tape in store.tapes()} <= {Status.FINISHED, Status.CANCELLED}
    store.close()


def test_an_updates_records_are_durable_before_its_weights_are_published(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the publication must not leave tapes of a version that no record explains."""
    synced = Synced(monkeypatch, path.parent)
    waits = SegmentWriter.when_durable

    def wait(self: SegmentWriter, done: Any) -> bool:
        found = waits(self, done)
        if found:
            self.commit()
        return found

    # Without a thread nothing is written before a caller waits for it, so the order is that of the calls.
    monkeypatch.setattr(SegmentWriter, "when_durable", wait)
    config = settings_of(updates=3, max_lag=0)
    published: list[str] = []
    with Store.create(path, thread=False) as store:
        history = history_in(store, path, config)
        loop = loop_in(history, config, env=Shifted)
        sync_weights = loop.engine.sync_weights

        async def checked(weights: Any, version: str, mode: str) -> None:
            left = b"".join(synced.left(segment) or b"" for segment in sorted((path / "tapes").glob("*.jsonl")))
            bodies = [json.loads(line)["b"] for line in left.splitlines()]
            assert version in [body["version"] for body in bodies if body["t"] == "publish"]
            assert len(published) in [body["update"] for body in bodies if body["t"] == "use"]
            published.append(version)
            await sync_weights(weights, version, mode)

        monkeypatch.setattr(loop.engine, "sync_weights", checked)
        asyncio.run(loop.run())
    assert published == ["run:1", "run:2", "run:3"]


def test_a_tape_with_an_id_that_the_model_lacks_is_set_aside_and_its_run_can_be_resumed(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine gives such an id. The process dies of it, as before ids were compared; the next one goes on."""
    config, options = settings_of(updates=2, max_lag=0), {"env": Shifted, "tasks": tasks(1)}
    with Store.create(path, durability="os") as store, monkeypatch.context() as patch:
        history = history_in(store, path, config)
        loop, asked = loop_in(history, config, **options), itertools.count()
        sample = loop.engine.complete

        async def lies(request: Any) -> Any:
            found = await sample(request)
            return dataclasses.replace(found, ids=array("i", [10**6]) + found.ids[1:]) if next(asked) == 3 else found

        patch.setattr(loop.engine, "complete", lies)
        for module in (delivery, plan):
            patch.setattr(module, "fits", lambda row, vocabulary: True)
        with pytest.raises(IndexError):
            asyncio.run(loop.run())
    with Store.open(path, write=True) as store:
        history = history_in(store, path, config)
        history.restore()
        loop = loop_in(history, config, **options)
        asyncio.run(loop.run())
        (bad,) = [tape.id for tape in store.tapes() if any(10**6 in (call.completion or ()) for call in tape.calls)]
        assert [use.info.get("beyond") for use in store.ledger("run").uses] == [[bad], None]
        assert [tape for use in store.ledger("run").uses for tape, *_ in use.items].count(bad) == 0
        assert caplog.text.count(bad) == 1
        books, audit = audit_run(store)
        assert books.tokens["filtered"] == store.tape(bad).calls[0].usage.completion_tokens
        (told,) = [odd for odd in audit.anomalies if odd.kind == "unknown token ids"]
        assert (told.count, told.tapes) == (1, (bad,))
        shutil.rmtree(path / "checkpoints")
        again = history_in(store, path, config)
        assert again.restore() == 2, "the updates are the same without their checkpoints"
    assert_books_close(path)
