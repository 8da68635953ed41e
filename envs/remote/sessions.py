"""Sessions: the episodes of a service, which can be resumed after a lost connection.

A session has one environment. Its calls are numbered from 1. The next number is carried out. The last number again,
with the same content, gets the same answer and is not carried out twice, also while it still runs. Other numbers are
refused. A session without a connection waits for a new one, and is closed after `window_seconds`.
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
    """Limits of a service for its clients."""

    sessions: int = Field(default=1000, ge=1)
    """Concurrent episodes, including those without a connection; further clients get status 503 and may try later."""
    message_bytes: int = Field(default=1 << 20, ge=1024)
    """Size limit of a message, in bytes."""
    call_seconds: float = Field(default=60.0, gt=0)
    """Time limit of a call; after it the session ends."""
    idle_seconds: float = Field(default=900.0, gt=0)
    """Longest time between two calls of a session; the model samples in between."""
    window_seconds: float = Field(default=30.0, gt=0)
    """How long a session waits for its client after a connection broke."""
    heartbeat_seconds: float = Field(default=20.0, gt=0)
    """Time between two pings; a client that doesn't answer a ping is considered gone."""
    retry_after: int = Field(default=1, ge=0)
    """Seconds after which a client that found no free place may try again."""
    grace_seconds: float = Field(default=5.0, ge=0)
    """How long running calls may continue when the service ends."""


class Session:
    """One episode."""

    def __init__(self, host: Host) -> None:
        self.id = secrets.token_hex(16)
        """A secret: a client that sends it may continue the episode."""
        self.connection: object | None = None
        """The current connection; None between two connections."""
        self.expires: asyncio.TimerHandle | None = None
        self._host = host
        self._last = 0
        self._digest = b""
        self._work: asyncio.Task[str] | None = None

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return self._work is not None and not self._work.done()

    @property
    def dead(self) -> bool:
        """Whether its environment hung, or was closed."""
        return self._host.dead

    async def answer(self, call: Call, text: str) -> str:
        """Carry out the call, or return the answer that its number already has. BadAnswer for a wrong number.

        The call runs in its own task, shielded from the connection's: a broken connection doesn't stop it, and the
        client that repeats it gets its answer. Without this a retry would act twice.
        """
        digest = hashlib.sha256(text.encode()).digest()
        if call.id == self._last and self._work is not None:
            if digest != self._digest:
                raise BadAnswer(f"call {call.id} differs from the call that was sent with this number before")
            return await asyncio.shield(self._work)
        if call.id != self._last + 1:
            raise BadAnswer(f"call {call.id} can't follow call {self._last}")
        if self.busy:
            if not isinstance(call, CloseCall):
                raise BadAnswer(f"call {call.id} came before the answer to call {self._last}")
            await self.stop()
        self._last, self._digest = call.id, digest
        self._work = asyncio.create_task(self._do(call))
        return await asyncio.shield(self._work)

    async def _do(self, call: Call) -> str:
        return (await self._host.answer(call)).encoded()

    async def again(self, host: Host) -> None:
        """Begin another episode in a fresh environment; its calls are numbered from 1."""
        try:
            await self.close()
        finally:
            self._host, self._last, self._digest, self._work = host, 0, b"", None

    async def stop(self) -> None:
        """Cancel the running call."""
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait({self._work}, timeout=5.0)

    async def settled(self) -> None:
        """Wait for the running call."""
        if self._work is not None:
            await asyncio.wait({self._work})

    async def close(self) -> None:
        """Cancel the running call and release the environment."""
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
        """`failed` is called for an environment that could not be closed after its client had left."""
        self._make, self._declared, self._limits, self._failed = make, declared, limits, failed
        self._open: dict[str, Session] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open) + len(self._closing)

    def every(self) -> list[Session]:
        """The open sessions."""
        return list(self._open.values())

    @property
    def full(self) -> bool:
        """Whether all places are taken. Closing sessions count: their environments still hold resources."""
        return len(self) >= self._limits.sessions

    def begin(self) -> Session:
        """Open a session."""
        session = Session(self.host())
        self._open[session.id] = session
        return session

    def host(self) -> Host:
        """A host for a fresh environment, which it makes at the first call."""
        return Host(self._make, self._declared, self._limits.call_seconds)

    def known(self, name: str) -> Session | None:
        """The open session with this id, or None."""
        return self._open.get(name)

    def attach(self, session: Session, connection: object) -> None:
        """Make `connection` the session's current one; it replaces any other."""
        session.connection = connection
        if session.expires is not None:
            session.expires.cancel()
            session.expires = None

    def detach(self, session: Session, connection: object) -> None:
        """The connection is lost: start the time window for a new one. Does nothing for a replaced connection."""
        if session.connection is not connection or session.id not in self._open:
            return
        session.connection = None
        session.expires = asyncio.get_running_loop().call_later(self._limits.window_seconds, self.end, session)

    def end(self, session: Session) -> None:
        """End the episode; the environment is released in the background, and its place is free after that."""
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
        """Wait up to `grace_seconds` for running calls, then end every episode."""
        running = [asyncio.create_task(s.settled()) for s in self._open.values() if s.busy]
        if running:
            await asyncio.wait(running, timeout=self._limits.grace_seconds)
        for session in list(self._open.values()):
            self.end(session)
        if self._closing:
            await asyncio.wait(set(self._closing))
        for task in running:
            task.cancel()
