"""The equation of every recipe, as its module documents it, written out in plain loops over one small batch.

The docstring of each function is the recipe's own equation, word for word: whoever edits one edits both.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable

import torch

from . import objective as oracle

GROUPS = ["g", "g", "g", "h", "h", "h", "k", "k"]
TURNS = [(2, 1), (1,), (3,), (2,), (1, 1), (2,), (1,), (2,)]
REWARDS = [1.0, 0.0, 0.25, 0.5, 2.0, 0.0, 1.0, 1.0]
FORMAT = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0]
PARTS = [{"right": r - 0.5 * f, "format": f} for r, f in zip(REWARDS, FORMAT, strict=True)]
WEIGHTS = {"right": 1.0, "format": 0.5}
"""Two components that add up to each reward."""
LENGTHS = [17000, 10, 19000, 20480, 30000, 20, 18000, 10]
"""What counts against a length limit; only a recipe with one looks at it."""
N = sum(map(sum, TURNS))


@dataclasses.dataclass
class World:
    """A batch as plain lists; `of` is each token's episode."""

    of: list[int]
    lp: list[float]
    old: list[float]
    ref: list[float]
    value: list[float]
    teacher: list[float]

    def group(self, i: int) -> list[float]:
        return [r for r, g in zip(REWARDS, GROUPS, strict=True) if g == GROUPS[i]]

    def tokens(self, i: int) -> list[int]:
        return [t for t, e in enumerate(self.of) if e == i]

    def std(self, eps: float) -> list[float]:
        return oracle.baseline(REWARDS, GROUPS, "std", "group", eps, 1)

    def ratio(self, t: int) -> float:
        return math.exp(self.lp[t] - self.old[t])

    def clipped(self, t: int, a: float, low: float = 0.2, high: float = 0.2) -> float:
        return min(self.ratio(t) * a, min(max(self.ratio(t), 1 - low), 1 + high) * a)


def world(seed: int = 3) -> World:
    g = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> list[float]:
        return (-1 + scale * torch.randn(N, generator=g, dtype=torch.float64)).clamp(max=-0.01).tolist()

    of = [i for i, turns in enumerate(TURNS) for _ in range(sum(turns))]
    old = draw(0.3)
    lp = [min(o + 0.4 * d, -0.01) for o, d in zip(old, torch.randn(N, generator=g).tolist(), strict=True)]
    ref, value = draw(0.3), torch.rand(N, generator=g, dtype=torch.float64).tolist()
    return World(of, lp, old, ref, value, draw(0.3))


def whitened(a: list[float]) -> list[float]:
    m = statistics.fmean(a)
    var = statistics.fmean((x - m) ** 2 for x in a)
    return [(x - m) / math.sqrt(max(var, 1e-8)) for x in a]


def grpo(w: World) -> float:
    """A_i = (r_i - mean_group) / (std_group + eps)            n - 1 in the variance, eps 1e-9
    loss = -1/T sum_t [ min(r_t A_i, clip(r_t, 1 - 0.2, 1 + 0.2) A_i) - beta k3_t ],  r_t = exp(lp_t - old_t)
    """
    a = w.std(1e-9)
    return -sum(w.clipped(t, a[w.of[t]]) for t in range(N)) / N


def reinforce(w: World) -> float:
    """A_i = (r_i - mean_group) / (std_group + eps)            n - 1 in the variance, eps 1e-4
    loss = -1/T sum_t [ lp_t A_i - beta k3_t ]
    """
    a = w.std(1e-4)
    return -sum(w.lp[t] * a[w.of[t]] for t in range(N)) / N


def reinforce_plain(w: World) -> float:
    """A_t = R_t = r_t + gamma R_{t+1}                          gamma 1
    loss = -1/T sum_t lp_t A_t
    """
    return -sum(w.lp[t] * REWARDS[w.of[t]] for t in range(N)) / N


def rloo(w: World) -> float:
    """A_i = r_i - mean_{j != i} r_j
    loss = -1/T sum_t lp_t A_i
    """
    a = oracle.baseline(REWARDS, GROUPS, "loo", "group", 0, 0)
    return -sum(w.lp[t] * a[w.of[t]] for t in range(N)) / N


