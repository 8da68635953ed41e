"""The environment of the demo with pictures: the picture alone says the way, and a blind walk's says nothing."""

from __future__ import annotations

import asyncio
import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.envs import BadTasks
from tapereel.envs.adapters.lamps import WAYS, Lamps, lamp, lamp_tasks, read_way
from tapereel.tapes import Answer, Task


def way_in(data: bytes) -> str:
    """The way, read from pixels: the channels in which the brightest half of the rows is bright."""
    pixels = np.asarray(Image.open(io.BytesIO(data))).reshape(-1, 3).astype(int)
    lit = pixels[np.argsort(pixels.max(axis=1))[-len(pixels) // 5 :]].mean(axis=0)
    on = tuple(int(value > 130) for value in lit)
    return next(way for way, shine in WAYS.items() if shine == on)


def private(task: Task) -> tuple[list[int], str]:
    assert isinstance(task.private, dict)
    lamps, ways = task.private["lamps"], task.private["ways"]
    assert isinstance(lamps, list)
    assert isinstance(ways, str)
    return [int(str(number)) for number in lamps], ways


def test_the_picture_alone_says_the_way():
    seen = [
        (lamp(number).data or b"", way)
        for task in lamp_tasks(100, 3)
        for number, way in zip(*private(task), strict=True)
    ]
    assert [way_in(data) for data, _ in seen] == [way for _, way in seen]
    assert len({data for data, _ in seen}) == 300, "each lamp has a picture of its own"
    assert lamp(7) == lamp(7)


def test_no_way_and_no_order_of_ways_is_right_more_often():
    ways = [private(task)[1] for task in lamp_tasks(4_000, 1)]
    for turn in range(3):
        assert all(abs(n - 1_000) < 120 for n in Counter(walk[turn] for walk in ways).values()), turn
    pairs = Counter(walk[:2] for walk in ways)
    assert len(pairs) == 16
    assert all(abs(n - 250) < 70 for n in pairs.values())


def test_a_blind_walk_shows_the_lamps_of_another_one():
    seeing, blind = lamp_tasks(2_000, 5), lamp_tasks(2_000, 5, blind=True)
    assert [private(task)[1] for task in seeing] == [private(task)[1] for task in blind]
    assert sorted(private(task)[0] for task in seeing) == sorted(private(task)[0] for task in blind)
    for a, b in zip(seeing, blind, strict=True):
        assert private(a)[0] != private(b)[0]
    letters = list(WAYS)
    said = [letters[number % 4] == way for task in blind for number, way in zip(*private(task), strict=True)]
    assert abs(sum(said) / len(said) - 0.25) < 0.03


def test_each_crossing_pays_its_share():
    task = lamp_tasks(1, 2)[0]
    right = private(task)[1]
    wrong = "nesw"[("nesw".index(right[1]) + 1) % 4]
    engine = ScriptedEngine([right[0], wrong, right[2]])
    tape = asyncio.run(rollout(ChatAgent(parse=read_way), Lamps, task, engine=engine))
    assert tape.reward == pytest.approx(2 / 3)
    shown = [part for message in tape.messages() if isinstance(message["content"], list) for part in message["content"]]
    assert [part["type"] for part in shown] == ["image"] * 3, "no text beside the pictures"


def test_another_task_is_refused_by_its_value():
    with pytest.raises(BadTasks, match=r"`lamps`.*'secret'"):
        asyncio.run(Lamps().reset(Task(private="secret")))
    with pytest.raises(BadTasks, match=r"`ways`.*\[1, 2\]"):
        asyncio.run(Lamps().reset(Task(private={"lamps": [1, 2], "ways": "n"})))


def test_any_text_is_a_way_and_other_text_a_wrong_one():
    env = Lamps()

    async def walk() -> list[float]:
        await env.reset(lamp_tasks(1, 2)[0])
        return [sum(v for _, v, _ in (await env.step(read_way(text))).components()) for text in ("", "north", "nn")]

    assert asyncio.run(walk()) == [0.0, 0.0, 0.0]
    assert read_way("e") == Answer(text="e")
