"""Tapes as trajectories in ATIF, the Agent Trajectory Interchange Format of Harbor.

A trajectory has the messages that the tape's models read and wrote, in the order of the calls, and between them the
steps that no model read. ATIF's required fields are always there. A value that isn't known is left out. The format is
described in Harbor's `rfcs/0001-trajectory-format.md`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from itertools import takewhile
from typing import Any

from pydantic_core import from_json, to_json

from ...agents.episode.conversations import AUTHORED
from ...agents.rendering.tool_calls import HermesReader, tool_name
from ...tapes import Message, Tape
from ...tapes.messages import ENV, frames_of, heard, said, shared_prefix
from ...tapes.pictures import MEDIA_NAME
from ...tapes.records import Call
from ...tapes.steps import Exchange, Step, ToolCalls, ToolOffer, ToolResults, Unknown
from ...tapes.tape import Entry
from ...tapes.transcript import kind_of, reads
from .sets import Turn, turns_of

VERSION = "ATIF-v1.8"
LOSES = (
    "the fields of steps: their text is kept",
    "the private part of the task, layers, and calls that failed",
    "log-probs of answers with a token of unknown log-prob, and token ids of text that no model sampled",
    "tool calls in the text of programs behind the gateway that aren't in Hermes' format: they stay in the message",
)
_SOURCES = {"system": "system", "developer": "system", "assistant": "agent"}
_SEVERAL = (
    "The tape has several conversations. `extra.conversation` numbers them, and `extra.agent` is the agent's path. "
    "A model has read the earlier steps with the number of its own step, and no others."
)
GATEWAY_ID = r"call_[0-9a-f]{24}(\d{1,4})"
"""The id that the gateway gives to a call that it read from the text. The group is the call's number in the answer."""
_Fields = dict[str, Any]


def write_atif(tapes: Iterable[Tape]) -> Iterator[Mapping[str, object] | str]:
    """Yield a trajectory for each tape. For a tape without steps, yield the reason as a string."""
    for tape in tapes:
        steps = _Steps(tape)
        yield _trajectory(tape, steps) if steps.made else "no step"


def atif_files(trajectory: Mapping[str, object], picture: Callable[[str], bytes]) -> tuple[str, dict[str, bytes]]:
    """Return the name of a trajectory's folder and the files in it, by name: `trajectory.json` and its pictures.

    `picture` returns the bytes of a picture, given the name of its file.
    """
    id = str(trajectory["trajectory_id"])
    name = id if re.fullmatch(r"[\w-]{1,100}", id, re.ASCII) else sha256(id.encode()).hexdigest()
    steps: Any = trajectory["steps"]
    contents = [step["message"] for step in steps]
    contents += [result["content"] for step in steps for result in step.get("observation", {}).get("results", ())]
    shown = {
        part["source"]["path"]
        for content in contents
        if isinstance(content, list)
        for part in content
        if "source" in part
    }
    files = {path: picture(path.removeprefix("images/")) for path in sorted(shown)}
    return name, {"trajectory.json": to_json(trajectory, inf_nan_mode="null") + b"\n", **files}


def _trajectory(tape: Tape, steps: _Steps) -> _Fields:
    begin, end, cause = tape.begin, tape.end, tape.cause
    made = [{"step_id": k, **step} for k, step in enumerate(steps.made, start=1)]
    models = {step["model_name"] for step in made if "model_name" in step}
    agent = {"name": begin.agent.name, "version": begin.versions.get("package", "unknown")} | _known(
        model_name=models.pop() if len(models) == 1 else None,
        tool_definitions=steps.tools,
        extra=_known(cls=begin.agent.cls or None, config=begin.agent.config),
    )
    metrics = [step["metrics"] for step in made if "metrics" in step]
    rewards = [
        _known(
            name=one.name,
            value=one.value if math.isfinite(one.value) else None,
            weight=one.weight,
            call=next((call for call, _, _ in tape.entries[one.step].calls), None) if one.step is not None else None,
        )
        for one in tape.rewards
    ]
    extra = _known(
        status=tape.status,
        cause=_known(type=cause.type, error=cause.error, message=cause.message) if cause is not None else None,
        reward=tape.reward,
        rewards=rewards,
        task=_known(id=begin.task.id or None, hash=begin.task_hash, public=begin.task.public),
        env=_known(name=begin.env.name, cls=begin.env.cls or None),
        env_seed=begin.env_seed,
        seed=begin.seed,
        group=begin.group,
        attempt=begin.attempt if begin.group is not None else None,
        split=begin.split,
        parent=begin.parent.model_dump(exclude_none=True) if begin.parent is not None else None,
        versions=begin.versions,
        began=_time(begin.at),
        seconds=end.seconds if end is not None else None,
    )
    return _known(
        schema_version=VERSION,
        session_id=tape.id,
        trajectory_id=tape.id,
        agent=agent,
        steps=made,
        notes=_SEVERAL if len(steps.conversations) > 1 else None,
        final_metrics=_known(
            total_prompt_tokens=_total(metrics, "prompt_tokens"),
            total_completion_tokens=_total(metrics, "completion_tokens"),
            total_cached_tokens=_total(metrics, "cached_tokens"),
            total_cost_usd=_total(metrics, "cost_usd"),
            total_steps=len(made),
        ),
        extra=extra,
    )


