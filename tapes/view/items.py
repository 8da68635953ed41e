"""Plain values for the page: the items of a transcript, with long strings cut and marked, and the table of tapes.

No record is skipped. A record that can't be read becomes a hole, which is an item that states the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pydantic import JsonValue

from ..pictures import videos_in
from ..records import Begin, Call, End, Identity, Label, Reward, StepRecord, Tokens
from ..schema import parse_record
from ..store.summary import Summary
from ..transcript import call_line, fragments_of, kind_of, shown

SHARD = 8_192
"""Number of tapes in one piece of the table."""
TEXT = 4_000
"""Maximum number of characters of one text in an item. The page requests the rest."""


def item(
    record: int, body: bytes, step: int = -1, rewards: Sequence[tuple[str, float, float]] = ()
) -> dict[str, object]:
    """Return the item for one record. `t` is the type of the record, or `hole`."""
    try:
        read = parse_record(body)
        found = _SHAPES[type(read)](read)
        if isinstance(read, Begin | StepRecord | Call) and read.media:
            sizes = dict(_sizes(json.loads(body)))
            found |= {"media": list(read.media), "sizes": [sizes.get(name) for name in read.media]}
    except (ValueError, KeyError) as error:
        why = str(error).splitlines()[0]
        raw = body.decode("utf-8", "replace")
        found = {"t": "hole", "why": f"this record can't be read: {why}", **_clip("raw", raw)}
    found["record"] = record
    if step >= 0:
        found["step"] = step
    if rewards:
        found["rewards"] = [list(one) for one in rewards]
    return found


def text_of(body: bytes) -> str:
    """Return the whole text of a record, or an empty string if the record has no text. The item shows only its
    beginning."""
    try:
        read = parse_record(body)
    except ValueError:
        return body.decode("utf-8", "replace")
    if isinstance(read, StepRecord):
        return shown(read.content)
    if isinstance(read, Call):
        return read.text or ""
    if isinstance(read, Begin):
        return _json(read.task.public) or ""
    if isinstance(read, End) and read.cause is not None:
        return ": ".join(part for part in (read.cause.error, read.cause.message) if part)
    return ""


def _times(files: tuple[str, ...], content: JsonValue) -> dict[str, object]:
    """Return a dict with `times`, a list with one entry for each file of a record: the frame's time in seconds, or None
    if the file isn't a frame. The dict is empty if the record has no video."""
    times: list[float | None] = [None] * len(files)
    at = 0
    for video in videos_in(content) if files else ():
        names = tuple(frame.name for frame in video.frames)
        found = next((k for k in range(at, len(files)) if files[k : k + len(names)] == names), None)
        if found is not None:  # otherwise, the value only looks like a video
            at = found + len(names)
            times[found:at] = video.times
    return {"times": times} if any(time is not None for time in times) else {}


