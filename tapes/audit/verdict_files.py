"""Keeps the verdicts of `replay`, `reexec`, `rescore` and `requery` on a run's tapes for later readers.

Each check writes a new file to the run's `verdicts/` folder. The file's name consists of the verb, the time and a hash
of the bytes in the file. The file is never changed. If its bytes don't match the hash, it is not read. The store is not
opened for writing, because a verdict is a statement about a tape and not a part of the tape. Each verdict names the
digest of its tape. Open tapes have no digest yet, so verdicts on them are not kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field

from ..store.disk import REAL, put_file, read_file
from ..value import Value
from .verdict import Verdict, Verdicts

FOLDER = "verdicts"
"""Folder below the run directory."""
LARGEST = 2**29
"""Maximum size of a file that is read, in bytes."""
_NAME = re.compile(r"(replay|reexec|rescore|requery)-\d{8}T\d{6}Z-([0-9a-f]{16})\.jsonl")


class Check(Value):
    """The first line of a file. It describes one check of some tapes."""

    verb: Literal["replay", "reexec", "rescore", "requery"]
    at: float
    """Time of the check in seconds since 1970."""
    turn: int | None = None
    """The only turn that was checked on each tape, or None if all turns were."""
    given: dict[str, str] = Field(default={})
    """Parts that the caller named (agent, environment, reward, model). All other parts came from the run."""


class _Line(NamedTuple):
    """One verdict and its check. `data` is the JSON of the verdict as in the file."""

    check: Check
    outcome: str
    data: bytes


def keep_verdicts(run: Path, verdicts: Verdicts, given: Mapping[str, str]) -> Path | None:
    """Write the verdicts on closed tapes to a new file, and return its path. The file is then durable. Return None if
    all verdicts are on open tapes.

    `given` has the parts of the check that the caller named, such as the model. All other parts came from the run.
    Raises OSError if the run can't be written to.
    """
    kept = [verdict for verdict in verdicts.verdicts if verdict.digest is not None]
    if not kept:
        return None
    now = time.time()
    check = {"verb": verdicts.verb, "at": now, "turn": verdicts.turn, "given": dict(given)}
    lines = [
        check,
        *(verdict.model_dump(mode="json", exclude_defaults=True, exclude={"divergence": {"diff"}}) for verdict in kept),
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    data = text.encode("utf-8", "replace")
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{verdicts.verb}-{stamp}-{hashlib.sha256(data).hexdigest()[:16]}.jsonl"
    put_file(REAL, path, data)
    return path


class Checks:
    """The verdicts that a run keeps. `refresh()` reads new files. Verdicts stay JSON until they are requested."""

    def __init__(self, run: Path) -> None:
        self.problems: list[str] = []
        """A sentence for each file that can't be read."""
        self._folder = run / FOLDER
        self._names: set[str] = set()
        self._lines: dict[str, list[_Line]] = {}

    def refresh(self) -> set[str]:
        """Read new files, or all files if one was removed. Return the tapes whose verdicts changed."""
        try:
            names = {name for name in os.listdir(self._folder) if _NAME.fullmatch(name)}
        except OSError:
            names = set()
        changed: set[str] = set()
        if self._names - names:
            changed |= set(self._lines)
            self._names, self._lines, self.problems = set(), {}, []
        for name in sorted(names - self._names):
            changed |= self._read(name)
        self._names = names
        return changed

    def summary(self, tape: str) -> str:
        """Return the newest verdict of each verb on the whole tape, in a form such as `replay verified, requery
        diverged`. Return an empty string for a tape that was not checked."""
        newest: dict[str, _Line] = {}
        for line in self._lines.get(tape, ()):
            if line.check.turn is None and (
                line.check.verb not in newest or line.check.at >= newest[line.check.verb].check.at
            ):
                newest[line.check.verb] = line
        return ", ".join(f"{verb} {newest[verb].outcome}" for verb in sorted(newest))

    def of(self, tape: str) -> list[tuple[Check, Verdict]]:
        """Return all verdicts on the tape, newest first."""
        lines = sorted(self._lines.get(tape, ()), key=lambda line: -line.check.at)
        return [(line.check, Verdict.model_validate_json(line.data)) for line in lines]

    def _read(self, name: str) -> set[str]:
        """Read one file, or add a sentence to `problems` if that fails. Return the tapes that have verdicts in it."""
        path = self._folder / name
        try:
            size = path.stat().st_size
            if size > LARGEST:
                raise ValueError(f"it has {size:,} bytes, more than the {LARGEST:,} that are read")
            data = read_file(path)
            if hashlib.sha256(data).hexdigest()[:16] != name.rpartition("-")[2].removesuffix(".jsonl"):
                raise ValueError("its bytes don't match the hash in its name")
            lines = data.splitlines()
            check = Check.model_validate_json(lines[0])
            verdicts = [Verdict.model_validate_json(text) for text in lines[1:]]
        except (OSError, ValueError, IndexError) as error:
            self.problems.append(f"{FOLDER}/{name} is not shown: {str(error).splitlines()[0]}")
            return set()
        for verdict, text in zip(verdicts, lines[1:], strict=True):
            self._lines.setdefault(verdict.tape, []).append(_Line(check, verdict.outcome, text))
        return {verdict.tape for verdict in verdicts}
