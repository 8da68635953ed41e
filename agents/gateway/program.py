"""A program outside as an agent: it is started with the address and key of its tape, and what it says is its action.

The program is any that speaks OpenAI's protocol: a command line, which finds `OPENAI_BASE_URL` and `OPENAI_API_KEY` in
its environment, or an async function, which is given both. It is shown the newest observation and answers with text.
Between the two it may ask the model as often as it likes; each question is a call on the tape. It knows nothing of how
requests are served (`server.py`) or linked (`linking.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ...tapes import Answer, Step, Tape
from ...tapes.errors import TapereelError
from ..agent import Agent
from ..guard import outside
from ..llm import LLM
from .server import Gateway
from .session import Session

LONGEST = 1024 * 1024
"""Bytes that a program may say."""
GRACE = 2.0
"""Seconds between asking a program to end and ending it."""


class ProgramFailed(TapereelError, RuntimeError):
    """The program ended with an error or said too much: the agent's fault. Says what it printed last."""


class Endpoint(NamedTuple):
    """Where a program asks the model: `AsyncOpenAI(**endpoint._asdict())`."""

    base_url: str
    api_key: str


Function = Callable[[str, Endpoint], Awaitable[str]]


class Program(Agent):
    """`Program(["python", "agent.py"])`, or `Program(solve)` with `async def solve(task: str, endpoint) -> str`.

    A command reads the task on stdin, or as the argument `{task}` where it has one; what it prints is its answer. It
    runs in a session of its own, all of which is ended with it. With `follow=False` the run's own temperature and top_p
    hold, whatever the program asks for.
    """

    patience = 10.0

    def __init__(self, program: Sequence[str] | Function, *, name: str = "program", follow: bool = True,
                 gateway: Gateway | None = None) -> None:  # fmt: skip
        """`gateway`: one that is being served; without it, the event loop's own is while a program runs."""
        if isinstance(program, str) or (callable(program) and not _is_async(program)):
            raise TypeError(f"Program needs a list of words, as in ['python', 'agent.py'], or an async function, not "
                            f"{program!r}")  # fmt: skip
        self.name = name
        self.program = program if callable(program) else tuple(program)
        self.follow = follow
        self._gateway = gateway

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        session = Session(tape, llm, follow=self.follow)
        with outside():
            serving = contextlib.AsyncExitStack()
            gateway = self._gateway or await serving.enter_async_context(_shared())
            key = gateway.open(session)
            running = asyncio.ensure_future(self._run(str(tape.last), Endpoint(gateway.url, key)))
        running.add_done_callback(lambda _: session.over())
        session.broken.add_done_callback(lambda broken: broken.cancelled() or session.over())
        try:
            async for exchange in session.exchanges():
                yield exchange
            yield Answer(text=await _outcome(running, session))
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
    """What the program said, or why the episode ends without it."""
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
    """Run a command to its end, and give what it printed."""
    inline = any("{task}" in word for word in words)
    process = await asyncio.create_subprocess_exec(
        *(word.replace("{task}", task) for word in words), stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True,
        env={**os.environ, "OPENAI_BASE_URL": endpoint.base_url, "OPENAI_API_KEY": endpoint.api_key},
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        said, complained, _ = await asyncio.gather(
            _read(process.stdout, keep=LONGEST + 1), _read(process.stderr, keep=None),
            _write(process.stdin, b"" if inline else task.encode()),
        )  # fmt: skip
        code = await process.wait()
    finally:
        await _end(process)
    shown = complained.decode(errors="replace").replace(endpoint.api_key, "[key]").strip()
    if code != 0:
        raise ProgramFailed(f"{words[0]} ended with exit code {code}: {shown[-1500:] or 'it printed no error'}")
    if len(said) > LONGEST:
        raise ProgramFailed(f"{words[0]} printed more than {LONGEST} bytes; an answer is shorter than that")
    return said.decode(errors="replace").replace(endpoint.api_key, "[key]").strip()


async def _write(stdin: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it need not read its task
        stdin.write(data)
        await stdin.drain()
        stdin.close()
        await stdin.wait_closed()


async def _read(stream: asyncio.StreamReader, *, keep: int | None) -> bytes:
    """The first `keep` bytes, or (None) the last 4,000; the rest is read and dropped, so that the program goes on."""
    held = b""
    while chunk := await stream.read(65536):
        held = (held + chunk)[-4000:] if keep is None else held + chunk[: keep - len(held)]
    return held


async def _end(process: asyncio.subprocess.Process) -> None:
    """The program, and whatever it started."""
    for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)
            if number is signal.SIGTERM:
                continue  # what it started may not have heard
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class _Shared:
    """The gateway of one event loop, served while anybody uses it."""

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
