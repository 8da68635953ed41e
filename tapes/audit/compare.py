"""Compares two tapes, aligned up to their first difference, and two runs, task by task.

Only what happened is compared: the steps, their tokens, the rewards and the end. Settings that were chosen beforehand,
such as the agent, seeds and sampling, are listed separately. Times and ids are never compared. No agent or environment
runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import isclose
from typing import TYPE_CHECKING, Any, Literal

from pydantic import JsonValue, computed_field

from ..common.progress import Progress, silent
from ..common.stats import mean_of
from ..records import Reward
from ..steps import Step, Unknown
from ..store.summary import attempts_of
from ..tape import Tape
from ..transcript import StepLine, TapeSummary, kind_of, step_lines, summarise
from ..value import Value
from .verdict import clipped, diff_lines, differences, plain

if TYPE_CHECKING:
    from ..store.store import Store
    from ..store.summary import Summary


class Setting(Value):
    """A setting that differs between the two tapes."""

    field: str
    """The name of the setting, such as `sampling.temperature`, `agent.config.system` or `seed`."""
    first: JsonValue
    """The value on the first tape, or None if the tape doesn't have the setting."""
    second: JsonValue


class Parting(Value):
    """The first place where two tapes differ."""

    turn: int | None
    """Number of the turn, counted from 0, or None at the end of the episode."""
    step: int | None
    """Index of the step in both tapes, or None at the end of the episode."""
    by: str | None
    """Who produced the step on the first tape, or on the second tape if the first is shorter: the path of an agent, or
    `env`. It is None at the end of the episode."""
    field: str
    """What differs, such as `answer.text`, `kind`, `tokens[3]`, `reward.exact` or `end.status`. `step` means that one
    tape has no more steps."""
    first: JsonValue
    """The value on the first tape, or None if the tape doesn't have it. Long strings are cut around the difference."""
    second: JsonValue

    @computed_field
    @property
    def diff(self) -> list[str]:
        """Both values, line by line. `-` marks lines in the first, `+` lines in the second, and ` ` lines in both."""
        return diff_lines(self.first, self.second)


class TapeDiff(Value):
    """Two tapes, side by side."""

    first: TapeSummary
    second: TapeSummary
    same_task: bool
    shared: int
    """Number of equal steps at the beginning."""
    shared_turns: int
    """Number of equal complete turns at the beginning."""
    parting: Parting | None
    """The first difference, or None if the episodes are equal."""
    settings: tuple[Setting, ...]
    steps: tuple[tuple[StepLine | None, StepLine | None], ...]
    """The steps after the shared ones, in pairs. If one tape is shorter, None takes the place of its missing steps."""

    @computed_field
    @property
    def exit_code(self) -> int:
        """The exit code: 0 if the tasks and the episodes are equal, otherwise 1."""
        return 0 if self.parting is None and self.same_task else 1


Change = Literal["won", "lost", "changed", "same", "only_first", "only_second"]


class TaskDiff(Value):
    """One task in two runs."""

    task: str
    """The task's hash."""
    name: str
    """The task's name, or an empty string if it has none."""
    change: Change
    """The change from the first run to the second. `won` means that the mean reward is higher in the second run.
    `changed` means that the mean reward is equal or unknown, but the tapes or their number differ."""
    first: float | None
    """Mean reward of the scored attempts in the first run, or None if there are none."""
    second: float | None
    attempts: tuple[int, int]
    tapes: tuple[str, str] | None
    """Two attempts to look at, one from each run. For `won`, they are the worst attempt of the first run and the best
    of the second. For `lost`, they are the best attempt of the first run and the worst of the second. Otherwise, they
    are the first pair that differs, or None if all pairs are equal."""
    parting: Parting | None
    """The first difference between these two attempts."""


class RunDiff(Value):
    """Two runs, task by task."""

    first: str
    second: str
    splits: tuple[str | None, str | None]
    """The split that was compared in each run. None means all splits."""
    counts: dict[Change, int]
    scored: int
    """Number of tasks with a scored attempt in both runs."""
    mean_first: float | None
    """Mean of `TaskDiff.first` over the tasks that `scored` counts, or None if there are none."""
    mean_second: float | None
    tasks: tuple[TaskDiff, ...]
    """All tasks that differ, in the order lost, changed, won, then tasks that only one run has. Each part is sorted by
    the size of the difference, largest first."""

    @computed_field
    @property
    def exit_code(self) -> int:
        """The exit code: 0 if both runs have the same tasks with equal outcomes, otherwise 1."""
        return 1 if self.tasks else 0


