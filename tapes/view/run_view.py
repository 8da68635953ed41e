"""RunView answers all of the viewer's questions about a run with plain values. The server and the report call it.

A RunView serves one caller at a time, so the server queues its requests. Content is read page by page, so a large run
or a long tape costs no more than the part that is shown. RunView writes only the index, which is a cache.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict

from ..audit.verdict_files import Checks
from ..common.stats import mean_of
from ..common.text import safe
from ..errors import NoSuchTape, NotATape, TapereelError
from ..records import Call
from ..schema import parse_record
from ..store.media import references
from ..store.store import Store
from ..store.summary import Summary
from ..store.verifier import verify
from .calls import Uses, call_detail
from .gist import gist_of
from .items import SHARD, columns, item, text_of
from .live import Integrity, Live, State, quick, state_of, whole
from .overview import overview_of, trains
from .tape_map import TapeMap

PAGE = 100
"""Number of items or turns in one page."""
LINE = 160
"""Maximum number of characters of an action, or of its result, in the outline."""
PIECE = 100_000
"""Maximum number of characters of a long text in one answer."""
KEPT_RECORDS, KEPT_MAPS = 1_500_000, 64
"""Maximum numbers of records and of maps that stay in memory. The least recently used map is dropped first."""
SEARCHED = 1_000_000
"""A search reads at most this number of characters of a text."""
SEARCHED_AT_ONCE = 4_000_000
"""Once the strings in an answer to a search exceed this number of characters, no more tapes are added to the answer."""


DIGESTED = 20_000
"""A tape's digest is compared with the digests in its checks only if the tape has at most this number of records."""
CHECKS, DIFF = 20, 40
"""Maximum number of checks in an answer, and maximum number of lines in the difference that a check found. The newest
checks are kept."""


class RunFacts(TypedDict):
    """The first answer that the page needs."""

    run: str
    path: str
    tapes: int
    records: int
    shard: int
    page: int
    piece: int
    rev: str | None
    """The revision to pass to `changes`, or None if the page's data never changes."""
    integrity: Integrity
    state: State
    trains: bool
    """Whether this is a training run, whose page opens at the overview."""
    left_out: NotRequired[list[str]]
    """What a file leaves out by design, one sentence each. A server leaves nothing out."""
    made: NotRequired[float]
    """When the file with the page was written, in seconds since 1970. A server doesn't set it."""


class Texts(TypedDict):
    """The strings of one page of items."""

    texts: list[tuple[int, str]]
    """The strings, as (number of the item, text)."""
    short: int
    """Number of strings that were cut to `SEARCHED` characters."""
    pages: int


class Insight(Protocol):
    """What only the training code knows about a tape. `finetune` provides it, and the viewer also works without it."""

    @property
    def decode(self) -> Callable[[int], str] | None:
        """A function that returns the text of a token id, or None if there is no tokenizer."""
        ...

    def explain(self, tape: str) -> dict[str, object]:
        """Return `verdict`, `notes`, `rows`, `advantages` and `ratios`. For each call, `advantages` and `ratios` hold a
        list with a number or None per completion token. `ratios` is missing if no weights were named."""
        ...

    def forget(self) -> None:
        """Drop everything that was read from the ledger, because training has added updates."""
        ...


