"""`tapereel explain`: show how training used each token of a tape, or how other recipes would have used an update."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ...envs.load_named import load_named
from ...tapes.common.stats import fixed
from ...tapes.common.text import counted, safe
from ...tapes.errors import UsageError
from ..console import Exit, Section, answer, at_least, given, styled
from ..progress_bars import live_progress

if TYPE_CHECKING:
    from rich.text import Text

    from ...finetune.inspect.explainer import Explanation, RowLine, TokenLine
    from ...finetune.inspect.lab import Experiment, RecipeLine

EXAMPLE = """
tapereel explain runs/demo
tapereel explain runs/demo 019a3c --context
tapereel explain runs/demo --n 1 --json
tapereel explain runs/demo --recipe own --recipe dr_grpo --recipe rloo
tapereel explain runs/demo --recipe mine.yaml --update 410 --update 420 --json
"""

SHOWN = 60
"""Maximum number of characters that are printed from each stretch of context."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "tape",
        nargs="*",
        default=[],
        help="ids of tapes, or their first characters (default: the last ones of the last update)",
    )
    parser.add_argument(
        "--n", type=at_least(1), default=3, metavar="N", help="number of tapes if you name none (default 3)"
    )
    parser.add_argument("--context", action="store_true", help="print each token of the context on a line of its own")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer (default: the run's own)")
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="NAME",
        help="module:name of your own term in the run's recipe; repeatable",
    )
    others = parser.add_argument_group("updates under other recipes, instead of tapes")
    others.add_argument(
        "--recipe",
        action="append",
        metavar="R",
        dest="recipes",
        help="a recipe's name, `own` for the run's recipe, or a YAML file with `recipe` and `changes`; repeatable. "
        "All are compared with the first, and a single one with `own`",
    )
    others.add_argument(
        "--update",
        action="append",
        type=int,
        metavar="K",
        dest="updates",
        help="number of an update, counted from 0 (default: the loop's last); repeatable",
    )
    others.add_argument("--policy", metavar="NAME", help="a trained player of the run (default: the loop's policy)")


def run(args: argparse.Namespace) -> int:
    """Print the explanation."""
    of_tapes, of_updates = ("tape", "n", "context", "tokenizer", "imports"), ("updates", "policy")
    for flag in given(args, of_tapes if args.recipes else of_updates):
        raise UsageError(f"{flag} doesn't go with --recipe" if args.recipes else f"{flag} needs --recipe")
    return _explain_recipes(args) if args.recipes else _explain_tapes(args)


def _explain_tapes(args: argparse.Namespace) -> int:
    from ...finetune.inspect.explainer import explain_run

    for name in args.imports:
        load_named(name)
    found = explain_run(args.run, args.tape, n=args.n, tokenizer=args.tokenizer)
    shown = [item for explanation in found for item in _shown(explanation, args.context)]
    answer(args, {"run": str(args.run), "tapes": found}, *(shown or ["the run has no closed tape to explain"]))
    return Exit.HOLDS


def _shown(e: Explanation, context: bool) -> Iterator[str | Text | Section]:
    s = e.tape
    reward = "unscored" if s.reward is None else f"reward {s.reward:g}"
    yield styled(f"tape {s.id}  {s.status}  {reward}", "bold")
    yield styled(e.verdict)
    if len(e.group_rewards) > 1:
        rewards = ", ".join("unscored" if r is None else f"{r:g}" for r in e.group_rewards)
        yield styled(f"compared with its group of {len(e.group_rewards)}, whose rewards were {rewards}")
    yield styled(
        f"{counted(len(e.rows), 'row')}, {counted(e.forwarded, 'token')} forwarded ({e.repeated:,} of them "
        f"repeated), {e.own:,} of them its own; {counted(e.unlabelled, 'token')} sampled but not used as labels"
    )
    for k, row in enumerate(e.rows):
        begun = f"row {k + 1} begins with call {_short(row.begins, s.id)}"
        if row.split:
            begun += f": a new row, {row.split}, which forwards {counted(row.repeated, 'token')} again"
        yield styled(begun, "cyan")
        yield _row_section(row, s.id, context)
    for note in e.notes:
        yield styled(f"unknown: {note}", "yellow")


