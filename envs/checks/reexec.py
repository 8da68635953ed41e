"""Re-execution: applies the recorded actions again in a fresh environment, with the recorded seed.

Observations, rewards and the end of the episode are compared with the recorded ones, except for the fields that the
environment declares as varying (`Environment.varies`). If a tape is executed several times, the verdict also names the
fields that differ between the executions, with a proposal for `varies`. No agent runs and no model is called.
Irreversible environments are refused.
"""

from __future__ import annotations

import asyncio
import random
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import JsonValue

from ...tapes import Action, Cause, CauseType, Observation, Status, Tape
from ...tapes.audit.checking import check_run
from ...tapes.audit.verdict import (
    Divergence,
    Likely,
    Verdict,
    Verdicts,
    clipped,
    differences,
    diverged,
    unverifiable,
    verified,
)
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.errors import UsageError
from ...tapes.status import trains
from ...tapes.steps import Unknown
from ...tapes.store.run_directory import recorded_settings
from ..environment import (
    AnyEnvironment,
    Environment,
    EnvironmentFactory,
    EnvironmentFault,
    Normalisers,
    RestoreMismatch,
    as_observation,
    as_outcome,
    as_reaction,
    new_environment,
    without,
)
from ..load_named import load_function
from ..rewards.sources import as_recorded

if TYPE_CHECKING:
    from ...tapes.store.store import Store

SECONDS = 60.0
"""Time limit for one execution, in seconds of wall-clock time."""
_SHAPES = (
    r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?",
    r"0x[0-9a-fA-F]+",
    r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?",
    r"[0-9a-fA-F]{6,}",
)
"""Patterns for text that often varies, narrowest first: ids, times, addresses, numbers, hashes."""


@dataclass(frozen=True)
class Moment:
    """What the environment returned at one point of an episode."""

    turn: int | None
    """The turn, or None for `reset` and for the whole episode."""
    step: int | None
    """The index of the recorded observation, or of the action if no observation follows. None for the whole episode."""
    values: dict[str, JsonValue] = field(default_factory=dict)
    """The JSON value of each field."""


