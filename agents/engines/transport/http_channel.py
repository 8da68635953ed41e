"""Talks to one server in JSON over HTTP, with finite timeouts and a limit on the size of answers.

`Server` never retries a request, but callers can see from `ServerFailed.retry` whether a retry can help. `RemoteEngine`
repeats requests that a busy server refused, and the agent's model interface (`LLM`) retries after other engine errors.

The API key is read from the environment for each request. No error message contains the key.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

from ....tapes.common.access_token import HOW_FOUND, token_for
from ....tapes.common.extras import raise_missing
from ....tapes.common.redact import refuse_secret, without_secrets
from ....tapes.errors import remedy
from ..engine import EngineError, EngineStopped
from .wire import retry_after

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise_missing(error, "engines over HTTP")

AGAIN = (408, 429, 500, 502, 503, 504)
"""HTTP statuses for which a retry of the same request may succeed."""
NO_ROUTE = (403, 404, 405)
"""HTTP statuses that servers return for a route that is missing or turned off."""
HINTS = {
    401: f"; is the API key right? {HOW_FOUND}",
    403: "; this route is off (vLLM: --enable-scale-out) or forbidden",
    404: "; the server lacks this route or model",
}
"""The likely cause of an HTTP status, which is added to the error message."""
CONNECTIONS = 512
"""Maximum number of open connections to a server."""
LARGEST = 256 << 20
"""Maximum size of an answer, in bytes. A completion with log-probs takes about 100 bytes per token."""


class ServerFailed(EngineError):
    """The server is unreachable, closed the connection, exceeded the timeout or returned an error status."""

    def __init__(self, message: str, *, retry: bool, status: int | None = None, after: float | None = None) -> None:
        super().__init__(message, retry=retry)
        self.status = status
        """The HTTP status, or None if the server sent none, for example because the connection failed or timed out."""
        self.after = after
        """Seconds to wait before a retry, as given by the `Retry-After` header, or None without this header."""
        self.slow = False
        """Whether the request timed out. The server may then be away, or may still be computing the answer."""

    @property
    def busy(self) -> bool:
        """Whether the server is healthy but accepts no requests now, because it is paused or full (429, 503)."""
        return self.status in (429, 503)

    @property
    def away(self) -> bool | None:
        """Whether the server is unreachable or accepts no requests at the moment. None if this is unknown, because the
        request itself may also be the cause (a timeout, 408, 500)."""
        if self.slow or self.status in (408, 500):
            return None
        return self.retry


class Server:
    """One server's base address and the connections to it. Any number of requests may run concurrently in one event
    loop."""

    def __init__(self, url: str, *, key_variable: str | None = None, seconds: float = 600.0):
        """`key_variable` names the environment variable that holds the API key. `seconds` is the default timeout for a
        request. Raises ValueError if `url` has no http scheme or contains a secret."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"server address {url!r}: must begin with http:// or https://")
        refuse_secret(url, "server address")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.in_flight = 0
        self._key_variable = key_variable
        self._seconds = seconds
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        """The session under True opens a new connection for each request (`fresh`). The session under False pools
        connections."""

    def __repr__(self) -> str:
        return self.url

    async def get(self, route: str, *, seconds: float | None = None) -> object:
        """Return the JSON answer to a GET. Raises ServerFailed."""
        return await self._ask("GET", route, None, None, seconds)

    async def post(
        self,
        route: str,
        body: object = None,
        *,
        params: dict[str, str] | None = None,
        seconds: float | None = None,
        fresh: bool = False,
        plain: bool = False,
    ) -> object:
        """Return the JSON answer to a POST, or the answer's text if `plain` is true. Raises ServerFailed.

        `fresh` opens a new connection. Control requests need it, because a server closes pooled connections after some
        errors, and completions may occupy the whole pool."""
        return await self._ask("POST", route, body, params, seconds, fresh, plain)

    async def stream(self, route: str, body: object) -> AsyncGenerator[bytes]:
        """Yield the answer to a POST in pieces of any size, as they arrive. The timeout applies to each piece, not to
        the whole answer. Raises ServerFailed."""
        async with self._answer("POST", route, body, None, self._seconds, False) as (answer, bound):
            async for part in _parts(answer.content, f"POST {self.url}{route}"):
                # Each piece restarts the timeout, because a long completion may take longer than `seconds` in total.
                bound.reschedule(asyncio.get_running_loop().time() + self._seconds)
                yield part

    async def healthy(self, seconds: float) -> bool:
        """Return whether the server answers a request to `/health` within `seconds`, with any status below 500."""
        try:
            await self.get("/health", seconds=seconds)
        except ServerFailed as error:
            return error.status is not None and error.status < 500
        return True

    def ended(self) -> str | None:
        """Return why the server will never answer again, or None if it may answer."""
        return None

    async def close(self) -> None:
        """Close all connections. Requests in flight fail."""
        while self._sessions:
            await self._sessions.popitem()[1].close()

    async def _ask(
        self,
        method: str,
        route: str,
        body: object,
        params: dict[str, str] | None,
        seconds: float | None,
        fresh: bool = False,
        plain: bool = False,
    ) -> object:
        seconds = self._seconds if seconds is None else seconds
        where = f"{method} {self.url}{route}"
        async with self._answer(method, route, body, params, seconds, fresh) as (answer, _):
            content = await _read(answer.content, where)
        if plain:
            return content.decode(errors="replace")
        if not content.strip():
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            beginning = _short(content, self._key(where))
            raise ServerFailed(f"{where}: the answer isn't JSON ({error}): {beginning}", retry=True) from error

    def _key(self, where: str) -> str | None:
        if self._key_variable is None:
            return token_for(self.url)
        key = os.environ.get(self._key_variable)
        if not key:
            raise EngineStopped(f"{where}: the environment variable {self._key_variable} (API key) is not set", "key")
        return key

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        route: str,
        body: object,
        params: dict[str, str] | None,
        seconds: float,
        fresh: bool,
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, asyncio.Timeout]]:
        """Yield a successful answer and the timeout. The caller then reads the body of the answer, and the timeout
        still applies. Raises ServerFailed for a status of 300 or above."""
        where = f"{method} {self.url}{route}"
        key = self._key(where)
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        if method == "POST":
            headers["Content-Type"] = "application/json"  # also without a body, because Tapereel's servers require it
        self.in_flight += 1
        try:
            async with (
                asyncio.timeout(seconds) as bound,
                self._open(fresh).request(
                    method, self.url + route, json=body, params=params, headers=headers, allow_redirects=False
                ) as answer,
            ):
                status = answer.status
                if status >= 300:
                    content = _short(await _read(answer.content, where), key)
                    if (target := answer.headers.get("Location")) is not None:
                        target = _short(target.encode(), key)
                        content = f"it redirects to {target!r}, and no redirect is followed: name that address instead"
                    # The server may have been restarted with a new key after this request read the old one.
                    retry = status in AGAIN or (status == 401 and self._key(where) != key)
                    after = retry_after(answer.headers.get("Retry-After"))
                    message = f"{where}: {status}{HINTS.get(status, '')}: {content}"
                    raise ServerFailed(message, retry=retry, status=status, after=after)
                yield answer, bound
        except TimeoutError as error:
            slow = ServerFailed(
                f"{where}: no answer within {seconds:g} s; is it overloaded, paused or stuck? The bound "
                "is the engine's timeout",
                retry=False,
            )
            slow.slow = True
            raise slow from error
        except aiohttp.ClientConnectorError as error:
            raise ServerFailed(
                f"{where}: no server answers ({error}); start one at that address "
                f"({remedy('serve model', '`LocalServer`', flags='')})",
                retry=True,
            ) from error
        except (aiohttp.ClientError, UnicodeError) as error:  # UnicodeError: the host isn't the name of a machine
            raise ServerFailed(f"{where}: {type(error).__name__}: {error}", retry=True) from error
        finally:
            # This must run after a cancellation too. Servers with the lowest `in_flight` are chosen, so if the count
            # stayed too high, this server would get fewer requests.
            self.in_flight -= 1

    def _open(self, fresh: bool) -> aiohttp.ClientSession:
        if fresh not in self._sessions:
            # `_answer` has its own timeout, and aiohttp's default (300 s in total) would end long completions.
            # `trust_env=False` ignores HTTP_PROXY and similar variables.
            self._sessions[fresh] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS, force_close=fresh),
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._sessions[fresh]


def free_port(address: str) -> int:
    """Return a port that is free at `address` now. Another process may take the port before the caller uses it. Raises
    OSError if this machine doesn't have the address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return probe.getsockname()[1]


async def _parts(stream: aiohttp.StreamReader, where: str) -> AsyncGenerator[bytes]:
    """Yield the body in pieces. Raises ServerFailed after `LARGEST` bytes, so that a server can't fill up the
    memory."""
    size = 0
    async for part in stream.iter_chunked(1 << 16):
        size += len(part)
        if size > LARGEST:
            raise ServerFailed(f"{where}: the answer is longer than {LARGEST >> 20} MiB", retry=False)
        yield part


async def _read(stream: aiohttp.StreamReader, where: str) -> bytes:
    return b"".join([part async for part in _parts(stream, where)])


def _short(content: bytes, key: str | None) -> str:
    """Return the beginning of an answer, without the key, because some servers repeat a key that they reject."""
    text = without_secrets(content[:2000].decode(errors="replace"), [key] if key else ())
    return text if len(text) <= 400 else f"{text[:400]} ..."
