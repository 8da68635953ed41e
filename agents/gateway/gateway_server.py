"""The gateway's HTTP server. It has the APIs of OpenAI and Anthropic, in which each API key belongs to one tape.

    POST /v1/chat/completions, /v1/responses, /v1/messages      with a tape's key
    POST /v1/messages/count_tokens      GET /v1/models, /v1/models/ID       /messages as /v1/messages
    /tapereel/tapes/...         begin, score and end tapes     with the admin token (`gateway_control.py`)

The server stores only the digest of a key. A key is valid for one tape, until that tape ends. By default, the server
listens on the loopback address only. The size of bodies and headers is limited, and so is the time to send them.
Refused requests are logged without the key. `gateway_session` answers requests. A dialect (`dialect.py`) reads each
request and writes its answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass

from pydantic import JsonValue
from pydantic_core import to_json

from ...tapes import StoreFailed
from ...tapes.common.http_service import BODY, EVERYWHERE, Handler, HttpService, web
from ...tapes.common.redact import without_secrets
from ...tapes.common.request_checks import bearer
from ...tapes.common.text import logger
from . import chat_protocol, messages_protocol, responses_protocol
from .dialect import Answered, Asked, Dialect, Refused, Stream
from .gateway_session import Live, Session, ended
from .linking import USES, Use

log = logger("gateway")

REMEMBERED = 10_000
"""The keys of at most this many ended tapes are remembered, to distinguish them from unknown keys."""
USE_HEADER = "X-Tapereel-Use"
"""Request header with which the program labels the call for training. Its value is one of `USES`."""
MODEL = "policy"
"""The name that /v1/models lists. Requests may use any name."""
PREFIX = "sk-tape-"
"""Prefix of every key of a tape."""
_KEY = re.compile(rf"(?=({PREFIX}[A-Za-z0-9_-]{{32}}))")
_DIALECTS: dict[str, Dialect] = {
    "/v1/chat/completions": chat_protocol,
    "/v1/responses": responses_protocol,
    "/v1/messages": messages_protocol,
    "/messages": messages_protocol,  # for clients that add no /v1 to ANTHROPIC_BASE_URL, as Vercel's AI SDK
}
"""The dialect of each route. Paths below a route have its dialect too."""
_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of one client request."""

    body: int = 8 * 1024 * 1024
    """Maximum bytes of a request body."""
    body_seconds: float = 30.0
    """Time limit for receiving a request body."""
    header_seconds: float = 30.0
    """Time limit for receiving a request's headers, counted from the connection or the previous answer."""
    write_seconds: float = 60.0
    """Time limit for a client to receive an answer, or each piece of a stream."""
    quiet_seconds: float = 15.0
    """After this many seconds of silence in a stream, a comment is sent so that the client doesn't time out."""
    hold_seconds: float = 60.0
    """Maximum seconds that a request waits during a weight sync. After that it is refused with 429 and Retry-After."""


