"""`LLM` is an agent's interface to its model for one episode.

For each call, it takes the agent's path from the tape, renders a prompt that continues the tokens sampled earlier, and
derives the seed. It also counts tokens, enforces limits, and records the call with its attempts. An agent never sees
more than its own conversation.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, Literal, TypeVar, cast, get_args

from pydantic import JsonValue, ValidationError

from ...tapes import Action, Call, CauseType, Message, Sampling, Step, Tape, Thought
from ...tapes.common.arguments import check_arguments, shown, wrong_fields
from ...tapes.common.run_async import GRACE
from ...tapes.common.shared_loop import guest
from ...tapes.common.text import logger, warn_once
from ...tapes.errors import BadArgument
from ...tapes.messages import check_messages, part_of, said, video_in
from ...tapes.pictures import pictures_of
from ...tapes.records import Attempt, Constraint, Label
from ...tapes.steps import content_parts
from ..engines.engine import (
    BLIND,
    CapableEngine,
    Completion,
    Engine,
    EngineError,
    EngineStopped,
    Finish,
    Listener,
    PromptTooLong,
    Request,
    error_text,
)
from ..engines.team_engine import answering
from ..rendering.answer_grammar import Grammar, answer_grammar
from ..rendering.renderer import Rendered
from ..rendering.tool_calls import HermesReader, ToolLike, read_tool_calls, tool_schema
from . import fire
from .clock import Clock
from .conversations import AUTHORED, Conversations, PendingCall
from .limits import LimitReached, Limits, TokenBudget, shorter_prompts
from .recorder import Recorder
from .reply import Attribution, Reply, checked_call
from .seeds import derive_seed, seed_stream
from .stop_strings import cut_at_stop, stop_strings
from .timers import CallTimer, Timers

log = logger("agent")
StepT = TypeVar("StepT", bound=Step)

BACKOFF = 0.5
"""Seconds before the first retry. Each further wait is twice as long."""


class ModelFailed(Exception):
    """The engine failed, and so did its retries. The engine's error is the `__cause__`."""


class AgentFault(Exception):
    """The agent broke the contract of `act`: thoughts, then one Action, and no model call after it."""


class RenderFailed(Exception):
    """The environment or the agent wrote content that can't be rendered as tokens."""


