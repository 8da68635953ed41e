"""The schema of `Use.info`: what the redo log says of one update beside the tokens that it trained on."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

from pydantic import ConfigDict, JsonValue, ValidationError

from ...tapes.errors import NotATape
from ...tapes.records import Use
from ...tapes.value import Value

Range = tuple[str, str, int, int]
"""(tape, call, start, end): completion tokens of a call, half-open."""


class ComputedOn(Value):
    """What the bits of an update depend on besides tapes and weights."""

    model_config = ConfigDict(frozen=True, extra="allow")

    recipe: str | None = None
    """SHA-256 of the recipe's JSON."""
    torch: str | None = None
    threads: int | None = None
    """CPU threads of torch: sums in another order have other last bits."""
    device: str | None = None
    chip: str | None = None
    ranks: int = 1
    """Processes that trained together."""


class UpdateInfo(Value):
    """`Use.info` of one epoch of an update. Fields that are at their default are not written.

    Unknown keys are kept: another version of this package, or another trainer (TRL), may have written more.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    phase: str = ""
    tapes: tuple[str, ...] = ()
    """Tapes that the update trained on, in order."""
    oldest: int | None = None
    """Tokens of versions below this one are stale; None: tokens have no age in this update."""
    rewards: tuple[float | None, ...] | None = None
    """Rewards in place of the tapes' own; None: the tapes' own."""
    aside: tuple[str, ...] = ()
    """Tapes of groups that were sampled for the update and set aside."""
    agents: tuple[str, ...] | None = None
    """Paths of the agents that were trained; None: all."""
    by_agent: bool = False
    batches: tuple[int, ...] = ()
    """Episodes of each rollout batch; empty: one batch."""
    epochs: int = 1
    minibatches: int = 1
    order: int = 0
    """Seed of the cuts into mini-batches."""
    shown: tuple[str, ...] = ()
    """Tapes that were imitated beside the batch."""
    stale: tuple[Range, ...] = ()
    """Tokens that were too old to be trained on."""
    filtered: tuple[Range, ...] = ()
    """Tokens of scored episodes that took no part."""
    lr: float | None = None
    skipped: str | None = None
    """Why no step was taken; None: the update was applied."""
    loss: float | None = None
    """None where it wasn't finite."""
    grad_norm: float | None = None
    """Before clipping; None where it wasn't finite."""
    context: tuple[Range, ...] = ()
    """Tokens of agents that aren't trained."""
    pins: dict[str, tuple[str, ...]] | None = None
    """Tape -> its digests as the update read it. Only the first epoch of an update has `pins`, `on` and `mismatch`."""
    on: ComputedOn | None = None
    mismatch: float | None = None
    """Largest |log-prob in training - at sampling| of a token."""

    @classmethod
    def of(cls, use: Use) -> UpdateInfo:
        """The info of a recorded update. NotATape where a field has the wrong type."""
        try:
            return cls.model_validate(use.info)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise NotATape(
                f"update {use.update} of lineage {use.lineage!r} has info.{place} = {first['input']!r:.80}: "
                f"{first['msg']}; the ledger was changed, restore it from a copy of the run"
            ) from error

    def record(self) -> dict[str, JsonValue]:
        """What `Use.info` holds: the fields that were set, in the order of this class."""
        found: dict[str, Any] = self.model_dump(mode="json", exclude_unset=True)
        return found


def by_update(uses: Iterable[Use]) -> list[list[Use]]:
    """The records of each update, in order: one for each epoch."""
    return [list(epochs) for _, epochs in groupby(uses, key=lambda use: use.update)]
