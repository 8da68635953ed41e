"""Parses server-sent events, and completions that are streamed as such events.

`Events` turns pieces of bytes into events. A piece may end anywhere, even inside a UTF-8 character. `ChunkStream`
merges the chunks of a streamed completion into an answer like an unstreamed one, so that one parser can read both.
Neither class opens a connection or reads a clock.
"""

from __future__ import annotations

import json
from typing import Any

from .wire import BadAnswer, Json, reader

LONGEST = 16 << 20
"""Maximum number of unparsed bytes in the buffer. Without it, a stream without line ends could fill up the memory."""
DONE = "[DONE]"


class StreamFailed(BadAnswer):
    """The server reports an error inside a stream."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status that the error would have had before the stream began, or None if the event doesn't name one."""


class Events:
    """Collects bytes and returns the `data` field of each complete event. Comments and all other fields are ignored.
    Lines may end in LF, CR LF or CR."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Add `piece`, and return the data of the events that are now complete. Raises BadAnswer if the buffer exceeds
        `LONGEST` bytes or the UTF-8 is invalid."""
        self._rest += piece
        if len(self._rest) > LONGEST:
            raise BadAnswer(f"the stream has an event of more than {LONGEST >> 20} MiB")
        found = []
        while (line := self._line()) is not None:
            if not line:
                if self._data:
                    found.append("\n".join(self._data))
                self._data = []
            elif line.startswith("data:"):
                self._data.append(line[5:].removeprefix(" "))
        return found

    def _line(self) -> str | None:
        """Remove the first line from the buffer and return it, or return None if no line is complete. Only complete
        lines are decoded, because the buffer may end inside a UTF-8 character."""
        ends = [at for at in (self._rest.find(b"\n"), self._rest.find(b"\r")) if at >= 0]
        if not ends:
            return None
        at = min(ends)
        if self._rest[at:] == b"\r":  # the LF of a CR LF may be in the next piece
            return None
        line, self._rest = self._rest[:at], self._rest[at + (2 if self._rest[at : at + 2] == b"\r\n" else 1) :]
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise BadAnswer(f"the stream isn't valid UTF-8: {error}") from error


class ChunkStream:
    """Merges the chunks of one streamed completion. It can return the answer so far at any time."""

    def __init__(self) -> None:
        self.done = False
        """Whether the event that ends the stream (`DONE`) was read. Any event after it is an error."""
        self._prompt: Any = None
        self._places: Any = None
        self._lists: dict[str, list[Any]] = {}
        """`ids` holds the token ids so far, and `content` holds the log-prob entries. Each key is missing until a chunk
        has a value for it."""
        self._choice: dict[str, Any] = {}
        self._usage: Any = None

    @reader
    def feed(self, data: str) -> list[object]:
        """Add one event and return the token ids in it. Raises StreamFailed if the event is an error, and BadAnswer if
        it is neither an error nor a chunk."""
        if self.done:
            raise BadAnswer(f"the stream continues after its end: {data[:200]!r}")
        if data == DONE:
            self.done = True
            return []
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadAnswer(f"an event of the stream isn't valid JSON ({error}): {data[:200]!r}") from error
        if not isinstance(chunk, dict) or "error" in chunk:
            error = chunk.get("error") if isinstance(chunk, dict) else None
            code = error.get("code") if isinstance(error, dict) else None
            raise StreamFailed(f"the stream broke off: {data[:400]}", code if isinstance(code, int) else None)
        self._prompt = chunk.get("prompt_token_ids") or self._prompt
        self._places = chunk.get("mm_placeholders") or self._places
        self._usage = chunk.get("usage") or self._usage
        return [id for choice in chunk.get("choices") or () for id in self._add(choice)]

    def _add(self, choice: Any) -> list[Any]:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            raise BadAnswer(f"one answer was asked for, the stream has {str(choice)[:200]}")
        self._more("content", (choice.get("logprobs") or {}).get("content"))
        for name in ("finish_reason", "stop_reason", "weight_versions"):
            if choice.get(name) is not None:
                self._choice[name] = choice[name]
        return self._more("ids", choice.get("token_ids"))

    def _more(self, name: str, values: Any) -> list[Any]:
        if values is None:
            return []
        if not isinstance(values, list):
            raise BadAnswer(f"a chunk of the stream has {name} of type {type(values).__name__}, not a list")
        self._lists.setdefault(name, []).extend(values)
        return values

    def answer(self, *, cut: bool = False) -> Json:
        """Return the answer in the same form as an unstreamed answer. Raises BadAnswer if the stream is incomplete.

        If the caller has ended the stream early (`cut`), the answer so far is returned with finish reason `abort`."""
        # A connection that was lost also ends the stream. Without this check, a truncated completion would be recorded
        # as a finished one.
        if not cut and not (self.done and "finish_reason" in self._choice):
            raise BadAnswer("the stream broke off before its end")
        ended = {"finish_reason": "abort"} if cut else {}
        return {
            "prompt_token_ids": self._prompt,
            "mm_placeholders": self._places,
            "usage": self._usage,
            "choices": [
                {
                    **self._choice,
                    **ended,
                    "token_ids": self._lists.get("ids"),
                    "logprobs": {"content": self._lists.get("content")},
                }
            ],
        }
