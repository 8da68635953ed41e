"""Probe: plays episodes of an environment that nobody trusts yet, and turns what goes wrong into findings.

Every episode runs in a thread that can be left behind, so that a call which never comes back costs its timeout and not
the whole check. What the findings mean together is for `check.py` to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import random
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ...tapes.records import Status, Task
from ...tapes.steps import Action, Answer, Observation
from ...tapes.value import Value
from ..environment import (
    Environment,
    EnvironmentFault,
    NotAnEnvironment,
    Outcome,
    as_observation,
    as_outcome,
    new_environment,
)
from ..loop_watch import LoopWatch, Stall

Policy = Callable[[Observation, random.Random], Action | str]
"""What to do on an observation; draws from the generator it is given, so that an episode can be played again."""
ResultT = TypeVar("ResultT")


class Finding(Value):
    """One thing that is wrong with an environment, for whoever maintains it."""

    check: str
    """Which check found it; a key of `Report.checks`."""
    severity: Literal["error", "warning"] = "error"
    sentence: str
    """What was seen and what to do about it."""
    where: str | None = None
    """`file:line in function`; None where no line is to blame."""


class Failed(Exception):
    """An episode can't go on; its finding is reported."""


class Stuck(Exception):
    """A call never came back; nothing more can be asked of this environment."""


@dataclass
class Play:
    """One episode as it went."""

    task: Task
    first: Observation | None = None
    turns: list[tuple[Action, Outcome]] = field(default_factory=list)
    last: Outcome | None = None
    """What `finish` gave."""
    status: Status | None = None
    """None where the episode failed."""

    @property
    def steps(self) -> list[Observation | Action]:
        """What would stand on the tape."""
        steps: list[Observation | Action] = [self.first] if self.first is not None else []
        for action, outcome in self.turns:
            steps += [action] if outcome.observation is None else [action, outcome.observation]
        return steps


