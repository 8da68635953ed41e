"""`tapereel import`: read another system's traces, rollouts or rows as tapes of a run."""

from __future__ import annotations

import argparse

from ...finetune.interchange.formats import FORMATS, read
from ...finetune.interchange.trace_files import Bounds
from ..console import Exit, answer

EXAMPLE = """
tapereel import traces.jsonl runs/imported --format openenv
tapereel import outputs/my-env--model/ runs/imported --format verifiers --split eval
tapereel import dialogues.parquet runs/shown --format sft --split demo
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("file", help="a .jsonl, .jsonl.gz, .zip or .parquet file, or a folder with results.jsonl")
    parser.add_argument("run", help="a run directory; it may exist already")
    parser.add_argument(
        "--format",
        required=True,
        choices=list(FORMATS),
        help="; ".join(f"{name}: {made.what}" for name, made in FORMATS.items()),
    )
    parser.add_argument("--split", help="split of the tapes (`train`, `eval`, `demo`, ...; default: as the file says)")
    bounds = Bounds()
    parser.add_argument(
        "--max-line",
        type=int,
        default=bounds.line,
        metavar="BYTES",
        help="refuse a longer record (default %(default)s)",
    )
    parser.add_argument(
        "--max-total",
        type=int,
        default=bounds.total,
        metavar="BYTES",
        help="refuse a file that unpacks to more (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Import, and print what was written."""
    bounds = Bounds(line=args.max_line, total=args.max_total)
    done = read(args.file, args.run, args.format, bounds=bounds, split=args.split)
    known = f"; {done.there:,} more were in the run already, with the same content" if done.there else ""
    answer(args, done, f"{done.path}: {done.tapes:,} tapes of {done.records:,} {done.format} records{known}")
    return Exit.HOLDS
