"""One answer while it is sampled: which of its text may be sent already, so that all that is sent is the answer.

What is held back: characters without all their bytes, what may be the beginning of a `stop`, and with tools whatever
may be the beginning of a call. It knows nothing of HTTP, tapes or engines.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import Any

from ..rendering.incremental_decoder import IncrementalDecoder, overlap
from .openai_protocol import ChatRequest

TAG = "<tool_call>"
"""What begins a call that the model writes into its text."""


class Pieces:
    """Ids to text that may be sent, for one answer."""

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str], *, tools: bool) -> None:
        self._decoder, self._stops, self._tools = decoder, stops, tools
        self._held = ""
        self._begun = False

    def feed(self, ids: Sequence[int]) -> str:
        """The text that may be sent by now, without what was given before."""
        self._held += self._decoder.feed(ids)
        n = self._free()
        piece, self._held = self._held[:n], self._held[n:]
        self._begun = self._begun or bool(piece)
        return piece

    def _free(self) -> int:
        """How many of the characters that are held belong to the answer, however it goes on."""
        held = self._held
        n = min((_before(held, stop) for stop in self._stops), default=len(held))
        if not self._tools:
            return n
        if not self._begun and held.lstrip()[:1] in ("", "{"):
            return 0  # as a whole it may be a call
        # Of a text before a call, the space at its end goes.
        return len(held[: min(n, _before(held, TAG))].rstrip())


def _before(text: str, word: str) -> int:
    """Where `word` begins in `text`, or may begin at its end."""
    at = text.find(word)
    return at if at >= 0 else len(text) - overlap(text, word)


class Live:
    """An answer on its way to a client: heard from the engine, taken by whoever sends it. Single use."""

    def __init__(self, request: ChatRequest) -> None:
        self.id = ""
        """Of the answer; empty until it is asked for."""
        self.created = int(time.time())
        self.sent = ""
        """All the text that was taken."""
        self.moved = asyncio.Event()
        """Set when there may be more to take, or the answer is there."""
        self._request = request
        self._renderer: Any = None
        self._pieces: Pieces | None = None
        self._new = array("i")
        self._again = ""
        """Of a try after one that failed: what must come once more of that which was sent."""
        self._parted = False

    def open(self, id: str, renderer: Any) -> None:
        """Called before the first token. `renderer`: the engine's; None for an engine of texts, which tells nothing."""
        self.id, self._renderer = id, renderer

    def tokens(self, ids: array[int]) -> None:
        """As a `Listener`."""
        self._new += ids
        self.moved.set()

    def again(self) -> None:
        """As a `Listener`: what comes now must begin with what was sent."""
        self._new, self._pieces = array("i"), None
        self._again, self._parted = self.sent, False

    async def quiet(self, seconds: float | None) -> bool:
        """Waits until it `moved`, once more than before; True where it didn't in so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self.moved.wait()
        except TimeoutError:
            return True
        self.moved.clear()
        return False

    def take(self) -> str:
        """The text to send now."""
        if not self._new or self._parted or self._renderer is None:
            return ""
        if self._pieces is None:
            self._pieces = Pieces(
                self._renderer.incremental_decoder(), self._request.stop, tools=self._request.tools is not None
            )
        new, self._new = self._new, array("i")
        text = self._pieces.feed(new)
        n = min(len(text), len(self._again))
        self._parted = text[:n] != self._again[:n]
        self._again = self._again[n:]
        if self._parted:
            return ""
        self.sent += text[n:]
        return text[n:]

    def end(self, text: str) -> bool:
        """The answer is there, and nothing more is taken. Whether what was sent is its beginning."""
        self._new, self._parted = array("i"), True
        return text.startswith(self.sent)
