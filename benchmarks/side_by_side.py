"""What the benchmarks against peers share: implementations run in turn, each in a process of its own, and a clock."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Found = dict[str, list[dict[str, Any]]]
"""Implementation -> the JSON object that it printed last, round by round."""


def in_turn(commands: Mapping[str, Sequence[str]], rounds: int) -> Found:
    """Every command once a round, so that a machine that gets busier slows all of them down; one torch thread each."""
    found: Found = {name: [] for name in commands}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    for _ in range(rounds):
        for name, command in commands.items():
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
            line = done.stdout.strip().splitlines()[-1]
            print(f"{name:<11} load {os.getloadavg()[0]:.1f} {line[:500]}", file=sys.stderr, flush=True)
            found[name].append(json.loads(line))
    return found


def ratio(these: Sequence[Mapping[str, float]], those: Sequence[Mapping[str, float]], key: str) -> float:
    """Median over the rounds of these divided by those."""
    return statistics.median(a[key] / b[key] for a, b in zip(these, those, strict=True))


def same_loss(found: Found, tolerance: float) -> float:
    """The loss that all of them report; ends the program where they don't agree."""
    losses = [one["loss"] for several in found.values() for one in several]
    if not max(losses) - min(losses) <= tolerance:
        raise SystemExit(f"the implementations disagree on the loss: {losses}")
    return losses[0]


def timed(work: Callable[[], Any], reps: int) -> tuple[float, float, Any]:
    """(CPU, wall) seconds, medians, and what the last call gave."""
    cpu, wall, found = [], [], None
    for _ in range(reps):
        c, w = time.process_time(), time.perf_counter()
        found = work()
        cpu.append(time.process_time() - c)
        wall.append(time.perf_counter() - w)
    return statistics.median(cpu), statistics.median(wall), found
