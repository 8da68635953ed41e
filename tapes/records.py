"""Records: the closed union, on `t`, of everything that is ever written to a run.

Tape records, from `begin` to `end`, are folded into the tape's digest; layers come any time later and never are; run
records have no tape. Bodies name tapes and calls by id, never by ordinal. This module knows nothing of files.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, JsonValue, SerializeAsAny, TypeAdapter, model_validator
from pydantic_core import PydanticSerializationError, to_json

from .arrays import Floats, Ints
from .sampling import Sampling
from .steps import Role, Step, Unknown, read_step, unwritable
from .value import Value

SCHEMA = "tapereel/1"
DIGEST_START = hashlib.sha256(SCHEMA.encode()).digest()
"""d0 of every digest; dk = SHA-256(dk-1 + body bytes of record k)."""

Message = dict[str, Any]
"""One chat message: `role`, `content` and, where they apply, `tool_calls`, `tool_call_id`, `name`."""


class Status(StrEnum):
    """How an episode ended. Decides whether it is trained on."""

    FINISHED = "finished"
    """The environment said `terminated`."""
    TRUNCATED = "truncated"
    """The environment said `truncated`."""
    LIMIT = "limit"
    """A limit of the rollout: turns, tokens, context or seconds (`cause.type` says which)."""
    ERROR = "error"
    """Something raised; `cause.type` says whose fault it is."""
    CANCELLED = "cancelled"
    """The caller stopped it."""
    CRASHED = "crashed"
    """The process died; written by recovery."""


class CauseType(StrEnum):
    """Whose fault an end is, or which limit was reached."""

    AGENT = "agent"
    ENVIRONMENT = "environment"
    MODEL = "model"
    OURS = "ours"
    TURNS = "turns"
    TOKENS = "tokens"
    CONTEXT = "context"
    SECONDS = "seconds"


TRAINABLE_LIMITS = frozenset({CauseType.TURNS, CauseType.TOKENS, CauseType.CONTEXT})


def trains(status: Status | None, cause: CauseType | None) -> bool:
    """The table that decides whether an episode may be trained on (if it is scored), and may be scored at its end.

    finished, truncated, a limit of turns, tokens or context, and an error of the agent's own: yes. A limit of seconds,
    an error of the environment, the model or ours, cancelled, crashed, still running: no.
    """
    if status in (Status.FINISHED, Status.TRUNCATED):
        return True
    if status is Status.LIMIT:
        return cause in TRAINABLE_LIMITS
    return status is Status.ERROR and cause is CauseType.AGENT


class Record(BaseModel):
    """Base of all records: frozen, and closed (an unknown field is refused)."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, ser_json_inf_nan="strings")

    def body(self) -> bytes:
        """The bytes that are written, hashed and folded into the digest: compact JSON in field order."""
        return to_json(self, inf_nan_mode="strings")


