"""A human-readable form of a tape: a summary, and one line per step with its rewards and its number of tokens.

It shows rewards and private parts, so it is meant for users, not for agents. All functions are pure and convert a
`Tape` to immutable values. The command line and the viewer format these values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

from pydantic import JsonValue

from .pictures import with_visuals
from .records import Call
from .steps import (
    ParseError,
    Role,
    Step,
    ToolCall,
    ToolCalls,
    ToolResults,
    Unknown,
    parts_of,
    role_of,
    text_of_fields,
)
from .tape import Tape
from .value import Value


class TapeSummary(Value):
    """The entry for a tape in a list of tapes."""

    id: str
    status: str
    """A `Status`, or `running`."""
    cause: str | None
    """Who caused the end or which limit was reached, and the message. It is None if the end has no cause."""
    raised_at: str | None
    """Where the exception was raised, as `file:line in function`, or None if there was no exception."""
    reward: float | None
    """The reward, or None if the tape is unscored."""
    split: str
    agent: str
    env: str
    group: str | None
    attempt: int
    parent: str | None
    """The point that this tape was forked from, as `tape@turn`."""
    steps: int
    turns: int
    calls: int
    sampled: int
    """Number of completion tokens in calls with log-probs."""
    authored: int
    """Number of completion tokens in calls without log-probs. No model sampled these tokens."""
    versions: tuple[str, ...]
    """The policy versions that sampled tokens, in order of first use."""
    seconds: float | None
    began: float
    """Start of the episode in seconds since 1970."""


class Fragment(Value):
    """A part of a step, as people read it: one tool call such as `count(shelf=92)`, the result of one tool call, or the
    whole text of any other step."""

    text: str
    tool: str = ""
    """The tool's name, or an empty string if the fragment isn't a call or a result."""
    error: bool = False
    """True if the tool failed, or if the model's answer could not be parsed."""


class StepLine(Value):
    """One step."""

    index: int
    turn: int
    """Number of the turn, counted from 0."""
    by: str
    role: Role
    kind: str
    text: str
    """The text that a model reads."""
    fragments: tuple[Fragment, ...]
    """The step as people read it."""
    rewards: dict[str, float]
    """Weight * value of each component that this step earned."""
    metrics: dict[str, float]
    """The value of each component with weight 0."""
    tokens: int
    """Number of completion tokens that the step was parsed from."""
    inherited: bool
    """True if the step is in the prefix of a fork and so belongs to the parent."""


class CallLine(Value):
    """One model call."""

    call: str
    by: str
    engine: str
    prompt: int | None
    """Number of prompt tokens, including those kept from the base, or None if the engine returned only text."""
    kept: int
    """Number of prompt tokens that are kept from the call's base."""
    completion: int | None
    finish: str | None
    temperature: float
    mean_logprob: float | None
    """The mean log-prob of the completion tokens, or None if no log-prob is known."""
    spans: tuple[tuple[str, int, int], ...]
    split: str | None
    """Why the call starts a new training row (see `Call.split`)."""
    cut: int
    cut_messages: int
    """Number of tokens and of messages that `limits.keep_prompt` left out of the prompt."""
    seconds: float
    retries: int


def summarise(tape: Tape) -> TapeSummary:
    """Return the summary of an open or closed tape."""
    begin, end, calls = tape.begin, tape.end, tape.calls
    versions = dict.fromkeys(version for call in calls for version, _, _ in call.spans)
    return TapeSummary(
        id=tape.id,
        status=tape.status.value if tape.status else "running",
        cause=_cause(tape),
        raised_at=tape.cause.frame if tape.cause is not None else None,
        reward=tape.reward,
        split=begin.split,
        agent=begin.agent.name,
        env=begin.env.name,
        group=begin.group,
        attempt=begin.attempt,
        parent=f"{begin.parent.tape}@{begin.parent.turn}" if begin.parent else None,
        steps=len(tape),
        turns=tape.turns,
        calls=len(calls),
        sampled=sum(len(c.completion or ()) for c in calls if c.logprobs is not None),
        authored=sum(len(c.completion or ()) for c in calls if c.logprobs is None),
        versions=tuple(versions),
        seconds=end.seconds if end is not None else None,
        began=begin.at,
    )


