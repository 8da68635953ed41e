"""A story: the intermediate form of an episode between a tape and a record of another framework's trace format.

A story has the model calls, each with its whole request, its reply and its token ids, and a few facts of the episode. A
story of a tape lacks the parts that no other format holds. A tape of a story links a call to the earlier call that its
tokens or messages extend, and its steps are made of the messages. The trace formats use this module.

A record that Tapereel wrote holds the object `tapereel` besides the format's fields. An import doesn't trust that
object: `Facts` validates it, as `conversation` validates messages.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from typing import cast, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter
from pydantic_core import from_json, to_json

from ...agents.engines.engine import Finish
from ...agents.episode.recorder import Recorder
from ...tapes import Answer, Cause, CauseType, Message, Sampling, Status, Tape, Task, ToolCall, ToolCalls
from ...tapes.arrays import floats, ints
from ...tapes.journal import Journal
from ...tapes.messages import ENV, frames_of, heard, text_of
from ...tapes.records import Begin, Call, End, Identity, Label, Reward, Tools
from ...tapes.steps import Prompt, Step, ToolResult, ToolResults
from ...tapes.store.store import Store
from ...tapes.tape import new_tape_id, step_record
from ...tapes.value import Value

MODEL = "policy"
"""Name of the agent if a format has no names."""
IMPORTED = "imported"
"""Name of the environment of imported tapes."""
OURS = "tapereel"
"""Key of the object with an episode's facts, where a format has a free field."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One model call."""

    name: str
    by: str = MODEL
    messages: tuple[Message, ...]
    """The whole request."""
    reply: Message
    tools: tuple[dict[str, JsonValue], ...] = ()
    prompt: Sequence[int] | None = None
    """All prompt ids; None without token ids."""
    completion: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    """Log-prob of each completion id, NaN where unknown; None without log-probs."""
    targets: Sequence[int] | None = None
    """1 for each completion id that may be trained on, else 0; None: all."""
    finish: str = "stop"
    sampling: Sampling = Sampling()
    spans: tuple[tuple[str, int, int], ...] = ()

    @cached_property
    def ids(self) -> NDArray[np.int32]:
        """(tokens,) prompt and completion ids."""
        return np.frombuffer(array("i", [*(self.prompt or ()), *(self.completion or ())]), np.int32)

    def extends(self, earlier: Turn) -> bool:
        """True if the prompt begins with all ids of `earlier`.

        Ids are compared, not texts: the same text may have other ids, and a row must hold the ids that were sampled.
        """
        n = len(earlier.ids)
        return (
            self.prompt is not None
            and 0 < n <= len(self.prompt)
            and np.array_equal(np.asarray(self.prompt[:n], np.int32), earlier.ids)
        )

    def follows(self, earlier: Turn) -> bool:
        """True if the messages begin with those of `earlier` and its reply."""
        return _begins(self.messages, [*earlier.messages, earlier.reply])


@dataclass(frozen=True)
class Score:
    """One reward component of the whole episode."""

    name: str
    value: float
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Story:
    """One episode."""

    id: str
    """Id of the tape, or the format's name of the episode; empty without a name."""
    turns: tuple[Turn, ...]
    task: Task = field(default_factory=Task)
    group: str | None = None
    attempt: int = 0
    split: str = "train"
    status: Status = Status.FINISHED
    cause: Cause | None = None
    scores: tuple[Score, ...] = ()

    @property
    def reward(self) -> float | None:
        """Weighted sum of the scores; None without a score of weight other than 0."""
        weighed = [score.weight * score.value for score in self.scores if score.weight]
        return sum(weighed) if weighed else None

    @property
    def content(self) -> str:
        """SHA-256 (hex) of all fields: stories with equal digests are equal. Imports use it to find duplicates."""
        return hashlib.sha256(to_json(self, inf_nan_mode="constants", fallback=list)).hexdigest()

    def facts(self) -> dict[str, JsonValue]:
        """The episode's fields except the turns, for the object `tapereel` of formats with a free field."""
        return {
            "tape": self.id,
            "task": self.task.model_dump(mode="json"),
            "group": self.group,
            "attempt": self.attempt,
            "split": self.split,
            "status": self.status.value,
            "cause": self.cause.model_dump(mode="json") if self.cause is not None else None,
            "scores": [[score.name, score.value, score.weight] for score in self.scores],
        }


