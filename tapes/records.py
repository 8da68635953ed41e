"""Records: the closed union, on `t`, of everything that is written to a run.

Tape records, from `begin` to `end`, are folded into the tape's digest. Layers are written any time later and are never
folded. Run records have no tape. Bodies name tapes and calls by id, never by ordinal, so a record means the same in any
segment.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializeAsAny,
    model_validator,
)
from pydantic_core import PydanticSerializationError, to_json

from .arrays import Floats, Ints
from .pictures import RECORDED, MediaNames, Visual, media_of, swapped, visuals_of
from .places import Places
from .status import CauseType, Status
from .steps import Role, Step, Unknown, measure, read_step, unwritable
from .value import Value

SCHEMA = "tapereel/1"
DIGEST_START = hashlib.sha256(SCHEMA.encode()).digest()
"""d0 of every digest; dk = SHA-256(dk-1 + body bytes of record k)."""

IN_TAPE = ("begin", "step", "call", "reward", "end")
"""The kinds of records that a tape is made of, up to its `end`; a later one of these is a layer."""

Message = dict[str, Any]
"""One chat message: `role`, `content` and, if they apply, `tool_calls`, `tool_call_id`, `name`."""


_is_none = partial(operator.is_, None)
"""For fields that a body leaves out if they are None: they must not change the digest of tapes without them. It is
written in C, since every record calls it."""


class Record(BaseModel):
    """Base of all records: immutable; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, ser_json_inf_nan="strings")

    def body(self) -> bytes:
        """The bytes that are written, hashed and folded into the digest: compact JSON in field order."""
        return to_json(self, inf_nan_mode="strings")


class Task(Value):
    """One problem instance. Only the environment and the trainer read `private`."""

    id: str = ""
    """A name for people; empty when the source has none. Groups and splits use `hash`, never the name."""
    public: JsonValue = None
    private: JsonValue = None
    """Answers and seeds. Never shown to an agent."""
    bare: bool = False
    """True when the task is a plain value: `private` is that value, and `reset` receives it unchanged."""
    pictures: tuple[Visual, ...] = Field(default=(), exclude_if=operator.not_, fail_fast=True)
    """The pictures and videos that it was made with, each once. In their places the two parts hold their names."""

    @model_validator(mode="before")
    @classmethod
    def _name_pictures(cls, data: Any) -> Any:
        """`Task(public={"image": picture})`: a record names the file, and the bytes are stored once."""
        if not isinstance(data, dict) or "pictures" in data:
            return data
        parts = {key: data[key] for key in ("public", "private") if key in data}
        found = tuple(dict.fromkeys(visuals_of(parts)))
        named = {k: swapped(v, lambda one: getattr(one, "name", one)) for k, v in parts.items()} if found else {}
        return {**data, **named, "pictures": found} if found else data

    def filled(self, part: JsonValue) -> object:
        """`part`, the public or the private one, with the pictures and videos in their places."""
        known = {picture.name: picture for picture in self.pictures}
        return swapped(part, lambda one: known.get(str(one), one)) if known else part

    @property
    def shown(self) -> tuple[Visual, ...]:
        """The pictures and videos of the public part."""
        return visuals_of(self.filled(self.public)) if self.pictures else ()

    @classmethod
    def of(cls, value: object) -> Task:
        """`value` if it is a Task, otherwise a bare task with `value` as its private part."""
        return value if isinstance(value, Task) else cls(private=cast(JsonValue, value), bare=True)

    @property
    def given(self) -> object:
        """The argument of `Environment.reset`: the plain value of a bare task, otherwise the task."""
        return self.filled(self.private) if self.bare else self

    @property
    def hash(self) -> str:
        """SHA-256 (hex) over the public and the private part. It doesn't depend on the name or on the order of keys."""
        parts = json.dumps([self.public, self.private], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(parts.encode()).hexdigest()


class Sampling(Value):
    """How a completion is sampled. Recorded log-probs are log softmax(logits / temperature) of each sampled id.
    Settings that are newer than the first tapes are left out at their defaults, so the digests of old tapes hold."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """0 is greedy decoding: never RL data, and the recorded log-probs are those at temperature 1."""
    max_tokens: int = Field(default=512, ge=1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0: no limit."""
    extra: dict[str, JsonValue] = Field(default={})
    """Further settings of the engine (penalties, grammars). They make a call unfit for RL, because they change the
    distribution; `stop`, the strings that end an answer, does not."""
    first_temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False, exclude_if=operator.not_)
    """Temperature of the first token (FIRE: 10 is usual); its log-prob is recorded at this temperature. None: as the
    other tokens."""
    min_tokens: int = Field(default=0, ge=0, exclude_if=operator.not_)
    """This many tokens at the start of an answer can't be end tokens: their log-probs come from the distribution over
    the other tokens. A string in `extra.stop` still ends an answer."""
    ignore_eos: bool = Field(default=False, exclude_if=operator.not_)
    """End tokens don't end an answer, and each token's distribution stays as it is; `min_tokens` has no effect."""

    @property
    def exact(self) -> bool:
        """True when the recorded log-probs come from the distribution that was sampled.

        top_p, top_k and most of `extra` cut or change the distribution after the log-probs were computed: importance
        ratios from such log-probs would be wrong.
        """
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == 0 and not set(self.extra) - {"stop"}

    @property
    def barring(self) -> int:
        """How many of the first tokens can't be end tokens."""
        return 0 if self.ignore_eos else self.min_tokens

    def temperature_at(self, position: int) -> float:
        """Temperature of the token at that position of the completion."""
        return self.first_temperature if position == 0 and self.first_temperature is not None else self.temperature


