"""ReplayEngine: recorded answers, given again in place of a model's.

Content is the assertion, never the key: a request is found by its place (the path that asks and the seed, which is that
of the n-th question of the path) and must then be the request that was recorded: messages, tools, sampling, token ids.
So identical prompts of a group, retries and concurrent sub-agents can't be mixed up. Given many tapes it serves a whole
loop of rollouts, with no model at all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...tapes import Call, Tape
from ...tapes.audit.verdict import Difference, Divergence, Likely, clipped, differences
from ...tapes.records import Usage
from ..engines.engine import Budget, Completion, EngineError, PromptTooLong, Request, SyncMode
from .script import record_of_call, turn_of

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 64
"""Rounds of the event loop that an answer waits for those that were recorded before it. Only questions asked at the
same time ever wait, and an agent that no longer asks what came before isn't waited for longer than this."""


class Diverged(EngineError):
    """A request differs from the recorded one, or there is none left; `divergence` has the place and both values."""

    def __init__(self, divergence: Divergence) -> None:
        d = divergence
        values = f"`{d.field}` was {d.recorded!r:.300}, it is now {d.observed!r:.300}"
        super().__init__(f"tape {d.tape}: {d.sentence} ({values})")
        self.divergence = divergence


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """Statistics in the form of other engines'."""

    busy_seconds: float = 0.0
    """Always 0: looking up a recorded answer takes no time worth measuring."""


