"""Records the three runs in this folder, and writes their digests.

It was run once, at commit 9dc43d5. Never run it with later code: these runs show that later code still reads them and
still trains the same. It was run in this repository's root, with the package of that commit on the path:

    git worktree add /tmp/old/tapereel 9dc43d5
    PYTHONPATH=/tmp/old OMP_NUM_THREADS=1 python -m tests.recorded.record
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .digest import digest_of, write_digest
from .worlds import WORLDS, train

HERE = Path(__file__).parent
LEFT_OUT = ("checkpoints", "report.html", "index.sqlite*", "lock")
"""Files that `verify`, `show` and `view` don't need."""
COMMON: dict[str, Any] = {
    "loop.updates": 3,
    "loop.groups": 2,
    "loop.group_size": 3,
    "loop.max_lag": 0,
    "loop.checkpoint_every": 1,
    "loop.keep_checkpoints": None,
    "loop.sampling.max_tokens": 6,
    "loop.limits.turns": 3,
    "loop.optimiser.lr": 1e-2,
    "trainer.device": "cpu",
    "evaluation.fraction": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "text": {
        **COMMON,
        "loop.changes": {"regulariser": [{"kind": "entropy", "coefficient": 0.05}]},
        "loop.minibatches": 2,
        "evaluation.fraction": 0.5,
        "evaluation.every": 2,
        "evaluation.limit": 3,
    },
    "tools": {**COMMON, "loop.recipe": "rloo"},
    # Pictures are read in threads, so only one episode at a time has the same batches in each run.
    "pictures": {
        **COMMON,
        "loop.recipe": "reinforce_plain",
        "loop.updates": 2,
        "loop.groups": 6,
        "loop.group_size": 1,
        "loop.max_concurrent": 1,
        "loop.sampling.max_tokens": 3,
    },
}
"""Name of a run -> its settings in the words of commit 9dc43d5."""


def main() -> None:
    """Record all runs."""
    for name in WORLDS:
        with TemporaryDirectory() as folder:
            run = train(name, Path(folder), SETTINGS[name])
            write_digest(HERE / f"{name}.json", digest_of(run))
            shutil.rmtree(HERE / name, ignore_errors=True)
            shutil.copytree(run, HERE / name, ignore=shutil.ignore_patterns(*LEFT_OUT))


if __name__ == "__main__":
    main()
