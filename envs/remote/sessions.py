"""Sessions: the episodes of a service, who may go on with them, and for how long.

A session has one environment. Its calls are numbered from 1: the next number is carried out; the last number again,
with the same words, gives the same answer (also while it is being carried out) and acts no second time; any other is
refused. A session whose connection is gone waits for another one, and is closed when none comes. Knows no sockets.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from typing import Any

from pydantic import Field

from ...tapes.value import Value
from ..environment import Environment
from .declared import Declared
from .env_protocol import Call, CloseCall
from .host import Host
from .remote_errors import BadAnswer


class ServiceLimits(Value):
    """What a service gives to its clients."""

    sessions: int = Field(default=1000, ge=1)
    """Episodes at once, those between two connections included; one more is told to come again later."""
    message_bytes: int = Field(default=1 << 20, ge=1024)
    """The longest message that is taken."""
    call_seconds: float = Field(default=60.0, gt=0)
    """The most that the environment may take for a call; then its session ends."""
    idle_seconds: float = Field(default=900.0, gt=0)
    """The most between two calls of a session; a model thinks in between."""
    window_seconds: float = Field(default=30.0, gt=0)
    """How long a session waits for its client after a connection broke."""
    heartbeat_seconds: float = Field(default=20.0, gt=0)
    """Between two pings; a client that doesn't answer one is gone."""
    retry_after: int = Field(default=1, ge=0)
    """Seconds after which a client that found no place may ask again."""
    grace_seconds: float = Field(default=5.0, ge=0)
    """How long calls may go on when the service ends."""


class Session:
    """One episode."""

    def __init__(self, host: Host) -> None:
        self.id = secrets.token_hex(16)
        """Whoever knows it may go on with the episode."""
        self.connection: object | None = None
        """Who speaks for it now; None between two connections."""
        self.expires: asyncio.TimerHandle | None = None
        self._host = host
        self._last = 0
        self._said = b""
        self._work: asyncio.Task[str] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call is being carried out."""
        return self._work is not None and not self._work.done()

    @property
    def dead(self) -> bool:
        """Whether its environment hung, or was closed."""
        return self._host.dead

    async def answer(self, call: Call, text: str) -> str:
        """The answer, encoded. BadAnswer where the call may not come now."""
        said = hashlib.sha256(text.encode()).digest()
        if call.id == self._last and self._work is not None:
            if said != self._said:
                raise BadAnswer(f"call {call.id} was another one before")
            return await asyncio.shield(self._work)
        if call.id != self._last + 1:
            raise BadAnswer(f"call {call.id} can't follow call {self._last}")
        if self.busy:
            if not isinstance(call, CloseCall):
                raise BadAnswer(f"call {call.id} came before the answer to call {self._last}")
            await self.stop()
        self._last, self._said = call.id, said
        self._work = asyncio.create_task(self._do(call))
        return await asyncio.shield(self._work)

    async def _do(self, call: Call) -> str:
        return (await self._host.answer(call)).encoded()

    async def again(self, host: Host) -> None:
        """Another episode, in a fresh environment, with numbers from 1."""
        try:
            await self.close()
        finally:
            self._host, self._last, self._said, self._work = host, 0, b"", None

    async def stop(self) -> None:
        """Give the running call up."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait({self._work}, timeout=5.0)

    async def settled(self) -> None:
        """Wait for the running call."""
        if self._work is not None:
            await asyncio.wait({self._work})

    async def close(self) -> None:
        """Give the running call up, and release the environment."""
        await self.stop()
        await self._host.close()


class Sessions:
    """All episodes of a service."""

    def __init__(
        self,
        make: Callable[[], Environment[Any]],
        declared: Declared,
        limits: ServiceLimits,
        failed: Callable[[Exception], None],
    ) -> None:
        """`failed` hears of environments that could not be closed when nobody was there to be told."""
        self._make, self._declared, self._limits, self._failed = make, declared, limits, failed
        self._open: dict[str, Session] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open) + len(self._closing)

    def every(self) -> list[Session]:
        """Those that are open."""
        return list(self._open.values())

    @property
    def full(self) -> bool:
        """Whether there is no place for one more."""
        return len(self) >= self._limits.sessions

    def begin(self) -> Session:
        """A new one."""
        session = Session(self.host())
        self._open[session.id] = session
        return session

    def host(self) -> Host:
        """A fresh environment, not made yet."""
        return Host(self._make, self._declared, self._limits.call_seconds)

    def known(self, name: str) -> Session | None:
        """The one of that name, if it is still there."""
        return self._open.get(name)

    def attach(self, session: Session, connection: object) -> None:
        """The connection speaks for it now, and any other one no more."""
        session.connection = connection
        if session.expires is not None:
            session.expires.cancel()
            session.expires = None

    def detach(self, session: Session, connection: object) -> None:
        """The connection is gone."""
        if session.connection is not connection or session.id not in self._open:
            return
        session.connection = None
        session.expires = asyncio.get_running_loop().call_later(self._limits.window_seconds, self.end, session)

    def end(self, session: Session) -> None:
        """The episode is over; its environment is released in the background, and its place free once it is."""
        if self._open.pop(session.id, None) is None:
            return
        if session.expires is not None:
            session.expires.cancel()
        task = asyncio.create_task(self._released(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _released(self, session: Session) -> None:
        try:
            async with asyncio.timeout(self._limits.call_seconds):
                await session.close()
        except Exception as error:
            self._failed(error)

    async def close(self) -> None:
        """Let running calls come to their end within the grace, then end every episode."""
        running = [asyncio.create_task(s.settled()) for s in self._open.values() if s.busy]
        if running:
            await asyncio.wait(running, timeout=self._limits.grace_seconds)
        for session in list(self._open.values()):
            self.end(session)
        if self._closing:
            await asyncio.wait(set(self._closing))
        for task in running:
            task.cancel()