class Facts(Value):
    """The facts of an episode, as `Story.facts` writes them."""

    tape: str = Field(default="", max_length=200)
    task: Task = Task()
    group: str | None = Field(default=None, max_length=500)
    attempt: int = 0
    split: str = Field(default="train", max_length=200)
    status: Status = Status.FINISHED
    cause: Cause | None = None
    scores: tuple[tuple[str, float, float], ...] = ()

    def story(self, turns: Iterable[Turn]) -> Story:
        """The story with these facts and turns."""
        fields = {**dict(self), "scores": tuple(starmap(Score, self.scores))}
        return Story(id=fields.pop("tape"), turns=tuple(turns), **fields)


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
    """The fields of a chat message that a tape requires. Other keys are allowed."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[dict[str, JsonValue]] | None = None
    tool_calls: list[FunctionCall] | None = None


_conversation: TypeAdapter[list[ChatMessage]] = TypeAdapter(list[ChatMessage])


def conversation(messages: object) -> list[Message]:
    """Validated chat messages, without their None values except `content`. ValidationError names the wrong message."""
    _conversation.validate_python(messages)
    return [
        {key: value for key, value in message.items() if value is not None or key == "content"}
        for message in cast(Sequence[Message], messages)
    ]


# From a tape


def story_of(tape: Tape) -> Story:
    """The story of a closed tape.

    If a failure left the tape unscored, its reward components become metrics (weight 0): a sum of some components must
    not become a reward.
    """
    labels = {layer.call: layer for layer in tape.layers if isinstance(layer, Label)}
    assert tape.status is not None
    totals: dict[tuple[str, float], float] = {}
    scored = tape.reward is not None
    for reward in tape.rewards:
        key = (reward.name, reward.weight if scored else 0.0)
        if reward.value == reward.value:
            totals[key] = totals.get(key, 0.0) + reward.value
    begin = tape.begin
    return Story(
        id=tape.id,
        task=begin.task,
        group=begin.group,
        attempt=begin.attempt,
        split=begin.split,
        status=tape.status,
        cause=tape.cause,
        scores=tuple(Score(name=n, value=v, weight=w) for (n, w), v in totals.items()),
        turns=tuple(
            _turn_of(tape, call, labels.get(call.call))
            for call in tape.calls
            if call.finish != "error" and not (call.finish == "cancelled" and not call.completion)
        ),
    )


def _turn_of(tape: Tape, call: Call, label: Label | None) -> Turn:
    whole = call.prompt is not None and call.completion is not None
    return Turn(
        name=call.call,
        by=call.by,
        messages=tuple(frames_of(tape.call_messages(call))),
        reply=call.reply,
        tools=tape.call_tools(call) or (),
        prompt=tape.call_prompt(call) if whole else None,
        completion=call.completion if whole else None,
        logprobs=call.logprobs if whole and call.sampling.exact and not call.sampling.barring else None,
        targets=_targets(label, len(call.completion or ())),
        finish=call.finish,
        sampling=call.sampling,
        spans=call.spans,
    )


def _targets(label: Label | None, n: int) -> list[int] | None:
    if label is None:
        return None
    if label.use != "agent" or label.ranges == ():
        return [0] * n
    if label.ranges is None:
        return None
    targets = [0] * n
    for start, end in label.ranges:
        targets[start:end] = [1] * (end - start)
    return targets


# To a tape


def stories_in(store: Store) -> Counter[tuple[str, str]]:
    """(content, status) -> number of the run's tapes that were written from such a story.

    A tape that a crashed process left unfinished is closed with another status. It doesn't match its story, so the next
    import writes that story again.
    """
    found: Counter[tuple[str, str]] = Counter()
    for summary in store.summaries(agent=MODEL, closed=True):
        if summary.env == IMPORTED:
            (body,) = store.bodies(store.index.places(summary.id, limit=1))
            content = from_json(body)["agent"].get("config", {}).get("content")
            found[content, str(summary.status)] += content is not None
    return found


def write_story(story: Story, journal: Journal | None, source: str) -> str:
    """Write a story as a closed tape; return the tape's id.

    journal: None checks whether the story can become a tape, and writes nothing. source: name of the story's format.
    """
    begin = Begin(
        tape=new_tape_id(),
        task=story.task,
        task_hash=story.task.hash,
        agent=Identity(name=MODEL, config={"imported": source, "origin": story.id, "content": story.content}),
        env=Identity(name=IMPORTED, effect="irreversible"),
        env_seed=0,
        seed=0,
        group=story.group,
        attempt=story.attempt,
        split=story.split,
        at=time.time(),
    )
    recorder = Recorder(begin, journal)
    written: list[tuple[Turn, Call]] = []
    layers: list[Label] = []
    for turn in story.turns:
        call = _write_turn(recorder, turn, written, source)
        written.append((turn, call))
        label = _label(recorder.tape, call.call, turn.targets)
        layers.extend([label] if label is not None else [])
    for score in story.scores:
        recorder.write(Reward(tape=recorder.tape, name=score.name, value=score.value, weight=score.weight))
    recorder.write(End(tape=recorder.tape, status=story.status, cause=story.cause, at=time.time()))
    # Labels follow the end: a layer is a later judgement on a closed tape, not part of its log.
    if journal is not None:
        for layer in layers:
            journal.append(layer.body())
    return recorder.tape


def _write_turn(recorder: Recorder, turn: Turn, before: list[tuple[Turn, Call]], source: str) -> Call:
    base = next((one for one in reversed(before) if _continues(turn, *one)), None)
    said = [*base[0].messages, base[1].reply] if base is not None else []
    kept = len(said) if _begins(turn.messages, said) else 0
    for step in _seen(turn, turn.messages[kept:]):
        recorder.write(step_record(recorder.tape, step, by=ENV))
    # The base's ids are an exact prefix of this prompt (see `_continues`), so the tape stores only the rest.
    keep = len(base[0].ids) if base is not None and turn.prompt is not None else 0
    call = Call(
        tape=recorder.tape,
        call=recorder.new_call_id(),
        by=turn.by,
        base=base[1].call if base is not None else None,
        keep=keep,
        keep_messages=kept,
        messages=turn.messages[kept:],
        prompt=None if turn.prompt is None else ints(list(turn.prompt)[keep:]),
        completion=None if turn.completion is None else ints(turn.completion),
        logprobs=None if turn.logprobs is None else floats(turn.logprobs),
        text=str(turn.reply.get("content") or ""),
        tool_calls=tuple(turn.reply["tool_calls"]) if turn.reply.get("tool_calls") else None,
        spans=turn.spans,
        finish=cast(Finish, turn.finish if turn.finish in get_args(Finish) else "stop"),
        sampling=turn.sampling,
        tools=_tools(turn, [earlier for earlier, _ in before]),
        engine=source,
        at=time.time(),
    )
    recorder.write(call)
    whole = ((call.call, 0, len(turn.completion or ())),)
    recorder.write(step_record(recorder.tape, _action(turn.reply), by=turn.by, calls=whole))
    return call


def _continues(turn: Turn, earlier: Turn, call: Call) -> bool:
    """True if the turn extends the earlier call of the same agent: by token ids if it has them, else by messages.

    Only an exact prefix counts: the tape then stores the rest of the prompt, and `keep` ids of the earlier call.
    """
    if earlier.by != turn.by:
        return False
    if turn.prompt is not None:
        return turn.extends(earlier)
    return not len(earlier.ids) and _begins(turn.messages, [*earlier.messages, call.reply])


def _begins(messages: Sequence[Message], conversation: list[Message]) -> bool:
    return list(messages[: len(conversation)]) == conversation


def _tools(turn: Turn, before: Iterable[Turn]) -> Tools | None:
    if not turn.tools:
        return None
    known = any(earlier.tools == turn.tools for earlier in before)
    digest = hashlib.sha256(json.dumps(turn.tools, sort_keys=True).encode()).hexdigest()[:16]
    return Tools(hash=digest, schemas=None if known else turn.tools)


def _seen(turn: Turn, messages: Sequence[Message]) -> Iterable[Step]:
    """The observations before this call: tool results if all messages are, else one prompt with the messages."""
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
    yield Prompt(text=last, messages=tuple(dict(m) for m in messages), tools=turn.tools)


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
    """The parsed arguments of a tool call; text that isn't a JSON object is kept under `arguments`."""
    try:
        found = from_json(given) if isinstance(given, str) else given
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": given}


def _label(tape: str, call: str, targets: Sequence[int] | None) -> Label | None:
    if targets is None or all(targets):
        return None
    edges = np.flatnonzero(np.diff([0, *targets, 0])).tolist()
    ranges = tuple((int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))
    return Label(tape=tape, call=call, ranges=ranges)


def cause_of(message: str) -> Cause:
    """The cause of an episode that another framework ended with an error: not known to be the agent's error."""
    return Cause(type=CauseType.ENVIRONMENT, message=message[:2000])
