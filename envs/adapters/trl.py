"""Adapter for code written for TRL: environment classes, reward functions and rows of data.

An environment class has `reset(**row)`, which may return text that is appended to the prompt. Its other public methods
are the tools, described by type hints and docstrings. `get_reward()`, if defined, gives the final score. A reward
function is `f(prompts, completions, completion_ids, **columns)` and returns a list with one number, or None, for each
completion. TRL need not be installed. Some details differ from TRL:

1. Every episode has its own instance, while TRL resets one instance repeatedly.
2. A reward function receives a batch of one. Functions that compare the completions in a batch can't be used.
3. A row's `images`, `image`, `videos` or `video` are the pictures and videos in the prompt. `reset` and reward
   functions get PIL images. TRL has no column for videos.
4. Values that don't exist here are not passed as None: `completion_ids` if an episode has no token ids, `environments`
   if an episode has ended, and `trainer_state`, since no TRL trainer runs. If the function's parameter has
   a default, the default is used. Otherwise the function fails with an error that names the parameter.
5. An answer whose call can't be read doesn't end the episode. The completion has the answer's raw text, then a user
   message with the problem. If the prompt is text, the completion is the text of all messages after it.
6. The values that a function passes to `log_metric` and `log_extra` are kept as evidence of its score.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import JsonValue

from ...tapes import (
    Action,
    Call,
    Message,
    NotATape,
    Observation,
    ParseError,
    Picture,
    Status,
    Tape,
    Task,
    Thought,
    ToolCall,
    ToolCalls,
    Video,
)
from ...tapes.common.stats import plain
from ...tapes.decoding import DATA_URL, decoded
from ...tapes.errors import BadArgument
from ...tapes.messages import frames_of, heard, text_of
from ...tapes.pictures import Visual
from ...tapes.steps import Prompt, content_parts, place_of
from ..blocking import in_thread
from ..environment import Effect, Outcome
from ..questions import Question, as_messages, question, question_key, question_part, taken
from ..rewards import Rewards, RewardSource, Scored
from ..taskset import SHOWN, prompt_part
from .tools import ToolEnvironment, as_parts, tool, with_pictures

Factory = Callable[[], Any]
TRLReward = Callable[..., Any]
"""`f(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async."""
_NOT_TOOLS = ("reset", "get_reward")
_NO_STATE = "no TRL trainer runs here, so there is no trainer state"


def trl_row(row: Mapping[str, JsonValue]) -> Task:
    """Convert a row of TRL data to a task. The prompt, its images and its videos are public, other columns private.

    Raises BadArgument if the row has no `prompt`, or if the prompt is neither text nor messages. If `reset` returns the
    whole prompt, set the row's `prompt` to None.
    """
    if not isinstance(row, Mapping) or "prompt" not in row:
        has = f"the columns {', '.join(map(repr, row))}" if isinstance(row, Mapping) and row else f"{row!r:.80}"
        raise BadArgument(
            f"a row needs a column `prompt`, a string or a list of messages; this is {has}. If `reset` returns the "
            "whole prompt, set it to None"
        )
    if row["prompt"] is not None:
        question(dict(row))
    public = {k: prompt_part(k, v) for k, v in row.items() if k in ("prompt", *SHOWN)}
    return Task.model_validate({"public": public, "private": {k: v for k, v in row.items() if k not in public}})


def row_of(task: Task) -> dict[str, JsonValue]:
    """Return all columns of the task's original row. Images and the frames of videos are PIL images."""
    parts = (task.filled(task.public), task.filled(task.private))
    return {key: _back(v) for part in parts if isinstance(part, dict) for key, v in part.items()}


def _back(value: Any) -> Any:
    """Return a column's value, with PIL images for pictures, data URLs and the frames of videos."""
    if isinstance(value, list):
        return [_back(one) for one in value]
    if isinstance(value, Video):
        return {"frames": _back(list(value.frames)), "fps": value.fps, "indices": list(value.indices)}
    picture = Picture.of(value) if isinstance(value, str) and DATA_URL.match(value) else value
    return decoded(picture.data or b"") if isinstance(picture, Picture) else value


class TRLEnvironment(ToolEnvironment):
    """An environment of TRL, for tasks made by `trl_row`: `TRLEnvironment(WordGame, rewards=[exact])`.

    The agent for this environment is `ChatAgent(actions=[ToolCalls], plain=Answer)`. An answer without a call ends the
    episode, as in TRL. `factory` is the `environment_factory` of `GRPOTrainer`: a class, a dict of classes, or None for
    tasks with one turn. A row's `environment` selects a class in the dict. `rewards` are the `reward_funcs`. Each
    function becomes a reward component with the function's name, and a second one of this name is `NAME_2`.
    """

    def __init__(
        self,
        factory: Factory | Mapping[str, Factory] | None = None,
        *,
        rewards: TRLReward | RewardSource[Tape] | Iterable[TRLReward | RewardSource[Tape]] = (),
        reward_weights: Sequence[float] | None = None,
        effect: Effect = "pure",
    ) -> None:
        """`rewards` is one function or several, and `reward_weights` are their weights, by default 1 each."""
        super().__init__((), parallel=1)
        self.effect = effect
        self._factory = factory
        self._instance: Any = None
        given: list[Any] = [rewards] if callable(rewards) or isinstance(rewards, RewardSource) else list(rewards)
        if wrong := [one for one in given if not (callable(one) or isinstance(one, RewardSource))]:
            raise BadArgument(
                f"rewards has {wrong[0]!r:.80}: give reward functions or RewardSources, and weights as `reward_weights`"
            )
        sources = [one if isinstance(one, RewardSource) else self._source(one) for one in given]
        names = [one.name for one in sources]
        weights = [one.weight for one in sources] if reward_weights is None else reward_weights
        if len(weights) != len(sources):
            raise BadArgument(f"reward_weights are {weights!r:.80} for {len(sources)} rewards: give one for each")
        for k, (one, weight) in enumerate(zip(sources, weights, strict=True)):
            before = names[:k].count(one.name)
            sources[k] = replace(one, name=f"{one.name}_{before + 1}" if before else one.name, weight=weight)
        if sources:
            self.rewards = Rewards(sources)

    def check_task(self, task: Task) -> str | None:
        if type(self).reset is not TRLEnvironment.reset:  # the task is read by another rule
            return None
        self._asked(task)
        return taken(task.private) if task.bare else None

    def _asked(self, task: Task) -> Question:
        """Return the question, which is empty if the row's `prompt` is None, since `reset` returns it then."""
        part, public = question_part(task)
        if isinstance(part, dict) and "prompt" in part and question_key(part) is None:
            return ""
        return question(part, public)

    async def reset(self, task: object) -> Prompt:
        self.task = Task.of(task)
        row = row_of(self.task)
        self._instance, addition = await self._made(row), None
        if self._instance is not None:
            members = inspect.getmembers(type(self._instance), predicate=inspect.isfunction)
            names = [name for name, _ in members if not name.startswith("_") and name not in _NOT_TOOLS]
            self.tools = {name: tool(getattr(self._instance, name), effect=self.effect) for name in names}
            addition = await self._own(self._instance.reset, **row)
        asked = self._asked(self.task)
        messages, pictures = await with_pictures(as_messages(asked), question_part(self.task)[0])
        if not asked and addition is None:
            raise BadArgument("the row's `prompt` is None, and no `reset` returns the prompt: set it")
        if addition is not None:
            messages[-1], more = await _extended(messages[-1], addition, self._instance)
            pictures += more
        last = next((text_of(m) for m in reversed(messages) if m["role"] == "user"), "")
        tools = tuple(t.schema for t in self.tools.values())
        return Prompt(text=last, messages=tuple(messages), tools=tools, pictures=tuple(pictures))

    async def finish(self, status: Status) -> Outcome | None:
        score: Any = await self._own(self._instance.get_reward) if hasattr(self._instance, "get_reward") else None
        return Outcome(reward=None if _is_none(score) else {type(self._instance).__name__: score})

    async def close(self) -> None:
        close = getattr(self._instance, "close", None)
        try:
            if callable(close) and "close" not in self.tools:
                await self._own(close)
        finally:
            await super().close()

    def _source(self, function: TRLReward) -> RewardSource[Tape]:
        async def score(tape: Tape) -> Scored | None:
            return await _score(function, tape, None if self._instance is None else [self._instance])

        return RewardSource(score=score, name=_name(function), pure="environments" not in _parameters(function))

    async def _made(self, row: dict[str, Any]) -> Any:
        factory = self._factory
        if isinstance(factory, Mapping):
            name = row.pop("environment", None)
            if name not in factory:
                raise BadArgument(f"the row names the environment {name!r}; there are {', '.join(map(repr, factory))}")
            factory = factory[name]
        made = await self._own(factory) if factory is not None else None
        if made is not None and not callable(getattr(made, "reset", None)):
            raise BadArgument(f"{type(made).__qualname__} has no method `reset`; a TRL environment class must have one")
        return made


def trl_reward(function: TRLReward, *, weight: float = 1.0, pure: bool = True) -> RewardSource[Tape]:
    """Return the function as a reward source for finished tapes, for example for `tapereel replay rewards`."""

    async def score(tape: Tape) -> Scored | None:
        return await _score(function, tape, None)

    return RewardSource(score=score, name=_name(function), weight=weight, pure=pure)


async def _score(function: TRLReward, tape: Tape, environments: list[Any] | None) -> Scored | None:
    row, first = row_of(tape.begin.task), tape[0]
    prompt = row.get(question_key(row) or "prompt", question_part(tape.begin.task)[0])
    completion: Any = _conversation(tape, isinstance(prompt, str)) or [{"role": "assistant", "content": ""}]
    if isinstance(prompt, str):
        completion = "\n".join(map(text_of, completion))
    elif isinstance(first, Prompt):
        prompt = [dict(message) for message in first.messages]  # with what `reset` returned
    logged: dict[str, dict[str, JsonValue]] = {}
    arguments: dict[str, Any] = {
        "prompts": [prompt],
        "completions": [completion],
        "log_extra": _log(logged, "extra"),
        "log_metric": _log(logged, "metrics"),
    }
    missing = {"trainer_state": _NO_STATE}
    columns = row.keys() - {"prompt", "completion", "completion_ids"}
    if own := sorted(columns & {*arguments, *missing, "environments"}):
        raise BadArgument(
            f"the row has the column {own[0]!r}, but a reward function gets its own `{own[0]}`: rename the column"
        )
    arguments |= {key: [row[key]] for key in columns}
    if environments is not None:
        arguments["environments"] = environments
    else:
        missing["environments"] = "the episode has no environment class, or has ended"
    try:
        arguments["completion_ids"] = [completion_ids(tape)]
    except NotATape as error:
        missing["completion_ids"] = str(error)
    return _read(function, await _called(function, **_accepted(function, arguments, missing)), logged)


def _accepted(function: TRLReward, arguments: dict[str, Any], missing: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments that the function accepts. Raises BadArgument if a required argument is missing."""
    parameters = _parameters(function)
    for name, why in missing.items():
        if name in parameters and parameters[name].default is inspect.Parameter.empty and name not in arguments:
            raise BadArgument(f"{_name(function)} requires `{name}`: {why}. Give the parameter a default, or remove it")
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return arguments
    return {name: value for name, value in arguments.items() if name in parameters}


def _read(function: TRLReward, scores: Any, logged: dict[str, dict[str, JsonValue]]) -> Scored | None:
    """Return the score for a batch of one, with the logged values as evidence."""
    try:
        (score,) = scores
    except (TypeError, ValueError) as error:
        raise BadArgument(
            f"{_name(function)} returned {scores!r:.80} for one completion: a reward function must return a list with "
            "one number, or None, for each"
        ) from error
    return None if _is_none(score) else Scored(score, evidence={**logged} or None)


def _is_none(score: object) -> bool:
    """Return whether a score is None or NaN, which are the same for TRL."""
    return score is None or (isinstance(score := plain(score), float) and math.isnan(score))


def completion_ids(tape: Tape) -> list[int]:
    """Return the token ids after the prompt: sampled tokens, and the tokens of the observations between them.

    Raises NotATape if the tape has no ids, or if its calls are not one token sequence. In the second case, the ids
    would differ from what the model read.
    """
    calls = [call for call in recorded_calls(tape) if call.completion or call.finish not in ("error", "cancelled")]
    if not calls:
        raise NotATape(f"tape {tape.id} has no model call, so it has no token ids")
    last = calls[-1]
    prompts = [prompt for call in calls if (prompt := call.prompt) is not None]
    if last.completion is None or len(prompts) < len(calls):
        raise NotATape(f"a call of tape {tape.id} has no token ids: its engine returned text only")
    start, whole = len(prompts[0]), prompts[-1] + last.completion
    for call, context in zip(calls, prompts, strict=True):
        context.extend(call.completion or ())
        if whole[: len(context)] != context:
            raise NotATape(
                f"the calls of tape {tape.id} are not one token sequence: the last one doesn't continue {call.call}"
            )
    return whole[start:].tolist()


def recorded_calls(tape: Tape) -> list[Call]:
    """Return the calls on the tape, including its inherited prefix."""
    return [*(recorded_calls(tape.parent) if tape.parent is not None else ()), *tape.calls]


def _log(logged: dict[str, dict[str, JsonValue]], kind: str) -> Callable[[str, Any], None]:
    def log(name: str, value: Any) -> None:
        logged.setdefault(kind, {})[str(name)] = json.loads(json.dumps(value, default=str, allow_nan=True))

    return log


def _parameters(function: TRLReward) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


async def _called(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call the function. A sync function runs in a thread, since it may block."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    found = await in_thread(lambda: function(**arguments))
    return await found if inspect.isawaitable(found) else found


async def _extended(last: Message, addition: Any, instance: Any) -> tuple[Message, list[Visual]]:
    """Return the prompt's last message, with the result of `reset` (a string or content parts) appended.

    Also return the pictures in that result.
    """
    if isinstance(addition, str) and isinstance(last["content"], str):
        return {**last, "content": last["content"] + addition}, []
    parts = [addition] if isinstance(addition, str) else await as_parts(addition)
    if isinstance(parts, str):
        what = f"{type(instance).__qualname__}.reset returned {type(addition).__name__}"
        raise BadArgument(f"{what}, but only a string, content parts with an image, or None can be recorded")
    before = content_parts(last) or [{"type": "text", "text": last["content"]}]
    shown = [part for part in parts if not isinstance(part, str)]
    after = [{"type": "text", "text": part} if isinstance(part, str) else place_of(part) for part in parts]
    return {**last, "content": [*before, *after]}, shown


_THINK = (
    (r"<think>", r"</think>"),
    (r"<seed:think>", r"</seed:think>"),
    (r"\[THINK\]", r"\[/THINK\]"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (r"<\|channel\|>analysis<\|message\|>", r"<\|end\|>(?:<\|start\|>assistant)?"),
    (r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>"),
    (r"<\|channel>thought\n", r"<channel\|>"),
)
"""The marks of thoughts, by family: most of them, Seed, Mistral, Command, gpt-oss, Kimi K3, Gemma."""
_THOUGHTS = re.compile("|".join(rf"{opens}(.*?)(?:{closes}|\Z)" for opens, closes in _THINK), re.DOTALL)
_CALLS = (
    r"<tool_call>.*?</tool_call>",  # Hermes, Qwen, GLM, Nemotron
    r"<(?P<mark>seed:tool_call|minimax:tool_call|tool_calls|function_calls)>.*</(?P=mark)>",
    r"<｜DSML｜.*</｜DSML｜(?:(?:function|tool)_calls|invoke)>",  # DeepSeek V3.2
    r"<｜tool▁calls?▁begin｜>.*<｜tool▁calls?▁end｜>",  # DeepSeek V3
    r"<\|tool_call(?:s_section)?_begin\|>.*<\|tool_call(?:s_section)?_end\|>",  # Kimi K2
    r"<\|open\|>(?:tools|call ).*<\|close\|>(?:tools|call)<\|sep\|>",  # Kimi K3
    r"<\|tool_call_start\|>.*<\|tool_call_end\|>",  # LFM2
    r"<\|tool_call>.*<tool_call\|>",  # Gemma 4
    r"<\|START_ACTION\|>.*<\|END_ACTION\|>",  # Command
    # gpt-oss
    r"(?: to=functions\.[^\s<>]+<\|channel\|>|<\|channel\|>(?:commentary|analysis) to=functions\.)"
    r".*?(?:<\|call\|>(?:<\|start\|>assistant)?|\Z)",
    # to the end of the answer: Mistral, Llama, Phi and Granite, MiniMax without its outer mark
    r"(?:\[TOOL_CALLS\]|<\|(?:python_tag|tool)|functools\[|<function|<invoke |\{\s*\"name\").*",
)
"""Match calls, by family. If a string in a call may contain the mark that ends it, the last such mark is the end."""
_AROUND = re.compile(
    r"<\|(?:START|END)_RESPONSE\|>|<\|(?:open|close)\|>(?:response|message)<\|sep\|>"
    r"|<\|(?:end|return)\|>(?:<\|start\|>assistant)?"
    r"|<\|channel\|>(?:final|commentary)(?: <\|constrain\|>\w+)?<\|message\|>"
)
"""Matches the marks around the content of an answer."""


def as_message(text: str, calls: Sequence[ToolCall]) -> Message:
    """Return a turn as TRL's `parse_response` does if there are tools. The content is the last text that is neither a
    thought nor a call."""
    opened = f"<think>{text}" if "</think>" in text and "<think>" not in text else text  # the prompt may end with it
    thoughts = ["".join(filter(None, found)) for found in map(re.Match.groups, _THOUGHTS.finditer(opened))]
    rest = _THOUGHTS.sub("\0", opened)
    if calls:
        names = "|".join(re.escape(call.name) for call in calls)  # Python's syntax has no marks of its own
        python = rf"(?:<\|python_start\|>)?\[(?:{names})\(.*\)\](?:<\|python_end\|>)?"
        rest = re.sub("|".join([*_CALLS, python]), "\0", rest, flags=re.DOTALL)
    texts = [part.strip() for part in _AROUND.sub("\0", rest).split("\0")]
    content = next((part for part in reversed(texts) if part), "")
    if "<tool_call>" in content:  # it was cut off
        return {"role": "assistant", "content": text}
    message: Message = {"role": "assistant", "content": content}
    if thoughts and thoughts[-1].strip():
        message["reasoning_content"] = thoughts[-1].strip()
    if calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message


def _conversation(tape: Tape, text: bool) -> list[Message]:
    """Return the messages after the prompt of a recorded episode. A turn is raw text with `text`, without tools, or if
    its calls can't be read."""
    calls, messages = {call.call: call for call in recorded_calls(tape)}, list[Message]()
    reads = not text and (not calls or any(call.tools is not None for call in calls.values()))
    for entry in tape.entries[1:]:
        step, made = entry.step, entry.step.calls if isinstance(entry.step, ToolCalls) else ()
        if isinstance(step, Observation):
            messages += [{k: v for k, v in m.items() if k != "tool_call_id"} for m in frames_of(heard(step))]
        elif isinstance(step, Action | ParseError):
            call = calls.pop(entry.calls[-1][0], None) if entry.calls else None
            said = call.text or "" if call is not None else "" if made else str(step)
            read = reads and isinstance(step, Action)
            messages.append(as_message(said, made) if read else {"role": "assistant", "content": said})
            messages += () if isinstance(step, Action) else heard(step)
    last = tape.calls[-1] if tape.calls else None
    if last and last.call in calls and all(isinstance(one, Thought) for one in tape[tape.log.cuts[-1].steps :]):
        messages.append({"role": "assistant", "content": last.text or ""})  # no step was made of it
    return messages


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
