"""Several rollout batches in one optimiser step: a term that compares over a batch compares within each rollout batch.

Token weights are computed once, over all rollout batches together. For a recipe without a term that compares over the
batch (`by = batch`), the gradient therefore equals that of one large batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..data.rows import Row
from ..data.stream import BadBatch, Episode, Stream
from . import Context
from . import loss as objective
from .recipe import Recipe

_COLUMNS = ("ref", "anchor", "entropy", "value")


def prepare(
    recipe: Recipe,
    rows: Sequence[Row],
    episodes: Sequence[Episode],
    stream: Stream,
    context: Context,
    sizes: Sequence[int] = (),
) -> objective.Batch:
    """The batch of `stream`, which was made of `rows` and `episodes`.

    sizes: number of episodes of each rollout batch, in the order of `episodes`; empty: one rollout batch. Raises
    BadBatch if the sizes don't add up to the number of episodes.
    """
    if len(sizes) < 2:
        return objective.prepare(recipe, stream, context)
    if sum(sizes) != len(episodes):
        raise BadBatch(
            f"rollout batches of {', '.join(map(str, sizes))} episodes add up to {sum(sizes)}, but there are "
            f"{len(episodes)} episodes: give the sizes of all batches"
        )
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[stream.episode]
    parts: list[tuple[torch.Tensor, objective.Batch]] = []
    first = 0
    for k, size in enumerate(sizes):
        mine = owner == k
        own = episodes[first : first + size]
        first += size
        names = {episode.tape for episode in own}
        part = Stream.of([row for row in rows if row.taught_by in names], own, dtype=stream.old.dtype)
        # A rollout batch's tokens stand in `part` in the same order as in `stream`, so a mask selects their columns.
        columns = {name: column[mine] for name in _COLUMNS if (column := getattr(stream, name)) is not None}
        parts.append((mine, objective.prepare(recipe, part.having(**columns), context)))
    advantage = torch.zeros(len(stream), dtype=torch.float64)
    entered, selected = (torch.zeros(len(stream), dtype=torch.bool) for _ in range(2))
    target = None if parts[0][1].target is None else torch.zeros_like(advantage)
    for mine, batch in parts:
        advantage[mine], entered[mine], selected[mine] = batch.advantage, batch.entered, batch.selected
        if target is not None and batch.target is not None:
            target[mine] = batch.target
    return objective.Batch(
        recipe=recipe, stream=stream, advantage=advantage, entered=entered, selected=selected, target=target
    )
