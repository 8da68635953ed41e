"""The viewer's server: one run, read-only, over HTTP on this machine.

The server refuses a request with another Host header: otherwise a page of another site could read tapes through a name
that resolves to this machine (DNS rebinding). Off loopback every request needs the token. The set of static files is
fixed, so no file path comes from a request. The policy lets the page load nothing but this server's files.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from ..common.extras import raise_missing
from ..common.redact import bearer, guard_log
from ..errors import NoSuchTape, TapereelError, UsageError
from . import RunView
from .view_files import IMAGES, POLICY, static_files

try:
    from aiohttp import web
except ModuleNotFoundError as _error:
    raise_missing(_error, "the viewer's server")

from pydantic_core import to_json

COOKIE = "tapereel-token"
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_Ask = Callable[[Mapping[str, str], Mapping[str, str]], Any]
"""(parts of the path, query) -> the answer."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Access:
    """Decides which requests are answered: by Host header and by token."""

    host: str
    port: int
    """0 before the server listens."""
    token: str | None
    """None on loopback: every process that can connect there can read the run's files anyway."""

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return _is_loopback(self.host)

    def names(self, host: str) -> bool:
        """Whether this `Host` header names this server."""
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "80")
        name = name.strip("[]").lower()
        if port != str(self.port):
            return False
        if self.loopback:
            return name in {"localhost", "127.0.0.1", "::1", self.host.lower()}
        if name in {self.host.lower(), "localhost", socket.gethostname().lower()}:
            return True
        # No foreign name server resolves a bare address, so an address can't be used for DNS rebinding.
        return _is_address(name)

    def has_token(self, request: web.Request) -> bool:
        """Whether the request has the token, or needs none."""
        if self.token is None:
            return True
        sent = bearer(request.headers.get("Authorization")) or request.cookies.get(COOKIE, "")
        # Comparing in constant time: the time of `==` would tell how many leading characters are right.
        return hmac.compare_digest(sent.encode("utf-8", "replace"), self.token.encode())


def choose_token(host: str, token: str | None) -> str | None:
    """The token that requests need: `token`, else None on loopback, else a new one."""
    if token is not None and (len(token) < 16 or not token.isascii() or not token.isalnum()):
        raise UsageError("--token must be at least 16 ASCII letters and digits; without --token a new one is made")
    return token if token is not None or _is_loopback(host) else secrets.token_hex(16)


