"""Rewards: named, weighted functions that say what an episode, or each of its actions, is worth.

A source gives a number, named numbers, or None where it has nothing to say, which is not zero. A source that fails
leaves the whole tape unscored, with the cause on record: a sum with a part missing would be a wrong number that looks
like a right one. This module knows nothing of environments beyond `Outcome`, and nothing of training.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from ..tapes import Action, Tape, TapereelError
from ..tapes.records import Reward
from .base import Outcome

SubjectT = TypeVar("SubjectT")
Score = float | Mapping[str, float] | None
"""A number (component: the source's name), named ones (`source/name`), or None: nothing to say."""
Scorer = Callable[[SubjectT], Score | Sequence[Score] | Awaitable[Score | Sequence[Score]]]


class RewardFailed(TapereelError, RuntimeError):
    """A reward source raised, took too long or gave what is no score; names the source and the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSource(Generic[SubjectT]):
    """One function and how its scores count."""

    score: Scorer[SubjectT]
    """Sync or async. Given a `Tape`, or whatever an environment hands to `Rewards.outcome`."""
    name: str = ""
    """Of its component; the function's name unless given."""
    weight: float = 1.0
    """In the sum that is the reward; 0 makes a metric of it, which is only reported."""
    per: Literal["episode", "step"] = "episode"
    """`step`: the function gives a sequence with one score for each action of the tape, in order."""
    pure: bool = True
    """The tape alone decides the score, so that it can be verified later. False for what needs the world as it is now
    (a judge model, a sandbox): if it is sync it then runs in a thread, since it may block."""
    timeout: float | None = None
    """Seconds until the source counts as failed; None to wait. A sync pure source can't be interrupted."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", getattr(self.score, "__name__", type(self.score).__name__))
        if not float("-inf") < self.weight < float("inf"):
            raise ValueError(f"reward source {self.name!r} has the weight {self.weight}; it must be a finite number")


class Rewards(Generic[SubjectT]):
    """Several sources as one, whose reward is their weighted sum.

    `Rewards([exact, RewardSource(score=brief, weight=0.1)])`; a bare function has weight 1.
    """

    def __init__(self, sources: Iterable[RewardSource[SubjectT] | Scorer[SubjectT]]) -> None:
        self.sources = tuple(s if isinstance(s, RewardSource) else RewardSource(score=s) for s in sources)
        names = [source.name for source in self.sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two reward sources are called {twice[0]!r}; give one of them another `name`")

    @property
    def pure(self) -> Rewards[SubjectT]:
        """Only those sources whose scores can be recomputed from a tape alone."""
        return Rewards(source for source in self.sources if source.pure)

    async def score(self: Rewards[Tape], tape: Tape, *, layer: str | None = None) -> list[Reward]:
        """The reward records of `tape`, for a later scoring called `layer` or (None) as part of the tape.

        When a source fails every record has weight 0, so the tape stays unscored, and the failed source's own record
        has the value NaN and the cause as its evidence. Actions that a fork inherited are the parent's to score.
        """
        at = [k for k, step in enumerate(tape) if isinstance(step, Action)]
        results = await asyncio.gather(*(_ask(source, tape, len(at)) for source in self.sources))
        failed = any(isinstance(result, RewardFailed) for result in results)
        records: list[Reward] = []
        for source, result in zip(self.sources, results, strict=True):
            if isinstance(result, RewardFailed):
                cause = {"failed": str(result), "frame": _frame(result)}
                records.append(Reward(tape=tape.id, name=source.name, value=float("nan"), weight=0.0, layer=layer,
                                      evidence=cause))  # fmt: skip
                continue
            weight = 0.0 if failed else source.weight
            for k, name, value in result:
                step = None if k is None else at[k]
                if step is None or step >= tape.inherited:
                    records.append(Reward(tape=tape.id, step=step, name=name, value=value, weight=weight, layer=layer))
        return records

    async def outcome(self, subject: SubjectT) -> Outcome:
        """For `Environment.finish`: the components of `subject`, already weighted, and the weight-0 ones as metrics.

        Raises RewardFailed when a source fails, so that the episode ends as an error of the environment, unscored.
        """
        for source in self.sources:
            if source.per == "step":
                raise ValueError(f"reward source {source.name!r} scores single steps; an environment gives those from "
                                 "`step`, or the finished tape is scored with Rewards.score")
        reward: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for source, result in zip(
            self.sources, await asyncio.gather(*(_ask(source, subject, 0) for source in self.sources)), strict=True
        ):
            if isinstance(result, RewardFailed):
                raise result
            for _, name, value in result:
                if source.weight == 0:
                    metrics[name] = value
                else:
                    reward[name] = source.weight * value
        return Outcome(reward=reward or None, metrics=metrics)


_Components = list[tuple[int | None, str, float]]
"""(ordinal of the action, None for the episode; component; value)."""


async def _ask(source: RewardSource[Any], subject: Any, actions: int) -> _Components | RewardFailed:
    timer = asyncio.timeout(source.timeout)
    try:
        async with timer:
            if source.pure or inspect.iscoroutinefunction(source.score):
                given = source.score(subject)
            else:
                given = await asyncio.to_thread(source.score, subject)
            if inspect.isawaitable(given):
                given = await given
        if source.per == "episode":
            return [(None, name, value) for name, value in _named(source.name, given)]
        if isinstance(given, str | Mapping) or not isinstance(given, Sequence):
            raise TypeError(f"a source per step gives a sequence with one score for each action, not {given!r:.80}")
        if len(given) != actions:
            raise ValueError(f"it gave {len(given)} scores for {actions} actions")
        return [(k, name, value) for k, one in enumerate(given) for name, value in _named(source.name, one)]
    except TimeoutError as error:
        late = timer.expired()
        return _failure(source, f"gave no score in {source.timeout} s" if late else f"TimeoutError: {error}", error)
    except Exception as error:  # the boundary: the fault becomes a record, or is raised by `outcome`
        return _failure(source, f"{type(error).__qualname__}: {error}", error)


def _failure(source: RewardSource[Any], what: str, error: BaseException) -> RewardFailed:
    what = what[:2000].encode("utf-8", "backslashreplace").decode()  # JSON can't hold lone surrogates
    failure = RewardFailed(f"reward source {source.name!r} failed, so the episode has no reward: {what}")
    failure.__cause__ = error
    return failure


def _frame(failure: RewardFailed) -> str | None:
    frames = traceback.extract_tb(failure.__cause__.__traceback__ if failure.__cause__ is not None else None)
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else None


def _named(name: str, score: Any) -> list[tuple[str, float]]:
    if score is None:
        return []
    named = isinstance(score, Mapping)
    parts = [(f"{name}/{key}", value) for key, value in score.items()] if named else [(name, score)]
    for part, value in parts:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{part} is {value!r:.80}; a score is a float, a dict of floats, or None")
        if not float("-inf") < value < float("inf"):
            raise ValueError(f"{part} is {value}; where there is no score, give None")
    return [(part, float(value)) for part, value in parts]
