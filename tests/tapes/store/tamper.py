"""Changing a finished run in every way, and asking whether that shows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from hashlib import sha256

from .crash import RUN, TAPES
from .lab import Clock, Lab
from .simdisk import SECTOR, Image, SimDisk

Check = Callable[[SimDisk], int]
"""Exit code of a verifier."""


def closed_run(lab: Lab, *, episodes: int = 6) -> Image:
    """Two sealed segments, the second by a writer that pinned the first."""
    disk = SimDisk()
    for part in range(2):
        with lab.Store.open(RUN, write=True, disk=_started(disk), cache=False, thread=False, clock=Clock()) as s:
            for k in range(episodes // 2):
                for n, body in enumerate(lab.episode(f"t{part}{k}")):
                    s.writer.append(body)
                    if n % 2:
                        s.writer.commit()
    return disk.image()


def crashed_run(lab: Lab, *, episodes: int = 5) -> tuple[Image, int]:
    """One segment without a seal, and how many of its lines were durable when its last line was written."""
    disk = SimDisk()
    store = lab.Store.open(RUN, write=True, disk=_started(disk), cache=False, thread=False, clock=Clock())
    for k in range(episodes):
        for body in lab.episode(f"t{k}"):
            store.writer.append(body)
        store.writer.commit()
    durable = store.writer.durable_lines
    for body in lab.episode("last"):
        store.writer.append(body)
    store.writer.commit(sync=False)
    store.abandon()
    return disk.image(), durable


def _started(disk: SimDisk) -> SimDisk:
    disk.make_folder(RUN / "tapes")
    return disk


def segment_paths(image: Image) -> list[str]:
    return sorted(path for path in image if path.startswith(f"{TAPES}/") and path.endswith(".jsonl"))


def damages(data: bytes, below: int, *, flips: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Ways to change a segment, each with a name. Only the first `below` lines are touched."""
    lines = data.splitlines(keepends=True)
    rng = random.Random(seed)
    end = sum(map(len, lines[:below]))
    for _ in range(flips):
        at, bit = rng.randrange(end), rng.randrange(8)
        yield f"bit {bit} of byte {at} flipped", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    for k in range(below):
        yield f"line {k} deleted", b"".join(lines[:k] + lines[k + 1 :])
        if k < below - 1 or below == len(lines):  # else the copy stands above what is asked about
            yield f"line {k} duplicated", b"".join([*lines[:k], lines[k], *lines[k:]])
        forged = forge(lines[k])
        if forged != lines[k]:
            yield f"line {k} forged", b"".join([*lines[:k], forged, *lines[k + 1 :]])
        for j in {min(k + 1, below - 1), rng.randrange(below)} - {k}:
            swapped = list(lines)
            swapped[k], swapped[j] = lines[j], lines[k]
            yield f"lines {k} and {j} swapped", b"".join(swapped)
    if below == len(lines):
        for _ in range(20):
            at = rng.randrange(end)
            yield f"byte {at} removed", data[:at] + data[at + 1 :]
            yield f"byte {at} doubled", data[: at + 1] + data[at:]
            yield f"{SECTOR} bytes from {at} zeroed", (data[:at] + bytes(SECTOR) + data[at + SECTOR :])[: len(data)]


def forge(line: bytes) -> bytes:
    """The line with other content and a hash that fits it."""
    head = line[: line.rfind(b',"h":')]
    for old, new in (
        (b'"value":1.0', b'"value":9.0'),
        (b'"text":"', b'"text":"!'),
        (b'"seconds":', b'"seconds":4'),
        (b'"env_seed":1', b'"env_seed":7'),
        (b'"pid":', b'"pid":1'),
        (b'"by":"agent"', b'"by":"other"'),
        (b'"reason":"', b'"reason":"not '),
    ):
        if old in head:
            head = head.replace(old, new, 1)
            break
    return head + b',"h":"' + sha256(head).hexdigest().encode() + b'"}\n'


def undetected(image: Image, below: dict[str, int], check: Check, *, flips: int) -> tuple[int, list[str]]:
    """How many changes were tried, and those for which the verifier's exit code was not 1."""
    tried, missed = 0, []
    for path, lines in below.items():
        for name, data in damages(image[path], lines, flips=flips):
            tried += 1
            code = check(SimDisk({**image, path: data}))
            if code != 1:
                missed.append(f"{path}: {name} (exit code {code})")
    return tried, missed
