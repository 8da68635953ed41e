"""A model's answer, and the search for the answer that a step was made of."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

from ...tapes import Message, Step, Thought, ToolCall, ToolCalls
from ...tapes.errors import BadArgument

AskT = TypeVar("AskT", bound=Callable[..., Coroutine[Any, Any, "Reply"]])
NOT_AWAITED = "a call of `llm(...)` was not awaited, so the model was not asked: write `reply = await llm(...)`"


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's answer."""

    text: str
    """The answer's text without the token that ends the turn. It is empty if the model ended its turn at once."""
    finish: str
    """`stop`, `length`, `tool_calls` or `abort`. `length` means that the answer was cut off."""
    call: str
    """Id of the call on the tape."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The function calls in the answer, if tools were offered. They are read from the text or parsed by the engine. An
    answer that was cut off has none."""
    content: str = ""
    """The answer's text without the function calls, or the whole text if there are none."""
    problem: str = ""
    """If a function call can't be read, this text explains the problem to the model. Otherwise it is empty. To let the
    model try again, yield `ParseError(problem=reply.problem)` and ask again."""
    chat_calls: tuple[Message, ...] = ()
    """All function calls in the chat format (`CallsRead.chat`)."""
    reasoning: str = ""
    """The text of the model's thoughts, without their marks, if the model's format has thoughts."""
    answer: str = ""
    """`content` without the model's thoughts."""

    def __str__(self) -> str:
        return self.text


class Attribution:
    """Finds who yielded each step of an episode, and which model call the step was made of.

    The agent may name the call (`LLM.read_from`). Otherwise, the candidates are the calls that the agent made since its
    previous step or, if it made none, the candidates of that step.
    """

    def __init__(self) -> None:
        self._delegated: list[tuple[Step, str]] = []
        """(step, path) for each step that the sub-agent at this path yielded in this turn, to the agent above it."""
        self._named: list[tuple[Step, str]] = []
        """(step, call) for each step whose call the agent named."""
        self._candidates: dict[str, list[Reply]] = {}
        """The candidates of each agent in this turn, by path."""
        self._stepped: set[str] = set()
        """The agents that have yielded a step since their last call."""
        self._made: set[str] = set()
        """The calls in this turn of which a step was made."""
        self._asking: list[Coroutine[Any, Any, Reply]] = []

    def asking(self, question: Coroutine[object, object, Reply]) -> None:
        """Remember a call that the agent must await."""
        self._asking = [*self._unawaited(), question]

    @property
    def not_awaited(self) -> str:
        """`NOT_AWAITED` if the agent forgot to await a call in this turn, and otherwise ""."""
        return NOT_AWAITED if self._unawaited() else ""

    def _unawaited(self) -> list[Coroutine[Any, Any, Reply]]:
        return [one for one in self._asking if inspect.getcoroutinestate(one) == inspect.CORO_CREATED]

    def answered(self, path: str, reply: Reply) -> None:
        if path in self._stepped:
            self._stepped.discard(path)
            self._candidates.pop(path, None)
        self._candidates.setdefault(path, []).append(reply)

    def spoke(self, step: Step, path: str) -> None:
        if not any(seen is step for seen, _ in self._delegated):
            self._delegated.append((step, path))

    def name(self, step: Step, call: str) -> None:
        self._named.append((step, call))

    def end_turn(self) -> None:
        for one in self._unawaited():
            one.close()  # or Python warns of it, and names a line of the rollout
        self._asking = []
        self._delegated.clear()
        self._candidates.clear()
        self._stepped.clear()
        self._made.clear()

    def asked(self, path: str) -> bool:
        """Return whether the agent has had an answer in this turn."""
        return path in self._candidates

    def find(self, step: Step, outermost: str) -> tuple[str, str | None]:
        """Return the path of the agent that yielded `step` just now, and the id of the call that the step was made of,
        or None. `outermost` is the path of the episode's own agent, which is used if no sub-agent yielded the step."""
        path = next((p for seen, p in self._delegated if seen is step), outermost)
        call = next((call for seen, call in self._named if seen is step), None)
        self._named = [entry for entry in self._named if entry[0] is not step]
        candidates = self._candidates.get(path, [])
        if call is None and isinstance(step, Thought) and step.said_back:
            call = candidates[-1].call if candidates else None
        elif call is None:
            made = (len(candidates) == 1 and _holds) or _is
            call = next((reply.call for reply in reversed(candidates) if made(reply, step)), None)
        self._stepped.add(path)
        if call is not None:
            self._made.add(call)
        return path, call

    def idle(self, path: str) -> int:
        """Return the number of candidates, if no step was made of any of them. Otherwise, return 0."""
        candidates = self._candidates.get(path, [])
        return 0 if any(reply.call in self._made for reply in candidates) else len(candidates)


def checked_call(ask: AskT) -> AskT:
    """Decorate `LLM.__call__`. An argument that it doesn't have is a BadArgument, and a call that the agent forgets to
    await is noticed."""

    @wraps(ask)
    def call(llm: Any, *args: Any, **named: Any) -> Coroutine[Any, Any, Reply]:
        try:
            question = ask(llm, *args, **named)
        except TypeError as error:  # no line of it has run yet
            what = str(error).rpartition("__call__() ")[2]
            raise BadArgument(
                f"llm() {what}: write `await llm(tape, system=..., temperature=...)`; other settings are fields of "
                "`sampling=Sampling(top_p=0.9)`, and the engine's own are in `Sampling(extra={'stop': ['END']})`"
            ) from None
        llm.attribution.asking(question)
        return question

    return call  # type: ignore[return-value]


def _is(reply: Reply, step: Step) -> bool:
    """Return whether the step is the whole answer: its text, or its function calls."""
    if reply.text and str(step) == reply.text:  # the usual case
        return True
    values = step.model_dump(mode="json")
    if isinstance(step, ToolCalls):
        return bool(step.calls) and _called(step.calls) == _called(reply.tool_calls)
    if len(reply.tool_calls) == 1 and reply.tool_calls[0].name == step.kind:
        return values | reply.tool_calls[0].arguments == values
    leaves = [leaf for leaf in _leaves(values) if leaf != ""]
    shown = {_plain(step), *(_plain(leaf) for leaf in leaves if len(leaves) == 1)}
    answers = {reply.text, reply.content, reply.answer, *([reply.reasoning] if isinstance(step, Thought) else ())}
    return not shown.isdisjoint({_plain(text) for text in answers if text or not leaves})


def _holds(reply: Reply, step: Step) -> bool:
    """Return whether every value of the step occurs in the answer. Case, white space and the format of numbers don't
    matter."""
    if _is(reply, step):
        return True
    called = _leaves([call.model_dump(mode="json") for call in reply.tool_calls])
    said = "\n".join(map(_plain, (reply.text, reply.content, reply.answer, reply.reasoning, *called)))
    numbers = {_number(found) for found in _NUMBER.findall(said)}
    return all(
        (_NUMBER.fullmatch(word := _plain(leaf).lstrip("+-")) is not None and _number(word) in numbers)
        or re.search(rf"(?<![a-z0-9_]){re.escape(_plain(leaf))}(?![a-z0-9_])", said) is not None
        for leaf in _leaves(step.model_dump(mode="json"))
    )


def _called(calls: tuple[ToolCall, ...]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in calls]


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    elif value is not None and not isinstance(value, bool):
        yield value


def _plain(shown: object) -> str:
    return " ".join(str(shown).casefold().split())


_NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")


def _number(text: str) -> float:
    return float(text.replace(",", ""))
