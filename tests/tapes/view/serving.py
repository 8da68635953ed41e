"""The viewer's real server, for tests: in a thread of its own, with a client that sends what it is told to."""

from __future__ import annotations

import http.client
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tapereel.tapes.view import Runs, RunView, Server

from ...finetune.loop.hosting import in_thread


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@contextmanager
def served(
    run: Path, *, host: str = "127.0.0.1", token: str | None = None, insight: Callable[[Any], Any] | None = None
) -> Iterator[Server]:
    """The server of a run, at work."""
    with serving_view(lambda: RunView(run, insight=insight), host, token) as server:
        yield server


@contextmanager
def serving_view(
    opened: Callable[[], RunView | Runs], host: str = "127.0.0.1", token: str | None = None
) -> Iterator[Server]:
    """The server of a view, at work."""

    @asynccontextmanager
    async def up() -> AsyncIterator[Server]:
        with opened() as view:
            async with Server(view, host, token).serving() as server:
                yield server

    with in_thread(up) as server:
        yield server


def ask(
    server: Server, path: str, *, host: str | None = None, authorization: str | None = None, **headers: str
) -> Answer:
    """One GET whose path is sent as it is given, and whose Host is `host` where one is given. It has the right token,
    unless `authorization` is given; an empty one is not sent."""
    bearer = f"Bearer {server.token}" if authorization is None else authorization
    if bearer:
        headers["Authorization"] = bearer
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    try:
        connection.putrequest("GET", path, skip_host=True)
        connection.putheader("Host", f"127.0.0.1:{server.port}" if host is None else host)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())
    finally:
        connection.close()


def show(page: Any, server: Any, where: str = "#/") -> None:
    """Go to a place of the viewer, and return when keys act on what it shows."""
    page.goto(f"{server.url}{where}")
    # A tape's rows are drawn before one of them is chosen.
    page.wait_for_function("() => T.app.rows.length > 0" + (" && T.app.tape.at >= 0" if "#/tape/" in where else ""))
