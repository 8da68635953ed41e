"""The viewer's server: one run, or the runs of a folder, read-only, over HTTP on this machine.

Every request needs the token as a bearer token, or the cookie that the printed link sets. The link redirects to an
address without the token, so that the token doesn't stay in the browser's history. The set of static files is fixed, so
no file path comes from a request. A folder's run is named by a key that its list gave out. The page's content policy
allows only this server's files.

A browser sends a cookie to all ports of a host, so another user's server on this machine could receive it. To prevent
this, the page is below a path that only its own browser knows, and the cookie is sent only for this path.
"""

from __future__ import annotations

import asyncio
import html
import re
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
from .runs import Runs

COOKIE = "tapereel-token"
_HEADERS = {"Content-Security-Policy": POLICY, "Cross-Origin-Opener-Policy": "same-origin"}
_Ask = Callable[[RunView, Mapping[str, str], Mapping[str, str]], Any]
"""A function that takes the run, the parts of the path and the query, and returns the answer."""
_RUN = "run/{run:[0-9a-f]{12}}/"
"""The path of a folder's run below the path of the folder's page."""
_RUN_PAGE = re.compile(r"run/[0-9a-f]{12}/")


class Server(HttpService):
    """Serves a `RunView`, or the views of a folder's runs. A view is not thread-safe, so one thread makes all quick
    calls, one after the other. Slow answers (explanations, reports and comparisons) use a second thread."""

    def __init__(self, view: RunView | Runs, host: str = "127.0.0.1", token: str | None = None) -> None:
        super().__init__(host, token)
        self.view = view
        self.home = f"/{secrets.token_urlsafe(12)}/"
        """The path of the page."""
        self._cookie = secrets.token_urlsafe(24)
        self._thread = ThreadPoolExecutor(1, "tapereel-view")
        self._slow = ThreadPoolExecutor(1, "tapereel-view-explains")
        self._verifying: dict[RunView, asyncio.Task[Integrity]] = {}

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
        runs = self.view if isinstance(self.view, Runs) else None
        base = "/" if runs is None else f"/{_RUN}"
        for name, (kind, body) in static_files().items():
            for home in {"/", base}:
                yield from self._at(home + ("" if name == "index.html" else name), _constant(kind, body))
        asked: dict[str, _Ask] = {
            "run": lambda v, at, q: v.overview(),
            "table/{shard:[0-9]{1,9}}": lambda v, at, q: v.table(int(at["shard"])),
            "changes": lambda v, at, q: v.changes(q.get("rev", "")),
            "gists": lambda v, at, q: v.gists(q.get("tapes", "").split(",")),
            "texts": lambda v, at, q: v.texts_of(q.get("tapes", "").split(",")),
            "curve": lambda v, at, q: v.curve(),
            "behind/{k:[0-9]{1,9}}": lambda v, at, q: v.behind(int(at["k"])),
            "tape/{tape}": lambda v, at, q: v.head(at["tape"]),
            "tape/{tape}/items/{page:[0-9]{1,9}}": lambda v, at, q: v.items(at["tape"], int(at["page"])),
            "tape/{tape}/turns/{page:[0-9]{1,9}}": lambda v, at, q: v.turns(at["tape"], int(at["page"])),
            "tape/{tape}/texts/{page:[0-9]{1,9}}": lambda v, at, q: v.texts(at["tape"], int(at["page"])),
            "tape/{tape}/find": lambda v, at, q: v.find(at["tape"], step=_number(q, "step"), call=q.get("call")),
            "tape/{tape}/call": lambda v, at, q: v.call(at["tape"], q.get("call", ""), _number(q, "from")),
            "tape/{tape}/text/{record:[0-9]{1,9}}": lambda v, at, q: v.text(
                at["tape"], int(at["record"]), _number(q, "piece") or 0
            ),
        }
        for path, ask in asked.items():
            yield from self._at(f"{base}api/{path}", self._answering(ask, self._thread))
        explain = self._answering(lambda v, at, q: v.explain(at["tape"]), self._slow)
        yield from self._at(f"{base}api/tape/{{tape}}/explain", explain)
        yield from self._at(f"{base}api/report", self._answering(lambda v, at, q: v.report(), self._slow))
        yield from self._at(f"{base}api/verify", self._verify)
        yield from self._at(f"{base}media/{{name}}", self._media)
        if runs is not None:
            key = "{run:[0-9a-f]{12}}"
            yield from self._at("/api/run", self._about_runs(lambda at, q: runs.overview(), self._thread))
            yield from self._at(f"/api/runs/{key}", self._about_runs(lambda at, q: runs.row(at["run"]), self._slow))
            compared = self._about_runs(
                lambda at, q: runs.compared(at["run"], at["other"], q.get("split"), q.get("against")), self._slow
            )
            yield from self._at(f"/api/compare/{key}/{{other:[0-9a-f]{{12}}}}", compared)

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
        """Return whether this opens the link or a page. Other sites may link to both, but not frame or read them."""
        how = request.headers.get("Sec-Fetch-Mode"), request.headers.get("Sec-Fetch-Dest")
        path = request.path.removeprefix(self.home)
        return (request.path == "/" or not path or _RUN_PAGE.fullmatch(path) is not None) and how == (
            "navigate",
            "document",
        )

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

    async def _view(self, request: web.Request) -> RunView:
        """Return the view of the run that the request names. Raises NoSuchTape if there is none."""
        if isinstance(self.view, RunView):
            return self.view
        loop, key = asyncio.get_running_loop(), request.match_info["run"]
        return await loop.run_in_executor(self._thread, self.view.view, key)

    def _answering(self, ask: _Ask, thread: ThreadPoolExecutor) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            async def found() -> bytes:
                view = await self._view(request)
                return await _in(thread, lambda: ask(view, request.match_info, request.query))

            return await self._answer_or_error(request, found())

        return handler

    def _about_runs(
        self, ask: Callable[[Mapping[str, str], Mapping[str, str]], object], thread: ThreadPoolExecutor
    ) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            found = _in(thread, lambda: ask(request.match_info, request.query))
            return await self._answer_or_error(request, found)

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
        # Several pages may wait for one verification. `shield` keeps it alive if one of them goes away.
        async def found() -> bytes:
            view = await self._view(request)
            running = self._verifying.get(view)
            if running is None or running.done():
                running = self._verifying[view] = asyncio.create_task(asyncio.to_thread(view.verify))
            return to_json(await asyncio.shield(running))

        return await self._answer_or_error(request, found())

    async def _media(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        try:
            view = await self._view(request)
            body = await asyncio.to_thread(view.store.media.get, f"media:{name}")
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


async def _in(thread: ThreadPoolExecutor, work: Callable[[], object]) -> bytes:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(thread, lambda: to_json(work(), inf_nan_mode="strings"))


def _number(query: Mapping[str, str], name: str) -> int | None:
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
