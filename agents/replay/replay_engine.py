"""ReplayEngine returns recorded answers in place of a model.

A request is looked up by its agent path and its seed. The seed differs for each call of a path. Then the content of the
request (messages, tools, sampling, token ids) must equal the recorded content. The content is never the key, so
identical prompts in a group, retries and concurrent sub-agents can't be mixed up. With several tapes, the engine serves
a whole training loop.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...tapes import Call, Tape
from ...tapes.audit.verdict import Difference, Divergence, Likely, clipped, differences
from ...tapes.records import Usage
from ..engines.engine import (
    Budget,
    Capability,
    Completion,
    EngineError,
    GrammarRefused,
    PromptTooLong,
    Request,
    Sampler,
    SyncMode,
)
from ..rendering.renderer import Renderer
from .script import call_divergence

if TYPE_CHECKING:
    from torch import Tensor

PATIENCE = 64
"""Maximum rounds of the event loop that an answer waits for the answers recorded before it. Only concurrent requests
wait. The wait is bounded, because the agent may have changed and leave out one of the earlier requests."""


class Diverged(EngineError):
    """A request differs from the recorded one, or no recorded request is left.

    `divergence` states where the two requests differ, with both values.
    """

    def __init__(self, divergence: Divergence) -> None:
        d = divergence
        values = f"`{d.field}` was {d.recorded!r:.300}, it is now {d.observed!r:.300}"
        super().__init__(f"tape {d.tape}: {d.sentence} ({values})")
        self.divergence = divergence


@dataclass(frozen=True, slots=True)
class ReplayStats:
    """Statistics in the same form as in other engines."""

    busy_seconds: float = 0.0
    """Always 0, because looking up a recorded answer takes no significant time."""


class ReplayEngine:
    """Returns the recorded answers from the tapes. With a renderer it also compares the prompts' token ids.

    A request is matched with a recorded call by path and seed. If no call has its seed and there is only one tape, the
    request is matched with the next call of its path. With several tapes the rollouts must use the recorded seeds.
    """

    name = "replay"

    def __init__(self, *tapes: Tape, renderer: Renderer | None = None, pairing: int = 0) -> None:
        """`pairing` chooses one of the ways to give their answers to equal requests of another process. 0 gives them in
        order of arrival."""
        if not tapes:
            raise ValueError("ReplayEngine needs at least one tape: pass the tapes whose answers it returns")
        self._renderer = renderer
        self._only = tapes[0] if len(tapes) == 1 else None
        self._recorded: dict[tuple[str, int | None], list[tuple[Tape, Call]]] = defaultdict(list)
        """The recorded calls, newest first, by (path, seed)."""
        for tape in reversed(tapes):
            for call in reversed(tape.calls):
                if call.engine != "authored":
                    self._recorded[call.by, call.seed].append((tape, call))
        self._queue = [call.call for call in tapes[0].calls if call.engine != "authored"] if self._only else []
        self._order = {call: k for k, call in enumerate(self._queue)}
        self._pairing = pairing
        self._given: set[str] = set()
        """The calls that `seed_of` gave to a request."""
        self.pairings = 1
        """Number of these ways among the requests so far."""
        self.patience = 0.0
        """Additional seconds that an answer waits for the answers recorded before it. Used if the agent's requests come
        from another process."""
        self.overdue = False
        """Whether an answer waited as long as that in vain, because the request for an earlier one never came."""
        self._moved = asyncio.Event()
        self._answered: set[str] = set()
        self._turn_of_answers = 0
        """Number of calls at the front of the queue that have been answered."""
        self.version = "recorded"
        self.changing = False
        self.stats = ReplayStats()
        # Recorded answers need no pixels, but a renderer that doesn't know pictures can't render the prompts.
        sees: set[Capability] = {"pictures"} if renderer is None or renderer.pictures is not None else set()
        self.can: frozenset[Capability] = frozenset({"stats", "weights", "copies", "recorded", *sees})

    @property
    def renderer(self) -> Renderer | None:
        return self._renderer

    @property
    def context(self) -> int | None:
        return None

    @property
    def left(self) -> int:
        """Number of recorded answers that were not requested yet."""
        return sum(len(calls) for calls in self._recorded.values())

    async def complete(self, request: Request) -> Completion:
        tape, call = self.take(request)
        self.check(tape, call, request)
        return await self.answer(call, request)

    def take(self, request: Request) -> tuple[Tape, Call]:
        """Remove the recorded call for this request and return it. Raises Diverged if none is left."""
        found = self._find(request)
        if found is None:
            raise Diverged(_unrecorded(self._only, request))
        return found.pop()

    def seed_of(self, request: Request, seeds: Callable[[int], int]) -> int:
        """Return the seed of the recorded call that this request repeats.

        The requests of another process may arrive in another order in each run, so the first recorded call with the
        same content counts, whatever its number. Nothing on a tape tells which of several equal requests got which
        answer, if they were in flight together.
        """
        alike: list[Call] = []
        for n in range(len(self._queue) + 1024 if self.patience else 0):
            for tape, call in self._recorded.get((request.path, seeds(n)), ())[-1:]:
                given = call.call in self._given or (alike and call.finish == "cancelled")
                if not given and _is_alike(tape, call, request):
                    alike.append(call)
        if not alike:
            return request.seed
        self.pairings *= len(alike)
        self._pairing, k = divmod(self._pairing, len(alike))
        self._given.add(alike[k].call)
        return alike[k].seed or 0

    async def granted(self, request: Request, budget: Budget) -> int | None:
        """Return how many tokens of the episode's limit this request gets in the replay, or None if it wasn't recorded.

        A recorded request gets its recorded max_tokens if concurrent calls may have left only that many tokens.
        Otherwise it gets its own max_tokens. If a request wasn't recorded, it may have been refused because all tokens
        were spent. The method then waits until they are spent in the replay too, so that the result doesn't depend on
        the speed of the answers.
        """
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
        """Return a list that ends with the recorded call for this request, or None if no call is left."""
        found = self._recorded.get((request.path, request.seed))
        if found:
            return found
        _, named, conversation = request.cache_key.partition(f"/{request.path}/")
        for call in self._only.calls if self._only is not None else ():
            rest = self._recorded.get((call.by, call.seed))
            same = call.by == request.path and (not named or self._may_be(call, conversation))
            if same and rest and rest[-1][1].call == call.call:
                return rest
        return None

    def _may_be(self, call: Call, conversation: str) -> bool:
        """Return whether a request in this conversation may be the recorded call.

        An external program's conversation is named after its first messages. If the tape lacks the name, these messages
        have changed. The request is then matched anyway, so that the comparison can show what changed.
        """
        if call.conversation == conversation or not self.patience or self._only is None:
            return call.conversation == conversation
        return all(other.conversation != conversation for other in self._only.calls)

    def check(self, tape: Tape, call: Call, request: Request) -> None:
        """Raise Diverged if the request isn't the recorded one."""
        for found, cause, sentence in _request_differences(tape, call, request):
            raise Diverged(call_divergence(tape, call, found, cause, f"call {call.call} by {call.by!r}: {sentence}"))

    async def answer(self, call: Call, request: Request) -> Completion:
        """Return the recorded answer after all answers that were recorded before it.

        The listener gets all tokens before this wait. In the recording, too, it got them before the answer.
        """
        found = recorded_answer(call)
        if request.listener is not None and found.ids:
            request.listener.tokens(found.ids)
        place = self._order.get(call.call, 0)
        await self._until(lambda: self._turn_of_answers >= place)
        self._answered.add(call.call)
        self._moved.set()
        while self._turn_of_answers < len(self._queue) and self._queue[self._turn_of_answers] in self._answered:
            self._turn_of_answers += 1
        if call.finish == "cancelled":
            # The agent cancelled this call during the recording, so this waits until the agent cancels it again.
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if request.on_partial is not None:
                    request.on_partial(found)
                raise
        if call.finish == "error":
            raise recorded_error(call)
        return found

    async def _until(self, done: Callable[[], bool]) -> None:
        for _ in range(PATIENCE):
            if done():
                return
            await asyncio.sleep(0)
        if self.patience:
            try:
                async with asyncio.timeout(self.patience):
                    while not done():
                        self._moved.clear()
                        await self._moved.wait()
            except TimeoutError:
                self.overdue = True

    def forget(self, cache_key: str) -> None:
        """Do nothing, because this engine keeps nothing by key."""

    samplers: Mapping[str, Sampler] = {}
    """Empty, because recorded answers come from no copy of the weights."""

    async def sync_weights(self, state: Mapping[str, Tensor], version: str, mode: SyncMode = "reprefill") -> None:
        """Store only the version. The answers and the versions in their spans stay as recorded."""
        self.version = version

    async def close(self) -> None:
        """Do nothing, because there is nothing to release."""

    def skip(self, calls: Sequence[Call]) -> None:
        """Treat these calls as answered, for a replay that begins after them."""
        self._answered.update(call.call for call in calls)
        for left in self._recorded.values():
            left[:] = [item for item in left if item[1].call not in self._answered]


