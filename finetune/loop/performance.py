"""Timers and health of a loop, as they go into metrics.jsonl under `perf/`: sums since this process began, which never
fall. Knows nothing of what is trained.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of one unit of `ru_maxrss`."""


@dataclass(slots=True)
class Timers:
    """Seconds by what was done."""

    wall: float = 0.0
    """Since the loop began."""
    engine: float = 0.0
    """In which the engine was at work."""
    train: float = 0.0
    """In which the trainer was; both may be at once."""
    publish: float = 0.0
    """In which new weights were brought to the engine."""


def perf(timers: Timers) -> dict[str, float]:
    """The part of a line of metrics: seconds, and the most memory that was in use at once, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT / 2**20
    line = {f"perf/{name}_seconds": round(getattr(timers, name), 4) for name in Timers.__dataclass_fields__}
    line["perf/memory_mib"] = round(peak, 1)
    if torch.cuda.is_available():
        line["perf/cuda_memory_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return line
