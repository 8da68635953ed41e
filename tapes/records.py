"""Records: all kinds of entries that can be written to a run. The field `t` of a record names its kind.

Tape records describe one episode, from its `begin` to its `end`, and the tape's digest covers them. Layers, such as
labels, are added to a tape at any later time, and the digest never covers them. Run records, such as `publish`, belong
to no tape. Records refer to tapes and calls by id and never by position, so a record has the same meaning in any file.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, Literal, cast, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    SerializeAsAny,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticSerializationError, to_json

from .arrays import Floats, Ints
from .errors import NotATape
from .pictures import RECORDED, MediaNames, Visual, media_of, swapped, visuals_of
from .places import Places
from .status import CauseType, Status
from .steps import Role, Step, Unknown, measure, read_step, unwritable
from .value import Value

SCHEMA = "tapereel/1"
DIGEST_START = hashlib.sha256(SCHEMA.encode()).digest()
"""The initial value d(0) of every digest. After record k, the digest is d(k) = SHA-256(d(k-1) + body of record k)."""

IN_TAPE = ("begin", "step", "call", "reward", "end")
"""The kinds of records that form a tape. A record of one of these kinds that is written after the tape's `end`, such as
a later reward, is a layer instead."""

Message = dict[str, Any]
"""One chat message. It has `role` and `content`, and may have `tool_calls`, `tool_call_id` and `name`."""


_is_none = partial(operator.is_, None)
"""Returns whether a value is None. If a field has this condition, None is not written. Fields that were added in a
later version have it, so that older tapes keep their digests. `operator.is_` is a C function and therefore fast enough
to run for every record."""

_ROLES = get_args(Role)


class Record(BaseModel):
    """Base class of all records. Records are immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, ser_json_inf_nan="strings")

    def body(self) -> bytes:
        """Return the record as compact JSON, with its fields in the order of the class. These bytes are written, and
        the digest is computed from them."""
        return to_json(self, inf_nan_mode="strings")


def answer_key(part: Mapping[str, JsonValue]) -> str | None:
    """Return the key that holds the right answer in a part of a task. None if there is none."""
    names = ("answer", "solution", "target", "reference")
    return next((name for name in names if part.get(name) is not None), None)


