"""The door: the one way from an agent to a model, for one episode.

It reads who speaks from the tape it is given, renders the conversation into the tokens that follow what was sampled
before, derives the seed, counts tokens, latches limits and records every call and attempt. It knows nothing of
environments, rewards or files, and never shows an agent more than its own conversation.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from ...tapes import Call, CauseType, Message, Sampling, Step, Tape
from ...tapes.messages import said, shared_prefix
from ...tapes.records import Attempt, Tools, Usage
from ..engines.engine import Completion, Engine, EngineError, Listener, PromptTooLong, Request, told
from . import fire
from .clock import Given, asker, derive_seed
from .guard import outside
from .limits import LimitReached, Limits, TokenBudget
from .listening import Hearing
from .recorder import Recorder
from .stop_strings import cut


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model answered."""

    text: str
    """Without the turn-ending token; empty when the model ended at once."""
    finish: str
    """`stop`, `length`, `tool_calls` or `abort`; a `length` answer was cut off."""
    call: str
    """Id of the call on the tape."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """Function calls that the engine parsed, in the chat format."""

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class TextTrack:
    """The leaf of a conversation with an engine of texts."""

    call: str
    messages: Sequence[Message]
    """The request's messages; the reply follows them."""
    reply: Message

    def shared(self, messages: Sequence[Message]) -> int:
        """How many leading messages of `messages` this conversation has, its reply included."""
        n = shared_prefix(messages, self.messages)
        if n == len(self.messages) and len(messages) > n and messages[n] == self.reply:
            return n + 1
        return n


class ModelFailed(Exception):
    """The engine failed and so did its retries: the model's fault. Carries the engine's error as its cause."""


class RenderFailed(Exception):
    """The conversation can't be made into tokens: what the environment or agent put in it, not the model."""


