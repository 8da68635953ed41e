"""Makes tapes from conversations that no run of this package recorded: imported rows, and the texts of a corpus.

A tape has a call for each answer of the model, and steps that are made from the messages. The agent and the environment
aren't known, so these tapes can be imitated but not replayed.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from pydantic import BaseModel, ConfigDict, JsonValue, TypeAdapter
from pydantic_core import from_json, to_json

from ...agents.episode.recorder import Recorder
from ...tapes import Answer, Message, Sampling, Status, Task, ToolCall, ToolCalls
from ...tapes.arrays import ints
from ...tapes.journal import Journal
from ...tapes.messages import ENV, heard, text_of
from ...tapes.records import Begin, Call, End, Identity, Reward, Tools
from ...tapes.steps import Prompt, Step, ToolResult, ToolResults
from ...tapes.store.store import Store
from ...tapes.tape import new_tape_id, step_record

MODEL = "policy"
"""Name of the agent in tapes made here."""
IMPORTED = "imported"
"""Name of the environment in tapes made here."""


class Function(BaseModel):
    """Name and arguments of a function call."""

    model_config = ConfigDict(extra="allow")
    name: str
    arguments: JsonValue = None


class FunctionCall(BaseModel):
    """One function call in a message."""

    model_config = ConfigDict(extra="allow")
    function: Function


class ChatMessage(BaseModel):
    """The fields that a chat message needs on a tape. Other keys are allowed."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[dict[str, JsonValue]] | None = None
    tool_calls: list[FunctionCall] | None = None


_messages: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


def checked_messages(messages: object) -> list[Message]:
    """Return validated chat messages, without keys whose value is None (except `content`). Raises a ValidationError
    that names the wrong message."""
    _messages.validate_python(messages)
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in cast(Sequence[Message], messages)
    ]


@dataclass(frozen=True, kw_only=True)
class Said:
    """One answer of the model, with the messages before it."""

    messages: tuple[Message, ...] = ()
    """The messages since the previous answer."""
    reply: Message
    prompt: Sequence[int] | None = None
    """All token ids of the prompt, or None if they aren't known."""
    completion: Sequence[int] | None = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """One conversation, which becomes one tape."""

    id: str = ""
    """Id of the tape from which the conversation was exported. Empty for a conversation that wasn't exported."""
    answers: tuple[Said, ...]
    by: str = MODEL
    """Path of the agent that gave these answers."""
    tools: tuple[dict[str, JsonValue], ...] = ()
    task: Task = field(default_factory=Task)
    group: str | None = None
    attempt: int = 0
    split: str = "train"
    status: Status = Status.FINISHED
    reward: tuple[str, float] | None = None
    """(component, value), or None for an unscored episode."""

    @property
    def content(self) -> str:
        """SHA-256 (hex) over all fields, by which an import recognises conversations that were imported before."""
        return hashlib.sha256(to_json(self, inf_nan_mode="constants", fallback=list)).hexdigest()


def imported(store: Store) -> Counter[tuple[str, str]]:
    """Return how many tapes in the run were made from each conversation, by its (content, status).

    A crash during an import leaves an unfinished tape, which is closed with another status. It then doesn't match its
    conversation, so the next import writes the conversation again.
    """
    found: Counter[tuple[str, str]] = Counter()
    for summary in store.summaries(agent=MODEL, closed=True):
        if summary.env == IMPORTED:
            (body,) = store.bodies(store.index.places(summary.id, limit=1))
            content = from_json(body)["agent"].get("config", {}).get("content")
            found[content, str(summary.status)] += content is not None
    return found


def write_tape(one: Conversation, journal: Journal | None, source: str) -> str:
    """Write the conversation `one` as a closed tape, and return the tape's id.

    If `journal` is None, nothing is written, but an error is raised if the conversation can't become a tape. `source`
    is the name of the format that the conversation was read from.
    """
    begin = Begin(
        tape=new_tape_id(),
        task=one.task,
        task_hash=one.task.hash,
        agent=Identity(name=MODEL, config={"imported": source, "origin": one.id, "content": one.content}),
        env=Identity(name=IMPORTED, effect="irreversible"),
        env_seed=0,
        seed=0,
        group=one.group,
        attempt=one.attempt,
        split=one.split,
        at=time.time(),
    )
    recorder = Recorder(begin, journal)
    before: str | None = None
    heard_so_far = 0
    for said in one.answers:
        for step in _seen(said.messages, one.tools):
            recorder.write(step_record(recorder.tape, step, by=ENV))
        call = Call(
            tape=recorder.tape,
            call=recorder.new_call_id(),
            by=one.by,
            base=before,
            keep=0,
            keep_messages=heard_so_far,
            new_messages=said.messages,
            new_prompt=None if said.prompt is None else ints(said.prompt),
            completion=None if said.completion is None else ints(said.completion),
            text=str(said.reply.get("content") or ""),
            tool_calls=tuple(said.reply["tool_calls"]) if said.reply.get("tool_calls") else None,
            finish="stop",
            sampling=Sampling(),
            tools=_tools(one.tools, known=before is not None),
            engine=source,
            at=time.time(),
        )
        recorder.write(call)
        whole = ((call.call, 0, len(said.completion or ())),)
        recorder.write(step_record(recorder.tape, _action(said.reply), by=one.by, calls=whole))
        before, heard_so_far = call.call, heard_so_far + len(said.messages) + 1
    if one.reward is not None:
        name, value = one.reward
        recorder.write(Reward(tape=recorder.tape, name=name, value=value))
    recorder.write(End(tape=recorder.tape, status=one.status, at=time.time()))
    return recorder.tape


def _tools(tools: tuple[dict[str, JsonValue], ...], *, known: bool) -> Tools | None:
    if not tools:
        return None
    digest = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).hexdigest()[:16]
    return Tools(hash=digest, schemas=None if known else tools)


def _seen(messages: Sequence[Message], tools: tuple[dict[str, JsonValue], ...]) -> Iterator[Step]:
    """Yield the observation before a call. It is a `ToolResults` if all messages are tool results, otherwise a
    `Prompt`."""
    if not messages:
        return
    if all(message["role"] == "tool" for message in messages):
        results = ToolResults(
            results=tuple(
                ToolResult(id=str(m.get("tool_call_id") or ""), name=str(m.get("name") or ""), content=text_of(m))
                for m in messages
            )
        )
        if heard(results) == [dict(m) for m in messages]:
            yield results
            return
    last = next((text_of(m) for m in reversed(messages) if m["role"] == "user"), text_of(messages[-1]))
    yield Prompt(text=last, messages=tuple(dict(m) for m in messages), tools=tools)


def _action(reply: Message) -> Answer | ToolCalls:
    calls = reply.get("tool_calls")
    if not calls:
        return Answer(text=text_of(reply))
    return ToolCalls(
        calls=tuple(
            ToolCall(
                id=str(call.get("id") or ""),
                name=str(call["function"]["name"]),
                arguments=_arguments(call["function"].get("arguments")),
            )
            for call in calls
        )
    )


def _arguments(given: JsonValue) -> dict[str, JsonValue]:
    """Return the arguments of a tool call as a dict. Anything other than a JSON object is kept under the key
    `arguments`."""
    try:
        found = from_json(given) if isinstance(given, str) else given
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": given}