class Task(Value):
    """One problem instance. Only the environment and the trainer read `private`."""

    model_config = ConfigDict(allow_inf_nan=False)  # JSON has no NaN, so the tape's task would be another one
    id: str = ""
    """A human-readable name, or an empty string if the source gives none. Groups and splits use `hash` instead."""
    public: JsonValue = None
    private: JsonValue = None
    """Answers and seeds. They are never shown to an agent."""
    bare: bool = False
    """True if the task was given as a plain value, such as a string. `private` holds this value, and
    `Environment.reset` receives it unchanged."""
    pictures: tuple[Visual, ...] = Field(default=(), exclude_if=operator.not_, fail_fast=True)
    """The pictures and videos in the task, each listed once. `public` and `private` hold only their names."""

    @model_validator(mode="before")
    @classmethod
    def _name_pictures(cls, data: Any, info: ValidationInfo) -> Any:
        """Replace the pictures in `Task(public={"image": picture})` by their names. So their bytes are stored only
        once. JSON has only names."""
        if info.mode == "json" or not isinstance(data, dict) or "pictures" in data:
            return data
        parts = {key: data[key] for key in ("public", "private") if key in data}
        found = tuple(dict.fromkeys(visuals_of(parts)))
        named = {k: swapped(v, lambda one: getattr(one, "name", one)) for k, v in parts.items()} if found else {}
        return {**data, **named, "pictures": found} if found else data

    def filled(self, part: JsonValue) -> object:
        """Return the public or private part, with each name of a picture or video replaced by the object itself."""
        known = {picture.name: picture for picture in self.pictures}
        return swapped(part, lambda one: known.get(str(one), one)) if known else part

    @property
    def shown(self) -> tuple[Visual, ...]:
        """The pictures and videos in the public part."""
        return visuals_of(self.filled(self.public)) if self.pictures else ()

    @classmethod
    def of(cls, value: object) -> Task:
        """Return `value` if it is a Task, otherwise a bare task with `value` as its private part."""
        return value if isinstance(value, Task) else cls(private=cast(JsonValue, value), bare=True)

    def fresh(self) -> Task:
        """Return a copy with lists and dicts of its own, so that a change to them changes no other attempt's task."""
        parts = {
            k: deepcopy(v) for k, v in (("public", self.public), ("private", self.private)) if type(v) in (dict, list)
        }
        return self.model_copy(update=parts) if parts else self

    @property
    def given(self) -> object:
        """The argument for `Environment.reset`: the plain value of a bare task, otherwise the task. It is a fresh copy,
        which the environment may change."""
        own = self.fresh()
        return own.filled(own.private) if self.bare else own

    @property
    def expected(self) -> JsonValue:
        """The right answer, or None if it isn't known. In a private part that is an object, it is the field with an
        answer's name (see `answer_key`). Any other private part is the answer if the task has a public part; without
        one it may be a seed."""
        if isinstance(self.private, dict):
            return self.private.get(answer_key(self.private) or "")
        return None if self.public is None else self.private

    @property
    def hash(self) -> str:
        """SHA-256 (hex) of the public and the private part. It doesn't depend on the name or on the order of keys."""
        parts = json.dumps([self.public, self.private], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(parts.encode()).hexdigest()


class Sampling(Value):
    """Settings for sampling a completion. A token's recorded log-prob is log softmax(logits / temperature) at the
    sampled id. A setting from a later version is written only if it differs from its default, so older tapes keep their
    digests."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """0 means greedy decoding. Greedy calls are never RL data, and their log-probs are recorded at temperature 1."""
    max_tokens: int = Field(default=512, ge=1)
    """Maximum number of tokens in an answer."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """1 means no limit."""
    top_k: int = Field(default=0, ge=0)
    """0 means no limit."""
    extra: dict[str, JsonValue] = Field(default={})
    """Further settings of the engine, such as penalties and grammars. A call with such settings can't be used for RL,
    because they change the distribution. The only exception is `stop`, the strings that end an answer."""
    first_temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False, exclude_if=operator.not_)
    """Temperature at which the first token is sampled and its log-prob recorded. None means the same temperature as for
    the other tokens. The FIRE method usually uses 10."""
    min_tokens: int = Field(default=0, ge=0, exclude_if=operator.not_)
    """The first `min_tokens` tokens of an answer can't be end tokens, and their log-probs come from the distribution
    without end tokens. A string in `extra.stop` can still end an answer earlier."""
    ignore_eos: bool = Field(default=False, exclude_if=operator.not_)
    """If True, end tokens don't end an answer. Each token's distribution is unchanged, and `min_tokens` is ignored."""

    @property
    def exact(self) -> bool:
        """True if the recorded log-probs belong to the distribution that the tokens were sampled from.

        `top_p`, `top_k` and most settings in `extra` change the distribution after the log-probs were computed.
        Importance ratios from these log-probs would then be wrong.
        """
        return self.temperature > 0 and self.top_p == 1 and self.top_k == 0 and not self.extra.keys() - {"stop"}

    @property
    def inexact(self) -> str:
        """Why the tokens can't be used for RL and what to change, or "" if they can."""
        if self.exact:
            return ""
        if self.temperature == 0:
            return "at temperature=0 the model always takes its likeliest token and explores nothing: set it above 0"
        changed = [f"top_p={self.top_p:g}"] * (self.top_p < 1) + [f"top_k={self.top_k}"] * (self.top_k > 0)
        changed += [f"extra.{name}" for name in self.extra if name != "stop"]
        return (
            f"{', '.join(changed)} changes the distribution that tokens are drawn from, and their recorded log-probs "
            "belong to the unchanged one: remove it"
        )

    @property
    def barring(self) -> int:
        """The number of leading tokens in a completion that can't be end tokens."""
        return 0 if self.ignore_eos else self.min_tokens

    def temperature_at(self, position: int) -> float:
        """Return the temperature of the token at `position` in the completion."""
        return self.first_temperature if position == 0 and self.first_temperature is not None else self.temperature


class Identity(Value):
    """Identifies the code of an agent or environment by its class and configuration."""

    name: str
    cls: str = ""
    """The `module:qualname` of the class when the tape was recorded."""
    config: dict[str, JsonValue] = Field(default={})
    """Its settings, such as the system prompt of a `ChatAgent`."""
    effect: Literal["pure", "idempotent", "irreversible"] | None = None
    """What happens if an action is carried out a second time. It is set only for environments."""


class Parent(Value):
    """The point in the parent tape where a fork begins. The parent's records before this point form the prefix."""

    tape: str
    digest: str
    """The parent's digest (hex) after the last record in the prefix."""
    records: int
    """Number of the parent's tape records in the prefix, including its `begin`."""
    turn: int
    """Number of the parent's turns in the prefix."""
    unverified: str | None = Field(default=None, exclude_if=_is_none)
    """Why the prefix couldn't be verified, if the caller forked in spite of this. None if the prefix was verified, or
    if it is unknown whether it was."""


class Begin(Record):
    """The first record of a tape. It holds all settings of the episode."""

    t: Literal["begin"] = "begin"
    tape: str
    task: Task
    task_hash: str
    """`Task.hash`, which groups and splits use."""
    agent: Identity
    env: Identity
    env_seed: int
    """The environment's seed, which all episodes in a group share."""
    seed: int
    """The sampling seed of this attempt."""
    group: str | None = None
    """The group whose attempts are compared, or None if the episode has none."""
    attempt: int = 0
    """The episode's number within its group, counted from 0."""
    split: str = "train"
    """The purpose of the tape: `train`, `eval`, `demo` or a name that the caller chose."""
    parent: Parent | None = None
    """Where the episode continues another tape, or None if it is not a fork."""
    versions: dict[str, str] = {}
    """The versions of Tapereel (`package`), of `python` and of the rule by which steps become messages
    (`conversation`). If a renderer is used, also the hashes of its `tokenizer` and `chat_template`. If the engine
    reads pictures, also the hash of its picture `processor`."""
    sampling: Sampling | None = Field(default=None, exclude_if=_is_none)
    """Sampling settings of the run, or None if unknown. Each call also records the settings that it used."""
    limits: dict[str, JsonValue] | None = Field(default=None, exclude_if=_is_none)
    """Limits of the episode, including the engine's context length, or None if unknown."""
    worker: str | None = Field(default=None, exclude_if=_is_none)
    """The worker that ran the episode, as MACHINE/NUMBER, or None if the process that wrote the tape ran it."""
    at: float
    """Wall-clock time in seconds since 1970."""

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
        return media_of(self.task.pictures)


class StepRecord(Record):
    """One step, the agent or environment that produced it, and the model calls that it was parsed from."""

    t: Literal["step"] = "step"
    tape: str
    by: str
    """Who produced the step: the path of an agent, such as `planner/searcher`, or `env` for the environment."""
    role: Role
    kind: str
    """The name of the step's class, such as `text`."""
    calls: tuple[tuple[str, int, int], ...] = ()
    """The completion tokens that this step was parsed from, as (call id, start, end)."""
    content: SerializeAsAny[Step]
    """The fields of the step."""
    media: MediaNames = Field(default=(), exclude_if=operator.not_)
    """Names of the media files that the content refers to in its fields of type `MediaReference`."""
    at: float

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        content = data.get("content")
        if isinstance(content, dict):  # checked first, because isinstance is slow for a pydantic class
            if data.get("role") in _ROLES and isinstance(data.get("kind"), str):
                return {**data, "content": read_step(data["role"], data["kind"], content)}
        elif isinstance(content, Step):
            media = media_of(content)
            return {**data, "media": media} if media else data
        return data

    def body(self) -> bytes:
        """Return the bytes as `Record.body` does. A step of unknown kind is written as it was read. Raises Unwritable
        if JSON can't represent the step."""
        if self.kind == self.content.kind or not isinstance(self.content, Unknown):
            measure(self.content)
            try:
                return to_json(self, inf_nan_mode="strings")
            except (PydanticSerializationError, UnicodeEncodeError) as error:
                raise unwritable(self.content, error) from error
        return to_json({**self.model_dump(), "content": self.content.content}, inf_nan_mode="strings")


class Attempt(Value):
    """One request to the engine for a call. Every attempt after the first is a retry."""

    seconds: float
    error: str | None = None
    """Type and message of the error, or None for the request that was answered."""
    queued: float | None = Field(default=None, exclude_if=_is_none)
    """The part of `seconds` before the model began to work on the request, or None if the engine doesn't report it."""


class Usage(Value):
    """Token counts and cost of a call. Values that the engine doesn't report are None."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the engine had in a cache."""
    cost: float | None = None
    """Cost in US dollars."""


class Constraint(Value):
    """The form that a request demands of its answer: JSON, a tool call, or either."""

    json_schema: dict[str, JsonValue] | None = None
    """The answer may be JSON that matches this schema. None means that it must call a tool."""
    tools: tuple[str, ...] = ()
    """The answer may call one of the tools with these names."""
    enforced: bool = False
    """Whether the engine sampled only tokens that keep the form. If not, the model was free to ignore the demand."""


class Tools(Value):
    """The tools that a call offers to the model, identified by a hash. Only the first call that offers these tools has
    their `schemas`."""

    hash: str
    schemas: tuple[dict[str, JsonValue], ...] | None = None


class Call(Record):
    """One model call. To save space, only the difference between its prompt and the prompt of an earlier call, the
    `base`, is stored.

    Let `ids` be the token ids of the base's whole prompt and completion. The whole prompt of this call is `ids[:keep] +
    prompt`. If `keep` is `len(ids)`, the call *extends* its base. If `keep` is smaller, the call starts a new training
    row, and the shared ids only save storage.

    Messages are stored in the same way. Let `read` be the messages in the base's request, followed by its `reply`. The
    messages in this call's request are `read[:keep_messages] + messages`.

    In Python, these stored fields are `new_prompt` and `new_messages`. `prompt` and `messages` give the whole request.
    """

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)

    t: Literal["call"] = "call"
    tape: str
    call: str
    by: str
    """The path of the agent that made the call."""
    conversation: str = Field(default="", exclude_if=operator.not_)
    """Name of the conversation if the agent holds several. It is empty in the usual case of a single conversation."""
    base: str | None = None
    """Id of the earlier call that `keep` and `keep_messages` refer to."""
    keep: int = 0
    """Number of token ids that the prompt shares with the base, from its beginning."""
    keep_messages: int = 0
    """Number of messages that the request shares with the base, from its beginning."""
    new_messages: tuple[Message, ...] = Field(default=(), validation_alias="messages", serialization_alias="messages")
    """The messages of the request after the first `keep_messages`."""
    media: MediaNames = Field(default=(), exclude_if=operator.not_)
    """Names of the pictures in messages that an external program sent. No step shows these pictures."""
    new_prompt: Ints | None = Field(default=None, validation_alias="prompt", serialization_alias="prompt")
    """The prompt's token ids after the first `keep` ids, which come from the base. None if the engine takes and returns
    only text."""
    places: Places = Field(default=(), exclude_if=operator.not_)
    """States which of the new prompt ids stand for which picture or video, in order. Offsets count from the start of
    the whole prompt."""
    completion: Ints | None = None
    """The sampled token ids, including the id that ends the turn. None if the engine returns only text."""
    logprobs: Floats | None = None
    """log softmax(logits / temperature) of each completion id, or NaN if unknown. Neither top-p, top-k nor an enforced
    `constraint` changes these values, so they are NaN if the engine knows only those under the constraint."""
    barred: tuple[int, ...] | None = Field(default=None, exclude_if=_is_none)
    """Ids of the end tokens that `sampling.min_tokens` excluded at the start of the completion, or None if unknown."""
    text: str | None = None
    """The answer's text."""
    tool_calls: tuple[dict[str, JsonValue], ...] | None = None
    """The tool calls that the engine parsed, in the chat format."""
    spans: tuple[tuple[str, int, int], ...] = ()
    """(policy version, start, end) for each range of completion tokens. The ranges are half-open and contiguous."""
    finish: Literal["stop", "length", "tool_calls", "abort", "cancelled", "error"] = "stop"
    """Why the completion ended."""
    sampling: Sampling = Sampling()
    seed: int | None = None
    """The sampling seed of this call."""
    tools: Tools | None = None
    constraint: Constraint | None = Field(default=None, exclude_if=_is_none)
    """The form that the request demanded of the answer, or None if the request left the form open."""
    usage: Usage = Usage()
    attempts: tuple[Attempt, ...] = ()
    split: str | None = None
    """Why this call starts a new training row instead of extending an earlier call. It is None if the call extends its
    base, or if its agent has made no calls before."""
    cut: int = Field(default=0, exclude_if=operator.not_)
    """Number of tokens by which `limits.keep_prompt` shortened the prompt."""
    cut_messages: int = Field(default=0, exclude_if=operator.not_)
    """Number of the conversation's messages that `limits.keep_prompt` left out of the prompt and the request. If it
    is 0 and `cut` isn't, an older version removed tokens and recorded the messages whole."""
    engine: str = ""
    """Name of the engine."""
    at: float

    @property
    def exact(self) -> bool:
        """True if the recorded log-probs belong to the distribution that the tokens were sampled from.

        In addition to the settings that `Sampling.exact` names, an enforced form changes this distribution."""
        return self.sampling.exact and not (self.constraint is not None and self.constraint.enforced)

    @property
    def reply(self) -> Message:
        """The assistant message that this call added to its conversation."""
        message: Message = {"role": "assistant", "content": self.text or ""}
        if self.tool_calls:
            message["tool_calls"] = list(self.tool_calls)
        return message

    @property
    def messages(self) -> list[Message]:
        """All messages of the request. Raises NotATape if some are its base's and the call isn't part of a tape."""
        return request(self, Call._base)

    @property
    def prompt(self) -> array[int] | None:
        """All token ids of the prompt, or None if the engine takes and returns only text. Raises NotATape if some are
        its base's and the call isn't part of a tape."""
        if self.new_prompt is None:
            return None
        ids = array("i")
        for one in self.sources():
            if one.keep:
                ids.extend(one._base().completion or ())
            del ids[one.keep :]
            ids.extend(one.new_prompt or ())
        return ids

    def sources(self) -> list[Call]:
        """Return the calls that the prompt's tokens come from, oldest first. The last one is this call."""
        chain: list[Call] = [self]
        while chain[-1].keep:
            chain.append(chain[-1]._base())
        return chain[::-1]

    def join(self, base: Call) -> None:
        """Set the call that `base` names. A tape does this, so that `messages` and `prompt` can be read."""
        object.__setattr__(self, "_joined", _Joined(base))  # no field: a record is frozen

    def _base(self) -> Call:
        joined: _Joined | None = self.__dict__.get("_joined")
        if joined is None or joined.call is None:
            raise NotATape(
                f"call {self.call} isn't part of a tape, so the messages and tokens that it keeps of call {self.base} "
                "are unknown: take it from `tape.calls`, or read `new_messages` and `new_prompt`"
            )
        return joined.call

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
            if not (at <= place.offset < place.end <= self.keep + len(self.new_prompt or ()) and place.media):
                raise ValueError(
                    f"call {self.call}: the picture at tokens [{place.offset}, {place.end}) is not behind token {at} "
                    f"and among the {len(self.new_prompt or ())} new prompt tokens"
                )
            at = place.end
        return self


