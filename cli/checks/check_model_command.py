"""`tapereel check model`: check that a model sees tools, that its calls are read, and that its answers end. The exit
code is 1 if not."""

from __future__ import annotations

import argparse

from ...tapes.common.config import load_config
from ..console import Exit, Section, answer
from ..scene_arguments import add_set_argument

EXAMPLE = """
tapereel check model models/tiny
tapereel check model models/tiny --set response_template=my_format.json --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", metavar="DIR", help="folder of a model or tokenizer, or its name on the hub")
    add_set_argument(parser, "response_template=my_format.json")


def run(args: argparse.Namespace) -> int:
    """Offer a tool, make and answer a call, and print what would spoil rollouts and how the template treats history."""
    from ...agents.setup.engine_config import RendererConfig

    renderer = load_config(RendererConfig, None, args.sets).load(args.model)
    faults, notes = renderer.faults(), renderer.probe()
    ends = [renderer.spell([id]) for id in renderer.end_ids]
    rows = [("fault", fault) for fault in faults] + [("template", f"the chat template {note}") for note in notes]
    answer(
        args,
        {"ok": not faults, "faults": faults, "template": notes, "end_tokens": ends},
        Section(("about", "finding"), rows, args.model, empty="no findings"),
        f"answers end with {', '.join(map(repr, ends))}",
    )
    return Exit.BROKEN if faults else Exit.HOLDS
