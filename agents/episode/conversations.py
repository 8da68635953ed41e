"""Holds the conversations of one episode with its model, renders each prompt and records each call.

A conversation is identified by an agent's path and an optional name. Its calls form a tree: each call extends an
earlier call, which is its base, or starts a new training row. The leaves of this tree are called tracks. The next
prompt continues the track that fits it best.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import JsonValue

from ...tapes import Call, Message, Sampling, Tape
from ...tapes.messages import shared_prefix
from ...tapes.records import Attempt, Tools, Usage
from ..engines.engine import Completion, Engine, Finish, Request
from ..rendering.renderer import Rendered, Renderer, Track
from .recorder import Recorder

AUTHORED = "authored"
"""The engine name in a call's record if the agent wrote the text without a model."""


@dataclass(slots=True)
class TextTrack:
    """A conversation up to its newest answer, which a later prompt may continue. Used for engines without a
    renderer."""

    call: str
    messages: Sequence[Message]
    """The messages of the request, without the reply."""
    reply: Message
    end: int
    """Number of messages, including the reply."""

    def shared(self, messages: Sequence[Message]) -> int:
        """Return how many of `messages`, counted from the first, are the same as in this track. The track's last
        message is the reply."""
        n = shared_prefix(messages, self.messages)
        if n == self.end - 1 and len(messages) > n and messages[n] == self.reply:
            return n + 1
        return n


TrackT = TypeVar("TrackT", Track, TextTrack)


@dataclass(slots=True)
class PendingCall:
    """A call that has no answer yet. It holds everything that the call's record needs, except the completion."""

    call: str
    path: str
    conversation: str
    request: Request
    rendered: Rendered | None
    """None if the engine has no renderer."""
    tools: Tools | None