class _Joined:
    """A call's base. Calls are compared and pickled without their bases, so this object equals only itself."""

    __slots__ = ("call",)

    def __init__(self, call: Call | None = None) -> None:
        self.call = call

    def __reduce__(self) -> tuple[type[_Joined], tuple[()]]:
        return _Joined, ()


def request(call: Call, base: Callable[[Call], Call], low: int = 0) -> list[Message]:
    """Return the messages of a request, starting with number `low`. `base` returns the base of a call.

    This walks from the call to its bases, newest first, and only as far back as needed. Each call keeps the first
    `keep_messages` messages of its base and adds its own. If the base's request has fewer messages than the call keeps,
    the base's reply is one of them. `high` is the number of messages that later calls keep from the current call, so
    that no message comes twice.
    """
    pieces: list[Sequence[Message]] = []
    high = call.keep_messages + len(call.new_messages)
    one: Call = call
    while True:
        keep = min(one.keep_messages, high)
        pieces.append(one.new_messages[max(0, low - keep) : max(0, high - keep)])
        if keep <= low or one.base is None:
            break
        earlier = base(one)
        said = earlier.keep_messages + len(earlier.new_messages)  # the base's reply has this number
        if keep > said >= low:
            pieces.append([earlier.reply])
        one, high = earlier, min(keep, said)
    return [message for piece in reversed(pieces) for message in piece]


