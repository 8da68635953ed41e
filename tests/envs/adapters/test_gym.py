"""GymEnvironment against real gymnasium: what it shows, what it takes, how it ends, and that a seed is a seed."""

from __future__ import annotations

import asyncio
import io
import random
import re
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import tapereel as tr
from tapereel.agents import ChatAgent, Limits, ScriptedEngine, rollout
from tapereel.envs import CodecNeeded, GymAction, GymEnvironment, GymObservation, GymRefusal, check_env
from tapereel.envs.adapters.gym import GymPicture
from tapereel.tapes import MissingExtra, Status, Task, Text
from tapereel.tapes.errors import UsageError
from tapereel.tapes.steps import parts_of

from ...agents.worlds import Guess

gymnasium = pytest.importorskip("gymnasium")


def _started(env: GymEnvironment, task: Any = None, seed: int = 0) -> tuple[GymEnvironment, Any]:
    env.rng = random.Random(seed)
    return env, asyncio.run(env.reset(task))


def _walk(env: GymEnvironment, *values: Any) -> list[Any]:
    async def steps() -> list[Any]:
        return [await env.step(GymAction(value=value)) for value in values]

    return asyncio.run(steps())


DOWN, RIGHT = 1, 2


def test_frozen_lake_to_its_goal():
    env, first = _started(GymEnvironment("FrozenLake-v1", is_slippery=False, metrics=("prob",)))
    assert first == GymObservation(value=0)
    outcomes = _walk(env, DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT)
    assert [str(o.observation) for o in outcomes] == ["4", "8", "9", "10", "14", "15"]
    assert [o.reward for o in outcomes] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    assert [o.terminated for o in outcomes] == [False] * 5 + [True]
    assert outcomes[0].metrics == {"prob": 1.0}
    asyncio.run(env.close())


def test_gymnasiums_time_limit_is_a_truncation():
    env, _ = _started(GymEnvironment("FrozenLake-v1", is_slippery=False, max_episode_steps=2))
    first, second = _walk(env, 0, 0)
    assert (first.terminated, first.truncated, second.terminated, second.truncated) == (False, False, False, True)
    asyncio.run(env.close())


def test_a_tuple_of_discrete_spaces_is_a_list():
    env, first = _started(GymEnvironment("Blackjack-v1"), 3)
    assert isinstance(first, GymObservation)
    assert isinstance(first.value, list)
    assert len(first.value) == 3
    assert str(first) == "[{},{},{}]".format(*first.value)
    (stuck,) = _walk(env, 0)
    assert stuck.terminated
    assert stuck.reward in (-1.0, 0.0, 1.0)
    asyncio.run(env.close())


def _hand(task: Any, seed: int) -> Any:
    env, first = _started(GymEnvironment("Blackjack-v1"), task, seed)
    asyncio.run(env.close())
    return first.value


def test_the_start_comes_from_the_environments_seed_or_from_the_task():
    assert [_hand(None, 1)] * 3 == [_hand(None, 1) for _ in range(3)]
    assert len({str(_hand(None, seed)) for seed in range(20)}) > 5
    assert _hand(7, 1) == _hand(7, 2) == _hand({"seed": 7}, 3) == _hand(Task(private=7), 4)
    assert _hand(7, 1) == _hand(Task(public=7), 5) == _hand(Task(public={"seed": 7}), 6)
    assert len({str(_hand(seed, 0)) for seed in range(20)}) > 5


def test_a_task_of_another_shape_is_refused():
    for wrong in ("7", True, 1.5, [1], {"Seed": 1}, {"seed": 1, "low": 0.1}, {"options": 1}):
        with pytest.raises(TypeError, match=f"GymEnvironment.*{re.escape(repr(wrong))}"):
            _started(GymEnvironment("Blackjack-v1"), wrong)
    for task in (Task(public={"seed": 1}, private=2), Task(public="Play.", private="Play."), Task(public={"sed": 1})):
        with pytest.raises(TypeError, match="GymEnvironment"):
            _started(GymEnvironment("Blackjack-v1"), task)