class ReplayEngine:
    """Gives what the tapes recorded. With a renderer the prompt's token ids are compared as well.

    One tape is found by the order of each path's questions; of several, the seeds of an episode tell which is meant, so
    the rollouts must be made with the recorded seeds.
    """

    name = "replay"

    def __init__(self, *tapes: Tape, renderer: Any | None = None) -> None:
        if not tapes:
            raise ValueError("ReplayEngine needs the tape, or the tapes, whose answers it is to give")
        self._renderer = renderer
        self._only = tapes[0] if len(tapes) == 1 else None
        self._recorded: dict[tuple[str, int | None], list[tuple[Tape, Call]]] = defaultdict(list)
        """(path, seed) -> what was recorded there, newest first."""
        for tape in reversed(tapes):
            for call in reversed(tape.calls):
                if call.engine != "authored":
                    self._recorded[call.by, call.seed].append((tape, call))
        self._queue = [call.call for call in tapes[0].calls if call.engine != "authored"] if self._only else []
        self._order = {call: k for k, call in enumerate(self._queue)}
        self.patience = 0.0
        """Seconds that an answer waits on top, where questions come from another process."""
        self._moved = asyncio.Event()
        self._answered: set[str] = set()
        self._turn_of_answers = 0
        """How many of the queue have been answered without a gap."""
        self.version = "recorded"
        self.changing = False
        self.stats = ReplayStats()

    @property
    def renderer(self) -> Any | None:
        return self._renderer

    @property
    def context(self) -> int | None:
        return None

    @property
    def left(self) -> int:
        """Recorded answers that nobody has asked for yet."""
        return sum(len(calls) for calls in self._recorded.values())

    async def complete(self, request: Request) -> Completion:
        tape, call = self.take(request)
        self.check(tape, call, request)
        return await self.answer(call, request)

    def take(self, request: Request) -> tuple[Tape, Call]:
        """The recorded call in the place of this request, which is used up by that. Diverged where there is none."""
        found = self._find(request)
        if found is None:
            raise Diverged(_unrecorded(self._only, request))
        return found.pop()

    async def granted(self, request: Request, budget: Budget) -> int | None:
        """The max_tokens with which this request was recorded, where no more may have been left of the budget, else
        those that it asks for; None where it wasn't recorded. Then it may have been refused once all was spent, which
        is waited for as long as for an answer."""
        found = self._find(request)
        if found is None:
            if self._only is not None and sum(_sampled(call) for call in self._only.calls) >= (budget.limit or 0):
                await self._until(lambda: budget.spent or self._turn_of_answers >= len(self._queue))
            return None
        tape, call = found[-1]
        others = sum(
            max(_sampled(one), one.sampling.max_tokens)
            for one in tape.calls
            if one.engine != "authored" and one.call != call.call
        )
        cut = call.sampling.max_tokens >= (budget.limit or 0) - others
        return min(call.sampling.max_tokens, request.sampling.max_tokens) if cut else request.sampling.max_tokens

    def _find(self, request: Request) -> list[tuple[Tape, Call]] | None:
        """Where the recorded call in the place of this request is the last one; None where there is none."""
        found = self._recorded.get((request.path, request.seed))
        if found:
            return found
        _, told, conversation = request.cache_key.partition(f"/{request.path}/")
        for call in self._only.calls if self._only is not None else ():
            rest = self._recorded.get((call.by, call.seed))
            same = call.by == request.path and (not told or self._may_be(call, conversation))
            if same and rest and rest[-1][1].call == call.call:
                return rest
        return None

    def _may_be(self, call: Call, conversation: str) -> bool:
        """Whether a question of this conversation may stand for the call. One that comes from elsewhere is named by its
        first messages: under a new name, it is an old one that begins otherwise."""
        if call.conversation == conversation or not self.patience or self._only is None:
            return call.conversation == conversation
        return all(other.conversation != conversation for other in self._only.calls)

    def check(self, tape: Tape, call: Call, request: Request) -> None:
        """Diverged where the request isn't the recorded one."""
        found = request_divergence(tape, call, request)
        if found is not None:
            raise Diverged(found)

    async def answer(self, call: Call, request: Request) -> Completion:
        """What was recorded; of questions asked at once, in the order in which their answers came. Whoever listens is
        told of all tokens at once, and before that: so they came."""
        found = recorded_answer(call)
        if request.listener is not None and found.ids:
            request.listener.tokens(found.ids)
        await self._wait_for_turn(self._order.get(call.call, 0))
        self._answered.add(call.call)
        self._moved.set()
        while self._turn_of_answers < len(self._queue) and self._queue[self._turn_of_answers] in self._answered:
            self._turn_of_answers += 1
        if call.finish == "cancelled":
            # Whoever asked gave up waiting, and does so again.
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if request.on_partial is not None:
                    request.on_partial(found)
                raise
        if call.finish == "error":
            raise recorded_error(call)
        return found

    async def _wait_for_turn(self, place: int) -> None:
        await self._until(lambda: self._turn_of_answers >= place)

    async def _until(self, done: Callable[[], bool]) -> None:
        for _ in range(PATIENCE):
            if done():
                return
            await asyncio.sleep(0)
        if self.patience:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.patience):
                    while not done():
                        self._moved.clear()
                        await self._moved.wait()

    def forget(self, cache_key: str) -> None:
        """Nothing is kept by key."""

    async def sync_weights(self, state: Mapping[str, Tensor], version: str, mode: SyncMode = "reprefill") -> None:
        """Note the version alone: the answers, and the versions of their spans, are the recorded ones."""
        self.version = version

    async def close(self) -> None:
        """Nothing is held."""

    def skip(self, calls: Sequence[Call]) -> None:
        """These were answered before the replay begins."""
        self._answered.update(call.call for call in calls)
        for left in self._recorded.values():
            left[:] = [item for item in left if item[1].call not in self._answered]


def _sampled(call: Call) -> int:
    """As the door counts them."""
    return len(call.completion) if call.completion is not None else call.usage.completion_tokens or 0


def recorded_answer(call: Call) -> Completion:
    """What the engine gave. Ids of a text that nobody sampled (a script's) were made by the door, not by the engine."""
    scripted = call.completion is not None and call.logprobs is None and not call.spans
    return Completion(
        text=call.text,
        ids=None if scripted else call.completion,
        logprobs=call.logprobs,
        spans=call.spans,
        finish=call.finish,
        tool_calls=call.tool_calls,
        usage=Usage() if scripted else call.usage,
    )


def recorded_error(call: Call) -> EngineError:
    """The error that a recorded call ended with, by its name and message."""
    text = call.attempts[-1].error if call.attempts else None
    name, _, message = (text or "EngineError: the recorded call failed").partition(": ")
    if name == PromptTooLong.__name__:
        return PromptTooLong(message)
    return type(name if name.isidentifier() else "EngineError", (EngineError,), {})(message)


