"""Continuous batching: all running requests share one forward per token, and may join or leave after each token.

A slot holds the KV of one running generation, which is one row of the batch. The b running rows always fill the slots 0
to b - 1. A new row takes the next free slot. When a row leaves, the last row moves into its slot. When new weights make
the KV stale, all generations are evicted. They join again with their completions as part of their prompts, so new
weights need no separate code path. Between two turns of a conversation, a copy of its KV is kept (parked). If space
runs out, the least recently used copy is dropped.

This module has no event loop, requests or versions. The caller decides when to call each method.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....tapes.arrays import floats, ints
from ....tapes.places import Place, keys, shared_length
from ...vision.vision import Pixels
from .engine_caches import Parked, ParkingLot, PictureFeatures
from .kv_cache import NOTHING, Seen, SlotDecoder
from .sampler import draw, penalised, uniforms

if TYPE_CHECKING:
    from .grammar_guide import Guide

SPARE = 64
"""Number of padding tokens that a prefill of several prompts may contain, in addition to a quarter of its real tokens.
With more padding, it is split in two. For a model with a million parameters on one core, a second forward costs about
as much as 64 tokens."""

Family = list["Generation"]
"""Generations that share one row of a prefill, because the tokens of each one are a prefix of the first one's
tokens. None of them ends inside the first one's tokens that have KV already."""


@dataclass(slots=True)
class Stats:
    """Counters since the engine was created."""

    sampled: int = 0
    """Sampled tokens."""
    prefilled: int = 0
    """Prompt tokens that a forward computed."""
    reused: int = 0
    """Prompt tokens whose KV was copied from a parked entry or from another row."""
    recomputed: int = 0
    """Tokens whose KV was computed again because new weights had made it stale."""
    steps: int = 0
    """Decoding forwards."""
    swaps: int = 0
    """Weight syncs."""
    max_batch: int = 0
    """Largest number of rows that ran together."""
    busy_seconds: float = 0.0
    """Wall time, in seconds, that the engine spent on prefill, decoding and sampling."""


@dataclass(slots=True, eq=False)
class Generation:
    """One prompt and the tokens sampled after it."""

    prompt: array[int]
    seed: int
    """An unsigned 64-bit integer."""
    temperature: float
    top_p: float
    top_k: int
    stops: frozenset[int]
    limit: int
    """The largest number of tokens to sample."""
    barred: tuple[int, ...]
    """Ids that must not occur among the first `min_tokens` sampled tokens."""
    min_tokens: int
    key: str
    """Key under which the KV is kept (parked) for the conversation's next turn. If the key is empty, the KV is
    dropped."""
    places: tuple[Place, ...] = ()
    """The pictures of the prompt, in order."""
    pixels: dict[int, Callable[[], Pixels]] = field(default_factory=dict)
    """For each `Place.key`, a function that returns the picture's pixels. The function may block."""
    penalties: Mapping[str, float] = field(default_factory=dict)
    """`min_p` and the penalties of `sampler.penalised`, by name."""
    guide: Guide | None = None
    """Keeps the completion within a grammar."""
    positions: NDArray[np.int64] | None = None
    """Rotary positions of shape (axes, prompt + limit), or None if a token's position is its index."""
    ids: array[int] = field(default_factory=ints)
    logprobs: array[float] = field(default_factory=floats)
    finish: Literal["stop", "length", "broken"] | None = None
    """`broken` means that the model's probabilities for the next token weren't finite, or that `guide` failed."""
    slot: int = -1
    """The slot of the generation, or -1 while it is not running."""
    reused: int | None = None
    """Number of prompt tokens for which KV was copied when the generation first joined a batch. None before that."""
    clean: bool = True
    """Whether the KV is finite and was computed by one version of the weights. Otherwise it must not be parked."""
    prompt_keys: bytes = field(init=False, repr=False)
    """The keys (`tapes.places.keys`) of the prompt's tokens as 64-bit integers."""

    def __post_init__(self) -> None:
        self.prompt_keys = keys(self.prompt, self.places).tobytes()

    @property
    def length(self) -> int:
        """Number of tokens in the prompt and in the completion so far."""
        return len(self.prompt) + len(self.ids)