def test_such_a_task_is_refused_before_the_run(tmp_path: Path):
    with pytest.raises(UsageError, match=r"task 1 .*GymEnvironment.*\{'sed': 1\}"):
        tr.run(ChatAgent(), lambda: GymEnvironment("Blackjack-v1"), [1, {"sed": 1}], ["1"], out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_gymnasiums_own_names_give_seed_and_options():
    tilt = {"observe": lambda seen, env: Text(text=str(float(seen[2])))}
    starts = []
    for options in ({"low": -0.001, "high": 0.001}, None):
        env, first = _started(GymEnvironment("CartPole-v1", **tilt), {"seed": 1, "options": options})
        starts.append(abs(float(first.text)))
        asyncio.run(env.close())
    assert starts[0] < 0.001 < starts[1]


def test_a_public_text_begins_the_first_observation():
    play = Task(public="Balance the pole!", private=1)
    codec = lambda seen, env: Text(text="seen")  # noqa: E731
    env, first = _started(GymEnvironment("CartPole-v1", observe=codec), play)
    assert str(first) == "Balance the pole!\nseen"
    assert str(_walk(env, 1)[0].observation) == "seen"
    env, first = _started(GymEnvironment("FrozenLake-v1"), play)
    assert str(first) == "Balance the pole!\n0"
    assert first.value == 0
    asyncio.run(env.close())
    _, first = _started(GymEnvironment("Painted-v0", pixels=True), play)
    assert parts_of(first) == ("Balance the pole!", first.picture)
    with pytest.raises(CodecNeeded, match=r"'Balance the pole!'.*Guess"):
        _started(GymEnvironment("CartPole-v1", observe=lambda seen, env: Guess(number=1)), play)  # type: ignore


def test_info_reaches_a_codec_that_asks_for_it():
    def moves(seen: Any, env: Any, info: Any) -> Text:
        return Text(text=f"{seen}: {[k for k, legal in enumerate(info['action_mask']) if legal]}")

    env, first = _started(GymEnvironment("Taxi-v4", observe=moves), 3)
    assert re.fullmatch(r"\d+: \[\d(, \d)*\]", str(first))
    assert re.fullmatch(r"\d+: \[\d(, \d)*\]", str(_walk(env, 0)[0].observation))
    env, _ = _started(GymEnvironment("Taxi-v4", metrics=["action_mask"]), 3)
    with pytest.raises(TypeError, match=r"'action_mask'.*info: \.\.\."):
        _walk(env, 0)
    asyncio.run(env.close())


def test_several_environments_at_once_are_refused():
    made = []

    def several() -> Any:
        made.append(gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"))
        return made[-1]

    with pytest.raises(TypeError, match=r"VectorEnv is 2 environments.*gymnasium\.make;"):
        _started(GymEnvironment(several))
    assert made[0].closed


def test_a_box_of_integers_is_plain_and_an_image_is_not():
    s = _spaces()
    board, image = s.Box(0, 9, (2, 2), np.int64), s.Box(0, 255, (2, 2), np.uint8)
    grid = Grid(s.Dict({"board": board, "lives": s.Box(0, 255, (1,), np.uint8)}), board, None)
    grid.shown = {"board": np.array([[1, 2], [3, 4]]), "lives": np.array([3], np.uint8)}
    env, first = _started(GymEnvironment(lambda: grid))
    assert first.value == {"board": [[1, 2], [3, 4]], "lives": [3]}
    _, refused, _ = _walk(env, [[0, 9], [0, 0]], [[0, 10], [0, 0]], [0, 1])
    assert isinstance(refused.observation, GymRefusal)
    assert [taken.tolist() for taken in grid.taken] == [[[0, 9], [0, 0]]]
    with pytest.raises(CodecNeeded, match=r"Box.*pixels=True"):
        _started(GymEnvironment(lambda: Grid(image, board, np.zeros((2, 2), np.uint8))))


def test_a_task_chooses_what_gymnasium_makes():
    env = GymEnvironment("FrozenLake-v1", is_slippery=False, map_name="4x4")
    shapes = []
    for task in ({"make": {"map_name": "8x8"}, "seed": 1}, None, Task(private={"make": {"desc": ["SFG"]}})):
        _started(env, task)
        shapes.append(env._env.unwrapped.desc.shape)
        assert env._env.unwrapped.P[0][RIGHT] == [(1.0, 1, 0, False)], "what is given for every task still holds"
    assert shapes == [(8, 8), (4, 4), (1, 3)]
    asyncio.run(env.close())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ({"is_slipery": False, "map_name": "8x8"}, "is_slipery=False, map_name='8x8'"),
        ({"map_name": "9x9"}, "map_name='9x9'.*KeyError"),
        ({"id": "Blackjack-v1"}, "id='Blackjack-v1'"),
        (["8x8"], r"`make`.*\['8x8'\]"),
    ],
)
def test_what_gymnasium_does_not_take_from_a_task_is_named(make: Any, says: str):
    env = GymEnvironment("FrozenLake-v1")
    with pytest.raises(TypeError, match=says):
        _started(env, {"make": make})
    _started(env)
    asyncio.run(env.close())


