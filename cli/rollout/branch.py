"""`tapereel branch`: continue a recorded episode from one of its turns, with a change."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ...tapes.audit.compare import TapeDiff, diff_tapes
from ...tapes.common.stats import number
from ..console import Exit, Section, answer, say
from ..scene_arguments import add_set_argument, option_settings

if TYPE_CHECKING:
    from ...agents.replay.branching import Branched

EXAMPLE = """
tapereel branch runs/demo 019a3c --at 2 --model runs/demo/checkpoints/update-000440/hf --n 16
tapereel branch runs/digits-script 019a3c --at 0 --set engine.answers='["7"]' --seed 3
tapereel branch runs/digits 019a3c --at 0 --set sampling.temperature=0.5 --agent agents.py:solver --unverified
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", help="a run directory; the continuations are recorded there too")
    parser.add_argument("tape", help="id of the tape to continue, or its first characters")
    parser.add_argument(
        "--at",
        type=int,
        required=True,
        metavar="TURN",
        help="first new turn, counted from 0; the turns before it are kept",
    )
    own = "(default: as in the run's configuration)"
    parser.add_argument("--agent", metavar="NAME", help=f"the agent, as module:name or file.py:name {own}")
    parser.add_argument("--env", metavar="NAME", help=f"an environment class or factory, as module:name {own}")
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="folder of a model and tokenizer in Hugging Face format (default: the engine of the run's configuration)",
    )
    parser.add_argument("--n", metavar="N", help="continuations, as one group (default 1)")
    parser.add_argument("--seed", metavar="N", help="sampling seed of the first continuation (default: the tape's)")
    parser.add_argument(
        "--env-seed",
        metavar="N",
        help="another environment seed; the kept turns must come out the same with it",
    )
    add_set_argument(parser, "sampling.temperature=0.5")
    parser.add_argument(
        "--unverified",
        action="store_true",
        help="continue even if the kept turns can't be verified; each tape records why",
    )


def run(args: argparse.Namespace) -> int:
    """Roll out, and print the result."""
    from ...agents.replay.branching import PrefixUnverified, branch_run

    sets = [*option_settings(args, "seed", "env_seed", n="attempts"), *args.sets]
    try:
        found = branch_run(
            args.run,
            args.tape,
            args.at,
            agent=args.agent,
            env=args.env,
            model=args.model,
            sets=sets,
            unverified=args.unverified,
        )
    except PrefixUnverified as error:
        if args.traceback:
            raise
        say(f"tapereel branch: {error}; --unverified continues anyway, and records the reason")
        return Exit.BROKEN if error.diverged else Exit.UNVERIFIABLE
    return _print(args, found)


def _print(args: argparse.Namespace, branched: Branched) -> int:
    tapes, found = branched.tapes, [diff_tapes(branched.recorded, tape) for tape in branched.tapes]
    parent = tapes[0].begin.parent
    assert parent is not None
    mean, recorded = branched.mean_reward, branched.recorded_reward
    data = {
        "run": str(args.run),
        "parent": parent.tape,
        "turn": parent.turn,
        "digest": parent.digest,
        "unverified": parent.unverified,
        "group": tapes[0].begin.group,
        "mean_reward": mean,
        "recorded_reward": recorded,
        "tapes": [
            {**one.second.model_dump(), "own_turns": tape.turns - parent.turn, "parting": one.parting}
            for one, tape in zip(found, tapes, strict=True)
        ],
    }
    differs = "differs from the recorded tape at"
    rows = [
        (one.second.id, one.second.status, number(one.second.reward), str(tape.turns - parent.turn), _place(one))
        for one, tape in zip(found, tapes, strict=True)
    ]
    made = Section(("tape", "status", "#reward", "#own turns", differs), rows)
    lines = [f"not verified: {parent.unverified}"] if parent.unverified is not None else []
    lines.append(
        f"{len(tapes)} continuations from turn {parent.turn} of {parent.tape}; mean reward from that turn on "
        f"{number(mean)} over {len(branched.rewards)} scored; the recorded tape earned {number(recorded)}"
    )
    answer(args, data, made, *lines)
    return Exit.HOLDS if any(tape.trains for tape in tapes) else Exit.BROKEN


def _place(found: TapeDiff) -> str:
    p = found.parting
    if p is None:
        return "nowhere"
    return p.field if p.turn is None else f"turn {p.turn}: {p.field}"
