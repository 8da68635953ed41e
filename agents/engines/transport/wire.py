"""What every server of tokens is asked and answers, whatever its dialect: the checks that make an answer training data.

Pure functions over JSON values; no connection, no clock. A dialect builds the body of a request and reads the answer;
what it read passes `sampled`, which refuses everything that would train a model on the wrong tokens: another number of
log-probs than of ids, unknown log-probs, version spans with holes.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from ....tapes.records import Usage
from ..engine import EngineError, Finish, Request

FLOOR = -9000.0
"""Servers write -9999 for a log-prob that they don't know; no sampled token of a real model comes near it."""
ABOVE_ZERO = 1e-3
"""A log-prob of a certain token may come out this far above zero by rounding; it reads as 0 then."""


P = ParamSpec("P")
ReadT = TypeVar("ReadT")


class BadAnswer(EngineError, ValueError):
    """An answer that can't be a completion: names the field, what it held and what was expected."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry=True)


def reader(read: Callable[P, ReadT]) -> Callable[P, ReadT]:
    """For what reads answers: a value of another kind than it should be, wherever it stands, is a BadAnswer."""

    @functools.wraps(read)
    def checked(*args: P.args, **kwargs: P.kwargs) -> ReadT:
        try:
            return read(*args, **kwargs)
        except EngineError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadAnswer(f"the answer can't be read: {type(error).__name__}: {str(error)[:400]}") from error

    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One checked answer."""

    ids: array[int]
    """int32, the turn-ending id included."""
    logprobs: array[float]
    """float32, one for each id, as the server gave them (after or before temperature: the dialect's probe knows)."""
    spans: tuple[tuple[str, int, int], ...] | None
    """(version, start, end), contiguous over all ids; None when the server doesn't say."""
    finish: Finish
    usage: Usage
    prompt: array[int] | None = None
    """int32: the ids that the server says it read; None when it doesn't say."""


class Dialect(Protocol):
    """How one kind of server is asked for tokens after tokens."""

    name: str
    """Of the kind of server; part of the engine's name on each call."""
    route: str
    """Where requests are posted."""
    streams: bool
    """Whether answers come as chunks of a chat completion; else they come as one JSON value."""
    tells: bool
    """Whether that can be asked for, and the chunks name versions as the whole answer does."""

    def body(self, request: Request, *, model: str, request_id: str, stops: Sequence[int]) -> dict[str, Any]:
        """The JSON body that asks for `request`, which ends at any of `stops`."""
        ...

    def parse(self, answer: Any) -> Sampled:
        """The completion in a JSON answer. BadAnswer when there is none."""
        ...

    def abort(self, request_id: str) -> tuple[str, dict[str, Any]]:
        """Route and body that end a request early; its answer then holds what was sampled so far."""
        ...

    def listing(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        """A body that asks for the log-probs of the `count` likeliest tokens as well."""
        ...

    def listed(self, answer: Any) -> list[float]:
        """Those of its first token. BadAnswer when there are none."""
        ...


def sampled(
    ids: Any,
    logprobs: Any,
    *,
    finish: Any,
    versions: Any,
    prompt_tokens: int | None,
    cached: int | None,
    prompt: Any = None,
    prompt_needed: bool = False,
) -> Sampled:
    """The checked completion. `versions` is a list of {"version", "start", "end"}, `prompt` the ids that were read;
    None: the server doesn't say. `prompt_needed` refuses that."""
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        raise BadAnswer(
            f"the answer has token ids {_kind(ids)} and log-probs {_kind(logprobs)}: this server doesn't "
            "return what was asked for, and text alone is no RL data; `tapereel serve model` starts vLLM with "
            "the flags that it needs"
        )
    if len(ids) != len(logprobs):
        raise BadAnswer(f"the answer has {len(ids)} token ids and {len(logprobs)} log-probs; nothing can be matched")
    if prompt_needed and not isinstance(prompt, list):
        raise BadAnswer(
            f"the answer has prompt ids {_kind(prompt)}: nobody can say what the server read, and text "
            "alone is no RL data"
        )
    return Sampled(
        ids=checked_ids(ids, "answer"),
        logprobs=array("f", [_logprob(value, k) for k, value in enumerate(logprobs)]),
        spans=_spans(versions, len(ids)),
        finish=_finish(finish),
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=len(ids), cached_tokens=cached),
        prompt=None if prompt is None else checked_ids(prompt, "prompt in the answer"),
    )


def same_prompt(asked: array[int], read: array[int] | None) -> None:
    """EngineError, which asking again doesn't help, where a server says that it read another prompt."""
    if read is None or read == asked:
        return
    at = next((k for k, (a, b) in enumerate(zip(asked, read, strict=False)) if a != b), min(len(asked), len(read)))
    raise EngineError(
        f"the server read another prompt than it was given: {len(read)} ids for {len(asked)}, and id "
        f"{at} is {read[at : at + 1].tolist()} for {asked[at : at + 1].tolist()}. It renders messages by "
        "itself; serve the model with the same chat template, or with routes that take token ids (vLLM: "
        "--enable-scale-out)"
    )


def checked_ids(values: Sequence[Any], where: str) -> array[int]:
    """Token ids of a JSON answer. BadAnswer where one is none."""
    for k, token in enumerate(values):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise BadAnswer(f"token id {k} of the {where} is {token!r}, not an id")
    return array("i", values)


def _logprob(value: Any, k: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise BadAnswer(f"log-prob {k} of the answer is {value!r}; a token without one can't be trained on")
    if not FLOOR < value <= ABOVE_ZERO:
        raise BadAnswer(f"log-prob {k} of the answer is {value!r}, the server's word for unknown or no log-prob at all")
    return min(float(value), 0.0)


def _spans(versions: Any, n: int) -> tuple[tuple[str, int, int], ...] | None:
    if versions is None:
        return None
    try:
        spans = tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in versions)
    except (TypeError, KeyError, ValueError) as error:
        raise BadAnswer(f"the version spans of the answer are {versions!r}: {type(error).__name__}: {error}") from error
    at = 0
    for _, start, end in spans:
        if start != at or end <= start:
            raise BadAnswer(f"the version spans of the answer, {spans!r}, don't follow each other from 0 to {n}")
        at = end
    if at != n:
        raise BadAnswer(f"the version spans of the answer, {spans!r}, cover {at} of {n} tokens")
    return spans


_FINISH: dict[Any, Finish] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "tool_calls": "tool_calls",
    "repetition": "stop",
}


def _finish(value: Any) -> Finish:
    if value not in _FINISH:
        raise BadAnswer(f"the answer finished as {value!r}, which is none of {', '.join(_FINISH)}")
    return _FINISH[value]


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def field(value: Any, *path: str | int) -> Any:
    """`value[path[0]][path[1]]...` of a JSON answer. BadAnswer, naming the place, where it isn't there."""
    for k, step in enumerate(path):
        try:
            value = value[step]
        except (TypeError, KeyError, IndexError) as error:
            where = ".".join(map(str, path[: k + 1]))
            raise BadAnswer(f"the answer has no {where}; it is {_short(value)}") from error
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."
