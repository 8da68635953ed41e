"""Counts over one answer: repetitions among its tokens, and words of reflection in its text."""

from __future__ import annotations

import re
from collections.abc import Sequence

REFLECTION = re.compile(
    r"\b(?:wait|hmm|alternatively|however|actually|re-?check|re-?think|re-?try|re-?examine|double-check"
    r"|(?:check|try) again)\b"
)
"""The English words that count as reflection."""


def repeated(ids: Sequence[int]) -> int:
    """Return how many 4-grams of the token ids (n,) occurred before in the same answer: 0 if all differ, at most n -
    4."""
    # For 6 tokens, a set is 13 times as fast as sorting with NumPy. For 16,000 tokens, it takes 1.3 times as long.
    grams = [*zip(ids, ids[1:], ids[2:], ids[3:], strict=False)]
    return len(grams) - len(set(grams))


def reflections(text: str) -> int:
    """Return the number of words of reflection in the text, such as "wait", "however" and "check again"."""
    return len(REFLECTION.findall(text.lower()))  # faster than a pattern that ignores case
