"""The interface between the agent's model interface (`LLM`) and the engines that sample tokens.

Every engine has the members of `Engine`. In addition, an engine may have capabilities, which are listed in
`Engine.can`. `MEMBERS` lists the members that each capability needs. Callers first check for the capability, for
example with `"score" in engine.can`, and then use its members. `check_engine` tests an engine against this interface.

All episodes of a run share one engine. An engine may own a renderer, which turns messages into token ids with the
model's tokenizer. A request always carries messages. If the engine has a renderer, the request carries the prompt's
token ids as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast, runtime_checkable

from ...tapes.common.redact import without_secrets
from ...tapes.errors import RunStopped, StopReason, TapereelError, UsageError, error_message
from ...tapes.places import Place
from ...tapes.records import Attempt, Constraint, Message, Sampling, Usage
from ..rendering.answer_grammar import Grammar

if TYPE_CHECKING:
    from torch import Tensor

    from ..rendering.renderer import Renderer

Finish = Literal["stop", "length", "tool_calls", "abort", "cancelled", "error"]
SyncMode = Literal["reprefill", "drain"]
"""What happens to completions in flight when weights change. `reprefill`: their KV cache is recomputed with the new
weights, and then they continue (exact). `drain`: they finish with the old weights while new requests wait (exact,
slower)."""
PublishMode = Literal["reprefill", "drain", "stale_kv", "abort"]
"""The modes of engines that support more than `SyncMode`. `abort`: completions in flight end, and the tokens sampled so
far are recorded. `stale_kv`: completions continue with the KV cache of the old weights. Their log-probs then belong to
no version, so this mode is for experiments only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one request. An engine without a renderer sets ids and log-probs to None, never to empty arrays."""

    text: str | None
    """The text, without the token that ends the turn."""
    ids: array[int] | None = None
    """Sampled ids (int32), including the id that ends the turn."""
    logprobs: array[float] | None = None
    """log softmax(logits / temperature) of each id (float32, same length as `ids`)."""
    barred: tuple[int, ...] | None = None
    """All ids that the engine excluded from the first `Sampling.min_tokens` tokens. None means that the engine doesn't
    know which ids were excluded, so the answer can't be used as RL data."""
    spans: tuple[tuple[str, int, int], ...] = ()
    """(policy version, start, end) of each run of `ids`. The spans are half-open and contiguous, and cover all ids."""
    finish: Finish = "stop"
    tool_calls: tuple[dict[str, Any], ...] | None = None
    usage: Usage = Usage()
    attempts: tuple[Attempt, ...] = ()
    """All attempts if the engine had to retry the request, with the successful attempt last. Otherwise empty."""
    enforced: bool = False
    """Whether the engine sampled only tokens that `Request.grammar` allows. Such an answer can't be used as RL data."""
    engine: str = ""
    """Name of the engine that answered, if a `TeamEngine` chose it. Otherwise empty."""


