"""Continuous batching as a plain state machine: who sits in which slot, what each has sampled, whose KV is kept.

Running rows are always slots [0, b): joiners come last, a leaver's slot is filled by the last row. A generation that is
evicted (its KV went stale) joins again as if its completion were part of its prompt, so new weights need no path of
their own. Between two turns of a conversation its KV is parked, least recently used first out.

Nothing here waits, and nothing here knows of event loops, requests or versions; whoever calls decides when.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ....tapes.arrays import floats, ints
from .kv_cache import SlotDecoder
from .sampler import draw, uniforms

SPARE = 64
"""Padding that a joint prefill may carry before it is split: for a model of a million parameters on one core, one more
forward costs about as much as 64 tokens."""


@dataclass(slots=True)
class Stats:
    """Counters since the engine was made."""

    sampled: int = 0
    """Tokens drawn."""
    prefilled: int = 0
    """Prompt tokens that were computed."""
    reused: int = 0
    """Prompt tokens whose KV was parked."""
    recomputed: int = 0
    """Tokens computed again because new weights made their KV stale."""
    steps: int = 0
    """Decoding forwards."""
    prefills: int = 0
    """Prefill forwards."""
    swaps: int = 0
    """Published versions."""
    max_batch: int = 0
    """Most rows that ran together."""
    busy_seconds: float = 0.0
    """Wall time inside forwards and sampling."""


@dataclass(slots=True, eq=False)
class Generation:
    """One prompt and what was sampled after it."""

    prompt: array[int]
    seed: int
    """Unsigned, 64 bits."""
    temperature: float
    top_p: float
    top_k: int
    stops: frozenset[int]
    limit: int
    """Most tokens to sample."""
    key: str
    """Where the KV is parked; empty for nowhere."""
    ids: array[int] = field(default_factory=ints)
    logprobs: array[float] = field(default_factory=floats)
    finish: Literal["stop", "length", "broken"] | None = None
    """`broken`: the model gave no finite probabilities for the next token."""
    slot: int = -1
    """-1 while not running."""
    reused: int | None = None
    """Prompt tokens found parked when it first joined; None before."""
    clean: bool = True
    """False once its KV mixes weights: it must not be parked."""


@dataclass(slots=True)
class Parked:
    """KV of the first tokens of a conversation."""

    ids: NDArray[np.int32]
    kv: Tensor


class ParkingLot:
    """KV by conversation, at most `budget` tokens in all."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.tokens = 0
        self._by_key: OrderedDict[str, Parked] = OrderedDict()

    def put(self, key: str, entry: Parked) -> None:
        """Keep `entry`, at the cost of the least recently used."""
        self.forget(key)
        self._by_key[key] = entry
        self.tokens += len(entry.ids)
        while self.tokens > self.budget:
            self.forget(next(iter(self._by_key)))

    def find(self, key: str, ids: NDArray[np.int32]) -> tuple[Parked | None, int]:
        """What is parked under `key`, and how much of it `ids` begins with; the last of `ids` is never counted."""
        entry = self._by_key.get(key)
        if entry is None:
            return None, 0
        n = min(len(entry.ids), len(ids) - 1)
        differ = entry.ids[:n] != ids[:n]
        return entry, int(differ.argmax()) if differ.any() else n

    def forget(self, key: str) -> None:
        """Drop what is parked under `key`, if anything is."""
        entry = self._by_key.pop(key, None)
        if entry is not None:
            self.tokens -= len(entry.ids)

    def clear(self) -> None:
        """Drop everything."""
        self._by_key.clear()
        self.tokens = 0


