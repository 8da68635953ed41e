"""Branches of a recorded run: configuration, environment and weights come from the run, and the tapes go into it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...envs.checks.reexec_run import own_environment
from ...envs.environment import Environment
from ...envs.rewards import load_rewards, rewarded
from ...tapes import Sampling, Tape
from ...tapes.common.config import load_config
from ...tapes.common.run_async import run_async
from ...tapes.errors import UsageError
from ...tapes.records import Publish, total_reward
from ...tapes.store.run_directory import recorded_settings
from ...tapes.store.store import Store
from ..episode.agent import Agent
from ..setup.recorded_setup import import_steps, recorded_agent, with_trainer_settings
from ..setup.setup import EnvSource, load_env
from ..setup.team_config import AttemptsConfig, PartnerConfig, RolloutConfig, make_team, speaker_of
from .branching import SPLIT, branch, cut, doubt_of, recorded_limits


class BranchConfig(RolloutConfig, AttemptsConfig):
    """Settings of the continuations, which are the attempts of one group. The other defaults are the recorded values;
    the split is `branch`."""

    seed: int
    """Sampling seed of the first continuation; the seeds of the others are derived from it."""
    env_seed: int


@dataclass(frozen=True)
class Branched:
    """A recorded tape and its continuations."""

    recorded: Tape
    turn: int
    """The continuations keep the turns before this one."""
    tapes: list[Tape]

    @property
    def mean_reward(self) -> float | None:
        """Over the continuations that ended usably and were scored; None without any."""
        rewards = self.rewards
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def rewards(self) -> list[float]:
        """Of the continuations that ended usably and were scored."""
        return [tape.reward for tape in self.tapes if tape.trains and tape.reward is not None]

    @property
    def recorded_reward(self) -> float | None:
        """What the recorded tape earned from the branch on, which is comparable with a continuation's reward."""
        return reward_since(self.recorded, self.tapes[0].inherited)


@dataclass(frozen=True)
class _Setup:
    """What is rolled out, and from where."""

    run: str
    tape: Tape
    turn: int
    agent: Agent
    env: Callable[[], Environment[Any]]
    config: BranchConfig
    recorded_players: frozenset[str]
    """Players ("" is the run's engine) whose model is the one of the run's configuration."""


def branch_run(
    run: str | Path,
    tape: str,
    turn: int,
    *,
    agent: Agent | str | None = None,
    env: EnvSource | None = None,
    model: str | None = None,
    sets: Sequence[str] = (),
    unverified: bool = False,
) -> Branched:
    """Continue a tape of a run from a turn, with something changed, and record the continuations in the same run.

    tape: an id or its first characters. turn: the first turn that is new, counted from 0. agent, env: objects or
    `module:name`; None: those of the run's configuration. model: a folder; None: the engine of the run's
    configuration. sets: settings of `BranchConfig`, as `attempts=16` or `sampling.temperature=0.5`.

    Nothing is written before the engines, the weights and the recorded turns are checked. Raises UsageError, and
    PrefixUnverified where the environment doesn't return to the recorded state (`unverified` continues nevertheless).
    """
    with Store.open(run) as store:
        setup = _setup(str(run), store, tape, turn, agent, env, model, sets)
    tapes = run_async(_branch(setup, unverified))
    return Branched(setup.tape, turn, tapes)


def reward_since(tape: Tape, step: int) -> float | None:
    """The sum of a tape's rewards for the steps from `step` on and for the whole episode; None where there is none.

    A fork doesn't repeat the rewards of its inherited steps, so those of its ancestors are counted as well.
    """
    rewards = [reward for reward in tape.rewards if reward.step is None or reward.step >= step]
    above = tape.parent
    while above is not None:
        rewards += (reward for reward in above.rewards if reward.step is not None and reward.step >= step)
        above = above.parent
    return total_reward(rewards)


def _setup(
    run: str,
    store: Store,
    name: str,
    turn: int,
    agent: Agent | str | None,
    env: EnvSource | None,
    model: str | None,
    sets: Sequence[str],
) -> _Setup:
    begin = store.tape(name).begin
    import_steps(run)
    settings = recorded_settings(run)
    named = env or settings.get(("env",))
    factory = load_env(named) if named is not None else own_environment(begin.env)
    if factory is None:
        raise UsageError(
            f"no environment is named, and {begin.tape} was recorded in {begin.env.cls}: give --env module:name"
        )
    rewards = load_rewards(settings.get(("rewards",)) or ())
    factory = factory if rewards is None else rewarded(factory, rewards)
    # Read again: only now are the step classes imported that this tape's steps are made of.
    tape = store.tape(name)
    try:
        cut(tape, turn)
    except ValueError as error:
        raise UsageError(f"--at {turn}: {error}") from error
    acting = recorded_agent(run, agent, begin.agent)
    config = _config(run, tape, model, sets)
    recorded = {""} if _keeps_engine(model, sets) else set()
    recorded |= {player for player in config.players if not _is_set(player, sets)}
    return _Setup(run, tape, turn, acting, factory, config, frozenset(recorded))


