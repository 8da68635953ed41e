"""Adapter for gymnasium environments.

Discrete and text spaces work without a codec, as do arrays of integers, and tuples and dicts of these. For other spaces
(boxes of floats, images), pass functions that convert observations and actions. The initial state is seeded from
`self.rng`, so it is the same for all episodes in a group. gymnasium is imported when an environment is made.
"""

from __future__ import annotations

import importlib.util
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue
from pydantic_core import to_json

from ...tapes import Picture
from ...tapes.common.arguments import check_arguments
from ...tapes.errors import MissingExtra, TapereelError
from ...tapes.records import Task
from ...tapes.steps import Action, Observation
from ..environment import Environment, Outcome

if TYPE_CHECKING:
    from gymnasium import Env, Space

Observe = Callable[..., Observation]
"""Converts gymnasium's observation to the agent's. The second argument is the gymnasium environment, for `render`. A
third parameter, if it is called `info`, gets gymnasium's `info`, for example for an action mask."""
Act = Callable[[Any, Any], Any]
"""Converts an action to the argument of `env.step`. The second argument is the gymnasium environment. If the function
raises ValueError, `env.step` is not called, and the agent sees the message as a `GymRefusal`."""


class GymObservation(Observation, kind="gym_observation"):
    """An observation from a gymnasium environment, as JSON values."""

    text: str = Field(default="", exclude_if=operator.not_)
    """The task's public text, in the first observation."""
    value: JsonValue

    def __str__(self) -> str:
        value = self.value if isinstance(self.value, str) else to_json(self.value).decode()
        return f"{self.text}\n{value}" if self.text else value


class GymPicture(Observation, kind="gym_picture"):
    """The rendered frame of a gymnasium environment (`pixels=True`)."""

    text: str = Field(default="", exclude_if=operator.not_)
    """The task's public text, in the first observation."""
    picture: Picture


class GymAction(Action, kind="gym_action"):
    """An element of the action space, as plain values: 2 for `Discrete`, a list for `Tuple` and `MultiDiscrete`."""

    value: JsonValue

    def __str__(self) -> str:
        return self.value if isinstance(self.value, str) else to_json(self.value).decode()


class GymRefusal(Observation, kind="gym_refusal"):
    """The last action is outside the action space. The state has not changed."""

    problem: str

    def __str__(self) -> str:
        return self.problem


class CodecNeeded(TapereelError, TypeError):
    """A space has no plain form. The message names the space and the codec to pass."""


