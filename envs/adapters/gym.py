"""Adapter for gymnasium environments.

Discrete and text spaces work without a codec, as do tuples, dicts and arrays of discrete spaces. For other spaces
(boxes of floats, images), pass functions that convert observations and actions. The initial state is seeded from
`self.rng`, so it is the same for all episodes in a group. gymnasium is imported when an environment is made.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue
from pydantic_core import to_json

from ...tapes import Picture
from ...tapes.common.arguments import check_arguments
from ...tapes.errors import MissingExtra, TapereelError
from ...tapes.records import Task
from ...tapes.steps import Action, Observation
from ..environment import Environment, Outcome

if TYPE_CHECKING:
    from gymnasium import Env, Space

Observe = Callable[[Any, Any], Observation]
"""Converts gymnasium's observation to the agent's. The second argument is the gymnasium environment, for `render`."""
Act = Callable[[Any, Any], Any]
"""Converts an action to the argument of `env.step`. The second argument is the gymnasium environment. If the function
raises ValueError, `env.step` is not called, and the agent sees the message as a `GymRefusal`."""


class GymObservation(Observation, kind="gym_observation"):
    """An observation from a gymnasium environment, as JSON values."""

    value: JsonValue

    def __str__(self) -> str:
        return self.value if isinstance(self.value, str) else to_json(self.value).decode()


class GymPicture(Observation, kind="gym_picture"):
    """The rendered frame of a gymnasium environment (`pixels=True`)."""

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
    is the seed for gymnasium's `reset`. A task without a seed gets one from `self.rng`. A dict holds the options for
    `reset`. Its key `seed` may hold the seed. Its key `make` may hold arguments for `gymnasium.make`, which override
    the constructor's. Every step is scored. An action outside the action space gets the reward 0.0 and a `GymRefusal`.
    """

    blocking = True
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
        **make: object,
    ) -> None:
        """`observe` and `act` are codecs for spaces without a plain form.

        `metrics` names the numbers in gymnasium's `info` to record as metrics. With `pixels`, the agent sees only the
        rendered frame, as with gymnasium's `AddRenderObservation`, and `render_mode` is "rgb_array" by default. `make`
        holds the arguments for `gymnasium.make` that apply to every task.
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
        self.make: dict[str, Any] = {"render_mode": "rgb_array", **make} if pixels and isinstance(env, str) else make
        self._env: Any = None
        self._env_make: dict[str, Any] = {}

    async def reset(self, task: object) -> Observation:
        """Start an episode. The gymnasium environment is made at the first call, and if the task has another `make`."""
        seed, options, make = _start(task)
        if self._env is None or make != self._env_make:
            await self.close()
            self._env = None
            self._env, self._env_make = self._made(make), make
        seed = self.rng.getrandbits(31) if seed is None else seed
        observation, _ = self._env.reset(seed=seed, options=options)
        return self._shown(observation)

    async def step(self, action: Action) -> Outcome:
        try:
            native = self._native(action)
        except ValueError as error:
            # The reward is 0.0, not None, so that the return of an agent without valid actions is 0.0, as in gymnasium.
            return Outcome(GymRefusal(problem=str(error)), reward=0.0)
        observation, reward, terminated, truncated, info = self._env.step(native)
        return Outcome(
            self._shown(observation),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated),
            metrics={name: float(info[name]) for name in self.metrics if name in info},
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
            return self.env()
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

    def _shown(self, observation: Any) -> Observation:
        if self.observe is not None:
            return self.observe(observation, self._env)
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
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
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
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary) and isinstance(value, list):
        return _whole(value, space)
    if isinstance(space, spaces.Tuple) and isinstance(value, list) and len(value) == len(space.spaces):
        return tuple(native(part, of) for part, of in zip(value, space.spaces, strict=True))
    if isinstance(space, spaces.Dict) and isinstance(value, dict) and value.keys() == space.spaces.keys():
        return {key: native(part, space.spaces[key]) for key, part in value.items()}
    known = spaces.Discrete, spaces.Text, spaces.MultiDiscrete, spaces.MultiBinary, spaces.Tuple, spaces.Dict
    if not isinstance(space, known):
        raise CodecNeeded(f"the action space {space} has no plain form. Pass a codec: act=lambda action, env: ...")
    raise _no_action(value, space)


def _whole(value: list[JsonValue], space: Any) -> Any:
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


def _start(task: object) -> tuple[int | None, dict[str, Any] | None, dict[str, Any]]:
    """Return the seed and the options for `env.reset`, and the task's own arguments for `gymnasium.make`."""
    value = task.private if isinstance(task, Task) else task
    if value is None:
        return None, None, {}
    if isinstance(value, int) and not isinstance(value, bool):
        return value, None, {}
    if isinstance(value, dict):
        options: dict[str, Any] = dict(value)
        seed, make = options.pop("seed", None), options.pop("make", {})
        if not isinstance(make, dict):
            raise TypeError(
                f"`make` of a GymEnvironment task must be a dict of gymnasium.make's arguments, not {make!r:.80}"
            )
        return seed, options or None, make
    raise TypeError(
        f"a GymEnvironment task must be None, an int (seed) or a dict (options of reset), not {value!r:.80}"
    )
