"""What the report says of any training run, read from its run directory, and when it is written.

`run_report` gives the page's data: it knows the store, the metrics and the results, not who chose the agent or the
tasks. `reporting` keeps report.html beside a run at work: at its evaluations and checkpoints, and when it ends, however
it ends.
"""

from __future__ import annotations

import copy
import logging
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...tapes.audit.faults import Faults
from ...tapes.records import End as EndRecord
from ...tapes.records import Status, parse_record
from ...tapes.store.books import Books
from ...tapes.store.index import Summary
from ...tapes.store.run_directory import CONFIG, METRICS, RunDir, read_metrics
from ...tapes.store.store import Store
from .curves import agent_curves, held_out_curve, held_out_levels, loss_curves, reward_curve
from .plots import Curve
from .report import End, Fact, Plot, ReportData, Score, TapePage, tape_page, write_report

log = logging.getLogger("tapereel.report")

REPORT = "report.html"
EVERY = 60.0
"""Seconds between two reports of a run at work, at least."""
UNTAUGHT = (
    "No token was trained on, so the model is what it was: nothing was scored, or all attempts of each group "
    "earned the same. `tapereel audit` says which."
)


@dataclass
class Reporter:
    """The report of one run, and what of the run has been read for it."""

    run: RunDir
    title: str
    recipe: str
    updates: int
    """That the loop is to make."""
    checkpoint_every: int
    agents: Sequence[str] = ()
    """Paths of the agents with a reward of their own."""
    tokenizer: Any = None
    """Gives the text of token ids; None: tokens are not shown."""
    complete: Callable[[ReportData], ReportData] = lambda data: data
    """What the caller adds to a finished run's page."""
    _faults: Faults = field(default_factory=Faults)
    _read: set[str] = field(default_factory=set)
    """Tapes in `_faults`."""
    _began: float = field(default_factory=time.perf_counter)
    _last: float = field(default_factory=time.perf_counter)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        # Of its own: it is read in another thread while episodes are rendered.
        self.tokenizer = copy.deepcopy(self.tokenizer)
        self._before = self.run.results.get("seconds", {}).get("total", 0.0)

    @property
    def path(self) -> Path:
        """Of the page."""
        return self.run.path / REPORT

    def on_line(self, line: Mapping[str, Any]) -> None:
        """A line of metrics was written: write the report where it is time to, beside the run."""
        due = line.get("phase") == "evaluation" or int(line.get("update", 0)) % self.checkpoint_every == 0
        busy = self._thread is not None and self._thread.is_alive()
        if not due or busy or time.perf_counter() - self._last < EVERY:
            return
        self._last = time.perf_counter()
        results = copy.deepcopy(self.run.results)
        self._thread = threading.Thread(target=self._try, args=(results,), daemon=True, name="report")
        self._thread.start()

    def _try(self, results: dict[str, Any], cut: str | None = None) -> None:
        try:
            write_report(self.path, self.data(results, over=cut is not None, cut=cut))
        except Exception as error:  # a page that isn't there costs nobody the run
            log.warning("%s was not written; the run is not affected (%s: %s)", self.path, type(error).__name__, error)

    def end(self, error: BaseException | None) -> None:
        """Write the last one: of a whole run, or of one that `error` ended."""
        if self._thread is not None:
            self._thread.join()
        if error is None:
            write_report(self.path, self.complete(self.data(self.run.results, over=True)))
        else:
            text = str(error).splitlines()
            self._try(self.run.results, type(error).__name__ + (f": {text[0][:300]}" if text else ""))

    def data(self, results: Mapping[str, Any], *, over: bool, cut: str | None = None) -> ReportData:
        """The page's data. `results`: those of the run directory; `cut`: what ended the run before its time."""
        store, run = self.run.store, str(self.run.path)
        books, metrics = store.books(), self.run.path / METRICS
        lines = [line for line in read_metrics(metrics) if line.get("phase") == "rl"]
        return ReportData(
            title=self.title,
            subtitle=f"{self.recipe}, lineage {results['lineage']}, in {run}",
            notes=self._notes(len(lines), books, over, cut),
            facts=self._facts(results, lines, books),
            plots=(
                reward_plot(self.recipe, metrics, results, self.agents),
                *(
                    Plot(title=title, curves=tuple(curves), ylabel="", caption=caption, small=True)
                    for title, caption, curves in loss_curves(metrics)
                ),
            ),
            scores=held_out_scores(results),
            seconds=self._seconds(results, over),
            tokens=books.tokens,
            ends=tuple(End(status=end.status, cause=end.cause or "", episodes=end.episodes) for end in books.ends),
            faults=self._faults_of(store),
            tapes=self._tapes(store),
            config=(self.run.path / CONFIG).read_text(),
            versions=_versions(store),
            checks=checks(run),
            next=next_commands(run),
        )

    def _notes(self, done: int, books: Books, over: bool, cut: str | None) -> tuple[str, ...]:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        notes = []
        if not over:
            notes.append(
                f"The run is at work: {done} of {self.updates} updates were made at {when}. This page is "
                "written again at evaluations and checkpoints."
            )
        elif cut is not None:
            notes.append(
                f"The run was ended after {done} of {self.updates} updates, at {when}, by {cut}. The same "
                "command with --resume goes on with it."
            )
        if over and done and not books.tokens["trained"] and not books.authored_trained:
            notes.append(UNTAUGHT)
        if not books.closes:
            notes.append("The books do not close: " + ("; ".join(books.findings) or "their sums differ"))
        return tuple(notes)

    def _facts(self, results: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], books: Books) -> tuple[Fact, ...]:
        facts = []
        rewards = [line["reward"] for line in lines if line.get("reward") is not None]
        if rewards:
            ends = (sum(some) / len(some) for some in (rewards[:5], rewards[-5:]))
            facts.append(
                Fact(label="reward of the updates", value=arrow(*ends), note="means of the first and the last five")
            )
        measured = [results.get(when) for when in ("before", "after")]
        if any(measured):
            before, after = (part["sampled"]["mean"] if part else None for part in measured)
            n = next(part["sampled"]["n"] for part in measured if part)
            facts.append(
                Fact(label="held-out reward", value=arrow(before, after), note=f"{n} episodes, none of them trained on")
            )
        return (
            *facts,
            Fact(label="updates", value=f"{len(lines)} of {self.updates}"),
            Fact(label="tokens", value=f"{books.sampled:,}", note=f"sampled; {books.tokens['trained']:,} trained on"),
            Fact(label="episodes on tape", value=f"{books.begun:,}"),
            Fact(label="seconds", value=f"{self._total(results, over='total' in results.get('seconds', {})):,.0f}"),
        )

    def _total(self, results: Mapping[str, Any], over: bool) -> float:
        known = results.get("seconds", {}).get("total", 0.0)
        return known if over and known > self._before else self._before + time.perf_counter() - self._began

    def _seconds(self, results: Mapping[str, Any], over: bool) -> dict[str, float]:
        """Parts of the wall clock, one after the other: evaluations between updates lie inside the loop."""
        known = results.get("seconds", {})
        parts = {name: known[key] for key, name in _PARTS.items() if key in known}
        rest = self._total(results, over) - sum(parts.values())
        return {**parts, "evaluations before and after, and the rest" if over else "since then": max(0.0, rest)}

    def _faults_of(self, store: Store) -> tuple[Any, ...]:
        for summary in store.summaries(status=Status.ERROR):
            if summary.id not in self._read:
                self._read.add(summary.id)
                (body,) = store.bodies([place for place in store.index.places(summary.id) if place.t == "end"][:1])
                end = parse_record(body)
                if isinstance(end, EndRecord) and end.cause is not None:
                    self._faults.count(summary.id, end.cause)
        return self._faults.most()

    def _tapes(self, store: Store) -> tuple[TapePage, ...]:
        """Of the tapes to train on: the best, the worst and the newest."""
        run = str(self.run.path)
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
            tape_page(
                store.tape(tape, refresh=False),
                f"{' and '.join(whats)} of the tapes to train on",
                self.decode if self.tokenizer is not None else None,
                commands=(command("view", run), command("show", run, tape), command("explain", run, tape)),
            )
            for tape, whats in chosen.items()
        )

    def decode(self, token: int) -> str:
        """The text of a token id."""
        return str(self.tokenizer.decode([token]))


