"""Rows for TRL's trainers: completions with tokens and rewards, conversations to imitate, and preference pairs.

Each row is flat, so JSONL and Parquet hold the same rows. Tool calls and tool schemas are JSON strings, because a
column of Parquet has one type. An import also accepts TRL's standard form, in which prompt and completion are texts:
a text becomes one message, of the user or of the assistant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator

from ...tapes import Message, Status, Task
from ...tapes.messages import frames_of
from ...tapes.steps import PLACE, content_parts
from .openenv_traces import Bit, Id
from .story import Score, Story, Turn, conversation

_COMMON = (
    "steps and their types: what is kept are messages",
    "who the agent and the environment were, seeds, times, versions of the policy, sampling, tools of single calls",
    "the private part of the task, reward components and layers: what is kept is the reward",
)
TRL_LOSES = (*_COMMON, "that several rows are one episode: each row comes back as a tape of its own")
SFT_LOSES = (*_COMMON, "token ids and log-probs")
PREFERENCE_LOSES = (*SFT_LOSES, "attempts that are neither the best nor the worst of their group")


def _as_text(tools: object) -> object:
    return json.dumps(tools) if isinstance(tools, list) else tools


class _Row(BaseModel):
    """The fields of all rows besides messages; all are optional."""

    model_config = ConfigDict(extra="ignore")
    reward: float | None = Field(default=None, allow_inf_nan=False)
    tape: str = Field(default="", max_length=200)
    group: str | None = Field(default=None, max_length=500)
    split: str = Field(default="train", max_length=200)
    status: Status = Status.FINISHED
    tools: Annotated[str | None, BeforeValidator(_as_text)] = None
    """A list of function schemas, as JSON text; a list becomes text."""

    def story(self, turns: Sequence[Turn], prompt: list[Message]) -> list[Story]:
        scores = () if self.reward is None else (Score(name="reward", value=self.reward),)
        return [
            Story(
                id=self.tape,
                turns=tuple(turns),
                task=_task(prompt),
                group=self.group,
                split=self.split,
                status=self.status,
                scores=scores,
            )
        ]


def _facts(story: Story) -> dict[str, Any]:
    return {
        "reward": story.reward,
        "tape": story.id,
        "group": story.group,
        "split": story.split,
        "status": story.status.value,
    }


# Completions with tokens


class TRLRow(_Row):
    """One token sequence: a prompt and a completion. `completion_mask` is 1 for the model's tokens."""

    prompt: list[dict[str, Any]]
    completion: list[dict[str, Any]]
    prompt_ids: list[Id] = Field(min_length=1)
    completion_ids: list[Id]
    completion_mask: list[Bit]
    logprobs: list[Annotated[float, Field(allow_inf_nan=False)] | None] | None = None


def write_trl(stories: Iterable[Story]) -> Iterator[Mapping[str, object] | str]:
    """A row for each chain of calls in which each call extends the one before; a reason for a story without rows."""
    for story in stories:
        if any(turn.prompt is None for turn in story.turns):
            yield "text without token ids"
            continue
        if not story.turns:
            yield "no model call"
        for chain in _chains(story.turns):
            first, last = chain[0], chain[-1]
            start, ids = len(first.prompt or ()), [*(last.prompt or ()), *(last.completion or ())]
            mask, logprobs = np.zeros(len(ids), dtype=int), np.full(len(ids), np.nan)
            for turn in chain:
                at = len(turn.prompt or ())
                span = slice(at, at + len(turn.completion or ()))
                mask[span] = turn.targets if turn.targets is not None else 1
                logprobs[span] = turn.logprobs if turn.logprobs is not None else np.nan
            logprobs[mask == 0] = np.nan  # a masked token isn't a target, so its log-prob must not be read
            whole = [*last.messages, last.reply]
            yield {
                "prompt": _flat(first.messages),
                "completion": _flat(whole[len(first.messages) :]),
                "tools": json.dumps(list(first.tools)) if first.tools else None,
                "prompt_ids": ids[:start],
                "completion_ids": ids[start:],
                "completion_mask": mask[start:].tolist(),
                "logprobs": [None if math.isnan(p) else p for p in logprobs[start:].tolist()],
                **_facts(story),
            }


