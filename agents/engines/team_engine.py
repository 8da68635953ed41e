"""Several models on one tape: an engine for each agent path, behind one door.

The path of who asks decides which engine answers: its own, or that of the nearest agent above it, or the one under the
empty path. A tape names one tokenizer and one chat template, so the engines that have any must have the same; what an
engine without them says is recorded in those of the others. Which of the models is trained is not known here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...tapes.errors import TapereelError
from .engine import Completion, Engine, EngineError, Request


class BadTeam(TapereelError, ValueError):
    """Engines that can't speak on one tape; says which and why."""


@dataclass(frozen=True, slots=True)
class TeamStats:
    """What the engines did together."""

    busy_seconds: float
    """Wall time at work, of all engines that tell."""


class TeamEngine:
    """`TeamEngine({"match/white": white, "match/black": black})`: an `Engine` for a rollout of several agents.

    `lead`: the path whose engine takes the weights that the loop publishes; by default the first. The others keep
    theirs, unless somebody publishes to them. `lent`: those of the engines that the team leaves open when it closes.
    """

    name = "team"

    def __init__(
        self, engines: Mapping[str, Engine], *, lead: str | None = None, lent: Collection[Engine] = ()
    ) -> None:
        if not engines:
            raise BadTeam("a team without engines: give at least one, by the path of the agent that it speaks for")
        lead = next(iter(engines)) if lead is None else lead
        if lead not in engines:
            raise BadTeam(f"lead is {lead!r}, the engines are those of {_names(engines)}: name one of these")
        self.engines = dict(engines)
        self.lead: Any = self.engines[lead]
        self._distinct = list({id(engine): engine for engine in self.engines.values()}.values())
        self._lent = {id(engine) for engine in lent}
        check_writing({path: engine.renderer for path, engine in self.engines.items()})

    @property
    def renderer(self) -> Any | None:
        """The one of all that have any."""
        return next((engine.renderer for engine in self._distinct if engine.renderer is not None), None)

    @property
    def context(self) -> int | None:
        """The smallest."""
        return min((c for engine in self._distinct if (c := engine.context) is not None), default=None)

    @property
    def stats(self) -> TeamStats:
        """Sums over the engines."""
        return TeamStats(sum(engine.stats.busy_seconds for engine in self._distinct if hasattr(engine, "stats")))  # type: ignore[attr-defined]

    @property
    def changing(self) -> bool:
        """Whether the weights of one of them are being exchanged."""
        return any(getattr(engine, "changing", False) for engine in self._distinct)

    def of(self, path: str) -> Engine:
        """The engine that speaks for the agent at `path`. EngineError where nobody does."""
        above = path
        while above not in self.engines:
            if not above:
                raise EngineError(f"no engine speaks for the agent {path!r}; there are some for {_names(self.engines)}")
            above = above.rpartition("/")[0]
        return self.engines[above]

    async def complete(self, request: Request) -> Completion:
        """As the engine of `request.path` answers, in its name."""
        engine = self.of(request.path)
        tell = request.on_partial

        def partial(completion: Completion) -> None:
            if tell is not None:
                tell(replace(completion, engine=engine.name))

        return replace(await engine.complete(replace(request, on_partial=partial)), engine=engine.name)

    async def sync_weights(self, state: Any, version: str, mode: Any = "reprefill") -> None:
        """New weights for the lead's engine."""
        await self.lead.sync_weights(state, version, mode)

    def forget(self, cache_key: str) -> None:
        for engine in self._distinct:
            engine.forget(cache_key)

    async def close(self) -> None:
        for engine in self._distinct:
            if id(engine) not in self._lent:
                await engine.close()


def check_writing(renderers: Mapping[str, Any | None]) -> None:
    """BadTeam where engines, by what to call them, would not write alike; those without a renderer write as others."""
    seen = {name: _writing(renderer) for name, renderer in renderers.items() if renderer is not None}
    if len(set(seen.values())) > 1:
        raise BadTeam(
            f"the engines of {_names(seen)} have different tokenizers or chat templates, and a tape has one: "
            "give models of one family the same renderer"
        )


def _writing(renderer: Any) -> tuple[str, str]:
    return renderer.tokenizer_hash, renderer.template_hash


def _names(engines: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, engines))
