"""RunView: every question that the viewer asks of a run, answered with plain values.

For one caller at a time; a server puts a queue before it. Content is read by the page, so a run of many tapes and a
tape of many records cost what is shown of them. Nothing is written but the index, a cache. It knows nothing of HTTP.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..audit.verdict_files import Checks
from ..common.text import safe
from ..errors import NoSuchTape, NotATape, TapereelError
from ..records import Call, parse_record
from ..store.index import Summary
from ..store.media import references
from ..store.store import Store
from ..store.verifier import verify
from .calls import call_detail
from .integrity import quick, whole
from .items import item, text_of
from .live import Live
from .overview import overview_of
from .table import SHARD, columns
from .tape_map import TapeMap
from .uses import Uses

PAGE = 100
"""Items, or turns, in one page."""
PIECE = 100_000
"""Characters of a long text in one piece."""
KEPT_RECORDS, KEPT_MAPS = 1_500_000, 64
"""Records, and tapes, of the maps that are kept for tapes looked at before."""
SEARCHED = 1_000_000
"""Characters of one text that a search looks at."""
SEARCHED_AT_ONCE = 4_000_000
"""Characters of all the texts in one answer to a search; at least one tape is in it."""


DIGESTED = 20_000
"""Records of the longest tape that is read whole to see whether a check was of what it is now."""
CHECKS, DIFF = 20, 40
"""Newest checks of a tape, and lines of what differs, that are shown."""


class Insight(Protocol):
    """What only training can tell of a tape. Given by whoever stands above training; the view does without."""

    @property
    def decode(self) -> Callable[[int], str] | None:
        """The text of a token id; None without a tokenizer."""
        ...

    def explain(self, tape: str) -> dict[str, Any]:
        """`verdict`, `notes`, `rows`, and `advantages` and `ratios`: call -> a number or None for each completion
        token; without weights to compare with, no `ratios`."""
        ...

    def forget(self) -> None:
        """Training went on: what was read of the ledger is old."""
        ...


class RunView:
    """One run, open for looking. Use it as a context manager. Single use."""

    def __init__(self, run: str | Path, *, insight: Callable[[Store], Insight] | None = None) -> None:
        """`insight` makes what tells of training, when it is first asked for. NoRun where no run is."""
        self.store = Store.open(run)
        self._make_insight, self._insight = insight, None
        self._maps: OrderedDict[str, TapeMap] = OrderedDict()
        self._uses: Uses | None = None
        self.checks = Checks(self.store.path)
        self.checks.refresh()
        self.live = Live(self.store)

    def __enter__(self) -> RunView:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.store.close()

    # The run

    def overview(self) -> dict[str, Any]:
        """What the page needs before anything else."""
        self._look_for_checks()
        rev = self.live.now()
        segments = self.store.index.segments()
        return {
            "run": safe(os.path.basename(os.path.abspath(self.store.path))),
            "path": safe(str(self.store.path)),
            "tapes": len(self.store.index.rewards()),
            "records": sum(segment.n for segment in segments),
            "shard": SHARD,
            "page": PAGE,
            "piece": PIECE,
            "rev": rev,
            "integrity": self._integrity(),
        }

    def _integrity(self) -> dict[str, Any]:
        found = quick(self.store, self.live.breaks)
        found["holes"] += self.checks.problems
        return found

    def _look_for_checks(self) -> None:
        tapes = self.checks.refresh()
        if tapes:
            self.live.touched(tapes)

    def table(self, shard: int) -> dict[str, Any]:
        """The columns of the tapes number `shard * SHARD` and following, in the order in which they began."""
        rows = self.store.index.tapes("1", (), limit=SHARD, offset=shard * SHARD)
        return {"from": shard * SHARD, **self.columns(rows)}

    def changes(self, rev: str) -> dict[str, Any]:
        """What was written since `rev`: the rows that are new or differ, and the next `rev`. `reset`: begin anew."""
        self._look_for_checks()
        ids, now = self.live.since(rev)
        if ids is None:
            return {"rev": now, "reset": True}
        found = {"rev": now, "reset": False, **self.columns(self.store.index.among(ids))}
        if ids or self.live.training:
            found["integrity"] = self._integrity()
        if self.live.training:
            self._uses, self.live.training = None, False
            if self._insight is not None:
                self._insight.forget()
            found["training"] = True
        return found

    def columns(self, rows: Sequence[Summary]) -> dict[str, Any]:
        """The columns of these rows of the table."""
        return columns(rows, self.store.index.versions(row.id for row in rows), self.checks.summary)

    @property
    def uses(self) -> Uses:
        """The ledger's updates; read again when training went on."""
        if self._uses is None:
            self._uses = Uses(self.store)
        return self._uses

    def curve(self) -> dict[str, Any]:
        """A point for each update: the mean recorded reward of its tapes. Without updates, no points. Where several
        policies learned, the phases of each are told apart."""
        rewards = self.store.index.rewards()
        several = len({update.lineage for update in self.uses.updates}) > 1
        points = []
        for k, update in enumerate(self.uses.updates):
            scored = [r for r in map(rewards.get, update.tapes) if r is not None]
            phase = f"{update.phase}, {update.lineage}" if several else update.phase
            points.append(
                {
                    "k": k,
                    "lineage": update.lineage,
                    "update": update.update,
                    "phase": phase,
                    "skipped": update.skipped,
                    "tapes": len(update.tapes),
                    "scored": len(scored),
                    "reward": sum(scored) / len(scored) if scored else None,
                }
            )
        return {"points": points}

    def behind(self, k: int) -> dict[str, Any]:
        """The tapes of point `k` of the curve."""
        updates = self.uses.updates
        if not 0 <= k < len(updates):
            raise NoSuchTape(f"the run has {len(updates)} updates; there is no point {k}")
        return {"tapes": list(updates[k].tapes)}

    def report(self) -> dict[str, Any]:
        """The overview page. Reads the whole run once, from a store of its own: safe to run in another thread."""
        with Store.open(self.store.path) as store:
            return overview_of(store).model_dump()

    def verify(self) -> dict[str, Any]:
        """Read every line of the run. Takes as long as that takes; safe to run in another thread."""
        found = whole(verify(self.store.path))
        found["holes"] += self.checks.problems
        return found

    # One tape

    def map(self, tape: str) -> TapeMap:
        """The map of a tape, brought up to date. NoSuchTape for an id that the run does not hold."""
        if self.live.replaced:
            self._maps.clear()
            self.live.replaced = False
        known = self._maps.get(tape)
        if known is not None:
            if tape in self.live.grown:
                self.live.grown.discard(tape)
                known.extend()
            self._maps.move_to_end(tape)
            return known
        if tape not in self.store.index.ids(tape):
            raise NoSuchTape(f"no tape {tape!r} is in {self.store.path}")
        self.live.grown.discard(tape)
        made = self._maps[tape] = TapeMap(self.store, tape)
        while len(self._maps) > 1 and (
            len(self._maps) > KEPT_MAPS or sum(len(one.places) for one in self._maps.values()) > KEPT_RECORDS
        ):
            self._maps.popitem(last=False)
        return made

    def head(self, tape: str) -> dict[str, Any]:
        """What stands above a transcript."""
        tape_map = self.map(tape)
        (row,) = self.store.index.tapes("id = ?", (tape,))
        begin, end = self._record(tape_map, tape_map.begin_record), self._record(tape_map, tape_map.end_record)
        return {
            "tape": tape,
            **_row(row),
            "begin": begin,
            "end": end,
            "items": len(tape_map.items),
            "records": len(tape_map.places),
            "steps": len(tape_map.step_items),
            "turns": row.actions,
            "outline": len(tape_map.turns),
            "inherited": tape_map.inherited,
            "holes": tape_map.holes,
            "episode": tape_map.episode,
            "components": _components(tape_map),
            "taken": self.uses.taken_by(tape),
            "children": [found.id for found in self.store.index.tapes("parent = ?", (tape,))],
            "checks": self._checks(tape_map),
        }

    def _checks(self, tape_map: TapeMap) -> list[dict[str, Any]]:
        """What checks said of the tape, newest first; `fits`: whether of what is on it now, None where that was not
        looked at."""
        kept = self.checks.of(tape_map.tape)
        digest = self._digest(tape_map) if kept else None
        return [
            {
                "verb": check.verb,
                "at": check.at,
                "turn": check.turn,
                "given": check.given,
                "outcome": verdict.outcome,
                "says": str(verdict),
                "checked": verdict.checked,
                "not_checked": list(verdict.not_checked),
                "fits": None if digest is None else verdict.digest == digest,
                **(
                    {
                        "field": d.field,
                        "cause": d.cause.value,
                        "step": d.step,
                        "call": d.call,
                        "where": d.where,
                        "diff": d.diff[:DIFF],
                    }
                    if (d := verdict.divergence) is not None
                    else {}
                ),
            }
            for check, verdict in kept[:CHECKS]
        ]

    def _digest(self, tape_map: TapeMap) -> str | None:
        if len(tape_map.places) > DIGESTED:
            return None
        try:
            return self.store.tape(tape_map.tape, refresh=False).digest
        except (TapereelError, OSError):
            return None  # the transcript shows what can't be read

    def items(self, tape: str, page: int) -> dict[str, Any]:
        """One page of the transcript."""
        tape_map = self.map(tape)
        first = page * PAGE
        records = tape_map.items[first : first + PAGE].tolist()
        shown = []
        for k, (record, body) in enumerate(zip(records, self._bodies(tape_map, records), strict=True)):
            step = tape_map.steps[record]
            one = item(record, body, step, tape_map.rewards.get(step, ()))
            one["turn"] = tape_map.turn_of_item[first + k]
            if record < tape_map.inherited:
                one["inherited"] = True
            media = references(body)
            if media:
                one["media"] = sorted(media)
            shown.append(one)
        return {"from": first, "items": shown}

    def turns(self, tape: str, page: int) -> dict[str, Any]:
        """One page of the outline."""
        tape_map = self.map(tape)
        low, high = page * PAGE, min((page + 1) * PAGE, len(tape_map.turns))
        acted = [tape_map.actions[k] for k in range(low, high)]
        texts = iter(list(self._bodies(tape_map, [record for record in acted if record >= 0])))
        shown = []
        for k, record in zip(range(low, high), acted, strict=True):
            found = item(record, next(texts)) if record >= 0 else {}
            shown.append(
                {
                    "turn": k,
                    "item": tape_map.turns[k],
                    "step": tape_map.steps[record] if record >= 0 else None,
                    "by": found.get("by"),
                    "kind": found.get("kind"),
                    "text": found.get("text", "")[:160],
                    "reward": tape_map.turn_reward(k),
                    "hole": found.get("t") == "hole",
                }
            )
        return {"from": low, "turns": shown}

    def find(self, tape: str, *, step: int | None = None, call: str | None = None) -> dict[str, Any]:
        """The item of a step or of a call: what a link names, whatever its place in a list."""
        tape_map = self.map(tape)
        if step is not None and 0 <= step < len(tape_map.step_items):
            return {"item": tape_map.step_items[step]}
        if call is not None and call in tape_map.calls:
            record = tape_map.calls[call]
            return {"item": _position(tape_map, record)}
        raise NoSuchTape(f"tape {tape} has no {f'step {step}' if call is None else f'call {call!r}'}")

    def call(self, tape: str, call: str, start: int | None = None) -> dict[str, Any]:
        """A call for the inspector; its request from message `start` on, or the newest of them."""
        tape_map = self.map(tape)
        one = self._call(tape_map, call)
        uses = [use for use in self.uses.of(tape) if use.call == call]
        decode = self._insight.decode if self._insight is not None else None
        return call_detail(
            one, lambda name: self._call(tape_map, name), self._before(tape_map, one), uses, decode=decode, start=start
        )

    def explain(self, tape: str) -> dict[str, Any]:
        """What training alone can tell of the tape; `missing` says why where it can't. `decodes`: calls asked for from
        now on have the text of their tokens. May be called from a thread of its own, one at a time."""
        if self._make_insight is None:
            return {"missing": "nothing here tells of training"}
        if tape not in self.store.index.ids(tape):
            raise NoSuchTape(f"no tape {tape!r} is in {self.store.path}")
        try:
            if self._insight is None:
                self._insight = self._make_insight(self.store)
            return {**self._insight.explain(tape), "decodes": self._insight.decode is not None}
        except (TapereelError, OSError, ImportError) as error:
            return {"missing": str(error)}

    def text(self, tape: str, record: int, piece: int = 0) -> dict[str, Any]:
        """A piece of the whole text of one record."""
        tape_map = self.map(tape)
        if not 0 <= record < len(tape_map.places):
            raise NoSuchTape(f"tape {tape} has {len(tape_map.places)} records; there is no record {record}")
        (body,) = self._bodies(tape_map, [record])
        text = text_of(body)
        return {"text": text[piece * PIECE : (piece + 1) * PIECE], "length": len(text)}

    def texts(self, tape: str, page: int) -> dict[str, Any]:
        """What a search looks at: (item, text) of one page; `short` counts texts that are longer than is searched."""
        tape_map = self.map(tape)
        first = page * PAGE
        records = tape_map.items[first : first + PAGE].tolist()
        found, short = [], 0
        for k, body in enumerate(self._bodies(tape_map, records)):
            text = text_of(body)
            short += len(text) > SEARCHED
            if text:
                found.append([first + k, text[:SEARCHED]])
        return {"texts": found, "short": short, "pages": -(-len(tape_map.items) // PAGE)}

    def texts_of(self, tapes: list[str]) -> list[dict[str, Any]]:
        """The first page of `texts` of each of these tapes, or of as many as one answer holds."""
        answer, size = [], 0
        for tape in tapes:
            found = self.texts(tape, 0)
            answer.append(found)
            size += sum(len(text) for _, text in found["texts"])
            if size > SEARCHED_AT_ONCE:
                break
        return answer

    def _bodies(self, tape_map: TapeMap, records: list[int]) -> Iterator[bytes]:
        return self.store.bodies([tape_map.places[record] for record in records])

    def _record(self, tape_map: TapeMap, record: int) -> dict[str, Any] | None:
        if record < 0:
            return None
        (body,) = self._bodies(tape_map, [record])
        return item(record, body)

    def _call(self, tape_map: TapeMap, call: str) -> Call:
        if call not in tape_map.calls:
            raise NoSuchTape(f"tape {tape_map.tape} has no call {call!r}")
        (body,) = self._bodies(tape_map, [tape_map.calls[call]])
        read = parse_record(body)
        if not isinstance(read, Call):
            raise NotATape(f"record {tape_map.calls[call]} of tape {tape_map.tape} is no call")
        return read

    def _before(self, tape_map: TapeMap, call: Call) -> Call | None:
        """The call that the same path made before in this conversation, as far back as a hundred calls."""
        record = tape_map.calls[call.call]
        earlier = (name for name, at in reversed(tape_map.calls.items()) if at < record)
        for name in itertools.islice(earlier, 100):
            one = self._call(tape_map, name)
            if (one.by, one.conversation) == (call.by, call.conversation):
                return one
        return None


def _position(tape_map: TapeMap, record: int) -> int:
    """The item of a record; items are in the order of records."""
    low, high = 0, len(tape_map.items)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if tape_map.items[middle] < record else (low, middle)
    return low


def _row(row: Summary) -> dict[str, Any]:
    return {
        "status": row.status or "running",
        "cause": row.cause,
        "reward": row.reward,
        "split": row.split,
        "group": row.group,
        "attempt": row.attempt,
        "agent": row.agent,
        "env": row.env,
        "task": row.task,
        "task_hash": row.task_hash,
        "parent": row.parent,
        "begun": row.begun,
        "calls": row.calls,
        "tokens": row.sampled,
        "actions": row.actions,
    }


def _components(tape_map: TapeMap) -> list[list[Any]]:
    """[name, weight * value over the whole tape, whether it counts]; metrics at their value."""
    sums: dict[tuple[str, bool], float] = {}
    for name, value, weight in itertools.chain(tape_map.episode, *tape_map.rewards.values()):
        key = (name, bool(weight))
        sums[key] = sums.get(key, 0.0) + (weight or 1.0) * value
    return [[name, total, counts] for (name, counts), total in sums.items()]


__all__ = ["PAGE", "Insight", "RunView"]
