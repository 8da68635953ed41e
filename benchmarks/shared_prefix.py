"""A group's shared prompt forwarded once against once per row: CPU seconds of one update, as a ratio.

    python benchmarks/shared_prefix.py [--prompts 16 64 256 1024] [--tokens 64] [--group 8] [--reps 3]

Two groups on a model of 0.34M parameters (width 96, 3 layers), one thread, recipe grpo.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tapereel.finetune import Episode, OptimiserConfig, Row, Trainer
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import micro_batches as micro


def policy() -> LlamaForCausalLM:
    """The model of these measurements, and one thread for it."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=104,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    )


def batch(prompt: int, tokens: int, group: int) -> tuple[list[Row], list[Episode]]:
    """Two groups, each with a prompt of its own."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, 100, (2, prompt)).astype(np.int32)
    own = np.arange(prompt, prompt + tokens, dtype=np.int32)
    ones = np.ones(tokens, np.float32)
    zeros = np.zeros(tokens, np.int32)
    rows = [
        Row(
            tape=f"t{i}",
            group=f"g{i % 2}",
            own=own,
            old=-4.6 * ones,
            temperature=ones,
            version=zeros,
            call=zeros,
            input_ids=np.concatenate([prompts[i % 2], rng.integers(0, 100, tokens).astype(np.int32)]),
            turn=zeros,
            offset=np.arange(tokens, dtype=np.int32),
            calls=("c",),
            agents=("a",),
            versions=("r:0",),
        )
        for i in range(2 * group)
    ]
    return rows, [Episode(tape=r.tape, group=r.group, reward=float(i // 2 % 2)) for i, r in enumerate(rows)]


def seconds(trainer: Trainer, rows: list[Row], episodes: list[Episode], share_from: int, reps: int) -> float:
    """Median CPU seconds of an update when prefixes of `share_from` tokens or more are shared."""
    micro.SHARE_TOKENS = share_from
    trainer.update(rows, episodes)
    times = []
    for _ in range(reps):
        start = time.process_time()
        trainer.update(rows, episodes)
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 64, 256, 1024])
    for name, default in (("tokens", 64), ("group", 8), ("reps", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    trainer = Trainer(policy(), get_recipe("grpo"), OptimiserConfig(lr=1e-6))
    micro.SHARE_SAVED = 0.0
    print(f"groups of {args.group}, {args.tokens} tokens each behind the prompt")
    print(f"{'prompt':>7}{'saved':>7}{'each':>8}{'once':>8}{'ratio':>7}")
    for prompt in args.prompts:
        rows, episodes = batch(prompt, args.tokens, args.group)
        each = seconds(trainer, rows, episodes, 10**9, args.reps)
        once = seconds(trainer, rows, episodes, 1, args.reps)
        saved = (prompt - 1) * (args.group - 1) / (args.group * (prompt + args.tokens))
        print(f"{prompt:>7}{saved:>7.0%}{each:>8.3f}{once:>8.3f}{once / each:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
