"""History: the sequence of updates that made a policy. Each is recorded, checkpointed and can be applied again.

A lineage counts its updates from 0 (the base weights) through every phase: version `lineage:n` is the policy after n
updates. A `use` record names the tokens that update n trained on; it is durable before an engine or a checkpoint has
the new weights. Resume loads the newest checkpoint and applies the recorded updates after it again, from the tapes, so
no update is lost or applied twice.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from pydantic import JsonValue
from pydantic_core import to_json
from torch import Tensor, nn

from ...tapes.common.text import logger
from ...tapes.errors import NoSuchTape, NotATape, TapereelError
from ...tapes.records import Publish, Use
from ...tapes.store.store import Store
from ..data.provenance import ChangedTape, Pin, Range, as_pinned, episode_of, known, ranges_of, weighed
from ..data.rows import Row, rows
from ..data.stream import Episode
from ..trainer.checkpoint import (
    BadCheckpoint,
    Checkpoint,
    checkpoints,
    copied_weights,
    prune,
    read_checkpoint,
    remove_partial,
    save_checkpoint,
    weights_digest,
)
from ..trainer.reference import ServedTeacher
from ..trainer.updates import PolicyTrainer, TrainerState, UpdateStats, together
from .delivery import Delivery
from .plan import Batch, ComputedOn, Plan, Source, UpdateInfo, by_update, taught_by
from .staleness import version_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ...agents.rendering.renderer import Renderer

__all__ = ["Batch", "BrokenHistory", "History", "Plan", "Source"]

log = logger("history")


class BrokenHistory(TapereelError, ValueError):
    """The recorded updates can't be applied: a tape is missing, or a checkpoint belongs to another run."""


class Differs(BrokenHistory):
    """An update that was applied again differs from its record."""

    def __init__(
        self, use: Use, field: str, sentence: str, *, recorded: JsonValue = None, found: JsonValue = None
    ) -> None:
        super().__init__(f"lineage {use.lineage!r}: update {use.update} {sentence}")
        self.update, self.field, self.sentence = use.update, field, sentence
        self.recorded, self.found = recorded, found


