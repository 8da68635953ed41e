"""What an update used: from tapes to its batch, and from its batch to the record in the ledger.

A pin says which content of a tape was read: the tape's own digest and that of every layer it had then. What is added
to a tape later changes neither, so an update can be made again from the content that it was made from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ...envs.rewards.relative import counted, training_reward
from ...tapes import Tape
from ...tapes.errors import TapereelError
from ...tapes.records import Label, Record, Use
from .by_agent import earned
from .rows import Row
from .stream import Episode, Stream

Item = tuple[str, str, int, int, float]
"""(tape, call, start, end, weight) over a call's completion tokens."""
Range = tuple[str, str, int, int]
Pin = tuple[str, ...]
"""(digest of the tape, digest of each layer that it was read with)."""


class ChangedTape(TapereelError, ValueError):
    """A tape isn't what an update read: its records, or a layer of then, are others or gone."""


def pin_of(tape: Tape) -> Pin:
    """Which content of the tape is there to read now."""
    return (tape.digest, *map(_layer_digest, tape.layers))


def as_pinned(tape: Tape, pin: Sequence[str]) -> Tape:
    """The tape with the layers that `pin` names and no younger ones. ChangedTape where its content isn't the same."""
    if tape.digest != pin[0]:
        raise ChangedTape(
            f"tape {tape.id} has digest {tape.digest} now; the update read it with {pin[0]}: a record of it was changed"
        )
    if len(pin) == 1 and not tape.layers:
        return tape
    layers = {_layer_digest(layer): layer for layer in tape.layers}
    gone = [digest for digest in pin[1:] if digest not in layers]
    if gone:
        raise ChangedTape(
            f"tape {tape.id} has no layer of digest {gone[0]} any more, which the update read: a label, "
            "reward or tokens layer was changed or removed"
        )
    return Tape.of(tape.bodies, layers=[layers[digest] for digest in pin[1:]], parent=tape.parent)


def _layer_digest(layer: Record) -> str:
    return hashlib.sha256(layer.body()).hexdigest()


def taught_by(uses: Iterable[Use]) -> dict[str, Pin]:
    """Pin of every tape with a token that one of these updates trained on, as the last of them read it."""
    taught: dict[str, Pin] = {}
    pins: dict[str, list[str]] = {}
    for use in uses:
        found: Any = use.info.get("pins")
        pins = found if found is not None else pins  # the later epochs of an update read what its first one did
        for tape in dict.fromkeys(item[0] for item in use.items):
            taught[tape] = tuple(pins.get(tape, ()))
    return taught


def known(number: float) -> float | None:
    """The number, or None where it is not finite: JSON has no NaN."""
    return number if math.isfinite(number) else None


def version_name(lineage: str, n: int) -> str:
    """`lineage:n`, the policy after n updates."""
    return f"{lineage}:{n}"


def version_number(version: str, lineage: str) -> int | None:
    """n of `lineage:n`; None for a version of another lineage."""
    name, _, n = version.rpartition(":")
    return int(n) if name == lineage and n.isdigit() else None


def episode_of(tape: Tape) -> Episode:
    """What the objective must know of a closed tape. Rewards of the whole episode count on its last turn."""
    turns = max(tape.turns, 1)
    per_turn = np.zeros(turns)
    components: dict[str, float] = {}
    for reward in counted(tape):
        components[reward.name] = components.get(reward.name, 0.0) + reward.value
        turn = tape.entries[reward.step].turn if reward.step is not None else turns - 1
        per_turn[min(turn, turns - 1)] += reward.weight * reward.value
    assert tape.status is not None
    parent, total = tape.begin.parent, training_reward(tape)
    alone, shared = earned(tape)
    return Episode(
        tape=tape.id,
        group=tape.begin.group or tape.id,
        reward=total,
        turn_rewards=per_turn if total is not None else None,
        components=components,
        status=tape.status,
        cause=tape.cause.type if tape.cause is not None else None,
        fork=f"{parent.tape}/{parent.turn}" if parent is not None else None,
        alone=alone,
        shared=shared,
        kept_out=_kept_out(tape),
        pin=pin_of(tape),
    )


def _kept_out(tape: Tape) -> tuple[Range, ...]:
    others = {layer.call for layer in tape.layers if isinstance(layer, Label) and layer.use != "agent"}
    return tuple(
        (tape.id, call.call, 0, len(call.completion)) for call in tape.calls if call.call in others and call.completion
    )


def drop_stale(rows: Sequence[Row], lineage: str, oldest: int) -> tuple[list[Row], list[Range]]:
    """The rows with every token of a policy older than `lineage:oldest` made context, and what was dropped.

    A token without a version (authored text) has no age. One of another lineage is refused by being stale: its policy
    is none of this history's.
    """
    fresh: list[Row] = []
    stale: list[Range] = []
    for row in rows:
        numbers = [version_number(version, lineage) for version in row.versions]
        young = np.array([*(n is not None and n >= oldest for n in numbers), True], dtype=bool)
        keep = young[row.version]
        if keep.all():
            fresh.append(row)
            continue
        stale.extend(_ranges(row, ~keep))
        if keep.any():
            fresh.append(row.where(keep))
    return fresh, stale


def drop_others(rows: Sequence[Row], agents: Sequence[str]) -> tuple[list[Row], list[Range]]:
    """The rows with the tokens of every agent but these (by path) made context, and what was made so."""
    kept: list[Row] = []
    others: list[Range] = []
    for row in rows:
        mine = np.array([agent in agents for agent in row.agents], dtype=bool)[row.call]
        if not mine.all():
            others.extend(_ranges(row, ~mine))
            row = row.where(mine)
        if mine.any():
            kept.append(row)
    return kept, others


def own_ranges(rows: Sequence[Row]) -> list[Range]:
    """All own tokens of the rows."""
    return [entry for row in rows for entry in _ranges(row, np.ones(len(row.own), dtype=bool))]


def weighed(rows: Sequence[Row], stream: Stream, weights: torch.Tensor) -> list[Item]:
    """Runs of equal weight inside a call, from the weights (T,) of the stream of `rows`."""
    weight, call = weights.numpy(), stream.call.numpy()
    offset = np.concatenate([row.offset for row in rows]) if rows else np.empty(0, np.int32)
    used = np.flatnonzero(weight)
    if not len(used):
        return []
    w, c, o = weight[used], call[used], offset[used]
    breaks = np.flatnonzero((np.diff(c) != 0) | (np.diff(o) != 1) | (np.diff(w) != 0)) + 1
    starts, ends = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(used)]]) - 1
    return [
        (*stream.calls[c[a]], int(o[a]), int(o[b]) + 1, float(w[a]))
        for a, b in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


def _ranges(row: Row, chosen: np.ndarray) -> list[Range]:
    at = np.flatnonzero(chosen)
    c, o = row.call[at], row.offset[at]
    breaks = np.flatnonzero((np.diff(c) != 0) | (np.diff(o) != 1)) + 1
    starts, ends = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(at)]]) - 1
    return [(row.tape, row.calls[c[a]], int(o[a]), int(o[b]) + 1) for a, b in zip(starts, ends, strict=True)]