class Batch:
    """The running rows of one decoder."""

    def __init__(self, decoder: SlotDecoder, park_tokens: int, stats: Stats) -> None:
        self.decoder = decoder
        self.parked = ParkingLot(park_tokens)
        self.stats = stats
        self.rows: list[Generation] = []
        n = decoder.slots
        self._length = np.zeros(n, dtype=np.int64)
        self._last = np.zeros(n, dtype=np.int64)
        self._seed = np.zeros(n, dtype=np.uint64)
        self._temperature = np.ones(n)

    @property
    def room(self) -> int:
        """Free slots."""
        return self.decoder.slots - len(self.rows)

    def missing(self, generation: Generation) -> int:
        """How many tokens would have to be computed if it joined now."""
        ids = _history(generation)
        return len(ids) - self.parked.find(generation.key, ids)[1]

    def groups(self, generations: Iterable[Generation]) -> list[list[Generation]]:
        """Split joiners into prefills of similar lengths, so that none is mostly padding."""
        out: list[list[Generation]] = []
        real = 0
        for new, generation in sorted(((self.missing(s), s) for s in generations), key=lambda pair: pair[0]):
            if out and (len(out[-1]) + 1) * new <= (real + new) * 1.25 + SPARE:
                out[-1].append(generation)
                real += new
            else:
                out.append([generation])
                real = new
        return out

    def join(self, group: Sequence[Generation]) -> list[Generation]:
        """Prefill `group` (at most `room`) in one forward and draw their next tokens. Gives those that finished.

        When the forward raises, nobody has joined."""
        first = len(self.rows)
        found = [self._settle(first + i, generation) for i, generation in enumerate(group)]
        have = np.array([n for _, n in found], dtype=np.int64)
        new = np.array([len(ids) for ids, _ in found], dtype=np.int64) - have
        ids = np.zeros((len(group), int(new.max())), dtype=np.int64)
        for row, (history, n) in enumerate(found):
            ids[row, ids.shape[1] - new[row] :] = history[n:]
        logits = self.decoder.extend(first, ids, have, new)
        self.stats.prefills += 1
        for i, generation in enumerate(group):
            self._seat(first + i, generation, int(have[i]), int(new[i]))
        self.rows.extend(group)
        self.stats.max_batch = max(self.stats.max_batch, len(self.rows))
        return self._sample(first, logits)

    def step(self) -> list[Generation]:
        """Feed every row its last token and draw the next. Gives those that finished."""
        b = len(self.rows)
        logits = self.decoder.extend(0, self._last[:b, None], self._length[:b], np.ones(b, dtype=np.int64))
        self._length[:b] += 1
        self.stats.steps += 1
        return self._sample(0, logits)

    def leave(self, generation: Generation, park: bool = True) -> None:
        """Free its slot; its KV is parked when that makes sense."""
        slot, length = generation.slot, int(self._length[generation.slot])
        if park and generation.key and generation.clean and length <= self.parked.budget:
            self.parked.put(generation.key, Parked(_history(generation)[:length], self.decoder.park(slot, length)))
        last = self.rows.pop()
        generation.slot = -1
        if last is not generation:
            self.rows[slot] = last
            for column in (self._length, self._last, self._seed, self._temperature):
                column[slot] = column[last.slot]
            self.decoder.move(last.slot, slot, int(self._length[slot]))
            last.slot = slot

    def evict(self) -> list[Generation]:
        """Everybody out, nothing parked. Gives them in the order of their slots, ready to join again."""
        out, self.rows = self.rows, []
        for generation in out:
            generation.slot = -1
        return out

    def _settle(self, slot: int, generation: Generation) -> tuple[NDArray[np.int32], int]:
        """Put parked KV into the slot: (all its tokens, how many of them have KV now)."""
        ids = _history(generation)
        entry, shared = self.parked.find(generation.key, ids)
        if entry is not None and shared:
            self.decoder.restore(slot, entry.kv, shared)
        return ids, shared

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

    def _sample(self, first: int, logits: Tensor) -> list[Generation]:
        """Draw for the rows from `first` on; the finished ones have left when this returns."""
        rows = self.rows[first:]
        at = slice(first, first + len(rows))
        uniform = uniforms(self._seed[at], np.array([len(s.ids) for s in rows], dtype=np.int64))
        top_p = top_k = None
        if any(s.top_k or s.top_p < 1.0 for s in rows):
            top_p = np.array([s.top_p for s in rows])
            top_k = np.array([s.top_k for s in rows], dtype=np.int64)
        ids, logprobs = draw(logits, self._temperature[at], uniform, top_p, top_k)
        self._last[at] = ids
        out = []
        for generation, token, logprob in zip(rows, ids, logprobs, strict=True):
            if logprob != logprob:
                generation.finish, generation.clean = "broken", False
                out.append(generation)
                self.decoder.wipe(generation.slot)  # before anybody moves in, or out of here with what is not finite
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
        for generation in out:
            self.leave(generation)
        return out


def _history(generation: Generation) -> NDArray[np.int32]:
    """Prompt and completion so far, as one array of its own."""
    return np.frombuffer(generation.prompt + generation.ids, dtype=np.int32)