class History:
    """The updates of one lineage in one store. Not safe to share between threads; `update` may run in one."""

    def __init__(
        self,
        store: Store,
        lineage: str,
        directory: Path,
        model: nn.Module,
        make_trainer: Callable[[str], PolicyTrainer],
        *,
        renderer: Renderer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        keep: int | None = 3,
        keep_bytes: int | None = None,
    ) -> None:
        """model: with the base weights. make_trainer: from a phase to a fresh trainer of the model. keep, keep_bytes:
        as in `prune`."""
        self.store = store
        self.lineage = lineage
        self.directory = directory
        self.model = model
        self.make_trainer = make_trainer
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.keep = keep
        self.keep_bytes = keep_bytes
        self.updates = 0
        """The number of updates in the present weights."""
        self.trained_tokens = 0
        self.taught: dict[str, Pin] = {}
        """Every tape that the present weights were trained on, with its content as the last update read it."""
        self.cursor = 0
        """The number of groups begun in this phase: the position in the taskset."""
        self.scores: dict[int, float] = {}
        """update -> held-out reward of its weights, if it was measured. The best checkpoint is kept."""
        self.phase = ""
        self.trainer: PolicyTrainer | None = None
        self.delivery = Delivery(model)
        self.unrecorded: list[Use] = []
        """Records of epochs of the last update that `restore` made and the store lacks, because a crash cut them off.
        The caller must append them before the next update."""

    @property
    def version(self) -> str:
        """The name of the present weights."""
        return version_name(self.lineage, self.updates)

    def enter(self, phase: str) -> PolicyTrainer:
        """The trainer of `phase`: the present one, or a fresh one at the begin of a phase."""
        if self.trainer is None or phase != self.phase:
            self.trainer, self.phase = self.make_trainer(phase), phase
        return self.trainer

    def from_store(self, tape: str, pin: Pin | None = None) -> tuple[list[Row], Episode]:
        """Rows and episode of a recorded tape: with all of its present layers, or with its content as `pin` names
        it."""
        found = self.store.tape(tape, refresh=False)
        if pin is not None:
            found = as_pinned(found, pin)
        return rows(found, renderer=self.renderer), episode_of(found)

    def update(self, plan: Plan, source: Source) -> tuple[UpdateStats, tuple[Use, ...]]:
        """Apply one update to the weights: an optimiser step, or one for each mini-batch of each epoch.

        Returns the statistics over all steps, and a record for each epoch. The records must be durable before an engine
        or a checkpoint gets the new weights: after a crash, tapes of a version without a record can't be explained.
        """
        # The pin of a tape names the content that this update reads. Layers that a later process adds to the tape (a
        # rescored reward, for example) don't change the update when it is applied again.
        pins: dict[str, Pin] = {}

        def noting(tape: str) -> tuple[list[Row], Episode]:
            found, episode = source(tape)
            pins[tape] = episode.pin
            return found, episode

        batch = plan.batch(self.lineage, noting)
        trainer = self.enter(plan.phase)
        trainer.version = self.version
        given = self.taught_rows(plan, batch)
        compared = {name: str(other) for name, other in trainer.others.items()}  # as they are before the update
        steps = list(
            trainer.updates(
                given,
                batch.episodes,
                epochs=plan.epochs,
                minibatches=plan.minibatches,
                seed=plan.order,
                batches=plan.batches,
                demonstrations=batch.shown,
            )
        )
        uses = tuple(
            self._use(plan, batch, epoch, steps[epoch * plan.minibatches : (epoch + 1) * plan.minibatches])
            for epoch in range(plan.epochs)
        )
        self.updates += 1
        self.trained_tokens += sum(end - start for use in uses for _, _, start, end, _ in use.items)
        stats = together(steps)
        uses[0].info.update(pins={tape: list(pin) for tape, pin in pins.items()}, on=computed_on(trainer))
        uses[0].info.update(compared)
        if self.delivery.found:
            uses[0].info["delivery"] = self.delivery.found
        highs = stats.sums.highs
        uses[0].info.update({name: known(highs[name]) for name in ("mismatch", "moved") if name in highs})
        self.taught.update(taught_by(uses))
        return stats, uses

    def taught_rows(self, plan: Plan, batch: Batch) -> Sequence[Row]:
        """The rows of the plan's update, with the log-probs of a teacher behind an engine. A recorded update reads
        these from the run, and raises BrokenHistory if they are gone."""
        teacher = self.enter(plan.phase).others.get("teacher")
        if not isinstance(teacher, ServedTeacher) or not batch.rows:
            return batch.rows
        recorded = isinstance(plan, UpdateInfo)
        try:
            folder = self.store.path / "teacher"
            given, path = teacher.said(batch.rows, folder, ask=not recorded, check=self.store.check_lead)
        except FileNotFoundError as error:
            raise BrokenHistory(f"update {self.updates} lacks what its teacher said: {error}") from error
        if not recorded:
            self.store.record_files(path)
        return given

    def _use(self, plan: Plan, batch: Batch, epoch: int, steps: list[UpdateStats]) -> Use:
        stats = together(steps)
        used = weighed(batch.rows, stats.stream, stats.weight) if stats.applied else []
        for step in steps:
            if step.applied and step.shown is not None:
                used += weighed(*step.shown)
        info = {
            **plan.info(),
            "stale": [list(r) for r in batch.stale],
            "filtered": [list(r) for r in (*batch.filtered, *_left_out(batch.rows, stats))],
            "lr": stats.lr,
            "skipped": stats.skipped,
            "loss": known(stats.loss),
            "grad_norm": known(stats.grad_norm),
        }
        if batch.context:
            info["context"] = [list(r) for r in batch.context]
        return Use(lineage=self.lineage, update=self.updates, epoch=epoch, items=tuple(used), info=info)

    def publish_record(self, mode: str) -> tuple[dict[str, Tensor], Publish]:
        """(a copy of the weights, their `publish` record)."""
        weights = copied_weights(self.model)
        return weights, Publish(version=self.version, digest=weights_digest(weights), mode=mode, at=time.time())

    def record_version(self, mode: str) -> None:
        """Record the present weights in the store, unless it has a record of this version."""
        # The version is looked up first: the digest of the weights costs a copy of the model.
        if self.version not in self.store.published:
            self.store.append_layer(self.publish_record(mode)[1])

    def checkpoint(self, *, pinned: bool = False) -> Checkpoint:
        """Write the weights and the trainer's state. A pinned checkpoint is never deleted for newer ones."""
        state = {
            "lineage": self.lineage,
            "phase": self.phase,
            "version": self.version,
            "pinned": pinned,
            "trained_tokens": self.trained_tokens,
            "cursor": self.cursor,
            "lead": self.store.lease.epoch if self.store.lease is not None else None,
        }
        trainer: dict[str, Any] = {"rng": torch.get_rng_state()}
        if self.trainer is not None:
            trainer |= self.trainer.state_dict()
            options = self.trainer.options
            state["schedule"] = {"lr": options.lr, **options.schedule.model_dump(mode="json")}
        made = save_checkpoint(
            self.directory,
            self.model,
            trainer,
            state,
            update=self.updates,
            tokenizer=self.tokenizer,
            pictures=self.renderer.pictures if self.renderer is not None else None,
            taught=self.taught,
            check=self.store.check_lead,
        )
        self.store.record_files(*sorted(made.path.rglob("*")))
        best = max(self.scores, key=self.scores.__getitem__, default=None)
        prune(self.directory, keep=self.keep, keep_bytes=self.keep_bytes, best=best)
        return made

    def settle(self) -> None:
        """At the end of a phase: make sure that the present weights have a checkpoint that is kept."""
        for found in checkpoints(self.directory, damaged=False):
            if found.update == self.updates and found.state["lineage"] == self.lineage and found.state.get("pinned"):
                return
        self.checkpoint(pinned=True)

    def restore(
        self,
        on_update: Callable[[int, int], None] | None = None,
        *,
        until: int | None = None,
        report: Callable[[UpdateStats, Sequence[Use]], None] | None = None,
        checkpoint_every: int | None = None,
    ) -> int:
        """Bring the weights to the last recorded update: load the newest checkpoint, then apply the updates after it
        again.

        Returns the number of updates that were applied again; `report` gets each of them. until: apply only updates
        below this one. checkpoint_every: write the checkpoints that the previous process had no time for, one after
        this many updates; None writes none. Raises BrokenHistory if a record and its update differ.
        """
        if checkpoint_every is not None:
            remove_partial(self.directory)
        uses = [use for use in self.store.ledger(self.lineage).uses if until is None or use.update < until]
        last = uses[-1].update + 1 if uses else 0
        leads = {use.update + 1: use.lead or 0 for use in uses}

        # A newer checkpoint has updates that these records don't explain, and so has one whose lead's last update a
        # later lead made again. An older one is loaded then.
        def fits(c: Checkpoint) -> bool:
            lead = c.state.get("lead") or 0
            return c.state["lineage"] == self.lineage and c.update <= last and lead >= leads.get(c.update, 0)

        if self._load_newest(fits):
            self.taught = taught_by(use for use in uses if use.update < self.updates)
        redo = by_update(use for use in uses if use.update >= self.updates)
        for k, epochs in enumerate(redo):
            stats, again = apply_again(self, epochs)
            # A crash between the records of an update's epochs: no engine got its weights, and the missing records are
            # written when the run continues.
            self.unrecorded.extend(again[len(epochs) :])
            if report is not None:
                report(stats, again)
            if checkpoint_every is not None and self.updates % checkpoint_every == 0 and not self.unrecorded:
                self._check_published()
                self.checkpoint()
            if on_update is not None:
                on_update(k + 1, len(redo))
        self._check_published()
        checked = [found for use in uses if (found := UpdateInfo.of(use).delivery)]
        if checked:
            self.delivery.recall(checked[-1], lambda tape: self.from_store(tape)[0])
        return len(redo)

    def _load_newest(self, fits: Callable[[Checkpoint], bool]) -> bool:
        """Load the newest checkpoint that is whole and fits, and return whether there is one. A damaged checkpoint
        costs only the time to apply its updates again."""
        recorded = any((self.store.path / name).is_relative_to(self.directory) for name in self.store.files)
        for path in sorted(self.directory.glob("update-*"), key=lambda path: (len(path.name), path.name), reverse=True):
            try:
                one = read_checkpoint(path)
                # Check for damage first: `fits` reads the checkpoint's state, which may be the damaged part.
                broken = self.store.damage(path)
                if broken is None and recorded:
                    # A crash came before its digests, or another program put it here.
                    broken = [f"no record has the digests of {path}"]
                if broken:
                    raise BadCheckpoint(broken[0])
                if fits(one):
                    self._load(one)
                    return True
            except BadCheckpoint as error:
                log.warning("%s; the checkpoint before it is used", error)
        return False

    def _load(self, checkpoint: Checkpoint) -> None:
        # Both are read before anything is changed: of a damaged checkpoint no half may be used.
        weights, state = checkpoint.weights(), checkpoint.trainer_state()
        self.model.load_state_dict(weights)
        self.updates = checkpoint.update
        self.trained_tokens = int(checkpoint.state["trained_tokens"])
        self.cursor = int(checkpoint.state.get("cursor", 0))
        # A trainer that draws random numbers must draw the same ones again.
        if "rng" in state:
            torch.set_rng_state(cast(Tensor, state["rng"]))
        if checkpoint.state["phase"]:
            self.enter(checkpoint.state["phase"]).load_state_dict(cast(TrainerState, state))

    def _check_published(self) -> None:
        """Raise BrokenHistory if the restored weights differ from the weights that were published under their version.

        The comparison is of bits. Without it, a resumed run on another machine would continue with slightly different
        weights under the same version, and tapes of both would count as of one policy.
        """
        recorded = self.store.published.get(self.version)
        found = weights_digest(copied_weights(self.model)) if recorded is not None else None
        if recorded is not None and found != recorded.digest:
            raise BrokenHistory(
                f"version {self.version} was published with digest {recorded.digest}; "
                f"the restored weights have {found}: the run was recorded on another machine or with "
                "another number of threads or version of a library, so resume it there"
            )