def reinforce_pp(w: World) -> float:
    """r_t = -beta k1_t, plus the episode's reward at its last own token
    A_t = (R_t - m) / sqrt(max(var, 1e-8)),  R_t = r_t + gamma R_{t+1},  m and var over all tokens of the batch
    loss = -1/T sum_t min(r A_t, clip(r, 0.8, 1.2) A_t)
    """
    a = whitened([REWARDS[e] for e in w.of])
    return -sum(w.clipped(t, a[t]) for t in range(N)) / N


def reinforce_pp_baseline(w: World) -> float:
    """A_i = (r_i - mean_group - m) / sqrt(max(var, 1e-8))      m and var over all tokens of the batch
    loss = -1/T sum_t [ min(r A_i, clip(r, 0.8, 1.2) A_i) - beta k2_t ]
    """
    a = whitened([REWARDS[e] - statistics.fmean(w.group(e)) for e in w.of])
    return -sum(w.clipped(t, a[t]) for t in range(N)) / N


def ppo(w: World) -> float:
    """delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1}        gamma 1, lambda 0.95
    A_t whitened over all tokens of the batch
    loss = -1/T sum_t min(r A_t, clip(r, 0.8, 1.2) A_t)
    """
    a: list[float] = []
    for i, r in enumerate(REWARDS):
        mine = w.tokens(i)
        a += oracle.gae([0.0] * (len(mine) - 1) + [r], [w.value[t] for t in mine], 1.0, 0.95, 0.0)[0]
    a = whitened(a)
    return -sum(w.clipped(t, a[t]) for t in range(N)) / N


def ppo_kl(w: World) -> float:
    """r_t = -beta k1_t, plus each turn's reward at its last own token        k1_t = old_t - ref_t
    delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lambda A_{t+1}        gamma 1, lambda 0.95
    A_t whitened over all tokens of the batch
    loss = -1/T sum_t min(r A_t, clip(r, 0.8, 1.2) A_t)
    after the update: beta *= 1 + clip(mean k1 / 0.25 - 1, -0.2, 0.2) n / 10000        beta 0.15 at first, n episodes
    """
    a: list[float] = []
    for i, r in enumerate(REWARDS):
        mine = w.tokens(i)
        earned = [-0.15 * (w.old[t] - w.ref[t]) for t in mine]
        earned[-1] += r
        a += oracle.gae(earned, [w.value[t] for t in mine], 1.0, 0.95, 0.0)[0]
    a = whitened(a)
    return -sum(w.clipped(t, a[t]) for t in range(N)) / N


def cpgd(w: World) -> float:
    """A_i = (r_i - m) / (s + 1e-6)                             m and s over the batch, n in the variance
    l_t = -A_i min(lp_t, old_t + log 1.2) where A_i > 0,  -A_i max(lp_t, old_t + log 0.8) where A_i < 0
    loss = 1/T sum_t [ l_t + 0.1 k3_t ],  k3 to the sampler
    """
    a = oracle.baseline(REWARDS, GROUPS, "std", "batch", 1e-6, 0)
    loss = 0.0
    for t in range(N):
        adv = a[w.of[t]]
        bound = min(w.lp[t], w.old[t] + math.log(1.2)) if adv > 0 else max(w.lp[t], w.old[t] + math.log(0.8))
        loss += -adv * bound + 0.1 * oracle.kl("k3", w.lp[t], w.old[t])
    return loss / N


def gdpo(w: World) -> float:
    """Y_i = sum_k w_k (c_ik - mean_group c_k) / (std_group c_k + eps)         n - 1 in the variance, eps 1e-4
    A_i = Y_i / (std_batch Y + eps)
    loss = -1/T sum_t min(r_t A_i, clip(r_t, 0.8, 1.2) A_i)
    """
    y = [0.0] * len(REWARDS)
    for name, weight in WEIGHTS.items():
        compared = oracle.baseline([parts[name] for parts in PARTS], GROUPS, "std", "group", 1e-4, 1)
        y = [before + weight * more for before, more in zip(y, compared, strict=True)]
    a = [one / (statistics.stdev(y) + 1e-4) for one in y]
    return -sum(w.clipped(t, a[w.of[t]]) for t in range(N)) / N


def dr_grpo(w: World) -> float:
    """A_i = r_i - mean_group
    loss = -1/(E limit) sum_t min(r_t A_i, clip(r_t, 0.8, 1.2) A_i)
    """
    a = oracle.baseline(REWARDS, GROUPS, "mean", "group", 0, 0)
    return -sum(w.clipped(t, a[w.of[t]]) for t in range(N)) / (len(REWARDS) * 512)


