"""Server-sent events, and completions that come as them: pure functions of what was read so far.

`Events` cuts bytes into events, whatever pieces they come in. `ChunkStream` folds the chunks of a streamed completion
into the answer that would have come at once, so that one reader serves both. No connection, no clock.
"""

from __future__ import annotations

import json
from typing import Any

from .wire import BadAnswer, reader

LONGEST = 16 << 20
"""Bytes of one event."""
DONE = "[DONE]"


class StreamFailed(BadAnswer):
    """The server tells of an error within a stream."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status
        """That the error would have had as an answer; None where the server doesn't say."""


class Events:
    """The data of each event, as they are completed. Lines end in LF, CR LF or CR; comments and other fields are
    passed over."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The data of the events that `piece` completes. BadAnswer where an event doesn't end or isn't UTF-8."""
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
        ends = [at for at in (self._rest.find(b"\n"), self._rest.find(b"\r")) if at >= 0]
        if not ends:
            return None
        at = min(ends)
        if self._rest[at:] == b"\r":  # LF may follow
            return None
        line, self._rest = self._rest[:at], self._rest[at + (2 if self._rest[at : at + 2] == b"\r\n" else 1) :]
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise BadAnswer(f"the stream is no UTF-8: {error}") from error


class ChunkStream:
    """The chunks of one streamed completion, put together."""

    def __init__(self) -> None:
        self.done = False
        """The end was read; what comes after it is refused."""
        self._prompt: Any = None
        self._lists: dict[str, list[Any]] = {}
        """Token ids and log-probs, as far as there were any."""
        self._choice: dict[str, Any] = {}
        self._usage: Any = None

    @reader
    def feed(self, data: str) -> list[Any]:
        """One event; gives the token ids in it. BadAnswer where it is no chunk, StreamFailed where it is an error."""
        if self.done:
            raise BadAnswer(f"the stream goes on after its end: {data[:200]!r}")
        if data == DONE:
            self.done = True
            return []
        try:
            chunk = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise BadAnswer(f"an event of the stream is no JSON ({error}): {data[:200]!r}") from error
        if not isinstance(chunk, dict) or "error" in chunk:
            told = chunk.get("error") if isinstance(chunk, dict) else None
            code = told.get("code") if isinstance(told, dict) else None
            raise StreamFailed(f"the stream broke off: {data[:400]}", code if isinstance(code, int) else None)
        self._prompt = chunk.get("prompt_token_ids") or self._prompt
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

    def answer(self, *, cut: bool = False) -> dict[str, Any]:
        """What a request without streaming would have been answered. BadAnswer where the stream didn't come to its end,
        unless it was `cut` on purpose: then what there is, aborted."""
        if not cut and not (self.done and "finish_reason" in self._choice):
            raise BadAnswer("the stream broke off before its end")
        ended = {"finish_reason": "abort"} if cut else {}
        return {
            "prompt_token_ids": self._prompt,
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