class LLM(Given):
    """`reply = await llm(tape, system="...")`. Built by `rollout`, one for each episode."""

    def __init__(
        self,
        recorder: Recorder,
        engine: Engine | None,
        *,
        seed: int,
        limits: Limits,
        sampling: Sampling,
        retries: int = 2,
        backoff: float = 0.5,
    ) -> None:
        super().__init__(recorder, seed)
        self._engine = engine
        self._limits = limits
        self._sampling = sampling
        self._retries = retries
        self._backoff = backoff
        self._calls: dict[str, int] = {}
        self._tracks: dict[tuple[str, str], list[Any]] = {}
        self._pending: dict[str, list[str]] = {}
        self._newest: dict[str, str] = {}
        self._spoken: list[tuple[Step, str]] = []
        self._tools: set[str] = set()
        self._keys: set[str] = set()
        self._read: list[tuple[Step, str]] = []
        self.asked = 0
        """Questions put to the engine in this episode."""
        self._budget = TokenBudget(limits.tokens)
        self.latched: LimitReached | None = None
        """The limit that was reached; every later call raises it again."""

    @property
    def sampled(self) -> int:
        """Tokens sampled in this episode, as far as the engine says."""
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
        tools: Sequence[type[BaseModel] | dict[str, Any]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        conversation: str = "",
        sampling: Sampling | None = None,
        seed: int | None = None,
        listener: Listener | None = None,
    ) -> Reply:
        """Ask the model, as the agent whose view `tape` is.

        The prompt is `system` and the tape's conversation, or `messages` as given. `tools` are step classes or
        function schemas. `conversation` names a second conversation of the same agent, with a history and seeds of its
        own; questions that one agent asks at the same time need one each, or their order is left to chance.
        `sampling` takes the place of the episode's for this call, and `seed` is mixed into the call's own.
        `listener` hears tokens while they are sampled, to show them: not every engine tells, so nothing may hang on it.
        Where a limit of tokens is taken up by what is under way, it waits until some of that has ended.
        Raises LimitReached (let it pass), ModelFailed, RenderFailed.
        """
        path = tape.scope
        if self._engine is None:
            raise ValueError(f"the agent {path!r} asked a model, but rollout was given no engine; pass engine=...")
        await self._check_limits()
        asked = messages if messages is not None else tape.messages(system)
        schemas = tuple(tool_schema(tool) for tool in tools) if tools else None
        rendered = self._render(path, conversation, asked, schemas)
        self.asked += 1
        sampling = self._fit(sampling or self._sampling, temperature, max_tokens, rendered)
        call = self._recorder.new_call_id()
        who = asker(path, conversation)
        number = self._calls[who] = self._calls.get(who, -1) + 1
        key = f"{self._recorder.tape}/{path}/{conversation}"
        self._keys.add(key)
        partial: list[Completion] = []
        hearing = Hearing(listener) if listener is not None else None
        request = Request(
            messages=asked,
            prompt=rendered.ids if rendered is not None else None,
            sampling=sampling,
            seed=derive_seed(self._seed, who, number, *(() if seed is None else (seed,))),
            tools=schemas,
            path=path,
            cache_key=key,
            on_partial=partial.append,
            listener=hearing,
        )
        write = _CallWriter(self, call, path, conversation, request, rendered, self._offered(schemas))
        held = 0
        try:
            held = await self._take(request)
            request = write.request = _within(request, held)
            completion, attempts = await self._ask(request)
        except asyncio.CancelledError:
            # Also without an answer: the question was asked, and a replay must know that it was given up.
            write(partial[0] if partial else Completion(text=None), (), finish="cancelled")
            raise
        except _Failed as failure:
            write(Completion(text=None), failure.attempts, finish="error")
            if isinstance(failure.error, PromptTooLong):
                raise self._latch(CauseType.CONTEXT, str(failure.error)) from failure.error
            raise ModelFailed(told(failure.error)) from failure.error
        else:
            write(completion, attempts, finish=completion.finish)
            if self._budget.spent:
                self._latch_tokens()
        finally:
            self._budget.give(held)
        if hearing is not None and hearing.error is not None:
            raise hearing.error
        return Reply(completion.text or "", completion.finish, call, completion.tool_calls or ())

    # Who spoke: rollout asks, for each yielded step, which path it came from and which calls it was read from

    def spoke(self, step: Step, path: str) -> None:
        """Called by `delegate`: this step, about to be yielded, is the sub-agent's."""
        if not any(seen is step for seen, _ in self._spoken):
            self._spoken.append((step, path))

    def read_from(self, step: Step, call: str) -> None:
        """This step, about to be yielded, was read from that call alone, whatever else was asked meanwhile."""
        self._read.append((step, call))

    def attribute(self, step: Step, outermost: str) -> tuple[str, tuple[tuple[str, int, int], ...]]:
        """(path, calls) of a step that was just yielded. A step of a turn without new calls shares the newest one."""
        path = next((p for seen, p in self._spoken if seen is step), outermost)
        self._spoken.clear()
        source = next((call for seen, call in self._read if seen is step), None)
        if source is not None:
            self._read = [entry for entry in self._read if entry[0] is not step]
            self._pending[path] = [call for call in self._pending.get(path, ()) if call != source]
            pending: list[str] | None = [source]
        else:
            pending = self._pending.pop(path, None) or None
        if pending is None and path in self._newest:
            pending = [self._newest[path]]
        calls = []
        for call in pending or ():
            record = self._recorder.log.call(call)
            calls.append((call, 0, len(record.completion or ())))
        return path, tuple(calls)

    def end_turn(self) -> None:
        """The turn's Action went to the environment: what is yielded from here on comes from new calls."""
        self._newest.clear()
        self._pending.clear()

    def authored(self, tape: Tape, step: Step, path: str) -> tuple[tuple[str, int, int], ...]:
        """Record words that no model was asked for (a scripted agent's) as a call, with tokens where there is a
        renderer: the same tape serves whoever wrote it."""
        reply = said(step)
        messages = tape.messages(path=path)
        call = self._recorder.new_call_id()
        renderer = self._engine.renderer if self._engine is not None else None
        if renderer is None:
            self._write_text(call, path, "", messages, Completion(text=reply["content"]), engine="authored")
            return ((call, 0, 0),)
        rendered = self._render(path, "", messages, None)
        request = Request(messages=messages, prompt=rendered.ids, sampling=Sampling(), seed=0)
        write = _CallWriter(self, call, path, "", request, rendered, None)
        tool_calls = reply.get("tool_calls")
        said_ = Completion(text=reply["content"], tool_calls=tuple(tool_calls) if tool_calls else None)
        write(said_, (), finish="stop", engine="authored")
        self._pending.pop(path, None)
        return ((call, 0, len(self._recorder.log.call(call).completion or ())),)

    def inherit(self, prefix: Tape) -> None:
        """Take over the conversations of a fork's prefix, so that its tokens stay the context of what follows."""
        renderer = self._engine.renderer if self._engine is not None else None
        calls: list[Call] = []
        tape: Tape | None = prefix
        while tape is not None:
            calls[:0] = tape.calls
            tape = tape.parent
        for call in calls:
            if call.engine != "authored":  # of those, nothing was asked
                who = asker(call.by, call.conversation)
                self._calls[who] = self._calls.get(who, -1) + 1
            if call.finish == "error" or (call.finish == "cancelled" and not call.completion):
                continue
            tracks = self._tracks.setdefault((call.by, call.conversation), [])
            messages = prefix.call_messages(call)
            if renderer is None:
                tracks.append(TextTrack(call.call, messages, call.reply))
            elif call.prompt is not None and call.completion is not None:
                tracks.append(
                    renderer.retrack(
                        call=call.call,
                        messages=[*messages, call.reply],
                        tools=prefix.call_tools(call),
                        ids=prefix.call_prompt(call) + call.completion,
                        completion=call.completion,
                    )
                )

    def number(self, who: str, n: int) -> None:
        """The newest question of that `asker` was its n-th, counted from 0: for a replay that begins in the midst."""
        self._calls[who] = n

    def close(self) -> None:
        """The episode is over: the engine may forget its conversations."""
        if self._engine is not None:
            for key in self._keys:
                self._engine.forget(key)

    # Inside

    async def _check_limits(self) -> None:
        if self._limits.calls is not None and self.asked >= self._limits.calls and self.latched is None:
            self._latch(CauseType.TURNS, f"{self.asked} questions asked, the limit is {self._limits.calls}")
        if self.latched is not None:
            await asyncio.sleep(0)  # an agent that swallows the limit and asks again must not block the event loop
            raise self.latched

    def _latch(self, limit: CauseType, message: str) -> LimitReached:
        self.latched = LimitReached(limit, message)
        return self.latched

    def _latch_tokens(self) -> LimitReached:
        return self._latch(CauseType.TOKENS, f"{self.sampled} tokens sampled, the limit is {self._limits.tokens}")

    async def _take(self, request: Request) -> int:
        """Tokens of the budget for this question. LimitReached where all are spent."""
        granted = getattr(self._engine, "granted", None)
        if granted is not None and self._limits.tokens is not None:
            # A replay gives what was given then: who waits for whom hangs on how long answers take.
            recorded = await granted(request, self._budget)
            if recorded is not None:
                return self._budget.hold(recorded)
        held = await self._budget.take(request.sampling.max_tokens)
        if held < 1:
            self.asked -= 1
            raise self.latched or self._latch_tokens()
        return held

    def _render(self, path: str, conversation: str, messages: Sequence[Message], tools: Any) -> Any:
        renderer = self._engine.renderer if self._engine is not None else None
        if renderer is None:
            return None
        try:
            return renderer.prompt(messages, tools, self._tracks.get((path, conversation), ()))
        except ValueError as error:
            raise RenderFailed(str(error)) from error

    def _fit(self, base: Sampling, temperature: float | None, max_tokens: int | None, rendered: Any) -> Sampling:
        wanted = base.max_tokens if max_tokens is None else max_tokens
        context = min(
            (c for c in (self._limits.context, self._engine.context if self._engine else None) if c), default=None
        )
        if context is not None and rendered is not None:
            room = context - len(rendered.ids)
            if room < 1:
                raise self._latch(
                    CauseType.CONTEXT, f"the prompt has {len(rendered.ids)} tokens, the context {context}"
                )
            wanted = min(wanted, room)
        if temperature is None and wanted == base.max_tokens:
            return base
        update = {"max_tokens": wanted, "temperature": base.temperature if temperature is None else temperature}
        return base.model_copy(update=update)

    def _offered(self, schemas: tuple[dict[str, Any], ...] | None) -> Tools | None:
        if schemas is None:
            return None
        digest = hashlib.sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()[:16]
        first = digest not in self._tools
        self._tools.add(digest)
        return Tools(hash=digest, schemas=schemas if first else None)

    async def _ask(self, request: Request) -> tuple[Completion, tuple[Attempt, ...]]:
        assert self._engine is not None
        attempts: list[Attempt] = []
        while True:
            started = time.perf_counter()
            try:
                with outside():
                    completion = await fire.complete(self._engine, request)
            except EngineError as error:
                seconds = time.perf_counter() - started
                attempts += error.attempts or (Attempt(seconds=seconds, error=told(error)),)
                if isinstance(error, PromptTooLong) or not error.retry or len(attempts) > self._retries:
                    raise _Failed(error, tuple(attempts)) from error
                if request.listener is not None:
                    request.listener.again()
                await asyncio.sleep(self._backoff * 2 ** (len(attempts) - 1))
            else:
                attempts += completion.attempts or (Attempt(seconds=time.perf_counter() - started),)
                return self._stopped(completion, request.sampling), tuple(attempts)

    def _stopped(self, completion: Completion, sampling: Sampling) -> Completion:
        """An answer up to the text that should end it."""
        stops: Any = sampling.extra.get("stop")
        if not stops:
            return completion
        renderer = self._engine.renderer if self._engine is not None else None
        return cut(completion, stops, renderer.decode if renderer is not None else None)

    def _write_text(
        self,
        call: str,
        path: str,
        conversation: str,
        messages: Sequence[Message],
        completion: Completion,
        engine: str,
        **more: Any,
    ) -> None:
        tracks = self._tracks.setdefault((path, conversation), [])
        base, keep = None, 0
        for track in reversed(tracks):
            shared = track.shared(messages)
            if shared > keep:
                base, keep = track, shared
                if keep == len(track.messages) + 1:
                    break
        record = Call(
            tape=self._recorder.tape,
            call=call,
            by=path,
            conversation=conversation,
            base=base.call if base is not None else None,
            keep_messages=keep,
            messages=tuple(messages[keep:]),
            text=completion.text,
            tool_calls=completion.tool_calls,
            usage=completion.usage,
            engine=engine,
            at=time.time(),
            **more,
        )
        self._recorder.write(record)
        track = TextTrack(call, messages, record.reply)
        if base is not None and keep == len(base.messages) + 1:
            tracks[tracks.index(base)] = track
        else:
            tracks.append(track)


