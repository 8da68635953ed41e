"""What was written for TRL, as it is: its environment classes, its reward functions and its rows of data.

An environment class has `reset(**row)`, which may give more text for the prompt; its other public methods are the
tools, by their type hints and docstrings; `get_reward()`, where there is one, scores the end. A reward function is
`f(prompts, completions, **columns)` and gives a list with one number, or None, for each completion. Neither needs TRL
to be installed. This module knows nothing of models and trainers.

1. Here every episode has an instance of its own; TRL resets one again and again.
2. A reward function gets a batch of one. What compares the completions of a batch needs them all, and is no function of
   one episode.
3. Text only: a `reset` that gives images is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..tapes import Action, Answer, Message, Status, Tape, TapereelError, Task, ToolCalls, ToolResults
from ..tapes.messages import heard
from ..tapes.steps import Prompt
from .base import Effect, Outcome
from .rewards import RewardSource
from .tools import ToolEnvironment, in_thread, tool

Factory = Callable[[], Any]
TRLReward = Callable[..., Any]
"""`f(prompts, completions, **columns) -> list[float | None]`, sync or async."""
_NOT_TOOLS = ("reset", "get_reward")


class NotTRL(TapereelError, TypeError):
    """A class, row or function that doesn't keep TRL's conventions; says which one and what is missing."""


def trl_row(row: Mapping[str, Any]) -> Task:
    """A row of TRL's data as a task: the prompt is its public part, every other column is private."""
    return Task(public={"prompt": row.get("prompt")}, private={k: v for k, v in row.items() if k != "prompt"})


def row_of(task: Task) -> dict[str, Any]:
    """All columns of the row that a task was made of."""
    parts = (task.public, task.private)
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items() if value is not None}


class TRLEnvironment(ToolEnvironment):
    """`TRLEnvironment(WordGame, rewards=[exact])`, on tasks made by `trl_row`. For `ChatAgent(actions=[ToolCalls],
    plain=Answer)`: an answer without a call is the end, as in TRL.

    factory: what `GRPOTrainer` gets as `environment_factory`: a class, or a dict of them that a row's `environment`
    chooses from; None for tasks of one turn. rewards: what it gets as `reward_funcs`, each a component under its name.
    """

    def __init__(self, factory: Factory | Mapping[str, Factory] | None = None, *, rewards: Iterable[TRLReward] = (),
                 effect: Effect = "pure") -> None:  # fmt: skip
        super().__init__((), parallel=1)
        self.effect = effect
        self._factory = factory
        self._rewards = tuple(rewards)
        self._instance: Any = None
        self._asked: Any = None
        self._said: list[Message] = []

    async def reset(self, task: Any) -> Prompt:
        self.task = Task.of(task)
        row = row_of(self.task)
        self._instance, given = self._made(row), None
        if self._instance is not None:
            self.tools = {method.__name__: tool(method, effect=self.effect) for method in _methods(self._instance)}
            given = await _called(self._instance.reset, **row)
        self._asked = row.get("prompt")
        messages = _opening(self._asked, given, self._instance)
        last = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
        return Prompt(text=last, messages=tuple(messages), tools=tuple(t.schema for t in self.tools.values()))

    async def step(self, action: ToolCalls | Answer) -> Outcome:
        self._said.append(_said(action))
        outcome = await super().step(action)
        if outcome.observation is not None:
            self._said.extend(heard(outcome.observation))
        return outcome

    async def finish(self, status: Status) -> Outcome | None:
        reward: dict[str, float] = {}
        if hasattr(self._instance, "get_reward"):
            score = await _called(self._instance.get_reward)
            if score is not None:
                reward[type(self._instance).__name__] = float(score)
        for function in self._rewards:
            score = await _score(function, self._asked, self._said, row_of(self.task))
            if score is not None:
                reward[_name(function)] = score
        return Outcome(reward=reward or None)

    async def close(self) -> None:
        await super().close()
        close = getattr(self._instance, "close", None)
        if callable(close) and "close" not in self.tools:
            await _called(close)

    def _made(self, row: dict[str, Any]) -> Any:
        factory = self._factory
        if isinstance(factory, Mapping):
            name = row.pop("environment", None)
            if name not in factory:
                raise NotTRL(f"the row asks for the environment {name!r}; there are {', '.join(map(repr, factory))}")
            factory = factory[name]
        made = factory() if factory is not None else None
        if made is not None and not callable(getattr(made, "reset", None)):
            raise NotTRL(f"{type(made).__qualname__} has no method `reset`, which an environment class of TRL has")
        return made


