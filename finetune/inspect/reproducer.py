"""Reproduce: a checkpoint derived again, from the base weights and the recorded tapes, update by update.

Nothing is sampled and no environment runs: every update is made from the tapes that its record names, by the code that
made it, and compared with all that the record says of it, bit for bit; the weights after it are compared with the
digest that was published. So the first update that differs is named, with what differed. The run is only read.

1. `verified` needs no promise about the machine: the same digest is the same weights. A difference on another machine,
   or with another version of torch, is `unverifiable`, since sums in another order have other last bits.
2. What produced a tape isn't asked here: `verify` says whether its bytes are those that were written, `replay` and
   `requery` whether agent and model say it again.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, JsonValue, computed_field
from torch import Tensor

from ...tapes.common.progress import Progress, silent
from ...tapes.errors import TapereelError, UsageError
from ...tapes.records import Use
from ...tapes.store.ledger import Ledger
from ...tapes.store.store import Store
from ...tapes.value import Value
from ..data.provenance import taught_by
from ..data.staleness import version_name
from ..history.history import BrokenHistory, Differs, GoneTape, History, apply_again, elsewhere
from ..history.update_facts import computed_on
from ..trainer.checkpoint import (
    STATE,
    BadCheckpoint,
    Checkpoint,
    checkpoint_folders,
    checkpoints,
    copied_weights,
    read_checkpoint,
    weights_digest,
)
from .rebuild import Past, Unknown


class Difference(Value):
    """The first thing that isn't as recorded."""

    update: int
    """Number of the update, from 0; it makes version `update + 1`. -1: the base weights."""
    field: str
    """`tape`, `recipe`, `items`, `stale`, `filtered`, `skipped`, `lr`, `loss`, `grad_norm`, `weights`, `checkpoint`,
    `trainer` or `taught`."""
    recorded: JsonValue = None
    found: JsonValue = None
    sentence: str
    """What differs, for people."""


class Reproduction(Value):
    """What became of deriving a checkpoint again."""

    run: str
    checkpoint: str | None
    """Its directory; None where only the ledger was followed."""
    lineage: str
    outcome: Literal["verified", "diverged", "unverifiable"]
    base: str
    """What the weights began as, in words."""
    updates: int
    """Updates applied again and found equal."""
    of: int
    """Updates in the checkpoint."""
    published: int = 0
    """Versions on the way whose weights have the digest that was published."""
    checkpoints: int = 0
    """Checkpoint files whose weights are those that were derived."""
    trainers: int = 0
    """Of these, files whose trainer's state (optimiser, counts, moments, coefficients, averages, critic) is the one
    that was derived; the base has none."""
    tapes: int = 0
    """Tapes that were trained on, each with the digest that its updates pinned."""
    digest: str | None = None
    """Of the weights that were derived; None where the end wasn't reached."""
    difference: Difference | None = None
    """None but for `diverged`."""
    reason: str | None = None
    """Why it can't be told; None but for `unverifiable`."""
    seconds: float = 0.0
    players: dict[str, Reproduction] = Field(default={})
    """Of the last checkpoints of the run's other policies, by name, where the run as a whole was asked for."""

    @computed_field
    @property
    def exit_code(self) -> int:
        """0 verified, 1 diverged, 2 unverifiable; of several policies, that of one that diverged, else unverifiable."""
        every = {self.outcome, *(one.outcome for one in self.players.values())}
        codes = {"diverged": 1, "unverifiable": 2}
        return next((code for outcome, code in codes.items() if outcome in every), 0)

    def __str__(self) -> str:
        if self.difference is not None:
            at = "at the base weights" if self.difference.update < 0 else f"at update {self.difference.update}"
            return f"diverged {at}: {self.difference.sentence}"
        return f"unverifiable: {self.reason}" if self.reason is not None else "verified"


def reproduce(run: str | Path, checkpoint: str | Path | None = None, *, progress: Progress = silent) -> Reproduction:
    """Derive a checkpoint of the run in the directory `run` again; default: its last, and every other on the way.

    `checkpoint`: a checkpoint's directory, wherever it lies, its name (`update-000040`) or its update. Without it `run`
    may be the directory of a checkpoint that lies in its run. UsageError where there is none.
    """
    run = Path(run)
    if not run.is_dir():
        raise UsageError(
            f"there is no folder {run}: name the directory of a run that trained, or of a checkpoint in one"
        )
    if checkpoint is None and (run / STATE).exists():
        run, checkpoint = _run_of(run.resolve()), run.resolve()
    found = _one(run, run / "checkpoints", checkpoint, progress)
    if checkpoint is not None:
        return found
    players = {folder.name: _one(run, folder, None, progress) for folder in checkpoint_folders(run)[1:]}
    return found.model_copy(update={"players": players})