class Identity(Value):
    """The code of an agent or environment: its class and its configuration."""

    name: str
    cls: str = ""
    """`module:qualname` when the tape was recorded."""
    config: dict[str, JsonValue] = Field(default={})
    effect: Literal["pure", "idempotent", "irreversible"] | None = None
    """Environments only: the effect of an action that is carried out again."""


class Parent(Value):
    """The place in the parent tape at which a fork begins."""

    tape: str
    digest: str
    """The parent's digest (hex) after the last record of the prefix."""
    records: int
    """Tape records of the parent in the prefix, its `begin` included."""
    turn: int
    """Turns of the parent in the prefix."""
    unverified: str | None = Field(default=None, exclude_if=_is_none)
    """Why the prefix couldn't be verified, if the caller forked anyway; None if it was verified, or isn't known."""


class Begin(Record):
    """The first record of a tape: all settings of the episode."""

    t: Literal["begin"] = "begin"
    tape: str
    task: Task
    task_hash: str
    agent: Identity
    env: Identity
    env_seed: int
    """The environment's seed, shared by a group."""
    seed: int
    """This attempt's sampling seed."""
    group: str | None = None
    attempt: int = 0
    """Number of the episode in its group, from 0."""
    split: str = "train"
    """`train`, `eval`, `demo` or a name of the caller: the purpose of the tape."""
    parent: Parent | None = None
    versions: dict[str, str] = {}
    """`package`, `python` and, with a renderer, `tokenizer` and `chat_template` (hashes); with pictures, `processor`
    (hash)."""
    sampling: Sampling | None = Field(default=None, exclude_if=_is_none)
    """Sampling settings of the run; each call records its own. None: unknown."""
    limits: dict[str, JsonValue] | None = Field(default=None, exclude_if=_is_none)
    """Limits of the episode, including the engine's context. None: unknown."""
    at: float
    """Seconds since 1970, wall clock."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        task = data.get("task") if isinstance(data, dict) else None
        if isinstance(task, dict) and task.get("pictures"):
            return {**data, "task": Task.model_validate(task, context=RECORDED)}
        return data

    @property
    def media(self) -> tuple[str, ...]:
        """Names of the media files that the task refers to."""
        return media_of(self.task)


class StepRecord(Record):
    """One step, the path that produced it, and the calls it was parsed from."""

    t: Literal["step"] = "step"
    tape: str
    by: str
    """The path of agent names that speaks (`planner/searcher`), or `env`."""
    role: Role
    kind: str
    calls: tuple[tuple[str, int, int], ...] = ()
    """(call id, start, end): the completion tokens that this step was parsed from."""
    content: SerializeAsAny[Step]
    media: MediaNames = Field(default=(), exclude_if=operator.not_)
    """Names of the media files that the content refers to: its fields of type `MediaReference`."""
    at: float

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        content = data.get("content")
        if isinstance(content, Step):
            media = media_of(content)
            return {**data, "media": media} if media else data
        if not isinstance(content, dict):
            return data
        if data.get("role") in get_args(Role) and isinstance(data.get("kind"), str):
            data = {**data, "content": read_step(data["role"], data["kind"], content)}
        return data

    def body(self) -> bytes:
        """As `Record.body`; a step of unknown kind is written as it was read. Unwritable if JSON can't hold it."""
        if self.kind == self.content.kind or not isinstance(self.content, Unknown):
            measure(self.content)
            try:
                return to_json(self, inf_nan_mode="strings")
            except (PydanticSerializationError, UnicodeEncodeError) as error:
                raise unwritable(self.content, error) from error
        return to_json({**self.model_dump(), "content": self.content.content}, inf_nan_mode="strings")