class LLM(Clock):
    """`reply = await llm(tape, system="...")`. `rollout` creates one `LLM` for each episode."""

    @check_arguments
    def __init__(
        self,
        recorder: Recorder,
        engine: Engine | None,
        *,
        seed: int,
        limits: Limits,
        sampling: Sampling,
        retries: int = 2,
    ) -> None:
        """A call is retried at most `retries` times after engine errors that may be temporary."""
        super().__init__(recorder, seed)
        self.recorder, self.engine, self.sampling = recorder, engine, sampling
        self._recorded = cast(CapableEngine, engine) if engine is not None and "recorded" in engine.can else None
        self._conversations = Conversations(recorder, engine)
        self._limits = limits
        self._retries = retries
        self.timers = Timers(limits, engine)
        self._asking: set[asyncio.Task[Any]] = set()
        """Tasks with a call in flight."""
        self._closed = False
        self._budget = TokenBudget(limits.tokens)
        self._numbers: dict[str, int] = {}
        """Number of the newest call in each seed stream."""
        self._sent: Counter[int] = Counter()
        """Number of requests to each engine, by the engine's id (`Request.number`)."""
        self._cache_keys: set[str] = set()
        self.attribution = Attribution()
        self.acted = False
        """Whether the agent has yielded its action in this turn."""
        self.asked = 0
        """Number of questions that were put to the engine in this episode."""
        self.latched: LimitReached | None = None
        """The limit that was reached, or None. Every later call raises this limit again."""
        self.stopped: EngineStopped | None = None
        """The error after which the engine can't answer any request, or None. It ends the episode and the run."""

    @property
    def sampled(self) -> int:
        """Tokens sampled in this episode, if the engine reports them."""
        return self._budget.used

    @sampled.setter
    def sampled(self, tokens: int) -> None:
        self._budget.used = tokens

    @checked_call
    async def __call__(
        self,
        tape: Tape,
        *,
        system: str | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[ToolLike] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        conversation: str = "",
        sampling: Sampling | None = None,
        seed: int | None = None,
        constraint: Constraint | None = None,
        listener: Listener | None = None,
        on_prompt: Callable[[str], None] | None = None,
    ) -> Reply:
        """Ask the model as the agent that sees `tape`.

        The prompt is `system` followed by the tape's conversation. If `messages` are given, they are the whole prompt,
        and `system` isn't allowed. `tools` are functions, step classes or function schemas. `conversation` names a
        further conversation of the same agent, with its own history and seeds. If one agent asks several questions
        concurrently, each question needs its own conversation name. Otherwise the order of the calls would depend on
        the event loop. `sampling` replaces the episode's sampling parameters for this call, and `seed` is mixed into
        the call's own seed. `constraint` is the form that the answer must have. The call records whether the engine
        enforced it. `listener` receives tokens while they are sampled. Use it only for display, because not every
        engine reports tokens before the answer is complete. `on_prompt` receives the prompt's text before the first
        token, if the engine has a renderer. This call waits while concurrent calls hold all remaining tokens of a token
        limit. Raises BadArgument, LimitReached (don't catch it), ModelFailed and RenderFailed.
        """
        if self.engine is None:
            raise ValueError(
                f"agent {tape.scope!r} asks a model, but the rollout has no engine: pass `engine=` to rollout"
            )
        await self._check_limits()
        _check_types(
            system=(system, str),
            tools=(tools, list | tuple),
            conversation=(conversation or None, str),
            sampling=(sampling, Sampling),
            seed=(seed, Integral),
            constraint=(constraint, Constraint),
            listener=(listener, Listener),
            on_prompt=(on_prompt, Callable),
        )
        settings = sampling or self.sampling
        if sampling is not None or temperature is not None or max_tokens is not None:
            settings = checked_sampling("llm()", settings, temperature=temperature, max_tokens=max_tokens)
        if messages is not None and system is not None:
            raise BadArgument("llm() got system and messages: make the system prompt the first of the messages")
        asked = check_messages(messages) if messages is not None else tape.messages(system)
        if system is not None and len(asked) > 1 and asked[1]["role"] in ("system", "developer"):
            warn_once(
                log, f"{tape.scope!r} and the task both give a system prompt, and the model reads both: remove one"
            )
        stop_strings(settings)  # raises BadArgument
        schemas = tuple(tool_schema(tool) for tool in tools) if tools else None
        heard = _SafeListener(listener) if listener is not None else None
        question = _Question(self.engine, tape.scope, conversation, asked, schemas, settings, seed, constraint, heard)
        call = self._prepare(question)
        if on_prompt is not None and call.rendered is not None:
            on_prompt(call.rendered.text)
        reply = self._read(call, await self._sample(call))
        self.attribution.answered(tape.scope, reply)
        return reply

    def count(
        self, tape: Tape, messages: Sequence[Message], tools: tuple[dict[str, JsonValue], ...] | None, conversation: str
    ) -> int | None:
        """Return the number of tokens in the prompt that a call with these arguments would have. None if the engine has
        no renderer. Raises RenderFailed."""
        rendered = self._render(tape.scope, conversation, messages, tools)
        return None if rendered is None else len(rendered.ids)

    # Attribution: for each yielded step, the rollout asks which path yielded it and which call it was made of

    def spoke(self, step: Step, path: str) -> None:
        """Remember that the sub-agent at `path` is about to yield this step. `delegate` calls this method."""
        self.attribution.spoke(step, path)

    def read_from(self, step: StepT, reply: Reply | str) -> StepT:
        """Name the answer that the agent made `step` of, and return the step: `yield llm.read_from(Move(dx=1), reply)`.

        The next prompt shows this answer, as it was sampled, as the agent's own. Without a name, an answer is found by
        its text. `reply` may be the id of a call.
        """
        self.attribution.name(step, reply if isinstance(reply, str) else reply.call)
        return step

    def label(self, reply: Reply, use: Literal["agent", "auxiliary", "discarded"]) -> None:
        """Label an answer. RL doesn't train on an `auxiliary` or `discarded` answer, and imitation doesn't either."""
        self.recorder.add_layer(Label(tape=self.recorder.tape, call=reply.call, use=use, reason="declared"))

    def attribute(self, step: Step, outermost: str) -> tuple[str, tuple[tuple[str, int, int], ...]]:
        """Return the path of the agent that yielded `step` just now, and the call that the step was made of, if any.
        `outermost` is the path of the episode's own agent, which is used if no sub-agent yielded the step.

        If the agent made no call in this turn, a call is recorded for the step.
        """
        path, call = self.attribution.find(step, outermost)
        if call is None and not self.attribution.asked(path) and not (isinstance(step, Thought) and step.said_back):
            call = self._author(step, path)
        elif call is None and isinstance(step, Action) and (calls := self.attribution.idle(path)):
            self._warn_of(path, calls)
        if call is None:
            return path, ()
        self._conversations.take(path, call)
        return path, ((call, 0, len(self.recorder.log.call(call).completion or ())),)

    def end_turn(self) -> None:
        """Forget the turn's calls, so that later steps are attributed only to calls in their own turn."""
        self.attribution.end_turn()
        self.acted = False

    def _author(self, step: Step, path: str) -> str:
        """Record a call for a step that the agent wrote without a model. Return the call's id.

        With a renderer, the call has token ids. Training can then use the tape as if a model had written it.
        """
        messages = Tape(self.recorder.log).messages(path=path)
        return self._conversations.write_authored(path, messages, said(step), self._render(path, "", messages, None))

    def _warn_of(self, path: str, calls: int) -> None:
        warn_once(
            log,
            f"agent {path!r}: {calls} call{'s' * (calls > 1)} in this turn, and the action is the text of none: name "
            "its call with `yield llm.read_from(action, reply)`; without a name, the model reads the action itself "
            "as its answer",
        )

    # Forks, replays, the end

    def inherit(self, prefix: Tape) -> None:
        """Continue the conversations and the seed streams of `prefix`, which is the tape that a fork begins with."""
        calls: list[Call] = []
        tape: Tape | None = prefix
        while tape is not None:
            calls[:0] = tape.calls
            tape = tape.parent
        for call in calls:
            if call.engine != AUTHORED:  # an authored call used no seed
                stream = seed_stream(call.by, call.conversation)
                self._numbers[stream] = self._numbers.get(stream, -1) + 1
                if self.engine is not None:
                    self._sent[id(answering(self.engine, call.by))] += 1
        self._conversations.inherit(prefix, calls)

    def number(self, stream: str, n: int) -> None:
        """Set the number (from 0) of the newest call in a seed stream. A replay that begins at a later turn needs this,
        because the seed of each call depends on its number."""
        self._numbers[stream] = n

    async def close(self) -> None:
        """Cancel the calls that the agent left in flight, and let the engine drop the episode's KV cache."""
        self._closed = True
        asking = [task for task in self._asking if task is not asyncio.current_task()]
        for task in asking:
            task.cancel()
        if asking:  # each cancelled call records its sampled tokens
            await asyncio.wait(asking, timeout=GRACE)
        if self.engine is not None:
            for key in self._cache_keys:
                self.engine.forget(key)

    # Inside

    async def _check_limits(self) -> None:
        if self._closed:
            raise RuntimeError("the episode has ended: a task that outlives its turn can't ask the model")
        if self.stopped is not None:
            await asyncio.sleep(0)
            raise ModelFailed(error_text(self.stopped)) from self.stopped
        if self._limits.calls is not None and self.asked >= self._limits.calls and self.latched is None:
            self._latch(CauseType.TURNS, f"{self.asked} questions asked, the limit is {self._limits.calls}")
        if self.acted:
            raise AgentFault("the agent asked the model after its action: the turn ends with the action")
        if self.latched is not None:
            await asyncio.sleep(0)  # an agent that swallows the limit and asks again must not block the event loop
            raise self.latched

    def _latch(self, limit: CauseType, message: str) -> LimitReached:
        return self.latch(LimitReached(limit, message))

    def latch(self, reached: LimitReached) -> LimitReached:
        """Remember the first limit that the episode reaches, and return it. Every later call raises this limit.
        `reached` is a newly reached limit, which counts only if it is the first."""
        self.latched = self.latched or reached
        return self.latched

    def _latch_tokens(self) -> LimitReached:
        return self._latch(CauseType.TOKENS, f"{self.sampled} tokens sampled, the limit is {self._limits.tokens}")

    def _failed(self, error: EngineError) -> ModelFailed | LimitReached:
        """Return LimitReached if the prompt was too long, and ModelFailed for any other error of the engine."""
        if isinstance(error, EngineStopped):
            self.stopped = error
        if isinstance(error, PromptTooLong):
            return self._latch(CauseType.CONTEXT, str(error))
        return ModelFailed(error_text(error))

    def _render(
        self, path: str, conversation: str, messages: Sequence[Message], tools: tuple[dict[str, JsonValue], ...] | None
    ) -> Rendered | None:
        try:
            return self._conversations.render(path, conversation, messages, tools)
        except ValueError as error:
            raise RenderFailed(str(error)) from error

    # One call: `_prepare` makes its request, `_sample` gets and records the answer, `_read` makes the reply

    def _prepare(self, question: _Question) -> _AskedCall:
        """Render the prompt, fit it into the limits, and number the call. Raises RenderFailed and LimitReached."""
        engine, path, conversation = question.engine, question.path, question.conversation
        if self.recorder.shown or (engine.renderer is not None and "pictures" in engine.can):
            self._check_sight(question)
        rendered = self._render(path, conversation, question.messages, question.tools)
        self.asked += 1
        rendered = self._fit(question, rendered)
        call = self.recorder.new_call_id()
        stream = seed_stream(path, conversation)
        number = self._numbers[stream] = self._numbers.get(stream, -1) + 1
        seeds = partial(_seed, self._seed, stream, question.seed)
        answers = id(answering(engine, path))
        self._sent[answers] += 1
        cache_key = f"{self.recorder.tape}/{path}/{conversation}"
        self._cache_keys.add(cache_key)
        timer, until_cancelled = CallTimer(self.timers), list[Completion]()
        request = Request(
            messages=question.messages,
            prompt=rendered.ids if rendered is not None else None,
            places=rendered.places if rendered is not None else (),
            sampling=question.sampling,
            seed=seeds(number),
            tools=question.tools,
            constraint=question.constraint,
            grammar=_grammar(question, rendered),
            path=path,
            number=self._sent[answers] - 1,
            cache_key=cache_key,
            on_partial=until_cancelled.append,
            on_start=timer.start,
            picture=self.recorder.picture,
            listener=question.listener,
        )
        if self._recorded is not None:
            request = replace(request, seed=self._recorded.seed_of(request, seeds))
        tools = self._conversations.tools_record(question.tools)
        return _AskedCall(call, path, conversation, request, rendered, tools, engine, timer, until_cancelled)

    def _check_sight(self, question: _Question) -> None:
        """Raise RenderFailed if the messages contain a picture or video and the engine can't see. Also raise it if no
        step or request has shown the picture or video, for example because a model wrote this part of the message."""
        engine, known = question.engine, self.recorder.shown
        for part in (part for message in question.messages for part in content_parts(message)):
            shown = video_in(part) or known.get(str(part.get("media")))
            if "pictures" not in engine.can and shown is not None:
                raise RenderFailed(f"the engine {engine.name!r} can't see, and the prompt holds {shown}: {BLIND}")
            if engine.renderer is None or part.get("type") not in ("image", "video"):
                continue
            plain = {name: value for name, value in part.items() if name != "detail"}  # a request's, for a hosted model
            if shown is None or plain != part_of(shown) or any(one.name not in known for one in pictures_of(shown)):
                raise RenderFailed(f"no step shows the picture or video of the part {part!r:.200}")

    def _fit(self, question: _Question, rendered: Rendered | None) -> Rendered | None:
        """Fit the question into the limits, and return its prompt. If `Limits.keep_prompt` is set, a prompt that is too
        long is cut. max_tokens is reduced to the space that the prompt leaves in the context."""
        limits, base = self._limits, question.sampling
        wanted = base.max_tokens
        context = min(filter(None, (limits.context, question.engine.context)), default=None)
        most, keep = limits.prompt_tokens, limits.keep_prompt
        if keep is not None and context is not None:
            most = min(most or context, context - wanted)
        if most is not None and rendered is None:
            raise ModelFailed(
                f"Limits.prompt_tokens and Limits.keep_prompt count tokens, and the engine {question.engine.name!r} "
                "works with text only: remove them"
            )
        if most is not None and rendered is not None and len(rendered.ids) > most:
            rendered = self._shortened(question, rendered, most)
        if context is not None and rendered is not None:
            room = context - len(rendered.ids)
            if room < 1:
                sizes = f"the prompt has {len(rendered.ids)} tokens, the context {context}"
                raise self._latch(CauseType.CONTEXT, sizes)
            wanted = min(wanted, room)
        if wanted != base.max_tokens:
            question.sampling = base.model_copy(update={"max_tokens": wanted})
        return rendered

    def _shortened(self, question: _Question, whole: Rendered, most: int) -> Rendered:
        """Leave out as few messages as a prompt of `most` tokens needs, and return this prompt. Raises LimitReached."""
        keep = self._limits.keep_prompt
        prompts = list(shorter_prompts(question.messages, keep)) if keep is not None else []

        def within(messages: Sequence[Message]) -> Rendered | None:
            found = self._render(question.path, question.conversation, messages, question.tools)
            return found if found is not None and len(found.ids) <= most else None

        at = bisect_left(prompts, True, key=lambda messages: within(messages) is not None)
        found = within(prompts[at]) if at < len(prompts) else None
        if found is None:
            least = " without the messages that keep_prompt may leave out" if prompts else ""
            sizes = f"the prompt has {len(whole.ids)} tokens, and limits and context leave {max(most, 0)} for it{least}"
            raise self._latch(CauseType.CONTEXT, sizes)
        left_out = len(question.messages) - len(prompts[at])
        question.messages = prompts[at]
        return replace(found, cut=len(whole.ids) - len(found.ids), cut_messages=left_out)

    async def _sample(self, call: _AskedCall) -> Completion:
        """Sample the answer within the episode's token limit, and record the call, however it ends.

        Raises ModelFailed, LimitReached, and the first error that the caller's listener raised.
        """
        task = asyncio.current_task()
        assert task is not None
        held = 0
        self._asking.add(task)
        try:
            held = await self._take_tokens(call.request)
            call.request = _limited(call.request, held)
            completion, attempts = await self._complete(call)
        except asyncio.CancelledError:
            # The call is recorded even without an answer: a replay must know that the agent asked and gave up.
            found = call.until_cancelled[0] if call.until_cancelled else Completion(text=None)
            self._record(call, found, (), "cancelled")
            raise
        except _Failed as failure:
            self._record(call, Completion(text=None), failure.attempts, "error")
            raise self._failed(failure.error) from failure.error
        else:
            self._record(call, completion, attempts, completion.finish)
            if self._budget.spent:
                self._latch_tokens()
        finally:
            # This must also run after a cancellation. Tokens that are never returned would block concurrent calls
            # forever.
            self._budget.give(held)
            self._asking.discard(task)
        listener = call.request.listener
        if isinstance(listener, _SafeListener) and listener.error is not None:
            raise listener.error
        return completion

    async def _take_tokens(self, request: Request) -> int:
        """Take tokens for this call from the episode's limit, and return their number. Raises LimitReached if all are
        spent.

        In a replay, the engine decides how many tokens the call gets, from the recorded call. This number can't be
        computed again, because it depended on how long concurrent answers took, and no tape records that.
        """
        if self._recorded is not None and self._limits.tokens is not None:
            recorded = await self._recorded.granted(request, self._budget)
            if recorded is not None:
                return self._budget.hold(recorded)
        held = await self._budget.take(request.sampling.max_tokens)
        if held < 1:
            self.asked -= 1  # the engine wasn't asked
            raise self.latched or self._latch_tokens()
        return held

    async def _complete(self, call: _AskedCall) -> tuple[Completion, tuple[Attempt, ...]]:
        """Return the completion and all attempts. Raises _Failed if a retry wouldn't help or all retries failed."""
        request, timer = call.request, call.timer
        attempts: list[Attempt] = []
        timer.call()
        was = guest.get()
        guest.set(False)  # the engine isn't part of the agent that asks it
        try:
            while True:
                try:
                    completion = await fire.complete(call.engine, request)
                except EngineError as error:
                    attempts += error.attempts or (timer.attempt(error_text(error)),)
                    if isinstance(error, PromptTooLong) or not error.retry or len(attempts) > self._retries:
                        raise _Failed(error, tuple(attempts)) from error
                    if request.listener is not None:
                        request.listener.again()
                    await asyncio.sleep(BACKOFF * 2 ** (len(attempts) - 1))
                    timer.begin()
                else:
                    attempts += completion.attempts or (timer.attempt(),)
                    return _stopped(call, completion), tuple(attempts)
        finally:
            guest.set(was)
            timer.end()

    def _record(self, call: _AskedCall, completion: Completion, attempts: tuple[Attempt, ...], finish: Finish) -> None:
        ids = completion.ids
        self._budget.used += len(ids) if ids is not None else completion.usage.completion_tokens or 0
        self._conversations.write(call, completion, attempts, finish=finish)

    def _read(self, call: _AskedCall, completion: Completion) -> Reply:
        """Return the agent's reply. It has function calls if tools were offered or the engine parsed some."""
        text, cut = completion.text or "", completion.finish in ("length", "abort")
        renderer, prompt = call.engine.renderer, call.rendered.text if call.rendered is not None else ""
        native, tools = completion.tool_calls, call.request.tools
        schemas = None if native else tools
        if renderer is None:
            read = HermesReader().read(text, schemas, prompt=prompt, cut=cut)
        else:
            read = renderer.read(text, schemas, ids=completion.ids, prompt=prompt, cut=cut)
        if native:
            called = read_tool_calls(text, tools or (), native=native, cut=cut)
            read = replace(called, reasoning=read.reasoning, answer=read.answer)
        return Reply(
            text,
            completion.finish,
            call.call,
            read.calls,
            read.content,
            read.problem,
            read.chat,
            read.reasoning,
            read.answer,
        )