def test_a_function_that_makes_the_environment_takes_nothing_from_a_task():
    env = GymEnvironment(lambda: gymnasium.make("FrozenLake-v1"))
    with pytest.raises(TypeError, match=r"\['map_name'\].*`make`"):
        _started(env, {"make": {"map_name": "8x8"}})


class Grid(gymnasium.Env):
    """Records what it is given."""

    def __init__(self, observations: Any, actions: Any, shown: Any) -> None:
        self.observation_space = observations
        self.action_space = actions
        self.shown = shown
        self.taken: list[Any] = []
        self.options: Any = None
        self.closed = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.options = options
        return self.shown, {}

    def step(self, action: Any) -> Any:
        self.taken.append(action)
        import numpy as np

        return self.shown, np.float32(0.5), np.bool_(False), np.bool_(True), {"level": np.int64(3), "name": "x"}

    def close(self) -> None:
        self.closed += 1


def _spaces() -> Any:
    return gymnasium.spaces


def test_plain_spaces_go_in_and_out_as_json():
    import numpy as np

    s = _spaces()
    place, both = s.Tuple((s.Discrete(3), s.MultiDiscrete([4, 5]))), s.Tuple((s.Discrete(2, start=4), s.MultiBinary(2)))
    observed = s.Dict({"text": s.Text(9), "on": s.MultiBinary(2), "at": place})
    acted = s.Dict({"pick": s.MultiDiscrete([3, 3]), "say": s.Text(5), "both": both})
    grid = Grid(observed, acted, {"text": "hi", "on": np.array([1, 0]), "at": (np.int64(2), np.array([3, 4]))})
    env, first = _started(GymEnvironment(lambda: grid, metrics=("level", "absent")), {"options": {"map": "big"}})
    assert first == GymObservation(value={"text": "hi", "on": [1, 0], "at": [2, [3, 4]]})
    assert grid.options == {"map": "big"}
    (outcome,) = _walk(env, {"pick": [2, 1], "say": "yes", "both": [5, [0, 1]]})
    assert (outcome.reward, outcome.terminated, outcome.truncated) == (0.5, False, True)
    assert outcome.metrics == {"level": 3.0}
    assert type(outcome.reward) is float
    assert type(outcome.truncated) is bool
    assert grid.taken[0]["pick"].tolist() == [2, 1]
    assert (grid.taken[0]["say"], grid.taken[0]["both"][0]) == ("yes", 5)
    asyncio.run(env.close())
    assert grid.closed == 1


@pytest.mark.parametrize("value", [4, -1, True, "1", 1.0, None, [1], {"a": 1}])
def test_what_is_no_discrete_action_is_refused_and_nothing_moves(value: Any):
    env, _ = _started(GymEnvironment("FrozenLake-v1", is_slippery=False))
    refused, moved = _walk(env, value, DOWN)
    assert isinstance(refused.observation, GymRefusal)
    assert "Discrete(4)" in str(refused.observation)
    assert (refused.reward, refused.terminated, refused.truncated) == (0.0, False, False)
    assert str(moved.observation) == "4"
    asyncio.run(env.close())


@pytest.mark.parametrize(
    "value",
    [
        [1],
        [1, 3],
        [1.5, 1],
        [1, 10**30],
        [[1], [2, 3]],
        ["a", "b"],
        [True, 1.0],
        [],
        3,
        {"0": 1},
    ],
)
def test_what_is_no_array_of_whole_numbers_in_range_is_refused(value: Any):
    s = _spaces()
    grid = Grid(s.Discrete(2), s.MultiDiscrete([2, 3]), 1)
    env, _ = _started(GymEnvironment(lambda: grid))
    (outcome,) = _walk(env, value)
    assert isinstance(outcome.observation, GymRefusal)
    assert "MultiDiscrete([2 3])" in str(outcome.observation)
    assert grid.taken == []


