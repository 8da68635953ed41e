"""Branching continues a recorded episode from one of its turns, with another agent, model, sampling or seed.

First the environment is restored and compared with the record. If it doesn't reach the recorded state, no continuation
is rolled out by default. A caller may still ask for continuations, and each of them then records the reason. Each
continuation is a separate tape, and its `begin` names the parent's digest and the turn. `branch` takes a tape and
objects. `branch_run` takes them from a run's configuration, and records the continuations in the same run.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...envs.environment import EnvironmentFactory, RestoreMismatch, new_environment
from ...envs.rewards import load_rewards, rewarded
from ...tapes import Sampling, Status, Tape
from ...tapes.common.config import Setting, load_config, setting_key
from ...tapes.common.run_async import run_async
from ...tapes.common.stats import mean_of
from ...tapes.errors import TapereelError, UsageError
from ...tapes.journal import Journal
from ...tapes.records import Publish, total_reward
from ...tapes.status import BRANCH
from ...tapes.steps import Unknown
from ...tapes.store.run_directory import recorded_settings
from ...tapes.store.store import Store
from ..engines.engine import Engine
from ..episode.agent import Agent
from ..episode.limits import Limits
from ..episode.rollout import Caller, rollout
from ..episode.seeds import derive_seed
from ..episode.spec import EpisodeSpec
from ..runs.group import Group, fill
from ..setup.recorded_setup import recorded_agent, with_trainer_settings
from ..setup.setup import EnvSource, SeedConfig, load_env
from ..setup.team_config import AttemptsConfig, PartnerConfig, RolloutConfig, make_team, speaker_of


class PrefixUnverified(TapereelError, ValueError):
    """The turns before the branch can't be verified, and nothing was rolled out."""

    def __init__(self, reason: str, *, diverged: bool) -> None:
        super().__init__(f"the episode can't be continued from that turn: {reason}")
        self.reason = reason
        self.diverged = diverged
        """True if the environment differs from the record, and False if it can't be compared."""


def continuation(tape: Tape, turn: int) -> EpisodeSpec:
    """Return the spec of an episode that continues `tape` after its first `turn` turns, with the recorded settings.

    With the same agent and model, this episode repeats the recorded one. So every difference comes from a setting that
    the caller changes in the spec. Another `env_seed` works only if the environment reaches the same state with it.
    Raises ValueError if the tape lacks the turn.
    """
    begin = tape.begin
    return EpisodeSpec(
        task=begin.task,
        split=BRANCH,
        seed=begin.seed,
        env_seed=begin.env_seed,
        sampling=begin.sampling or Sampling(),
        limits=recorded_limits(tape),
        fork=cut(tape, turn),
    )


async def branch(
    agent: Agent,
    env: EnvironmentFactory,
    spec: EpisodeSpec,
    *,
    engine: Engine | None = None,
    n: int = 1,
    journal: Journal | None = None,
    unverified: bool = False,
) -> list[Tape]:
    """Run `n` continuations of a recorded episode (see `continuation`). Return the closed tapes, which form one group.

    `spec.seed` is the seed of the first continuation, and the seeds of the others are derived from it. If an attempt's
    episode can't be trained on, it is retried once, and both tapes are returned.
    Raises PrefixUnverified, and rolls nothing out, if the environment doesn't reach the recorded state or acts
    irreversibly. With `unverified`, the continuations are rolled out anyway.
    """
    if n < 1:
        raise ValueError(f"n is {n}; it must be 1 or more")
    doubt = await doubt_of(spec, env)
    if doubt is not None and not unverified:
        raise doubt
    spec = spec.model_copy(update={"unverified": doubt.reason if doubt is not None else None})
    return await _continue(spec, partial(rollout, agent, env, engine=engine, journal=journal), n)


async def _continue(
    spec: EpisodeSpec, play: Callable[[EpisodeSpec], Awaitable[Tape]], n: int, concurrency: int | None = None
) -> list[Tape]:
    """Play `n` continuations as one group. `play` is `rollout` without the spec."""
    prefix = _prefix(spec)
    group = Group(0, spec.task, n)
    name = f"branch/{prefix.id}/{prefix.turns}/{uuid.uuid4().hex[:8]}"

    async def one(attempt: int, again: int) -> Tape:
        first = attempt == again == 0
        seed = spec.seed if first else derive_seed(spec.seed, "branch", prefix.turns, attempt, again)
        return await play(spec.model_copy(update={"group": name, "attempt": attempt, "seed": seed}))

    await fill(group, one, concurrency=concurrency)
    return [tape for _, tapes in sorted(group.tapes.items()) for tape in tapes]


def _prefix(spec: EpisodeSpec) -> Tape:
    if spec.fork is None:
        raise ValueError("the spec continues no episode: make it with `continuation(tape, turn)`, or set its `fork`")
    return spec.fork


