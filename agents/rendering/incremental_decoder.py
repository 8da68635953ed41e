"""An incremental detokenizer. It turns token ids into text while they are being sampled.

The pieces of text add up to the text that the renderer decodes from all ids. It makes no difference how the ids are
split between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

REPLACEMENT = "\ufffd"
"""The character that a tokenizer returns if the last bytes of a character are still missing."""


class IncrementalDecoder:
    """Returns the text of one answer, token by token. `Renderer.incremental_decoder` creates one for each answer."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        ends: Collection[int],
        byte_ids: Collection[int],
        ending: str = "",
    ) -> None:
        """`decode` turns ids into text. `ends` has the ids that end an answer and aren't part of its text. `byte_ids`
        has the ids of single bytes. Successive byte ids are decoded together, so the next one may change the text.
        `ending` is the text that the template writes before an end id. It isn't part of the answer's text either."""
        self._decode, self._ending = decode, ending
        self._open = frozenset((*ends, *byte_ids))
        self._ids: list[int] = []
        """The newest ids. They are kept even after their text was returned, because the text of later ids can depend on
        them."""
        self._returned = 0
        """Number of ids at the beginning of `_ids` whose text was returned already."""
        self._held = ""
        """Decoded text that is held back, because it may be the beginning of `ending`."""

    def feed(self, ids: Sequence[int]) -> str:
        """Add `ids` and return the text that is certain now. Text that later ids may change is held back.

        It is held back for ids of single bytes, an incomplete character (U+FFFD), ids that end the answer, and text
        that may be the beginning of `ending`. A client could otherwise receive text that isn't in the recorded answer.
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
    """Return the number of characters at the end of `text` that could be the beginning of `word`.

    With `whole`, these characters may also be the complete `word`.
    """
    most = min(len(text), len(word) - (not whole))
    return next((n for n in range(most, 0, -1) if text.endswith(word[:n])), 0)
