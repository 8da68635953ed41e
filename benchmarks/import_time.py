"""What the first import costs, beside an empty Python and torch, in one run: `python benchmarks/import_time.py`.

Target: `import tapereel.tapes` below 0.3 s. Prints the median CPU seconds of nine processes each (user and system, so
that a busy machine disturbs little), and the cost above an empty process.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys

STATEMENTS = (
    "pass",
    "import pydantic",
    "import tapereel",
    "import tapereel.tapes",
    "import tapereel.envs",
    "import tapereel.agents",
    "import tapereel.cli",
    "import tapereel.finetune",
    "import torch",
)
REPEATS = 9


def seconds(statement: str) -> float:
    """CPU seconds of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Interleaved, so that a busy moment of the machine falls on all of them."""
    for statement in STATEMENTS:
        seconds(statement)
    rounds = [[seconds(statement) for statement in STATEMENTS] for _ in range(REPEATS)]
    medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
    print(f"{'':<28}{'seconds':>9}{'above empty':>13}")
    for statement, median in zip(STATEMENTS, medians, strict=True):
        print(f"{statement:<28}{median:>9.3f}{median - medians[0]:>13.3f}")


if __name__ == "__main__":
    main()
