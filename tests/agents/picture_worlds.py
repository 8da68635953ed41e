"""Worlds whose reward depends on pixels, and a provider that reads them."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Observation, Picture, ToolCalls, ToolOffer, ToolResult, ToolResults, Video

TURNS = 3


class Seen(Observation, kind="p_seen"):
    text: str
    picture: Picture


class Several(Observation, kind="p_several"):
    before: str
    pictures: tuple[Picture, ...]
    after: str = ""


def square(corner: int, shade: int = 0) -> np.ndarray:
    """A picture of 40x30 pixels, whose quarter `corner` is red."""
    image = np.full((30, 40, 3), shade, "uint8")
    y, x = divmod(corner, 2)
    image[y * 15 : y * 15 + 15, x * 20 : x * 20 + 20] = (255, 0, 0)
    return image


def corner_of(image: np.ndarray) -> int:
    red = [[image[a : a + 15, b : b + 20, 0].mean() for b in (0, 20)] for a in (0, 15)]
    return int(np.argmax(red))


class Corners(Environment[Answer]):
    """Where is the square? A picture a turn; the task is the first corner."""

    async def reset(self, task: int) -> Seen:
        self.corner, self.turn = task % 4, 0
        return await self._show("Which quarter is red, 0 to 3?")

    async def _show(self, text: str) -> Seen:
        return Seen(text=text, picture=await Picture.read(square(self.corner), alt="a square"))

    async def step(self, action: Answer) -> Outcome:
        right = action.text.strip() == str(self.corner)
        self.corner, self.turn = (self.corner + 1) % 4, self.turn + 1
        if self.turn == TURNS:
            return Outcome(reward=float(right), terminated=True)
        return Outcome(await self._show("And now?"), reward=float(right))


class Gallery(Environment[Answer]):
    """The corner that differs is in one of several pictures of one message."""

    async def reset(self, task: int) -> Several:
        self.task = task
        pictures = [await Picture.read(square(task, shade)) for shade in (10, 20)]
        return Several(before="Look at both:", pictures=tuple(pictures), after="Which quarter?")

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=float(action.text == str(self.task)), terminated=True)


class Filmed(Observation, kind="p_filmed"):
    text: str
    film: Video


FPS, INDICES = 2.0, (0, 1, 5)


class Cinema(Environment[Answer]):
    """Where is the square at the end? Two films of three frames, in which it moves; the task is its first corner."""

    async def reset(self, task: int) -> Filmed:
        self.corner, self.turn = task % 4, 0
        return await self._show("Which quarter is red at the end, 0 to 3?")

    async def _show(self, text: str) -> Filmed:
        frames = [square((self.corner + k) % 4, self.turn) for k in range(3)]
        return Filmed(text=text, film=await Video.read(frames, fps=FPS, indices=INDICES))

    async def step(self, action: Answer) -> Outcome:
        right = action.text.strip() == str((self.corner + 2) % 4)
        self.corner, self.turn = (self.corner + 1) % 4, self.turn + 1
        if self.turn == 2:
            return Outcome(reward=float(right), terminated=True)
        return Outcome(await self._show("And now?"), reward=float(right))


LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}


class Camera(Environment[Any]):
    """The picture comes as the result of a tool; with `film`, a video that ends with it."""

    film = False

    async def reset(self, task: int) -> ToolOffer:
        self.task = task
        return ToolOffer(text="Take a photo. Which quarter is red?", tools=(LOOK,))

    async def step(self, action: Any) -> Outcome:
        if isinstance(action, ToolCalls):
            photo: Picture | Video = await Picture.read(square(self.task))
            if self.film:
                photo = Video.of([square((self.task + 1) % 4), photo], fps=10)
            results = tuple(
                ToolResult(id=call.id, name=call.name, content="done", pictures=(photo,)) for call in action.calls
            )
            return Outcome(ToolResults(results=results), reward=0.0)
        return Outcome(reward=float(action.text == str(self.task)), terminated=True)


def images(body: dict[str, Any]) -> list[np.ndarray]:
    """The decoded pictures of a request in OpenAI's format, in order."""
    found = []
    for message in body["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image_url":
                url = part["image_url"]["url"]
                assert url.startswith("data:image/png;base64,")
                with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])), formats=["PNG"]) as image:
                    found.append(np.asarray(image))
    return found


def by_pixels(body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a model that sees: the red quarter of the newest picture; where a tool looks, it looks first."""
    seen = images(body)
    if body.get("tools") and not seen:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        return {"content": None, "tool_calls": [call]}
    return {"content": str(corner_of(seen[-1])) if seen else "none"}
