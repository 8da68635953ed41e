"""Re-execution: applies the recorded actions again in a fresh environment, with the recorded seed.

Each observation, reward and end is compared with the recorded one, without the fields that the environment declares as
varying (`Environment.varies`). Several executions show which fields differ between them, and so what to declare. No
agent runs and no model is called. Irreversible environments are refused.
"""

from __future__ import annotations

import asyncio
import random
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...tapes import Action, CauseType, Observation, Status, Tape
from ...tapes.audit.verdict import (
    Divergence,
    Likely,
    Verdict,
    clipped,
    differences,
    diverged,
    unverifiable,
    verified,
)
from ...tapes.records import Reward, trains
from ...tapes.steps import Unknown
from ..environment import (
    Environment,
    Normalisers,
    Outcome,
    RestoreMismatch,
    as_observation,
    as_outcome,
    new_environment,
    without,
)

SECONDS = 60.0
"""Time limit of one execution, in seconds of wall-clock time."""
_SHAPES = (
    r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?",
    r"0x[0-9a-fA-F]+",
    r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?",
    r"[0-9a-fA-F]{6,}",
)
"""Patterns of text that often varies, the narrowest first: ids, times, addresses, numbers, hashes."""


@dataclass(frozen=True)
class Moment:
    """The environment's results at one point of an episode."""

    turn: int | None
    """None at `reset` and for the episode as a whole."""
    step: int | None
    """Index of the recorded observation, else of the action; None for the episode as a whole."""
    values: dict[str, Any] = field(default_factory=dict)
    """Plain values by field."""


async def reexec(
    tape: Tape,
    make: Callable[[], Environment[Any]],
    *,
    normalise: Normalisers | None = None,
    times: int = 1,
    seconds: float = SECONDS,
) -> Verdict:
    """Execute the actions of `tape` again in an environment from `make`, `times` times, and compare.

    `normalise` adds to the fields that the environment declares as varying.
    """
    env = new_environment(make)
    rules = {**env.varies, **(normalise or {})}
    unable = _unable(tape, env)
    if unable is not None:
        await env.close()
        return unverifiable("reexec", tape.id, unable)
    then = list(_recorded(tape))
    runs: list[list[Moment]] = []
    found: Divergence | None = None
    for k in range(times):
        try:
            async with asyncio.timeout(seconds):
                moments, raised = await _execute(tape, env if k == 0 else new_environment(make))
        except TimeoutError:
            return unverifiable("reexec", tape.id, f"the environment did not finish within {seconds:g} s")
        runs.append(moments)
        found = found or _compare(tape, then, moments, raised, rules)
    more: dict[str, Any] = {"checked": _counts(then), **_variation(runs, rules)}
    return verified("reexec", tape.id, **more) if found is None else diverged("reexec", found, **more)


def _unable(tape: Tape, env: Environment[Any]) -> str | None:
    if "irreversible" in (env.effect, tape.begin.env.effect):
        return (
            f"{type(env).__name__} is irreversible: executing its actions again would repeat their effects on the "
            "outside world"
        )
    unknown = next((step for step in tape if isinstance(step, Unknown)), None)
    if unknown is not None:
        return f"no imported module defines the step kind {unknown.original!r}: name the module that defines it"
    if not tape.entries:
        return f"the tape has no steps: it ended with {tape.cause.message if tape.cause else tape.status}"
    return None


# What was recorded


