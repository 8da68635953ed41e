"""What training by the embedded engine costs on a GPU, by the model's size: memory, tokens per second, precision.

    python benchmarks/gpu.py 0.6b-full 0.6b-plain 0.6b-lora 4b-lora 0.6b-example 4b-example [--updates 4]

The model has the shape of Qwen3 and random weights, so nothing is downloaded and nothing sensible is learned: an answer
earns the share of its tokens whose name ends in 7. Every case runs in a process of its own, through `train`. Printed:
peak memory of torch, seconds of an update's rollouts and of its training, tokens per second of both, and the mean
|log-prob of the sampler - log-prob of the trainer| over trained tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from tapereel.agents import LLM, agent
from tapereel.envs import Environment, Outcome
from tapereel.tapes import Answer, Tape, Text

HERE = Path(__file__).resolve().parent
VOCABULARY = 151_936
RANK = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
SHAPES = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
FULL = {"loop.optimiser.autocast": "bfloat16", "loop.optimiser.gradient_checkpointing": True}
LORA = {
    "trainer.lora": {"rank": 16, "alpha": 32},
    "trainer.dtype": "bfloat16",
    "loop.optimiser.autocast": "bfloat16",
    "loop.optimiser.gradient_checkpointing": True,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-full": ("tiny", FULL),
    "tiny-lora": ("tiny", LORA),
    "0.6b-full": ("0.6b", FULL),
    "0.6b-plain": ("0.6b", {"loop.optimiser.autocast": "bfloat16", "loop.optimiser.gradient_checkpointing": False}),
    "0.6b-float32": ("0.6b", {"loop.optimiser.gradient_checkpointing": True}),
    "0.6b-lora": ("0.6b", LORA),
    "4b-lora": ("4b", LORA),
    "tiny-qlora": ("tiny", LORA | {"trainer.lora": {"rank": 16, "alpha": 32, "quantise": "nf4"}}),
    "0.6b-qlora": ("0.6b", LORA | {"trainer.lora": {"rank": 16, "alpha": 32, "quantise": "nf4"}}),
    "4b-qlora": ("4b", LORA | {"trainer.lora": {"rank": 16, "alpha": 32, "quantise": "nf4"}}),
    "4b-full": ("4b", FULL),
    "tiny-offload": ("tiny", FULL | {"trainer.offload": True}),
    "0.6b-offload": ("0.6b", FULL | {"trainer.offload": True}),
    "4b-offload": ("4b", FULL | {"trainer.offload": True}),
    # By one rank of torchrun, which shards with FSDP2.
    "tiny-fsdp": ("tiny", FULL | {"processes.shard": True}),
    "0.6b-fsdp": ("0.6b", FULL | {"processes.shard": True}),
    # The settings of examples/qwen3_*.yaml, with fewer groups.
    "0.6b-example": ("0.6b", {"loop.groups": 16}),
    "4b-example": ("4b", {"loop.groups": 8}),
}


class Sevens(Environment[Answer]):
    """Pays for tokens whose name ends in 7."""

    async def reset(self, task: str) -> Text:
        return Text(text=task)

    async def step(self, action: Answer) -> Outcome:
        words = action.text.split("|")
        return Outcome(reward=sum(word.endswith("7") for word in words) / max(len(words), 1), terminated=True)


@agent
async def speaker(tape: Tape, llm: LLM) -> AsyncIterator[Answer]:
    yield Answer(text=(await llm(tape)).text)


def save_model(folder: Path, size: str, device: str) -> None:
    """A random model of the size's shape, and a tokenizer of as many tokens: those of bytes, and names."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    names = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: k for k, name in enumerate(names + [f"|{k}" for k in range(VOCABULARY - len(names))])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
        chat_template="{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=SHAPES[size]["num_attention_heads"] if size == "tiny" else 8,
        head_dim=16 if size == "tiny" else 128,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=1,
        pad_token_id=0,
        **SHAPES[size],
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)


def settings(case: str, model: Path, updates: int) -> dict[str, Any]:
    given: dict[str, Any] = {
        "engine": {"kind": "embedded", "slots": 64, "capacity": 1024},
        "loop": {
            "groups": 4,
            "group_size": 16,
            "max_lag": 0,
            "sampler_tolerance": 5.0,
            "sampling": {"max_tokens": 256},
            "optimiser": {"lr": 1e-6, "micro_tokens": 16384},
            "checkpoint_every": 1000,
        },
    }
    if case.endswith("-example"):
        given = yaml.safe_load((HERE.parent / "examples" / f"qwen3_{CASES[case][0]}.yaml").read_text())
        given |= {"rewards": [], "dataset": {}}
        given["engine"].pop("renderer", None)
    given |= {
        "agent": f"{HERE / 'gpu.py'}:speaker",
        "env": f"{HERE / 'gpu.py'}:Sevens",
        "tasks": [f"{k} is the number that we speak of. " * 8 for k in range(64)],
        "evaluation": {"fraction": 0},
    }
    given["engine"]["model"], given["loop"]["updates"] = str(model), updates
    for key, value in CASES[case][1].items():
        place = given
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return given


def measured(case: str, folder: Path, updates: int) -> dict[str, Any]:
    import torch

    from tapereel.finetune.api.estimate import estimate
    from tapereel.finetune.run.train_config import TrainConfig
    from tapereel.finetune.run.train_run import train
    from tapereel.finetune.trainer.options import fitted

    cuda = torch.cuda.is_available()
    size = CASES[case][0]
    model = folder / size
    if not model.exists():
        save_model(model, size, "cuda" if cuda else "cpu")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    out, config = folder / case, TrainConfig.model_validate(settings(case, model, updates))
    began = time.perf_counter()
    summary = train(config, out)
    seconds = time.perf_counter() - began
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    kept = ("train_seconds", "trained_tokens", "mismatch", "grad_norm")
    report = json.loads(summary.model_dump_json())
    return {
        "case": case,
        "seconds": round(seconds, 1),
        "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "reserved GiB": round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else None,
        "estimated GiB": estimate(fitted(config)),
        "books close": summary.books_close,
        "rollouts": {key: report[key] for key in ("seconds", "tokens")},
        "updates": [{key: line[key] for key in kept} for line in lines if "train_seconds" in line],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=list(CASES))
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where models and runs are kept (default: a temporary folder)")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(measured(given.cases[0], given.folder, given.updates)))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        folder.mkdir(exist_ok=True, parents=True)
        for case in given.cases:
            words = [sys.executable, *(RANK if case.endswith("-fsdp") else ()), __file__, case, "--inside"]
            words += ["--folder", folder, "--updates", str(given.updates)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                print(case, "failed:", done.stdout[-1000:], done.stderr[-3000:], flush=True)
            else:
                print(done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