@runtime_checkable
class Listener(Protocol):
    """Receives the tokens of one request while they are sampled. The engine calls the methods in the event loop, so
    they must return at once and must not raise."""

    def tokens(self, ids: array[int], /) -> None:
        """Receive the ids sampled since the last call, in order. All ids received so far, or since the last call of
        `again`, are the first ids of the completion."""
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
    """Where the pictures are in the prompt ids, in order. `picture` returns the bytes of their files."""
    sampling: Sampling
    seed: int
    """A 64-bit seed. The same seed, prompt and weights give the same tokens, regardless of other running requests."""
    tools: tuple[dict[str, Any], ...] | None = None
    constraint: Constraint | None = None
    """The form that the agent demands of the answer. An engine enforces `grammar` instead."""
    grammar: Grammar = ()
    """The completion must be one of these alternatives. Empty if any text is allowed. Only an engine with the
    capability `grammar` gets one. `Sampling.min_tokens` and `ignore_eos` don't apply to such a request."""
    path: str = ""
    """Path of the agent that sends the request, for replay and logs. It must not influence what is sampled."""
    number: int | None = None
    """How many requests the episode sent to this engine before this one, or None for a request outside an episode. A
    retry keeps its number, and a fork counts the calls that it inherited. Only a script of answers needs it."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the completion, in addition to the model's own. The completion includes the id that ended it."""
    cache_key: str = ""
    """Requests with the same key belong to one conversation. An engine may keep the KV cache between them."""
    on_partial: Callable[[Completion], None] | None = field(default=None, compare=False)
    """Called once if the request is cancelled, before CancelledError is raised. It gets the completion so far."""
    on_start: Callable[[], None] | None = field(default=None, compare=False)
    """Called when the model begins to work on the request, if the engine can tell. Until the first call, the request
    counts as waiting in the engine's queue (`agents/episode/timers.py`). Further calls have no effect."""
    picture: Callable[[str], bytes] | None = field(default=None, compare=False)
    """Returns the bytes of the PNG file that a content part `{"type": "image", "media": ...}` names. This call blocks,
    and raises BadPicture if the picture isn't on the tape."""
    listener: Listener | None = field(default=None, compare=False)
    """Receives tokens while they are sampled, if the engine can stream. The listener must not influence what is
    sampled."""


Capability = Literal["pictures", "stats", "weights", "copies", "sleep", "score", "absence", "recorded", "grammar"]
"""What an engine can do in addition to sampling."""
TRAINING: tuple[Capability, ...] = ("stats", "weights")
"""The capabilities that the training loop needs. Every `TrainableEngine` has them."""


class Engine(Protocol):
    """Samples completions. All methods run in one event loop. There may be many calls of `complete` at the same time,
    one from each episode that waits for an answer."""

    @property
    def name(self) -> str:
        """Name of the engine, which is recorded with each call. It is constant."""
        ...

    @property
    def can(self) -> frozenset[Capability]:
        """The engine's capabilities. The set is constant. The engine has every member that `MEMBERS` lists for them.

        `pictures`: it accepts content parts with pictures in messages. `stats`: it measures its busy time. `weights`:
        its weights can be replaced while it samples. `copies`: it has several copies of the weights, such as one on
        each server. `sleep`: it can free its GPU memory. `score`: it computes log-probs of given tokens, so its model
        can be a teacher. `absence`: it waits for servers that don't answer. `recorded`: it returns recorded answers.
        `grammar`: it samples only tokens that `Request.grammar` allows, and then sets `Completion.enforced`."""
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
        of the model or its server. If the call is cancelled, the engine passes the tokens sampled so far to
        `request.on_partial` and then raises CancelledError."""
        ...

    def forget(self, cache_key: str) -> None:
        """Drop everything cached under this key, because the conversation has ended. An unknown key is ignored."""
        ...

    async def close(self) -> None:
        """Release all resources. Requests in flight end as `abort` or raise EngineError. A second call does nothing."""
        ...


class EngineStats(Protocol):
    """Measurements of an engine, for computing performance metrics."""

    @property
    def busy_seconds(self) -> float:
        """Wall time in seconds during which the engine has had work since it was created. It never decreases."""
        ...


class TrainableEngine(Engine, Protocol):
    """An engine with the capabilities in `TRAINING`. The training loop can replace its weights while it samples."""

    @property
    def stats(self) -> EngineStats:
        """Totals since the engine was created. They may be read at any time and from any thread."""
        ...

    @property
    def version(self) -> str:
        """Name of the current weights. The spans of tokens sampled from now on carry this name."""
        ...

    @property
    def changing(self) -> bool:
        """Whether a new request would wait because a weight sync is in progress."""
        ...

    async def sync_weights(self, state: Mapping[str, Tensor], version: str, mode: SyncMode = ...) -> None:
        """Replace the weights with `state` (a state dict with Hugging Face names) and call them `version`.

        The loop calls this from the engine's event loop while completions are in flight. It never makes two calls at
        the same time, and doesn't change `state` until the call returns.

        Raises ValueError, and changes nothing, if `version` was used before or `state` isn't a state dict of the model.
        A version names one set of weights only. After any other exception, the engine's weights are unknown, and it
        must refuse later requests."""
        ...


class EngineAbsence(Protocol):
    """Measures how long an engine waits for servers that don't answer."""

    @property
    def seconds(self) -> float:
        """Seconds that the engine has spent waiting since it was created, because no server answered."""
        ...

    async def over(self) -> None:
        """Wait until requests are answered again, or until no request waits for an answer."""
        ...


