"""One prompt and one answer: the agent and environment for a trainer with its own prompts. No reward is computed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from ...agents import LLM, Agent
from ...envs.adapters.trl import is_message
from ...envs.environment import Environment, Outcome
from ...tapes import Answer, Tape, TapereelError, Task
from ...tapes.steps import Prompt


class BadPrompt(TapereelError, TypeError):
    """The prompt isn't a list of chat messages."""


class Asked(Environment[Answer]):
    """Shows the prompt, a list of chat messages in the public part of the task, and ends with the answer."""

    async def reset(self, task: Task) -> Prompt:
        prompt: Any = task.public.get("prompt") if isinstance(task.public, dict) else None
        if (
            isinstance(prompt, str)
            or not isinstance(prompt, Sequence)
            or not prompt
            or not all(map(is_message, prompt))
        ):
            raise BadPrompt(
                f'the prompt {prompt!r:.80} is no list of chat messages: write [{{"role": "user", "content": "..."}}]'
            )
        messages = [{"role": m["role"], "content": m["content"]} for m in prompt]
        return Prompt(text=messages[-1]["content"], messages=tuple(messages))

    async def step(self, action: Answer) -> Outcome:
        return Outcome(terminated=True)


class Ask(Agent):
    """Answers with the text of one model call."""

    name = "policy"

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Answer]:
        yield Answer(text=(await llm(tape)).text)