def _recorded(tape: Tape) -> Iterator[Moment]:
    """One moment for `reset`, one for each action, one for the episode."""
    rewards: dict[int | None, list[Reward]] = defaultdict(list)
    others = tape.begin.env.config.get("rewards")  # sources that read the tape: `rescore` runs those again
    for reward in tape.rewards:
        if not isinstance(others, list) or reward.name.partition("/")[0] not in others:
            rewards[reward.step].append(reward)
    entries = tape.entries
    if tape.inherited == 0 and isinstance(entries[0].step, Observation):
        yield Moment(None, 0, {"observation": _plain(entries[0].step)})
    own = [k for k, entry in enumerate(entries) if k >= tape.inherited and isinstance(entry.step, Action)]
    for k in own:
        after = entries[k + 1] if k + 1 < len(entries) else None
        seen = after.step if after is not None and isinstance(after.step, Observation) else None
        ends = k == own[-1] and tape.status in (Status.FINISHED, Status.TRUNCATED)
        done = str(tape.status) if ends else None
        scored = _scored((r.name, r.value, r.weight) for r in rewards[k])
        values = {"observation": _plain(seen), **scored, "done": done}
        yield Moment(entries[k].turn, k + 1 if seen is not None else k, values)
    yield Moment(None, None, _scored((r.name, r.value, r.weight) for r in rewards[None]))


def _plain(step: Observation | None) -> Any:
    return None if step is None else {"kind": step.kind, step.kind: step.model_dump(mode="json")}


def _scored(parts: Any) -> dict[str, float]:
    return {f"{'reward' if weight else 'metric'}.{name}": float(value) for name, value, weight in parts}


def _answered(outcome: Outcome) -> dict[str, float]:
    """The components as rollout records them: metrics have weight 0."""
    parts = [(name, value, 1.0) for name, value in outcome.components()]
    at = len(parts) - len(outcome.metrics)
    return _scored((name, value, weight if k < at else 0.0) for k, (name, value, weight) in enumerate(parts))


# What happens now


async def _execute(tape: Tape, env: Environment[Any]) -> tuple[list[Moment], Exception | None]:
    """The moments of one execution, and the exception that ended it, if any."""
    moments: list[Moment] = []
    try:
        await _steps(tape, env, moments)
    except Exception as error:  # compared with the recorded error
        return moments, error
    finally:
        await env.close()
    return moments, None


async def _steps(tape: Tape, env: Environment[Any], moments: list[Moment]) -> None:
    begin = tape.begin
    env.rng = random.Random(begin.env_seed)
    if tape.parent is not None:
        await env.restore(begin.task.given, tape.parent)
    else:
        first = as_observation(await env.reset(begin.task.given))
        moments.append(Moment(None, 0, {"observation": _plain(first)}))
    for k, entry in enumerate(tape.entries):
        if k < tape.inherited or not isinstance(entry.step, Action):
            continue
        outcome = as_outcome(await env.step(entry.step))
        done = Status.FINISHED if outcome.terminated else Status.TRUNCATED if outcome.truncated else None
        seen, ends = _plain(outcome.observation), done.value if done is not None else None
        moments.append(Moment(entry.turn, k, {"observation": seen, **_answered(outcome), "done": ends}))
    status, cause = tape.status, tape.cause
    last = await env.finish(status) if status is not None and trains(status, cause.type if cause else None) else None
    moments.append(Moment(None, None, _answered(last) if last is not None else {}))


# Comparing


def _compare(
    tape: Tape, then: Sequence[Moment], now: Sequence[Moment], raised: Exception | None, rules: Normalisers
) -> Divergence | None:
    recorded = tape.cause if tape.cause is not None and tape.cause.type is CauseType.ENVIRONMENT else None
    for a, b in zip(then, now, strict=False):
        if recorded is not None and a.values.get("observation") is None and a in then[-2:-1]:
            break  # the recorded step failed here, so the tape holds no result to compare
        for found in differences(normalised(a.values, rules), normalised(b.values, rules)):
            what, old, new = found.field, *clipped(found.recorded, found.observed)
            return Divergence(
                tape=tape.id,
                turn=a.turn,
                step=a.step,
                by="env",
                field=what,
                recorded=old,
                observed=new,
                cause=Likely.REWARD if what.startswith(("reward.", "metric.")) else Likely.ENVIRONMENT,
                sentence=f"{_when(a)}: `{what}` was {old!r:.200} and is now {new!r:.200}",
            )
    return _compare_errors(tape, then, now, raised)