def unscores(value: float, weight: float, evidence: JsonValue) -> bool:
    """Return whether a reward component with these fields has failed. A failed component leaves its whole tape
    unscored.

    A component with a weight other than 0 has failed if its value is NaN. A metric (weight 0) has failed if its value
    is NaN and its evidence says that its source failed. A NaN in any other metric doesn't affect the reward.
    """
    return value != value and (weight != 0 or (isinstance(evidence, dict) and "failed" in evidence))


class Reward(Record):
    """One component of a tape's reward. If it was recorded before the tape's end, the tape's digest covers it. If it
    was recorded later, it is a layer.

    The reward of a tape is the sum of weight * value over the components before its end (`total_reward`). A tape is
    unscored if it has only metrics (weight 0), if it has no components, or if a component failed. Unscored is not the
    same as a reward of 0.
    """

    t: Literal["reward"] = "reward"
    tape: str
    step: int | None = None
    """Index of the step that earned the reward, or None if the reward is for the episode as a whole."""
    name: str = "reward"
    value: float
    weight: float = 1.0
    """0 means that the component is a metric, which is reported but not part of the reward."""
    layer: str | None = None
    """Name of the later scoring that added this reward. None for a reward that was recorded with the tape."""
    evidence: JsonValue = None
    """What the source gave as its reason, such as a judge's answers."""

    @property
    def failed(self) -> bool:
        """True if the component leaves the tape unscored (`unscores`)."""
        return unscores(self.value, self.weight, self.evidence)