# Two tapes


def diff_tapes(first: Tape, second: Tape) -> TapeDiff:
    """Compare two tapes. Open tapes are compared up to their newest record."""
    a, b = first.entries, second.entries
    parting = parting_of(first, second)
    shared = min(len(a), len(b)) if parting is None or parting.step is None else parting.step
    return TapeDiff(
        first=summarise(first),
        second=summarise(second),
        same_task=first.begin.task_hash == second.begin.task_hash,
        shared=shared,
        shared_turns=first.turns if shared == len(a) else a[shared].turn,
        parting=parting,
        settings=tuple(_settings(first, second)),
        steps=tuple(zip_longest(step_lines(first)[shared:], step_lines(second)[shared:])),
    )


def parting_of(first: Tape, second: Tape) -> Parting | None:
    """Return the first place where two tapes differ, or None if the episodes are equal."""
    a, b = first.entries, second.entries
    earned = _earned(first), _earned(second)
    both = min(len(a), len(b))
    for k in range(both):
        if found := _step_difference(first, second, k, earned):
            return Parting(turn=a[k].turn, step=k, by=a[k].by, **found)
    if len(a) != len(b):
        entry, step = (a if len(a) > both else b)[both], (first if len(a) > both else second)[both]
        shown = f"{kind_of(step)}: {step}"
        return Parting(
            turn=entry.turn,
            step=both,
            by=entry.by,
            field="step",
            first=shown if len(a) > both else None,
            second=shown if len(b) > both else None,
        )
    found = _first(_end(first, earned[0]), _end(second, earned[1]))
    return None if found is None else Parting(turn=None, step=None, by=None, **found)


def _first(then: Any, now: Any) -> dict[str, Any] | None:
    found = next(differences(plain(then), plain(now)), None)
    if found is None:
        return None
    first, second = clipped(found.recorded, found.observed)
    return {"field": found.field, "first": first, "second": second}


Earned = dict[int | None, dict[str, float]]
"""The values of components, by the index of the step and the name of the component. The index None stands for the
episode as a whole."""


def _earned(tape: Tape) -> Earned:
    """Return the recorded rewards of a tape, including the rewards that a fork's parent earned in the prefix."""
    earned: Earned = _earned(tape.parent) if tape.parent is not None else {}
    for reward in tape.rewards:
        earned.setdefault(reward.step, {})[_component(reward)] = reward.value
    return earned


def _component(reward: Reward) -> str:
    return f"{'reward' if reward.weight else 'metric'}.{reward.name}"


def _step_difference(first: Tape, second: Tape, k: int, earned: tuple[Earned, Earned]) -> dict[str, Any] | None:
    tokens = _tokens(first, k), _tokens(second, k)
    compared = None not in tokens  # an engine that returns only text records no ids, and that alone is not a difference
    sides: list[dict[str, Any]] = []
    for tape, own, ids in zip((first, second), earned, tokens, strict=True):
        step: Step = tape[k]
        kind, content = kind_of(step), step.content if isinstance(step, Unknown) else step.model_dump(mode="json")
        sides.append(
            {
                "by": tape.entries[k].by,
                "kind": kind,
                kind: content,
                "tokens": ids if compared else None,
                **own.get(k, {}),
            }
        )
    return _first(*sides)


def _tokens(tape: Tape, k: int) -> list[int] | None:
    """Return the completion tokens that a step was parsed from, or None if its calls have no token ids."""
    ids: list[int] = []
    for call, start, end in tape.entries[k].calls:
        completion = tape.call(call).completion
        if completion is None:
            return None
        ids += completion[start:end]
    return ids


def _end(tape: Tape, earned: Earned) -> dict[str, Any]:
    cause = tape.cause
    why = {"type": cause.type.value, "error": cause.error} if cause is not None else None
    return {**earned.get(None, {}), "end": {"status": tape.status.value if tape.status else None, "cause": why}}


