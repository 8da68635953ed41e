"""HTTP reward models: many samples in one POST request; every answer is validated.

    {"ids": [...], "queries": [...], "prompts": [...], "references": [...], "labels": [...]}  ->  {"rewards": [...]}

`references` and `labels` are sent if a sample has one. An answer needs one finite number for each query, or named
numbers, or null for no score. A server that returns `ids` may answer in any order; otherwise the order of the queries
counts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from pydantic import JsonValue
from pydantic_core import from_json

from ...tapes import Tape, TapereelError
from ...tapes.errors import MissingExtra
from .samples import ModelScore, Sample, WrongAnswer, checked, model_source, sample_of
from .sources import RewardSource

LARGEST = 64 << 20
"""Size limit of an answer, in bytes."""
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the request is repeated."""
LONGEST_WAIT = 60.0
"""Longest wait between two tries, in seconds, also if the server asks for more."""


class RewardServerFailed(TapereelError, ConnectionError):
    """A reward model did not answer in any try; the message names the server and the last cause."""


class HttpReward:
    """A reward model behind a URL."""

    def __init__(
        self,
        url: str,
        *,
        tries: int = 5,
        wait: float = 1.0,
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
        key_variable: str | None = None,
    ) -> None:
        """
        tries: how often a request is sent at most; wait: seconds before the second try, doubled before each further
            try; the server's `Retry-After` takes precedence. timeout: seconds of one try.
        key_variable: the environment variable with the bearer token; the token and `headers` are never recorded.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{url!r} is not the address of a reward model; write it as in http://127.0.0.1:5000/score"
            )
        if tries < 1:
            raise ValueError(f"tries must be at least 1, not {tries}")
        self.name = f"{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
        """The address without parts that may be secret (user, query)."""
        self.tries, self.wait, self.timeout = tries, wait, timeout
        self._url, self._headers, self._key_variable = url, dict(headers or {}), key_variable

    async def score(self, samples: Sequence[Sample]) -> list[ModelScore]:
        """One request with all samples. RewardServerFailed if no try is answered, WrongAnswer for an invalid answer."""
        body = self._body(samples)
        for k in range(self.tries):
            try:
                return self._read(await self._post(body), samples)
            except _TryAgain as again:
                if k == self.tries - 1:
                    raise RewardServerFailed(
                        f"reward model {self.name} did not answer in {self.tries} tries; the last one: {again}"
                    ) from again.__cause__
                pause = self.wait * 2**k if again.after is None else again.after
                await asyncio.sleep(min(pause, LONGEST_WAIT))
        raise AssertionError("unreachable")

    def _body(self, samples: Sequence[Sample]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "ids": [s.id for s in samples],
            "queries": [s.query for s in samples],
            "prompts": [s.prompt for s in samples],
        }
        if any(s.reference is not None for s in samples):
            body["references"] = [s.reference for s in samples]
        if any(s.label is not None for s in samples):
            body["labels"] = [s.label for s in samples]
        return body

    async def _post(self, body: dict[str, Any]) -> JsonValue:
        try:
            import aiohttp
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "aiohttp", "http", "an HTTP reward model") from error
        headers = dict(self._headers)
        if self._key_variable is not None:
            headers["Authorization"] = f"Bearer {_secret(self._key_variable)}"
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.timeout)) as session,
                session.post(self._url, json=body, headers=headers, allow_redirects=False) as answer,
            ):
                text = await _all(answer.content)
                if answer.status in PASSING:
                    pause = _seconds(answer.headers.get("Retry-After"))
                    raise _TryAgain(f"HTTP {answer.status}: {_short(text)}", pause)
                if answer.status != 200:
                    raise WrongAnswer(
                        f"reward model {self.name} refused the request: HTTP {answer.status}: {_short(text)}"
                    )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if isinstance(error, TapereelError):
                raise
            raise _TryAgain(f"{type(error).__name__}: {error}", None) from error
        try:
            return from_json(text, allow_inf_nan=True)
        except ValueError as error:
            raise WrongAnswer(f"reward model {self.name} returned invalid JSON: {_short(text)}") from error

    def _read(self, answer: JsonValue, samples: Sequence[Sample]) -> list[ModelScore]:
        who = f"reward model {self.name}"
        if not isinstance(answer, dict) or "rewards" not in answer:
            raise WrongAnswer(f"{who} returned {str(answer)[:120]!r}, without `rewards`")
        scores: Any = answer["rewards"]
        ids: Any = answer.get("ids")
        if ids is None:
            return checked(scores, samples, who)
        if not isinstance(ids, list) or not isinstance(scores, list) or len(ids) != len(scores):
            raise WrongAnswer(
                f"{who} returned {len(scores) if isinstance(scores, list) else 'no'} rewards for "
                f"{len(ids) if isinstance(ids, list) else 'no'} ids"
            )
        wanted = [sample.id for sample in samples]
        if sorted(map(str, ids)) != sorted(wanted):
            odd = next((i for i in ids if ids.count(i) > 1 or i not in wanted), None)
            what = f"{odd!r:.80}" if odd is not None else f"no {next(i for i in wanted if i not in ids)!r}"
            raise WrongAnswer(f"{who} returned other ids than those of the request: {what}")
        by_id = dict(zip(ids, scores, strict=True))
        return checked([by_id[i] for i in wanted], samples, who)


def http_reward(
    url: str,
    *,
    name: str | None = None,
    weight: float = 1.0,
    size: int = 64,
    concurrency: int = 4,
    sample: Callable[[Tape], Sample] = sample_of,
    **options: Any,
) -> RewardSource[Tape]:
    """A source of `HttpReward(url, **options)`: up to `size` tapes in a request, `concurrency` requests at a time."""
    model = HttpReward(url, **options)
    longest = model.tries * (model.timeout + LONGEST_WAIT)
    return model_source(
        model,
        name=name or model.name.replace("/", "_"),
        weight=weight,
        size=size,
        concurrency=concurrency,
        sample=sample,
        timeout=10 * longest,
    )


class _TryAgain(Exception):
    def __init__(self, why: str, after: float | None) -> None:
        super().__init__(why)
        self.after = after


async def _all(stream: Any) -> bytes:
    text = bytearray()
    async for chunk in stream.iter_chunked(1 << 16):
        text += chunk
        if len(text) > LARGEST:
            raise WrongAnswer(f"an answer of more than {LARGEST:,} bytes")
    return bytes(text)


def _short(text: bytes) -> str:
    return repr(text[:200].decode("utf-8", "replace"))


def _seconds(header: str | None) -> float | None:
    try:
        return max(0.0, float(header)) if header is not None else None
    except ValueError:  # Retry-After may be a date: use the own waiting time instead
        return None


def _secret(variable: str) -> str:
    key = os.environ.get(variable)
    if not key:
        raise ValueError(f"the environment variable {variable} (the token of the reward model) is not set")
    return key
