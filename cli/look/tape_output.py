"""One tape, or a list of tapes, as sections and lines for the verb `show`."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from ...tapes.common.stats import number
from ...tapes.common.text import counted
from ...tapes.messages import text_of
from ...tapes.status import Status
from ...tapes.tape import Tape
from ...tapes.transcript import CallLine, StepLine, TapeSummary, plain
from ..console import Section, styled

if TYPE_CHECKING:
    from pydantic import JsonValue
    from rich.text import Text

    from ...tapes.records import Message
    from ...tapes.store.store import Store
    from ...tapes.store.summary import Summary
    from ...tapes.view.gist import Gist

LONGEST, LINES = 2000, 30
"""Maximum number of characters and of lines that are printed from a part of a step without `--full`."""
COMPACT, DEEPEST = 40, 8
"""JSON of at most `COMPACT` characters stays on one line, and also what is nested more than `DEEPEST` deep."""
SHORTEST = 8
"""Minimum number of characters of a tape's id in the list."""
RUNNING = "running"  # the status of a tape without an end, as printed
_STYLE = {"observation": "cyan", "thought": "dim italic", "action": "bold"}
_STATUS_STYLE = {Status.FINISHED: "green", RUNNING: "blue", Status.TRUNCATED: "yellow", Status.LIMIT: "yellow"}


def head(tape: Tape, s: TapeSummary, full: bool) -> list[Text]:
    """Return the lines above the steps: how the tape ended, with which reward, why, and the expected answer."""
    first = styled(f"tape {s.id}  ", "bold").append_text(status_text(s.status, s.cause))
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
        lines.append(styled(f"ended by {s.cause}", _STATUS_STYLE.get(s.status, "red")))
    if s.raised_at is not None:
        lines.append(styled(f"raised at {s.raised_at}"))
    task = tape.begin.task
    if task.id or task.public is not None:
        named = ": ".join(part for part in (task.id, "" if task.public is None else plain(task.public)) if part)
        lines.append(styled(f"task {named if full else folded(named)}"))
    if task.expected is not None:
        expected = plain(task.expected)
        lines.append(styled(f"expected answer {expected if full else folded(expected)}"))
    return lines


def step_section(steps: Sequence[StepLine], full: bool) -> Section:
    """Return the steps as a table."""
    rows = [
        (
            str(step.index),
            str(step.turn),
            step.by,
            step.kind,
            _step_text(step, full),
            str(step.tokens or ""),
            numbers({**step.rewards, **{f"({name})": value for name, value in step.metrics.items()}}),
        )
        for step in steps
    ]
    headings = ("#", "#turn", "by", "kind", "text", "#tokens", "#reward")
    return Section(headings, rows, optional=("kind", "turn", "tokens", "reward"))


def call_section(tape: str, calls: Sequence[CallLine]) -> Section:
    """Return the model calls of a tape as a table."""
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
            + (f"; new row ({c.split})" if c.split else "")
            + (f"; cut ({c.cut_messages} messages, {c.cut} tokens)" if c.cut or c.cut_messages else ""),
        )
        for c in calls
    ]
    headings = "call by engine #prompt #kept #completion finish #T #log-prob versions"
    return Section(tuple(headings.split()), rows, optional=("engine", "T", "by"))


def request_section(call: str, messages: Sequence[Message], full: bool) -> Section:
    """Return the whole request of one model call, message by message, as the model read it."""
    rows = []
    for message in messages:
        more = {name: value for name, value in message.items() if name not in ("role", "content")}
        text = "\n".join(
            part for part in (text_of(message), json.dumps(more, ensure_ascii=False) if more else "") if part
        )
        rows.append((str(message.get("role", "")), text if full else folded(text)))
    return Section(("role", "content"), rows, title=f"request {call}")


def status_text(status: str | None, cause: str | None) -> Text:
    """Return how a tape ended, with the type of its cause, in a colour."""
    status = status or RUNNING
    word = status if cause is None else f"{status} ({cause.split(':')[0]})"
    return styled(word, _STATUS_STYLE.get(status, "red"))


def numbers(values: dict[str, float]) -> str:
    """Return names with their numbers."""
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


def folded(text: str) -> str:
    """Return the text without its middle part if it is longer than `LONGEST` characters or `LINES` lines. The end is
    kept because it often has the reason of a failure."""
    lines = text.splitlines()
    if len(text) <= LONGEST and len(lines) <= LINES:
        return text
    first = "\n".join(lines[: LINES * 2 // 3])[: LONGEST * 2 // 3]
    last = "\n".join(lines[-LINES // 3 :])[-LONGEST // 3 :]
    left = len(text) - len(first) - len(last)
    return f"{first}\n… {left:,} characters are left out; --full prints them …\n{last}"


def _step_text(step: StepLine, full: bool) -> Text:
    """Return the parts of a step: calls in bold, results plain with the tool's name if there are several, and errors in
    red."""
    made = styled("")
    results = step.role == "observation" and len(step.fragments) > 1
    for k, part in enumerate(step.fragments):
        text = _indented_json(part.text)
        style = "red" if part.error else "" if part.tool and step.role == "observation" else _STYLE[step.role]
        made.append("\n" if k else "").append_text(styled(f"{part.tool}: " if results else "", "bold"))
        made.append_text(styled(text if full else folded(text), style))
    if step.inherited:
        made.stylize("dim")
    return made


def _indented_json(text: str) -> str:
    """Return long JSON in several lines, and any other text unchanged."""
    if len(text) <= COMPACT or text[0] not in "{[":
        return text
    try:
        return _indented(json.loads(text), 0)
    except (ValueError, RecursionError):
        return text


def _indented(value: JsonValue, depth: int) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or depth == DEEPEST or len(line) + 2 * depth <= COMPACT:
        return line
    parts = [_indented(part, depth + 1) for part in (value.values() if isinstance(value, dict) else value)]
    if isinstance(value, dict):
        parts = [f"{json.dumps(name, ensure_ascii=False)}: {part}" for name, part in zip(value, parts, strict=True)]
    start = "\n" + "  " * depth
    return f"{line[0]}{start}  {f',{start}  '.join(parts)}{start}{line[-1]}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _length(store: Store, ids: Collection[str]) -> int:
    """Return the number of characters, from the start of each id, that no other tape of the run begins with."""
    length, longest = SHORTEST, max(map(len, ids), default=0)
    while length < longest and any(len(store.index.ids(name[:length])) > 1 for name in ids):
        length += 1
    return length


def list_section(store: Store, listed: Sequence[tuple[Summary, Gist]]) -> Section:
    """Return the list of tapes, with ids that are as short as the run allows."""
    length = _length(store, [s.id for s, _ in listed])
    rows = [
        (
            s.id[:length],
            gist.question or s.task or s.task_hash[:SHORTEST],
            gist.expected or "",
            gist.given or "",
            number(s.reward),
            status_text(s.status, s.cause),
            s.split,
            str(s.actions),
            str(s.sampled),
            s.task,
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(s.begun)),
            s.agent,
            f"{s.group}/{s.attempt}" if s.group is not None else "",
        )
        for s, gist in listed
    ]
    headings = "tape question expected given #reward ended split #turns #tokens task began agent group"
    text = ("question", "expected", "given", "ended", "split", "task", "began", "agent", "group")
    by_importance = ("group", "agent", "began", "task", "tokens", "turns", "split")
    return Section(tuple(headings.split()), rows, cut=text, optional=by_importance)
