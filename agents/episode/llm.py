"""`LLM`: an agent's interface to its model, for one episode.

It takes the speaker from the tape, renders the conversation into the tokens that follow what was sampled before,
derives the seed, counts tokens, enforces limits and records every call with its attempts. An agent never sees more than
its own conversation.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import BaseModel, JsonValue

from ...tapes import Call, CauseType, Message, Sampling, Step, Tape, ToolCall
from ...tapes.common.arguments import check_arguments
from ...tapes.common.run_async import GRACE
from ...tapes.common.shared_loop import guest
from ...tapes.messages import part_of, said, video_in
from ...tapes.pictures import pictures_of
from ...tapes.records import Attempt
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
from ..rendering.renderer import Rendered
from ..rendering.tool_calls import read_tool_calls
from . import fire
from .clock import Clock
from .conversations import AUTHORED, Conversations, PendingCall
from .limits import LimitReached, Limits, TokenBudget
from .recorder import Recorder
from .seeds import derive_seed, seed_stream
from .timers import Timers

BACKOFF = 0.5
"""Seconds before the first retry; each further wait is twice as long."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's answer."""

    text: str
    """Without the turn-ending token; empty when the model ended at once."""
    finish: str
    """`stop`, `length`, `tool_calls` or `abort`; a `length` answer was cut off."""
    call: str
    """Id of the call on the tape."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The function calls in the answer, where tools were offered: read from the text, or parsed by the engine."""
    content: str = ""
    """The text around the calls; the whole text where there are none."""
    problem: str = ""
    """What is wrong with a call that can't be read, as sentences for the model; empty where all could be read. Yield it
    as `ParseError(problem=...)` and ask again."""
    chat_calls: tuple[Message, ...] = ()
    """All calls in the chat format (`CallsRead.chat`)."""

    def __str__(self) -> str:
        return self.text


class ModelFailed(Exception):
    """The engine failed, and so did its retries. The engine's error is the `__cause__`."""


class RenderFailed(Exception):
    """The conversation can't be rendered as tokens: the fault of the environment or agent that wrote its content."""


