"""`TeamEngine` combines an engine for each agent path into one `Engine`, so that a tape can have several models.

A request goes to the engine for its agent's path. If that path has no engine, the nearest ancestor with an engine is
used. The last resort is the empty path. All engines with a renderer must have the same tokenizer and chat template,
because a tape has only one of each. Answers from an engine without a renderer are recorded in tokens of that tokenizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from ...tapes.errors import TapereelError, UsageError
from .engine import (
    BLIND,
    Capability,
    CapableEngine,
    Completion,
    Engine,
    EngineAbsence,
    EngineError,
    Request,
    SyncMode,
    absence_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from ..rendering.renderer import Renderer


class UnknownAgent(TapereelError, ValueError):
    """The settings name an agent that doesn't speak in the episodes. The message has the paths of those that do."""


@dataclass(frozen=True, slots=True)
class TeamStats:
    """Totals over all engines in a team."""

    busy_seconds: float
    """Sum of all measured busy times. It can exceed the wall time, because engines work concurrently."""


@dataclass(frozen=True, slots=True)
class TeamAbsence:
    """Measures how long the engines in a team wait for their servers."""

    parts: Sequence[EngineAbsence]

    @property
    def seconds(self) -> float:
        """The engines' waiting times, added up. The sum exceeds the wall time if several engines wait at once."""
        return sum(part.seconds for part in self.parts)

    async def over(self) -> None:
        """Wait until no engine waits for its servers any more."""
        for part in self.parts:
            await part.over()


def check_sight(engine: Engine, shows: str | None) -> None:
    """Raise UsageError if a run shows pictures that `engine` can't read. In a team, every engine must be able to read
    them.

    `shows` is a sentence about the task or environment that shows pictures, or None if the run shows none."""
    for one in engine.engines.values() if isinstance(engine, TeamEngine) else [engine]:
        if "pictures" not in one.can:
            refuse_pictures(one.name, shows)


def refuse_pictures(name: str, shows: str | None) -> None:
    """Raise UsageError if a run shows pictures, as the sentence `shows` says. `name` is the engine or model that can't
    read them."""
    if shows is not None:
        raise UsageError(f"the engine {name!r} can't see, and {shows}: {BLIND}")


