"""What a reward model is shown of a tape: texts, the reference answer and the label, with an id to tell it by.

And how many tapes become one request: scores are asked for tape by tape, and models answer many at once. Knows nothing
of any one model.
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
    """A reward model gave what is no answer to the samples it was shown; says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode, to a reward model."""

    id: str
    """Of the tape."""
    prompt: str
    """What the model was asked last: its whole conversation up to there."""
    query: str
    """The prompt and the answer to it."""
    messages: tuple[Message, ...]
    """The same as chat messages, the answer last."""
    reference: JsonValue = None
    """The right answer, as far as the task has one; None: it hasn't."""
    label: str | None = None
    """What kind of task it is; None: nothing is said."""


class RewardModel(Protocol):
    """Scores many samples at once."""

    async def score(self, samples: Sequence[Sample]) -> Sequence[ModelScore]:
        """One score for each, in their order."""
        ...


def sample_of(tape: Tape, *, decode: Callable[[Sequence[int]], str] | None = None) -> Sample:
    """The tape's last call. decode: from token ids to text with special tokens, as a tokenizer's `decode`: then prompt
    and query are exactly what was sampled from and what was sampled; else they are the messages, `role: content`."""
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
    """Messages as text, as good as it gets without a chat template."""
    return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in messages)


def reference_of(tape: Tape) -> JsonValue:
    """The task's private part, or `answer` or `reference` in it."""
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
    """The scores, if they are one finite number (or named ones, or None) for each sample. WrongAnswer if not."""
    if isinstance(scores, str | Mapping) or not isinstance(scores, Sequence):
        raise WrongAnswer(f"{who} gave {type(scores).__name__} {str(scores)[:80]!r}, not a list of scores")
    if len(scores) != len(samples):
        raise WrongAnswer(f"{who} gave {len(scores)} scores for {len(samples)} samples")
    for score, sample in zip(scores, samples, strict=True):
        for value in score.values() if isinstance(score, Mapping) else (score,):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and _finite(value)) and score is not None:
                odd = "an integer that no float can hold" if number and isinstance(value, int) else f"{value!r:.80}"
                raise WrongAnswer(f"{who} gave {odd} for {sample.id}; a score is a finite number, or null for none")
    return list(scores)


def _finite(value: float) -> bool:
    """Also of an integer that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


class Batched:
    """A scorer of single tapes that asks a model about all those waiting at once, at most `size`, in `concurrency`
    calls at a time. One call that fails leaves all of its tapes unscored."""

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
        if self._loop is not loop:  # those of an earlier loop ended with it
            self._loop, self._waiting, self._asking = loop, [], set()
        answer: asyncio.Future[ModelScore] = loop.create_future()
        self._waiting.append((self.sample(tape), answer))
        loop.call_soon(self._begin)  # what else comes in this round of the loop goes along
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
        except Exception as error:  # each of those who wait is told
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
    """A reward model as a source."""
    return RewardSource(
        score=Batched(model, size=size, concurrency=concurrency, sample=sample),
        name=name,
        weight=weight,
        pure=pure,
        timeout=timeout,
    )
