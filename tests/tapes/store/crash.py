"""The crash enumerator: run writers on a simulated disk, cut the power after every operation, recover, and check.

After each operation of the workload every legal disk image is recovered (each distinct image once) and compared with
what had been acknowledged by then. `Enumerator.counts` says how many operations, images and distinct images that was.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from .lab import Clock, Lab
from .simdisk import Image, SimDisk, fingerprint


@contextmanager
def steady() -> Iterator[None]:
    """One process number, so that lines are as long in every process and the same images are tried."""
    with mock.patch("os.getpid", return_value=4242):
        yield


RUN = Path("/run")
TAPES = "/run/tapes"


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Recovery:
    """What recovering one image gave."""

    bodies: frozenset[bytes]
    segments: dict[str, bytes]
    """Every segment that the image had, as recovery left it."""
    disk: SimDisk


@dataclass
class Trace:
    """A workload as it runs: what it wrote, and what it was told is safe."""

    lab: Lab
    disk: SimDisk
    acknowledged: set[bytes] = field(default_factory=set)
    """Bodies that a writer said are durable."""
    media: dict[str, bytes] = field(default_factory=dict)

    def append(self, writer: Any, *bodies: bytes) -> None:
        for body in bodies:
            writer.append(body)

    def ask(self, writer: Any, *bodies: bytes) -> None:
        """Append, and note in the very moment in which the writer acknowledges."""
        self.append(writer, *bodies)

        def done(error: Exception | None) -> None:
            if error is None:
                self.acknowledged.update(bodies)
                self.disk.after_operation()

        writer.when_durable(done)


def two_writers(trace: Trace) -> Iterator[None]:
    """Two writers, several segments, media, a training record, a clean end of one and none of the other."""
    lab, disk, clock = trace.lab, trace.disk, Clock()
    options = {"disk": disk, "cache": False, "thread": False, "clock": clock}
    one = lab.Store.create(RUN, rotate_bytes=2200, **options)
    yield
    trace.ask(one.writer, lab.begin("a"), lab.step("a", "first", action=False))
    one.writer.commit()
    trace.append(one.writer, lab.call("a", "a.1", 5))
    one.writer.commit(sync=False)
    two = lab.Store.open(RUN, write=True, rotate_bytes=1 << 20, **options)
    trace.ask(two.writer, lab.begin("b", split="eval"))
    two.writer.commit()
    reference = two.media.put(b"a picture " * 30, ".png")
    trace.media[reference] = b"a picture " * 30
    trace.ask(two.writer, lab.look("b", reference))
    trace.ask(one.writer, lab.step("a", "done"), lab.reward("a"), lab.end("a"))
    two.writer.commit(sync=False)
    one.writer.commit()
    two.writer.commit()
    trace.ask(one.writer, lab.use(0, [("a", "a.1", 0, 5, 0.2)]), lab.begin("c"))
    one.writer.commit()  # goes on in a new segment
    trace.append(two.writer, lab.call("b", "b.1", 3), lab.step("b", "act"))
    trace.ask(one.writer, lab.step("c", "second", action=False), lab.call("c", "c.1", 4), lab.step("c", "x" * 600))
    one.writer.commit()
    two.writer.commit(sync=False)
    trace.ask(two.writer, lab.end("b"))
    two.writer.commit()
    trace.ask(one.writer, lab.reward("c"), lab.end("c"))
    one.writer.commit()
    one.close()
    trace.append(two.writer, lab.begin("d"), lab.step("d", "never acknowledged", action=False))
    two.writer.commit(sync=False)
    two.abandon()
    yield


class Enumerator:
    """Runs a workload once and checks every legal image after each of its operations."""

    def __init__(self, lab: Lab, *, thorough: bool = True, stride: int = 1, deep: int = 0) -> None:
        """`stride`: check after every so many operations. `deep`: cut recovery itself, on one image in so many."""
        self.lab, self.thorough, self.stride, self.deep = lab, thorough, stride, deep
        self.counts: Counter[str] = Counter()
        self._seen: dict[bytes, Recovery] = {}
        self.stale = old_segment(lab)

    def run(self, workload: Callable[[Trace], Iterator[None]] = two_writers) -> Counter[str]:
        """Counts. Raises Broken at the first image that breaks an invariant."""
        trace = Trace(self.lab, SimDisk())
        trace.disk.after_operation = lambda: self._after(trace)  # type: ignore[method-assign]
        for _ in workload(trace):
            pass
        self.counts["acknowledged"] = len(trace.acknowledged)
        return self.counts

    def _after(self, trace: Trace) -> None:
        self.counts["moments"] += 1
        if self.counts["moments"] % self.stride:
            return
        written = _written(trace.disk)
        safe = {path: inode.safe for path, inode in _segments(trace.disk)}
        if self.deep and self.counts["moments"] % 4 == 0:
            self._cut_recovery(trace.disk.after_death(), written, safe, trace)
        for image in itertools.chain([trace.disk.image()], trace.disk.crash_images(self.stale, thorough=self.thorough)):
            self.counts["images"] += 1
            self.check(image, written, safe, trace)

    def check(self, image: Image, written: dict[str, bytes], safe: dict[str, bytes], trace: Trace) -> None:
        key = fingerprint(image)
        found = self._seen.get(key)
        if found is None:
            self.counts["distinct"] += 1
            found = self._seen[key] = self.recover(image)
            if self.deep and self.counts["distinct"] % self.deep == 0 and _has_files(image):
                self._cut_recovery(SimDisk(image, seed=8), written, safe, trace)
        self.compare(found, written, safe, trace)

    def recover(self, image: Image) -> Recovery:
        """Recover one image and check what must hold of any recovery."""
        if not _has_files(image):
            image = {f"{TAPES}/lock": b"", **image}  # power went before the first file had a name
        disk = SimDisk(image, seed=7)
        return self._recover(disk, image)

    def _recover(self, disk: SimDisk, image: Image) -> Recovery:
        lab = self.lab
        before = lab.verifier.verify(RUN, disk=disk)
        _expect(not before.broken, f"a crash is called tampering: {before.broken}")
        store = lab.Store.open(RUN, write=True, disk=disk, cache=False, thread=False, clock=Clock())
        torn = {t.segment: t for t in store.recovered.torn}
        if self.counts["distinct"] % 2:
            store.close()
        else:
            store.abandon()
        after = disk.image()
        segments = {path: after[path] for path in image if path.endswith(".jsonl")}
        for path, data in segments.items():
            name = Path(path).stem
            kept = after.get(f"{TAPES}/{torn[name].kept}", b"") if name in torn else b""
            _expect(data + kept == image[path], f"bytes of {path} are neither in place nor kept")
        report = lab.verifier.verify(RUN, disk=disk)
        _expect(not report.broken and not report.torn, f"after recovery: {report.broken} {report.torn}")
        _expect(report.open == 0, f"{report.open} episodes are open after recovery")
        records = list(lab.Store.open(RUN, disk=disk, cache=False).records())
        ends = Counter(stored.tape for stored in records if stored.t == "end")
        _expect(all(n == 1 for n in ends.values()), f"tapes with more than one end: {ends}")
        self._check_media(disk, records)
        self._check_used(records)
        if self.counts["distinct"] % 4 == 0:
            again = lab.Store.open(RUN, write=True, disk=disk, cache=False, thread=False, clock=Clock())
            _expect(not again.recovered.crashed and not again.recovered.torn, "a second recovery finds more to do")
            again.abandon()
        return Recovery(frozenset(stored.body for stored in records), segments, disk)

    def _check_media(self, disk: SimDisk, records: list[Any]) -> None:
        media = self.lab.Store.open(RUN, disk=disk, cache=False).media
        for stored in records:
            for name in self.lab.media.references(stored.body):
                try:
                    media.get(f"media:{name}")
                except ValueError as error:
                    raise Broken(f"a recovered record names a media file that is not whole: {error}") from None

    def _check_used(self, records: list[Any]) -> None:
        """Begun >= trained: nothing is trained on that did not begin, and end, among what was recovered."""
        ended = {stored.tape for stored in records if stored.t == "end"}
        used = {item[0] for stored in records if stored.t == "use" for item in stored.record.items}
        _expect(used <= ended, f"trained on tapes that are not there: {used - ended}")

    def compare(self, found: Recovery, written: dict[str, bytes], safe: dict[str, bytes], trace: Trace) -> None:
        """Against what had been written, synced and acknowledged at this moment."""
        for path, data in found.segments.items():
            _expect(written[path].startswith(data), f"what is recovered of {path} is no prefix of what was written")
        for path, data in safe.items():
            kept = found.segments.get(path)
            _expect(
                not data or kept is None or len(kept) >= data.rfind(b"\n") + 1,
                f"synced lines of {path} are called torn",
            )
        lost = trace.acknowledged - found.bodies
        _expect(not lost, f"acknowledged and lost: {sorted(lost)[:3]}")

    def _cut_recovery(self, disk: SimDisk, written: dict[str, bytes], safe: dict[str, bytes], trace: Trace) -> None:
        """Cut the power after every operation of a recovery, too, and recover from that."""
        acknowledged = Trace(self.lab, disk, set(trace.acknowledged))
        moments: list[list[Image]] = []
        disk.after_operation = lambda: moments.append(  # type: ignore[method-assign]
            [disk.image(), *disk.crash_images(self.stale, thorough=False)]
        )
        store = self.lab.Store.open(RUN, write=True, disk=disk, cache=False, thread=False, clock=Clock())
        store.close()
        every = _written(disk)
        for cut in itertools.chain.from_iterable(moments):
            self.counts["images in recovery"] += 1
            key = fingerprint(cut)
            if key not in self._seen:
                self.counts["distinct in recovery"] += 1
                self._seen[key] = self.recover(cut)
            found = self._seen[key]
            old = {path: data for path, data in found.segments.items() if path in written}
            self.compare(Recovery(found.bodies, old, found.disk), written, safe, acknowledged)
            for path in found.segments.keys() - written.keys():
                _expect(every[path].startswith(found.segments[path]), f"{path} is not what recovery wrote there")


def _has_files(image: Image) -> bool:
    return any(path.startswith(f"{TAPES}/") for path in image)


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def _segments(disk: SimDisk) -> Iterator[tuple[str, Any]]:
    for path, inode in disk.names_now.items():
        if path.endswith(".jsonl"):
            yield path, disk.inodes[inode]


def _written(disk: SimDisk) -> dict[str, bytes]:
    return {path: bytes(inode.data) for path, inode in _segments(disk)}


def old_segment(lab: Lab) -> bytes:
    """A segment of another, earlier run with the same name: what a reused block may still hold."""
    disk = SimDisk(seed=1)
    with lab.Store.create(RUN, disk=disk, cache=False, thread=False, clock=Clock(1_600_000_000.0)) as store:
        for k in range(6):
            for body in lab.episode(f"old{k}"):
                store.writer.append(body)
            store.writer.commit()
    return next(data for path, data in disk.image().items() if path.endswith(".jsonl"))
