"""Verdicts: the outcome of checking a tape, and the place of its first divergence.

A check has one of three outcomes: `verified`, `diverged` (with the place, both values and the likely cause), or
`unverifiable` (with the reason). The models are frozen and consist of JSON values, so scripts and viewers can use them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, Unpack

from pydantic import Field, JsonValue, computed_field
from pydantic_core import to_jsonable_python

from ..value import STANDINGS, Standing, Value

if TYPE_CHECKING:
    from ..tape import Tape

CLIP = 4000
"""Number of characters that a divergence keeps from a value. A longer value is cut around the first difference."""


class Likely(StrEnum):
    """The likely cause of a divergence. This is a guess from the field that differs, meant as a starting point."""

    CODE = "code"
    """The agent's code took another step, used another setting or raised a new error."""
    PROMPT = "prompt"
    """The agent's prompt differs: its system prompt, or messages that it writes itself."""
    TOOLS = "tools"
    """The offered functions differ, or their order differs."""
    PARSER = "parser"
    """The model's answer equals the recorded one, but was parsed as another step."""
    ORDER = "order"
    """The requests or steps are the same, but in another order."""
    RENDERING = "rendering"
    """The messages are the same, but their token ids differ, due to the tokenizer, chat template or renderer."""
    EXHAUSTED = "exhausted"
    """The agent made more or fewer requests than the tape holds."""
    NONDETERMINISM = "nondeterminism"
    """The agent reads a clock, randomness, a socket or another process. `where` names the line."""
    ENVIRONMENT = "environment"
    """The environment reacted differently than in the recording."""
    WEIGHTS = "weights"
    """The model differs from the one that sampled the tape."""
    REWARD = "reward"
    """The reward code differs from the code that scored the tape."""


class Divergence(Value):
    """The first difference between an observed value and the recorded one."""

    tape: str
    turn: int | None = None
    """Number of the turn, counted from 0, or None if the place has no turn."""
    record: int | None = None
    """Index of the record in the tape, where `begin` has index 0. It is None if nothing was recorded."""
    step: int | None = None
    """Index of the step in the tape, or None if the place is a call or the end."""
    call: str | None = None
    """Id of the call, or None if the place is not a call."""
    by: str | None = None
    """The path of the agent that produced the differing value (`planner/searcher`), or `env`."""
    field: str
    """What differs, such as `messages[1].content`, `prompt[17]`, `observation.text`, `reward.exact` or
    `logprobs[3]`."""
    recorded: JsonValue = None
    """The recorded value, or None if nothing was recorded. Long strings are cut around the difference."""
    observed: JsonValue = None
    """The observed value, or None if nothing was observed."""
    cause: Likely
    sentence: str
    """A human-readable description of what happened."""
    where: str | None = None
    """The code that caused the divergence, as `file:line in function`, or None if no line is known."""

    @computed_field
    @property
    def diff(self) -> list[str]:
        """Both values, line by line. `-` marks recorded lines, `+` observed lines, and ` ` lines in both."""
        return diff_lines(self.recorded, self.observed)


class Failure(Value):
    """An error, a timeout or an unusable value in code that a check had to run."""

    source: str
    """The name of the code. For a reward, this is the name of its source."""
    error: str
    """What happened, with the exception's name and message."""
    where: str | None = None
    """The code that failed, as `file:line in function`, or None if no line is known."""


class Verdict(Value):
    """The outcome of one check of one tape."""

    verb: str
    """`replay`, `reexec`, `rescore` or `requery`."""
    tape: str
    outcome: Literal["verified", "diverged", "unverifiable"]
    digest: str | None = None
    """The tape's digest when it was checked, or None for an open tape."""
    divergence: Divergence | None = None
    """The first difference that was found, or None if the outcome isn't `diverged`."""
    reason: str | None = None
    """Why the tape can't be verified, or None if the outcome isn't `unverifiable`."""
    checked: dict[str, int] = Field(default={})
    """Number of values that were compared and found equal, for each kind of value: calls, steps, observations, rewards
    and tokens."""
    not_checked: tuple[str, ...] = ()
    """Parts of the tape that the verdict doesn't cover."""
    failures: tuple[Failure, ...] = ()
    """Failures of code that affect only a part of this check."""
    measured: dict[str, float] = Field(default={})
    """Measurements made by the check, such as the largest difference between log-probs."""
    precision: str | None = None
    """The precision in which log-probs were computed, or None if none were."""
    proposed: dict[str, str | None] = Field(default={})
    """The declaration (`Environment.varies`) for each field that varies between executions."""

    def of(self, tape: Tape) -> Verdict:
        """Return this verdict with the digest of `tape`, the tape that was checked."""
        return self.model_copy(update={"digest": tape.digest if tape.closed else None})

    def __str__(self) -> str:
        if self.divergence is not None:
            d = self.divergence
            at = "" if d.turn is None else f" at turn {d.turn}"
            return f"diverged{at}, {d.field}: {d.sentence}"
        return f"unverifiable: {self.reason}" if self.reason is not None else "verified"


