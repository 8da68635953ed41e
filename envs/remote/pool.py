"""Runs environments in separate processes, for environments that block, compute, hang or crash.

`with Pool(Simulator, processes=4) as pool:` makes a factory. Each episode has a process to itself. If a call takes too
long or is cancelled, the episode fails. Its process gets a few seconds to close the environment, and is then killed
with all child processes. A new process replaces it, and other episodes are not affected. The messages in
`env_protocol.py` are sent over pipes as lines, and nothing is pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from ..environment import EnvironmentFactory, check_factory
from ..load_named import load_named
from .declared import Declared
from .env_protocol import Answer, Call, CloseCall, check_length, read_welcome
from .proxy import Proxy
from .remote_errors import BadAnswer, Busy, SessionLost, Unreachable

_STARTING = 120.0
"""Time limit for a process to start and to import the packages of its environment, in seconds."""
ResultT = TypeVar("ResultT")
_ENDING = 5.0
"""Seconds in which a process must close its environment and exit before it is killed."""


class Pool:
    """A factory of environments that run in at most `processes` processes."""

    def __init__(
        self,
        make: str | EnvironmentFactory,
        *,
        processes: int,
        seconds: float | None = 60.0,
        patience: float | None = 60.0,
        largest: int = 1 << 30,
    ) -> None:
        """`make` is an Environment class, a function with a return type, or the name of either.

        A class or function must be at the top level of a module. A name is `package.module:name` or `file.py:name`.
        `seconds` is the time limit for a call, after which the process is killed. `patience` is how long an episode
        waits for a free process, in seconds. None means no limit for either of them. `largest` is the size limit for a
        message, in bytes. It stops a process whose answer never ends.
        """
        if processes < 1:
            raise ValueError(f"processes is {processes}; a pool needs at least one")
        found = load_named(make) if isinstance(make, str) else make
        check_factory(found)
        self.declared = Declared.of(found)
        self.places = processes
        """The number of episodes that can run at once."""
        self.started = 0
        """The number of processes started so far."""
        self.killed = 0
        """The number of processes given up because a call hung, failed or was cancelled."""
        self.seconds, self.patience, self.largest = seconds, patience, largest
        self._name = make if isinstance(make, str) else _name_of(make)
        self._free = Places(processes)
        self._idle: list[LineProcess] = []
        self._all: set[LineProcess] = set()
        self._lock = threading.Lock()
        self._ending: list[threading.Thread] = []
        """Threads that wait for the end of a process."""
        self._threads = ThreadPoolExecutor(processes, "tapereel-pool")
        self._closed = False

    def __call__(self) -> PooledEnvironment:
        """Return an environment for one episode. The environment takes a process at its first call."""
        return PooledEnvironment(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes. Each may close its environment first (see `LineProcess.end`)."""
        with self._lock:
            self._closed = True
            for worker in list(self._all):
                self._discard(worker)
            self._idle.clear()
        for thread in self._ending:
            thread.join()
        self._threads.shutdown(wait=True)

    async def run(self, work: Callable[..., ResultT], *args: object) -> ResultT:
        """Run a blocking function in one of the pool's threads."""
        if self._closed:
            raise self._gone()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def take(self) -> LineProcess:
        """Return a free process, reserved for the caller. Raises Busy if no process is free in time."""
        try:
            async with asyncio.timeout(self.patience):
                await self._free.acquire()
        except TimeoutError as error:
            raise Busy(
                f"all {self.places} processes of the pool of {self.declared.name} were in use for "
                f"{self.patience:g} s; increase `processes`, or run fewer episodes at once"
            ) from error
        try:
            return await self._worker()
        except BaseException:
            self._free.release()
            raise

    def give_back(self, worker: LineProcess) -> None:
        """Give a process back after its episode, so that another episode may use it."""
        with self._lock:
            if not self._closed:
                self._idle.append(worker)
        self._free.release()

    def lose(self, worker: LineProcess) -> None:
        """End a process whose state is unknown. Then the next episode starts another process."""
        with self._lock:
            self.killed += 1
            self._discard(worker, self._free.release)

    def _gone(self) -> SessionLost:
        return SessionLost(f"the pool of {self.declared.name} is closed")

    def _discard(self, worker: LineProcess, then: Callable[[], object] = lambda: None) -> None:
        """End a process in a thread, and call `then` at its end."""

        def end() -> None:
            worker.end()
            then()

        self._all.discard(worker)
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        self._ending.append(threading.Thread(target=end, name="tapereel-pool-end"))
        self._ending[-1].start()

    async def _worker(self) -> LineProcess:
        with self._lock:
            if self._closed:
                raise self._gone()
            while self._idle:
                worker = self._idle.pop()
                if worker.ended() is None:
                    return worker
                self._discard(worker)
            # This lets the worker import the same modules as this process.
            search = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            command = [sys.executable, "-m", "tapereel.envs.remote.host", self._name, str(self.largest)]
            worker = LineProcess(command, largest=self.largest, environment=search)
            self._all.add(worker)
            self.started += 1
        try:
            async with asyncio.timeout(_STARTING):
                line = await self.run(worker.read)
            if not line:
                raise Unreachable(
                    f"a process for {self._name} exited before it was ready (exit code "
                    f"{await self.run(worker.code)}); its stderr shows the reason"
                )
            welcome = read_welcome(line)
            self.declared.agree(welcome.name, welcome.kinds, welcome.effect)
        except BaseException as error:
            with self._lock:
                self._discard(worker)
            if isinstance(error, TimeoutError):
                raise Unreachable(f"a process for {self._name} was not ready within {_STARTING:g} s") from error
            raise
        return worker


