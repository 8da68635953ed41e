"""A run that a later version wrote: what this version doesn't know is named, and nothing is called broken for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import tapereel as tr
from tapereel.cli import main
from tapereel.tapes.errors import NewerRecord
from tapereel.tapes.records import Publish
from tapereel.tapes.schema import parse_record
from tapereel.tapes.store import Store, verify


class Echo(tr.Environment):
    async def reset(self, task: str) -> str:
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        return tr.Outcome("so", reward=1.0, terminated=True)


Grown = tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]
"""(kind of record, what a later version makes of it, the part that this version doesn't know)."""
GROWN: dict[str, Grown] = {
    "an optional field": ("step", lambda one: {**one, "seconds": 1.5}, 'the field "seconds"'),
    "a field of a call": ("call", lambda one: {**one, "cost_centre": "x"}, 'the field "cost_centre"'),
    "a field inside": ("begin", lambda one: {**one, "env": {**one["env"], "image": "x"}}, 'the field "env.image"'),
    "an enum member": ("end", lambda one: {**one, "status": "paused"}, "'paused' of the field \"status\""),
    "a kind of run record": ("publish", lambda one: {**one, "t": "note"}, 'the type "note"'),
}


def grown_by(parts: Iterable[Grown], folder: Path) -> Path:
    """A run of two episodes, in which the first record of each named kind has a part that only a later version
    knows."""
    run = tr.run(tr.ChatAgent(), Echo, ["a", "b"], ["yes"], out=folder / "run")
    with Store.open(run.path) as store:
        bodies = [
            stored.body for stored in store.records() if stored.t not in ("open", "commit", "seal", "lead", "files")
        ]
    bodies.append(Publish(version="base:0", digest="0" * 64, at=0.0).body())
    for kind, change, _ in parts:
        at = next(k for k, body in enumerate(bodies) if json.loads(body)["t"] == kind)
        bodies[at] = json.dumps(change(json.loads(bodies[at])), separators=(",", ":")).encode()
    with Store.create(folder / "grown") as store:
        for body in bodies:
            store.writer.append(body)
    return folder / "grown"


@pytest.fixture(params=GROWN)
def grown(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A run with one such part, and the part."""
    return grown_by([GROWN[request.param]], tmp_path), GROWN[request.param][2]


def test_what_a_later_version_wrote_is_undecided_and_named(grown: tuple[Path, str], capsys) -> None:
    run, part = grown
    report = verify(run)
    assert (report.exit_code, report.verdict, report.broken) == (2, "undecided", ())
    assert [sentence for sentence in report.unknown if part in sentence], report.unknown
    assert main(["verify", str(run)]) == 2
    assert part in capsys.readouterr().out
    assert main(["show", str(run)]) == 0
    assert main(["scores", str(run)]) == 0
    capsys.readouterr()


def test_a_tape_with_such_a_record_says_so_and_is_not_replayed(grown: tuple[Path, str], capsys) -> None:
    run, part = grown
    with Store.open(run) as store:
        tape = store.summaries()[0].id
        if "note" in part:  # a record of no tape, so that every tape can be read
            assert store.tape(tape).id == tape
            return
        with pytest.raises(NewerRecord) as caught:
            store.tape(tape)
    assert part in str(caught.value)
    assert main(["show", str(run), tape]) == 2
    shown = capsys.readouterr()
    assert part in shown.err
    assert "pydantic" not in shown.err


def test_all_parts_of_one_run_are_named_and_a_flipped_bit_is_still_broken(tmp_path: Path, capsys) -> None:
    parts = [GROWN[name] for name in ("an optional field", "an enum member", "a kind of run record")]
    run = grown_by(parts, tmp_path)
    assert main(["verify", str(run), "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert (report["verdict"], report["broken"], len(report["unknown"])) == ("undecided", [], 3)
    assert all(any(part in sentence for sentence in report["unknown"]) for _, _, part in parts)
    (segment,) = (run / "tapes").glob("*.jsonl")
    data = bytearray(segment.read_bytes())
    data[data.index(b'"yes"') + 1] ^= 1
    segment.write_bytes(data)
    assert main(["verify", str(run), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "broken"


def test_a_record_that_is_wrong_in_another_way_is_not_newer() -> None:
    body = {"t": "void", "lineage": "run", "update": "x", "unknown": 1}
    with pytest.raises(ValidationError):
        parse_record(json.dumps(body).encode())
