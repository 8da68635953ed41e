"""Items of a transcript as plain values: the content of a record, with long texts cut and marked as cut.

A record that can't be read is an item too, a hole with the reason: no record is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..records import Begin, Call, End, Identity, Label, Reward, StepRecord, Tokens, parse_record
from ..transcript import kind_of, reads

TEXT = 4_000
"""Characters of one text in an item; the page asks for the rest."""


def item(record: int, body: bytes, step: int = -1, rewards: Sequence[tuple[str, float, float]] = ()) -> dict[str, Any]:
    """The item of one record. `t` is the type of the record, or `hole`."""
    try:
        read = parse_record(body)
        found = _SHAPES[type(read)](read)
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
    """The whole text of which the item shows the beginning; empty for a record without text."""
    try:
        read = parse_record(body)
    except ValueError:
        return body.decode("utf-8", "replace")
    if isinstance(read, StepRecord):
        return reads(read.content)
    if isinstance(read, Call):
        return read.text or ""
    if isinstance(read, Begin):
        return _json(read.task.public) or ""
    if isinstance(read, End) and read.cause is not None:
        return ": ".join(part for part in (read.cause.error, read.cause.message) if part)
    return ""


def _clip(name: str, text: str, limit: int = TEXT) -> dict[str, Any]:
    """`name` -> the text up to `limit`, and `cut` -> the whole length of a longer text."""
    return {name: text} if len(text) <= limit else {name: text[:limit], "cut": len(text)}


def _step(read: StepRecord) -> dict[str, Any]:
    text = reads(read.content)
    found = {
        "t": "step",
        "by": read.by,
        "role": read.role,
        "kind": kind_of(read.content),
        "at": read.at,
        "calls": [list(part) for part in read.calls],
        **_clip("text", text),
    }
    fields = json.loads(read.body())["content"]
    if not (isinstance(fields, dict) and len(fields) == 1 and isinstance(next(iter(fields.values())), str)):
        written = json.dumps(fields, ensure_ascii=False, indent=1)
        found["fields"] = written if len(written) <= TEXT else f"{written[:TEXT]}\N{HORIZONTAL ELLIPSIS}"
    return found


def call_line(read: Call) -> dict[str, Any]:
    """A call without its messages and tokens."""
    known = [x for x in read.logprobs or () if x == x]
    return {
        "t": "call",
        "call": read.call,
        "by": read.by,
        "conversation": read.conversation,
        "engine": read.engine,
        "at": read.at,
        "prompt": read.keep + len(read.prompt) if read.prompt is not None else None,
        "kept": read.keep,
        "base": read.base,
        "completion": len(read.completion) if read.completion is not None else None,
        "finish": read.finish,
        "temperature": read.sampling.temperature,
        "logprob": sum(known) / len(known) if known else None,
        "unknown": sum(x != x for x in read.logprobs) if read.logprobs is not None else None,
        "spans": [list(span) for span in read.spans],
        "split": read.split,
        "seconds": sum(one.seconds for one in read.attempts),
        "retries": max(0, len(read.attempts) - 1),
        "errors": [one.error[:500] for one in read.attempts if one.error],
        **_clip("text", read.text or ""),
    }


def _begin(read: Begin) -> dict[str, Any]:
    return {
        "t": "begin",
        "tape": read.tape,
        "at": read.at,
        "split": read.split,
        "group": read.group,
        "attempt": read.attempt,
        "env_seed": str(read.env_seed),
        "seed": str(read.seed),
        "versions": read.versions,
        "task": read.task.id,
        "task_hash": read.task_hash,
        "public": _json(read.task.public),
        "private": _json(read.task.private),
        "agent": _identity(read.agent),
        "env": _identity(read.env),
        "parent": read.parent.model_dump() if read.parent is not None else None,
        "sampling": _json(read.sampling.model_dump(mode="json")) if read.sampling is not None else None,
        "limits": _json(read.limits),
    }


def _identity(read: Identity) -> dict[str, Any]:
    return {"name": read.name, "cls": read.cls, "effect": read.effect, "config": _json(read.config or None)}


def _json(value: Any) -> str | None:
    """A value as text to read; None for None."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1)
    return text if len(text) <= TEXT else f"{text[:TEXT]}\N{HORIZONTAL ELLIPSIS} ({len(text):,} characters)"


def _end(read: End) -> dict[str, Any]:
    cause = read.cause.model_dump(mode="json") if read.cause is not None else None
    if cause is not None and cause["message"] and len(cause["message"]) > TEXT:
        cause["message"] = cause["message"][:TEXT] + "\N{HORIZONTAL ELLIPSIS}"
    return {"t": "end", "status": read.status.value, "cause": cause, "seconds": read.seconds, "at": read.at}


def _reward(read: Reward) -> dict[str, Any]:
    return {
        "t": "reward",
        "name": read.name,
        "value": read.value,
        "weight": read.weight,
        "of": read.step,
        "layer": read.layer,
        "evidence": _json(read.evidence),
    }


def _label(read: Label) -> dict[str, Any]:
    ranges = [list(one) for one in read.ranges] if read.ranges is not None else None
    return {"t": "label", "call": read.call, "use": read.use, "ranges": ranges, "layer": read.layer}


def _tokens(read: Tokens) -> dict[str, Any]:
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
    Call: call_line,
    Reward: _reward,
    End: _end,
    Label: _label,
    Tokens: _tokens,
}
