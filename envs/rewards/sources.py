"""Rewards: named, weighted functions that score an episode or each of its actions.

A source returns a number, named numbers, or None. None means no score, which differs from a score of zero. If a source
fails, the cause is recorded and the whole tape stays unscored. A sum without one of its parts would look like a valid
reward.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, Never, TypeVar

from pydantic import JsonValue

from ...tapes import Action, Tape, TapereelError
from ...tapes.common.arguments import check_arguments
from ...tapes.common.stats import plain, reward_value
from ...tapes.common.text import storable
from ...tapes.errors import RunStopped
from ...tapes.records import Reward
from ...tapes.store.summary import GROUP_LAYER
from ..environment import AnyEnvironment, EnvironmentFactory, Outcome, TapeScorer, call_factory, check_factory

SubjectT = TypeVar("SubjectT", contravariant=True)
SECONDS = 600.0
"""Default time limit for a source, in seconds."""


class RewardFailed(TapereelError, RuntimeError):
    """A source raised, took too long or returned an invalid score. The message names the source and the cause."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A score with evidence or weights."""

    score: float | Mapping[str, float] | None
    evidence: JsonValue = None
    """The reason for the score, such as a judge's question and answer. It is kept in the score's first record."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each named number, by default 1. It is multiplied by the weight of the source."""