_PARTS = {"demonstrations": "demonstrations", "restore": "restore", "sft": "imitation", "rl": "the loop"}


@contextmanager
def reporting(reporter: Reporter) -> Iterator[Reporter]:
    """Inside, report.html is written now and then; on the way out, once more, whatever ended the run."""
    reporter.run.listeners.append(reporter.on_line)
    try:
        yield reporter
    except BaseException as error:
        reporter.end(error)
        raise
    else:
        reporter.end(None)
    finally:
        reporter.run.listeners.remove(reporter.on_line)


def reward_plot(
    name: str, metrics: Path, results: Mapping[str, Any], agents: Sequence[str] = (), others: Sequence[Curve] = ()
) -> Plot:
    """Reward per update, that of each agent and of `others`, and the held-out rewards."""
    curves = [reward_curve(name, metrics), *agent_curves(agents, metrics), *others, *held_out_curve(dict(results))]
    return Plot(
        title="Mean reward of each update's episodes",
        curves=tuple(curves),
        levels=held_out_levels(dict(results), "sampled"),
        xlabel="update",
        ylabel="mean reward",
        caption="Thin: each update; thick: mean over five.",
    )


def held_out_scores(results: Mapping[str, Any]) -> tuple[Score, ...]:
    """A line for each evaluation that was made, in order."""
    between = results.get("evaluations", {})
    rows = [
        ("before", results.get("before")),
        *((f"after update {k}", between[k]) for k in sorted(between, key=int)),
        ("after", results.get("after")),
    ]
    return tuple(
        Score(
            name=name,
            sampled=part["sampled"]["mean"],
            n=part["sampled"]["n"],
            greedy=part["greedy"]["mean"] if "greedy" in part else None,
        )
        for name, part in rows
        if part
    )


def arrow(before: float | None, after: float | None) -> str:
    """Two numbers, the second of which became of the first."""
    return " → ".join("not measured" if value is None else f"{value:.3f}" for value in (before, after))


def command(verb: str, *words: str) -> str:
    """A command line that a shell reads as meant."""
    return " ".join(("tapereel", verb, *map(shlex.quote, words)))


def checks(run: str) -> dict[str, str]:
    """Command lines that check a training run."""
    return {
        command("verify", run): "every line of the record is as it was written",
        command("audit", run): "where each token and episode went, and what looks wrong",
        command("reproduce", run): "the updates, made again from the tapes, give the same weights",
        command("requery", run): "the recorded probabilities are those of the weights that sampled",
    }


def next_commands(run: str) -> tuple[str, ...]:
    """Things to look at in a training run."""
    return tuple(command(verb, run) for verb in ("show", "view", "explain"))


def _reward(summary: Summary) -> float:
    assert summary.reward is not None
    return summary.reward


def _versions(store: Store) -> dict[str, str]:
    """What the newest tape names by version."""
    newest = store.index.tapes("status is not null")[-1:]
    return dict(store.tape(newest[0].id, refresh=False).begin.versions) if newest else {}
