"""Sampled tokens per second of the embedded engine, beside plain transformers, in one run on one thread.

    python benchmarks/embedded_engine.py [--json] [--repeat N] [--new N]

Ways to sample the same number of tokens after prompts of 64: `engine` (EmbeddedEngine, which also stamps, records
float32 log-probs and is fed by one coroutine per request; its model attends by sdpa), `eager` (the same, its model with
eager attention, which is quicker for small heads on a CPU), `raw` (a hand-written loop over a DynamicCache with
log-softmax, multinomial and gather), `generate` (model.generate, which gives no log-probs) and, for completions of
uneven length, both again: a batch that is padded to its slowest row against slots that are filled anew. Then what
parking buys over three turns, and what a weight swap costs. Time is the process's own CPU time, so that neighbours on
the machine count for less; read the ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tapereel.agents import EmbeddedEngine, Request
from tapereel.agents.rendering import Renderer
from tapereel.tapes import Sampling
from tapereel.tapes.arrays import ints

PROMPT = 64
VOCABULARY = 103


class NoText(Renderer):
    """A renderer that reads nothing: text is not what is measured."""

    def __init__(self) -> None:
        self.end_ids = ()

    def decode(self, ids: Sequence[int]) -> str:
        """Nothing."""
        return ""


def models() -> dict[str, PreTrainedModel]:
    """A Llama of 0.34M and a Qwen3 of 1.0M parameters, character-level vocabularies."""
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    made = [
        LlamaForCausalLM(LlamaConfig(**common, hidden_size=96, num_hidden_layers=3, intermediate_size=256)),
        Qwen3ForCausalLM(
            Qwen3Config(**common, hidden_size=144, num_hidden_layers=4, intermediate_size=384, head_dim=36)
        ),
    ]
    return {f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M": model.eval() for model in made}


def prompts(n: int) -> list[list[int]]:
    """n prompts of random ids."""
    rng = random.Random(n)
    return [[rng.randrange(1, VOCABULARY) for _ in range(PROMPT)] for _ in range(n)]


def cpu_seconds(work: Callable[[], Any], repeat: int) -> float:
    """Median CPU seconds of `work`, after one round that isn't counted."""
    work()
    times = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def by_engine(engine: EmbeddedEngine, lengths: Sequence[int]) -> Callable[[], None]:
    """One coroutine per completion length."""
    asked = [
        Request(messages=(), prompt=ints(prompt), sampling=Sampling(max_tokens=length), seed=i)
        for i, (prompt, length) in enumerate(zip(prompts(len(lengths)), lengths, strict=True))
    ]

    async def all_of_them() -> None:
        await asyncio.gather(*(engine.complete(request) for request in asked))

    return lambda: asyncio.run(all_of_them())


@torch.inference_mode()
def raw_loop(model: Any, batch: torch.Tensor, new: int) -> None:
    """What one writes by hand: ids and log-probs of `new` tokens for each row."""
    cache = DynamicCache()
    ids, logprobs = batch, []
    for _ in range(new):
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        scores = torch.log_softmax(logits, -1)
        ids = torch.multinomial(scores.exp(), 1)
        logprobs.append(scores.gather(1, ids))


def in_batches(work: Callable[[torch.Tensor, int], Any], lengths: Sequence[int], size: int) -> Callable[[], None]:
    """Plain batches of `size`, each as long as its longest completion."""
    rows = torch.tensor(prompts(len(lengths)))

    def run() -> None:
        for start in range(0, len(lengths), size):
            work(rows[start : start + size], max(lengths[start : start + size]))

    return run