class Probe:
    """Calls an environment's methods, in time, and plays whole episodes with them."""

    def __init__(
        self,
        factory: Callable[[], Environment[Any]],
        policy: Policy,
        *,
        max_turns: int,
        timeout: float,
        stall: float,
        seed: int,
    ) -> None:
        self.findings: list[Finding] = []
        self.max_turns = max_turns
        self.timeout = timeout
        self.seed = seed
        self._factory = factory
        self._policy = policy
        self._stall = stall
        self._calls = 0
        self._threads: dict[Future[list[Any]], tuple[threading.Thread, LoopWatch | None]] = {}
        self._inside: dict[int, str] = {}
        """Thread -> the call that it was last seen in."""
        self._made: list[Environment[Any]] = []
        self.unused = self.make()
        """An instance that is closed without ever having been reset."""
        kind = type(self.unused)
        self.name = kind.__name__
        self.blocking = self.unused.blocking
        self.effect = self.unused.effect
        self._files = {
            f.__code__.co_filename
            for cls in kind.__mro__
            if cls.__module__ != Environment.__module__
            for f in vars(cls).values()
            if inspect.isfunction(f)
        }

    def found(self, check: str, sentence: str, where: str | None = None, *, warning: bool = False) -> None:
        """Report, once, however often it is met."""
        if not any((f.check, f.sentence) == (check, sentence) for f in self.findings):
            severity = "warning" if warning else "error"
            self.findings.append(Finding(check=check, severity=severity, sentence=sentence, where=where))

    def make(self) -> Environment[Any]:
        """A fresh instance. NotAnEnvironment where the factory makes something else, or the same one again."""
        env = new_environment(self._factory)
        if any(env is other for other in self._made):
            raise NotAnEnvironment(
                "the factory returned the same instance twice; an instance serves one episode, so make a new one in "
                "each call"
            )
        self._made = [*self._made[-7:], env]
        return env

    def run(self, *works: Callable[[], Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
        """Do all at once: in one event loop, or each in a thread where the environment says that it blocks.

        Raises Stuck when no call has come back for longer than any may take.
        """
        groups = [[work] for work in works] if self.blocking else [list(works)]
        pending = [self._thread(group) for group in groups]
        while True:
            before = self._calls
            # Longer than the limit inside the loop, which tells more about a call that only waits.
            _, late = wait(pending, timeout=1.5 * self.timeout)
            if not late:
                return [result for future in pending for result in future.result()]
            if self._calls == before:
                thread, watch = self._threads[late.pop()]
                if watch is not None:
                    watch.stop()
                self._report_stuck(thread)
                raise Stuck

    def _thread(self, works: Sequence[Callable[[], Awaitable[Any]]]) -> Future[list[Any]]:
        done: Future[list[Any]] = Future()
        watch = None if self.blocking else LoopWatch(self._stalled, seconds=self._stall)

        async def together() -> None:
            with watch if watch is not None else contextlib.nullcontext():
                results = await asyncio.gather(*(work() for work in works), return_exceptions=True)
            failures = [result for result in results if isinstance(result, BaseException)]
            if failures:
                done.set_exception(failures[0])
            else:
                done.set_result(results)

        thread = threading.Thread(target=lambda: asyncio.run(together()), name=f"check-{self.name}", daemon=True)
        thread.start()
        self._threads[done] = thread, watch
        return done

    async def call(self, env: Environment[Any], method: str, *args: Any, check: str = "raises") -> Any:
        """`await env.method(*args)` within the time limit. Failed where it raises, Stuck where it only waits."""
        self._calls += 1
        self._inside[threading.get_ident()] = method
        await asyncio.sleep(0)  # instances that share state must meet each other between their calls
        timer = asyncio.timeout(self.timeout)
        try:
            async with timer:
                given = getattr(env, method)(*args)
                if not inspect.isawaitable(given):
                    self.found("types", f"{self.name}.{method} is not async; write `async def {method}`")
                    raise Failed
                return await given
        except TimeoutError as error:
            if timer.expired():
                self.found(
                    "hangs",
                    f"{self.name}.{method} gave no answer in {self.timeout:g} s; an episode that meets "
                    "this waits for its whole limit, so give what it waits for a time limit",
                    self._frame(error.__cause__ or error),
                )
                raise Stuck from error
            self._raised(check, method, error)
        except Failed:
            raise
        except Exception as error:
            self._raised(check, method, error)
        finally:
            self._calls += 1

    def _raised(self, check: str, method: str, error: Exception) -> None:
        self.found(
            check,
            f"{self.name}.{method} raised {type(error).__qualname__}: {str(error)[:300]}; the episode "
            "would end as an error of the environment and never be trained on",
            self._frame(error),
        )
        raise Failed from error

    async def play(self, task: Task, k: int, *, script: Sequence[Action] | None = None) -> Play:
        """The episode of `task` with the k-th seed: by the policy, or by the actions of `script`."""
        env = self.make()
        env.rng = random.Random(self.seed + k)
        play = Play(task)
        try:
            play.first = self._checked(as_observation, await self.call(env, "reset", task.given), "reset")
            await self._turns(env, play, random.Random(f"{self.seed}/{k}"), script)
            last = await self.call(env, "finish", play.status)
            if last is not None:
                play.last = self._checked(as_outcome, last, "finish")
        except Failed:
            play.status = None
        finally:
            await self.close(env)
        return play

    async def _turns(
        self, env: Environment[Any], play: Play, rng: random.Random, script: Sequence[Action] | None
    ) -> None:
        seen = play.first
        assert seen is not None
        for turn in range(self.max_turns if script is None else len(script)):
            action = self._next_action(seen, rng) if script is None else script[turn]
            outcome = self._checked(as_outcome, await self.call(env, "step", action), "step")
            play.turns.append((action, outcome))
            if outcome.terminated or outcome.truncated:
                play.status = Status.FINISHED if outcome.terminated else Status.TRUNCATED
                return
            if outcome.observation is None:
                self.found(
                    "types",
                    f"{self.name}.step gave no observation on {action!r:.120} though the episode goes "
                    "on: the agent would act without seeing what its action did",
                    warning=True,
                )
            else:
                seen = outcome.observation
        play.status = Status.LIMIT

    async def close(self, env: Environment[Any]) -> None:
        """Close; a failure is a finding and nothing more."""
        try:
            await self.call(env, "close", check="close")
        except Failed:
            return

    def _next_action(self, seen: Observation, rng: random.Random) -> Action:
        action = self._policy(seen, rng)
        if isinstance(action, str):
            return Answer(text=action)
        if not isinstance(action, Action):
            raise TypeError(f"the policy returned {action!r:.80} for {seen!r:.80}; it must return an Action or a str")
        return action

    def _checked(self, convert: Callable[..., ResultT], value: object, method: str) -> ResultT:
        """`value`, which `method` returned, as rollout takes it. A wrong type is a finding and ends the episode."""
        wanted = {"reset": "an Observation or a str", "step": "an Outcome", "finish": "an Outcome or None"}[method]
        try:
            return convert(value)
        except EnvironmentFault as error:
            self.found("types", f"{self.name}.{method} returned {value!r:.120}; it must return {wanted}")
            raise Failed from error

    def _stalled(self, stall: Stall) -> None:
        if any(frame.filename in self._files for frame in stall.stack):
            where = next(frame for frame in reversed(stall.stack) if frame.filename in self._files)
            self.found(
                "blocks",
                f"{self.name}.{where.name} held the event loop for {stall.seconds:.2f} s or more, at "
                f"{stall.where()}; every other episode stood still. Await something async there, or set "
                f"`blocking = True` on {self.name}, and it runs in a thread",
                f"{where.filename}:{where.lineno} in {where.name}",
            )

    def _report_stuck(self, thread: threading.Thread) -> None:
        ident = thread.ident or 0
        frame = sys._current_frames().get(ident)
        where = self._inner(traceback.extract_stack(frame)) if frame is not None else None
        self.found(
            "hangs",
            f"{self.name}.{self._inside.get(ident, 'reset')} was called and neither came back within "
            f"{1.5 * self.timeout:g} s nor let itself be cancelled; it holds its thread until the process ends. "
            "Give what it waits for a time limit",
            where,
        )

    def _frame(self, error: BaseException) -> str | None:
        return self._inner(traceback.extract_tb(error.__traceback__), last=True)

    def _inner(self, frames: Sequence[traceback.FrameSummary], *, last: bool = False) -> str | None:
        own = [frame for frame in frames if frame.filename in self._files]
        chosen = own or (list(frames) if last else [])
        return f"{chosen[-1].filename}:{chosen[-1].lineno} in {chosen[-1].name}" if chosen else None