class Gateway(HttpService):
    """The server: `async with Gateway().serving() as gateway:`, then `gateway.open(session)` and `gateway.url`.

    Single use. Call its methods in the event loop that runs `serving`, because its counters and tables have no lock.
    """

    no_token = "unknown API key: neither a tape's key nor the admin token"

    def __init__(self, host: str = "127.0.0.1", *, token: str | None = None, bounds: Bounds = Bounds()) -> None:
        """`token` is the admin token for the routes that a subclass adds. By default a new one is made."""
        super().__init__(host, token)
        self.bounds = bounds
        self.body_bytes, self.body_seconds = bounds.body, bounds.body_seconds
        self.header_seconds = bounds.header_seconds
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        self._paused = 0

    @property
    def url(self) -> str:
        """The value of `OPENAI_BASE_URL` for programs on this machine."""
        return f"{self.address}/v1"

    def url_for(self, request: web.Request) -> str:
        """Return the base URL for the client of this request.

        If the server listens on every address, the URL has the `Host` that the client used.
        """
        return f"http://{request.host}/v1" if self.host in EVERYWHERE else self.url

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of the APIs."""
        return [
            web.get("/v1/models", self._models),
            web.get("/v1/models/{model:.+}", self._model),
            *(web.post(path, self._ask) for path in _DIALECTS),
            web.post("/v1/embeddings", self._embed),
            *(web.post(f"{path}/count_tokens", self._count) for path in ("/v1/messages", "/messages")),
        ]

    def has_token(self, request: web.Request) -> bool:
        """Return whether the request carries the admin token or a tape's key. Each route requires one of the two."""
        digest = _digest(_key_of(request))
        return digest in self._sessions or digest in self._ended or self.has_admin_token(request)

    def has_admin_token(self, request: web.Request) -> bool:
        """Return whether the request carries the admin token."""
        return super().has_token(request)

    def refusal(self, request: web.Request, status: int, why: str) -> web.Response:
        """Return the answer to a refused request in the form that the API's servers use."""
        return self._refuse(request, Refused(status, why))

    # Keys

    def open(self, session: Session) -> str:
        """Return a new key, which is valid for this session until `shut`."""
        key = f"{PREFIX}{secrets.token_urlsafe(24)}"
        self._sessions[_digest(key)] = session
        return key

    def shut(self, key: str) -> None:
        """Revoke the key."""
        digest = _digest(key)
        if self._sessions.pop(digest, None) is not None:
            self._ended[digest] = None
            if len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)

    def without_keys(self, *values: object) -> None:
        """Raise Refused if JSON values that will be recorded contain a tape's key or the admin token."""
        text = to_json(values).decode()
        if to_json(self.token).decode()[1:-1] in text:
            raise Refused(400, "the body holds the admin token, which would be recorded; leave it out")
        digests = map(_digest, set(_KEY.findall(text)))
        if any(digest in self._sessions or digest in self._ended for digest in digests):
            raise Refused(400, "the body holds an API key of a tape, which would be recorded; leave it out")

    def _session(self, request: web.Request) -> Session:
        key = _key_of(request)
        # Sessions are found by digest, so that the time of the look-up reveals nothing about existing keys.
        session = self._sessions.get(_digest(key))
        if session is not None:
            return session
        if _digest(key) in self._ended:
            raise ended()
        raise Refused(401, "unknown API key: not a tape's key")

    # Weights

    def pause(self) -> None:
        """Hold new requests during a weight sync, until `resume` has been called once for each `pause`.

        After `hold_seconds`, a held request is refused with 429. The engine decides how a sync affects calls in flight.
        """
        self._paused += 1

    def resume(self) -> bool:
        """Undo one `pause`. Return whether another `pause` is still in effect."""
        self._paused = max(self._paused - 1, 0)
        return self._paused > 0

    async def _steady(self, session: Session) -> None:
        """Wait until no weight sync is in progress. Raises Refused with 429 after `hold_seconds`."""
        deadline = time.monotonic() + self.bounds.hold_seconds
        # A held request counts as activity. Otherwise the idle limit would end the tape during a long weight sync.
        session.held += 1
        try:
            # The engine doesn't signal the end of its own weight sync, so it is polled.
            while self._paused or session.changing:
                if time.monotonic() >= deadline:
                    why = "the model's weights are being replaced; ask again in a moment"
                    raise Refused(429, why, code="weights_changing")
                await asyncio.sleep(0.02)
        finally:
            session.held -= 1
            session.heard_at = time.monotonic()

    # Requests

    async def answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle the request, and answer every error in the form that the API's servers use."""
        try:
            return await handler(request)
        except Refused as error:
            return self._refuse(request, error)
        except web.HTTPException as error:
            why = f"{request.method} {request.path[:100]} is not served here: {error.reason}"
            return self.refusal(request, error.status, why)
        except StoreFailed as error:
            return self._refuse(request, _store_failed(error))

    def _log(self, request: web.Request, error: Refused) -> None:
        known = [self.token]
        log.info(
            "refused %s %r from %s: %d %s",
            request.method,
            without_secrets(request.path, known)[:100],
            request.remote,
            error.status,
            without_secrets(str(error), known),
        )

    def _refuse(self, request: web.Request, error: Refused) -> web.Response:
        self._log(request, error)
        refused = to_json(_dialect(request).refusal(error))
        return web.Response(status=error.status, body=refused, content_type="application/json", headers=error.headers)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request)
        return json_response({"object": "list", "data": [_about(MODEL)]})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        """Describe a model of any name, because requests may use any model name."""
        self._session(request)
        return json_response(_about(request.match_info["model"]))

    async def _count(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        return json_response({"input_tokens": await session.count(messages_protocol.read_count(request[BODY]))})

    async def _embed(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        self.without_keys(request[BODY])
        return json_response(await session.embed(request[BODY]))

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        session, dialect = self._session(request), _dialect(request)
        asked = dialect.read(request[BODY])
        # Check this before the call is recorded. A tape is never rewritten, so a recorded key would stay on it.
        self.without_keys(asked.messages, asked.tools, asked.stop, asked.model, asked.constraint)
        use = _use(request)
        await self._steady(session)
        if asked.stream:
            return await self._stream(request, session, asked, use, dialect.stream(asked))
        answer = await session.ask(asked, use=use)
        response = json_response(dialect.body(asked, answer))
        await self._deliver(request, response, session, answer, None)
        return response

    async def _stream(
        self, request: web.Request, session: Session, asked: Asked, use: Use | None, stream: Stream
    ) -> web.StreamResponse:
        """Stream the answer while it is sampled.

        An error before the first token gets its own HTTP status, because nothing has been sent at that point. A later
        error is sent as an event, because the status 200 has already been sent.
        """
        live, response = Live(asked), web.StreamResponse(headers=_EVENTS)
        asking = asyncio.ensure_future(session.ask(asked, use=use, live=live))
        asking.add_done_callback(lambda _: live.moved.set())
        try:
            while True:
                quiet = await live.quiet(self.bounds.quiet_seconds if response.prepared else None)
                if asking.done():
                    break
                data = stream.quiet if quiet else _taken(live, stream, response.prepared)
                if data and not await self._write(request, response, data):
                    return response
            answer = await asking
            rest = _taken(live, stream, response.prepared) + stream.end(answer)
            await self._deliver(request, response, session, answer, rest)
        except (Refused, StoreFailed) as error:
            if not response.prepared:
                raise
            refused = error if isinstance(error, Refused) else _store_failed(error)
            self._log(request, refused)
            await self._write(request, response, stream.failed(refused))
        finally:
            # If the client is gone, the partial answer is recorded before this method returns. This uses `wait`,
            # because `await asking` would raise the request's error in place of the error that is being raised.
            asking.cancel()
            await asyncio.wait([asking])
            if not asking.cancelled():
                asking.exception()  # retrieved, so that asyncio doesn't log it as never retrieved
        return response

    async def _deliver(
        self, request: web.Request, response: web.StreamResponse, session: Session, answer: Answered, data: bytes | None
    ) -> None:
        """Send the end of an answer as `_write` does, and tell the session whether it arrived."""
        # An answer counts as delivered while it is being sent, because its client may end the tape at once.
        session.undelivered.discard(answer.id)
        arrived = False
        try:
            arrived = await self._write(request, response, data)
        finally:
            if not arrived:
                session.undelivered.add(answer.id)

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes | None) -> bool:
        """Send `data`, or the whole response if `data` is None. Return whether the client received it in time."""
        try:
            async with asyncio.timeout(self.bounds.write_seconds):
                await response.prepare(request)
                await (response.write_eof() if data is None else response.write(data))
            return True
        except TimeoutError:
            log.info("%s did not take its answer in %g s", request.remote, self.bounds.write_seconds)
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            log.info("%s has gone", request.remote)
        return False


def _about(model: str) -> dict[str, JsonValue]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "tapereel"}


