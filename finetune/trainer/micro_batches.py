"""Micro-batches: the rows that are forwarded together, and the positions that predict the tokens to score. These are
the tokens whose log-probs or values are needed.

Rows of similar length form a micro-batch. Each row is cut after its last token to score, and padded on the right. A
causal model attends only to the left, so right padding needs no mask. Neither the padding nor the other rows change a
log-prob.

Rows may also be packed end to end into one row without padding. Positions restart at each row, so that attention
doesn't cross the boundaries. This needs a kernel that knows the boundaries (variable-length attention on GPU). On a
CPU, the mask is block-diagonal, which is exact but quadratic in the length of the pack. An update then takes 3.8 times
as long as with padding for rows of 55 to 65 tokens, and 3.4 times for rows of 10 to 200 (`benchmarks/packing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...agents.vision.vision import Vision
from ...tapes.places import Place, keys, shared_length
from ..data.rows import Row
from ..data.stream import BadBatch
from .sequence_parallel import SequenceRanks, Together

MICRO_TOKENS = 2048
"""Largest number of tokens (including padding) plus picture patches in a micro-batch. This value was the best in
measurements with small models on one CPU thread."""
SHARE_TOKENS = 16
"""Length of the shortest prefix that is worth its own forward pass. With SmolLM2-135M, prompts of 37 tokens and answers
of 16, an update took 0.65 of the CPU time with 16 instead of 64."""
SHARE_SAVED = 0.25
"""A group's shared prefix is forwarded once if this saves at least this share of the group's tokens.

Measured with groups of 8 rows with 64 tokens each after the prefix: an update takes 1.04 times as long as without
sharing if 16 % are saved, 0.65 times for 43 %, 0.35 times for 70 % and 0.20 times for 82 %.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Pictures:
    """The pictures in a micro-batch. A picture in several rows is included once."""

    vision: Vision
    shown: tuple[tuple[Place, Callable[[str], bytes]], ...]
    """For each picture, one of its places in the rows, and the function that returns the bytes of its files."""
    where: Tensor
    """(B, P + L) int64: for each token of a picture, the index of its feature in `features`. -1 for all other tokens.
    The shared prefix comes first."""

    def features(self, model: nn.Module) -> Tensor:
        """Return the features (N, levels, D) of all pictures, with gradient if the tower or the projector is
        trained."""
        return self.vision.features(model, [self.vision.pixels(place, file) for place, file in self.shown])


