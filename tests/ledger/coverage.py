"""Which test proves which row of the capability ledger: docs/project/coverage.md, made from the marks on the tests.

    python tests/ledger/coverage.py            writes the page
    python tests/ledger/coverage.py --check    says what is wrong and writes nothing; exit code 1 if anything is

A row is what the library must be able to do, or a trap that it must not fall into; they are listed in
`rows_of_ledger.json`, with the area of the project that answers for each. A test says by
`@pytest.mark.ledger("F37", "T02")` which rows it proves: literals on the test itself, so that this page follows from
the text of the tests, and nothing has to be imported or run.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

if __package__:
    from .reach import Reach
else:
    from reach import Reach

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "project" / "coverage.md"
LEDGER = Path(__file__).with_name("rows_of_ledger.json")
BUILT = (2, 3, 4)
"""Areas whose every row has a test, or a reason in `missing` why it has none yet."""


class Ledger(NamedTuple):
    """The rows, and what is known of them."""

    blocks: dict[str, list[dict]]
    """Rows by block: `id`, `what` holds, and `issue`: the number of its area; None: later than all of them."""
    areas: dict[str, str]
    """Name of each area by its number."""
    missing: dict[str, str]
    """Rows of a built area that no test proves yet, and why."""
    inside: dict[str, str]
    """Rows whose tests all make records inside by hand (`Reach.by_hand`), and why no run shows them."""

    def rows(self) -> Iterator[dict]:
        for block in self.blocks.values():
            yield from block


class Proof(NamedTuple):
    """A test that carries a row's mark."""

    file: str
    """From the root of the repository."""
    test: str
    by_hand: bool = False
    """It makes records inside and goes through no door: it can't prove a row alone."""


def read() -> Ledger:
    """The ledger as it is kept beside this file."""
    whole = json.loads(LEDGER.read_text(encoding="utf-8"))
    return Ledger(whole["blocks"], whole["areas"], whole["missing"], whole["inside"])


