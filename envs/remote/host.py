"""Carries out the calls to one environment instance and reports its errors as `Fault` messages.

Servers (`env_service.py`) and the processes in a pool use this module. Any exception from the environment except
KeyboardInterrupt becomes a `Fault`. After a call that exceeds its time limit, the host accepts no more calls.

This module is also the worker process in a pool. Calls and answers are lines of JSON on stdin and stdout:

    python -m tapereel.envs.remote.host package.module:name LARGEST

The environment's own output goes to stderr. The process ends when its stdin is closed, even in the middle of a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from typing import IO, Any, cast

from ...tapes.common.run_async import complete, end, shared_runner
from ...tapes.common.text import guard_terminal, logger, storable
from ...tapes.errors import error_message
from ...tapes.pictures import RECORDED
from ...tapes.steps import Action, Step
from ...tapes.tape import Tape
from ..blocking import EnvironmentThread
from ..environment import (
    AnyEnvironment,
    Environment,
    EnvironmentFactory,
    Outcome,
    RestoreMismatch,
    as_observation,
    as_outcome,
    bare_tape,
    new_environment,
)
from ..load_named import load_named
from ..supervised import Supervised, TimedOut
from .declared import Declared
from .env_protocol import (
    Answer,
    Call,
    CloseCall,
    Fault,
    Message,
    ResetCall,
    RestoreCall,
    Result,
    StepCall,
    Welcome,
    read_call,
)
from .remote_errors import BadAnswer

log = logger("service")
_ENDING = 3.0
"""Time limit for a worker's environment to close after stdin has ended, in seconds."""


class Host:
    """Answers the calls to one instance, which is made at the first `reset` or `restore`."""

    def __init__(
        self, make: EnvironmentFactory, declared: Declared, seconds: float | None, *, alone: bool = False
    ) -> None:
        """`seconds` is the time limit for a call, or None for no limit. `alone` states that no other episode uses this
        event loop, so a blocking environment needs no thread."""
        self.dead = False
        """True after a call hung, because the state of the environment is then unknown."""
        self._make = make
        self._declared = declared
        self._seconds = seconds
        self._alone = alone
        self._code = Supervised()
        self._env: AnyEnvironment | None = None
        self._thread: EnvironmentThread | None = None

    async def answer(self, call: Call) -> Answer:
        """Carry out the call and return its answer. Raises CancelledError if the caller was cancelled. A
        KeyboardInterrupt is passed on."""
        try:
            return await self._code(self._do(call), f"{self._declared.name}.{call.t}", self._seconds)
        except TimedOut as error:
            self.dead = True
            return Fault(id=call.id, code="hung", message=str(error))
        except BadAnswer as error:
            return Fault(id=call.id, code="refused", error="BadAnswer", message=storable(str(error)))
        except RestoreMismatch as error:
            return Fault(id=call.id, code="mismatch", error="RestoreMismatch", message=storable(str(error)))
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:
            frames = traceback.extract_tb(error.__traceback__)
            frame = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else None
            kind, message = type(error).__qualname__, storable(error_message(error))
            return Fault(id=call.id, code="raised", error=kind, message=message, frame=frame)
        finally:
            if isinstance(call, CloseCall):
                self._code.close()  # the next episode gets its own task and context variables

    async def close(self) -> None:
        """Release the instance, if one was made. An error in its `close` is only logged, since no call waits for it."""
        try:
            await self._code(self._release(), f"{self._declared.name}.close", self._seconds)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:
            kind, message = type(error).__qualname__, error_message(error)[:500]
            log.warning("an instance of %s could not be closed: %s: %s", self._declared.name, kind, message)
        finally:
            self._code.close()

    async def _release(self) -> None:
        env, self._env = self._env, None
        try:
            if env is not None:
                await self._run(env.close())
        finally:
            if self._thread is not None:
                self._thread.stop()
                self._thread = None

    async def _do(self, call: Call) -> Answer:
        if isinstance(call, CloseCall):
            await self._release()
            return Result(id=call.id)
        if isinstance(call, ResetCall | RestoreCall):
            return await self._begin(call)
        if self._env is None:
            raise BadAnswer(f"`{call.t}` was called before `reset`")
        if isinstance(call, StepCall):
            action = call.action.action(self._declared)
            outcome = await self._run(cast("Environment[Action]", self._env).step(action))
        else:
            outcome = await self._run(self._env.finish(call.status))
            if outcome is None:
                return Result(id=call.id)
        return self._result(call, as_outcome(outcome, call.t))

    async def _begin(self, call: ResetCall | RestoreCall) -> Answer:
        env = self._made()
        if call.rng is not None:
            try:
                env.rng = call.rng.made()
            except ValueError as error:
                raise BadAnswer(f"invalid state of a random generator: {error}") from error
        if isinstance(call, RestoreCall):
            await self._run(env.restore(call.task.given, self._tape(call)))
            return Result(id=call.id)
        observation = as_observation(await self._run(env.reset(call.task.given)))
        return self._result(call, Outcome(observation))

    def _made(self) -> AnyEnvironment:
        if self._env is None:
            self._env = new_environment(self._make)
            if self._env.rewards is not None and self._declared.rewards is None:
                raise TypeError(
                    f"{self._declared.name} has its own rewards ({', '.join(self._env.rewards.names)}), which read "
                    "the tape, but the server has no tape: add them on the side that runs the episodes, as "
                    "`rewarded(environment, Rewards([...]))`"
                )
            if self._env.blocking and not self._alone:
                self._thread = EnvironmentThread(self._declared.name)
        return self._env

    async def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await (self._thread.run(coroutine) if self._thread is not None else coroutine)

    def _result(self, call: Call, outcome: Outcome) -> Result:
        shown = outcome.observation
        if shown is not None and not self._declared.holds(shown):
            raise TypeError(
                f"{self._declared.name} returned a {type(shown).__qualname__}, which it doesn't declare; add the class "
                "to its `kinds`"
            )
        return Result.of(call.id, outcome)

    def _tape(self, call: RestoreCall) -> Tape:
        declared, steps = self._declared, list[Step]()
        for item in call.steps:
            read = declared.action if item.kind in declared.actions else declared.observation
            steps.append(read(item.kind, item.content, RECORDED))
        return bare_tape(call.tape, call.task, declared.name, call.env_seed, steps)