def step_lines(tape: Tape) -> list[StepLine]:
    """Return the lines for all steps, in order."""
    rewards: dict[int, dict[str, float]] = {}
    metrics: dict[int, dict[str, float]] = {}
    for reward in tape.rewards:
        if reward.step is not None:
            earned = (rewards if reward.weight else metrics).setdefault(reward.step, {})
            earned[reward.name] = earned.get(reward.name, 0.0) + (reward.weight or 1.0) * reward.value
    return [
        StepLine(
            index=i,
            turn=entry.turn,
            by=entry.by,
            role=role_of(entry.step),
            kind=kind_of(entry.step),
            text=reads(entry.step),
            fragments=fragments_of(entry.step),
            rewards=rewards.get(i, {}),
            metrics=metrics.get(i, {}),
            tokens=sum(b - a for _, a, b in entry.calls),
            inherited=i < tape.inherited,
        )
        for i, entry in enumerate(tape.entries)
    ]


def episode_rewards(tape: Tape) -> dict[str, float]:
    """Return weight * value of each component of the whole episode. A metric (weight 0) has its plain value."""
    return {r.name: (r.weight or 1.0) * r.value for r in tape.rewards if r.step is None}


def call_lines(tape: Tape) -> list[CallLine]:
    """Return the lines for the tape's own model calls, in order. Calls on its parent tape are left out."""
    return [call_line(call) for call in tape.calls]


def call_line(call: Call) -> CallLine:
    """Return the line for one model call."""
    known = [x for x in call.logprobs or () if x == x]
    return CallLine(
        call=call.call,
        by=call.by,
        engine=call.engine,
        prompt=call.keep + len(call.new_prompt) if call.new_prompt is not None else None,
        kept=call.keep,
        completion=len(call.completion) if call.completion is not None else None,
        finish=call.finish,
        temperature=call.sampling.temperature,
        mean_logprob=sum(known) / len(known) if known else None,
        spans=call.spans,
        split=call.split,
        cut=call.cut,
        cut_messages=call.cut_messages,
        seconds=sum(a.seconds for a in call.attempts),
        retries=max(0, len(call.attempts) - 1),
    )


def _cause(tape: Tape) -> str | None:
    cause = tape.cause
    if cause is None:
        return None
    return ": ".join(part for part in (cause.type.value, cause.error, cause.message) if part)


def kind_of(step: Step) -> str:
    """Return the step's kind on the tape, even if its class is not imported."""
    return step.original if isinstance(step, Unknown) else step.kind


def not_imported(tape: Tape) -> str:
    """Return a sentence that names the tape's steps whose classes aren't imported, and the modules to import. It is
    empty if there are none."""
    kinds = sorted({step.original for step in tape if isinstance(step, Unknown)})
    if not kinds:
        return ""
    modules = {one.cls.partition(":")[0]: None for one in (tape.begin.agent, tape.begin.env)}
    named = [name for name in modules if name and name.partition(".")[0] not in ("tapereel", "__main__")]
    remedy = f"import {', '.join(named)}" if named else "import the module that defines them"
    return f"the classes of the steps {', '.join(kinds)} aren't imported, so they are Unknown steps: {remedy} first"


def reads(step: Step) -> str:
    """Return `str(step)`. For a step whose class is not imported, apply `Step.__str__` to its content."""
    if isinstance(step, Unknown):
        return text_of_fields(cast(dict[str, object], with_visuals(step.content)))
    return str(step)


def fragments_of(step: Step) -> tuple[Fragment, ...]:
    """Return the step as people read it. Tool calls and their results have one fragment each."""
    if isinstance(step, ToolCalls):
        return tuple(Fragment(text=call_text(call), tool=call.name) for call in step.calls)
    if isinstance(step, ToolResults):
        return tuple(
            Fragment(text="\n".join((one.content, *map(str, one.pictures))), tool=one.name, error=one.error)
            for one in step.results
        )
    text = reads(step) if isinstance(step, Unknown) else "\n".join(map(str, parts_of(step)))
    return (Fragment(text=text, error=isinstance(step, ParseError)),)


def shown(step: Step) -> str:
    """Return the text of a step for people. A tool call reads `count(shelf=92)`, and its result `86`. If several tools
    were called at once, each result begins with its tool's name."""
    return joined(fragments_of(step), role_of(step))


def joined(fragments: Sequence[Fragment], role: Role) -> str:
    """Return the text of a step of this role for people, from its fragments."""
    named = len(fragments) > 1 and role == "observation"
    return "\n".join(f"{one.tool}: {one.text}" if named else one.text for one in fragments)


def call_text(call: ToolCall) -> str:
    """Return a tool call as it is written in code: `search(query="tapes", limit=3)`."""
    given = (f"{name if name.isidentifier() else _json(name)}={_json(value)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(given)})"


def plain(value: JsonValue) -> str:
    """Return a string unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else _json(value)


def _json(value: JsonValue) -> str:
    return json.dumps(value, ensure_ascii=False)
