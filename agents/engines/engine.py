"""The protocol between the door of an episode and whatever samples tokens.

An engine is shared by all episodes and knows nothing of tapes. It owns the renderer, since the tokenizer is the
model's. A request carries messages always, and prompt token ids where the engine has a renderer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from ...tapes.common.redact import without_secrets
from ...tapes.errors import TapereelError
from ...tapes.records import Attempt, Message, Sampling, Usage

Finish = Literal["stop", "length", "tool_calls", "abort", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one request gave. Ids and log-probs are absent (None) for an engine of texts, never empty stand-ins."""

    text: str | None
    """The text without the turn-ending token."""
    ids: array[int] | None = None
    """Sampled ids, the turn-ending one included (int32)."""
    logprobs: array[float] | None = None
    """log softmax(logits / temperature) of each id (float32), same length as `ids`."""
    spans: tuple[tuple[str, int, int], ...] = ()
    """(policy version, start, end) over `ids`, half-open, contiguous, covering all of it."""
    finish: Finish = "stop"
    tool_calls: tuple[dict[str, Any], ...] | None = None
    usage: Usage = Usage()
    attempts: tuple[Attempt, ...] = ()
    """Every try, the one that answered last, of an engine that tries again by itself; empty: there was one."""
    engine: str = ""
    """Name of the engine that answered, where another one was asked, as a team is; empty: the one that was asked."""


class Listener(Protocol):
    """Hears what is sampled for one request while it is. Called in the event loop, between other things: it must return
    at once and must not raise."""

    def tokens(self, ids: array[int], /) -> None:
        """Sampled since it was told last, in order. All that is told is what the completion's ids begin with."""
        ...

    def again(self) -> None:
        """What was told is void: that try failed, and the request is tried once more from its beginning."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing to complete."""

    messages: Sequence[Message]
    prompt: array[int] | None
    """All prompt ids (int32), or None for an engine without a renderer."""
    sampling: Sampling
    seed: int
    """64-bit. The same seed, prompt and weights give the same tokens, whatever else runs beside it."""
    tools: tuple[dict[str, Any], ...] | None = None
    path: str = ""
    """Who asks; for replay and logs. It must not change what is sampled."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the completion, beside the model's own; the id is part of the completion."""
    cache_key: str = ""
    """Requests with one key continue one conversation: an engine may keep its KV between them."""
    on_partial: Callable[[Completion], None] | None = field(default=None, compare=False)
    """Called once with what was sampled so far, before CancelledError is raised to the canceller."""
    listener: Listener | None = field(default=None, compare=False)
    """Told of tokens while they are sampled, where the engine can; one that can't never calls it. It must not change
    what is sampled."""


@runtime_checkable
class Engine(Protocol):
    """Samples completions. Implementations: `ScriptedEngine`, `ReplayEngine`, `EmbeddedEngine`, ..."""

    name: str
    """Written on each call."""

    @property
    def renderer(self) -> Any | None:
        """The `Renderer` of this engine's model, or None for an engine of texts."""
        ...

    @property
    def context(self) -> int | None:
        """Most tokens that prompt and completion may have together; None when there is no limit known."""
        ...

    async def complete(self, request: Request) -> Completion:
        """Sample. Raises `EngineError` for what is the model's or the server's fault, `PromptTooLong` when the prompt
        leaves no room. When cancelled, calls `request.on_partial` and raises CancelledError."""
        ...

    def forget(self, cache_key: str) -> None:
        """The conversation is over: whatever is kept under this key may go."""
        ...

    async def close(self) -> None:
        """Release what the engine holds; requests in flight end as `abort`."""
        ...


class EngineError(TapereelError, RuntimeError):
    """The model or its server failed; the episode ends with the cause `model`, unless the agent deals with it."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry
        """True where the same request may well succeed a moment later."""
        self.attempts: tuple[Attempt, ...] = ()
        """Every try of an engine that tries again by itself; empty: there was one."""


class PromptTooLong(EngineError, ValueError):
    """The prompt leaves no room for a completion; the episode ends with the limit `context`."""


def one_temperature(request: Request) -> None:
    """For engines: refuse what would be sampled otherwise than asked for. EngineError."""
    if request.sampling.first_temperature is not None:
        raise EngineError(
            f"first_temperature={request.sampling.first_temperature:g} takes two requests: ask with "
            "tapereel.agents.episode.fire.complete(engine, request), as the door of an episode does"
        )


def told(error: Exception) -> str:
    """Type and message of an error as a tape may hold it: without secrets that a server or library put there."""
    return f"{type(error).__name__}: {without_secrets(str(error))}"