class Attempt(Value):
    """One request of a call to the engine; every one after the first is a retry."""

    seconds: float
    error: str | None = None
    """Type and message of the error; None for the request that was answered."""
    queued: float | None = Field(default=None, exclude_if=_is_none)
    """The part of `seconds` before the model began to work on the request; None if the engine doesn't report it."""


class Usage(Value):
    """Token counts and cost of a call; None if the engine doesn't report them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost: float | None = None
    """US dollars."""


class Tools(Value):
    """The tools that a call offers, by hash. Only the first call of a tape that offers them holds the schemas."""

    hash: str
    schemas: tuple[dict[str, JsonValue], ...] | None = None


class Call(Record):
    """One model call, stored as its additions to an earlier call (`base`).

    ids(call) = prompt(call) + completion(call); prompt(call) = ids(base)[:keep] + prompt. The call *extends* its base
    iff `keep` is all of ids(base); a smaller `keep` only saves storage and starts a new training row.
    conversation(call) = messages(call) + [reply(call)]; messages(call) = conversation(base)[:keep_messages] + messages.
    """

    t: Literal["call"] = "call"
    tape: str
    call: str
    by: str
    """The path that called."""
    conversation: str = Field(default="", exclude_if=operator.not_)
    """Name of the conversation, for paths that hold several; empty for the usual single one."""
    base: str | None = None
    keep: int = 0
    keep_messages: int = 0
    messages: tuple[Message, ...] = ()
    media: MediaNames = Field(default=(), exclude_if=operator.not_)
    """Names of the pictures in `messages` that came with a program's request: no step shows them."""
    prompt: Ints | None = None
    """New prompt token ids after the kept ones; None when the engine takes and returns text only."""
    places: Places = Field(default=(), exclude_if=operator.not_)
    """Which of the new prompt ids stand for pictures, in order; offsets count from the first id of the whole prompt."""
    completion: Ints | None = None
    """Sampled token ids, including the one that ends the turn; None when the engine returns text only."""
    logprobs: Floats | None = None
    """log softmax(logits / temperature) of each completion id; NaN if unknown."""
    barred: tuple[int, ...] | None = Field(default=None, exclude_if=_is_none)
    """With `sampling.min_tokens`: the end ids that the distribution of the first tokens lacks. None: unknown."""
    text: str | None = None
    tool_calls: tuple[dict[str, JsonValue], ...] | None = None
    """The tool calls that the engine parsed, in the chat format."""
    spans: tuple[tuple[str, int, int], ...] = ()
    """(version, start, end) over completion tokens, half-open and contiguous."""
    finish: Literal["stop", "length", "tool_calls", "abort", "cancelled", "error"] = "stop"
    sampling: Sampling = Sampling()
    seed: int | None = None
    tools: Tools | None = None
    usage: Usage = Usage()
    attempts: tuple[Attempt, ...] = ()
    split: str | None = None
    """Why this call starts a new row although its path has spoken; None when it extends its base or is the first."""
    cut: int = Field(default=0, exclude_if=operator.not_)
    """Tokens of the conversation that the prompt leaves out (`limits.keep_prompt`)."""
    engine: str = ""
    at: float

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
        at = self.keep
        for place in self.places:
            if not (at <= place.offset < place.end <= self.keep + len(self.prompt or ()) and place.media):
                raise ValueError(
                    f"call {self.call}: the picture at tokens [{place.offset}, {place.end}) is not behind token {at} "
                    f"and among the {len(self.prompt or ())} new prompt tokens"
                )
            at = place.end
        return self