def _one(run: Path, folder: Path, checkpoint: str | Path | None, progress: Progress) -> Reproduction:
    """Of one of the checkpoints in `folder`."""
    found = checkpoints(folder)
    wanted = find_checkpoint(run, checkpoint, found)
    with Store.open(run) as store, tempfile.TemporaryDirectory() as scratch:
        lineage = str(wanted.state["lineage"])
        among = [c for c in found if c.update < wanted.update and c.state["lineage"] == lineage]
        try:
            past = Past.of(run, store, Path(scratch), lineage)
        except Unknown as error:
            return Reproduction(
                run=str(run),
                checkpoint=str(wanted.path),
                lineage=lineage,
                outcome="unverifiable",
                base="unknown",
                updates=0,
                of=wanted.update,
                reason=str(error),
            )
        return retrace(
            past.history,
            until=wanted.update,
            files=[*(among if checkpoint is None else ()), wanted],
            base=past.base,
            progress=progress,
        )


def _run_of(checkpoint: Path) -> Path:
    """The run in which a checkpoint lies."""
    return next((above.parent for above in checkpoint.parents if above.name == "checkpoints"), checkpoint.parent.parent)


def find_checkpoint(run: Path, name: str | Path | None, found: Sequence[Checkpoint] | None = None) -> Checkpoint:
    """The checkpoint that `name` means: a directory, `update-000040`, `40`; None: the last. UsageError if none is."""
    found = checkpoints(run / "checkpoints") if found is None else found
    if not found and name is None:
        raise UsageError(f"{run} has no checkpoint: it is no training run, or it has not got to its first one")
    if name is None:
        return found[-1]
    text = str(name)
    for one in found:
        if text in (str(one.update), one.path.name):
            return one
    if (Path(text) / STATE).exists():
        return read_checkpoint(Path(text))
    there = ", ".join(one.path.name for one in found[-5:]) or "none"
    raise UsageError(f"{run} has no checkpoint {text!r}; there are {'... ' if len(found) > 5 else ''}{there}")


def retrace(
    history: History,
    *,
    until: int | None = None,
    files: Sequence[Checkpoint] = (),
    base: str = "as given",
    progress: Progress = silent,
) -> Reproduction:
    """Apply the recorded updates below `until` (default: all) to `history`, whose model has the base weights, and
    compare what comes out with the records and with the weights in `files`."""
    return _Walk(history, until, files, base, progress).report()


