"""RemoteEnvironment: the client of an environment on a server.

After a dropped connection the client reconnects and repeats the call with the same number, so no action is carried out
twice. If the server is full, the client retries at the time that the server names. All waiting is bounded. An answer
must belong to the call and be of a declared kind; otherwise the episode ends as an error of the environment.
"""

from __future__ import annotations

import asyncio

from ..environment import EnvironmentFactory
from .channel import Channel, Dropped, Line
from .declared import Declared
from .env_protocol import PROTOCOL, Answer, Call, CloseCall, Fault, Welcome, read_answer, read_welcome
from .proxy import Proxy
from .remote_errors import BadAnswer, Hung, RemoteError, SessionLost, Unreachable

ROUTE = "/env"
SESSION = "Tapereel-Session"
"""Header with the id of the session to resume."""
_CLOSING, _CLOSING_AFTER_FAILURE = 10.0, 1.0
"""Time limits for closing on the server, in seconds: normally, and after a call without an answer."""


class RemoteEnvironment(Proxy):
    """`RemoteEnvironment("http://host:port", GuessNumber)`: one episode in the `GuessNumber` of that server."""

    def __init__(
        self,
        url: str,
        environment: Declared | EnvironmentFactory,
        *,
        key_variable: str | None = None,
        seconds: float = 60.0,
        patience: float = 30.0,
        largest: int = 4 << 20,
    ) -> None:
        """`environment`: the class, or a `Declared`, with the expected kinds of steps.

        key_variable: the environment variable with the server's token. seconds: time limit of an answer after the
        server has received the call. patience: the longest wait, in each call, for a free place or an unreachable
        server, in seconds. largest: size limit of a message, in bytes.
        """
        super().__init__(Declared.of(environment))
        self._line = Line(url, key_variable=key_variable, seconds=seconds, patience=patience, largest=largest)
        self.url = self._line.url
        self._session = ""
        self._accepts = 0
        """Size limit of the server for a message, in bytes; 0 before the greeting."""
        self._sent = 0
        """Number of the last call that was sent."""
        self._over: str | None = None
        """Why the episode accepts no more calls; None while it does."""

    async def close(self) -> None:
        """Release the environment on the server. A lost session is no error here: an earlier call has reported it."""
        if self._line.channel is None:
            return
        over, self._over = self._over, self._over or "it is closed"
        try:
            async with asyncio.timeout(_CLOSING if over is None else _CLOSING_AFTER_FAILURE):
                await self._close_there(self._line.channel)
        except (SessionLost, Unreachable, TimeoutError):
            return  # the server closes a session that no client resumes
        except RemoteError:
            if over is None:
                raise
        finally:
            await self._line.hang_up()

    async def _close_there(self, channel: Channel) -> None:
        call = CloseCall(id=self._sent + 1)
        await channel.send(call.encoded())
        answer = read_answer(await channel.receive())
        while 0 < answer.id < call.id:  # the answer to an earlier call that was cancelled
            answer = read_answer(await channel.receive())
        if isinstance(answer, Fault):
            raise self._error(answer)

    async def _ask(self, call: Call) -> Answer:
        if self._over is not None:
            raise SessionLost(f"{self.url}: {self._over}")
        text = call.encoded()
        most = self._line.seconds + self._line.patience
        whole = asyncio.timeout(most)
        try:
            async with whole:
                return await self._until_answered(call, text)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._over = "a call was cancelled, so the state of the environment is unknown"
            if isinstance(error, TimeoutError) and whole.expired():
                raise Hung(
                    f"{self.url}: `{call.t}` had no answer within {most:g} s, including reconnections"
                ) from error
            raise
        except RemoteError as error:
            self._over = f"it failed before: {error}"
            await self._line.hang_up(goodbye=False)
            raise

    async def _until_answered(self, call: Call, text: str) -> Answer:
        until = asyncio.get_running_loop().time() + self._line.patience
        while True:
            try:
                if self._line.channel is None:
                    self._line.channel = await self._line.patiently(self._open, until)
                channel = self._line.channel
                if len(text) * 4 > self._accepts and len(text.encode()) > self._accepts:
                    raise BadAnswer(
                        f"{self.url}: this `{call.t}` has {len(text.encode())} bytes, and the server accepts "
                        f"{self._accepts}; increase its limit message_bytes"
                    )
                self._sent = call.id
                await channel.send(text)
                return self._read(call, await self._line.answer(channel, call.t))
            except Dropped as error:
                await self._line.hang_up(goodbye=False)
                if asyncio.get_running_loop().time() > until:
                    raise Unreachable(f"{self.url}: the connection broke repeatedly: {error}") from error

    async def _open(self) -> Channel:
        headers = {SESSION: self._session} if self._session else {}
        channel = await self._line.open(ROUTE, headers, (PROTOCOL,))
        try:
            async with asyncio.timeout(_CLOSING):
                self._greeted(read_welcome(await channel.receive()))
        except BaseException as error:
            await channel.close()
            if isinstance(error, TimeoutError):
                raise Unreachable(f"{self.url}: connected, but no greeting within {_CLOSING:g} s") from error
            raise
        return channel

    def _greeted(self, welcome: Welcome) -> None:
        if welcome.protocol != PROTOCOL:
            raise BadAnswer(f"{self.url}: the server uses the protocol {welcome.protocol[:40]!r}, not {PROTOCOL!r}")
        self._declared.agree(welcome.name, welcome.kinds, welcome.effect)
        if self._session and (not welcome.resumed or welcome.session != self._session):
            raise BadAnswer(f"{self.url}: the server began a new episode instead of resuming the current one")
        if not 16 <= len(welcome.session) <= 128 or not welcome.session.isalnum():
            raise BadAnswer(f"{self.url}: {welcome.session[:40]!r} is not a valid session id")
        self._session, self._accepts = welcome.session, welcome.message_bytes

    def _location(self) -> str:
        return self.url
