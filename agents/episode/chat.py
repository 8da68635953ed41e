"""ChatAgent is an agent made from a system prompt and the action types that it may use.

The agent parses the model's answer as one of the action types. An answer that can't be parsed becomes a `ParseError`
thought on the tape. The next prompt shows the problem to the model, which may try again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from pydantic import JsonValue, ValidationError

from ...tapes import Action, Answer, ParseError, Sampling, Step, Tape, ToolCalls, ToolOffer, ToolResults
from ...tapes.common.arguments import check_arguments
from ...tapes.errors import UsageError
from ..rendering.tool_calls import read_tool_calls, tool_name, tool_schema
from .agent import Agent, check_name
from .llm import LLM, checked_sampling
from .reply import Reply


class TooManyParseErrors(ValueError):
    """The model's answers could not be parsed as an action. This is an error of the agent."""


class ChatAgent(Agent):
    """An agent that asks the model once per turn and parses the answer as an action.

    `ChatAgent("You are helpful.")` answers with the model's text as an `Answer`. If the environment offers tools, the
    agent also makes function calls. (The default is the same as `actions=[ToolCalls], plain=Answer`.) One of these
    parameters replaces the default:

    - `parse`: a function from the answer's text to an Action. If it raises a ValueError, the model reads the message.
    - `actions`: Action classes that are offered to the model as tools. A function call (`Reply.tool_calls`) becomes an
      instance of one of them. If `ToolCalls` is one of them, any calls are accepted unchanged, and the tools in the
      episode's `ToolOffer` are offered too. An answer without a call becomes an instance of `plain`, which is an Action
      class with the single field `text`. If `plain` is None, the answer becomes a `ParseError`.

    If one call in an answer can't be read, none of its calls is made, and the whole answer becomes a `ParseError`.
    """

    @check_arguments
    def __init__(
        self,
        system: str | None = None,
        *,
        actions: Sequence[type[Action]] = (),
        plain: type[Action] | None = None,
        parse: Callable[[str], Action] | None = None,
        tools: Sequence[dict[str, JsonValue]] = (),
        misreads: int = 2,
        name: str = "agent",
        temperature: float | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """`system` is the system prompt. If an answer can't be parsed, the model is asked again, at most `misreads`
        times per turn. `temperature` and `max_tokens` are for this agent's calls. None means the episode's value."""
        if parse is not None and actions:
            raise UsageError("ChatAgent takes `parse` or `actions`, not both: each defines how an answer is parsed")
        if plain is not None and (not actions or list(plain.model_fields) != ["text"]):
            raise UsageError(f"`plain` goes with `actions`, and {plain.__qualname__} must have one field, `text`")
        if misreads < 0:
            raise UsageError(f"misreads must be 0 or more, not {misreads}")
        kinds = [action.kind for action in actions]
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise UsageError(f"two of the `actions` have the kind {twice[0]!r}, so the model can't name one of them")
        check_name(name)
        checked_sampling("ChatAgent()", Sampling(), temperature=temperature, max_tokens=max_tokens)
        self.system = system
        self.actions = tuple(actions)
        self.plain = plain
        self.parse = parse
        self.tools: tuple[dict[str, Any], ...] = tuple(map(tool_schema, tools))
        self.misreads = misreads
        self.name = name
        self.temperature = temperature
        self.max_tokens = max_tokens

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        offered = self._offered(tape)
        for tries_left in range(self.misreads, -1, -1):
            reply = await llm(
                tape.now(),
                system=self.system,
                tools=offered or None,
                temperature=self.temperature,
                max_tokens=self.max_tokens,
            )
            try:
                action = self.parse(reply.text) if self.parse is not None else self._parse_reply(reply, bool(offered))
            except ValueError as error:
                problem = _problem(error)
                if tries_left == 0:
                    said = f"(answer: {reply.text[:200]!r})"
                    raise TooManyParseErrors(f"{problem} {said}{self._lacking(bool(offered))}") from error
                yield ParseError(problem=problem)
                continue
            yield llm.read_from(action, reply)
            return

    @property
    def _actions(self) -> tuple[type[Action], ...]:
        return self.actions or (ToolCalls,)

    @property
    def _plain(self) -> type[Action] | None:
        return self.plain if self.actions else Answer

    def _offered(self, tape: Tape) -> list[type[Action] | dict[str, JsonValue]]:
        """Return the tools that the model may call: action classes, this agent's own tools, and the episode's tools."""
        offered: list[type[Action] | dict[str, JsonValue]] = [a for a in self._actions if a is not ToolCalls]
        offered.extend(self.tools)
        if self.parse is None and ToolCalls in self._actions:
            seen = (step for step in tape if isinstance(step, ToolOffer | ToolResults))
            offered.extend(tool for step in seen for tool in step.tools)
        return offered

    def _parse_reply(self, reply: Reply, offered: bool) -> Action:
        calls, problem = list(reply.tool_calls), reply.problem
        if self.actions and not offered and not calls:  # with `actions=[ToolCalls]` and no tools, any call is read
            read = read_tool_calls(reply.text, cut=reply.finish in ("length", "abort"))
            calls, problem = list(read.calls), read.problem
        if problem:
            raise ValueError(problem + (" No call was made: write all of them again." if calls else ""))
        if not calls:
            if self._plain is not None:
                return self._plain.model_validate({"text": reply.text})
            shape, known = '{"name": ..., "arguments": {...}}', ", ".join(self._names())
            raise ValueError(f"Answer with a call{f' of one of: {known}' if known else ''}, as {shape}.")
        typed = {a.kind: a for a in self._actions if a is not ToolCalls}
        if ToolCalls in self._actions and (len(calls) > 1 or calls[0].name not in typed):
            return ToolCalls(calls=tuple(calls))
        if len(calls) > 1:
            raise ValueError("Answer with one call at a time.")
        if calls[0].name in typed:
            return typed[calls[0].name].model_validate(calls[0].arguments)
        raise ValueError(f"There is no {calls[0].name!r}. Call one of: {', '.join(self._names())}.")

    def _lacking(self, offered: bool) -> str:
        """Return what to do if the agent wants calls only, and no tools are offered."""
        if offered or not self.actions or self.plain is not None:
            return ""
        return (
            "; actions=[ToolCalls] asks for calls, and no tool is offered: use an environment that offers tools, such "
            "as ToolEnvironment, or pass `tools`, or plain=Answer to accept answers without a call"
        )

    def _names(self) -> list[str]:
        names = [a.kind for a in self._actions if a is not ToolCalls]
        return names + [tool_name(tool) for tool in self.tools]


def _problem(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        parts = [f"{'.'.join(str(p) for p in e['loc']) or 'value'}: {e['msg']}" for e in error.errors()]
        return "The call could not be read: " + "; ".join(parts) + "."
    return str(error) or "The answer could not be read."
