"""Reward models: their input (a tape's prompt, answer, reference, label and id), batching, and models behind a URL.

Scores are requested for single tapes, but models score many tapes at once, so `Batched` collects the requests.
`HttpReward` sends many samples in one POST request. Every answer is validated.

    {"ids": [...], "queries": [...], "prompts": [...], "references": [...], "labels": [...]}  ->  {"rewards": [...]}

`references` is sent only if a sample has a reference, and `labels` only if a sample has a label. For each query, the
answer must hold a finite number, named finite numbers, or null for no score. The scores must be in the order of the
queries, unless the server also returns `ids`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, Unpack
from urllib.parse import urlsplit

from pydantic import JsonValue
from pydantic_core import from_json

from ...tapes import Message, Tape, TapereelError
from ...tapes.common.stats import reward_value
from ...tapes.errors import MissingExtra
from ...tapes.messages import text_of
from .sources import RewardSource, Score, label_of, reference_of

LARGEST = 64 << 20
"""Size limit for an answer, in bytes."""
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses for which a retry of the same request may succeed."""
LONGEST_WAIT = 60.0
"""The longest wait between two tries, in seconds. It also limits the wait that a server asks for."""


ModelScore = float | Mapping[str, float] | None


class WrongAnswer(TapereelError, ValueError):
    """The answer from a reward model doesn't fit the samples. The message states why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode, as the input of a reward model."""

    id: str
    """The id of the tape."""
    prompt: str
    """The prompt of the tape's last call, which is the whole conversation before the model's answer."""
    query: str
    """The prompt, followed by the model's answer."""
    messages: tuple[Message, ...]
    """The query as chat messages, with the answer last."""
    reference: JsonValue = None
    """The right answer, or None if the task has no reference."""
    label: str | None = None
    """The kind of task, or None if the task doesn't name it."""