class Conversations:
    """Every conversation in one episode. No other class writes records of calls."""

    def __init__(self, recorder: Recorder, engine: Engine | None) -> None:
        self._recorder = recorder
        self._engine = engine
        self._tokens: defaultdict[tuple[str, str], list[Track]] = defaultdict(list)
        self._texts: defaultdict[tuple[str, str], list[TextTrack]] = defaultdict(list)
        self._taken: dict[str, Track | TextTrack] = {}
        """For each agent, the track that ends with the newest answer of which a step was made."""
        self._tools: set[str] = set()
        """Hashes of the tool lists whose schemas are already on the tape."""

    @property
    def renderer(self) -> Renderer | None:
        return self._engine.renderer if self._engine is not None else None

    def render(
        self, path: str, conversation: str, messages: Sequence[Message], tools: Sequence[dict[str, JsonValue]] | None
    ) -> Rendered | None:
        """Return the prompt, or None if there is no renderer. Raises ValueError if the messages can't be rendered."""
        renderer = self.renderer
        if renderer is None:
            return None
        rendered = renderer.prompt(messages, tools, self._offered(self._tokens[path, conversation], path))
        renderer.warn_of_lost(rendered)
        return rendered

    def take(self, path: str, call: str) -> None:
        """Remember that the agent made a step of this call. Among answers with equal text, the next prompt continues
        this one, in whichever conversation it was sampled."""
        for tracks in (self._tokens, self._texts):
            found = (one for key, kept in tracks.items() if key[0] == path for one in kept if one.call == call)
            self._taken.update((path, track) for track in found)

    def _offered(self, tracks: list[TrackT], path: str) -> list[TrackT]:
        """Return the tracks that a prompt may continue. Among equals, the last is chosen."""
        taken: Any = self._taken.get(path)
        return [*(one for one in tracks if one is not taken), taken] if taken is not None else tracks

    def tools_record(self, schemas: tuple[dict[str, JsonValue], ...] | None) -> Tools | None:
        """Return the record of the tools that a call offers.

        On each tape, the first call with these tools records their schemas. Later calls record only the hash.
        """
        if schemas is None:
            return None
        digest = hashlib.sha256(json.dumps(schemas, sort_keys=True).encode()).hexdigest()[:16]
        first = digest not in self._tools
        self._tools.add(digest)
        return Tools(hash=digest, schemas=schemas if first else None)

    def write(
        self,
        pending: PendingCall,
        completion: Completion,
        attempts: tuple[Attempt, ...] = (),
        *,
        finish: Finish,
        engine: str = "",
    ) -> None:
        """Record the call, however it ended, and make it a leaf in its conversation's tree.

        `engine` is the name to record. If it is empty, the name of the engine that answered is recorded.
        """
        request, constraint = pending.request, pending.request.constraint
        engine = engine or completion.engine or (self._engine.name if self._engine is not None else "")
        shared: dict[str, Any] = {
            "tape": self._recorder.tape,
            "call": pending.call,
            "by": pending.path,
            "conversation": pending.conversation,
            "text": completion.text,
            "tool_calls": completion.tool_calls,
            "barred": completion.barred,
            "sampling": request.sampling,
            "seed": None if engine == AUTHORED else request.seed,
            "tools": pending.tools,
            "constraint": constraint and constraint.model_copy(update={"enforced": completion.enforced}),
            "attempts": attempts,
            "finish": finish,
            "engine": engine,
        }
        if pending.rendered is None:
            self._write_texts(pending, completion, shared)
        else:
            self._write_tokens(pending, pending.rendered, completion, shared)

    def _write_texts(self, pending: PendingCall, completion: Completion, shared: dict[str, Any]) -> None:
        messages = pending.request.messages
        tracks = self._texts[pending.path, pending.conversation]
        base, keep = None, 0
        for track in reversed(self._offered(tracks, pending.path)):
            n = track.shared(messages)
            if n > keep:
                base, keep = track, n
                if keep == track.end:
                    break
        new = tuple(messages[keep:])
        record = Call(
            base=base.call if base is not None else None,
            keep_messages=keep,
            new_messages=new,
            media=self._recorder.asked_in(new),
            usage=completion.usage,
            at=time.time(),
            **shared,
        )
        self._recorder.write(record)
        track = TextTrack(pending.call, messages, record.reply, len(messages) + 1)
        if base is not None and keep == base.end and base in tracks:
            tracks[tracks.index(base)] = track
        else:
            tracks.append(track)

    def _write_tokens(
        self, pending: PendingCall, rendered: Rendered, completion: Completion, shared: dict[str, Any]
    ) -> None:
        ids, base, keep = self._ids(rendered, completion), rendered.base, rendered.keep_messages
        usage = completion.usage
        if usage == Usage():
            usage = Usage(prompt_tokens=len(rendered.ids), completion_tokens=len(ids))
        new = tuple(pending.request.messages[keep:])
        record = Call(
            base=base.call if base is not None else None,
            keep=rendered.keep,
            keep_messages=keep,
            new_messages=new,
            media=self._recorder.asked_in(new),
            new_prompt=rendered.new,
            places=tuple(place for place in rendered.places if place.offset >= rendered.keep),
            completion=ids,
            logprobs=completion.logprobs,
            spans=completion.spans,
            split=rendered.split,
            cut=rendered.cut,
            cut_messages=rendered.cut_messages,
            usage=usage,
            at=time.time(),
            **shared,
        )
        self._recorder.write(record)
        if record.finish == "error" or (record.finish == "cancelled" and not ids):
            return  # a call without an answer leaves nothing that a later prompt could continue
        renderer = self.renderer
        assert renderer is not None
        track = renderer.track(rendered, call=pending.call, reply=record.reply, completion=ids)
        tracks = self._tokens[pending.path, pending.conversation]
        # A call that extends its base replaces the base as a leaf. If the call starts a new row (`split`), the base
        # stays a leaf, because a later prompt may return to it.
        if base is not None and rendered.split is None and base in tracks:
            tracks[tracks.index(base)] = track
        else:
            tracks.append(track)

    def _ids(self, rendered: Rendered, completion: Completion) -> array[int]:
        """Return the sampled ids. For an answer that is only text, return the ids that an engine would have sampled."""
        if completion.ids is not None:
            return completion.ids
        if completion.text is None:
            return array("i")
        reply: Message = {"role": "assistant", "content": completion.text}
        if completion.tool_calls:
            reply["tool_calls"] = list(completion.tool_calls)
        renderer = self.renderer
        assert renderer is not None
        return renderer.completion(rendered, reply)

    def write_authored(self, path: str, messages: Sequence[Message], reply: Message, rendered: Rendered | None) -> str:
        """Record text that the agent wrote without a model. Return the id of the call."""
        call = self._recorder.new_call_id()
        request = Request(
            messages=messages, prompt=rendered.ids if rendered is not None else None, sampling=Sampling(), seed=0
        )
        # If there is no renderer, only the step records the function calls.
        calls = reply.get("tool_calls") if rendered is not None else None
        completion = Completion(text=reply["content"], tool_calls=tuple(calls) if calls else None)
        self.write(PendingCall(call, path, "", request, rendered, None), completion, finish="stop", engine=AUTHORED)
        return call

    def inherit(self, prefix: Tape, calls: Sequence[Call]) -> None:
        """Continue the conversations of `prefix`, which is the tape that a fork begins with. Its recorded tokens remain
        the context of later calls.

        Otherwise the fork would tokenize these conversations again and start new training rows, instead of extending
        the recorded ones.
        """
        renderer = self.renderer
        for call in calls:
            if call.finish == "error" or (call.finish == "cancelled" and not call.completion):
                continue
            key, messages = (call.by, call.conversation), call.messages
            if renderer is None:
                self._texts[key].append(TextTrack(call.call, messages, call.reply, len(messages) + 1))
            elif (prompt := call.prompt) is not None and call.completion is not None:
                self._tokens[key].append(
                    renderer.retrack(
                        call=call.call,
                        messages=[*messages, call.reply],
                        tools=prefix.call_tools(call),
                        ids=prompt + call.completion,
                        completion=call.completion,
                        places=prefix.call_places(call),
                    )
                )
        for entry in prefix.entries:
            for call, _, _ in entry.calls:
                self.take(entry.by, call)