class Budget(Protocol):
    """An episode's token budget, with the members that `CapableEngine.granted` reads."""

    @property
    def limit(self) -> int | None:
        """Number of tokens allowed in the whole episode, or None for no limit."""
        ...

    @property
    def spent(self) -> bool:
        """Whether no token is left."""
        ...


Sampler = Callable[[Request], Awaitable[Completion]]
"""A function like `Engine.complete` that samples from one particular copy of the engine's weights."""


class CapableEngine(TrainableEngine, Protocol):
    """The members of all capabilities, for type checkers. An engine may lack some of them, so check `engine.can` first.
    A call then looks like `cast(CapableEngine, engine).sleep()`."""

    @property
    def samplers(self) -> Mapping[str, Sampler]:
        """For the capability `copies`: a function for each copy of the weights, by the copy's name. The function
        samples with this copy. The training loop uses these functions to check that new weights reached every copy."""
        ...

    @property
    def absence(self) -> EngineAbsence:
        """For the capability `absence`: how long the engine has waited for servers that don't answer."""
        ...

    async def sleep(self) -> None:
        """For the capability `sleep`: free the GPU memory while the trainer computes. Requests in flight
        end as `abort`, and later ones raise EngineError until `wake`. Does nothing if the engine is already asleep."""
        ...

    async def wake(self) -> None:
        """For the capability `sleep`: take the GPU memory back and sample again. Does nothing if the engine is
        awake."""
        ...

    async def score(
        self, ids: Sequence[int], places: Sequence[Place] = (), picture: Callable[[str], bytes] | None = None
    ) -> array[float]:
        """For the capability `score`: return log softmax(logits) at temperature 1 for each of `ids[1:]`, given all ids
        before it. The result has len(ids) - 1 values (float32, nats). `places` and `picture` are the same as in
        `Request`. They are given only if there are pictures and the engine has the capability `pictures` too. May be
        called concurrently. Raises `PromptTooLong` and `EngineError` as `complete` does."""
        ...

    async def granted(self, request: Request, budget: Budget) -> int | None:
        """For the capability `recorded`: return how many tokens of the episode's limit this request gets in the replay,
        or None if the request wasn't recorded. A call with `first_temperature` is one request here, although sampling
        it takes two."""
        ...

    def seed_of(self, request: Request, seeds: Callable[[int], int]) -> int:
        """For the capability `recorded`: return the seed of the recorded call that this request repeats. `seeds` gives
        the seed of the request if it were the n-th of its conversation, counted from 0."""
        ...


MEMBERS: Mapping[Capability, tuple[str, ...]] = {
    "pictures": (),
    "stats": ("stats",),
    "weights": ("version", "changing", "sync_weights"),
    "copies": ("samplers",),
    "sleep": ("sleep", "wake"),
    "score": ("score",),
    "absence": ("absence",),
    "recorded": ("granted", "seed_of"),
    "grammar": (),
}
"""The members of `CapableEngine` that each capability needs."""
_ALWAYS = ("name", "can", "renderer", "context", "complete", "forget", "close")
_METHODS = ("complete", "forget", "close", "sync_weights", "sleep", "wake", "score", "granted", "seed_of")


def incomplete(engine: object) -> list[str]:
    """Return one sentence for each member of `Engine` that the object lacks. Without these members it can't even
    sample."""
    missing = _missing(engine, _ALWAYS)
    return [f"it lacks {', '.join(missing)} of `Engine`: define them"] if missing else []


