"""`tapereel check engine`: check that an engine keeps its contract. The exit code is 1 if a check failed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, cast

from ...envs.load_named import load_named
from ..console import Exit, answer, positive

if TYPE_CHECKING:
    from torch import Tensor

    from ...agents import Engine

EXAMPLE = """
tapereel check engine my_engine.py:MyEngine
tapereel check engine my_package.engines:make --trainable --weights models/tiny --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("engine", help="an engine, its class, or a function that makes one: module:name, file.py:name")
    parser.add_argument("--trainable", action="store_true", help="require the members that training needs")
    parser.add_argument(
        "--weights", metavar="DIR", help="folder of a model whose weights are synced to the engine (default: no sync)"
    )
    parser.add_argument(
        "--timeout", type=positive, default=60.0, metavar="S", help="longest call in seconds (default 60)"
    )


def run(args: argparse.Namespace) -> int:
    """Send the requests, and print a line for each broken rule."""
    from ...agents.engines.check_engine import check_engine

    report = check_engine(
        cast("Engine", load_named(args.engine)),
        weights=_weights(args.weights),
        trainable=args.trainable,
        timeout=args.timeout,
    )
    answer(args, report, *str(report).splitlines())
    return Exit.HOLDS if report.ok else Exit.BROKEN


def _weights(folder: str | None) -> dict[str, Tensor] | None:
    if folder is None:
        return None
    from ...agents.engines.embedded.pretrained import load_pretrained

    return dict(load_pretrained(folder).model.state_dict())