class PooledEnvironment(Proxy):
    """One episode in a process from a pool."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool.declared, call_seconds=pool.seconds)
        self._pool = pool
        self._worker: LineProcess | None = None

    async def acquire(self) -> None:
        if self._worker is None and self._over is None:
            self._worker = await self._pool.take()

    async def close(self) -> None:
        """Close the remote environment and give the process back to the pool."""
        if self._worker is None:
            return
        try:
            await self._ask(CloseCall(id=self._number + 1))
        finally:  # also if the environment's `close` raised
            worker, self._worker, self._over = self._worker, None, self._over or "it is closed"
            if worker is not None:
                self._pool.give_back(worker)

    def _encoded(self, call: Call) -> str:
        line = call.encoded() + "\n"
        check_length(call, line, self._pool.largest, "increase `largest` of the pool")
        return line

    async def _exchange(self, call: Call, text: str) -> Answer:
        assert self._worker is not None
        self._number = call.id
        answer = await self._pool.run(self._worker.ask, text.encode())
        if not answer:
            raise SessionLost(
                f"the process of this {self.environment} exited (exit code "
                f"{await self._pool.run(self._worker.code)}); its stderr may show the reason"
            )
        return self._read(call, answer)

    async def _abandon(self, cut: bool) -> None:
        # The answer to a cancelled call is still to come, and the next episode would read that answer as its own.
        worker, self._worker = self._worker, None
        if worker is not None:
            if not cut:
                worker.kill()
            self._pool.lose(worker)


class LineProcess:
    """One process and its two pipes. `ask` and `read` block, and other threads may call the other methods meanwhile."""

    def __init__(
        self, command: Sequence[str], *, largest: int = 1 << 20, environment: Mapping[str, str] | None = None
    ) -> None:
        """`largest` is the size limit for an answer, in bytes. `environment` is added to this process's variables."""
        self._largest = largest
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )

    def ask(self, line: bytes) -> bytes:
        """Send one line and return the answer. It is empty if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return b""
        return self.read()

    def read(self) -> bytes:
        """Return the next line. It is empty if the process has ended, even in the middle of a line.

        Raises BadAnswer if the line is too long.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline(self._largest + 1)
        if len(line) > self._largest:
            raise BadAnswer(
                f"an answer of more than {self._largest} bytes, the limit `largest`: send less, or increase it"
            )
        return line if line.endswith(b"\n") else b""

    def ended(self) -> int | None:
        """Return the exit code, or None while the process runs. It is negative if a signal ended the process.

        WNOWAIT leaves the process unreaped, so its number stays reserved and `kill` can't hit another process.
        """
        if self._process.returncode is not None or not hasattr(os, "waitid"):
            return self._process.poll()
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def code(self) -> int | None:
        """Wait up to `_ENDING` seconds for the exit code. Return None if the process doesn't end."""
        for _ in range(int(_ENDING / 0.05)):
            if self.ended() is not None:
                break
            time.sleep(0.05)
        return self.ended()

    def leave(self) -> None:
        """Ask the process to end by closing its stdin."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process and its child processes (its process group)."""
        if self._process.returncode is not None:
            return  # it has been reaped, and the system may have given its number to another process
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Ask the process to end. Kill it after `_ENDING` seconds, and in any case its child processes."""
        self.leave()
        self.code()
        self.stop()

    def stop(self) -> None:
        """Kill the process and wait until it has ended."""
        self.kill()
        self.reap()

    def reap(self) -> None:
        """Wait until the process has ended, kill it if that takes too long, and close the pipes."""
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait(_ENDING)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class Places:
    """A fair semaphore that tasks in several event loops can share. An `asyncio.Semaphore` belongs to one loop."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._waiting: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._lock = threading.Lock()

    async def acquire(self) -> None:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._count > 0:
                self._count -= 1
                return
            future: asyncio.Future[None] = loop.create_future()
            self._waiting.append((loop, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release()  # the place arrived together with the cancellation: pass it on, or it is lost
            raise

    def release(self) -> None:
        """Pass the place to the task that has waited longest, or count it as free."""
        with self._lock:
            while self._waiting:
                loop, future = self._waiting.popleft()
                with contextlib.suppress(RuntimeError):  # the waiter's loop is closed: take the next waiter
                    loop.call_soon_threadsafe(self._settle, future)
                    return
            self._count += 1

    def _settle(self, future: asyncio.Future[None]) -> None:
        if future.done():
            self.release()
        else:
            future.set_result(None)


def _name_of(make: Any) -> str:
    """Return the name by which `load_named` finds `make` in another process. Raises ValueError if it has no name."""
    path = getattr(make, "__qualname__", "<")
    if "<" in path:
        raise ValueError(
            f"{make!r:.80} can't be imported by another process: pass a class or a function at the top of a module"
        )
    module = sys.modules[make.__module__]
    file = getattr(module, "__file__", None)
    if getattr(module, "__package__", None) or file is None:
        return f"{make.__module__}:{path}"
    return f"{Path(file).resolve()}:{path}"
