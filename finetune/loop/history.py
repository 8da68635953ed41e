"""The history of a policy: the sequence of updates that made it. Each update is recorded and can be applied again.

A lineage is the name of one sequence. Version `lineage:n` is the policy after n updates in all phases, and
`lineage:0` has the base weights.

A `use` record names the tokens that one update trained on. The record is durable before any engine or checkpoint gets
the new weights. To resume a run, the newest checkpoint is loaded, and the updates that were recorded later are applied
again from the tapes. So no update is lost or applied twice.
"""

from __future__ import annotations

import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue
from pydantic_core import to_json
from torch import Tensor, nn

from ...agents.rendering.renderer import Renderer
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
    prune,
    read_checkpoint,
    remove_partial,
    save_checkpoint,
)
from ..trainer.logprobs import shares_prefixes, vocabulary_of
from ..trainer.micro_batches import SHARE_TOKENS
from ..trainer.reference import ServedTeacher
from ..trainer.trainer import Trainer
from ..trainer.updates import Division, TrainerState, UpdateStats, together, with_files
from .delivery import Delivery
from .plan import Batch, ComputedOn, Plan, Source, UpdateInfo, by_update, taught_by
from .policy import Policy
from .rounding import allowed, rounding_of, sample_of
from .staleness import version_name

__all__ = ["Batch", "BrokenHistory", "History", "Plan", "Source"]

log = logger("history")


class BrokenHistory(TapereelError, ValueError):
    """Raised if recorded updates can't be applied again, for example because a tape is missing."""


class Differs(BrokenHistory):
    """Raised if an update that was applied again differs from its record."""

    def __init__(
        self, use: Use, field: str, sentence: str, *, recorded: JsonValue = None, found: JsonValue = None
    ) -> None:
        super().__init__(f"lineage {use.lineage!r}: update {use.update} {sentence}")
        self.update, self.field, self.sentence = use.update, field, sentence
        self.recorded, self.found = recorded, found


