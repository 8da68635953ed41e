"""Rows packed end to end against rows padded: CPU seconds of one update, as a ratio.

    python benchmarks/packing.py [--rows 64] [--reps 3]

A model of 0.34M parameters (width 96, 3 layers), one thread, recipe grpo, micro-batches of 2,048 tokens. On a CPU the
mask of packed rows is block-diagonal and costs the square of the pack.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from shared_prefix import policy

from tapereel.finetune import Episode, OptimiserConfig, Row, Trainer
from tapereel.finetune.recipes import get_recipe

LENGTHS = ((55, 65), (10, 200))
"""Shortest and longest row."""


def rows_of(lengths: np.ndarray) -> list[Row]:
    """A row of each length, in groups of 8; all but its first token are the agent's own."""
    rng = np.random.default_rng(0)
    rows = []
    for i, n in enumerate(map(int, lengths)):
        ones, zeros = np.ones(n - 1, np.float32), np.zeros(n - 1, np.int32)
        rows.append(
            Row(
                tape=f"t{i}",
                group=f"g{i // 8}",
                input_ids=rng.integers(0, 100, n).astype(np.int32),
                own=np.arange(1, n, dtype=np.int32),
                old=-4.6 * ones,
                temperature=ones,
                version=zeros,
                call=zeros,
                turn=zeros,
                offset=np.arange(n - 1, dtype=np.int32),
                calls=("c",),
                agents=("a",),
                versions=("r:0",),
            )
        )
    return rows


def seconds(rows: list[Row], pack: bool, reps: int) -> float:
    """Median CPU seconds of an update."""
    trainer = Trainer(policy(), get_recipe("grpo"), OptimiserConfig(lr=1e-6, pack=pack))
    episodes = [Episode(tape=r.tape, group=r.group, reward=float(i % 2)) for i, r in enumerate(rows)]
    trainer.update(rows, episodes)
    times = []
    for _ in range(reps):
        start = time.process_time()
        trainer.update(rows, episodes)
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 64), ("reps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print(f"{'tokens a row':>14}{'padded':>9}{'packed':>9}{'ratio':>7}")
    for low, high in LENGTHS:
        rows = rows_of(np.random.default_rng(1).integers(low, high, args.rows))
        padded, packed = (seconds(rows, pack, args.reps) for pack in (False, True))
        print(f"{f'{low} to {high}':>14}{padded:>9.3f}{packed:>9.3f}{packed / padded:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
