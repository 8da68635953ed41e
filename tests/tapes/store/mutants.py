"""Stores that were broken on purpose: each a change of a line or two in a copy of the package."""

# ruff: noqa: E501  (the edits quote lines of the source)

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tapereel.tapes

from .lab import Lab


@dataclass(frozen=True)
class Mutant:
    """`edits`: (file, old text, new text); the file contains the old text exactly once."""

    name: str
    killed_by: str
    """Name of the first check in `killers.py` that finds it."""
    edits: tuple[tuple[str, str, str], ...]


MUTANTS = (
    Mutant(
        "no sync",
        "failed_sync",
        (
            (
                "writer.py",
                """            if sync:
                self._sync()
""",
                "",
            ),
        ),
    ),
    Mutant(
        "acknowledge before sync",
        "failed_sync",
        (
            (
                "writer.py",
                """            self._put(batch)
            if sync:
                self._sync()
""",
                """            self._put(batch)
            for _, done in self._waiting:
                done(None)
            self._waiting = []
            if sync:
                self._sync()
""",
            ),
        ),
    ),
    Mutant("no directory sync", "crash", (("writer.py", "    disk.sync_dir(folder)\n", ""),)),
    Mutant(
        "reader that skips bad lines",
        "crash",
        (
            (
                "reader.py",
                'raw[-1:] != b"\\n" and len(raw) < MAX_LINE\n                    return',
                "False\n                    self.offset += len(raw)\n                    self.why = None\n                    continue",
            ),
            ("segment.py", "        elif line.p != self.head:", "        elif False:"),
            ("segment.py", "        if line.n != self.n:\n", "        if line.n < self.n:\n"),
        ),
    ),
    Mutant(
        "retry after a failed sync",
        "failed_sync",
        (
            (
                "writer.py",
                """            if sync:
                self._sync()
        except""",
                """            if sync:
                try:
                    self._sync()
                except OSError:
                    self._sync()
        except""",
            ),
        ),
    ),
    Mutant(
        "append to a torn tail",
        "crash",
        (
            (
                "recovery.py",
                "SegmentWriter(folder, new_segment(disk, folder),",
                "SegmentWriter(folder, held.popitem() if held else new_segment(disk, folder),",
            ),
            ("recovery.py", "        disk.truncate(handle, broken.offset)\n", ""),
        ),
    ),
    Mutant(
        "media after its reference",
        "crash",
        (
            (
                "media.py",
                "                put_file(self.disk, self.folder / name, data)\n",
                "                self.__dict__.setdefault('later', []).append((name, data))\n",
            ),
        ),
    ),
    Mutant(
        "media not synced",
        "crash",
        (
            (
                "disk.py",
                """        write_all(disk, handle, data)
        disk.sync(handle)
    finally:""",
                """        write_all(disk, handle, data)
    finally:""",
            ),
        ),
    ),
    Mutant(
        "truncate without keeping the bytes",
        "crash",
        (("recovery.py", "        put_file(disk, folder / kept, tail)\n", ""),),
    ),
    Mutant(
        "frontier dropped",
        "flipped_bits",
        (
            (
                "writer.py",
                "encode_line(n, self.durable_lines, self._head, body)",
                "encode_line(n, 0, self._head, body)",
            ),
        ),
    ),
    Mutant(
        "frontier ahead of the disk",
        "crash",
        (
            (
                "writer.py",
                "encode_line(n, self.durable_lines, self._head, body)",
                "encode_line(n, max(self._written - self._base, 0), self._head, body)",
            ),
        ),
    ),
    Mutant(
        "recovery without the lock",
        "live_writer",
        (("recovery.py", "        if disk.lock(handle):\n", "        if disk.lock(handle) or True:\n"),),
    ),
    Mutant(
        "seal before what it seals",
        "crash",
        (
            (
                "writer.py",
                """        self._put(batch)
        self.disk.sync(old)
        write_all(""",
                """        self._put(batch)
        write_all(""",
            ),
        ),
    ),
    Mutant(
        "pin before sync",
        "crash_in_recovery",
        (
            (
                "recovery.py",
                "        found.torn.append(Torn(name, broken.offset, len(tail), kept))\n    disk.sync(handle)\n",
                "        found.torn.append(Torn(name, broken.offset, len(tail), kept))\n",
            ),
        ),
    ),
    Mutant(
        "heads not pinned",
        "removed_segment",
        (("recovery.py", "pins = tips(segments, set(found.live), folder, disk)", "pins = {}"),),
    ),
    Mutant(
        "a live writer's head pinned whole",
        "crash",
        (("recovery.py", "        if segment.name in live and segment.sealed is None:\n", "        if False:\n"),),
    ),
    Mutant(
        "open episodes left open",
        "crash",
        (
            (
                "recovery.py",
                "                    if owner(segments, tape, index) not in found.live:\n",
                "                    if False:\n",
            ),
        ),
    ),
    Mutant(
        "evidence from any line",
        "stale_tail",
        (("reader.py", "linked = [run for run in runs if run.own or run.first.p in heads]", "linked = runs"),),
    ),
)


@contextmanager
def broken_store(mutant: Mutant, folder: Path) -> Iterator[Lab]:
    """A `Lab` on a copy of the package with the mutant's edits."""
    package = f"mutant_{abs(hash(mutant.name))}"
    home = folder / package
    source = Path(tapereel.tapes.__file__).parent
    shutil.copytree(source, home / "tapes", ignore=shutil.ignore_patterns("__pycache__"))
    (home / "__init__.py").write_text("")
    for name, old, new in mutant.edits:
        (path,) = (home / "tapes").rglob(name)
        text = path.read_text()
        if text.count(old) != 1:
            raise LookupError(
                f"mutant {mutant.name!r}: its text stands {text.count(old)} times in {name}; bring it in line "
                "with the source"
            )
        path.write_text(text.replace(old, new))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield Lab(f"{package}.tapes")
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
