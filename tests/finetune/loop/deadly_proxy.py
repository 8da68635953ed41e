"""A proxy in front of a server, at an address that stays, which does something deadly at a chosen moment.

It knows which request passes, so that a process dies before it hears a request, or after it did what was asked and
before anybody heard of it: surely, on any machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

from .hosting import in_thread


@dataclass
class Moment:
    """The n-th request of a route: as it is `asked`, before it is passed on; `answered`, and the answer is lost; or
    after the answer was `passed` on."""

    route: str
    point: Literal["asked", "answered", "passed"]
    nth: int
    act: Callable[[], object]
    """What happens then; nothing is passed on meanwhile."""
    seen: int = 0
    happened: bool = False

    def happen(self) -> None:
        self.act()
        self.happened = True


class DeadlyProxy:
    """`with DeadlyProxy(lambda: server.url) as proxy:`, in a thread of its own. Connections end as the server's do."""

    def __init__(self, server: Callable[[], str]) -> None:
        self.url = ""
        self.moments: list[Moment] = []
        """They happen one after the other."""
        self._server = server
        self._up = in_thread(self._serving)

    @contextlib.asynccontextmanager
    async def _serving(self) -> AsyncIterator[None]:
        listener = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield
        listener.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked: list[Moment] = []
        """The moment that the answer under way is waited for, if there is one."""
        with contextlib.suppress(OSError, asyncio.CancelledError):
            to = self._server()
            theirs, ours = await asyncio.open_connection(urlsplit(to).hostname, urlsplit(to).port)
            ways = [
                asyncio.ensure_future(self._pass(reader, ours, asked, "asked", to)),
                asyncio.ensure_future(self._pass(theirs, writer, asked, "answered", to)),
            ]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                ours.close()
        writer.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: list[Moment], point: str, to: str
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(1 << 16):
                if point == "asked":
                    piece = piece.replace(_host(self.url), _host(to), 1)
                moment = self._begun(piece) if point == "asked" else asked.pop() if asked else None
                if moment is not None and moment.point == "passed" and point == "answered":
                    writer.write(piece)
                    await writer.drain()
                    return moment.happen()
                if moment is not None and moment.point == point:
                    moment.happen()
                    if point == "answered":
                        return None
                elif moment is not None:
                    asked.append(moment)
                writer.write(piece)
                await writer.drain()

    def _begun(self, piece: bytes) -> Moment | None:
        """The moment, if its request begins here."""
        moment = next((one for one in self.moments if not one.happened), None)
        if moment is None or not piece.startswith(f"POST {moment.route}".encode()):
            return None
        moment.seen += 1
        return moment if moment.seen == moment.nth else None

    def __enter__(self) -> Self:
        self._up.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._up.__exit__(kind, error, at)


def _host(url: str) -> bytes:
    return f"Host: {urlsplit(url).netloc}".encode()
