"""The interface between the agent's model interface (`LLM`) and the engines that sample tokens.

Every engine has the members of `Engine`. The set `Engine.can` names what an engine can do in addition to sampling, and
`MEMBERS` lists the members that each of these capabilities needs. Callers ask `"score" in engine.can` before they use
one of these members. `check_engine` tests an engine against this interface.

All episodes of a run share one engine. An engine owns its renderer, because the tokenizer belongs to the model. A
request always carries messages. If the engine has a renderer, the request carries prompt token ids as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from ...tapes.common.redact import without_secrets
from ...tapes.errors import RunStopped, StopReason, TapereelError, UsageError, error_message
from ...tapes.places import Place
from ...tapes.records import Attempt, Message, Sampling, Usage

if TYPE_CHECKING:
    from torch import Tensor

    from ..rendering.renderer import Renderer

Finish = Literal["stop", "length", "tool_calls", "abort", "cancelled", "error"]
SyncMode = Literal["reprefill", "drain"]
"""What happens to completions in flight when weights change. `reprefill`: they continue, and the new weights compute
their KV cache again (exact). `drain`: they finish with the old weights, while new requests wait (exact, slower)."""
PublishMode = Literal["reprefill", "drain", "stale_kv", "abort"]
"""The modes of engines that support more than `SyncMode`. `abort`: completions in flight end, and their tokens so far
are recorded. `stale_kv`: they continue on the old KV, and their log-probs belong to no version, so it is for
experiments only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one request. An engine without a renderer has None for ids and log-probs, never empty arrays."""

    text: str | None
    """The text without the turn-ending token."""
    ids: array[int] | None = None
    """Sampled ids, including the turn-ending one (int32)."""
    logprobs: array[float] | None = None
    """log softmax(logits / temperature) of each id (float32). It has the same length as `ids`."""
    barred: tuple[int, ...] | None = None
    """All ids that the engine excluded from the distribution of the first tokens because of `Sampling.min_tokens`. None
    means that the engine can't say, so the answer can't be used as RL data."""
    spans: tuple[tuple[str, int, int], ...] = ()
    """(policy version, start, end) over `ids`. The spans are half-open and contiguous, and cover all ids."""
    finish: Finish = "stop"
    tool_calls: tuple[dict[str, Any], ...] | None = None
    usage: Usage = Usage()
    attempts: tuple[Attempt, ...] = ()
    """All attempts at the request if the engine retries, with the successful one last. Empty after a single attempt."""
    engine: str = ""
    """Name of the engine that answered, as set by `TeamEngine`. Empty if it is the engine that was asked."""


class Listener(Protocol):
    """Receives the tokens of one request while they are sampled. The engine calls its methods in the event loop, so
    they must return at once and must not raise."""

    def tokens(self, ids: array[int], /) -> None:
        """Receive the ids sampled since the last call, in order. All ids received so far always form a prefix of the
        completion's ids."""
        ...

    def again(self) -> None:
        """Discard the ids received so far, because the attempt failed and the request starts again from its
        beginning."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to complete, and how to complete it."""

    messages: Sequence[Message]
    prompt: array[int] | None
    """All prompt ids (int32), or None for an engine without a renderer."""
    places: tuple[Place, ...] = ()
    """Which prompt ids stand for pictures, in order. `picture` returns the bytes of their files."""
    sampling: Sampling
    seed: int
    """A 64-bit seed. The same seed, prompt and weights give the same tokens, regardless of other running requests."""
    tools: tuple[dict[str, Any], ...] | None = None
    path: str = ""
    """Path of the agent that asks, for replay and logs. It must not change what is sampled."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the completion, in addition to the model's own. The id that ends it is part of the completion."""
    cache_key: str = ""
    """Requests with the same key continue one conversation, so an engine may keep its KV cache between them."""
    on_partial: Callable[[Completion], None] | None = field(default=None, compare=False)
    """Called once when the request is cancelled, with what was sampled so far, before CancelledError is raised."""
    on_start: Callable[[], None] | None = field(default=None, compare=False)
    """Called once when the model begins to work on the request, if the engine can tell. The time before that is counted
    as the engine's queue (`agents/episode/timers.py`)."""
    picture: Callable[[str], bytes] | None = field(default=None, compare=False)
    """Returns the PNG of the file that a content part `{"type": "image", "media": ...}` names. The call blocks. It
    raises BadPicture if the picture isn't on the tape."""
    listener: Listener | None = field(default=None, compare=False)
    """Receives tokens while they are sampled. An engine that can't stream never calls it. It must not change what is
    sampled."""


Capability = Literal["pictures", "stats", "weights", "copies", "sleep", "score", "absence", "recorded"]
"""What an engine can do in addition to sampling."""
TRAINING: tuple[Capability, ...] = ("stats", "weights")
"""The capabilities that the training loop needs. A `TrainableEngine` has them."""


