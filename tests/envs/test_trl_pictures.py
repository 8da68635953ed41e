"""Images of data sets and of TRL's environments: pictures of the prompt and of tool results, which rewards see too."""

from __future__ import annotations

import asyncio
import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tapereel.agents import ChatAgent, Request, ScriptedEngine, rollout
from tapereel.envs import BadTasks, Outcome, Taskset
from tapereel.envs.adapters import ToolEnvironment, TRLEnvironment, trl_reward, trl_row
from tapereel.envs.checks.rescore import rescore
from tapereel.envs.rewards import Rewards
from tapereel.envs.taskset import columns, standard_row
from tapereel.tapes import Answer, Picture, Status, Tape, Task, ToolCalls, ToolResults, Video
from tapereel.tapes.pictures import pictures_of
from tapereel.tapes.steps import content_parts
from tapereel.tapes.store import Store

from ..agents.picture_worlds import corner_of, square

datasets = pytest.importorskip("datasets")
AGENT = ChatAgent(actions=[ToolCalls], plain=Answer)
TAKE = '<tool_call>{"name": "take", "arguments": {}}</tool_call>'


def file_of(corner: int) -> bytes:
    written = io.BytesIO()
    Image.fromarray(square(corner)).save(written, "PNG")
    return written.getvalue()


URL = f"data:image/png;base64,{base64.b64encode(file_of(0)).decode()}"


def seen(request: Request) -> list[int]:
    """The red corners of the pictures in a request, by their pixels."""
    assert request.picture is not None
    names = [str(p["media"]) for m in request.messages for p in content_parts(m) if p.get("type") == "image"]
    return [corner_of(np.asarray(Image.open(io.BytesIO(request.picture(name))))) for name in names]


def by_pixels(request: Request) -> str:
    if request.tools and len(seen(request)) < 2:
        return TAKE
    return "".join(map(str, seen(request)))


def play(env: Any, task: Any, **options: Any) -> Tape:
    return asyncio.run(rollout(AGENT, env, task, engine=ScriptedEngine(by_pixels), **options))


class Plain(ToolEnvironment):
    """No tools: the prompt is the task's."""

    def __init__(self) -> None:
        super().__init__(())


class Photos:
    """Shows a photo in `reset`, and another one by a tool."""

    def reset(self, **row: Any) -> list[dict[str, Any]]:
        self.corner = int(row["corner"])
        return [{"type": "text", "text": "First:"}, {"type": "image", "image": Image.fromarray(square(self.corner))}]

    def take(self) -> list[dict[str, Any]]:
        """Take another photo."""
        photo = Image.fromarray(square((self.corner + 1) % 4))
        return [{"type": "image", "image": photo}, {"type": "text", "text": "Second."}]


def sees(completions: Any, corner: Any, **columns: Any) -> list[float]:
    return [float(completions[0][-1]["content"] == f"{corner[0]}{(corner[0] + 1) % 4}")]


def test_an_environment_of_trl_shows_images_by_reset_and_by_tools():
    tape = play(
        lambda: TRLEnvironment(Photos, rewards=[sees]),
        trl_row({"prompt": [{"role": "user", "content": "Look."}], "corner": 2}),
    )
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0)
    assert [part["type"] for part in tape.messages()[0]["content"]] == ["text", "text", "image"]
    (step,) = [step for step in tape if isinstance(step, ToolResults)]
    assert (step.results[0].content, step.results[0].pictures) == ("Second.", (Picture.of(square(3)),))


def test_an_environment_of_trl_shows_videos_and_its_rewards_read_their_frames():
    heard: list[Any] = []

    class Films(Photos):
        def reset(self, **row: Any) -> Any:
            self.corner = int(row["corner"])
            return ["First:", Video.of([square(self.corner)], fps=2, indices=[3])]

        def take(self) -> Any:
            """Film again."""
            return Video.of([square(3)], fps=2, indices=[5])

    def reads(completions: Any, **columns: Any) -> list[float]:
        heard.extend(completions[0])
        return [1.0]

    row = trl_row({"prompt": [{"role": "user", "content": "Look."}], "corner": 2})
    engine = ScriptedEngine([TAKE, "32"])
    tape = asyncio.run(rollout(AGENT, lambda: TRLEnvironment(Films, rewards=[reads]), row, engine=engine))
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0), tape.cause
    assert [part["type"] for part in tape.messages()[0]["content"]] == ["text", "text", "video"]
    (result,) = [message for message in heard if message["role"] == "tool"]
    assert [part.get("text", part["type"]) for part in result["content"]] == ["<2.5 seconds>", "image"]


def looked(images: Any = None, image: Any = None, completions: Any = None, **columns: Any) -> list[float]:
    """1 where the answer names the corners of the row's images, which TRL gives as PIL images."""
    found = images[0] if images is not None else [image[0]]
    assert all(isinstance(one, Image.Image) for one in found)
    said = completions[0] if isinstance(completions[0], str) else completions[0][-1]["content"]
    return [float(said == "".join(str(corner_of(np.asarray(one))) for one in found))]