class _Failed(Exception):
    def __init__(self, error: EngineError, attempts: tuple[Attempt, ...]) -> None:
        super().__init__(str(error))
        self.error = error
        self.attempts = attempts


@dataclass(slots=True)
class _CallWriter:
    """Writes the record of one call, however it ended."""

    llm: LLM
    call: str
    path: str
    conversation: str
    request: Request
    rendered: Any
    tools: Tools | None

    def __call__(self, completion: Completion, attempts: tuple[Attempt, ...], *, finish: Any, engine: str = "") -> None:
        llm, request, rendered = self.llm, self.request, self.rendered
        engine = engine or completion.engine or (llm._engine.name if llm._engine is not None else "")
        common: dict[str, Any] = {
            "sampling": request.sampling,
            "seed": request.seed,
            "tools": self.tools,
            "attempts": attempts,
            "finish": finish,
        }
        if engine != "authored":
            llm.sampled += (
                len(completion.ids) if completion.ids is not None else completion.usage.completion_tokens or 0
            )
        else:
            common.update(seed=None)
        if rendered is None:
            llm._write_text(self.call, self.path, self.conversation, request.messages, completion, engine, **common)
        else:
            ids, base = self._ids(completion), rendered.base
            record = Call(
                tape=llm._recorder.tape,
                call=self.call,
                by=self.path,
                conversation=self.conversation,
                base=base.call if base is not None else None,
                keep=rendered.keep,
                keep_messages=rendered.keep_messages,
                messages=tuple(request.messages[rendered.keep_messages :]),
                prompt=rendered.new,
                completion=ids,
                logprobs=completion.logprobs,
                text=completion.text,
                tool_calls=completion.tool_calls,
                spans=completion.spans,
                split=rendered.split,
                engine=engine,
                at=time.time(),
                usage=completion.usage
                if completion.usage != Usage()
                else Usage(prompt_tokens=len(rendered.ids), completion_tokens=len(ids)),
                **common,
            )
            llm._recorder.write(record)
            if finish != "error" and not (finish == "cancelled" and not ids):
                self._track(ids, record)
        if finish not in ("error", "cancelled"):  # what nobody heard is nobody's answer
            llm._pending.setdefault(self.path, []).append(self.call)
            llm._newest[self.path] = self.call

    def _track(self, ids: array[int], record: Call) -> None:
        llm, base = self.llm, self.rendered.base
        tracks = llm._tracks.setdefault((self.path, self.conversation), [])
        assert llm._engine is not None
        assert llm._engine.renderer is not None
        track = llm._engine.renderer.track(self.rendered, call=self.call, reply=record.reply, completion=ids)
        if base is not None and self.rendered.split is None and base in tracks:
            tracks[tracks.index(base)] = track
        else:
            tracks.append(track)

    def _ids(self, completion: Completion) -> array[int]:
        """What was sampled or, of text that nobody sampled, the ids an engine would have given."""
        if completion.ids is not None:
            return completion.ids
        if completion.text is None:
            return array("i")
        reply: Message = {"role": "assistant", "content": completion.text}
        if completion.tool_calls:
            reply["tool_calls"] = list(completion.tool_calls)
        assert self.llm._engine is not None
        assert self.llm._engine.renderer is not None
        return self.llm._engine.renderer.completion(self.rendered, reply)


def _within(request: Request, tokens: int) -> Request:
    """The request, for so many tokens at most."""
    sampling = request.sampling
    if sampling.max_tokens <= tokens:
        return request
    update = {"max_tokens": tokens, "temperature": sampling.temperature}
    return replace(request, sampling=sampling.model_copy(update=update))


def tool_schema(tool: type[BaseModel] | dict[str, Any]) -> dict[str, Any]:
    """A function schema in the chat format: as given, or of a step class (name: its kind; text: its docstring)."""
    if isinstance(tool, dict):
        return tool
    schema = tool.model_json_schema()
    schema.pop("title", None)
    description = schema.pop("description", None) or ""
    function = {"name": getattr(tool, "kind", tool.__name__), "description": description, "parameters": schema}
    return {"type": "function", "function": function}
