"""A page of another origin in a real browser against each server, and the viewer's link."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tapereel.tapes.common import HttpService
from tapereel.tapes.common.http_service import Handler, web
from tapereel.tapes.view import Server

from ...attack.test_servers import NAMES, routes, up
from ...finetune.loop.hosting import in_thread
from .serving import served

pytestmark = [pytest.mark.browser, pytest.mark.timeout(120)]

ATTACK = """async ([root, routes]) => {
  const read = [];
  const tried = [];
  const note = (what) => (found) => { if (found) read.push(`${what}: ${found}`); };
  for (const [method, path] of routes) {
    const url = root + path;
    const plain = { method, mode: "no-cors", credentials: "include" };
    if (method === "POST") plain.body = "{}";
    tried.push(fetch(url, plain).then((a) => a.text()).then(note(`no-cors ${url}`), () => 0));
    const json = { method, mode: "cors", credentials: "include", headers: { "Content-Type": "application/json" } };
    if (method === "POST") json.body = "{}";
    tried.push(fetch(url, json).then((a) => a.text()).then(note(`cors ${url}`), () => 0));
    const simple = { method, mode: "cors" };
    if (method === "POST") simple.body = new Blob(["{}"], { type: "text/plain" });
    tried.push(fetch(url, simple).then((a) => a.text()).then(note(`simple ${url}`), () => 0));
    if (method === "POST") {
      navigator.sendBeacon(url, new Blob(["{}"], { type: "text/plain" }));
      for (const enctype of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
        const frame = document.createElement("iframe");
        frame.name = `f${Math.random()}`;
        const form = document.createElement("form");
        Object.assign(form, { action: url, method: "post", enctype, target: frame.name });
        const field = document.createElement("input");
        field.name = '{"a":"'; field.value = '"}';
        form.append(field);
        document.body.append(frame, form);
        tried.push(new Promise((done) => { frame.onload = done; setTimeout(done, 3000); }));
        form.submit();
      }
    } else {
      for (const tag of ["img", "script", "iframe"]) {
        const element = document.createElement(tag);
        tried.push(new Promise((done) => { element.onload = element.onerror = done; setTimeout(done, 3000); }));
        element.src = url;
        document.body.append(element);
      }
    }
    tried.push(new Promise((done) => {
      const socket = new WebSocket(url.replace("http", "ws"), "tapereel-env.1");
      socket.onopen = () => { read.push(`socket ${url}`); done(); };
      socket.onerror = done;
    }));
  }
  await Promise.all(tried);
  return read;
}"""


class _Evil(http.server.BaseHTTPRequestHandler):
    link: ClassVar[str] = ""
    cookies: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.cookies.extend(self.headers.get_all("Cookie") or [])
        body = f'<!doctype html><link rel="icon" href="data:,"><a href="{self.link}">look</a>'.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


@contextmanager
def evil() -> Iterator[int]:
    """A server of somebody else's page, on another port of this machine."""
    _Evil.cookies.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Evil)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module", params=NAMES)
def attacked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpService]:
    with in_thread(lambda: up(request.param, tmp_path_factory.mktemp(request.param))) as found:
        yield found


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"], ids=["another site", "another port"])
def test_a_page_of_another_origin_reaches_no_route(chromium: Any, attacked: HttpService, host: str):
    reached: list[str] = []
    answer = attacked.answer

    async def noted(request: web.Request, handler: Handler) -> web.StreamResponse:
        reached.append(f"{request.method} {request.path}")
        return await answer(request, handler)

    context = chromium.new_context()
    page = context.new_page()
    if isinstance(attacked, Server):
        page.goto(attacked.url)  # the reader is logged in
        page.wait_for_function("() => T.app.rows.length > 0")
        page.goto("about:blank")
    attacked.answer = noted  # type: ignore[method-assign]
    try:
        with evil() as port:
            page.goto(f"http://{host}:{port}/")
            read = page.evaluate(ATTACK, [attacked.address, [list(route) for route in routes(attacked)]])
    finally:
        attacked.answer = answer  # type: ignore[method-assign]
        context.close()
    assert read == []
    assert reached == []
    assert _Evil.cookies == [], "the viewer's cookie isn't sent to another port"


def _shown(page: Any, server: Server) -> None:
    """The run is shown, at an address without the token."""
    page.wait_for_function("() => typeof T !== 'undefined' && T.app && T.app.rows.length > 0")
    assert page.url.split("#")[0] == f"{server.address}{server.home}"
    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("document.referrer") == ""
    assert server.token not in str(page.evaluate("performance.getEntriesByType('resource').map((e) => e.name)"))
    page.reload()
    page.wait_for_function("() => typeof T !== 'undefined' && T.app && T.app.rows.length > 0")
    page.go_back()
    assert server.token not in page.url


@pytest.mark.parametrize("way", ["typed", "the file", "a link of another site", "a link of another port"])
def test_the_link_opens_the_viewer(chromium: Any, run: Path, way: str):
    with served(run) as server, evil() as port:
        context = chromium.new_context()
        page = context.new_page()
        page.set_default_timeout(30_000)
        if way == "typed":
            page.goto(server.url)
            _shown(page, server)
        elif way == "the file":
            with server.opening_file() as file:
                page.goto(file.as_uri())
                page.wait_for_url(f"{server.address}**")
                _shown(page, server)
        else:
            _Evil.link = server.url
            page.goto(f"http://{'localhost' if 'site' in way else '127.0.0.1'}:{port}/")
            page.click("a")
            _shown(page, server)
        context.close()


def test_without_the_link_the_page_says_what_is_missing_and_does_not_try_for_ever(chromium: Any, run: Path):
    with served(run) as server:
        context = chromium.new_context()
        page = context.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        answer = page.goto(server.address + server.home)
        assert answer.status == 401
        page.wait_for_timeout(1500)
        assert "token" in page.inner_text("body")
        assert len([url for url in asked if url.endswith(server.home)]) <= 2
        context.close()


def test_two_viewers_in_one_browser_don_t_log_each_other_out(chromium: Any, run: Path):
    with served(run) as one, served(run) as two:
        context = chromium.new_context()
        pages = [context.new_page() for _ in range(2)]
        for page, server in zip(pages, (one, two), strict=True):
            page.goto(server.url)
        for page, server in zip(pages, (one, two), strict=True):
            page.reload()
            _shown(page, server)
        context.close()
