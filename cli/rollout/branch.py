"""`tapereel branch`: go on from a turn of a recorded episode, with something changed; or draw the tree of forks."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ...agents.episode.agent import Agent
from ...agents.episode.limits import Limits
from ...agents.replay.branching import SPLIT, PrefixUnverified, branch, cut, doubt_of, recorded_limits
from ...agents.setup.engine_config import EngineConfig
from ...agents.setup.recorded_setup import import_steps, recorded_agent, with_trainer_settings
from ...agents.setup.setup import load_env
from ...agents.setup.team_config import PartnerConfig, Partners, make_team, speaker_of
from ...envs.environment import Environment
from ...envs.rewards import load_rewards, rewarded
from ...tapes import Sampling, Tape
from ...tapes.audit.compare import TapeDiff, diff_tapes
from ...tapes.common.config import Config, load_config
from ...tapes.common.text import number, safe
from ...tapes.errors import UsageError
from ...tapes.records import Publish
from ...tapes.scoring import total
from ...tapes.store.forks import Fork, tree
from ...tapes.store.run_directory import recorded_settings
from ...tapes.store.store import Store
from ..checks.reexec_verb import own_environment
from ..console import Exit, answer, say, table

if TYPE_CHECKING:
    from rich.tree import Tree

EXAMPLE = """
tapereel branch runs/demo 019a3c --at 2 --model runs/demo/checkpoints/update-000440/hf --n 16
tapereel branch runs/digits-script 019a3c --at 0 --set engine.answers='["7"]' --seed 3
tapereel branch runs/digits 019a3c --at 0 --set sampling.temperature=0.5 --agent agents.py:solver --unverified
tapereel branch runs/demo --tree
"""


class BranchConfig(Config):
    """What the continuations are rolled out with. Whatever isn't set is as it was recorded."""

    engine: EngineConfig
    players: Partners = Field(default={})
    """As in a run."""
    sampling: Sampling
    limits: Limits
    n: int = Field(default=1, ge=1)
    """Continuations; they are one group."""
    seed: int
    """Of the first continuation's sampling; the others' are derived from it."""
    env_seed: int
    split: str = SPLIT
    """What the tapes are recorded for."""
    concurrency: int = Field(default=16, ge=1)
    """Continuations in flight."""