async def reexec(
    tape: Tape,
    make: EnvironmentFactory,
    *,
    normalise: Normalisers | None = None,
    times: int = 1,
    seconds: float = SECONDS,
) -> Verdict:
    """Execute the recorded actions `times` times, each time in a new environment, and compare the results with `tape`.

    `normalise` lists varying fields in addition to the environment's own `varies`.
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
    counts = {
        "observations": sum(m.values.get("observation") is not None for m in then),
        "rewards": sum(key.startswith(("reward.", "metric.")) for m in then for key in m.values),
    }
    more: dict[str, Any] = {"checked": counts, **_variation(runs, rules)}
    return verified("reexec", tape.id, **more) if found is None else diverged("reexec", found, **more)


def _unable(tape: Tape, env: AnyEnvironment) -> str | None:
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


# The recorded episode


def _recorded(tape: Tape) -> Iterator[Moment]:
    """Yield one moment for `reset`, one for each action and one for the episode."""
    rewards: dict[int | None, list[tuple[str, float, float]]] = defaultdict(list)
    others = tape.begin.env.config.get("rewards")  # sources that read the tape: `rescore` runs these again
    if isinstance(others, list):
        others = as_recorded([str(name) for name in others], {reward.name for reward in tape.rewards})
    for reward in tape.rewards:
        if not isinstance(others, list) or reward.name.partition("/")[0] not in others:
            rewards[reward.step].append((reward.name, reward.value, reward.weight))
    entries = tape.entries
    if tape.inherited == 0 and isinstance(entries[0].step, Observation):
        yield Moment(None, 0, {"observation": _plain(entries[0].step)})
    own = [k for k, entry in enumerate(entries) if k >= tape.inherited and isinstance(entry.step, Action)]
    for k in own:
        after = entries[k + 1] if k + 1 < len(entries) else None
        seen = after.step if after is not None and isinstance(after.step, Observation) else None
        ends = k == own[-1] and tape.status in (Status.FINISHED, Status.TRUNCATED)
        done = str(tape.status) if ends else None
        values = {"observation": _plain(seen), **_scored(rewards[k]), "done": done}
        yield Moment(entries[k].turn, k + 1 if seen is not None else k, values)
    yield Moment(None, None, _scored(rewards[None]))


def _plain(step: Observation | None) -> dict[str, JsonValue] | None:
    return None if step is None else {"kind": step.kind, step.kind: step.model_dump(mode="json")}


def _scored(parts: Iterable[tuple[str, float, float]]) -> dict[str, JsonValue]:
    """Convert reward components, each given as (name, value, weight), to fields. A metric has the weight 0."""
    return {f"{'reward' if weight else 'metric'}.{name}": float(value) for name, value, weight in parts}


# What happens now


async def _execute(tape: Tape, env: AnyEnvironment) -> tuple[list[Moment], Exception | None]:
    """Return the moments of one execution, and the exception that ended it, if any."""
    moments: list[Moment] = []
    try:
        await _steps(tape, env, moments)
    except Exception as error:  # compared with the recorded error
        return moments, error
    finally:
        await env.close()
    return moments, None


async def _steps(tape: Tape, env: AnyEnvironment, moments: list[Moment]) -> None:
    begin = tape.begin
    failed = tape.cause is not None and tape.cause.error == EnvironmentFault.__qualname__
    read = as_reaction if failed else as_outcome
    env.rng = random.Random(begin.env_seed)
    if tape.parent is not None:
        await env.restore(begin.task.given, tape.parent)
    else:
        first = as_observation(await env.reset(begin.task.given))
        moments.append(Moment(None, 0, {"observation": _plain(first)}))
    for k, entry in enumerate(tape.entries):
        if k < tape.inherited or not isinstance(entry.step, Action):
            continue
        outcome = read(await cast("Environment[Action]", env).step(entry.step))
        done = Status.FINISHED if outcome.terminated else Status.TRUNCATED if outcome.truncated else None
        seen, ends = _plain(outcome.observation), done.value if done is not None else None
        moments.append(Moment(entry.turn, k, {"observation": seen, **_scored(outcome.components()), "done": ends}))
    status, cause = tape.status, tape.cause
    last = await env.finish(status) if status is not None and trains(status, cause.type if cause else None) else None
    moments.append(Moment(None, None, _scored(last.components()) if last is not None else {}))


# Comparing


def _compare(
    tape: Tape, then: Sequence[Moment], now: Sequence[Moment], raised: Exception | None, rules: Normalisers
) -> Divergence | None:
    fault = tape.cause if tape.cause is not None and tape.cause.type is CauseType.ENVIRONMENT else None
    for a, b in zip(then, now, strict=False):
        if fault is not None and a.values.get("observation") is None and a in then[-2:-1]:
            break  # the recorded step failed here, so the tape holds no result to compare
        for found in differences(normalised(a.values, rules), normalised(b.values, rules)):
            old, new = clipped(found.recorded, found.observed)
            return Divergence(
                tape=tape.id,
                turn=a.turn,
                step=a.step,
                by="env",
                field=found.field,
                recorded=old,
                observed=new,
                cause=Likely.REWARD if found.field.startswith(("reward.", "metric.")) else Likely.ENVIRONMENT,
                sentence=f"{_when(a)}: `{found.field}` was {old!r:.200} and is now {new!r:.200}",
            )
    return _compare_errors(tape, fault, then, now, raised)


def _compare_errors(
    tape: Tape, fault: Cause | None, then: Sequence[Moment], now: Sequence[Moment], raised: Exception | None
) -> Divergence | None:
    was = fault.error if fault is not None and fault.error != "RenderFailed" else None
    new = type(raised).__qualname__ if raised is not None else None
    if was == new:
        return None
    where, current = None, "the environment raises no error"
    at = then[max(0, len(then) - 2)]  # the recorded error belongs to the last action that was taken
    if raised is not None:
        at = then[min(len(now), len(then) - 1)]
        frame = traceback.extract_tb(raised.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno} in {frame.name}"
        what = f"the environment raises {new}"
        if isinstance(raised, RestoreMismatch):
            what = "the turns before the fork give other results now"
        current = f"{what}: {raised}"
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


def normalised(values: Mapping[str, JsonValue], rules: Normalisers) -> dict[str, JsonValue]:
    """Return the values with the varying parts replaced. The names of an observation's fields begin with its kind."""
    made = {key: without(value, key, rules) for key, value in values.items()}
    seen = values.get("observation")
    if isinstance(seen, dict):
        made["observation"] = {key: without(part, key, rules) for key, part in seen.items()}
    return made


# What varies


