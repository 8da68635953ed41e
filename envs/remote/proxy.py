"""An Environment that runs in another process. Its methods send calls and return typed results.

Subclasses carry the messages over a WebSocket (`remote_environment.py`), a pipe (`pool.py`) or OpenEnv's protocol
(`openenv.py`). An exception in the remote environment is raised here under the same class name.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pydantic import JsonValue

from ...tapes.records import Status, Task
from ...tapes.steps import Action, Observation
from ..environment import Environment, Outcome, RestoreMismatch
from .declared import Declared
from .env_protocol import (
    Answer,
    Call,
    Fault,
    FinishCall,
    Item,
    RandomState,
    ResetCall,
    RestoreCall,
    Result,
    StepCall,
    files_of,
    read_answer,
)
from .remote_errors import BadAnswer, Hung, Refused, RemoteFault, SessionLost

if TYPE_CHECKING:
    from ...tapes import Tape


class Proxy(Environment[Action]):
    """Base class of remote environments. `_exchange` sends a call and returns its answer."""

    def __init__(self, declared: Declared, *, location: str = "", call_seconds: float | None = None) -> None:
        """`location` is the environment's name in error messages. By default, it is the name of the declaration.
        `call_seconds` is the time limit for a call, or None for no limit."""
        self.environment = declared.name
        """The class name of the remote environment."""
        self.effect = declared.effect
        self.varies = dict(declared.varies)
        if declared.pixels:  # set only then, so that recorded configurations without pixels don't change
            self.pixels = True
        if declared.rewards is not None:
            self.rewards = declared.rewards
        self._declared = declared
        self._location = location or declared.name
        self._call_seconds = call_seconds
        self._number = 0
        """The number of the last call that was sent."""
        self._over: str | None = None
        """The reason why the episode accepts no more calls, or None while it accepts calls."""

    async def reset(self, task: JsonValue | Task) -> Observation:
        """Begin the episode, and send the state of the local `rng`."""
        whole = Task.of(task)
        call = ResetCall(id=self._number + 1, task=whole, files=files_of(whole), rng=self._rng_state())
        result = await self._ask(call)
        if result.observation is None:
            raise BadAnswer(f"{self._location}: the answer to `reset` has no observation")
        return result.observation.observation(self._declared)

    async def step(self, action: Action) -> Outcome:
        if self._declared.actions.get(action.kind) is not type(action):
            raise TypeError(
                f"{self.environment} accepts {', '.join(sorted(self._declared.actions))}, not "
                f"{action.kind!r} ({type(action).__qualname__})"
            )
        return await self._outcome(StepCall(id=self._number + 1, action=Item.of(action)))

    async def finish(self, status: Status) -> Outcome | None:
        """Return the environment's final score, or an empty outcome if it has none."""
        return await self._outcome(FinishCall(id=self._number + 1, status=status))

    async def restore(self, task: JsonValue | Task, tape: Tape) -> None:
        """Send the actions and observations on the tape, for the remote environment's own `restore`."""
        steps = [step for step in tape if isinstance(step, Action | Observation)]
        foreign = next((step for step in steps if not self._declared.holds(step)), None)
        if foreign is not None:
            raise TypeError(
                f"tape {tape.id} has a step of the kind {foreign.kind!r}, which {self.environment} doesn't declare"
            )
        whole = Task.of(task)
        call = RestoreCall(
            id=self._number + 1,
            task=whole,
            files=files_of(whole),
            rng=self._rng_state(),
            tape=tape.id,
            env_seed=tape.begin.env_seed,
            steps=tuple(Item.of(step, files=False) for step in steps),
        )
        await self._ask(call)

    async def _outcome(self, call: Call) -> Outcome:
        return (await self._ask(call)).outcome(self._declared)

    async def _ask(self, call: Call) -> Result:
        """Send one call and return its result. If the answer is a Fault, raise its error.

        Without a valid answer, the episode accepts no more calls.
        """
        if self._over is not None:
            raise SessionLost(f"{self._location}: {self._over}")
        await self.acquire()
        text = self._encoded(call)
        timer = asyncio.timeout(self._call_seconds)
        try:
            async with timer:
                answer = await self._exchange(call, text)
        except BaseException as error:
            cut = timer.expired() or isinstance(error, asyncio.CancelledError)
            self._over = "a call was cut off, so its state is unknown" if cut else f"it failed before: {error}"
            await self._abandon(cut)
            if timer.expired() and isinstance(error, TimeoutError):
                raise Hung(
                    f"{self._location}: `{call.t}` had no answer within {self._call_seconds:g} s; if it is only slow, "
                    "increase `seconds`"
                ) from error
            raise
        if isinstance(answer, Fault):
            raise self._error(answer)
        return answer

    def _encoded(self, call: Call) -> str:
        return call.encoded()

    async def _exchange(self, call: Call, text: str) -> Answer:
        """Send the message `text` for one call, and set `_number`. Return the answer after checking it with `_read`."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _exchange(call, text)")

    async def _abandon(self, cut: bool) -> None:
        """Release the connection after an error. `cut` means that the call was cancelled or took too long."""
        raise NotImplementedError(f"{type(self).__qualname__} must define _abandon(cut)")

    def _read(self, call: Call, text: str | bytes) -> Answer:
        """Return the answer in `text`. Raises BadAnswer if it belongs to another call."""
        answer = read_answer(text)
        if answer.id != call.id:
            raise BadAnswer(f"{self._location}: an answer to call {answer.id} instead of call {call.id}")
        return answer

    def _error(self, fault: Fault) -> Exception:
        if fault.code == "mismatch":
            return RestoreMismatch(fault.message)
        if fault.code == "raised":
            frame = f" ({fault.frame} at {self._location})" if fault.frame else ""
            return RemoteFault.named(fault.error, f"{fault.message}{frame}")
        kind = {"hung": Hung, "lost": SessionLost, "refused": Refused}[fault.code]
        return kind(f"{self._location}: {fault.message}")

    def _rng_state(self) -> RandomState | None:
        rng = getattr(self, "rng", None)
        return RandomState.of(rng) if rng is not None else None