class Task(Value):
    """One problem instance. `private` is for the environment's eyes only."""

    id: str = ""
    """A name for people; empty when the source has none. Groups and splits go by `hash`, never by this."""
    public: JsonValue = None
    private: JsonValue = None
    """Answers and seeds. Never shown to an agent."""
    bare: bool = False
    """True when the task was given as a plain value (then `private` is that value, and `reset` gets it as it was)."""

    @classmethod
    def of(cls, value: Any) -> Task:
        """The task itself, or a bare value as the private part of one."""
        return value if isinstance(value, Task) else cls(private=value, bare=True)

    @property
    def given(self) -> Any:
        """What `Environment.reset` receives."""
        return self.private if self.bare else self

    @property
    def hash(self) -> str:
        """SHA-256 over the public and the private part (hex): one instance, one hash, whatever its name or the order of
        its keys."""
        parts = json.dumps([self.public, self.private], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(parts.encode()).hexdigest()


class Identity(Value):
    """Which code ran: its class and its configuration."""

    name: str
    cls: str = ""
    """`module:qualname`."""
    config: dict[str, JsonValue] = Field(default={})
    effect: Literal["pure", "idempotent", "irreversible"] | None = None
    """Environments only: what re-running an action would do to the world."""


class Parent(Value):
    """Where a fork was cut."""

    tape: str
    digest: str
    """The parent's digest (hex) after the last record of the prefix."""
    records: int
    """Tape records of the parent in the prefix, its `begin` included."""
    turn: int
    """Turns of the parent that the prefix holds."""
    unverified: str | None = None
    """Why the prefix couldn't be verified, where somebody went on from it all the same. None: it was, or nothing is
    told."""


class Begin(Record):
    """The first record of a tape: everything that was decided before the first step."""

    t: Literal["begin"] = "begin"
    tape: str
    task: Task
    task_hash: str
    agent: Identity
    env: Identity
    env_seed: int
    """Shared by a group: the environment's randomness."""
    seed: int
    """This attempt's sampling seed."""
    group: str | None = None
    attempt: int = 0
    """Which episode of its group."""
    split: str = "train"
    """`train`, `eval`, `demo` or a name of the caller's: what the tape was recorded for."""
    parent: Parent | None = None
    versions: dict[str, str] = {}
    """`package`, `python` and, where there is a renderer, `tokenizer` and `chat_template` (hashes)."""
    sampling: Sampling | None = None
    """How the run asked to sample; each call says how it was sampled. None on tapes that don't tell."""
    limits: dict[str, JsonValue] | None = None
    """What the episode might use, the engine's own context included. None on tapes that don't tell."""
    at: float
    """Seconds since 1970, wall clock."""

    def body(self) -> bytes:
        """As `Record.body`, without what a tape doesn't tell."""
        untold: dict[str, Any] = {field: True for field in ("sampling", "limits") if getattr(self, field) is None}
        if self.parent is not None and self.parent.unverified is None:
            untold["parent"] = {"unverified": True}
        if self.sampling is not None and self.sampling.first_temperature is None:
            untold["sampling"] = {"first_temperature": True}
        return to_json(self, inf_nan_mode="strings", exclude=untold or None)


class StepRecord(Record):
    """One step, and who produced it from which calls."""

    t: Literal["step"] = "step"
    tape: str
    by: str
    """The path of agent names that speaks (`planner/searcher`), or `env`."""
    role: Role
    kind: str
    calls: tuple[tuple[str, int, int], ...] = ()
    """(call id, start, end): the completion tokens that this step was read from."""
    content: SerializeAsAny[Step]
    at: float

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("content"), dict):
            return data
        if data.get("role") in get_args(Role) and isinstance(data.get("kind"), str):
            data = {**data, "content": read_step(data["role"], data["kind"], data["content"])}
        return data

    def body(self) -> bytes:
        """As `Record.body`; an unknown step is written back as it was read. Unwritable where JSON can't hold it."""
        if self.kind == self.content.kind or not isinstance(self.content, Unknown):
            try:
                return to_json(self, inf_nan_mode="strings")
            except (PydanticSerializationError, UnicodeEncodeError) as error:
                raise unwritable(self.content, error) from error
        return to_json({**self.model_dump(), "content": self.content.content}, inf_nan_mode="strings")


class Attempt(Value):
    """One try of a call at the engine; a repeated one is a retry."""

    seconds: float
    error: str | None = None
    """Type and message of what went wrong; None for the try that answered."""


