"""Branch: continues a recorded episode from one of its turns, with another agent, model, sampling or seed.

The environment is restored first and compared with the record; continuations are rolled out only where it reaches the
recorded state. Each continuation is a tape of its own; its `begin` names the parent's digest and the turn. A caller may
force continuations of a prefix that can't be verified; each of them records the reason.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import Any

from ...envs.environment import Environment, RestoreMismatch, new_environment
from ...tapes import Sampling, Status, Tape
from ...tapes.errors import TapereelError
from ...tapes.journal import Journal
from ...tapes.steps import Unknown
from ..engines.engine import Engine
from ..episode.agent import Agent
from ..episode.environment_calls import Caller
from ..episode.limits import Limits
from ..episode.rollout import rollout
from ..episode.seeds import derive_seed
from ..runs.group import Group, fill

SPLIT = "branch"
"""The default split of continuations: they are for inspection, not for training."""


class PrefixUnverified(TapereelError, ValueError):
    """The turns before the branch can't be verified; nothing was rolled out."""

    def __init__(self, reason: str, *, diverged: bool) -> None:
        super().__init__(f"the episode can't be continued from that turn: {reason}")
        self.reason = reason
        self.diverged = diverged
        """True: the environment differs from the record. False: it can't be compared."""


async def branch(
    tape: Tape,
    turn: int,
    agent: Agent,
    env: Callable[[], Environment[Any]],
    *,
    engine: Engine | None = None,
    n: int = 1,
    seed: int | None = None,
    env_seed: int | None = None,
    sampling: Sampling | None = None,
    limits: Limits | None = None,
    split: str = SPLIT,
    journal: Journal | None = None,
    concurrency: int = 16,
    unverified: bool = False,
) -> list[Tape]:
    """Continue `tape` after its first `turn` turns, `n` times, as one group; returns the continuations' closed tapes.

    Settings that are not passed are the recorded ones, the seeds included. So the first continuation by the same agent
    and model repeats the recorded episode, and every difference comes from a changed setting. `seed` is the first
    continuation's; the other seeds are derived from it. Another `env_seed` works only where the environment reaches the
    same state with it. An attempt whose episode can't be trained on is retried once; both tapes are returned.
    Raises PrefixUnverified, before anything is rolled out, where the environment doesn't reach the recorded state or
    acts irreversibly; `unverified` continues anyway. ValueError where the tape has no such turn.
    """
    if n < 1 or concurrency < 1:
        raise ValueError(f"n is {n} and concurrency {concurrency}; both must be 1 or more")
    prefix = cut(tape, turn)
    begin = tape.begin
    limits = limits or recorded_limits(tape)
    env_seed = begin.env_seed if env_seed is None else env_seed
    doubt = await doubt_of(tape, turn, env, env_seed=env_seed, limits=limits)
    if doubt is not None and not unverified:
        raise doubt
    group = Group(0, begin.task, n)
    name = f"branch/{prefix.id}/{turn}/{uuid.uuid4().hex[:8]}"
    base = begin.seed if seed is None else seed

    async def one(attempt: int, again: int) -> Tape:
        own = base if attempt == again == 0 else derive_seed(base, "branch", turn, attempt, again)
        return await rollout(
            agent,
            env,
            begin.task,
            engine=engine,
            seed=own,
            env_seed=env_seed,
            group=name,
            attempt=attempt,
            split=split,
            limits=limits,
            sampling=sampling or begin.sampling,
            journal=journal,
            fork=prefix,
            unverified=doubt.reason if doubt is not None else None,
        )

    await fill(group, one, concurrency=concurrency)
    return [made for _, tapes in sorted(group.tapes.items()) for made in tapes]


def cut(tape: Tape, turn: int) -> Tape:
    """The prefix of `turn` turns. ValueError where the tape has fewer turns, or the episode ended before."""
    prefix = tape.at_turn(turn)
    if turn == tape.turns and tape.status in (Status.FINISHED, Status.TRUNCATED):
        raise ValueError(
            f"tape {tape.id} ended as {tape.status} with turn {turn - 1}, counted from 0: there is no "
            f"turn {turn} to continue"
        )
    return prefix


def recorded_limits(tape: Tape) -> Limits:
    """The limits of the recorded episode; the defaults where the tape doesn't record them."""
    recorded = tape.begin.limits
    return Limits() if recorded is None else Limits.model_validate({**dict.fromkeys(Limits.model_fields), **recorded})


async def doubt_of(
    tape: Tape,
    turn: int,
    make: Callable[[], Environment[Any]],
    *,
    env_seed: int | None = None,
    limits: Limits | None = None,
) -> PrefixUnverified | None:
    """Why the first `turn` turns can't be verified; None where a fresh environment reached the recorded state.

    Raises PrefixUnverified where the environment can't be restored at all, so that no continuation is possible.
    """
    begin, prefix = tape.begin, cut(tape, turn)
    unknown = next((step for step in prefix if isinstance(step, Unknown)), None)
    if unknown is not None:
        raise PrefixUnverified(
            f"no imported module defines the step kind {unknown.original!r}: pass the module that does",
            diverged=False,
        )
    env = new_environment(make)
    if "irreversible" in (env.effect, begin.env.effect):
        await env.close()
        return PrefixUnverified(
            f"{type(env).__name__} is irreversible: restoring it would repeat the effects of the recorded actions",
            diverged=False,
        )
    env.rng = random.Random(begin.env_seed if env_seed is None else env_seed)
    call = Caller(env, (limits or recorded_limits(tape)).environment_seconds)
    try:
        await call("restore", begin.task.given, prefix)
    except RestoreMismatch as error:
        return PrefixUnverified(str(error), diverged=True)
    except Exception as error:
        raise PrefixUnverified(
            f"{type(env).__name__} can't be restored, it raised {type(error).__name__}: {error}", diverged=True
        ) from error
    finally:
        try:
            await call("close")
        finally:
            call.stop()
    return None
