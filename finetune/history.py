"""History: the line of updates that made a policy. Each is recorded, checkpointed and can be applied again.

One lineage counts its updates from 0 (the base weights) through every phase: version `lineage:n` is the policy after n
updates. A `use` record says what update n trained on, and is durable before anything else may know of it. Resume loads
the newest checkpoint and applies the recorded updates after it, from the tapes; so no update is lost or applied twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..tapes.errors import TapereelError
from ..tapes.records import Publish, Use
from ..tapes.store import Store
from .checkpoint import Checkpoint, checkpoints, copied_weights, save_checkpoint, weights_digest
from .rows import Row, rows
from .stream import Episode
from .trainer import Trainer, UpdateStats
from .use import Range, drop_stale, episode_of, items, left_out, version_name


class BrokenHistory(TapereelError, ValueError):
    """The recorded updates can't be applied: a tape is missing, or a checkpoint belongs to another run."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What one update trains on, in order."""

    rows: list[Row]
    episodes: list[Episode]
    stale: list[Range] = field(default_factory=list)

    @property
    def tapes(self) -> list[str]:
        return [episode.tape for episode in self.episodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a batch is made of tapes: all that a `use` record must say for it to be made again."""

    phase: str
    tapes: tuple[str, ...]
    oldest: int | None = None
    """Tokens of versions below this one are stale; None: age plays no part."""
    rewards: tuple[float | None, ...] | None = None
    """Rewards that take the place of the tapes' own (a control experiment); None for a tape that is unscored."""

    def info(self) -> dict[str, Any]:
        return {"phase": self.phase, "tapes": list(self.tapes), "oldest": self.oldest,
                "rewards": list(self.rewards) if self.rewards is not None else None}

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Plan:
        rewards = info.get("rewards")
        return cls(phase=info["phase"], tapes=tuple(info["tapes"]), oldest=info.get("oldest"),
                   rewards=tuple(rewards) if rewards is not None else None)


Source = Callable[[str], tuple[list[Row], Episode]]
"""Rows and episode of a tape, by its id."""


class History:
    """The updates of one lineage in one store. Not safe to share between threads; `update` may run in one."""

    def __init__(
        self,
        store: Store,
        lineage: str,
        directory: Path,
        model: Any,
        make_trainer: Callable[[str], Trainer],
        *,
        renderer: Any | None = None,
        tokenizer: Any | None = None,
        keep: int | None = 3,
    ) -> None:
        """`model` has the base weights; `make_trainer(phase)` gives a fresh trainer of it for one phase."""
        self.store = store
        self.lineage = lineage
        self.directory = directory
        self.model = model
        self.make_trainer = make_trainer
        self.renderer = renderer
        self.tokenizer = tokenizer
        self.keep = keep
        self.updates = 0
        """Updates in the weights now."""
        self.trained_tokens = 0
        self.phase = ""
        self.trainer: Trainer | None = None

    @property
    def version(self) -> str:
        """Name of the weights as they are now."""
        return version_name(self.lineage, self.updates)

    def enter(self, phase: str) -> Trainer:
        """The trainer of `phase`: the one at work, or a fresh one where another phase ran before."""
        if self.trainer is None or phase != self.phase:
            self.trainer, self.phase = self.make_trainer(phase), phase
        return self.trainer

    def from_store(self, tape: str) -> tuple[list[Row], Episode]:
        """Rows and episode of a recorded tape."""
        found = self.store.tape(tape, refresh=False)
        return rows(found, renderer=self.renderer), episode_of(found)

    def batch(self, plan: Plan, source: Source) -> Batch:
        """What `plan` trains on."""
        batch = Batch([], [])
        for k, tape in enumerate(plan.tapes):
            found, episode = source(tape)
            if plan.oldest is not None:
                found, stale = drop_stale(found, self.lineage, plan.oldest)
                batch.stale.extend(stale)
            if plan.rewards is not None:
                episode = replace(episode, reward=plan.rewards[k], turn_rewards=None)
            batch.rows.extend(found)
            batch.episodes.append(episode)
        return batch

    def update(self, plan: Plan, source: Source) -> tuple[UpdateStats, Use]:
        """Apply one update to the weights; gives the record that must be durable before anything else knows of it."""
        batch = self.batch(plan, source)
        stats = self.enter(plan.phase).update(batch.rows, batch.episodes)
        used = items(batch.rows, stats) if stats.applied else []
        info = {**plan.info(), "stale": [list(r) for r in batch.stale],
                "filtered": [list(r) for r in left_out(batch.rows, stats)], "lr": stats.lr,
                "skipped": stats.skipped}  # fmt: skip
        use = Use(lineage=self.lineage, update=self.updates, items=tuple(used), info=info)
        self.updates += 1
        self.trained_tokens += sum(end - start for _, _, start, end, _ in used)
        return stats, use

    def publish_record(self, mode: str) -> tuple[dict[str, Any], Publish]:
        """(a copy of the weights, the record that names them)."""
        weights = copied_weights(self.model)
        return weights, Publish(version=self.version, digest=weights_digest(weights), mode=mode, at=time.time())

    def checkpoint(self, *, pinned: bool = False) -> Checkpoint:
        """Write the weights and the trainer's state; a pinned one is never deleted for a newer one."""
        state = {"lineage": self.lineage, "phase": self.phase, "version": self.version, "pinned": pinned,
                 "trained_tokens": self.trained_tokens}  # fmt: skip
        trainer = self.trainer.state_dict() if self.trainer is not None else {}
        return save_checkpoint(self.directory, self.model, trainer, state, update=self.updates,
                               tokenizer=self.tokenizer, keep=self.keep)  # fmt: skip

    def settle(self) -> None:
        """Make sure that the weights as they are now have a checkpoint that stays: a phase ends here."""
        for found in checkpoints(self.directory):
            if found.update == self.updates and found.state["lineage"] == self.lineage and found.state.get("pinned"):
                return
        self.checkpoint(pinned=True)

    def restore(self, on_update: Callable[[int, int], None] | None = None, *, until: int | None = None) -> int:
        """Bring the weights to the last recorded update: newest checkpoint, then the redo log. Gives how many updates
        were applied again. BrokenHistory where the record doesn't allow it."""
        uses = [use for use in self.store.ledger(self.lineage).uses if until is None or use.update < until]
        last = uses[-1].update + 1 if uses else 0
        usable = [c for c in checkpoints(self.directory) if c.state["lineage"] == self.lineage and c.update <= last]
        if usable:
            self._load(usable[-1])
        redo = [use for use in uses if use.update >= self.updates]
        for k, use in enumerate(redo):
            if use.update != self.updates:
                raise BrokenHistory(f"lineage {self.lineage!r}: update {self.updates} is not in the ledger, but update "
                                    f"{use.update} is; the run directory is incomplete")
            _, again = self.update(Plan.of(use.info), self.from_store)
            if again.items != use.items:
                raise BrokenHistory(f"lineage {self.lineage!r}: update {use.update} applied again trains on other "
                                    "tokens or weights than recorded: the code, the tapes or the configuration changed")
            if on_update is not None:
                on_update(k + 1, len(redo))
        self._check_published()
        return len(redo)

    def _load(self, checkpoint: Checkpoint) -> None:
        self.model.load_state_dict(checkpoint.weights())
        self.updates = checkpoint.update
        self.trained_tokens = int(checkpoint.state["trained_tokens"])
        if checkpoint.state["phase"]:
            self.enter(checkpoint.state["phase"]).load_state_dict(checkpoint.trainer_state())

    def _check_published(self) -> None:
        for stored in self.store.run_records("publish"):
            if stored.record.version == self.version:
                found = weights_digest(copied_weights(self.model))
                if found != stored.record.digest:
                    raise BrokenHistory(f"version {self.version} was published with digest {stored.record.digest}; "
                                        f"restored, it has {found}: another machine, thread count or library version")

    @property
    def published(self) -> set[str]:
        """Versions that have a publish record."""
        return {stored.record.version for stored in self.store.run_records("publish")}
