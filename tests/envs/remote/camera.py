"""An environment with pictures, as a process of a pool finds it."""

from __future__ import annotations

from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Observation, Picture


class Photo(Observation, kind="camera_photo"):
    text: str
    picture: Picture


class Camera(Environment[Answer]):
    """Two pictures: black, then grey."""

    async def reset(self, task: int) -> Photo:
        return self._taken(0)

    def _taken(self, shade: int) -> Photo:
        import numpy as np

        return Photo(text="look", picture=Picture.of(np.full((20, 30, 3), shade, "uint8")))

    async def step(self, action: Answer) -> Outcome:
        return Outcome(self._taken(99), reward=1.0, terminated=True)