def request_divergence(tape: Tape, call: Call, request: Request) -> Divergence | None:
    """Where a request isn't the recorded one; None where it is."""
    found = next(_request_differences(tape, call, request), None)
    if found is None:
        return None
    difference, cause, sentence = found
    then, now = clipped(difference.recorded, difference.observed)
    at = record_of_call(tape, call)
    return Divergence(
        tape=tape.id,
        turn=turn_of(tape, at),
        record=at,
        call=call.call,
        by=call.by,
        field=difference.field,
        recorded=then,
        observed=now,
        cause=cause,
        sentence=f"call {call.call} by {call.by!r}: {sentence}",
    )


def _request_differences(tape: Tape, call: Call, request: Request) -> Iterator[tuple[Difference, Likely, str]]:
    then, now = tape.call_messages(call), list(request.messages)
    if then != now:
        for difference in differences(then, now, "messages"):
            cause, sentence = _blame_messages(tape, call, then, now, difference)
            yield difference, cause, sentence
    offered, offers = tape.call_tools(call), request.tools
    if offered != offers:
        order = sorted(map(repr, offered or ())) == sorted(map(repr, offers or ()))
        told = "the same tools are offered in another order" if order else "other tools are offered"
        for difference in differences(list(offered or ()), list(offers or ()), "tools"):
            yield difference, Likely.TOOLS, told
    if tape.begin.sampling is not None and call.sampling != request.sampling:
        for difference in differences(call.sampling.model_dump(), request.sampling.model_dump(), "sampling"):
            yield difference, Likely.CODE, "the agent asks to sample otherwise"
    if call.seed != request.seed:
        yield (
            Difference("seed", call.seed, request.seed),
            Likely.ORDER,
            f"`seed` was {call.seed}, it is now {request.seed}: it is another question of that agent, or the tape "
            "says another sampling seed",
        )
    if request.prompt is not None and call.prompt is not None:
        ids = tape.call_prompt(call)
        if ids != request.prompt:
            at = next(
                (k for k, (a, b) in enumerate(zip(ids, request.prompt, strict=False)) if a != b),
                min(len(ids), len(request.prompt)),
            )
            sentence = (
                f"the same messages are other token ids from position {at} on: the tokenizer, the template or "
                "the renderer's settings aren't those of the recording"
            )
            yield (
                Difference(f"prompt[{at}]", list(ids[at : at + 8]), list(request.prompt[at : at + 8])),
                Likely.RENDERING,
                sentence,
            )


def _blame_messages(
    tape: Tape, call: Call, then: list[Any], now: list[Any], difference: Difference
) -> tuple[Likely, str]:
    if sorted(map(repr, then)) == sorted(map(repr, now)):
        return Likely.ORDER, f"the messages come in another order, from `{difference.field}` on"
    others = [one for one in tape.calls if one.by == call.by and one.call != call.call]
    same = next((one.call for one in others if tape.call_messages(one) == now), None)
    if same is not None:
        return Likely.ORDER, f"the agent asks here what it asked in call {same}"
    at = int(difference.field.split("[")[1].split("]")[0])
    role = (then[at] if at < len(then) else now[at]).get("role")
    what = "the system prompt" if role == "system" else f"message {at} ({role})"
    return Likely.PROMPT, f"{what} is not the recorded one, at `{difference.field}`"


def _unrecorded(tape: Tape | None, request: Request) -> Divergence:
    if tape is None:
        sentence = (
            f"no tape has a question by {request.path!r} with the seed {request.seed} left: give the tapes "
            "that were recorded with these seeds"
        )
    elif any(call.by == request.path for call in tape.calls):
        sentence = f"{request.path!r} asks the model once more than was recorded"
    else:
        known = ", ".join(sorted({call.by for call in tape.calls})) or "nobody"
        sentence = f"{request.path!r} asks the model, who never did on this tape ({known} did)"
    return Divergence(
        tape=tape.id if tape is not None else "",
        by=request.path,
        field="call",
        observed=clipped("", str(dict(request.messages[-1])) if request.messages else "")[1],
        cause=Likely.EXHAUSTED,
        sentence=sentence,
    )