def _sampled(call: Call) -> int:
    """Return the number of sampled tokens in a call, counted as `LLM` counts them."""
    return len(call.completion) if call.completion is not None else call.usage.completion_tokens or 0


def recorded_answer(call: Call) -> Completion:
    """Return the completion that the engine returned during the recording.

    If a scripted engine returned only text, `LLM` made the ids on the tape, and they are left out.
    """
    scripted = call.completion is not None and call.logprobs is None and not call.spans
    return Completion(
        text=call.text,
        ids=None if scripted else call.completion,
        logprobs=call.logprobs,
        barred=call.barred,
        enforced=call.constraint is not None and call.constraint.enforced,
        spans=call.spans,
        finish=call.finish,
        tool_calls=call.tool_calls,
        usage=Usage() if scripted else call.usage,
    )


def recorded_error(call: Call) -> EngineError:
    """Return the error that ended a recorded call, with the same class name and message."""
    text = call.attempts[-1].error if call.attempts else None
    name, _, message = (text or "EngineError: the recorded call failed").partition(": ")
    for known in (PromptTooLong, GrammarRefused):
        if name == known.__name__:
            return known(message)
    return type(name if name.isidentifier() else "EngineError", (EngineError,), {})(message)


def _is_alike(tape: Tape, call: Call, request: Request) -> bool:
    """Return whether the request has the content of a recorded call. Its tokens follow from the content, and concurrent
    calls may have left it fewer tokens for its answer."""
    if call.keep_messages + len(call.new_messages) != len(request.messages):
        return False  # saves most comparisons in a long conversation
    sampling = request.sampling.model_copy(update={"max_tokens": call.sampling.max_tokens})
    asked = replace(request, seed=call.seed or 0, prompt=None, sampling=sampling)
    return next(_request_differences(tape, call, asked), None) is None