@dataclass(frozen=True, slots=True)
class Micro:
    """Some rows, padded or packed, that are forwarded as one batch."""

    ids: Tensor
    """(B, L) int64 token ids, without a shared prefix."""
    at: Tensor
    """(n,) int64: for each token to score, the position that predicts it, which is the one before it. The B * L
    positions of `ids` are counted row by row."""
    token: Tensor
    """(n,) int64 ids of the tokens to score."""
    temperature: Tensor
    """(n,) float32 temperatures of the tokens to score."""
    index: Tensor
    """(n,) int64 positions of the tokens to score in the stream of all rows."""
    there: Tensor
    """(B, L) bool: False for padding."""
    prefix: Tensor | None
    """(P,) int64 ids that all rows begin with, which are forwarded once. None if there is no shared prefix."""
    packed: Tensor | None = None
    """(1, L) int64: if rows are packed into one, the index of each token in its original row. None if rows are
    padded."""
    positions: Tensor | None = None
    """(axes, B, P + L) int64 rotary positions, with the shared prefix first. If None, the model numbers the tokens
    itself."""
    pictures: Pictures | None = None
    """The pictures in the rows, or None if there are none."""
    barred: Tensor | None = None
    """(2, m) int64: ids that the sampler excluded. For each k, the id `barred[1, k]` was excluded when the token with
    the index `barred[0, k]` in `token` was sampled. None if no ids were excluded."""
    sequence: SequenceRanks | None = None
    """The ranks that forward this micro-batch together, each a part of its columns. None if one process does."""

    @property
    def tokens(self) -> int:
        """Number of tokens that are forwarded, including padding."""
        return self.ids.numel() + (0 if self.prefix is None else len(self.prefix))

    @property
    def own(self) -> Micro:
        """The part of this micro-batch that this rank forwards. Columns are padded to a multiple of the ranks."""
        if self.sequence is None:
            return self
        size, rank, width = self.sequence.size, self.sequence.rank, self.width

        def cut(columns: Tensor | None, fill: int = 0) -> Tensor | None:
            return None if columns is None else _padded(columns, width * size, fill).tensor_split(size, -1)[rank]

        mine = self.mine
        packed, ids = self.packed, cast(Tensor, cut(self.ids))
        # A model numbers its columns from 0, and this rank's columns begin later.
        if packed is None and self.positions is None:
            packed = torch.arange(self.ids.shape[1]).expand_as(self.ids)
        barred = self.barred
        if barred is not None:
            place = torch.full_like(self.token, -1).index_copy_(0, mine, torch.arange(len(mine)))[barred[0]]
            barred = torch.stack([place, barred[1]])[:, place >= 0]
        shown = self.pictures
        # `at` counts row by row. A row has only `width` columns here, the first of which is rank * width.
        return replace(
            self,
            ids=ids,
            at=self.at[mine] // self.ids.shape[1] * width + self.at[mine] % self.ids.shape[1] - rank * width,
            token=self.token[mine],
            temperature=self.temperature[mine],
            index=self.index[mine],
            there=cast(Tensor, cut(self.there)),
            packed=cut(packed),
            positions=cut(self.positions),
            pictures=shown and replace(shown, where=cast(Tensor, cut(shown.where, -1))),
            barred=barred,
            sequence=None,
        )

    @property
    def width(self) -> int:
        """Number of columns that each rank forwards."""
        return -(-self.ids.shape[1] // (self.sequence.size if self.sequence else 1))

    @property
    def mine(self) -> Tensor:
        """(m,) int64 indices in `token` of the tokens that this rank scores."""
        if self.sequence is None:
            return torch.arange(len(self.at))
        return (self.at % self.ids.shape[1] // self.width == self.sequence.rank).nonzero()[:, 0]

    @property
    def together(self) -> dict[str, Together | Tensor]:
        """The arguments that tell the attention layers of a model about the other ranks. The mask isn't read, but keeps
        the model from making one of this rank's columns."""
        if self.sequence is None:
            return {}
        end = self.width * self.sequence.size
        starts = [0] if self.packed is None else (self.packed[0] == 0).nonzero()[:, 0].tolist()
        lengths = np.diff([*starts, end]).tolist()
        return {"together": Together(self.sequence, lengths), "attention_mask": torch.ones(1, 1, 1, 1)}

    def joined(self, values: Tensor) -> Tensor:
        """Return the values (n,) of all tokens to score, given the values of this rank's."""
        if self.sequence is None:
            return values
        # Each rank fills in its own tokens and leaves 0 for the others, so the sum over ranks has all of them.
        whole = values.new_zeros(len(self.token))
        return self.sequence.add_up(whole.index_put((self.mine.to(values.device),), values))

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks that forward this micro-batch."""
        return x if self.sequence is None else self.sequence.add_up(x)

    @classmethod
    def idle(cls) -> Micro:
        """Return a micro-batch without a token to score, which adds exactly 0 to every gradient. A rank forwards it to
        keep step with ranks that have more micro-batches."""
        none = torch.zeros(0, dtype=torch.int64)
        ids = torch.zeros(1, 1, dtype=torch.int64)
        return cls(ids=ids, at=none, token=none, temperature=torch.zeros(0), index=none, there=ids.bool(), prefix=None)


def plan(
    rows: Sequence[Row],
    *,
    live: Tensor | None = None,
    micro_tokens: int = MICRO_TOKENS,
    share: bool = False,
    pack: bool = False,
    vision: Vision | None = None,
) -> list[Micro]:
    """Return micro-batches that together score each own token once, or only the tokens that `live` (T,) bool marks.

    Rows without a token to score are left out. A row is a micro-batch by itself if its tokens and picture patches
    exceed `micro_tokens`. With `share`, the prefix that a group's rows share is forwarded once if that saves enough.
    With `pack`, rows without a shared prefix are packed instead of padded.

    `vision` is how the model sees pictures. Raises BadBatch if a row shows a picture, and either `vision` is None or
    the row can't read the picture's file.
    """
    start = np.concatenate([[0], np.cumsum([len(row.own) for row in rows])]).astype(np.int64)
    marks = np.ones(start[-1], dtype=bool) if live is None else live.numpy()
    wanted = [marks[start[i] : start[i + 1]].nonzero()[0] for i in range(len(rows))]
    # The last token to score isn't forwarded: the position before it predicts it.
    length = np.array([row.own[w[-1]] if len(w) else 0 for row, w in zip(rows, wanted, strict=True)], dtype=np.int64)
    shown = [[p for p in row.places if p.offset < n] for row, n in zip(rows, length, strict=True)]
    for row, places in zip(rows, shown, strict=True):
        if places and (vision is None or row.file is None):
            lacks = (
                "the model that should score it can't see" if vision is None else "its row has no way to their files"
            )
            raise BadBatch(f"tape {row.tape} shows pictures, and {lacks}: train a vision model, or leave the tape out")
    # Neighbours have similar lengths, which keeps padding short. A stable sort leaves rows of one length in their
    # order, because the order of a sum decides its last bits.
    order = [int(i) for i in np.argsort(length, kind="stable") if length[i]]
    # Rows that begin with the same picture are placed together, so that few micro-batches compute it. Text comes first.
    order.sort(key=lambda i: -shown[i][0].key if shown[i] else 0)
    batches = _Batches(rows, wanted, length, start, shown, vision)
    return [
        micro
        for members, prefix in (_families(rows, wanted, length, order) if share else [(order, 0)])
        for micro in batches.of(members, prefix, micro_tokens, pack and not prefix)
    ]


def _families(
    rows: Sequence[Row], wanted: Sequence[NDArray], length: NDArray, order: Sequence[int]
) -> list[tuple[list[int], int]]:
    """Return (rows of a group, length of their shared prefix) for each group that shares enough, then (all other rows,
    0)."""
    groups: dict[str, list[int]] = {}
    for i in order:
        groups.setdefault(rows[i].group, []).append(i)
    families, others = [], []
    for members in groups.values():
        prefix = _common([rows[i] for i in members], min(int(rows[i].own[wanted[i][0]]) for i in members) - 1)
        saved = prefix * (len(members) - 1)
        if prefix >= SHARE_TOKENS and saved >= SHARE_SAVED * int(length[members].sum()):
            families.append((members, prefix))
        else:
            others += members
    rest = set(others)
    return [*families, ([i for i in order if i in rest], 0)]


def _common(rows: Sequence[Row], most: int) -> int:
    """Return the length of the prefix that all rows share, but at most `most` tokens.

    Hidden states are read only after the prefix. So callers choose `most` such that the prefix ends before the position
    that predicts the first token to score.
    """
    first = keys(rows[0].input_ids, rows[0].places)
    for row in rows[1:]:
        most = shared_length(first, keys(row.input_ids, row.places), (*rows[0].places, *row.places), most)
    return most


@dataclass(frozen=True, slots=True)
class _Batches:
    rows: Sequence[Row]
    wanted: Sequence[NDArray]
    length: NDArray
    start: NDArray
    shown: Sequence[Sequence[Place]]
    """For each row, the places of pictures in the part of the row that is forwarded."""
    vision: Vision | None

    def of(self, order: Sequence[int], prefix: int, micro_tokens: int, pack: bool) -> list[Micro]:
        """Return micro-batches of the rows in this order. A new one begins when the next row would exceed
        `micro_tokens`."""
        groups: list[list[int]] = []
        group: list[int] = []
        longest, total, patches = 0, 0, dict[int, int]()
        for i in order:
            n = int(self.length[i])
            seen = {place.key: self.vision.patches(place.grid) for place in self.shown[i]} if self.vision else {}
            # Padding makes every row as long as the longest. The prefix is forwarded once.
            tokens = total + n if pack else prefix + (len(group) + 1) * (max(longest, n) - prefix)
            if group and tokens + sum((patches | seen).values()) > micro_tokens:
                groups.append(group)
                group = []
                longest, total, patches = 0, 0, {}
            group.append(i)
            longest, total, patches = max(longest, n), total + n, patches | seen
        if group:
            groups.append(group)
        return [self.packed(group) if pack else self.one(group, prefix) for group in groups]

    def packed(self, group: Sequence[int]) -> Micro:
        """Return one micro-batch of the rows packed end to end. The positions of each row begin at 0."""
        lengths = self.length[list(group)]
        starts = np.cumsum(lengths) - lengths
        ids = np.concatenate([self.rows[i].input_ids[:n] for i, n in zip(group, lengths, strict=True)])
        at = [self.rows[i].own[self.wanted[i]] + (first - 1) for i, first in zip(group, starts, strict=True)]
        return self._micro(
            group,
            ids[None].astype(np.int64),
            at,
            np.ones((1, len(ids)), dtype=bool),
            None,
            torch.from_numpy(np.arange(len(ids)) - np.repeat(starts, lengths))[None],
            [(0, int(first)) for first in starts],
        )

    def one(self, group: Sequence[int], prefix: int) -> Micro:
        width = int(self.length[list(group)].max()) - prefix
        ids = np.zeros((len(group), width), dtype=np.int64)
        for j, i in enumerate(group):
            ids[j, : self.length[i] - prefix] = self.rows[i].input_ids[prefix : self.length[i]]
        at = [self.rows[i].own[self.wanted[i]] + (j * width - 1 - prefix) for j, i in enumerate(group)]
        there = np.arange(width) < (self.length[list(group)] - prefix)[:, None]
        shared = torch.from_numpy(self.rows[group[0]].input_ids[:prefix]).long() if prefix else None
        return self._micro(group, ids, at, there, shared, None, [(j, 0) for j in range(len(group))])

    def _micro(
        self,
        group: Sequence[int],
        ids: NDArray,
        at: Sequence[NDArray],
        there: NDArray,
        prefix: Tensor | None,
        packed: Tensor | None,
        corners: Sequence[tuple[int, int]],
    ) -> Micro:
        """`corners` has the position (row, column) of each row's first token in the micro-batch, which is a table (B, P
        + L)."""
        wanted = [(self.rows[i], self.wanted[i], self.start[i]) for i in group]
        before = np.cumsum([0, *(len(mine) for _, mine, _ in wanted)])
        # A bar names its token by the token's index in the whole micro-batch.
        barred = [row.barred(mine, first) for (row, mine, _), first in zip(wanted, before, strict=False) if row.bars]
        shape = (len(ids), ids.shape[1] + (0 if prefix is None else len(prefix)))
        positions, pictures = self._seen(group, shape, corners, packed is not None)
        return Micro(
            ids=torch.from_numpy(ids),
            at=_joined(at),
            there=torch.from_numpy(there),
            prefix=prefix,
            packed=packed,
            positions=positions,
            pictures=pictures,
            token=_joined([row.input_ids[row.own[mine]] for row, mine, _ in wanted]),
            temperature=torch.from_numpy(np.concatenate([row.temperature[mine] for row, mine, _ in wanted])),
            index=_joined([mine + start for _, mine, start in wanted]),
            barred=torch.from_numpy(np.concatenate(barred).T) if barred else None,
        )

    def _seen(
        self, group: Sequence[int], shape: tuple[int, int], corners: Sequence[tuple[int, int]], packed: bool
    ) -> tuple[Tensor | None, Pictures | None]:
        """Return (rotary positions, pictures). With packed rows, a vision model needs positions even without a picture,
        because they show where each row ends."""
        vision = self.vision
        if vision is None or not (packed or any(self.shown[i] for i in group)):
            return None, None
        positions: NDArray[np.int64] | None = None
        where, n, features = np.full(shape, -1, dtype=np.int64), 0, dict[int, NDArray[np.int64]]()
        shown: list[tuple[Place, Callable[[str], bytes]]] = []
        for i, (line, column) in zip(group, corners, strict=True):
            end, file = column + int(self.length[i]), self.rows[i].file
            if (mine := vision.positions(self.shown[i], end - column)) is not None:
                positions = np.zeros((len(mine), *shape), dtype=np.int64) if positions is None else positions
                positions[:, line, column:end] = mine
            for place in self.shown[i]:
                if place.key not in features:
                    mask = vision.feature_mask(place)
                    features[place.key] = np.where(mask, n + mask.cumsum() - 1, -1)
                    n += int(mask.sum())
                    assert file is not None, "`plan` refuses a row with pictures and without files"
                    shown.append((place, file))
                where[line, column + place.offset : column + place.end] = features[place.key]
        pictures = Pictures(vision, tuple(shown), torch.from_numpy(where)) if shown else None
        return None if positions is None else torch.from_numpy(positions), pictures


def _joined(columns: Sequence[NDArray]) -> Tensor:
    return torch.from_numpy(np.concatenate(columns)).long()


def _padded(columns: Tensor, width: int, fill: int) -> Tensor:
    return nn.functional.pad(columns, (0, width - columns.shape[-1]), value=fill)
