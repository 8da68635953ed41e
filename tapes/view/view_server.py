"""The viewer's server: one run, read-only, over HTTP on this machine.

The server refuses a request with another Host header: otherwise a page of another site could read tapes through a name
that resolves to this machine (DNS rebinding). Off loopback every request needs the token. The set of static files is
fixed, so no file path comes from a request. The policy lets the page load nothing but this server's files.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, Self

from pydantic_core import to_json

from ..common.http_service import SHORTEST_TOKEN, Handler, HttpService, is_loopback, same_token, web
from ..errors import NoSuchTape, TapereelError, UsageError
from . import RunView
from .bundle import IMAGES, POLICY, static_files
from .live import Integrity

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


def choose_token(host: str, token: str | None) -> str | None:
    """The token that requests need: `token`, else None on loopback, else a new one."""
    if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isalnum()):
        raise UsageError(
            f"--token must be at least {SHORTEST_TOKEN} ASCII letters and digits; without --token a new one is made"
        )
    return token if token is not None or is_loopback(host) else secrets.token_hex(16)


class Server(HttpService):
    """Serves one `RunView`. The view is not thread-safe, so one thread makes all quick calls, one after the other; slow
    answers, which open their own store, have a second thread."""

    def __init__(self, view: RunView, host: str = "127.0.0.1", token: str | None = None) -> None:
        super().__init__(host, choose_token(host, token))
        self.view = view
        self._thread = ThreadPoolExecutor(1, "tapereel-view")
        self._slow = ThreadPoolExecutor(1, "tapereel-view-explains")
        self._verifying: asyncio.Task[Integrity] | None = None

    @property
    def url(self) -> str:
        """The address of the page, with the token where requests need one."""
        return f"{super().url}/" + (f"?token={self.token}" if self.token is not None else "")

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Self]:
        """Serve inside the block; port 0 takes a free port."""
        try:
            async with super().serving(port):
                yield self
        finally:
            for thread in (self._thread, self._slow):
                await asyncio.to_thread(thread.shutdown, cancel_futures=True)

    def routes(self) -> Iterator[web.RouteDef]:
        """The static files, and the questions that the page asks."""
        for name, (kind, body) in static_files().items():
            path = "/" if name == "index.html" else f"/{name}"
            yield web.get(path, _constant(kind, body))
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
            yield web.get(path, self._answering(ask, self._thread))
        explain = self._answering(lambda at, q: self.view.explain(at["tape"]), self._slow)
        yield web.get("/api/tape/{tape}/explain", explain)
        yield web.get("/api/report", self._answering(lambda at, q: self.view.report(), self._slow))
        yield web.get("/api/verify", self._verify)
        yield web.get("/media/{name}", self._media)

    def admit(self, request: web.Request) -> web.StreamResponse | None:
        """Also refuse pages of other sites. The address with the token sets a cookie, which all later requests have."""
        if request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site") and request.path != "/":
            return self.refusal(403, "a page of another site sent this request, and only the viewer's own page may")
        refused = super().admit(request)
        if refused is None and self.token is not None and "token" in request.query and request.path == "/":
            refused = web.Response(status=303, headers={"Location": "/", **_HEADERS})
            refused.set_cookie(COOKIE, self.token, httponly=True, samesite="Strict")
        return refused

    def has_token(self, request: web.Request) -> bool:
        """The printed address has the token in its query, and the page's requests have it in a cookie."""
        sent = request.query.get("token") if request.path == "/" else None
        if sent is None:
            sent = request.cookies.get(COOKIE, "")
        return super().has_token(request) or same_token(sent, self.token or "")

    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every answer gets the headers that protect the page."""
        try:
            response = await handler(request)
        except web.HTTPException as error:
            return self.refusal(error.status, error.reason)
        response.headers.update(_HEADERS)
        return response

    def refusal(self, status: int, why: str) -> web.Response:
        """The answer to a refused request, as JSON."""
        body = to_json({"error": why})
        return web.Response(status=status, body=body, content_type="application/json", headers=_HEADERS)

    def _answering(self, ask: _Ask, thread: ThreadPoolExecutor) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            def work() -> bytes:
                return to_json(ask(request.match_info, request.query), inf_nan_mode="strings")

            return await self._answer_or_error(asyncio.get_running_loop().run_in_executor(thread, work))

        return handler

    async def _answer_or_error(self, work: Awaitable[bytes]) -> web.StreamResponse:
        """The answer as JSON, or the error's text with its HTTP status."""
        try:
            return web.Response(body=await work, content_type="application/json")
        except NoSuchTape as error:
            return self.refusal(404, str(error))
        except (TapereelError, OSError) as error:
            return self.refusal(500, str(error))

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        if self._verifying is None or self._verifying.done():
            self._verifying = asyncio.create_task(asyncio.to_thread(self.view.verify))
        running = self._verifying

        # Several pages may wait for one verification: `shield` keeps it alive when one of them goes away.
        async def found() -> bytes:
            return to_json(await asyncio.shield(running))

        return await self._answer_or_error(found())

    async def _media(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        try:
            body = await asyncio.to_thread(self.view.store.media.get, f"media:{name}")
        except (ValueError, TapereelError) as error:
            return self.refusal(404, str(error))
        kind = IMAGES.get(name[64:])
        if kind is not None:
            return web.Response(body=body, content_type=kind)
        return web.Response(
            body=body,
            content_type="application/octet-stream",
            headers={"Content-Disposition": f'attachment; filename="{name[:77]}"'},
        )


def _constant(kind: str, body: bytes) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=kind, charset="utf-8")

    return handler


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