def main(name: str, largest: int) -> None:
    """Serve the environment called `name` until stdin ends."""
    # The messages use copies of stdin and stdout. The environment itself reads from an empty file and prints to stderr,
    # because a `print` in the environment would otherwise corrupt the protocol.
    asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    guard_terminal()
    make = cast(EnvironmentFactory, load_named(name))
    declared = Declared.of(make)
    _write(answers, Welcome.to(declared, message_bytes=largest))
    with contextlib.redirect_stderr(sys.stderr):  # the environment may replace sys.stderr
        _serve(make, declared, asked, answers, largest)


def _serve(make: EnvironmentFactory, declared: Declared, asked: IO[bytes], answers: IO[bytes], largest: int) -> None:
    runner = shared_runner()
    loop, host = runner.get_loop(), Host(make, declared, None, alone=True)
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    answering: asyncio.Task[Answer] | None = None

    def cancel() -> None:  # no caller reads the answer, and the environment must be closed in time
        if answering is not None:
            answering.cancel()

    ended = partial(loop.call_soon_threadsafe, cancel)
    threading.Thread(target=_read, args=(asked, lines, largest, ended), daemon=True).start()
    while (line := lines.get()) is not None:
        try:
            call = read_call(line)
        except BadAnswer as error:
            _write(answers, Fault(id=0, code="refused", error="BadAnswer", message=str(error)))
            continue
        answering = loop.create_task(host.answer(call))
        try:
            _write(answers, complete(runner, answering))
        except (asyncio.CancelledError, BrokenPipeError):
            break
    complete(runner, loop.create_task(host.close()))
    end(runner)


def _read(asked: IO[bytes], lines: queue.SimpleQueue[bytes | None], largest: int, ended: Callable[[], object]) -> None:
    """Read calls in a separate thread, so that the process ends when stdin ends, even if a call still hangs. `ended` is
    called at the end of stdin."""
    while (line := asked.readline(largest + 1)).endswith(b"\n"):
        lines.put(line)
    lines.put(None)
    ended()
    time.sleep(_ENDING)
    os._exit(1)


def _write(answers: IO[bytes], message: Message) -> None:
    answers.write(message.encoded().encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
