"""Power cuts after every operation, on a simulated disk."""

from __future__ import annotations

import pytest

from tapereel.tapes.store import Store

from .crash import RUN, Enumerator, steady
from .killers import failed_sync, live_writer, stale_tail
from .lab import Clock, Lab
from .simdisk import SimDisk


@pytest.mark.kill
def test_every_legal_image_recovers_everything_that_was_acknowledged() -> None:
    with steady():
        counts = Enumerator(Lab(), thorough=True, deep=120).run()
    # What was tried, so that a workload that shrinks to nothing is seen.
    assert counts["moments"] > 50
    assert counts["acknowledged"] >= 15
    assert counts["distinct"] > 1_000
    assert counts["distinct in recovery"] > 1_000
    print({name: counts[name] for name in sorted(counts)})


def test_a_sync_that_failed_is_never_tried_again() -> None:
    failed_sync(Lab())


def test_a_live_writer_is_never_touched() -> None:
    live_writer(Lab())


def test_old_lines_of_another_run_are_no_evidence() -> None:
    stale_tail(Lab())


def test_the_simulated_disk_loses_what_was_not_synced() -> None:
    disk = SimDisk()
    disk.make_folder(RUN)
    handle = disk.create(RUN / "a")
    disk.write(handle, b"x" * 300)
    images = list(disk.crash_images(b""))
    assert {} in images
    assert {"/run/a": b""} in images
    assert {"/run/a": b"x" * 300} in images
    assert {"/run/a": b"x" * 128} in images
    assert any(len(data) == 300 and data[:128] != b"x" * 128 for data in (image.get("/run/a", b"") for image in images))
    disk.sync(handle)
    assert {} in list(disk.crash_images(b""))
    disk.sync_dir(RUN)
    assert list(disk.crash_images(b"")) == [{"/run/a": b"x" * 300}]


def test_closing_with_many_lines_queued_seals_them_all() -> None:
    """A commit line that the writer adds of itself while it closes stands before the seal."""
    lab, disk = Lab(), SimDisk()
    with Store.create(RUN, disk=disk, cache=False, thread=False, clock=Clock()) as store:
        for k in range(100):
            for body in lab.episode(f"t{k}"):
                store.writer.append(body)
    report = lab.verifier.verify(RUN, disk=disk)
    assert report.exit_code == 0, report.broken
    assert report.episodes == 100
    assert report.segments[0].sealed
