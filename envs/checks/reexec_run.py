"""Re-execution of a whole run: recorded actions run again in fresh environments, and the answers are compared."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...tapes.audit.checking import check_run
from ...tapes.common.progress import Progress, silent
from ...tapes.common.renamed import current_path
from ...tapes.errors import UsageError
from ...tapes.store.run_directory import recorded_settings
from ..load_named import load_named

if TYPE_CHECKING:
    from ...tapes.audit.verdict import Verdict, Verdicts
    from ...tapes.records import Identity
    from ...tapes.store.store import Store
    from ...tapes.tape import Tape
    from ..environment import Environment

CALCULATOR_SETTINGS = ("width", "max_turns", "scorer")
"""Settings of a calculator that are read from a tape."""


def reexec_run(
    run: str | Path,
    env: str | None = None,
    *,
    masks: Mapping[str, str | None] | None = None,
    times: int = 1,
    seconds: float = 60.0,
    tapes: Sequence[str] = (),
    split: str | None = None,
    jobs: int | None = None,
    progress: Progress = silent,
) -> Verdicts:
    """Execute the recorded actions again, on the named tapes of a run or on all closed tapes of a split.

    env: `module:name` of an environment class or factory; None: that of the run's configuration. masks: field -> the
    regex of the part that may differ, None for the whole field. times: executions of each tape; with two or more, the
    verdicts name the fields that vary (`proposed_masks`). seconds: wall clock of one execution.
    """
    if times < 1 or seconds <= 0:
        raise UsageError(f"times is {times} and seconds {seconds}; times must be 1 or more, and seconds above 0")
    name = env or recorded_settings(run).get("env")
    plan = ReexecPlan(name if isinstance(name, str) else None, tuple((masks or {}).items()), times, seconds)
    plan.factory()  # a wrong name is refused here, before any process starts
    return check_run(run, "reexec", plan, tapes=tapes, split=split, jobs=jobs, progress=progress)


def proposed_masks(verdicts: Iterable[Verdict]) -> dict[str, str | None]:
    """The fields that varied between executions -> what to declare in `Environment.varies`. Where two tapes propose
    different parts of a field, the whole field is proposed (None)."""
    proposed: dict[str, str | None] = {}
    for verdict in verdicts:
        for field, rule in verdict.proposed.items():
            proposed[field] = None if proposed.get(field, rule) != rule else rule
    return proposed


@dataclass(frozen=True)
class ReexecPlan:
    """What a worker process needs to execute tapes again. It is pickled, so it holds names and no objects."""

    env: str | None
    """None: the environment on each tape, where that is Tapereel's own."""
    masks: tuple[tuple[str, str | None], ...]
    times: int
    seconds: float

    def factory(self) -> Callable[[], Environment[Any]] | None:
        """The factory called `env`; None without a name. UsageError where the name is that of something else."""
        if self.env is None:
            return None
        found = load_named(self.env)
        if not callable(found):
            raise UsageError(
                f"{self.env} is an object of type {type(found).__qualname__}, not an environment class or "
                "a function that makes one"
            )
        return cast("Callable[[], Environment[Any]]", found)

    def __call__(self, store: Store) -> Callable[[Tape], Verdict]:
        from ...tapes.audit.verdict import unverifiable
        from .reexec import reexec

        named, masks = self.factory(), dict(self.masks)

        def check(tape: Tape) -> Verdict:
            make = named or own_environment(tape.begin.env)
            if make is None:
                return unverifiable(
                    "reexec",
                    tape.id,
                    f"no environment is named; the tape was recorded in {tape.begin.env.cls}: give --env module:name",
                )
            return asyncio.run(reexec(tape, make, normalise=masks, times=self.times, seconds=self.seconds))

        return check


def own_environment(identity: Identity) -> Callable[[], Environment[Any]] | None:
    """The calculator with the settings on the tape, where the tape was recorded in one; None for any other.

    A tape may come from an untrusted source, so a class path on it is never imported: other code runs only where the
    caller or the run's configuration names it.
    """
    from ..adapters.calculator import Calculator

    if current_path(identity.cls) != f"{Calculator.__module__}:{Calculator.__qualname__}":
        return None
    config: dict[str, Any] = {key: identity.config[key] for key in CALCULATOR_SETTINGS if key in identity.config}
    return lambda: Calculator(**config)
