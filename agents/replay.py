"""ReplayEngine: the recorded answers of one tape, given again in each path's own order.

Content is the assertion, never the key: the n-th request of a path gets the n-th answer of that path, and must be the
request that was recorded. So identical prompts, retries and concurrent sub-agents can't be mixed up.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from ..tapes import Call, Tape
from .engine import Completion, EngineError, Request


class Diverged(EngineError):
    """A request differs from the recorded one, or there is none left; names path, call, field and both values."""


class ReplayEngine:
    """Gives what `tape` recorded. With a renderer the prompt's token ids are compared as well."""

    name = "replay"

    def __init__(self, tape: Tape, *, renderer: Any | None = None) -> None:
        self._tape = tape
        self._renderer = renderer
        self._left: dict[str, list[Call]] = defaultdict(list)
        for call in reversed(tape.calls):
            if call.engine != "authored":
                self._left[call.by].append(call)

    @property
    def renderer(self) -> Any | None:
        return self._renderer

    @property
    def context(self) -> int | None:
        return None

    @property
    def left(self) -> int:
        """Recorded answers that nobody has asked for yet."""
        return sum(len(calls) for calls in self._left.values())

    async def complete(self, request: Request) -> Completion:
        calls = self._left[request.path]
        if not calls:
            raise Diverged(f"tape {self._tape.id}: {request.path!r} asks the model once more than was recorded")
        call = calls.pop()
        self._compare(call, request)
        if call.finish == "error":
            raise EngineError(
                call.attempts[-1].error or "the recorded call failed" if call.attempts else "recorded failure"
            )
        return Completion(
            text=call.text, ids=call.completion, logprobs=call.logprobs, spans=call.spans, finish=call.finish,
            tool_calls=call.tool_calls, usage=call.usage,
        )  # fmt: skip

    def forget(self, cache_key: str) -> None:
        """Nothing is kept by key."""

    async def close(self) -> None:
        """Nothing is held."""

    def _compare(self, call: Call, request: Request) -> None:
        recorded: list[tuple[str, Any, Any]] = [
            ("messages", self._tape.call_messages(call), list(request.messages)),
            ("sampling", call.sampling.model_dump(), request.sampling.model_dump()),
            ("seed", call.seed, request.seed),
        ]
        if request.prompt is not None and call.prompt is not None:
            recorded.append(("prompt", self._tape.call_prompt(call).tolist(), request.prompt.tolist()))
        for field, then, now in recorded:
            if then != now:
                raise Diverged(
                    f"tape {self._tape.id}, call {call.call} by {call.by!r}: `{field}` was "
                    f"{_short(then)}, it is now {_short(now)}"
                )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 600 else f"{text[:300]} ... {text[-300:]}"