class GymEnvironment(Environment[Action]):
    """A gymnasium environment, such as `GymEnvironment("FrozenLake-v1", is_slippery=False)`.

    The first argument is an id or a factory function: `GymEnvironment(make)`. A task is None, an int or a dict. An int
    is the seed for gymnasium's `reset`. A task without a seed gets one from `self.rng`. A dict may have the keys
    `seed`, `options` (for `reset`) and `make` (arguments for `gymnasium.make`, which override the constructor's). The
    parts of a `Task` are read alike, and a public text begins the first observation. Every step is scored. An action
    outside the action space gets the reward `refused` and a `GymRefusal`. It counts as a step for the time limit of
    the registered environment (`max_episode_steps`).
    """

    blocking = True
    refused: float = 0.0
    """The reward of an action outside the action space."""
    kinds = (GymAction, GymObservation, GymPicture, GymRefusal)

    @check_arguments
    def __init__(
        self,
        env: str | Callable[[], Env],
        /,
        *,
        observe: Observe | None = None,
        act: Act | None = None,
        metrics: Sequence[str] = (),
        pixels: bool = False,
        refused: float = 0.0,
        **make: object,
    ) -> None:
        """`observe` and `act` are codecs for spaces without a plain form.

        `metrics` names the numbers in gymnasium's `info` to record as metrics. With `pixels`, the agent sees only the
        rendered frame, as with gymnasium's `AddRenderObservation`, and `render_mode` is "rgb_array" by default.
        `refused` is the reward of an action outside the action space. `make` holds the arguments for `gymnasium.make`
        that apply to every task.
        """
        if importlib.util.find_spec("gymnasium") is None:
            raise MissingExtra("gymnasium", "gym", "GymEnvironment")
        if make and callable(env):
            raise TypeError(
                f"{sorted(make)} are arguments of gymnasium.make, but a function makes this environment: pass them "
                "inside the function"
            )
        if pixels and observe is not None:
            raise TypeError("pixels=True shows the rendered frame, and `observe` decides otherwise: give one of them")
        self.env = env
        if pixels:  # set only then, so that recorded configurations of environments without pixels don't change
            self.pixels = True
        self.observe = observe
        self.act = act
        self.metrics = tuple(metrics)
        if refused:  # for the same reason
            self.refused = refused
        self.make: dict[str, Any] = {"render_mode": "rgb_array", **make} if pixels and isinstance(env, str) else make
        self._env: Any = None
        self._env_make: dict[str, Any] = {}
        self._steps = 0
        """The number of actions so far, also of refused ones."""

    async def reset(self, task: object) -> Observation:
        """Start an episode. The gymnasium environment is made at the first call, and if the task has another `make`."""
        text, start = _start(task)
        seed, options, make = start.get("seed"), start.get("options"), start.get("make") or {}
        if self._env is None or make != self._env_make:
            await self.close()
            self._env = None
            self._env, self._env_make = self._made(make), make
        seed, self._steps = self.rng.getrandbits(31) if seed is None else seed, 0
        first = self._shown(*self._env.reset(seed=seed, options=options))
        said = getattr(first, "text", None)
        if text and not isinstance(said, str):
            raise CodecNeeded(
                f"the task's text {text!r:.80} has no place in {type(first).__qualname__}: let `observe` return Text"
            )
        return first.model_copy(update={"text": f"{text}\n{said}" if said else text}) if text else first

    def check_task(self, task: Task) -> None:
        if type(self).reset is GymEnvironment.reset:
            _start(task)

    async def step(self, action: Action) -> Outcome:
        self._steps += 1
        most = getattr(self._env.spec, "max_episode_steps", None)
        over = most is not None and self._steps >= most
        try:
            native = self._native(action)
        except ValueError as error:
            # By default the reward is 0.0, not None, so that the return of an agent without valid actions is 0.0.
            return Outcome(GymRefusal(problem=str(error)), reward=self.refused, truncated=over)
        observation, reward, terminated, truncated, info = self._env.step(native)
        return Outcome(
            self._shown(observation, info),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated) or (over and not terminated),
            metrics={name: _number(name, info[name]) for name in self.metrics if name in info},
        )

    async def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _made(self, make: dict[str, Any]) -> Any:
        if callable(self.env):
            if make:
                raise TypeError(
                    f"the task has arguments of gymnasium.make {sorted(make)}, but a function makes this environment: "
                    "name the environment by its id, or remove them from the task's `make`"
                )
            made: Any = self.env()
            if hasattr(made, "num_envs"):  # gymnasium.vector.VectorEnv
                made.close()
                raise TypeError(
                    f"{type(made).__qualname__} is {made.num_envs} environments at once, and an episode needs one: use "
                    "gymnasium.make; a run plays several episodes at once by itself"
                )
            return made
        import gymnasium

        if not make:
            return gymnasium.make(self.env, **self.make)
        try:
            return gymnasium.make(self.env, **{**self.make, **make})
        except Exception as error:  # gymnasium passes on any exception of the environment's code
            arguments = ", ".join(f"{name}={value!r:.80}" for name, value in make.items())
            raise TypeError(
                f"gymnasium.make({self.env!r}) refuses the task's arguments ({arguments}): "
                f"{type(error).__name__}: {error}; correct the task's `make`"
            ) from error

    def _shown(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        if self.observe is not None:
            more = {"info": info} if "info" in inspect.signature(self.observe).parameters else {}
            return self.observe(observation, self._env, **more)
        if self.pixels:
            frame = self._env.render()
            if frame is None or isinstance(frame, list | str):
                raise CodecNeeded(f'pixels=True needs render_mode="rgb_array", not {self._env.render_mode!r}')
            return GymPicture(picture=Picture.of(frame))
        return GymObservation(value=plain(observation, self._env.observation_space))

    def _native(self, action: Action) -> Any:
        if self.act is not None:
            return self.act(action, self._env)
        if not isinstance(action, GymAction):
            raise CodecNeeded(
                f"{type(action).__qualname__} is not a GymAction. Let the agent make one, as "
                "ChatAgent(parse=lambda text: GymAction(value=int(text))), or pass a codec: act=lambda action, env: ..."
            )
        space = self._env.action_space
        value = native(action.value, space)
        if not space.contains(value):
            raise _no_action(action.value, space)
        return value


def plain(value: object, space: Space) -> JsonValue:
    """Convert an element of a gymnasium space to JSON values. Raises CodecNeeded if the space has no plain form."""
    from gymnasium import spaces

    element: Any = value
    if isinstance(space, spaces.Discrete):
        return int(element)
    if isinstance(space, spaces.Text):
        return str(element)
    if _holds_integers(space):
        return element.tolist()
    if isinstance(space, spaces.Tuple):
        return [plain(part, of) for part, of in zip(element, space.spaces, strict=True)]
    if isinstance(space, spaces.Dict):
        return {key: plain(element[key], of) for key, of in space.spaces.items()}
    raise CodecNeeded(
        f"the observation space {space} has no plain form. Pass a codec: "
        "observe=lambda observation, env: Text(text=...), or pixels=True to show the rendered frame as a picture"
    )


def native(value: JsonValue, space: Space) -> object:
    """Convert JSON values to an element of the space. Raises ValueError if they don't have the form of the space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete) and isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(space, spaces.Text) and isinstance(value, str):
        return value
    if _holds_integers(space):
        return _whole(value, space)
    if isinstance(space, spaces.Tuple) and isinstance(value, list) and len(value) == len(space.spaces):
        return tuple(native(part, of) for part, of in zip(value, space.spaces, strict=True))
    if isinstance(space, spaces.Dict) and isinstance(value, dict) and value.keys() == space.spaces.keys():
        return {key: native(part, space.spaces[key]) for key, part in value.items()}
    if not isinstance(space, spaces.Discrete | spaces.Text | spaces.Tuple | spaces.Dict):
        raise CodecNeeded(f"the action space {space} has no plain form. Pass a codec: act=lambda action, env: ...")
    raise _no_action(value, space)


def _holds_integers(space: Any) -> bool:
    """Return whether the elements are arrays of integers. An array of `uint8` with several axes is an image."""
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return space.dtype.kind in "iu" and (len(space.shape) < 2 or space.dtype != "uint8")
    return isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`metrics` names info[{name!r}], which is {value!r:.80} and not a number: show it to the agent with "
            "observe=lambda observation, env, info: ..."
        ) from error


def _whole(value: JsonValue, space: Any) -> Any:
    import numpy as np

    try:
        # Without this check, the cast would turn 1.5 into 1.
        if np.array(value).dtype.kind in "iu":
            return np.array(value, dtype=space.dtype)
    except (ValueError, OverflowError):  # a ragged list, or a number too large for the space's type
        pass
    raise _no_action(value, space)


def _no_action(value: JsonValue, space: Any) -> ValueError:
    return ValueError(f"{to_json(value).decode()} isn't a valid action; the actions are {space}")


def _start(task: object) -> tuple[str, dict[str, Any]]:
    """Return the public text, and the `seed`, `options` and `make` of a task. Raises TypeError if it has more."""
    given = Task.of(task)
    text, start = given.public if isinstance(given.public, str) else "", dict[str, Any]()
    for part in (None if text else given.public, given.private):
        found: Any = {"seed": part} if isinstance(part, int) and not isinstance(part, bool) else part
        if found is None:
            continue
        wrong = not isinstance(found, dict) or found.keys() - {"seed", "options", "make"} or found.keys() & start.keys()
        if wrong or not all(isinstance(found.get(key) or {}, dict) for key in ("options", "make")):
            raise TypeError(
                f"a GymEnvironment task must be None, an int (seed), or a dict with `seed`, `options` (a dict for "
                f"reset) and `make` (a dict of gymnasium.make's arguments), not {found!r:.80}"
            )
        start |= found
    return text, start
