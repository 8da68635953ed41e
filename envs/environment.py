"""The contract between an environment and the rollout: `reset`, `step`, `finish`, `restore`, `close`.

One instance lives for one episode; a group takes a factory. An environment knows nothing of models, prompts, tokens or
files. Private task parts, rewards and metrics go to the record, never to the agent.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from ..tapes import Action, Observation, Status, TapereelError
from .varying import without

if TYPE_CHECKING:
    from ..tapes import Tape
    from ..tapes.records import Reward

ActionT = TypeVar("ActionT", bound=Action)
Effect = Literal["pure", "idempotent", "irreversible"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an action led to.

    An episode goes on until `terminated` (the task is over) or `truncated` (cut off; a critic may bootstrap).
    """

    observation: Observation | None = None
    """What the agent sees next; may be None at the end."""
    reward: float | dict[str, float] | None = None
    """A number (component `reward`), named components, or None: this action was not scored, which is not zero."""
    terminated: bool = False
    truncated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to report beside the reward; recorded with weight 0."""

    def __post_init__(self) -> None:
        if self.observation is not None and not isinstance(self.observation, Observation):
            raise TypeError(
                f"Outcome.observation must be an Observation or None, not {type(self.observation).__name__}"
            )
        for name, value in self.components():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"reward component {name!r} must be a float, not {value!r}: write float(...) around it")
            if value != value or value in (float("inf"), float("-inf")):
                raise ValueError(f"reward component {name!r} is {value}; leave it out where there is no score")
        if not isinstance(self.terminated, bool) or not isinstance(self.truncated, bool):
            raise TypeError("Outcome.terminated and Outcome.truncated must be bool")

    def components(self) -> Iterator[tuple[str, float]]:
        """(name, value) of each reward component, then of each metric."""
        if isinstance(self.reward, dict):
            yield from self.reward.items()
        elif self.reward is not None:
            yield "reward", self.reward
        yield from self.metrics.items()


class TapeScorer(Protocol):
    """What scores a whole tape; `tapereel.envs.rewards.Rewards` is the implementation."""

    @property
    def names(self) -> list[str]:
        """Names of all reward components."""
        ...

    async def score(self, tape: Tape, /, *, layer: str | None = None) -> list[Reward]:
        """The reward records of `tape`: of a later scoring called `layer` or, with None, part of the tape."""
        ...


class Environment(Generic[ActionT]):
    """Subclass, and give `reset` and `step`. `class GuessNumber(Environment[Guess]): ...`"""

    effect: Effect = "pure"
    """What running an action again would do to the world outside: nothing, the same as once, or harm. Where it is not
    `pure`, an action's intent is durable on disk before `step` is called."""
    blocking: ClassVar[bool] = False
    """True when the methods below block the event loop although they are `async` (a C library, a sync simulator):
    rollout then runs each call in a thread of its own."""

    varies: Mapping[str, str | None] = {}
    """What may differ when the same actions are taken again, as `{"reading.text": "[0-9]+ ms"}`: a field of an
    observation (`kind.field`) or `reward.name`, and a regular expression of the part that varies; None for all of it.
    """

    kinds: ClassVar[tuple[type[Action] | type[Observation], ...]] = ()
    """Its kinds of actions and observations, as far as `Environment[...]` and the return type of `reset` don't name
    them. Needed where it is served to other processes, which take and send only what is declared."""

    rewards: TapeScorer | None = None
    """Sources that score the whole tape when the episode has ended, after `finish`; what they give is recorded on it.
    One that fails ends the episode as an error of the environment, so it is never trained on."""

    rng: random.Random
    """Seeded by rollout from the environment seed, before `reset`. Groups share that seed."""

    async def reset(self, task: Any) -> Observation:
        """Begin the episode for `task`: the bare value, or the `Task`, that the taskset gave."""
        raise NotImplementedError(f"{type(self).__qualname__} must define reset(self, task)")

    async def step(self, action: ActionT) -> Outcome:
        """What `action` leads to."""
        raise NotImplementedError(f"{type(self).__qualname__} must define step(self, action)")

    async def finish(self, status: Status) -> Outcome | None:
        """The last word on scoring, once, when the episode ends in any way that can be trained on.

        Its reward is recorded for the episode as a whole; its observation is ignored.
        """
        return None

    async def restore(self, task: Any, tape: Tape) -> None:
        """Bring a fresh instance to the state after the last step of `tape`.

        The default resets, applies the recorded actions again and compares each observation; override it with a
        snapshot where that is slow. Raises `RestoreMismatch` where the environment answers otherwise than recorded,
        in what it doesn't declare to vary.
        """
        seen = [await self.reset(task)]
        for action in tape.actions:
            outcome = await self.step(action)  # type: ignore[arg-type]
            if outcome.observation is not None:
                seen.append(outcome.observation)
        recorded = list(tape.observations)
        for k, (now, then) in enumerate(zip(seen, recorded, strict=False)):
            if now != then and self._lasting(now) != self._lasting(then):
                raise RestoreMismatch(
                    f"observation {k} of tape {tape.id} was {then!r}; the environment now gives {now!r}"
                )
        if len(seen) != len(recorded):
            raise RestoreMismatch(
                f"tape {tape.id} has {len(recorded)} observations; the environment now gives {len(seen)}"
            )

    def _lasting(self, seen: Observation) -> tuple[str, Any]:
        return seen.kind, without(seen.model_dump(mode="json"), seen.kind, self.varies)

    async def close(self) -> None:
        """Release what the instance holds. Called once, whatever happened."""


class RestoreMismatch(TapereelError, ValueError):
    """The environment did not come back to the recorded state."""
