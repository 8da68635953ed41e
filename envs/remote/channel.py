"""Channel: one WebSocket, seen from the client, on which nothing is trusted.

Text messages of bounded length come in one at a time; a peer that sends more than was asked for is not read any
further. Pings are answered while nobody waits for a message. Compression is off and redirects are refused, so a
message is never longer than it was on the wire and a token goes nowhere else. Knows nothing of what messages say.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, TypeVar

from ...tapes.common.extras import raise_missing
from .remote_errors import BadAnswer, Busy, Refused, RemoteError, SessionLost, Unreachable

try:
    import aiohttp
except ModuleNotFoundError as _error:
    raise_missing(_error, "an environment on another server")

HEARTBEAT = 20.0
"""Seconds between pings; a peer that doesn't answer one is gone."""
_CONNECT = 20.0
"""Seconds that a handshake may take."""
_FIRST, _LONGEST = 0.05, 5.0
"""Seconds between tries: the first, and the most."""
_GOODBYE = 2.0
ResultT = TypeVar("ResultT")


class Full(Busy):
    """The server is at capacity now, and may say when to come again."""

    def __init__(self, message: str, after: float | None) -> None:
        super().__init__(message)
        self.after = after
        """Seconds after which the server wants to be asked again; None where it doesn't say."""


class Dropped(Unreachable):
    """The connection broke; what was asked may have been done."""


class Channel:
    """`await Channel.open(url, ...)`, then `send` and `receive` in turn, and `close`."""

    def __init__(
        self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, url: str, largest: int
    ) -> None:
        self.url = url
        self._session, self._socket, self._largest = session, socket, largest
        self._came: asyncio.Queue[str | Exception] = asyncio.Queue(maxsize=1)
        self._end: Exception | None = None
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, url: str, *, headers: dict[str, str], largest: int, protocols: tuple[str, ...] = ()) -> Channel:
        """Connect. Unreachable and Full may pass; Refused and SessionLost won't."""
        session = aiohttp.ClientSession(trace_configs=[_no_redirects()], trust_env=False)
        try:
            async with asyncio.timeout(_CONNECT):
                socket = await session.ws_connect(
                    url,
                    headers=headers,
                    protocols=protocols,
                    heartbeat=HEARTBEAT,
                    compress=0,
                    max_msg_size=largest,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_GOODBYE),  # pyright: ignore[reportCallIssue]
                )
        except BaseException as error:
            await session.close()
            if isinstance(error, aiohttp.WSServerHandshakeError):
                raise _refusal(url, error) from error
            if isinstance(error, RemoteError):
                raise
            if isinstance(error, aiohttp.ClientError | OSError):
                raise Unreachable(f"{url}: {type(error).__name__}: {error}") from error
            raise
        return cls(session, socket, url, largest)

    async def send(self, text: str) -> None:
        """As `receive` raises where the connection is no more."""
        if self._end is not None:
            raise self._end
        try:
            await self._socket.send_str(text)
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise self._end or Dropped(f"{self.url}: {error}") from error

    async def receive(self) -> str:
        """The next message. Dropped, SessionLost (the server is going away) or BadAnswer."""
        came = await self._came.get()
        if isinstance(came, Exception):
            raise came
        return came

    async def close(self, *, goodbye: bool = True) -> None:
        """Let the connection go, without waiting where nobody would answer. What is gone is closed. Who is cancelled
        meanwhile leaves when it is closed too, or a connection would be left open."""
        closing = asyncio.create_task(self._close(goodbye))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait({closing})
            raise

    async def _close(self, goodbye: bool) -> None:
        self._reader.cancel()
        try:
            await asyncio.wait({self._reader})
            # The peer may go on for ever instead of answering.
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(_GOODBYE if goodbye else 0):
                    await self._socket.close()
        finally:
            await self._session.close()

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                await self._came.put(message.data)
                continue
            self._end = self._ended(message)
            await self._came.put(self._end)
            return

    def _ended(self, message: aiohttp.WSMessage) -> Exception:
        if message.type is aiohttp.WSMsgType.BINARY:
            return BadAnswer(f"{self.url}: {len(message.data)} bytes that are no text")
        if message.type is aiohttp.WSMsgType.ERROR and isinstance(message.data, aiohttp.WebSocketError):
            if message.data.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                return BadAnswer(f"{self.url}: a message of more than {self._largest} bytes")
            return BadAnswer(f"{self.url}: no WebSocket any more: {message.data}")
        code = self._socket.close_code
        if code == aiohttp.WSCloseCode.GOING_AWAY:
            return SessionLost(f"{self.url}: the server went away, and the episode's environment with it")
        if code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            return BadAnswer(
                f"{self.url}: a message was longer than the other side takes, or than {self._largest} bytes"
            )
        if code in (aiohttp.WSCloseCode.POLICY_VIOLATION, aiohttp.WSCloseCode.PROTOCOL_ERROR):
            return Refused(f"{self.url}: the server closed the connection: {str(message.extra or code)[:200]}")
        return Dropped(f"{self.url}: the connection broke (code {code})")


async def patiently(attempt: Callable[[], Awaitable[ResultT]], until: float, patience: float) -> ResultT:
    """What `attempt` gives, tried again where there is nobody or no place, up to the moment `until` of the event loop.

    Unreachable or Busy after that; `patience` is the number of seconds to tell then.
    """
    pause = _FIRST
    while True:
        try:
            return await attempt()
        except (Full, Unreachable) as error:
            after = error.after if isinstance(error, Full) else None
            # Never before the server wants it, and not all at once.
            wait = max(pause, after or 0.0) * (1 + random.random())
            if asyncio.get_running_loop().time() + wait > until:
                kind = Busy if isinstance(error, Full) else Unreachable
                raise kind(f"{error}; given up after {patience:g} s") from error
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST)


def address(url: str) -> str:
    """The address of a server, without its end. ValueError where it is none, or holds a secret."""
    if not url.startswith(("http://", "https://", "ws://", "wss://")):
        raise ValueError(f"server address {url[:60]!r}: must begin with http://, https://, ws:// or wss://")
    if "@" in url or "?" in url:
        raise ValueError(
            "a server address is written on tapes: it can't hold a password or a query; give the token by key_variable="
        )
    return url.rstrip("/")


def token_header(variable: str | None, url: str) -> dict[str, str]:
    """The header with the token from the environment variable; empty where none is needed. Refused without a value."""
    if variable is None:
        return {}
    token = os.environ.get(variable)
    if not token:
        raise Refused(f"{url}: the environment variable {variable} (the server's token) is not set")
    return {"Authorization": f"Bearer {token}"}


def _no_redirects() -> aiohttp.TraceConfig:
    async def refuse(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
        raise Refused(f"{params.url}: the server wants to redirect, which is not followed; give the address itself")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return trace


def _refusal(url: str, error: aiohttp.WSServerHandshakeError) -> Exception:
    status = error.status
    if status in (429, 503):
        told = (error.headers or {}).get("Retry-After", "")
        return Full(f"{url}: the server has no place (status {status})", float(told) if told.isdecimal() else None)
    if status == 410:
        return SessionLost(
            f"{url}: the server no longer has the episode: it was restarted, or the connection was gone for too long"
        )
    hint = {
        401: "; is the token right?",
        403: "; is the token right?",
        404: "; no environment is served there",
        426: "; it speaks another version of the protocol",
    }.get(status, "")
    if 500 <= status < 600:
        return Unreachable(f"{url}: the server answered with status {status}")
    return Refused(f"{url}: no WebSocket there: status {status}{hint}")
