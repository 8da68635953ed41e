"""Summaries of tapes. The index, the books, the audit and the viewer read records through this module.

`read_facts` reads only the fields of a record that its readers need, and gives them types. It doesn't validate the
whole record, because that would be too slow for an index of a million records. `TapeFold` sums up the facts about one
tape. All readers use both, so they agree on which rewards failed and which tokens were sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import NotATape
from ..records import Call, Label, Record, StepRecord, Tokens, Use, Void, exact_sum, unscores
from ..status import TRAINED_SPLITS, CauseType, Status, trains
from .segment import read_body

if TYPE_CHECKING:
    from pydantic import JsonValue

GROUP_LAYER = "group"
"""Name of the layer for rewards that compare a tape with its group. Training adds these to the tape's own reward."""
SHORT = 16
"""If the limit on an answer's length is below this number of tokens, the limit is assumed to be intended."""
_PLAIN = r'[^"\\]*'
"""Pattern for the characters of a JSON string without escapes."""


def _leading(cls: type[Record], *names: str) -> re.Pattern[bytes]:
    """Return a pattern that reads the fields `names` from the start of a `cls` record's body. It has a group for each
    field.

    A body has its fields in the order of its class. So the first fields can be read without the content, which is most
    of a run's bytes. If a body doesn't match, for example because a string has an escape, it must be read as JSON.
    """
    t, *fields = cls.model_fields
    pattern = rf'\{{"{t}":"{cls.model_fields[t].default}"'
    for field in fields[: fields.index(names[-1]) + 1]:
        pattern += f',"{field}":"({_PLAIN})"' if field in names else f',"{field}":"{_PLAIN}"'
    return re.compile(pattern.encode())


_STEP = _leading(StepRecord, "by", "role", "kind")
_CALL = _leading(Call, "call")


class StepFacts(NamedTuple):
    """The facts from one step."""

    by: str
    role: str
    kind: str
    body: bytes

    @property
    def content(self) -> JsonValue:
        """The fields of the step, or its text."""
        return read_body(self.body).get("content")


class CallFacts(NamedTuple):
    """One model call. Its columns of token ids and log-probs stay in base64, as on the tape, and are not decoded."""

    call: str
    by: str
    engine: str | None
    finish: str | None
    spans: list[tuple[str, int, int]]
    """(version, start, end) for each range of completion tokens that one version sampled."""
    keep: int
    """Number of prompt tokens that the call shares with its base."""
    prompt: str | None
    """The prompt's token ids after the shared ones, or None if the engine accepted only text."""
    completion: str | None
    logprobs: str | None
    usage: dict[str, Any]
    """Usage as the engine reported it."""
    attempts: list[dict[str, Any]]
    """`seconds` and `error` for each request that the call made."""

    @property
    def sampled(self) -> bool:
        """Whether a policy sampled the completion. An authored completion has neither versions nor log-probs."""
        return bool(self.spans) or self.logprobs is not None

    @property
    def prompt_tokens(self) -> int | None:
        """The number of prompt ids. Without ids, it is the engine's own count, or None if that is unknown."""
        return self.usage.get("prompt_tokens") if self.prompt is None else self.keep + column_length(self.prompt)

    @property
    def completion_tokens(self) -> int | None:
        """The number of completion ids. Without ids, it is the engine's own count, or None if that is unknown."""
        return self.usage.get("completion_tokens") if self.completion is None else column_length(self.completion)


class RewardFacts(NamedTuple):
    """The facts from one reward component."""

    name: str
    step: int | None
    value: float
    weight: float
    layer: str | None
    evidence: bool
    failed: bool
    """Whether this reward leaves its tape unscored."""
    kind: str | None = None
    """Kind of the action that earned the reward. Only the audit sets it. It is None for a reward of the whole
    episode."""


class EndFacts(NamedTuple):
    """The facts from the end of a tape."""

    status: Status
    cause: CauseType | None
    seconds: float
    at: float