def unscores(value: float, weight: float, evidence: JsonValue) -> bool:
    """Whether a component with these fields leaves its whole tape unscored.

    It does when it counts (weight not 0) and is NaN, or when it records the failure of its source. A metric that is NaN
    doesn't affect the reward.
    """
    return value != value and (weight != 0 or (isinstance(evidence, dict) and "failed" in evidence))


class Reward(Record):
    """One reward component. Inside a tape it is part of the digest; after its end it is a layer.

    The reward of a tape is the sum of weight * value over the components that were recorded with it; a tape without
    any, or with one that failed, is unscored, which is not zero (`total_reward`).
    """

    t: Literal["reward"] = "reward"
    tape: str
    step: int | None = None
    """Index of the action that earned it; None for the episode as a whole."""
    name: str = "reward"
    value: float
    weight: float = 1.0
    """0 for a metric, which is only reported."""
    layer: str | None = None
    """None for a reward recorded with the tape; else the name of the later scoring."""
    evidence: JsonValue = None

    @property
    def failed(self) -> bool:
        """Whether it leaves the tape unscored (`unscores`)."""
        return unscores(self.value, self.weight, self.evidence)


def total_reward(rewards: Iterable[Reward]) -> float | None:
    """The reward of a tape: the sum of weight * value of its components.

    None if no component counts (weight 0 is a metric), or if one failed. One rule serves tapes, indexes, audits
    and training.
    """
    every = list(rewards)
    counted = [r.weight * r.value for r in every if r.weight != 0]
    return sum(counted) if counted and not any(r.failed for r in every) else None


class Cause(Value):
    """Why an episode ended."""

    type: CauseType
    error: str | None = None
    """Class of the exception."""
    message: str | None = None
    frame: str | None = None
    """`file:line in function`: the last place in the user's code, otherwise the last of the traceback."""


class End(Record):
    """The last record of a tape."""

    t: Literal["end"] = "end"
    tape: str
    status: Status
    cause: Cause | None = None
    seconds: float = 0.0
    at: float
    agent_seconds: float | None = Field(default=None, exclude_if=_is_none)
    """Seconds that count as the agent's (`agents/episode/timers.py`); None if unknown."""
    beside: tuple[Cause, ...] = Field(default=(), exclude_if=operator.not_)
    """Faults that didn't end the episode: a `close` that failed, code that was left running."""


class Label(Record):
    """Layer: which tokens of a call are training targets, if not its whole completion."""

    t: Literal["label"] = "label"
    tape: str
    call: str
    use: Literal["agent", "auxiliary", "discarded"] = "agent"
    ranges: tuple[tuple[int, int], ...] | None = None
    """Completion ranges that are targets; None for all."""
    layer: str | None = None
    after: str | None = Field(default=None, exclude_if=_is_none)
    """The call whose prompt and completion begin this call's prompt, if it isn't its `base` (which may be another
    earlier call); None for the `base`."""


