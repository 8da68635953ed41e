"""`tapereel show`: print a tape, or list the tapes of a run. It only reads."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import from_json

from ...tapes.common.stats import fixed, mean_of, number
from ...tapes.common.text import counted
from ...tapes.errors import UsageError
from ...tapes.status import BRANCH, Status
from ...tapes.store.disk import read_file
from ...tapes.tape import Tape
from ...tapes.transcript import call_lines, episode_rewards, not_imported, step_lines, summarise
from ..console import Exit, Section, answer, at_least
from ..score_lines import cut_lines
from .tape_output import (
    LINES,
    LONGEST,
    RUNNING,
    call_section,
    head,
    list_section,
    numbers,
    request_section,
    step_section,
)

if TYPE_CHECKING:
    from rich.text import Text

    from ...tapes.store.store import Store
    from ...tapes.store.summary import Summary

EXAMPLE = """
tapereel show runs/demo
tapereel show runs/demo --split eval --status finished --last 50
tapereel show runs/demo --failed --browse
tapereel show runs/demo --worst 5
tapereel show runs/demo 019a3c --calls
tapereel show runs/demo --taught runs/demo/checkpoints/update-000440
tapereel show tape.json --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", help="a run directory, or a tape written as one JSON document")
    parser.add_argument("tape", nargs="?", help="id of a tape, or its first characters (default: list the tapes)")
    parser.add_argument(
        "--status",
        choices=[*(status.value for status in Status), RUNNING],
        metavar="STATUS",
        help="list only tapes of this status (`finished`, `error`, ..., `running`); cancelled tapes are listed only "
        "with `--status cancelled`",
    )
    parser.add_argument("--split", help="list only tapes of this split (`train`, `eval`, `demo`, ...)")
    parser.add_argument(
        "--reward", type=float, metavar="X", help="list only tapes with this reward, compared as it is printed"
    )
    parser.add_argument(
        "--failed",
        action="store_true",
        help="list only tapes that ended in an error or a crash, have no reward, or have a reward of 0 or less",
    )
    parser.add_argument(
        "--taught", metavar="CKPT", help="list only tapes that this checkpoint (a directory) was trained on"
    )
    listed = parser.add_mutually_exclusive_group()
    listed.add_argument(
        "--last",
        type=at_least(0),
        default=20,
        metavar="N",
        help="list the newest N matching tapes (default 20)",
    )
    listed.add_argument(
        "--worst", type=at_least(1), metavar="N", help="list the N matching tapes with the lowest rewards, lowest first"
    )
    parser.add_argument(
        "--browse",
        action="store_true",
        help="print the first tape of the list, or TAPE; the key n prints the next one, p the previous one, q ends",
    )
    parser.add_argument("--layer", help="list the rewards of this later scoring (replay rewards --layer)")
    parser.add_argument(
        "--calls", action="store_true", help="print the model calls of a tape too, each with its whole request"
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help=f"print every step of a tape whole; without it, at most {LONGEST:,} characters and {LINES} lines of each "
        "part",
    )


def run(args: argparse.Namespace) -> int:
    """Print the tape or the list."""
    path = Path(args.run)
    if path.is_file():
        if args.tape is not None or args.browse:
            more = "--browse" if args.tape is None else f"the tape id {args.tape!r}"
            raise UsageError(f"{path} is a file with one tape: remove {more}")
        try:
            document = from_json(path.read_bytes())
        except (ValueError, OSError) as error:
            raise UsageError(f"{path} is not a tape in JSON: {error}") from error
        if not isinstance(document, dict) or "records" not in document:
            raise UsageError(f"{path} is not a tape in JSON: it has no `records`")
        _show_tape(args, Tape.model_validate(document))
        return Exit.HOLDS
    from ...tapes.store.store import Store

    with Store.open(path) as store:
        if args.browse:
            _browse(args, store)
        elif args.tape is not None:
            _show_tape(args, store.tape(args.tape))
        else:
            _show_list(args, store)
    return Exit.HOLDS


def _matching(args: argparse.Namespace, store: Store) -> tuple[list[Summary], int]:
    """Return the tapes that match the arguments, in the order in which they began, and the number of cancelled ones
    that are left out."""
    closed = False if args.status == RUNNING else None
    found = store.summaries(status=args.status if closed is None else None, split=args.split, closed=closed)
    if args.layer is not None and found:
        found = store.rescored(args.layer, found)
    if args.taught is not None:
        trained_on = _trained_on(store, Path(args.taught))
        found = [s for s in found if s.id in trained_on]
    if args.reward is not None:
        found = [s for s in found if s.reward is not None and number(s.reward) == number(args.reward)]
    if args.failed:
        found = [s for s in found if _failed(s)]
    kept = [s for s in found if s.status != Status.CANCELLED or args.status is not None]
    return kept, len(found) - len(kept)


