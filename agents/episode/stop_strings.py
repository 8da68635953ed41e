"""Texts that end an answer, for engines that know ids only: the completion is cut behind the token that completed one.

Sampling goes from left to right, so what is kept is what an engine that looks at the text would have sampled. The text
of the answer ends before the stop; its ids hold it, since the model chose them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..engines.engine import Completion


def cut(completion: Completion, stops: Sequence[str], decode: Callable[[Any], str] | None) -> Completion:
    """The completion up to the first of `stops`. `decode`: ids -> text; None for an engine of texts."""
    at = _first(completion.text or "", stops)
    if at is None:
        return completion
    text = (completion.text or "")[:at]
    if completion.ids is None or decode is None:
        return replace(completion, text=text, finish="stop")
    n = _length(completion.ids, stops, decode)
    return replace(
        completion,
        text=text,
        finish="stop",
        ids=completion.ids[:n],
        logprobs=completion.logprobs[:n] if completion.logprobs is not None else None,
        spans=tuple((version, start, min(end, n)) for version, start, end in completion.spans if start < n),
    )


def _first(text: str, stops: Sequence[str]) -> int | None:
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)


def _length(ids: Any, stops: Sequence[str], decode: Callable[[Any], str]) -> int:
    """The fewest leading ids whose text holds a stop."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if _first(decode(ids[:middle]), stops) is None:
            low = middle + 1
        else:
            high = middle
    return low
