"""Reproduce: computes a checkpoint again, update by update, from the base weights and the recorded tapes.

No model samples and no environment runs. The training code makes every update again, from the tapes that its record
names. The result must equal the record bit for bit, and the new weights must have the published digest. If not, the
report names the first update that differs, and what differs. The run is only read.

1. The outcome `verified` is certain on every machine, because equal digests mean equal weights. Another machine or
   torch version may add numbers in another order, which can change the last bits. So if an update differs there, the
   outcome is `unverifiable` instead of `diverged`.
2. How a tape was made isn't checked here. `verify` checks its bytes, `replay` the agent, and `requery` the log-probs.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, JsonValue, computed_field

from ...envs.rewards.relative import counted
from ...tapes.common.config import check_version
from ...tapes.common.progress import Progress, silent
from ...tapes.errors import TapereelError, UsageError
from ...tapes.records import Use, total_reward
from ...tapes.store.ledger import Ledger
from ...tapes.store.store import Store
from ...tapes.value import STANDINGS, Standing, Value
from ..loop.history import FORMULAS, BrokenHistory, Differs, History, apply_again, computed_on, elsewhere, other_rules
from ..loop.plan import Plan, by_update, taught_by
from ..loop.staleness import version_name
from ..trainer.checkpoint import (
    STATE,
    BadCheckpoint,
    Checkpoint,
    checkpoint_folders,
    checkpoints,
    read_checkpoint,
)
from ..trainer.distributed import launched
from ..trainer.ranks import Ranks
from .rebuild import RebuiltRun, Unknown, follow, present_config

Outcome = Literal["verified", "diverged", "unverifiable"]


class Difference(Value):
    """The first difference between the run and its computation here."""

    update: int
    """Number of the update, counted from 0. The update makes version `update + 1`. -1 means the base weights."""
    field: str
    """What differs: `tape`, `recipe`, `reference`, `teacher`, `items`, `stale`, `filtered`, `context`, `skipped`, `lr`,
    `loss`, `grad_norm`, `weights`, `checkpoint`, `trainer`, `taught` or `files`."""
    recorded: JsonValue = None
    found: JsonValue = None
    sentence: str


class Reproduction(Value):
    """The result of computing a checkpoint again."""

    run: str
    checkpoint: str | None
    """Directory of the checkpoint, or None if only the records of updates were compared."""
    lineage: str
    outcome: Outcome
    base: str
    updates: int
    """Number of updates that were applied again with an equal result."""
    of: int
    """Number of updates that the checkpoint contains."""
    published: int = 0
    """How many of the published versions, up to the checkpoint, were computed again with equal weights."""
    checkpoints: int = 0
    """Number of checkpoints whose weights equal the computed ones."""
    trainers: int = 0
    """Number of these checkpoints whose trainer state equals the computed one too: optimiser, counts, moments,
    coefficients, averages and critic. The base checkpoint has no trainer state."""
    tapes: int = 0
    """Number of tapes that were trained on. Each still has the content that its updates read."""
    digest: str | None = None
    """Digest of the computed weights if the outcome is `verified`, otherwise None."""
    difference: Difference | None = None
    """The first difference, if the outcome is `diverged`."""
    reason: str | None = None
    """Why the comparison is not possible, if the outcome is `unverifiable`."""
    seconds: float = 0.0
    players: dict[str, Reproduction] = Field(default={})
    """The result for the last checkpoint of each trained player, by name. It is empty if a checkpoint was named."""

    @computed_field
    @property
    def exit_code(self) -> int:
        """0 for verified, 1 for diverged, 2 for unverifiable. With several policies, it is 1 if any diverged, otherwise
        2 if any is unverifiable."""
        every = {self.outcome, *(one.outcome for one in self.players.values())}
        codes = {"diverged": 1, "unverifiable": 2}
        return next((code for outcome, code in codes.items() if outcome in every), 0)

    @computed_field
    @property
    def verdict(self) -> Standing:
        """The exit code in words: `broken` if a policy diverged, `undecided` if a policy is unverifiable."""
        return STANDINGS[self.exit_code]

    def __str__(self) -> str:
        if self.difference is not None:
            at = "at the base weights" if self.difference.update < 0 else f"at update {self.difference.update}"
            return f"diverged {at}: {self.difference.sentence}"
        return f"unverifiable: {self.reason}" if self.reason is not None else "verified"


def reproduce(run: str | Path, checkpoint: str | Path | None = None, *, progress: Progress = silent) -> Reproduction:
    """Compute a checkpoint of a run again and compare it. By default, this is the last checkpoint, and all earlier ones
    are compared too.

    `run` is the directory of the run, or without `checkpoint` also the directory of a checkpoint inside a run.
    `checkpoint` is the directory of a checkpoint anywhere, its name (`update-000040`), or its number of updates. Raises
    UsageError if the checkpoint doesn't exist, and OtherVersion if another version of this package wrote the run's
    settings.

    A run by several processes needs as many here: start this with `torchrun` on each. Every rank returns the result.
    """
    run = Path(run)
    if not run.is_dir():
        raise UsageError(f"there is no folder {run}: name the directory of a training run, or of a checkpoint in one")
    if checkpoint is None and (run / STATE).exists():
        run, checkpoint = _run_of(run.resolve()), run.resolve()
    check_version(run)
    with launched(**_launch(run)) as ranks:
        if ranks.rank:
            return cast(Reproduction, follow(run, ranks))
        found = _one(run, run / "checkpoints", checkpoint, progress, ranks)
        ranks.broadcast(("end", found))
    if checkpoint is not None:
        return found
    # Several processes train one policy only, so a run of theirs has no player that learns.
    players = {folder.name: _one(run, folder, None, progress, Ranks()) for folder in checkpoint_folders(run)[1:]}
    return found.model_copy(update={"players": players})


def _launch(run: Path) -> dict[str, Any]:
    try:
        found = present_config(run).processes.model_dump()
        # A process alone computes what it can, and the result names the number of processes that the run had.
        return found if "WORLD_SIZE" in os.environ else {**found, "sequence_parallel": 1}
    except Unknown:  # the result will say so
        return {}


def _one(run: Path, folder: Path, checkpoint: str | Path | None, progress: Progress, ranks: Ranks) -> Reproduction:
    """Reproduce one policy, whose checkpoints are in `folder`."""
    found = checkpoints(folder)
    wanted = _find_checkpoint(run, checkpoint, found)
    with Store.open(run) as store, tempfile.TemporaryDirectory() as scratch:
        lineage = str(wanted.state["lineage"])
        # A damaged checkpoint is always included, whichever lineage it names, so that the damage is reported.
        among = [c for c in found if c.update < wanted.update]
        among = [c for c in among if c.state.get("lineage") == lineage or store.damage(c.path)]
        try:
            rebuilt = RebuiltRun.of(run, store, Path(scratch), lineage, ranks)
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
            rebuilt.history,
            until=wanted.update,
            files=[*(among if checkpoint is None else ()), wanted],
            base=rebuilt.base,
            progress=progress,
        )


def _run_of(checkpoint: Path) -> Path:
    return next((above.parent for above in checkpoint.parents if above.name == "checkpoints"), checkpoint.parent.parent)


def _find_checkpoint(run: Path, name: str | Path | None, found: Sequence[Checkpoint]) -> Checkpoint:
    """Return the checkpoint that `name` means: a directory, `update-000040` or `40`. None means the last checkpoint.
    Raises UsageError if it doesn't exist."""
    if not found and name is None:
        raise UsageError(
            f"{run} has no checkpoint: it is not a training run, or it has not written its first checkpoint yet"
        )
    if name is None:
        return found[-1]
    text = str(name)
    for one in found:
        if text in (str(one.update), one.path.name):
            return one
    if (Path(text) / STATE).exists():
        return read_checkpoint(Path(text))
    there = ", ".join(one.path.name for one in found[-5:]) or "none"
    raise UsageError(f"{run} has no checkpoint {text!r}; it has {'... ' if len(found) > 5 else ''}{there}")