def _settings(first: Tape, second: Tape) -> Iterator[Setting]:
    sides: list[dict[str, Any]] = []
    for tape in (first, second):
        settings = tape.begin.model_dump(
            mode="json",
            include={
                "task_hash",
                "agent",
                "env",
                "env_seed",
                "seed",
                "split",
                "sampling",
                "limits",
                "versions",
            },
        )
        sides.append({**settings, "policy": list(summarise(tape).versions)})
    for found in differences(sides[0], sides[1]):
        then, now = clipped(found.recorded, found.observed)
        yield Setting(field=found.field, first=then, second=now)


# Two runs


def diff_runs(
    first: Store,
    second: Store,
    split: str | None = None,
    *,
    against_split: str | None = None,
    progress: Progress = silent,
) -> RunDiff:
    """Compare the closed tapes of two runs task by task.

    `split` selects the same split in both runs. `against_split` selects another split in the second run.
    """
    splits = split, against_split or split
    a, b = (
        attempts_of(store.summaries(split=split, closed=True))
        for store, split in zip((first, second), splits, strict=True)
    )
    found: list[TaskDiff] = []
    scored: list[tuple[float, float]] = []
    tasks = list(dict.fromkeys([*a, *b]))
    for k, task in enumerate(tasks):
        made = _task(task, a.get(task, []), b.get(task, []), first, second)
        found.append(made)
        if made.first is not None and made.second is not None:
            scored.append((made.first, made.second))
        progress("diff", k + 1, len(tasks), "tasks")
    changes: dict[Change, int] = {"won": 0, "lost": 0, "changed": 0, "same": 0, "only_first": 0, "only_second": 0}
    for task in found:
        changes[task.change] += 1
    return RunDiff(
        first=str(first.path),
        second=str(second.path),
        splits=splits,
        counts=changes,
        scored=len(scored),
        mean_first=mean_of([x for x, _ in scored]),
        mean_second=mean_of([y for _, y in scored]),
        tasks=tuple(sorted((task for task in found if task.change != "same"), key=_size)),
    )


SHOWN_FIRST: tuple[Change, ...] = ("lost", "changed", "won", "only_first", "only_second")
"""Order of the differences in a report. Losses come first, so that many wins can't hide them."""


def _size(task: TaskDiff) -> tuple[int, float]:
    return SHOWN_FIRST.index(task.change), -abs((task.first or 0.0) - (task.second or 0.0))


def _task(task: str, a: Sequence[Summary], b: Sequence[Summary], first: Store, second: Store) -> TaskDiff:
    a, b = (sorted(side, key=lambda s: (s.attempt, s.begun)) for side in (a, b))
    then, now = _mean(a), _mean(b)
    pairs = list(zip(a, b, strict=False))
    change: Change
    tapes: tuple[str, str] | None = None
    parting: Parting | None = None
    if not a or not b:
        change = "only_first" if a else "only_second"
    elif then is not None and now is not None and not isclose(then, now, abs_tol=1e-12):
        change = "won" if now > then else "lost"
        one, two = (_best if now < then else _worst)(a), (_worst if now < then else _best)(b)
        tapes = one.id, two.id
        parting = _parting(first, one, second, two)
    else:
        change = "same" if len(a) == len(b) else "changed"
        for one, two in pairs:
            parting = _parting(first, one, second, two)
            if parting is not None:
                change, tapes = "changed", (one.id, two.id)
                break
    name = next((s.task for s in (*a, *b) if s.task), "")
    return TaskDiff(
        task=task,
        name=name,
        change=change,
        first=then,
        second=now,
        attempts=(len(a), len(b)),
        tapes=tapes,
        parting=parting,
    )


def _reward(summary: Summary) -> float | None:
    return summary.reward if summary.trainable else None


def _mean(attempts: Sequence[Summary]) -> float | None:
    scored = [reward for s in attempts if (reward := _reward(s)) is not None]
    return mean_of(scored)


def _best(attempts: Sequence[Summary]) -> Summary:
    return max((s for s in attempts if _reward(s) is not None), key=lambda s: _reward(s) or 0.0)


def _worst(attempts: Sequence[Summary]) -> Summary:
    return min((s for s in attempts if _reward(s) is not None), key=lambda s: _reward(s) or 0.0)


def _parting(first: Store, one: Summary, second: Store, two: Summary) -> Parting | None:
    if first is second and one.id == two.id:
        return None
    return parting_of(first.tape(one.id, refresh=False), second.tape(two.id, refresh=False))
