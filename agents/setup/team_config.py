"""The models that sample episodes, and the settings shared by all verbs that record episodes.

Partners are further models in the episodes. Each partner samples for the agents that `players` lists for it, and the
run's `engine` samples for all other agents. `finetune` decides which models are trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import AfterValidator, Field, StringConstraints

from ...tapes.common.config import Config
from ...tapes.errors import UsageError
from ...tapes.records import Publish, Sampling
from ..engines.engine import Engine
from ..engines.team_engine import TeamEngine, UnknownAgent, check_sight, check_writing
from ..episode.limits import Limits
from .engine_config import (
    AnyEngineConfig,
    EmbeddedConfig,
    EngineConfig,
    LoadedEngine,
    RenderedConfig,
    ScriptedConfig,
    make_engine,
)

if TYPE_CHECKING:
    from ..rendering.renderer import Renderer

EngineT = TypeVar("EngineT", bound=Engine)

REST = ""
"""The team's key for the engine that samples for all agents without a partner."""


class ModelConfig(Config):
    """A model that samples."""

    engine: EngineConfig
    """The engine that samples with this model. The run's engine samples for every agent that belongs to no player."""


class PartnerConfig(ModelConfig):
    """A further model in the episodes, and the agents that it samples for.

    The partner's engine must have the same tokenizer and chat template as the run's engine, or return only text.
    """

    agents: tuple[str, ...] = Field(min_length=1)
    """Paths of its agents, such as `pair/seeker`. Agents below a path are included, unless another partner has them."""


def _distinct(players: Mapping[str, PartnerConfig]) -> Mapping[str, PartnerConfig]:
    every = [path for player in players.values() for path in player.agents]
    twice = sorted({path for path in every if every.count(path) > 1})
    if twice:
        raise ValueError(f"{twice[0]!r} is there twice: an agent has one model")
    return players


PlayerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{1,64}$")]
"""The name of a player. It consists of letters, digits and `_`, because it is also the name of a folder."""
Partners = Annotated[dict[PlayerName, PartnerConfig], AfterValidator(_distinct)]


class EpisodesConfig(ModelConfig):
    """How episodes are sampled and recorded."""

    sampling: Sampling = Sampling()
    limits: Limits = Limits()
    """Limits of one episode."""
    split: str = "eval"
    """The purpose of the tapes. Only `train` and `demo` may be trained on."""


class RolloutConfig(EpisodesConfig):
    """How episodes are rolled out, by one or more models."""

    players: Partners = Field(default={})
    """Further models in the episodes, by names of your choice. Each samples for its own agents."""


class AttemptsConfig(Config):
    """How many episodes there are for one task."""

    attempts: int = Field(default=1, ge=1, le=100_000)
    """Number of episodes for each task. They form one group and share the environment's seed."""
    concurrency: int = Field(default=64, ge=1)
    """Maximum number of episodes in flight."""


def renderer_of(config: AnyEngineConfig) -> Renderer | None:
    """Return the renderer for an engine with these settings, or None for a text-only engine. Creates no engine."""
    if not isinstance(config, RenderedConfig):
        return None
    folder = config.tokenizer if isinstance(config, ScriptedConfig) else config.model
    if folder is None:
        return None
    return config.renderer.load(folder)


def check_together(engine: AnyEngineConfig, players: Mapping[str, PartnerConfig]) -> None:
    """Raise UsageError if the engines can't record on one tape. The check creates no engine."""
    check_writing(
        {
            "engine": renderer_of(engine),
            **{f"players.{name}": renderer_of(player.engine) for name, player in players.items()},
        }
        if players
        else {}
    )


def check_outermost(players: Mapping[str, PartnerConfig], agent: str) -> None:
    """Raise UnknownAgent if a player has an agent whose path doesn't begin with `agent`, the outermost agent's."""
    for name, player in players.items():
        wrong = next((path for path in player.agents if not f"{path}/".startswith(f"{agent}/")), None)
        if wrong is not None:
            raise UnknownAgent(
                f"players.{name}.agents names {wrong!r}, but each path in these episodes is {agent!r} or begins with "
                f"{agent + '/'!r}: correct it"
            )


def threads_of(engines: Iterable[AnyEngineConfig]) -> int:
    """Return the number of torch threads for the process, which is the largest setting of its embedded engines."""
    return max((config.threads for config in engines if isinstance(config, EmbeddedConfig)), default=1)


def speaker_of(path: str, players: Mapping[str, PartnerConfig]) -> str:
    """Return the name of the player that samples for the agent at `path`. This player lists the path, or the nearest
    path above it. If no player does, return REST, which names the run's own engine."""
    seats = {path: name for name, player in players.items() for path in player.agents}
    above = path
    while above and above not in seats:
        above = above.rpartition("/")[0]
    return seats.get(above, REST)


def team_of(
    engine: EngineT, players: Mapping[str, PartnerConfig], engines: Mapping[str, Engine], *, lent: Collection[str] = ()
) -> EngineT | TeamEngine:
    """Return a team of `engine` and the players' `engines`, by player name. Without players, return just `engine`.

    The team's `close` doesn't close the engines of the players in `lent`, because the caller owns them.
    """
    if not players:
        return engine
    seats = {path: engines[name] for name, player in players.items() for path in player.agents}
    return TeamEngine({REST: engine, **seats}, lent=[engines[name] for name in lent])


async def make_partners(players: Mapping[str, ModelConfig]) -> dict[str, LoadedEngine]:
    """Create an engine for each player. If creating an engine fails, close the others and raise the error."""
    made: dict[str, LoadedEngine] = {}
    try:
        for name, player in players.items():
            made[name] = await make_engine(player.engine)
    except BaseException:  # includes a cancellation: no caller has the engines yet, so no other code can close them
        for one in made.values():
            await one.engine.close()
        raise
    return made


async def make_team(
    config: AnyEngineConfig, players: Mapping[str, PartnerConfig], *, shows: str | None = None
) -> tuple[Engine, dict[str, Publish]]:
    """Create the engines of `config` and of the players. `shows` is a sentence about the task or environment that shows
    pictures, or None.

    Returns (the team, the identity of each engine's weights by player name). The engine of `config` has the name REST,
    and engines without weights are left out. Raises UsageError if the engines can't record on one tape, or if the run
    shows pictures and one of the engines can't see them.
    """
    check_together(config, players)
    models = {REST: ModelConfig(engine=config), **players}
    made = await make_partners(models)
    engines = [model.engine for model in models.values()]
    if any(isinstance(engine, EmbeddedConfig) for engine in engines):
        import torch

        torch.set_num_threads(threads_of(engines))  # each new engine sets this number, but there is one per process
    published = {name: one.publish for name, one in made.items() if one.publish is not None}
    team = team_of(made[REST].engine, players, {name: made[name].engine for name in players})
    try:
        check_sight(team, shows)
    except UsageError:
        await team.close()
        raise
    return team, published