@dataclass(slots=True, eq=False)
class _Conversation:
    """A conversation of the agent at the path `by`. All messages in `read` are steps already."""

    by: str
    read: Sequence[Message] = ()
    steps: list[_Fields] = field(default_factory=list)
    """The agent's steps, which tool results refer to."""


class _Steps:
    """The steps of a trajectory, without their numbers."""

    def __init__(self, tape: Tape) -> None:
        self.made: list[_Fields] = []
        self.conversations: list[_Conversation] = []
        self._tape = tape
        self._places: list[_Conversation] = []
        """The conversation of each step in `made`."""
        self._replies: list[Message] = []
        self._linked: dict[str, list[Step]] = {}
        """The steps that were parsed from each call."""
        for entry in tape.entries:
            for call, _, _ in entry.calls:
                self._linked.setdefault(call, []).append(entry.step)
        self._errors = {
            to_json(message)
            for entry in tape.entries
            if isinstance(entry.step, ToolResults)
            for message, result in zip(frames_of(heard(entry.step)), entry.step.results, strict=True)
            if result.error
        }
        events = _events(tape)
        self._turns = [one for one, _ in events if isinstance(one, Turn)]
        offers = [one.tools for one in self._turns] or [one.tools for one in tape if isinstance(one, ToolOffer)]
        self.tools = list({to_json(tool): tool for offer in offers for tool in offer}.values())
        for event, copied in events:
            if isinstance(event, Turn):
                self._turn(event, copied)
            else:
                self._entry(event, copied)
        if len(self.conversations) > 1:
            for step, place in zip(self.made, self._places, strict=True):
                number = self.conversations.index(place)
                step["extra"] = {"agent": place.by, "conversation": number, **step.get("extra", {})}

    def _add(self, step: _Fields, to: _Conversation) -> None:
        self.made.append(step)
        self._places.append(to)
        if step["source"] == "agent":
            to.steps.append(step)

    def _turn(self, turn: Turn, copied: bool) -> None:
        """Add the messages that the call read and no earlier call of its conversation, and the call's answer."""
        call, messages = turn.call, turn.messages
        found = [
            (shared_prefix(one.read, messages), k) for k, one in enumerate(self.conversations) if one.by == call.by
        ]
        extended = max(((n, k) for n, k in found if n == len(self.conversations[k].read)), default=None)
        if extended is not None:
            shared = begin = extended[0]
            to = self.conversations[extended[1]]
        else:
            shared, begin = max((n for n, _ in found), default=0), 0
            self.conversations.append(to := _Conversation(call.by))
        for k, message in enumerate(messages[begin:], begin):
            self._message(message, to, copied or k < shared or message in self._replies)
        self._add(self._answer(turn, copied), to)
        self._replies.append(turn.reply)
        to.read = [*messages, turn.reply]

    def _answer(self, turn: Turn, copied: bool) -> _Fields:
        call, steps = turn.call, self._linked.get(turn.call.call, [])
        text, authored = call.text or "", call.engine == AUTHORED
        message, reasoning, calls = _parsed(call, steps, turn, self._results(turn))
        others = [s for s in steps if not isinstance(s, ToolCalls | Exchange) and reads(s) not in (text, message)]
        return _known(
            source="agent",
            timestamp=_time(call.at),
            model_name=call.engine.partition(":")[2] or None,
            message=message,
            reasoning_content=reasoning or None,
            tool_calls=calls,
            metrics=None if authored or copied else _metrics(self._tape, call),
            llm_call_count=0 if authored else 1 if call.attempts else None,
            is_copied_context=copied or None,
            extra=_known(
                call=call.call,
                engine=call.engine or None,
                finish=call.finish,
                versions=call.spans,
                sampling=call.sampling.model_dump(exclude_defaults=True),
                text=text if text != message else None,
                steps=[{"kind": kind_of(step), "text": reads(step)} for step in others],
                tools=[tool_name(tool) for tool in turn.tools] if list(turn.tools) != self.tools else None,
            ),
        )

    def _results(self, turn: Turn) -> list[str]:
        """Return the ids of the tool results that follow an answer to a program."""
        if not turn.tools or not any(isinstance(step, Exchange) for step in self._linked.get(turn.call.call, ())):
            return []
        follows = (one.messages[len(turn.messages) + 1 :] for one in self._turns if one.follows(turn))
        after = takewhile(lambda message: message.get("role") == "tool", next(follows, ()))
        return [str(message.get("tool_call_id")) for message in after]

    def _message(self, message: Message, to: _Conversation, copied: bool, **fields: object) -> None:
        """Add a message that a model read, as a step or as the result of a tool call."""
        content, role = _content(message.get("content")), str(message.get("role"))
        source = _SOURCES.get(role, "user")
        if role == "tool" and to.steps:
            id, error = message.get("tool_call_id"), to_json(message) in self._errors
            asked = (s for s in reversed(to.steps) if any(c["tool_call_id"] == id for c in s.get("tool_calls", ())))
            step = next(asked, None)
            extra = {"name": message.get("name"), "error": error or None, "tool_call_id": id if step is None else None}
            result = _known(source_call_id=id if step is not None else None, content=content, extra=_known(**extra))
            (step or to.steps[-1]).setdefault("observation", {"results": []})["results"].append(result)
            return
        thought = message.get("reasoning_content") or message.get("reasoning")
        if role == "tool":
            fields["extra"] = {k: message[k] for k in ("role", "name", "tool_call_id") if message.get(k)}
        step = _known(
            source=source,
            message=content,
            is_copied_context=copied or None,
            **fields,
        )
        if source == "agent":
            step |= _known(
                reasoning_content=thought if isinstance(thought, str) else None,
                tool_calls=_tool_calls(message.get("tool_calls") or ()),
            )
        self._add(step, to)

    def _entry(self, entry: Entry, copied: bool) -> None:
        """Add a step that no model read in this form."""
        if not self.conversations:
            self.conversations.append(_Conversation(self._tape.begin.agent.name))
        fields: _Fields = {"timestamp": _time(entry.at)}
        if entry.by != ENV:
            fields |= {"llm_call_count": 0, "extra": {"kind": kind_of(entry.step), "by": entry.by}}
        for message in frames_of(_messages(entry)):
            self._message(message, self.conversations[-1], copied, **fields)