def _variation(runs: Sequence[Sequence[Moment]], rules: Normalisers) -> dict[str, Any]:
    """Measure what varies between several executions. The result has `measured`, the share of moments with a difference
    for each field that differs, and `proposed`, a `varies` that would make the executions equal."""
    if len(runs) < 2:
        return {}
    rows: dict[str, list[list[JsonValue]]] = defaultdict(list)
    for moments in zip(*runs, strict=False):
        leaves = [dict(_leaves(normalised(m.values, rules))) for m in moments]
        for name in dict.fromkeys(chain.from_iterable(leaves)):
            rows[name].append([values.get(name) for values in leaves])
    measured: dict[str, float] = {}
    for name, values in rows.items():
        differ = sum(any(v != row[0] for v in row) for row in values)
        if differ:
            measured[name] = differ / len(values)
    proposed = _merged((re.sub(r"\[\d+\]", "[]", name), _proposal(rows[name])) for name in measured)
    return {"measured": measured, "proposed": proposed}


def _merged(proposals: Iterable[tuple[str, str | None]]) -> dict[str, str | None]:
    """Merge pairs of (field, part to ignore) into one mapping. A field with different proposals gets None, so the whole
    field is ignored."""
    merged: dict[str, str | None] = {}
    for name, rule in proposals:
        merged[name] = rule if merged.get(name, rule) == rule else None
    return merged


def _leaves(values: Mapping[str, JsonValue]) -> Iterator[tuple[str, JsonValue]]:
    """Yield (field, value) for every leaf. The names of an observation's fields begin with its kind."""
    for key, value in values.items():
        if key == "observation" and isinstance(value, dict):
            kind = str(value["kind"])
            yield from _under(kind, value[kind])
        else:
            yield key, value


def _under(name: str, value: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _under(f"{name}.{key}", item)
    elif isinstance(value, list):
        for k, item in enumerate(value):
            yield from _under(f"{name}[{k}]", item)
    else:
        yield name, value


def _proposal(rows: Sequence[Sequence[JsonValue]]) -> str | None:
    """Return a pattern for the varying part of a field: the narrowest of `_SHAPES` that makes all executions equal if
    its matches are removed. None ignores the whole field."""
    if not all(isinstance(value, str) for row in rows for value in row):
        return None
    for shape in _SHAPES:
        if all(len({re.sub(shape, "…", str(value)) for value in row}) == 1 for row in rows):
            return shape
    return None


# A whole run


def reexec_run(
    run: str | Path,
    env: str | None = None,
    *,
    masks: Normalisers | None = None,
    times: int = 1,
    seconds: float = SECONDS,
    tapes: Sequence[str] = (),
    split: str | None = None,
    jobs: int | None = None,
    progress: Progress = silent,
) -> Verdicts:
    """Execute the actions on tapes of a run again.

    `tapes` names the tapes. If it is empty, all closed tapes in `split` are used. `env` is the `module:name` of an
    environment class or factory. None uses the environment in the run's configuration. `masks` gives, for each field, a
    regular expression for the part that may differ, or None for the whole field. Each tape is executed `times` times.
    If `times` is 2 or more, the verdicts name the fields that vary (see `proposed_masks`). One execution may take
    `seconds` of wall-clock time.
    """
    if times < 1 or seconds <= 0:
        raise UsageError(f"times is {times} and seconds {seconds}; times must be 1 or more, and seconds above 0")
    recorded = recorded_settings(run).get("env")
    name = env or (recorded if isinstance(recorded, str) else None)
    _factory(name)  # a wrong name is refused here, before any process starts
    plan = partial(_plan, name, dict(masks or {}), times, seconds)
    return check_run(run, "reexec", plan, tapes=tapes, split=split, jobs=jobs, progress=progress)


def proposed_masks(verdicts: Iterable[Verdict]) -> dict[str, str | None]:
    """Return an entry for `Environment.varies` for each field that varied between executions."""
    return _merged(item for verdict in verdicts for item in verdict.proposed.items())


def _factory(name: str | None) -> EnvironmentFactory | None:
    """Return the factory called `name`, or None if `name` is None. Raises UsageError if the object is not a factory."""
    if name is None:
        return None
    return cast("EnvironmentFactory", load_function(name, "an environment class or a function that makes one"))


def _plan(name: str | None, masks: Normalisers, times: int, seconds: float, store: Store) -> Callable[[Tape], Verdict]:
    """Return the function that checks one tape. Each worker process makes its own."""
    make = _factory(name)

    def check(tape: Tape) -> Verdict:
        if make is None:
            return unverifiable(
                "reexec",
                tape.id,
                f"no environment is named; the tape was recorded in {tape.begin.env.cls}: name one",
            )
        return run_async(reexec(tape, make, normalise=masks, times=times, seconds=seconds))

    return check
