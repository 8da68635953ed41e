"""The rollout runs one episode from `reset` to `end`.

Almost every error of the agent, the environment or the model only ends the episode. It is recorded on the tape and not
raised, because a failed episode is data too. Three errors of a running episode are raised. A failure of the store is
raised at once, because an episode that can't be recorded must stop. A cancellation by the caller is raised after the
tape is closed. `EngineStopped` is raised then too. It means that the engine can't answer any episode.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import platform
import random
import time
import traceback
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

from pydantic import JsonValue

from ...envs.blocking import EnvironmentThread
from ...envs.environment import (
    AnyEnvironment,
    Environment,
    EnvironmentFactory,
    NotAnEnvironment,
    Outcome,
    RestoreMismatch,
    as_observation,
    as_outcome,
    as_reaction,
    new_environment,
)
from ...envs.loop_watch import is_user_code
from ...envs.remote.declared import Declared
from ...envs.rewards import RewardFailed
from ...envs.rewards.sources import beside
from ...envs.supervised import Stopped, Supervised, TimedOut
from ...tapes import Action, Cause, CauseType, Observation, Sampling, Status, Step, StoreFailed, Tape, ToolCalls
from ...tapes.common.arguments import check_arguments
from ...tapes.common.redact import without_secrets
from ...tapes.common.shared_loop import settle
from ...tapes.common.text import logger, storable
from ...tapes.errors import BadArgument, TapereelError, error_message
from ...tapes.journal import Journal
from ...tapes.messages import CONVERSATION, ENV
from ...tapes.records import Begin, End, Identity, Parent, Reward
from ...tapes.status import trains
from ...tapes.tape import Ending, new_tape_id, step_record
from ..engines.engine import Engine, EngineStopped, absence_of
from .agent import Agent, configuration, qualified
from .chat import TooManyParseErrors
from .limits import LimitReached, Limits
from .llm import LLM, AgentFault, ModelFailed, RenderFailed
from .process_settings import rare_collections
from .recorder import Recorder, keep_pictures
from .spec import EpisodeSpec

log = logger("rollout")


NOT_FAULTS = (StoreFailed, asyncio.CancelledError, KeyboardInterrupt)
"""Exceptions that are never recorded as an error of the agent or the environment: a failure of the store, Ctrl-C and a
cancellation by the caller. Any other cancellation becomes an ordinary error in `Supervised`."""


@check_arguments
async def rollout(
    agent: Agent,
    env: AnyEnvironment | EnvironmentFactory,
    task: object,
    *,
    engine: Engine | None = None,
    seed: int | None = None,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    journal: Journal | None = None,
) -> Tape:
    """Run one episode of `agent` in `env` on `task`, and return its closed tape.

    `env` is an instance that no other episode uses, or a factory. `task` is an `EpisodeSpec`, a Task, or any other
    value, which becomes the private part of a new Task. `reset` gets this part, and the agent never sees it. `seed`,
    `sampling` and `limits` replace the values in the spec.
    If there is a `journal`, each record is written to it as soon as it is made. If the environment isn't `pure`, the
    record of an action is durable before the action is carried out. If the engine is waiting for its servers, the
    episode begins after that wait.
    Raises NotAnEnvironment and VersionMismatch before the episode begins. During the episode, raises StoreFailed,
    EngineStopped, CancelledError and KeyboardInterrupt. Every other error ends the episode and is recorded on the tape.
    """
    absence = absence_of(engine)
    if absence is not None:
        await absence.over()
    given = {"seed": seed, "sampling": sampling, "limits": limits}
    spec = EpisodeSpec.of(task, **{name: value for name, value in given.items() if value is not None})
    versions = _versions(engine)
    _check_versions(spec.versions, versions)
    factory, env = env, env if isinstance(env, Environment) else _new_environment(env)
    recorded = _recorded_limits(spec.limits, engine)
    begin = _begin(spec, agent.identity(), _identity(env, factory), recorded, versions)
    if begin.task.pictures:
        await asyncio.to_thread(keep_pictures, begin.task, journal)  # the recorder would block the event loop
    recorder = Recorder(begin, journal, spec.fork)
    episode = Episode(agent, env, recorder, engine=engine, limits=spec.limits, retries=spec.retries)
    with rare_collections.changed():
        return await episode.run()


def _begin(
    spec: EpisodeSpec, agent: Identity, env: Identity, limits: dict[str, JsonValue], versions: dict[str, str]
) -> Begin:
    task = spec.task.fresh()
    return Begin(
        tape=spec.tape_id or new_tape_id(),
        task=task,
        task_hash=task.hash,
        agent=agent,
        env=env,
        env_seed=spec.environment_seed,
        seed=spec.seed,
        group=spec.group,
        attempt=spec.attempt,
        split=spec.split,
        parent=None if spec.fork is None else parent_of(spec.fork, spec.unverified),
        versions=versions,
        sampling=spec.sampling,
        limits=limits,
        worker=spec.worker,
        at=time.time(),
    )


class VersionMismatch(TapereelError, ValueError):
    """An episode's spec names a version, and this process has another one. The episode didn't begin."""


def _check_versions(wanted: Mapping[str, str], have: Mapping[str, str]) -> None:
    for name, version in wanted.items():
        if have.get(name) != version:
            raise VersionMismatch(
                f"the spec's versions name {name} {version!r}, and this process has {have.get(name, 'none')!r}: "
                "run the episode where that version is installed, or remove it from the spec"
            )


def parent_of(fork: Tape, unverified: str | None = None) -> Parent:
    """Return the `Parent` of a tape that continues `fork`. `unverified` explains why the environment may differ."""
    return Parent(tape=fork.id, digest=fork.digest, records=len(fork.bodies), turn=fork.turns, unverified=unverified)


class Caller:
    """`await caller("step", action)` calls a method of the environment, with a time limit of `seconds`.

    A TimeoutError from the environment itself is passed on unchanged. A blocking environment runs in one daemon thread
    for the whole episode. If a call exceeds its time limit, this thread keeps running, because Python can't stop it.
    """

    def __init__(self, env: AnyEnvironment, seconds: float | None) -> None:
        self.code = Supervised()
        self._env = env
        self._seconds = seconds
        self._thread = EnvironmentThread(type(env).__qualname__) if env.blocking else None

    async def __call__(self, method: str, *args: object, bounded: bool = True) -> object:
        name = f"{type(self._env).__qualname__}.{method}"
        seconds = self._seconds if bounded else None
        try:
            return await self.code(self._call(name, method, args), name, seconds)
        except TimedOut as error:
            raise TimeoutError(f"{error} (Limits.environment_seconds)") from error

    async def _call(self, name: str, method: str, args: tuple[object, ...]) -> object:
        coroutine: Coroutine[Any, Any, Any] = getattr(self._env, method)(*args)
        if not inspect.isawaitable(coroutine):
            raise TypeError(f"{name} is not async: write `async def {method}`")
        return await (coroutine if self._thread is None else self._thread.run(coroutine))

    def stop(self) -> None:
        """End the task that runs the calls, and let the thread end after its current call."""
        self.code.close()
        if self._thread is not None:
            self._thread.stop()


class Episode:
    """One episode. Its settings are in the recorder's `begin` record. Await `episode.run()` once."""

    reaction = staticmethod(as_reaction)

    def __init__(
        self,
        agent: Agent,
        env: AnyEnvironment,
        recorder: Recorder,
        *,
        engine: Engine | None,
        limits: Limits,
        retries: int,
    ) -> None:
        self.agent = agent
        self.actor: Agent | None = None
        """The instance that acts in this episode (`Agent.for_episode`). None before the first turn."""
        self.env = env
        self.recorder = recorder
        self.limits = limits
        self.log = recorder.log
        self.begin = begin = recorder.log.begin
        self.started = time.perf_counter()
        self.llm = LLM(
            recorder,
            engine,
            seed=begin.seed,
            limits=limits,
            sampling=begin.sampling or Sampling(),
            retries=retries,
        )
        if self.log.parent is not None:
            self.llm.inherit(self.log.parent)
        self.call = Caller(env, limits.environment_seconds)
        self.acting = Supervised()
        self.timers = self.llm.timers
        self.timers.on_limit = self._out_of_time
        self.faults: list[Cause] = []
        self.components: set[str] = set()
        """The environment's own reward components so far."""

    async def run(self) -> Tape:
        try:
            return await self._run()
        finally:
            self.acting.close()
            self.call.stop()
            # The method refers to this episode, and a cycle would keep it in memory until a garbage collection.
            self.timers.on_limit = lambda _: None

    async def _run(self) -> Tape:
        status, cause, cancelled = Status.ERROR, None, None
        self.timers.start()
        try:
            status, cause = await self._episode()
        except asyncio.CancelledError as error:
            status, cause, cancelled = Status.CANCELLED, None, error
        except StoreFailed:
            raise
        except Exception as error:  # an error in Tapereel itself; errors in other code were already turned into ends
            status, cause = Status.ERROR, _cause(CauseType.OURS, error)
        finally:
            self.timers.stop()
        if self.llm.stopped is not None and cancelled is None:  # applies even if the agent continued without an answer
            status, cause = Status.ERROR, _cause(CauseType.MODEL, self.llm.stopped)
        try:
            await self.llm.close()
            status, cause = await self._score_all(status, cause)
        except asyncio.CancelledError as error:
            status, cause, cancelled = Status.CANCELLED, None, error
        try:
            await self._close()
        except asyncio.CancelledError as error:  # without an `end` the tape would count as crashed
            status, cause, cancelled = Status.CANCELLED, None, error
        for kind, code in ((CauseType.AGENT, self.acting), (CauseType.ENVIRONMENT, self.call.code)):
            self.faults += [Cause(type=kind, message=message) for message in code.left]
        self.recorder.write(self._end(status, cause))
        if cause is not None and status is Status.ERROR:
            self._warn(cause)
        for fault in self.faults:
            if fault.error is not None:  # code that was left running has already been logged
                self._warn(fault, kept=status is not Status.ERROR)
        if cancelled is not None:
            raise cancelled
        await self.recorder.durable()
        if self.llm.stopped is not None:
            raise self.llm.stopped
        return Tape(self.log)

    def _warn(self, cause: Cause, *, kept: bool = False) -> None:
        """Log a fault, unless the same fault of another episode was already logged.

        An episode that ended with TooManyParseErrors and has a reward is training data, so it causes no warning. Any
        other error of the agent is a bug to repair, even if its episode has a reward.
        """
        misread = cause.error == TooManyParseErrors.__name__ and Tape(self.log).reward is not None
        if not misread and _first_time(cause.type.value, cause.error, cause.frame):
            log.warning(
                "an episode %s an error of the %s: %s: %s (%s); the same fault is not reported again",
                "kept its result despite" if kept else "ended with",
                cause.type.value,
                cause.error,
                cause.message,
                cause.frame or "no frame",
            )

    def _out_of_time(self, reached: LimitReached) -> None:
        """Stop the agent or the environment, because a timer reached its limit. If neither of them is running, the next
        check of `timers.reached` ends the episode."""
        self.llm.latch(reached)
        self.acting.stop()
        self.call.code.stop()

    async def _episode(self) -> tuple[Status, Cause | None]:
        failure = await self._reset()
        if failure is not None:
            return failure
        while True:
            turns = self.log.turn
            if self.limits.turns is not None and turns >= self.limits.turns:
                return Status.LIMIT, Cause(type=CauseType.TURNS, message=f"{turns} turns taken")
            action, ended = await self._act()
            if ended is not None:
                return ended
            assert action is not None
            if self.env.effect != "pure" or self.recorder.every_turn:
                # The action is durable before it is carried out, so that after a crash the tape shows every effect on
                # the world.
                await self.recorder.durable()
            ended = await self._react(action)
            if ended is not None:
                return ended

    async def _reset(self) -> tuple[Status, Cause | None] | None:
        try:
            self.env.rng = random.Random(self.begin.env_seed)
            if _defines(self.env, "acquire"):
                await self.call("acquire", bounded=False)
            if self.log.parent is not None:
                return await self._restore(self.log.parent)
            await self._record(as_observation(await self.call("reset", self.begin.task.given)), ENV, ())
        except NOT_FAULTS:
            raise
        except BaseException as error:
            return self._ended(CauseType.ENVIRONMENT, error)
        return None

    async def _restore(self, fork: Tape) -> None:
        try:
            await self.call("restore", self.begin.task.given, fork)
        except RestoreMismatch:
            if self.begin.parent is None or self.begin.parent.unverified is None:
                raise

    async def _act(self) -> tuple[Action | None, tuple[Status, Cause | None] | None]:
        """Run one turn of the agent. Return (action, None), or (None, (status, cause)) if the episode ends in this
        turn."""
        view = Tape(self.log, scope=self.agent.path, agent_view=True)
        try:
            self.timers.acting(True)
            try:
                action = await self.acting(self._turn(view), f"{type(self.agent).__qualname__}.act")
            finally:
                self.timers.acting(False)
        except NOT_FAULTS:
            raise
        except BaseException as error:
            status, cause = self._ended(CauseType.AGENT, error)
            forgotten = self.llm.attribution.not_awaited
            if (
                cause is not None
                and forgotten
                and isinstance(error, AgentFault | AttributeError | TypeError | ValueError)
            ):
                cause = cause.model_copy(update={"message": f"{cause.message}; {forgotten}"})
            return None, (status, cause)
        finally:
            self.llm.end_turn()
        if self.timers.reached is not None:
            return None, _limit(self.timers.reached)
        if action is None:
            if self.llm.latched is not None:
                return None, _limit(self.llm.latched)
            fault = AgentFault(f"{type(self.agent).__qualname__}.act ended without an Action")
            return None, (Status.ERROR, _cause(CauseType.AGENT, fault))
        return action, None

    async def _turn(self, view: Tape) -> Action | None:
        self.actor = self.actor or self.agent.for_episode()
        steps = self.actor.act(view, self.llm)
        if not hasattr(steps, "__aiter__"):
            close = getattr(steps, "close", None)
            if close is not None:
                close()  # close the coroutine, or Python warns that it was never awaited
            raise AgentFault(
                f"{type(self.agent).__qualname__}.act must be an async generator: `async def` with `yield`"
            )
        try:
            action = None
            async for step in steps:
                if self.acting.left:
                    return None  # this task was left running, and its episode ended without it
                if not isinstance(step, Step) or isinstance(step, Observation):
                    raise AgentFault(f"act yielded {step!r}: it may yield thoughts and one Action")
                if action is not None:
                    late = f"act yielded {step!r:.200} after its action {action!r:.200}"
                    raise AgentFault(f"{late}: yield thoughts first, and one action at the end")
                path, calls = self.llm.attribute(step, view.scope)
                await self._record(step, path, calls)
                if isinstance(step, Action):  # the rest of `act` runs before the environment's step
                    action, self.llm.acted = step, True
            if self.llm.attribution.not_awaited:
                raise AgentFault(f"act yielded {action!r:.200}")
        finally:
            close = getattr(steps, "aclose", None)
            if close is not None:
                await close()
        return action

    async def _react(self, action: Action) -> tuple[Status, Cause | None] | None:
        at = len(self.log.entries) - 1
        try:
            if isinstance(action, ToolCalls):
                self.timers.acting(True)
            try:
                outcome = self.reaction(await self.call("step", action))
            finally:
                self.timers.acting(False)
            self._score(outcome, at)
            if outcome.observation is not None:
                await self._record(outcome.observation, ENV, ())
        except NOT_FAULTS:
            raise
        except BaseException as error:
            status, cause = self._ended(CauseType.ENVIRONMENT, error)
            hint = _of_another_type(self.env, action) if isinstance(error, AttributeError | TypeError) else ""
            if cause is not None and hint:
                cause = cause.model_copy(update={"message": f"{cause.message}. {hint}"})
            return status, cause
        if outcome.terminated:
            return Status.FINISHED, None
        if outcome.truncated:
            return Status.TRUNCATED, None
        if self.llm.latched is not None:
            return _limit(self.llm.latched)
        return None

    def _ended(self, kind: CauseType, error: BaseException) -> tuple[Status, Cause | None]:
        """Return the status and cause of an episode that this error ends. `kind` says whose code raised the error."""
        if isinstance(error, Stopped) and self.timers.reached is not None:
            return _limit(self.timers.reached)
        # An agent's TaskGroup wraps the exceptions that its model calls raise.
        for found in _parts(error):
            if isinstance(found, StoreFailed):
                raise found
            if isinstance(found, EngineStopped):  # from a judge; the agent gets a ModelFailed instead
                self.llm.stopped = found
                return Status.ERROR, _cause(CauseType.MODEL, found)
            if isinstance(found, LimitReached):
                return _limit(found)
            if isinstance(found, ModelFailed):
                return Status.ERROR, _cause(CauseType.MODEL, found)
            if isinstance(found, RenderFailed):
                return Status.ERROR, _cause(CauseType.ENVIRONMENT, found)
        return Status.ERROR, _cause(kind, error)

    def _end(self, status: Status, cause: Cause | None) -> End:
        return End(
            tape=self.recorder.tape,
            status=status,
            cause=cause,
            seconds=time.perf_counter() - self.started,
            at=time.time(),
            agent_seconds=self.timers.agent_seconds,
            beside=tuple(self.faults),
        )

    async def _score_all(self, status: Status, cause: Cause | None) -> tuple[Status, Cause | None]:
        """Record the rewards from the environment's `finish`, then the rewards from sources that read the whole tape.

        Only an episode that can be trained on is scored.
        """
        if not trains(status, cause.type if cause is not None else None):
            return status, cause
        try:
            outcome = await self.call("finish", status) if _defines(self.env, "finish") else None
            if outcome is not None:
                self._score(as_outcome(outcome, "finish"), None)
            if self.env.rewards is not None:
                scoring = self.env.rewards.score(Ending(self.log, self._end(status, cause)))
                records = await self.call.code(scoring, "the rewards")
                for record in beside(records, self.env.rewards.names, self.components):
                    self.recorder.write(record)
                failed = next((r.evidence for r in records if r.value != r.value), None)
                if isinstance(failed, dict):
                    self._keep(cause)
                    found = _cause(CauseType.ENVIRONMENT, RewardFailed(str(failed["failed"])))
                    return Status.ERROR, found.model_copy(update={"frame": failed.get("frame")})
        except NOT_FAULTS:
            raise
        except BaseException as error:
            self._keep(cause)
            return self._ended(CauseType.ENVIRONMENT, error)
        return status, cause

    def _keep(self, cause: Cause | None) -> None:
        """Keep the error that ended the episode, because another error replaces it as the cause."""
        if cause is not None and cause.error is not None:
            self.faults.append(cause)

    async def _close(self) -> None:
        """Close the environment. An error while closing is recorded in `End` and doesn't change the result."""
        try:
            if _defines(self.env, "close"):
                await self.call("close")
        except NOT_FAULTS:
            raise
        except BaseException as error:
            self.faults.append(_cause(CauseType.ENVIRONMENT, error))

    async def _record(self, step: Step, by: str, calls: tuple[tuple[str, int, int], ...]) -> None:
        record = step_record(self.recorder.tape, step, by=by, calls=calls)
        if record.media:
            await self.recorder.keep(step)
        self.recorder.write(record)

    def _score(self, outcome: Outcome, step: int | None) -> None:
        for name, value, weight in outcome.components():
            self.components.add(name)
            self.recorder.write(
                Reward(tape=self.recorder.tape, step=step, name=name, value=float(value), weight=weight)
            )