def exact_sum(values: list[float]) -> float:
    """Return the sum of the values, rounded once. Earlier versions recorded values that are too large for that."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)


def total_reward(rewards: Iterable[Reward]) -> float | None:
    """Return the reward of a tape: the sum of weight * value over its components.

    The sum is exact up to one rounding at the end, so the weights 0.6, 0.3 and 0.1 add up to 1.0. Return None if all
    components are metrics (weight 0) or if a component failed. Tapes, indexes, audits and training
    all use this rule.
    """
    every = list(rewards)
    counted = [r.weight * r.value for r in every if r.weight != 0]
    return exact_sum(counted) if counted and not any(r.failed for r in every) else None


class Cause(Value):
    """Why an episode ended."""

    type: CauseType
    error: str | None = None
    """Class of the exception."""
    message: str | None = None
    frame: str | None = None
    """Where the error was raised, as `file:line in function`. This is the last frame of the traceback in the user's
    code. If no frame is in the user's code, it is the last frame of all."""


class End(Record):
    """The last record of a tape."""

    t: Literal["end"] = "end"
    tape: str
    status: Status
    cause: Cause | None = None
    seconds: float = 0.0
    """Duration of the episode."""
    at: float
    agent_seconds: float | None = Field(default=None, exclude_if=_is_none)
    """Seconds that are counted as the agent's time (`agents/episode/timers.py`), or None if unknown."""
    beside: tuple[Cause, ...] = Field(default=(), exclude_if=operator.not_)
    """Faults that didn't end the episode, such as a failed `close` or code that was left running."""