class _Walk:
    """One reproduction."""

    def __init__(
        self, history: History, until: int | None, files: Sequence[Checkpoint], base: str, progress: Progress
    ) -> None:
        self.history, self.base, self.progress = history, base, progress
        self.ledger: Ledger = history.store.ledger(history.lineage)
        self.until = self.ledger.next_update if until is None else until
        self.files = {one.update: one for one in files}
        self.last = files[-1] if files else None
        self.known = {stored.record.version: stored.record.digest for stored in history.store.run_records("publish")}
        self.counts = {"published": 0, "checkpoints": 0, "trainers": 0}
        self.digest: str | None = None
        self.started = time.perf_counter()
        self.other = ""
        """What of torch and the machine is other than at some update so far."""

    def report(self) -> Reproduction:
        uses = [use for use in self.ledger.uses if use.update < self.until]
        steps = [list(epochs) for _, epochs in groupby(uses, key=lambda use: use.update)]
        try:
            self._weights(self.history.lineage)
            for k, epochs in enumerate(steps):
                self._apply(epochs)
                self.progress("applying the recorded updates again", k + 1, len(steps), "")
        except Differs as error:
            return self._differs(
                Difference(
                    update=error.update,
                    field=error.field,
                    sentence=str(error),
                    recorded=error.recorded,
                    found=error.found,
                )
            )
        except GoneTape as error:
            return self._made("unverifiable", reason=str(error))
        except _Other as error:
            return self._differs(error.difference)
        except BrokenHistory as error:
            return self._made("unverifiable", reason=str(error))
        if self.history.updates < self.until:
            return self._made(
                "unverifiable",
                reason=f"the ledger ends at update {self.history.updates}, the "
                f"checkpoint has {self.until}: the tapes of the others are elsewhere",
            )
        return self._made("verified")

    def _apply(self, epochs: list[Use]) -> None:
        on: Any = epochs[0].info.get("on") or {}
        trainer = self.history.enter(str(epochs[0].info["phase"]))
        here = {**computed_on(trainer), "threads": on.get("threads")}
        self.other = elsewhere(on, here) or self.other
        _, again = apply_again(self.history, epochs)
        if len(again) != len(epochs):
            raise BrokenHistory(
                f"update {epochs[0].update} has {len(again)} epochs, {len(epochs)} are in the ledger; "
                "the run is at work, or died there: resume it"
            )
        self._weights(epochs[0].lineage)

    def _weights(self, lineage: str) -> None:
        """Compare the weights as they are now with all that says what they are."""
        n = self.history.updates
        published, file = self.known.get(version_name(lineage, n)), self.files.get(n)
        last = n == self.until
        if published is None and file is None and not last:
            return
        self.digest = weights_digest(copied_weights(self.history.model))
        if published is not None:
            if n == 0 and published != self.digest:
                raise BrokenHistory(
                    f"the base weights here ({self.base}) fold to {self.digest}, those that the run "
                    f"began with to {published}"
                )
            if published != self.digest:
                raise _Other(
                    n - 1,
                    "weights",
                    f"the weights after it fold to {self.digest}, version "
                    f"{version_name(lineage, n)} was published with {published}",
                    published,
                    self.digest,
                )
            self.counts["published"] += 1
        if file is not None:
            self._file(file)
            self.counts["checkpoints"] += 1

    def _file(self, file: Checkpoint) -> None:
        assert self.digest is not None
        try:
            found = weights_digest(file.weights())
            taught = file.taught()
        except BadCheckpoint as error:
            raise _Other(file.update - 1, "checkpoint", str(error), self.digest, None) from error
        if found != self.digest:
            raise _Other(
                file.update - 1,
                "checkpoint",
                f"the weights in {file.path} fold to {found}, base weights and tapes give {self.digest}",
                self.digest,
                found,
            )
        self._trainer(file)
        pinned = taught_by(use for use in self.ledger.uses if use.update < file.update)
        if "taught" in file.state and taught != pinned:
            tape = next(name for name in [*taught, *pinned] if taught.get(name) != pinned.get(name))
            raise _Other(
                file.update - 1,
                "taught",
                f"{file.path} was taught by tape {tape} as {taught.get(tape)}, the ledger says {pinned.get(tape)}",
                list(pinned.get(tape, ())),
                list(taught.get(tape, ())),
            )

    def _trainer(self, file: Checkpoint) -> None:
        """Compare the state that the next update goes on from, but for random numbers, which no update draws."""
        phase, trainer = file.state["phase"], self.history.trainer
        if not phase:
            return
        if trainer is None or phase != self.history.phase:
            raise _Other(
                file.update - 1,
                "trainer",
                f"{file.path} is of phase {phase!r}, its last update was of {self.history.phase!r}",
                self.history.phase,
                phase,
            )
        try:
            saved = {name: value for name, value in file.trainer_state().items() if name != "rng"}
        except BadCheckpoint as error:
            raise _Other(file.update - 1, "trainer", str(error), None, None) from error
        derived = trainer.state_dict()
        for place, then, now in _unlike(saved, {name: derived.get(name) for name in saved}):
            raise _Other(
                file.update - 1,
                "trainer",
                f"{place} of the trainer's state in {file.path} is {then}, base weights and tapes give {now}",
                now,
                then,
            )
        self.counts["trainers"] += 1

    def _differs(self, difference: Difference) -> Reproduction:
        if self.other and difference.field in ("loss", "grad_norm", "weights", "checkpoint", "trainer"):
            return self._made(
                "unverifiable",
                reason=f"update {difference.update} comes out otherwise, but here is "
                f"{self.other}, where last bits may differ: {difference.sentence}",
            )
        return self._made("diverged", difference=difference)

    def _made(self, outcome: Any, **more: Any) -> Reproduction:
        done = outcome == "verified"
        return Reproduction(
            run=str(self.history.store.path),
            checkpoint=str(self.last.path) if self.last else None,
            lineage=self.history.lineage,
            outcome=outcome,
            base=self.base,
            updates=self.history.updates if done else min(self.history.updates, self._equal(more)),
            of=self.until,
            tapes=len(self.history.taught),
            digest=self.digest if done else None,
            seconds=time.perf_counter() - self.started,
            **self.counts,
            **more,
        )

    @staticmethod
    def _equal(more: dict[str, Any]) -> int:
        difference = more.get("difference")
        return max(0, difference.update) if difference is not None else 1 << 62


def _unlike(saved: Any, derived: Any, place: str = "") -> Iterator[tuple[str, str, str]]:
    """(place, saved, derived) of what isn't the same to the bit; of tensors their digests."""
    if isinstance(saved, dict) and isinstance(derived, dict):
        for key in dict.fromkeys([*saved, *derived]):
            yield from _unlike(saved.get(key), derived.get(key), f"{place}.{key}" if place else str(key))
    elif isinstance(saved, list | tuple) and isinstance(derived, list | tuple) and len(saved) == len(derived):
        for k, (then, now) in enumerate(zip(saved, derived, strict=True)):
            yield from _unlike(then, now, f"{place}[{k}]")
    else:
        then, now = (weights_digest({"": x}) if isinstance(x, Tensor) else repr(x) for x in (saved, derived))
        if then != now:
            yield place, then, now


class _Other(TapereelError):
    """Weights or files that aren't those derived."""

    def __init__(self, update: int, field: str, sentence: str, recorded: Any, found: Any) -> None:
        super().__init__(sentence)
        self.difference = Difference(update=update, field=field, sentence=sentence, recorded=recorded, found=found)