class Tokens(Record):
    """Layer: token ids of authored text, which no local model sampled (a scripted agent, an API, a person)."""

    t: Literal["tokens"] = "tokens"
    tape: str
    call: str
    prompt: Ints
    """All prompt ids, including the base's."""
    places: Places = Field(default=(), exclude_if=operator.not_)
    """Which prompt ids stand for pictures, in order."""
    completion: Ints
    tokenizer: str
    """Hash of the tokenizer and the chat template that made these ids."""


class Use(Record):
    """The whole batch of one update, written before the update is applied: the redo log.

    After a crash between this record and the next checkpoint, the update is applied again from it.
    """

    t: Literal["use"] = "use"
    lineage: str
    update: int
    epoch: int = 0
    items: tuple[tuple[str, str, int, int, float], ...]
    """(tape, call, start, end, weight): completion tokens of a call, and each one's weight in the loss."""
    info: dict[str, JsonValue] = {}
    """Data for applying the update again, in addition to the items: phase, tapes with their pinned digests, the
    recipe's hash, learning rate, and the tokens that were set aside (`stale`, `filtered`, `context`). Also the
    update's measurements: loss, gradient norm, mismatch of trainer and sampler."""
    lead: int | None = Field(default=None, exclude_if=_is_none)
    """Epoch of the lead that wrote it (`tapes/store/lease.py`); None if it was written without a lease."""


class Void(Record):
    """Cancels the updates of `lineage` after `update`; the lineage `into` continues from there."""

    t: Literal["void"] = "void"
    lineage: str
    update: int
    into: str
    reason: str
    lead: int | None = Field(default=None, exclude_if=_is_none)
    """As `Use.lead`."""


class Open(Record):
    """First line of a segment."""

    t: Literal["open"] = "open"
    segment: str
    pid: int
    at: float
    pins: dict[str, str] = {}
    """Segment name -> hash of its last line, for the earlier segments that this writer found."""
    versions: dict[str, str] = {}


class Publish(Record):
    """New weights became the policy under `version`."""

    t: Literal["publish"] = "publish"
    version: str
    """`lineage:n`; never reused."""
    digest: str
    """SHA-256 over the weights, by name, dtype, shape and bytes."""
    mode: str = "reprefill"
    """How completions in flight were treated: `reprefill`, `drain`, `stale_kv`, or a mode of the engine's own."""
    at: float
    lead: int | None = Field(default=None, exclude_if=_is_none)
    """As `Use.lead`."""


class Lead(Record):
    """A process took the lease of the run: from here on it alone writes updates and publishes weights."""

    t: Literal["lead"] = "lead"
    epoch: int
    host: str
    pid: int
    at: float


class Files(Record):
    """Digests of files of the run that no segment holds: configuration, results, metrics, recipes, checkpoints."""

    t: Literal["files"] = "files"
    files: dict[str, str | None]
    """Path below the run -> SHA-256 (hex) of its bytes; None while the lead changes it. A later record counts."""
    at: float


class Commit(Record):
    """States how far the segment is durable, by the line's own `c`. An idle writer appends it."""

    t: Literal["commit"] = "commit"
    opened: str = ""
    """Hash of the segment's first line: ties the lines around this one to their file when other lines are damaged."""


class Seal(Record):
    """Last line of a segment: every line before it is durable, and no line follows."""

    t: Literal["seal"] = "seal"
    opened: str = ""
    """Hash of the segment's first line."""
    reason: str = "closed"
    next: str | None = None
    """The next segment of the same writer; None when the writer stopped."""


def fold(digest: bytes, body: bytes) -> bytes:
    """The digest after one more record: SHA-256(digest + body)."""
    return hashlib.sha256(digest + body).digest()
