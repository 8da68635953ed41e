"""The servers of one engine and the weights that they have.

Contract. Only servers with the newest weights sample. A server that fails in a weight sync, or doesn't answer when one
begins, is left out, and the others go on. About every ten seconds it is tried again, and after it got the newest
weights it samples again. In the same way, servers join and leave if `engine.urls` is a file. If a sync fails on all
servers that are left, it raises an error, and the engine refuses all later requests.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ....tapes.common.text import logger
from ....tapes.errors import TapereelError
from ..engine import EngineError, EngineStopped, PublishMode, error_text
from ..transport.absence import Absence, Tries, stop_reason
from ..transport.http_channel import Server, ServerFailed
from ..weights.sleeping import Sleeper
from ..weights.weight_files import check_weights, write_weights
from ..weights.weight_sync import PublishFailed, WeightSync, sync_servers, weight_version
from ..weights.weight_transfer import SHARED_MEMORY
from .health import RemoteStats, Wellness
from .server_config import AddressesFile, Broadcast, ServerSettings, Transfer, read_addresses

if TYPE_CHECKING:
    from torch import Tensor

HEALTH_SECONDS = 5.0
"""Time limit, in seconds, for finding out whether a server answers at all."""
LOOK_AGAIN = 10.0
"""Seconds between two looks at the servers that are left out and at the file of addresses."""
KEPT = 2
"""Number of weights folders that are kept, one for each of the newest published versions."""

log = logger("engine")


class ForeignWeights(EngineError):
    """A server sampled with the wrong weights. Either they are older than the weights that were current when the
    request was sent, or this engine never published them. A restarted server has wrong weights until it gets the run's
    weights again."""


@dataclass(slots=True, eq=False)
class Member:
    """One server of a fleet."""

    server: Server
    sync: WeightSync
    ready: bool = True
    """Whether the server has the newest weights. If not, nothing is sampled there."""
    synced: float = 0.0
    """`time.monotonic()` when the newest weights had last been sent to this server alone, or infinity while they are
    being sent. Requests that were sent to it earlier are asked again. It was restarted, and ends them, perhaps without
    a token."""


Enrol = Callable[[str], Awaitable[Member]]
"""Connects to the server at an address. Raises EngineError if it can't take part."""
SendWeights = Callable[[Member], Awaitable[bool]]
"""Sends the newest weights to one member. Returns False if there are none yet. Raises EngineError or PublishFailed."""


