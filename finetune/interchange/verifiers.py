"""Rollouts in the format of verifiers' `results.jsonl`: one JSON object per rollout, with its `trajectory`.

A rollout without a trajectory has its prompt and completion as messages; each message of the assistant is a call
without token ids. An export writes reward components as `metrics`, and other facts without a field to `info`, under
`tapereel`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from ...tapes import Message, Sampling, Status, Task
from .openenv_traces import Bit, Id
from .story import MODEL, OURS, Facts, Score, Story, Turn, cause_of, conversation

LOSES = (
    "which steps were made of the words: types of observations, thoughts and actions, and the environment's own words "
    "after the last call",
    "who the agent and the environment were, seeds, times, tools of single calls, versions of the policy, attempts of "
    "a call, cost",
    "rewards per step (their sums are kept), and layers other than labels",
    "names of roles: verifiers has calls of tools as JSON strings, which come back as calls",
)


class Tokens(BaseModel):
    """Token ids, mask and log-probs of one step of a trajectory."""

    model_config = ConfigDict(extra="ignore")
    prompt_ids: list[Id]
    completion_ids: list[Id]
    completion_mask: list[Bit]
    completion_logprobs: list[float | None]


class TrajectoryStep(BaseModel):
    """One model call."""

    model_config = ConfigDict(extra="ignore")
    prompt: list[dict[str, Any]] | str
    completion: list[dict[str, Any]] | str
    tokens: Tokens | None = None
    is_truncated: bool = False
    response: dict[str, JsonValue] | None = None
    extras: dict[str, JsonValue] | None = None


class Rollout(BaseModel):
    """One line of `results.jsonl`."""

    model_config = ConfigDict(extra="ignore")
    example_id: int | str = 0
    prompt: list[dict[str, Any]] | str | None = None
    completion: list[dict[str, Any]] | str | None = None
    answer: JsonValue = None
    reward: float | None = Field(default=None, allow_inf_nan=False)
    metrics: dict[str, float | None] = {}
    info: JsonValue = None
    is_truncated: bool = False
    error: JsonValue = None
    trajectory: list[TrajectoryStep] | None = Field(default=None, max_length=2000)


class _Own(BaseModel):
    """What an export adds to a step, under `tapereel`."""

    model_config = ConfigDict(extra="ignore")
    by: str = ""
    finish: str = ""
    sampling: Sampling = Sampling()


# Stories to rollouts


def write(stories: Iterable[Story]) -> Iterator[Mapping[str, object] | str]:
    """A rollout for each scored story; a reason for an unscored one, which the format can't hold."""
    examples: dict[str, int] = {}
    for story in stories:
        if not story.turns:
            yield "no model call"
        elif story.reward is None:
            yield "unscored"
        else:
            yield _rollout(story, examples.setdefault(story.task.hash, len(examples)))


def _rollout(story: Story, example: int) -> dict[str, Any]:
    first, last = story.turns[0], story.turns[-1]
    whole = [*last.messages, last.reply]
    same = list(whole[: len(first.messages)]) == list(first.messages)
    completion = whole[len(first.messages) :] if same else [turn.reply for turn in story.turns]
    private = story.task.private
    return {
        "example_id": example,
        "prompt": _theirs(first.messages),
        "completion": _theirs(completion),
        **({"answer": private} if isinstance(private, str) else {}),
        "info": {OURS: story.facts()},
        "reward": story.reward,
        "metrics": _metrics(story),
        "error": _error(story),
        "timing": {"start_time": 0.0, "total": 0.0},
        "is_completed": True,
        "is_truncated": story.status in (Status.TRUNCATED, Status.LIMIT),
        "stop_condition": story.status.value,
        "trajectory": [_step(turn, story.id) for turn in story.turns],
        "tool_defs": None,
    }


def _metrics(story: Story) -> dict[str, float]:
    found: dict[str, float] = {}
    for score in story.scores:
        found[score.name] = found.get(score.name, 0.0) + score.value
    return found


def _error(story: Story) -> dict[str, str] | None:
    if story.status is not Status.ERROR:
        return None
    message = (story.cause.message if story.cause is not None else None) or "unknown"
    kind = (story.cause.error if story.cause is not None else None) or "Error"
    return {"error": kind, "error_chain_repr": f"{kind}({message!r})", "error_chain_str": message}


def _step(turn: Turn, trajectory: str) -> dict[str, Any]:
    cut = turn.finish == "length"
    tokens = None
    if turn.prompt is not None and turn.completion is not None:
        n = len(turn.completion)
        tokens = {
            "prompt_ids": list(turn.prompt),
            "prompt_mask": [0] * len(turn.prompt),
            "completion_ids": list(turn.completion),
            "completion_mask": list(turn.targets or [1] * n),
            "completion_logprobs": [None if math.isnan(p) else float(p) for p in turn.logprobs or [math.nan] * n],
            "overlong_prompt": False,
            "is_truncated": cut,
            "routed_experts": None,
        }
    message = _theirs([turn.reply])[0]
    return {
        "prompt": _theirs(turn.messages),
        "completion": [message],
        "response": {
            "id": turn.name,
            "created": 0,
            "model": turn.by,
            "usage": None,
            "message": {
                "role": "assistant",
                "content": turn.reply.get("content") or "",
                "finish_reason": turn.finish if turn.finish in ("stop", "length", "tool_calls") else None,
                "is_truncated": cut,
                "tokens": None,
            },
        },
        "tokens": tokens,
        "reward": None,
        "advantage": None,
        "is_truncated": cut,
        "trajectory_id": trajectory,
        "extras": {OURS: {"by": turn.by, "finish": turn.finish, "sampling": turn.sampling.model_dump(mode="json")}},
    }


