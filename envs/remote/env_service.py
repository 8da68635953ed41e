"""Serves an environment on a port, with one instance for each WebSocket session.

Every client needs the token. `HttpService` checks it in every request, including those that open a WebSocket.
`ServiceLimits` bounds the resources that clients can use. A client that exceeds a limit is refused before it uses any.
Messages are JSON and can only become steps of declared kinds. OpenEnv's clients are served too, at `/ws`, `/schema` and
`/metadata` (`openenv_service.py`).

A session is one episode with one environment. Its calls are numbered from 1. A call with the next number is carried
out. If the client repeats the last call, it gets the same answer, and the call is carried out only once, even if it is
still running. Other numbers are refused. After a lost connection, the session waits `window_seconds` for a new one. It
is closed earlier if a new client needs its place. OpenEnv's messages have no numbers, so a session with OpenEnv's
protocol ends with its connection.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import secrets
import weakref
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from pydantic import Field, JsonValue

from ...tapes.common.http_service import (
    BasicAuth,
    HttpService,
    WSCloseCode,
    WSMsgType,
    web,
)
from ...tapes.common.request_checks import same_token
from ...tapes.common.run_async import GRACE
from ...tapes.common.text import logger
from ...tapes.records import Task
from ...tapes.value import Value
from ..environment import EnvironmentFactory
from .declared import Declared
from .env_protocol import PROTOCOL, ROUTE, SESSION, Answer, Call, CloseCall, Fault, Welcome, read_call
from .host import Host
from .openenv import OPENENV_ROUTE
from .openenv_service import OpenEnvEpisodes, openenv_schema, problem
from .remote_errors import BadAnswer

log = logger("service")
RECONNECT_SECONDS = 5.0
"""Seconds for which a session keeps its place after a lost connection, so that its client can reconnect. A session that
has received no call doesn't keep its place."""
_AT_ONCE = 4
"""Unanswered calls allowed on one connection. A correct client has at most one, plus one when it closes."""


class ServiceLimits(Value):
    """The limits of a service for its clients."""

    sessions: int = Field(default=1000, ge=1)
    """Concurrent episodes, including those without a connection. Further clients get status 503 and may retry later."""
    message_bytes: int = Field(default=1 << 20, ge=1024)
    """Size limit for a message, in bytes."""
    call_seconds: float = Field(default=60.0, gt=0)
    """Time limit for a call, in seconds. The session ends if a call exceeds it."""
    idle_seconds: float = Field(default=900.0, gt=0)
    """The longest time between two calls in a session, in seconds. The model samples an action in this time."""
    window_seconds: float = Field(default=30.0, gt=0)
    """Seconds for which a session waits for its client after a lost connection."""
    heartbeat_seconds: float = Field(default=20.0, gt=0)
    """Seconds between two pings. A client that doesn't answer a ping is considered gone."""
    retry_after: int = Field(default=1, ge=0)
    """Seconds after which a client may try again if all places are taken."""
    grace_seconds: float = Field(default=5.0, ge=0)
    """Seconds for which running calls may continue when the service ends."""


class Session:
    """One episode."""

    def __init__(self, host: Host) -> None:
        self.id = secrets.token_hex(16)
        """The session's id. It is a secret, because a client that sends it may continue the episode."""
        self.connection: object | None = None
        """The current connection, or None if no client is connected."""
        self.expires: asyncio.TimerHandle | None = None
        self.left_at = 0.0
        """When the last connection ended, in the event loop's time."""
        self.over = False
        """True if the session accepts no more calls, because its environment was closed or hung."""
        self.work: asyncio.Task[Answer] | None = None
        """The task that carries out the last call."""
        self._host = host
        self._last = 0
        self._digest = b""

    @property
    def busy(self) -> bool:
        """Whether a call is running."""
        return self.work is not None and not self.work.done()

    def abandoned(self, now: float) -> bool:
        """Return whether a new client may take this session's place. After a lost connection, a session keeps its place
        for RECONNECT_SECONDS. A session that has received no call then loses its place at once."""
        return self.expires is not None and (self._last == 0 or now - self.left_at >= RECONNECT_SECONDS)

    async def answer(self, call: Call, text: str) -> Answer:
        """Carry out the call and return its answer. Raises BadAnswer if the number is wrong.

        A call that repeats the last number gets the same answer and isn't carried out again, so a client can safely
        repeat a call after a broken connection.
        """
        digest = hashlib.sha256(text.encode()).digest()
        if call.id == self._last and self.work is not None:
            if digest != self._digest:
                raise BadAnswer(f"call {call.id} differs from the call that was sent with this number before")
            return await asyncio.shield(self.work)
        if call.id != self._last + 1:
            raise BadAnswer(f"call {call.id} can't follow call {self._last}")
        if self.busy:
            if not isinstance(call, CloseCall):
                raise BadAnswer(f"call {call.id} came before the answer to call {self._last}")
            await self.stop()
        self._last, self._digest = call.id, digest
        return await self.carry_out(call)

    async def carry_out(self, call: Call) -> Answer:
        """Carry out the call in its own task, which a broken connection doesn't stop."""
        if self.over:
            return Fault(id=call.id, code="lost", message="the episode has ended; connect again for another one")

        async def work() -> Answer:
            answer = await self._host.answer(call)
            self.over = self.over or self._host.dead or isinstance(call, CloseCall)
            return answer

        self.work = asyncio.create_task(work())
        return await asyncio.shield(self.work)

    async def stop(self) -> None:
        """Cancel the running call."""
        if self.work is not None and not self.work.done():
            self.work.cancel()
            await asyncio.wait({self.work}, timeout=GRACE + 1)  # the host leaves a call behind after GRACE

    async def close(self) -> None:
        """Cancel the running call and release the environment. A further call would get a new environment."""
        await self.stop()
        await self._host.close()