Reason = Literal["undelivered", "abandoned", "declared"]
"""Why a program's answer isn't trained on: no client received it, the program abandoned its branch, or the program said
so itself."""


class Label(Record):
    """A layer that states which completion tokens of a call are training targets."""

    t: Literal["label"] = "label"
    tape: str
    call: str
    use: Literal["agent", "auxiliary", "discarded"] = "agent"
    ranges: tuple[tuple[int, int], ...] | None = None
    """Completion ranges that are targets. None means that the whole completion is a target."""
    layer: str | None = None
    after: str | None = Field(default=None, exclude_if=_is_none)
    """Id of an earlier call. The labelled call's prompt begins with the prompt and completion of that earlier call.
    None means that the earlier call is the labelled call's `base`."""
    reason: Reason | None = Field(default=None, exclude_if=_is_none)
    """Why the call isn't trained on, if `use` doesn't say it. It is unknown on tapes of earlier versions."""


class Tokens(Record):
    """A layer with the token ids of authored text, which no local model sampled. The text may come from a scripted
    agent, an API or a person."""

    t: Literal["tokens"] = "tokens"
    tape: str
    call: str
    prompt: Ints
    """All prompt ids, including those kept from the base."""
    places: Places = Field(default=(), exclude_if=operator.not_)
    """States which prompt ids stand for which picture or video, in order."""
    completion: Ints
    tokenizer: str
    """Hash of the tokenizer and the chat template that produced these ids."""


