"""`tapereel export`: write the tapes of a run as rows of a dataset, or as conversations if `--format` is given.

It doesn't change the run, and leaves out tapes that are still running. Of a run that trained, it also leaves out the
held-out tapes, unless `--split` names their split or the format is `atif`, which isn't for training.
"""

from __future__ import annotations

import argparse
from collections import Counter

from ...finetune.interchange import FORMATS, Exchange, write
from ...finetune.interchange.row_files import export, renderer_of, training_tapes
from ...tapes.audit.checking import check_split
from ...tapes.errors import UsageError
from ...tapes.records import Status
from ..console import Exit, answer, given, say

EXAMPLE = """
tapereel export runs/demo demo.parquet
tapereel export runs/demo demo.jsonl --split train --status finished --min-reward 1
tapereel export runs/demo demo-dataset --tokenizer path/to/tokenizer
tapereel export runs/demo shown.jsonl --format sft
tapereel export runs/demo trajectories --format atif --split eval
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "out", help="a .jsonl or .parquet file, or a folder for a dataset or --format atif; must not exist yet"
    )
    parser.add_argument(
        "--format",
        default="rows",
        choices=["rows", *FORMATS],
        help="rows: token sequences with labels (the default); "
        + "; ".join(f"{name}: {made.what}" for name, made in FORMATS.items()),
    )
    parser.add_argument(
        "--split",
        help="only tapes of this split (`train`, `eval`, `demo`, ...); without it, the held-out tapes of a run that "
        "trained are left out, except with --format atif",
    )
    parser.add_argument(
        "--status",
        choices=[status.value for status in Status],
        metavar="STATUS",
        help="only tapes of this status (`finished`, `truncated`, ...)",
    )
    parser.add_argument("--min-reward", type=float, metavar="R", help="only tapes with at least this reward")
    parser.add_argument(
        "--agent",
        metavar="PATH",
        action="append",
        dest="agents",
        help="path of an agent, such as pair/guide, whose tokens are labels (other agents' tokens are context); "
        "repeatable, with --format rows",
    )
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="folder of a tokenizer with a chat template, for tapes without token ids"
    )


def run(args: argparse.Namespace) -> int:
    """Export, and print a summary."""
    from ...tapes.store.store import Store, Where

    if args.format != "rows":
        for flag in given(args, ("agents", "tokenizer")):
            raise UsageError(
                f"{flag} is only for --format rows: remove it, since {args.format} has whole conversations"
            )
    with Store.open(args.run) as store:
        check_split(store, args.split)
        where: Where = {"split": args.split, "status": args.status, "min_reward": args.min_reward, "closed": True}
        if args.format == "atif":
            tapes, held_out = store.tapes(**where), Counter[str]()
        else:
            tapes, held_out = training_tapes(store, where)
        for split, n in held_out.items():
            say(f"{n:,} tapes of the held-out split {split} were left out: to export them, give --split {split}")
        images = bool(store.media.names())
        if args.format != "rows":
            return _answer_format(args, write(tapes, args.out, args.format, images=images))
        renderer = renderer_of(args.tokenizer)
        done = export(tapes, args.out, agents=args.agents, renderer=renderer, images=images)
    if done.without_tokens:
        say(f"{done.without_tokens} tapes have text but no token ids, and were left out: give --tokenizer")
    answer(
        args,
        done,
        f"{done.path}: {done.rows:,} rows of {done.tapes:,} tapes, {done.tokens:,} tokens, "
        f"{done.own_tokens:,} of them the agent's own",
    )
    return Exit.HOLDS


def _answer_format(args: argparse.Namespace, done: Exchange) -> int:
    for sentence in done.loses:
        say(f"not in this format: {sentence}")
    for why, n in done.left_out.items():
        say(f"{n} tapes left out: {why}")
    answer(args, done, f"{done.path}: {done.records:,} {done.format} records of {done.tapes:,} tapes")
    return Exit.HOLDS