def _row_section(row: RowLine, tape: str, context: bool) -> Section:
    rows: list[list[str | Text]] = []
    for own, tokens in itertools.groupby(row.tokens, key=lambda token: token.own):
        stretch = list(tokens)
        rows += [_cells(token, tape) for token in stretch] if own or context else [_stretch(stretch)]
    headings = "#position token #id label #step call version #T #log-prob #reward #advantage #weight"
    return Section(tuple(headings.split()), rows, optional=("id", "T", "call", "version", "step"))


def _cells(token: TokenLine, tape: str) -> list[str | Text]:
    shown = "" if token.text is None else _visible(token.text)
    if not token.own:
        return [str(token.position), styled(shown, "dim"), str(token.id), styled("context", "dim")]
    label = "own" if token.fate in (None, "trained") else f"own, {token.fate}"
    return [
        str(token.position),
        styled(shown, "bold"),
        str(token.id),
        label,
        "" if token.step is None else str(token.step),
        styled(_short(token.call or "", tape)),
        styled(token.version or "authored"),
        "" if token.temperature is None else f"{token.temperature:g}",
        *map(_rounded, (token.logprob, token.reward, token.advantage)),
        "" if token.weight is None else f"{token.weight:.2e}",
    ]


def _stretch(tokens: list[TokenLine]) -> list[str | Text]:
    text = "".join(_visible(token.text or "") for token in tokens)
    text = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} … {text[-SHOWN // 2 :]}"
    first, last = tokens[0].position, tokens[-1].position
    return [f"{first}-{last}" if last > first else str(first), styled(text, "dim"), "", styled("context", "dim")]


def _visible(text: str) -> str:
    return safe(text).replace("\n", "\\n").replace("\t", "\\t")


def _short(call: str, tape: str) -> str:
    return call.removeprefix(tape)


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


# Updates under other recipes


def _explain_recipes(args: argparse.Namespace) -> int:
    from ...finetune.inspect.lab import OWN, lab

    recipes = args.recipes if len(args.recipes) > 1 else [OWN, *args.recipes]
    with live_progress() as progress:
        report = lab(args.run, recipes, args.updates, policy=args.policy, progress=progress)
    shown = [item for experiment in report.experiments for item in _tables(experiment)]
    answer(args, report, *shown, f"{report.seconds:.1f} s")
    return Exit.HOLDS


def _tables(experiment: Experiment) -> Iterator[str | Text | Section]:
    yield (
        f"update {experiment.update} ({experiment.phase}) at version {experiment.version}: {experiment.episodes} "
        f"episodes, {experiment.tokens} tokens of the agent's own"
    )
    headings = (
        "recipe",
        "#loss",
        "#gradient norm",
        "#cosine",
        "#mean |A|",
        "#clipped",
        "#tokens",
        "#dropped",
        "as recorded",
    )
    yield Section(headings, [_line_cells(line) for line in experiment.lines], optional=("dropped", "clipped"))
    shifts = [
        (
            line.recipe,
            repr(shift.text),
            f"{shift.first:+.3%}",
            f"{shift.pull:+.3%}",
            shift.tape,
            shift.call.removeprefix(shift.tape).lstrip("."),
            str(shift.offset),
        )
        for line in experiment.lines[1:]
        for shift in (*line.gained, *line.lost)
    ]
    if shifts:
        headings = ("recipe", "token", "#pull, first", "#pull, this", "tape", "#call", "#offset")
        yield Section(headings, shifts)


def _line_cells(line: RecipeLine) -> list[str]:
    recorded = "" if line.recorded is None else "yes" if line.recorded else "NO"
    return [
        line.recipe,
        fixed(line.loss, ".6g"),
        fixed(line.grad_norm, ".6g"),
        fixed(line.cosine, ".4g"),
        fixed(line.mean_advantage, ".3g"),
        fixed(line.clipped, ".3g"),
        str(line.tokens),
        str(line.dropped),
        line.skipped or recorded,
    ]
