"""Replay of a whole run: the agent's code runs again on every tape, and each request and step is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...tapes.audit.checking import check_run
from ...tapes.common.progress import Progress, silent
from ...tapes.common.run_async import run_async
from ...tapes.errors import UsageError

if TYPE_CHECKING:
    from ...tapes.audit.verdict import Verdict, Verdicts
    from ...tapes.store.store import Store
    from ...tapes.tape import Tape
    from ..episode.agent import Agent

SECONDS = 60.0
"""Wall clock that one tape may take."""


def replay_run(
    run: str | Path,
    agent: Agent | str | None = None,
    *,
    imports: Sequence[str] = (),
    tokenizer: str | None = None,
    turn: int | None = None,
    seconds: float = SECONDS,
    tapes: Sequence[str] = (),
    split: str | None = None,
    jobs: int | None = None,
    progress: Progress = silent,
) -> Verdicts:
    """Run the agent again on the named tapes of a run, or on all closed tapes of a split.

    agent: an object or `module:name`; None: the agent of the run's configuration. An object is replayed in this
    process, since worker processes find agents by name. imports: `module:name` of anything else that
    defines steps. tokenizer: a folder; None: the run's own. turn: check this turn alone. jobs: processes; None: as
    many as pay for their start.
    """
    if seconds <= 0:
        raise UsageError(f"seconds is {seconds}; it must be above 0")
    if agent is not None and not isinstance(agent, str):
        jobs = 1
    plan = ReplayPlan(str(run), agent, tuple(imports), tokenizer, turn, seconds)
    return check_run(run, "replay", plan, tapes=tapes, split=split, turn=turn, jobs=jobs, progress=progress)


@dataclass(frozen=True)
class ReplayPlan:
    """What a worker process needs to replay tapes. It is pickled, unless `agent` is an object."""

    run: str
    agent: Agent | str | None
    imports: tuple[str, ...]
    tokenizer: str | None
    turn: int | None
    seconds: float

    def __call__(self, store: Store) -> Callable[[Tape], Verdict]:
        from ...tapes.audit.verdict import unverifiable
        from ..setup.recorded_setup import import_steps, recorded_agent, recorded_renderer
        from .replayer import replay

        first = next(iter(store.summaries()), None)
        import_steps(self.run, self.imports)
        begin = store.tape(first.id).begin if first is not None else None
        agent = recorded_agent(self.run, self.agent, begin.agent if begin is not None else None)
        renderer = recorded_renderer(self.run, self.tokenizer)

        def check(tape: Tape) -> Verdict:
            if tape.begin.agent.name != agent.path:
                return unverifiable(
                    "replay",
                    tape.id,
                    f"it was recorded of the agent {tape.begin.agent.name!r}, not of {agent.path!r}: give --agent",
                )
            return run_async(replay(tape, agent, renderer=renderer, turn=self.turn, seconds=self.seconds))

        return check
