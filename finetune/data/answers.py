"""Counts over one answer: repetitions among its tokens, and words of reflection in its text."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

REFLECTION = re.compile(
    r"\b(?:wait|hmm|alternatively|however|actually|re-?check|re-?think|re-?try|re-?examine|double-check"
    r"|(?:check|try) again)\b"
)
"""The English words that count as reflection."""


def repeated(ids: NDArray[np.integer]) -> int:
    """Return how many 4-grams of the token ids (n,) occurred before in the same answer: 0 if all differ, at most n -
    4."""
    if len(ids) < 5:
        return 0
    wide = ids.astype(np.int64)
    # A 64-bit key holds two 32-bit ids, or the indices of two pairs. So equal keys mean equal 4-grams.
    _, pair = np.unique(wide[:-1] << 32 | wide[1:], return_inverse=True)
    return len(pair) - 2 - len(np.unique(pair[:-2] << 32 | pair[2:]))


def reflections(text: str) -> int:
    """Return the number of words of reflection in the text, such as "wait", "however" and "check again"."""
    return len(REFLECTION.findall(text.lower()))  # faster than a pattern that ignores case
