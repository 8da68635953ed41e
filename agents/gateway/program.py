"""An external program as an agent: it gets the address and key of its tape, and its output is its action.

The program is any that speaks OpenAI's protocol: a command line, which finds `OPENAI_BASE_URL` and `OPENAI_API_KEY` in
its environment, or an async function, which is given both. It is shown the newest observation and answers with text.
Between the two it may ask the model as often as it likes; each question is a call on the tape.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ...tapes import Answer, Step, Tape
from ...tapes.common.redact import without_secrets
from ...tapes.errors import TapereelError
from ..engines.transport.proxies import ask_directly
from ..episode.agent import Agent
from ..episode.llm import LLM
from .gateway_server import Gateway
from .gateway_session import Session

LONGEST = 1024 * 1024
"""Maximum bytes of a program's output."""
GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL."""
KILL = 10.0
"""Seconds to wait for a killed process to end."""
DRAIN = 1.0
"""Seconds to read the rest of a program's output after it and its children ended."""
_ERRORS = 4000
"""Last bytes of stderr that are kept."""


class ProgramFailed(TapereelError, RuntimeError):
    """The program ended with an error or printed too much: an error of the agent. Quotes its last output."""


class Endpoint(NamedTuple):
    """Where a program asks the model: `AsyncOpenAI(**endpoint._asdict())`."""

    base_url: str
    api_key: str


Function = Callable[[str, Endpoint], Awaitable[str]]


class Program(Agent):
    """`Program(["python", "agent.py"])`, or `Program(solve)` with `async def solve(task: str, endpoint) -> str`.

    A command reads the task on stdin, or as the argument `{task}` where it has one; what it prints until it ends is its
    answer, without secrets that are known as such. It has all variables of this process's environment, and its address
    and key. What it started and left running is ended with it: the session it runs in, and (on Linux) whatever else
    has its key in its environment. A process that has put itself into another session and its key away goes on.

    With `follow=False` the run's own temperature and top_p hold, whatever the program asks for.
    """

    patience = 10.0

    def __init__(
        self,
        program: Sequence[str] | Function,
        *,
        name: str = "program",
        follow: bool = True,
        gateway: Gateway | None = None,
    ) -> None:
        """`gateway`: one that is being served; without it, the event loop's own is while a program runs."""
        if isinstance(program, str) or (callable(program) and not _is_async(program)):
            raise TypeError(
                f"Program needs a list of words, as in ['python', 'agent.py'], or an async function, not {program!r}"
            )
        self.name = name
        self.program = program if callable(program) else tuple(program)
        self.follow = follow
        self._gateway = gateway

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        session = Session(tape, llm, follow=self.follow)
        serving = contextlib.AsyncExitStack()
        gateway = self._gateway or await serving.enter_async_context(_shared())
        key = gateway.open(session)
        ask_directly(gateway.url)
        running = asyncio.ensure_future(self._run(str(tape.last), Endpoint(gateway.url, key)))
        running.add_done_callback(lambda _: session.over())
        session.broken.add_done_callback(lambda broken: broken.cancelled() or session.over())
        try:
            async for exchange in session.exchanges():
                yield exchange
            yield Answer(text=without_secrets((await _outcome(running, session)).replace(key, "[key]")))
        finally:
            gateway.shut(key)
            running.cancel()
            await asyncio.wait([running])
            await session.close()
            await serving.aclose()

    async def _run(self, task: str, endpoint: Endpoint) -> str:
        if callable(self.program):
            return await self.program(task, endpoint)
        return await _command(self.program, task, endpoint)


async def _outcome(running: asyncio.Future[str], session: Session) -> str:
    """The program's output, or the reason why the episode ends without it."""
    if session.broken.done():
        session.broken.result()
    try:
        said = await running
    except asyncio.CancelledError:
        raise
    except Exception as error:
        if session.limited is not None:
            raise session.limited from error
        if session.failed is not None:
            raise session.failed from error
        raise
    if session.limited is not None:
        raise session.limited
    return said


async def _command(words: Sequence[str], task: str, endpoint: Endpoint) -> str:
    """Run a command to its end, and return its output."""
    inline = any("{task}" in word for word in words)
    transport, ran = await asyncio.get_running_loop().subprocess_exec(
        _Ran,
        *(word.replace("{task}", task) for word in words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key},
    )
    try:
        stdin: Any = transport.get_pipe_transport(0)
        stdin.write(b"" if inline else task.encode())
        stdin.write_eof()
        await ran.exited.wait()
    finally:
        await _end(transport.get_pid(), ran, endpoint.api_key)
        transport.close()
    code = transport.get_returncode()
    shown = ran.complained.decode(errors="replace").replace(endpoint.api_key, "[key]").strip()
    if code != 0:
        raise ProgramFailed(f"{words[0]} ended with exit code {code}: {shown[-1500:] or 'it printed no error'}")
    if len(ran.said) > LONGEST:
        raise ProgramFailed(f"{words[0]} printed more than {LONGEST} bytes; an answer is shorter than that")
    return ran.said.decode(errors="replace").strip()


class _Ran(asyncio.SubprocessProtocol):
    """What a command says, and that it has ended, whoever still holds its pipes."""

    def __init__(self) -> None:
        self.said, self.complained = bytearray(), b""
        self.exited, self.drained = asyncio.Event(), asyncio.Event()
        self._pipes = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        if fd == 1:
            self.said += data[: LONGEST + 1 - len(self.said)]
        else:
            self.complained = (self.complained + data)[-_ERRORS:]

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._pipes.discard(fd)
        if not self._pipes:
            self.drained.set()

    def process_exited(self) -> None:
        self.exited.set()


async def _end(pid: int, ran: _Ran, key: str) -> None:
    """The command where it hasn't ended, and whatever it started; then what they said is here."""
    if not ran.exited.is_set():
        _signal(pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ran.exited.wait(), GRACE)
    _signal(pid, signal.SIGKILL)
    await asyncio.to_thread(_end_strays, key.encode())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ran.exited.wait(), KILL)
    with contextlib.suppress(TimeoutError):  # somebody who got away holds a pipe: what was said counts
        await asyncio.wait_for(ran.drained.wait(), DRAIN)


def _signal(session: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, number)


def _end_strays(key: bytes) -> None:
    """Whoever left the session has the key of this tape in its environment still, as nobody else has."""
    for _ in range(10):  # a killed process may just have started another one
        found = [pid for pid in map(int, filter(str.isdigit, _processes())) if key in _environment(pid)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _processes() -> list[str]:
    return os.listdir("/proc") if sys.platform == "linux" else []


def _environment(pid: int) -> bytes:
    """That a process began with; empty where it isn't ours, or is gone."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class _Shared:
    """The gateway of one event loop, served while at least one program uses it."""

    def __init__(self) -> None:
        self.users = 0
        self.gateway: Gateway | None = None
        self.stack = contextlib.AsyncExitStack()
        self.lock = asyncio.Lock()


_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared] = WeakKeyDictionary()


@asynccontextmanager
async def _shared() -> AsyncIterator[Gateway]:
    shared = _loops.setdefault(asyncio.get_running_loop(), _Shared())
    shared.users += 1
    try:
        async with shared.lock:
            if shared.gateway is None:
                shared.gateway = await shared.stack.enter_async_context(Gateway().serving())
        yield shared.gateway
    finally:
        shared.users -= 1
        async with shared.lock:
            if not shared.users and shared.gateway is not None:
                shared.gateway = None
                await shared.stack.aclose()
