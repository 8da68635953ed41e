"""Pictures of tasks: a file of the run for each, however many attempts name it, and the bytes again from that file."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from tapereel.agents import EpisodeSpec, ScriptedEngine, rollout
from tapereel.agents.replay import replay
from tapereel.agents.replay.branching import cut
from tapereel.envs import BadTasks, Environment, Outcome, Taskset
from tapereel.envs.adapters import TRLEnvironment, trl_reward, trl_row
from tapereel.envs.adapters.trl import row_of
from tapereel.envs.checks.reexec import reexec
from tapereel.envs.checks.rescore import rescore
from tapereel.envs.remote import BadAnswer, Declared, ResetCall, read_call
from tapereel.envs.remote.env_protocol import files_of
from tapereel.envs.remote.host import Host
from tapereel.envs.remote.proxy import Proxy
from tapereel.envs.rewards import Rewards
from tapereel.envs.taskset import standard_row
from tapereel.tapes import Answer, Picture, Status, Tape, Task
from tapereel.tapes.records import Begin
from tapereel.tapes.store import Store, verify

from ..agents.picture_worlds import square
from .test_trl_pictures import AGENT, URL, Plain, by_pixels, file_of, looked


def photos(corners: int) -> Taskset:
    """Tasks of a data set with one image in each row."""
    made = {"prompt": ["Where?"] * corners, "image": [{"bytes": file_of(k), "path": None} for k in range(corners)]}
    rows = datasets.Dataset.from_dict(made).cast_column("image", datasets.Image())
    return Taskset(rows, row=trl_row)


def recorded(tasks: Taskset, run: Path, attempts: int) -> list[Tape]:
    async def play() -> list[Tape]:
        env, engine = (lambda: TRLEnvironment(rewards=[looked])), ScriptedEngine(by_pixels)
        every = (rollout(AGENT, env, t, engine=engine, journal=store.writer) for _ in range(attempts) for t in tasks)
        return await asyncio.gather(*every)

    with Store.create(run) as store:
        return asyncio.run(play())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "photos"
    tapes = recorded(photos(4), path, 20)
    assert {(tape.status, tape.reward) for tape in tapes} == {(Status.FINISHED, 1.0)}
    return path


def test_a_picture_of_a_data_set_is_one_file_for_all_episodes(run: Path):
    assert len(list((run / "tapes" / "media").glob("*.png"))) == 4
    written = b"".join(file.read_bytes() for file in (run / "tapes").glob("*.jsonl"))
    assert written.count(b'"t":"begin"') == 80
    assert b"base64" not in written
    report = verify(run)
    assert (report.verdict, report.media, report.unnamed_media) == ("holds", 4, 0)


def test_replay_rescore_and_the_environment_read_the_file_again(run: Path):
    with Store.open(run) as store:
        tape = next(iter(store.tapes(closed=True)))
        assert tape.begin.task.hash == tape.begin.task_hash
        assert row_of(tape.begin.task)["image"].size == square(0).shape[1::-1]
        assert asyncio.run(replay(tape, AGENT)).outcome == "verified"
        assert asyncio.run(reexec(tape, TRLEnvironment)).outcome == "verified"
        verdict, _ = asyncio.run(rescore(tape, Rewards([trl_reward(looked)])))
        assert verdict.outcome == "verified"
        again = rollout(
            AGENT, TRLEnvironment, EpisodeSpec.of(tape.begin.task, fork=cut(tape, 0)), engine=ScriptedEngine(by_pixels)
        )
        assert asyncio.run(again).status is Status.FINISHED


def test_a_changed_file_of_a_task_is_named(run: Path):
    file = next((run / "tapes" / "media").iterdir())
    whole = file.read_bytes()
    try:
        for damaged in (whole[:-1], b""):
            file.write_bytes(damaged)
            assert any(file.name in problem for problem in verify(run).broken)
        file.unlink()
        assert any(file.name in problem for problem in verify(run).broken)
    finally:
        file.write_bytes(whole)


def test_a_task_is_told_by_its_pictures():
    first, second = Picture.of(square(0)), Picture.of(square(1))
    assert Task(public=[first, "?"]).hash != Task(public=[second, "?"]).hash  # type: ignore[list-item]
    task = Task.of({"photo": first, "answer": 1})
    assert (task.given, task.shown) == ({"photo": first, "answer": 1}, ())
    assert Task.of({"photo": first.name, "answer": 1}).pictures == ()
    row = standard_row({"prompt": "q", "image": "photo", "target": "goal"})
    made = row({"q": "Where?", "photo": URL, "goal": file_of(1)})
    assert (made.pictures, made.shown) == ((first, second), (first,))


def test_a_run_of_before_with_data_urls_is_read(tmp_path: Path):
    task = Task(public={"prompt": "Where?", "image": URL})
    with Store.create(tmp_path / "run") as store:
        tape = asyncio.run(rollout(AGENT, TRLEnvironment, task, engine=ScriptedEngine(by_pixels), journal=store.writer))
        (read,) = store.tapes(closed=True)
    assert row_of(read.begin.task)["image"].size == square(0).shape[1::-1]
    assert asyncio.run(replay(tape, AGENT)).outcome == "verified"
    assert verify(tmp_path / "run").verdict == "holds"


def test_text_that_names_a_file_is_no_picture():
    body = {"public": Picture.of(square(0)).name}
    begin = {"tape": "t", "task": body, "task_hash": "", "agent": {"name": ""}, "env": {"name": ""}}
    read = Begin.model_validate({**begin, "env_seed": 0, "seed": 0, "at": 0})
    assert read.media == ()
    sent = Task.of(Picture.of(square(0))).model_dump(mode="json")
    with pytest.raises(ValueError, match=r"Media\.put"):
        Task.model_validate(sent)


class Photo(Environment[Answer]):
    """Ends with the reward 1 where the answer is the width of the task's picture."""

    async def reset(self, task: Any) -> str:
        self.picture = task.filled(task.public)["image"]
        assert self.picture.data == Picture.of(square(2)).data
        return "How wide?"

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=float(action.text == str(self.picture.width)), terminated=True)