def retrace(
    history: History,
    *,
    until: int | None = None,
    files: Sequence[Checkpoint] = (),
    base: str = "the weights of the model",
    progress: Progress = silent,
) -> Reproduction:
    """Apply the recorded updates to `history`, whose model has the base weights. Compare the results with the records
    and with the checkpoints `files`. With `until`, only updates with a lower number are applied."""
    return _Walk(history, until, files, base, progress).report()


class _Walk:
    """One reproduction, which applies the updates one by one and compares after each."""

    def __init__(
        self, history: History, until: int | None, files: Sequence[Checkpoint], base: str, progress: Progress
    ) -> None:
        self.history, self.base, self.progress = history, base, progress
        self.ledger: Ledger = history.store.ledger(history.lineage)
        self.until = self.ledger.next_update if until is None else until
        self.files = {one.update: one for one in files}
        self.last = files[-1] if files else None
        self.known = {version: one.digest for version, one in history.store.published.items()}
        self.counts = {"published": 0, "checkpoints": 0, "trainers": 0}
        self.digest: str | None = None
        self.started = time.perf_counter()
        self.other = ""
        """How the present machine or torch version differs from those of an update. Empty if nothing differs."""
        self.remedy = ""
        """How to get the recorded number of processes, as the end of a sentence. Empty if it is the number here."""

    def report(self) -> Reproduction:
        steps = by_update(use for use in self.ledger.uses if use.update < self.until)
        try:
            self._weights(self.history.lineage)
            for k, epochs in enumerate(steps):
                self._apply(epochs)
                self.progress("applying the recorded updates again", k + 1, len(steps), "")
        except (Differs, _Other) as error:
            named = {name: getattr(error, name) for name in ("update", "field", "recorded", "found")}
            return self._differs(Difference(sentence=str(error), **named))
        except BrokenHistory as error:
            return self._made("unverifiable", reason=str(error))
        if self.history.updates < self.until:
            return self._made(
                "unverifiable",
                reason=f"the ledger ends at update {self.history.updates}, the checkpoint has {self.until} updates: "
                "the tapes of the missing updates are not in this run",
            )
        return self._made("verified")

    def _apply(self, epochs: list[Use]) -> None:
        on: Any = epochs[0].info.get("on") or {}
        plan = Plan.of(epochs[0])
        trainer = self.history.enter(plan.phase)
        # The number of threads is left out: an update is applied with the recorded number, so it can't differ.
        here = {**computed_on(trainer), "threads": on.get("threads")}
        self.other = elsewhere(on, here) or self.other
        self.other = other_rules(on, trainer, plan, self._rounded) or self.other
        if (ranks := on.get("ranks", here["ranks"])) != here["ranks"]:
            run = self.history.store.path
            self.remedy = f". Use as many processes: torchrun --nproc-per-node {ranks} -m tapereel reproduce {run}"
        _, again = apply_again(self.history, epochs)
        if len(again) != len(epochs):
            raise BrokenHistory(
                f"update {epochs[0].update} has {len(again)} epochs, and the ledger has {len(epochs)} of them: the run "
                "is at work, or died there. Resume it"
            )
        self._weights(epochs[0].lineage)

    def _rounded(self, tape: str) -> bool:
        """Whether the tape's reward differs from the sum that versions without exact sums computed."""
        rewards = counted(self.history.store.tape(tape))
        return total_reward(rewards) not in (None, sum(r.weight * r.value for r in rewards if r.weight))

    def _weights(self, lineage: str) -> None:
        """Compare the current weights with the published digest and the checkpoint of the same version. Either may be
        missing.

        This is done after each update. The last checkpoint alone wouldn't show which update differs.
        """
        n = self.history.updates
        published, file = self.known.get(version_name(lineage, n)), self.files.get(n)
        last = n == self.until
        if published is None and file is None and not last:
            return
        self.digest = self.history.policy.weights.digest(published)
        if published is not None:
            if n == 0 and published != self.digest:
                raise BrokenHistory(
                    f"the base weights here ({self.base}) have digest {self.digest}, the run began with weights of "
                    f"digest {published}"
                )
            if published != self.digest:
                version = version_name(lineage, n)
                said = (
                    f"the weights after it have digest {self.digest}, version {version} was published with {published}"
                )
                raise _Other(n - 1, "weights", said, published, self.digest)
            self.counts["published"] += 1
        if file is not None:
            self._file(file)
            self.counts["checkpoints"] += 1

    def _file(self, file: Checkpoint) -> None:
        try:
            for field, sentence, recorded, found in self._unlike_file(file):
                raise _Other(file.update - 1, field, sentence, recorded, found)
        except BadCheckpoint as error:
            raise _Other(file.update - 1, "checkpoint", str(error), self.digest, None) from error

    def _unlike_file(self, file: Checkpoint) -> Iterator[tuple[str, str, JsonValue, JsonValue]]:
        """Yield (field, sentence, recorded, found) for each part of the checkpoint that differs from the computed one.

        States of random number generators are left out, because no update draws from them.
        """
        derives = "base weights and tapes give"
        found, taught = self.history.policy.weights.digest_in(file, self.digest), file.taught()
        if found != self.digest:
            sentence = f"the weights in {file.path} have digest {found}, {derives} {self.digest}"
            yield "checkpoint", sentence, self.digest, found
        phase, trainer = file.state["phase"], self.history.trainer
        if phase and (trainer is None or phase != self.history.phase):
            sentence = f"{file.path} has phase {phase!r}, and its last update has phase {self.history.phase!r}"
            yield "trainer", sentence, self.history.phase, phase
        elif phase and trainer is not None:
            try:
                different = self.history.policy.weights.unlike(file)
            except BadCheckpoint as error:
                yield "trainer", str(error), None, None
                return
            for place, then, now in different:
                yield "trainer", f"{place} of the trainer's state in {file.path} is {then}, {derives} {now}", now, then
            self.counts["trainers"] += 1
        pinned = taught_by(use for use in self.ledger.uses if use.update < file.update)
        if "taught" in file.state and taught != pinned:
            tape = next(name for name in [*taught, *pinned] if taught.get(name) != pinned.get(name))
            then, now = taught.get(tape), pinned.get(tape)
            sentence = f"{file.path} was taught by tape {tape} as {then}, the ledger says {now}"
            yield "taught", sentence, list(now or ()), list(then or ())
        if broken := self.history.store.damage(file.path):  # this includes files that no update reads, such as `hf/`
            yield "files", broken[0], None, None

    def _differs(self, difference: Difference) -> Reproduction:
        bits = ("recipe", "reference", "loss", "grad_norm", "weights", "checkpoint", "trainer")
        if any(rule in self.other for rule in FORMULAS):
            # Another formula trains other tokens too, for example if rewards that are equal now differed.
            bits = (*bits, "items", "filtered", "skipped", "taught", "lr")
        if self.other and difference.field in bits:
            return self._made(
                "unverifiable",
                reason=f"update {difference.update} differs, but here is "
                f"{self.other}, which may change the result: {difference.sentence}{self.remedy}",
            )
        return self._made("diverged", difference=difference)

    def _made(self, outcome: Outcome, **more: Any) -> Reproduction:
        different: Difference | None = more.get("difference")
        return Reproduction(
            run=str(self.history.store.path),
            checkpoint=str(self.last.path) if self.last else None,
            lineage=self.history.lineage,
            outcome=outcome,
            base=self.base,
            updates=self.history.updates if different is None else min(self.history.updates, max(0, different.update)),
            of=self.until,
            tapes=len(self.history.taught),
            digest=self.digest if outcome == "verified" else None,
            seconds=time.perf_counter() - self.started,
            **self.counts,
            **more,
        )


class _Other(TapereelError):
    """Raised if recorded weights or files differ from the computed ones."""

    def __init__(self, update: int, field: str, sentence: str, recorded: Any, found: Any) -> None:
        super().__init__(sentence)
        self.update, self.field, self.recorded, self.found = update, field, recorded, found
