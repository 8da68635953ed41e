"""A gateway in which clients begin, score and end tapes over HTTP. Each tape is an ordinary rollout in the gateway.

    POST /tapereel/tapes                  {"task": ..., "group", "attempt", "agent", "seed", "split", "budget": {...}}
    GET  /tapereel/tapes/TAPE             the state of the tape, or how it ended
    POST /tapereel/tapes/TAPE/rewards     {"rewards": {"name": 1.0}, "metrics": {...}}
    POST /tapereel/tapes/TAPE/end         {"status": finished | truncated | error | cancelled, "message", "answer"}
    POST /tapereel/pause, /tapereel/resume   before and after a weight sync

All these routes need the admin token. A tape ends by itself after `idle` seconds without a request. `gateway_server`
answers the requests to the model. `serve_gateway` records into a run directory.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, ValidationError

from ...envs import Environment, Outcome
from ...tapes import Answer, CauseType, Sampling, Status, Step, StoreFailed, Tape, Task, Text
from ...tapes.common.http_service import BODY, Handler, web
from ...tapes.common.stats import REWARD_LIMIT
from ...tapes.common.text import logger
from ...tapes.errors import TapereelError, remedy
from ...tapes.journal import Journal
from ...tapes.store.run_directory import open_run
from ...tapes.tape import new_tape_id
from ..engines.engine import Engine, EngineStopped
from ..episode.agent import Agent
from ..episode.limits import LimitReached, Limits
from ..episode.llm import LLM
from ..episode.rollout import rollout
from ..episode.spec import EpisodeSpec
from ..setup.engine_config import make_engine, warn_of_faults
from ..setup.team_config import EpisodesConfig
from .dialect import Refused, invalid
from .gateway_server import Bounds, Gateway, json_response
from .gateway_session import Session

log = logger("gateway")

REMEMBERED = 10_000
"""The final states of at most this many ended tapes are kept for queries. The oldest are dropped first."""
_Route = Callable[[web.Request], Awaitable[object]]
BodyT = TypeVar("BodyT", bound=BaseModel)
Ending = Literal["finished", "truncated", "error", "cancelled"]


class ClientFailed(TapereelError, RuntimeError):
    """The client ended the tape with status `error`."""


class Budget(BaseModel):
    """Limits of one tape. None means the gateway's limit. Reaching a limit ends the tape, with the limit as the
    cause."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    calls: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    """Maximum number of tokens sampled in all calls."""
    context: int | None = Field(default=None, ge=2)
    agent_seconds: float | None = Field(default=None, gt=0)
    """Maximum seconds for the client itself and for its calls while the model computes, as in `Limits`."""
    system_seconds: float | None = Field(default=None, gt=0)
    """Maximum seconds for everything else, as in `Limits`."""
    idle: float | None = Field(default=None, gt=0)
    """The tape ends after this many seconds without a request."""


class BeginTape(BaseModel):
    """The body of a request that begins a tape."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    task: JsonValue = None
    """The agent's task as any JSON value, or {"public", "private", "id"}. `public` is the tape's first observation."""
    group: str | None = Field(default=None, max_length=200)
    attempt: int = Field(default=0, ge=0)
    agent: str = Field(default="agent", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    seed: int = Field(default=0, ge=0, lt=2**63)
    split: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")
    budget: Budget = Budget()


class ScoreTape(BaseModel):
    """The body of a request that scores a tape. If a name already has a value, the new value replaces it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    rewards: dict[str, Annotated[FiniteFloat, Field(ge=-REWARD_LIMIT, le=REWARD_LIMIT)]] = {}
    metrics: dict[str, FiniteFloat] = {}


class EndTape(BaseModel):
    """The body of a request that ends a tape."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    status: Ending = "finished"
    message: str = Field(default="", max_length=2000)
    """The error message if the status is `error`."""
    answer: str | None = None
    """The agent's final answer. By default it is the model's last answer."""


@dataclass(slots=True)
class _Open:
    """One open tape, from the request that begins it until its rollout has ended."""

    id: str
    ready: asyncio.Future[str]
    """Set to the tape's API key when the agent starts to act."""
    end: asyncio.Future[EndTape]
    """Set by the request that ends the tape. It stays pending if a limit, a failure or a cancellation ends the tape."""
    scores: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    task: asyncio.Task[Tape] | None = None
    llm: LLM | None = None


class Client(Agent):
    """The agent for an external program. A single `act` covers all of the program's requests to the model."""

    def __init__(
        self, name: str, open_: _Open, gateway: Gateway, session: Callable[[Tape, LLM], Session], *, idle: float
    ) -> None:
        self.name, self._open, self._gateway, self._session, self._idle = name, open_, gateway, session, idle

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Step]:
        session, end = self._session(tape, llm), self._open.end
        key = self._gateway.open(session)
        self._open.llm = llm
        self._open.ready.set_result(key)
        # `over` only ends the loop below. The client, the idle watch and a failure may call it in any order, because
        # `_ending` finds the reason for the end afterwards.
        end.add_done_callback(lambda _: session.over())
        watch = asyncio.ensure_future(_idle(session, self._idle))
        said = ""
        try:
            async for exchange in session.exchanges():
                said = exchange.answered
                yield exchange
            yield Answer(text=_ending(session, end, self._idle, said))
        finally:
            # The key is revoked first, because a request that arrives while the session closes must not start a call.
            self._gateway.shut(key)
            watch.cancel()
            await session.close()