def _compare_errors(
    tape: Tape, then: Sequence[Moment], now: Sequence[Moment], raised: Exception | None
) -> Divergence | None:
    cause = tape.cause if tape.cause is not None and tape.cause.type is CauseType.ENVIRONMENT else None
    was = cause.error if cause is not None and cause.error != "RenderFailed" else None
    new = type(raised).__qualname__ if raised is not None else None
    if was == new:
        return None
    # If nothing raises now, the recorded error belongs to the last action that was taken.
    at = then[min(len(now), len(then) - 1) if raised is not None else max(0, len(then) - 2)]
    frames = traceback.extract_tb(raised.__traceback__) if raised is not None else None
    where = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else None
    current = f"the environment raises {new}: {raised}" if new is not None else "the environment raises no error"
    if isinstance(raised, RestoreMismatch):
        current = f"the turns before the fork give other results now: {raised}"
    recorded = f"recorded: {was}" if was is not None else "no error is recorded"
    return Divergence(
        tape=tape.id,
        turn=at.turn,
        step=at.step,
        by="env",
        field="error",
        recorded=was,
        observed=new,
        cause=Likely.ENVIRONMENT,
        sentence=f"{_when(at)}: {current}; {recorded}",
        where=where,
    )


def _when(moment: Moment) -> str:
    if moment.turn is not None:
        return f"turn {moment.turn}"
    return "at reset" if moment.step == 0 else "at the end of the episode"


def normalised(values: Mapping[str, Any], rules: Normalisers) -> dict[str, Any]:
    """The values, without the fields that are declared as varying."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        if key == "observation" and value is not None:
            kind = value["kind"]
            made[key] = {"kind": kind, kind: without(value[kind], kind, rules)}
        else:
            made[key] = without(value, key, rules)
    return made


def _counts(moments: Sequence[Moment]) -> dict[str, int]:
    return {
        "observations": sum(m.values.get("observation") is not None for m in moments),
        "rewards": sum(key.startswith(("reward.", "metric.")) for m in moments for key in m.values),
    }


# What varies


def _variation(runs: Sequence[Sequence[Moment]], rules: Normalisers) -> dict[str, Any]:
    """For several executions: the share of moments in which a field differs, and the `varies` that makes them equal."""
    if len(runs) < 2:
        return {}
    seen: dict[str, list[list[Any]]] = defaultdict(list)
    for moments in zip(*runs, strict=False):
        for name in dict.fromkeys(name for m in moments for name, _ in _leaves(normalised(m.values, rules))):
            columns = [dict(_leaves(normalised(m.values, rules))).get(name) for m in moments]
            seen[name].append(columns)
    vary = {name: rows for name, rows in seen.items() if any(any(v != row[0] for v in row) for row in rows)}
    measured = {name: sum(any(v != row[0] for v in row) for row in rows) / len(rows) for name, rows in vary.items()}
    proposed: dict[str, str | None] = {}
    for name, rows in vary.items():
        rule = _proposal(rows)
        field_name = re.sub(r"\[\d+\]", "[]", name)
        proposed[field_name] = None if proposed.get(field_name, rule) != rule else rule
    return {"measured": measured, "proposed": proposed}


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(field, value) of every leaf; the fields of an observation begin with its kind."""
    for key, value in values.items():
        if key == "observation" and value is not None:
            yield from _under(value["kind"], value[value["kind"]])
        else:
            yield key, value


def _under(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _under(f"{name}.{key}", item)
    elif isinstance(value, list):
        for k, item in enumerate(value):
            yield from _under(f"{name}[{k}]", item)
    else:
        yield name, value


def _proposal(rows: Sequence[Sequence[Any]]) -> str | None:
    """The narrowest pattern whose removal makes all executions equal; None to ignore the whole field."""
    if not all(isinstance(value, str) for row in rows for value in row):
        return None
    for shape in _SHAPES:
        if all(len({re.sub(shape, "…", value) for value in row}) == 1 for row in rows):
            return shape
    return None
