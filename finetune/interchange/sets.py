"""Rows in the formats of TRL's trainers: conversations to imitate (SFT), and preference pairs.

JSONL and Parquet files contain the same rows. Tool calls and tool schemas are JSON strings, because a column in Parquet
has one type. An import also accepts TRL's standard form, in which prompt and completion are strings. The prompt then
becomes one message from the user, and the completion one message from the assistant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from ...tapes import Message, Status, Tape, Task
from ...tapes.common.stats import REWARD_LIMIT
from ...tapes.messages import frames_of
from ...tapes.records import Call
from ...tapes.steps import PLACE, content_parts
from .imported import Conversation, Said, checked_messages

_Score = Annotated[float | None, Field(ge=-REWARD_LIMIT, le=REWARD_LIMIT, allow_inf_nan=False)]
_COMMON = (
    "steps and their types: messages are kept",
    "who the agent and the environment were, seeds, times, versions of the policy, sampling, tools of single calls",
    "the private part of the task, reward components and layers: the reward is kept",
)
SFT_LOSES = (*_COMMON, "token ids and log-probs")
PREFERENCE_LOSES = (*SFT_LOSES, "attempts that are neither the best nor the worst of their group")


def _as_text(tools: object) -> object:
    return json.dumps(tools) if isinstance(tools, list) else tools


class Turn(NamedTuple):
    """One model call in a tape: all messages of the request, the reply and the tools. `call` is its record."""

    messages: list[Message]
    reply: Message
    tools: tuple[dict[str, JsonValue], ...]
    call: Call
    made: bool
    """Whether a step of the agent was made of the answer."""

    def follows(self, earlier: Turn) -> bool:
        """Return True if the messages begin with all messages of `earlier`, followed by its reply."""
        said = [*earlier.messages, earlier.reply]
        return self.messages[: len(said)] == said


def turns_of(tape: Tape) -> list[Turn]:
    """Return the model calls in a tape that have an answer, without the answers that weren't taken."""
    made, left_out = {call for entry in tape.entries for call, _, _ in entry.calls}, tape.not_taken
    return [
        Turn(frames_of(call.messages), call.reply, tape.call_tools(call) or (), call, call.call in made)
        for call in tape.calls
        if call.finish != "error"
        and not (call.finish == "cancelled" and not call.completion)
        and call.call not in left_out
    ]


# Conversations to imitate


class SFTRow(BaseModel):
    """A conversation to imitate, either as `messages` or as a prompt and a completion.

    Each message from the assistant becomes a model call, but messages in a prompt are only context.
    """

    model_config = ConfigDict(extra="ignore")
    reward: _Score = None
    tape: str = Field(default="", max_length=200)
    group: str | None = Field(default=None, max_length=500)
    split: str = Field(default="train", max_length=200)
    status: Status = Status.FINISHED
    tools: Annotated[str | None, BeforeValidator(_as_text)] = None
    """The function schemas, as a JSON list in text form. A list of objects is converted to text."""
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    prompt: list[dict[str, Any]] | str | None = None
    completion: list[dict[str, Any]] | str | None = None

    @model_validator(mode="after")
    def _one_form(self) -> SFTRow:
        pair = self.prompt is not None and self.completion is not None
        if pair == (self.messages is not None):
            raise ValueError("a row has `messages`, or `prompt` and `completion`")
        return self


def write_sft(tapes: Iterable[Tape]) -> Iterator[Mapping[str, object] | str]:
    """Yield a row for each conversation of the tapes. A conversation that a later call extends is a part of the longer
    row. For a tape without a conversation, yield the reason as a string."""
    for tape in tapes:
        turns = turns_of(tape)
        if not turns:
            yield "no model call"
        for k, turn in enumerate(turns):
            if any(later.follows(turn) for later in turns[k + 1 :]):
                continue
            yield {
                "messages": _flat([*turn.messages, turn.reply]),
                "tools": json.dumps(list(turn.tools)) if turn.tools else None,
                "reward": tape.reward,
                "tape": tape.id,
                "group": tape.begin.group,
                "split": tape.begin.split,
                "status": str(tape.status),
            }


def read_sft(record: Mapping[str, object], stem: str) -> list[Conversation]:
    """Return the conversation in a row, as text without token ids. A trainer tokenizes it later."""
    _without_images(record)
    row = SFTRow.model_validate(dict(record))
    before, said = _back(row.prompt or [], "user"), _back(row.messages or row.completion or [], "assistant")
    answers, prompt = _spoken(before, said)
    return [
        Conversation(
            id=row.tape,
            answers=answers,
            tools=_tools(row.tools),
            task=_task(prompt),
            group=row.group,
            split=row.split,
            status=row.status,
            reward=None if row.reward is None else ("reward", row.reward),
        )
    ]


def _spoken(prompt: list[Message], said: list[Message]) -> tuple[tuple[Said, ...], list[Message]]:
    """Return the assistant's messages in `said` as answers, and all messages before the first answer."""
    whole = [*prompt, *said]
    at = [k for k in range(len(prompt), len(whole)) if whole[k]["role"] == "assistant"]
    if not at:
        raise ValueError("no message of an assistant, so there is nothing to learn from it")
    since = [0, *(k + 1 for k in at)]
    answers = tuple(Said(messages=tuple(whole[a:k]), reply=whole[k]) for a, k in zip(since, at, strict=False))
    return answers, whole[: at[0]]


# Preferences


