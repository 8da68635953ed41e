"""Hearing an answer while it is sampled: what an agent's own listener may do wrong, and text that won't change.

`Hearing` keeps an agent's errors out of engines that others share. `Spoken` turns ids into text piece by piece: the
pieces of any cut of the ids add up to what the renderer says of all of them. Knows nothing of requests and tapes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..engines.engine import Listener

CUT = "\ufffd"
"""How a character reads that hasn't all of its bytes."""


class Hearing:
    """Between an engine and an agent's listener, whose first error is kept here, and which hears nothing after it."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.error: Exception | None = None
        """What the listener raised."""

    def tokens(self, ids: array[int]) -> None:
        self._tell(self._listener.tokens, ids)

    def again(self) -> None:
        self._tell(self._listener.again)

    def _tell(self, what: Callable[..., None], *given: Any) -> None:
        if self.error is None:
            try:
                what(*given)
            except Exception as error:
                self.error = error


class Spoken:
    """The text of one answer, as its ids come. Made by `Renderer.spoken`. Single use."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        ends: Collection[int],
        byte_ids: Collection[int],
        ending: str = "",
    ) -> None:
        """`decode`: ids -> text. `ends` end an answer and are no text, and where one does, `ending` before it isn't
        either. `byte_ids` are tokens of one byte, of which a run reads otherwise when it goes on."""
        self._decode, self._ending = decode, ending
        self._open = frozenset((*ends, *byte_ids))
        self._ids: list[int] = []
        """From somewhat before what was given: how an id reads hangs on those before it."""
        self._read = 0
        """How many of these were given as text."""
        self._held = ""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is certain by now, without what was given before."""
        self._ids += ids
        n = len(self._ids)
        while n > self._read and self._ids[n - 1] in self._open:
            n -= 1
        if n == self._read:
            return ""
        before, text = self._decode(self._ids[: self._read]), self._decode(self._ids[:n])
        if text.endswith(CUT) or len(text) <= len(before):
            return ""
        self._ids, self._read = self._ids[self._read :], n - self._read
        text = self._held + text[len(before) :]
        certain = len(text) - overlap(text, self._ending, whole=True)
        self._held = text[certain:]
        return text[:certain]


def overlap(text: str, word: str, *, whole: bool = False) -> int:
    """How many characters at the end of `text` may be the beginning of `word`, or with `whole` all of it."""
    most = min(len(text), len(word) - (not whole))
    return next((n for n in range(most, 0, -1) if text.endswith(word[:n])), 0)