def _theirs(messages: Iterable[Message]) -> list[Message]:
    """Messages with tool calls as JSON strings of `{id, name, arguments}`, as verifiers writes them."""
    return [
        {**m, "tool_calls": [json.dumps({"id": c.get("id") or "", **c["function"]}) for c in m["tool_calls"]]}
        if m.get("tool_calls")
        else dict(m)
        for m in messages
    ]


# Rollouts to stories


def read(record: Mapping[str, object], stem: str) -> list[Story]:
    """The story of one rollout. stem: of the file's name, used in group names. ValueError for an invalid record."""
    rollout = Rollout.model_validate(dict(record))
    info = _parsed(rollout.info)
    ours = info.pop(OURS, None) if isinstance(info, dict) else None
    turns = tuple(_read_turns(rollout))
    if not turns:
        raise ValueError("neither a trajectory nor a completion with an assistant's message")
    if ours is not None:
        return [Facts.model_validate(ours).story(turns)]
    status, cause = Status.TRUNCATED if rollout.is_truncated else Status.FINISHED, None
    if rollout.error:
        chain = rollout.error.get("error_chain_str") if isinstance(rollout.error, dict) else rollout.error
        status, cause = Status.ERROR, cause_of(str(chain))
    prompt = rollout.prompt if isinstance(rollout.prompt, str) else _ours(rollout.prompt or [])
    task = Task.model_validate({"public": {"prompt": prompt}, "private": {"answer": rollout.answer, "info": info}})
    scores = [] if rollout.reward is None else [Score(name="reward", value=rollout.reward)]
    scores += [Score(name=n, value=v, weight=0.0) for n, v in rollout.metrics.items() if v is not None and v == v]
    return [
        Story(
            id="",
            task=task,
            group=f"{stem}/{rollout.example_id}",
            status=status,
            cause=cause,
            turns=turns,
            scores=tuple(scores),
        )
    ]


def _read_turns(rollout: Rollout) -> Iterator[Turn]:
    if not rollout.trajectory:
        said: list[Message] = _ours(rollout.prompt or [])
        for message in _ours(rollout.completion or [], role="assistant"):
            if message["role"] == "assistant":
                yield Turn(name=f"{len(said)}", messages=tuple(said), reply=message)
            said.append(message)
        return
    for k, step in enumerate(rollout.trajectory):
        own = _Own.model_validate((step.extras or {}).get(OURS) or {})
        reply = _ours(step.completion, role="assistant")
        if not reply:
            raise ValueError(f"trajectory.{k}: no completion")
        tokens = step.tokens
        yield Turn(
            name=str((step.response or {}).get("id") or k),
            by=own.by or MODEL,
            messages=tuple(_ours(step.prompt)),
            reply=reply[-1],
            finish=own.finish or ("length" if step.is_truncated else "stop"),
            sampling=own.sampling,
            **(_tokens(tokens, k) if tokens else {}),
        )


def _tokens(tokens: Tokens, k: int) -> dict[str, Any]:
    n = len(tokens.completion_ids)
    if not len(tokens.completion_mask) == len(tokens.completion_logprobs) == n:
        raise ValueError(
            f"trajectory.{k}: {n} completion ids, {len(tokens.completion_mask)} in the mask, "
            f"{len(tokens.completion_logprobs)} log-probs"
        )
    known = [math.nan if p is None else p for p in tokens.completion_logprobs]
    return {
        "prompt": tokens.prompt_ids,
        "completion": tokens.completion_ids,
        "logprobs": known,
        "targets": None if all(tokens.completion_mask) else tokens.completion_mask,
    }


def _ours(messages: list[dict[str, Any]] | str, *, role: str = "user") -> list[Message]:
    if isinstance(messages, str):
        return [{"role": role, "content": messages}]
    made: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls")
        if not calls:
            made.append({key: value for key, value in message.items() if key != "tool_calls"})
            continue
        if not isinstance(calls, list):
            raise ValueError("tool_calls is no list")
        found = [_parsed(call) for call in calls]
        if not all(isinstance(call, dict) for call in found):
            raise ValueError("a call of a tool is no object")
        made.append(
            {
                **message,
                "tool_calls": [
                    call
                    if "function" in call
                    else {
                        "id": str(call.get("id") or ""),
                        "type": "function",
                        "function": {key: value for key, value in call.items() if key != "id"},
                    }
                    for call in found
                ],
            }
        )
    return conversation(made)


def _parsed(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
