"""`tapereel show`: print a tape, or list the tapes of a run. It only reads."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import from_json

from ...tapes.common.stats import fixed, mean_of, number
from ...tapes.common.text import counted
from ...tapes.errors import UsageError
from ...tapes.records import Status
from ...tapes.store.disk import read_file
from ...tapes.tape import Tape
from ...tapes.transcript import (
    CallLine,
    StepLine,
    TapeSummary,
    call_lines,
    episode_rewards,
    step_lines,
    summarise,
)
from ..console import Exit, Section, answer, at_least, styled

if TYPE_CHECKING:
    from rich.text import Text

    from ...tapes.store.store import Store
    from ...tapes.store.summary import Summary

EXAMPLE = """
tapereel show runs/demo
tapereel show runs/demo --split eval --status finished --last 50
tapereel show runs/demo 019a3c --calls
tapereel show runs/demo --taught runs/demo/checkpoints/update-000440
tapereel show tape.json --json
"""

LONGEST = 4000
"""Maximum number of characters that are printed from a step without `--full`."""
TASK = 16
"""Maximum number of characters from a task's name in the list."""
RUNNING = "running"  # the status of a tape without an end, as printed
_STYLE = {"observation": "cyan", "thought": "dim italic", "action": "bold"}
_STATUS_STYLE = {"finished": "green", "running": "blue", "truncated": "yellow", "limit": "yellow"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run", help="a run directory, or a tape written as one JSON document")
    parser.add_argument("tape", nargs="?", help="id of a tape, or its first characters (default: list the tapes)")
    parser.add_argument(
        "--status",
        choices=[*(status.value for status in Status), RUNNING],
        metavar="STATUS",
        help="list only tapes of this status (`finished`, `error`, ..., `running`)",
    )
    parser.add_argument("--split", help="list only tapes of this split (`train`, `eval`, `demo`, ...)")
    parser.add_argument(
        "--last",
        type=at_least(0),
        default=20,
        metavar="N",
        help="list the newest N matching tapes (default 20)",
    )
    parser.add_argument(
        "--taught", metavar="CKPT", help="list only tapes that this checkpoint (a directory) was trained on"
    )
    parser.add_argument("--calls", action="store_true", help="print the model calls of a tape too")
    parser.add_argument(
        "--full",
        action="store_true",
        help=f"print every step of a tape whole, not only its first {LONGEST:,} characters",
    )


def run(args: argparse.Namespace) -> int:
    """Print the tape or the list."""
    path = Path(args.run)
    if path.is_file():
        if args.tape is not None:
            raise UsageError(f"{path} is a file with one tape: remove the tape id {args.tape!r}")
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
        if args.tape is not None:
            _show_tape(args, store.tape(args.tape))
        else:
            closed = False if args.status == RUNNING else None
            found = store.summaries(status=args.status if closed is None else None, split=args.split, closed=closed)
            if args.taught is not None:
                trained_on = _trained_on(store, Path(args.taught))
                found = [summary for summary in found if summary.id in trained_on]
            _show_list(args, found)
    return Exit.HOLDS


def _trained_on(store: Store, checkpoint: Path) -> Collection[str]:
    """Return the ids of tapes that were trained on before `checkpoint`. Raises UsageError if it isn't a checkpoint."""
    try:
        state = json.loads(read_file(checkpoint / "state.json"))
        return store.ledger(str(state["lineage"])).taught(before=int(state["update"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{checkpoint} is not a checkpoint: its state.json can't be read: {error}") from error


def _show_tape(args: argparse.Namespace, tape: Tape) -> None:
    summary, steps, calls = summarise(tape), step_lines(tape), call_lines(tape)
    shown: list[Section | str | Text] = [*_head(tape, summary), _step_section(steps, None if args.full else LONGEST)]
    if args.calls:
        shown.append(_call_section(tape.id, calls))
    episode = episode_rewards(tape)
    if episode:
        shown.append("for the episode: " + _numbers(episode))
    data = {"tape": summary, "task": tape.task, "steps": steps, "calls": calls, "episode_rewards": episode}
    answer(args, data, *shown)


def _show_list(args: argparse.Namespace, every: list[Summary]) -> None:
    newest = every[-args.last :] if args.last > 0 else []
    counts = dict(Counter(summary.status or RUNNING for summary in every).most_common())
    scored = [summary.reward for summary in every if summary.reward is not None]
    mean = mean_of(scored)
    statuses = ", ".join(f"{n} {status}" for status, n in counts.items()) or "none matches"
    line = f"{counted(len(every), 'tape')} ({statuses})"
    if mean is not None:
        line += f"; mean reward {fixed(mean)} over {len(scored)} scored"
    data = {
        "run": str(args.run),
        "count": len(every),
        "statuses": counts,
        "mean_reward": mean,
        "tapes": [{**s._asdict(), "status": s.status or RUNNING} for s in newest],
    }
    answer(args, data, _list_section(newest), line)


def _list_section(summaries: list[Summary]) -> Section:
    rows = [
        (
            s.id,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(s.begun)),
            _task_name(s),
            s.split,
            _status(s.status, s.cause),
            number(s.reward),
            str(s.actions),
            str(s.sampled),
            s.agent,
            f"{s.group}/{s.attempt}" if s.group is not None else "",
        )
        for s in summaries
    ]
    headings = "tape began task split status #reward #turns #tokens agent group"
    return Section(tuple(headings.split()), rows, fold=("task", "split", "status", "agent", "group"))


def _task_name(s: Summary) -> str:
    """Return a task's name, cut to the column's width, or the start of its hash if it has no name."""
    if not s.task:
        return s.task_hash[:8]
    return s.task if len(s.task) <= TASK else f"{s.task[: TASK - 1]}…"


def _head(tape: Tape, s: TapeSummary) -> list[Text]:
    first = styled(f"tape {s.id}  ", "bold").append_text(_status(s.status, s.cause))
    lines = [first.append(f"  reward {number(s.reward)}")]
    about = (
        f"{s.agent} in {s.env}, split {s.split}, {counted(s.turns, 'turn')}, {counted(s.calls, 'call')}, "
        f"{counted(s.sampled, 'token')} sampled"
    )
    if s.authored:
        about += f", {s.authored} authored"
    lines.append(styled(about if s.seconds is None else f"{about}, {s.seconds:.2f} s"))
    if s.parent is not None:
        lines.append(styled(f"forked from {s.parent}"))
    if s.cause is not None:
        lines.append(styled(f"ended by {s.cause}", "yellow"))
    if s.raised_at is not None:
        lines.append(styled(f"raised at {s.raised_at}"))
    if tape.task is not None:
        lines.append(styled(f"task {tape.task}"))
    return lines


def _step_section(steps: list[StepLine], longest: int | None) -> Section:
    rows = [
        (
            str(step.index),
            str(step.turn),
            step.by,
            step.kind,
            styled(_shortened(step.text, longest), _STYLE[step.role] + (" dim" if step.inherited else "")),
            str(step.tokens or ""),
            _numbers({**step.rewards, **{f"({name})": value for name, value in step.metrics.items()}}),
        )
        for step in steps
    ]
    headings = ("#", "#turn", "by", "kind", "text", "#tokens", "#reward")
    return Section(headings, rows, fold=("by", "kind", "text", "reward"))


def _shortened(text: str, longest: int | None) -> str:
    """Return the first `longest` characters and the number of omitted ones, or the whole text if `longest` is None."""
    left = 0 if longest is None else len(text) - longest
    return f"{text[:longest]} … ({left:,} more characters; --full shows them)" if left > 0 else text


def _call_section(tape: str, calls: list[CallLine]) -> Section:
    rows = [
        (
            c.call.removeprefix(tape),
            c.by,
            c.engine,
            _count(c.prompt),
            str(c.kept),
            _count(c.completion),
            c.finish or "",
            f"{c.temperature:g}",
            number(c.mean_logprob),
            ", ".join(f"{version} [{start}, {end})" for version, start, end in c.spans)
            + (f"; new row ({c.split})" if c.split else ""),
        )
        for c in calls
    ]
    headings = "call by engine #prompt #kept #completion finish #T #log-prob versions"
    return Section(tuple(headings.split()), rows, fold=("by", "engine", "finish", "versions"))


def _status(status: str | None, cause: str | None) -> Text:
    status = status or RUNNING
    word = status if cause is None else f"{status} ({cause.split(':')[0]})"
    return styled(word, _STATUS_STYLE.get(status, "red"))


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _numbers(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())