class LLM(Clock):
    """`reply = await llm(tape, system="...")`. Built by `rollout`, one for each episode."""

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
        """retries: further requests after an engine's error that may pass."""
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
        """Seed stream -> number of its newest call."""
        self._cache_keys: set[str] = set()
        self._delegated: list[tuple[Step, str]] = []
        """(step, path) of steps that a sub-agent is about to yield."""
        self._read: list[tuple[Step, str]] = []
        """(step, call) where the agent names the call that a step was read from."""
        self._unread: dict[str, list[str]] = {}
        """Path -> its calls that no step was read from yet."""
        self._newest: dict[str, str] = {}
        """Path -> its newest answered call of this turn."""
        self.asked = 0
        """Questions put to the engine in this episode."""
        self.latched: LimitReached | None = None
        """The limit that was reached; every later call raises it again."""
        self.stopped: EngineStopped | None = None
        """The error after which no engine answers any more; the episode and the run end with it."""

    @property
    def sampled(self) -> int:
        """Tokens sampled in this episode, as far as the engine reports them."""
        return self._budget.used

    @sampled.setter
    def sampled(self, tokens: int) -> None:
        self._budget.used = tokens

    async def __call__(
        self,
        tape: Tape,
        *,
        system: str | None = None,
        messages: Sequence[Message] | None = None,
        tools: Sequence[type[BaseModel] | dict[str, JsonValue]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        conversation: str = "",
        sampling: Sampling | None = None,
        seed: int | None = None,
        listener: Listener | None = None,
    ) -> Reply:
        """Ask the model, as the agent whose view `tape` is.

        The prompt is `system` and the tape's conversation, or `messages` unchanged. `tools` are step classes or
        function schemas. `conversation` names a further conversation of the same agent, with its own history and seeds.
        Questions that one agent asks concurrently need one name each, or their order depends on the event loop.
        `sampling` replaces the episode's for this call, and `seed` is mixed into the call's own. `listener` receives
        tokens while they are sampled, for display only: not every engine reports them.
        Waits where concurrent calls hold the rest of a token limit. Raises LimitReached (let it pass), ModelFailed and
        RenderFailed.
        """
        path = tape.scope
        if self.engine is None:
            raise ValueError(f"agent {path!r} asks a model, but the rollout has no engine: pass `engine=` to rollout")
        await self._check_limits()
        asked = messages if messages is not None else tape.messages(system)
        if self.recorder.shown or (self.engine.renderer is not None and "pictures" in self.engine.can):
            self._check_sight(asked)
        schemas = tuple(tool_schema(tool) for tool in tools) if tools else None
        rendered = self._render(path, conversation, asked, schemas)
        self.asked += 1
        rendered, sampling = self._fit(sampling or self.sampling, temperature, max_tokens, rendered)
        call = self.recorder.new_call_id()
        stream = seed_stream(path, conversation)
        number = self._numbers[stream] = self._numbers.get(stream, -1) + 1
        cache_key = f"{self.recorder.tape}/{path}/{conversation}"
        self._cache_keys.add(cache_key)
        partial: list[Completion] = []
        safe_listener = _SafeListener(listener) if listener is not None else None
        timed = _Timed(self.timers)
        request = Request(
            messages=asked,
            prompt=rendered.ids if rendered is not None else None,
            places=rendered.places if rendered is not None else (),
            sampling=sampling,
            seed=derive_seed(self._seed, stream, number, *(() if seed is None else (seed,))),
            tools=schemas,
            path=path,
            cache_key=cache_key,
            on_partial=partial.append,
            on_start=timed.start,
            picture=self.recorder.picture,
            listener=safe_listener,
        )
        pending = PendingCall(call, path, conversation, request, rendered, self._conversations.tools_record(schemas))
        held, task = 0, asyncio.current_task()
        assert task is not None
        self._asking.add(task)
        try:
            held = await self._take_tokens(request)
            pending.request = _limited(request, held)
            completion, attempts = await self._complete(pending.request, timed)
        except asyncio.CancelledError:
            # Recorded also without an answer: the agent asked, and a replay must know that it gave the question up.
            self._write(pending, partial[0] if partial else Completion(text=None), (), "cancelled")
            raise
        except _Failed as failure:
            self._write(pending, Completion(text=None), failure.attempts, "error")
            if isinstance(failure.error, EngineStopped):
                self.stopped = failure.error
            if isinstance(failure.error, PromptTooLong):
                raise self._latch(CauseType.CONTEXT, str(failure.error)) from failure.error
            raise ModelFailed(error_text(failure.error)) from failure.error
        else:
            self._write(pending, completion, attempts, completion.finish)
            self._unread.setdefault(path, []).append(call)
            self._newest[path] = call
            if self._budget.spent:
                self._latch_tokens()
        finally:
            # On every way out, also cancellation: tokens that are never returned would block concurrent calls forever.
            self._budget.give(held)
            self._asking.discard(task)
        if safe_listener is not None and safe_listener.error is not None:
            raise safe_listener.error
        text, native = completion.text or "", completion.tool_calls or ()
        if schemas is None and not native:
            return Reply(text, completion.finish, call, content=text)
        # A template may open a thought in the prompt, as DeepSeek's does.
        thinking = rendered is not None and rendered.text.rstrip().endswith("<think>")
        read = read_tool_calls(text, schemas or (), native=native, thinking=thinking)
        return Reply(text, completion.finish, call, read.calls, read.content, read.problem, read.chat)

    # Attribution: the rollout asks, for each yielded step, which path yielded it and which calls it was read from

    def spoke(self, step: Step, path: str) -> None:
        """`delegate` calls this: the sub-agent at `path` is about to yield this step."""
        if not any(seen is step for seen, _ in self._delegated):
            self._delegated.append((step, path))

    def read_from(self, step: Step, call: str) -> None:
        """The step, about to be yielded, was read from that call alone, whatever else was asked meanwhile."""
        self._read.append((step, call))

    def attribute(self, step: Step, outermost: str) -> tuple[str, tuple[tuple[str, int, int], ...]]:
        """(path, calls) of a step that was just yielded. A step without new calls in its turn shares the newest one."""
        path = next((p for seen, p in self._delegated if seen is step), outermost)
        self._delegated.clear()
        source = next((call for seen, call in self._read if seen is step), None)
        if source is not None:
            self._read = [entry for entry in self._read if entry[0] is not step]
            self._unread[path] = [call for call in self._unread.get(path, ()) if call != source]
            calls = [source]
        else:
            calls = self._unread.pop(path, None) or []
            if not calls and path in self._newest:
                calls = [self._newest[path]]
        return path, tuple((call, 0, self._completion_tokens(call)) for call in calls)

    def end_turn(self) -> None:
        """The turn's Action is done: steps that follow come from new calls."""
        self._newest.clear()
        self._unread.clear()

    def authored(self, tape: Tape, step: Step, path: str) -> tuple[tuple[str, int, int], ...]:
        """Record a step that the agent wrote without a model (a scripted agent's) as a call; return the step's calls.

        With a renderer the call has tokens, so the tape can be trained on like one that a model wrote.
        """
        messages = tape.messages(path=path)
        rendered = self._render(path, "", messages, None)
        call = self._conversations.write_authored(path, messages, said(step), rendered)
        if rendered is not None:
            self._newest[path] = call
            self._unread.pop(path, None)
        return ((call, 0, self._completion_tokens(call)),)

    def _completion_tokens(self, call: str) -> int:
        return len(self.recorder.log.call(call).completion or ())

    # Forks, replays, the end

    def inherit(self, prefix: Tape) -> None:
        """Continue the conversations and the seed streams of a fork's prefix."""
        calls: list[Call] = []
        tape: Tape | None = prefix
        while tape is not None:
            calls[:0] = tape.calls
            tape = tape.parent
        for call in calls:
            if call.engine != AUTHORED:  # an authored call took no seed
                stream = seed_stream(call.by, call.conversation)
                self._numbers[stream] = self._numbers.get(stream, -1) + 1
        self._conversations.inherit(prefix, calls)

    def number(self, stream: str, n: int) -> None:
        """Set the number of the stream's newest call (from 0), for a replay that begins at a later turn."""
        self._numbers[stream] = n

    async def close(self) -> None:
        """The episode has ended: end the calls that helper tasks still make, and let the engine drop the KV cache."""
        self._closed = True
        asking = [task for task in self._asking if task is not asyncio.current_task()]
        for task in asking:
            task.cancel()
        if asking:  # each records what was sampled
            await asyncio.wait(asking, timeout=GRACE)
        if self.engine is not None:
            for key in self._cache_keys:
                self.engine.forget(key)

    # Inside

    def _check_sight(self, messages: Sequence[Message]) -> None:
        """RenderFailed where the messages hold a picture or video and the engine can't see, or a part that a text
        wrote."""
        assert self.engine is not None
        blind, renderer, known = "pictures" not in self.engine.can, self.engine.renderer, self.recorder.shown
        for part in (part for message in messages for part in content_parts(message)):
            shown = video_in(part) or known.get(str(part.get("media")))
            if blind and shown is not None:
                raise RenderFailed(f"the engine {self.engine.name!r} can't see, and the prompt holds {shown}: {BLIND}")
            if renderer is None or part.get("type") not in ("image", "video"):
                continue
            if shown is None or part != part_of(shown) or any(one.name not in known for one in pictures_of(shown)):
                raise RenderFailed(
                    f"the part {part!r:.200} is not that of a picture which a step shows, nor of a video"
                )

    async def _check_limits(self) -> None:
        if self._closed:
            raise RuntimeError("the episode has ended: a task that outlives its turn can't ask the model")
        if self.stopped is not None:
            await asyncio.sleep(0)
            raise ModelFailed(error_text(self.stopped)) from self.stopped
        if self._limits.calls is not None and self.asked >= self._limits.calls and self.latched is None:
            self._latch(CauseType.TURNS, f"{self.asked} questions asked, the limit is {self._limits.calls}")
        if self.latched is not None:
            await asyncio.sleep(0)  # an agent that swallows the limit and asks again must not block the event loop
            raise self.latched

    def _latch(self, limit: CauseType, message: str) -> LimitReached:
        return self.latch(LimitReached(limit, message))

    def latch(self, reached: LimitReached) -> LimitReached:
        """From now on every call raises `reached`, unless an earlier limit was reached."""
        self.latched = self.latched or reached
        return self.latched

    def _latch_tokens(self) -> LimitReached:
        return self._latch(CauseType.TOKENS, f"{self.sampled} tokens sampled, the limit is {self._limits.tokens}")

    async def _take_tokens(self, request: Request) -> int:
        """Take tokens of the episode's limit for this request. LimitReached where all are spent.

        In a replay the engine says how many the recorded call had: how long a call waited for the tokens of others
        depended on how long their answers took, which no tape records.
        """
        if self._recorded is not None and self._limits.tokens is not None:
            recorded = await self._recorded.granted(request, self._budget)
            if recorded is not None:
                return self._budget.hold(recorded)
        held = await self._budget.take(request.sampling.max_tokens)
        if held < 1:
            self.asked -= 1
            raise self.latched or self._latch_tokens()
        return held

    def _render(
        self, path: str, conversation: str, messages: Sequence[Message], tools: tuple[dict[str, JsonValue], ...] | None
    ) -> Rendered | None:
        try:
            return self._conversations.render(path, conversation, messages, tools)
        except ValueError as error:
            raise RenderFailed(str(error)) from error

    def _fit(
        self, base: Sampling, temperature: float | None, max_tokens: int | None, rendered: Rendered | None
    ) -> tuple[Rendered | None, Sampling]:
        """The prompt of one call, cut where the limits say so, and its sampling, with at most as many tokens as the
        context has room for."""
        wanted = base.max_tokens if max_tokens is None else max_tokens
        context = min(
            (c for c in (self._limits.context, self.engine.context if self.engine else None) if c), default=None
        )
        most, keep = self._limits.prompt_tokens, self._limits.keep_prompt
        if keep is not None and context is not None:
            most = min(most or context, context - wanted)
        if most is not None and rendered is None:
            raise ModelFailed("limits.prompt_tokens and limits.keep_prompt need an engine of tokens: remove them")
        if most is not None and rendered is not None and len(rendered.ids) > most:
            if keep is None or most < 1:
                sizes = f"the prompt has {len(rendered.ids)} tokens, and limits and context leave {max(most, 0)} for it"
                raise self._latch(CauseType.CONTEXT, sizes)
            rendered = rendered.cut_to(most, keep)
        if context is not None and rendered is not None:
            room = context - len(rendered.ids)
            if room < 1:
                raise self._latch(
                    CauseType.CONTEXT, f"the prompt has {len(rendered.ids)} tokens, the context {context}"
                )
            wanted = min(wanted, room)
        if temperature is None and wanted == base.max_tokens:
            return rendered, base
        update = {"max_tokens": wanted, "temperature": base.temperature if temperature is None else temperature}
        return rendered, base.model_copy(update=update)

    async def _complete(self, request: Request, timed: _Timed) -> tuple[Completion, tuple[Attempt, ...]]:
        """The completion and every attempt at it. Raises _Failed when the error won't pass or retries are used up."""
        assert self.engine is not None
        attempts: list[Attempt] = []
        timed.call()
        was = guest.get()
        guest.set(False)  # the engine isn't part of the agent that asks it
        try:
            while True:
                try:
                    completion = await fire.complete(self.engine, request)
                except EngineError as error:
                    attempts += error.attempts or (timed.attempt(error_text(error)),)
                    if isinstance(error, PromptTooLong) or not error.retry or len(attempts) > self._retries:
                        raise _Failed(error, tuple(attempts)) from error
                    if request.listener is not None:
                        request.listener.again()
                    await asyncio.sleep(BACKOFF * 2 ** (len(attempts) - 1))
                    timed.begin()
                else:
                    attempts += completion.attempts or (timed.attempt(),)
                    return self._stopped(completion, request.sampling), tuple(attempts)
        finally:
            guest.set(was)
            timed.end()

    def _stopped(self, completion: Completion, sampling: Sampling) -> Completion:
        """The completion, cut at the first stop string."""
        stops: Any = sampling.extra.get("stop")
        if not stops:
            return completion
        renderer = self._conversations.renderer
        return cut_at_stop(completion, stops, renderer.decode if renderer is not None else None)

    def _write(
        self, pending: PendingCall, completion: Completion, attempts: tuple[Attempt, ...], finish: Finish
    ) -> None:
        """Count the sampled tokens and record the call, however it ended.

        Only an answered call is attributed to later steps (see `__call__`): an agent never saw the other ones.
        """
        ids = completion.ids
        self.sampled += len(ids) if ids is not None else completion.usage.completion_tokens or 0
        self._conversations.write(pending, completion, attempts, finish=finish)


class _Failed(Exception):
    def __init__(self, error: EngineError, attempts: tuple[Attempt, ...]) -> None:
        super().__init__(str(error))
        self.error = error
        self.attempts = attempts


class _Timed:
    """One call and its attempts, on the episode's timers. An engine may report its start late, after a cancellation."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._over = False

    def call(self) -> None:
        """The call begins, with its first attempt."""
        self._timers.called()
        self.begin()

    def begin(self) -> None:
        """An attempt begins."""
        self._begun, self._queued = time.perf_counter(), None

    def start(self) -> None:
        """`Request.on_start`: the model works at the attempt."""
        if self._queued is None and not self._over:
            self._queued = time.perf_counter() - self._begun
            self._timers.worked(1)

    def attempt(self, error: str | None = None) -> Attempt:
        """The attempt, which has ended: what follows is no work of the model."""
        found = Attempt(seconds=time.perf_counter() - self._begun, error=error, queued=self._queued)
        self._wait()
        return found

    def end(self) -> None:
        """The call has ended."""
        self._wait()
        self._over = True
        self._timers.answered()

    def _wait(self) -> None:
        if self._queued is not None:
            self._queued = None
            self._timers.worked(-1)


class _SafeListener:
    """Passes tokens to an agent's listener until it raises, and keeps its first error.

    The engine calls it. An agent's error raised there would break the engine's loop for all episodes that share it.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self.error: Exception | None = None
        """What the listener raised."""

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


def _limited(request: Request, tokens: int) -> Request:
    """The request, for at most `tokens` tokens."""
    sampling = request.sampling
    if sampling.max_tokens <= tokens:
        return request
    update = {"max_tokens": tokens, "temperature": sampling.temperature}
    return replace(request, sampling=sampling.model_copy(update=update))


def tool_schema(tool: type[BaseModel] | dict[str, JsonValue]) -> dict[str, JsonValue]:
    """A function schema in the chat format: a dict unchanged; of a step class its kind, docstring and fields."""
    if isinstance(tool, dict):
        return tool
    schema = tool.model_json_schema()
    schema.pop("title", None)
    description = schema.pop("description", None) or ""
    function = {"name": getattr(tool, "kind", tool.__name__), "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def cut_at_stop(
    completion: Completion, stops: Sequence[str], decode: Callable[[Sequence[int]], str] | None
) -> Completion:
    """The completion up to the first stop string, for engines that only know stop ids. decode: ids -> text; None for an
    engine of texts.

    Sampling goes from left to right, so the kept ids are those that an engine with stop strings would have sampled. The
    text ends before the stop string; the ids include it, because the model chose them.
    """
    at = _first_stop(completion.text or "", stops)
    if at is None:
        return completion
    text = (completion.text or "")[:at]
    if completion.ids is None or decode is None:
        return replace(completion, text=text, finish="stop")
    ids = completion.ids
    # The shortest prefix with a stop string. A longer prefix contains every stop string of a shorter one, so bisection
    # is right.
    lengths = range(1, len(ids))
    n = 1 + bisect_left(lengths, True, key=lambda n: _first_stop(decode(ids[:n]), stops) is not None)
    return replace(
        completion,
        text=text,
        finish="stop",
        ids=ids[:n],
        logprobs=completion.logprobs[:n] if completion.logprobs is not None else None,
        spans=tuple((version, start, min(end, n)) for version, start, end in completion.spans if start < n),
    )


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