# The redo log: recorded updates, applied again


def apply_again(history: History, epochs: Sequence[Use]) -> tuple[UpdateStats, tuple[Use, ...]]:
    """Apply one update, recorded in `epochs`, to the history's weights; returns its statistics and its new records.

    Raises Differs if the update isn't the recorded one, and BrokenHistory if a tape is gone. After a crash the record
    may lack its last epochs; then only the recorded epochs are compared.
    """
    use = epochs[0]
    if use.update != history.updates:
        raise BrokenHistory(
            f"lineage {history.lineage!r}: update {history.updates} is not in the ledger, but update "
            f"{use.update} is; the run directory is incomplete"
        )
    try:
        info = UpdateInfo.of(use)
        with with_threads((info.on or ComputedOn()).threads):
            stats, again = history.update(info, as_read(history, info))
    except ChangedTape as error:
        raise Differs(use, "tape", f"can't be applied again: {error}") from error
    except (NoSuchTape, NotATape) as error:
        raise BrokenHistory(f"lineage {use.lineage!r}: update {use.update} can't be applied again: {error}") from error
    try:
        for then, now in zip(epochs, again, strict=False):
            _compare(then, now)
    except Differs as error:
        raise _by_recipe(error, use, again[0]) from None
    return stats, again


def as_read(history: History, info: UpdateInfo) -> Source:
    """The source of tapes with the content that the update read. Raises ChangedTape if a tape has lost it."""
    pins = info.pins or {}
    return lambda tape: history.from_store(tape, pins.get(tape) or None)


