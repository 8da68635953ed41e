"""An incremental detokenizer, which turns token ids into text while they are sampled.

The pieces of text add up to the text that the renderer decodes from all ids, regardless of how the ids are split.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"
"""The character that a tokenizer returns while the last bytes of a character are missing."""


class IncrementalDecoder:
    """Returns the text of one answer, token by token. Created by `Renderer.incremental_decoder` for a single use."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        ends: Collection[int],
        byte_ids: Collection[int],
        ending: str = "",
    ) -> None:
        """`decode` returns the text of ids. `ends` has the ids that end an answer and have no text. `byte_ids` has the
        tokens of a single byte, since a run of them decodes differently when another one follows. `ending` is text
        before an id of `ends` that belongs to the end of the answer, not to its text."""
        self._decode, self._ending = decode, ending
        self._open = frozenset((*ends, *byte_ids))
        self._ids: list[int] = []
        """The newest ids. Some were already returned as text, but how a tokenizer decodes an id depends on earlier
        ids."""
        self._returned = 0
        """How many of `_ids` were already returned as text."""
        self._held = ""
        """Decoded text that may be the beginning of `ending`."""

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that `ids` add. Text that later ids could still change is held back for the next call.

        It holds back ids of single bytes, the beginning of a character (U+FFFD), ids that end the answer, and a
        possible beginning of `ending`. Otherwise a client would see text that the recorded answer doesn't have.
        """
        self._ids += ids
        n = len(self._ids)
        while n > self._returned and self._ids[n - 1] in self._open:
            n -= 1
        if n == self._returned:
            return ""
        before, text = self._decode(self._ids[: self._returned]), self._decode(self._ids[:n])
        if text.endswith(REPLACEMENT) or len(text) <= len(before):
            return ""
        self._ids, self._returned = self._ids[self._returned :], n - self._returned
        text = self._held + text[len(before) :]
        certain = len(text) - overlap(text, self._ending, whole=True)
        self._held = text[certain:]
        return text[:certain]


def overlap(text: str, word: str, *, whole: bool = False) -> int:
    """Return how many characters at the end of `text` are the beginning of `word`, or with `whole` all of `word`."""
    most = min(len(text), len(word) - (not whole))
    return next((n for n in range(most, 0, -1) if text.endswith(word[:n])), 0)