class History:
    """The updates of one lineage in one store. Two threads must not use it at the same time, but `update` may run in
    any thread."""

    def __init__(self, policy: Policy, store: Store, lineage: str, directory: Path) -> None:
        """The model of `policy` has the base weights. Checkpoints are written to `directory`."""
        self.policy = policy
        self.store = store
        self.lineage = lineage
        self.directory = directory
        self.updates = 0
        """Number of updates that led to the current weights."""
        self.trained_tokens = 0
        self.taught: dict[str, Pin] = {}
        """For each tape that the current weights were trained on, a pin: the digests of its content when an update last
        read it."""
        self.cursor = 0
        """Number of groups that have begun in this phase, and so the position in the taskset."""
        self.scores: dict[int, float] = {}
        """Held-out reward after each update that was evaluated. The checkpoint with the highest reward is kept."""
        self.phase = ""
        self.trainer: Trainer | None = None
        """The present phase's trainer in this process."""
        self.delivery = Delivery(policy)
        self.unrecorded: list[Use] = []
        """Records of the last update that the store lacks, because a crash came between the records of its epochs.
        `restore` makes these records again, and the caller must append them to the store before the next update."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.policy.model

    @property
    def version(self) -> str:
        """The version name of the current weights."""
        return version_name(self.lineage, self.updates)

    def enter(self, phase: str) -> Trainer:
        """Return the trainer for `phase`. Each phase begins with a new trainer."""
        if self.trainer is None or phase != self.phase:
            self.trainer, self.phase = self.policy.weights.enter(phase), phase
        return self.trainer

    def from_store(self, tape: str, pin: Pin | None = None) -> tuple[list[Row], Episode]:
        """Return the rows and the `Episode` of a recorded tape. With `pin`, the tape is read as it was when the pin was
        made. Without `pin`, it is read with all of its current layers."""
        return _read(self.store, self.policy.renderer, tape, pin)

    def update(self, plan: Plan, source: Source) -> tuple[UpdateStats, tuple[Use, ...]]:
        """Apply one update to the weights, with one optimiser step for each mini-batch in each epoch.

        Returns the statistics over all optimiser steps, and one record per epoch. These records must be durable before
        an engine or a checkpoint gets the new weights. Otherwise a crash could leave tapes that were sampled by an
        unrecorded version.
        """
        # A pin names the content of a tape that this update reads. A later process may add layers, such as a rescored
        # reward. When the update is applied again, they are left out, so the result is the same.
        pins: dict[str, Pin] = {}

        def noting(tape: str) -> tuple[list[Row], Episode]:
            found, episode = source(tape)
            pins[tape] = episode.pin
            return found, episode

        batch = plan.batch(self.lineage, noting, vocabulary := vocabulary_of(self.model))
        for tape in batch.beyond:
            log.warning("tape %s is set aside: it has a token id that isn't one of the model's %d", tape, vocabulary)
        plan = plan.model_copy(update={"beyond": tuple(batch.beyond)})
        # A new phase begins with a new optimiser, because its recipe and learning rate are other ones.
        trainer, weights = self.enter(plan.phase), self.policy.weights
        trainer.version = self.version
        given = self.taught_rows(plan, batch)
        # Also before the update: rounding is measured with the weights that sampled the tokens.
        rounded = self._rounding(batch)
        # Before the update, because it may change the reference. An update that is applied again has recorded names.
        compared = weights.compared({name: getattr(plan, name, None) for name in trainer.others})
        divided = Division.of(
            given,
            batch.episodes,
            weights.ranks.shares,
            minibatches=plan.minibatches,
            batches=plan.batches,
            demonstrations=batch.shown,
        )
        steps = weights.updates(divided, epochs=plan.epochs, seed=plan.order)
        uses = tuple(
            self._use(plan, batch, epoch, steps[epoch * plan.minibatches : (epoch + 1) * plan.minibatches])
            for epoch in range(plan.epochs)
        )
        self.updates += 1
        self.trained_tokens += sum(end - start for use in uses for _, _, start, end, _ in use.items)
        stats = together(steps)
        # The first epoch's record has what is the same for all epochs.
        uses[0].info.update(pins={tape: list(pin) for tape, pin in pins.items()}, on=computed_on(trainer))
        uses[0].info.update(compared)
        if self.delivery.found:
            uses[0].info["delivery"] = self.delivery.found
        highs = stats.sums.highs
        uses[0].info.update({name: known(highs[name]) for name in ("mismatch", "moved") if name in highs})
        if rounded is not None and (square := stats.sums.mean("mismatch/square")) is not None:
            # Both log-probs are rounded, so the mean square of their difference is up to twice that of an error.
            limit = math.sqrt(2) * allowed(int(stats.sums.counts["mismatch"]), rounded)
            uses[0].info["rounding"] = {"error": math.sqrt(square), "limit": limit}
        self.taught.update(taught_by(uses))
        return stats, uses

    def _rounding(self, batch: Batch) -> NDArray[np.float64] | None:
        """Measure how autocast rounds the log-probs of tokens that the current weights sampled (`rounding_of`). Return
        None without autocast or such tokens."""
        policy = self.policy
        found = [] if policy.autocast is None else sample_of(batch.rows, self.version)
        about = {"autocast": policy.autocast, "vision": policy.vision}
        return policy.weights.call(rounding_of, rows=with_files(found), **about) if found else None

    def taught_rows(self, plan: Plan, batch: Batch) -> Sequence[Row]:
        """Return the rows of `batch` for the planned update. If an engine serves the teacher, add the teacher's
        log-probs.

        For an update that was recorded before, these log-probs are read from the run. Raises BrokenHistory if they are
        gone.
        """
        teacher = self.enter(plan.phase).others.get("teacher")
        if not isinstance(teacher, ServedTeacher) or not batch.rows:
            return batch.rows
        recorded = isinstance(plan, UpdateInfo)  # the plan of an update that is applied again
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
        # A skipped update trained on nothing, so its record lists all tokens as left out.
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

    def publish_record(self, mode: str) -> tuple[Mapping[str, Tensor], Publish]:
        """Return the weights for the engine, and the `publish` record for them. Use them before the next update. An
        embedded engine copies them itself. For servers, they are a copy, unless several processes share the weights
        (`Processes.weights`)."""
        return self.policy.weights.weights(copied=self.policy.servers is not None), self._publish(mode)

    def _publish(self, mode: str) -> Publish:
        return Publish(version=self.version, digest=self.policy.weights.digest(), mode=mode, at=time.time())

    def record_version(self, mode: str) -> None:
        """Append a `publish` record for the current weights to the store, if the store has none for this version
        yet."""
        # The store is checked first, because the digest reads all weights.
        if self.version not in self.store.published:
            self.store.append_layer(self._publish(mode))

    def checkpoint(self, *, pinned: bool = False) -> Checkpoint:
        """Write the weights and the trainer's state. A pinned checkpoint is never deleted to make space for others."""
        state = {
            "lineage": self.lineage,
            "phase": self.phase,
            "version": self.version,
            "pinned": pinned,
            "trained_tokens": self.trained_tokens,
            "cursor": self.cursor,
            "lead": self.store.lease.epoch if self.store.lease is not None else None,
        }
        weights, renderer = self.policy.weights, self.policy.renderer
        trainer: dict[str, Any] = {"rng": torch.get_rng_state()}
        if self.trainer is not None:
            trainer |= {} if weights.shared else weights.state()
            options = self.trainer.options
            state["schedule"] = {"lr": options.lr, **options.schedule.model_dump(mode="json")}
        made = save_checkpoint(
            self.directory,
            self.model,
            trainer,
            state,
            update=self.updates,
            tokenizer=self.policy.tokenizer,
            pictures=renderer.pictures,
            taught=self.taught,
            check=self.store.check_lead,
            held=weights,
        )
        self.store.record_files(*sorted(made.path.rglob("*")))
        best = max(self.scores, key=self.scores.__getitem__, default=None)
        prune(self.directory, keep=self.policy.keep, best=best)
        return made

    def settle(self) -> None:
        """Make sure that a pinned checkpoint of the current weights exists. This is called at the end of a phase."""
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
        """Restore the weights of the last recorded update. Load the newest checkpoint, and apply later updates again.

        Returns the number of updates that were applied again. `on_update(done, all)` and `report` are called after each
        of these updates. With `until`, only updates with a lower number are restored. With `checkpoint_every`, missing
        checkpoints are written at this interval. Raises Differs if an update differs from its record, and BrokenHistory
        if an update can't be applied again or the weights differ from the published ones.
        """
        if checkpoint_every is not None:
            remove_partial(self.directory)
        uses = [use for use in self.store.ledger(self.lineage).uses if until is None or use.update < until]
        last = uses[-1].update + 1 if uses else 0
        leads = {use.update + 1: use.lead or 0 for use in uses}

        # Only a checkpoint whose updates are all in these records can be used. A checkpoint may be newer than the last
        # record, or another process may have made its last update again (under a later lead). Then an older one is
        # loaded.
        def fits(c: Checkpoint) -> bool:
            lead = c.state.get("lead") or 0
            return c.state["lineage"] == self.lineage and c.update <= last and lead >= leads.get(c.update, 0)

        if self._load_newest(fits):
            self.taught = taught_by(use for use in uses if use.update < self.updates)
        redo = by_update(use for use in uses if use.update >= self.updates)
        for k, epochs in enumerate(redo):
            stats, again = apply_again(self, epochs)
            # A crash may have come between the records of an update's epochs. Then no engine got the weights after this
            # update, and the missing records are written when the run continues.
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
        """Load the newest undamaged checkpoint for which `fits` is true. Return False if there is none. Skipping a
        damaged checkpoint only costs time, because its updates are applied again."""
        recorded = any((self.store.path / name).is_relative_to(self.directory) for name in self.store.files)
        for path in sorted(self.directory.glob("update-*"), key=lambda path: (len(path.name), path.name), reverse=True):
            try:
                one = read_checkpoint(path)
                # Damage is checked first, because `fits` reads the checkpoint's state, which may be the damaged part.
                broken = self.store.damage(path)
                if broken is None and recorded:
                    # Without digests, the checkpoint is from a crash before they were recorded, or from another
                    # program.
                    broken = [f"no record has the digests of {path}"]
                if broken:
                    raise BadCheckpoint((self.policy.weights.damage(one) or broken)[0])
                if fits(one):
                    self._load(one)
                    return True
            except BadCheckpoint as error:
                log.warning("%s; the checkpoint before it is used", error)
        return False

    def _load(self, checkpoint: Checkpoint) -> None:
        # Weights and state are read before anything is changed, so that no part of a damaged checkpoint is used.
        weights, shared = self.policy.weights, self.policy.weights.shared  # if shared, each process reads its own part
        state = checkpoint.mapped("trainer.pt") if shared else checkpoint.trainer_state()
        weights.read(checkpoint)
        self.updates = checkpoint.update
        self.trained_tokens = int(checkpoint.state["trained_tokens"])
        self.cursor = int(checkpoint.state.get("cursor", 0))
        # A trainer that draws random numbers must draw the same numbers again.
        if "rng" in state:
            torch.set_rng_state(cast(Tensor, state["rng"]))
        if checkpoint.state["phase"]:
            self.enter(checkpoint.state["phase"])
            weights.resume(checkpoint) if shared else weights.load(cast(TrainerState, state))

    def _check_published(self) -> None:
        """Raise BrokenHistory if the restored weights differ from the published weights of the same version.

        The weights are compared bit for bit. Otherwise, a run that is resumed on another machine could continue with
        slightly different weights, and tapes from both machines would count as sampled by one version.
        """
        recorded = self.store.published.get(self.version)
        if recorded is not None and (found := self.policy.weights.digest(recorded.digest)) != recorded.digest:
            raise BrokenHistory(
                f"version {self.version} was published with digest {recorded.digest}; "
                f"the restored weights have {found}: the run was recorded on another machine or with "
                "another number of threads or version of a library, so resume it there"
            )


