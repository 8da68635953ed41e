"""FIRE: the first token of an answer at a temperature of its own (often 10), the rest as ever.

A hot first token spreads the attempts of a group over more beginnings than their model alone would choose, at the price
of some that it would never have begun with. As in the published algorithm, with these deviations:

1. It is two requests to the engine, prompt and prompt + first token, so any engine of tokens can do it; the second has
   a seed of its own, or both would be drawn with the same random number.
2. The log-prob of the first token is that at its own temperature, and training scores it there: both parts are drawn
   exactly, so the answer is RL data like any other.
3. A first token that ends the answer, or one that uses up the limit, is the whole answer, and nothing more is asked.

Knows nothing of tapes.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace

from ...tapes.records import Sampling, Usage
from ..engines.engine import Completion, Engine, EngineError, Listener, PromptTooLong, RecordedEngine, Request
from .seeds import derive_seed

Spans = tuple[tuple[str, int, int], ...]


async def complete(engine: Engine, request: Request) -> Completion:
    """`engine.complete`, in two parts where the first token has a temperature of its own. One of a tape's answers is
    given whole, as it was recorded."""
    hot = request.sampling.first_temperature
    if hot is None or isinstance(engine, RecordedEngine):
        return await engine.complete(request)
    if request.prompt is None:
        raise EngineError(
            f"first_temperature={hot:g}: {engine.name} takes and gives texts, and only an engine of "
            "tokens can go on behind a first token; leave sampling.first_temperature out"
        )
    plain = request.sampling.model_copy(update={"first_temperature": None})
    first = await engine.complete(replace(_part(request, plain, temperature=hot, max_tokens=1), listener=None))
    left = request.sampling.max_tokens - len(first.ids or ())
    if first.ids is None or first.finish != "length" or left < 1:
        return first
    rest = replace(
        _part(request, plain, temperature=plain.temperature, max_tokens=left),
        prompt=request.prompt + first.ids,
        seed=derive_seed(request.seed, "rest"),
        listener=_Rest(request.listener, first.ids) if request.listener is not None else None,
    )
    return await _with_rest(engine, request, first, rest)


class _Rest:
    """Tells of the first token when the second is there."""

    def __init__(self, listener: Listener, first: array[int]) -> None:
        self._listener, self._first, self._told = listener, first, False

    def tokens(self, ids: array[int]) -> None:
        self._listener.tokens(ids if self._told else self._first + ids)
        self._told = True

    def again(self) -> None:
        self._told = False
        self._listener.again()


def _part(request: Request, sampling: Sampling, **changes: float) -> Request:
    return replace(request, sampling=sampling.model_copy(update=changes))


async def _with_rest(engine: Engine, request: Request, first: Completion, rest: Request) -> Completion:
    told = False

    def on_partial(found: Completion) -> None:
        nonlocal told
        told = True
        if request.on_partial is not None:
            request.on_partial(_joined(engine, first, found))

    try:
        return _joined(engine, first, await engine.complete(replace(rest, on_partial=on_partial)))
    except PromptTooLong:
        return first  # which took the last place in the context
    except asyncio.CancelledError:
        if not told and request.on_partial is not None:
            request.on_partial(replace(first, finish="cancelled"))
        raise


def _joined(engine: Engine, first: Completion, rest: Completion) -> Completion:
    assert first.ids is not None
    ids = first.ids + (rest.ids or array("i"))
    logprobs = None
    if first.logprobs is not None and rest.logprobs is not None:
        logprobs = first.logprobs + rest.logprobs
    usage = Usage(
        prompt_tokens=first.usage.prompt_tokens,
        completion_tokens=len(ids),
        cached_tokens=first.usage.cached_tokens,
        cost=_sum(first.usage.cost, rest.usage.cost),
    )
    text = engine.renderer.decode(ids) if engine.renderer is not None else (first.text or "") + (rest.text or "")
    return replace(
        rest,
        text=text,
        ids=ids,
        logprobs=logprobs,
        spans=_spans(first.spans, rest.spans, len(first.ids)),
        usage=usage,
        attempts=(),
    )


def _spans(first: Spans, rest: Sequence[tuple[str, int, int]], n: int) -> Spans:
    """One after the other; neighbours of one version are one span."""
    spans = list(first)
    for version, start, end in rest:
        if spans and spans[-1][0] == version and spans[-1][2] == start + n:
            spans[-1] = (version, spans[-1][1], end + n)
        else:
            spans.append((version, start + n, end + n))
    return tuple(spans)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b
