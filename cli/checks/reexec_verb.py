"""`tapereel reexec`: does a fresh environment still answer the recorded actions as it did?"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ...envs.load_named import load_named
from ...tapes.common.renamed import current_path
from ...tapes.common.text import safe
from ...tapes.errors import UsageError
from ...tapes.store.run_directory import recorded_settings
from .verdict_output import add_tape_arguments, check_named, tell

if TYPE_CHECKING:
    from ...envs.environment import Environment
    from ...tapes.audit.verdict import Verdict
    from ...tapes.records import Identity
    from ...tapes.store.store import Store
    from ...tapes.tape import Tape

EXAMPLE = """
tapereel reexec runs/demo --env tapereel.finetune.run.demonstrations:calculator
tapereel reexec runs/digits 019a3c --env examples/digits.py:Digits --times 3
tapereel reexec runs/digits --mask 'digit.text=[0-9]+' --mask reward.seconds
"""


OWN = ("width", "max_turns", "scorer")
"""Settings of a calculator that are taken from a tape."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    add_tape_arguments(parser)
    parser.add_argument(
        "--env",
        metavar="NAME",
        help="module:name of an environment class or factory (default: as the run's configuration says)",
    )
    parser.add_argument(
        "--times",
        type=int,
        default=1,
        metavar="N",
        help="execute N times, and tell which fields vary and what to declare",
    )
    parser.add_argument(
        "--mask",
        action="append",
        default=[],
        metavar="FIELD[=REGEX]",
        help="a field that may differ (`kind.field`, `reward.name`), or which part",
    )
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="time for one execution (default 60)")


def run(args: argparse.Namespace) -> int:
    """Execute again, and print the verdicts."""
    if args.times < 1 or args.seconds <= 0:
        raise UsageError(f"--times is {args.times} and --seconds {args.seconds}; both must be above 0")
    masks = tuple((name, rule or None) for name, _, rule in (text.partition("=") for text in args.mask))
    name = args.env or recorded_settings(args.run).get(("env",))
    plan = ReexecPlan(name if isinstance(name, str) else None, masks, args.times, args.seconds)
    plan.named()
    verdicts = check_named(args, "reexec", plan)
    proposed: dict[str, str | None] = {}
    for verdict in verdicts.verdicts:
        for field, rule in verdict.proposed.items():
            proposed[field] = None if proposed.get(field, rule) != rule else rule
    told = [safe(f"varies = {proposed!r}   # on the environment, if that is as it should be")] if proposed else []
    if args.times > 1 and not proposed:
        told = [f"nothing varies in {args.times} executions"]
    return tell(args, verdicts, *told, data={"proposed": proposed})


@dataclass(frozen=True)
class ReexecPlan:
    """What a process needs to know to execute tapes again."""

    env: str | None
    """None: the one on each tape, where it is Tapereel's own."""
    masks: tuple[tuple[str, str | None], ...]
    times: int
    seconds: float

    def named(self) -> Callable[[], Environment[Any]] | None:
        """The factory that was named. UsageError where the name is that of something else."""
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
        from ...envs.checks.reexec import reexec
        from ...tapes.audit.verdict import unverifiable

        named, masks = self.named(), dict(self.masks)

        def check(tape: Tape) -> Verdict:
            make = named or own_environment(tape.begin.env)
            if make is None:
                return unverifiable(
                    "reexec",
                    tape.id,
                    f"which environment? It was recorded in {tape.begin.env.cls}: give --env module:name",
                )
            return asyncio.run(reexec(tape, make, normalise=masks, times=self.times, seconds=self.seconds))

        return check


def own_environment(identity: Identity) -> Callable[[], Environment[Any]] | None:
    """The calculator, configured as the tape says, where it was recorded in one; None for any other.

    A tape may come from anywhere, so no name that stands on it is looked up: other code runs only when it is named by
    the caller or the run's configuration."""
    from ...envs.adapters.calculator import Calculator

    if current_path(identity.cls) != f"{Calculator.__module__}:{Calculator.__qualname__}":
        return None
    config: dict[str, Any] = {key: identity.config[key] for key in OWN if key in identity.config}
    return lambda: Calculator(**config)
