"""Plays episodes in an untested environment and turns its faults into findings, for `check_env`.

Every episode runs in a daemon thread that can be abandoned, so even a call that never returns is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Never, TypeVar, cast

from ...tapes.records import Status, Task
from ...tapes.steps import Action, Answer, Observation
from ...tapes.tape import Tape
from ..environment import (
    AnyEnvironment,
    Environment,
    EnvironmentFactory,
    Outcome,
    as_observation,
    as_outcome,
    as_reaction,
    new_environment,
)
from ..loop_watch import LoopWatch, Stall
from .findings import Finding

Policy = Callable[[Observation, random.Random], Action | str]
"""A function that returns the action for an observation. A `str` stands for an `Answer`. The function must draw from
the generator that it receives, so that the episode can be repeated."""
ResultT = TypeVar("ResultT")


class Failed(Exception):
    """An episode can't continue. The reason has been reported as a finding."""


class Stuck(Exception):
    """A call never returned. The check ends, because the environment's state is unknown."""


@dataclass
class Play:
    """The course of one episode."""

    task: Task
    number: int
    """The number of the episode, which decides its seeds."""
    first: Observation | None = None
    turns: list[tuple[Action, Outcome]] = field(default_factory=list)
    last: Outcome | None = None
    """The result of `finish`."""
    status: Status | None = None
    """How the episode ended, or None if it failed."""

    @property
    def steps(self) -> list[Observation | Action]:
        """The steps that a tape of the episode would hold."""
        steps: list[Observation | Action | None] = [self.first]
        for action, outcome in self.turns:
            steps += [action, outcome.observation]
        return [step for step in steps if step is not None]

    @property
    def total(self) -> float | None:
        """The reward that a tape of the episode would have, or None if no part of it is scored."""
        outcomes = [outcome for _, outcome in self.turns] + ([self.last] if self.last is not None else [])
        values = [value for outcome in outcomes for _, value, weight in outcome.components() if weight]
        return sum(values) if values else None


