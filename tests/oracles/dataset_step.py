"""One step on the rows of a dataset in plain loops, from the formulas: GRPO and REINFORCE at each token's temperature.

    lp_t  = log softmax(logits / T_t) of the token
    R_e   = r_e - b sum_t k3(old_t, ref_t)                                 over the episode's tokens with a known old_t
    A_e   = (R_e - mean) / (std + eps)                     over the group's episodes that may train and have a reward
    l_t   = -min(r_t A, clip(r_t, 1 - c, 1 + c) A) + beta k3(lp_t, ref_t),  r_t = exp(lp_t - old_t);  or -lp_t A + ...
    loss  = 1/T sum_t l_t,  or  1/E sum_e 1/T_e sum_t l_t

Reads the rows of a dataset as mappings, null for unknown, and a function from ids to logits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TRAINS = {"finished", "truncated"}
LIMITS = {"turns", "tokens", "context", "agent_seconds"}


@dataclass
class Settings:
    algo: str = "grpo"
    """grpo (eps 1e-9) or reinforce (eps 1e-4)."""
    clip: float = 0.2
    beta: float = 0.0
    reward_beta: float = 0.0
    weigh: str = "token"
    raw: bool = False
    """The reward itself in place of the advantage."""
    relu: bool = False


def known(x: float | None) -> bool:
    return x is not None and math.isfinite(x)


def may_train(row: Mapping[str, Any]) -> bool:
    status, cause = row["status"], row["cause"]
    return (
        status in TRAINS or (status == "limit" and cause in LIMITS) or (status == "error" and cause == "agent")
    ) and known(row["reward"])


def k3(lp: Any, ref: float) -> Any:
    d = ref - lp
    return (d.exp() if isinstance(d, Tensor) else math.exp(d)) - d - 1


def tokens(row: Mapping[str, Any]) -> list[int]:
    return [t for t, label in enumerate(row["labels"]) if label != -100 and known(row["old_logprobs"][t])]


def advantages(rows: Sequence[Mapping[str, Any]], how: Settings) -> dict[str, float]:
    """Advantage (or raw reward) of each tape that trains."""
    reward: dict[str, float] = {}
    group: dict[str, str] = {}
    for row in rows:
        if may_train(row):
            reward.setdefault(row["tape_id"], row["reward"])
            group[row["tape_id"]] = row["group_id"]
            if how.reward_beta:
                price = math.fsum(k3(row["old_logprobs"][t], row["ref_logprobs"][t]) for t in tokens(row))
                reward[row["tape_id"]] -= how.reward_beta * price
    out = {}
    for tape, r in reward.items():
        peers = [x for other, x in reward.items() if group[other] == group[tape]]
        a = r
        if not how.raw:
            flat = len(set(peers)) == 1
            eps = 1e-9 if how.algo == "grpo" else 1e-4
            a = 0.0 if flat else (r - statistics.fmean(peers)) / (statistics.stdev(peers) + eps)
        out[tape] = max(a, 0.0) if how.relu else a
    return out


def step(rows: Sequence[Mapping[str, Any]], logits: Callable[[list[int]], Tensor], how: Settings) -> Tensor:
    """The loss of all rows, with gradient. logits: ids -> (L, V), where row t predicts token t + 1."""
    worth = advantages(rows, how)
    losses: dict[str, list[Tensor]] = {}
    for row in rows:
        if row["tape_id"] not in worth:
            continue
        a = worth[row["tape_id"]]
        out = logits(row["input_ids"])
        for t in tokens(row):
            z = out[t - 1] / row["temperature"][t]
            lp = z[row["input_ids"][t]] - torch.logsumexp(z, 0)
            if how.algo == "grpo":
                r = torch.exp(lp - row["old_logprobs"][t])
                now = r.item()
                bound = min(max(now, 1 - how.clip), 1 + how.clip)
                loss = -r * a if now * a <= bound * a else torch.tensor(-bound * a, dtype=lp.dtype)
            else:
                loss = -lp * a
            if how.beta:
                loss = loss + how.beta * k3(lp, row["ref_logprobs"][t])
            losses.setdefault(row["tape_id"], []).append(loss)
    if how.weigh == "token":
        every = [x for mine in losses.values() for x in mine]
        return torch.stack(every).sum() / len(every)
    return torch.stack([torch.stack(mine).sum() / len(mine) for mine in losses.values()]).sum() / len(losses)