def _ending(session: Session, end: asyncio.Future[EndTape], idle: float, said: str) -> str:
    """Return the final answer of the tape, or raise the reason why the tape ends without one."""
    # A failure takes precedence over a limit, and a limit over the end that the client asked for. If the client ended
    # the tape because its request was refused, the tape must state why the request was refused.
    if session.broken is not None:
        raise session.broken
    if session.limited is not None:
        raise session.limited
    if not end.done():
        raise LimitReached(CauseType.SECONDS, f"no request for {idle:g} s")
    asked = end.result()
    if asked.status == "error":
        raise ClientFailed(asked.message or "no message was given")
    return said if asked.answer is None else asked.answer


async def _idle(session: Session, seconds: float) -> None:
    """End the session after `seconds` without a request. Requests in flight and held requests count as activity."""
    while True:
        left = session.heard_at + seconds - time.monotonic()
        if left <= 0 and not session.busy:
            return session.over()
        await asyncio.sleep(left if left > 0 else seconds)


class Elsewhere(Environment[Answer]):
    """Represents the environment, which runs on the client's side. The client reports the rewards, metrics and
    truncation."""

    def __init__(self, open_: _Open) -> None:
        self._open = open_

    async def reset(self, task: Task) -> Text:
        return Text(text=task.public if isinstance(task.public, str) else json.dumps(task.public))

    async def step(self, action: Answer) -> Outcome:
        truncated = self._open.end.done() and self._open.end.result().status == "truncated"
        return Outcome(terminated=not truncated, truncated=truncated)

    async def finish(self, status: Status) -> Outcome:
        return Outcome(reward=dict(self._open.scores) or None, metrics=dict(self._open.metrics))


