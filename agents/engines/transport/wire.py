"""Shared parts of the requests and answers of all token servers, and checks before an answer becomes training data.

A `Dialect` builds JSON requests for one kind of server and reads its answers. Every answer goes through `sampled`,
which rejects anything that would train the model on wrong values. Examples are different numbers of log-probs and ids,
unknown log-probs, and version spans with gaps. The functions are pure. They work on JSON values and open no connection.
"""

from __future__ import annotations

import functools
import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from pydantic import ValidationError

from ....tapes.errors import remedy
from ....tapes.records import Message, Usage
from ..engine import EngineError, Finish, Request

FLOOR = -9000.0
"""Log-probs at or below this value (nats) are rejected. Servers send -9999 if they don't know a log-prob. The log-prob
of a token that was really sampled is never this low."""
ABOVE_ZERO = 1e-3
"""Log-probs between 0 and this value (nats) are read as 0, because rounding can lift the log-prob of a near-certain
token above zero. Larger values are rejected."""


LATEST = 3600.0
"""Maximum wait in seconds that a `Retry-After` header can ask for. The engine's `patience` is a further limit."""


Json = dict[str, object]
"""A JSON object, such as the body of a request or of an answer."""
P = ParamSpec("P")
ReadT = TypeVar("ReadT")


class BadAnswer(EngineError, ValueError):
    """The answer isn't a valid completion. The message names the wrong field, its value and what was expected."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retry=True)


def reader(read: Callable[P, ReadT]) -> Callable[P, ReadT]:
    """Decorate a function that parses answers, so that it raises BadAnswer if a value in the answer has a wrong
    type."""

    @functools.wraps(read)
    def checked(*args: P.args, **kwargs: P.kwargs) -> ReadT:
        try:
            return read(*args, **kwargs)
        except EngineError:
            raise
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            found = f"{error.title} {'.'.join(map(str, first['loc']))}: {first['msg']}, not {first['input']!r:.100}"
            raise BadAnswer(f"the answer can't be read: {found}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise BadAnswer(f"the answer can't be read: {type(error).__name__}: {str(error)[:400]}") from error

    return checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The completion from an answer that passed all checks."""

    ids: array[int]
    """Sampled ids (int32), including the turn-ending id."""
    logprobs: array[float]
    """Log-prob of each id in nats (float32), as the server returned it. It was computed before or after temperature was
    applied, as given by `Capabilities.logprobs`."""
    spans: tuple[tuple[str, int, int], ...] | None
    """(version, start, end) of each run of `ids`. The spans are half-open and contiguous, and cover all ids. None if
    the answer names no versions."""
    finish: Finish
    usage: Usage
    prompt: array[int] | None = None
    """The prompt ids (int32) that the server read, or None if they aren't in the answer."""
    places: tuple[tuple[int, int], ...] = ()
    """Where the server read each picture in `prompt`, as (offset, length), in order."""


class Dialect(Protocol):
    """The format of requests and answers for one kind of server. The server samples ids after the ids of a prompt."""

    name: str
    """Kind of server. The engine's name, which is recorded with each call, starts with it."""
    route: str
    """Route to which requests are posted."""
    streams: bool
    """Whether answers always arrive as chunks of a chat completion. If False, an answer is one JSON value."""
    tells: bool
    """Whether the server can stream an answer whose chunks name weight versions, as an unstreamed answer does."""

    def body(self, request: Request, *, model: str, request_id: str, stops: Sequence[int]) -> Json:
        """Return `request` as a JSON body. The ids in `stops` end the completion."""
        ...

    def parse(self, answer: object) -> Sampled:
        """Return the completion in a JSON answer. Raises BadAnswer if the answer isn't a valid completion."""
        ...

    def abort(self, request_id: str) -> tuple[str, Json]:
        """Return the route and body of a call that ends the request early. The request's own answer then has the tokens
        sampled so far."""
        ...

    def listing(self, body: Json, count: int) -> Json:
        """Return `body` with an added field that asks for the log-probs of the `count` likeliest tokens."""
        ...

    def listed(self, answer: object) -> list[float]:
        """Return the log-probs listed at the first sampled token. Raises BadAnswer if they are missing."""
        ...


