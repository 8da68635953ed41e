"""The format, as bytes that ship: what was written once must read the same for ever, by both verifiers.

Changing these files changes what old runs mean; a new format gets a new schema name and new vectors beside them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tapereel.tapes import Corrupt
from tapereel.tapes.store import Store, encode_line, verify, verify_tape

GOLDEN = Path(__file__).parent / "golden"
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())


@pytest.fixture(params=sorted(EXPECTED))
def vector(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy, as reading makes an index beside the segments."""
    run = tmp_path / request.param
    shutil.copytree(GOLDEN / request.param, run)
    return run, EXPECTED[request.param]


def test_both_verifiers_say_what_is_expected(vector: tuple[Path, dict[str, Any]]) -> None:
    run, expected = vector
    report = verify(run)
    code, independent = verify_tape.check(run, [])
    assert report.exit_code == code == expected["exit_code"], (report.broken, report.torn, independent)
    assert report.records == independent["records"] == expected["records"]
    assert {s.name: s.head for s in report.segments} == expected["heads"]
    assert {name: s["head"] for name, s in independent["segments"].items()} == expected["heads"]
    assert independent["tapes"] == expected["digests"]


def test_tapes_have_the_digests_that_the_independent_verifier_computes(vector: tuple[Path, dict[str, Any]]) -> None:
    run, expected = vector
    with Store.open(run) as store:
        if expected["exit_code"] == 1:
            with pytest.raises(Corrupt):
                list(store.tapes())
            return
        assert {tape.id: tape.digest for tape in store.tapes()} == expected["digests"]


def test_the_independent_verifier_runs_on_its_own(vector: tuple[Path, dict[str, Any]]) -> None:
    run, expected = vector
    name, head = next(iter(expected["heads"].items()))
    command = [sys.executable, "-I", "-S", verify_tape.__file__, str(run)]
    done = subprocess.run([*command, "--pin", f"{name}:{head}"], capture_output=True, text=True, check=False)
    assert done.returncode == expected["exit_code"], done.stderr
    assert json.loads(done.stdout)["verdict"] == ("holds", "broken", "undecided")[expected["exit_code"]]
    done = subprocess.run([*command, "--pin", f"{name}:{'0' * 64}"], capture_output=True, text=True, check=False)
    assert done.returncode == 1


def test_the_independent_verifier_is_small_and_alone() -> None:
    text = Path(verify_tape.__file__).read_text()
    assert len(text.splitlines()) <= 135
    imports = [line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert set(imports) <= sys.stdlib_module_names


def test_a_line_is_exactly_these_bytes() -> None:
    line, head = encode_line(3, 2, b"0" * 64, b'{"t":"commit"}')
    assert head == EXPECTED_LINE.split(b'"')[-2]
    assert line == EXPECTED_LINE


EXPECTED_LINE = (
    b'{"n":3,"c":2,"p":"0000000000000000000000000000000000000000000000000000000000000000","b":{"t":"commit"},'
    b'"h":"dbda783b6d22fbde45fe99fe2dd536344f1dd7d83faedaf01bd6aaa85a0ffa58"}\n'
)