@dataclass(frozen=True)
class _Scene:
    """What is rolled out, from where."""

    tape: Tape
    turn: int
    agent: Agent
    env: Callable[[], Environment[Any]]
    config: BranchConfig


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("run", help="a run directory; the continuations are recorded there too")
    parser.add_argument("tape", nargs="?", help="id of the tape to go on from, or its first characters")
    parser.add_argument(
        "--at", type=int, metavar="TURN", help="take up this turn, counted from 0: the turns before it are kept"
    )
    parser.add_argument(
        "--tree",
        nargs="?",
        const="",
        metavar="TAPE",
        help="draw the trees of forks, or the one in which TAPE stands, and run nothing",
    )
    parser.add_argument(
        "--agent", metavar="NAME", help="module:name or file.py:name (default: as the run's configuration says)"
    )
    parser.add_argument(
        "--env",
        metavar="NAME",
        help="module:name of an environment class or factory (default: as the run's configuration says)",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a model and tokenizer in Hugging Face format (default: the engine of the run's configuration)",
    )
    parser.add_argument("--n", metavar="N", help="continuations, as one group (1)")
    parser.add_argument("--seed", metavar="N", help="sampling seed of the first continuation (the tape's own)")
    parser.add_argument(
        "--env-seed",
        metavar="N",
        help="another environment seed, where the environment comes to the same state under it",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="sets",
        help="one setting, as in --set sampling.temperature=0.5; repeatable",
    )
    parser.add_argument(
        "--unverified",
        action="store_true",
        help="go on even where the prefix can't be verified; each tape records why it can't",
    )


def run(args: argparse.Namespace) -> int:
    """Roll out or draw, and print what came of it."""
    if args.tree is not None:
        with Store.open(args.run) as store:
            trees = tree(store, args.tree or None)
        answer(args, {"run": str(args.run), "trees": trees}, *(map(_drawn, trees) if trees else ["no forks"]))
        return Exit.HOLDS
    if args.tape is None or args.at is None:
        raise UsageError("from where? name a tape and a turn, as in `tapereel branch RUN TAPE --at 2`, or say --tree")
    with Store.open(args.run) as store:
        scene = _scene(args, store)
    try:
        tapes = asyncio.run(_branch(args, scene))
    except PrefixUnverified as error:
        if args.traceback:
            raise
        say(f"tapereel branch: {error}; --unverified goes on all the same, and records that")
        return Exit.BROKEN if error.diverged else Exit.UNVERIFIABLE
    return _tell(args, scene, tapes)


def _scene(args: argparse.Namespace, store: Store) -> _Scene:
    begin = store.tape(args.tape).begin
    import_steps(args.run)
    agent = recorded_agent(args.run, args.agent, begin.agent)
    settings = recorded_settings(args.run)
    name = args.env or settings.get(("env",))
    env = load_env(name) if isinstance(name, str) else own_environment(begin.env)
    if env is None:
        raise UsageError(f"which environment? {begin.tape} was recorded in {begin.env.cls}: give --env module:name")
    rewards = load_rewards(settings.get(("rewards",)) or ())
    env = env if rewards is None else rewarded(env, rewards)
    tape = store.tape(args.tape)  # again: what defines its steps is imported now
    try:
        cut(tape, args.at)
    except ValueError as error:
        raise UsageError(f"--at {args.at}: {error}") from error
    return _Scene(tape, args.at, agent, env, _config(args, tape))


def _config(args: argparse.Namespace, tape: Tape) -> BranchConfig:
    begin = tape.begin
    recorded = with_trainer_settings(_recorded(args.run, "engine"), _recorded(args.run, "trainer"))
    players = _recorded(args.run, "players")
    if not _keeps_engine(args):
        recorded = {"renderer": recorded["renderer"]} if "renderer" in recorded else {}
    base: dict[str, Any] = {
        "engine": recorded,
        "players": _speaking(players),
        "sampling": (begin.sampling or Sampling()).model_dump(mode="json"),
        "limits": recorded_limits(tape).model_dump(mode="json"),
        "seed": begin.seed,
        "env_seed": begin.env_seed,
    }
    sets = [f"{key}={json.dumps(value)}" for key, value in base.items() if value != {}]
    if args.model is not None:
        sets += ["engine.kind=embedded", f"engine.model={args.model}"]
    elif any(text.startswith(("engine.answers", "engine.policy")) for text in args.sets):
        sets.append("engine.kind=scripted")
    elif not recorded and not args.sets:
        raise UsageError(f"which model? {args.run} has no configuration that names an engine: give --model DIR")
    more = {"n": args.n, "seed": args.seed, "env_seed": args.env_seed}
    return load_config(BranchConfig, None, [*sets, *(f"{k}={v}" for k, v in more.items() if v is not None), *args.sets])


def _keeps_engine(args: argparse.Namespace) -> bool:
    """Whether the model is to be the one of the run's configuration."""
    others = ("engine.kind", "engine.model", "engine.answers", "engine.policy")
    return args.model is None and not any(text.startswith(others) for text in args.sets)


def _recorded(run: str, group: str) -> dict[str, Any]:
    """The settings of the run in that group, nested; empty where there are none."""
    made: dict[str, Any] = {}
    for keys, value in recorded_settings(run).items():
        if keys[0] == group and len(keys) > 1:
            node = made
            for key in keys[1:-1]:
                node = node.setdefault(key, {})
            node[keys[-1]] = value
    return made


def _speaking(players: dict[str, Any]) -> dict[str, Any]:
    """What of the players' settings says how they speak; how they learn plays no part."""
    known = PartnerConfig.model_fields
    return {
        name: {key: value for key, value in own.items() if key in known}
        | {"engine": with_trainer_settings(own["engine"], {} if own.get("frozen") else own.get("trainer", {}))}
        for name, own in players.items()
    }


async def _branch(args: argparse.Namespace, scene: _Scene) -> list[Tape]:
    """The continuations. Nothing is written to the run before it is sure that there will be some."""
    config = scene.config
    seeds: dict[str, Any] = {"env_seed": config.env_seed, "limits": config.limits}
    engine, publishes = await make_team(config.engine, config.players)
    try:
        _check_weights(args, scene, publishes)
        doubt = None if args.unverified else await doubt_of(scene.tape, scene.turn, scene.env, **seeds)
        if doubt is not None:
            raise doubt
        with Store.open(args.run, write=True) as store:
            known = {stored.record.version for stored in store.run_records("publish")}
            for publish in publishes.values():
                if publish.version not in known:
                    store.append_layer(publish)
                    known.add(publish.version)
            return await branch(
                scene.tape,
                scene.turn,
                scene.agent,
                scene.env,
                engine=engine,
                n=config.n,
                seed=config.seed,
                sampling=config.sampling,
                split=config.split,
                journal=store.writer,
                concurrency=config.concurrency,
                unverified=args.unverified,
                **seeds,
            )
    finally:
        await engine.close()


def _check_weights(args: argparse.Namespace, scene: _Scene, publishes: Mapping[str, Publish]) -> None:
    """A run's configuration names the weights that it began with, which need not be those that sampled this tape."""
    tape, players = scene.tape, scene.config.players
    for name, publish in publishes.items():
        if not _as_recorded(args, name):
            continue
        versions = {
            version for call in tape.calls if speaker_of(call.by, players) == name for version, _, _ in call.spans
        }
        if versions and publish.version not in versions:
            how = f"--set players.{name}.engine.model=RUN/checkpoints/{name}" if name else "--model RUN/checkpoints"
            raise UsageError(
                f"tape {tape.id} was sampled from version {', '.join(sorted(versions))}, and the run's "
                f"configuration names other weights ({publish.version}): say which ones are meant, as in "
                f"{how}/update-000080/hf"
            )


def _as_recorded(args: argparse.Namespace, name: str) -> bool:
    """Whether the model of that player is to be the one of the run's configuration."""
    if not name:
        return _keeps_engine(args)
    return not any(text.startswith(("players=", f"players.{name}=", f"players.{name}.engine")) for text in args.sets)


# What people see


def _tell(args: argparse.Namespace, scene: _Scene, tapes: list[Tape]) -> int:
    found = [diff_tapes(scene.tape, tape) for tape in tapes]
    parent = tapes[0].begin.parent
    assert parent is not None
    rewards = [tape.reward for tape in tapes if tape.trains and tape.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    then = _earned_since(scene.tape, tapes[0].inherited)
    data = {
        "run": str(args.run),
        "parent": parent.tape,
        "turn": parent.turn,
        "digest": parent.digest,
        "unverified": parent.unverified,
        "group": tapes[0].begin.group,
        "mean_reward": mean,
        "recorded_reward": then,
        "tapes": [
            {**one.second.model_dump(), "own_turns": tape.turns - parent.turn, "parting": one.parting}
            for one, tape in zip(found, tapes, strict=True)
        ],
    }
    made = table(
        "tape",
        "status",
        "#reward",
        "#own turns",
        "parts from the recorded one",
        fold=("status", "parts from the recorded one"),
    )
    for one, tape in zip(found, tapes, strict=True):
        made.add_row(
            one.second.id, one.second.status, number(one.second.reward), str(tape.turns - parent.turn), _parts(one)
        )
    lines = [safe(f"went on unverified: {parent.unverified}")] if parent.unverified is not None else []
    lines.append(
        f"{len(tapes)} from turn {parent.turn} of {parent.tape}; from that turn on they earn {number(mean)} "
        f"in the mean over {len(rewards)} scored, and the recorded one {number(then)}"
    )
    answer(args, data, made, *lines)
    return Exit.HOLDS if any(tape.trains for tape in tapes) else Exit.BROKEN


def _earned_since(tape: Tape, step: int) -> float | None:
    """What a tape earned from that step on, as a continuation from there is scored: for its own part and its end."""
    rewards = [r for r in tape.rewards if r.step is None or r.step >= step]
    above = tape.parent
    while above is not None:
        rewards += (r for r in above.rewards if r.step is not None and r.step >= step)
        above = above.parent
    return total(rewards)


def _parts(found: TapeDiff) -> str:
    p = found.parting
    if p is None:
        return "nowhere"
    return safe(f"turn {p.turn}: {p.field}" if p.turn is not None else p.field)


def _drawn(root: Fork) -> Tree:
    from rich.tree import Tree

    drawn = Tree(safe(_label(root)))
    _grow(drawn, root)
    return drawn


def _grow(drawn: Tree, fork: Fork) -> None:
    for child in fork.children:
        _grow(drawn.add(safe(_label(child))), child)


def _label(fork: Fork) -> str:
    at = f"turn {fork.turn}: " if fork.parent is not None else ""
    told = f"{at}{fork.tape}  {fork.status or 'running'}, reward {number(fork.reward)}, {fork.turns} own turns"
    told += f", {fork.agent}, split {fork.split}"
    return told if fork.unverified is None else f"{told}, unverified ({fork.unverified})"