def dapo(w: World) -> float:
    """A_i = (r_i - mean_group) / (std_group + 1e-9),  r_i with the overlong price
    loss = -1/T sum_t min(r_t A_i, clip(r_t, 0.8, 1.28) A_i)         groups without spread are dropped, and not in T
    """
    priced = [r - min(max(n - (20480 - 4096), 0) / 4096, 1) for r, n in zip(REWARDS, LENGTHS, strict=True)]
    a = oracle.baseline(priced, GROUPS, "std", "group", 1e-9, 1)
    used = [t for t in range(N) if len(set(w.group(w.of[t]))) > 1]
    return -sum(w.clipped(t, a[w.of[t]], 0.2, 0.28) for t in used) / len(used)


def gspo(w: World) -> float:
    """s_i = exp(mean_t (lp_t - old_t))
    A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/E sum_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i)
    """
    a, loss = w.std(1e-9), 0.0
    for i in range(len(REWARDS)):
        s = math.exp(statistics.fmean(w.lp[t] - w.old[t] for t in w.tokens(i)))
        loss -= min(s * a[i], min(max(s, 1 - 3e-4), 1 + 4e-4) * a[i]) / len(REWARDS)
    return loss


def cispo(w: World) -> float:
    """A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/T sum_t sg(min(r_t, 5)) A_i lp_t
    """
    # The value of the loss; its gradient is checked apart, since the weight carries none.
    a = w.std(1e-9)
    return -sum(min(w.ratio(t), 5) * a[w.of[t]] * w.lp[t] for t in range(N)) / N


def sapo(w: World) -> float:
    """A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/E sum_i 1/T_i sum_t (4 / tau) sigmoid(tau (r_t - 1)) A_i       tau 1 where A_i > 0, 1.05 where A_i < 0
    """
    a, loss = w.std(1e-9), 0.0
    for t in range(N):
        adv = a[w.of[t]]
        tau = 1.0 if adv > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (w.ratio(t) - 1)))
        loss -= 4 / tau * gate * adv / (len(REWARDS) * len(w.tokens(w.of[t])))
    return loss


def decoupled_ppo(w: World) -> float:
    """A_i = (r_i - mean_group) / (std_group + 1e-9)
    loss = -1/T sum_t min(exp(prox_t - old_t), 2) min(r_t A_i, clip(r_t, 0.8, 1.2) A_i),  r_t = exp(lp_t - prox_t)
    """
    # prox is lp: the ratio is 1, the weight min(exp(lp - old), 2).
    a = w.std(1e-9)
    return -sum(min(w.ratio(t), 2) * a[w.of[t]] for t in range(N)) / N


def sft(w: World) -> float:
    """loss = -1/T sum_t lp_t"""
    return -sum(w.lp) / N


def rft(w: World) -> float:
    """loss = -1/T sum_t lp_t        over the own tokens of episodes with reward >= 1"""
    used = [t for t in range(N) if REWARDS[w.of[t]] >= 1]
    return -sum(w.lp[t] for t in used) / len(used)


def minor_sft(w: World) -> float:
    """loss = -1/T sum_t (2 / beta) log sigmoid(beta mean_episode(lp - ref))        beta 0.1"""
    loss = 0.0
    for t in range(N):
        ratio = statistics.fmean(w.lp[u] - w.ref[u] for u in w.tokens(w.of[t]))
        loss += -2 / 0.1 * math.log(1 / (1 + math.exp(-0.1 * ratio))) / N
    return loss


def distill(w: World) -> float:
    """loss = 1/T sum_t k3_t,  k3 = exp(teacher - lp) - 1 - (teacher - lp)"""
    return sum(oracle.kl("k3", w.lp[t], w.teacher[t]) for t in range(N)) / N


EQUATIONS: dict[str, Callable[[World], float]] = {
    f.__name__: f
    for f in (
        sft,
        grpo,
        reinforce,
        reinforce_plain,
        rloo,
        reinforce_pp,
        reinforce_pp_baseline,
        ppo,
        ppo_kl,
        cpgd,
        gdpo,
        dr_grpo,
        dapo,
        gspo,
        cispo,
        sapo,
        decoupled_ppo,
        rft,
        minor_sft,
        distill,
    )
}