def cut(tape: Tape, turn: int) -> Tape:
    """Return the part of the tape with its first `turn` turns. Raises ValueError if the tape has fewer turns, or if the
    environment ended the episode with the last of them."""
    prefix = tape.at_turn(turn)
    if turn == tape.turns and tape.status in (Status.FINISHED, Status.TRUNCATED):
        raise ValueError(
            f"tape {tape.id} ended as {tape.status} with turn {turn - 1}, counted from 0: there is no "
            f"turn {turn} to continue"
        )
    return prefix


def recorded_limits(tape: Tape) -> Limits:
    """Return the limits of the recorded episode, or the defaults if the tape doesn't record them."""
    recorded = tape.begin.limits
    return Limits() if recorded is None else Limits.recorded(recorded)


async def doubt_of(spec: EpisodeSpec, make: EnvironmentFactory) -> PrefixUnverified | None:
    """Return why the turns that `spec` continues can't be verified, or None if a fresh environment reached the recorded
    state.

    Raises PrefixUnverified if the environment can't be restored at all, so that no continuation is possible.
    """
    prefix = _prefix(spec)
    unknown = next((step for step in prefix if isinstance(step, Unknown)), None)
    if unknown is not None:
        raise PrefixUnverified(
            f"no imported module defines the step kind {unknown.original!r}: import the module that does",
            diverged=False,
        )
    env = new_environment(make)
    if "irreversible" in (env.effect, prefix.begin.env.effect):
        await env.close()
        return PrefixUnverified(
            f"{type(env).__name__} is irreversible: restoring it would repeat the effects of the recorded actions",
            diverged=False,
        )
    env.rng = random.Random(spec.environment_seed)
    call = Caller(env, spec.limits.environment_seconds)
    try:
        await call("restore", spec.task.given, prefix)
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


# Branches of a recorded run, which take the configuration, environment and weights from the run


class BranchConfig(RolloutConfig, AttemptsConfig, SeedConfig):
    """Settings of the continuations, which are the attempts of one group.

    By default the split is `branch`, and the other settings have their recorded values. `seed` is the sampling seed of
    the first continuation. The other seeds are derived from it.
    """

    env_seed: int


@dataclass(frozen=True)
class Branched:
    """A recorded tape and its continuations."""

    recorded: Tape
    turn: int
    """Number of the first new turn. The continuations keep the turns before it."""
    tapes: list[Tape]

    @property
    def mean_reward(self) -> float | None:
        """The mean of `rewards`, or None if there are none."""
        return mean_of(self.rewards)

    @property
    def rewards(self) -> list[float]:
        """The rewards of the continuations that were scored and could be trained on (`tape.trains`)."""
        return [tape.reward for tape in self.tapes if tape.trains and tape.reward is not None]

    @property
    def recorded_reward(self) -> float | None:
        """The recorded tape's reward after the branch, to compare with a continuation's reward."""
        return reward_since(self.recorded, self.tapes[0].inherited)


def branch_run(
    run: str | Path,
    tape: str,
    turn: int,
    *,
    agent: Agent | str | None = None,
    env: EnvSource | None = None,
    model: str | None = None,
    sets: Sequence[Setting] = (),
    unverified: bool = False,
) -> Branched:
    """Continue a run's tape from one of its turns, with changed settings, and record the result in the same run.

    `tape` is an id or its first characters. `turn` is the first turn that is new, counted from 0. `agent` and `env` are
    objects or `module:name`. `model` is a folder. By default, the agent, the environment and the engine come from the
    run's configuration. `sets` are settings of `BranchConfig`: `attempts=16` or `("sampling.temperature", 0.5)`.

    The engines, the weights and the recorded turns are checked before anything is written. Raises UsageError. Without
    `unverified`, also raises PrefixUnverified if the environment doesn't return to the recorded state.
    """
    settings = recorded_settings(run)
    with Store.open(run) as store:
        begin = store.tape(tape).begin
        named = env or settings.get("env")
        if named is None:
            raise UsageError(
                f"no environment is named, and {begin.tape} was recorded in {begin.env.cls}: give `env=...`"
            )
        factory = load_env(named)
        # Read the tape again, because the step classes that it needs have only now been imported.
        recorded = store.tape(tape)
    rewards = load_rewards(settings.get("rewards") or ())
    factory = factory if rewards is None else rewarded(factory, rewards)
    try:
        spec = continuation(recorded, turn)
    except ValueError as error:
        raise UsageError(f"turn {turn}: {error}") from error
    acting = recorded_agent(run, agent, begin.agent)
    config = _config(str(run), settings, recorded, model, sets)
    own = {name for name in config.players if not _is_set(name, sets)} | ({""} if _keeps_engine(model, sets) else set())
    names = ("split", "seed", "env_seed", "sampling", "limits")
    spec = spec.model_copy(update={name: getattr(config, name) for name in names})
    sampled = {name: _versions_of(recorded, name, config) for name in own}
    tapes = run_async(_branch(run, spec, acting, factory, config, sampled, unverified))
    return Branched(recorded, turn, tapes)


