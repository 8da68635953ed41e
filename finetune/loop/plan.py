"""The plan of an update: from which recorded tapes it makes its batch, and how. It is a part of the `use` record.

An update makes one new version of the policy. It may pass over its batch in several epochs, and divide the batch into
mini-batches with one optimiser step each. Each epoch has a `use` record in the ledger, which names the tokens that it
trained on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Self

from pydantic import ConfigDict, JsonValue, ValidationError

from ...agents.episode.seeds import derive_seed
from ...tapes.errors import NotATape
from ...tapes.records import Use
from ...tapes.value import Value
from ..data.by_agent import apart, check_addresses
from ..data.provenance import Pin, Range, drop_others, own_ranges
from ..data.rows import Row
from ..data.stream import Episode
from .staleness import drop_stale

TEXTS = "@corpus"
"""The agent's path in the rows of a corpus. It isn't the path of a real agent, and all policies imitate these rows."""
Source = Callable[[str], tuple[list[Row], Episode]]
"""Function that takes the id of a tape and returns the tape's rows and its `Episode`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows and episodes that one update trains on, in order. Three fields list the tokens that are left out, each
    for one reason."""

    rows: list[Row]
    episodes: list[Episode]
    stale: list[Range] = field(default_factory=list)
    context: list[Range] = field(default_factory=list)
    """Tokens that the model reads, but that have no loss: they are from agents that aren't trained, or a label excludes
    their answer."""
    filtered: list[Range] = field(default_factory=list)
    """Tokens of groups that were set aside before the update, because all their rewards are equal."""
    beyond: list[str] = field(default_factory=list)
    """Tapes that were set aside, because they have a token id that the model doesn't have."""
    shown: list[Row] = field(default_factory=list)
    """Demonstrations: rows to imitate in addition, for a recipe with an `nll` regulariser."""


class ComputedOn(Value):
    """The conditions, in addition to tapes and weights, that determine the exact result of an update."""

    model_config = ConfigDict(frozen=True, extra="allow")

    recipe: str | None = None
    """SHA-256 of the recipe's JSON."""
    torch: str | None = None
    threads: int | None = None
    """Number of torch's CPU threads. It affects the order in which sums are computed, and so their last bits."""
    device: str | None = None
    chip: str | None = None
    ranks: int = 1
    """Number of processes that trained together."""


class Plan(Value):
    """The tapes of an update, and how the update trains on them. A `use` record stores these fields under the same
    names."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    phase: str = ""
    tapes: tuple[str, ...] = ()
    oldest: int | None = None
    """Number of the oldest version of the policy whose tokens are trained on. Older tokens are stale and left out. None
    sets no bound."""
    rewards: tuple[float | None, ...] | None = None
    """Rewards that replace the recorded rewards of `tapes` in a control experiment. An unscored tape has None."""
    aside: tuple[str, ...] = ()
    """Tapes of flat groups (groups with equal rewards), which were sampled for this update but aren't trained on. Their
    tokens count as `filtered`."""
    agents: tuple[str, ...] | None = None
    """Paths of the agents that are trained. Tokens of other agents are context. None trains all agents."""
    by_agent: bool = False
    """If true, an agent's reward is compared with the rewards of the same agent in the group's other attempts."""
    batches: tuple[int, ...] = ()
    """Number of tapes in each rollout batch, or () if the update has only one rollout batch. A baseline with `by =
    batch` compares episodes only within one rollout batch."""
    epochs: int = 1
    minibatches: int = 1
    """Optimiser steps per epoch, each on one part of the tapes."""
    order: int = 0
    """The seed for dividing the tapes into mini-batches."""
    shown: tuple[str, ...] = ()
    """Demonstrations: tapes that the update imitates in addition."""
    beyond: tuple[str, ...] = ()
    """Tapes that the update set aside, because they have a token id that the model doesn't have. Their tokens count as
    `filtered`."""

    @property
    def every(self) -> tuple[str, ...]:
        """All tapes that the update takes from the queue: the tapes to train on, and the tapes of flat groups."""
        return (*self.tapes, *self.aside)

    @property
    def read(self) -> tuple[str, ...]:
        """All tapes that the update reads: the tapes that it takes from the queue, and its demonstrations."""
        return (*self.every, *self.shown)

    def info(self) -> dict[str, JsonValue]:
        """Return the plan as it is stored in a `use` record.

        Most fields are left out if they have their default value. So a record that is older than one of these fields
        equals a new record.
        """
        whole = self.model_dump(mode="json", include=set(Plan.model_fields))
        kept = ("phase", "tapes", "oldest", "rewards")
        return {
            name: value
            for name, value in whole.items()
            if name in kept or getattr(self, name) != Plan.model_fields[name].default
        }

    @classmethod
    def of(cls, use: Use) -> Self:
        """Return the plan for a recorded update. Raises NotATape if a field has the wrong type."""
        try:
            return cls.model_validate(use.info)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise NotATape(
                f"update {use.update} of lineage {use.lineage!r} has info.{place} = {first['input']!r:.80}: "
                f"{first['msg']}; the ledger was changed, restore it from a copy of the run"
            ) from error

    def batch(self, lineage: str, source: Source, vocabulary: float = math.inf) -> Batch:
        """Return the batch. `lineage` is the name of the policy whose versions `oldest` counts. If `oldest` is set,
        tokens that other policies sampled count as stale. `vocabulary` is the number of the model's token ids."""
        batch = Batch([], [])

        # A recorded update keeps its own list, so that it is the same with a model of more token ids.
        def within(tape: str, rows: list[Row]) -> list[Row]:
            if tape not in self.beyond and all(fits(row, vocabulary) for row in rows):
                return rows
            batch.beyond.append(tape)
            batch.filtered.extend(own_ranges(rows))
            return []

        if self.by_agent:
            found = [source(tape) for tape in self.tapes]
            # A component may name an agent that speaks in only some tapes, so the batch is checked as a whole.
            check_addresses((episode for _, episode in found), (row for rows, _ in found for row in rows))
        for k, tape in enumerate(self.tapes):
            found, episode = source(tape)
            batch.context.extend(episode.kept_out)
            if self.agents is not None:
                found, others = drop_others(found, self.agents)
                batch.context.extend(others)
            if self.oldest is not None:
                found, stale = drop_stale(found, lineage, self.oldest)
                batch.stale.extend(stale)
            found = within(tape, found)
            if self.rewards is not None:
                # Recorded rewards per turn would tell what the shuffled reward is meant to hide.
                episode = replace(episode, reward=self.rewards[k], turn_rewards=None)
            found, episodes = apart(found, episode) if self.by_agent else (found, [episode])
            batch.rows.extend(found)
            batch.episodes.extend(episodes)
        for tape in self.aside:
            found, episode = source(tape)
            # Tokens of an unscored episode are in the books as unscored, and each token is in one account only.
            if episode.reward is not None:
                batch.filtered.extend(own_ranges(found))
        for tape in self.shown:
            found, _ = source(tape)
            found = found if self.agents is None else drop_others(found, (*self.agents, TEXTS))[0]
            batch.shown.extend(within(tape, found))
        return batch


