"""Service: serves an environment on a port, one instance for each WebSocket session.

By default it listens on loopback; any other address requires a token. Requests with an `Origin` header are refused, so
a web page can't reach a server on its reader's machine. `ServiceLimits` bounds the resources of clients; a client over
a limit is refused before it costs resources. Messages are JSON and become steps of declared kinds only. Sessions are in
`sessions.py`; `openenv_service.py` adds OpenEnv's protocol.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
import logging
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from ...tapes.common.extras import raise_missing
from ...tapes.common.redact import bearer, guard_log
from ..environment import Environment
from .declared import Declared
from .env_client import ROUTE, SESSION
from .env_protocol import PROTOCOL, CloseCall, Fault, Welcome, read_call
from .remote_errors import BadAnswer
from .sessions import ServiceLimits, Session, Sessions

try:
    from aiohttp import WSCloseCode, WSMsgType, web
except ModuleNotFoundError as _error:
    raise_missing(_error, "serving an environment")

log = logging.getLogger("tapereel.service")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_AT_ONCE = 4
"""Unanswered calls of one connection; a correct client has one, and one more to close."""


class Service:
    """`async with Service(GuessNumber).serving(8100) as service: ...`"""

    def __init__(
        self,
        make: Callable[[], Environment[Any]],
        *,
        declared: Declared | None = None,
        host: str = "127.0.0.1",
        token: str | None = None,
        limits: ServiceLimits | None = None,
    ) -> None:
        """`make` makes an instance for each session: a class, a function or a `Pool`. `declared`: the declaration, if
        neither the class nor a return type has it. `token`: required from every client; needed beyond loopback."""
        if token is None and not is_loopback(host):
            raise ValueError(f"other machines can reach a service at {host}: pass a token")
        if token is not None and (len(token) < 16 or not token.isascii() or not token.isprintable()):
            raise ValueError("a token needs at least 16 printable ASCII characters")
        self.host, self.port = host, 0
        self.declared = declared or Declared.of(make)
        self.limits = limits or ServiceLimits()
        most = getattr(make, "places", None)
        if isinstance(most, int):
            self.limits = self.limits.model_copy(update={"sessions": min(most, self.limits.sessions)})
        self.sessions = Sessions(make, self.declared, self.limits, self._unclosed)
        self.routes: list[tuple[str, Handler]] = [(ROUTE, self._serve), ("/health", self._health)]
        """GET routes; more may be added before `serving`."""
        self._token = token
        self._sockets: weakref.WeakSet[web.WebSocketResponse] = weakref.WeakSet()
        self._ending = False

    @property
    def url(self) -> str:
        """The address of the service."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[Service]:
        """Serve inside the block; `port` 0 takes a free port. At the end running calls may finish, and every instance
        is closed."""
        guard_log("aiohttp.server")  # it logs headers that it can't parse, and they may hold the token
        app = web.Application(middlewares=[self._guard])
        for path, handler in self.routes:
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, port, backlog=1024).start()
            self.port = runner.addresses[0][1]
            yield self
        finally:
            self._ending = True
            await self.sessions.close()
            await asyncio.gather(*(self._bye(socket) for socket in list(self._sockets)))
            await runner.cleanup()

    def place(self) -> web.Response | None:
        """The refusal of a client if no place is free; else None."""
        if not self._ending and not self.sessions.full:
            return None
        why = "the service is shutting down" if self._ending else f"all {self.limits.sessions} places are taken"
        return web.Response(status=503, text=why, headers={"Retry-After": str(self.limits.retry_after)})

    async def open(self, request: web.Request, *protocols: str) -> web.WebSocketResponse:
        """Accept a WebSocket."""
        socket = web.WebSocketResponse(
            heartbeat=self.limits.heartbeat_seconds,
            max_msg_size=self.limits.message_bytes,
            compress=False,
            protocols=protocols,
            timeout=2.0,
        )
        await socket.prepare(request)
        self._sockets.add(socket)
        return socket

    async def heard(self, socket: web.WebSocketResponse, session: Session) -> str | None:
        """The next message; None if the connection has ended, also by exceeding `idle_seconds`."""
        while True:
            try:
                async with asyncio.timeout(self.limits.idle_seconds):
                    message = await socket.receive()
            except TimeoutError:
                if session.busy:
                    continue
                await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"idle for too long")
                self.sessions.end(session)
                return None
            if message.type is WSMsgType.TEXT:
                return message.data
            if message.type is WSMsgType.BINARY:
                await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"text only")
            return None

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if "Origin" in request.headers:
            return web.Response(status=403, text="requests from web pages (with an Origin header) are refused")
        token = bearer(request.headers.get("Authorization"))
        # Compared in constant time: otherwise the response time reveals how much of a guess is right.
        if self._token is not None and not hmac.compare_digest(token.encode(), self._token.encode()):
            return web.Response(status=401, text="a valid token is required", headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {
                "status": "healthy",
                "environment": self.declared.name,
                "protocol": PROTOCOL,
                "sessions": len(self.sessions),
                "places": self.limits.sessions,
            }
        )

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if PROTOCOL not in [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]:
            return web.Response(status=426, text=f"this address needs a WebSocket with the protocol {PROTOCOL}")
        name = request.headers.get(SESSION)
        session = self.sessions.known(name) if name is not None else None
        if name is not None and session is None:
            return web.Response(status=410, text="the session no longer exists")
        if session is None:
            refused = self.place()
            if refused is not None:
                return refused
            session = self.sessions.begin()
        connection = object()
        self.sessions.attach(session, connection)
        try:
            socket = await self.open(request, PROTOCOL)
            welcome = Welcome.to(
                self.declared, session.id, resumed=name is not None, message_bytes=self.limits.message_bytes
            )
            await socket.send_str(welcome.encoded())
            await self.converse(socket, session, functools.partial(self._reply, socket, session))
            return socket
        finally:
            self.sessions.detach(session, connection)

    async def converse(
        self, socket: web.WebSocketResponse, session: Session, reply: Callable[[str], Coroutine[Any, Any, None]]
    ) -> None:
        """Reply to each message until the connection ends.

        Messages are read while calls run; otherwise a lost connection would be noticed only after the call.
        """
        replies: set[asyncio.Task[None]] = set()
        try:
            while (text := await self.heard(socket, session)) is not None:
                if len(replies) >= _AT_ONCE:
                    await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"too many calls at once")
                    return
                task = asyncio.create_task(reply(text))
                replies.add(task)
                task.add_done_callback(functools.partial(self._replied, replies))
        finally:
            for task in replies:
                task.cancel()
            await asyncio.gather(*replies, return_exceptions=True)

    async def _reply(self, socket: web.WebSocketResponse, session: Session, text: str) -> None:
        number, over = 0, False
        try:
            call = read_call(text)
            number = call.id
            if self.sessions.known(session.id) is None:
                answer = Fault(id=number, code="lost", message="the episode has ended").encoded()
            else:
                answer = await session.answer(call, text)
                over = isinstance(call, CloseCall)
        except BadAnswer as error:
            answer = Fault(id=number, code="refused", error="BadAnswer", message=str(error)).encoded()
        if over or session.dead:
            self.sessions.end(session)
        await socket.send_str(answer)

    def _replied(self, replies: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        replies.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ConnectionError):
            log.debug("a client of %s left before its answer; it may reconnect for it", self.declared.name)
        elif error is not None:
            log.error("a call to %s could not be answered", self.declared.name, exc_info=error)

    async def _bye(self, socket: web.WebSocketResponse) -> None:
        await socket.close(code=WSCloseCode.GOING_AWAY, message=b"the service is shutting down")

    def _unclosed(self, error: Exception) -> None:
        log.warning(
            "an instance of %s could not be closed: %s: %s",
            self.declared.name,
            type(error).__qualname__,
            str(error)[:500],
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