def _events(tape: Tape) -> list[tuple[Turn | Entry, bool]]:
    """Return the answered calls of a tape in order, and the steps that no call wrote and no later call read in this
    form. The flag is True for a parent's event."""
    turns = {turn.call.call: turn for turn in turns_of(tape)}
    calls = [(k, turns[call.call]) for k, call in tape.log.call_order if call.call in turns]
    newest = {_key(message): k for k, turn in calls for message in turn.call.new_messages}
    places = [k for k, body in enumerate(tape.bodies) if from_json(body)["t"] == "step"]
    own = zip(places, tape.entries[tape.inherited :], strict=True)
    steps = [(k, entry) for k, entry in own if not any(call in turns for call, _, _ in entry.calls)]
    earlier = _events(tape.parent) if tape.parent is not None else []
    return [
        (event, copied)
        for k, event, copied in (
            *((-1, event, True) for event, _ in earlier),
            *((k, event, False) for k, event in sorted((*calls, *steps), key=lambda one: one[0])),
        )
        if isinstance(event, Turn) or any(newest.get(_key(message), -1) <= k for message in _messages(event))
    ]


def _messages(entry: Entry) -> list[Message]:
    step = entry.step
    if entry.by == ENV and not isinstance(step, Unknown):
        return heard(step)
    if entry.by != ENV and isinstance(step, ToolCalls):
        return [said(step)]
    return [{"role": "user" if entry.by == ENV else "assistant", "content": reads(step)}]


