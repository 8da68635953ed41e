"""ChatAgent: the straight road from a system prompt and action types to an agent.

The model's answer is read as one of the action types. An answer that can't be read becomes a `ParseError` thought: it is
on the tape, the model is told what was wrong, and may try again.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from pydantic import ValidationError

from ...tapes import Action, ParseError, Step, Tape, ToolCall, ToolCalls, ToolOffer
from ...tapes.common.plain_json import read_plain
from .agent import Agent
from .llm import LLM, Reply

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


class TooManyParseErrors(ValueError):
    """The model's answers could not be read as an action; the agent's error."""


class ChatAgent(Agent):
    """One model call a turn, read as an action.

    - `parse`: a function from the answer's text to an Action; a ValueError it raises is the message to the model.
    - else `actions`: the Action classes are offered as tools, and a function call (parsed by the engine, or written as
      JSON, bare or between <tool_call> tags) is read as one. `ToolCalls` among them takes any calls as they are, and
      offers the tools that the episode began with (`ToolOffer`). `plain` is what an answer without a call becomes, as
      `Answer`: an Action class with one field, `text`; without it such an answer is misread.
    """

    def __init__(
        self,
        system: str | None = None,
        *,
        actions: Sequence[type[Action]] = (),
        plain: type[Action] | None = None,
        parse: Callable[[str], Action] | None = None,
        tools: Sequence[dict[str, Any]] = (),
        misreads: int = 2,
        name: str = "agent",
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        if (parse is None) == (not actions):
            raise ValueError("ChatAgent needs `parse` or `actions`, one of them")
        if plain is not None and (not actions or list(plain.model_fields) != ["text"]):
            raise ValueError(f"`plain` goes with `actions`, and {plain.__qualname__} must have one field, `text`")
        if misreads < 0:
            raise ValueError(f"misreads must be 0 or more, not {misreads}")
        self.system = system
        self.actions = tuple(actions)
        self.plain = plain
        self.parse = parse
        self.tools = tuple(tools)
        self.misreads = misreads
        self.name = name
        self.temperature = temperature
        self.max_tokens = max_tokens

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        offered: list[Any] = [a for a in self.actions if a is not ToolCalls]
        offered.extend(self.tools)
        if ToolCalls in self.actions and len(tape) and isinstance(tape[0], ToolOffer):
            offered.extend(tape[0].tools)
        for tries_left in range(self.misreads, -1, -1):
            reply = await llm(
                tape.now(),
                system=self.system,
                tools=offered or None,
                temperature=self.temperature,
                max_tokens=self.max_tokens,
            )
            try:
                action = self.parse(reply.text) if self.parse is not None else self._read(reply)
            except ValueError as error:
                problem = _problem(error)
                if tries_left == 0:
                    raise TooManyParseErrors(f"{problem} (answer: {reply.text[:200]!r})") from error
                yield ParseError(problem=problem)
                continue
            yield action
            return

    def _read(self, reply: Reply) -> Action:
        calls = list(reply.tool_calls) or _written(reply.text)
        if not calls and self.plain is not None:
            return self.plain.model_validate({"text": reply.text})
        if not calls:
            raise ValueError(f"Answer with a call of one of: {', '.join(self._names())}.")
        parsed = [_function(call, k) for k, call in enumerate(calls)]
        if ToolCalls in self.actions and (len(parsed) > 1 or parsed[0].name not in self._names(typed=True)):
            return ToolCalls(calls=tuple(parsed))
        if len(parsed) > 1:
            raise ValueError("Answer with one call at a time.")
        for cls in self.actions:
            if cls.kind == parsed[0].name:
                return cls.model_validate(parsed[0].arguments)
        raise ValueError(f"There is no {parsed[0].name!r}. Call one of: {', '.join(self._names())}.")

    def _names(self, *, typed: bool = False) -> list[str]:
        names = [a.kind for a in self.actions if a is not ToolCalls]
        return names if typed else names + [t.get("function", t).get("name", "?") for t in self.tools]


def _written(text: str) -> list[dict[str, Any]]:
    """Function calls that a model wrote as text: between <tool_call> tags, or the whole text as one JSON object."""
    found = _TOOL_CALL.findall(text)
    if not found and text.strip().startswith("{"):
        found = [text.strip()]
    calls = []
    for body in found:
        try:
            call = read_plain(body)
        except ValueError as error:
            raise ValueError(f"The call is not valid JSON: {error}.") from None
        if not isinstance(call, dict):
            raise ValueError('A call is a JSON object with "name" and "arguments".')
        calls.append(call)
    return calls


def _function(call: dict[str, Any], k: int) -> ToolCall:
    function = call.get("function", call)
    if not isinstance(function, dict):
        raise ValueError('A call is a JSON object with "name" and "arguments".')
    name, arguments = function.get("name"), function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = read_plain(arguments or "{}")
        except ValueError as error:
            raise ValueError(f"The arguments are not valid JSON: {error}.") from None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError('A call is a JSON object with "name" and "arguments".')
    return ToolCall(id=str(call.get("id") or f"call_{k}"), name=name, arguments=arguments)


def _problem(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        parts = [f"{'.'.join(str(p) for p in e['loc']) or 'value'}: {e['msg']}" for e in error.errors()]
        return "The call could not be read: " + "; ".join(parts) + "."
    return str(error) or "The answer could not be read."