@dataclass(slots=True)
class _Question:
    """What an agent asks. `LLM` may shorten the messages and reduce max_tokens, to fit them into the limits."""

    engine: Engine
    path: str
    conversation: str
    messages: Sequence[Message]
    tools: tuple[dict[str, JsonValue], ...] | None
    sampling: Sampling
    seed: int | None
    constraint: Constraint | None
    listener: _SafeListener | None


@dataclass(slots=True)
class _AskedCall(PendingCall):
    """A call that an engine answers."""

    engine: Engine
    timer: CallTimer
    until_cancelled: list[Completion]
    """The completion up to a cancellation. Empty if the engine reported no partial completion."""


def _grammar(question: _Question, rendered: Rendered | None) -> Grammar:
    """Return the grammar that the engine must enforce, or () if the engine or the model's format can't have one.

    With `first_temperature`, an answer is sampled in two requests, and a grammar describes a whole answer."""
    engine, constraint = question.engine, question.constraint
    if constraint is None or rendered is None or engine.renderer is None:
        return ()
    if "grammar" not in engine.can or question.sampling.first_temperature:
        return ()
    return answer_grammar(constraint, question.tools or (), engine.renderer, rendered.text)


def _stopped(call: _AskedCall, completion: Completion) -> Completion:
    """Return the completion, cut at the first stop string."""
    stops = stop_strings(call.request.sampling)
    if not stops:
        return completion
    renderer = call.engine.renderer
    return cut_at_stop(completion, stops, renderer.decode if renderer is not None else None)


