"""What can be said of a run's bytes without reading them all, and what that leaves open.

The banner is this until somebody asks for `verify`, which reads every line. Neither claims what it did not do.
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
    """From the index: how far the segments read, where their lines break, which are missing."""
    segments = store.index.segments()
    numbers = {int(segment.name[:6]) for segment in segments}
    missing = sorted(set(range(1, max(numbers, default=0))) - numbers)
    corrupt = [
        str(found)
        for found in [*breaks.values(), *store.index.unread()]
        if not isinstance(found, Break) or found.verdict == "corrupt"
    ]
    torn = [str(found) for found in breaks.values() if found.verdict != "corrupt"]
    holes = [f"segment {number:06d} is missing: what it held is not shown" for number in missing]
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
            "lines that were indexed earlier: what changed on the disk since would show when a tape is read, or by "
            "verify",
            "pins, media files, the prefixes of forks and the books: verify does",
            "what agents, environments, models and training did: replay, rescore, requery and reproduce do",
        ],
    }


def whole(report: Report) -> dict[str, Any]:
    """What `verify` found."""
    return {
        "kind": "verify",
        "verdict": report.verdict,
        "at": time.time(),
        "head": report.head,
        "checked": [
            f"{counted(len(report.segments), 'segment')}, {counted(report.records, 'record')} and "
            f"{counted(report.media, 'media file')}, every byte; {counted(report.pins, 'pin')}; the books of "
            f"{counted(report.books.sampled, 'sampled token')}"
        ],
        "broken": list(report.broken),
        "holes": [
            *report.torn,
            *(f"segment {number} is missing, and nothing pins it" for number in report.holes),
            *(f"{name}: bytes that a recovery set aside" for name in report.set_aside),
        ],
        "live": [segment.name for segment in report.segments if segment.live],
        "not_checked": list(report.not_checked),
    }