@contextmanager
def with_threads(recorded: int | None) -> Iterator[None]:
    """Inside, torch has the recorded number of threads: it divides sums by threads, and sums in another order have
    other last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(recorded or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _by_recipe(error: Differs, use: Use, again: Use) -> Differs:
    """The error, with the recipe named as its cause if the recipe's digest differs too.

    Another digest alone isn't an error: a term's new constant changes it, and may not affect the update.
    """
    then: Any = use.info.get("on") or {}
    now: Any = again.info.get("on") or {}
    if then.get("recipe") in (None, now.get("recipe")):
        return error
    return Differs(
        use,
        "recipe",
        "was made by another recipe than the configuration gives now, and applied again "
        f"trains on other tokens or weights than recorded: {error.sentence}",
        recorded=then["recipe"],
        found=now.get("recipe"),
    )


def _compare(use: Use, again: Use) -> None:
    for k in range(max(len(use.items), len(again.items))):
        then, now = (
            cast("list[JsonValue] | None", list(u.items[k]) if k < len(u.items) else None) for u in (use, again)
        )
        if then != now:
            raise Differs(
                use,
                "items",
                f"applied again trains on other tokens or weights than recorded: {_item(now)}; "
                f"the record has {_item(then)}. The code, the tapes or the configuration changed",
                recorded=then,
                found=now,
            )
    for field in ("reference", "teacher", "stale", "filtered", "context", "skipped", "lr", "loss", "grad_norm"):
        then, now = use.info.get(field), again.info.get(field)
        if field in use.info and then != now:
            name = field.replace("_", " ")
            what = (
                f"sets other tokens aside as {name}"
                if isinstance(now, list)
                else f"has {name} {now!r}, the record says {then!r}"
            )
            other = elsewhere(*(cast("dict[str, JsonValue]", one.info.get("on")) for one in (use, again)))
            here = f" (here is {other})" if other else ""
            sentence = f"applied again {what}: the weights, a tape, the code or the configuration changed{here}"
            raise Differs(use, field, sentence, recorded=then, found=now)


def _item(item: Any) -> str:
    if item is None:
        return "nothing"
    tape, call, start, end, weight = item
    return f"tokens [{start}, {end}) of call {call} of tape {tape} with weight {weight!r}"


def elsewhere(then: Mapping[str, JsonValue] | None, now: Mapping[str, JsonValue]) -> str:
    """The differences of torch and the machine between the update and now; empty without any."""
    names = [
        f"{name} {now.get(name)} and not {value}"
        for name, value in (then or {}).items()
        if name != "recipe" and now.get(name) != value
    ]
    return ", ".join(names)


CPU_NAMES = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""Lines of `/proc/cpuinfo`: the first three on x86_64, the others on aarch64."""


