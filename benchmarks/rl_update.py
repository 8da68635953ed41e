"""One RL update, ours against plain cross-entropy over all logits: time and memory above the model, as ratios.

    python benchmarks/rl_update.py [--vocabulary 32000] [--rows 8] [--length 1024] [--reps 3]

A two-layer Llama of width 128, one thread; half of each row's tokens are the agent's own. Each implementation runs in a
process of its own, and memory is its peak resident size less that before the first update. CPU seconds, median.

    plain   logits of every position in float32, log_softmax, gather, clipped loss, backward
    ours    Trainer.update with the recipe grpo: own positions only, the vocabulary in chunks
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def model_and_rows(vocabulary: int, rows: int, length: int) -> tuple[Any, list[Any], list[Any]]:
    """A fresh model, and rows of alternating 64-token turns."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tapereel.finetune.rows import Row
    from tapereel.finetune.stream import Episode

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=length, tie_word_embeddings=True))
    rng = np.random.default_rng(0)
    turn = np.arange(length) // 64
    own = np.flatnonzero(turn % 2 == 1).astype(np.int32)
    calls = (turn[own] // 2).astype(np.int32)
    n = len(own)
    made = [Row(tape=f"t{i}", group="g", input_ids=rng.integers(0, vocabulary, length).astype(np.int32), own=own,
                old=np.full(n, -np.log(vocabulary), np.float32), temperature=np.ones(n, np.float32),
                version=np.zeros(n, np.int32), call=calls, turn=calls, offset=(np.arange(n) % 64).astype(np.int32),
                calls=tuple(f"c{k}" for k in range(calls.max() + 1)), agents=("a",) * (int(calls.max()) + 1),
                versions=("r:0",)) for i in range(rows)]
    return model, made, [Episode(tape=f"t{i}", group="g", reward=float(i % 2)) for i in range(rows)]


def ours(vocabulary: int, rows: int, length: int) -> Callable[[], None]:
    from tapereel.finetune.recipes import get_recipe
    from tapereel.finetune.trainer import Trainer

    model, made, episodes = model_and_rows(vocabulary, rows, length)
    trainer = Trainer(model, get_recipe("grpo"), lr=1e-6)
    return lambda: _applied(trainer.update(made, episodes).applied)


def plain(vocabulary: int, rows: int, length: int) -> Callable[[], None]:
    model, made, episodes = model_and_rows(vocabulary, rows, length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids = torch.from_numpy(np.stack([row.input_ids for row in made])).long()
    own = torch.from_numpy(made[0].own).long()
    old = torch.from_numpy(np.stack([row.old for row in made]))
    rewards = torch.tensor([episode.reward for episode in episodes])
    advantage = ((rewards - rewards.mean()) / rewards.std())[:, None]

    def update() -> None:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        lp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][:, own - 1]
        ratio = (lp - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def _applied(applied: bool) -> None:
    if not applied:
        raise RuntimeError("the update was skipped: there is nothing to time")


def measure(name: str, vocabulary: int, rows: int, length: int, reps: int) -> dict[str, float]:
    """In this process: CPU seconds per update, and MiB above what the model takes."""
    torch.set_num_threads(1)
    update = {"ours": ours, "plain": plain}[name](vocabulary, rows, length)
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(reps):
        start = time.process_time()
        update()
        seconds.append(time.process_time() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": statistics.median(seconds), "mib": (peak - base) / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("vocabulary", 32_000), ("rows", 8), ("length", 1024), ("reps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", choices=["ours", "plain"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = {"vocabulary": args.vocabulary, "rows": args.rows, "length": args.length, "reps": args.reps}
    if args.only:
        print(json.dumps(measure(args.only, **shape)))
        return
    found = {}
    for name in ("plain", "ours"):
        flags = [f"--{key}={value}" for key, value in shape.items()]
        command = [sys.executable, __file__, "--only", name, *flags]
        out = subprocess.run(command, check=True, capture_output=True, text=True)
        found[name] = json.loads(out.stdout)
    print(f"vocabulary {args.vocabulary}, {args.rows} x {args.length} tokens")
    print(f"{'':<8}{'CPU s':>8}{'MiB':>9}{'time':>7}{'memory':>8}")
    for name, one in found.items():
        print(f"{name:<8}{one['seconds']:>8.2f}{one['mib']:>9.0f}{one['seconds'] / found['plain']['seconds']:>7.2f}"
              f"{one['mib'] / found['plain']['mib']:>8.2f}")


if __name__ == "__main__":
    main()