class RunView:
    """One run, open for reading. Use it as a context manager, and only once."""

    def __init__(self, run: str | Path, *, insight: Callable[[Store], Insight] | None = None) -> None:
        """`insight` creates the provider of facts about training. It is called when a question first needs these facts.
        Raises UsageError if `run` holds no run."""
        self.store = Store.open(run)
        self.store.strict = False
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

    def overview(self) -> RunFacts:
        """Return the run's name, size and integrity. This is the first answer that the page needs."""
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
            "state": state_of(self.store),
            "trains": trains(self.store),
            "integrity": self._integrity(),
        }

    def _integrity(self) -> Integrity:
        found = quick(self.store, self.live.breaks)
        found["holes"] += self.checks.problems
        return found

    def _look_for_checks(self) -> None:
        tapes = self.checks.refresh()
        if tapes:
            self.live.touched(tapes)

    def table(self, shard: int) -> dict[str, object]:
        """Return the columns for the tapes in piece number `shard` of the table, in the order in which they began."""
        rows = self.store.index.tapes("1", (), limit=SHARD, offset=shard * SHARD)
        return {"from": shard * SHARD, **self.columns(rows)}

    def gists(self, tapes: Sequence[str]) -> dict[str, dict[str, object]]:
        """Return the question, the expected answer and the given answer of each of these tapes, by id. A tape that the
        run doesn't have is left out."""
        return {tape: gist_of(self.store, tape).model_dump() for tape in tapes if tape in self.store.index.ids(tape)}

    def changes(self, rev: str) -> dict[str, object]:
        """Return the rows that changed since revision `rev`, and the new revision. `reset` makes the page reload."""
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

    def columns(self, rows: Sequence[Summary]) -> dict[str, object]:
        """Return these rows of the table as columns."""
        return columns(rows, self.store.index.versions(row.id for row in rows), self.checks.summary)

    @property
    def uses(self) -> Uses:
        """The updates in the ledger. They are read again after training has added updates."""
        if self._uses is None:
            self._uses = Uses(self.store)
        return self._uses

    def curve(self) -> dict[str, list[dict[str, object]]]:
        """Return a point for each update. Its value is the mean recorded reward of the update's tapes. A run without
        updates has no points. If a run has several lineages, the phase of a point also names the lineage."""
        rewards = self.store.index.rewards()
        several = len({update.lineage for update in self.uses.updates}) > 1
        points = []
        for k, update in enumerate(self.uses.updates):
            scored = [r for r in map(rewards.get, update.tapes) if r is not None]
            phase = f"{update.phase}, {update.lineage}" if several else update.phase
            points.append(
                {
                    **update._asdict(),
                    "k": k,
                    "phase": phase,
                    "tapes": len(update.tapes),
                    "scored": len(scored),
                    "reward": mean_of(scored),
                }
            )
        return {"points": points}

    def behind(self, k: int) -> dict[str, list[str]]:
        """Return the tapes of the update at point `k` of the curve."""
        updates = self.uses.updates
        if not 0 <= k < len(updates):
            raise NoSuchTape(f"the curve has no point {k}: the run has {len(updates)} updates")
        return {"tapes": list(updates[k].tapes)}

    def report(self) -> dict[str, object]:
        """Return the overview page. This reads the whole run through a separate store, so another thread can run it."""
        with Store.open(self.store.path) as store:
            store.strict = False
            return overview_of(store).model_dump()

    def verify(self) -> Integrity:
        """Verify every byte of the run, which reads all of it. This can run in another thread."""
        found = whole(verify(self.store.path))
        found["holes"] += self.checks.problems
        return found

    # One tape

    def map(self, tape: str) -> TapeMap:
        """Return the map of a tape, brought up to date. Raises NoSuchTape if the run has no tape with this id."""
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

    def head(self, tape: str) -> dict[str, object]:
        """Return the facts that are shown above a transcript."""
        tape_map = self.map(tape)
        (row,) = self.store.index.tapes("id = ?", (tape,))
        begin, end = self._record(tape_map, tape_map.begin_record), self._record(tape_map, tape_map.end_record)
        return {
            "tape": tape,
            **row._asdict(),
            "status": row.status or "running",
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
            "gist": gist_of(self.store, tape).model_dump(),
            "taken": self.uses.taken_by(tape),
            "children": [found.id for found in self.store.index.tapes("parent = ?", (tape,))],
            "checks": self._checks(tape_map),
        }

    def _checks(self, tape_map: TapeMap) -> list[dict[str, object]]:
        """Return the verdicts of checks on the tape, newest first. `fits` is True if the tape still has the digest that
        was checked, and None if the tape's digest isn't known."""
        kept = self.checks.of(tape_map.tape)
        digest = self._digest(tape_map) if kept else None
        return [
            {
                **check.model_dump(),
                **verdict.model_dump(include={"outcome", "checked", "not_checked"}),
                "says": str(verdict),
                "fits": None if digest is None else verdict.digest == digest,
                **(
                    d.model_dump(mode="json", include={"field", "cause", "step", "call", "where"})
                    | {"diff": d.diff[:DIFF]}
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
            return None  # the transcript shows the unreadable record as a hole

    def items(self, tape: str, page: int) -> dict[str, object]:
        """Return one page of the transcript."""
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
            shown.append(one)
        return {"from": first, "items": shown}

    def media(self, tape: str) -> set[str]:
        """Return the names of the media files that the tape's records refer to."""
        tape_map = self.map(tape)
        return set().union(*map(references, self._bodies(tape_map, tape_map.items.tolist())))

    def turns(self, tape: str, page: int) -> dict[str, object]:
        """Return one page of the outline."""
        tape_map = self.map(tape)
        low, high = page * PAGE, min((page + 1) * PAGE, len(tape_map.turns))
        shown = []
        for k in range(low, high):
            record = tape_map.actions[k]
            acted = self._record(tape_map, record) or {}
            after = self._record(tape_map, tape_map.step_after(record)) or {}
            answered = after.get("role") == "observation"
            shown.append(
                {
                    "turn": k,
                    "item": tape_map.turns[k],
                    "step": tape_map.steps[record] if record >= 0 else None,
                    "by": acted.get("by"),
                    "kind": acted.get("kind"),
                    "text": _line(acted),
                    "result": _line(after) if answered else None,
                    "failed": bool(answered and after.get("failed")),
                    "reward": tape_map.turn_reward(k),
                    "hole": acted.get("t") == "hole",
                }
            )
        return {"from": low, "turns": shown}

    def find(self, tape: str, *, step: int | None = None, call: str | None = None) -> dict[str, object]:
        """Return the item of a step or call. Links don't name items, because indexing a run changes their numbers."""
        tape_map = self.map(tape)
        if step is not None and 0 <= step < len(tape_map.step_items):
            return {"item": tape_map.step_items[step]}
        if call is not None and call in tape_map.calls:
            return {"item": bisect_left(tape_map.items, tape_map.calls[call])}
        raise NoSuchTape(f"tape {tape} has no {f'step {step}' if call is None else f'call {call!r}'}")

    def call(self, tape: str, call: str, start: int | None = None) -> dict[str, object]:
        """Return a call for the inspector. Its request starts at message `start`. None selects the newest messages."""
        tape_map = self.map(tape)
        one = self._call(tape_map, call)
        uses = [use for use in self.uses.of(tape) if use.call == call]
        decode = self._insight.decode if self._insight is not None else None
        return call_detail(
            one, lambda name: self._call(tape_map, name), self._before(tape_map, one), uses, decode=decode, start=start
        )

    def explain(self, tape: str) -> dict[str, object]:
        """Return what only the training code knows about the tape, or `missing` with the reason. If `decodes` is True,
        later answers from `call` contain the text of their tokens. This method may run in another thread, but two calls
        must not run at the same time."""
        if self._make_insight is None:
            return {"missing": "this page has no access to the training code"}
        if tape not in self.store.index.ids(tape):
            raise NoSuchTape(f"no tape {tape!r} is in {self.store.path}")
        try:
            if self._insight is None:
                self._insight = self._make_insight(self.store)
            return {**self._insight.explain(tape), "decodes": self._insight.decode is not None}
        except (TapereelError, OSError, ImportError) as error:
            return {"missing": str(error)}

    def text(self, tape: str, record: int, piece: int = 0) -> dict[str, object]:
        """Return piece number `piece` of a record's whole text."""
        tape_map = self.map(tape)
        if not 0 <= record < len(tape_map.places):
            raise NoSuchTape(f"tape {tape} has {len(tape_map.places)} records, so it has no record {record}")
        (body,) = self._bodies(tape_map, [record])
        text = text_of(body)
        return {"text": text[piece * PIECE : (piece + 1) * PIECE], "length": len(text)}

    def texts(self, tape: str, page: int) -> Texts:
        """Return the strings in one page of items, for a search."""
        tape_map = self.map(tape)
        first = page * PAGE
        records = tape_map.items[first : first + PAGE].tolist()
        found: list[tuple[int, str]] = []
        short = 0
        for k, body in enumerate(self._bodies(tape_map, records)):
            text = text_of(body)
            short += len(text) > SEARCHED
            if text:
                found.append((first + k, text[:SEARCHED]))
        return {"texts": found, "short": short, "pages": -(-len(tape_map.items) // PAGE)}

    def texts_of(self, tapes: list[str]) -> list[Texts]:
        """Return the first page of `texts` for each tape, until the answer has over `SEARCHED_AT_ONCE` characters."""
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

    def _record(self, tape_map: TapeMap, record: int) -> dict[str, object] | None:
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
            raise NotATape(
                f"record {tape_map.calls[call]} of tape {tape_map.tape} is not a call, though the index says so"
            )
        return read

    def _before(self, tape_map: TapeMap, call: Call) -> Call | None:
        """Return the previous call by this agent path in this conversation, if it is among the last hundred."""
        record = tape_map.calls[call.call]
        earlier = (name for name, at in reversed(tape_map.calls.items()) if at < record)
        for name in itertools.islice(earlier, 100):
            one = self._call(tape_map, name)
            if (one.by, one.conversation) == (call.by, call.conversation):
                return one
        return None


def _line(found: dict[str, object]) -> str:
    """Return the first characters of an item's text, on one line."""
    return " ".join(str(found.get("text", ""))[:LINE].split())


def _components(tape_map: TapeMap) -> list[list[Any]]:
    """Return [name, sum of weight * value over the tape, whether it is a reward] for each component. For a metric
    (weight 0), the sum is over its plain values."""
    sums: dict[tuple[str, bool], float] = {}
    for name, value, weight in itertools.chain(tape_map.episode, *tape_map.rewards.values()):
        key = (name, bool(weight))
        sums[key] = sums.get(key, 0.0) + (weight or 1.0) * value
    return [[name, total, counts] for (name, counts), total in sums.items()]


__all__ = ["PAGE", "Insight", "RunView"]
