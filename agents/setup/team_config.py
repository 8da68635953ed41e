"""Partners: models that speak in the same episodes as a run's own engine, each for agents of its own.

The settings `players` of `tapereel run`, `branch` and `train` are these. The run's `engine` speaks for everybody whom
no partner has. Who of them is trained isn't known here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, StringConstraints

from ...tapes.common.config import Config
from ...tapes.records import Publish
from ..engines.engine import Engine
from ..engines.team_engine import TeamEngine, check_writing
from .engine_config import AnyEngineConfig, EmbeddedConfig, EngineConfig, Made, make_engine

EngineT = TypeVar("EngineT", bound=Engine)

REST = ""
"""Where a team has the engine of all who have no other."""


class PartnerConfig(Config):
    """Another model in the episodes, and whom it speaks for."""

    agents: tuple[str, ...] = Field(min_length=1)
    """Paths of its agents, as `pair/seeker`. It speaks for those below them as well, unless another one does."""
    engine: EngineConfig
    """Of the tokenizer and chat template of the run's engine, or one that gives texts alone."""


def _distinct(players: Mapping[str, PartnerConfig]) -> Mapping[str, PartnerConfig]:
    every = [path for player in players.values() for path in player.agents]
    twice = sorted({path for path in every if every.count(path) > 1})
    if twice:
        raise ValueError(f"{twice[0]!r} stands there twice: an agent has one model")
    return players


PlayerName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{1,64}$")]
"""Letters, digits and `_`: it names a folder."""
Partners = Annotated[dict[PlayerName, PartnerConfig], AfterValidator(_distinct)]


def renderer_of(config: AnyEngineConfig) -> Any | None:
    """The renderer of that engine, which need not be made for it; None for one that gives texts alone."""
    folder = getattr(config, "tokenizer" if config.kind == "scripted" else "model", None)
    if config.kind == "litellm" or folder is None:
        return None
    from ..engines.embedded.pretrained import load_tokenizer

    return config.renderer.make(load_tokenizer(folder))  # type: ignore[union-attr]


def check_together(engine: AnyEngineConfig, players: Mapping[str, PartnerConfig]) -> None:
    """BadTeam where they can't write on one tape, found without making them."""
    check_writing(
        {
            "engine": renderer_of(engine),
            **{f"players.{name}": renderer_of(player.engine) for name, player in players.items()},
        }
        if players
        else {}
    )


def threads_of(engines: Iterable[AnyEngineConfig]) -> int:
    """How many torch threads the process uses: as many as the engine that asks for most."""
    return max((config.threads or 1 for config in engines if isinstance(config, EmbeddedConfig)), default=1)


def speaker_of(path: str, players: Mapping[str, PartnerConfig]) -> str:
    """The name of the player that speaks for the agent at `path`; REST where the run's engine does."""
    seats = {path: name for name, player in players.items() for path in player.agents}
    above = path
    while above and above not in seats:
        above = above.rpartition("/")[0]
    return seats.get(above, REST)


def team_of(
    engine: EngineT, players: Mapping[str, PartnerConfig], engines: Mapping[str, Engine], *, lent: Collection[str] = ()
) -> EngineT | TeamEngine:
    """`engine` alone, or a team of it and the players' `engines`, by name. The team leaves those of the players in
    `lent` open when it is closed."""
    if not players:
        return engine
    seats = {path: engines[name] for name, player in players.items() for path in player.agents}
    return TeamEngine({REST: engine, **seats}, lent=[engines[name] for name in lent])


async def make_partners(players: Mapping[str, PartnerConfig]) -> dict[str, Made]:
    """An engine for each, by name. Where one can't be made, the others are closed."""
    made: dict[str, Made] = {}
    try:
        for name, player in players.items():
            made[name] = await make_engine(player.engine)
    except BaseException:
        for one in made.values():
            await one.engine.close()
        raise
    return made


async def make_team(config: AnyEngineConfig, players: Mapping[str, PartnerConfig]) -> tuple[Engine, dict[str, Publish]]:
    """(the engine of `config` with those of the players, the weights of each that has any by the player's name, REST
    for `config`). BadTeam where they can't write on one tape."""
    check_together(config, players)
    partners = await make_partners(players)
    try:
        made = await make_engine(config)
    except BaseException:
        for one in partners.values():
            await one.engine.close()
        raise
    _use_threads([config, *(player.engine for player in players.values())])
    published = {name: one.publish for name, one in {REST: made, **partners}.items() if one.publish is not None}
    return team_of(made.engine, players, {name: one.engine for name, one in partners.items()}), published


def _use_threads(engines: list[AnyEngineConfig]) -> None:
    """The last embedded engine that was made has set its own number."""
    if any(config.kind == "embedded" for config in engines):
        import torch

        torch.set_num_threads(threads_of(engines))
