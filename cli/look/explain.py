"""`tapereel explain`: how training used each token of a tape, or how other recipes would have used an update."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...tapes.common.text import counted, safe
from ...tapes.errors import UsageError
from ..console import Exit, answer, table
from .recipe_tables import explain_recipes

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from ...finetune.inspect.explainer import Explanation, RowLine, TokenLine

EXAMPLE = """
tapereel explain runs/demo
tapereel explain runs/demo 019a3c --context
tapereel explain runs/demo --n 1 --json
tapereel explain runs/demo --recipe own --recipe dr_grpo --recipe rloo
tapereel explain runs/demo --recipe mine.yaml --update 410 --update 420 --json
"""

SHOWN = 60
"""Characters of a stretch of context that are printed."""
TAPES = 3
"""Instructive tapes that are explained, unless `--n` says otherwise."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "tape", nargs="*", default=[], help="ids of tapes, or their first characters (default: instructive ones)"
    )
    parser.add_argument("--n", type=int, metavar="N", help="number of instructive tapes (default 3)")
    parser.add_argument("--context", action="store_true", help="print each token of the context on a line of its own")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the run's own)")
    others = parser.add_argument_group("updates under other recipes, in place of tapes")
    others.add_argument(
        "--recipe",
        action="append",
        metavar="R",
        dest="recipes",
        help="a recipe's name, `own`, or a YAML file with `recipe` and `changes`; repeatable: the others are compared "
        "with the first (a single one with `own`)",
    )
    others.add_argument(
        "--update",
        action="append",
        type=int,
        metavar="K",
        dest="updates",
        help="number of an update, from 0; repeatable (default: the loop's last)",
    )
    others.add_argument(
        "--policy", metavar="NAME", help="a player of the run that learned (default: the loop's policy)"
    )
    others.add_argument(
        "--tokens", type=int, metavar="N", help="print the N tokens that gain and lose most weight (default 5)"
    )


def run(args: argparse.Namespace) -> int:
    """Explain, and print."""
    _check_options(args)
    return explain_recipes(args) if args.recipes else _explain_tapes(args)


def _check_options(args: argparse.Namespace) -> None:
    """UsageError for an option that the other form of the verb has, which would be ignored."""
    of_tapes, of_updates = ("tape", "n", "context", "tokenizer"), ("updates", "policy", "tokens")
    for name in of_tapes if args.recipes else of_updates:
        value = getattr(args, name)
        if value is not None and value is not False and value != []:
            flag = {"tape": "a tape", "updates": "--update"}.get(name, f"--{name}")
            raise UsageError(f"{flag} doesn't go with --recipe" if args.recipes else f"{flag} needs --recipe")


def _explain_tapes(args: argparse.Namespace) -> int:
    from ...finetune.inspect.explainer import Explainer
    from ...finetune.inspect.instructive import instructive
    from ...finetune.inspect.token_reader import token_reader
    from ...tapes.store.store import Store

    n = TAPES if args.n is None else args.n
    if n < 1:
        raise UsageError(f"--n is {n}; it must be 1 or more")
    with Store.open(args.run) as store:
        chosen = [(name, "asked for") for name in args.tape] or list(itertools.islice(instructive(store), n))
        decode, renderer = token_reader(store.path, args.tokenizer, [store.tape(name) for name, _ in chosen])
        explainer = Explainer(store, decode, renderer)
        found = [explainer.explain(name, why) for name, why in chosen]
    shown = [item for explanation in found for item in _shown(explanation, args.context)]
    answer(args, {"run": str(args.run), "tapes": found}, *(shown or ["the run has no closed tape to explain"]))
    return Exit.HOLDS


def _shown(e: Explanation, context: bool) -> Iterator[RenderableType]:
    s = e.tape
    reward = "unscored" if s.reward is None else f"reward {s.reward:g}"
    yield _text(f"tape {s.id}  {s.status}  {reward}  ({e.why})", "bold")
    yield _text(e.verdict)
    if len(e.group_rewards) > 1:
        rewards = ", ".join("unscored" if r is None else f"{r:g}" for r in e.group_rewards)
        yield _text(f"compared with its group of {len(e.group_rewards)}, whose rewards were {rewards}")
    yield _text(
        f"{counted(len(e.rows), 'row')}, {counted(e.forwarded, 'token')} forwarded ({e.repeated:,} of them "
        f"repeated), {e.own:,} of them its own; sampled, but not a label: {counted(e.unlabelled, 'token')}"
    )
    for k, row in enumerate(e.rows):
        begun = f"row {k + 1} begins with call {_short(row.begins, s.id)}"
        if row.split:
            begun += f": a new row, {row.split}; tokens forwarded again: {row.repeated:,}"
        yield _text(begun, "cyan")
        yield _row_table(row, s.id, context)
    for note in e.notes:
        yield _text(f"unknown: {note}", "yellow")


def _row_table(row: RowLine, tape: str, context: bool) -> Table:
    made = table(
        "#position",
        "token",
        "#id",
        "label",
        "#step",
        "call",
        "version",
        "#T",
        "#log-prob",
        "#reward",
        "#advantage",
        "#weight",
        fold=("token",),
    )
    for own, tokens in itertools.groupby(row.tokens, key=lambda token: token.own):
        stretch = list(tokens)
        if own or context:
            for token in stretch:
                made.add_row(*_cells(token, tape))
        else:
            made.add_row(*_stretch(stretch))
    return made


def _cells(token: TokenLine, tape: str) -> list[RenderableType]:
    shown = "" if token.text is None else _visible(token.text)
    if not token.own:
        return [str(token.position), _text(shown, "dim"), str(token.id), _text("context", "dim")]
    label = "own" if token.fate in (None, "trained") else f"own, {token.fate}"
    return [
        str(token.position),
        _text(shown, "bold"),
        str(token.id),
        label,
        "" if token.step is None else str(token.step),
        _text(_short(token.call or "", tape)),
        _text(token.version or "authored"),
        "" if token.temperature is None else f"{token.temperature:g}",
        *map(_rounded, (token.logprob, token.reward, token.advantage)),
        "" if token.weight is None else f"{token.weight:.2e}",
    ]


def _stretch(tokens: list[TokenLine]) -> list[RenderableType]:
    text = "".join(_visible(token.text or "") for token in tokens)
    text = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
    first, last = tokens[0].position, tokens[-1].position
    return [f"{first}-{last}" if last > first else str(first), _text(text, "dim"), "", _text("context", "dim")]


def _visible(text: str) -> str:
    return safe(text).replace("\n", "\\n").replace("\t", "\\t")


def _short(call: str, tape: str) -> str:
    return call.removeprefix(tape)


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(safe(text), style)


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
