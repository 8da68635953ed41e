"""A remedy has the words of the floor that offers it, and otherwise those of the floor that has the problem."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapereel.tapes import errors as remedies
from tapereel.tapes.audit.climb import Climb
from tapereel.tapes.errors import Command, offer, remedy
from tapereel.tapes.store import Store
from tapereel.tapes.view.overview import checks, next_commands


@pytest.fixture
def nothing_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "_remedies", {})
    monkeypatch.setattr(remedies, "_checks", [])
    monkeypatch.setattr(remedies, "_looks", [])


@pytest.mark.usefixtures("nothing_offered")
def test_a_floor_has_its_own_words_until_another_one_offers_better_ones():
    assert remedy("look", "read it", tape="t") == "read it"
    assert (checks("run"), next_commands("run")) == ({}, ())
    offer({"look": "look --at {tape}"}, [Command("c {run}", "why"), Command("t {run}", trained=True)], [])
    assert remedy("look", "read it", tape="t") == "look --at t"
    assert checks("a b", trained=False) == {"c 'a b'": "why"}
    assert set(checks("a b")) == {"c 'a b'", "t 'a b'"}
    offer({}, [], [])
    assert remedy("look", "read it", tape="t") == "read it"


@pytest.mark.usefixtures("nothing_offered")
def test_advice_and_errors_have_remedies_without_upper_floors(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        starts = Climb(store, [], {}, []).starts
    assert starts[0] == "Begin with a warm start on right examples (the warm start tapes)."


def test_the_command_line_has_a_flag_where_python_has_a_function(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        starts = Climb(store, [], {}, []).starts
    assert "warm.tapes" in starts[0]
    assert "--take-over" in remedy("end lease", "end_lease")
    assert "end_lease" in remedy("end lease", "end_lease")