class Batch:
    """The running rows of one decoder."""

    def __init__(self, decoder: SlotDecoder, park_tokens: int, stats: Stats) -> None:
        self.decoder = decoder
        self.parked = ParkingLot(park_tokens)
        self.pictures = None if decoder.vision is None else PictureFeatures(decoder, decoder.vision)
        self.stats = stats
        self.rows: list[Generation] = []
        n = decoder.slots
        # Each array has one value per slot. `_length` is the number of tokens with KV. The last sampled token has none
        # yet. It is in `_last`, and the next step feeds it to the model.
        self._length = np.zeros(n, dtype=np.int64)
        self._last = np.zeros(n, dtype=np.int64)
        self._seed = np.zeros(n, dtype=np.uint64)
        self._temperature = np.ones(n)

    @property
    def room(self) -> int:
        """Number of free slots."""
        return self.decoder.slots - len(self.rows)

    def missing(self, generation: Generation, joining: Iterable[Generation] = ()) -> int:
        """Return the number of tokens that a forward must compute if the generation joins now, after `joining`."""
        length = generation.length
        return length - self._nearest(generation, joining, self.shared(generation)[1], length)[1]

    def shared(self, generation: Generation, most: int | None = None) -> tuple[Parked | Generation | None, int]:
        """Return the parked KV or the running row that the generation can copy most KV from, and the number of tokens
        that it shares with the generation. It is at most `most`, and less than the generation's number of tokens."""
        most = min(generation.length - 1, generation.length if most is None else most)
        parked, n = self.parked.find(generation.key, _keys(generation), generation.places, most)
        row, shared = self._nearest(generation, (row for row in self.rows if row.clean), n, most)
        return (row, shared) if row is not None else (parked, n)

    def _nearest(
        self, generation: Generation, others: Iterable[Generation], n: int, most: int
    ) -> tuple[Generation | None, int]:
        """Return the one of `others` that begins with most tokens of the generation, and their number. None and `n` if
        none begins with more than `n` tokens."""
        found, tokens = None, _keys(generation)
        more = tokens[: n + 1].tobytes()
        for other in others:
            if n >= most:
                break
            # Most rows are ruled out by this comparison of bytes, which is much cheaper than `shared_length`.
            if not (other.prompt_keys if n < len(other.prompt) else _key_bytes(other)).startswith(more):
                continue
            theirs = _keys(other) if other.slot < 0 else _keys(other)[: self._length[other.slot]]
            shared = shared_length(theirs, tokens, (*other.places, *generation.places), most)
            if shared > n:
                found, n = other, shared
                more = tokens[: n + 1].tobytes()
        return found, n

    def plan(self, generations: Iterable[Generation]) -> tuple[list[list[Family]], list[Generation]]:
        """Return the prefills to run now, and the generations to plan again after them, because they can then copy the
        KV of a common prefix from one of the new rows. So a prefix is computed once, although its rows differ later.

        They wait only if this saves more than `SPARE` tokens in total. Otherwise, the second forward costs more."""
        now: list[tuple[int, Family]] = []
        later: list[tuple[int, Family]] = []
        saved = 0
        for have, family in self._families(generations):
            length = family[0].length
            shared = self._nearest(family[0], (other[0] for _, other in now), have, length)[1]
            (later if shared > have else now).append((length - have, family))
            saved += shared - have
        if saved <= SPARE:
            now, later = now + later, []
        return self._packed(now), [generation for _, family in later for generation in family]

    def _packed(self, families: Iterable[tuple[int, Family]]) -> list[list[Family]]:
        """Pack new rows of similar length into prefills, so that each prefill has little padding. Each family comes
        with the number of tokens to compute."""
        out: list[list[Family]] = []
        real = 0
        for new, family in sorted(families, key=lambda pair: pair[0]):
            # Families come in ascending length, so if this one joins, the group's rows become `new` columns wide. The
            # left side of the comparison is the group's size with padding.
            if out and (len(out[-1]) + 1) * new <= (real + new) * 1.25 + SPARE:
                out[-1].append(family)
                real += new
            else:
                out.append([family])
                real = new
        return out

    def _families(self, generations: Iterable[Generation]) -> list[tuple[int, Family]]:
        """Group generations that begin with the same tokens, so that a shared prompt is computed only once. Each family
        comes with the number of its first one's tokens that have KV already."""
        out: list[tuple[int, Family]] = []
        # In descending order, a token sequence directly follows the longer sequences that begin with it.
        longest, have = b"", 0
        known = [(_key_bytes(generation), generation) for generation in generations]
        for tokens, generation in sorted(known, key=lambda pair: pair[0], reverse=True):
            if longest.startswith(tokens) and generation.length > have:
                out[-1][1].append(generation)
            else:
                longest, have = tokens, self.shared(generation)[1]
                out.append((have, [generation]))
        return out

    def join(self, families: Sequence[Family]) -> list[Generation]:
        """Prefill `families` (at most `room` generations) in one forward, with one row for each family. Then sample one
        token for each generation. Returns the finished generations.

        If the forward raises, no generation has joined."""
        first, computed = len(self.rows), [family[0] for family in families]
        found = [self._settle(first + i, family) for i, family in enumerate(families)]
        have = np.array([n for _, n in found], dtype=np.int64)
        new = np.array([len(ids) for ids, _ in found], dtype=np.int64) - have
        ids = np.zeros((len(computed), int(new.max())), dtype=np.int64)
        for row, (history, n) in enumerate(found):
            ids[row, ids.shape[1] - new[row] :] = history[n:]
        others = [(row, generation) for row, family in enumerate(families) for generation in family[1:]]
        length = [generation.length for _, generation in others]
        last = [*(have + new), *length]
        at = np.array([*range(len(computed)), *(row for row, _ in others)])
        columns = ids.shape[1] - 1 - ((have + new)[at] - last)
        logits = self.decoder.extend(first, ids, have, new, self.seen(computed, have, new), (at, columns))
        # Slots are assigned only after the forward. If it raises, the KV that it wrote is in slots that are still free,
        # and is overwritten or masked when they are used.
        for i, generation in enumerate(computed):
            self._seat(first + i, generation, int(have[i]), int(new[i]))
        for slot, (row, generation), n in zip(
            range(first + len(computed), first + len(at)), others, length, strict=True
        ):
            self.decoder.move(first + row, slot, n)
            self._seat(slot, generation, n, 0)
        self.rows += [*computed, *(generation for _, generation in others)]
        self.stats.max_batch = max(self.stats.max_batch, len(self.rows))
        return self._sample(first, logits)

    def step(self) -> list[Generation]:
        """Feed the last token of every row and sample the next one. Returns the finished generations."""
        b = len(self.rows)
        have, one = self._length[:b], np.ones(b, dtype=np.int64)
        logits = self.decoder.extend(0, self._last[:b, None], have, one, self.seen(self.rows, have, one))
        self._length[:b] += 1
        self.stats.steps += 1
        return self._sample(0, logits)

    def leave(self, generation: Generation, park: bool = True) -> None:
        """Free the slot of `generation`. With `park`, park its KV if it is clean, has a key and fits the budget."""
        slot, length = generation.slot, int(self._length[generation.slot])
        if park and generation.key and generation.clean and length <= self.parked.budget:
            # This must come before the last row moves into the slot. `length` excludes the last sampled token, which
            # has no KV. If its id were parked too, the next turn would reuse KV that doesn't exist.
            parked = Parked(_keys(generation)[:length], generation.places, self.decoder.park(slot, length))
            self.parked.put(generation.key, parked, length)
        last = self.rows.pop()
        generation.slot = -1
        if last is not generation:
            self.rows[slot] = last
            for column in (self._length, self._last, self._seed, self._temperature):
                column[slot] = column[last.slot]
            self.decoder.move(last.slot, slot, int(self._length[slot]))
            last.slot = slot

    def evict(self) -> list[Generation]:
        """Remove all rows without parking their KV. Returns their generations in slot order. They may join again."""
        out, self.rows = self.rows, []
        for generation in out:
            generation.slot = -1
        return out

    def _settle(self, slot: int, family: Family) -> tuple[NDArray[np.int32], int]:
        """Copy the KV that the first of the family shares with parked KV or a running row into the slot. Returns all of
        its tokens, and how many of them have KV now.

        The source stays valid, because several generations may copy from it. Each of the family needs logits after its
        last token, so this token must be computed."""
        source, shared = self.shared(family[0], min(one.length for one in family) - 1)
        if isinstance(source, Generation):
            self.decoder.move(source.slot, slot, shared)
        elif source is not None and shared:
            self.decoder.restore(slot, source.kv, shared)
        return _history(family[0]), shared

    def seen(self, rows: Sequence[Generation], have: NDArray[np.int64], new: NDArray[np.int64]) -> Seen:
        """Return the rotary positions and picture features for the next `new` tokens of each row. The `have` tokens
        before them have KV already."""
        if self.pictures is None:
            return NOTHING
        rotary = None if rows[0].positions is None else np.zeros((len(rows[0].positions), len(rows), new.max()), int)
        # Parked KV never ends inside a picture, so either all of a picture's tokens are computed or none.
        shown = [(row, place) for row, n in enumerate(have) for place in rows[row].places if place.offset >= n]
        features = self.pictures.of({place.key: rows[row].pixels[place.key] for row, place in shown})
        first = dict(zip(features, np.cumsum([0, *map(len, features.values())]), strict=False))
        where = np.full((len(rows), new.max()), -1)
        for row, generation in enumerate(rows):
            end = have[row] + new[row]
            if rotary is not None and generation.positions is not None:
                rotary[:, row, -new[row] :] = generation.positions[:, have[row] : end]
        for row, place in shown:
            at = place.offset + np.flatnonzero(self.pictures.vision.feature_mask(place))
            # Tokens are right-aligned: the last column is the row's last token.
            where[row, at - have[row] - new[row]] = first[place.key] + np.arange(len(features[place.key]))
        return Seen(rotary, where, torch.cat(list(features.values()))) if shown else Seen(rotary)

    def _seat(self, slot: int, generation: Generation, have: int, new: int) -> None:
        generation.slot = slot
        self._length[slot] = have + new
        self._seed[slot] = generation.seed
        self._temperature[slot] = generation.temperature
        if generation.reused is None:
            generation.reused = have
            self.stats.reused += have
            self.stats.prefilled += new
        else:
            self.stats.recomputed += new

    def _allowed(self, rows: Sequence[Generation], logits: Tensor) -> NDArray[np.bool_] | None:
        """Return a mask (rows, vocabulary) of the ids that may be sampled, or None if no row has a grammar."""
        if all(one.guide is None for one in rows):
            return None
        allowed = np.ones(logits.shape, dtype=bool)
        for k, one in enumerate(rows):
            if one.guide is not None:
                allowed[k] = one.guide.allowed()
        return allowed

    def _sample(self, first: int, logits: Tensor) -> list[Generation]:
        """Sample one token for each row from slot `first` on. Returns the generations that have finished and left."""
        rows = self.rows[first:]
        at = slice(first, first + len(rows))
        # The random number depends on the position in the completion, not on the number of draws. A generation
        # therefore continues the same random stream after an eviction or a move to another slot.
        uniform = uniforms(self._seed[at], np.array([len(s.ids) for s in rows], dtype=np.int64))
        top_p = top_k = None
        if any(s.top_k or s.top_p < 1.0 for s in rows):
            top_p = np.array([s.top_p for s in rows])
            top_k = np.array([s.top_k for s in rows], dtype=np.int64)
        barred = [(k, stop) for k, s in enumerate(rows) if len(s.ids) < s.min_tokens for stop in s.barred]
        if barred:
            # In the logits, so that the log-prob is one of the ids that were left. The trainer bars the same ids
            # (`Row.bars`). It can't repeat a grammar, so `allowed` changes what is drawn and not the log-prob.
            logits = logits.index_put(tuple(torch.tensor(barred).T), logits.new_tensor(-torch.inf))
        allowed = self._allowed(rows, logits)
        drawn = min_p = None
        if [s for s in rows if s.penalties]:
            drawn = torch.stack([penalised(logits[k], s.penalties, s.prompt, s.ids) for k, s in enumerate(rows)])
            min_p = np.array([s.penalties.get("min_p", 0.0) for s in rows])
        ids, logprobs = draw(logits, self._temperature[at], uniform, top_p, top_k, allowed, drawn, min_p)
        for k, s in enumerate(rows if allowed is not None else ()):
            if s.guide is None or logprobs[k] != logprobs[k]:  # NaN
                continue
            taken = s.guide.take(ids[k], s.limit - len(s.ids))
            if s.guide.error:
                logprobs[k] = float("nan")
            elif taken != ids[k]:  # the answer must be closed now
                ids[k], logprobs[k] = taken, _logprob(logits[k], self._temperature[first + k], taken)
        self._last[at] = ids
        out = []
        for generation, token, logprob in zip(rows, ids, logprobs, strict=True):
            if logprob != logprob:  # NaN
                generation.finish, generation.clean = "broken", False
                out.append(generation)
                # Zero the slot before its reuse, because attention multiplies masked values by 0, and 0 * NaN is NaN.
                self.decoder.wipe(generation.slot)
                continue
            self.stats.sampled += 1
            generation.ids.append(token)
            generation.logprobs.append(logprob)
            if token in generation.stops:
                generation.finish = "stop"
            elif len(generation.ids) >= generation.limit:
                generation.finish = "length"
            if generation.finish:
                out.append(generation)
        # leave() moves the last row into the free slot, so it can't be called in the loop above, which still reads rows
        # by slot. In reverse order, it never moves a row that is about to leave.
        for generation in reversed(out):
            self.leave(generation)
        return out


def _logprob(logits: Tensor, temperature: float, id: int) -> float:
    return float((logits.double() / (temperature or 1.0)).log_softmax(-1)[id])


def _history(generation: Generation) -> NDArray[np.int32]:
    """Return the prompt and the completion so far as one new array."""
    return np.frombuffer(generation.prompt + generation.ids, dtype=np.int32)


def _key_bytes(generation: Generation) -> bytes:
    """Return the keys of the prompt and the completion so far as 64-bit integers."""
    return generation.prompt_keys + keys(generation.ids, ()).tobytes() if generation.ids else generation.prompt_keys


def _keys(generation: Generation) -> NDArray[np.int64]:
    return np.frombuffer(_key_bytes(generation), dtype=np.int64)
