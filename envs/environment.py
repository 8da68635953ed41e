"""The contract between an environment and the rollout: `reset`, `step`, `finish`, `restore`, `close`.

One instance serves one episode, so a group of episodes needs a factory. The private part of a task, the rewards and the
metrics are recorded on the tape, but the agent doesn't see them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, Never, Protocol, cast

from pydantic import JsonValue, SkipValidation
from typing_extensions import TypeVar

from ..tapes import Action, Answer, Observation, Status, Step, Tape, TapereelError, Text
from ..tapes.common.arguments import shown
from ..tapes.common.stats import plain, reward_value
from ..tapes.errors import BadArgument, UsageError
from ..tapes.messages import ENV
from ..tapes.records import Begin, Identity, Reward, Task
from ..tapes.tape import step_record

ActionT = TypeVar("ActionT", bound=Action, contravariant=True, default=Answer)
TaskT = TypeVar("TaskT", contravariant=True, default=Any)
Effect = Literal["pure", "idempotent", "irreversible"]
Normalisers = Mapping[str, str | None]
"""Maps the name of each field that varies between executions to a regular expression for the varying part, or to None
if the whole field varies. The name of a field has the form `kind.field`, with `[]` for list items, or `reward.name`. An
example is `{"reading.text": "[0-9]+ ms"}`."""

_FACTORY = "pass an Environment class, or a function that makes a new instance in each call: `lambda: MyEnv(...)`"


class EnvironmentFault(TapereelError, TypeError):
    """A method of the environment returned a value of the wrong type."""


class NotAnEnvironment(UsageError, TypeError):
    """The factory doesn't make a new environment for each episode. The message explains how to correct it."""


class RestoreMismatch(TapereelError, ValueError):
    """The environment did not return to the recorded state."""


def as_observation(value: object, source: str = "the value that reset returns") -> Observation:
    """Return `value` as it is recorded: a `str` becomes `Text`. An Observation is copied, because what the agent saw
    stays as it was if the environment changes its object later.

    Raises EnvironmentFault for any other type. The rollout, re-execution, `check_env` and remote hosts all use this
    function after `reset`, so they record and compare the same step.
    """
    if isinstance(value, str):
        return Text(text=value)
    if isinstance(value, Observation):
        return value.model_copy(deep=True)
    raise EnvironmentFault(f"{source} must be an Observation or a str, not {type(value).__name__}")


def as_outcome(value: object, method: str = "step") -> Outcome:
    """Return `value` unchanged. Raises EnvironmentFault if it isn't an Outcome. `method` is the method that returned
    the value, for the error message."""
    if isinstance(value, Outcome):
        value.components()  # raises if a reward became invalid after the constructor checked it
        return value
    wanted = "an Outcome" if method == "step" else "an Outcome or None"
    raise EnvironmentFault(f"{method} must return {wanted}, not {type(value).__name__}")


def as_reaction(value: object) -> Outcome:
    """Return the outcome of `step` in a new episode. Raises EnvironmentFault if the episode goes on without an
    observation. Tapes of earlier versions may have such steps, so what reads a tape calls `as_outcome`."""
    outcome = as_outcome(value)
    if outcome.observation is None and not (outcome.terminated or outcome.truncated):
        raise EnvironmentFault(
            "step returned an Outcome without an observation and without an end, so the agent would act again and see "
            "no result: set `terminated=True` if the task is over, or return the agent's next observation"
        )
    return outcome


def without(value: JsonValue, name: str, rules: Normalisers) -> JsonValue:
    """Return the JSON value of the field `name`, with each part that varies by `rules` replaced by `…`."""
    if name in rules:
        rule = rules[name]
        return "…" if rule is None else re.sub(rule, "…", value if isinstance(value, str) else repr(value))
    if isinstance(value, dict):
        return {key: without(item, f"{name}.{key}", rules) for key, item in value.items()}
    if isinstance(value, list):
        return [without(item, f"{name}[]", rules) for item in value]
    return value


def check_factory(factory: object) -> None:
    """Raise NotAnEnvironment if `factory` is an environment instance or can't be called."""
    if isinstance(factory, Environment):
        name = type(factory).__qualname__
        raise NotAnEnvironment(f"this is one instance of {name}, and an instance serves one episode: {_FACTORY}")
    if not callable(factory):
        raise NotAnEnvironment(f"{shown(factory)} is not an environment factory: {_FACTORY}")


def new_environment(factory: EnvironmentFactory) -> AnyEnvironment:
    """Make the instance for one episode. Raises NotAnEnvironment if `factory` can't be called, doesn't return an
    Environment, or returns an instance that it returned before."""
    return first_use(call_factory(factory))


def call_factory(factory: EnvironmentFactory) -> AnyEnvironment:
    """Return what `factory` returns, for a factory around it. Raises NotAnEnvironment if it isn't an Environment."""
    check_factory(factory)
    env = factory()
    if not isinstance(env, Environment):
        raise NotAnEnvironment(f"the factory returned {shown(env)}, which is not an Environment: {_FACTORY}")
    return env