class Usage(Value):
    """What a call cost, as far as the engine says."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost: float | None = None
    """US dollars."""


class Tools(Value):
    """The tools offered, by hash; the definitions are spelled out on the first call of a tape that offers them."""

    hash: str
    schemas: tuple[dict[str, JsonValue], ...] | None = None


class Call(Record):
    """One model call, as what it adds to an earlier one (`base`).

    ids(call) = prompt(call) + completion(call); prompt(call) = ids(base)[:keep] + prompt. The call *extends* its base
    iff `keep` is all of ids(base); a smaller `keep` only saves storage and starts a new training row.
    conversation(call) = messages(call) + [reply(call)]; messages(call) = conversation(base)[:keep_messages] + messages.
    """

    t: Literal["call"] = "call"
    tape: str
    call: str
    by: str
    """The path that called."""
    conversation: str = ""
    """Which of the path's conversations; most have one, without a name."""
    base: str | None = None
    keep: int = 0
    keep_messages: int = 0
    messages: tuple[Message, ...] = ()
    prompt: Ints | None = None
    """New prompt token ids after the kept ones; None when the engine takes and gives text only."""
    completion: Ints | None = None
    """Sampled token ids, the turn-ending one included; None when the engine gives text only."""
    logprobs: Floats | None = None
    """log softmax(logits / temperature) of each completion id; NaN where unknown."""
    text: str | None = None
    tool_calls: tuple[dict[str, JsonValue], ...] | None = None
    """What the engine parsed as tool calls, in the chat format."""
    spans: tuple[tuple[str, int, int], ...] = ()
    """(version, start, end) over completion tokens, half-open and contiguous."""
    finish: Literal["stop", "length", "tool_calls", "abort", "cancelled", "error"] = "stop"
    sampling: Sampling = Sampling()
    seed: int | None = None
    tools: Tools | None = None
    usage: Usage = Usage()
    attempts: tuple[Attempt, ...] = ()
    split: str | None = None
    """Why this call starts a new row though the path spoke before; None when it extends its base or is the first."""
    engine: str = ""
    at: float

    def body(self) -> bytes:
        """As `Record.body`, without the optional fields that this call doesn't use."""
        unused: dict[str, Any] = {} if self.conversation else {"conversation": True}
        if self.sampling.first_temperature is None:
            unused["sampling"] = {"first_temperature": True}
        return to_json(self, inf_nan_mode="strings", exclude=unused or None)

    @property
    def reply(self) -> Message:
        """The assistant message that this call added to its conversation."""
        message: Message = {"role": "assistant", "content": self.text or ""}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message

    @model_validator(mode="after")
    def _columns_agree(self) -> Call:
        n = len(self.completion) if self.completion is not None else 0
        if self.logprobs is not None and len(self.logprobs) != n:
            raise ValueError(f"call {self.call}: {len(self.logprobs)} log-probs for {n} completion tokens")
        at = 0
        for version, start, end in self.spans:
            if start != at or end < start or end > n:
                raise ValueError(
                    f"call {self.call}: version spans {self.spans} don't partition {n} completion tokens "
                    f"(at {version!r})"
                )
            at = end
        if self.spans and at != n:
            raise ValueError(f"call {self.call}: version spans end at {at}, the completion has {n} tokens")
        return self


def unscores(value: Any, weight: float, evidence: JsonValue) -> bool:
    """Whether a component with these fields leaves its whole tape without a reward: one that counts and is NaN, or the
    record of a source that failed. A metric that is NaN says nothing of the reward."""
    known = value == value and value != "NaN"
    return not known and (weight != 0 or (isinstance(evidence, dict) and "failed" in evidence))


class Reward(Record):
    """One reward component. Inside a tape it is part of the digest; after its end it is a layer.

    The reward of a tape is the sum of weight * value over the components that were recorded with it; a tape without
    any, or with one that failed, is unscored, which is not zero (`scoring.total`).
    """

    t: Literal["reward"] = "reward"
    tape: str
    step: int | None = None
    """Index of the action that earned it; None for the episode as a whole."""
    name: str = "reward"
    value: float
    weight: float = 1.0
    """0 for a metric that is only reported."""
    layer: str | None = None
    """None for what was recorded with the tape; else the name of the later scoring."""
    evidence: JsonValue = None

    @property
    def failed(self) -> bool:
        """Whether it says that its source gave no number."""
        return unscores(self.value, self.weight, self.evidence)


