"""The viewer's server: one run, read-only, over HTTP on this machine.

Every request needs the token as a bearer token, or the cookie that the printed link sets. The link redirects to an
address without the token, so that the token doesn't stay in the browser's history. The set of static files is fixed, so
no file path comes from a request. The page's content policy allows only this server's files.

A browser sends a cookie to all ports of a host, so another user's server on this machine could receive it. To prevent
this, the page is below a path that only its own browser knows, and the cookie is sent only for this path.
"""

from __future__ import annotations

import asyncio
import html
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from pydantic_core import to_json

from ..common.access_token import private_file, token_path
from ..common.http_service import Handler, HttpService, same_token, web
from ..errors import NoSuchTape, TapereelError
from . import RunView
from .bundle import IMAGES, POLICY, static_files
from .live import Integrity

COOKIE = "tapereel-token"
_HEADERS = {"Content-Security-Policy": POLICY, "Cross-Origin-Opener-Policy": "same-origin"}
_Ask = Callable[[Mapping[str, str], Mapping[str, str]], Any]
"""A function that takes the parts of the path and the query, and returns the answer."""


class Server(HttpService):
    """Serves one `RunView`. The view is not thread-safe, so one thread makes all quick calls, one after the other. Slow
    answers (explanations and reports) use a second thread."""

    def __init__(self, view: RunView, host: str = "127.0.0.1", token: str | None = None) -> None:
        super().__init__(host, token)
        self.view = view
        self.home = f"/{secrets.token_urlsafe(12)}/"
        """The path of the page."""
        self._cookie = secrets.token_urlsafe(24)
        self._thread = ThreadPoolExecutor(1, "tapereel-view")
        self._slow = ThreadPoolExecutor(1, "tapereel-view-explains")
        self._verifying: asyncio.Task[Integrity] | None = None

    @property
    def url(self) -> str:
        """The link that opens the page, with the token."""
        return f"{self.address}/?token={quote(self.token, safe='')}"

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Self]:
        """Serve inside the block. Port 0 selects a free port."""
        try:
            async with super().serving(port):
                yield self
        finally:
            for thread in (self._thread, self._slow):
                await asyncio.to_thread(thread.shutdown, cancel_futures=True)

    @contextmanager
    def opening_file(self) -> Iterator[Path]:
        """Create a file that redirects the browser to the link, and remove it after the block. The link itself must not
        be in the command line that opens the browser, because every user of the machine can read command lines."""
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={html.escape(self.url)}">'
        path = private_file(f"{token_path(self.address)}.html", page)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield routes for the static files and for the questions that the page asks."""
        for name, (kind, body) in static_files().items():
            yield from self._at("/" if name == "index.html" else f"/{name}", _constant(kind, body))
        asked: dict[str, _Ask] = {
            "/api/run": lambda at, q: self.view.overview(),
            "/api/table/{shard:[0-9]{1,9}}": lambda at, q: self.view.table(int(at["shard"])),
            "/api/changes": lambda at, q: self.view.changes(q.get("rev", "")),
            "/api/gists": lambda at, q: self.view.gists(q.get("tapes", "").split(",")),
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
            yield from self._at(path, self._answering(ask, self._thread))
        explain = self._answering(lambda at, q: self.view.explain(at["tape"]), self._slow)
        yield from self._at("/api/tape/{tape}/explain", explain)
        yield from self._at("/api/report", self._answering(lambda at, q: self.view.report(), self._slow))
        yield from self._at("/api/verify", self._verify)
        yield from self._at("/media/{name}", self._media)

    def _at(self, path: str, handler: Handler) -> Iterator[web.RouteDef]:
        """Yield the route for programs, and the same route for the page."""
        yield web.get(path, handler)
        yield web.get(self.home + path[1:], handler)

    def admit(self, request: web.Request) -> web.StreamResponse | None:
        """Check the request as the base class does. If the request is the link with the token, the answer sets the
        cookie and redirects to the page. All later requests carry the cookie."""
        refused = super().admit(request)
        if refused is None and request.path == "/" and "token" in request.query:
            refused = web.Response(status=303, headers={"Location": self.home})
            refused.set_cookie(COOKIE, self._cookie, path=self.home, httponly=True, samesite="Strict")
        elif refused is not None and request.headers.get("Sec-Fetch-Site") != "same-origin" and self.is_page(request):
            # After a link on another site, browsers don't send the cookie even at the redirect (SameSite=Strict). This
            # answer makes the page reload. The second request comes from this server's page, so it has the cookie.
            refused.headers["Refresh"] = "0"
        return refused

    def is_page(self, request: web.Request) -> bool:
        """Return whether this opens the link or the page. Other sites may link to both, but not frame or read them."""
        how = request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest")
        return request.path in ("/", self.home) and how == ("navigate", "document")

    def has_token(self, request: web.Request) -> bool:
        """Return whether the request carries the token or the page's cookie. The link has the token in its query."""
        linked = request.query.get("token") if request.path == "/" else None
        if linked is not None:
            return same_token(linked, self.token)
        return super().has_token(request) or same_token(request.cookies.get(COOKIE, ""), self._cookie)

    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Add the headers that protect the page to every answer."""
        response = await super().answer(request, handler)
        response.headers.update(_HEADERS)
        return response

    def refusal(self, request: web.Request, status: int, why: str) -> web.Response:
        """Return the answer to a rejected request as JSON."""
        body = to_json({"error": why})
        return web.Response(status=status, body=body, content_type="application/json", headers=_HEADERS)

    def _answering(self, ask: _Ask, thread: ThreadPoolExecutor) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            def work() -> bytes:
                return to_json(ask(request.match_info, request.query), inf_nan_mode="strings")

            return await self._answer_or_error(request, asyncio.get_running_loop().run_in_executor(thread, work))

        return handler

    async def _answer_or_error(self, request: web.Request, work: Awaitable[bytes]) -> web.StreamResponse:
        """Return the answer as JSON, or the error's text with its HTTP status."""
        try:
            return web.Response(body=await work, content_type="application/json")
        except NoSuchTape as error:
            return self.refusal(request, 404, str(error))
        except (TapereelError, OSError) as error:
            return self.refusal(request, 500, str(error))

    async def _verify(self, request: web.Request) -> web.StreamResponse:
        if self._verifying is None or self._verifying.done():
            self._verifying = asyncio.create_task(asyncio.to_thread(self.view.verify))
        running = self._verifying

        # Several pages may wait for one verification. `shield` keeps it alive if one of them goes away.
        async def found() -> bytes:
            return to_json(await asyncio.shield(running))

        return await self._answer_or_error(request, found())

    async def _media(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        try:
            body = await asyncio.to_thread(self.view.store.media.get, f"media:{name}")
        except (ValueError, TapereelError) as error:
            return self.refusal(request, 404, str(error))
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
