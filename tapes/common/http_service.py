"""The life cycle of every HTTP server of Tapereel, and the checks that a request passes before its route.

The viewer, the embedded engine's server, the environment service and the gateway are subclasses. They import `web` from
here: without aiohttp, this module names the extra that installs it.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Self

from .extras import raise_missing
from .redact import bearer, guard_log

try:
    from aiohttp import WSCloseCode as WSCloseCode
    from aiohttp import WSMsgType as WSMsgType
    from aiohttp import web
except ModuleNotFoundError as _error:
    raise_missing(_error, "an HTTP server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Wildcard listen address -> the loopback address that reaches it from the same machine."""
SHORTEST_TOKEN = 16
"""Minimum number of characters of a token; a shorter token can be guessed."""


class HttpService:
    """One server on one address: `async with service.serving(port): service.url`.

    A subclass defines `routes`, and may extend `admit`, `answer` and `stop`.
    """

    body_bytes = 1 << 20
    """Maximum size of a request body."""
    header_seconds = 3630.0
    """Time limit for a request's headers, counted from the connection or the previous answer.

    The default is longer than the time for which clients keep idle connections."""

    def __init__(self, host: str, token: str | None) -> None:
        """token: every request must have it; None: the server needs none, or checks other credentials."""
        self.host, self.port, self.token = host, 0, token

    @property
    def url(self) -> str:
        """The base URL for clients on this machine."""
        host = EVERYWHERE.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Self]:
        """Serve inside the block; port 0 takes a free port."""
        guard_log("aiohttp.server")  # aiohttp logs headers that it can't parse, and they may hold a token
        app = web.Application(middlewares=[self._guard], client_max_size=self.body_bytes)
        app.add_routes(self.routes())
        runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=1.0,
            keepalive_timeout=self.header_seconds,
            lingering_time=0.5,
            auto_decompress=False,
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, port, backlog=1024).start()
            self.port = runner.addresses[0][1]
            yield self
        finally:
            await self.stop()
            await runner.cleanup()

    def routes(self) -> Iterable[web.RouteDef]:
        """The routes."""
        raise NotImplementedError(f"{type(self).__qualname__} must define routes()")

    async def stop(self) -> None:
        """End the work of the server's routes. Called at the end of `serving`, while requests are still answered."""

    def admit(self, request: web.Request) -> web.StreamResponse | None:
        """The answer to a request that must not reach its route; None if it may."""
        if not names_server(request.host, self.host, self.port):
            # Otherwise a web page could reach the server by a name that resolves to this machine (DNS rebinding).
            return self.refusal(
                403, f"the Host header {request.host[:80]!r} doesn't name this server: use the address that it printed"
            )
        if not self.has_token(request):
            return self.refusal(401, "a valid token is required: the one that the server printed or was started with")
        return None

    def has_token(self, request: web.Request) -> bool:
        """Whether the request has the token, or needs none."""
        return self.token is None or same_token(bearer(request.headers.get("Authorization")), self.token)

    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The answer of the route's handler to an admitted request."""
        return await handler(request)

    def refusal(self, status: int, why: str) -> web.Response:
        """The answer to a refused request."""
        return web.json_response({"error": {"message": why, "code": status}}, status=status)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = self.admit(request)
        return refused if refused is not None else await self.answer(request, handler)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at `host`."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def names_server(header: str, host: str, port: int) -> bool:
    """Whether the `Host` header names the server that listens on this host and port."""
    name, _, named_port = header.rpartition(":") if not header.endswith("]") and ":" in header else (header, "", "80")
    name = name.strip("[]").lower()
    if named_port != str(port):
        return False
    if is_loopback(host):
        return name in {"localhost", "127.0.0.1", "::1", host.lower()}
    # No foreign name server resolves a bare address, so an address can't be used for DNS rebinding.
    return name in {host.lower(), "localhost", socket.gethostname().lower()} or _is_address(name)


def same_token(sent: str, token: str) -> bool:
    """Whether the texts are equal. Constant time: the time of `==` would tell how many leading characters are right."""
    return hmac.compare_digest(sent.encode("utf-8", "replace"), token.encode())


def require_token(host: str, token: str | None) -> None:
    """Raise ValueError for a server beyond loopback without a token."""
    if token is None and not is_loopback(host):
        raise ValueError(f"other machines can reach a server at {host}: pass a token, which its clients send")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