def _config(run: str, tape: Tape, model: str | None, sets: Sequence[str]) -> BranchConfig:
    """The recorded settings, with `model` and `sets` on top."""
    begin = tape.begin
    engine = with_trainer_settings(_recorded(run, "engine"), _recorded(run, "trainer"))
    players = _recorded(run, "players")
    if not _keeps_engine(model, sets):
        engine = {"renderer": engine["renderer"]} if "renderer" in engine else {}
    base: dict[str, Any] = {
        "engine": engine,
        "players": _speaking(players),
        "sampling": (begin.sampling or Sampling()).model_dump(mode="json"),
        "limits": recorded_limits(tape).model_dump(mode="json"),
        "seed": begin.seed,
        "env_seed": begin.env_seed,
        "split": SPLIT,
    }
    below = [f"{key}={json.dumps(value)}" for key, value in base.items() if value != {}]
    if model is not None:
        below += ["engine.kind=embedded", f"engine.model={model}"]
    elif any(text.startswith(("engine.answers", "engine.policy")) for text in sets):
        below.append("engine.kind=scripted")
    elif not engine and not any(text.startswith("engine") for text in sets):
        raise UsageError(f"no model is named, and {run} has no configuration with an engine: give --model DIR")
    return load_config(BranchConfig, None, [*below, *sets])


def _keeps_engine(model: str | None, sets: Sequence[str]) -> bool:
    """Whether the model is the one of the run's configuration."""
    others = ("engine.kind", "engine.model", "engine.answers", "engine.policy")
    return model is None and not any(text.startswith(others) for text in sets)


def _is_set(player: str, sets: Sequence[str]) -> bool:
    """Whether the settings name another engine for the player."""
    return any(text.startswith(("players=", f"players.{player}=", f"players.{player}.engine")) for text in sets)


def _recorded(run: str, group: str) -> dict[str, Any]:
    """A group of the run's recorded settings, nested; empty where there is none."""
    made: dict[str, Any] = {}
    for keys, value in recorded_settings(run).items():
        if keys[0] == group and len(keys) > 1:
            node = made
            for key in keys[1:-1]:
                node = node.setdefault(key, {})
            node[keys[-1]] = value
    return made


def _speaking(players: dict[str, Any]) -> dict[str, Any]:
    """The players' settings without those of their training, which a branch doesn't use."""
    known = PartnerConfig.model_fields
    return {
        name: {key: value for key, value in own.items() if key in known}
        | {"engine": with_trainer_settings(own["engine"], {} if own.get("frozen") else own.get("trainer", {}))}
        for name, own in players.items()
    }


async def _branch(setup: _Setup, unverified: bool) -> list[Tape]:
    """The continuations. The store is opened for writing only after every check has passed."""
    config = setup.config
    seeds: dict[str, Any] = {"env_seed": config.env_seed, "limits": config.limits}
    engine, publishes = await make_team(config.engine, config.players)
    try:
        _check_weights(setup, publishes)
        doubt = None if unverified else await doubt_of(setup.tape, setup.turn, setup.env, **seeds)
        if doubt is not None:
            raise doubt
        with Store.open(setup.run, write=True) as store:
            store.record_weights(*publishes.values())
            return await branch(
                setup.tape,
                setup.turn,
                setup.agent,
                setup.env,
                engine=engine,
                n=config.attempts,
                seed=config.seed,
                sampling=config.sampling,
                split=config.split,
                journal=store.writer,
                concurrency=config.concurrency,
                unverified=unverified,
                **seeds,
            )
    finally:
        await engine.close()


def _check_weights(setup: _Setup, publishes: Mapping[str, Publish]) -> None:
    """UsageError where the run's configuration names other weights than those that sampled the tape.

    The configuration names the weights that training began with. A tape of a later update was sampled by a checkpoint,
    and a branch from the first weights would compare two policies without saying so.
    """
    for name, publish in publishes.items():
        if name not in setup.recorded_players:
            continue
        versions = {
            version
            for call in setup.tape.calls
            if speaker_of(call.by, setup.config.players) == name
            for version, _, _ in call.spans
        }
        if versions and publish.version not in versions:
            how = f"--set players.{name}.engine.model=RUN/checkpoints/{name}" if name else "--model RUN/checkpoints"
            raise UsageError(
                f"tape {setup.tape.id} was sampled from version {', '.join(sorted(versions))}, and the run's "
                f"configuration names other weights ({publish.version}): say which ones are meant, as in "
                f"{how}/update-000080/hf"
            )