class Engine(Protocol):
    """Samples completions. All methods run in one event loop. `complete` is called concurrently, once for each episode
    that waits for an answer."""

    @property
    def name(self) -> str:
        """Name of the engine, which each recorded call carries. It is constant."""
        ...

    @property
    def can(self) -> frozenset[Capability]:
        """What the engine can do. The set is constant. An engine has every member that `MEMBERS` lists for its
        capabilities.

        `pictures`: it accepts content parts with pictures in messages. `stats`: it measures its busy time. `weights`:
        its weights can be replaced while it samples. `copies`: it has several copies of the weights, such as one on
        each server. `sleep`: it can free its GPU memory. `score`: it computes log-probs of given tokens, so its model
        can be a teacher. `absence`: it waits for servers that don't answer. `recorded`: it returns recorded answers."""
        ...

    @property
    def renderer(self) -> Renderer | None:
        """The renderer of this engine's model, or None for an engine that works with text only. It is constant."""
        ...

    @property
    def context(self) -> int | None:
        """Maximum number of tokens in prompt and completion together, or None if no limit is known."""
        ...

    async def complete(self, request: Request) -> Completion:
        """Sample one completion. May be called any number of times concurrently.

        Raises `PromptTooLong` if the prompt leaves no room for a completion, and `EngineError` for every other failure
        of the model or its server. If the call is cancelled, it calls `request.on_partial` with the tokens sampled so
        far, then raises CancelledError."""
        ...

    def forget(self, cache_key: str) -> None:
        """Drop what is cached under this key, because its conversation has ended. An unknown key is ignored."""
        ...

    async def close(self) -> None:
        """Release all resources. Requests in flight end as `abort` or raise EngineError. A second call does nothing."""
        ...


class EngineStats(Protocol):
    """The measurements that performance metrics read."""

    @property
    def busy_seconds(self) -> float:
        """Wall time in seconds during which the engine has had work since it was created. It never decreases."""
        ...


class TrainableEngine(Engine, Protocol):
    """An engine with the capabilities in `TRAINING`, whose weights the training loop can replace while it samples."""

    @property
    def stats(self) -> EngineStats:
        """Sums since the engine was created. They may be read at any time and from any thread."""
        ...

    @property
    def version(self) -> str:
        """Name of the current weights, which the spans of tokens sampled from now on carry."""
        ...

    @property
    def changing(self) -> bool:
        """Whether a new request would wait because a weight sync is in progress."""
        ...

    async def sync_weights(self, state: Mapping[str, Tensor], version: str, mode: SyncMode = ...) -> None:
        """Replace the weights by `state` (a state dict with Hugging Face names). `version` then names them.

        The loop calls this from the engine's event loop while completions are in flight. It never makes two calls at
        once, and doesn't change `state` until the call returns. Each version names one set of weights. Raises
        ValueError, before anything changes, if a version was used before or if `state` isn't the model's. Any other
        exception means that the weights are unknown, so the engine must refuse every later request."""
        ...


class EngineAbsence(Protocol):
    """How long an engine waits for its servers."""

    @property
    def seconds(self) -> float:
        """Seconds since the engine was created during which no request was answered. It grows while the servers are
        away."""
        ...

    async def over(self) -> None:
        """Wait until requests are answered again, or until no request waits for an answer."""
        ...


class Budget(Protocol):
    """The part of an episode's token budget that `CapableEngine.granted` reads."""

    @property
    def limit(self) -> int | None:
        """Number of tokens allowed in the whole episode, or None for no limit."""
        ...

    @property
    def spent(self) -> bool:
        """Whether no token is left."""
        ...


Sampler = Callable[[Request], Awaitable[Completion]]
"""`complete` of one copy of an engine's weights."""


class CapableEngine(TrainableEngine, Protocol):
    """The members of all capabilities, for type checkers. Check `engine.can` first, then call `cast(CapableEngine,
    engine).sleep()`. No engine needs all of them."""

    @property
    def samplers(self) -> Mapping[str, Sampler]:
        """`copies`: name of each copy -> its sampler. The delivery of weights is checked on every copy."""
        ...

    @property
    def absence(self) -> EngineAbsence:
        """`absence`: the engine's waits for its servers."""
        ...

    async def sleep(self) -> None:
        """`sleep`: free the GPU memory while the trainer computes (`loop.sleep`). Requests in flight end as `abort`,
        and later ones raise EngineError until `wake`. Does nothing if the engine is already asleep."""
        ...

    async def wake(self) -> None:
        """`sleep`: take the GPU memory back and sample again. Does nothing if the engine is awake."""
        ...

    async def score(
        self, ids: Sequence[int], places: Sequence[Place] = (), picture: Callable[[str], bytes] | None = None
    ) -> array[float]:
        """`score`: return log softmax(logits) at temperature 1 for each of `ids[1:]`, given all ids before it. The
        result has len(ids) - 1 values (float32, nats). `places` and `picture` are as in `Request`, and are given only
        if there are pictures and the engine also has `pictures`. May be called concurrently. Raises `PromptTooLong` and
        `EngineError` as `complete` does."""
        ...

    async def granted(self, request: Request, budget: Budget) -> int | None:
        """`recorded`: return the `max_tokens` that this request was granted when it was recorded, or None if it wasn't
        recorded. One recorded call is one request, even if sampling it took two."""
        ...


