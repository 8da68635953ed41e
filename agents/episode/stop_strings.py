"""Stop strings for engines that only know stop ids. The answer is cut after it was sampled."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from ...tapes import Sampling
from ...tapes.errors import BadArgument, short_repr
from ..engines.engine import Completion


def stop_strings(sampling: Sampling) -> Sequence[str]:
    """Return the strings that end an answer. Raises BadArgument if `extra.stop` is neither a string nor a list of
    strings, or if one is empty."""
    given = sampling.extra.get("stop")
    if not given:
        return ()
    found = [given] if isinstance(given, str) else given
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise BadArgument(f"sampling.extra['stop'] is {short_repr(given)}: give strings that aren't empty")
    return [str(one) for one in found]


def cut_at_stop(
    completion: Completion, stops: Sequence[str], decode: Callable[[Sequence[int]], str] | None
) -> Completion:
    """Return the completion, cut at its first stop string.

    `decode` turns ids into text. It is None for an engine without a renderer. Sampling goes from left to right, so an
    engine with stop strings would have sampled the same ids. The returned text ends before the stop string. The
    returned ids include the stop string, because the model sampled it.
    """
    at = _first_stop(completion.text or "", stops)
    if at is None:
        return completion
    text = (completion.text or "")[:at]
    if completion.ids is None or decode is None:
        return replace(completion, text=text, finish="stop")
    ids = completion.ids
    # Find the shortest prefix with a stop string. A longer prefix contains every stop string that a shorter one
    # contains, so bisection finds it.
    lengths = range(1, len(ids))
    n = 1 + bisect_left(lengths, True, key=lambda n: _first_stop(decode(ids[:n]), stops) is not None)
    return replace(
        completion,
        text=text,
        finish="stop",
        ids=ids[:n],
        logprobs=completion.logprobs[:n] if completion.logprobs is not None else None,
        spans=tuple((version, start, min(end, n)) for version, start, end in completion.spans if start < n),
    )


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