def sampled(
    ids: object,
    logprobs: object,
    *,
    finish: object,
    versions: object,
    prompt_tokens: int | None,
    cached: int | None,
    named: list[object] | None = None,
    prompt: object = None,
    prompt_needed: bool = False,
    places: Sequence[Mapping[str, int]] | None = None,
) -> Sampled:
    """Check the fields of an answer and return the completion. Raises BadAnswer.

    `versions` is a list of {"version", "start", "end"}, `named` holds the ids that the log-probs belong to, `prompt`
    holds the ids that the server read, and `places` holds the {"offset", "length"} of each picture. Each of these four
    is None if the answer lacks it. If `prompt_needed` is true, an answer without `prompt` is rejected."""
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        raise BadAnswer(
            f"the answer has token ids {_kind(ids)} and log-probs {_kind(logprobs)}: this server doesn't "
            "return ids, and text alone can't be trained on by RL; "
            f"{remedy('serve model', '`LocalServer`', flags='')} starts vLLM with the flags that it needs"
        )
    if named is not None and named != ids:
        # If the log-probs were shifted by one position, each token would be trained with its neighbour's log-prob.
        raise BadAnswer(f"the log-probs of the answer belong to the ids {named!r}, but {ids!r} were sampled")
    if len(ids) != len(logprobs):
        raise BadAnswer(f"the answer has {len(ids)} token ids and {len(logprobs)} log-probs; nothing can be matched")
    if prompt_needed and not isinstance(prompt, list):
        raise BadAnswer(
            f"the answer has prompt ids {_kind(prompt)}: without them the prompt that the server read is "
            "unknown, and text alone can't be trained on by RL"
        )
    if not isinstance(finish, str) or finish not in _FINISH:
        raise BadAnswer(f"the answer finished as {finish!r}, not as one of {', '.join(_FINISH)}")
    return Sampled(
        ids=checked_ids(ids, "answer"),
        logprobs=array("f", [checked_logprob(value, k) for k, value in enumerate(logprobs)]),
        spans=_spans(versions, len(ids)),
        finish=_FINISH[finish],
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=len(ids), cached_tokens=cached),
        prompt=checked_ids(prompt, "prompt in the answer") if isinstance(prompt, list) else None,
        places=tuple((place["offset"], place["length"]) for place in places or ()),
    )


def check_size(request: Request, found: Sampled, vocabulary: int | None) -> None:
    """Raise BadAnswer if the answer has more tokens than `request` allows, or an id that isn't one of the model's
    `vocabulary` ids. None means that their number is unknown.

    An update on such an id would fail, and on the same tape again whenever the run is resumed."""
    most = request.sampling.max_tokens
    if len(found.ids) > most:
        raise BadAnswer(f"the answer has {len(found.ids)} tokens, and at most {most} were asked for (max_tokens)")
    if vocabulary is not None and max(found.ids, default=0) >= vocabulary:
        k = next(k for k, id in enumerate(found.ids) if id >= vocabulary)
        raise BadAnswer(
            f"token id {k} of the answer is {found.ids[k]}, and the model's ids end at {vocabulary - 1}: the server "
            "has another model, or a larger vocabulary; serve the model that engine.model names"
        )


def same_prompt(request: Request, found: Sampled) -> None:
    """Check that the server read the prompt ids of `request`, with its pictures at the same places. If it didn't,
    raises EngineError, without retry. The answer may lack the prompt ids only if the request has no pictures.

    Log-probs are valid only after exactly the recorded prompt. With any other prompt, training would be wrong without
    any error."""
    asked, read = request.prompt, found.prompt
    assert asked is not None
    for k, place in enumerate(request.places):
        theirs = found.places[k] if k < len(found.places) else None
        if theirs != (place.offset, place.length) or len(found.places) != len(request.places) or read is None:
            tokens = "no tokens" if theirs is None else f"the {theirs[1]} tokens from {theirs[0]}"
            raise EngineError(
                f"the server read picture {k + 1} of {len(request.places)}, {place.media[0]}, as {tokens}, and "
                f"{len(found.places)} pictures in all; the prompt has it as the {place.length} tokens from "
                f"{place.offset}. Serve the same model with its own preprocessor_config.json, by vLLM 0.32 or later"
            )
    if read is None or read == asked:
        return
    at = next((k for k, (a, b) in enumerate(zip(asked, read, strict=False)) if a != b), min(len(asked), len(read)))
    raise EngineError(
        f"the server read another prompt than it was given: {len(read)} ids for {len(asked)}, and id "
        f"{at} is {read[at : at + 1].tolist()} for {asked[at : at + 1].tolist()}. It renders messages by "
        "itself; serve the model with the same chat template, or with routes that take token ids (vLLM: "
        "--enable-scale-out), without which limits.keep_prompt can't cut prompts"
    )


