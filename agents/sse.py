"""Server-sent events, and chat completions that come as them: pure functions of what was read so far.

`Events` cuts bytes into events, whatever pieces they come in. `ChatStream` folds the events of a streamed chat
completion into the answer that would have come at once, so that one reader serves both. No connection, no clock.
"""

from __future__ import annotations

import json
from typing import Any

from .wire import BadAnswer

LONGEST = 16 << 20
"""Bytes of one event."""
DONE = "[DONE]"


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
        line, self._rest = self._rest[:at], self._rest[at + (2 if self._rest[at:at + 2] == b"\r\n" else 1):]
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise BadAnswer(f"the stream is no UTF-8: {error}") from error


class ChatStream:
    """The chunks of one streamed chat completion, put together."""

    def __init__(self) -> None:
        self.done = False
        """The end was read; what comes after it is refused."""
        self._prompt: Any = None
        self._ids: list[Any] | None = None
        self._content: list[Any] | None = None
        self._choice: dict[str, Any] = {}
        self._usage: Any = None

    def feed(self, data: str) -> None:
        """One event. BadAnswer where it is no chunk or tells of an error."""
        if self.done:
            raise BadAnswer(f"the stream goes on after its end: {data[:200]!r}")
        if data == DONE:
            self.done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise BadAnswer(f"an event of the stream is no JSON ({error}): {data[:200]!r}") from error
        if not isinstance(chunk, dict) or "error" in chunk:
            raise BadAnswer(f"the stream broke off: {data[:400]}")
        self._prompt = chunk.get("prompt_token_ids") or self._prompt
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk.get("choices") or ():
            self._add(choice)

    def _add(self, choice: Any) -> None:
        if not isinstance(choice, dict) or choice.get("index", 0) != 0:
            raise BadAnswer(f"one answer was asked for, the stream has {str(choice)[:200]}")
        if (ids := choice.get("token_ids")) is not None:
            self._ids = [*(self._ids or ()), *ids]
        content = (choice.get("logprobs") or {}).get("content")
        if content is not None:
            self._content = [*(self._content or ()), *content]
        for name in ("finish_reason", "stop_reason", "weight_versions"):
            if choice.get(name) is not None:
                self._choice[name] = choice[name]

    def answer(self, *, cut: bool = False) -> dict[str, Any]:
        """What a request without streaming would have been answered. BadAnswer where the stream didn't come to its end,
        unless it was `cut` on purpose: then what there is, aborted."""
        if not cut and not (self.done and "finish_reason" in self._choice):
            raise BadAnswer("the stream broke off before its end")
        ended = {"finish_reason": "abort"} if cut else {}
        return {"prompt_token_ids": self._prompt, "usage": self._usage, "choices": [
            {**self._choice, **ended, "token_ids": self._ids, "logprobs": {"content": self._content}}]}  # fmt: skip
