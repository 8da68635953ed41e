"""Samples one token per row from random numbers that depend only on (seed, position).

The generator is counter-based and has no state. A row therefore gets the same random numbers in any batch, in any slot
and after any number of evictions. The sampler inverts the CDF of float64 probabilities.

Limit: the logits of one row differ in their last bits with the shape of the batch. A random number within about 1e-7 of
a boundary of the CDF may therefore select the neighbouring token. The log-prob stays exact for the sampled token.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def as_seed(seed: int) -> int:
    """Return `seed` as an unsigned 64-bit value. Wider or negative integers wrap around."""
    return seed & _MASK


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return one float64 in [0, 1) for each (seed, position). It is SplitMix64 over the counter, from a start that is a
    hash of the seed.

    Without the hash, two seeds that differ by a multiple of the golden-ratio constant give streams that are shifts of
    each other.
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
) -> tuple[list[int], list[float]]:
    """Return token ids and their log-probs for float32 `logits` (rows, vocabulary).

    A log-prob is log softmax(logits / temperature) of the sampled id over the whole vocabulary. `top_p` and `top_k`
    restrict the candidates and don't change the log-prob. The values 1.0 and 0 disable them for a row. Temperature 0
    selects the first of the largest logits, with the log-prob at temperature 1. A row without finite probabilities gets
    NaN.
    """
    greedy = temperature == 0.0
    scale = torch.from_numpy(np.where(greedy, 1.0, temperature)).to(logits.device)
    # The sum is in float64, as a float32 cumulative sum over a whole vocabulary rounds small probabilities away.
    p = torch.softmax(logits.double() / scale[:, None], dim=-1)
    kept = p if top_p is None or top_k is None else _filtered(p, top_p, top_k)
    cdf = kept.cumsum(-1)
    # The target is scaled by the last value of the CDF, which is below 1 after filtering and otherwise differs from 1
    # by rounding.
    target = torch.from_numpy(uniform).to(logits.device)[:, None] * cdf[:, -1:]
    # right=True skips tokens of probability 0, whose CDF equals the previous token's.
    ids = torch.searchsorted(cdf, target, right=True).clamp_(max=p.shape[-1] - 1)
    if greedy.any():
        first = torch.from_numpy(greedy).to(logits.device)[:, None]
        ids = torch.where(first, logits.argmax(-1, keepdim=True), ids)
    logprobs = p.gather(1, ids).log_()
    return ids[:, 0].tolist(), logprobs[:, 0].float().tolist()


def _filtered(p: Tensor, top_p: NDArray[np.float64], top_k: NDArray[np.int64]) -> Tensor:
    """Return `p` with zeros outside each row's candidates.

    The candidates are the smallest set among the `top_k` most probable tokens whose share reaches `top_p`."""
    sorted_p, order = torch.sort(p, dim=-1, descending=True, stable=True)
    rank = torch.arange(p.shape[-1], device=p.device)
    most = torch.from_numpy(np.where(top_k > 0, top_k, p.shape[-1])).to(p.device)[:, None]
    sorted_p = sorted_p * (rank < most)
    # This is the probability of all tokens ranked above each token, normalised over the `top_k` tokens.
    before = (sorted_p / sorted_p.sum(-1, keepdim=True)).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    limit = torch.from_numpy(top_p).to(p.device)[:, None]
    # Rank 0 always stays, because a row without a candidate has no CDF.
    sorted_p = sorted_p * ((before < limit) | (limit >= 1.0) | (rank == 0))
    return torch.zeros_like(p).scatter_(1, order, sorted_p)
