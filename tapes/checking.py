"""What the verbs that check tapes share: which tapes, on how many processors, and how verdicts are told.

A check is a function from a tape to a verdict. A plan makes it in each process, and can be sent there. This module
knows no check.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import UsageError, answer, safe, say, table
from .progress import live_progress
from .verdict import Divergence, Verdict, Verdicts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from .store import Store
    from .tape import Tape

PER_JOB = 250
"""Tapes for which another process is worth its start."""
SHOWN = 20
"""Verdicts that are shown to people one by one; `--json` has them all."""


GIVEN = ("agent", "env", "reward", "model", "layer", "mask", "tolerance", "no_guard")
"""Arguments that say against what the tapes were checked; kept with the verdicts where they were given."""

Plan = Callable[["Store"], Callable[["Tape"], Verdict]]
"""Picklable: makes, in each process, the check of a tape of an open store."""


def add_tape_arguments(parser: argparse.ArgumentParser, *, turn: bool = False) -> None:
    """Which tapes, and how."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "tape", nargs="*", default=[], help="ids of tapes, or their first characters; without any, all that ended"
    )
    if turn:
        parser.add_argument("--turn", type=int, metavar="K", help="this turn alone, counted from 0")
    parser.add_argument("--split", help="only tapes of this split (`train`, `eval`, `demo`, ...)")
    add_keep_argument(parser)
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: as many as it pays to start)")


def add_keep_argument(parser: argparse.ArgumentParser) -> None:
    """Whether the verdicts stay."""
    parser.add_argument(
        "--no-keep", action="store_true", help="leave no file with the verdicts in the run, for `tapereel view`"
    )


def check_run(args: argparse.Namespace, verb: str, plan: Plan) -> Verdicts:
    """Check the tapes that the arguments name. UsageError, NoRun or NoSuchTape where they name none."""
    from .store import Store

    started = time.perf_counter()
    with Store.open(args.run) as store:
        torn = torn_tails(store)
        ids = chosen_tapes(store, args.tape, args.split)
    jobs = args.jobs if args.jobs is not None else min(os.cpu_count() or 1, max(1, len(ids) // PER_JOB))
    if jobs < 1:
        raise UsageError(f"--jobs is {jobs}; it must be 1 or more")
    found: dict[str, Verdict] = {}
    counts: Counter[str] = Counter()
    with live_progress() as progress:
        for verdict in _verdicts(Path(args.run), plan, ids, jobs):
            found[verdict.tape] = verdict
            counts[verdict.outcome] += 1
            progress(verb, len(found), len(ids), ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    return Verdicts(
        verb=verb,
        run=str(args.run),
        verdicts=tuple(found[name] for name in ids),
        torn=tuple(torn),
        turn=getattr(args, "turn", None),
        seconds=round(time.perf_counter() - started, 3),
    )


def chosen_tapes(store: Store, names: Sequence[str], split: str | None) -> list[str]:
    """Ids of the named tapes, or of all of the split that ended. NoSuchTape, or UsageError for a split that no tape is
    of."""
    check_split(store, split)
    return [store.tape(name).id for name in names] or [one.id for one in store.summaries(split=split, closed=True)]


def check_split(store: Store, split: str | None) -> None:
    """UsageError where a split is named that no tape is of; says which there are."""
    if split is not None and not store.summaries(split=split):
        known = ", ".join(dict.fromkeys(one.split for one in store.summaries())) or "none: it holds no tape"
        raise UsageError(f"{store.path} has no tape of the split {split!r}; its splits are {known}")


def torn_tails(store: Store) -> list[str]:
    """A sentence for each segment whose last bytes can't be read: what they held is in no verdict."""
    return [
        f"{torn.size:,} bytes at the tail of segment {torn.segment} are torn, and what they held is left out here: "
        f"see tapereel verify {store.path}"
        for torn in store.refresh().values()
    ]


def _verdicts(run: Path, plan: Plan, ids: Sequence[str], jobs: int) -> Iterator[Verdict]:
    if jobs == 1:
        yield from _work(run, plan, ids)
        return
    size = max(1, min(PER_JOB, -(-len(ids) // jobs)))
    # Spawned: a forked child of a process with threads (a tokenizer's, torch's) may hang.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = [pool.submit(_work_all, run, plan, ids[k : k + size]) for k in range(0, len(ids), size)]
        for part in as_completed(parts):
            yield from part.result()


def _work_all(run: Path, plan: Plan, ids: Sequence[str]) -> list[Verdict]:
    return list(_work(run, plan, ids))


def _work(run: Path, plan: Plan, ids: Sequence[str]) -> Iterator[Verdict]:
    from .store import Store

    with Store.open(run) as store:
        check = plan(store)
        store.refresh()
        for name in ids:
            tape = store.tape(name, refresh=False)
            yield check(tape).of(tape)


def tell(args: argparse.Namespace, verdicts: Verdicts, *more: RenderableType, data: Any = None) -> int:
    """Keep the verdicts beside the run's tapes, print them, and give the exit code. `data`: more fields of the JSON
    object."""
    kept = None if args.no_keep else _keep(args, verdicts)
    answer(args, {**verdicts.model_dump(mode="json"), **(data or {}), "kept": kept}, *_shown(verdicts), *more)
    return verdicts.exit_code


def _keep(args: argparse.Namespace, verdicts: Verdicts) -> str | None:
    """Where they were kept; None where nothing was, and why is said."""
    from .verdicts import keep_verdicts

    given = {name: str(value) for name in GIVEN if (value := getattr(args, name, None))}
    try:
        path = keep_verdicts(Path(args.run), verdicts, given)
    except OSError as error:
        say(f"the verdicts are not kept, so `tapereel view` will not show them: {error.strerror or error}: {args.run}")
        return None
    return None if path is None else str(path)


def _shown(verdicts: Verdicts) -> Iterator[RenderableType]:
    yield from map(safe, verdicts.torn)
    bad = [v for v in verdicts.verdicts if v.outcome == "diverged"]
    if bad:
        made = table("tape", "#turn", "where", "likely cause", fold=("where", "likely cause"))
        for d in (v.divergence for v in bad[:SHOWN] if v.divergence is not None):
            made.add_row(d.tape, "" if d.turn is None else str(d.turn), safe(d.field), d.cause.value)
        yield made
    if len(bad) > SHOWN:
        yield f"and {len(bad) - SHOWN:,} more that diverge: --json has them all"
    if bad and bad[0].divergence is not None:
        yield from _first(bad[0].divergence)
    reasons = Counter(v.reason for v in verdicts.verdicts if v.reason is not None)
    for reason, n in reasons.most_common(SHOWN // 4):
        yield safe(f"{n:,} can't be verified: {reason}")
    if len(reasons) > SHOWN // 4:
        yield f"and {len(reasons) - SHOWN // 4} more reasons: --json has them all"
    notes = Counter(note for verdict in verdicts.verdicts for note in verdict.not_checked)
    for note, n in notes.most_common(SHOWN // 4):
        yield safe(f"not checked on {n:,}: {note}")
    checked: Counter[str] = Counter()
    for verdict in verdicts.verdicts:
        checked.update(verdict.checked)
    told = ", ".join(f"{n:,} {name}" for name, n in checked.items() if n) or "nothing"
    yield f"{verdicts.verb}: {', '.join(f'{n:,} {name}' for name, n in verdicts.counts.items())}; compared: {told}"


def _first(d: Divergence) -> Iterator[str]:
    yield safe(f"tape {d.tape}: {d.sentence}")
    if d.where is not None:
        yield safe(f"at {d.where}")
    yield from (safe(line[:400]) for line in d.diff[:40])
