"""A run rewritten: the same records but for what a change makes of them, in a chain whose every hash is right.

This is what an editor of history would do who has the whole directory; no check of bytes shows it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from tapereel.tapes.store import Store

Change = Callable[[dict[str, Any]], dict[str, Any] | None]
"""A record's new body; None leaves it out."""


def rewrite(path: Path, change: Change) -> None:
    """Replace the tapes of the run at `path`."""
    aside = path.with_name(f"{path.name}-aside")
    with Store.open(path, cache=False) as store:
        bodies = [json.loads(s.body) for s in store.records() if s.t not in ("open", "commit", "seal")]
    with Store.create(aside, durability="os") as store:
        for body in bodies:
            changed = change(body)
            if changed is not None:
                store.writer.append(to_json(changed))  # writes 1e-5 as the store does, where json writes 1e-05
    shutil.rmtree(path / "tapes")
    shutil.move(aside / "tapes", path / "tapes")
    shutil.rmtree(aside)


def digests(path: Path) -> dict[str, str]:
    """tape -> digest, of every tape that ended."""
    with Store.open(path, cache=False) as store:
        return {tape.id: tape.digest for tape in store.tapes(closed=True)}


def repin(path: Path) -> None:
    """Make every update pin the tapes as they are now."""
    now = digests(path)

    def change(body: dict[str, Any]) -> dict[str, Any]:
        for tape, pin in body.get("info", {}).get("pins", {}).items() if body["t"] == "use" else ():
            pin[0] = now[tape]
        return body

    rewrite(path, change)