class Fleet:
    """The servers of one engine."""

    def __init__(
        self,
        members: Sequence[Member],
        config: ServerSettings,
        *,
        version: str,
        stats: RemoteStats,
        send: SendWeights | None = None,
    ) -> None:
        """`version` names the weights that the members have now. `send` is None if this engine never replaces them."""
        self.members = list(members)
        self.version = version
        self.versions = {version: 0}
        """The number of each version, in order of publication. The version at connection has number 0."""
        self.absence = Absence(config.patience)
        self.sleeper = Sleeper(lambda: [member.sync for member in self.ready])
        self.publishing = asyncio.Lock()
        self.moment = 0
        """Increases when a weight sync begins and when it ends, so it is odd while a sync is in progress."""
        self.mixed = 0
        """The value of `moment` when the last weight sync in a mode other than `drain` began. Completions that were in
        flight at that time may have tokens from two versions."""
        self.broken: Exception | None = None
        """The error of a failed weight sync, or None. It is never cleared, because the weights stay unknown to this
        engine."""
        self.written: list[Path] = []
        """Folders with published weights, the oldest first."""
        self._send = send
        self._config = config
        self._stats = stats
        self._wellness = Wellness()
        self._left: list[Server] = []
        """Servers that the file of addresses no longer names. Their requests in flight may end."""
        self._watching: asyncio.Task[None] | None = None
        self._warned: dict[str, str] = {}
        """For each address that can't take part, the reason that was logged last."""
        self._temporary: Path | None = None
        if config.weights_folder is None:
            local = isinstance(config.weights, Transfer | Broadcast) and SHARED_MEMORY.is_dir()
            within = SHARED_MEMORY if local else None
            self._temporary = Path(tempfile.mkdtemp(prefix="tapereel-weights-", dir=within))

    @property
    def ready(self) -> list[Member]:
        """The members that sample. There is always one."""
        return [member for member in self.members if member.ready]

    def of(self, server: Server) -> Member | None:
        """Return the server's member, or None if the file of addresses no longer names it."""
        return next((member for member in self.members if member.server is server), None)

    def samples(self, server: Server) -> bool:
        """Return whether new requests may go to this server."""
        return any(member.server is server for member in self.ready)

    def best(self) -> Server:
        """Return the server for a new conversation."""
        return self._wellness.best([member.server for member in self.ready])

    def lost(self, server: Server) -> None:
        """Let new conversations avoid this server for a while, because a request to it failed."""
        self._wellness.lost(server)

    def reached(self, server: Server) -> None:
        """Stop avoiding this server, because it answered."""
        self._wellness.reached(server)

    def stop_if_broken(self, cause: Exception | None) -> None:
        """Raise EngineError if a weight sync has failed, because completions from that time have unknown weights."""
        if self.broken is not None:
            raise EngineError(f"a publish failed while this was sampled: {self.broken}") from cause

    def check_sender(self, server: Server, sent: float) -> None:
        """Raise ForeignWeights if an answer can't be used because the server was left out after `sent`, the request's
        `time.monotonic()`, or got the newest weights again only then."""
        member = self.of(server)
        if member is not None and not (member.ready and member.synced < sent):
            raise ForeignWeights(f"{server} lost the run's weights while it sampled", retry=True)

    # -- servers that are away --------------------------------------------------------------------------------------

    async def wait_until_healthy(self) -> None:
        """Wait until a member answers on `/health`, and leave out those that don't. A weight sync needs this, since its
        steps aren't repeated."""
        async with self.stopping():
            with self.absence.request() as tries:
                while True:
                    members = self.ready
                    answers = await asyncio.gather(*(one.server.healthy(HEALTH_SECONDS) for one in members))
                    if any(answers):
                        break
                    problem = f"{members[0].server} does not answer, and new weights are to be sent there"
                    error = ServerFailed(f"{problem}: restart it and resume the run", retry=True)
                    await self.wait(members[0].server, error, tries)
        for member, healthy in zip(members, answers, strict=True):
            if not healthy:
                await self.leave_out(member, "it doesn't answer")

    @asynccontextmanager
    async def stopping(self) -> AsyncIterator[None]:
        """Raise EngineStopped if a control step fails because a server is away. Other errors aren't changed."""
        try:
            yield
        except (PublishFailed, ServerFailed) as error:
            for member in self.ready:
                if member.server.ended() is not None or not await member.server.healthy(HEALTH_SECONDS):
                    raise EngineStopped(str(error), "away") from error
            raise

    async def wait(self, server: Server, error: ServerFailed, tries: Tries) -> None:
        """Wait before the next attempt if a request failed because `server` is away. Raises `error` if the server isn't
        away, and EngineStopped like `Tries.failed`."""
        if not await is_away(server, error, min(HEALTH_SECONDS, self._config.seconds)):
            tries.answered()
            raise error
        self._stats.refused += error.busy
        if error.busy and self.moment % 2:
            tries.answered()  # this engine's weight sync paused it, and has its own time limits
        elif error.status != 429:
            self.lost(server)
        await tries.failed(error, after=None if error.after is None else min(error.after, 30.0))

    async def leave_out_if_away(self, server: Server, error: ServerFailed) -> None:
        """Leave out this server if it can't answer any request, rather than wait for it."""
        member = self.of(server)
        if member is not None and not error.busy and await is_away(server, error, HEALTH_SECONDS):
            await self.leave_out(member, error)

    async def leave_out(self, member: Member, why: object) -> None:
        """Let nothing be sampled by this member until it has the newest weights. Its requests in flight fail, and are
        sent to other members. Does nothing if no other member samples."""
        if member.ready and len(self.ready) > 1:
            member.ready = False
            left = f"{len(self.ready)} of {len(self.members)} servers sample"
            log.warning("%s is left out until it has the newest weights (%s): %s", member.server, left, why)
            await member.server.close()

    # -- weights ----------------------------------------------------------------------------------------------------

    def check_version(self, version: str) -> None:
        """Raise ValueError if the version was used before."""
        if version in self.versions:
            raise ValueError(f"version {version!r} was published before; a version names one set of weights for good")

    def folder_of(self, version: str) -> Path:
        """Return the folder for the weights of this version."""
        folder = self._temporary or Path(self._config.weights_folder or "")
        return folder / version.replace("/", "_").replace(":", "_")

    async def publish(self, state: Mapping[str, Tensor], version: str, mode: PublishMode) -> None:
        """Replace the weights of all members that sample (see `RemoteEngine.sync_weights`)."""
        check_weights(state, Path(self._config.model))
        await self.wait_until_healthy()
        async with self.publishing, self.stopping():
            folder = self.folder_of(version)
            await asyncio.to_thread(write_weights, state, folder, Path(self._config.model))
            # Before the first server changes, `moment` must be odd and the version must be known. Completions may
            # return with the new version while the sync is still in progress, and would otherwise be rejected as
            # foreign.
            self.versions[version] = len(self.versions)
            steps: dict[str, float] = {}
            self.moment += 1
            if mode != "drain":
                self.mixed = self.moment
            try:
                with self._stats.timed("publish"):
                    await self.sleeper.weights()
                    members = self.ready
                    failed = await sync_servers([one.sync for one in members], folder, version, mode, steps)
                    for member in members:
                        if member.sync in failed:
                            await self.leave_out(member, failed[member.sync])
            except BaseException as error:
                # A cancelled sync has failed too, because only some servers may have the new weights. `moment` stays
                # odd.
                self.broken = error if isinstance(error, Exception) else RuntimeError(repr(error))
                raise
            finally:
                for name, seconds in steps.items():
                    self._stats.add(f"publish/{name}", seconds)
            # The members have resumed. Answers to requests sent from now on must have this version or a later one.
            self.version = version
            self.moment += 1
            self._stats.publishes += 1
            self.written.append(folder)
            while len(self.written) > KEPT:
                await asyncio.to_thread(shutil.rmtree, self.written.pop(0), True)

    async def send_again(self, member: Member) -> bool:
        """Send the published weights to this member alone (see `SendWeights`)."""
        if not self.written:
            return False
        await member.sync.init()
        await sync_servers([member.sync], self.written[-1], self.version, "abort")
        return True

    async def restore(self, server: Server, error: ForeignWeights, sent: float) -> None:
        """Send the newest weights to a restarted server, because it has lost all weights that were sent to it. A
        request that was sent at `sent` (`time.monotonic()`) has shown this.

        Raises EngineStopped if this engine has published no weights, because the server then has a different model."""
        if len(self.versions) == 1:
            raise EngineStopped(str(error), "model") from error
        async with self.publishing, self.stopping():
            member = self.of(server)
            if member is None or not member.ready or sent < member.synced:
                return  # restored by another request, or left out
            if await weight_version(server) == self.version:
                return  # restored by a weight sync
            log.warning("%s has other weights than the run, and gets the weights of %s again", server, self.version)
            self.moment += 1
            try:
                await self.send_newest(member)
            except BaseException as failed:
                if len(self.ready) == 1 or not isinstance(failed, Exception):
                    self.broken = failed if isinstance(failed, Exception) else RuntimeError(repr(failed))
                    raise
                await self.leave_out(member, failed)
            self.moment += 1

    async def send_newest(self, member: Member) -> bool:
        """Send the newest weights to this member alone. Returns False if there are none yet. Raises EngineError,
        PublishFailed or ServerFailed.

        If this engine never replaces weights, the member must have the right ones already."""
        member.synced = math.inf
        if self._send is None:
            found = await weight_version(member.server)
            if found is not None and found != self.version:
                raise EngineError(f"it has the weights {found!r}, and the run samples with {self.version!r}")
        elif not await self._send(member):
            return False
        member.synced = time.monotonic()
        return True

    # -- members that join and leave --------------------------------------------------------------------------------

    def watch(self, enrol: Enrol, away: Iterable[str] = ()) -> None:
        """Begin to look at the servers that are left out, and at the file of addresses, every `LOOK_AGAIN` seconds.
        `away` are addresses in the file that didn't answer."""
        self._warned = dict.fromkeys(away, "it doesn't answer")
        for url in away:
            log.warning("%s is left out until it answers", url)
        self._watching = asyncio.create_task(self._watch(enrol))

    async def _watch(self, enrol: Enrol) -> None:
        while True:
            await asyncio.sleep(LOOK_AGAIN)
            if isinstance(self._config.urls, str):
                await self._enter(self._config.urls, self._read_again(self._config.urls, enrol))
            for member in [member for member in self.members if not member.ready]:
                await self._enter(member.server.url, self._rejoin(member, enrol))

    async def _read_again(self, urls: AddressesFile, enrol: Enrol) -> None:
        """Let the servers leave that the file no longer names, and let those join that it names now. If something is
        wrong with the file, no server leaves, because the wrong line may be meant for it."""
        lines, problem = read_addresses(urls)
        named = [Server(url).url for url in lines]
        if problem is None:
            self._warned.pop(urls, None)
        else:
            self._warn(urls, str(problem))
        known = {member.server.url: member for member in self.members}
        for url in known.keys() - set(named) if problem is None else ():
            # The last server that samples stays until another one has its weights.
            if not known[url].ready or len(self.ready) > 1:
                log.warning("%s has left: %s no longer names it", url, urls)
                self.members.remove(known[url])
                self._left.append(known[url].server)
        for url in dict.fromkeys(named):
            if url not in known:
                await self._enter(url, self._join(url, enrol))

    async def _join(self, url: str, enrol: Enrol) -> None:
        member = await enrol(url)
        member.ready = False
        self.members.append(member)
        await self._admit(member)

    async def _rejoin(self, member: Member, enrol: Enrol) -> None:
        if self.sleeper.state == "awake" and await member.server.healthy(HEALTH_SECONDS):
            again = await enrol(member.server.url)  # it may be another process now
            self.members[self.members.index(member)] = again
            again.ready = False
            await member.server.close()
            await self._admit(again)

    async def _admit(self, member: Member) -> None:
        async with self.publishing:
            if self.sleeper.state == "awake" and await self.send_newest(member):
                member.ready = True
                self._warned.pop(member.server.url, None)
                log.warning("%s has the weights of %s and samples from now on", member.server, self.version)

    async def _enter(self, url: str, entering: Awaitable[None]) -> None:
        """Log why the server at `url` can't take part, if it can't. Its answers may cause any error, and no server that
        isn't needed may end the run."""
        try:
            await entering
        except Exception as error:
            self._warn(url, str(error) if isinstance(error, TapereelError) else error_text(error))

    def _warn(self, subject: str, why: str) -> None:
        if self._warned.get(subject) != why:
            self._warned[subject] = why
            log.warning("%s can't take part yet: %s", subject, why)

    async def close(self) -> None:
        """Stop watching, close the connections and delete the temporary weights folder. Requests in flight fail."""
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError, Exception):  # its error has reached the requests through `broken`
                await self._watching
        for member in self.members:
            await member.sync.close()
        for server in [*(member.server for member in self.members), *self._left]:
            await server.close()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


async def is_away(server: Server, error: ServerFailed, seconds: float) -> bool:
    """Return whether the server that failed with `error` can't answer any request at the moment. `seconds` is the time
    limit for the health check. Raises EngineStopped if all later requests would fail too, for example because the API
    key is wrong."""
    reason = stop_reason(error.status, str(error))
    if reason is not None:
        raise EngineStopped(str(error), reason) from error
    ended = server.ended()
    if ended is not None:
        raise EngineStopped(ended, "away") from error
    return error.away if error.away is not None else not await server.healthy(seconds)