def checked_ids(values: Sequence[object], where: str) -> array[int]:
    """Return the token ids in a JSON answer as int32. Raises BadAnswer if a value isn't a token id."""
    for k, token in enumerate(values):
        # `bool` is a subclass of `int`, so JSON `true` would otherwise become token id 1.
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise BadAnswer(f"token id {k} of the {where} is {token!r}, not an id")
    return array("i", cast("Sequence[int]", values))


def checked_logprob(value: object, k: int) -> float:
    """Return the log-prob at position `k`, in nats and at most 0. Raises BadAnswer if it is NaN or out of range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise BadAnswer(f"log-prob {k} of the answer is {value!r}; a token without one can't be trained on")
    if not FLOOR < value <= ABOVE_ZERO:
        raise BadAnswer(f"log-prob {k} of the answer is {value!r}, the server's placeholder for an unknown log-prob")
    return min(float(value), 0.0)


def _spans(versions: Any, n: int) -> tuple[tuple[str, int, int], ...] | None:
    """Return the version spans, from which each token's staleness is computed. They must cover all `n` tokens in order,
    with no gap or overlap. Otherwise, BadAnswer is raised."""
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


_FINISH: dict[str, Finish] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "tool_calls": "tool_calls",
    "repetition": "stop",
}


def _kind(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def field(value: object, *path: str | int) -> object:
    """Return `value[path[0]][path[1]]...` from a JSON answer. If a part of the path is missing, raises BadAnswer with
    that part."""
    found: Any = value
    for k, step in enumerate(path):
        try:
            found = found[step]
        except (TypeError, KeyError, IndexError) as error:
            where = ".".join(map(str, path[: k + 1]))
            raise BadAnswer(f"the answer lacks {where}: {found!r:.200}") from error
    return found


NOT_MADE = "This call was not made."
"""The result that a hosted model reads for a call of which the agent made nothing."""


def with_results(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one result for each tool call, directly behind the calls, as OpenAI's and Anthropic's
    APIs require.

    If none of an answer's calls has a result, the user message that follows is the result of the first one: what a
    typed action led to, or why the answer couldn't be read. A result without its call becomes a user message.
    """
    sent: list[Message] = []
    left = [*messages][::-1]
    while left:
        message = left.pop()
        if message.get("role") == "tool":
            message = {"role": "user", "content": message.get("content", "")}
        sent.append(dict(message))
        calls = [str(call.get("id")) for call in message.get("tool_calls") or ()]
        found: dict[str, Message] = {}
        while calls and left and left[-1].get("role") == "tool" and (id := left[-1].get("tool_call_id")) in calls:
            found[str(id)] = left.pop()
        if calls and not found and left and left[-1].get("role") == "user":
            found[calls[0]] = {"role": "tool", "tool_call_id": calls[0], "content": left.pop().get("content", "")}
        sent += [found.get(id) or {"role": "tool", "tool_call_id": id, "content": NOT_MADE} for id in calls]
    return sent


def openai_messages(messages: Sequence[Message]) -> list[Message]:
    """Return the messages in OpenAI's format, with the arguments of tool calls as JSON text."""
    return [
        {**message, "tool_calls": [_call_as_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _call_as_text(call: Json) -> Json:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return dict(call)
    return {
        **call,
        "function": {**function, "arguments": json.dumps(function.get("arguments", {}), ensure_ascii=False)},
    }


def retry_after(value: str | None) -> float | None:
    """Return the number of seconds that a `Retry-After` header asks for, but at most `LATEST`. Returns None if the
    header is neither a number of seconds nor a date (RFC 9110)."""
    if not value:
        return None
    if value.isascii() and value.replace(".", "", 1).isdecimal():
        return min(float(value), LATEST)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return min(max((at - datetime.now(UTC)).total_seconds(), 0.0), LATEST)