class Wire(Proxy):
    """Sends calls and answers as text, to an environment in this process."""

    env: type[Environment[Answer]] = Photo

    def __init__(self) -> None:
        super().__init__(Declared.of(self.env))
        self.host = Host(self.env, self._declared, None)

    async def _exchange(self, call: Any, text: str) -> Any:
        return self._read(call, (await self.host.answer(read_call(text))).encoded())

    async def _abandon(self, cut: bool) -> None:
        raise AssertionError("this wire loses no message")


def test_pictures_of_tasks_reach_environments_elsewhere(tmp_path: Path):
    (task,) = Taskset([{"prompt": "?", "image": file_of(2)}], row=trl_row)
    with Store.create(tmp_path / "run") as store:
        engine = ScriptedEngine([str(square(2).shape[1])])
        tape = asyncio.run(rollout(AGENT, Wire, task, engine=engine, journal=store.writer))
        assert tape.reward == 1.0, tape.cause
        assert asyncio.run(reexec(store.tape(tape.id), Wire)).outcome == "verified"
        asyncio.run(Wire().restore(store.tape(tape.id).begin.task, cut(store.tape(tape.id), 0)))
    assert verify(tmp_path / "run").media == 1
    next((tmp_path / "run" / "tapes" / "media").iterdir()).unlink()
    assert task.pictures[0].name in str(verify(tmp_path / "run").broken)


def test_a_message_with_another_file_for_a_task_is_refused():
    task = Task.of(Picture.of(square(0)))
    call = ResetCall(id=1, task=task, files=files_of(task))
    assert read_call(call.encoded()).task.given.data == task.pictures[0].data  # type: ignore[union-attr]
    other = files_of(Task.of(Picture.of(square(1))))
    for files in ({}, other, {task.pictures[0].name: next(iter(other.values()))}):
        with pytest.raises(BadAnswer):
            read_call(call.model_copy(update={"files": files}).encoded())


def test_a_prompt_of_a_text_column_is_never_a_picture():
    tape = asyncio.run(rollout(AGENT, Plain, trl_row({"prompt": URL}), engine=ScriptedEngine(["x"])))
    assert tape.messages()[0]["content"] == URL


@pytest.mark.parametrize("image", [Image.fromarray(square(1)), file_of(1)])
def test_a_picture_that_is_no_picture_yet_says_how_to_make_one(image: Any) -> None:
    with pytest.raises(BadTasks, match=r"private\.image.*tr\.Picture\.of"):
        Taskset([{"image": image, "question": "which?"}])[0]
