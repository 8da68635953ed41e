"""Two policies of different weights learn from the same tapes, each from its own words, and the books close."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.engines.embedded import weights_digest
from tapereel.finetune.data.by_agent import rewards_of
from tapereel.finetune.inspect.explainer import Explainer
from tapereel.finetune.loop import BrokenHistory
from tapereel.finetune.loop.learner import BadPlayers
from tapereel.finetune.loop.loop import UpdateReport
from tapereel.finetune.trainer import checkpoints
from tapereel.tapes.records import Use
from tapereel.tapes.store import Store, verify

from ..loop.lab import assert_books_close, history_in
from .duet import ALTO, BASS, loop_of, settings, two


def weights(history: Any) -> str:
    return weights_digest(history.model.state_dict())


def trained(path: Path, **changes: Any) -> tuple[list[UpdateReport], dict[str, str], dict[str, str]]:
    """(reports, digests before, digests after) of a whole run."""
    reports: list[UpdateReport] = []
    config = settings(**changes.pop("settings", {}))
    with Store.create(path, durability="os") as store:
        both = two(store, path, config)
        before = {history.lineage: weights(history) for history in both}
        asyncio.run(loop_of(*both, config, on_update=reports.append, **changes).run())
        return reports, before, {history.lineage: weights(history) for history in both}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("duet") / "run"
    return path, trained(path)


def uses(path: Path) -> dict[str, list[Use]]:
    with Store.open(path, cache=False) as store:
        found = [stored.record for stored in store.run_records("use")]
    return {name: [use for use in found if use.lineage == name] for name in ("alto", "bass")}


def test_each_learns_from_its_own_words(run: tuple[Path, Any]) -> None:
    path, (reports, before, after) = run
    assert all(before[name] != after[name] for name in before)
    found = uses(path)
    assert [use.update for use in found["alto"]] == [use.update for use in found["bass"]] == [0, 1, 2]
    with Store.open(path) as store:
        by = {call.call: call.by for tape in store.tapes() for call in tape.calls}
        spans = {call.by: {v.partition(":")[0] for v, _, _ in call.spans} for t in store.tapes() for call in t.calls}
    assert {by[item[1]] for use in found["alto"] for item in use.items} == {ALTO}
    assert {by[item[1]] for use in found["bass"] for item in use.items} == {BASS}
    assert spans[ALTO] == {"alto"}
    assert spans[BASS] == {"bass"}
    assert {f"reward/agent/{ALTO}", f"reward/agent/{BASS}"} <= set(reports[0].metrics)


def test_the_books_close_and_the_run_verifies(run: tuple[Path, Any]) -> None:
    path, _ = run
    books = assert_books_close(path)
    assert books.tokens["context"] == 0, "what is context to one is trained by the other"
    assert verify(path).exit_code == 0


def test_both_are_explained(run: tuple[Path, Any]) -> None:
    path, _ = run
    with Store.open(path) as store:
        name = uses(path)["alto"][-1].info["tapes"][0]
        explained = Explainer(store).explain(name)
        own = [token for row in explained.rows for token in row.tokens if token.own]
        sampled = [token for token in own if token.version is not None]
    assert {token.fate for token in sampled} <= {"trained", "filtered"}
    assert {use.lineage for use in explained.uses} == {"alto", "bass"}


def test_a_frozen_agent_is_context_and_stays_as_it_was(tmp_path: Path) -> None:
    _, before, after = trained(tmp_path / "run", frozen=True)
    assert before["bass"] == after["bass"]
    assert before["alto"] != after["alto"]
    books = assert_books_close(tmp_path / "run")
    assert books.tokens["context"] > 0


def test_both_are_restored_bit_for_bit_from_the_tapes(run: tuple[Path, Any], tmp_path: Path) -> None:
    path, (_, before, after) = run
    config = settings()
    with Store.open(path, cache=False) as store:
        for history in two(store, tmp_path, config):
            assert weights(history) == before[history.lineage]
            assert history.restore() == 3
            assert weights(history) == after[history.lineage]


def test_a_player_makes_up_for_what_only_the_loop_recorded(tmp_path: Path) -> None:
    """The process dies after the loop's record of update 1 and before the player's."""
    path, config = tmp_path / "run", settings(checkpoint_every=100)
    whole = trained(tmp_path / "whole", settings={"checkpoint_every": 100})[2]
    with Store.create(path, durability="os") as store:
        both = two(store, path, config)
        append, seen = store.append_layer, []

        def dies(record: Any) -> None:
            seen.append(record)
            if isinstance(record, Use) and (record.lineage, record.update) == ("bass", 1):
                raise KeyboardInterrupt
            append(record)

        store.append_layer = dies  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(loop_of(*both, config).run())
    assert {name: len(found) for name, found in uses(path).items()} == {"alto": 2, "bass": 1}
    with Store.open(path, write=True, durability="os") as store:
        both = two(store, path, config)
        for history in both:
            history.restore()
        assert [history.updates for history in both] == [2, 1]
        asyncio.run(loop_of(*both, config).run())
        assert {history.lineage: weights(history) for history in both} == whole
    assert_books_close(path)
    assert [use.update for use in uses(path)["bass"]] == [0, 1, 2]
    assert [c.update for c in checkpoints(path / "bass" / "checkpoints")] == [3]


def test_who_trains_whom_must_be_plain(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        config = settings()
        alto, bass = two(store, tmp_path, config)
        with pytest.raises(BadPlayers, match=r"loop\.agents"):
            loop_of(alto, bass, settings(agents=None))
        with pytest.raises(BadPlayers, match="'duet/bass'"):
            loop_of(alto, bass, settings(agents=(ALTO, BASS)))
        with pytest.raises(BadPlayers, match="'alto'"):
            loop_of(alto, history_in(store, tmp_path / "x", config, lineage="alto"), config)
        bass.updates = 5
        with pytest.raises(BrokenHistory, match=r"\b5\b.*'alto'.*\b0\b"):
            loop_of(alto, bass, config)


def test_a_group_that_teaches_one_of_them_is_not_flat(tmp_path: Path) -> None:
    """Where flat groups are dropped, one is set aside only if it is flat for everybody who is trained."""
    config = settings(changes={"select": {"flat": "drop"}}, extra_groups=4, updates=1)
    with Store.create(tmp_path / "run", durability="os") as store:
        loop = loop_of(*two(store, tmp_path, config), config)
        assert loop.rollouts.trained == {ALTO, BASS}
        asyncio.run(loop.run())
        (use, *_) = [s.record for s in store.run_records("use") if s.record.lineage == "alto"]
        for name in use.info.get("aside", ()):
            group = store.tape(name).begin.group
            tapes = [tape for tape in store.tapes() if tape.begin.group == group]
            for path in (ALTO, BASS):
                assert len({rewards_of(tape, [path])[path] for tape in tapes}) == 1
        taken = {store.tape(name).begin.group for name in use.info["tapes"]}
        assert taken
        for group in taken:
            tapes = [tape for tape in store.tapes() if tape.begin.group == group]
            assert any(len({rewards_of(tape, [path])[path] for tape in tapes}) > 1 for path in (ALTO, BASS))