def undeclared(engine: Engine, needs: Iterable[Capability] = ()) -> list[str]:
    """Return one sentence for each fault in `engine.can`. A fault is a capability that doesn't exist, a capability
    whose members are missing, or a capability in `needs` that isn't declared."""
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
    """Check that `engine` is an Engine with the capabilities in `needs`, and raise UsageError if it isn't. `use` names
    the component that needs them, for the error message."""
    faults = incomplete(engine) or undeclared(cast(Engine, engine), needs)
    if faults:
        raise UsageError(
            f"{use} can't use the engine {type(engine).__qualname__}: {'; '.join(faults)} (tapereel.check_engine tests "
            "an engine)"
        )


BLIND = (
    "use a hosted model that takes pictures (engine.kind: litellm), a vision model, or an environment that shows text"
)
"""Advice for error messages about an engine that accepts no pictures."""


def absence_of(engine: Engine | None) -> EngineAbsence | None:
    """Return `engine.absence`, or None if the engine doesn't have the capability `absence`."""
    return cast(CapableEngine, engine).absence if engine is not None and "absence" in engine.can else None


class EngineError(TapereelError, RuntimeError):
    """The model or its server failed. The episode ends with the cause `model`, unless the agent handles the error."""

    def __init__(self, message: str, *, retry: bool = False) -> None:
        super().__init__(message)
        self.retry = retry
        """Whether the same request may succeed if it is repeated a moment later."""
        self.attempts: tuple[Attempt, ...] = ()
        """All attempts if the engine retried the request. Otherwise empty."""

    def __reduce__(self) -> tuple[object, ...]:
        # The arguments of a subclass may differ from `args`, which pickle would call it with.
        return _unpickled, (type(self), Exception.__str__(self), self.__dict__)


def _unpickled(kind: type[EngineError], message: str, state: dict[str, object]) -> EngineError:
    error = kind.__new__(kind, message)
    error.__dict__.update(state)
    return error


class EngineStopped(EngineError, RunStopped):
    """No later request can succeed, either because no server answers or because the API key, the model or the budget
    was refused. The episode and the run end with the cause `model`, whatever the agent does."""

    def __init__(self, message: str, reason: StopReason) -> None:
        super().__init__(message)
        self.reason = reason

    def at(self, progress: str, engines: Sequence[str] = ()) -> EngineStopped:
        """Return this error with a longer message, which adds the run's progress and how to resume the run. `engines`
        names the engine settings that may have another `model` in the resumed run."""
        go_on = "repeat it with `resume=True` for the others"
        if self.reason == "model" and engines:
            names = " or ".join(f"{engine}.model" for engine in engines)
            go_on = f"correct that model's name ({names}) or its address, and repeat it with `resume=True`"
        elif self.reason == "model":
            go_on += " when a server has that model, or choose another path (`out=...`) for another model"
        return EngineStopped(f"{self}. {progress}; {go_on}", self.reason)


class PromptTooLong(EngineError, ValueError):
    """The prompt leaves no room for a completion. The episode ends with the limit `context`."""


class GrammarRefused(EngineError, ValueError):
    """The engine can't enforce the grammar, for example because a JSON schema is invalid or has a keyword that the
    engine doesn't know."""


def one_temperature(request: Request) -> None:
    """Raise EngineError if a request has `first_temperature`. An engine samples each request at one temperature. The
    agent's model interface therefore makes two requests for a call with two temperatures (`agents/episode/fire.py`)."""
    if request.sampling.first_temperature is not None:
        raise EngineError(
            f"first_temperature={request.sampling.first_temperature:g} takes two requests: ask with "
            "tapereel.agents.episode.fire.complete(engine, request), as the agent's model interface does"
        )


def error_text(error: Exception) -> str:
    """Return the error's type and message. Secrets from a server or library are removed, because tapes are shared."""
    return f"{type(error).__name__}: {without_secrets(error_message(error))}"
