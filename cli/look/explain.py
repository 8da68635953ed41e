"""`tapereel explain`: token by token, what a tape was to training."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...tapes.common.text import counted, safe
from ...tapes.errors import UsageError
from ..console import Exit, answer, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from ...finetune.inspect.explainer import Explanation, RowLine, TokenLine

EXAMPLE = """
tapereel explain runs/demo
tapereel explain runs/demo 019a3c --context
tapereel explain runs/demo --n 1 --json
"""

SHOWN = 60
"""Characters of a stretch of context that are shown."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "tape", nargs="*", default=[], help="ids of tapes, or their first characters; without any, a telling few"
    )
    parser.add_argument("--n", type=int, default=3, metavar="N", help="how many, where none is named (default 3)")
    parser.add_argument("--context", action="store_true", help="show each token of the context, not one line for many")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the run's own)")


def run(args: argparse.Namespace) -> int:
    """Explain, and print."""
    from ...finetune.inspect.explainer import Explainer
    from ...finetune.inspect.instructive import instructive
    from ...finetune.inspect.token_reader import token_reader
    from ...tapes.store.store import Store

    if args.n < 1:
        raise UsageError(f"--n is {args.n}; it must be 1 or more")
    with Store.open(args.run) as store:
        chosen = [(name, "asked for") for name in args.tape] or list(itertools.islice(instructive(store), args.n))
        decode, renderer = token_reader(store.path, args.tokenizer, [store.tape(name) for name, _ in chosen])
        explainer = Explainer(store, decode, renderer)
        found = [explainer.explain(name, why) for name, why in chosen]
    shown = [item for explanation in found for item in _shown(explanation, args.context)]
    answer(args, {"run": str(args.run), "tapes": found}, *(shown or ["there is no closed tape to explain"]))
    return Exit.HOLDS


# For people


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
        f"once more), {e.own:,} of them its own; said, but no label: {counted(e.unlabelled, 'token')}"
    )
    for k, row in enumerate(e.rows):
        begun = f"row {k + 1} begins with call {_short(row.begins, s.id)}"
        if row.split:
            begun += f": a new row, {row.split}; tokens forwarded once more: {row.repeated:,}"
        yield _text(begun, "cyan")
        yield _row_table(row, s.id, context)
    for note in e.notes:
        yield _text(f"not known: {note}", "yellow")


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
        *map(_number, (token.logprob, token.reward, token.advantage)),
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


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
