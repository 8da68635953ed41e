"""Videos of tasks: files of the run for their frames, however many attempts name them, and the times with them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tapereel.agents import EpisodeSpec, ScriptedEngine, rollout
from tapereel.agents.rendering import Renderer
from tapereel.agents.replay import replay
from tapereel.agents.replay.branching import cut
from tapereel.envs import BadTasks, Environment, Outcome, Taskset
from tapereel.envs.adapters import TRLEnvironment, trl_reward, trl_row
from tapereel.envs.adapters.trl import row_of
from tapereel.envs.checks.reexec import reexec
from tapereel.envs.checks.rescore import rescore
from tapereel.envs.remote import ResetCall, read_call
from tapereel.envs.remote.env_protocol import files_of
from tapereel.envs.rewards import Rewards
from tapereel.envs.taskset import standard_row
from tapereel.tapes import Answer, Picture, Status, Tape, Task, Video
from tapereel.tapes.common.run_async import run_async
from tapereel.tapes.messages import part_of
from tapereel.tapes.store import Store, verify

from ..agents.episode.test_seeing_tokens import Babbler
from ..agents.picture_worlds import corner_of, square
from ..agents.rendering.seeing import QWEN, Films, tokenizer
from .test_task_pictures import Wire
from .test_trl_pictures import AGENT, URL, Plain, datasets, file_of, play

FPS, INDICES = 30, (0, 15, 45)
FILM = Video.of([square(corner) for corner in (0, 1, 2)], fps=FPS, indices=INDICES)


def column(*films: tuple[int, ...], key: str = "videos", indices: tuple[int, ...] | None = INDICES) -> Any:
    """A data set whose rows have a video each, with a red corner in each frame."""
    made = [{"frames": [{"bytes": file_of(k), "path": None} for k in film], "fps": FPS} for film in films]
    shown = [{**one, "indices": [*indices]} if indices is not None else one for one in made]
    values = [[one] for one in shown] if key == "videos" else shown
    rows = datasets.Dataset.from_dict({"prompt": ["Where?"] * len(films), key: values})
    film = {"frames": datasets.List(datasets.Image()), "fps": datasets.Value("float64")}
    if indices is not None:
        film["indices"] = datasets.List(datasets.Value("int64"))
    return rows.cast_column(key, datasets.List(film) if key == "videos" else film)


def ends(completions: Any, videos: Any, **columns: Any) -> list[float]:
    """1 where the answer names the red corner of the last frame."""
    (film,) = videos[0]
    assert (film["fps"], film["indices"]) == (FPS, [*INDICES])
    return [float(completions[0] == str(corner_of(np.asarray(film["frames"][-1]))))]


def recorded(tasks: Taskset, run: Path, attempts: int) -> list[Tape]:
    async def play() -> list[Tape]:
        engine = ScriptedEngine(lambda request: "2")
        env = lambda: TRLEnvironment(rewards=[ends])  # noqa: E731
        every = (rollout(AGENT, env, t, engine=engine, journal=store.writer) for _ in range(attempts) for t in tasks)
        return await asyncio.gather(*every)

    with Store.create(run) as store:
        return run_async(play())


def test_a_video_of_a_data_set_is_stored_once_and_verified_replayed_rescored_and_forked(tmp_path: Path) -> None:
    tapes = recorded(Taskset(column((0, 1, 2), (1, 0, 2)), row=trl_row), tmp_path / "run", 10)
    assert {(tape.status, tape.reward) for tape in tapes} == {(Status.FINISHED, 1.0)}
    assert len(list((tmp_path / "run/tapes/media").iterdir())) == 3
    assert b"base64" not in b"".join(file.read_bytes() for file in (tmp_path / "run/tapes").glob("*.jsonl"))
    report = verify(tmp_path / "run")
    assert (report.verdict, report.media, report.unnamed_media) == ("holds", 3, 0)
    with Store.open(tmp_path / "run") as store:
        tape = next(tape for tape in store.tapes(closed=True) if tape.begin.task.pictures == (FILM,))
        assert tape.begin.task.hash == tape.begin.task_hash
        assert tape.messages()[0]["content"] == [part_of(FILM), {"type": "text", "text": "Where?"}]
        assert run_async(replay(tape, AGENT)).outcome == "verified"
        assert run_async(reexec(tape, TRLEnvironment)).outcome == "verified"
        verdict, _ = run_async(rescore(tape, Rewards([trl_reward(ends)])))
        assert verdict.outcome == "verified", verdict
        engine = ScriptedEngine(lambda request: "2")
        again = rollout(AGENT, TRLEnvironment, EpisodeSpec.of(tape.begin.task, fork=cut(tape, 0)), engine=engine)
        assert run_async(again).status is Status.FINISHED
    file = next((tmp_path / "run/tapes/media").iterdir())
    file.unlink()
    assert any(file.name in problem for problem in verify(tmp_path / "run").broken)


def test_a_task_is_told_by_the_frames_and_times_of_its_video() -> None:
    task = Task(public={"clip": FILM}, private=[FILM, FILM.frames[0]])  # type: ignore[dict-item, list-item]
    assert (task.pictures, task.shown) == ((FILM, FILM.frames[0]), (FILM,))
    assert (task.filled(task.public), task.filled(task.private)) == ({"clip": FILM}, [FILM, FILM.frames[0]])
    others = (
        Video.of(FILM.frames, fps=FPS),
        Video.of(FILM.frames, fps=FPS / 2, indices=INDICES),
        Video.of(FILM.frames[::-1], fps=FPS, indices=INDICES),
    )
    assert len({Task.of(film).hash for film in (FILM, *others)}) == 4
    assert Task.of(FILM).hash == Task.of(Video.of(FILM.frames, fps=FPS, indices=INDICES)).hash
    assert (Task.of(FILM).given, Task.of(FILM.name).pictures) == (FILM, ())


def test_a_native_video_is_read_from_a_task() -> None:
    (task,) = Taskset(column((0, 1, 2)), row=trl_row)
    engine = Babbler(Renderer(tokenizer(QWEN), Films()))
    tape = run_async(rollout(AGENT, TRLEnvironment, task, engine=engine))
    (place,) = tape.call_places(next(iter(tape.calls)))
    assert (place.kind, place.times) == ("video", FILM.times)
    assert place.media == tuple(frame.name for frame in FILM.frames)


class Theatre(Environment[Answer]):
    """Ends with the reward 1 where the answer is the time of the last frame, in seconds."""

    async def reset(self, task: Any) -> str:
        self.film = task.filled(task.public)["clip"]
        assert self.film == FILM
        assert [frame.data for frame in self.film.frames] == [frame.data for frame in FILM.frames]
        return "How long?"

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=float(action.text == str(self.film.times[-1])), terminated=True)


def test_videos_of_tasks_reach_environments_elsewhere(tmp_path: Path) -> None:
    class Sent(Wire):
        env = Theatre

    task = Task.model_validate({"public": {"clip": FILM}})
    with Store.create(tmp_path / "run") as store:
        engine = ScriptedEngine(["1.5"])
        tape = run_async(rollout(AGENT, Sent, task, engine=engine, journal=store.writer))
        assert tape.reward == 1.0, tape.cause
        assert run_async(reexec(store.tape(tape.id), Sent)).outcome == "verified"
    assert verify(tmp_path / "run").media == 3
    assert read_call(ResetCall(id=1, task=task, files=files_of(task)).encoded()).task == task  # type: ignore[union-attr]


def test_videos_and_pictures_stand_at_their_parts_of_the_prompt() -> None:
    still = Picture.of(square(3))
    film = {"frames": [URL, file_of(1), Image.fromarray(square(2))], "fps": FPS, "indices": INDICES}
    said = [{"type": "video"}, {"type": "text", "text": "and"}, {"type": "image"}, {"type": "text", "text": "?"}]
    row = {"prompt": [{"role": "user", "content": said}], "image": file_of(3), "video": film}
    made = standard_row({"prompt": "prompt", "image": "image", "video": "video"})(row)
    for env, task in ((TRLEnvironment, trl_row(row)), (Plain, made)):
        tape = play(env, task)
        assert tape.messages()[0]["content"] == [part_of(FILM), said[1], part_of(still), said[3]], tape.cause
    assert row_of(trl_row(row))["video"]["frames"][2].size == (40, 30)  # type: ignore[index]
    (task,) = Taskset(column((0, 1, 2), key="video", indices=None), row=trl_row)
    assert task.shown == (Video.of(FILM.frames, fps=FPS),)
    tape = play(Plain, trl_row({**row, "video": None}))
    assert re.search(r"\b1\b.*'video'.*\b0\b", str(tape.cause))


@pytest.mark.parametrize(
    ("videos", "says"),
    [
        ([[file_of(0), file_of(1)]], r"item 0: .*'videos'.*\[.*\bfps\b"),
        ([{"frames": [file_of(0)], "fps": None}], "'videos'"),
        ([{"frames": [file_of(0)], "fps": 1, "start": 2}], "'videos'"),
        ([{"frames": [file_of(0), "/etc/passwd"], "fps": 1}], "'videos'"),
        ([{"frames": [], "fps": 1}], "'videos'"),
        ([file_of(0)], "'videos'"),
        ([{"frames": [file_of(0)], "fps": 0}], r"item 0: .*fps=0\.0"),
        ([{"frames": [file_of(0)], "fps": 1, "indices": [0, 1]}], r"\b1 frames\b.*\b2 indices\b"),
        ([{"bytes": b"\0\0\0\x18ftypmp42", "path": None}], "item 0: .*PNG.*JPEG.*WebP"),
    ],
)
def test_a_row_with_what_is_no_video_is_refused(videos: list[Any], says: str) -> None:
    with pytest.raises(BadTasks, match=says):
        Taskset([{"prompt": "?", "videos": videos}], row=trl_row)


def test_a_task_names_no_file_by_a_video(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(file_of(0))
    path = str(tmp_path / "secret.png")
    for value in (path, [path], {"frames": [path], "fps": 1}, part_of(FILM), FILM.name):
        for env in (TRLEnvironment, Plain):
            tape = play(env, Task(public={"prompt": "?", "videos": value}))
            assert isinstance(tape.messages()[0]["content"], str)
