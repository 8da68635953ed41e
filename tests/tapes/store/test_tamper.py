"""A finished run changed in every way: below the frontier, a seal or a pin all of it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json, to_json

from tapereel.tapes.store import Store, verify, verify_tape
from tapereel.tapes.store.reader import PINS

from .crash import RUN
from .lab import Lab
from .simdisk import Image, SimDisk
from .tamper import closed_run, crashed_run, segment_paths, undetected


def check(disk: SimDisk) -> int:
    return verify(RUN, disk=disk).exit_code


def without_pins(image: Image) -> Image:
    return {path: data for path, data in image.items() if not path.endswith("pins.json")}


def rewritten(lab: Lab) -> Image:
    """The whole run again, with another reward, every hash fitting."""
    lab.reward = lambda tape, value=1.0, **more: Lab.reward(lab, tape, 7.0, **more)  # type: ignore[method-assign]
    return closed_run(lab, episodes=4)


@pytest.mark.attack
def test_every_change_below_a_pin_shows() -> None:
    image = closed_run(Lab(), episodes=4)
    assert check(SimDisk(image)) == 0
    lines = {path: image[path].count(b"\n") for path in segment_paths(image)}
    tried, missed = undetected(image, lines, check, flips=100)
    assert not missed
    assert tried >= 400


@pytest.mark.attack
def test_every_change_below_the_seals_shows_without_a_pin() -> None:
    image = without_pins(closed_run(Lab(), episodes=4))
    first, last = segment_paths(image)
    # The last seal itself is above every frontier; what becomes of it is told below.
    lines = {first: image[first].count(b"\n"), last: image[last].count(b"\n") - 1}
    tried, missed = undetected(image, lines, check, flips=100)
    assert not missed
    assert tried >= 300


@pytest.mark.attack
def test_every_change_below_the_frontier_of_a_crashed_run_shows() -> None:
    image, durable = crashed_run(Lab())
    assert check(SimDisk(image)) == 0
    tried, missed = undetected(image, {segment_paths(image)[0]: durable}, check, flips=150)
    assert not missed
    assert tried >= 250


def test_a_cut_tail_shows_with_a_pin_and_only_then() -> None:
    image = closed_run(Lab(), episodes=4)
    last = segment_paths(image)[-1]
    lines = image[last].splitlines(keepends=True)
    head = verify(RUN, disk=SimDisk(image)).head
    assert head is not None
    pins = f"{RUN}/{PINS}"
    cut = {**image, last: b"".join(lines[:-1])}
    assert check(SimDisk(without_pins(cut))) == 2  # the first segment was closed, so pins.json was there
    kept = {name: h for name, h in from_json(image[pins]).items() if name not in last}
    cut[pins] = to_json(kept)
    assert check(SimDisk(cut)) == 0  # documented: nobody can know that there was more
    assert any("rewritten" in text for text in verify(RUN, disk=SimDisk(without_pins(cut))).not_checked)
    assert verify(RUN, disk=SimDisk(cut), pins=[head]).exit_code == 1
    assert verify(RUN, disk=SimDisk(cut), pins=[head.split(":")[1]]).exit_code == 1
    assert verify(RUN, disk=SimDisk(cut), exact=[head]).exit_code == 1
    assert check(SimDisk({**image, last: cut[last]})) == 1


def test_who_would_write_after_a_cut_tail_is_refused_and_the_pins_stay() -> None:
    lab = Lab()
    image = closed_run(lab, episodes=4)
    pins = f"{RUN}/{lab.reader.PINS}"
    last = segment_paths(image)[-1]
    lines = image[last].splitlines(keepends=True)
    head = next(h for name, h in from_json(image[pins]).items() if name in last)
    for keep in range(1, len(lines)):
        cut = {**image, last: b"".join(lines[:keep])}
        disk = SimDisk(cut)
        with pytest.raises(lab.errors.Corrupt, match=head):
            lab.Store.open(RUN, write=True, disk=disk, cache=False, thread=False)
        assert disk.image() == cut
        assert check(disk) == 1
    disk = SimDisk({**image, pins: b"[1]"})
    with pytest.raises(lab.errors.Corrupt, match=lab.reader.PINS):
        lab.Store.open(RUN, write=True, disk=disk, cache=False, thread=False)
    disk = SimDisk(image)
    with lab.Store.open(RUN, write=True, disk=disk, cache=False, thread=False) as store:
        assert set(image) < set(disk.image()), "an unharmed run is written on"
        assert store.recovered.torn == []
    assert len(from_json(disk.image()[pins])) == 3
    assert check(disk) == 0


def test_a_rewritten_chain_shows_with_a_pin_and_only_then() -> None:
    image = closed_run(Lab(), episodes=4)
    head = verify(RUN, disk=SimDisk(image)).head
    assert head is not None
    other = rewritten(Lab())
    assert check(SimDisk(without_pins(other))) == 2
    assert check(SimDisk(other)) == 0
    assert verify(RUN, disk=SimDisk(without_pins(other)), pins=[head]).exit_code == 1


def test_a_damaged_last_line_is_torn_without_a_pin_and_broken_with_one() -> None:
    image = closed_run(Lab(), episodes=4)
    last = segment_paths(image)[-1]
    data = bytearray(image[last])
    data[-100] ^= 1
    assert check(SimDisk({**without_pins(image), last: bytes(data)})) == 2
    assert check(SimDisk({**image, last: bytes(data)})) == 1


def test_a_missing_segment_that_nothing_pins_is_a_hole() -> None:
    lab = Lab()
    disk = SimDisk()
    writers = [lab.Store.create(RUN, disk=disk, cache=False, thread=False)]
    disk.inodes[-1].data.clear()  # nothing of it was durable when the second began, so the second pins nothing
    writers.append(lab.Store.open(RUN, write=True, disk=disk, cache=False, thread=False))
    image = disk.image()
    report = verify(RUN, disk=SimDisk({path: data for path, data in image.items() if "/000001-" not in path}))
    assert (report.exit_code, report.holes) == (2, ("000001",))


def test_the_independent_verifier_agrees(tmp_path: Path) -> None:
    def independent(disk: SimDisk) -> int:
        return verify_tape.check(written(disk.image(), tmp_path), [])[0]

    image = closed_run(Lab(), episodes=2)
    assert independent(SimDisk(image)) == 0
    tried, missed = undetected(
        image, {path: image[path].count(b"\n") for path in segment_paths(image)}, independent, flips=60
    )
    assert not missed
    assert tried > 150
    crashed, durable = crashed_run(Lab(), episodes=3)
    _, missed = undetected(without_pins(crashed), {segment_paths(crashed)[0]: durable}, independent, flips=60)
    assert not missed


def written(image: Image, folder: Path) -> Path:
    """The image as real files; gives the run's directory."""
    run: Any = folder / "run"
    (run / "tapes").mkdir(parents=True, exist_ok=True)
    for old in (run / "tapes").iterdir():
        old.unlink()
    (run / "pins.json").unlink(missing_ok=True)
    for path, data in image.items():
        (run / Path(path).relative_to(RUN)).write_bytes(data)
    return run


def test_a_run_inside_a_run_is_not_checked(tmp_path: Path) -> None:
    for folder in (tmp_path / "run", tmp_path / "run" / "demonstrations"):
        Store.create(folder).close()
    report = verify(tmp_path / "run")
    assert report.verdict == "holds"
    assert [text for text in report.not_checked if "the run demonstrations" in text]