def test_a_space_without_a_plain_form_asks_for_a_codec():
    with pytest.raises(CodecNeeded, match=r"Box.*observe=lambda"):
        _started(GymEnvironment("CartPole-v1"))
    s = _spaces()
    env, _ = _started(GymEnvironment(lambda: Grid(s.Discrete(2), s.Box(0, 1), 1)))
    with pytest.raises(CodecNeeded, match=r"Box.*\bact=lambda"):
        _walk(env, 0.5)
    env, _ = _started(GymEnvironment(lambda: Grid(s.Discrete(2), s.Discrete(2), 1)))
    with pytest.raises(CodecNeeded, match=r"Guess.*GymAction"):
        asyncio.run(env.step(Guess(number=1)))


def test_codecs_show_and_read_anything():
    env, first = _started(
        GymEnvironment(
            "CartPole-v1",
            observe=lambda seen, env: Text(text=f"tilt {seen[2]:+.1f} of {env.spec.id}"),
            act=lambda action, env: action.number,
        )
    )
    assert str(first) in ("tilt +0.0 of CartPole-v1", "tilt -0.0 of CartPole-v1")
    outcome = asyncio.run(env.step(Guess(number=1)))
    assert outcome.reward == 1.0
    asyncio.run(env.close())


def test_an_error_in_the_simulator_is_not_taken_for_a_wrong_action():
    class Broken(Grid):
        def step(self, action: Any) -> Any:
            raise ValueError("the physics engine gave up")

    s = _spaces()
    env, _ = _started(GymEnvironment(lambda: Broken(s.Discrete(2), s.Discrete(2), 1)))
    with pytest.raises(ValueError, match="gave up"):
        _walk(env, 1)


def test_the_simulator_runs_off_the_event_loop_in_one_thread():
    threads: list[int] = []

    class Where(Grid):
        def reset(self, **options: Any) -> Any:
            threads.append(threading.get_ident())
            return super().reset(**options)

        def step(self, action: Any) -> Any:
            threads.append(threading.get_ident())
            return super().step(action)

        def close(self) -> None:
            threads.append(threading.get_ident())

    s = _spaces()
    env = GymEnvironment(lambda: Where(s.Discrete(2), s.Discrete(2), 1))
    agent = ChatAgent(parse=lambda text: GymAction(value=int(text)))
    tape = asyncio.run(rollout(agent, env, task=None, engine=ScriptedEngine(["1"])))
    assert tape.status is Status.TRUNCATED
    assert len(threads) == 3
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


def test_a_whole_episode_on_a_tape():
    lake = GymEnvironment("FrozenLake-v1", is_slippery=False)
    agent = ChatAgent("Get to 15.", parse=lambda text: GymAction(value=int(text)))
    engine = ScriptedEngine(["1", "1", "9", "2", "2", "1", "2"])
    tape = asyncio.run(rollout(agent, lake, task=None, engine=engine, limits=Limits(turns=20)))
    assert (tape.status, tape.reward, tape.turns) == (Status.FINISHED, 1.0, 7)
    assert [r.value for r in tape.rewards] == [0.0] * 6 + [1.0]
    assert [str(o) for o in tape.observations][2:4] == ["8", "9 isn't a valid action; the actions are Discrete(4)"]
    assert tape.begin.env.config == {
        "env": "FrozenLake-v1",
        "make": {"is_slippery": False},
        "metrics": [],
        "act": None,
        "observe": None,
    }


@pytest.mark.parametrize(("name", "actions"), [("FrozenLake-v1", 4), ("Blackjack-v1", 2)])
def test_real_environments_pass_the_check(name: str, actions: int):
    report = check_env(
        lambda: GymEnvironment(name),
        [None, 1, 2],
        lambda seen, rng: GymAction(value=rng.randrange(actions)),
        max_turns=100,
        reward_range=(-1.0, 1.0),
    )
    assert report.ok, str(report)
    assert report.findings == ()
    assert report.episodes == 3
    assert report.checks["determinism"] == report.checks["concurrency"] == report.checks["restore"] == "ok"