def _defines(env: AnyEnvironment, method: str) -> bool:
    """Return whether the environment has its own `method`. The methods of the base class do nothing, so a call of them
    would only cost its way to the environment's task and back."""
    return getattr(getattr(env, method), "__func__", None) is not getattr(Environment, method)


def _recorded_limits(limits: Limits, engine: Engine | None) -> dict[str, JsonValue]:
    """Return the limits that `begin` records. Limits that aren't set are left out.

    `context` is the smaller of the episode's limit and the engine's own limit.
    """
    recorded = limits.model_dump(exclude_none=True)
    contexts = [c for c in (limits.context, engine.context if engine is not None else None) if c]
    return {**recorded, "context": min(contexts)} if contexts else recorded


def _limit(reached: LimitReached) -> tuple[Status, Cause | None]:
    return Status.LIMIT, Cause(type=reached.limit, message=str(reached))


def _parts(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _parts(part)
    else:
        yield error


def _cause(kind: CauseType, error: BaseException) -> Cause:
    frames = traceback.extract_tb(error.__traceback__)
    # Use the innermost line of the user's code, because that is where the user can correct an error from a library.
    at = next((f for f in reversed(frames) if is_user_code(f.filename)), frames[-1] if frames else None)
    frame = f"{at.filename}:{at.lineno} in {at.name}" if at is not None else None
    message = storable(without_secrets(error_message(error)))
    return Cause(type=kind, error=type(error).__qualname__, message=message, frame=frame)


_reported: set[tuple[str | None, ...]] = set()


def _first_time(*fault: str | None) -> bool:
    if fault in _reported or len(_reported) > 1000:
        return False
    _reported.add(fault)
    return True


class _Unmade(Environment[Action]):
    """Stands in for an environment that couldn't be constructed. The episode ends with the constructor's error."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def reset(self, task: object) -> str:
        raise self._error


def _new_environment(factory: EnvironmentFactory) -> AnyEnvironment:
    process = os.getpid()
    try:
        return new_environment(factory)
    except (NotAnEnvironment, KeyboardInterrupt):
        raise
    except BaseException as error:
        return _Unmade(error)
    finally:
        settle(process)


def _of_another_type(env: AnyEnvironment, action: Action) -> str:
    """Return a sentence if the environment's class declares other actions than this one, otherwise ""."""
    try:
        wanted = tuple(Declared.of(env).actions.values())
    except (BadArgument, TypeError, ValueError):  # nothing is declared
        return ""
    if not wanted or isinstance(action, wanted):
        return ""
    names, got = ", ".join(one.__name__ for one in wanted), type(action).__name__
    return f"{type(env).__name__} takes {names}, and the agent gave it {got}: ChatAgent(actions=[{names}])"


def _identity(env: AnyEnvironment, factory: object) -> Identity:
    """Return the identity of the environment, or of its factory if the factory raised an error."""
    if isinstance(env, _Unmade):
        return Identity(name=getattr(factory, "__name__", type(factory).__name__))
    config = configuration(env)
    if env.rewards is not None:
        config["rewards"] = list(env.rewards.names)
    return Identity(name=type(env).__name__, cls=qualified(type(env)), config=config, effect=env.effect)


@functools.lru_cache(maxsize=1)
def _package_versions() -> tuple[tuple[str, str], ...]:
    from importlib.metadata import version

    return (("package", version("tapereel")), ("python", platform.python_version()))


def _versions(engine: Engine | None) -> dict[str, str]:
    versions = {**dict(_package_versions()), "conversation": CONVERSATION}
    renderer = engine.renderer if engine is not None else None
    if engine is not None and renderer is not None:
        versions["tokenizer"] = renderer.tokenizer_hash
        versions["chat_template"] = renderer.template_hash
        if renderer.pictures is not None and "pictures" in engine.can:
            versions["processor"] = renderer.pictures.hash
    return versions