class Verdicts(Value):
    """The verdicts of one verb on a run or on some of its tapes."""

    verb: str
    run: str
    verdicts: tuple[Verdict, ...]
    torn: tuple[str, ...] = ()
    """A sentence for each segment whose tail can't be read."""
    turn: int | None = None
    """The only turn that was checked, or None if all turns were."""
    seconds: float = 0.0
    """Wall-clock seconds that the check took."""

    @computed_field
    @property
    def counts(self) -> dict[str, int]:
        """Number of tapes by outcome."""
        counts = {"verified": 0, "diverged": 0, "unverifiable": 0}
        for verdict in self.verdicts:
            counts[verdict.outcome] += 1
        return counts

    @computed_field
    @property
    def exit_code(self) -> int:
        """The exit code: 1 if a tape diverged, otherwise 2 if a tape is unverifiable or none was checked, otherwise
        0."""
        counts = self.counts
        if counts["diverged"]:
            return 1
        return 2 if counts["unverifiable"] or not self.verdicts else 0

    @computed_field
    @property
    def verdict(self) -> Standing:
        """The exit code in words: `holds`, `broken` if a tape diverged, or `undecided` if a tape can't be verified or
        no tape was checked."""
        return STANDINGS[self.exit_code]


class Covered(TypedDict, total=False):
    """What a verdict covers, as fields of `Verdict`."""

    checked: dict[str, int]
    not_checked: tuple[str, ...]
    failures: tuple[Failure, ...]
    measured: dict[str, float]
    precision: str | None
    proposed: dict[str, str | None]


def verified(verb: str, tape: str, **more: Unpack[Covered]) -> Verdict:
    """Return a verdict with the outcome `verified`."""
    return Verdict(verb=verb, tape=tape, outcome="verified", **more)


def diverged(verb: str, divergence: Divergence, **more: Unpack[Covered]) -> Verdict:
    """Return a verdict with the outcome `diverged`."""
    return Verdict(verb=verb, tape=divergence.tape, outcome="diverged", divergence=divergence, **more)


def unverifiable(verb: str, tape: str, reason: str, **more: Unpack[Covered]) -> Verdict:
    """Return a verdict with the outcome `unverifiable`."""
    return Verdict(verb=verb, tape=tape, outcome="unverifiable", reason=reason, **more)


# Comparing


class Difference(NamedTuple):
    """One field that differs between two values."""

    field: str
    recorded: Any
    """The recorded value, or None if it is missing."""
    observed: Any
    """The observed value, or None if it is missing."""


def differences(recorded: object, observed: object, field: str = "") -> Iterator[Difference]:
    """Yield the fields that differ between two plain values, in order. If one list is longer than the other, each of
    its extra items is a difference."""
    if isinstance(recorded, dict) and isinstance(observed, dict):
        for key in dict.fromkeys([*recorded, *observed]):
            yield from differences(recorded.get(key), observed.get(key), f"{field}.{key}" if field else str(key))
    elif isinstance(recorded, list | tuple) and isinstance(observed, list | tuple):
        for k, (then, now) in enumerate(zip(recorded, observed, strict=False)):
            yield from differences(then, now, f"{field}[{k}]")
        for k in range(min(len(recorded), len(observed)), max(len(recorded), len(observed))):
            yield Difference(
                f"{field}[{k}]", recorded[k] if k < len(recorded) else None, observed[k] if k < len(observed) else None
            )
    elif not _same(recorded, observed):
        yield Difference(field, recorded, observed)


def plain(value: object) -> JsonValue:
    """Return a value as JSON represents it."""
    return to_jsonable_python(value, inf_nan_mode="strings", fallback=repr)


def clipped(recorded: object, observed: object) -> tuple[JsonValue, JsonValue]:
    """Return both values as JSON, with long strings cut around their first difference."""
    then, now = plain(recorded), plain(observed)
    if not isinstance(then, str) or not isinstance(now, str):
        return _clip(then), _clip(now)
    at = next((k for k, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
    return _window(then, at), _window(now, at)


def diff_lines(recorded: object, observed: object) -> list[str]:
    """Compare two plain values line by line. `-` marks lines in the first, `+` in the second, and ` ` in both."""
    return list(_marked(_text_lines(recorded), _text_lines(observed)))


def _same(recorded: Any, observed: Any) -> bool:
    # NaN equals NaN here, because a log-prob that is unknown both times isn't a divergence. As in JSON, True is not 1.
    if isinstance(recorded, float) and isinstance(observed, float) and recorded != recorded:
        return observed != observed
    return isinstance(recorded, bool) == isinstance(observed, bool) and recorded == observed


def _clip(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return value if len(text) <= CLIP else _window(text, 0)


def _window(text: str, at: int) -> str:
    if len(text) <= CLIP:
        return text
    start = max(0, at - CLIP // 2)
    end = start + CLIP
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"


def _text_lines(value: Any) -> list[str]:
    if value is None:
        return []
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)).splitlines()


def _marked(recorded: list[str], observed: list[str]) -> Iterable[str]:
    for line in difflib.ndiff(recorded, observed):
        if not line.startswith("?"):
            yield line[:2].strip().ljust(1) + line[2:]