async def _branch(
    run: str | Path,
    spec: EpisodeSpec,
    agent: Agent,
    env: EnvironmentFactory,
    config: BranchConfig,
    sampled: Mapping[str, set[str]],
    unverified: bool,
) -> list[Tape]:
    """Return the continuations. The store is opened for writing only after every check has passed."""
    engine, publishes = await make_team(config.engine, config.players)
    try:
        _check_weights(sampled, publishes)
        doubt = await doubt_of(spec, env)
        if doubt is not None and not unverified:
            raise doubt
        spec = spec.model_copy(update={"unverified": doubt.reason if doubt is not None else None})
        with Store.open(run, write=True) as store:
            store.record_weights(*publishes.values())
            play = partial(rollout, agent, env, engine=engine, journal=store.writer)
            return await _continue(spec, play, config.attempts, config.concurrency)
    finally:
        await engine.close()


def reward_since(tape: Tape, step: int) -> float | None:
    """Sum a tape's rewards for the steps from `step` on and for the whole episode. Return None if there are none.

    A fork doesn't repeat the rewards of its inherited steps, so its ancestors' rewards are counted as well.
    """
    rewards = [reward for reward in tape.rewards if reward.step is None or reward.step >= step]
    above = tape.parent
    while above is not None:
        rewards += (reward for reward in above.rewards if reward.step is not None and reward.step >= step)
        above = above.parent
    return total_reward(rewards)


def _config(
    run: str, settings: Mapping[str, Any], tape: Tape, model: str | None, sets: Sequence[Setting]
) -> BranchConfig:
    begin = tape.begin
    engine = with_trainer_settings(settings.get("engine") or {}, settings.get("trainer") or {})
    if not _keeps_engine(model, sets):
        engine = {"renderer": engine["renderer"]} if "renderer" in engine else {}
    base: dict[str, Any] = {
        "engine": engine,
        "players": _speaking(settings.get("players") or {}),
        "sampling": (begin.sampling or Sampling()).model_dump(mode="json"),
        "limits": recorded_limits(tape).model_dump(mode="json"),
        "seed": begin.seed,
        "env_seed": begin.env_seed,
        "split": BRANCH,
    }
    below = [(key, value) for key, value in base.items() if value != {}]
    if model is not None:
        below += [("engine.kind", "embedded"), ("engine.model", model)]
    elif _sets_any(sets, "engine.answers", "engine.policy"):
        below.append(("engine.kind", "scripted"))
    elif not engine and not _sets_any(sets, "engine"):
        raise UsageError(f"no model is named, and {run} has no configuration with an engine: give `model=DIR`")
    return load_config(BranchConfig, None, [*below, *sets])


def _keeps_engine(model: str | None, sets: Sequence[Setting]) -> bool:
    return model is None and not _sets_any(sets, "engine.kind", "engine.model", "engine.answers", "engine.policy")


def _is_set(player: str, sets: Sequence[Setting]) -> bool:
    """Return whether `sets` contain another engine for the player."""
    whole = {"players", f"players.{player}"}.intersection(map(setting_key, sets))
    return bool(whole) or _sets_any(sets, f"players.{player}.engine")


def _sets_any(sets: Sequence[Setting], *keys: str) -> bool:
    return any(f"{setting_key(one)}.".startswith(f"{key}.") for one in sets for key in keys)


def _speaking(players: dict[str, Any]) -> dict[str, Any]:
    """Return the players' settings without the training settings, which a branch doesn't use."""
    known = PartnerConfig.model_fields
    return {
        name: {key: value for key, value in own.items() if key in known}
        | {"engine": with_trainer_settings(own["engine"], {} if own.get("frozen") else own.get("trainer", {}))}
        for name, own in players.items()
    }


def _versions_of(tape: Tape, player: str, config: BranchConfig) -> set[str]:
    """The versions of the weights that sampled the player's calls. The run's engine is the player ""."""
    calls = (call for call in tape.calls if speaker_of(call.by, config.players) == player)
    return {version for call in calls for version, _, _ in call.spans}


def _check_weights(sampled: Mapping[str, set[str]], publishes: Mapping[str, Publish]) -> None:
    """Raise UsageError if the run's configuration names weights that didn't sample the tape.

    The configuration names the weights that training began with, but a checkpoint sampled the tapes of later updates. A
    branch of one of these tapes with the first weights would silently compare two policies. `sampled` has the versions
    that sampled the tape, for each player that takes its model from the run's configuration.
    """
    for name, publish in publishes.items():
        versions = sampled.get(name)
        if versions and publish.version not in versions:
            key = f"players.{name}.engine.model" if name else "model"
            raise UsageError(
                f"the tape was sampled from version {', '.join(sorted(versions))}, and the run's "
                f"configuration names other weights ({publish.version}): say which ones are meant, as in "
                f"`{key}=RUN/checkpoints/{name and name + '/'}update-000080/hf`"
            )