def _sizes(value: object) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the name and the recorded (width, height) in pixels of each picture in a record's JSON. The page reserves
    this space before the file arrives."""
    match value:
        case {"media": str(media), "width": int(width), "height": int(height)}:
            yield media.removeprefix("media:"), (width, height)
        case dict() | list():
            for part in value.values() if isinstance(value, dict) else value:
                yield from _sizes(part)
        case _:
            pass


def _clip(name: str, text: str) -> dict[str, object]:
    """Return a dict with the first `TEXT` characters as `name` and, if the text is longer, its length as `cut`."""
    return {name: text} if len(text) <= TEXT else {name: text[:TEXT], "cut": len(text)}


def _step(read: StepRecord) -> dict[str, object]:
    text = shown(read.content)
    found: dict[str, object] = {
        "t": "step",
        "by": read.by,
        "role": read.role,
        "kind": kind_of(read.content),
        "at": read.at,
        "calls": [list(part) for part in read.calls],
        **_clip("text", text),
    }
    fields = json.loads(read.body())["content"]
    found |= _times(read.media, fields)
    parts = fragments_of(read.content)
    if any(part.tool or part.error for part in parts):
        found["parts"] = [{"tool": part.tool, "error": part.error, **_clip("text", part.text)} for part in parts]
        found["failed"] = any(part.error for part in parts)
    if not (isinstance(fields, dict) and len(fields) == 1 and isinstance(next(iter(fields.values())), str)):
        found["fields"] = _json(fields)
    return found


def call_item(read: Call) -> dict[str, object]:
    """Return a call without its messages and tokens."""
    return {
        "t": "call",
        **call_line(read).model_dump(mode="json"),
        "conversation": read.conversation,
        "at": read.at,
        "base": read.base,
        "unknown": sum(x != x for x in read.logprobs) if read.logprobs is not None else None,
        "errors": [one.error[:500] for one in read.attempts if one.error],
        **_clip("text", read.text or ""),
    }


def _begin(read: Begin) -> dict[str, object]:
    plain = ("t", "tape", "at", "split", "group", "attempt", "versions", "task_hash", "parent")
    return {
        **read.model_dump(mode="json", include=set(plain)),
        "env_seed": str(read.env_seed),
        "seed": str(read.seed),
        "task": read.task.id,
        "public": _json(read.task.public),
        "private": _json(read.task.private),
        "agent": _identity(read.agent),
        "env": _identity(read.env),
        "sampling": _json(read.sampling.model_dump(mode="json")) if read.sampling is not None else None,
        "limits": _json(read.limits),
        **_times(read.media, json.loads(read.body())["task"].get("pictures")),
    }


def _identity(read: Identity) -> dict[str, object]:
    return {"name": read.name, "cls": read.cls, "effect": read.effect, "config": _json(read.config or None)}


def _json(value: Any) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
    return text if len(text) <= TEXT else f"{text[:TEXT]}\N{HORIZONTAL ELLIPSIS} ({len(text):,} characters)"


def _end(read: End) -> dict[str, object]:
    cause = read.cause.model_dump(mode="json") if read.cause is not None else None
    if cause is not None:
        cause["message"] = _json(cause["message"])
    return {"t": "end", "status": read.status.value, "cause": cause, "seconds": read.seconds, "at": read.at}


def _reward(read: Reward) -> dict[str, object]:
    return {
        "t": "reward",
        "name": read.name,
        "value": read.value,
        "weight": read.weight,
        "of": read.step,
        "layer": read.layer,
        "evidence": _json(read.evidence),
    }


def _tokens(read: Tokens) -> dict[str, object]:
    return {
        "t": "tokens",
        "call": read.call,
        "prompt": len(read.prompt),
        "completion": len(read.completion),
        "tokenizer": read.tokenizer,
    }


_SHAPES: dict[type, Any] = {
    Begin: _begin,
    StepRecord: _step,
    Call: call_item,
    Reward: _reward,
    End: _end,
    Label: Label.model_dump,
    Tokens: _tokens,
}


def columns(
    summaries: Sequence[Summary], versions: dict[str, list[str]], checks: Callable[[str], str]
) -> dict[str, object]:
    """Return the table's columns for these tapes. `versions` lists the policy versions that sampled each tape. `checks`
    returns a tape's verdicts."""
    return {
        "n": len(summaries),
        "id": [s.id for s in summaries],
        "status": coded(s.status or "running" for s in summaries),
        "cause": coded(s.cause or "" for s in summaries),
        "reward": [s.reward for s in summaries],
        "split": coded(s.split or "" for s in summaries),
        "task": coded(s.task or (s.task_hash or "")[:12] for s in summaries),
        "group": coded(s.group or "" for s in summaries),
        "attempt": [s.attempt or 0 for s in summaries],
        "agent": coded(s.agent or "" for s in summaries),
        "env": coded(s.env or "" for s in summaries),
        "version": coded(", ".join(versions.get(s.id, ())) for s in summaries),
        "parent": coded(s.parent or "" for s in summaries),
        "checks": coded(checks(s.id) for s in summaries),
        "begun": [s.begun for s in summaries],
        "seconds": [s.ended - s.begun if s.ended is not None and s.begun is not None else None for s in summaries],
        "turns": [s.actions for s in summaries],
        "calls": [s.calls for s in summaries],
        "tokens": [s.sampled for s in summaries],
    }


def coded(values: Iterable[str]) -> dict[str, object]:
    """Return a dict with the distinct strings as `words`. Its `at` holds the index in `words` for each row."""
    words: dict[str, int] = {}
    at = [words.setdefault(value, len(words)) for value in values]
    return {"words": list(words), "at": at}
