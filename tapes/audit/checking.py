"""Checks many tapes: selects the tapes, divides them among processes, and returns the verdicts in order.

A check is a function from a tape to a verdict. A plan is picklable and creates the check in each process.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.progress import Progress, silent
from ..common.text import guard_terminal
from ..errors import UsageError, remedy
from .verdict import Verdict, Verdicts

if TYPE_CHECKING:
    from ..store.store import Store
    from ..tape import Tape

PER_JOB = 250
"""Number of tapes that justify starting another process."""

Plan = Callable[["Store"], Callable[["Tape"], Verdict]]
"""A picklable function that each process calls with its own open store. It returns the check, which is a function from
a tape to a verdict."""


def check_run(
    run: str | Path,
    verb: str,
    plan: Plan,
    *,
    tapes: Sequence[str] = (),
    split: str | None = None,
    jobs: int | None = None,
    progress: Progress = silent,
) -> Verdicts:
    """Check the named tapes of a run, or all closed tapes in a split.

    `jobs` is the number of processes. By default, this is one for every `PER_JOB` tapes, up to the number of CPUs.
    Raises NoSuchTape for an unknown tape, and UsageError for an unknown split or if `jobs` is below 1.
    """
    from ..store.store import Store

    started = time.perf_counter()
    with Store.open(run) as store:
        torn = torn_tails(store)
        ids = chosen_tapes(store, tapes, split)
    if jobs is None:
        jobs = min(os.cpu_count() or 1, max(1, len(ids) // PER_JOB))
    if jobs < 1:
        raise UsageError(f"jobs is {jobs}; it must be 1 or more")
    found: dict[str, Verdict] = {}
    counts: Counter[str] = Counter()
    for verdict in _verdicts(Path(run), plan, ids, jobs):
        found[verdict.tape] = verdict
        counts[verdict.outcome] += 1
        progress(verb, len(found), len(ids), ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    return Verdicts(
        verb=verb,
        run=str(run),
        verdicts=tuple(found[name] for name in ids),
        torn=tuple(torn),
        seconds=round(time.perf_counter() - started, 3),
    )


def chosen_tapes(store: Store, names: Sequence[str], split: str | None) -> list[str]:
    """Return the ids of the named tapes, or of all closed tapes in the split. Raises NoSuchTape for an unknown tape and
    UsageError for an unknown split."""
    check_split(store, split)
    return [store.tape(name).id for name in names] or [one.id for one in store.summaries(split=split, closed=True)]


def check_split(store: Store, split: str | None) -> None:
    """Raise UsageError if no tape has the split `split`. The error lists the existing splits."""
    if split is not None and not store.summaries(split=split):
        known = ", ".join(dict.fromkeys(one.split for one in store.summaries())) or "none: it holds no tape"
        raise UsageError(f"{store.path} has no tape of the split {split!r}; its splits are {known}")


def torn_tails(store: Store) -> list[str]:
    """Return a sentence for each segment with unreadable bytes at its end. Verdicts don't cover the records in these
    bytes."""
    return [
        f"{torn.size:,} bytes at the tail of segment {torn.segment} are torn, so their records are left out here: "
        f"see {remedy('verify run', f'`verify` of {store.path}', run=store.path)}"
        for torn in store.refresh().values()
    ]


def _verdicts(run: Path, plan: Plan, ids: Sequence[str], jobs: int) -> Iterator[Verdict]:
    if jobs == 1:
        yield from _work(run, plan, ids)
        return
    size = max(1, min(PER_JOB, -(-len(ids) // jobs)))
    # The processes are spawned, because a child forked from a process with threads (a tokenizer's or torch's) may hang.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=guard_terminal) as pool:
        parts = [pool.submit(_work_all, run, plan, ids[k : k + size]) for k in range(0, len(ids), size)]
        for part in as_completed(parts):
            yield from part.result()


def _work_all(run: Path, plan: Plan, ids: Sequence[str]) -> list[Verdict]:
    return list(_work(run, plan, ids))


def _work(run: Path, plan: Plan, ids: Sequence[str]) -> Iterator[Verdict]:
    from ..store.store import Store

    with Store.open(run) as store:
        check = plan(store)
        store.refresh()
        for name in ids:
            tape = store.tape(name, refresh=False)
            yield check(tape).of(tape)