class RewardModel(Protocol):
    """Scores many samples at once."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[ModelScore]:
        """Return one score for each sample, in the same order."""
        ...


def sample_of(tape: Tape, *, decode: Callable[[Sequence[int]], str] | None = None) -> Sample:
    """Convert the tape's last call to a sample.

    `decode` converts token ids to text with special tokens, like a tokenizer's `decode`. With `decode`, the prompt and
    the query are exactly the sampled text. Without it, they consist of the messages, each as `role: content`.
    """
    call = next((c for c in reversed(tape.calls) if c.finish not in ("error", "cancelled")), None)
    if call is None:
        messages = list(tape.messages(path=tape.begin.agent.name))
        before = messages[:-1]
    else:
        before = call.messages
        messages = [*before, call.reply]
    ids = call.prompt if call is not None and decode is not None else None
    if decode is not None and call is not None and call.completion is not None and ids is not None:
        prompt, query = decode(ids.tolist()), decode([*ids, *call.completion])
    else:
        prompt, query = as_script(before), as_script(messages)
    return Sample(tape.id, prompt, query, tuple(messages), reference_of(tape), label_of(tape))


def as_script(messages: Sequence[Message]) -> str:
    """Return the messages as text, without a chat template. Each picture is described by its size and hash."""
    return "\n".join(f"{message['role']}: {text_of(message)}" for message in messages)


def checked(scores: object, samples: Sequence[Sample], who: str) -> list[ModelScore]:
    """Return the scores as a list. Raises WrongAnswer unless there is one valid score for each sample.

    A valid score is a finite number, a mapping from names to finite numbers, or None.
    """
    if isinstance(scores, str | Mapping) or not isinstance(scores, Sequence):
        raise WrongAnswer(f"{who} returned {type(scores).__name__} {str(scores)[:80]!r}, not a list of scores")
    if len(scores) != len(samples):
        raise WrongAnswer(f"{who} returned {len(scores)} scores for {len(samples)} samples")
    for score, sample in zip(scores, samples, strict=True):
        for value in score.values() if isinstance(score, Mapping) else (score,):
            try:
                # The check uses weight 0, as for a metric. Thus a finite number that is too large for a reward passes
                # here, and later fails only its own tape instead of the whole request.
                reward_value(f"the score of {sample.id}", 0 if score is None else value, 0)
            except (TypeError, ValueError) as error:
                raise WrongAnswer(f"{who} returned an invalid score: {error}") from None
    return list(scores)


class Batched:
    """Scores single tapes by sending all waiting tapes to a model in one call.

    A call has at most `size` tapes, and at most `concurrency` calls run at once. A failed call leaves all of its tapes
    unscored.
    """

    def __init__(
        self, model: RewardModel, *, size: int = 64, concurrency: int = 1, sample: Callable[[Tape], Sample] = sample_of
    ) -> None:
        if size < 1 or concurrency < 1:
            raise ValueError(f"size and concurrency must be at least 1, not {size} and {concurrency}")
        self.model = model
        self.size, self.concurrency, self.sample = size, concurrency, sample
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[tuple[Sample, asyncio.Future[ModelScore]]] = []
        self._asking: set[asyncio.Task[None]] = set()

    async def __call__(self, tape: Tape) -> Score:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # requests from an earlier event loop ended with it
            self._loop, self._waiting, self._asking = loop, [], set()
        answer: asyncio.Future[ModelScore] = loop.create_future()
        self._waiting.append((self.sample(tape), answer))
        loop.call_soon(self._begin)  # deferred, so that requests from the same pass of the loop share a batch
        return await answer

    def _begin(self) -> None:
        while self._waiting and len(self._asking) < self.concurrency:
            batch = [(sample, answer) for sample, answer in self._waiting[: self.size] if not answer.done()]
            del self._waiting[: self.size]
            if batch:
                task = asyncio.ensure_future(self._ask(batch))
                self._asking.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        self._begin()

    async def _ask(self, batch: list[tuple[Sample, asyncio.Future[ModelScore]]]) -> None:
        samples = [sample for sample, _ in batch]
        try:
            scores = checked(await self.model.score(samples), samples, type(self.model).__name__)
        except Exception as error:  # every waiting tape gets the error
            for _, answer in batch:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), score in zip(batch, scores, strict=True):
            if not answer.done():
                answer.set_result(score)


def model_source(
    model: RewardModel,
    *,
    name: str,
    weight: float = 1.0,
    size: int = 64,
    concurrency: int = 1,
    sample: Callable[[Tape], Sample] = sample_of,
    pure: bool = False,
    timeout: float | None = 600.0,
) -> RewardSource[Tape]:
    """Return a reward source that batches requests to a reward model."""
    return RewardSource(
        score=Batched(model, size=size, concurrency=concurrency, sample=sample),
        name=name,
        weight=weight,
        pure=pure,
        timeout=timeout,
    )


# Models behind a URL


class RewardServerFailed(TapereelError, ConnectionError):
    """All tries of a request failed. The message names the server, and the cause of the last failure."""


class HttpOptions(TypedDict, total=False):
    """The options of `HttpReward`, which documents them."""

    tries: int
    wait: float
    timeout: float
    headers: Mapping[str, str] | None
    key_variable: str | None


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
        tries: The maximum number of times that a request is sent.
        wait: Seconds to wait before the second try. The wait doubles before each further try. If the server sends
            `Retry-After`, that wait is used instead.
        timeout: Time limit for one try, in seconds.
        key_variable: The environment variable that holds the bearer token. The token and `headers` are never recorded.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"{url!r} is not the address of a reward model. Write it as in http://127.0.0.1:5000/score"
            )
        if tries < 1:
            raise ValueError(f"tries must be at least 1, not {tries}")
        self.name = f"{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
        """The address without the user and the query, because both may be secret."""
        self.tries, self.wait, self.timeout = tries, wait, timeout
        self._url, self._headers, self._key_variable = url, dict(headers or {}), key_variable

    async def score(self, samples: Sequence[Sample]) -> list[ModelScore]:
        """Send one request with all samples and return their scores.

        Raises RewardServerFailed if every try fails, and WrongAnswer for an invalid answer or a refused request.
        """
        body = self._body(samples)
        for k in range(self.tries):
            try:
                return self._read(await self._post(body), samples)
            except _TryAgain as again:
                if k == self.tries - 1:
                    raise RewardServerFailed(
                        f"reward model {self.name} did not answer in {self.tries} tries, the last time because: {again}"
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
            key = os.environ.get(self._key_variable)
            if not key:
                raise ValueError(
                    f"the environment variable {self._key_variable} (the token of the reward model) is not set"
                )
            headers["Authorization"] = f"Bearer {key}"
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
            raise WrongAnswer(f"{who} returned ids that differ from the request's: {what}")
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
    **options: Unpack[HttpOptions],
) -> RewardSource[Tape]:
    """Return a source for `HttpReward(url, **options)`.

    A request scores up to `size` tapes, and up to `concurrency` requests run at once.
    """
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
    except ValueError:  # Retry-After may be a date: the default pause is used then
        return None