class Server:
    """Serves one `RunView`. The view is not thread-safe, so one thread makes all quick calls, one after the other; slow
    answers, which open their own store, have a second thread."""

    def __init__(self, view: RunView, host: str = "127.0.0.1", token: str | None = None) -> None:
        self.view = view
        self.access = Access(host, 0, choose_token(host, token))
        self._thread = ThreadPoolExecutor(1, "tapereel-view")
        self._slow = ThreadPoolExecutor(1, "tapereel-view-explains")
        self._verifying: asyncio.Task[dict[str, Any]] | None = None

    @property
    def url(self) -> str:
        """The address of the page, with the token where requests need one."""
        host = f"[{self.access.host}]" if ":" in self.access.host else self.access.host
        query = f"?token={self.access.token}" if self.access.token is not None else ""
        return f"http://{host}:{self.access.port}/{query}"

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Server]:
        """Serve inside the block; port 0 takes a free port."""
        guard_log("aiohttp.server")  # aiohttp logs headers that it can't read, and a header may hold the token
        runner = web.AppRunner(self.application(), access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.access.host, port)
            await site.start()
            self.access = Access(self.access.host, runner.addresses[0][1], self.access.token)
            yield self
        finally:
            await runner.cleanup()
            for thread in (self._thread, self._slow):
                await asyncio.to_thread(thread.shutdown, cancel_futures=True)

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._guard])
        for name, (kind, body) in static_files().items():
            path = "/" if name == "index.html" else f"/{name}"
            app.router.add_get(path, _constant(kind, body))
        asked: dict[str, _Ask] = {
            "/api/run": lambda at, q: self.view.overview(),
            "/api/table/{shard:[0-9]{1,9}}": lambda at, q: self.view.table(int(at["shard"])),
            "/api/changes": lambda at, q: self.view.changes(q.get("rev", "")),
            "/api/texts": lambda at, q: self.view.texts_of(q.get("tapes", "").split(",")),
            "/api/curve": lambda at, q: self.view.curve(),
            "/api/behind/{k:[0-9]{1,9}}": lambda at, q: self.view.behind(int(at["k"])),
            "/api/tape/{tape}": lambda at, q: self.view.head(at["tape"]),
            "/api/tape/{tape}/items/{page:[0-9]{1,9}}": lambda at, q: self.view.items(at["tape"], int(at["page"])),
            "/api/tape/{tape}/turns/{page:[0-9]{1,9}}": lambda at, q: self.view.turns(at["tape"], int(at["page"])),
            "/api/tape/{tape}/texts/{page:[0-9]{1,9}}": lambda at, q: self.view.texts(at["tape"], int(at["page"])),
            "/api/tape/{tape}/find": lambda at, q: self.view.find(
                at["tape"], step=_number(q, "step"), call=q.get("call")
            ),
            "/api/tape/{tape}/call": lambda at, q: self.view.call(at["tape"], q.get("call", ""), _number(q, "from")),
            "/api/tape/{tape}/text/{record:[0-9]{1,9}}": lambda at, q: self.view.text(
                at["tape"], int(at["record"]), _number(q, "piece") or 0
            ),
        }
        for path, ask in asked.items():
            app.router.add_get(path, self._answering(ask, self._thread))
        app.router.add_get(
            "/api/tape/{tape}/explain", self._answering(lambda at, q: self.view.explain(at["tape"]), self._slow)
        )
        app.router.add_get("/api/report", self._answering(lambda at, q: self.view.report(), self._slow))
        app.router.add_get("/api/verify", self._verify)
        app.router.add_get("/media/{name}", self._media)
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        if not self.access.names(request.host):
            return _refusal(
                403,
                f"the Host header {request.host[:80]!r} doesn't name this server: open the address that "
                "`tapereel view` printed",
            )
        if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and request.path != "/":
            return _refusal(403, "a page of another site sent this request, and only the viewer's own page may")
        token = request.query.get("token")
        if self.access.token is not None and token is not None and request.path == "/":
            if not hmac.compare_digest(token.encode("utf-8", "replace"), self.access.token.encode()):
                return _refusal(401, "the token is wrong: open the address that `tapereel view` printed")
            found = web.Response(status=303, headers={"Location": "/", **_HEADERS})
            found.set_cookie(COOKIE, self.access.token, httponly=True, samesite="Strict")
            return found
        if not self.access.has_token(request):
            return _refusal(401, "the request has no token: open the address that `tapereel view` printed")
        try:
            response = await handler(request)
        except web.HTTPException as error:
            return _refusal(error.status, error.reason)
        response.headers.update(_HEADERS)
        return response

    def _answering(self, ask: _Ask, thread: ThreadPoolExecutor) -> _Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            def work() -> bytes:
                return to_json(ask(request.match_info, request.query), inf_nan_mode="strings")

            return await _answer_or_error(asyncio.get_running_loop().run_in_executor(thread, work))

        return handler

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        if self._verifying is None or self._verifying.done():
            self._verifying = asyncio.create_task(asyncio.to_thread(self.view.verify))
        running = self._verifying

        # Several pages may wait for one verification: `shield` keeps it alive when one of them goes away.
        async def found() -> bytes:
            return to_json(await asyncio.shield(running))

        return await _answer_or_error(found())

    async def _media(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        try:
            body = await asyncio.to_thread(self.view.store.media.get, f"media:{name}")
        except (ValueError, TapereelError) as error:
            return _refusal(404, str(error))
        kind = IMAGES.get(name[64:])
        if kind is not None:
            return web.Response(body=body, content_type=kind)
        return web.Response(
            body=body,
            content_type="application/octet-stream",
            headers={"Content-Disposition": f'attachment; filename="{name[:77]}"'},
        )


async def _answer_or_error(work: Awaitable[bytes]) -> web.StreamResponse:
    """The answer as JSON, or the error's text with its HTTP status."""
    try:
        return web.Response(body=await work, content_type="application/json")
    except NoSuchTape as error:
        return _refusal(404, str(error))
    except (TapereelError, OSError) as error:
        return _refusal(500, str(error))


def _refusal(status: int, why: str) -> web.Response:
    return web.Response(status=status, body=to_json({"error": why}), content_type="application/json", headers=_HEADERS)


def _constant(kind: str, body: bytes) -> _Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=kind, charset="utf-8")

    return handler


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