class Summary(NamedTuple):
    """The facts about a tape that are shown in a list of tapes. The index has them, so the tape needn't be read."""

    id: str
    segment: str
    """The segment in which the tape begins."""
    n: int
    """The ordinal of the tape's `begin` line in that segment."""
    split: str = ""
    task_hash: str = ""
    task: str = ""
    """The task's name, or an empty string if it has none."""
    group: str | None = None
    attempt: int = 0
    agent: str = ""
    env: str = ""
    effect: str | None = None
    parent: str | None = None
    """The tape from which this tape was forked."""
    begun: float = 0.0
    """Time of the `begin`, in seconds since 1970."""
    status: str | None = None
    """None while the tape is open."""
    cause: str | None = None
    ended: float | None = None
    reward: float | None = None
    """The reward recorded with the tape, or None, as in `Tape.reward`."""
    calls: int = 0
    actions: int = 0
    sampled: int = 0
    """Number of completion tokens in the tape's own calls, as far as the engines returned token ids."""
    cut: int = 0
    """Number of the tape's own answers that a limit on tokens cut off. An answer of fewer than `SHORT` tokens was meant
    to be short."""

    @property
    def trainable(self) -> bool:
        """Whether the reward measures the agent. It doesn't if a fault in the environment, model or machine ended the
        episode."""
        return trains(Status(self.status) if self.status else None, CauseType(self.cause) if self.cause else None)


BEGUN = Summary._fields.index("status")
"""Number of leading fields that the `begin` determines. Later records change only the fields after these."""


class TapeFold:
    """The sums over a tape's records so far. Every record after the `begin` must be added, in order."""

    __slots__ = ("actions", "begun", "calls", "cause", "cut", "ended", "failed", "parts", "sampled", "status")

    def __init__(self, begun: Summary, failed: bool = False, parts: Iterable[float] = ()) -> None:
        """`begun` is the summary to add to, `failed` is true if a component of its reward has failed, and `parts` has
        the components that have counted so far."""
        self.begun = begun
        self.status = Status(begun.status) if begun.status is not None else None
        self.cause = CauseType(begun.cause) if begun.cause is not None else None
        self.ended, self.failed, self.parts = begun.ended, failed, [*parts]
        self.calls, self.actions, self.sampled, self.cut = begun.calls, begun.actions, begun.sampled, begun.cut

    def add(self, facts: Facts) -> None:
        """Add one record. A reward after the end is a layer, which changes no sum."""
        if isinstance(facts, StepFacts):
            self.actions += facts.role == "action"
        elif isinstance(facts, CallFacts):
            self.calls += 1
            self.sampled += column_length(facts.completion)
            self.cut += facts.finish == "length" and (facts.completion_tokens or SHORT) >= SHORT
        elif isinstance(facts, RewardFacts):
            self.score(facts.value, facts.weight, facts.failed)
        elif isinstance(facts, EndFacts):
            self.status, self.cause, self.ended = facts.status, facts.cause, facts.at

    def score(self, value: float, weight: float, failed: bool) -> None:
        """Add one component of the reward, unless it is a layer."""
        if self.status is not None:
            return
        # A failure is permanent, because a sum without the failed component is not a reward (`total_reward`).
        if self.failed or failed:
            self.failed, self.parts = True, []
        elif weight:
            self.parts.append(weight * value)

    @property
    def reward(self) -> float | None:
        """The reward so far, or None, as in `Tape.reward`."""
        counts = bool(self.parts) and (self.status is None or self.trainable)
        return exact_sum(self.parts) if counts else None

    @property
    def trainable(self) -> bool:
        """Whether the tape ended in a way that allows scoring it and training on it."""
        return trains(self.status, self.cause)

    @property
    def held_out(self) -> bool:
        """Whether the tape's split is never trained on."""
        return self.begun.split not in TRAINED_SPLITS


Facts = Summary | StepFacts | CallFacts | RewardFacts | EndFacts | Label | Tokens | Use | Void