def _key_of(request: web.Request) -> str:
    """Return the API key, which OpenAI's clients send as a bearer token and Anthropic's in the header `x-api-key`."""
    return bearer(request.headers.get("Authorization")) or request.headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _use(request: web.Request) -> Use | None:
    header = request.headers.get(USE_HEADER)
    if header is None:
        return None
    for use in USES:
        if use == header.lower():
            return use
    raise Refused(400, f"{USE_HEADER} is one of {', '.join(USES)}, not {header[:50]!r}", param=USE_HEADER)


def _dialect(request: web.Request) -> Dialect:
    """Return the dialect of the request's path. Paths of no dialect have OpenAI's errors."""
    return next((dialect for path, dialect in _DIALECTS.items() if request.path.startswith(path)), chat_protocol)


def _taken(live: Live, stream: Stream, begun: bool) -> bytes:
    pieces = live.take()
    begin = b"" if begun else stream.begin(live.id, live.created)
    return begin + b"".join(stream.thought(text) if thought else stream.text(text) for thought, text in pieces)


def _store_failed(error: StoreFailed) -> Refused:
    return Refused(500, str(error), code="store_failed", final=True)


def json_response(value: object) -> web.Response:
    """Return an answer in JSON."""
    return web.Response(body=to_json(value), content_type="application/json")