class Service(HttpService):
    """Serves an environment: `async with Service(GuessNumber).serving(8100) as service: ...`"""

    token_in_file = True

    def __init__(
        self,
        make: EnvironmentFactory,
        *,
        declared: Declared | None = None,
        host: str = "127.0.0.1",
        token: str | None = None,
        limits: ServiceLimits | None = None,
        tasks: Sequence[JsonValue | Task] | None = None,
    ) -> None:
        """`make` makes an instance for each session. It is a class, a function or a `Pool`.

        `declared` is needed if neither a class nor a return type provides the declaration. Every client must send
        `token`. If it is None, a new token is made, and this user's clients on this machine can find it. If a client of
        OpenEnv sends no task, it gets one of `tasks`.
        """
        super().__init__(host, token)
        self.declared = declared or Declared.of(make)
        self.limits = limits or ServiceLimits()
        most = getattr(make, "places", None)
        if isinstance(most, int):
            self.limits = self.limits.model_copy(update={"sessions": min(most, self.limits.sessions)})
        self.sessions: dict[str, Session] = {}
        """The open sessions, by id."""
        self._make, self._tasks = make, tasks
        self._closing: set[asyncio.Task[None]] = set()
        self._sockets: weakref.WeakSet[web.WebSocketResponse] = weakref.WeakSet()
        self._ending = False

    def routes(self) -> Iterable[web.RouteDef]:
        """Return the routes: the WebSockets of both protocols, the state of the service, and OpenEnv's descriptions."""
        return [
            web.get(ROUTE, self._serve),
            web.get(OPENENV_ROUTE, self._serve_openenv),
            web.get("/health", self._health),
            web.get("/schema", self._schema),
            web.get("/metadata", self._metadata),
        ]

    async def stop(self) -> None:
        """Wait up to `grace_seconds` for running calls, then close every instance."""
        self._ending = True
        running = [session.work for session in self.sessions.values() if session.work is not None]
        if running:
            await asyncio.wait(running, timeout=self.limits.grace_seconds)
        for session in list(self.sessions.values()):
            self._finish(session)
        if self._closing:
            await asyncio.wait(set(self._closing))
        goodbye = b"the service is shutting down"
        await asyncio.gather(
            *(socket.close(code=WSCloseCode.GOING_AWAY, message=goodbye) for socket in list(self._sockets))
        )

    # Sessions

    @property
    def occupied(self) -> int:
        """The number of places taken. A closing session counts, because its environment still holds resources."""
        return len(self.sessions) + len(self._closing)

    def _refusal(self) -> web.Response | None:
        """Return the response that refuses a new client, or None if a place is free.

        If no place is free, the session that was abandoned first is ended, so that a retry finds a free place.
        """
        if not self._ending and self.occupied < self.limits.sessions:
            return None
        now = asyncio.get_running_loop().time()
        left = [session for session in self.sessions.values() if session.abandoned(now)]
        if left:
            self._finish(min(left, key=lambda session: session.left_at))
        why = "the service is shutting down" if self._ending else f"all {self.limits.sessions} places are taken"
        return web.Response(status=503, text=why, headers={"Retry-After": str(self.limits.retry_after)})

    def _begin(self) -> Session:
        session = Session(Host(self._make, self.declared, self.limits.call_seconds))
        self.sessions[session.id] = session
        return session

    def _finish(self, session: Session) -> None:
        """End the episode. The place becomes free when the environment has been released in the background."""
        session.over = True
        if self.sessions.pop(session.id, None) is None:
            return
        if session.expires is not None:
            session.expires.cancel()
        task = asyncio.create_task(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    @contextmanager
    def _connected(self, session: Session) -> Iterator[None]:
        """Give the session a new connection inside the block. This connection replaces any earlier one.

        Afterwards the session waits `window_seconds` for a new connection.
        """
        connection = session.connection = object()
        if session.expires is not None:
            session.expires.cancel()
            session.expires = None
        try:
            yield
        finally:
            if session.connection is connection and session.id in self.sessions:
                session.connection = None
                loop = asyncio.get_running_loop()
                session.left_at = loop.time()
                session.expires = loop.call_later(self.limits.window_seconds, self._finish, session)

    # Connections

    async def _open(self, request: web.Request, *protocols: str) -> web.WebSocketResponse:
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

    async def _heard(self, socket: web.WebSocketResponse, session: Session) -> str | None:
        """Return the next message, or None if the connection has ended or was idle for too long (`idle_seconds`)."""
        while True:
            try:
                async with asyncio.timeout(self.limits.idle_seconds):
                    message = await socket.receive()
            except TimeoutError:
                if session.busy:
                    continue
                await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"idle for too long")
                self._finish(session)
                return None
            if message.type is WSMsgType.TEXT:
                return message.data
            if message.type is WSMsgType.BINARY:
                await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"text only")
            return None

    def has_token(self, request: web.Request) -> bool:
        """Return whether the request carries the token. The token is also accepted as the Basic authentication
        password, because OpenEnv's own client can send it only as part of the URL."""
        try:
            sent = BasicAuth.decode(request.headers.get("Authorization", "")).password
        except ValueError:
            return super().has_token(request)
        return same_token(sent, self.token)

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {
                "status": "healthy",
                "environment": self.declared.name,
                "protocol": PROTOCOL,
                "sessions": self.occupied,
                "places": self.limits.sessions,
            }
        )

    async def _schema(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(openenv_schema(self.declared))

    async def _metadata(self, request: web.Request) -> web.StreamResponse:
        name = self.declared.name
        return web.json_response({"name": name, "description": f"{name}, served by Tapereel"})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        if PROTOCOL not in [name.strip() for name in request.headers.get("Sec-WebSocket-Protocol", "").split(",")]:
            return web.Response(status=426, text=f"this address needs a WebSocket with the protocol {PROTOCOL}")
        name = request.headers.get(SESSION)
        session = self.sessions.get(name) if name is not None else None
        if name is not None and session is None:
            return web.Response(status=410, text="the session no longer exists")
        if session is None:
            refused = self._refusal()
            if refused is not None:
                return refused
            session = self._begin()
        with self._connected(session):
            socket = await self._open(request, PROTOCOL)
            welcome = Welcome.to(
                self.declared, session.id, resumed=name is not None, message_bytes=self.limits.message_bytes
            )
            await socket.send_str(welcome.encoded())
            await self._converse(socket, session, functools.partial(_reply, session))
            return socket

    async def _serve_openenv(self, request: web.Request) -> web.StreamResponse:
        refused = self._refusal()
        if refused is not None:
            socket = await self._open(request)
            await socket.send_str(problem("CAPACITY_REACHED", str(refused.text)))
            await socket.close()
            return socket
        session = self._begin()
        try:
            socket = await self._open(request)
            episodes = OpenEnvEpisodes(self.declared, self._tasks, session.carry_out, session.close)
            await self._converse(socket, session, episodes.reply)
            return socket
        finally:
            self._finish(session)

    async def _converse(
        self, socket: web.WebSocketResponse, session: Session, reply: Callable[[str], Awaitable[str | None]]
    ) -> None:
        """Reply to each message until the connection ends or `reply` returns None.

        Messages are read while calls run, because a lost connection would otherwise be noticed only after the call.
        """

        async def answer(text: str) -> None:
            answered = await reply(text)
            if session.over:
                self._finish(session)
            await (socket.send_str(answered) if answered is not None else socket.close())

        replies: set[asyncio.Task[None]] = set()
        try:
            while (text := await self._heard(socket, session)) is not None:
                if len(replies) >= _AT_ONCE:
                    await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=b"too many calls at once")
                    return
                task = asyncio.create_task(answer(text))
                replies.add(task)
                task.add_done_callback(functools.partial(self._replied, replies))
        finally:
            for task in replies:
                task.cancel()
            await asyncio.gather(*replies, return_exceptions=True)

    def _replied(self, replies: set[asyncio.Task[None]], task: asyncio.Task[None]) -> None:
        replies.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ConnectionError):
            log.debug("a client of %s left before its answer; it may reconnect for it", self.declared.name)
        elif error is not None:
            log.error("a call to %s could not be answered", self.declared.name, exc_info=error)


async def _reply(session: Session, text: str) -> str:
    number = 0
    try:
        call = read_call(text)
        number = call.id
        return (await session.answer(call, text)).encoded()
    except BadAnswer as error:
        return Fault(id=number, code="refused", error="BadAnswer", message=str(error)).encoded()
