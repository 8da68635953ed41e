"""Converts text to token ids and back, and makes sure that only the chat template writes control tokens.

A *control token* is an added token that is special or that occurs in the chat template. If the text of a control token
occurs in content, a private mark is inserted after its first character. The pieces between marks are encoded
separately, so the tokenizer can't turn this text into the token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast

from ...tapes.errors import TapereelError

MarkedT = TypeVar("MarkedT")

_MARK = "\ufdd0"
_BREAK = _MARK + "1"
_LITERAL = _MARK + "0"
"""Written in place of a mark that the content itself contains. A mark is a Unicode noncharacter."""


class RenderError(TapereelError, ValueError):
    """A conversation can't be turned into tokens. The message names the problem and the remedy."""


class ChatTokenizer(Protocol):
    """The members of a transformers fast tokenizer that this module uses."""

    chat_template: str | dict[str, str] | None

    @property
    def backend_tokenizer(self) -> object: ...
    @property
    def special_tokens_map(self) -> Mapping[str, object]: ...
    @property
    def apply_chat_template(self) -> Callable[..., object]: ...


class Codec:
    """Encodes and decodes text with its own copy of the tokenizer's backend."""

    def __init__(self, tokenizer: ChatTokenizer, literals: str, *, special_text: Literal["split", "refuse"]) -> None:
        """`literals` is the text that the chat template itself writes. `special_text` decides what happens if content
        contains the text of a control token: `split` encodes it as plain text, and `refuse` raises RenderError.

        Raises RenderError if the tokenizer has no backend from the `tokenizers` library.
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise RenderError(
                f"{type(tokenizer).__name__} has no backend of the `tokenizers` library; load a fast one "
                "(transformers.AutoTokenizer, or PreTrainedTokenizerFast(tokenizer_object=...))"
            )
        # Padding, truncation and `encode_special_tokens` are part of the backend's state. If other users of the
        # tokenizer changed this state, the same text would encode to other ids. So the backend is copied.
        self._backend = type(backend).from_str(backend.to_str())
        self._backend.no_padding()
        self._backend.no_truncation()
        self._backend.encode_special_tokens = False
        self._refuse = special_text == "refuse"
        self.hash: str = hashlib.sha256(self.json.encode()).hexdigest()
        """SHA-256 (hex) of the backend, as serialised by the `tokenizers` library."""
        self.control: dict[str, int] = {
            token.content: id
            for id, token in self._backend.get_added_tokens_decoder().items()
            if not token.content.isspace() and (token.special or token.content in literals)
        }
        """The id of each control token, by its text."""
        self.special: frozenset[str] = frozenset(
            token.content for token in self._backend.get_added_tokens_decoder().values() if token.special
        )
        """The control tokens that the tokenizer marks as special."""
        unknown = str(tokenizer.special_tokens_map.get("unk_token"))
        self.unknown: int | None = self._backend.token_to_id(unknown)
        """The id of text that the tokenizer has no token for, if it has one."""
        self._ids = frozenset(id for token, id in self.control.items() if token != unknown)
        """Ids that plain text must never encode to. The unknown token is left out, because text can encode to it."""
        ids = (self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_ids = frozenset(id for id in ids if id is not None)
        """Ids of single bytes (`<0x00>` to `<0xFF>`), if the tokenizer has any. Successive byte ids are decoded
        together."""
        self._pattern = _any_of(self.control)
        self._newline = self._raw("\n")

    @property
    def json(self) -> str:
        """The backend, as the `tokenizers` library serialises it."""
        return self._backend.to_str()

    def pattern(self, tokens: Iterable[str]) -> re.Pattern[str]:
        """Return a regular expression that matches any of these control tokens, and prefers longer ones."""
        return _any_of(tokens)

    def controls(self, text: str) -> list[str]:
        """Return the control tokens in marked text, in order."""
        return [token for piece in text.split(_BREAK) for token in self._pattern.findall(piece)]

    def lost(self, text: str) -> list[str]:
        """Return the characters of a text that become the unknown token."""
        return [char for char in sorted({*text}) if self.unknown in self._raw(char)]

    def shared(self, a: str, b: str) -> str:
        """Return the longest common prefix that doesn't end inside a control token of either text."""
        n = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        inside = (one.start() for text in (a, b) for one in self._pattern.finditer(text) if one.start() < n < one.end())
        return a[: min(inside, default=n)]

    def token(self, id: int) -> str:
        """Return the text of one id."""
        return self._backend.id_to_token(id) or ""

    def mark(self, value: MarkedT, where: str, only: re.Pattern[str] | None = None) -> MarkedT:
        """Insert a mark into the text of every control token in `value` (text, or nested lists and dicts of text).

        Returns the same object if it needs no mark. `where` names the value in error messages. `only` is given for
        answers, because the model may have sampled control tokens. Then only the tokens that match `only` are marked,
        and `refuse` has no effect. Raises RenderError if a token is refused, or if a token is a single character, which
        can't be split.
        """
        return cast(MarkedT, self._mark(value, where, only))

    def _mark(self, value: Any, where: str, only: re.Pattern[str] | None) -> Any:
        if isinstance(value, str):
            return self._mark_text(value, where, only)
        if isinstance(value, Mapping):
            items = {self._mark(k, where, only): self._mark(v, where, only) for k, v in value.items()}
            return items if items != value else value
        if isinstance(value, list | tuple):
            parts = [self._mark(part, where, only) for part in value]
            words = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
            # A template writes content parts one after another. Adjacent parts must not form a control token together.
            if (only or self._pattern).search("".join(text for text in words if isinstance(text, str))):
                parts = [
                    {**part, "text": f"{_BREAK}{text}"} if isinstance(part, Mapping) and isinstance(text, str) else part
                    for part, text in zip(parts, words, strict=True)
                ]
            return parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
        return value

    def encode(self, text: str, *, after: int | None = None) -> list[int]:
        """Encode marked text. It is a whole prompt or, if `after` is given, the part of a prompt that follows this id.

        Raises RenderError if the ids contain a control token that isn't in the text.
        """
        pieces = text.split(_BREAK)
        first = pieces[0].replace(_LITERAL, _MARK)
        ids = self._raw(first) if after is None else self._following(first, after)
        for piece in pieces[1:]:
            ids += self._middle(piece.replace(_LITERAL, _MARK))
        # A tokenizer that normalises text before it looks for tokens may produce a control token even from marked
        # text.
        if sum(id in self._ids for id in ids) > len(self.controls(text)):
            read = [self.token(id) for id in ids if id in self._ids]
            raise RenderError(
                f"the tokenizer reads control tokens into text that holds none: {read} from "
                f"{text[-200:]!r}; it normalises text before it looks for added tokens; make them "
                "AddedToken(normalized=False)"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including the text of control tokens. An incomplete character becomes U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def _mark_text(self, text: str, where: str, only: re.Pattern[str] | None) -> str:
        pattern, refuse = only or self._pattern, self._refuse and only is None
        if _MARK in text:
            text = text.replace(_MARK, _LITERAL)
        # This is a loop, because the rest of a token, after its mark, may contain another control token.
        while (found := pattern.search(text)) is not None:
            token = found.group()
            if refuse or len(token) == 1:
                why = "special_text='refuse'" if refuse else "a single character can't be split"
                raise RenderError(
                    f"{where} holds the text of the control token {token!r}, which must not reach the "
                    f"model as that token ({why}); escape or drop it"
                    + (", or let the renderer encode it as plain text with special_text='split'" if refuse else "")
                )
            text = pattern.sub(lambda m: m.group()[0] + _BREAK + m.group()[1:], text)
        return text

    def _raw(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids if text else []

    def _following(self, text: str, after: int) -> list[int]:
        """Encode `text` as the continuation of the id `after`.

        If the id is a control token, the token and the text are encoded together, and the token's id is then removed.
        This is needed because some control tokens consume the white space after them.
        """
        if after not in self._ids:
            return self._middle(text)
        ids = self._raw(self.token(after) + text)
        return ids[1:] if ids[:1] == [after] else self._middle(text)

    def _middle(self, text: str) -> list[int]:
        """Encode `text` as a continuation of other text.

        SentencePiece adds a space before the first word. To avoid this space, the text is encoded with a newline in
        front, and the newline's ids are then removed. If the tokenizer merges the newline with the text, the text is
        encoded alone.
        """
        ids = self._raw("\n" + text)
        n = len(self._newline)
        return ids[n:] if ids[:n] == self._newline else self._raw(text)


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    # Longer tokens must come before their own prefixes, because `|` takes the first alternative that matches.
    return re.compile("|".join(map(re.escape, sorted(tokens, reverse=True))) or "(?!)")


def plain(text: str) -> str:
    """Return marked text without its marks, which is the original text."""
    return text.replace(_BREAK, "").replace(_LITERAL, _MARK)


def digest(*parts: object) -> str:
    """Return the SHA-256 (hex) of the parts, written as canonical JSON."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