class Control(Gateway):
    """A gateway with the control routes. Leaving `serving` cancels the open tapes."""

    def __init__(
        self,
        token: str | None,
        engine: Engine,
        *,
        journal: Journal | None,
        limits: Limits | None = None,
        sampling: Sampling | None = None,
        idle: float = 300.0,
        split: str = "train",
        follow: bool = True,
        embeddings: str | None = None,
        most: int = 4096,
        host: str = "127.0.0.1",
        bounds: Bounds | None = None,
    ) -> None:
        """`token` is the admin token. Raises UsageError if it has under 16 characters. If it is None, one is generated.

        A tape ends after `idle` seconds without a request. At most `most` tapes may be open. `follow` and
        `embeddings` are described at `GatewayConfig`.
        """
        super().__init__(host, token=token, bounds=bounds or Bounds())
        self._engine, self._journal = engine, journal
        self._limits, self._sampling = limits or Limits(), sampling or Sampling()
        self._idle, self._split, self._most = idle, split, most
        self._make_session = partial(Session, follow=follow, embeddings=embeddings)
        self._open: dict[str, _Open] = {}
        self._done: OrderedDict[str, dict[str, JsonValue]] = OrderedDict()
        self._closed = False
        self.stopped: asyncio.Future[EngineStopped] = asyncio.get_running_loop().create_future()
        """Set to the engine's error when the engine can't answer any more tapes."""

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of OpenAI's protocol and the control routes."""
        tape = "/tapereel/tapes/{tape:[0-9a-f]{8,64}}"
        return [
            *super().routes(),
            web.get(tape, self._route(self._state)),
            web.post("/tapereel/tapes", self._route(self._begin)),
            web.post(f"{tape}/rewards", self._route(self._score)),
            web.post(f"{tape}/end", self._route(self._end)),
            web.post("/tapereel/pause", self._route(self._pause)),
            web.post("/tapereel/resume", self._route(self._resume)),
        ]

    def _route(self, route: _Route) -> Handler:
        async def handler(request: web.Request) -> web.StreamResponse:
            if not self.has_admin_token(request):
                raise Refused(401, "the admin token is needed here")
            return json_response(await route(request))

        return handler

    def _body(self, request: web.Request, model: type[BodyT]) -> BodyT:
        try:
            body = model.model_validate(request[BODY])
        except ValidationError as error:
            raise invalid(error) from None
        self.without_keys(body.model_dump())
        return body

    async def _pause(self, request: web.Request) -> object:
        self.pause()
        return {"paused": True}

    async def _resume(self, request: web.Request) -> object:
        return {"paused": self.resume()}

    async def _begin(self, request: web.Request) -> object:
        """Begin a tape. Returns its id, its API key and the base URL for requests to the model.

        Raises Refused if the gateway is ending or too many tapes are open. Raises StoreFailed if the tape can't be
        written.
        """
        asked = self._body(request, BeginTape)
        if self._closed:
            raise Refused(503, "the gateway is ending", code="shutting_down")
        if len(self._open) >= self._most:
            raise Refused(429, f"{self._most} tapes are open, which is the most; end some", code="too_many_tapes")
        loop = asyncio.get_running_loop()
        new = _Open(new_tape_id(), loop.create_future(), loop.create_future())
        budget = asked.budget.model_dump(exclude_none=True, exclude={"idle"})
        client = Client(asked.agent, new, self, self._make_session, idle=asked.budget.idle or self._idle)
        spec = EpisodeSpec(
            task=_task(asked.task),
            split=asked.split or self._split,
            seed=asked.seed,
            group=asked.group,
            attempt=asked.attempt,
            limits=self._limits.model_copy(update=budget),
            sampling=self._sampling,
            tape_id=new.id,
        )
        play = rollout(client, Elsewhere(new), spec, engine=self._engine, journal=self._journal)
        new.task = loop.create_task(play)
        # No `await` comes between the check of `most` and this line, so concurrent requests can't exceed the maximum.
        self._open[new.id] = new
        new.task.add_done_callback(lambda task: self._over(new, task))
        await asyncio.wait((new.ready, new.task), return_when=asyncio.FIRST_COMPLETED)
        if not new.ready.done():
            new.task.result()  # raises StoreFailed; no other failure ends an episode before the agent acts
            raise Refused(500, f"tape {new.id} ended before it began to ask")
        return {"tape": new.id, "key": new.ready.result(), "base_url": self.url_for(request)}

    def _over(self, open_: _Open, task: asyncio.Task[Tape]) -> None:
        del self._open[open_.id]
        status: str = "cancelled"
        cause: JsonValue = None
        reward: float | None = None
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, EngineStopped):
            status, cause = "error", {"type": "model", "message": str(failure)}
            if not self.stopped.done():
                self.stopped.set_result(failure)
        elif failure is not None:
            log.error("tape %s was not closed: %s: %s", open_.id, type(failure).__name__, failure)
            status = "failed"
        elif not task.cancelled():
            tape = task.result()
            status, reward = str(tape.status), tape.reward
            cause = tape.cause.model_dump() if tape.cause is not None else None
        self._done[open_.id] = {**_use_of(open_), "status": status, "cause": cause, "reward": reward}
        if len(self._done) > REMEMBERED:
            self._done.popitem(last=False)

    async def _score(self, request: web.Request) -> object:
        asked = self._body(request, ScoreTape)
        open_ = self._the(request.match_info["tape"])
        open_.scores.update(asked.rewards)
        open_.metrics.update(asked.metrics)
        return {"tape": open_.id, "rewards": open_.scores, "metrics": open_.metrics}

    async def _end(self, request: web.Request) -> object:
        """End a tape. Returns how it ended, after its last record is written. Raises Refused or StoreFailed."""
        asked = self._body(request, EndTape)
        open_ = self._the(request.match_info["tape"])
        assert open_.task is not None
        if open_.end.done():
            raise Refused(409, f"tape {open_.id} is being ended already", code="tape_ended")
        if asked.status == "cancelled":
            open_.task.cancel()
        else:
            open_.end.set_result(asked)
        # If the client disconnects now, `wait` alone is cancelled. `await open_.task` would cancel the tape's rollout
        # too.
        await asyncio.wait([open_.task])
        if not open_.task.cancelled() and isinstance(error := open_.task.exception(), StoreFailed):
            raise error
        return self._done[open_.id]

    async def _state(self, request: web.Request) -> object:
        """Return the state of an open tape, or how an ended tape ended. Raises Refused for an unknown tape."""
        tape = request.match_info["tape"]
        if tape in self._done:
            return self._done[tape]
        return {**_use_of(self._the(tape)), "status": "running", "cause": None, "reward": None}

    def _the(self, tape: str) -> _Open:
        if tape in self._open:
            return self._open[tape]
        if tape in self._done:
            raise Refused(
                409, f"tape {tape} has ended; score it later with {remedy('rescore', '`rescore`')}", code="tape_ended"
            )
        raise Refused(404, f"there is no open tape {tape}")

    async def stop(self) -> None:
        """End all open tapes as cancelled, and refuse new ones. Returns after all their rollouts have ended."""
        self._closed = True
        tasks = [open_.task for open_ in self._open.values() if open_.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _use_of(open_: _Open) -> dict[str, JsonValue]:
    llm = open_.llm
    return {
        "tape": open_.id,
        "calls": llm.asked if llm is not None else 0,
        "sampled_tokens": llm.sampled if llm is not None else 0,
    }


def _task(value: JsonValue) -> Task:
    if isinstance(value, dict) and value and set(value) <= {"public", "private", "id"}:
        try:
            return Task.model_validate(value)
        except ValidationError as error:
            raise invalid(error) from None
    return Task(public=value)


class GatewayConfig(EpisodesConfig):
    """The engine that is served, and the defaults of each tape.

    `sampling` has the defaults for requests. Its `max_tokens` is also the maximum that a request may ask for.
    """

    split: str = "train"
    """Split of a tape if its client doesn't set one."""
    limits: Limits = Limits(agent_seconds=3600.0, system_seconds=3600.0)
    """Limits of a tape if its client doesn't set any."""
    follow: bool = True
    """Whether temperature, `top_p`, `top_k`, `min_p` and penalties of a request are followed. If False, `sampling` sets
    them, so that a client that asks for temperature 0 still gives data for RL."""
    embeddings: str | None = Field(default=None, pattern="^https?://")
    """Address of the server to which requests for embeddings are passed on. It gets the API key in the environment
    variable `OPENAI_API_KEY`, if that is set. Without an address, such requests are refused."""
    idle_seconds: float = Field(default=300.0, gt=0)
    """A tape is ended after this many seconds without a request."""
    hold_seconds: float = Field(default=60.0, ge=0)
    """Maximum seconds that a request waits for a weight sync. After that it is refused with 429."""
    max_body: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Maximum bytes of one request body."""


@asynccontextmanager
async def serve_gateway(
    config: GatewayConfig,
    out: str | Path,
    *,
    token: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    resume: bool = False,
) -> AsyncIterator[Control]:
    """Serve a gateway inside the `async with` block, and record into the run directory `out`.

    `token` is the admin token of the control routes. By default one is generated. If `port` is 0, a free port is used.
    Leaving the block ends open tapes as cancelled, then seals the store and closes the engine. Raises UsageError if
    `out` holds a run and `resume` is false, or if `token` is too short.
    """
    made = await make_engine(config.engine)
    warn_of_faults(made.engine.renderer, config.sampling)
    try:
        with open_run(Path(out), config, resume=resume) as directory:
            store = directory.store
            if made.publish is not None:
                store.record_weights(made.publish)
            gateway = Control(
                token,
                made.engine,
                journal=store.writer,
                limits=config.limits,
                sampling=config.sampling,
                idle=config.idle_seconds,
                split=config.split,
                follow=config.follow,
                embeddings=config.embeddings,
                host=host,
                bounds=Bounds(body=config.max_body, hold_seconds=config.hold_seconds),
            )
            # Open tapes end before the store is sealed. A sealed store takes no records, so a tape that ends later
            # would lose its last records.
            async with gateway.serving(port):
                yield gateway
    finally:
        await made.engine.close()
