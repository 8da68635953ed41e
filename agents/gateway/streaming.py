"""Decides which text of an answer can be sent while it is sampled, so that the sent text begins the final answer.

Incomplete characters and text that may be the beginning of a stop string are held back. If the request has tools, text
that may be the beginning of a tool call is held back too. A client can't take sent text back.
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
"""The beginning of a tool call in the model's text."""


class Pieces:
    """Turns the token ids of one answer into text that can be sent. Single use."""

    def __init__(self, decoder: IncrementalDecoder, stops: Sequence[str], *, tools: bool) -> None:
        self._decoder, self._stops, self._tools = decoder, stops, tools
        self._held = ""
        self._begun = False

    def feed(self, ids: Sequence[int]) -> str:
        """Add ids, and return the further text that can be sent now."""
        self._held += self._decoder.feed(ids)
        n = self._free()
        piece, self._held = self._held[:n], self._held[n:]
        self._begun = self._begun or bool(piece)
        return piece

    def _free(self) -> int:
        """How many of the held characters belong to the answer's text for every possible continuation."""
        held = self._held
        n = min((_before(held, stop) for stop in self._stops), default=len(held))
        if not self._tools:
            return n
        if not self._begun and held.lstrip()[:1] in ("", "{"):
            return 0  # the whole answer may be a tool call as one JSON object
        # `read_calls` strips the white space between the text and a call, so white space at the end is held back.
        return len(held[: min(n, _before(held, TAG))].rstrip())


def _before(text: str, word: str) -> int:
    """The index at which `word` begins in `text` or may begin at its end; otherwise the length of `text`."""
    at = text.find(word)
    return at if at >= 0 else len(text) - overlap(text, word)


class Live:
    """The streamed answer of one request: the engine's listener writes, and the HTTP handler reads. Single use.

    Both run in the same event loop. The engine may retry after text was sent; then the new attempt must repeat the sent
    text, or the stream stops and `end` returns False.
    """

    def __init__(self, request: ChatRequest) -> None:
        self.id = ""
        """Id of the answer; empty until `open`."""
        self.created = int(time.time())
        self.sent = ""
        """All text that was sent."""
        self.moved = asyncio.Event()
        """Set when there may be new text for `take`, or the request is done."""
        self._request = request
        self._renderer: Any = None
        self._pieces: Pieces | None = None
        self._new = array("i")
        """Ids (int32) that `take` hasn't decoded yet."""
        self._again = ""
        """After a failed attempt: the sent text that the new attempt must repeat."""
        self._parted = False
        """Whether the new attempt differs from the sent text, or the answer is complete: nothing more is sent."""

    def open(self, id: str, renderer: Any) -> None:
        """Called before the first token. renderer: the engine's; None for a text engine, which can't stream tokens."""
        self.id, self._renderer = id, renderer

    def tokens(self, ids: array[int]) -> None:
        """`Listener.tokens`."""
        self._new += ids
        self.moved.set()

    def again(self) -> None:
        """`Listener.again`, called by `LLM` before a retry: the new attempt must begin with the sent text."""
        # The decoder is replaced too: its state belongs to the ids of the failed attempt.
        self._new, self._pieces = array("i"), None
        self._again, self._parted = self.sent, False

    async def quiet(self, seconds: float | None) -> bool:
        """Wait for `moved`, and clear it. Returns True if it wasn't set within `seconds` (None: no limit)."""
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
                self._renderer.incremental_decoder(), self._request.stop, tools=bool(self._request.tools)
            )
        new, self._new = self._new, array("i")
        text = self._pieces.feed(new)
        # After a retry, the first `len(_again)` characters were already sent: they are compared and not sent again.
        n = min(len(text), len(self._again))
        self._parted = text[:n] != self._again[:n]
        self._again = self._again[n:]
        if self._parted:
            return ""
        self.sent += text[n:]
        return text[n:]

    def end(self, text: str) -> bool:
        """Stop streaming: the answer is complete. Returns whether the sent text is a prefix of `text`."""
        self._new, self._parted = array("i"), True
        return text.startswith(self.sent)
