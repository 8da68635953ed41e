"""One model call for the inspector: the exact request, its changes since the previous request, the tokens, their uses.

A call stores only what it adds to its base call. `request` reads base calls only as far back as the window needs, so a
long conversation costs no more than the part shown. The uses of tokens come from the ledger and cover only living
lineages. Advantages are not in the ledger, so `finetune/inspect/explainer.py` computes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import NotATape
from ..messages import image_parts
from ..places import Place
from ..records import Call, Constraint, Message, Use, request
from ..store.ledger import FATES, Fate, ranges
from ..store.store import Store
from .items import call_item

WINDOW = 40
"""The first answer holds this number of messages from the end of the request."""
MESSAGE = 40_000
"""Maximum number of characters of one message in an answer."""
PROMPT_TOKENS = 2_000
"""Maximum number of new prompt tokens in an answer. The last tokens of the prompt are kept."""

Find = Callable[[str], Call]


class TokenUse(NamedTuple):
    """A range of completion tokens in a call and its use in one update."""

    call: str
    start: int
    end: int
    fate: Fate
    weight: float
    """Weight in the update's loss, or 0 for tokens outside the loss."""
    lineage: str
    update: int


class Update(NamedTuple):
    """One update, for the curve."""

    lineage: str
    update: int
    phase: str
    skipped: str | None
    """Why the update was not applied, or None if it was."""
    tapes: tuple[str, ...]


class Uses:
    """The updates that a run had when this object was created."""

    def __init__(self, store: Store) -> None:
        self.updates: list[Update] = []
        self._uses: list[Use] = []
        self._of_tape: dict[str, list[int]] = {}
        lineages = store.lineages()
        for lineage in lineages.living:
            try:
                uses = lineages.ledger(lineage).uses
            except NotATape:
                continue  # the overview reports the contradiction, and the tapes can still be read
            for use in uses:
                tapes = _tapes(use)
                for tape in tapes:
                    self._of_tape.setdefault(tape, []).append(len(self._uses))
                skipped = use.info.get("skipped")
                self.updates.append(
                    Update(
                        use.lineage,
                        use.update,
                        str(use.info.get("phase") or "training"),
                        str(skipped) if skipped else None,
                        tapes,
                    )
                )
                self._uses.append(use)

    def of(self, tape: str) -> list[TokenUse]:
        """Return the tape's token ranges, update by update. Ranges may overlap, and later ranges then overwrite
        earlier ones. Within an update, the strongest fate comes last, so that `trained` replaces `stale`."""
        found: list[TokenUse] = []
        for k in self._of_tape.get(tape, ()):
            use = self._uses[k]
            for fate in reversed(FATES):
                named = ((*one, 0.0) for one in ranges(use, fate)) if fate != "trained" else use.items
                found += [
                    TokenUse(call, start, end, fate, weight, use.lineage, use.update)
                    for name, call, start, end, weight in named
                    if name == tape
                ]
        return found

    def taken_by(self, tape: str) -> list[dict[str, object]]:
        """Return the updates that used the tape."""
        return [
            {"lineage": u.lineage, "update": u.update, "phase": u.phase, "skipped": u.skipped}
            for k in self._of_tape.get(tape, ())
            for u in (self.updates[k],)
        ]


def _tapes(use: Use) -> tuple[str, ...]:
    listed = use.info.get("tapes")
    named = map(str, listed) if isinstance(listed, list | tuple) else ()
    return tuple(dict.fromkeys([*named, *(item[0] for item in use.items)]))


