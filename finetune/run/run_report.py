"""The results of a training run: its summary, and `report.html`, the viewer's overview page as one file.

The page is written at evaluations and checkpoints, and when the run ends, even if it ends with an error. The last one
is written after the store is sealed, so it shows a complete record. If writing fails while the run is in progress, the
run continues.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import Field

from ...tapes.common.text import logger
from ...tapes.store.run_directory import METRICS, Results, RunDir, read_metrics
from ...tapes.value import Value
from ...tapes.view.bundle import write_report
from ...tapes.view.overview import Overview, overview_of, parts_of_time, untaught
from .train_config import EndedBy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logger("report")
_Given = TypeVar("_Given")

REPORT = "report.html"
EVERY = 60.0
"""Minimum number of seconds between two reports while the run is in progress."""


class PlayerSummary(Value):
    """The result of a player, which is another model in the episodes."""

    agents: tuple[str, ...]
    lineage: str | None
    """The lineage of the player's weights, or None for a frozen player."""
    updates: int
    model: str | None
    """The folder with the model, or None if the engine has no folder."""


class TrainSummary(Value):
    """The results of a training run."""

    run: str
    lineage: str
    recipe: str
    updates: int
    """Number of updates that the loop made. Updates of the warm start don't count."""
    ended_by: EndedBy
    """`stop_at` if the reward on held-out tasks reached `loop.stop_at` before all updates were made."""
    reward: dict[str, float | None]
    """Mean reward in the `first` five and the `last` five updates of the loop (see `ends_of`)."""
    agents: dict[str, dict[str, float | None]]
    """Mean reward in the first and the last five updates for each agent with its own reward (`loop.by_agent`), by
    path."""
    players: dict[str, PlayerSummary]
    held_out: dict[str, Any]
    """`before`, `after` and, if configured, `greedy_before` and `greedy_after` are mean rewards over `n` scored
    episodes. They are None if there was no evaluation. `after_change` is the difference, paired by task, with its
    interval and the means over the tasks that both scored. `after_pass_at` has the same for pass@k, by k. `tasks` is
    the number of held-out tasks with a score, and `every` has the mean rewards by update."""
    seconds: dict[str, float]
    tokens: dict[str, int]
    episodes: int
    books_close: bool
    model: str
    """The folder with the trained model, in Hugging Face format."""
    report: str
    """The HTML file that shows these results."""
    compared: dict[str, str] = Field(default={})
    """Name and digest of the `reference` and the `teacher`, if the recipe uses them."""
    advice: tuple[str, ...] = ()
    """Suggestions of where to look if training doesn't work. Each suggestion is one sentence."""
    code_changes: tuple[str, ...] = ()
    """A sentence about each change of the user's code before a resume."""


@dataclass
class Reporter:
    """Writes the report of one run."""

    run: RunDir
    title: str
    recipe: str
    updates: int
    """Number of updates that the loop is configured to make."""
    checkpoint_every: int
    tokenizer: PreTrainedTokenizerBase | None = None
    """The tokenizer that decodes token ids for the page. With None, the page shows the ids."""

    def __post_init__(self) -> None:
        # This is a copy, because a thread can't safely use the tokenizer that the run renders prompts with.
        self.tokenizer = copy.deepcopy(self.tokenizer)
        self._seconds_before = self.run.results.seconds.get("total", 0.0)
        self._began = self._last = time.perf_counter()
        self._thread: threading.Thread | None = None

    @property
    def path(self) -> Path:
        """The path of the page."""
        return self.run.path / REPORT

    def on_line(self, line: Mapping[str, object]) -> None:
        """Write a report if one is due. This is called with each metrics line. It writes in a thread, so the loop
        doesn't wait."""
        due = line.get("phase") == "evaluation" or cast(int, line.get("update", 0)) % self.checkpoint_every == 0
        busy = self._thread is not None and self._thread.is_alive()
        if not due or busy or time.perf_counter() - self._last < EVERY:
            return
        self._last = time.perf_counter()
        # This is a copy, because the loop changes the results while the thread reads them.
        results = self.run.results.model_copy(deep=True)
        self._thread = threading.Thread(target=self._try, args=(self._write_now, results), daemon=True, name="report")
        self._thread.start()

    def _try(self, work: Callable[[_Given], None], given: _Given) -> None:
        try:
            work(given)
        except Exception as error:  # a failure here must not end the run, nor hide the error that ended it
            log.warning("%s was not written; the run is not affected (%s: %s)", self.path, type(error).__name__, error)

    def _write_now(self, results: Results) -> None:
        self.run.store.check_lead()
        self._write(self.overview(results, over=False))

    def _write(self, overview: Overview) -> None:
        if self.run.store.lease is not None:
            self.run.store.lease.check()  # only the latest lead may write the page
        tokenizer = self.tokenizer
        decode = None if tokenizer is None else lambda token: str(tokenizer.decode([token]))
        write_report(self.path, self.run.path, overview, decode)

    def end(self, error: BaseException | None) -> None:
        """Make the last report, which is written as soon as the store is sealed. `error` is the error that ended the
        run, or None if the run has finished."""
        if self._thread is not None:
            self._thread.join()
        cut = None
        if error is not None:
            text = str(error).splitlines()
            cut = type(error).__name__ + (f": {text[0][:300]}" if text else "")
        self._try(self._end, cut)

    def _end(self, cut: str | None) -> None:
        overview = self.overview(self.run.results, over=True, cut=cut)
        self.run.sealed.callback(self._try, self._write, overview)

    def overview(self, results: Results, *, over: bool, cut: str | None = None) -> Overview:
        """Return the page's content. `results` are the results so far. `cut` is the error that ended the run early."""
        known = results.seconds.get("total", 0.0)
        running = self._seconds_before + time.perf_counter() - self._began
        total = known if over and known > self._seconds_before else running
        rest = "evaluations before and after, and the rest" if over else "since then"
        return overview_of(
            self.run.store,
            title=self.title,
            recipe=self.recipe,
            results=results,
            seconds=parts_of_time(results, total, rest),
            notes=self._notes(over, cut),
        )

    def _notes(self, over: bool, cut: str | None) -> list[str]:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
        done = sum(line.get("phase") == "rl" for line in read_metrics(self.run.path / METRICS))
        notes = []
        if not over:
            notes.append(
                f"The run is in progress: {done} of {self.updates} updates were made at {when}. This page is "
                "written again at evaluations and checkpoints."
            )
        elif cut is not None:
            notes.append(
                f"The run was ended after {done} of {self.updates} updates, at {when}, by {cut}. Resume it to continue."
            )
        elif over and done < self.updates:
            notes.append(
                f"The loop ended after {done} of {self.updates} updates, because the reward on held-out tasks reached "
                "loop.stop_at."
            )
        if over and done:
            books = self.run.store.books()
            if not books.tokens["trained"] and not books.authored_trained:
                notes.append(untaught())
        return notes


@contextmanager
def reporting(reporter: Reporter) -> Iterator[Reporter]:
    """Write report.html from time to time during the block, and once after the run is sealed, even if an error ends the
    run."""
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