def test_wrong_arguments_and_a_missing_gymnasium(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(TypeError, match=r"\['is_slippery'\]"):
        GymEnvironment(lambda: None, is_slippery=False)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingExtra, match=r"tapereel\[gym\]"):
        GymEnvironment("FrozenLake-v1")


class Painted(gymnasium.Env[Any, Any]):
    """A square of one colour, which each step makes brighter by the action."""

    metadata = {"render_modes": ["rgb_array", "rgb_array_list"], "render_fps": 4}  # noqa: RUF012
    action_space = gymnasium.spaces.Discrete(3)
    observation_space = gymnasium.spaces.Box(0, 255, (8, 6, 3), np.uint8)

    def __init__(self, render_mode: str | None = None) -> None:
        self.render_mode = render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.shade = 100
        return self.frame(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.shade += int(action)
        return self.frame(), float(action), False, False, {}

    def frame(self) -> Any:
        return np.full((8, 6, 3), self.shade, "uint8")

    def render(self) -> Any:
        return [self.frame()] if self.render_mode == "rgb_array_list" else self.frame()


gymnasium.register("Painted-v0", Painted)


def test_pixels_show_the_rendered_frame_of_every_step():
    env, first = _started(GymEnvironment("Painted-v0", pixels=True))
    shown = [first, *(outcome.observation for outcome in _walk(env, 1, 2))]
    assert all(isinstance(step, GymPicture) for step in shown)
    frames = [np.asarray(Image.open(io.BytesIO(step.picture.data)))[0, 0].tolist() for step in shown]
    assert frames == [[100] * 3, [101] * 3, [103] * 3]
    (refused,) = _walk(env, 7)
    assert isinstance(refused.observation, GymRefusal)
    _, first = _started(GymEnvironment(lambda: Painted("rgb_array"), pixels=True))
    assert first == shown[0]


@pytest.mark.parametrize("name", ["FrozenLake-v1", "CartPole-v1"])
@pytest.mark.filterwarnings("ignore")
def test_pixels_of_known_environments(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env, first = _started(GymEnvironment(name, pixels=True))
    _, same = _started(GymEnvironment(name, pixels=True))
    assert first == same
    assert isinstance(first, GymPicture)
    assert isinstance(_walk(env, 1)[0].observation, GymPicture)
    asyncio.run(env.close())


@pytest.mark.filterwarnings("ignore")
def test_pixels_need_a_frame_and_pixels_alone_are_no_picture_by_themselves():
    with pytest.raises(CodecNeeded, match=r"Box.*pixels=True"):
        _started(GymEnvironment("Painted-v0"))
    for make in (lambda: Painted("rgb_array_list"), lambda: gymnasium.make("CartPole-v1")):
        with pytest.raises(CodecNeeded, match=r'pixels=True.*render_mode="rgb_array"'):
            _started(GymEnvironment(make, pixels=True))
    with pytest.raises(TypeError, match=r"pixels=True.*`observe`"):
        GymEnvironment("Painted-v0", pixels=True, observe=lambda observation, env: GymObservation(value=1))


def test_a_refused_action_costs_what_the_user_says_and_counts_for_the_time_limit():
    env, _ = _started(GymEnvironment("FrozenLake-v1", is_slippery=False, max_episode_steps=3, refused=-1.0))
    moved, refused, last = _walk(env, DOWN, "up", 9)
    assert [o.reward for o in (moved, refused, last)] == [0.0, -1.0, -1.0]
    assert [o.truncated for o in (moved, refused, last)] == [False, False, True]
    asyncio.run(env.reset(None))
    assert [o.truncated for o in _walk(env, "up", DOWN, DOWN)] == [False, False, True], "gymnasium counted two steps"
    asyncio.run(env.close())


def test_an_agent_without_a_valid_action_ends_at_the_environments_time_limit():
    env = lambda: GymEnvironment("CartPole-v1", max_episode_steps=5, observe=lambda o, env: Text(text="?"))  # noqa: E731
    agent = ChatAgent(parse=lambda text: GymAction(value=text))
    tape = asyncio.run(rollout(agent, env, None, engine=ScriptedEngine(["left"] * 9)))
    assert (tape.status, len(tape.actions)) == (Status.TRUNCATED, 5)