class Cause(Value):
    """Why an episode ended as it did."""

    type: CauseType
    error: str | None = None
    """Class of the exception."""
    message: str | None = None
    frame: str | None = None
    """`file:line in function`: the last place in the user's code, else the last of the traceback."""


class End(Record):
    """The last record of a tape."""

    t: Literal["end"] = "end"
    tape: str
    status: Status
    cause: Cause | None = None
    seconds: float = 0.0
    at: float


class Label(Record):
    """Layer: which of a call's tokens are targets, where that differs from all of its completion."""

    t: Literal["label"] = "label"
    tape: str
    call: str
    use: Literal["agent", "auxiliary", "discarded"] = "agent"
    ranges: tuple[tuple[int, int], ...] | None = None
    """Completion ranges that are targets; None for all."""
    layer: str | None = None
    after: str | None = None
    """The call whose prompt and completion this one's prompt begins with, where the call itself doesn't say so (it may
    have been recorded earlier). None: as the call says."""

    def body(self) -> bytes:
        """As `Record.body`, without what isn't told."""
        return to_json(self, inf_nan_mode="strings", exclude={"after"} if self.after is None else None)


class Tokens(Record):
    """Layer: token ids of text that nobody sampled (a scripted agent, an API, a person)."""

    t: Literal["tokens"] = "tokens"
    tape: str
    call: str
    prompt: Ints
    """All prompt ids, not a delta."""
    completion: Ints
    tokenizer: str
    """Hash of the tokenizer and chat template that made them."""


class Use(Record):
    """One update's batch, whole: what was trained on, written before the update is applied. The redo log."""

    t: Literal["use"] = "use"
    lineage: str
    update: int
    epoch: int = 0
    items: tuple[tuple[str, str, int, int, float], ...]
    """(tape, call, start, end, weight): completion tokens of a call, and each one's weight in the loss."""
    info: dict[str, JsonValue] = {}
    """What re-applying the update needs beyond the tapes (learning rate, advantages' recipe, row order)."""


class Void(Record):
    """From here on, updates of `lineage` after `update` did not happen; `into` is the lineage that goes on."""

    t: Literal["void"] = "void"
    lineage: str
    update: int
    into: str
    reason: str


class Open(Record):
    """First line of a segment."""

    t: Literal["open"] = "open"
    segment: str
    pid: int
    at: float
    pins: dict[str, str] = {}
    """Heads of earlier segments, by segment name, as this writer found them."""
    versions: dict[str, str] = {}


class Publish(Record):
    """New weights became the policy under `version`."""

    t: Literal["publish"] = "publish"
    version: str
    """`lineage:n`; never reused."""
    digest: str
    """SHA-256 over the weights, by name, dtype, shape and bytes."""
    mode: str = "reprefill"
    """What happened to completions in flight: `reprefill`, `drain`, `stale_kv`, or an engine's own word."""
    at: float


class Commit(Record):
    """Says, on an idle writer, up to where the segment is durable (the line's own `c`)."""

    t: Literal["commit"] = "commit"
    opened: str = ""
    """Hash of the segment's first line: ties the lines around this one to their file where others are damaged."""


class Seal(Record):
    """Last line of a segment: everything before it is durable and nothing follows."""

    t: Literal["seal"] = "seal"
    opened: str = ""
    """Hash of the segment's first line."""
    reason: str = "closed"
    next: str | None = None
    """The segment in which the same writer goes on; None when it stopped."""


AnyRecord = Annotated[
    Begin | StepRecord | Call | Reward | End | Label | Tokens | Use | Void | Open | Publish | Commit | Seal,
    Field(discriminator="t"),
]

_adapter: TypeAdapter[AnyRecord] = TypeAdapter(AnyRecord)


def parse_record(body: bytes) -> Any:
    """The record in `body` (JSON). A pydantic ValidationError, which is a ValueError, says what is wrong with it."""
    return _adapter.validate_json(body)


def fold(digest: bytes, body: bytes) -> bytes:
    """One step of the digest."""
    return hashlib.sha256(digest + body).digest()
