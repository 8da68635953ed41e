"""Lines, segments and pins that are cut off, emptied, deleted or added after a run was closed: findings A11 and beyond.

What can't be known without a pin that was kept elsewhere stands at the end: a run whose files were changed together.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.tapes.records import SCHEMA, Lead, Open, Seal
from tapereel.tapes.store import Lease, Store, encode_line, verify
from tapereel.tapes.store.segment import ZERO
from tapereel.tapes.store.verifier import Report

from ..tapes.store.lab import Lab

lab = Lab()


def write(store: Store, *tapes: str) -> None:
    for tape in tapes:
        for body in lab.episode(tape):
            store.writer.append(body)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A closed run under a lease, of two segments."""
    path = tmp_path / "run"
    path.mkdir()
    with Lease(path) as lease, Store.create(path, rotate_bytes=4_000, thread=False) as store:
        store.take_lead(lease)
        for k in range(8):
            write(store, f"t{k}")
            store.writer.sync()
    assert len(segments(path)) >= 2
    assert verify(path).exit_code == 0
    return path


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A closed run under a lease, of one segment."""
    path = tmp_path / "single"
    path.mkdir()
    with Lease(path) as lease, Store.create(path) as store:
        store.take_lead(lease)
        write(store, "a", "b")
    return path


def segments(run: Path) -> list[Path]:
    return sorted((run / "tapes").glob("*.jsonl"))


def cut(path: Path, keep: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:keep]))


def pins(run: Path) -> dict[str, str]:
    return json.loads((run / "pins.json").read_text())


def head_of(run: Path) -> str:
    head = verify(run).head
    assert head is not None
    return head


def forged(run: Path, *, seal: bool) -> Path:
    """A segment behind the last one, with fitting hashes, as anybody can write it."""
    name = f"{int(segments(run)[-1].stem[:6]) + 1:06d}-abcdef"
    last = verify(run).segments[-1]
    body = Open(segment=name, pid=1, at=0.0, pins={last.name: last.head}, versions={"schema": SCHEMA}).body()
    line, first = encode_line(0, 0, last.head.encode(), body)
    lines, head = [line], first
    for body in lab.episode("forged"):
        line, head = encode_line(len(lines), 1, head, body)
        lines.append(line)
    if seal:
        body = Seal(opened=first.decode(), reason="closed", next=None).body()
        lines.append(encode_line(len(lines), len(lines), head, body)[0])
    path = run / "tapes" / f"{name}.jsonl"
    path.write_bytes(b"".join(lines))
    return path


def gone(run: Path) -> None:
    (run / "pins.json").unlink()


def emptied(run: Path) -> None:
    (run / "pins.json").write_bytes(b"")


def braces(run: Path) -> None:
    (run / "pins.json").write_text("{}")


def one_less(run: Path) -> None:
    (run / "pins.json").write_text(json.dumps(dict([*pins(run).items()][:-1])))


@pytest.mark.parametrize("change", [gone, emptied, braces, one_less])
def test_a_closed_run_without_its_pins_does_not_hold(single: Path, change: Callable[[Path], None]) -> None:
    change(single)
    assert verify(single).exit_code in (1, 2)
    assert "pins" in " ".join([*verify(single).unsettled, *verify(single).broken])


@pytest.mark.parametrize("lock", ["file", "pipe"])
def test_a_lock_that_cant_be_tested_hides_nothing(single: Path, lock: str) -> None:
    gone(single)
    (single / "tapes" / "lock").unlink()
    if lock == "pipe":
        os.mkfifo(single / "tapes" / "lock")
    assert verify(single).exit_code == 2


@pytest.mark.parametrize("keep", [-1, -3, 3, 2])
@pytest.mark.parametrize("leads", ["kept", "deleted", "emptied"])
def test_a_cut_tail_of_a_led_run_does_not_hold_without_pins(single: Path, keep: int, leads: str) -> None:
    (path,) = segments(single)
    cut(path, keep)
    assert verify(single).exit_code == 1  # `pins.json` names the last line
    gone(single)
    if leads == "deleted":
        shutil.rmtree(single / "leads")
    elif leads == "emptied":
        next((single / "leads").iterdir()).write_bytes(b"")
    report = verify(single)
    assert report.exit_code == 2
    assert "lead 1" in report.unsettled[0]


@pytest.mark.parametrize("k", [0, 1, -1])
@pytest.mark.parametrize("change", ["deleted", "emptied", "first line"])
def test_a_segment_that_is_gone_or_empty_does_not_hold(run: Path, k: int, change: str) -> None:
    path = segments(run)[k]
    gone(run)
    if change == "deleted":
        path.unlink()
    else:
        cut(path, change == "first line")
    assert verify(run).exit_code in (1, 2)


def test_an_empty_run_does_not_hold(tmp_path: Path) -> None:
    with Store.create(tmp_path / "run") as store:
        write(store, "a")
    gone(tmp_path / "run")
    cut(segments(tmp_path / "run")[0], 0)
    (sentence,) = verify(tmp_path / "run").unsettled
    assert segments(tmp_path / "run")[0].stem in sentence


def test_names_of_next_segments_that_go_in_a_circle_end(single: Path) -> None:
    """The names are those of records, and records can be forged."""
    (path,) = segments(single)
    name = path.stem
    lines, head = list[bytes](), ZERO
    first = b""
    for body in (
        Open(segment=name, pid=1, at=0.0, pins={}, versions={"schema": SCHEMA}).body(),
        Lead(epoch=1, host="h", pid=1, at=0.0).body(),
    ):
        line, head = encode_line(len(lines), len(lines), head, body)
        first = first or head
        lines.append(line)
    lines.append(encode_line(2, 2, head, Seal(opened=first.decode(), reason="full", next=name).body())[0])
    path.write_bytes(b"".join(lines))
    gone(single)
    verify(single)


# --exact


def exact(run: Path, *pins: str) -> Report:
    return verify(run, exact=pins)


def test_nothing_comes_after_an_exact_pin(single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, kept = head_of(single), tmp_path / "kept.json"
    shutil.copy(single / "pins.json", kept)
    for pin in (head, head.split(":")[1], str(kept)):
        assert exact(single, pin).exit_code == 0
    for seal in (False, True):
        path = forged(single, seal=seal)
        if seal:  # and its head beside the others
            report = verify(single).segments[-1]
            (single / "pins.json").write_text(json.dumps({**pins(single), report.name: report.head}))
        assert verify(single, pins=[head]).exit_code == 0, "a pin is a floor"
        for pin in (head, head.split(":")[1], str(kept)):
            assert re.search(rf"{path.stem}.*\bpin\b", exact(single, pin).broken[0])
            assert main(["verify", str(single), "--exact", pin]) == 1
        assert path.stem in capsys.readouterr().out
        path.unlink()
        shutil.copy(kept, single / "pins.json")
    (path,) = segments(single)
    whole = path.read_bytes()
    path.write_bytes(whole + b"x")
    assert exact(single, head).exit_code == 1
    path.write_bytes(b"")
    path.unlink()
    path.symlink_to(path)
    assert exact(single, head).exit_code == 1


def test_an_exact_pin_before_the_end_is_not_the_end(single: Path) -> None:
    (path,) = segments(single)
    line = path.read_bytes().splitlines()[4]
    assert exact(single, line[-66:-2].decode()).exit_code == 1
    assert exact(single, f"{path.stem}:{'0' * 64}").exit_code == 1
    (single / "none.json").write_text("{}")
    assert exact(single, str(single / "none.json")).exit_code == 1


def test_a_run_that_went_on_needs_a_new_exact_pin(run: Path) -> None:
    old = head_of(run)
    with Store.open(run, write=True) as store:
        write(store, "more")
    assert exact(run, old).exit_code == 1
    assert exact(run, head_of(run)).exit_code == 0, "the newest head stands for all segments before"


def test_two_writers_at_once_need_both_heads(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = Store.create(run)
    second = Store.open(run, write=True)
    for store in (first, second, first, second):
        write(store, f"{id(store)}{store.writer.durable_lines}")
        store.writer.sync()
    second.close()
    first.close()
    assert verify(run).exit_code == 0
    assert set(pins(run)) == {path.stem for path in segments(run)}
    assert exact(run, head_of(run)).exit_code == 1, "the first went on after the second pinned it"
    assert exact(run, str(run / "pins.json")).exit_code == 0


def test_two_writers_that_close_at_once_leave_both_heads(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = Store.create(run)
    second = Store.open(run, write=True)
    refresh, other = first.refresh, threading.Thread(target=second.close)

    def between(*args: object) -> object:
        """The second closes after the first has read the heads, and before it writes them, if nothing keeps it out."""
        found = refresh()
        if not other.ident:
            other.start()
            other.join(timeout=2)
        return found

    first.refresh = between  # type: ignore[method-assign, assignment]
    first.close()
    other.join()
    assert set(pins(run)) == {path.stem for path in segments(run)}
    assert verify(run).exit_code == 0


def test_an_added_checkpoint_is_after_an_exact_pin(single: Path) -> None:
    head = head_of(single)
    (single / "checkpoints" / "update-000001").mkdir(parents=True)
    (single / "checkpoints" / "update-000001" / "state.json").write_text("{}")
    assert verify(single).exit_code == 0
    assert "update-000001" in exact(single, head).broken[0]


def test_a_fork_and_a_segment_that_is_no_file(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Store.create(run) as store:
        write(store, "a")
        parent = {"tape": "a", "records": 1, "digest": "0" * 64, "turn": 0}
        store.writer.append(lab.begin("b", parent=parent))
    with Store.open(run, write=True) as store:
        write(store, "c")
    path = segments(run)[1]
    path.unlink()
    os.mkfifo(path)
    assert any(path.name in text and "regular" in text for text in verify(run).broken)


# What can't be known without a pin that was kept elsewhere


def test_only_a_pin_shows_what_was_changed_together(single: Path) -> None:
    """Documented in docs/reference/security.md: a cut run that looks like a crashed one in every file."""
    head = head_of(single)
    (path,) = segments(single)
    cut(path, 1)
    gone(single)
    shutil.rmtree(single / "leads")
    assert verify(single).exit_code == 0
    assert verify(single, pins=[head]).exit_code == 1