# Applying recorded updates again


def apply_again(history: History, epochs: Sequence[Use]) -> tuple[UpdateStats, tuple[Use, ...]]:
    """Apply the update recorded in `epochs` to the history's weights. Return its statistics and its new records.

    Raises Differs if the update differs from its record, and BrokenHistory if a tape is missing. Epochs without a
    record, which a crash can leave, aren't compared.
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
            stats, again = history.update(info, as_read(info, history.store, history.policy.renderer))
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


def _read(store: Store, renderer: Renderer | None, tape: str, pin: Pin | None) -> tuple[list[Row], Episode]:
    found = store.tape(tape, refresh=False)
    if pin is not None:
        found = as_pinned(found, pin)
    return rows(found, renderer=renderer), episode_of(found)


def as_read(info: UpdateInfo, store: Store, renderer: Renderer | None) -> Source:
    """Return a source of tapes as the update read them, before later layers were added.

    The source raises ChangedTape if the tape no longer has this content.
    """
    pins = info.pins or {}
    return lambda tape: _read(store, renderer, tape, pins.get(tape) or None)


@contextmanager
def with_threads(recorded: int | None) -> Iterator[None]:
    """Set torch to the recorded number of threads inside the block, or change nothing if it is None.

    The number of threads decides how torch splits a sum, and a sum in another order can differ in its last bits.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(recorded or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _by_recipe(error: Differs, use: Use, again: Use) -> Differs:
    """Return an error that names the recipe as the cause, if the recipe's digest differs too. Otherwise return `error`.

    A different digest alone isn't an error. A new version of this package may add a constant to a term, which changes
    the digest but not the update.
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
    """Describe how the machine, the libraries and the formulas of an update (`then`) differ from the present ones
    (`now`). Empty if nothing differs."""
    before = {TURNS: 1} if TURNS in now else {}
    names = [
        f"{name} {now.get(name)} and not {value}"
        for name, value in {**before, **(then or {})}.items()
        if name != "recipe" and now.get(name) != value
    ]
    return ", ".join(names)


TURNS = "formula for rewards per turn"
"""Condition of an update that reads rewards per turn: the version of their formula. Updates before version 2 have none.
They counted a turn that isn't scored as 0, and compared rewards before adding them up to returns."""

SUMS = "sums of rewards"
SCHEDULES = "learning rates"
VALUES = "clips of a new critic's values"
PREFIXES = "prefixes forwarded once"
RULES: dict[str, JsonValue] = {
    SUMS: "exact",
    SCHEDULES: "of the update",
    VALUES: "around its first mean",
    PREFIXES: f"from {SHARE_TOKENS} tokens",
}
"""Conditions of each update that earlier versions didn't record, because other rules held. Sums of rewards were rounded
after each component. Schedules counted optimiser steps, and the policy's didn't wait for `critic.first`. In the first
update of a normalised critic, values were clipped around 0. Only prefixes of 64 tokens or more were shared, which
changes the last bits of a gradient."""
FORMULAS = (TURNS, SUMS, SCHEDULES, VALUES)
"""The rules that decide more than the last bits."""


def other_rules(on: Mapping[str, object], trainer: Trainer, plan: Plan, rounded: Callable[[str], bool]) -> str:
    """Name the rules that an update before them didn't follow, and that may change its result. `rounded` tells whether
    the sum of a tape's rewards differs."""
    critic, steps = trainer.critic, plan.epochs * plan.minibatches
    counted = (critic and critic.first) or (trainer.options.schedule.varies and steps > 1)
    differs = {
        SUMS: lambda: any(map(rounded, plan.tapes)),
        SCHEDULES: lambda: counted or (critic and critic.options.schedule.varies and steps * critic.passes > 1),
        VALUES: lambda: critic and critic.critic.normalised and critic.critic.fresh and critic.loss.clip is not None,
        PREFIXES: lambda: not trainer.ranks.joint and shares_prefixes(trainer.model),
    }
    return ", ".join(f"a version with {rule} {RULES[rule]}" for rule in RULES if rule not in on and differs[rule]())


CPU_NAMES = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""Fields of `/proc/cpuinfo` that identify the processor. The first three exist on x86_64, and the others on aarch64."""


@cache
def cpu_model() -> str:
    """Return the vendor, family and model of the processor.

    Math libraries choose their code by the processor's model. So sums can differ in their last bits even between two
    processors with the same instructions.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return " ".join(found[name] for name in CPU_NAMES if name in found)


def computed_on(trainer: Trainer) -> dict[str, JsonValue]:
    """Return the conditions that determine the exact result of an update, in addition to its tapes and weights.

    They are the recipe, the torch version, threads, device, chip, ranks, and the image processor of a vision model.
    """
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
        **RULES,
        **({"sequence_parallel": sequence.size} if (sequence := trainer.ranks.sequence) is not None else {}),
        **({TURNS: 2} if trainer.recipe.reward.reads_turns else {}),
        **({"processor": trainer.vision.hash} if trainer.vision is not None else {}),
    }


def _left_out(rows: Sequence[Row], stats: UpdateStats) -> list[Range]:
    """Return the tokens of scored episodes that did not enter the loss.

    There are three causes: the recipe did not select the token or its group, RL can't train on the token (its log-prob
    at sampling is unknown), or the whole update was skipped. No later update trains on these tokens, so this update's
    record lists them.
    """
    stream = stats.stream
    idle = (stats.weight == 0) if stats.applied else torch.ones(len(stream), dtype=torch.bool)
    chosen = (idle & ~stream.episodes.reward.isnan()[stream.episode]).numpy()
    cuts = np.cumsum([len(row.own) for row in rows])[:-1]
    parts = zip(rows, np.split(chosen, cuts), strict=True) if rows else ()
    return [entry for row, part in parts for entry in ranges_of(row, part)]
