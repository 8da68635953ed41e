"""The overview of a run: headline numbers, curves, fates of tokens and episodes, tapes to read, commands to run.

`overview_of` reads the overview from the directory of any run, even while the run is being written. The viewer shows it
as its overview page, and `bundle` writes this page as one file. A training run adds what only its own process knows.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from ..audit.advice import advice
from ..audit.faults import Fault, Faults
from ..common.config_yaml import Group
from ..common.stats import ends_of, fixed, mean_of
from ..errors import Command, OtherVersion, TapereelError, check_commands, remedy, show_commands
from ..records import End as EndRecord
from ..records import Status
from ..schema import parse_record
from ..store.books import Books, Lost, spent
from ..store.disk import read_file
from ..store.run_directory import CONFIG, METRICS, RESULTS, Results, read_metrics, recorded_settings
from ..store.store import Store
from ..store.summary import Summary
from ..value import Value
from .curves import Plot, loss_plots, reward_plot
from .live import state_of

NO_METRICS = f"{METRICS} is missing: the run has no metrics, or none yet"
DIED = "The writer of this run is gone and has not closed it: it was killed, or it crashed."


def untaught() -> str:
    """The note of a run whose updates trained on no token."""
    return (
        "No token was trained on, so the weights did not change: no episode was scored, or all attempts of each group "
        f"earned the same. {remedy('audit', '`audit(run)`')} shows which."
    )


class Score(Value):
    """One line in the table of results, for one policy on the held-out tasks."""

    name: str
    """The name of the line, such as `before`, `after` or `control: SFT only`."""
    sampled: float | None
    """Mean reward at temperature 1, or None if it was not measured."""
    greedy: float | None
    """Mean reward at temperature 0, or None if it was not measured."""
    n: int | None = None
    """Number of scored episodes on held-out tasks."""
    note: str = ""


class Fact(Value):
    """One number in large type at the top of the page."""

    label: str
    value: str
    note: str = ""


class TapeToRead(Value):
    """A tape that the page proposes to read."""

    tape: str
    caption: str
    """Why the page proposes it, such as `after training, a wrong answer`."""


class Overview(Value):
    """Everything on the page. An empty part is left out of the page."""

    title: str
    subtitle: str = ""
    notes: tuple[str, ...] = ()
    """Notes above the numbers, for example that the run is still running or why it ended early."""
    facts: tuple[Fact, ...] = ()
    plots: tuple[Plot, ...] = ()
    scores: tuple[Score, ...] = ()
    seconds: dict[str, float] = Field(default={})
    """Wall-clock seconds of each part of the run."""
    tokens: dict[str, int] = Field(default={})
    """Number of sampled tokens with each fate. The numbers add up to all sampled tokens."""
    ends: tuple[Lost, ...] = ()
    faults: tuple[Fault, ...] = ()
    """The errors that ended episodes, most frequent first."""
    tapes: tuple[TapeToRead, ...] = ()
    checks: dict[str, str] = Field(default={})
    """For each command line, the property that it checks."""
    next: tuple[str, ...] = ()
    """Command lines to try on this run."""
    config: str = ""
    """The resolved configuration, as YAML."""
    versions: dict[str, str] = Field(default={})
    """The version of each piece of software, according to the newest tape."""


def overview_of(
    store: Store,
    *,
    title: str | None = None,
    recipe: str | None = None,
    results: Results | None = None,
    seconds: Mapping[str, float] | None = None,
    notes: Sequence[str] = (),
) -> Overview:
    """Return the overview of the run that this store belongs to.

    Arguments that aren't given are read from the run directory. A run in progress passes its seconds so far and its
    current results, which may be newer than the file.
    """
    path = store.path
    metrics = path / METRICS
    books, accounting = _books(store)
    edited = store.edited()
    lines = [line for line in read_metrics(metrics) if line.get("phase") == "rl"] if not edited else []
    settings = settings_of(path)
    loop = settings.get("loop") or {}
    if results is None:
        results = Results.read(path) if (path / RESULTS).exists() and not edited else Results()
    if seconds is None:
        seconds = parts_of_time(results)
    if recipe is None:
        recipe = str(loop.get("recipe") or "reward")
    trained = bool(lines or results.lineage)
    config = path / CONFIG
    return Overview(
        title=path.resolve().name if title is None else title,
        subtitle=f"{recipe}, lineage {results.lineage}, in {path}" if results.lineage else str(path),
        notes=(
            *notes,
            *((DIED + remedy("resume", ""),) if state_of(store) == "died" else ()),
            *(f"{text}. No number of such files is shown." for text in edited),
            *((f"{NO_METRICS}.",) if loop and not edited and not metrics.exists() else ()),
            *accounting,
            *advice(store, "train" if lines else None, lines, results.after),
        ),
        facts=_facts(results, lines, books, seconds, loop.get("updates") if metrics.exists() else None),
        plots=(reward_plot(recipe, metrics, results), *loss_plots(metrics)) if trained else (),
        scores=held_out_scores(results),
        seconds=dict(seconds),
        tokens=books.tokens if books is not None and books.sampled else {},
        ends=books.ends if books is not None else (),
        faults=_faults(store),
        tapes=_tapes(store),
        checks=checks(str(path), trained=trained),
        next=next_commands(str(path)),
        config=read_file(config).decode(errors="replace") if config.exists() else "",
        versions=_versions(store),
    )


def settings_of(path: Path) -> Group:
    """Return the settings of the run at `path`. They are empty if they can't be read or another version wrote them."""
    try:
        return recorded_settings(path)
    except OtherVersion:
        return {}


