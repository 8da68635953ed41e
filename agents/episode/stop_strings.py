"""Stop strings, for engines that only know stop ids: cuts a completion after the token that completes a stop string.

Sampling goes from left to right, so the kept ids are those that an engine with stop strings would have sampled. The
text ends before the stop string; the ids include it, because the model chose them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ..engines.engine import Completion


def cut(completion: Completion, stops: Sequence[str], decode: Callable[[Any], str] | None) -> Completion:
    """The completion up to the first stop string. decode: ids -> text; None for an engine of texts."""
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
    """The smallest number of leading ids whose text contains a stop string, by bisection.

    Bisection is right because a longer prefix contains every stop string of a shorter one.
    """
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if _first(decode(ids[:middle]), stops) is None:
            low = middle + 1
        else:
            high = middle
    return low
