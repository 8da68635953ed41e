"""Every row of the capability ledger has its tests, and docs/project/coverage.md says which."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import coverage
from .coverage import Ledger, Proof
from .reach import Reach

ROWS = {
    "A": [{"id": "F1", "what": "this", "issue": 4}, {"id": "F2", "what": "that", "issue": 4}],
    "B": [{"id": "F3", "what": "far", "issue": 6}, {"id": "F4", "what": "farther", "issue": None}],
}
PROOF = Proof("tests/test_a.py", "test_it_holds")


def ledger(missing: dict[str, str] | None = None, inside: dict[str, str] | None = None) -> Ledger:
    return Ledger(ROWS, {"4": "here", "6": "there"}, missing or {}, inside or {})


@pytest.mark.docs
@pytest.mark.ledger("T54")
def test_the_page_is_what_the_marks_say_and_no_row_is_without_a_test():
    known = coverage.read()
    proofs, unread = coverage.marks(coverage.ROOT / "tests")
    assert coverage.problems(known, proofs, unread) == []
    assert coverage.PAGE.read_text(encoding="utf-8") == coverage.page(known, proofs), "run tests/ledger/coverage.py"


def test_a_row_without_a_test_needs_a_reason_and_a_stale_reason_is_found():
    (gap,) = coverage.problems(ledger(), {"F1": [PROOF]}, [])
    assert "row F2 (that)" in gap
    assert coverage.problems(ledger({"F2": "because"}), {"F1": [PROOF]}, []) == []
    (stale,) = coverage.problems(ledger({"F2": "because"}), {"F1": [PROOF], "F2": [PROOF]}, [])
    assert "take it out" in stale
    (unknown,) = coverage.problems(ledger(), {"F1": [PROOF], "F2": [PROOF], "F9": [PROOF]}, [])
    assert "tests/test_a.py::test_it_holds proves row F9" in unknown
    twice = Ledger({"A": [*ROWS["A"], ROWS["A"][0]]}, {}, {"F3": "far"}, {})
    assert len(coverage.problems(twice, {"F1": [PROOF], "F2": [PROOF]}, [])) == 2


def test_a_row_that_is_only_checked_by_hand_needs_a_reason():
    by_hand = PROOF._replace(by_hand=True)
    (gap,) = coverage.problems(ledger(), {"F1": [by_hand], "F2": [PROOF, by_hand]}, [])
    assert "all tests of row F1 make records inside by hand" in gap
    assert coverage.problems(ledger(inside={"F1": "because"}), {"F1": [by_hand], "F2": [PROOF]}, []) == []
    (stale,) = coverage.problems(ledger(inside={"F1": "because"}), {"F1": [by_hand, PROOF], "F2": [PROOF]}, [])
    assert "row F1 is listed as inside and isn't" in stale
    other = by_hand._replace(file="tests/x/test_b.py")
    proofs = {"F1": [by_hand], "F2": [by_hand._replace(test="test_it_adds_up"), other, PROOF]}
    text = coverage.page(ledger(inside={"F1": "because"}), proofs)
    assert "| F1 | this | **inside**: because. [a](../../tests/test_a.py) |" in text
    assert "| F2 | that | [a](../../tests/test_a.py); also [b](../../tests/x/test_b.py) |" in text


def test_by_hand_is_read_through_helpers_and_fixtures(tmp_path: Path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "build.py").write_text(
        "import tapereel as tr\nfrom tapereel.finetune.data.stream import Episode\n\n"
        "def made():\n    return Episode()\n\ndef played():\n    return tr.train()\n"
    )
    (folder / "conftest.py").write_text(
        "import pytest\nfrom .build import played\n\n@pytest.fixture\ndef run():\n    return played()\n"
    )
    (folder / "test_a.py").write_text(
        "from . import build\nfrom .build import made\n\ndef test_hand():\n    made()\n\n"
        "def test_door(run):\n    made()\n\ndef test_both():\n    build.made()\n    build.played()\n\n"
        "def test_neither():\n    pass\n"
    )
    reach = Reach(tmp_path)
    tests = ("test_hand", "test_door", "test_both", "test_neither")
    assert [reach.by_hand("tests/test_a.py", test) for test in tests] == [True, False, False, False]


def test_each_row_has_its_state_and_its_tests():
    proofs = {"F1": [PROOF, Proof("tests/test_a.py", "test_again"), Proof("tests/x/test_b.py", "test_too")]}
    states = [coverage.state(row, ledger({"F2": "because"}), proofs) for row in ledger().rows()]
    assert states == ["proven", "missing", "open: there", "later"]
    text = coverage.page(ledger({"F2": "because"}), proofs)
    assert "| F1 | this | [a](../../tests/test_a.py), [b](../../tests/x/test_b.py) |" in text
    assert "| F2 | that | **missing**: because |" in text
    assert "| open: there | 1 |" in text


def test_a_mark_is_a_literal_on_a_test(tmp_path: Path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text(
        "import pytest\nrow = 'F1'\n\n@pytest.mark.ledger('F1', 'F2')\nasync def test_it():\n    pass\n\n"
        "@pytest.mark.ledger(row)\ndef test_computed():\n    pass\n\n"
        "@pytest.mark.ledger('F3')\ndef helper():\n    pass\n\n"
        "cases = [pytest.param(1, marks=pytest.mark.ledger('F4'))]\n"
    )
    proofs, unread = coverage.marks(folder)
    assert proofs == {name: [Proof("tests/test_a.py", "test_it")] for name in ("F1", "F2")}
    assert [line.split(": ")[0] for line in unread] == [f"tests/test_a.py:{n}" for n in (8, 12, 16)]
