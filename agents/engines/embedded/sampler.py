"""Samples one token per row from random numbers that depend only on (seed, position).

The random generator is counter-based and has no state, so a row gets the same numbers in any batch, in any slot and
after any number of evictions. A token is drawn by inverting the CDF of the probabilities in float64.

There is one limit. The last bits of a row's logits depend on the shape of the batch, so a random number within about
1e-7 of a boundary in the CDF may select the neighbouring token. The log-prob is still exact for the sampled token.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PENALTIES: dict[str, tuple[float, float, float]] = {
    "min_p": (0.0, 0.0, 1.0),
    "presence_penalty": (0.0, -2.0, 2.0),
    "frequency_penalty": (0.0, -2.0, 2.0),
    "repetition_penalty": (1.0, 1e-3, 1e3),
}
"""Further settings of a request: the value that changes nothing, and the smallest and the largest value."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def as_seed(seed: int) -> int:
    """Return `seed` as an unsigned 64-bit value. Integers outside that range wrap around."""
    return seed & _MASK


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a float64 in [0, 1) for each (seed, position). It is the output of SplitMix64 at this position in a
    stream, which starts from a hash of the seed.

    Without the hash, two seeds that differ by a multiple of the golden-ratio constant would give the same stream, only
    shifted.
    """
    counters = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    # uint64 arithmetic wraps modulo 2**64. The upper 53 bits fill the mantissa of a float64, so 1.0 can't occur.
    return (_mix(_mix(seeds) + counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(
    logits: Tensor,
    temperature: NDArray[np.float64],
    uniform: NDArray[np.float64],
    top_p: NDArray[np.float64] | None = None,
    top_k: NDArray[np.int64] | None = None,
    allowed: NDArray[np.bool_] | None = None,
    drawn: Tensor | None = None,
    min_p: NDArray[np.float64] | None = None,
) -> tuple[list[int], list[float]]:
    """Return token ids and their log-probs for float32 `logits` (rows, vocabulary).

    A log-prob is log softmax(logits / temperature) over the whole vocabulary, at the sampled id. `allowed` (rows,
    vocabulary), `min_p`, `top_p` and `top_k` restrict which ids can be sampled, but don't change the log-prob. In a
    row, `min_p` 0.0, `top_p` 1.0 and `top_k` 0 mean no restriction. `drawn` are the logits after penalties, from which
    ids are sampled, or None without penalties. Temperature 0 selects the allowed id with the largest logit (the first
    one in a tie) and gives its log-prob at temperature 1. If a row has no finite probabilities, its log-prob is NaN.
    """
    greedy = temperature == 0.0
    scale = torch.from_numpy(np.where(greedy, 1.0, temperature)).to(logits.device)
    # In float32, a cumulative sum over a whole vocabulary would round small probabilities away.
    scaled = logits.double() / scale[:, None]
    p = torch.softmax(scaled, dim=-1)
    whole = None if drawn is None and min_p is None else scaled.log_softmax(-1)
    if drawn is not None:
        logits, scaled = drawn, drawn.double() / scale[:, None]
        p = torch.softmax(scaled, dim=-1)
    if allowed is not None:
        # The allowed ids are normalised by themselves, because their probability may be too small for a float64.
        whole = scaled.log_softmax(-1) if whole is None else whole
        mask = torch.from_numpy(~allowed).to(logits.device)
        logits, p = logits.masked_fill(mask, -torch.inf), scaled.masked_fill(mask, -torch.inf).softmax(-1)
    if min_p is not None:
        least = torch.from_numpy(min_p).to(p.device)[:, None] * p.amax(-1, keepdim=True)
        p = p.masked_fill(p < least, 0.0)
    kept = p if top_p is None or top_k is None else _filtered(p, top_p, top_k)
    cdf = kept.cumsum(-1)
    # The target is scaled by the last value in the CDF, because this value is below 1 after filtering, and only
    # approximately 1 otherwise.
    target = torch.from_numpy(uniform).to(logits.device)[:, None] * cdf[:, -1:]
    # right=True skips tokens with probability 0, because their value in the CDF equals the previous token's.
    ids = torch.searchsorted(cdf, target, right=True).clamp_(max=p.shape[-1] - 1)
    if greedy.any():
        first = torch.from_numpy(greedy).to(logits.device)[:, None]
        ids = torch.where(first, logits.argmax(-1, keepdim=True), ids)
    logprobs = p.gather(1, ids).log_() if whole is None else whole.gather(1, ids)
    return ids[:, 0].tolist(), logprobs[:, 0].float().tolist()


def penalties_of(settings: Mapping[str, object]) -> dict[str, float]:
    """Return the settings in `PENALTIES` that change anything. Raises ValueError if one is out of its range."""
    found: dict[str, float] = {}
    for name, (off, low, high) in PENALTIES.items() if settings else ():
        value = settings.get(name, off)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"{name} is {value!r}; it must be a number from {low:g} to {high:g}")
        if value != off:
            found[name] = float(value)
    return found


def penalised(logits: Tensor, penalties: Mapping[str, float], prompt: array[int], ids: array[int]) -> Tensor:
    """Return a row's `logits` (vocabulary,) with vLLM's penalties: `repetition_penalty` for each id in the prompt or
    the answer `ids`, and `frequency_penalty` and `presence_penalty` for each id in the answer."""
    own = torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=len(logits)).to(logits.device)
    seen = (own > 0).index_fill(0, torch.tensor(prompt, dtype=torch.long, device=logits.device), True)
    repetition = penalties.get("repetition_penalty", 1.0)
    weaker = torch.where(logits > 0, logits / repetition, logits * repetition)
    used = penalties.get("frequency_penalty", 0.0) * own + penalties.get("presence_penalty", 0.0) * (own > 0)
    return torch.where(seen, weaker, logits) - used


def _filtered(p: Tensor, top_p: NDArray[np.float64], top_k: NDArray[np.int64]) -> Tensor:
    """Return `p` with zeros outside each row's candidates.

    The candidates are found in two steps. First, the `top_k` most probable tokens are kept. Of these, the most probable
    ones are taken until they have the share `top_p` of the kept probability."""
    sorted_p, order = torch.sort(p, dim=-1, descending=True, stable=True)
    rank = torch.arange(p.shape[-1], device=p.device)
    most = torch.from_numpy(np.where(top_k > 0, top_k, p.shape[-1])).to(p.device)[:, None]
    sorted_p = sorted_p * (rank < most)
    # For each token, the probability of all tokens ranked above it, normalised over the `top_k` tokens.
    before = (sorted_p / sorted_p.sum(-1, keepdim=True)).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    limit = torch.from_numpy(top_p).to(p.device)[:, None]
    # The most probable token always stays, because without any candidate a row would have no CDF.
    sorted_p = sorted_p * ((before < limit) | (limit >= 1.0) | (rank == 0))
    return torch.zeros_like(p).scatter_(1, order, sorted_p)