def _key(message: Message) -> bytes:
    return to_json([message.get("content"), message.get("tool_calls")])


def _parsed(call: Call, steps: Sequence[Step], turn: Turn, results: Sequence[str]) -> tuple[str, str, list[_Fields]]:
    """Return message, reasoning and tool calls of an answer. `results` are the ids of the tool results that follow it.

    If the recorded calls can't be found in the text, the message is the whole text.
    """
    text, made = call.text or "", [one for step in steps if isinstance(step, ToolCalls) for one in step.calls]
    recorded = [{"tool_call_id": one.id, "function_name": one.name, "arguments": one.arguments} for one in made]
    if call.engine == AUTHORED:
        return text, "", recorded or _tool_calls(call.tool_calls or ())
    if call.tool_calls or not (made or results):
        read = HermesReader().read(text, None)
        return read.answer, read.reasoning, _tool_calls(call.tool_calls or ())
    read = HermesReader().read(text, turn.tools)
    if made:
        same = [(one.name, one.arguments) for one in read.calls] == [(one.name, one.arguments) for one in made]
        return (read.answer, read.reasoning, recorded) if same else (text, "", recorded)
    # The gateway read the calls, and only their numbers are on the tape, in the ids of the results.
    ids = {int(found[1]): id for id in results if (found := re.fullmatch(GATEWAY_ID, id))}
    if sorted(ids) != list(range(len(read.chat))) or not ids:
        return text, "", []
    return read.answer, read.reasoning, _tool_calls({**one, "id": ids[k]} for k, one in enumerate(read.chat))


def _tool_calls(calls: Iterable[Mapping[str, Any]]) -> list[_Fields]:
    """Return calls in the chat format as ATIF's. Arguments that aren't an object are kept in `extra`."""
    made: list[_Fields] = []
    for call in calls:
        function = call["function"]
        given = function.get("arguments")
        try:
            arguments = from_json(given, allow_inf_nan=False) if isinstance(given, str) else given
        except ValueError:
            arguments = None
        right = isinstance(arguments, dict)
        fields = {"tool_call_id": str(call.get("id") or ""), "function_name": str(function["name"])}
        made.append(
            fields | {"arguments": arguments if right else {}} | ({} if right else {"extra": {"arguments": given}})
        )
    return made


def _metrics(tape: Tape, call: Call) -> _Fields:
    prompt = list(ids) if (ids := call.prompt) is not None else None
    completion = list(call.completion) if call.completion is not None else None
    usage, logprobs = call.usage, call.logprobs
    counts = (usage.prompt_tokens, prompt), (usage.completion_tokens, completion)
    prompt_tokens, completion_tokens = (len(ids) if n is None and ids is not None else n for n, ids in counts)
    return _known(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=usage.cached_tokens,
        cost_usd=usage.cost,
        prompt_token_ids=prompt,
        completion_token_ids=completion,
        logprobs=list(logprobs) if logprobs is not None and all(map(math.isfinite, logprobs)) else None,
    )


def _total(metrics: Sequence[_Fields], name: str) -> float | None:
    """Return the sum over all answers, or None if one of them is unknown."""
    return sum(one[name] for one in metrics) if metrics and all(name in one for one in metrics) else None


def _content(content: object) -> str | list[_Fields]:
    if not isinstance(content, list) or not content:
        return content if isinstance(content, str) else ""
    return [_part(part) for part in content]


def _part(part: Any) -> _Fields:
    """Return a content part. A part that ATIF doesn't have is named in a text part."""
    if isinstance(part, dict) and part.get("type") == "image" and re.fullmatch(MEDIA_NAME, str(part.get("media"))):
        return {"type": "image", "source": {"media_type": "image/png", "path": f"images/{part['media']}"}}
    if isinstance(part, dict):
        text = part.get("text")
        return {"type": "text", "text": text if isinstance(text, str) else f"[{part.get('type')}]"}
    return {"type": "text", "text": str(part)}


def _time(at: float) -> str | None:
    try:
        return datetime.fromtimestamp(at, UTC).isoformat()
    except (OverflowError, ValueError, OSError):  # no time that a calendar has
        return None


def _known(**fields: object) -> _Fields:
    """Return the fields without None and without empty lists and objects."""
    return {name: value for name, value in fields.items() if value is not None and value not in ([], {}, ())}