def _request_differences(tape: Tape, call: Call, request: Request) -> Iterator[tuple[Difference, Likely, str]]:
    then, now = call.messages, list(request.messages)
    if then != now:
        for difference in differences(then, now, "messages"):
            cause, sentence = _blame_messages(tape, call, then, now, difference)
            yield difference, cause, sentence
    offered, offers = tape.call_tools(call), request.tools
    if offered != offers:
        order = sorted(map(repr, offered or ())) == sorted(map(repr, offers or ()))
        sentence = "the same tools are offered in another order" if order else "other tools are offered"
        for difference in differences(list(offered or ()), list(offers or ()), "tools"):
            yield difference, Likely.TOOLS, sentence
    if tape.begin.sampling is not None and call.sampling != request.sampling:
        for difference in differences(call.sampling.model_dump(), request.sampling.model_dump(), "sampling"):
            yield difference, Likely.CODE, "the agent asks for other sampling settings"
    demanded, demands = (one and one.model_dump(exclude={"enforced"}) for one in (call.constraint, request.constraint))
    if demanded != demands:
        for difference in differences(demanded, demands, "constraint"):
            yield difference, Likely.CODE, "the agent demands another form of the answer"
    if call.seed != request.seed:
        yield (
            Difference("seed", call.seed, request.seed),
            Likely.ORDER,
            f"`seed` was {call.seed}, it is now {request.seed}: it is another call of that agent, or the tape "
            "records another sampling seed",
        )
    if request.prompt is not None and (ids := call.prompt) is not None:
        if ids != request.prompt:
            at = next(
                (k for k, (a, b) in enumerate(zip(ids, request.prompt, strict=False)) if a != b),
                min(len(ids), len(request.prompt)),
            )
            sentence = (
                f"the same messages are other token ids from position {at} on: the tokenizer, the chat template or "
                "the renderer's settings differ from the recording"
            )
            yield (
                Difference(f"prompt[{at}]", list(ids[at : at + 8]), list(request.prompt[at : at + 8])),
                Likely.RENDERING,
                sentence,
            )
        places = tape.call_places(call)
        if places != request.places:
            sentence = "the pictures of the prompt are at other tokens: the image processor differs from the recording"
            yield next(differences(places, request.places, "places")), Likely.RENDERING, sentence


def _blame_messages(
    tape: Tape, call: Call, then: list[Any], now: list[Any], difference: Difference
) -> tuple[Likely, str]:
    if sorted(map(repr, then)) == sorted(map(repr, now)):
        return Likely.ORDER, f"the messages are in another order, from `{difference.field}` on"
    others = [one for one in tape.calls if one.by == call.by and one.call != call.call]
    same = next((one.call for one in others if one.messages == now), None)
    if same is not None:
        return Likely.ORDER, f"the agent makes the request that it made in call {same}"
    at = int(difference.field.split("[")[1].split("]")[0])
    role = (then[at] if at < len(then) else now[at]).get("role")
    what = "the system prompt" if role == "system" else f"message {at} ({role})"
    return Likely.PROMPT, f"{what} is not the recorded one, at `{difference.field}`"


def _unrecorded(tape: Tape | None, request: Request) -> Divergence:
    if tape is None:
        sentence = (
            f"no tape has a call by {request.path!r} with the seed {request.seed} left: pass the tapes that were "
            "recorded with these seeds"
        )
    elif any(call.by == request.path for call in tape.calls):
        sentence = f"{request.path!r} calls the model more often than recorded"
    else:
        known = ", ".join(sorted({call.by for call in tape.calls})) or "none"
        sentence = f"{request.path!r} calls the model, but has no call on this tape (agents with calls: {known})"
    return Divergence(
        tape=tape.id if tape is not None else "",
        by=request.path,
        field="call",
        observed=clipped("", str(dict(request.messages[-1])) if request.messages else "")[1],
        cause=Likely.EXHAUSTED,
        sentence=sentence,
    )
