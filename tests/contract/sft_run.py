"""Run by the Python of the TRL environment: `sft_run.py OUT`. TRL's own trainers train on rows of a run.

OUT/run is a run, OUT/model its model. OUT/seen.json says which ids and targets `SFTTrainer` forwarded, its losses, and
which prompts `GRPOTrainer` asked.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import tapereel as tr

PLAIN = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "disable_tqdm": True,
    "max_steps": 2,
    "learning_rate": 1e-2,
}


def main(out: Path) -> None:
    torch.set_num_threads(1)
    folder = out / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = [p.detach().clone() for p in model.parameters()]
    data = tr.open(out / "run").dataset(status="finished")
    seen = []

    class Seeing(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            for ids, labels, mask in zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"], strict=True):
                there = mask.bool()
                seen.append({"input_ids": ids[there].tolist(), "labels": labels[there].tolist()})
            return super().compute_loss(model, inputs, *args, **kwargs)

    args = SFTConfig(output_dir=str(out / "sft"), max_length=None, per_device_train_batch_size=4, **PLAIN)
    trainer = Seeing(model=model, args=args, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    moved = any(bool((a != b).any()) for a, b in zip(before, model.parameters(), strict=True))
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]

    asked = []

    def reward(prompts, completions, **_):
        asked.extend(prompts)
        return [float(len(completion)) for completion in completions]

    prompts = tr.open(out / "run").dataset(tokenizer=folder).select_columns(["prompt_text"])
    prompts = prompts.rename_column("prompt_text", "prompt")
    args = GRPOConfig(
        output_dir=str(out / "grpo"), per_device_train_batch_size=4, num_generations=2, max_completion_length=4, **PLAIN
    )
    GRPOTrainer(model=model, args=args, train_dataset=prompts, processing_class=tokenizer, reward_funcs=reward).train()
    (out / "seen.json").write_text(json.dumps({"seen": seen, "losses": losses, "moved": moved, "asked": asked}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