Score = float | Mapping[str, float] | Scored | None
"""A number (recorded as `source`), named numbers (recorded as `source/name`), a `Scored`, or None for no score."""
Scorer = Callable[[SubjectT], Score | Sequence[Score] | Awaitable[Score | Sequence[Score]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSource(Generic[SubjectT]):
    """A function and the weight of its scores."""

    score: Scorer[SubjectT]
    """A sync or async function. It receives a `Tape`, or the subject that was passed to `Rewards.outcome`. With
    `per="group"`, it receives a list of tapes."""
    name: str = ""
    """The name of the reward component, by default the function's. If a component of the environment has this name, the
    source's is `NAME_2`."""
    weight: float = 1.0
    """The weight of the score in the reward, which is a sum. A score with weight 0 is only reported, as a metric."""
    per: Literal["episode", "step", "group"] = "episode"
    """The unit that is scored. With `step`, the function returns one score for each action on the tape, in order. With
    `group`, it receives the closed tapes of all attempts in a group and returns one score for each tape. Each score is
    recorded as a layer on its tape."""
    pure: bool = True
    """True if the score depends only on the tape, so that it can be verified later. False if it needs other resources,
    such as a judge model or a sandbox. A sync function that isn't pure runs in a thread, since it may block."""
    timeout: float | None = SECONDS
    """Seconds until the source counts as failed, or None for no limit. A sync pure source can't be interrupted."""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", getattr(self.score, "__name__", type(self.score).__name__))
        if not float("-inf") < self.weight < float("inf"):
            raise ValueError(f"reward source {self.name!r} has the weight {self.weight}; it must be a finite number")


AnySource = RewardSource[Never]
"""A source for any type of subject. A caller must know the type, or cast."""


class Rewards(Generic[SubjectT]):
    """Several sources. The reward is the weighted sum of their scores.

    A bare function has weight 1: `Rewards([exact, RewardSource(score=brief, weight=0.1)])`.
    """

    @check_arguments
    def __init__(self, sources: Iterable[AnySource | Scorer[SubjectT]]) -> None:
        every = tuple(s if isinstance(s, RewardSource) else RewardSource(score=s) for s in sources)
        names = [source.name for source in every]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two reward sources have the name {twice[0]!r}; give one of them another `name`")
        self.sources: tuple[AnySource, ...] = tuple(source for source in every if source.per != "group")
        """The sources that score one tape."""
        self.relative: tuple[AnySource, ...] = tuple(source for source in every if source.per == "group")
        """The sources that compare the tapes in a group."""

    @property
    def names(self) -> list[str]:
        return [source.name for source in (*self.sources, *self.relative)]

    async def score(self: Rewards[Tape], tape: Tape, *, layer: str | None = None) -> list[Reward]:
        """Return the reward records for `tape`. With `layer`, the records belong to the later scoring of that name.

        If a source fails, every record has weight 0, so the tape stays unscored. The failed source's record has the
        value NaN, and its evidence is the cause. Actions that a fork inherits are scored only on the parent tape.
        """
        at = [k for k, step in enumerate(tape) if isinstance(step, Action)]
        results = await asyncio.gather(*(_ask(source, tape, len(at)) for source in self.sources))
        failed = any(isinstance(result, RewardFailed) for result in results)
        records: list[Reward] = []
        for source, result in zip(self.sources, results, strict=True):
            if isinstance(result, RewardFailed):
                records.append(_failure_record(tape, source, result, layer))
                continue
            for part in result:
                step = None if part.place is None else at[part.place]
                if step is None or step >= tape.inherited:
                    records.append(_record(tape, source, part, step, layer, failed))
        return records

    async def compare(self, tapes: Sequence[Tape]) -> dict[str, list[Reward]]:
        """Score a group with the sources that have `per="group"`. Return the records for GROUP_LAYER, by tape id.

        If a source fails, every record on every tape has weight 0. The attempts in a group are comparable only if the
        same sources have scored all of them.
        """
        results = await asyncio.gather(*(_ask(source, list(tapes), len(tapes)) for source in self.relative))
        failed = any(isinstance(result, RewardFailed) for result in results)
        records: dict[str, list[Reward]] = {tape.id: [] for tape in tapes}
        for source, result in zip(self.relative, results, strict=True):
            if isinstance(result, RewardFailed):
                for tape in tapes:
                    records[tape.id].append(_failure_record(tape, source, result, GROUP_LAYER))
                continue
            for part in result:
                assert part.place is not None
                tape = tapes[part.place]
                records[tape.id].append(_record(tape, source, part, None, GROUP_LAYER, failed))
        return records

    async def outcome(self, subject: SubjectT) -> Outcome:
        """Score `subject` and return the scores as an outcome, for use in `Environment.finish`.

        Components with weight 0 become the outcome's metrics. The others, multiplied by their weights, become its
        reward. Raises RewardFailed if a source fails. The episode then ends unscored, as an error of the environment.
        """
        for source in (*self.sources, *self.relative):
            if source.per != "episode":
                what = (
                    "single steps: return their rewards from `step`"
                    if source.per == "step"
                    else "groups, which an environment can't see: pass it as a reward of the run"
                )
                raise ValueError(
                    f"reward source {source.name!r} scores {what}, or score the finished tape with Rewards.score"
                )
        reward: dict[str, float] = {}
        metrics: dict[str, float] = {}
        for source, result in zip(
            self.sources, await asyncio.gather(*(_ask(source, subject, 0) for source in self.sources)), strict=True
        ):
            if isinstance(result, RewardFailed):
                raise result
            for part in result:
                weight = source.weight * part.weight
                if weight == 0:
                    metrics[part.name] = part.value
                else:
                    reward[part.name] = weight * part.value
        return Outcome(reward=reward or None, metrics=metrics)


class rewarded:
    """An environment factory that adds further rewards to each instance."""

    def __init__(self, make: EnvironmentFactory, rewards: Rewards[Tape]) -> None:
        check_factory(make)
        self.make = make
        self._more = rewards
        self.rewards: Rewards[Tape] = Rewards([*_every(getattr(make, "rewards", None)), *_every(rewards)])

    def __call__(self) -> AnyEnvironment:
        env = call_factory(self.make)
        env.rewards = Rewards([*_every(env.rewards), *_every(self._more)])
        return env


def _every(rewards: TapeScorer | None) -> tuple[AnySource, ...]:
    if rewards is None:
        return ()
    if not isinstance(rewards, Rewards):
        raise TypeError(f"rewards of type {type(rewards).__name__} can't be combined with others: use Rewards(...)")
    return (*rewards.sources, *rewards.relative)


def beside(records: Sequence[Reward], names: Iterable[str], own: Collection[str]) -> list[Reward]:
    """Return the records of an episode's sources next to the environment's `own` components. A source with the name of
    one of these becomes `NAME_2`, so that both can be distinguished and weighed."""
    taken = [name for name in names if any(_heads(name, component) for component in own)]
    return [
        next((r.model_copy(update={"name": f"{n}_2{r.name[len(n) :]}"}) for n in taken if _heads(n, r.name)), r)
        for r in records
    ]


def as_recorded(names: Sequence[str], components: Collection[str]) -> list[str]:
    """Return the names that `beside` gave to the sources called `names` on a tape with these components."""

    def on_tape(name: str) -> bool:
        return any(_heads(name, component) for component in components)

    second = {name: f"{name}_2" for name in names if on_tape(name) and f"{name}_2" not in names}
    return [second[name] if name in second and on_tape(second[name]) else name for name in names]


def _heads(source: str, component: str) -> bool:
    return component == source or component.startswith(f"{source}/")


class _Part(NamedTuple):
    """One number in a source's score."""

    place: int | None
    """The action's index (`per="step"`) or the tape's index in its group. It is None for the whole episode."""
    name: str
    value: float
    weight: float = 1.0
    evidence: JsonValue = None


def _record(
    tape: Tape, source: RewardSource[Any], part: _Part, step: int | None, layer: str | None, failed: bool
) -> Reward:
    return Reward(
        tape=tape.id,
        step=step,
        name=part.name,
        value=part.value,
        layer=layer,
        evidence=part.evidence,
        weight=0.0 if failed else source.weight * part.weight,
    )


def _failure_record(tape: Tape, source: RewardSource[Any], failure: RewardFailed, layer: str | None) -> Reward:
    cause: dict[str, JsonValue] = {"failed": str(failure), "frame": _frame(source, failure)}
    evidence = getattr(failure.__cause__, "evidence", None)
    if evidence is not None:
        cause["evidence"] = evidence
    return Reward(tape=tape.id, name=source.name, value=float("nan"), weight=0.0, layer=layer, evidence=cause)


async def _asked(source: RewardSource[Any], subject: Any) -> Any:
    """Return the raw result of the source's function. A sync function that may block runs in a thread."""
    is_async = inspect.iscoroutinefunction(source.score) or inspect.iscoroutinefunction(type(source.score).__call__)
    if source.pure or is_async:
        result = source.score(subject)
    else:
        result = await asyncio.to_thread(source.score, subject)
    return await result if inspect.isawaitable(result) else result


async def _ask(source: RewardSource[Any], subject: Any, places: int) -> list[_Part] | RewardFailed:
    timer = asyncio.timeout(source.timeout)
    try:
        async with timer:
            scores = await _asked(source, subject)
        if source.per == "episode":
            return _parts(source, scores, None)
        of = "action" if source.per == "step" else "tape"
        if isinstance(scores, str | Mapping) or not isinstance(scores, Sequence):
            raise TypeError(
                f"a source per {source.per} must return a sequence with one score for each {of}, not {scores!r:.80}"
            )
        if len(scores) != places:
            raise ValueError(f"it returned {len(scores)} scores for {places} {of}s")
        return [part for k, one in enumerate(scores) for part in _parts(source, one, k)]
    except TimeoutError as error:
        late = timer.expired()
        return _failure(source, f"no score within {source.timeout} s" if late else f"TimeoutError: {error}", error)
    except RunStopped:
        raise  # not a fault of this episode: a problem with a judge's server, key or budget stops all scoring
    except Exception as error:  # the boundary: the fault becomes a record, or is raised by `outcome`
        return _failure(source, f"{type(error).__qualname__}: {error}", error)


def _failure(source: RewardSource[Any], what: str, error: BaseException) -> RewardFailed:
    failure = RewardFailed(f"reward source {source.name!r} failed, so the episode has no reward: {storable(what)}")
    failure.__cause__ = error
    return failure


def _frame(source: RewardSource[Any], failure: RewardFailed) -> str | None:
    """Return the line that raised the error. If this module rejected the score, return the source's first line."""
    frames = traceback.extract_tb(failure.__cause__.__traceback__ if failure.__cause__ is not None else None)
    code = getattr(source.score, "__code__", None)
    if code is not None and (not frames or frames[-1].filename in (__file__, reward_value.__code__.co_filename)):
        return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
    return f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else None


def _parts(source: RewardSource[Any], score: Any, place: int | None) -> list[_Part]:
    scored = score if isinstance(score, Scored) else Scored(score)
    if scored.score is None:
        return []
    if isinstance(scored.score, Mapping):
        found = [(f"{source.name}/{key}", value, scored.weights.get(key, 1.0)) for key, value in scored.score.items()]
    else:
        found = [(source.name, scored.score, 1.0)]
    return [
        _Part(
            place,
            part,
            reward_value(part, value, source.weight * weight),
            weight,
            scored.evidence if k == 0 else None,
        )
        for k, (part, value, weight) in enumerate(found)
    ]


# Ensembles


def reference_of(tape: Tape) -> JsonValue:
    """Return the right answer to the tape's task (see `Task.expected`)."""
    return tape.begin.task.expected


def label_of(tape: Tape) -> str | None:
    """Return `label` from the private part of the task, or else from the public part."""
    for part in (tape.begin.task.private, tape.begin.task.public):
        if isinstance(part, dict) and part.get("label") is not None:
            return str(part["label"])
    return None


class NoRecipe(TapereelError, LookupError):
    """The task's label has no recipe, or a part of the recipe returned no score."""


def ensemble(
    parts: Mapping[str, RewardSource[Tape] | Scorer[Tape]],
    recipe: Mapping[str, Mapping[str, float]],
    *,
    label: Callable[[Tape], str | None] = label_of,
    name: str = "ensemble",
    weight: float = 1.0,
    timeout: float | None = 600.0,
) -> RewardSource[Tape]:
    """Return a source that weights its parts by `recipe[label]`. Raises ValueError if a recipe has unknown parts."""
    for kind, weights in recipe.items():
        strange = [part for part in weights if part not in parts]
        if strange:
            raise ValueError(
                f"the recipe of {kind!r} names {strange[0]!r}, which is not a part; there are "
                f"{', '.join(parts) or 'no parts'}"
            )
    sources = {
        key: part if isinstance(part, RewardSource) else RewardSource(score=part, name=key)
        for key, part in parts.items()
    }

    async def score(tape: Tape) -> Scored:
        kind = label(tape)
        if kind is None or kind not in recipe:
            raise NoRecipe(
                f"the task has the label {kind!r}, which has no recipe; there are {', '.join(map(repr, recipe))}"
            )
        needed = {key: w for key, w in recipe[kind].items() if w != 0}
        scores = await asyncio.gather(*(_score(sources[key], tape) for key in needed))
        values: dict[str, float] = {}
        reasons: dict[str, JsonValue] = {"label": kind}
        for key, (value, evidence) in zip(needed, scores, strict=True):
            if value is None:
                raise NoRecipe(f"part {key!r}, which the recipe of {kind!r} needs, returned no score")
            values[key] = value
            if evidence is not None:
                reasons[key] = evidence
        return Scored(values, evidence=reasons, weights=needed)

    pure = all(source.pure for source in sources.values())
    return RewardSource(score=score, name=name, weight=weight, pure=pure, timeout=timeout)


async def _score(source: RewardSource[Tape], tape: Tape) -> tuple[float | None, JsonValue]:
    result = await _asked(source, tape)
    scored = result if isinstance(result, Scored) else Scored(result)
    value = plain(scored.score)
    if value is not None and not isinstance(value, int | float):
        raise TypeError(
            f"part {source.name!r} returned {scored.score!r:.80}; a part of an ensemble must return one number"
        )
    return value, scored.evidence
