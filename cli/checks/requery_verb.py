"""`tapereel requery`: did these tokens come from these weights?"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from ...tapes.audit.checking import chosen_tapes, torn_tails
from ...tapes.audit.verdict import Verdict, Verdicts
from ...tapes.errors import UsageError
from ..progress_bars import live_progress
from .verdict_output import add_keep_argument, tell

if TYPE_CHECKING:
    from ...tapes.store.store import Store

EXAMPLE = """
tapereel requery runs/digits
tapereel requery runs/digits --model runs/digits/checkpoints/update-000080
tapereel requery runs/digits 019a3c --model runs/digits-model --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "tape",
        nargs="*",
        default=[],
        help="ids of tapes, or their first characters; without any, all that a model sampled",
    )
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="a checkpoint or model folder that must have sampled every "
        "token (default: those of each token's own version, where the run keeps them)",
    )
    parser.add_argument("--split", help="only tapes of this split (`train`, `eval`, ...)")
    add_keep_argument(parser)
    parser.add_argument("--tolerance", type=float, metavar="NATS", help="difference of log-probs that is none (1e-4)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="torch threads (default 1)")


def run(args: argparse.Namespace) -> int:
    """Put the tokens to the weights, and print the verdicts."""
    import torch

    from ...finetune.inspect.requery import BATCH, TOLERANCE, Policies, requery
    from ...tapes.store.store import Store

    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    if tolerance < 0 or args.threads < 1:
        raise UsageError(f"--tolerance is {tolerance} and --threads {args.threads}; neither can be")
    torch.set_num_threads(args.threads)
    started, found = time.perf_counter(), list[Verdict]()
    with Store.open(args.run) as store, live_progress() as progress:
        torn = torn_tails(store)
        every = chosen_tapes(store, args.tape, args.split)
        ids = every if args.tape else _sampled(store, args.split)
        policies = Policies(
            store.path,
            [stored.record for stored in store.run_records("publish")],
            only=args.model,
            begun=_begun(args.run),
        )
        for k in range(0, len(ids), BATCH):
            tapes = [store.tape(name, refresh=False) for name in ids[k : k + BATCH]]
            verdicts = requery(tapes, policies, tolerance=tolerance)
            found += [verdict.of(tape) for verdict, tape in zip(verdicts, tapes, strict=True)]
            progress("requery", len(found), len(ids), "")
    verdicts = Verdicts(
        verb="requery",
        run=str(args.run),
        verdicts=tuple(found),
        torn=tuple(torn),
        seconds=round(time.perf_counter() - started, 3),
    )
    reason = (
        None
        if ids
        else (
            f"none of the {len(every):,} tapes that ended holds a token that a model sampled, so there is nothing to "
            "put to any weights: scripts and text-only engines record text"
        )
    )
    return tell(args, verdicts, *([reason] if reason else _lines(found, tolerance)), data={"reason": reason})


def _sampled(store: Store, split: str | None) -> list[str]:
    return [summary.id for summary in store.summaries(split=split, closed=True) if summary.sampled]


def _begun(run: Any) -> list[str]:
    """The model folders that the run was begun with, those of its players too."""
    from ...tapes.store.run_directory import recorded_settings

    told = {keys: value for keys, value in recorded_settings(run).items() if keys[-2:] == ("engine", "model")}
    return [folder for keys, folder in told.items() if keys[0] in ("engine", "players") and isinstance(folder, str)]


def _lines(found: list[Verdict], tolerance: float) -> list[str]:
    compared = [v for v in found if v.measured]
    n = sum(v.checked["tokens"] for v in compared)
    if not n:
        return []
    mean = sum(v.measured["mean"] * v.checked["tokens"] for v in compared) / n
    largest = max(v.measured["largest"] for v in compared)
    return [
        f"log-probs of {n:,} tokens differ by {mean:.2g} nats in the mean and {largest:.2g} at most "
        f"(tolerance {tolerance:g})"
    ]
