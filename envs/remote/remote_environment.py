"""The client for an environment on a server.

After a dropped connection, the client reconnects and repeats the call with the same number, so no action is carried out
twice. If the server is full, the client waits at least as long as the server asks, then retries. Every wait is bounded.
An answer must belong to the call and be of a declared kind. Otherwise the episode ends as an error of the environment.
"""

from __future__ import annotations

import asyncio
import os
import random

from ...tapes.common.access_token import token_for
from ..environment import EnvironmentFactory
from .channel import Channel, Dropped, Full
from .declared import Declared
from .env_protocol import (
    PROTOCOL,
    ROUTE,
    SESSION,
    Answer,
    Call,
    CloseCall,
    Fault,
    check_length,
    read_answer,
    read_welcome,
)
from .proxy import Proxy
from .remote_errors import BadAnswer, Busy, Hung, Refused, RemoteError, SessionLost, Unreachable

_CLOSING, _CLOSING_AFTER_FAILURE = 10.0, 1.0
"""Time limits for closing the remote environment, in seconds: normally, and after a call without an answer."""
_FIRST, _LONGEST = 0.05, 5.0
"""Seconds between attempts: the first pause, and the longest pause."""


class RemoteEnvironment(Proxy):
    """One episode in the environment of a server: `RemoteEnvironment("http://host:port", GuessNumber)`."""

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
        """`environment` declares the expected kinds of steps. It is the environment's class or a `Declared`.

        `key_variable` names the environment variable that holds the server's token. `seconds` is the time limit for an
        answer after the server has received the call. `patience` is how long a call may wait for a full or unreachable
        server, in seconds. `largest` is the size limit for a message, in bytes. Raises ValueError if the address is
        invalid or contains a secret.
        """
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"server address {url[:60]!r}: must begin with http://, https://, ws:// or wss://")
        if "@" in url or "?" in url:
            raise ValueError(
                "a server address is written on tapes, so it can't hold a password or a query; pass the name of the "
                "environment variable with the token as key_variable="
            )
        self.url = url.rstrip("/")
        super().__init__(Declared.of(environment), location=self.url, call_seconds=seconds + patience)
        self._seconds, self._patience, self._largest = seconds, patience, largest
        self._key_variable = key_variable
        self._channel: Channel | None = None
        self._session = ""
        self._accepts = 0
        """The server's size limit for a message, in bytes. It is 0 before the greeting."""

    async def close(self) -> None:
        """Release the environment on the server. A lost session isn't an error here: an earlier call reported it."""
        over, self._over = self._over, self._over or "it is closed"
        if self._channel is None:
            return
        try:
            async with asyncio.timeout(_CLOSING if over is None else _CLOSING_AFTER_FAILURE):
                await self._close_there(self._channel)
        except (SessionLost, Unreachable, TimeoutError):
            return  # the server closes a session that no client resumes
        except RemoteError:
            if over is None:
                raise
        finally:
            await self._hang_up()

    async def _close_there(self, channel: Channel) -> None:
        call = CloseCall(id=self._number + 1)
        await channel.send(call.encoded())
        answer = read_answer(await channel.receive())
        while 0 < answer.id < call.id:  # the answer to an earlier call that was cancelled
            answer = read_answer(await channel.receive())
        if isinstance(answer, Fault):
            raise self._error(answer)

    async def _exchange(self, call: Call, text: str) -> Answer:
        """Send the call and return its answer. While the server is full or unreachable, retry for `patience` seconds.

        Raises Busy or Unreachable when this time is over.
        """
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._patience, _FIRST
        while True:
            try:
                if self._channel is None:
                    self._channel = await self._connected()
                return await self._exchange_once(self._channel, call, text)
            except (Full, Unreachable) as error:
                await self._hang_up(goodbye=False)
                after = error.after if isinstance(error, Full) else None
                # The wait never ends before the server's Retry-After. The random factor spreads out the retries of many
                # clients. Without it, all episodes that found the server full would try again at the same moment.
                wait = max(pause, after or 0.0) * (1 + random.random())
                if isinstance(error, Dropped) and pause == _FIRST:
                    wait = 0.0  # the server has accepted this client before
                if loop.time() + wait > until:
                    kind = Busy if isinstance(error, Full) else Unreachable
                    raise kind(f"{error}; stopped trying after {self._patience:g} s") from error
                await asyncio.sleep(wait)
                pause = min(2 * pause, _LONGEST)

    async def _exchange_once(self, channel: Channel, call: Call, text: str) -> Answer:
        """Send the call over this channel and return its answer. Raises Dropped if the connection breaks."""
        check_length(call, text, self._accepts, f"increase the limit message_bytes of {self.url}")
        self._number = call.id
        await channel.send(text)
        return self._read(call, await self._received(channel, call))

    async def _received(self, channel: Channel, call: Call) -> str:
        """Return the next message from the channel. Raises Hung after `seconds`."""
        timer = asyncio.timeout(self._seconds)
        try:
            async with timer:
                return await channel.receive()
        except TimeoutError as error:
            if not timer.expired():
                raise
            raise Hung(f"{self.url}: no answer to `{call.t}` within {self._seconds:g} s") from error

    async def _connected(self) -> Channel:
        channel = await self._opened(ROUTE, {SESSION: self._session} if self._session else {}, (PROTOCOL,))
        try:
            async with asyncio.timeout(_CLOSING):
                self._greeted(await channel.receive())
        except BaseException as error:
            await channel.close()
            if isinstance(error, TimeoutError):
                raise Unreachable(f"{self.url}: connected, but no greeting within {_CLOSING:g} s") from error
            raise
        return channel

    async def _opened(self, route: str, headers: dict[str, str], protocols: tuple[str, ...] = ()) -> Channel:
        """Return a channel to the route. Raises Refused if the variable with the server's token is not set."""
        variable = self._key_variable
        token = token_for(self.url) if variable is None else os.environ.get(variable)
        if variable is not None and not token:
            raise Refused(f"{self.url}: the environment variable {variable} (the server's token) is not set")
        sent = {**headers, "Authorization": f"Bearer {token}"} if token else headers
        try:
            return await Channel.open(self.url + route, headers=sent, largest=self._largest, protocols=protocols)
        except Refused as error:
            if variable is None and token_for(self.url) != token:
                # The server was restarted after the token was read, so another attempt can succeed.
                raise Unreachable(str(error)) from error
            raise

    def _greeted(self, text: str) -> None:
        welcome = read_welcome(text)
        if welcome.protocol != PROTOCOL:
            raise BadAnswer(f"{self.url}: the server uses the protocol {welcome.protocol[:40]!r}, not {PROTOCOL!r}")
        self._declared.agree(welcome.name, welcome.kinds, welcome.effect)
        if self._session and (not welcome.resumed or welcome.session != self._session):
            raise BadAnswer(f"{self.url}: the server began a new episode instead of resuming the current one")
        if not 16 <= len(welcome.session) <= 128 or not welcome.session.isalnum():
            raise BadAnswer(f"{self.url}: {welcome.session[:40]!r} is not a valid session id")
        self._session, self._accepts = welcome.session, welcome.message_bytes

    async def _hang_up(self, *, goodbye: bool = True) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(goodbye=goodbye)

    async def _abandon(self, cut: bool) -> None:
        if not cut:  # otherwise `close` cancels the call on the server
            await self._hang_up(goodbye=False)
