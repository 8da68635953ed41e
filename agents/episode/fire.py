"""FIRE sampling samples an answer's first token at its own temperature, often 10, and the rest at the usual one.

With a high first temperature, the attempts in a group begin in more different ways. The cost is that some of them begin
in a way that the model would never choose. This module implements the published algorithm with these deviations:

1. It makes two requests to the engine, one for the prompt and one for the prompt with the first token. Every engine
   that handles tokens therefore supports it. The second request has its own seed. With the same seed, it would draw
   its first token with the same random number as the answer's first token.
2. The log-prob of the first token is measured at the first temperature, and training scores the token at the same
   temperature. Both parts are sampled exactly, so the answer is on-policy data like any other.
3. If the first token ends the answer or reaches the token limit, it is the whole answer, and no second request is sent.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import replace

from ...tapes.records import Sampling, Usage
from ..engines.engine import Completion, Engine, EngineError, Listener, PromptTooLong, Request
from .seeds import derive_seed

Spans = tuple[tuple[str, int, int], ...]


async def complete(engine: Engine, request: Request) -> Completion:
    """Call `engine.complete`, or make two requests if the first token has its own temperature. All of an episode's
    requests go through here.

    An engine that returns recorded answers gets one request, because it returns each answer as a whole.
    """
    hot = request.sampling.first_temperature
    if hot is None or "recorded" in engine.can:
        return await engine.complete(request)
    if request.prompt is None:
        raise EngineError(
            f"sampling.first_temperature={hot:g} needs an engine of tokens, and {engine.name} has no renderer: "
            "remove sampling.first_temperature"
        )
    plain = request.sampling.model_copy(update={"first_temperature": None})
    first = await engine.complete(replace(_part(request, plain, temperature=hot, max_tokens=1), listener=None))
    left = request.sampling.max_tokens - len(first.ids or ())
    if first.ids is None or first.finish != "length" or left < 1:
        return first
    rest = replace(
        _part(request, plain, temperature=plain.temperature, max_tokens=left, min_tokens=max(plain.min_tokens - 1, 0)),
        prompt=request.prompt + first.ids,
        seed=derive_seed(request.seed, "rest"),
        listener=_Rest(request.listener, first.ids) if request.listener is not None else None,
    )
    return await _with_rest(engine, request, first, rest)


class _Rest:
    """The listener of the second request. It reports the answer's first token together with this request's tokens.

    If the second request is retried, the caller's listener discards the first token too (`Listener.again`), and then
    gets it again.
    """

    def __init__(self, listener: Listener, first: array[int]) -> None:
        self._listener, self._first, self._reported = listener, first, False

    def tokens(self, ids: array[int]) -> None:
        self._listener.tokens(ids if self._reported else self._first + ids)
        self._reported = True

    def again(self) -> None:
        self._reported = False
        self._listener.again()


def _part(request: Request, sampling: Sampling, **changes: float) -> Request:
    return replace(request, sampling=sampling.model_copy(update=changes))


async def _with_rest(engine: Engine, request: Request, first: Completion, rest: Request) -> Completion:
    """Return the first token followed by the second request's completion.

    If the second request is cancelled, `on_partial` still gets at least the first token.
    """
    reported = False

    def on_partial(found: Completion) -> None:
        nonlocal reported
        reported = True
        if request.on_partial is not None:
            request.on_partial(_joined(engine, first, found))

    try:
        return _joined(engine, first, await engine.complete(replace(rest, on_partial=on_partial)))
    except PromptTooLong:
        return first  # the first token filled the context
    except asyncio.CancelledError:
        if not reported and request.on_partial is not None:
            request.on_partial(replace(first, finish="cancelled"))
        raise


def _joined(engine: Engine, first: Completion, rest: Completion) -> Completion:
    assert first.ids is not None
    ids = first.ids + (rest.ids or array("i"))
    logprobs = None
    if first.logprobs is not None and rest.logprobs is not None:
        logprobs = first.logprobs + rest.logprobs
    costs = first.usage.cost, rest.usage.cost
    usage = Usage(
        prompt_tokens=first.usage.prompt_tokens,
        completion_tokens=len(ids),
        cached_tokens=first.usage.cached_tokens,
        cost=None if costs[0] is None or costs[1] is None else costs[0] + costs[1],
    )
    text = engine.renderer.decode(ids) if engine.renderer is not None else (first.text or "") + (rest.text or "")
    return replace(
        rest,
        text=text,
        ids=ids,
        logprobs=logprobs,
        barred=first.barred,
        spans=_spans(first.spans, rest.spans, len(first.ids)),
        usage=usage,
        attempts=(),
    )


def _spans(first: Spans, rest: Sequence[tuple[str, int, int]], n: int) -> Spans:
    """Return the spans of both parts. `rest` begins after `n` tokens. Adjacent spans of one version are merged."""
    spans = list(first)
    for version, start, end in rest:
        if spans and spans[-1][0] == version and spans[-1][2] == start + n:
            spans[-1] = (version, spans[-1][1], end + n)
        else:
            spans.append((version, start + n, end + n))
    return tuple(spans)
