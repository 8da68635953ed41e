"""Lamps: the environment of the demo with pictures. At each crossing, the colour of a lamp shows the way.

A task is a walk over several crossings. At each crossing, the agent sees a picture of a lamp and answers with one of
the letters in `WAYS`. The lamp's colour decides which way is right, and the text doesn't mention the colour. The size,
place, shade and background of the lamp vary, and each pixel is noisy. The reward component `right` is the share of
crossings at which the agent chose the right way.
"""

from __future__ import annotations

import random
from functools import lru_cache

from pydantic import JsonValue

from ...tapes.pictures import Picture
from ...tapes.records import Task
from ...tapes.steps import Answer, Observation
from ..environment import Environment, Outcome
from ..taskset import BadTasks, Taskset

WAYS = {"n": (1, 0, 0), "e": (0, 1, 0), "s": (0, 0, 1), "w": (1, 1, 1)}
"""The colour (red, green, blue) of each way's lamp. Any two ways differ in at least two channels."""
SIDE = 16
"""The width and height of a picture, in pixels."""
NOISE = 24
"""The largest number by which noise raises or lowers one channel of a pixel."""


class Lamp(Observation, kind="lamp"):
    """The lamp that the agent sees at a crossing."""

    picture: Picture


class Lamps(Environment[Answer]):
    """A walk over crossings. A task has a private list of `lamps` and the right `ways`, as `lamp_tasks` makes them."""

    kinds = (Lamp,)
    pixels = True

    async def reset(self, task: Task) -> Lamp:
        private = task.private if isinstance(task.private, dict) else {}
        lamps, ways = private.get("lamps"), private.get("ways")
        if not isinstance(lamps, list) or not isinstance(ways, str) or not 0 < len(lamps) == len(ways):
            raise BadTasks(
                "a task of Lamps needs private `lamps` and as many `ways`, as lamp_tasks() makes them; task "
                f"{task.id or task.hash[:12]} has {task.private!r:.60}"
            )
        self._lamps, self._ways = [int(str(number)) for number in lamps], ways
        self._turn = 0
        return Lamp(picture=lamp(self._lamps[0]))

    async def step(self, action: Answer) -> Outcome:
        """Score the way, and show the next lamp."""
        right = action.text == self._ways[self._turn]
        self._turn += 1
        end = self._turn == len(self._lamps)
        reward = {"right": right / len(self._lamps)}
        return Outcome(None if end else Lamp(picture=lamp(self._lamps[self._turn])), reward=reward, terminated=end)


def read_way(text: str) -> Answer:
    """Return a model's text as the way. Any text is accepted.

    `ChatAgent(parse=read_way)` is an agent for this environment.
    """
    return Answer(text=text)


def lamp_tasks(size: int, seed: int = 0, *, crossings: int = 3, blind: bool = False) -> Taskset:
    """Return `size` walks, each with its own lamps.

    At each crossing, every way is right with the probability 1/4, independently of the other crossings. With `blind`,
    each walk shows the lamps of another walk, so the pictures don't reveal the right ways.
    """
    rng = random.Random(f"lamps {seed}")
    walks = [[rng.getrandbits(40) for _ in range(crossings)] for _ in range(size)]
    # The walks are drawn independently, so a rotation by 1 is as good as a shuffle, and no walk keeps its own lamps.
    shown = [*walks[1:], walks[0]] if blind else walks

    def task(k: int) -> Task:
        lamps: list[JsonValue] = [*shown[k]]
        return Task(id=f"lamps/{seed}/{k}", private={"lamps": lamps, "ways": "".join(map(_way, walks[k]))})

    return Taskset([task(k) for k in range(size)], name="lamps")


@lru_cache(maxsize=1 << 14)
def lamp(number: int) -> Picture:
    """Return the picture of a lamp. Equal numbers give equal pixels. The colour stands for the way `number % 4`."""
    from PIL import Image

    rng = random.Random(number)
    ground = rng.randrange(40, 130)
    shine = [rng.randrange(160, 256) if on else rng.randrange(80) for on in WAYS[_way(number)]]
    size = rng.randrange(SIDE // 2, SIDE - 2)
    left, top = rng.randrange(SIDE - size + 1), rng.randrange(SIDE - size + 1)
    pixels = bytearray(rng.randbytes(SIDE * SIDE * 3))
    for k, noise in enumerate(pixels):
        row, column, channel = k // (SIDE * 3), k // 3 % SIDE, k % 3
        lit = top <= row < top + size and left <= column < left + size
        value = (shine[channel] if lit else ground) + noise % (2 * NOISE + 1) - NOISE
        pixels[k] = max(0, min(255, value))
    return Picture.of(Image.frombytes("RGB", (SIDE, SIDE), bytes(pixels)), alt=f"a lamp, {size} pixels wide")


def _way(number: int) -> str:
    return list(WAYS)[number % len(WAYS)]