def call_detail(
    call: Call,
    find: Find,
    before: Call | None,
    uses: Sequence[TokenUse],
    *,
    decode: Callable[[int], str] | None = None,
    start: int | None = None,
) -> dict[str, object]:
    """Return everything known about `call`. `find` returns a call by its id. `before` is the path's previous call."""
    total = call.keep_messages + len(call.new_messages)
    low = max(0, total - WINDOW) if start is None else max(0, min(start, total))
    shown = request(call, lambda one: find(str(one.base)), low)
    return {
        **call_item(call),
        "text": call.text,
        "cut": None,
        "total": total,
        "from": low,
        "messages": [_message(one) for one in shown],
        "diff": _difference(call, shown, low, before, find),
        "sampling": call.sampling.model_dump(mode="json"),
        "form": _form(call.constraint),
        "tools": _tools(call, find),
        "seed": None if call.seed is None else str(call.seed),  # as text: a JavaScript number has 53 bits, a seed 64
        "tool_calls": _pretty(call.tool_calls),
        "usage": call.usage.model_dump(mode="json"),
        "attempts": [one.model_dump(mode="json") for one in call.attempts],
        **_tokens(call, uses, decode),
    }


def _form(form: Constraint | None) -> dict[str, object] | None:
    if form is None:
        return None
    return {"tools": form.tools, "schema": _pretty(form.json_schema), "enforced": form.enforced}


def _difference(
    call: Call, shown: list[Message], low: int, before: Call | None, find: Find
) -> dict[str, object] | None:
    """Return the difference from the previous request: how many leading messages are equal, and which are gone."""
    if before is None:
        return None
    was = before.keep_messages + len(before.new_messages)
    earlier = request(before, lambda one: find(str(one.base)), low) if was > low else []
    same = 0
    while same < min(len(shown), len(earlier)) and shown[same] == earlier[same]:
        same += 1
    return {"before": before.call, "same": low + same, "removed": [_message(one) for one in earlier[same:][-WINDOW:]]}


def _message(message: Message) -> dict[str, object]:
    content = message.get("content")
    text = content if isinstance(content, str) else _pretty(content) or ""
    found: dict[str, object] = {"role": str(message.get("role", "")), "text": text[:MESSAGE]}
    if len(text) > MESSAGE:
        found["cut"] = len(text)
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    if rest:
        found["more"] = _pretty(rest)
    return found


def _pretty(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, indent=1)


def _tools(call: Call, find: Find) -> dict[str, object] | None:
    """Return the offered functions. The first call that offers them holds their schemas. Later calls hold a hash."""
    if call.tools is None:
        return None
    one = call
    while one.tools is not None and one.tools.hash == call.tools.hash and one.tools.schemas is None and one.base:
        one = find(one.base)
    schemas = one.tools.schemas if one.tools is not None and one.tools.hash == call.tools.hash else None
    return {"hash": call.tools.hash, "schemas": _pretty(schemas)}


def _tokens(call: Call, uses: Sequence[TokenUse], decode: Callable[[int], str] | None) -> dict[str, object]:
    ids = list(call.completion or ())
    versions: list[str | None] = [None] * len(ids)
    for version, start, end in call.spans:
        versions[start:end] = [version] * (end - start)
    fates: list[str | None] = [None] * len(ids)
    weights: list[float | None] = [None] * len(ids)
    for use in uses:
        inside = range(max(0, use.start), min(use.end, len(ids)))
        for k in inside:
            fates[k] = use.fate
            if use.fate == "trained":
                weights[k] = use.weight
    new = list(call.new_prompt or ())[-PROMPT_TOKENS:]
    first = call.keep + len(call.new_prompt or ()) - len(new)
    size = {
        str(part.get("media")): f"{part.get('width')}x{part.get('height')}" for part in image_parts(call.new_messages)
    }

    def says(place: Place) -> str:
        return f"{' '.join(place.media)} {size.get(place.media[0], '')} grid {'x'.join(map(str, place.grid))}"

    logprobs = [None if x != x else x for x in call.logprobs] if call.logprobs is not None else None
    return {
        "ids": ids,
        "logprobs": logprobs,
        "token_versions": versions,
        "fates": fates,
        "weights": weights,
        "pieces": [decode(one) for one in ids] if decode is not None else None,
        "new_ids": new,
        "new_pieces": [decode(one) for one in new] if decode is not None else None,
        "new_places": [[p.offset - first, p.length, says(p)] for p in call.places if p.end > first],
        "new_total": len(call.new_prompt) if call.new_prompt is not None else None,
    }
