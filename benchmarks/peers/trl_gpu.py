"""TRL's `GRPOTrainer` on the model and prompts of `gpu.py`'s case `0.6b-full`: 4 groups of 16, at most 256 tokens.

Arguments: the model's folder, updates. As in that case, weights are float32, computation is bfloat16, layers are
checkpointed, and each batch of answers is trained on in one optimiser step. `generate()` of
transformers samples, 64 answers at once. TRL trains 16 rows at a time, twice its default. Prints one JSON object.
"""

import json
import sys
import tempfile
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

GROUPS, GROUP = 4, 16


def settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Timed(GRPOTrainer):
    sampling: list[float]

    def _generate(self, *args, **kwargs):
        settle()
        began = time.perf_counter()
        found = super()._generate(*args, **kwargs)
        settle()
        self.sampling.append(time.perf_counter() - began)
        return found


def main(folder: str, updates: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens: list[int] = []

    def sevens(completions, completion_ids, **_):
        tokens.append(sum(map(len, completion_ids)))
        words = [tokenizer.decode(ids).split("|") for ids in completion_ids]
        return [sum(word.endswith("7") for word in each) / max(len(each), 1) for each in words]

    prompts = [f"{k} is the number that we speak of. " * 8 for k in range(64)]
    with tempfile.TemporaryDirectory() as out:
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=sevens,
            processing_class=tokenizer,
            args=GRPOConfig(
                output_dir=out,
                use_cpu=not torch.cuda.is_available(),
                bf16=True,
                gradient_checkpointing=True,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                per_device_train_batch_size=GROUP,
                gradient_accumulation_steps=GROUPS,
                num_generations=GROUP,
                max_steps=updates,
                learning_rate=1e-6,
                lr_scheduler_type="constant",
                max_completion_length=256,
                temperature=1.0,
                beta=0.0,
                seed=0,
            ),
            train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in prompts]}),
        )
        trainer.sampling = []
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        trainer.train()
        settle()
        seconds = time.perf_counter() - began
    sampling = sum(trainer.sampling)
    print(
        json.dumps(
            {
                "case": "trl",
                "seconds": round(seconds, 1),
                "peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None,
                "tokens": sum(tokens),
                "sampling seconds": [round(each, 2) for each in trainer.sampling],
                "sampled/s": round(sum(tokens) / sampling),
                "trained/s": round(sum(tokens) / (seconds - sampling)),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
