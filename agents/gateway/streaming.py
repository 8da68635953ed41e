"""Streams an answer while it is sampled: decides which text can be sent, so that the sent text is the final answer.

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
"""The beginning of a function call that the model writes into its text."""


class Pieces:
    """Turns the ids of one answer into text that can be sent."""

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str], *, tools: bool) -> None:
        self._decoder, self._stops, self._tools = decoder, stops, tools
        self._held = ""
        self._begun = False

    def feed(self, ids: Sequence[int]) -> str:
        """The further text that can be sent now."""
        self._held += self._decoder.feed(ids)
        n = self._free()
        piece, self._held = self._held[:n], self._held[n:]
        self._begun = self._begun or bool(piece)
        return piece

    def _free(self) -> int:
        """How many of the held characters belong to the answer, whatever follows."""
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
    """The answer of one request: a listener of the engine, read by the HTTP handler. Single use."""

    def __init__(self, request: ChatRequest) -> None:
        self.id = ""
        """Of the answer; empty until it is asked for."""
        self.created = int(time.time())
        self.sent = ""
        """All text that was sent."""
        self.moved = asyncio.Event()
        """Set when there may be more to take, or the answer is there."""
        self._request = request
        self._renderer: Any = None
        self._pieces: Pieces | None = None
        self._new = array("i")
        self._again = ""
        """After a failed attempt: the sent text that the new attempt must repeat."""
        self._parted = False

    def open(self, id: str, renderer: Any) -> None:
        """Called before the first token. `renderer`: the engine's; None for an engine of texts, which tells nothing."""
        self.id, self._renderer = id, renderer

    def tokens(self, ids: array[int]) -> None:
        """`Listener.tokens`."""
        self._new += ids
        self.moved.set()

    def again(self) -> None:
        """`Listener.again`: the new attempt must begin with the text that was sent."""
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
        """The answer is complete. Returns whether the sent text is its beginning."""
        self._new, self._parted = array("i"), True
        return text.startswith(self.sent)