def marks(folder: Path) -> tuple[dict[str, list[Proof]], list[str]]:
    """(tests by row, marks that can't be read: each with its place)."""
    proofs: dict[str, list[Proof]] = {}
    unread: list[str] = []
    reach = Reach(folder.parent)
    for path in sorted(folder.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = path.relative_to(folder.parent).as_posix()
        on_tests: set[int] = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
                continue
            its = list(filter(_is_mark, node.decorator_list))
            on_tests |= set(map(id, its))
            for row in dict.fromkeys(row for mark in its for row in _rows(mark)):
                proofs.setdefault(row, []).append(Proof(file, node.name, reach.by_hand(file, node.name)))
        unread += [
            f"{file}:{node.lineno}: write the rows as literals in a decorator of the test"
            for node in ast.walk(tree)
            if _is_mark(node) and (id(node) not in on_tests or not _rows(node))
        ]
    return proofs, unread


def _is_mark(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.ledger"


def _rows(mark: ast.AST) -> list[str]:
    """The rows that a mark names; none when it computes them."""
    assert isinstance(mark, ast.Call)
    named = [a.value for a in mark.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return named if len(named) == len(mark.args) and not mark.keywords else []


def problems(ledger: Ledger, proofs: dict[str, list[Proof]], unread: list[str]) -> list[str]:
    """What keeps the page from being true, a sentence each."""
    known = [row["id"] for row in ledger.rows()]
    wrong = list(unread)
    wrong += [f"row {name} is listed twice" for name in sorted({n for n in known if known.count(n) > 1})]
    wrong += [
        f"{proof.file}::{proof.test} proves row {name}, which is not in {LEDGER.name}"
        for name, tests in proofs.items()
        if name not in known
        for proof in tests
    ]
    wrong += [
        f"no test carries the mark of row {row['id']} ({row['what']}): write one, or give the reason in "
        f"`missing` of {LEDGER.name}"
        for row in ledger.rows()
        if row["issue"] in BUILT and row["id"] not in proofs and row["id"] not in ledger.missing
    ]
    wrong += [
        f"row {name} is listed as missing and has a test: take it out of `missing`"
        for name in ledger.missing
        if name in proofs
    ]
    wrong += [
        f"`missing` names row {name}, which is no row of a built area"
        for name in ledger.missing
        if name not in {row["id"] for row in ledger.rows() if row["issue"] in BUILT}
    ]
    by_hand = [name for name, tests in proofs.items() if all(proof.by_hand for proof in tests)]
    wrong += [
        f"all tests of row {name} make records inside by hand: write one that reaches it by settings or by the public "
        f"functions, or give the reason in `inside` of {LEDGER.name}"
        for name in by_hand
        if name not in ledger.inside
    ]
    wrong += [f"row {name} is listed as inside and isn't: take it out" for name in ledger.inside if name not in by_hand]
    return wrong


def state(row: dict, ledger: Ledger, proofs: dict[str, list[Proof]]) -> str:
    """One of `proven`, `inside`, `missing`, `later` and `open: AREA`."""
    if row["id"] in ledger.inside:
        return "inside"
    if row["id"] in proofs:
        return "proven"
    if row["id"] in ledger.missing:
        return "missing"
    return "later" if row["issue"] is None else f"open: {ledger.areas[str(row['issue'])]}"


def page(ledger: Ledger, proofs: dict[str, list[Proof]]) -> str:
    """The whole of docs/project/coverage.md."""
    states = [state(row, ledger, proofs) for row in ledger.rows()]
    lines = ["# Coverage", "", *INTRODUCTION, "", "| state | rows |", "|---|---|"]
    lines += [f"| {name} | {states.count(name)} |" for name in sorted(set(states), key=lambda s: (s != "proven", s))]
    for block, rows in ledger.blocks.items():
        lines += ["", f"## {block}", "", "| row | what holds | tests |", "|---|---|---|"]
        for row in rows:
            lines.append(f"| {row['id']} | {row['what']} | {_cell(row, ledger, proofs)} |")
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
The library's promises, one a row, and the test files that prove them. F rows are capabilities, X rows extend them,
T rows are traps that other libraries fell into, and P rows hold for any batch. A test names its rows with
`@pytest.mark.ledger("F37", "T02")`, so search a linked file for a row's name. `python tests/ledger/coverage.py` makes
this page, and a test fails if it is out of date. `tests/ledger/*.json` has the numbers of the closed forms.

Tests in the first files reach the row as a user does: by a setting of `tapereel train`, a verb or the public Python
functions. The files after "also" make rows, episodes or a stream by hand, and prove no row alone. If a row has only
tests of this kind, its state is *inside*, and the table gives the reason. A row that is *later* has no code yet.\
""".splitlines()


def _cell(row: dict, ledger: Ledger, proofs: dict[str, list[Proof]]) -> str:
    how = state(row, ledger, proofs)
    if how == "missing":
        return f"**missing**: {ledger.missing[row['id']]}"
    if how not in ("proven", "inside"):
        return how
    files: dict[bool, dict[str, None]] = {False: {}, True: {}}
    for proof in proofs[row["id"]]:
        files[proof.by_hand and how == "proven"][proof.file] = None
    parts = [", ".join(map(_link, files[False]))]
    others = ", ".join(_link(file) for file in files[True] if file not in files[False])
    parts += [f"also {others}"] if others else []
    reason = f"**inside**: {ledger.inside[row['id']]}. " if how == "inside" else ""
    return reason + "; ".join(parts)


def _link(file: str) -> str:
    return f"[{Path(file).stem.removeprefix('test_')}](../../{file})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    ledger = read()
    proofs, unread = marks(ROOT / "tests")
    wrong = problems(ledger, proofs, unread)
    text = page(ledger, proofs)
    if check and (not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text):
        wrong.append("docs/project/coverage.md isn't what the marks say: run python tests/ledger/coverage.py")
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    print("\n".join(wrong) or "every row of the areas that are built has a test", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
