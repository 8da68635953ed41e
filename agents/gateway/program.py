"""Runs an external program as an agent. The program gets its tape's URL and key, and its output is the action.

The program is a command or an async function that uses an API of OpenAI or Anthropic. A command finds URL and key in
the variables of both (`Endpoint.variables`). A function gets them as one argument. The program reads the newest
observation and answers with text. Before its answer it may send any number of requests to the model. Each request is a
call on the tape.
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
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from weakref import WeakKeyDictionary

from ...tapes import Answer, Step, Tape
from ...tapes.common.arguments import check_arguments
from ...tapes.common.redact import without_secrets
from ...tapes.errors import BadArgument, TapereelError
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
"""Maximum seconds to wait until a killed process has ended."""
DRAIN = 1.0
"""Maximum seconds for reading the rest of a program's output after the program and its children have ended."""
_ERRORS = 4000
"""How many bytes are kept from the end of stderr."""


class ProgramFailed(TapereelError, RuntimeError):
    """The program ended with an error or printed too much. This is the agent's error. The message quotes the output."""


class Endpoint(NamedTuple):
    """URL and key for a program's requests to the model: `AsyncOpenAI(**endpoint._asdict())`, or
    `AsyncAnthropic(base_url=endpoint.root_url, api_key=endpoint.api_key)`."""

    base_url: str
    api_key: str

    @property
    def root_url(self) -> str:
        """The URL without `/v1`, which Anthropic's clients add themselves."""
        return self.base_url.removesuffix("/v1")

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables in which the official clients find URL and key."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.root_url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


Function = Callable[[str, Endpoint], Awaitable[str]]


ProgramSource = Annotated[
    Sequence[str] | Function, "a list of words, as in ['python', 'agent.py'], or an async function"
]


class Program(Agent):
    """`Program(["python", "agent.py"])`, or `Program(solve)` with `async def solve(task: str, endpoint) -> str`.

    A command gets the task on stdin, or in its arguments in place of `{task}`. Its output on stdout is the answer.
    Known secrets in the answer are replaced. The command's environment is this process's environment plus the URL and
    the key.

    When the command ends, all processes that remain in its process session are killed. On Linux, processes with its key
    in their environment are killed too. A process that left the session and dropped the key survives.

    With `follow=False`, temperature and top_p come from the run and not from the program's requests. `embeddings` is
    the address of a server that makes embeddings. It gets the key in OPENAI_API_KEY of this process.
    """

    patience = 10.0

    @check_arguments
    def __init__(
        self,
        program: ProgramSource,
        *,
        name: str = "program",
        follow: bool = True,
        embeddings: str | None = None,
        gateway: Gateway | None = None,
    ) -> None:
        """`gateway` is a gateway that is already being served. By default, all programs in an event loop share one.

        Raises BadArgument if `program` is neither a list of strings nor an async function.
        """
        if isinstance(program, str) or (callable(program) and not _is_async(program)):
            raise BadArgument(
                "Program(): program must be a list of words, as in ['python', 'agent.py'], or an async function, not "
                f"{program!r}"
            )
        self.name = name
        self.program = program if callable(program) else tuple(program)
        self.follow = follow
        self.embeddings = embeddings
        self._gateway = gateway

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        session = Session(tape, llm, follow=self.follow, embeddings=self.embeddings)
        serving = contextlib.AsyncExitStack()
        gateway = self._gateway or await serving.enter_async_context(_shared())
        key = gateway.open(session)
        ask_directly(gateway.url)
        running = asyncio.ensure_future(self._run(str(tape.last), Endpoint(gateway.url, key)))
        running.add_done_callback(lambda _: session.over())
        try:
            async for exchange in session.exchanges():
                yield exchange
            yield Answer(text=without_secrets((await _outcome(running, session)).replace(key, "[key]")))
        finally:
            # The key is revoked and the program is ended before the session closes, so that no request arrives after
            # the labels are recorded. The gateway stops last, because it still answers the cancelled requests.
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
    """Return the program's output, or raise the reason why the episode ends without it."""
    # A program often fails because its request was refused. Then the limit or the engine's failure is the cause, and is
    # raised in place of the program's error. A reached limit ends the episode even if the program returned an answer.
    if session.broken is not None:
        raise session.broken
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
    """Run a command to its end and return its output. Raises ProgramFailed."""
    inline = any("{task}" in word for word in words)
    # The start is shielded from cancellation. If it were cancelled, asyncio would wait forever for pipes that it never
    # connects, and processes that the command had already started would stay behind.
    starting = asyncio.ensure_future(
        asyncio.get_running_loop().subprocess_exec(
            _Ran,
            *(word.replace("{task}", task) for word in words),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=_inherited() | endpoint.variables,
        )
    )
    try:
        transport, ran = await asyncio.shield(starting)
        stdin: Any = transport.get_pipe_transport(0)
        stdin.write(b"" if inline else task.encode())
        stdin.write_eof()
        await ran.exited.wait()
    finally:
        transport, ran = await asyncio.shield(starting)
        await _end(transport.get_pid(), ran, endpoint.api_key)
        transport.close()
    code = transport.get_returncode()
    shown = ran.complained.decode(errors="replace").replace(endpoint.api_key, "[key]").strip()
    if code != 0:
        raise ProgramFailed(f"{words[0]} ended with exit code {code}: {shown[-1500:] or 'it printed no error'}")
    if len(ran.said) > LONGEST:
        raise ProgramFailed(f"{words[0]} printed more than {LONGEST} bytes; an answer is shorter than that")
    return ran.said.decode(errors="replace").strip()


def _inherited() -> dict[str, str]:
    """Return this process's environment without the token that Anthropic's clients would send in place of the key."""
    return {name: value for name, value in os.environ.items() if name != "ANTHROPIC_AUTH_TOKEN"}


class _Ran(asyncio.SubprocessProtocol):
    """Collects a command's output and waits for its end.

    The command ends when its process exits, even if its pipes are still open. A surviving child can hold them open.
    """

    def __init__(self) -> None:
        self.said, self.complained = bytearray(), b""
        self.exited, self.drained = asyncio.Event(), asyncio.Event()
        self._pipes = {1, 2}

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        if fd == 1:
            # One byte more than allowed is kept, so that the caller sees that the output is too long.
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
    """End the command if it still runs, kill the processes that it started, then wait for the rest of its output."""
    if not ran.exited.is_set():
        _signal(pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ran.exited.wait(), GRACE)
    _signal(pid, signal.SIGKILL)
    await asyncio.to_thread(_end_strays, key.encode())
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(ran.exited.wait(), KILL)
    with contextlib.suppress(TimeoutError):  # a surviving process may hold a pipe, so use the output so far
        await asyncio.wait_for(ran.drained.wait(), DRAIN)


def _signal(session: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(session, number)


def _end_strays(key: bytes) -> None:
    """Kill the processes that left the command's session. They are found by the tape's key in their environment. No
    other process has this key."""
    if sys.platform != "linux":
        return
    for _ in range(10):  # repeated, because a process may fork between the scan and the kill
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if key in _environment(pid)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def _environment(pid: int) -> bytes:
    """Return the environment that a process started with, or nothing if the process is another user's or has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
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
    # `users` is increased before the lock is taken. Otherwise another program could end at the same time and stop the
    # gateway, which this program is about to use.
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
