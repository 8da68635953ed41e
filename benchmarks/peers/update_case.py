"""The update that `rl_update.py` measures, for every implementation: model, batch, reward, clock. No tapereel here.

A two-layer Llama of width 128; turns of 64 tokens alternate between the environment and the agent, whose tokens are
the labels. Rewards alternate between 0 and 1 and all rows are one group. A peer's script lies beside this file and runs
in the peer's own environment, which needs torch, transformers and numpy.
"""

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

CLIP = 0.2
LR = 1e-6
TURN = 64


@dataclass
class Case:
    vocabulary: int
    rows: int
    length: int
    reps: int

    def ids(self) -> np.ndarray:
        """(rows, length) int64 token ids."""
        return np.random.default_rng(0).integers(0, self.vocabulary, (self.rows, self.length))

    def own(self) -> np.ndarray:
        """(length,) bool: the agent's own tokens."""
        return np.arange(self.length) // TURN % 2 == 1

    def rewards(self) -> np.ndarray:
        """(rows,) float64."""
        return np.arange(self.rows) % 2.0

    def old(self) -> float:
        """Log-prob that the sampler reported for every token: that of an even distribution."""
        return float(-np.log(self.vocabulary))

    def advantages(self) -> np.ndarray:
        """(rows,) float64 standard scores within the one group."""
        r = self.rewards()
        return (r - r.mean()) / r.std(ddof=1)

    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary,
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=self.length,
                tie_word_embeddings=True,
            )
        )


def optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def apply(model: Any, optim: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Backward, clip, step: the same for all but ours, which has its own."""
    optim.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()


def measure(update: Callable[[], float | None], reps: int) -> dict[str, float]:
    """CPU and wall seconds of an update (medians), and the peak of the process above what it held before the first."""
    with open("/proc/self/statm") as file:
        base = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
    cpu, wall, losses = [], [], []
    for _ in range(reps):
        c, w = time.process_time(), time.perf_counter()
        losses.append(update())
        cpu.append(time.process_time() - c)
        wall.append(time.perf_counter() - w)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "cpu": statistics.median(cpu),
        "wall": statistics.median(wall),
        "mib": (peak - base) / 1024,
        "loss": losses[0] if losses[0] is not None else float("nan"),
    }


def main(make: Callable[[Case], Callable[[], float | None]]) -> None:
    """Measure what `make(case)` gives and print it as JSON; arguments: vocabulary rows length reps."""
    parser = argparse.ArgumentParser()
    for name in ("vocabulary", "rows", "length", "reps"):
        parser.add_argument(name, type=int)
    case = Case(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    print(json.dumps(measure(make(case), case.reps)))