MEMBERS: Mapping[Capability, tuple[str, ...]] = {
    "pictures": (),
    "stats": ("stats",),
    "weights": ("version", "changing", "sync_weights"),
    "copies": ("samplers",),
    "sleep": ("sleep", "wake"),
    "score": ("score",),
    "absence": ("absence",),
    "recorded": ("granted",),
}
"""Capability -> the members of `CapableEngine` that it needs."""
_ALWAYS = ("name", "can", "renderer", "context", "complete", "forget", "close")
_METHODS = ("complete", "forget", "close", "sync_weights", "sleep", "wake", "score", "granted")


def incomplete(engine: object) -> list[str]:
    """Return the faults of an engine that can't even sample, as one sentence each. They name the members of `Engine`
    that it lacks."""
    missing = _missing(engine, _ALWAYS)
    return [f"it lacks {', '.join(missing)} of `Engine`: define them"] if missing else []


def undeclared(engine: Engine, needs: Iterable[Capability] = ()) -> list[str]:
    """Return the faults of `engine.can`, as one sentence each: a capability that doesn't exist, one whose members are
    missing, or one from `needs` that isn't declared."""
    can: object = engine.can
    if not isinstance(can, Set) or not can <= MEMBERS.keys():
        return [f"its `can` is {can!r}: give a frozenset of some of {', '.join(map(repr, MEMBERS))}"]
    lacks = {name: ", ".join(_missing(engine, MEMBERS[name])) for name in MEMBERS}
    return [
        f"its `can` has {name!r}, but it lacks {lacks[name]}: define them, or remove {name!r} from `can`"
        for name in MEMBERS
        if name in can and lacks[name]
    ] + [
        f"its `can` lacks {name!r}: {f'define {lacks[name]} and ' if lacks[name] else ''}add {name!r} to `can`"
        for name in needs
        if name not in can
    ]


def _missing(engine: object, names: Iterable[str]) -> list[str]:
    absent = object()
    found = {name: getattr(engine, name, absent) for name in names}
    return [name for name, value in found.items() if value is absent or (name in _METHODS and not callable(value))]


def require(engine: object, needs: Iterable[Capability], use: str) -> None:
    """Raise UsageError if `engine` isn't an Engine with the capabilities `needs`. `use` names what needs them."""
    faults = incomplete(engine) or undeclared(cast(Engine, engine), needs)
    if faults:
        raise UsageError(
            f"{use} can't use the engine {type(engine).__qualname__}: {'; '.join(faults)} (tapereel.check_engine tests "
            "an engine)"
        )


BLIND = (
    "use a hosted model that takes pictures (engine.kind: litellm), a vision model, or an environment that shows text"
)
"""What the user can do if an engine can't see."""


def absence_of(engine: Engine | None) -> EngineAbsence | None:
    """Return `absence` of an engine that waits for its servers, or None for any other engine."""
    return cast(CapableEngine, engine).absence if engine is not None and "absence" in engine.can else None


class EngineError(TapereelError, RuntimeError):
    """The model or its server failed. The episode ends with the cause `model`, unless the agent handles the error."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry
        """Whether the same request may succeed a moment later."""
        self.attempts: tuple[Attempt, ...] = ()
        """All attempts if the engine retries. Empty after a single attempt."""


class EngineStopped(EngineError, RunStopped):
    """No later request can succeed, because no server answers, or because the key, the model or the budget is refused.
    The episode and the run end with the cause `model`, whatever the agent does."""

    def __init__(self, message: str, reason: StopReason) -> None:
        super().__init__(message)
        self.reason = reason

    def at(self, progress: str, engines: Sequence[str] = ()) -> EngineStopped:
        """Return the same error with the progress of the run and instructions for continuing it. `engines` names the
        settings whose `model` may differ in a resumed run."""
        go_on = "repeat it with `resume=True` for the others"
        if self.reason == "model" and engines:
            names = " or ".join(f"{engine}.model" for engine in engines)
            go_on = f"correct that model's name ({names}) or its address, and repeat it with `resume=True`"
        elif self.reason == "model":
            go_on += " when a server has that model, or choose another path (`out=...`) for another model"
        return EngineStopped(f"{self}. {progress}; {go_on}", self.reason)


class PromptTooLong(EngineError, ValueError):
    """The prompt leaves no room for a completion. The episode ends with the limit `context`."""


def one_temperature(request: Request) -> None:
    """Raise EngineError if a request has `first_temperature`, because sampling it takes two requests. Engines call
    this."""
    if request.sampling.first_temperature is not None:
        raise EngineError(
            f"first_temperature={request.sampling.first_temperature:g} takes two requests: ask with "
            "tapereel.agents.episode.fire.complete(engine, request), as the agent's model interface does"
        )


def error_text(error: Exception) -> str:
    """Return the type and message of an error without the secrets of a server or library, because tapes are shared."""
    return f"{type(error).__name__}: {without_secrets(error_message(error))}"
