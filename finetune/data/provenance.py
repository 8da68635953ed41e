"""Provenance of an update: the tapes that it read, their content at that time, and the weight of each token in the
loss.

A pin identifies the content that a tape had when an update read it. It consists of the tape's own digest and the
digests of the layers that the tape had at that time. Layers that are added later don't change the pin, so the update
can be repeated with the same content.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ...envs.rewards.relative import training_reward
from ...tapes import Tape
from ...tapes.errors import TapereelError
from ...tapes.records import Label, Record
from ...tapes.store.ledger import Range
from .by_agent import turn_rewards
from .rows import Row
from .stream import Episode, Stream

Item = tuple[str, str, int, int, float]
"""(tape, call, start, end, weight): the tokens [start, end) of a call's completion, and the weight of their loss."""
Pin = tuple[str, ...]
"""The digest of a tape, followed by the digests of its layers (labels or rewards that were added later)."""


class ChangedTape(TapereelError, ValueError):
    """Raised if a tape no longer has the content that an update read, because a record or a layer was edited or
    removed."""


def pin_of(tape: Tape) -> Pin:
    """Return the pin of the tape in its current state."""
    return (tape.digest, *map(_layer_digest, tape.layers))


def as_pinned(tape: Tape, pin: Sequence[str]) -> Tape:
    """Return the tape as it was when the pin was made, without layers that were added later.

    Raises ChangedTape if the tape's digest differs or a layer in the pin is missing.
    """
    if tape.digest != pin[0]:
        raise ChangedTape(
            f"tape {tape.id} has digest {tape.digest} now and had {pin[0]} when the update read it: a record of it was "
            "changed; restore the tape from a copy of the run"
        )
    if len(pin) == 1 and not tape.layers:
        return tape
    layers = {_layer_digest(layer): layer for layer in tape.layers}
    gone = [digest for digest in pin[1:] if digest not in layers]
    if gone:
        raise ChangedTape(
            f"tape {tape.id} has no layer of digest {gone[0]}, which the update read: a label, reward or tokens layer "
            "was changed or removed since; restore it from a copy of the run"
        )
    return Tape.of(tape.bodies, layers=[layers[digest] for digest in pin[1:]], parent=tape.parent, file=tape.picture)


def _layer_digest(layer: Record) -> str:
    return hashlib.sha256(layer.body()).hexdigest()


def known(number: float) -> float | None:
    """Return the number, or None if it isn't finite, because JSON has no NaN."""
    return number if math.isfinite(number) else None


def episode_of(tape: Tape) -> Episode:
    """Return the `Episode` for a closed tape, with the tape's rewards, group, status and pin."""
    earned = turn_rewards(tape)
    total = training_reward(tape)
    assert tape.status is not None
    parent = tape.begin.parent
    return Episode(
        tape=tape.id,
        group=tape.begin.group or tape.id,
        reward=total,
        turn_rewards=earned.whole if total is not None else None,
        components=earned.components,
        weights=earned.weights,
        status=tape.status,
        cause=tape.cause.type if tape.cause is not None else None,
        fork=f"{parent.tape}/{parent.turn}" if parent is not None else None,
        alone=earned.alone,
        shared=earned.shared,
        kept_out=_kept_out(tape),
        pin=pin_of(tape),
    )


def _kept_out(tape: Tape) -> tuple[Range, ...]:
    others = {layer.call for layer in tape.layers if isinstance(layer, Label) and layer.use != "agent"}
    return tuple(
        (tape.id, call.call, 0, len(call.completion)) for call in tape.calls if call.call in others and call.completion
    )


def keep_tokens(rows: Iterable[Row], kept: Callable[[Row], NDArray[np.bool_] | None]) -> tuple[list[Row], list[Range]]:
    """Stop training on some own tokens: make them context. Return the new rows, and the ranges of these tokens.

    `kept` takes a row and returns a mask (n,) of the own tokens to keep, or None to keep all. A row in which none are
    kept is left out.
    """
    found: list[Row] = []
    excluded: list[Range] = []
    for row in rows:
        keep = kept(row)
        if keep is None or keep.all():
            found.append(row)
            continue
        excluded.extend(ranges_of(row, ~keep))
        if keep.any():
            found.append(row.where(keep))
    return found, excluded


def drop_others(rows: Sequence[Row], agents: Sequence[str]) -> tuple[list[Row], list[Range]]:
    """Train only the tokens of `agents` (paths): make all other own tokens context. Returns the same as
    `keep_tokens`."""

    def ours(row: Row) -> NDArray[np.bool_] | None:
        known = [agent in agents for agent in row.agents]
        return None if all(known) else np.array(known, dtype=bool)[row.call]

    return keep_tokens(rows, ours)


def own_ranges(rows: Sequence[Row]) -> list[Range]:
    """Return the ranges of all own tokens in the rows."""
    return [entry for row in rows for entry in ranges_of(row, np.ones(len(row.own), dtype=bool))]


def weighed(rows: Sequence[Row], stream: Stream, weights: torch.Tensor) -> list[Item]:
    """Return the tokens that an update trained on, as runs of consecutive tokens with equal weights in a call.

    `weights` (T,) are the weights of the tokens in `stream`, which was made from `rows`. Tokens with weight 0 were not
    part of the update and are left out. The ledger stores runs instead of tokens, because most recipes give all tokens
    in a call the same weight.
    """
    weight = weights.numpy()
    offset = np.concatenate([row.offset for row in rows]) if rows else np.empty(0, np.int32)
    used = np.flatnonzero(weight)
    w, c, o = weight[used], stream.call.numpy()[used], offset[used]
    return [(*stream.calls[c[a]], int(o[a]), int(o[b]) + 1, float(w[a])) for a, b in _runs(c, o, w)]


def ranges_of(row: Row, chosen: NDArray[np.bool_]) -> list[Range]:
    """Return the own tokens that `chosen` (n,) bool marks, as ranges of consecutive tokens in a call."""
    at = np.flatnonzero(chosen)
    c, o = row.call[at], row.offset[at]
    return [(row.tape, row.calls[c[a]], int(o[a]), int(o[b]) + 1) for a, b in _runs(c, o, c)]


def _runs(call: NDArray, offset: NDArray, value: NDArray) -> list[tuple[int, int]]:
    """Return the (first, last) index of each run of consecutive tokens in which `call` and `value` stay the same."""
    if not len(call):
        return []
    breaks = np.flatnonzero((np.diff(call) != 0) | (np.diff(offset) != 1) | (np.diff(value) != 0)) + 1
    return list(zip([0, *breaks.tolist()], [*(breaks - 1).tolist(), len(call) - 1], strict=True))
