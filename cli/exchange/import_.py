"""`tapereel import`: read rows of conversations as tapes of a run."""

from __future__ import annotations

import argparse

from ...finetune.interchange.formats import FORMATS, IMPORTS, read
from ..console import Exit, answer

EXAMPLE = """
tapereel import pairs.jsonl runs/imported --format preference
tapereel import dialogues.parquet runs/shown --format sft --split demo
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("file", help="a .jsonl or .parquet file")
    parser.add_argument("run", help="a run directory; it may exist already")
    parser.add_argument(
        "--format",
        required=True,
        choices=IMPORTS,
        help="; ".join(f"{name}: {FORMATS[name].what}" for name in IMPORTS),
    )
    parser.add_argument(
        "--split", help="split of the tapes, such as `train` or `demo` (default: the split in the file)"
    )


def run(args: argparse.Namespace) -> int:
    """Import, and print a summary."""
    done = read(args.file, args.run, args.format, split=args.split)
    known = f"; {done.there:,} more were in the run already, with the same content" if done.there else ""
    answer(args, done, f"{done.path}: {done.tapes:,} tapes of {done.records:,} {done.format} records{known}")
    return Exit.HOLDS
