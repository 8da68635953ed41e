"""Metrics, slowly: of rollouts from the JSON of their records, of tokens from lists of ratios and advantages.

Written from docs/reference/metrics.md in plain Python; shares no code with the package.
"""

from __future__ import annotations

import base64
import json
import statistics
import struct
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def ints(text: str | None) -> list[int]:
    """Token ids of a record: little-endian int32 in base64."""
    raw = base64.b64decode(text or "")
    return list(struct.unpack(f"<{len(raw) // 4}i", raw))


def rollouts(tapes: Sequence[Sequence[bytes]], update: int, oldest: int, by: set[str] | None = None) -> Record:
    """The values of a batch of whole tapes, each the bodies of its records, for update number `update`; tokens of
    versions below `oldest` are stale. by: the agents whose tokens count; None: all."""
    episodes = [[json.loads(body) for body in tape] for tape in tapes]
    answers, cut, own, total, turns, ends, rewards, ages = [], [], [], [], [], [], [], []
    parts: dict[str, list[float]] = {}
    for records in episodes:
        whole: dict[str, list[int]] = {}
        mine: list[list[int]] = []
        for call in (record for record in records if record["t"] == "call"):
            before = whole[call["base"]][: call["keep"]] if call["base"] else []
            completion = ints(call["completion"])
            whole[call["call"]] = [*before, *ints(call["prompt"]), *completion]
            if by is None or call["by"] in by:
                mine.append(completion)
                cut.append(call["finish"] == "length")
                ages += [update - int(version.split(":")[1]) for version, a, b in call["spans"] for _ in range(a, b)]
        answers += [len(completion) for completion in mine]
        own.append(sum(map(len, mine)))
        ids = list(whole.values())
        total.append(sum(len(a) for a in ids if not any(b is not a and b[: len(a)] == a for b in ids)))
        turns.append(sum(record["t"] == "step" and record["role"] == "action" for record in records))
        ends.append(records[-1]["status"])
        earned: dict[str, float] = {}
        for reward in (record for record in records if record["t"] == "reward"):
            earned[reward["name"]] = earned.get(reward["name"], 0.0) + reward["value"]
        for name, value in earned.items():
            parts.setdefault(name, []).append(value)
        counted = [record for record in records if record["t"] == "reward" and record["weight"]]
        if counted:
            rewards.append(sum(record["value"] * record["weight"] for record in counted))
    stale = sum(update - age < oldest for age in ages)
    return {
        "reward": mean(rewards),
        "episodes": len(episodes),
        "turns": mean(turns),
        "truncated": mean([end != "finished" for end in ends]),
        **{f"ended/{name}": mean([end == name for end in ends]) for name in ("truncated", "limit", "error")},
        **{f"component/{name}": mean(values) for name, values in parts.items()},
        "length/answer": mean(answers),
        "length/answer/max": max(answers),
        "length/answer/cut": mean(cut),
        "length/episode": mean(own),
        "length/episode/max": max(own),
        "length/total": mean(total),
        "length/total/max": max(total),
        "lag": mean(ages),
        "lag/max": max(ages),
        "stale_tokens": stale,
        "stale_share": stale / len(ages),
    }


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, deviation, extremes and mean square."""
    return {
        name: statistics.fmean(values),
        f"{name}/std": statistics.pstdev(values),
        f"{name}/min": min(values),
        f"{name}/max": max(values),
        f"{name}/square": statistics.fmean([value * value for value in values]),
    }


def clip_ratios(ratios: Sequence[float], advantages: Sequence[float], low: float, high: float) -> dict[str, float]:
    """TRL's `clip_ratio/*_mean` of these completion tokens, by the lines of its `_compute_loss`."""
    is_low = [r < 1 - low and a < 0 for r, a in zip(ratios, advantages, strict=True)]
    is_high = [r > 1 + high and a > 0 for r, a in zip(ratios, advantages, strict=True)]
    region = [a or b for a, b in zip(is_low, is_high, strict=True)]
    named = {"low_mean": is_low, "high_mean": is_high, "region_mean": region}
    return {name: sum(values) / len(values) for name, values in named.items()}