def throughput(model: PreTrainedModel, new: int, repeat: int) -> dict[str, dict[str, float]]:
    """Tokens per second by concurrency and way."""

    def generate(rows: torch.Tensor, n: int) -> None:
        model.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            do_sample=True,
            min_new_tokens=n,  # type: ignore
            max_new_tokens=n,
            top_k=0,
        )

    def raw(rows: torch.Tensor, n: int) -> None:
        raw_loop(model, rows, n)

    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    rng = random.Random(0)
    cases = {str(n): ([new] * n, n) for n in (1, 8, 64, 256)}
    cases["256 uneven, 64 slots"] = ([rng.randrange(4, 2 * new - 3) for _ in range(256)], 64)
    out: dict[str, dict[str, float]] = {}
    for name, (lengths, width) in cases.items():
        engine = EmbeddedEngine(model, NoText(), version="v0", slots=width, capacity=PROMPT + 2 * new)
        with_eager = EmbeddedEngine(eager, NoText(), version="v0", slots=width, capacity=PROMPT + 2 * new)
        ways = {
            "engine": by_engine(engine, lengths),
            "eager": by_engine(with_eager, lengths),
            "raw": in_batches(raw, lengths, width),
            "generate": in_batches(generate, lengths, width),
        }
        out[name] = {way: sum(lengths) / cpu_seconds(work, repeat) for way, work in ways.items()}
    return out


def turns(model: PreTrainedModel, park_tokens: int, repeat: int) -> float:
    """Tokens per second over 64 episodes of three turns (prompts grow; 12 tokens are sampled each time)."""

    async def episode(engine: EmbeddedEngine, number: int, prompt: list[int]) -> None:
        ids = ints(prompt)
        for turn in range(3):
            completion = await engine.complete(
                Request(
                    messages=(),
                    prompt=ids,
                    sampling=Sampling(max_tokens=12),
                    seed=3 * number + turn,
                    cache_key=f"e{number}",
                )
            )
            ids = ids + (completion.ids or ints()) + ints([5, 6, 7, 8])
        engine.forget(f"e{number}")

    async def all_of_them() -> None:
        await asyncio.gather(*(episode(engine, i, prompt) for i, prompt in enumerate(prompts(64))))

    engine = EmbeddedEngine(model, NoText(), version="v0", slots=64, capacity=256, park_tokens=park_tokens)
    return 64 * 36 / cpu_seconds(lambda: asyncio.run(all_of_them()), repeat)


def swap_milliseconds(model: PreTrainedModel) -> float:
    """What a swap adds to the run of 64 rows whose KV it makes stale, at about 96 tokens each."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    engine = EmbeddedEngine(model, NoText(), version="v0", slots=64, capacity=256)
    published = 0

    async def run(swaps: int) -> None:
        nonlocal published
        asked = [Request(messages=(), prompt=ints(p), sampling=Sampling(max_tokens=64), seed=0) for p in prompts(64)]
        running = [asyncio.ensure_future(engine.complete(request)) for request in asked]
        for _ in range(32 * swaps):  # a turn of the loop is a decoding step
            await asyncio.sleep(0)
        for _ in range(swaps):
            published += 1
            await engine.sync_weights(state, f"v{published}")
        await asyncio.gather(*running)

    plain = cpu_seconds(lambda: asyncio.run(run(0)), 5)
    return 1e3 * (cpu_seconds(lambda: asyncio.run(run(1)), 5) - plain)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--repeat", type=int, default=5, help="rounds per cell, of which the median counts")
    parser.add_argument("--new", type=int, default=64, help="tokens per completion")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, model in models().items():
        results[name] = {
            "tokens_per_second": throughput(model, options.new, options.repeat),
            "three_turns": {
                "parked": turns(model, 64 * 256, options.repeat),
                "not parked": turns(model, 0, options.repeat),
            },
            "swap_ms_64_rows": swap_milliseconds(model),
        }
    if options.json:
        print(json.dumps(results))
        return
    for name, result in results.items():
        print(
            f"{name} parameters\n{'concurrent':24}{'engine tok/s':>14}{'eager':>9}{'raw':>9}{'generate':>10}"
            f"{'/raw':>7}{'/gen':>7}"
        )
        for case, row in result["tokens_per_second"].items():
            print(
                f"{case:24}{row['engine']:14,.0f}{row['eager']:9,.0f}{row['raw']:9,.0f}{row['generate']:10,.0f}"
                f"{row['engine'] / row['raw']:7.2f}{row['engine'] / row['generate']:7.2f}"
            )
        kept, lost = result["three_turns"]["parked"], result["three_turns"]["not parked"]
        print(f"three turns, 64 episodes: {kept:,.0f} tok/s parked, {lost:,.0f} not ({kept / lost:.2f}x)")
        print(f"a swap under 64 running rows of about 96 tokens: {result['swap_ms_64_rows']:.0f} ms\n")


if __name__ == "__main__":
    main()