class TeamEngine:
    """An `Engine` for a rollout of several agents: `TeamEngine({"match/white": white, "match/black": black})`.

    The first engine is the lead, to which the training loop sends new weights. The weights of another engine change
    only if its own `sync_weights` is called. The engines in `lent` stay open when the team is closed.
    """

    name = "team"

    def __init__(self, engines: Mapping[str, Engine], *, lent: Collection[Engine] = ()) -> None:
        if not engines:
            raise UsageError(
                "A team has no engines: give at least one, under the path of the agent that it answers for"
            )
        self.engines = dict(engines)
        self.lead = next(iter(self.engines.values()))
        # The same engine may be given for several paths. Engines are compared by id, because they need not be hashable.
        self._distinct = list({id(engine): engine for engine in self.engines.values()}.values())
        self._lent = {id(engine) for engine in lent}
        check_writing({path: engine.renderer for path, engine in self.engines.items()})
        self._able = [cast(CapableEngine, engine) for engine in self._distinct]
        can: set[Capability] = {"stats", *(self.lead.can & {"weights"})}
        if all("pictures" in engine.can for engine in self._able):
            can.add("pictures")
        if any("absence" in engine.can for engine in self._able):
            can.add("absence")
        if any("grammar" in engine.can for engine in self._able):
            can.add("grammar")
        self.can = frozenset(can)
        """The team has `weights` if the lead has it, and `pictures` if all engines have it. It has `absence` or
        `grammar` if at least one engine has it. An engine without `grammar` gets no grammar."""

    @property
    def renderer(self) -> Renderer | None:
        """The renderer that all engines with a renderer share, or None if no engine has one."""
        return next((engine.renderer for engine in self._distinct if engine.renderer is not None), None)

    @property
    def context(self) -> int | None:
        """The smallest `context` of all engines."""
        return min((c for engine in self._distinct if (c := engine.context) is not None), default=None)

    @property
    def stats(self) -> TeamStats:
        """Totals over the engines that measure their busy time."""
        return TeamStats(sum(engine.stats.busy_seconds for engine in self._able if "stats" in engine.can))

    @property
    def version(self) -> str:
        """Version of the lead's weights. It is empty if the lead takes no weights."""
        return cast(CapableEngine, self.lead).version if "weights" in self.lead.can else ""

    @property
    def changing(self) -> bool:
        """Whether a weight sync is in progress at any engine."""
        return any(engine.changing for engine in self._able if "weights" in engine.can)

    @property
    def absence(self) -> TeamAbsence:
        """How long the engines have waited for their servers."""
        return TeamAbsence([one for engine in self._distinct if (one := absence_of(engine)) is not None])

    def of(self, path: str) -> Engine:
        """Return the engine that answers requests from the agent at `path`. Raises EngineError if there is none."""
        found = self.engines.get(self.seat(path))
        if found is None:
            raise EngineError(
                f"No engine answers for the agent {path!r}; the team has the paths {_quoted(self.engines)}"
            )
        return found

    def seat(self, path: str) -> str:
        """Return the nearest path to `path`, from itself upwards, that has an engine, or an empty string."""
        while path and path not in self.engines:
            path = path.rpartition("/")[0]
        return path

    async def complete(self, request: Request) -> Completion:
        """Return a completion from the engine for `request.path`. `Completion.engine` is that engine's name."""
        engine = self.of(request.path)
        on_partial = request.on_partial

        def named_partial(completion: Completion) -> None:
            if on_partial is not None:
                on_partial(replace(completion, engine=engine.name))

        grammar = request.grammar if "grammar" in engine.can else ()
        asked = replace(request, on_partial=named_partial, grammar=grammar)
        return replace(await engine.complete(asked), engine=engine.name)

    async def sync_weights(self, state: Mapping[str, Tensor], version: str, mode: SyncMode = "reprefill") -> None:
        """Replace the lead's weights. Raises UsageError if the lead takes no weights."""
        if "weights" not in self.lead.can:
            raise UsageError(f"The team's lead, {self.lead.name}, takes no weights: lead with an engine that does")
        await cast(CapableEngine, self.lead).sync_weights(state, version, mode)

    def forget(self, cache_key: str) -> None:
        """Call `forget` on every engine, because the key doesn't tell which engine had the conversation."""
        for engine in self._distinct:
            engine.forget(cache_key)

    async def close(self) -> None:
        """Close all engines except those in `lent`."""
        for engine in self._distinct:
            if id(engine) not in self._lent:
                await engine.close()


def answering(engine: Engine, path: str) -> Engine:
    """Return the engine that answers the agent at `path`: one of a team's engines, or `engine` itself."""
    return engine.engines.get(engine.seat(path), engine) if isinstance(engine, TeamEngine) else engine


def check_seats(engine: Engine, spoke: Set[str]) -> None:
    """Raise UnknownAgent if a team has an engine for a path at which, or below which, none of the agents in `spoke` is.
    Another engine would answer for the agent that was meant, without a word."""
    seats = engine.engines if isinstance(engine, TeamEngine) and spoke else ()
    unknown = [seat for seat in seats if seat and not any(f"{path}/".startswith(f"{seat}/") for path in spoke)]
    if unknown:
        raise UnknownAgent(
            f"the players name {_quoted(unknown)}, but the agents that spoke are {_quoted(sorted(spoke))}: correct "
            "`players.NAME.agents`"
        )


def lead_of(engine: Engine) -> Engine:
    """Return the lead if `engine` is a team, and otherwise `engine` itself. The loop replaces this engine's weights."""
    return engine.lead if isinstance(engine, TeamEngine) else engine


def check_writing(renderers: Mapping[str, Renderer | None]) -> None:
    """Raise UsageError if the renderers differ in tokenizer or chat template. `renderers` holds the renderer of each
    engine by its name. Engines without a renderer (None) are always accepted."""
    hashes = {
        name: (renderer.tokenizer_hash, renderer.template_hash)
        for name, renderer in renderers.items()
        if renderer is not None
    }
    if len(set(hashes.values())) > 1:
        raise UsageError(
            f"The engines {_quoted(hashes)} have different tokenizers or chat templates, and a tape has only one: "
            "use models of one family, with the same renderer settings"
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