def rows() -> Any:
    """A data set as TRL's vision data sets are: conversations with parts, and a list of images of each row."""
    said = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "?"}]
    made = {
        "prompt": [
            [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, {"role": "user", "content": said}]
        ],
        "images": [[{"bytes": file_of(3), "path": None}, {"bytes": file_of(1), "path": None}]],
        "label": [7],
    }
    return datasets.Dataset.from_dict(made).cast_column("images", datasets.Sequence(datasets.Image()))


@pytest.mark.parametrize("decoded", [True, False])
def test_images_of_a_data_set_are_pictures_of_the_prompt(decoded: bool, tmp_path: Path):
    rows_ = rows() if decoded else rows().cast_column("images", datasets.Sequence(datasets.Image(decode=False)))
    (task,) = Taskset(rows_, row=trl_row)
    with Store.create(tmp_path / "run") as store:
        tape = play(lambda: TRLEnvironment(rewards=[looked]), task, journal=store.writer)
        assert (tape.status, tape.reward, tape.task["prompt"][1]["role"]) == (Status.FINISHED, 1.0, "user")
        assert [part["type"] for part in tape.messages()[1]["content"]] == ["image", "text", "image", "text"]
        assert tape[0].pictures == tuple(Picture.of(square(corner)) for corner in (3, 1))
        verdict, _ = asyncio.run(rescore(store.tape(tape.id), Rewards([trl_reward(looked)])))
    assert verdict.outcome == "verified", verdict


@pytest.mark.parametrize(
    ("row", "types"),
    [
        ({"prompt": "Where?", "image": Image.fromarray(square(2))}, ["image", "text"]),
        (
            {"prompt": [{"role": "user", "content": "Where?"}], "images": [file_of(2), file_of(0)]},
            ["image"] * 2 + ["text"],
        ),
        ({"prompt": "Where?", "images": []}, None),
        ({"prompt": "Where?", "images": None, "image": None}, None),
    ],
)
def test_pictures_without_a_place_stand_before_the_text(row: dict[str, Any], types: list[str] | None):
    for env, task in ((TRLEnvironment, trl_row(row)), (Plain, columns([*row])(row))):
        tape = play(env, task)
        assert tape.status is Status.FINISHED, tape.cause
        content = tape.messages()[0]["content"]
        assert content == "Where?" if types is None else [part["type"] for part in content] == types


class Named(Plain):
    async def answered(self, text: str) -> Outcome:
        assert isinstance(self.task.private, dict)
        return Outcome(reward=float(text == self.task.private["answer"]), terminated=True)


def test_columns_of_a_data_set_make_tasks_with_pictures():
    made = {"question": ["Where?"], "picture": [{"bytes": file_of(1), "path": None}], "answer": ["1"]}
    rows_ = datasets.Dataset.from_dict(made).cast_column("picture", datasets.Image())
    row = standard_row({"prompt": "question", "image": "picture", "answer": "answer"})
    (task,) = Taskset(rows_, row=row)
    assert play(Named, task).reward == 1.0


def test_images_that_do_not_fit_are_named():
    two = [file_of(0), file_of(1)]
    for prompt, images, says in [
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
            two,
            r"\b1\b.*'image'.*\b2\b",
        ),
        (
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
            [],
            r"\b1\b.*'image'.*\b0\b",
        ),
    ]:
        tape = play(TRLEnvironment, trl_row({"prompt": prompt, "images": images}))
        assert tape.cause is not None
        assert re.search(says, tape.cause.message or "")
    with pytest.raises(BadTasks, match=r"item 1: .*PNG.*JPEG.*WebP"):
        Taskset([{"prompt": "a", "images": two}, {"prompt": "b", "images": [b"<svg/>"]}], row=trl_row)


def test_an_image_without_bytes_is_refused_by_its_path():
    with pytest.raises(BadTasks, match=r"'photo\.png'.*cast_column"):
        list(Taskset([{"prompt": "?", "images": [{"bytes": None, "path": "photo.png"}]}], row=trl_row))


@pytest.mark.parametrize(
    "hostile", ["{path}", "file://{path}", "http://127.0.0.1:1/a.png", {"path": "{path}"}, 5, "data:,x"]
)
def test_a_task_names_no_file_or_url(hostile: Any, tmp_path: Path):
    """A task may come from another process; an environment reads no file that it names."""
    path = tmp_path / "secret.png"
    path.write_bytes(file_of(0))
    named = hostile.format(path=path) if isinstance(hostile, str) else hostile
    for task in (Task(public={"prompt": "?", "images": [named]}), Task(public={"prompt": "?", "image": named})):
        for env in (TRLEnvironment, Plain):
            tape = play(env, task)
            assert (tape.status, pictures_of(tape[0])) == (Status.FINISHED, ())
            assert isinstance(tape.messages()[0]["content"], str)
    said = [{"role": "user", "content": [{"type": "image"}]}]
    tape = play(Plain, Task(public={"prompt": said, "images": [URL, named]}))
    assert re.search(r"'image'.*\b0\b", str(tape.cause))


def test_a_bomb_in_a_task_is_refused():
    url = f"data:image/png;base64,{base64.b64encode(b'GIF89a' + bytes(100)).decode()}"
    tape = play(Plain, Task(public={"prompt": "?", "images": [url]}))
    assert tape.cause is not None
    assert "WebP" in (tape.cause.message or "")
