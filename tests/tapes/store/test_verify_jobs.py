"""`verify` in several processes gives the report of one process, whatever was done to the run."""

from __future__ import annotations

import gc
import multiprocessing
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store, verifier, verify
from tapereel.tapes.store.segment import BadLine
from tapereel.tapes.store.verifier import VerifierDied
from tapereel.tests.tapes.store.deadly import Deadly

from .crash import RUN
from .lab import Lab
from .simdisk import SimDisk
from .tamper import closed_run, crashed_run, damages, segment_paths

pytestmark = pytest.mark.attack

lab = Lab()


class InThisProcess(verifier._Parts):
    """Reads the parts as the processes do, but here."""

    def __init__(self, *given: object) -> None:
        folder, sizes, _, self.disk, self.pinned = given  # type: ignore[assignment]
        self.folder: Path = folder  # type: ignore[assignment]
        self.sizes: dict[str, int] = sizes  # type: ignore[assignment]
        self.used = 0

    def of(self, segment: str) -> Iterator[verifier._Part]:
        size = self.sizes[segment]
        for k in range(0, size, verifier.PART):
            part = (segment, k, min(k + verifier.PART, size))
            try:
                found = verifier._read_part(self.folder, part, self.disk, self.pinned)
            except (OSError, BadLine):
                continue
            if found is not None:
                yield found

    def close(self) -> None:
        pass


@pytest.mark.parametrize("part", [300, 1_000])
def test_parts_give_the_same_report_of_every_damage(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(part)
    for image, below in ((closed_run(lab), None), crashed_run(lab)):
        cases = [("unchanged", image), *((f"{path} is gone", image.keys() - {path}) for path in segment_paths(image))]
        runs = [{name: image[name] for name in kept} for _, kept in cases]
        for path in segment_paths(image):
            lines = len(image[path].splitlines()) if below is None else below
            found = [*damages(image[path], lines, flips=10, seed=part)]
            runs += [{**image, path: data} for _, data in rng.sample(found, 12)]
        for run in runs:
            with monkeypatch.context() as patch:
                whole = verify(RUN, disk=SimDisk(run))
                patch.setattr(verifier, "PART", part)
                patch.setattr(verifier, "_Parts", InThisProcess)
                assert verify(RUN, jobs=2, disk=SimDisk(run)) == whole


def test_most_lines_of_a_sound_run_are_read_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would compare the reading of one process with itself."""
    followed = list[bool]()
    follows = verifier._Part.follows
    monkeypatch.setattr(verifier._Part, "follows", lambda *given: followed.append(follows(*given)) or followed[-1])
    monkeypatch.setattr(verifier, "PART", 1_000)
    monkeypatch.setattr(verifier, "_Parts", InThisProcess)
    assert verify(RUN, jobs=2, disk=SimDisk(closed_run(lab))).exit_code == 0
    assert len(followed) > 10
    assert all(followed)


def write(store: Store, episodes: range) -> None:
    for k in episodes:
        for body in lab.episode(f"t{k:03d}"):
            store.writer.append(body)
    store.writer.sync()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three segments of some 30 kB."""
    path = tmp_path_factory.mktemp("jobs") / "run"
    for part in range(3):
        with Store.open(path, write=True, cache=False) if part else Store.create(path, cache=False) as store:
            write(store, range(20 * part, 20 * part + 20))
    return path


def test_processes_find_the_same_damage(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "PART", 8_000)
    paths = sorted((run / "tapes").glob("*.jsonl"))
    data = {path: path.read_bytes() for path in paths}
    for k, path in enumerate(paths):  # a flipped bit in each segment
        at = len(data[path]) * (k + 1) // 4
        path.write_bytes(data[path][:at] + bytes([data[path][at] ^ 1]) + data[path][at + 1 :])
        assert (whole := verify(run)).exit_code == 1
        assert verify(run, jobs=2) == whole
        path.write_bytes(data[path])
    paths[1].unlink()
    assert (whole := verify(run)).exit_code == 1
    assert verify(run, jobs=3) == whole
    paths[1].write_bytes(data[paths[1]])


def test_processes_read_a_live_run_in_which_a_tape_is_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "PART", 4_000)
    with Store.create(tmp_path / "run", cache=False) as store:
        write(store, range(10))
    with Store.open(tmp_path / "run", write=True, cache=False) as store:
        write(store, range(5, 15))
        whole = verify(tmp_path / "run")
        assert any("begins twice" in text for text in whole.broken)
        assert whole.segments[-1].live
        assert verify(tmp_path / "run", jobs=2) == whole


def test_a_process_that_dies_is_an_error(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "PART", 8_000)
    with pytest.raises(VerifierDied, match=r"exit code 7.*jobs=1"):
        verify(run, jobs=2, disk=Deadly())
    assert not multiprocessing.active_children()
    assert not [one for one in threading.enumerate() if "Queue" in one.name]


def test_verifying_makes_no_garbage_that_only_a_collection_would_find(run: Path) -> None:
    assert verify(run).exit_code == 0
    gc.collect()
    gc.disable()
    try:
        verify(run)
        assert gc.collect() == 0
        assert not gc.isenabled()
    finally:
        gc.enable()
    verify(run)
    assert gc.isenabled()


def test_the_number_of_processes_is_positive(run: Path) -> None:
    with pytest.raises(UsageError, match="jobs is 0"):
        verify(run, jobs=0)
