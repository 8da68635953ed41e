"""`tapereel replay`: does the agent's code still do, word for word, what the tapes say it did?"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...tapes.errors import UsageError
from .verdict_output import add_tape_arguments, check_named, tell

if TYPE_CHECKING:
    from ...tapes.audit.verdict import Verdict
    from ...tapes.store.store import Store
    from ...tapes.tape import Tape

EXAMPLE = """
tapereel replay runs/demo
tapereel replay runs/demo 019a3c --turn 2
tapereel replay runs/digits --agent examples/digits.py:player --jobs 4 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    add_tape_arguments(parser, turn=True)
    parser.add_argument(
        "--agent", metavar="NAME", help="module:name or file.py:name (default: as the run's configuration says)"
    )
    parser.add_argument(
        "--import",
        dest="names",
        action="append",
        default=[],
        metavar="NAME",
        help="module:name of an environment, or of anything else that defines steps",
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the run's own)")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="time for one tape (default 60)")


def run(args: argparse.Namespace) -> int:
    """Replay, and print the verdicts."""
    if args.seconds <= 0:
        raise UsageError(f"--seconds is {args.seconds}; it must be above 0")
    plan = ReplayPlan(str(args.run), args.agent, tuple(args.names), args.tokenizer, args.turn, args.seconds)
    return tell(args, check_named(args, "replay", plan))


@dataclass(frozen=True)
class ReplayPlan:
    """What a process needs to know to replay tapes."""

    run: str
    agent: str | None
    names: tuple[str, ...]
    tokenizer: str | None
    turn: int | None
    seconds: float

    def __call__(self, store: Store) -> Callable[[Tape], Verdict]:
        from ...agents.replay.replayer import replay
        from ...agents.setup.recorded_setup import import_steps, recorded_agent, recorded_renderer
        from ...tapes.audit.verdict import unverifiable

        first = next(iter(store.summaries()), None)
        import_steps(self.run, self.names)
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
            return asyncio.run(replay(tape, agent, renderer=renderer, turn=self.turn, seconds=self.seconds))

        return check
