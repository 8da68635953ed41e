"""The checks that a broken store must not survive. Each takes a `Lab` and raises when an invariant does not hold."""

from __future__ import annotations

import itertools

from .crash import RUN, Broken, Enumerator, old_segment
from .lab import Clock, Lab
from .simdisk import SECTOR, SimDisk
from .tamper import closed_run, crashed_run, damages, segment_paths, undetected


def crash(lab: Lab) -> None:
    """Two writers, rotation, media: every legal image after every operation."""
    Enumerator(lab, thorough=False).run()


def crash_in_recovery(lab: Lab) -> None:
    """The same, with the power cut again in the middle of recovery."""
    Enumerator(lab, thorough=False, stride=3, deep=10).run()


def failed_sync(lab: Lab) -> None:
    """A sync fails once; after that the disk forgets what it could not write, and says that all is well."""
    disk = SimDisk()
    store = lab.Store.create(RUN, disk=disk, cache=False, thread=False, clock=Clock())
    told: list[bool] = []
    body = lab.begin("a")
    disk.failing_syncs = 1
    store.writer.append(body)
    store.writer.when_durable(lambda error: told.append(error is None))
    store.writer.commit()
    for image in disk.crash_images(b""):
        kept = any(body in data for data in image.values())
        if told != [False] and not kept:
            raise Broken(f"acknowledged ({told}) after a failed sync, and lost")
    try:
        store.writer.append(lab.step("a", "more"))
    except lab.errors.StoreFailed:
        return
    raise Broken("a writer whose sync failed takes more")


def live_writer(lab: Lab) -> None:
    """Somebody opens the run while its writer works: nothing of the writer's is touched."""
    disk = SimDisk()
    one = lab.Store.create(RUN, disk=disk, cache=False, thread=False, clock=Clock())
    one.writer.append(lab.begin("a"))
    one.writer.commit()
    before = disk.image()
    two = lab.Store.open(RUN, write=True, disk=disk, cache=False, thread=False, clock=Clock())
    if two.recovered.crashed or any(disk.image()[path] != data for path, data in before.items()):
        raise Broken(f"a live writer's episodes were ended, or its files changed: {two.recovered}")


def stale_tail(lab: Lab) -> None:
    """Sectors that were never written hold whole lines of an older run's segment, at every offset."""
    disk = SimDisk()
    store = lab.Store.create(RUN, disk=disk, cache=False, thread=False, clock=Clock())
    for body in lab.episode("a"):
        store.writer.append(body)
    store.writer.commit()
    for body in lab.episode("b"):
        store.writer.append(body)
    store.writer.commit(sync=False)
    (path,) = segment_paths(disk.image())
    inode = disk.inodes[disk.names_now[path]]
    first = len(inode.safe) + -len(inode.safe) % SECTOR
    stale = old_segment(lab)
    half = len(stale) // 2  # from here on the old lines state frontiers beyond the break
    for phase in range(half, half + 1500, 12):
        data = bytes(inode.data[:first]) + stale[phase : phase + len(inode.data) - first]
        report = lab.verifier.verify(RUN, disk=SimDisk({path: data}))
        if report.broken:
            raise Broken(f"a crash is called tampering: {report.broken}")


def removed_segment(lab: Lab) -> None:
    """A segment that a later one pins is gone, and so is the file with the pins."""
    closed = closed_run(lab, episodes=2)
    without = {
        path: data
        for path, data in closed.items()
        if path != segment_paths(closed)[0] and not path.endswith("pins.json")
    }
    if lab.verifier.verify(RUN, disk=SimDisk(without)).exit_code != 1:
        raise Broken("a segment that another pins was removed, and nobody noticed")


def flipped_bits(lab: Lab) -> None:
    """Ten bits of a crashed run, each below its frontier."""
    image, durable = crashed_run(lab, episodes=1)
    (path,) = segment_paths(image)
    for name, data in itertools.islice(damages(image[path], durable, flips=10), 10):
        if lab.verifier.verify(RUN, disk=SimDisk({**image, path: data})).exit_code != 1:
            raise Broken(f"{name} below the frontier, and nobody noticed")


def tampered(lab: Lab) -> None:
    """Changed, moved, copied, forged and removed lines of a sealed run and of a crashed one."""

    def check(disk: SimDisk) -> int:
        return lab.verifier.verify(RUN, disk=disk).exit_code

    image, durable = crashed_run(lab, episodes=3)
    below = {segment_paths(image)[0]: durable}
    closed = closed_run(lab, episodes=2)
    for run, lines in ((image, below), (closed, {path: closed[path].count(b"\n") for path in segment_paths(closed)})):
        if check(SimDisk(run)) != 0:
            raise Broken("a sound run does not verify")
        _, missed = undetected(run, lines, check, flips=10)
        if missed:
            raise Broken(f"{len(missed)} changes went unseen: {missed[0]}")


KILLERS = (failed_sync, live_writer, crash, removed_segment, stale_tail, flipped_bits, crash_in_recovery, tampered)