class Probe:
    """Calls an environment's methods with a time limit, and plays whole episodes."""

    def __init__(
        self,
        factory: EnvironmentFactory,
        policy: Policy,
        *,
        max_turns: int,
        timeout: float,
        stall: float,
        seed: int,
    ) -> None:
        self.findings: list[Finding] = []
        self.max_turns, self.timeout, self.seed = max_turns, timeout, seed
        self._factory, self._policy, self._stall = factory, policy, stall
        self._calls = 0
        self._inside: dict[int | None, str] = {}
        """The method that each thread called last, by thread id."""
        self._made: list[AnyEnvironment] = []
        """The newest instances. While they live, what they left running isn't garbage, and can be counted."""
        self.unused = self.make()
        """An instance that is closed without a `reset`, to check that `close` works then too."""
        kind = type(self.unused)
        self.name, self.blocking, self.effect = kind.__name__, self.unused.blocking, self.unused.effect
        own = [cls for cls in kind.__mro__ if cls.__module__ != Environment.__module__]
        self._files = {f.__code__.co_filename for cls in own for f in vars(cls).values() if inspect.isfunction(f)}

    def found(self, check: str, sentence: str, where: str | None = None, *, warning: bool = False) -> None:
        """Report a finding. The same sentence is reported only once."""
        if not any((f.check, f.sentence) == (check, sentence) for f in self.findings):
            severity = "warning" if warning else "error"
            self.findings.append(Finding(check=check, severity=severity, sentence=sentence, where=where))

    def make(self) -> AnyEnvironment:
        """Make an instance. Raises NotAnEnvironment if the factory returns another type, or the same instance twice."""
        env = new_environment(self._factory)
        self._made = [*self._made[-7:], env]
        return env

    # Threads

    def run(self, *works: Callable[[], Coroutine[object, Never, ResultT]]) -> list[ResultT]:
        """Run all `works` concurrently: in one event loop or, if the environment is `blocking`, each in its own thread.

        Raises Stuck if no call has started or returned for 1.5 times the timeout. `self._calls` counts starts and
        returns, so an episode with many slow calls isn't mistaken for one that hangs.
        """
        groups = [[work] for work in works] if self.blocking else [list(works)]
        threads = dict(self._start(group) for group in groups)
        while True:
            before = self._calls
            # A call that only waits is ended earlier, by the limit inside the loop, whose finding names the line.
            _, late = wait(threads, timeout=1.5 * self.timeout)
            if not late:
                return [result for done in threads for result in done.result()]
            if self._calls == before:
                self._watch.stop()
                self._report_stuck(threads[late.pop()].ident)
                raise Stuck

    def _start(
        self, works: Sequence[Callable[[], Coroutine[object, Never, ResultT]]]
    ) -> tuple[Future[list[ResultT]], threading.Thread]:
        done: Future[list[ResultT]] = Future()
        self._watch = LoopWatch(self._stalled, seconds=self._stall)

        async def together() -> None:
            with contextlib.nullcontext() if self.blocking else self._watch:
                results = await asyncio.gather(*(work() for work in works), return_exceptions=True)
            failure = next((result for result in results if isinstance(result, BaseException)), None)
            if failure is not None:
                done.set_exception(failure)
            else:
                done.set_result(cast("list[ResultT]", results))

        thread = threading.Thread(target=lambda: asyncio.run(together()), name=f"check-{self.name}", daemon=True)
        thread.start()
        return done, thread

    def _stalled(self, stall: Stall) -> None:
        own = [frame for frame in stall.stack if frame.filename in self._files]
        if own and not stall.starved:
            self.found(
                "blocks",
                f"{self.name}.{own[-1].name} blocked the event loop for {stall.seconds:.2f} s or more, at "
                f"{stall.where()}; every other episode waited. Use an async operation there, or set "
                f"`blocking = True` on {self.name} to run it in a thread",
                self._frame(stall.stack),
            )

    def _report_stuck(self, ident: int | None) -> None:
        # A call that hangs raises nothing, so its line is read from the stack of its thread.
        frame = sys._current_frames().get(ident or 0)
        self.found(
            "hangs",
            f"{self.name}.{self._inside.get(ident, 'reset')} neither returned within {1.5 * self.timeout:g} s nor "
            "reacted to cancellation; it occupies its thread until the process ends. Set a timeout on the operation "
            "that it waits for",
            self._frame(traceback.extract_stack(frame)) if frame is not None else None,
        )

    def _frame(self, frames: Sequence[traceback.FrameSummary], *, any_file: bool = False) -> str | None:
        """Return the innermost frame in the environment's own files. If none is found and `any_file` is set,
        return the innermost frame in any file."""
        own = [frame for frame in frames if frame.filename in self._files] or (list(frames) if any_file else [])
        return f"{own[-1].filename}:{own[-1].lineno} in {own[-1].name}" if own else None

    # Calls

    async def call(self, env: AnyEnvironment, method: str, *args: object, check: str = "raises") -> object:
        """Return `await env.method(*args)`. Raises Failed if the method raises, and Stuck if it takes too long."""
        self._calls += 1
        self._inside[threading.get_ident()] = method
        await asyncio.sleep(0)  # interleave concurrent episodes at each call, to reveal shared state
        timer = asyncio.timeout(self.timeout)
        try:
            async with timer:
                result = getattr(env, method)(*args)
                if inspect.isawaitable(result):
                    return await result
        except Exception as error:
            hung = isinstance(error, TimeoutError) and timer.expired()
            cause = (error.__cause__ or error) if hung else error
            problem = (
                f"did not return in {self.timeout:g} s; an episode would wait for its whole time limit, so set a "
                "timeout on the operation that it waits for"
                if hung
                else f"raised {type(error).__qualname__}: {str(error)[:300]}; the episode would end as an error of the "
                "environment and never be trained on"
            )
            frame = self._frame(traceback.extract_tb(cause.__traceback__), any_file=True)
            self.found("hangs" if hung else check, f"{self.name}.{method} {problem}", frame)
            raise (Stuck if hung else Failed) from error
        finally:
            self._calls += 1
        self.found("types", f"{self.name}.{method} is not async: write `async def {method}`")
        raise Failed

    async def play(
        self, task: Task, number: int, *, script: Sequence[Action] | None = None, prefix: Tape | None = None
    ) -> Play:
        """Play the episode for `task` with the policy, or with the actions in `script`.

        With `prefix`, the episode continues from the end of that tape, and `finish` is not called.
        """
        env = self.make()
        env.rng = random.Random(self.seed + number)
        play = Play(task, number)
        try:
            if prefix is None:
                play.first = self._checked(as_observation, await self.call(env, "reset", task.given), "reset")
            else:
                await self.call(env, "restore", task.given, prefix, check="restore")
            check = "raises" if prefix is None else "restore"
            await self._turns(env, play, random.Random(f"{self.seed}/{number}"), script, check)
            last = await self.call(env, "finish", play.status) if prefix is None else None
            if last is not None:
                play.last = self._checked(partial(as_outcome, method="finish"), last, "finish")
        except Failed:
            play.status = None
        finally:
            await self.close(env)
        return play

    async def _turns(
        self, env: AnyEnvironment, play: Play, rng: random.Random, script: Sequence[Action] | None, check: str
    ) -> None:
        seen: Any = play.first
        for turn in range(self.max_turns if script is None else len(script)):
            action = self._next_action(seen, rng) if script is None else script[turn]
            outcome = self._checked(as_reaction, await self.call(env, "step", action, check=check), "step")
            play.turns.append((action, outcome))
            if outcome.terminated or outcome.truncated:
                play.status = Status.FINISHED if outcome.terminated else Status.TRUNCATED
                return
            seen = outcome.observation
        play.status = Status.LIMIT

    async def close(self, env: AnyEnvironment) -> None:
        """Close the environment. A failure is reported as a finding, but not raised."""
        with contextlib.suppress(Failed):
            await self.call(env, "close", check="close")

    def _next_action(self, seen: Observation, rng: random.Random) -> Action:
        action = self._policy(seen, rng)
        if isinstance(action, str):
            return Answer(text=action)
        if not isinstance(action, Action):
            raise TypeError(f"the policy returned {action!r:.80} for {seen!r:.80}; it must return an Action or a str")
        return action

    def _checked(self, convert: Callable[[object], ResultT], value: object, method: str) -> ResultT:
        """Convert `value`, the result of `method`, as a rollout does.

        A wrong type is a finding and ends the episode.
        """
        try:
            return convert(value)
        except (TypeError, ValueError) as error:
            self.found("types", f"{self.name}.{method} returned {value!r:.120}: {error}")
            raise Failed from error
