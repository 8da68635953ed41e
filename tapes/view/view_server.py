"""The viewer's server: one run, read-only, over HTTP on this machine.

Requests whose Host is not ours are refused (a page elsewhere must not read tapes by a name that it points here). Off
loopback every request needs the token. Static files are named beforehand, so no path is ever taken from a request. The
page may load nothing but what this server sends. What is shown is decided in `tapes/view`.
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
"""From what a path and a query name to the answer."""
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Door:
    """Who may come in."""

    host: str
    port: int
    """0 before the server has one."""
    token: str | None
    """None on loopback, where whoever can connect can read the files as well."""

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        return _is_loopback(self.host)

    def lets(self, host: str) -> bool:
        """Whether a request for this `Host` header means us."""
        name, _, port = host.rpartition(":") if not host.endswith("]") and ":" in host else (host, "", "80")
        name = name.strip("[]").lower()
        if port != str(self.port):
            return False
        if self.loopback:
            return name in {"localhost", "127.0.0.1", "::1", self.host.lower()}
        if name in {self.host.lower(), "localhost", socket.gethostname().lower()}:
            return True
        # A bare address can't be pointed here by somebody else's name server.
        return _is_address(name)

    def knows(self, request: web.Request) -> bool:
        """Whether the request brings the token, where one is needed."""
        if self.token is None:
            return True
        given = bearer(request.headers.get("Authorization")) or request.cookies.get(COOKIE, "")
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def choose_token(host: str, token: str | None) -> str | None:
    """The token to ask for: the one given, none on loopback, else a new one."""
    if token is not None and (len(token) < 16 or not token.isascii() or not token.isalnum()):
        raise UsageError("--token must be at least 16 letters and digits; leave it out to have one made")
    return token if token is not None or _is_loopback(host) else secrets.token_hex(16)


class Server:
    """Answers for one `RunView`, whose methods it calls one at a time in a thread of its own."""

    def __init__(self, view: RunView, host: str = "127.0.0.1", token: str | None = None) -> None:
        self.view = view
        self.door = Door(host, 0, choose_token(host, token))
        self._thread = ThreadPoolExecutor(1, "tapereel-view")
        self._slow = ThreadPoolExecutor(1, "tapereel-view-explains")
        self._verifying: asyncio.Task[dict[str, Any]] | None = None

    @property
    def url(self) -> str:
        """Where to look, with the token where one is needed."""
        host = f"[{self.door.host}]" if ":" in self.door.host else self.door.host
        query = f"?token={self.door.token}" if self.door.token is not None else ""
        return f"http://{host}:{self.door.port}/{query}"

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Server]:
        """Serves inside; `port` 0 takes a free one."""
        guard_log("aiohttp.server")  # which quotes the headers that it can't read
        runner = web.AppRunner(self.application(), access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self.door.host, port)
            await site.start()
            self.door = Door(self.door.host, runner.addresses[0][1], self.door.token)
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
        if not self.door.lets(request.host):
            return _refusal(403, f"this server answers for its own address only, not for {request.host[:80]!r}")
        if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and request.path != "/":
            return _refusal(403, "a page of another site asked")
        token = request.query.get("token")
        if self.door.token is not None and token is not None and request.path == "/":
            if not hmac.compare_digest(token.encode("utf-8", "replace"), self.door.token.encode()):
                return _refusal(401, "that is not the token; `tapereel view` printed the address with the right one")
            found = web.Response(status=303, headers={"Location": "/", **_HEADERS})
            found.set_cookie(COOKIE, self.door.token, httponly=True, samesite="Strict")
            return found
        if not self.door.knows(request):
            return _refusal(401, "a token is needed; `tapereel view` printed the address that holds it")
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

            return await _told(asyncio.get_running_loop().run_in_executor(thread, work))

        return handler

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        if self._verifying is None or self._verifying.done():
            self._verifying = asyncio.create_task(asyncio.to_thread(self.view.verify))
        running = self._verifying

        async def found() -> bytes:
            return to_json(await asyncio.shield(running))

        return await _told(found())

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


async def _told(work: Awaitable[bytes]) -> web.StreamResponse:
    """The answer, or the error as a sentence."""
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
