"""Proxy: an Environment whose instance is in another process. Its methods send calls and return typed results.

Subclasses define the transport: a WebSocket (`env_client.py`) or a pipe (`pool.py`). An exception of the remote
environment is raised here under the same class name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pydantic import JsonValue

from ...tapes.records import Status, Task
from ...tapes.steps import Action, Observation
from ..environment import Environment, Outcome, RestoreMismatch
from .declared import Declared
from .env_protocol import (
    Answer,
    Call,
    Done,
    Fault,
    FinishCall,
    Item,
    Led,
    Message,
    RandomState,
    ResetCall,
    RestoreCall,
    Shown,
    StepCall,
    files_of,
    read_answer,
)
from .remote_errors import BadAnswer, Hung, Refused, RemoteFault, SessionLost

if TYPE_CHECKING:
    from ...tapes import Tape


AnswerT = TypeVar("AnswerT", bound=Message)


class Proxy(Environment[Action]):
    """Base class of remote environments. `_ask` sends a call and returns its answer."""

    def __init__(self, declared: Declared) -> None:
        self.environment = declared.name
        """Class name of the remote environment."""
        self.effect = declared.effect
        self.varies = dict(declared.varies)
        if declared.pixels:  # not set otherwise: recorded configurations of environments without it stay as they are
            self.pixels = True
        if declared.rewards is not None:
            self.rewards = declared.rewards
        self._declared = declared
        self._number = 0

    async def reset(self, task: JsonValue | Task) -> Observation:
        """Begin the episode, with the state of the local `rng`."""
        whole = Task.of(task)
        call = ResetCall(id=self._next(), task=whole, files=files_of(whole), rng=self._rng_state())
        seen = (await self._asked(call, Shown)).observation
        return self._declared.observation(seen.kind, seen.content, seen.received())

    async def step(self, action: Action) -> Outcome:
        """Carry out the action remotely."""
        if self._declared.actions.get(action.kind) is not type(action):
            raise TypeError(
                f"{self.environment} accepts {', '.join(sorted(self._declared.actions))}, not "
                f"{action.kind!r} ({type(action).__qualname__})"
            )
        call = StepCall(id=self._next(), action=Item.of(action))
        return (await self._asked(call, Led)).outcome(self._declared)

    async def finish(self, status: Status) -> Outcome | None:
        """The environment's final scoring."""
        call = FinishCall(id=self._next(), status=status)
        answer = await self._asked(call, Led, Done)
        return answer.outcome(self._declared) if isinstance(answer, Led) else None

    async def restore(self, task: JsonValue | Task, tape: Tape) -> None:
        """Call the environment's own `restore`; the tape's actions and observations are sent."""
        steps = [step for step in tape if isinstance(step, Action | Observation)]
        foreign = next((step for step in steps if not self._declared.holds(step)), None)
        if foreign is not None:
            raise TypeError(
                f"tape {tape.id} has a step of the kind {foreign.kind!r}, which {self.environment} doesn't declare"
            )
        whole = Task.of(task)
        call = RestoreCall(
            id=self._next(),
            task=whole,
            files=files_of(whole),
            rng=self._rng_state(),
            tape=tape.id,
            env_seed=tape.begin.env_seed,
            steps=tuple(Item.of(step, files=False) for step in steps),
        )
        await self._asked(call, Done)

    async def _asked(self, call: Call, *kinds: type[AnswerT]) -> AnswerT:
        """The answer, which must be of one of these kinds. Raises the error of a Fault, BadAnswer for another kind."""
        answer = await self._ask(call)
        if isinstance(answer, Fault):
            raise self._error(answer)
        if not isinstance(answer, kinds):
            raise BadAnswer(f"`{answer.t}` is not a valid answer to `{call.t}`")
        return answer

    async def _ask(self, call: Call) -> Answer:
        """Send one call; return its answer, which `_read` has checked."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _ask(call)")

    def _read(self, call: Call, text: str | bytes) -> Answer:
        """The answer in `text`. BadAnswer if it belongs to another call."""
        answer = read_answer(text)
        if answer.id != call.id:
            raise BadAnswer(f"{self._location()}: an answer to call {answer.id} instead of call {call.id}")
        return answer

    def _location(self) -> str:
        """The place where the environment runs, for messages."""
        return self.environment

    def _error(self, fault: Fault) -> Exception:
        if fault.code == "mismatch":
            return RestoreMismatch(fault.message)
        if fault.code == "raised":
            where = f" ({fault.frame} at {self._location()})" if fault.frame else ""
            return RemoteFault.named(fault.error, f"{fault.message}{where}")
        kind = {"hung": Hung, "lost": SessionLost, "refused": Refused}[fault.code]
        return kind(f"{self._location()}: {fault.message}")

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _rng_state(self) -> RandomState | None:
        rng = getattr(self, "rng", None)
        return RandomState.of(rng) if rng is not None else None
