"""Timers and memory of a loop, as they stand under `perf/` in metrics.jsonl. Sums since this process began."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch

UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of one unit of `ru_maxrss`: bytes on macOS, KiB on Linux."""


@dataclass(slots=True)
class Timers:
    """Seconds by activity."""

    wall: float = 0.0
    """Since the loop began."""
    engine: float = 0.0
    """In which the engine computed."""
    train: float = 0.0
    """In which the trainer computed; engine and trainer overlap."""
    publish: float = 0.0
    """In which the engine received new weights."""


def perf(timers: Timers) -> dict[str, float]:
    """The timers in seconds, and the peak memory of the process and of its GPU in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT / 2**20
    line = {f"perf/{name}_seconds": round(getattr(timers, name), 4) for name in Timers.__dataclass_fields__}
    line["perf/memory_mib"] = round(peak, 1)
    if torch.cuda.is_available():
        line["perf/cuda_memory_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return line
