"""The base class of all HTTP servers in Tapereel. It runs a server, and checks requests before they reach their routes.

The viewer, the embedded engine's server, the environment service and the gateway are subclasses. They import `web` from
this module, because the error about a missing aiohttp then names the extra that installs it.

A server always has a token, even on loopback, because every user of a machine can connect to its loopback addresses. A
request reaches its route only with the right Host, Origin and token (`request_checks.py`). Its body must be within
limits on size, nesting and time, and is read and parsed before the route runs. This also protects routes that are added
later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Self

from .access_token import HOW_FOUND, check_token, drop_token, new_token, private_file, token_path
from .extras import raise_missing
from .plain_json import read_plain
from .redact import guard_log
from .request_checks import PRIVATE, SAFE, bearer, refused_change, refused_origin, same_token

try:
    from aiohttp import BasicAuth as BasicAuth
    from aiohttp import WSCloseCode as WSCloseCode
    from aiohttp import WSMsgType as WSMsgType
    from aiohttp import web
except ModuleNotFoundError as _error:
    raise_missing(_error, "an HTTP server")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""For each wildcard address that a server may listen on, the loopback address that reaches it from the same machine."""
BODY: web.RequestKey[Any] = web.RequestKey("body", object)
"""`request[BODY]` is the JSON object in the body of a request that may change something, or {} without a body."""
MOST_VALUES = 500_000
"""Maximum number of values in a body. Parsing must be fast, because it holds the interpreter lock even in a thread."""
_IN_PLACE = 1 << 16
"""Bodies up to this number of bytes are parsed in the event loop, because using a thread would take longer."""


class HttpService:
    """One server on one address. Use it as `async with service.serving(port)`, and then read `service.url`.

    A subclass defines `routes`, and may extend `admit`, `answer` and `stop`.
    """

    body_bytes = 8 << 20
    """Maximum size of a request body in bytes."""
    body_seconds = 30.0
    """Time limit for receiving a request's body, in seconds."""
    header_seconds = 30.0
    """Time limit in seconds for a request's headers, counted from the connection or the previous answer. Clients must
    close idle connections sooner. aiohttp's client closes them after 15 seconds."""
    no_token = f"a valid token is required. {HOW_FOUND}"
    """The answer to a request without the token."""
    token_in_file = False
    """Whether a token that the server creates is written to a file, where clients of the same user find it
    (`access_token.py`)."""

    def __init__(self, host: str, token: str | None = None) -> None:
        """Every request must carry `token`. By default, a token is created. Raises UsageError if `token` is invalid."""
        self.host, self.port = host, 0
        self.token = new_token() if token is None else check_token(token)
        self.token_file: str | None = None
        """The file with the token while the server is running, or None if no file is written."""
        self._made = token is None

    @property
    def url(self) -> str:
        """The base URL for clients on this machine."""
        return self.address

    @property
    def address(self) -> str:
        """The scheme, host and port for clients on this machine."""
        host = EVERYWHERE.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Self]:
        """Serve inside the block. Port 0 selects a free port."""
        guard_log("aiohttp.server")  # aiohttp logs headers that it can't parse, and they may hold a token
        app = web.Application(middlewares=[self._guard], client_max_size=self.body_bytes)
        app.add_routes(self.routes())
        app.on_response_prepare.append(_make_private)
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
            if self._made and self.token_in_file:
                self.token_file = str(private_file(token_path(self.address), self.token))
            yield self
        finally:
            drop_token(self.address, self.token)
            await self.stop()
            await runner.cleanup()

    def routes(self) -> Iterable[web.RouteDef]:
        """Return the server's routes."""
        raise NotImplementedError(f"{type(self).__qualname__} must define routes()")

    async def stop(self) -> None:
        """End the work of the server's routes. `serving` calls this at its end, while requests are still answered."""

    def admit(self, request: web.Request) -> web.StreamResponse | None:
        """Return the answer to a request that is rejected, or None if the request may reach its route."""
        sent = request.headers
        site = () if self.is_page(request) else sent.getall("Sec-Fetch-Site", ())
        why = refused_origin(sent.getall("Host", ()), sent.getall("Origin", ()), site, self.host)
        if why is not None:
            return self.refusal(request, 403, why)
        if not self.has_token(request):
            return self.refusal(request, 401, self.no_token)
        why = refused_change(request.method, sent.get("Content-Type", ""))
        return self.refusal(request, 415, why) if why is not None else None

    def is_page(self, request: web.Request) -> bool:
        """Return whether the request opens this server's own page. Other sites may link to this page."""
        return False

    def has_token(self, request: web.Request) -> bool:
        """Return whether the request carries the token."""
        return same_token(bearer(request.headers.get("Authorization")), self.token)

    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Return the answer of the route's handler to an admitted request."""
        try:
            return await handler(request)
        except web.HTTPException as error:
            return self.refusal(request, error.status, error.reason)

    def refusal(self, request: web.Request, status: int, why: str) -> web.Response:
        """Return the answer to a rejected request."""
        return web.json_response({"error": {"message": why, "code": status}}, status=status)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = self.admit(request)
        if refused is None and request.method not in SAFE:
            refused = await self._take_body(request)
        if refused is None:
            return await self.answer(request, handler)
        if refused.status == 401:
            refused.headers["WWW-Authenticate"] = "Bearer"
        if not request.content.is_eof():
            refused.force_close()  # the rest of the body is not read
        return refused

    async def _take_body(self, request: web.Request) -> web.StreamResponse | None:
        """Read and parse the body. Return a refusal if it is too large, too slow or not plain JSON, otherwise None."""
        too_large = f"a request has at most {self.body_bytes} bytes and {MOST_VALUES} values here"
        if (request.content_length or 0) > self.body_bytes:
            return self.refusal(request, 413, too_large)
        try:
            async with asyncio.timeout(self.body_seconds):
                body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return self.refusal(request, 413, too_large)
        except TimeoutError:
            return self.refusal(request, 408, f"the body had not come after {self.body_seconds:g} s")
        if sum(map(body.count, (b",", b"[", b"{"))) > MOST_VALUES:
            return self.refusal(request, 413, too_large)
        try:
            read = asyncio.to_thread(read_plain, body) if len(body) > _IN_PLACE else None
            request[BODY] = (await read if read is not None else read_plain(body)) if body else {}
        except ValueError as error:
            return self.refusal(request, 400, f"the body is not JSON in UTF-8: {error}")
        return None if isinstance(request[BODY], dict) else self.refusal(request, 400, "the body is not a JSON object")


async def _make_private(request: web.Request, response: web.StreamResponse) -> None:
    for name, value in PRIVATE.items():
        response.headers.setdefault(name, value)
