"""Service: serves an environment on a port, one instance for each WebSocket session.

By default it listens on loopback; any other address requires a token. Requests with an `Origin` header are refused, so
a web page can't reach a server on its reader's machine. `ServiceLimits` bounds the resources of clients; a client over
a limit is refused before it costs resources. Messages are JSON and become steps of declared kinds only. Sessions are in
`sessions.py`; `openenv_service.py` adds OpenEnv's protocol.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from ...tapes.common.http_service import (
    SHORTEST_TOKEN,
    Handler,
    HttpService,
    WSCloseCode,
    WSMsgType,
    require_token,
    web,
)
from ..environment import Environment
from .declared import Declared
from .env_client import ROUTE, SESSION
from .env_protocol import PROTOCOL, CloseCall, Fault, Welcome, read_call
from .remote_errors import BadAnswer
from .sessions import ServiceLimits, Session, Sessions

log = logging.getLogger("tapereel.service")
_AT_ONCE = 4
"""Unanswered calls of one connection; a correct client has one, and one more to close."""


class Service(HttpService):
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
        super().__init__(host, token)
        require_token(host, token)
        if token is not None and (len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable()):
            raise ValueError(f"a token needs at least {SHORTEST_TOKEN} printable ASCII characters")
        self.declared = declared or Declared.of(make)
        self.limits = limits or ServiceLimits()
        most = getattr(make, "places", None)
        if isinstance(most, int):
            self.limits = self.limits.model_copy(update={"sessions": min(most, self.limits.sessions)})
        self.sessions = Sessions(make, self.declared, self.limits, self._unclosed)
        self.more_routes: list[tuple[str, Handler]] = []
        """Further GET routes, to be added before `serving`."""
        self._sockets: weakref.WeakSet[web.WebSocketResponse] = weakref.WeakSet()
        self._ending = False

    @property
    def url(self) -> str:
        """The address of the service."""
        return self.address

    def routes(self) -> Iterable[web.RouteDef]:
        """The WebSocket of Tapereel's own protocol, the state of the service, and the added routes."""
        routes = [(ROUTE, self._serve), ("/health", self._health), *self.more_routes]
        return [web.get(path, handler) for path, handler in routes]

    async def stop(self) -> None:
        """Let running calls finish, and close every instance."""
        self._ending = True
        await self.sessions.close()
        await asyncio.gather(*(self._bye(socket) for socket in list(self._sockets)))

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

    def admit(self, request: web.Request) -> web.StreamResponse | None:
        """Refuse web pages, and requests without the token. Clients may use any name of the server."""
        if "Origin" in request.headers:
            return self.refusal(403, "requests from web pages (with an Origin header) are refused")
        return None if self.has_token(request) else self.refusal(401, "a valid token is required")

    def refusal(self, status: int, why: str) -> web.Response:
        """The answer to a refused request, as text."""
        headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        return web.Response(status=status, text=why, headers=headers)

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