def checked_sampling(caller: str, base: Sampling, **given: float | None) -> Sampling:
    """Return `base` with the values that a call gives. Raises BadArgument if a value is invalid. With it, an engine
    could fail for every request of a batch, and the record of the call couldn't be read."""
    try:
        return Sampling.model_validate({**vars(base), **{k: v for k, v in given.items() if v is not None}})
    except ValidationError as error:
        raise BadArgument(f"{caller}: {wrong_fields(error, Sampling)}") from error


def _check_types(**arguments: tuple[object, Any]) -> None:
    """Raise BadArgument if an argument, given as (value, type), has another type and isn't None."""
    for name, (value, kind) in arguments.items():
        if value is not None and not isinstance(value, kind):
            kinds = " or ".join(one.__name__ for one in get_args(kind) or (kind,))
            raise BadArgument(f"llm(): {name} is {shown(value)}; it must be of the type {kinds}")


class _Failed(Exception):
    def __init__(self, error: EngineError, attempts: tuple[Attempt, ...]) -> None:
        super().__init__(str(error))
        self.error = error
        self.attempts = attempts


class _SafeListener:
    """Passes tokens to an agent's listener until the listener raises an error, and keeps this error.

    The engine calls this object. If the listener's error reached the engine, it would break the engine's loop for all
    episodes that share the engine.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.error: Exception | None = None

    def tokens(self, ids: array[int]) -> None:
        self._call(self._listener.tokens, ids)

    def again(self) -> None:
        self._call(self._listener.again)

    def _call(self, method: Callable[..., None], *args: array[int]) -> None:
        if self.error is None:
            try:
                method(*args)
            except Exception as error:
                self.error = error


def _seed(seed: int, stream: str, mixed_in: int | None, number: int) -> int:
    return derive_seed(seed, stream, number, *(() if mixed_in is None else (mixed_in,)))


def _limited(request: Request, tokens: int) -> Request:
    sampling = request.sampling
    if sampling.max_tokens <= tokens:
        return request
    return replace(request, sampling=sampling.model_copy(update={"max_tokens": tokens}))
