"""A run that is known to show pictures needs engines that see: else it is refused before it writes anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tapereel as tr
from tapereel.agents import ChatAgent
from tapereel.envs import GymEnvironment
from tapereel.envs.adapters import ToolEnvironment
from tapereel.envs.adapters.lamps import Lamps
from tapereel.envs.remote import Declared, Pool, RemoteEnvironment
from tapereel.finetune.api import save_tiny_model
from tapereel.tapes import Answer, Picture, Task, ToolCalls, Video
from tapereel.tapes.errors import UsageError

from ..picture_worlds import Corners, square

AGENT = ChatAgent(actions=[ToolCalls], plain=Answer)
PHOTO = Task.model_validate({"id": "photo", "public": {"prompt": "?", "image": Picture.of(square(0))}})
FILM = Task.model_validate({"id": "film", "public": {"prompt": "?", "video": Video.of([square(0)], fps=1)}})
TEXT = Task(id="text", public={"prompt": "?"})
HIDDEN = Task.model_validate({"public": {"prompt": "?"}, "private": {"goal": Picture.of(square(0))}})


class Plain(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__(())

    async def answered(self, text: str) -> tr.Outcome:
        return tr.Outcome(reward=1.0, terminated=True)


def pixels() -> GymEnvironment:
    return GymEnvironment("FrozenLake-v1", pixels=True)


def elsewhere() -> RemoteEnvironment:
    """Nothing listens there: what an environment shows is known before the first connection."""
    return RemoteEnvironment("http://127.0.0.1:9", Lamps)


@pytest.fixture(scope="module")
def blind(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "text", size="micro")


@pytest.mark.parametrize(
    ("env", "tasks", "says"),
    [
        (Plain, [TEXT, PHOTO], r"'photo'.*\[picture 40x30"),
        (Plain, [TEXT, FILM], r"'film'.*\[video 1 frames 40x30"),
        (pixels, [1], "GymEnvironment"),
        (elsewhere, [1], "RemoteEnvironment"),
    ],
)
@pytest.mark.parametrize("verb", [tr.run, tr.evaluate, tr.train])
def test_an_engine_that_cannot_see_is_refused_at_the_start(
    verb: Any, env: Any, tasks: list[Any], says: str, blind: str, tmp_path: Path
):
    pytest.importorskip("gymnasium")
    settings = {"evaluation.fraction": 0} if verb is tr.train else {}
    with pytest.raises(UsageError, match=rf"'(embedded|{blind})'.*{says}"):
        verb(AGENT, env, tasks, blind, out=tmp_path / "run", settings=settings)
    assert not (tmp_path / "run").exists()


def test_environments_in_other_processes_say_whether_they_show_pictures():
    pytest.importorskip("gymnasium")
    assert Declared.of(pixels()).pixels
    with Pool(Lamps, processes=1) as showing, Pool(Plain, processes=1) as plain:
        assert (showing().pixels, plain().pixels, showing.started) == (True, False, 0)
        assert "pixels" not in vars(plain()), "recorded configurations stay as they are"


def test_a_picture_of_a_held_out_task_counts(blind: str, tmp_path: Path):
    (tmp_path / "held_out.py").write_text(f"from {__name__} import PHOTO\ntasks = [PHOTO]\n")
    settings = {"evaluation.tasks": f"{tmp_path}/held_out.py:tasks"}
    with pytest.raises(UsageError, match=r"'photo'.*\[picture 40x30"):
        tr.train(AGENT, Plain, [TEXT], blind, out=tmp_path / "run", settings=settings)
    assert not (tmp_path / "run").exists()


def test_a_partner_that_cannot_see_is_named(blind: str, tmp_path: Path):
    settings: Any = {"players.other.engine": {"kind": "embedded", "model": blind}, "players.other.agents": ["agent/x"]}
    with pytest.raises(UsageError, match=r"'embedded'.*'photo'"):
        tr.run(AGENT, Plain, [PHOTO], ["yes"], out=tmp_path / "run", settings=settings)


@pytest.mark.parametrize(("env", "task"), [(Corners, 1), (Plain, HIDDEN)])
def test_what_is_not_known_at_the_start_is_no_reason(env: Any, task: Any, blind: str, tmp_path: Path):
    settings: Any = {"limits.turns": 1, "sampling.max_tokens": 1, "retries": 0}
    made = tr.run(AGENT, env, [task], blind, out=tmp_path / "run", settings=settings)
    (tape,) = made.tapes()
    said = tape.cause.message if tape.cause is not None else ""
    assert ("[picture" in (said or "")) == (env is Corners)