@cache
def cpu_model() -> str:
    """Vendor, family and model of the processor. Math libraries choose their code by it, so processors with the same
    instructions can differ in the last bits of a sum."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return " ".join(found[name] for name in CPU_NAMES if name in found)


def computed_on(trainer: PolicyTrainer) -> dict[str, JsonValue]:
    """Everything except tapes and weights that determines an update's bits: recipe, torch version, threads, device,
    ranks, and the image processor of a vision model."""
    device = next(trainer.model.parameters()).device
    chip = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {cpu_model()}".strip()
    )
    recipe = hashlib.sha256(to_json(trainer.recipe.model_dump(mode="json"))).hexdigest()
    return {
        "recipe": recipe,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": device.type,
        "chip": chip,
        "ranks": trainer.ranks.size,
        **({"processor": trainer.vision.hash} if trainer.vision is not None else {}),
    }


def _left_out(rows: Sequence[Row], stats: UpdateStats) -> list[Range]:
    """The tokens of scored episodes without a part in the loss: the recipe did not select them or their group, they are
    no data for RL, or the whole update was skipped. No later update trains on them, so this update accounts for
    them."""
    stream = stats.stream
    idle = (stats.weight == 0) if stats.applied else torch.ones(len(stream), dtype=torch.bool)
    chosen = (idle & ~stream.episodes.reward.isnan()[stream.episode]).numpy()
    cuts = np.cumsum([len(row.own) for row in rows])[:-1]
    parts = zip(rows, np.split(chosen, cuts), strict=True) if rows else ()
    return [entry for row, part in parts for entry in ranges_of(row, part)]