def _chains(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Chains of calls: a call extends a chain if its prompt begins with the tokens and messages of the last call."""
    chains: list[list[Turn]] = []
    for turn in turns:
        extended = next((chain for chain in chains if turn.follows(chain[-1]) and turn.extends(chain[-1])), None)
        if extended is not None:
            extended.append(turn)
        else:
            chains.append([turn])
    return chains


def read_trl(record: Mapping[str, object], stem: str) -> list[Story]:
    """One story, with a call for each run of ones in the mask. ValueError if mask, ids or messages disagree."""
    _without_images(record)
    row = TRLRow.model_validate(dict(record))
    n = len(row.completion_ids)
    logprobs = row.logprobs if row.logprobs is not None else [None] * n
    if not len(row.completion_mask) == len(logprobs) == n:
        raise ValueError(f"{n} completion ids, {len(row.completion_mask)} in the mask, {len(logprobs)} log-probs")
    prompt, said = _back(row.prompt), _back(row.completion)
    replies = [k for k, message in enumerate(said) if message["role"] == "assistant"]
    edges = np.flatnonzero(np.diff([0, *row.completion_mask, 0])).tolist()
    spans = list(zip(edges[::2], edges[1::2], strict=True))
    if len(spans) != len(replies):
        raise ValueError(
            f"the mask has {len(spans)} stretches of the model's tokens, the completion {len(replies)} "
            "messages of an assistant"
        )
    turns = [
        Turn(
            name=str(k),
            messages=(*prompt, *said[:at]),
            reply=said[at],
            tools=_tools(row.tools),
            prompt=[*row.prompt_ids, *row.completion_ids[:a]],
            completion=row.completion_ids[a:b],
            logprobs=[math.nan if p is None else p for p in logprobs[a:b]],
        )
        for k, (at, (a, b)) in enumerate(zip(replies, spans, strict=True))
    ]
    return row.story(turns, prompt)


# Conversations to imitate


class SFTRow(_Row):
    """One conversation, or a prompt and a completion.

    Each message of the assistant in a conversation is a call. With a prompt, only those of the completion are.
    """

    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    prompt: list[dict[str, Any]] | str | None = None
    completion: list[dict[str, Any]] | str | None = None

    @model_validator(mode="after")
    def _one_form(self) -> SFTRow:
        pair = self.prompt is not None and self.completion is not None
        if pair == (self.messages is not None):
            raise ValueError("a row has `messages`, or `prompt` and `completion`")
        return self


def write_sft(stories: Iterable[Story]) -> Iterator[Mapping[str, object] | str]:
    """A row for each conversation that no later call extends."""
    for story in stories:
        if not story.turns:
            yield "no model call"
        for k, turn in enumerate(story.turns):
            if any(later.follows(turn) for later in story.turns[k + 1 :]):
                continue
            yield {
                "messages": _flat([*turn.messages, turn.reply]),
                "tools": json.dumps(list(turn.tools)) if turn.tools else None,
                **_facts(story),
            }


def read_sft(record: Mapping[str, object], stem: str) -> list[Story]:
    """One story without token ids; a trainer tokenizes its text."""
    _without_images(record)
    row = SFTRow.model_validate(dict(record))
    before, said = _back(row.prompt or [], "user"), _back(row.messages or row.completion or [], "assistant")
    turns, prompt = _spoken(before, said, row.tools)
    return row.story(turns, prompt)


def _spoken(prompt: list[Message], said: list[Message], tools: str | None) -> tuple[list[Turn], list[Message]]:
    """(a call for each message of the assistant in `said`, the messages before the first call)."""
    whole = [*prompt, *said]
    at = [k for k in range(len(prompt), len(whole)) if whole[k]["role"] == "assistant"]
    if not at:
        raise ValueError("no message of an assistant, so there is nothing to learn from it")
    turns = [Turn(name=str(k), messages=tuple(whole[:k]), reply=whole[k], tools=_tools(tools)) for k in at]
    return turns, whole[: at[0]]


# Preferences


class PreferenceRow(BaseModel):
    """Two answers to one prompt: the chosen and the rejected one."""

    model_config = ConfigDict(extra="ignore")
    prompt: list[dict[str, Any]] | str
    chosen: list[dict[str, Any]] | str = Field(min_length=1)
    rejected: list[dict[str, Any]] | str = Field(min_length=1)
    score_chosen: float | None = Field(default=None, allow_inf_nan=False)
    score_rejected: float | None = Field(default=None, allow_inf_nan=False)
    group: str | None = Field(default=None, max_length=500)
    tools: Annotated[str | None, BeforeValidator(_as_text)] = None


def write_preference(stories: Iterable[Story]) -> Iterator[Mapping[str, object] | str]:
    """A pair for each group: the answers with the highest and the lowest reward.

    All stories stay in memory until the last, because a group's members may come in any order.
    """
    groups: dict[str, list[Story]] = {}
    for story in stories:
        if story.group is None:
            yield "in no group"
        elif story.reward is None or not story.turns:
            yield "unscored"
        else:
            groups.setdefault(story.group, []).append(story)
    for name, members in groups.items():
        pair = _pair(members)
        why = "neither the best nor the worst of its group" if pair else "its group has one reward, or several prompts"
        yield from [why] * (len(members) - (2 if pair else 0))
        if pair is not None:
            yield {"group": name, **pair}


def _pair(members: Sequence[Story]) -> dict[str, Any] | None:
    ranked = sorted(members, key=lambda story: story.reward or 0.0)
    best, worst = ranked[-1], ranked[0]
    prompt = best.turns[0].messages
    if best.reward == worst.reward or worst.turns[0].messages != prompt:
        return None
    chosen, rejected = ([*s.turns[-1].messages, s.turns[-1].reply][len(prompt) :] for s in (best, worst))
    return {
        "prompt": _flat(prompt),
        "chosen": _flat(chosen),
        "rejected": _flat(rejected),
        "score_chosen": best.reward,
        "score_rejected": worst.reward,
        "tools": json.dumps(list(best.turns[0].tools)) if best.turns[0].tools else None,
    }


def read_preference(record: Mapping[str, object], stem: str) -> list[Story]:
    """Two stories in one group. Without scores, the reward `preferred` is 1 for the chosen and 0 for the rejected."""
    _without_images(record)
    row = PreferenceRow.model_validate(dict(record))
    prompt = _back(row.prompt, "user")
    made = []
    for k, (said, score) in enumerate(((row.chosen, row.score_chosen), (row.rejected, row.score_rejected))):
        turns, _ = _spoken(prompt, _back(said, "assistant"), row.tools)
        earned = Score(name="preferred", value=1.0 - k) if score is None else Score(name="reward", value=score)
        group = row.group or f"{stem}/{json.dumps(prompt)}"[:500]
        made.append(Story(id="", turns=tuple(turns), task=_task(prompt), group=group, attempt=k, scores=(earned,)))
    return made


# Messages in a column


def with_images(row: Mapping[str, object], image: Callable[[str], object]) -> Mapping[str, object] | str:
    """The row in TRL's form for pictures: every content is a list of parts, and the column `images` has the picture of
    each part `{"type": "image"}`, in order. A reason where TRL's form can't hold the row. image: what stands in the
    column, by the name of the file."""
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
        raise ValueError("it has pictures (`images`), which only tasks hold: read the file by `--tasks`")


def _flat(messages: Iterable[Message]) -> list[Message]:
    return [{**m, "tool_calls": json.dumps(m["tool_calls"])} if m.get("tool_calls") else dict(m) for m in messages]


def _back(messages: Iterable[dict[str, Any]] | str, role: str = "user") -> list[Message]:
    """Validated messages, with tool calls parsed from JSON. role: the role of a plain text."""
    if isinstance(messages, str):
        messages = [{"role": role, "content": messages}]
    return conversation(
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
        raise ValueError("`tools` is no list of function schemas")
    return tuple(found)
