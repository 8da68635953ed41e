"""The client side of one WebSocket to an untrusted server.

A channel receives text messages of bounded length, one at a time, and stops reading from a peer that sends unrequested
messages. It also answers pings between calls. Compression is off, so a message is never longer than the data that was
transferred. Redirects are refused, so no other server receives the token.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

from ...tapes.common.access_token import HOW_FOUND
from ...tapes.common.extras import raise_missing
from .remote_errors import BadAnswer, Busy, Refused, RemoteError, SessionLost, Unreachable

try:
    import aiohttp
except ModuleNotFoundError as _error:
    raise_missing(_error, "an environment on another server")

HEARTBEAT = 20.0
"""Seconds between pings. A peer that doesn't answer a ping is considered gone."""
_CONNECT = 20.0
"""Time limit of a handshake, in seconds."""
_GOODBYE = 2.0
"""Time limit of a closing handshake, in seconds."""


class Full(Busy):
    """The server is at capacity. It may state when to try again."""

    def __init__(self, message: str, after: float | None) -> None:
        super().__init__(message)
        self.after = after
        """Seconds to wait before the next attempt, or None if the server doesn't state a time."""


class Dropped(Unreachable):
    """The connection broke. The call may have been carried out."""


class Channel:
    """One connection. Use `await Channel.open(url, ...)`, then `send` and `receive` in turn, and finally `close`."""

    def __init__(
        self, session: aiohttp.ClientSession, socket: aiohttp.ClientWebSocketResponse, url: str, largest: int
    ) -> None:
        self.url = url
        self._session, self._socket, self._largest = session, socket, largest
        self._received: asyncio.Queue[str | Exception] = asyncio.Queue(maxsize=1)
        self._end: Exception | None = None
        self._sent = 0
        """The number of characters in the last message that was sent."""
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def open(cls, url: str, *, headers: dict[str, str], largest: int, protocols: tuple[str, ...] = ()) -> Channel:
        """Connect to the server. After Unreachable or Full, another attempt can succeed. After Refused or SessionLost,
        it can't."""
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
        """Send a message. If the connection is gone, this raises the same errors as `receive`."""
        if self._end is not None:
            raise self._end
        self._sent = len(text)
        try:
            await self._socket.send_str(text)
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise self._end or Dropped(f"{self.url}: {error}") from error

    async def receive(self) -> str:
        """Return the next message. Raises Dropped, SessionLost (the server shut down), Refused or BadAnswer."""
        message = await self._received.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def close(self, *, goodbye: bool = True) -> None:
        """Close the connection. Without `goodbye`, don't wait for the peer's closing handshake.

        Even if the caller is cancelled, the connection is closed before this method returns.
        """
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
            # The peer may never answer the closing handshake.
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with asyncio.timeout(_GOODBYE if goodbye else 0):
                    await self._socket.close()
        finally:
            await self._session.close()

    async def _read(self) -> None:
        while True:
            message = await self._socket.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                await self._received.put(message.data)
                continue
            self._end = self._ended(message)
            await self._received.put(self._end)
            return

    def _ended(self, message: aiohttp.WSMessage) -> Exception:
        if message.type is aiohttp.WSMsgType.BINARY:
            return BadAnswer(f"{self.url}: a binary message of {len(message.data)} bytes, where text is expected")
        if message.type is aiohttp.WSMsgType.ERROR and isinstance(message.data, aiohttp.WebSocketError):
            if message.data.code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                return BadAnswer(f"{self.url}: a message of more than {self._largest} bytes")
            return BadAnswer(f"{self.url}: invalid WebSocket data: {message.data}")
        code = self._socket.close_code
        if code == aiohttp.WSCloseCode.GOING_AWAY:
            return SessionLost(f"{self.url}: the server shut down, and the episode's environment with it")
        if code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            return BadAnswer(
                f"{self.url}: a message was too long: the last one sent has {self._sent} characters, which may be more "
                f"than the server's message_bytes, and `largest` accepts {self._largest} bytes; increase that limit"
            )
        if code in (aiohttp.WSCloseCode.POLICY_VIOLATION, aiohttp.WSCloseCode.PROTOCOL_ERROR):
            return Refused(f"{self.url}: the server closed the connection: {str(message.extra or code)[:200]}")
        return Dropped(f"{self.url}: the connection broke (code {code})")


def _no_redirects() -> aiohttp.TraceConfig:
    async def refuse(session: aiohttp.ClientSession, context: SimpleNamespace, params: Any) -> None:
        raise Refused(f"{params.url}: the server redirects, which is not followed; use the final address")

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return trace


def _refusal(url: str, error: aiohttp.WSServerHandshakeError) -> Exception:
    status = error.status
    if status in (429, 503):
        after = (error.headers or {}).get("Retry-After", "")
        message = f"{url}: the server has no free place (status {status})"
        return Full(message, float(after) if after.isdecimal() else None)
    if status == 410:
        return SessionLost(
            f"{url}: the server no longer has the episode: it was restarted, or the connection was lost for too long"
        )
    hint = {
        401: f"; is the token right? {HOW_FOUND}",
        403: "; is it the address that the server printed?",
        404: "; no environment is served there",
        426: "; it uses another version of the protocol",
    }.get(status, "")
    if 500 <= status < 600:
        return Unreachable(f"{url}: the server answered with status {status}")
    return Refused(f"{url}: the server opened no WebSocket: status {status}{hint}")
