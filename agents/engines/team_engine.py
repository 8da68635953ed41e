"""TeamEngine: several models on one tape, an engine for each agent path, behind one `Engine`.

The path of the agent that asks selects the engine: its own, else the one of its nearest ancestor, else the one under
the empty path. A tape has one tokenizer and one chat template, so all engines that have a renderer must have the same.
Answers of an engine without a renderer are recorded in the tokens of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...tapes.errors import TapereelError, UsageError
from .engine import (
    BLIND,
    ChangingEngine,
    Completion,
    Engine,
    EngineAbsence,
    EngineError,
    MeasuredEngine,
    Request,
    SyncMode,
    TrainableEngine,
    absence_of,
    sees,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..rendering.renderer import Renderer


class BadTeam(TapereelError, ValueError):
    """Engines that can't be used together on one tape; says which and why."""


@dataclass(frozen=True, slots=True)
class TeamStats:
    """Sums over the engines of a team."""

    busy_seconds: float
    """Busy time of all engines that measure it; can exceed the wall time, since engines work at the same time."""


@dataclass(frozen=True, slots=True)
class TeamAbsence:
    """The waits of a team's engines for their servers."""

    parts: Sequence[EngineAbsence]

    @property
    def seconds(self) -> float:
        """Their sum, which exceeds the wall time where several wait at once."""
        return sum(part.seconds for part in self.parts)

    async def over(self) -> None:
        """Wait for all engines."""
        for part in self.parts:
            await part.over()


def check_sight(engine: object, shows: str | None, name: str | None = None) -> None:
    """UsageError where `engine`, or one of a team, can't see, and a run shows pictures.

    shows: as `LoadedSetup.shows`. name: the engine's in the error; None: its own."""
    parts = engine.engines.values() if isinstance(engine, TeamEngine) else [engine]
    for one in parts if shows is not None else ():
        if not sees(one):
            name = name or getattr(one, "name", type(one).__name__)
            raise UsageError(f"the engine {name!r} can't see, and {shows}: {BLIND}")


class TeamEngine:
    """`TeamEngine({"match/white": white, "match/black": black})`: an `Engine` for a rollout of several agents.

    The first engine is the lead: it takes the weights that the loop syncs. The weights of the other engines change only
    by their own `sync_weights`. `lent`: engines that stay open when the team is closed.
    """

    name = "team"

    def __init__(self, engines: Mapping[str, Engine], *, lent: Collection[Engine] = ()) -> None:
        if not engines:
            raise BadTeam("A team has no engines: give at least one, under the path of the agent that it answers for")
        self.engines = dict(engines)
        self.lead = next(iter(self.engines.values()))
        # One engine may answer for several paths; by id, because engines need not be hashable.
        self._distinct = list({id(engine): engine for engine in self.engines.values()}.values())
        self._lent = {id(engine) for engine in lent}
        check_writing({path: engine.renderer for path, engine in self.engines.items()})

    @property
    def renderer(self) -> Renderer | None:
        """The renderer that all engines with a renderer share; None when all give texts only."""
        return next((engine.renderer for engine in self._distinct if engine.renderer is not None), None)

    @property
    def context(self) -> int | None:
        """The smallest context of the engines."""
        return min((c for engine in self._distinct if (c := engine.context) is not None), default=None)

    @property
    def sees(self) -> bool:
        """Whether all engines take pictures."""
        return all(map(sees, self._distinct))

    @property
    def stats(self) -> TeamStats:
        """Sums over the engines."""
        return TeamStats(sum(one.stats.busy_seconds for one in self._distinct if isinstance(one, MeasuredEngine)))

    @property
    def version(self) -> str:
        """Version of the lead's weights; empty where the lead takes none."""
        return self.lead.version if isinstance(self.lead, TrainableEngine) else ""

    @property
    def changing(self) -> bool:
        """Whether a weight sync of any engine is in progress."""
        return any(engine.changing for engine in self._distinct if isinstance(engine, ChangingEngine))

    @property
    def absence(self) -> TeamAbsence:
        """The waits of the engines for their servers."""
        absences = [absence_of(engine) for engine in self._distinct]
        return TeamAbsence([absence for absence in absences if absence is not None])

    def of(self, path: str) -> Engine:
        """The engine that answers for the agent at `path`. EngineError where there is none."""
        above = path
        while above not in self.engines:
            if not above:
                raise EngineError(
                    f"No engine answers for the agent {path!r}; the team's paths: {_quoted(self.engines)}"
                )
            above = above.rpartition("/")[0]
        return self.engines[above]

    async def complete(self, request: Request) -> Completion:
        """The completion of the engine for `request.path`, with that engine's name in `Completion.engine`."""
        engine = self.of(request.path)
        on_partial = request.on_partial

        def named_partial(completion: Completion) -> None:
            if on_partial is not None:
                on_partial(replace(completion, engine=engine.name))

        return replace(await engine.complete(replace(request, on_partial=named_partial)), engine=engine.name)

    async def sync_weights(self, state: Mapping[str, Tensor], version: str, mode: SyncMode = "reprefill") -> None:
        """New weights for the lead's engine. BadTeam where the lead takes none."""
        if not isinstance(self.lead, TrainableEngine):
            raise BadTeam(f"The team's lead, {self.lead.name}, takes no weights: lead with a TrainableEngine")
        await self.lead.sync_weights(state, version, mode)

    def forget(self, cache_key: str) -> None:
        """In every engine: the key doesn't say which engine held the conversation."""
        for engine in self._distinct:
            engine.forget(cache_key)

    async def close(self) -> None:
        """Close all engines except those in `lent`."""
        for engine in self._distinct:
            if id(engine) not in self._lent:
                await engine.close()


def lead_of(engine: Engine) -> Engine:
    """The engine whose weights the loop replaces: a team's lead, else `engine` itself."""
    return engine.lead if isinstance(engine, TeamEngine) else engine


def check_writing(renderers: Mapping[str, Renderer | None]) -> None:
    """BadTeam where renderers, by the names of their engines, differ in tokenizer or chat template; None fits all."""
    hashes = {
        name: (renderer.tokenizer_hash, renderer.template_hash)
        for name, renderer in renderers.items()
        if renderer is not None
    }
    if len(set(hashes.values())) > 1:
        raise BadTeam(
            f"The engines {_quoted(hashes)} have different tokenizers or chat templates, and a tape has only one: "
            "use models of one family, with the same renderer settings"
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