def trl_reward(function: TRLReward, *, weight: float = 1.0, pure: bool = True) -> RewardSource[Tape]:
    """The function as a reward source that scores finished tapes, as `tapereel rescore` does."""

    async def score(tape: Tape) -> float | None:
        prompt, said = _conversation(tape)
        return await _score(function, prompt, said, row_of(tape.begin.task))

    return RewardSource(score=score, name=_name(function), weight=weight, pure=pure)


async def _score(function: TRLReward, prompt: Any, said: Sequence[Message], row: Mapping[str, Any]) -> float | None:
    completion: Any = said[-1]["content"] if isinstance(prompt, str) and said else list(said)
    columns = {key: [value] for key, value in row.items() if key not in ("prompt", "completion", "completion_ids")}
    more = {"completion_ids": [None], "trainer_state": None, "log_extra": _unheard, "log_metric": _unheard}
    given = {"prompts": [prompt], "completions": [completion], **more, **columns}
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        given = {name: value for name, value in given.items() if name in parameters}
    scores = await _called(function, **given)
    if not isinstance(scores, Sequence) or len(scores) != 1:
        raise NotTRL(f"{_name(function)} gave {scores!r:.80} for one completion: a reward function gives a list with "
                     "one number, or None, for each")  # fmt: skip
    return None if scores[0] is None else float(scores[0])


def _unheard(*_: Any, **__: Any) -> None:
    """Where TRL logs, a tape has the reward itself."""


async def _called(function: Callable[..., Any], **arguments: Any) -> Any:
    """A sync one may block: it runs in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    found = await in_thread(lambda: function(**arguments))
    return await found if inspect.isawaitable(found) else found


def _methods(instance: Any) -> list[Callable[..., Any]]:
    names = [name for name, _ in inspect.getmembers(type(instance), predicate=inspect.isfunction)]
    return [getattr(instance, name) for name in names if not name.startswith("_") and name not in _NOT_TOOLS]


def _opening(prompt: Any, given: Any, instance: Any) -> list[Message]:
    """The prompt as messages, with what `reset` gave at the end of the last one."""
    if given is not None and not isinstance(given, str):
        raise NotTRL(f"{type(instance).__qualname__}.reset gave {type(given).__name__}, and only a text, or None, can "
                     "be recorded")  # fmt: skip
    messages = [{"role": "user", "content": prompt or ""}] if prompt is None or isinstance(prompt, str) else prompt
    if not isinstance(messages, Sequence) or not messages or not all(_is_message(m) for m in messages):
        raise NotTRL(f"the prompt {prompt!r:.80} is neither a text nor a list of messages with `role` and a text")
    *before, last = (dict(message) for message in messages)
    return [*before, {**last, "content": last["content"] + (given or "")}]


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str) and \
        isinstance(message.get("content"), str)


def _said(action: Action) -> Message:
    if not isinstance(action, ToolCalls):
        return {"role": "assistant", "content": str(action)}
    calls = [{"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in action.calls]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _conversation(tape: Tape) -> tuple[Any, list[Message]]:
    """(prompt as the row has it, everything after it), of a recorded episode."""
    said: list[Message] = []
    for step in list(tape)[1:]:
        if isinstance(step, ToolResults):
            said.extend(heard(step))
        elif isinstance(step, Action):
            said.append(_said(step))
    public = tape.task
    prompt = public.get("prompt") if isinstance(public, dict) else public
    return prompt, said


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)

