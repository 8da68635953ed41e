"""OpenEnv's `TrainingTrace`, version 1: one JSON object per episode, with one turn per model call.

A turn has the engine's prompt and completion ids, and the log-probs of the sampled tokens. It also has a loss mask over
prompt and completion, the request and the reply. Facts without a field stand in a turn's free `metadata`, under
`tapereel`; the first turn has those of the episode. An import reads them there, and other readers ignore them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...tapes import Sampling
from .story import MODEL, OURS, Facts, Story, Turn, conversation

LOSES = (
    "which steps were made of the words: types of observations, thoughts and actions, and the environment's own words "
    "after the last call",
    "who the agent and the environment were, seeds, times, attempts of a call, usage and cost",
    "rewards per step (their sums are kept), and layers",
)
"""An import restores the first, the third and parts of the second as plain text, answers and episode scores."""

Id = Annotated[int, Field(ge=0, le=2**31 - 1)]
Bit = Annotated[int, Field(ge=0, le=1)]


class TrainingTurn(BaseModel):
    """One engine call, with the checks that OpenEnv demands."""

    model_config = ConfigDict(strict=True, extra="forbid")
    node_id: str = Field(min_length=1, max_length=500)
    prompt_token_ids: list[Id] = Field(min_length=1)
    completion_token_ids: list[Id]
    per_token_logps: list[Annotated[float, Field(le=0, allow_inf_nan=False)]]
    loss_mask: list[Bit]
    request: dict[str, Any] = {}
    response: dict[str, Any] = {}
    metadata: dict[str, Any] = {}

    @model_validator(mode="after")
    def _agrees(self) -> TrainingTurn:
        sampled = len(self.completion_token_ids)
        if len(self.per_token_logps) != sampled:
            raise ValueError(f"{len(self.per_token_logps)} log-probs for {sampled} completion tokens")
        if len(self.loss_mask) != len(self.prompt_token_ids) + sampled:
            raise ValueError("the loss mask covers prompt and completion")
        if any(self.loss_mask[: len(self.prompt_token_ids)]):
            raise ValueError("a token of the prompt is to be trained on")
        return self


class TrainingTrace(BaseModel):
    """One episode."""

    model_config = ConfigDict(strict=True, extra="forbid")
    schema_version: Literal[1] = 1
    turns: list[TrainingTurn] = Field(max_length=2000)

    @model_validator(mode="after")
    def _distinct(self) -> TrainingTrace:
        names = [turn.node_id for turn in self.turns]
        if len(set(names)) != len(names):
            raise ValueError("two turns have one node_id")
        return self


def write(stories: Iterable[Story]) -> Iterator[Mapping[str, object] | str]:
    """A trace for each story; the reason for a story that lacks token ids or log-probs of sampled tokens."""
    for story in stories:
        problem = _problem(story)
        if problem is not None:
            yield problem
            continue
        turns = [_turn(turn, story.facts() if k == 0 else None) for k, turn in enumerate(story.turns)]
        yield TrainingTrace(turns=turns).model_dump(mode="json")


def _problem(story: Story) -> str | None:
    if not story.turns:
        return "no model call"
    if any(turn.completion is None or not turn.prompt for turn in story.turns):
        return "text without token ids"
    if any(turn.logprobs is None or any(math.isnan(p) for p in turn.logprobs) for turn in story.turns):
        return "unknown log-probs"
    return None


def _turn(turn: Turn, facts: Mapping[str, Any] | None) -> TrainingTurn:
    completion = list(turn.completion or ())
    targets = list(turn.targets) if turn.targets is not None else [1] * len(completion)
    own = {"sampling": turn.sampling.model_dump(mode="json"), "spans": [list(span) for span in turn.spans]}
    return TrainingTurn(
        node_id=turn.name,
        prompt_token_ids=list(turn.prompt or ()),
        completion_token_ids=completion,
        # Rounding may make a log-prob slightly positive, which the format refuses.
        per_token_logps=[min(0.0, float(p)) for p in turn.logprobs or ()],
        loss_mask=[0] * len(turn.prompt or ()) + targets,
        request={"messages": list(turn.messages), "tools": list(turn.tools) or None},
        response={"choices": [{"message": turn.reply, "finish_reason": turn.finish}]},
        metadata={"agent": turn.by, OURS: {**own, **({"episode": facts} if facts is not None else {})}},
    )


class _Own(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sampling: Sampling = Sampling()
    spans: tuple[tuple[str, int, int], ...] = ()
    episode: Facts = Facts()


def read(record: Mapping[str, object], stem: str) -> list[Story]:
    """The story of one trace. ValueError if the record isn't valid. stem: unused."""
    trace = TrainingTrace.model_validate(dict(record))
    own = [_Own.model_validate(turn.metadata.get(OURS, {})) for turn in trace.turns]
    facts = own[0].episode if own else Facts()
    return [facts.story(map(_read, trace.turns, own))]


def _read(turn: TrainingTurn, own: _Own) -> Turn:
    n = len(turn.prompt_token_ids)
    choices = turn.response.get("choices") or [{}]
    choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
    (reply,) = conversation([choice.get("message") or {"role": "assistant", "content": ""}])
    by = turn.metadata.get("agent")
    tools = turn.request.get("tools") or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("the tools of a request are a list of objects")
    targets = turn.loss_mask[n:]
    return Turn(
        name=turn.node_id,
        by=by if isinstance(by, str) and by else MODEL,
        messages=tuple(conversation(turn.request.get("messages") or [])),
        reply=reply,
        tools=tuple(tools),
        prompt=turn.prompt_token_ids,
        completion=turn.completion_token_ids,
        logprobs=turn.per_token_logps,
        targets=None if all(targets) else targets,
        finish=str(choice.get("finish_reason") or "stop"),
        sampling=own.sampling,
        spans=own.spans,
    )