def trains(store: Store) -> bool:
    """Return whether this is a training run: its configuration has a loop, or updates were recorded."""
    return "loop" in settings_of(store.path) or bool(store.index.places("", t="use", limit=1))


def _books(store: Store) -> tuple[Books | None, tuple[str, ...]]:
    """Return the accounting of the run's tokens, and sentences about its errors. If a record is unreadable,
    the accounting is None, so that the page can still show its other parts."""
    try:
        books = store.books()
    except TapereelError as error:
        return None, (f"The tokens can't be accounted for: {error}",)
    why = "; ".join(books.findings) or "the sums differ"
    return books, () if books.closes else (f"Not every token is accounted for: {why}",)


def _facts(
    results: Results,
    lines: Sequence[Mapping[str, Any]],
    books: Books | None,
    seconds: Mapping[str, float],
    updates: Any,
) -> tuple[Fact, ...]:
    facts = []
    rewards = [line["reward"] for line in lines if line.get("reward") is not None]
    if rewards:
        ends = map(mean_of, ends_of(rewards))
        facts.append(
            Fact(label="reward of the updates", value=arrow(*ends), note="means of the first and the last five")
        )
    measured = results.before, results.after
    if any(measured):
        before, after = (part["sampled"].mean if part else None for part in measured)
        n = next(part["sampled"].n for part in measured if part)
        facts.append(
            Fact(label="held-out reward", value=arrow(before, after), note=f"{n} episodes, none of them trained on")
        )
    if updates is not None:
        facts.append(Fact(label="updates", value=f"{len(lines)} of {updates}"))
    if books is not None:
        trained = f"; {books.tokens['trained']:,} trained on" if updates is not None else ""
        made = books.sampled + books.reported.get("completion", 0)
        note = spent(books.counts) if books.reported else "sampled"
        facts.append(Fact(label="tokens", value=f"{made:,}", note=f"{note}{trained}"))
        facts.append(Fact(label="episodes on tape", value=f"{books.begun:,}"))
    if seconds:
        facts.append(Fact(label="seconds", value=f"{sum(seconds.values()):,.0f}"))
    return tuple(facts)


_PARTS = {"restore": "restore", "sft": "imitation", "rl": "the loop"}
"""Names of the parts of a run, which follow each other, by key in `Results.seconds`. `total` is the whole run. The
time of any other key lies within one of these parts."""


def parts_of_time(
    results: Results, total: float | None = None, rest: str = "evaluations before and after, and the rest"
) -> dict[str, float]:
    """Return the wall-clock seconds of each part. They add up to `total`, or to the recorded total if it is None."""
    known = results.seconds
    total = known.get("total") if total is None else total
    if total is None:
        return {}
    parts = {name: known[key] for key, name in _PARTS.items() if key in known}
    return {**parts, rest: max(0.0, total - sum(parts.values()))}


def held_out_scores(results: Results) -> tuple[Score, ...]:
    """Return a line for each evaluation, in the order of the updates."""
    between = results.evaluations
    rows = [
        ("before", results.before),
        *((f"after update {k}", between[k]) for k in sorted(between, key=int)),
        ("after", results.after),
    ]
    return tuple(
        Score(
            name=name,
            sampled=part["sampled"].mean,
            n=part["sampled"].n,
            greedy=part["greedy"].mean if "greedy" in part else None,
        )
        for name, part in rows
        if part
    )


def _faults(store: Store) -> tuple[Fault, ...]:
    faults = Faults()
    for summary in store.summaries(status=Status.ERROR):
        for body in store.bodies([place for place in store.index.places(summary.id) if place.t == "end"][:1]):
            try:
                end = parse_record(body)
            except TapereelError:
                continue  # the transcript shows the record as a hole
            if isinstance(end, EndRecord) and end.cause is not None:
                faults.count(summary.id, end.cause)
    return faults.most()


def _tapes(store: Store) -> tuple[TapeToRead, ...]:
    """Return the best, the worst and the newest tape in the split `train`. One tape may be several of these."""
    closed = store.summaries(split="train", closed=True)
    scored = [summary for summary in closed if summary.reward is not None]
    chosen: dict[str, list[str]] = {}
    for what, found in (
        ("the best", max(scored, key=_reward, default=None)),
        ("the worst", min(reversed(scored), key=_reward, default=None)),
        ("the newest", closed[-1] if closed else None),
    ):
        if found is not None:
            chosen.setdefault(found.id, []).append(what)
    return tuple(
        TapeToRead(tape=tape, caption=f"{' and '.join(whats)} of the tapes to train on")
        for tape, whats in chosen.items()
    )


def _reward(summary: Summary) -> float:
    assert summary.reward is not None
    return summary.reward


def _versions(store: Store) -> dict[str, str]:
    newest = store.index.tapes("status is not null")[-1:]
    try:
        return dict(store.tape(newest[0].id, refresh=False).begin.versions) if newest else {}
    except TapereelError:
        return {}


def arrow(before: float | None, after: float | None) -> str:
    """Return `before → after`, with three decimals."""
    return " → ".join("not measured" if value is None else fixed(value) for value in (before, after))


def checks(run: str | Path, *, trained: bool = True) -> dict[str, str]:
    """Return command lines that check a run, and what each checks. Without `trained`, no training is checked."""
    return {_line(one, run): one.purpose for one in check_commands(trained)}


def next_commands(run: str | Path) -> tuple[str, ...]:
    """Return command lines that show a run."""
    return tuple(_line(one, run) for one in show_commands())


def _line(command: Command, run: str | Path) -> str:
    return command.line.format(run=shlex.quote(str(run)))