def _failed(s: Summary) -> bool:
    bad = s.status in (Status.ERROR, Status.CRASHED) or s.reward is None or s.reward <= 0
    return s.status is not None and bad


def _listed(args: argparse.Namespace, matching: list[Summary]) -> list[Summary]:
    if args.worst is not None:
        scored = [(s.reward, k) for k, s in enumerate(matching) if s.reward is not None]
        return [matching[k] for _, k in sorted(scored)[: args.worst]]
    return matching[-args.last :] if args.last > 0 else []


def _trained_on(store: Store, checkpoint: Path) -> Collection[str]:
    """Return the ids of tapes that were trained on before `checkpoint`. Raises UsageError if it isn't a checkpoint."""
    try:
        state = json.loads(read_file(checkpoint / "state.json"))
        return store.ledger(str(state["lineage"])).taught(before=int(state["update"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{checkpoint} is not a checkpoint: its state.json can't be read: {error}") from error


def _show_tape(args: argparse.Namespace, tape: Tape) -> None:
    summary, steps, calls = summarise(tape), step_lines(tape), call_lines(tape)
    shown: list[Section | str | Text] = [*head(tape, summary, args.full), step_section(steps, args.full)]
    requests = {call.call: call.messages for call in tape.calls} if args.calls else {}
    if args.calls:
        shown.append(call_section(tape.id, calls))
        shown += [request_section(name.removeprefix(tape.id), one, args.full) for name, one in requests.items()]
    episode = episode_rewards(tape)
    if episode:
        shown.append("for the episode: " + numbers(episode))
    layers = tape.layer_rewards
    shown += [f"reward in layer {name}: {number(value)}" for name, value in layers.items()]
    if unknown := not_imported(tape):
        shown.append(unknown)
    data = {
        "tape": summary,
        "task": tape.task,
        "expected": tape.begin.task.expected,
        "steps": steps,
        "calls": calls,
        "requests": requests,
        "episode_rewards": episode,
        "layers": layers,
    }
    answer(args, data, *shown)


def _show_list(args: argparse.Namespace, store: Store) -> None:
    from ...tapes.store.run_directory import code_changes
    from ...tapes.view.gist import gist_of

    matching, cancelled = _matching(args, store)
    listed = [(s, gist_of(store, s.id)) for s in _listed(args, matching)]
    counts = dict(Counter(s.status or RUNNING for s in matching).most_common())
    episodes = [s for s in matching if s.split != BRANCH or args.split is not None]
    scored = [s.reward for s in episodes if s.trainable and s.reward is not None]
    mean = mean_of(scored)
    statuses = ", ".join(f"{n} {status}" for status, n in counts.items()) or "none matches"
    line = f"{counted(len(matching), 'tape')} ({statuses})"
    if mean is not None:
        line += f"; mean reward {fixed(mean)} over {len(scored)} scored"
    for cut in cut_lines(sum(s.cut for s in matching), sum(s.calls for s in matching)):
        line += f"; {cut}"
    if cancelled:
        line += f"; {cancelled:,} cancelled left out (--status cancelled lists them)"
    changes = code_changes(args.run)
    data = {
        "run": str(args.run),
        "code_changes": changes,
        "count": len(matching),
        "cancelled_left_out": cancelled,
        "statuses": counts,
        "mean_reward": mean,
        "tapes": [{**s._asdict(), "status": s.status or RUNNING, **gist.model_dump()} for s, gist in listed],
    }
    answer(args, data, list_section(store, listed), line, *changes)


def _browse(args: argparse.Namespace, store: Store) -> None:
    from .browse import browse

    if args.json or not (sys.stdin.isatty() and args.answer_to.isatty()):
        raise UsageError("--browse reads keys: use it in a terminal, without a pipe and without --json")
    matching, _ = _matching(args, store)
    ids, at = [s.id for s in (matching if args.tape is not None else _listed(args, matching))], 0
    if args.tape is not None:
        name = store.tape(args.tape).id
        if name not in ids:
            raise UsageError(f"the list doesn't have the tape {name}: change --status, --split or the other filters")
        at = ids.index(name)
    if ids:
        browse(ids, at, lambda name: _show_tape(args, store.tape(name)), lambda line: answer(args, {}, line))
    else:
        answer(args, {}, "no tape matches")
