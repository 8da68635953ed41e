"""What an update used: from tapes to its batch, and from its batch to the record in the ledger."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..tapes import Tape
from .rows import Row
from .stream import Episode
from .trainer import UpdateStats

Item = tuple[str, str, int, int, float]
"""(tape, call, start, end, weight) over a call's completion tokens."""
Range = tuple[str, str, int, int]


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
    for reward in tape.rewards:
        components[reward.name] = components.get(reward.name, 0.0) + reward.value
        turn = tape.entries[reward.step].turn if reward.step is not None else turns - 1
        per_turn[min(turn, turns - 1)] += reward.weight * reward.value
    assert tape.status is not None
    parent = tape.begin.parent
    return Episode(
        tape=tape.id,
        group=tape.begin.group or tape.id,
        reward=tape.reward,
        turn_rewards=per_turn if tape.reward is not None else None,
        components=components,
        status=tape.status,
        cause=tape.cause.type if tape.cause is not None else None,
        fork=f"{parent.tape}/{parent.turn}" if parent is not None else None,
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


def items(rows: Sequence[Row], stats: UpdateStats) -> list[Item]:
    """What each token's loss counted, as runs of equal weight inside a call; tokens of weight 0 took no part."""
    stream = stats.stream
    weight, call = stats.weight.numpy(), stream.call.numpy()
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


def left_out(rows: Sequence[Row], stats: UpdateStats) -> list[Range]:
    """The tokens of scored episodes that took no part: their group or they themselves were not selected, they are no RL
    data, or the whole update was skipped. They had their turn, so they are accounted for with this update."""
    stream = stats.stream
    idle = (stats.weight == 0) if stats.applied else torch.ones(len(stream), dtype=torch.bool)
    chosen = (idle & ~stream.episodes.reward.isnan()[stream.episode]).numpy()
    cuts = np.cumsum([len(row.own) for row in rows])[:-1]
    return [entry for row, part in zip(rows, np.split(chosen, cuts), strict=True) if part.any()
            for entry in _ranges(row, part)] if rows else []  # fmt: skip


def _ranges(row: Row, chosen: np.ndarray) -> list[Range]:
    at = np.flatnonzero(chosen)
    c, o = row.call[at], row.offset[at]
    breaks = np.flatnonzero((np.diff(c) != 0) | (np.diff(o) != 1)) + 1
    starts, ends = np.concatenate([[0], breaks]), np.concatenate([breaks, [len(at)]]) - 1
    return [(row.tape, row.calls[c[a]], int(o[a]), int(o[b]) + 1) for a, b in zip(starts, ends, strict=True)]