def first_use(env: AnyEnvironment) -> AnyEnvironment:
    """Return an instance that a factory made. Raises NotAnEnvironment if a factory returned this instance before, or if
    its `rewards` can't score a tape."""
    name = type(env).__qualname__
    if env.rewards is not None and not hasattr(env.rewards, "names"):  # such as a list or a function on the class
        raise NotAnEnvironment(f"{name}.rewards is {shown(env.rewards)}: write `rewards = Rewards([...])`")
    if vars(env).get("_used") == id(env):  # a copy of a used instance has its attributes, but another id
        raise NotAnEnvironment(
            f"the factory returned the same {name} again, and an instance serves one episode: make a new one in each "
            f"call, as `lambda: {name}(...)` does"
        )
    object.__setattr__(env, "_used", id(env))
    return env


@dataclass(frozen=True, slots=True, init=False)
class Outcome:
    """The result of one action.

    The episode continues until `terminated` or `truncated` is set. `terminated` means that the task is over.
    `truncated` means that the episode was cut off, so a critic may bootstrap from its last state.
    """

    observation: Observation | None = None
    """The agent's next observation. It may be None only if the episode ends here. A `str` is stored as `Text`."""
    reward: float | dict[str, float] | None = None
    """A dict of named components, or a number for the single component `reward`. None means that this action was not
    scored, which differs from a reward of zero."""
    terminated: bool = False
    truncated: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    """Numbers to report next to the reward. They are recorded with weight 0."""

    def __init__(
        self,
        observation: Observation | str | None = None,
        reward: float | dict[str, float] | None = None,
        terminated: bool = False,
        truncated: bool = False,
        metrics: dict[str, float] | None = None,
    ) -> None:
        if metrics is not None and not isinstance(metrics, dict):
            raise BadArgument(f"Outcome.metrics must be a dict of floats, not {type(metrics).__name__}")
        if observation is not None:
            observation = as_observation(observation, "Outcome.observation, unless it is None,")
        put = object.__setattr__  # the class is frozen
        put(self, "observation", observation)
        put(self, "reward", reward)
        put(self, "metrics", {} if metrics is None else {**metrics})
        put(self, "terminated", terminated)
        put(self, "truncated", truncated)
        if reward is not None or metrics:
            parts: dict[str, float] = {}
            for name, value, weight in self.components():
                (parts if weight else self.metrics)[name] = value
            put(self, "reward", parts if isinstance(reward, dict) else parts.get("reward"))
        # Identity costs no call, and almost every value is one of the two.
        for name, value in (("terminated", terminated), ("truncated", truncated)):
            if value is not True and value is not False:
                flag = plain(value)
                if not isinstance(flag, bool):
                    raise BadArgument(f"Outcome.{name} must be a bool, not {shown(value)}")
                put(self, name, flag)

    def components(self) -> list[tuple[str, float, float]]:
        """Return (name, value, weight) for each reward component and each metric.

        A reward component has the weight 1, and a metric has the weight 0. Raises BadArgument if `reward_value` rejects
        a value.
        """
        reward, every = self.reward, list[tuple[str, object, float]]()
        if isinstance(reward, dict):
            every += [(name, value, 1.0) for name, value in reward.items()]
        elif reward is not None:
            every.append(("reward", reward, 1.0))
        if self.metrics:
            every += [(name, value, 0.0) for name, value in self.metrics.items()]
        return [
            (name, reward_value(f"reward component {name!r}", value, weight), weight) for name, value, weight in every
        ]


def bare_tape(tape: str, task: Task, env: str, env_seed: int, steps: Iterable[Step]) -> Tape:
    """Return a tape that can be passed to `restore`. It has `steps` from an environment called `env`, but no calls,
    rewards or end."""
    identity = Identity(name=env)
    agent = Identity(name="agent")
    begin = Begin(
        tape=tape, task=task, task_hash=task.hash, agent=agent, env=identity, env_seed=env_seed, seed=0, at=0.0
    )
    records = [step_record(tape, step, by="agent" if isinstance(step, Action) else ENV) for step in steps]
    return Tape.of([begin.body(), *(record.body() for record in records)])


class TapeScorer(Protocol):
    """Scores a whole tape. `tapereel.envs.rewards.Rewards` implements it."""

    @property
    def names(self) -> list[str]:
        """Names of all reward components."""
        ...

    async def score(self, tape: Tape, /, *, layer: str | None = None) -> list[Reward]:
        """Return the reward records for `tape`. If `layer` is None, the records become part of the tape. Otherwise they
        belong to the later scoring called `layer`."""
        ...


class _BeforeReset:
    """Stands in for `rng` until the rollout sets it."""

    def __get__(self, env: object, cls: type) -> object:
        raise AttributeError(
            f"{cls.__name__} has no `rng` yet: it exists from `reset` on, so draw in `reset` instead of `__init__`"
        )


