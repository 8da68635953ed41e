"""report.html: a training run on one self-contained page, to be read offline and passed on.

`ReportData` is all that the page shows. Whatever a model, a task or a file name wrote is text there: the template
escapes every value, the page allows no script and fetches nothing. This module trains nothing and reads no files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from pydantic import Field

from ...tapes import Tape
from ...tapes.audit.faults import Fault
from ...tapes.common.text import counted, safe
from ...tapes.errors import MissingExtra
from ...tapes.store.disk import REAL, put_file
from ...tapes.transcript import StepLine, TapeSummary, episode_rewards, step_lines, summarise
from ...tapes.value import Value
from .plots import WIDE, Curve, Level, curve_svg

SHADES = 5
"""Steps of the colour that says how unlikely a sampled token was."""
SMALL = (4.6, 3.0)
"""Inches of a figure that stands beside others."""


class Score(Value):
    """One line of the table of results: a policy on the held-out tasks."""

    name: str
    """As `before`, `after`, `control: SFT only`."""
    sampled: float | None
    """Mean reward at temperature 1; None where it was not measured."""
    greedy: float | None
    """Mean reward at temperature 0."""
    n: int | None = None
    """Scored episodes on held-out tasks."""
    note: str = ""


class Fact(Value):
    """One number in large type at the head of the page."""

    label: str
    value: str
    note: str = ""


class Plot(Value):
    """One figure."""

    title: str
    curves: tuple[Curve, ...]
    levels: tuple[Level, ...] = ()
    xlabel: str = "update"
    ylabel: str = "reward"
    caption: str = ""
    small: bool = False
    """Drawn beside others, not over the whole width."""


class Token(Value):
    """One completion token on the page."""

    text: str
    logprob: float
    """NaN for text that nobody sampled."""
    version: str | None
    """Policy version that sampled it."""


class StepPage(Value):
    """One step of a tape on the page."""

    line: StepLine
    tokens: tuple[Token, ...]
    """The tokens that it was read from; empty for observations and for engines of texts."""


class TapePage(Value):
    """One tape to read."""

    caption: str
    """Why it is here: `after training, a wrong answer`."""
    summary: TapeSummary
    task: str
    """The public part of the task; empty when there is none."""
    steps: tuple[StepPage, ...]
    episode: dict[str, float]
    """What the episode earned as a whole, by component."""
    left_out: int = 0
    """Steps of its middle that are not on the page."""
    commands: tuple[str, ...] = ()
    """Command lines that show it whole."""


class End(Value):
    """Episodes that ended alike."""

    status: str
    cause: str
    """Whose fault or which limit; empty for an end that needs no cause."""
    episodes: int


class ReportData(Value):
    """Everything on the page. What is empty is left out."""

    title: str
    subtitle: str = ""
    facts: tuple[Fact, ...] = ()
    plots: tuple[Plot, ...] = ()
    scores: tuple[Score, ...] = ()
    seconds: dict[str, float] = Field(default={})
    """Where the wall-clock time went, by part."""
    tokens: dict[str, int] = Field(default={})
    """The token books: a partition of the sampled tokens."""
    episodes: dict[str, int] = Field(default={})
    """Episodes by status."""
    notes: tuple[str, ...] = ()
    """What a reader must know before the numbers: that it still runs, or how it was cut off."""
    ends: tuple[End, ...] = ()
    """What ended episodes."""
    faults: tuple[Fault, ...] = ()
    """The errors among it."""
    tapes: tuple[TapePage, ...] = ()
    config: str = ""
    """The resolved configuration, as YAML."""
    versions: dict[str, str] = Field(default={})
    """Of the software and what else a tape names by version."""
    checks: dict[str, str] = Field(default={})
    """Command lines that check the run -> what each checks."""
    next: tuple[str, ...] = ()
    """Command lines to try on this run."""


LONG_TAPE, LONG_STEP = 40, 4000
"""Steps of a tape, and characters and tokens of a step, that are on the page."""


def tape_page(
    tape: Tape, caption: str, decode: Callable[[int], str] | None = None, *, commands: tuple[str, ...] = ()
) -> TapePage:
    """A closed tape as it is shown, of a long one its two ends; `decode` gives the text of one token id, and without it
    no tokens are shown."""
    entries = tape.entries
    lines = step_lines(tape)
    shown = lines if len(lines) <= LONG_TAPE else [*lines[: LONG_TAPE // 2], *lines[-LONG_TAPE // 2 :]]
    steps = tuple(
        StepPage(
            line=line.model_copy(update={"text": _begin(line.text)}),
            tokens=_tokens(tape, entries[line.index].calls, decode) if decode is not None else (),
        )
        for line in shown
    )
    task = "" if tape.task is None else tape.task if isinstance(tape.task, str) else json.dumps(tape.task)
    return TapePage(
        caption=caption,
        summary=summarise(tape),
        task=task,
        steps=steps,
        episode=episode_rewards(tape),
        left_out=len(lines) - len(shown),
        commands=commands,
    )


def write_report(path: str | PathLike[str], data: ReportData) -> None:
    """Write the page, in place of an earlier one as a whole."""
    put_file(REAL, Path(path), render_report(data).encode())


def render_report(data: ReportData) -> str:
    """The page as text."""
    drawn = [
        (
            plot,
            curve_svg(
                plot.curves,
                levels=plot.levels,
                xlabel=plot.xlabel,
                ylabel=plot.ylabel,
                size=SMALL if plot.small else WIDE,
            ),
        )
        for plot in data.plots
    ]
    filters = {
        "number": _number,
        "shade": _shade,
        "token": _token_text,
        "parts": _parts,
        "percent": _percent,
        "counted": counted,
    }
    return render_page("report.html.jinja", filters, r=data, plots=drawn, shades=SHADES)


def render_page(template: str, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """A page by a template of this package: every value is escaped, but for what the filter `svg` is given, which is a
    drawing of ours."""
    try:
        import jinja2
        from markupsafe import Markup
    except ImportError as error:
        raise MissingExtra("jinja2", "train", "writing a page") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters.update(filters, svg=Markup)
    return environment.get_template(template).render(**values)


def _tokens(tape: Tape, ranges: tuple[tuple[str, int, int], ...], decode: Callable[[int], str]) -> tuple[Token, ...]:
    tokens: list[Token] = []
    for name, start, end in ranges:
        call = tape.call(name)
        versions = [version for version, a, b in call.spans for _ in range(a, b)]
        for i, token in list(enumerate(call.completion or ()))[start:end]:
            logprob = call.logprobs[i] if call.logprobs is not None else math.nan
            if len(tokens) == LONG_STEP:
                return (*tokens, Token(text=" …", logprob=math.nan, version=None))
            tokens.append(Token(text=decode(token), logprob=logprob, version=versions[i] if versions else None))
    return tuple(tokens)


def _begin(text: str) -> str:
    return text if len(text) <= LONG_STEP else f"{text[:LONG_STEP]} … ({len(text) - LONG_STEP:,} more characters)"


def _shown(value: Any) -> Any:
    """Control characters, and those that turn the direction of writing, are spelled out; markup of ours passes."""
    return safe(value) if type(value) is str else value


def _number(value: float | None, digits: int = 3) -> str:
    return "\N{EN DASH}" if value is None or math.isnan(value) else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    """Width of a bar for a share from 0 to 1; rewards outside that are drawn as empty or full."""
    return f"{100 * min(1.0, max(0.0, value or 0.0)):.1f}%"


def _shade(logprob: float) -> str:
    """Class of a token: `un` when nobody sampled it, else `p0` (certain) ... `p5` (probability below 5 %)."""
    return "un" if math.isnan(logprob) else f"p{min(SHADES, int(-logprob / 3.0 * SHADES))}"


def _token_text(text: str) -> str:
    return safe(text).replace("\n", "\N{RETURN SYMBOL}\n") or "\N{EMPTY SET}"


def _parts(values: dict[str, float]) -> list[tuple[str, float, float, int]]:
    """(name, value, share, colour) of a whole that a bar shows, largest first; colour 0 is that of nothing."""
    whole = sum(values.values())
    ordered = sorted(values.items(), key=lambda item: -item[1])
    colours = [0 if not value else min(i, 7) for i, (_, value) in enumerate(ordered, start=1)]
    return [
        (name.replace("_", " "), value, value / whole if whole else 0.0, colour)
        for (name, value), colour in zip(ordered, colours, strict=True)
    ]
