"""The input of reward models (texts, reference answer, label and id of a tape), and batching of their requests.

Scores are requested for single tapes, while models score many at once: `Batched` collects the requests.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import JsonValue

from ...tapes import Message, Tape, TapereelError
from .sources import RewardSource, Score

ModelScore = float | Mapping[str, float] | None


class WrongAnswer(TapereelError, ValueError):
    """The answer of a reward model doesn't fit the samples; the message says why."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode, as the input of a reward model."""

    id: str
    """Id of the tape."""
    prompt: str
    """The prompt of the last call: the whole conversation before its answer."""
    query: str
    """The prompt and its answer."""
    messages: tuple[Message, ...]
    """The query as chat messages, the answer last."""
    reference: JsonValue = None
    """The right answer; None if the task has none."""
    label: str | None = None
    """The kind of task; None if the task doesn't name it."""


class RewardModel(Protocol):
    """Scores many samples at once."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[ModelScore]:
        """One score for each sample, in the same order."""
        ...


def sample_of(tape: Tape, *, decode: Callable[[Sequence[int]], str] | None = None) -> Sample:
    """The tape's last call as a sample.

    decode: converts token ids to text with special tokens, like a tokenizer's `decode`. With it, prompt and query are
    exactly the sampled text; without it, they are the messages as `role: content`.
    """
    call = next((c for c in reversed(tape.calls) if c.finish not in ("error", "cancelled")), None)
    if call is None:
        messages = list(tape.messages(path=tape.begin.agent.name))
        before = messages[:-1]
    else:
        before = tape.call_messages(call)
        messages = [*before, call.reply]
    if decode is not None and call is not None and call.completion is not None:
        ids = tape.call_prompt(call)
        prompt, query = decode(ids.tolist()), decode([*ids, *call.completion])
    else:
        prompt, query = as_script(before), as_script(messages)
    return Sample(tape.id, prompt, query, tuple(messages), reference_of(tape), label_of(tape))


def as_script(messages: Sequence[Message]) -> str:
    """Messages as text, without a chat template."""
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)


def reference_of(tape: Tape) -> JsonValue:
    """`answer` or `reference` in the task's private part, or the whole private part if it is not a dict."""
    private = tape.begin.task.private
    if not isinstance(private, dict):
        return private
    return private.get("answer", private.get("reference"))


def label_of(tape: Tape) -> str | None:
    """`label` in the private or the public part of the task."""
    for part in (tape.begin.task.private, tape.begin.task.public):
        if isinstance(part, dict) and part.get("label") is not None:
            return str(part["label"])
    return None


def checked(scores: Sequence[Any], samples: Sequence[Sample], who: str) -> list[ModelScore]:
    """The scores, if each sample has one finite number, named finite numbers, or None. WrongAnswer otherwise."""
    if isinstance(scores, str | Mapping) or not isinstance(scores, Sequence):
        raise WrongAnswer(f"{who} returned {type(scores).__name__} {str(scores)[:80]!r}, not a list of scores")
    if len(scores) != len(samples):
        raise WrongAnswer(f"{who} returned {len(scores)} scores for {len(samples)} samples")
    for score, sample in zip(scores, samples, strict=True):
        for value in score.values() if isinstance(score, Mapping) else (score,):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and _finite(value)) and score is not None:
                odd = "an integer that no float can hold" if number and isinstance(value, int) else f"{value!r:.80}"
                raise WrongAnswer(
                    f"{who} returned {odd} for {sample.id}; a score must be a finite number, or null for no score"
                )
    return list(scores)


def _finite(value: float) -> bool:
    """False also for an integer that no float can hold, for which `math.isfinite` raises."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class Batched:
    """A scorer of single tapes that sends all waiting tapes to a model in one call.

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
        if self._loop is not loop:  # the requests of an earlier event loop ended with that loop
            self._loop, self._waiting, self._asking = loop, [], set()
        answer: asyncio.Future[ModelScore] = loop.create_future()
        self._waiting.append((self.sample(tape), answer))
        loop.call_soon(self._begin)  # deferred, so that requests of the same loop pass share one batch
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
    """A reward source that batches requests to a reward model."""
    return RewardSource(
        score=Batched(model, size=size, concurrency=concurrency, sample=sample),
        name=name,
        weight=weight,
        pure=pure,
        timeout=timeout,
    )