def read_facts(t: str, body: bytes) -> Facts | None:
    """Return the facts from a record of type `t`, or None if no fold needs that type. Raises NotATape if the record
    can't be read.

    For a `begin`, the facts are the initial summary for a `TapeFold`.
    """
    reader = _READERS.get(t)
    try:
        return reader(body) if reader is not None else None
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise NotATape(f"a {t} can't be read: {error}: {body[:80]!r}…") from error


def is_action(body: bytes) -> bool:
    """Return whether a step is an action. A summary needs nothing else from a step, and steps are half of a run's
    records."""
    match = _STEP.match(body)
    return match[2] == b"action" if match is not None else read_step(body).role == "action"


def call_id(body: bytes) -> str:
    """Return the id of a call, usually without reading its tokens."""
    match = _CALL.match(body)
    return match[1].decode() if match is not None else str(_read(body).get("call"))


def column_length(column: object) -> int:
    """Return the number of 4-byte values in a base64 column."""
    if not isinstance(column, str):
        return 0
    return (len(column) * 3 // 4 - column.count("=", -2)) // 4


def _read(body: bytes) -> dict[str, Any]:
    """Return the fields of a record, without validation, because the record was checked when it was written."""
    return read_body(body)


def read_begin(body: bytes, segment: str = "", n: int = 0) -> Summary:
    """Return the summary of a tape that has only its `begin`, which is line `n` of `segment`."""
    read = _read(body).get
    env = read("env") or {}
    return Summary(
        str(read("tape")),
        segment,
        n,
        read("split", "train"),
        read("task_hash", ""),
        (read("task") or {}).get("id", ""),
        read("group"),
        read("attempt") or 0,
        (read("agent") or {}).get("name", ""),
        env.get("name", ""),
        env.get("effect"),
        (read("parent") or {}).get("tape"),
        read("at", 0.0),
    )


def read_step(body: bytes) -> StepFacts:
    """Return the facts from a step, usually without reading its content, which is most of a run's bytes."""
    match = _STEP.match(body)
    if match is not None:
        return StepFacts(match[1].decode(), match[2].decode(), match[3].decode(), body)
    read = _read(body)
    return StepFacts(str(read.get("by")), str(read.get("role")), str(read.get("kind")), body)


def _call(body: bytes) -> CallFacts:
    read = _read(body).get
    return CallFacts(
        str(read("call")),
        str(read("by")),
        read("engine"),
        read("finish"),
        read("spans") or [],
        read("keep", 0),
        read("prompt"),
        read("completion"),
        read("logprobs"),
        read("usage") or {},
        read("attempts") or [],
    )


def read_reward(body: bytes) -> RewardFacts:
    """Return the facts from a reward."""
    read = _read(body)
    value, weight, evidence = float(read["value"]), float(read.get("weight", 1.0)), read.get("evidence")
    return RewardFacts(
        str(read.get("name", "reward")),
        read.get("step"),
        value,
        weight,
        read.get("layer"),
        evidence is not None,
        unscores(value, weight, evidence),
    )


def _end(body: bytes) -> EndFacts:
    read = _read(body)
    cause = (read.get("cause") or {}).get("type")
    return EndFacts(
        Status(read.get("status")),
        CauseType(cause) if cause is not None else None,
        read.get("seconds") or 0.0,
        read.get("at", 0.0),
    )


_READERS = {
    "begin": read_begin,
    "step": read_step,
    "call": _call,
    "label": Label.model_validate_json,
    "reward": read_reward,
    "end": _end,
    "tokens": Tokens.model_validate_json,
    "use": Use.model_validate_json,
    "void": Void.model_validate_json,
}


def attempts_of(closed: Iterable[Summary]) -> dict[str, list[Summary]]:
    """Return one episode for each attempt, by task hash. If an attempt has several episodes, this is the last one that
    counts (`Summary.trainable`), or the first one if none counts."""
    found: dict[str, dict[tuple[str, int], Summary]] = {}
    for s in closed:
        place = (s.group or s.id, s.attempt)
        attempts = found.setdefault(s.task_hash, {})
        if s.trainable or place not in attempts:
            attempts[place] = s
    return {task: list(attempts.values()) for task, attempts in found.items()}
