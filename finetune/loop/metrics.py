"""Lines of metrics.jsonl: the values of one update, from the process that made it or from one that applies it again."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import torch

from ...tapes import Tape
from ...tapes.records import Use
from ..data.staleness import version_number
from ..history.plan import UpdateInfo
from ..trainer.trainer import UpdateStats


def imitation_line(stats: UpdateStats, uses: Sequence[Use]) -> dict[str, object]:
    """The line of an update on recorded tapes (SFT). uses: its records, one for each epoch."""
    use = uses[0]
    return {
        "phase": UpdateInfo.of(use).phase,
        "update": use.update + 1,
        "loss": stats.loss,
        "lr": stats.lr,
        "grad_norm": stats.grad_norm,
        "skipped": stats.skipped,
    }


def rollout_line(
    stats: UpdateStats, uses: Sequence[Use], tapes: Sequence[Tape], seconds: float | None
) -> dict[str, object]:
    """The line of an update of the loop on `tapes`. seconds: its duration; None for an update that is applied again."""
    use = uses[0]
    info = UpdateInfo.of(use)
    trained = sum(end - start for one in uses for _, _, start, end, _ in one.items)
    # The reward of a continuation counts its own turns only, so it is not comparable with that of a whole episode.
    scored = [tape.reward for tape in tapes if tape.reward is not None and tape.begin.parent is None]
    line: dict[str, object] = {
        "phase": info.phase,
        "update": use.update + 1,
        "reward": sum(scored) / len(scored) if scored else None,
        "episodes": len(tapes),
        "turns": sum(t.turns for t in tapes) / max(len(tapes), 1),
        "loss": stats.loss,
        "grad_norm": stats.grad_norm,
        "lr": stats.lr,
        "skipped": stats.skipped,
        "mismatch": stats.mismatch,
        "ess": stats.ess,
        "lag": _lag(tapes, use),
        "trained_tokens": trained,
        "stale_tokens": sum(r[3] - r[2] for r in info.stale),
        "filtered_tokens": sum(r[3] - r[2] for r in info.filtered),
        "train_seconds": seconds,
        "truncated": sum(t.status != "finished" for t in tapes) / max(len(tapes), 1),
    }
    # The objective's sums cover the tokens that entered the loss. Where a name is the same, the line keeps the value
    # over all that was sampled for the update.
    return {**line, **{name: value for name, value in stats.sums.flat().items() if name not in line}}


def _lag(tapes: Sequence[Tape], use: Use) -> float:
    """Mean staleness of the batch's sampled tokens, in updates; tokens of another lineage don't count."""
    total = n = 0
    for tape in tapes:
        for call in tape.calls:
            for version, start, end in call.spans:
                number = version_number(version, use.lineage)
                if number is not None:
                    total += (use.update - number) * (end - start)
                    n += end - start
    return total / n if n else 0.0


UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of one unit of `ru_maxrss`: bytes on macOS, KiB on Linux."""


def performance_line(**seconds: float) -> dict[str, float]:
    """`perf/NAME_seconds` of each argument, and the peak memory of the process and of its GPU in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT / 2**20
    line = {f"perf/{name}_seconds": round(value, 4) for name, value in seconds.items()}
    line["perf/memory_mib"] = round(peak, 1)
    if torch.cuda.is_available():
        line["perf/cuda_memory_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return line