class PreferenceRow(BaseModel):
    """A prompt with two answers, one chosen and one rejected."""

    model_config = ConfigDict(extra="ignore")
    prompt: list[dict[str, Any]] | str
    chosen: list[dict[str, Any]] | str = Field(min_length=1)
    rejected: list[dict[str, Any]] | str = Field(min_length=1)
    score_chosen: _Score = None
    score_rejected: _Score = None
    group: str | None = Field(default=None, max_length=500)
    tools: Annotated[str | None, BeforeValidator(_as_text)] = None


class _Member(NamedTuple):
    reward: float
    turns: list[Turn]


def write_preference(tapes: Iterable[Tape]) -> Iterator[Mapping[str, object] | str]:
    """Yield a row for each group, made of the attempts with the highest and the lowest reward. For every other tape,
    yield the reason why it is left out.

    All conversations stay in memory until the end, because the tapes of a group may come in any order.
    """
    groups: dict[str, list[_Member]] = {}
    for tape in tapes:
        turns = turns_of(tape)
        if tape.begin.group is None:
            yield "in no group"
        elif tape.reward is None or not turns:
            yield "unscored"
        else:
            groups.setdefault(tape.begin.group, []).append(_Member(tape.reward, turns))
    for name, members in groups.items():
        pair = _pair(members)
        why = "neither the best nor the worst of its group" if pair else "its group has one reward, or several prompts"
        yield from [why] * (len(members) - (2 if pair else 0))
        if pair is not None:
            yield {"group": name, **pair}


def _pair(members: Sequence[_Member]) -> dict[str, Any] | None:
    ranked = sorted(members, key=lambda member: member.reward)
    best, worst = ranked[-1], ranked[0]
    prompt = best.turns[0].messages
    if best.reward == worst.reward or worst.turns[0].messages != prompt:
        return None
    said = [_last(member.turns, prompt) for member in (best, worst)]
    if None in said:
        return None
    chosen, rejected = (one or [] for one in said)
    return {
        "prompt": _flat(prompt),
        "chosen": _flat(chosen),
        "rejected": _flat(rejected),
        "score_chosen": best.reward,
        "score_rejected": worst.reward,
        "tools": json.dumps(list(best.turns[0].tools)) if best.turns[0].tools else None,
    }


def _last(turns: Sequence[Turn], prompt: list[Message]) -> list[Message] | None:
    """Return what follows the prompt, up to the last answer of which a step was made. None if no such answer has the
    prompt."""
    ends = (turn for turn in reversed(turns) if turn.made and turn.messages[: len(prompt)] == prompt)
    return next(([*turn.messages, turn.reply][len(prompt) :] for turn in ends), None)


def read_preference(record: Mapping[str, object], stem: str) -> list[Conversation]:
    """Return the two answers of a row as attempts in one group. An answer without a score gets a reward component
    `preferred`, which is 1 for the chosen answer and 0 for the rejected one."""
    _without_images(record)
    row = PreferenceRow.model_validate(dict(record))
    prompt = _back(row.prompt, "user")
    made = []
    for k, (said, score) in enumerate(((row.chosen, row.score_chosen), (row.rejected, row.score_rejected))):
        answers, _ = _spoken(prompt, _back(said, "assistant"))
        reward = ("preferred", 1.0 - k) if score is None else ("reward", score)
        group = row.group or f"{stem}/{json.dumps(prompt)}"[:500]
        tools, task = _tools(row.tools), _task(prompt)
        made.append(Conversation(answers=answers, tools=tools, task=task, group=group, attempt=k, reward=reward))
    return made


# Messages in a column


def with_images(row: Mapping[str, object], image: Callable[[str], object]) -> Mapping[str, object] | str:
    """Return the row in TRL's form for pictures, or the reason why this isn't possible as a string.

    In this form, every content is a list of parts. The column `images` has the pictures for the parts `{"type":
    "image"}`, in order. `image` takes the name of a picture's file and returns the value for this column.
    """
    names: list[str] = []
    made: dict[str, object] = dict(row)
    for key in ("messages", "prompt", "completion", "chosen", "rejected"):
        before, shown = len(names), []
        for message in frames_of(cast("Sequence[Message]", row.get(key, ()))):
            parts = content_parts(message) or [{"type": "text", "text": message.get("content") or ""}]
            names += [str(part["media"]) for part in parts if "media" in part]
            shown.append({**message, "content": [PLACE if "media" in part else part for part in parts]})
        if key in ("chosen", "rejected") and len(names) > before:
            return "pictures behind the prompt, which TRL's preference form doesn't hold"
        made |= {key: shown} if key in row else {}
    return {**made, "images": [image(name) for name in names]}


def _without_images(row: Mapping[str, object]) -> None:
    if row.get("images"):
        raise ValueError("it has pictures (`images`), which only tasks hold: read the file as tasks")


def _flat(messages: Iterable[Message]) -> list[Message]:
    return [{**m, "tool_calls": json.dumps(m["tool_calls"])} if m.get("tool_calls") else dict(m) for m in messages]


def _back(messages: Iterable[dict[str, Any]] | str, role: str = "user") -> list[Message]:
    """Return validated messages, with tool calls parsed from JSON. A string becomes one message with `role`."""
    if isinstance(messages, str):
        messages = [{"role": role, "content": messages}]
    return checked_messages(
        [
            {**m, "tool_calls": json.loads(m["tool_calls"])} if isinstance(m.get("tool_calls"), str) else m
            for m in messages
        ]
    )


def _task(prompt: list[Message]) -> Task:
    return Task.model_validate({"public": {"prompt": prompt}})


def _tools(text: str | None) -> tuple[dict[str, JsonValue], ...]:
    found = json.loads(text) if text else []
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        raise ValueError("`tools` isn't a list of function schemas")
    return tuple(found)