def fits(row: Row, vocabulary: float) -> bool:
    """Return whether a model with this number of token ids can read the row."""
    return bool(row.input_ids.min() >= 0 and row.input_ids.max() < vocabulary)


class UpdateInfo(Plan):
    """The contents of `Use.info` for one epoch of an update: the plan and the results.

    Unknown keys are kept, because another version of this package or another trainer (TRL) may have written them.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    stale: tuple[Range, ...] = ()
    """Tokens that were too old to be trained on."""
    filtered: tuple[Range, ...] = ()
    """Tokens of scored episodes that did not enter the loss."""
    lr: float | None = None
    skipped: str | None = None
    """The reason why the update was skipped, or None if it was applied."""
    loss: float | None = None
    """The loss, or None if it wasn't finite."""
    grad_norm: float | None = None
    """The norm of the gradient before clipping, or None if it wasn't finite."""
    context: tuple[Range, ...] = ()
    """Tokens from agents that aren't trained, and from answers that a label excludes."""
    pins: dict[str, tuple[str, ...]] | None = None
    """The content of each tape when the update read it, as digests. Only the record of the first epoch has this field
    and the fields below."""
    reference: str | None = None
    """Name and digest of the reference model, or None if the recipe doesn't use a reference."""
    teacher: str | None = None
    """Name and digest of the teacher, or None if the recipe doesn't use a teacher."""
    on: ComputedOn | None = None
    mismatch: float | None = None
    """Largest |log-prob in training - log-prob at sampling|, over the tokens that were sampled with the weights before
    the update. In a record without `moved`, it covers all tokens."""
    moved: float | None = None
    """The same as `mismatch`, but over all tokens."""
    rounding: dict[str, float] | None = None
    """With autocast: the root mean square of `mismatch`'s differences in nats (`error`), and the largest one that
    rounding explains (`limit`)."""
    delivery: dict[str, JsonValue] | None = None
    """Result of the check that the samplers had the weights before the update (see `delivery.py`)."""


def by_update(uses: Iterable[Use]) -> list[list[Use]]:
    """Group the records by update, in order. Each update has one record per epoch."""
    return [list(epochs) for _, epochs in groupby(uses, key=lambda use: use.update)]


def taught_by(uses: Iterable[Use]) -> dict[str, Pin]:
    """Return a pin (digests of the content) for each tape that these updates trained on, from the last update that read
    it."""
    taught: dict[str, Pin] = {}
    pins: dict[str, Pin] = {}
    for use in uses:
        found = UpdateInfo.of(use).pins
        pins = found if found is not None else pins  # only the first epoch in an update records pins
        for tape in dict.fromkeys(item[0] for item in use.items):
            taught[tape] = pins.get(tape, ())
    return taught


def batch_of(tapes: Sequence[str], update: int, batch: int, seed: int) -> tuple[str, ...]:
    """Return the tapes for the SFT update with number `update`, counted from 0.

    In each epoch, the tapes are shuffled and divided into batches. The result depends only on the arguments, so a
    resumed run draws the same batches.
    """
    if len(tapes) < batch:
        raise ValueError(f"{len(tapes)} tapes don't fill a batch of {batch}: record more, or lower the batch")
    per_epoch = len(tapes) // batch
    epoch, k = divmod(update, per_epoch)
    # The seed has the epoch in it, so an epoch's order doesn't depend on how the epochs before it were drawn.
    order = list(range(len(tapes)))
    random.Random(derive_seed(seed, "sft", epoch)).shuffle(order)
    return tuple(tapes[i] for i in order[k * batch : (k + 1) * batch])
