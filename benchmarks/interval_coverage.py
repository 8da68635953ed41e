"""How often the intervals of `agents.passk` hold the truth: simulated policies, each task with a chance of its own.

`python benchmarks/interval_coverage.py [--runs 1000]` prints the numbers that docs/how-to/evaluation.md sums up.
"""

from __future__ import annotations

import argparse
import random

from tapereel.agents.runs.pass_at_k import bootstrap, compare, pass_at_k, share_interval

MIXES = {"even (1, 1)": (1.0, 1.0), "mostly solved (8, 2)": (8.0, 2.0), "hard (0.2, 3)": (0.2, 3.0)}
"""Beta distributions that the chance of a task is drawn from."""


def truth(a: float, b: float, k: int) -> float:
    """E[1 - (1 - q)^k] of q from Beta(a, b)."""
    miss = 1.0
    for i in range(k):
        miss *= (b + i) / (a + b + i)
    return 1 - miss


def holds(interval, value: float) -> bool:
    return interval is not None and interval.low <= value <= interval.high


def row(name: str, tasks: int, attempts: int, k: int, runs: int) -> str:
    a, b = MIXES[name]
    rng = random.Random(f"{name}/{tasks}/{attempts}/{k}")
    hits = [0, 0, 0]
    for run in range(runs):
        q = [rng.betavariate(a, b) for _ in range(tasks)]
        one, two = ([sum(rng.random() < p for _ in range(attempts)) for p in q] for _ in range(2))
        hits[0] += holds(share_interval([pass_at_k(attempts, c, k) for c in one]), truth(a, b, k))
        hits[1] += holds(bootstrap([c / attempts for c in one], seed=run, resamples=500), a / (a + b))
        rewards = [{str(i): [1.0] * c + [0.0] * (attempts - c) for i, c in enumerate(side)} for side in (one, two)]
        hits[2] += holds(compare(*rewards, seed=run).reward, 0.0) if run < runs // 4 else 0
    shares = [hits[0] / runs, hits[1] / runs, hits[2] / (runs // 4)]
    return f"| {name} | {tasks} | {attempts} | {k} | " + " | ".join(f"{s:.3f}" for s in shares) + " |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=1000)
    runs = parser.parse_args().runs
    print("| chances of the tasks | tasks | attempts | k | pass@k | mean reward | difference |")
    print("|---|---|---|---|---|---|---|")
    for tasks in (10, 50, 200):
        for attempts, k in ((1, 1), (16, 1), (16, 4)):
            for name in MIXES:
                print(row(name, tasks, attempts, k, runs), flush=True)


if __name__ == "__main__":
    main()
