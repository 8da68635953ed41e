"""The integrity banner: what is known about a run's bytes, and what is not.

`quick` uses the index only. `whole` reports `verify`, which reads every byte and runs when the user asks for it. Both
list what they did not check.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..common.text import counted
from ..store.reader import Break
from ..store.store import Store
from ..store.verifier import Report


def quick(store: Store, breaks: Mapping[str, Break]) -> dict[str, Any]:
    """From the index: the segments that were read, the lines where they break, and the missing segments."""
    segments = store.index.segments()
    numbers = {int(segment.name[:6]) for segment in segments}
    missing = sorted(set(range(1, max(numbers, default=0))) - numbers)
    corrupt = [
        str(found)
        for found in [*breaks.values(), *store.index.unread()]
        if not isinstance(found, Break) or found.verdict == "corrupt"
    ]
    torn = [str(found) for found in breaks.values() if found.verdict != "corrupt"]
    holes = [f"segment {number:06d} is missing: its records are not shown" for number in missing]
    writing = [segment.name for segment in segments if segment.sealed is None]
    records = sum(segment.n for segment in segments)
    return {
        "kind": "quick",
        "verdict": "broken" if corrupt else "not verified",
        "checked": [
            f"{counted(len(segments), 'segment')}, {counted(records, 'record')}: each line's hash, and its "
            "link to the line before, when the index read it"
        ],
        "broken": corrupt,
        "holes": [*holes, *torn],
        "live": writing,
        "not_checked": [
            "lines that were indexed earlier: a later change on the disk shows when a tape is read, or by verify",
            "pins, media files, the prefixes of forks and the accounting of tokens: verify checks them",
            "what agents, environments, models and training did: replay, rescore, requery and reproduce check it",
        ],
    }


def whole(report: Report) -> dict[str, Any]:
    """The report of `verify`, for the banner."""
    return {
        "kind": "verify",
        "verdict": report.verdict,
        "at": time.time(),
        "head": report.head,
        "checked": [
            f"{counted(len(report.segments), 'segment')}, {counted(report.records, 'record')} and "
            f"{counted(report.media, 'media file')}, every byte; {counted(report.pins, 'pin')}; the accounting of "
            f"{counted(report.books.sampled, 'sampled token')}"
        ],
        "broken": list(report.broken),
        "holes": [
            *report.torn,
            *(f"segment {number} is missing, and no pin names it" for number in report.holes),
            *(f"{name}: bytes that a recovery moved out of the store" for name in report.set_aside),
        ],
        "live": [segment.name for segment in report.segments if segment.live],
        "not_checked": list(report.not_checked),
    }
