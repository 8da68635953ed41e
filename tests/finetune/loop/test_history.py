"""History: every recorded version can be made again from the base weights, and what doesn't add up is refused."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.engines.embedded import weights_digest
from tapereel.finetune import History, OptimiserConfig
from tapereel.finetune.loop import BrokenHistory
from tapereel.finetune.loop.history import Differs
from tapereel.finetune.trainer import copied_weights, save_checkpoint
from tapereel.tapes import Status, Tape
from tapereel.tapes.records import Label
from tapereel.tapes.store import Store

from .lab import Flaky, assert_books_close, history_in, loop_in, model, run, settings_of, tasks

CONFIG = settings_of(updates=5, checkpoint_every=2)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    run(path, CONFIG, tasks=tasks(1))
    return path


@pytest.fixture
def trained(original: Path, tmp_path: Path) -> Path:
    """A run of five updates, this test's own."""
    return shutil.copytree(original, tmp_path / "run")


def digest(history: History) -> str:
    return weights_digest(copied_weights(history.model))


def published(store: Store) -> dict[str, str]:
    return {stored.record.version: stored.record.digest for stored in store.run_records("publish")}


def test_every_version_is_made_again_bit_for_bit(trained: Path, tmp_path: Path) -> None:
    with Store.open(trained) as store:
        known = published(store)
        for k in range(1, 6):
            fresh = history_in(store, tmp_path / f"fresh{k}", CONFIG)
            assert fresh.restore(until=k) == k, "there is no checkpoint there"
            assert (fresh.version, digest(fresh)) == (f"run:{k}", known[f"run:{k}"])
        beside = history_in(store, trained, CONFIG)
        assert beside.restore() == 0, "the last checkpoint has it"
        assert digest(beside) == known["run:5"]
        assert history_in(store, tmp_path / "none", CONFIG).restore(until=0) == 0


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("optimiser", r"\blr 0\.02\b.*\b0\.01\b"),
        ("base", r"\bloss -?\d"),
    ],
)
def test_what_can_t_be_the_same_weights_is_refused(trained: Path, tmp_path: Path, what: str, match: str) -> None:
    config = CONFIG.model_copy(update={"optimiser": OptimiserConfig(lr=2e-2)}) if what == "optimiser" else CONFIG
    with Store.open(trained) as store, pytest.raises(BrokenHistory, match=match):
        history_in(store, tmp_path / "fresh", config, policy=model(seed=1 if what == "base" else 0)).restore()


def test_another_recipe_trains_on_other_tokens_or_weights(trained: Path, tmp_path: Path) -> None:
    with Store.open(trained) as store:
        other = history_in(store, tmp_path / "a", CONFIG, changes={"weigh": {"kind": "episode"}})
        with pytest.raises(Differs) as found:
            other.restore()
        assert found.value.field == "recipe"


def test_a_layer_that_is_younger_than_the_update_changes_nothing(trained: Path, tmp_path: Path) -> None:
    with Store.open(trained, write=True) as store:
        tape, call, *_ = next(s.record for s in store.run_records("use") if s.record.items).items[0]
        store.append_layer(Label(tape=tape, call=call, use="discarded"))
        store.writer.sync()
        history = history_in(store, tmp_path / "b", CONFIG)
        assert history.restore() == 5
        assert digest(history) == published(store)["run:5"]
        assert not any(row.calls[0] == call for row in history.from_store(tape)[0]), "but what comes now heeds it"


def test_a_missing_update_is_named(trained: Path, tmp_path: Path) -> None:
    with Store.open(trained) as store, Store.create(tmp_path / "partial") as partial:
        for stored in store.records():
            if stored.t in ("open", "commit", "seal") or (stored.t == "use" and stored.record.update == 2):
                continue
            partial.writer.append(stored.body)
        partial.writer.sync()
        with pytest.raises(BrokenHistory, match=r"update 2\b.*update 3\b"):
            history_in(partial, tmp_path / "fresh", CONFIG).restore()


def test_a_checkpoint_of_another_lineage_or_of_the_future_is_not_loaded(trained: Path, tmp_path: Path) -> None:
    for update, lineage in ((5, "other"), (9, "run")):
        state = {"lineage": lineage, "phase": "", "trained_tokens": 0}
        save_checkpoint(tmp_path / "c" / "checkpoints", model(seed=3), {}, state, update=update)
    with Store.open(trained) as store:
        history = history_in(store, tmp_path / "c", CONFIG)
        assert history.restore() == 5
        assert digest(history) == published(store)["run:5"]


class Gone(BaseException):
    """The process is dead."""


@pytest.mark.parametrize("lag", [0, 1])
def test_a_loop_that_is_abandoned_goes_on_with_the_same_groups(tmp_path: Path, lag: int) -> None:
    path, config = tmp_path / "run", settings_of(updates=6, max_lag=lag, groups=3)
    Flaky.luck = random.Random(2)
    rng = random.Random(lag)
    done = False
    for attempt in range(50):
        store = Store.open(path, write=True) if attempt else Store.create(path)
        history = history_in(store, path, config)
        history.restore()
        loop = loop_in(history, config, env=Flaky, tasks=tasks(3))
        done = abandoned(loop, rng.randint(2, 300))
        store.close() if done else store.abandon()
        if done:
            break
    assert done
    assert attempt > 4
    assert_books_close(path)
    store = Store.open(path)
    tries: dict[tuple[Any, int], list[Tape]] = {}
    for tape in store.tapes(split="train"):
        tries.setdefault((tape.begin.group, tape.begin.attempt), []).append(tape)
    for found in tries.values():
        own = [tape for tape in found if tape.status not in (Status.CRASHED, Status.CANCELLED)]
        assert len(own) <= 2, "sampled again once, by however many processes"
        assert sum(tape.trains for tape in found) <= 1
        assert len({tape.begin.seed for tape in own}) == len(own)
        assert len({tape.begin.seed for tape in found}) <= len(own) + 1, "what was cut is repeated with its seed"
    uses = [stored.record for stored in store.run_records("use")]
    assert [use.update for use in uses] == list(range(6))
    taken = [name for use in uses for name in use.info["tapes"]]
    assert len(taken) == len(set(taken))
    fresh = history_in(store, tmp_path / "fresh", config)
    assert fresh.restore() == 6
    assert digest(fresh) == published(store)["run:6"]
    store.close()


def abandoned(loop: Any, records: int) -> bool:
    """Run, but write no more than so many records; True when it was done before."""
    append, left = loop.store.writer.append, records

    def limited(body: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Gone
        append(body)

    loop.store.writer.append = limited
    try:
        asyncio.run(loop.run())
    except Gone:
        return False
    return True