class Use(Record):
    """The training data of one update of the weights. It is written before the update is applied, as in a redo log.

    After a crash, each update since the last checkpoint is applied again from its record.
    """

    t: Literal["use"] = "use"
    lineage: str
    """The unbroken history of updates that this update continues."""
    update: int
    epoch: int = 0
    items: tuple[tuple[str, str, int, int, float], ...]
    """(tape, call, start, end, weight) for ranges of completion tokens. `weight` is each token's weight in the loss."""
    info: dict[str, JsonValue] = {}
    """Further data for applying the update again: phase, tapes with their pinned digests, the recipe's hash, learning
    rate, and the tokens that were set aside (`stale`, `filtered`, `context`). It also holds the update's measurements:
    loss, gradient norm, and the mismatch between trainer and sampler."""
    lead: int | None = Field(default=None, exclude_if=_is_none)
    """Number (epoch) of the lease under which the record was written (`tapes/store/lease.py`), or None without a
    lease."""


class Void(Record):
    """Cancels all updates in `lineage` with a number above `update`. The lineage `into` continues after `update`."""

    t: Literal["void"] = "void"
    lineage: str
    update: int
    into: str
    reason: str
    lead: int | None = Field(default=None, exclude_if=_is_none)
    """Epoch of the lease, as in `Use.lead`."""


class Open(Record):
    """The first line of a segment. A segment is one of the files that hold a run's records."""

    t: Literal["open"] = "open"
    segment: str
    pid: int
    at: float
    pins: dict[str, str] = {}
    """Pins on earlier segments, by segment name. A pin is the hash of the segment's last line that was known to be
    durable. If a pinned line is missing later, the earlier segment was changed."""
    versions: dict[str, str] = {}
    """The `schema` of the segment's records."""


class Publish(Record):
    """Records that new weights became the policy under the name `version`."""

    t: Literal["publish"] = "publish"
    version: str
    """Has the form `lineage:n` and is never reused."""
    digest: str
    """SHA-256 over each tensor's name and digest. The digest covers dtype, shape and rows."""
    mode: str = "reprefill"
    """What happened to completions that were being sampled when the weights changed: `reprefill`, `drain`, `stale_kv`,
    or a mode that the engine defines."""
    at: float
    lead: int | None = Field(default=None, exclude_if=_is_none)
    """Epoch of the lease, as in `Use.lead`."""


class Lead(Record):
    """Records that a process took the run's lease. Until another process takes it, only this process writes updates and
    weights."""

    t: Literal["lead"] = "lead"
    epoch: int
    host: str
    pid: int
    at: float


class Files(Record):
    """Digests of the run's files outside the segments: configuration, results, metrics, recipes and checkpoints."""

    t: Literal["files"] = "files"
    files: dict[str, str | None]
    """The SHA-256 (hex) of each file's bytes, by the file's path below the run. None means that the process that leads
    the run may still change the file. If several records name a path, the last record counts."""
    at: float


class Commit(Record):
    """States how far the segment is durable, in the field `c` of its line. A writer appends it when it becomes idle,
    and after many lines without a pause."""

    t: Literal["commit"] = "commit"
    opened: str = ""
    """Hash of the segment's first line. If the file is damaged, the hash proves that this line and the lines chained to
    it belong to the segment."""


class Seal(Record):
    """The last line of a segment. Every line before it is durable, and no line follows it."""

    t: Literal["seal"] = "seal"
    opened: str = ""
    """Hash of the segment's first line."""
    reason: str = "closed"
    next: str | None = None
    """The next segment of the same writer, or None if the writer stopped."""


def fold(digest: bytes, body: bytes) -> bytes:
    """Return the digest after one more record: SHA-256(digest + body)."""
    return hashlib.sha256(digest + body).digest()