class Environment(Generic[ActionT, TaskT]):
    """Base class of environments. Define `reset` and `step` in a subclass: `class GuessNumber(Environment[Guess]): ...`

    Without an action type, as in `class GuessWord(Environment): ...`, `step` receives an `Answer`. This action has one
    field, `text`. A second type argument, as in `Environment[Guess, int]`, is the type of a task. Only type checkers
    use it. An observation may be a plain `str`, which is recorded as `Text`.
    """

    effect: Effect = "pure"
    """What a repeated action does to the outside world. `pure`: nothing. `idempotent`: nothing beyond the first time.
    `irreversible`: harm. In the last two cases, the intent to act is durable on disk before `step` is called."""
    blocking: ClassVar[bool] = False
    """True if the methods below block the event loop although they are `async`, for example because they call a C
    library or a synchronous simulator. The rollout then runs each call in a separate thread."""

    pixels: bool = False
    """True if the observations are known to contain pictures. If the engine can't process pictures, the run is refused
    at its start. With False, the run is refused at the first picture."""

    varies: Mapping[str, str | None] = {}
    """Non-deterministic fields to ignore during re-execution, such as `{"reading.text": "[0-9]+ ms"}`. A key is a field
    of an observation (`kind.field`) or `reward.name`. A value is a regular expression for the part to ignore, or None
    to ignore the whole field."""

    kinds: ClassVar[tuple[type[Action] | type[Observation], ...]] = ()
    """More kinds of actions and observations, in addition to the types in `Environment[...]` and the return type of
    `reset`. An environment that is served to other processes must list them, because messages hold only declared
    kinds."""

    rewards: TapeScorer | None = None
    """Sources that score the whole tape after the episode has ended and `finish` has returned. Their rewards are
    recorded on the tape. If a source fails, the episode ends as an error of the environment, so it is never trained on.
    """

    rng: random.Random = cast(Any, _BeforeReset())
    """The episode's random generator. The rollout seeds it before `reset`, with the same seed for a whole group."""

    def check_task(self, task: Task) -> str | None:
        """Raise an error if no episode could begin with this task. A run calls this method for each task before the
        first episode, on an instance that no episode uses. The text that it returns, if any, is shown to the user
        once."""

    async def acquire(self) -> None:
        """Wait until the episode can begin, for example until a process is free. The time limit for this wait is
        `Limits.system_seconds`, not `Limits.environment_seconds`."""

    async def reset(self, task: TaskT) -> Observation | str:
        """Begin the episode. `task` is the plain value if the taskset was made from plain values, such as numbers or
        the rows of a file. Otherwise it is a `Task`."""
        raise NotImplementedError(f"{type(self).__qualname__} must define reset(self, task)")

    async def step(self, action: ActionT) -> Outcome:
        """Carry out `action`."""
        raise NotImplementedError(f"{type(self).__qualname__} must define step(self, action)")

    async def finish(self, status: Status) -> Outcome | None:
        """Return a final score. This method is called once, if the episode ends in a way that can be trained on.

        The outcome's reward is recorded for the episode as a whole, and its observation is ignored.
        """
        return None

    async def restore(self, task: TaskT, tape: Tape) -> None:
        """Bring a fresh instance to the state after the last step of `tape`.

        The default implementation resets, applies the recorded actions again and compares each observation with the
        recorded one. If applying the actions is slow, override the method to load a snapshot. Raises `RestoreMismatch`
        if an observation differs in a part that `varies` doesn't list. The state is then not the one on the tape.
        """
        seen = [as_observation(await self.reset(task))]
        for action in tape.actions:
            outcome = as_outcome(await cast("Environment[Action]", self).step(action))
            if outcome.observation is not None:
                seen.append(outcome.observation)
        recorded = list(tape.observations)
        for k, (now, then) in enumerate(zip(seen, recorded, strict=False)):
            if now != then and self._fixed_part(now) != self._fixed_part(then):
                raise RestoreMismatch(
                    f"observation {k} of tape {tape.id} was {then!r}; the environment now returns {now!r}"
                )
        if len(seen) != len(recorded):
            raise RestoreMismatch(
                f"tape {tape.id} has {len(recorded)} observations; the environment now returns {len(seen)}"
            )

    def _fixed_part(self, seen: Observation) -> tuple[str, Any]:
        """Return the observation's kind and fields. The parts in `varies` are replaced."""
        return seen.kind, without(seen.model_dump(mode="json"), seen.kind, self.varies)

    async def close(self) -> None:
        """Release the instance's resources. This method is called once, however the episode ended, and also if `reset`
        failed or never ran. So set the attributes that it reads in `__init__`."""


AnyEnvironment = Environment[Never]
"""An environment with any action type. A caller of `step` must know the action type, or cast."""
EnvironmentFactory = SkipValidation[Callable[[], AnyEnvironment]]
"""An environment class, or a function without arguments that makes an instance for one episode. See `check_factory`."""
