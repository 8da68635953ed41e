"""GRPO on a real pretrained model, beside TRL's `GRPOTrainer`: CPU and wall seconds of an update, and memory.

    python benchmarks/real_model.py MODEL [--threads 1] [--lora] [--recipe gspo]
    python benchmarks/real_model.py MODEL --trl PYTHON
    python benchmarks/real_model.py MODEL --engine

MODEL is a folder, or a GGUF file as `python -m tests.contract.smollm_env` fetches it. The case is in
`peers/letters_case.py`: 8 groups of 8 answers of 16 tokens, in float32, with our settings by default and the embedded
engine. Every implementation runs in a process of its own, in turn, `--rounds` times; the first update of each isn't
counted. `above` is the peak above that of the imports. TRL trains without gradient checkpointing.

`--engine` compares sampling alone with `generate()`: 8 and 32 answers of 24 tokens to different questions.

    trl  python -m tests.contract.trl_env
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from peers.letters_case import GROUP, GROUPS, LR, TOKENS, WORDS, Clock, question, reward
from side_by_side import Found, in_turn, ratio, timed

from tapereel.tapes.common.hub import model_folder

HERE = Path(__file__).parent


def ours(model: str, steps: int, threads: int, lora: bool, recipe: str) -> None:
    """Updates of `train`, as JSON."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  (the imports are measured apart)

    import tapereel as tr
    from tapereel.finetune.run import train_run

    assert train_run

    class Letter(tr.Environment):
        async def reset(self, task: str) -> str:
            self.word = task
            return question(task)

        async def step(self, action: tr.Answer) -> tr.Outcome:
            return tr.Outcome(reward=reward(self.word, action.text), terminated=True)

    torch.set_num_threads(threads)
    settings: dict[str, Any] = {
        "loop.sampling.max_tokens": TOKENS,
        "loop.sampling.ignore_eos": True,
        "loop.limits.turns": 1,
        "loop.groups": GROUPS,
        "loop.group_size": GROUP,
        "loop.optimiser.lr": LR,
        "loop.checkpoint_every": 10**6,
        "evaluation.fraction": 0,
        **({"trainer.lora.rank": 16} if lora else {}),
    }
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        tr.train(
            tr.ChatAgent(),
            Letter,
            WORDS,
            model,
            updates=steps,
            recipe=recipe,
            out=f"{out}/run",
            settings=settings,
            progress=lambda *_: clock.tick(),
        )
    print(clock.report())


def engine(model: str, threads: int, answers: tuple[int, ...] = (8, 32), new: int = 24, reps: int = 3) -> None:
    """Sampled tokens per CPU second of the embedded engine and of `generate()`."""
    import torch

    from tapereel.agents import Request
    from tapereel.agents.engines.embedded.embedded_engine import EmbeddedEngine
    from tapereel.agents.engines.embedded.pretrained import load_pretrained
    from tapereel.agents.rendering.renderer import Renderer
    from tapereel.tapes import Sampling

    torch.set_num_threads(threads)
    found = load_pretrained(model)
    renderer, tokenizer = Renderer(found.tokenizer), found.tokenizer
    tokenizer.padding_side = "left"
    plain: Any = found.model
    made = EmbeddedEngine(plain, renderer, version="r:0", slots=max(answers), capacity=128)
    how = Sampling(max_tokens=new, ignore_eos=True)

    async def sample(asked: list[list[dict[str, str]]], seed: int) -> None:
        requests = [
            Request(messages=one, prompt=renderer.prompt(one).ids, seed=seed + k, sampling=how)
            for k, one in enumerate(asked)
        ]
        await asyncio.gather(*map(made.complete, requests))

    with asyncio.Runner() as runner:
        print("| answers | engine, tokens/CPU s | generate() | ratio | wall ratio |\n|---|---|---|---|---|")
        for n in answers:
            asked: Any = [[{"role": "user", "content": question(word)}] for word in WORDS[:n]]
            inputs: Any = tokenizer.apply_chat_template(
                asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )

            def generate(inputs: Any = inputs) -> None:
                with torch.no_grad():
                    plain.generate(**inputs, max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0)

            runner.run(sample(asked, 999))
            own = timed(lambda asked=asked: runner.run(sample(asked, 0)), reps)
            other = timed(generate, reps)
            cpu, theirs = (n * new / one[0] for one in (own, other))
            print(f"| {n} | {cpu:.1f} | {theirs:.1f} | {cpu / theirs:.2f} | {other[1] / own[1]:.2f} |", flush=True)


def table(found: Found) -> str:
    """Markdown: medians over rounds of the medians over updates, and ours divided by each peer's."""
    names = ("cpu", "wall", "peak", "above")
    rounds = {
        name: [{**one, **{key: statistics.median(one[key][1:]) for key in names[:2]}} for one in several]
        for name, several in found.items()
    }
    lines = ["| | CPU s | wall s | peak, MB | above the imports |", "|---|---|---|---|---|"]
    for name, several in rounds.items():
        lines.append(
            f"| {name} | " + " | ".join(f"{statistics.median(r[k] for r in several):.4g}" for k in names) + " |"
        )
        if name != "ours":
            ratios = [f"{ratio(rounds['ours'], several, key):.2f}" for key in names]
            lines.append(f"| ours / {name} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a folder or a GGUF file; without it, a tiny model shows that it runs")
    parser.add_argument("--trl", metavar="PYTHON")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--recipe", default="grpo")
    parser.add_argument("--engine", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model
        if model is None:
            from tapereel import save_tiny_model

            model, args.steps, args.rounds = save_tiny_model(f"{scratch}/model", context=128), 2, 1
        model = str(model_folder(model))
        if args.engine:
            engine(model, args.threads)
            return
        rest = [model, str(args.steps), str(args.threads)]
        commands = {"ours": [sys.executable, __file__, "ours", *rest, str(int(args.lora)), args.recipe]}
        if args.trl:
            commands["trl"] = [args.trl, str(HERE / "peers" / "trl_letters.py"), *rest]
        print(table(in_turn(commands, args.rounds)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["ours"]:
        ours(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), bool(int(sys.argv[5])), sys.argv[6])
    else:
        main()
