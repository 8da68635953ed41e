"""`tapereel audit`: the books of a run. Every sampled token has one place, every episode is begun, ended or open."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .console import Exit, answer, safe, table

if TYPE_CHECKING:
    from rich.table import Table

    from .books import Books

EXAMPLE = """
tapereel audit runs/demo
tapereel audit runs/demo --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory")


def run(args: argparse.Namespace) -> int:
    from .store import Store

    with Store.open(args.run) as store:
        books = store.books()
    shown = [_tokens(books), *_below(books), _episodes(books), *(f"broken: {safe(text)}" for text in books.findings)]
    verdict = "the books close" if books.closes else "the books do NOT close"
    data = {"run": str(args.run), "closes": books.closes, "sum": sum(books.tokens.values()), **books.model_dump()}
    answer(args, data, *shown, verdict)
    return Exit.HOLDS if books.closes else Exit.BROKEN


def _tokens(books: Books) -> Table:
    made = table("sampled tokens", "#number", "#share")
    for place, n in books.tokens.items():
        made.add_row(place.replace("_", " "), f"{n:,}", f"{n / books.sampled:.1%}" if books.sampled else "")
    made.add_section()
    made.add_row("together", f"{sum(books.tokens.values()):,}", "")
    made.add_row("sampled", f"{books.sampled:,}", "")
    return made


def _below(books: Books) -> list[str]:
    lines = [f"beside these: {books.authored:,} authored tokens, {books.authored_trained:,} of them trained on; "
             f"{books.applied:,} token-updates applied"]  # fmt: skip
    if books.textual:
        lines.append(f"{books.textual:,} calls of engines that give text only: their tokens can't be counted")
    return lines


def _episodes(books: Books) -> Table:
    made = table("episodes", "#number", "trained on", "#tokens", "by length in turns", fold=("by length in turns",))
    for end in books.ends:
        name = end.status if end.cause is None else f"{end.status} ({end.cause})"
        lengths = ", ".join(f"{turns}: {n}" for turns, n in end.turns.items())
        made.add_row(name, f"{end.episodes:,}", "if scored" if end.trainable else "never", f"{end.sampled:,}", lengths)
    made.add_section()
    made.add_row("ended", f"{books.ended:,}")
    made.add_row("open", f"{books.open:,}")
    made.add_row("begun", f"{books.begun:,}")
    return made
