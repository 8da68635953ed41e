"""One server over HTTP with JSON: finite timeouts, bounded answers, and errors typed by whether trying again can help.

Knows nothing of tokens. A key is read from the environment when it is needed and is part of no message.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from ....tapes.common.extras import raise_missing
from ....tapes.common.redact import holds_secret, without_secrets
from ..engine import EngineError
from .retry_after import retry_after

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise_missing(error, "engines over HTTP")

AGAIN = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed."""
LARGEST = 256 << 20
"""Bytes of one answer. A completion with its log-probs takes about 100 bytes a token."""


class ServerFailed(EngineError):
    """The server couldn't be reached, broke off, took too long or said no."""

    def __init__(self, message: str, *, retry: bool, status: int | None = None, after: float | None = None) -> None:
        super().__init__(message, retry=retry)
        self.status = status
        """The HTTP status; None when no answer came."""
        self.after = after
        """Seconds after which the server wants to be asked again, where it said so."""

    @property
    def busy(self) -> bool:
        """True when the server is well and takes no requests now: it is paused or full."""
        return self.status in (429, 503)


class Channel(Protocol):
    """A way to ask one server: `Server` over HTTP, or a vLLM inside this process. Errors are `ServerFailed`."""

    in_flight: int
    """Requests under way."""

    async def get(self, route: str, *, seconds: float | None = None) -> Any:
        """The JSON answer to a GET."""
        ...

    async def post(
        self,
        route: str,
        body: Any = None,
        *,
        params: dict[str, str] | None = None,
        seconds: float | None = None,
        fresh: bool = False,
        plain: bool = False,
    ) -> Any:
        """The JSON answer to a POST; with `plain`, its text. `fresh` takes no pooled connection."""
        ...

    def stream(self, route: str, body: Any) -> AsyncGenerator[bytes]:
        """The answer to a POST as it comes, in pieces of any size."""
        ...

    async def close(self) -> None:
        """Let go of what is held."""
        ...


class Server:
    """A base address and its connections. Safe for any number of requests at once, of one event loop."""

    def __init__(self, url: str, *, key_variable: str | None = None, seconds: float = 600.0, connections: int = 512):
        """`key_variable` names the environment variable with the API key. Every request is bounded by `seconds`."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"server address {url!r}: must begin with http:// or https://")
        if holds_secret(url):
            raise ValueError(
                f"server address {without_secrets(url)!r} holds a user, a password or a key, which would "
                "be recorded with it; give the key by its variable: key_variable="
            )
        self.url = url.rstrip("/").removesuffix("/v1")
        self.in_flight = 0
        self._key_variable = key_variable
        self._seconds = seconds
        self._connections = connections
        self._sessions: dict[bool, aiohttp.ClientSession] = {}
        """By whether each request has a connection of its own."""

    def __repr__(self) -> str:
        return self.url

    async def get(self, route: str, *, seconds: float | None = None) -> Any:
        """The JSON answer to a GET. ServerFailed."""
        return await self._ask("GET", route, None, None, seconds)

    async def post(
        self,
        route: str,
        body: Any = None,
        *,
        params: dict[str, str] | None = None,
        seconds: float | None = None,
        fresh: bool = False,
        plain: bool = False,
    ) -> Any:
        """The JSON answer to a POST; with `plain`, its text. `fresh` takes no pooled connection: servers drop those
        after some errors, and all of them may be in use. ServerFailed."""
        return await self._ask("POST", route, body, params, seconds, fresh, plain)

    async def stream(self, route: str, body: Any) -> AsyncGenerator[bytes]:
        """The answer to a POST as it comes, in pieces of any size. Every piece is waited for as long as a whole answer
        would be. ServerFailed."""
        where, size = f"POST {self.url}{route}", 0
        async with self._answer("POST", route, body, None, self._seconds, False) as (answer, bound):
            async for part in answer.content.iter_chunked(1 << 16):
                bound.reschedule(asyncio.get_running_loop().time() + self._seconds)
                size += len(part)
                if size > LARGEST:
                    raise ServerFailed(f"{where}: the answer is longer than {LARGEST >> 20} MiB", retry=False)
                yield part

    async def close(self) -> None:
        """Let the connections go."""
        while self._sessions:
            await self._sessions.popitem()[1].close()

    async def _ask(
        self,
        method: str,
        route: str,
        body: Any,
        params: dict[str, str] | None,
        seconds: float | None,
        fresh: bool = False,
        plain: bool = False,
    ) -> Any:
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
            told = _short(content, self._key(where))
            raise ServerFailed(f"{where}: the answer is no JSON ({error}): {told}", retry=True) from error

    def _key(self, where: str) -> str | None:
        if self._key_variable is None:
            return None
        key = os.environ.get(self._key_variable)
        if not key:
            raise ServerFailed(
                f"{where}: the environment variable {self._key_variable} (API key) is not set", retry=False
            )
        return key

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        route: str,
        body: Any,
        params: dict[str, str] | None,
        seconds: float,
        fresh: bool,
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, asyncio.Timeout]]:
        """An answer of success, its body unread, and the bound on what is done with it."""
        where = f"{method} {self.url}{route}"
        key = self._key(where)
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        self.in_flight += 1
        try:
            async with (
                asyncio.timeout(seconds) as bound,
                self._open(fresh).request(
                    method, self.url + route, json=body, params=params, headers=headers, allow_redirects=False
                ) as answer,
            ):
                if answer.status >= 300:
                    content = await _read(answer.content, where)
                    raise _refused(where, answer.status, content, answer.headers.get("Retry-After"), key)
                yield answer, bound
        except TimeoutError as error:
            raise ServerFailed(
                f"{where}: no answer within {seconds:g} s; is it overloaded, paused or stuck? The bound "
                "is the engine's timeout",
                retry=False,
            ) from error
        except aiohttp.ClientConnectorError as error:
            raise ServerFailed(
                f"{where}: no server answers ({error}); start one at that address (`tapereel serve model`)",
                retry=True,
            ) from error
        except aiohttp.ClientError as error:
            raise ServerFailed(f"{where}: {type(error).__name__}: {error}", retry=True) from error
        finally:
            self.in_flight -= 1

    def _open(self, fresh: bool) -> aiohttp.ClientSession:
        if fresh not in self._sessions:
            self._sessions[fresh] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._connections, force_close=fresh),
                trust_env=False,
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._sessions[fresh]


async def _read(stream: aiohttp.StreamReader, where: str) -> bytes:
    parts, size = [], 0
    async for part in stream.iter_chunked(1 << 16):
        size += len(part)
        if size > LARGEST:
            raise ServerFailed(f"{where}: the answer is longer than {LARGEST >> 20} MiB", retry=False)
        parts.append(part)
    return b"".join(parts)


def _refused(where: str, status: int, content: bytes, after: str | None, key: str | None) -> ServerFailed:
    hint = {
        401: "; is the API key right?",
        403: "; this route is off (vLLM: --enable-scale-out) or forbidden",
        404: "; the server has no such route or model",
    }.get(status, "")
    return ServerFailed(
        f"{where}: {status}{hint}: {_short(content, key)}",
        retry=status in AGAIN,
        status=status,
        after=retry_after(after),
    )


def _short(content: bytes, key: str | None) -> str:
    """The beginning of an answer; some servers send back the key that they refuse."""
    text = without_secrets(content[:2000].decode(errors="replace"), [key] if key else ())
    return text if len(text) <= 400 else f"{text[:400]} ..."
