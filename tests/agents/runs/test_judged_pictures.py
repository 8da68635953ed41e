"""Rewards and judges see the pictures of an episode: while it runs, and after it was read from its run."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tapereel.agents import LLM, Agent, EpisodeSpec, Request, ScriptedEngine, rollout
from tapereel.agents.gateway import Endpoint, Program
from tapereel.agents.runs import judge_reward
from tapereel.agents.runs.judge import pairwise_reward
from tapereel.envs.checks.rescore import rescore
from tapereel.envs.rewards import Rewards, RewardSource
from tapereel.tapes import Answer, Tape
from tapereel.tapes.messages import image_parts, part_of
from tapereel.tapes.pictures import pictures_of
from tapereel.tapes.steps import content_parts
from tapereel.tapes.store import Store

from ...toy_envs import Echo
from ..gateway.test_asked_pictures import turns
from ..picture_worlds import Cinema, Corners, Gallery, corner_of


class Player(Agent):
    async def act(self, tape: Tape, llm: LLM) -> Any:
        yield Answer(text=(await llm(tape)).text)


def corner(data: bytes | None) -> int:
    assert data is not None
    return corner_of(np.asarray(Image.open(io.BytesIO(data))))


def by_pixels(tape: Tape) -> float:
    """A reward function that looks at every picture of the steps."""
    seen = [corner(picture.data) for step in tape for picture in pictures_of(step)]
    assert seen == [corner(tape.picture(p.name)) for step in tape for p in pictures_of(step)]
    return float(int("".join(map(str, seen))))


def shown(request: Request) -> list[int]:
    assert request.picture is not None
    parts = [part for message in request.messages for part in content_parts(message) if part["type"] == "image"]
    return [corner(request.picture(str(part["media"]))) for part in parts]


def played(env: Any, journal: Any, task: int = 1, **fields: Any) -> Tape:
    spec = EpisodeSpec.of(task, **fields)
    return asyncio.run(rollout(Player(), env, spec, engine=ScriptedEngine(["1"] * 9), journal=journal))


def test_a_reward_sees_the_pixels_in_the_episode_and_when_it_is_scored_again(tmp_path: Path):
    rewards = Rewards([RewardSource(score=by_pixels, name="look")])

    class Scored(Corners):
        def __init__(self) -> None:
            self.rewards = rewards

    with Store.create(tmp_path / "run") as store:
        tape = played(Scored, store.writer)
        assert next(r.value for r in tape.rewards if r.name == "look") == 123.0, tape.cause
    with Store.open(tmp_path / "run") as store:
        again = store.tape(tape.id)
    verdict, _ = asyncio.run(rescore(again, rewards))
    assert (verdict.outcome, verdict.failures) == ("verified", ())
    for file in (tmp_path / "run/tapes/media").iterdir():
        file.unlink()
    verdict, _ = asyncio.run(rescore(again, rewards))
    assert (verdict.outcome, len(verdict.failures)) == ("diverged", 1)
    assert str(tmp_path / "run/tapes/media") in verdict.failures[0].error
    assert "missing" in verdict.failures[0].error


@pytest.mark.parametrize("reopened", [False, True])
def test_a_judge_sees_the_pictures_in_order(reopened: bool, tmp_path: Path):
    asked: list[Request] = []

    def model(request: Request) -> str:
        asked.append(request)
        return f"Score: {sum(10**k * c for k, c in enumerate(reversed(shown(request))))}"

    with Store.create(tmp_path / "run") as store:
        tape = played(Corners, store.writer)
        judged = store.tape(tape.id) if reopened else tape
        source = judge_reward(ScriptedEngine(model), "Right?", high=1000)
        (record,) = asyncio.run(Rewards([source]).score(judged))
    assert record.value == 0.123, record
    content = asked[0].messages[1]["content"]
    assert [part["type"] for part in content] == ["text", *["text", "image"] * 3]
    names = [picture for step in tape for picture in pictures_of(step)]
    assert [part["text"] for part in content[1::2]] == [str(picture) for picture in names]
    assert all(str(picture) in content[0]["text"] for picture in names)
    assert "'type'" not in content[0]["text"]


def test_a_judge_sees_videos_with_their_names_and_times():
    asked: list[Request] = []

    def model(request: Request) -> str:
        asked.append(request)
        assert request.picture is not None
        seen = [corner(request.picture(str(part["media"]))) for part in image_parts(request.messages)]
        return f"Score: {int(''.join(map(str, seen)))}"

    tape = played(Cinema, None)
    (record,) = asyncio.run(Rewards([judge_reward(ScriptedEngine(model), "?", high=10**6)]).score(tape))
    assert record.value == 0.123230
    films: list[Any] = [step.film for step in tape.observations]  # type: ignore[attr-defined]
    said, *shown = asked[0].messages[1]["content"]
    assert shown == [part for film in films for part in ({"type": "text", "text": str(film)}, part_of(film))]
    assert all(str(film) in said["text"] for film in films)


def test_a_judge_sees_pictures_of_programs_and_of_both_attempts():
    def model(request: Request) -> str:
        return f"Score: {int(''.join(map(str, shown(request))))}"

    async def program(task: str, endpoint: Endpoint) -> str:
        return await turns(task, endpoint)

    tape = asyncio.run(rollout(Program(program), Echo(), "31", engine=ScriptedEngine(["a", "b"])))
    (record,) = asyncio.run(Rewards([judge_reward(ScriptedEngine(model), "?", high=100)]).score(tape))
    assert record.value == 0.31
    two = [played(Gallery, None, task, group="g", attempt=task) for task in (0, 3)]
    orders: list[list[int]] = []

    def better(request: Request) -> str:
        orders.append(shown(request))
        return "Better: FIRST" if orders[-1][0] == 3 else "Better: SECOND"

    source: Any = pairwise_reward(ScriptedEngine(better), "?")
    first, second = asyncio.run(source.score(two))
    assert sorted(orders) == [[0, 0, 3, 3], [3, 3, 0, 0]]
    assert (first.score["share"], second.score["share"]) == (0.0, 1.0)


def test_a_blind_judge_is_named_with_the_picture_and_may_judge_a_text():
    class Blind(ScriptedEngine):
        name = "blind"

        def __init__(self) -> None:
            super().__init__(lambda request: "Score: 5")
            self.can -= {"pictures"}

    tape = played(Corners, None)
    (record,) = asyncio.run(Rewards([judge_reward(Blind(), "?")]).score(tape))
    assert np.isnan(record.value)
    for named in ("blind", tape.id, str(pictures_of(tape[0])[0]), "`show`"):
        assert named in str(record.evidence)
    (record,) = asyncio.run(Rewards([judge_reward(Blind(), "?", show=lambda tape: "the answer")]).score(tape))
    assert record.value == 0.5
    text = asyncio.run(rollout(Player(), Echo(), "x", engine=ScriptedEngine(["x"])))
    (record,) = asyncio.run(Rewards([judge_reward(Blind(), "?")]).score(text))
    assert record.value == 0.5
