"""TRL's `GRPOTrainer` on the case of `real_model.py`; run by its own Python (`real_model.py --trl PYTHON`).

Arguments: the model's folder, steps, threads. Gradient checkpointing and bfloat16, which TRL turns on by default, are
off, and so are logging and saving.
"""

import sys
import tempfile

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  (the imports are measured apart)
from datasets import Dataset
from letters_case import GROUP, GROUPS, LR, TOKENS, WORDS, Clock, question, reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_begin(self, args, state, control, **kwargs):
        self.clock.begin()

    def on_step_end(self, args, state, control, **kwargs):
        self.clock.tick()


def scores(completions, word, **_):
    return [reward(one, messages[-1]["content"]) for one, messages in zip(word, completions, strict=True)]


def main(folder: str, steps: int, threads: int) -> None:
    torch.set_num_threads(threads)
    clock = Clock()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    rows = {"prompt": [[{"role": "user", "content": question(word)}] for word in WORDS], "word": WORDS}
    with tempfile.TemporaryDirectory() as out:
        config = GRPOConfig(
            output_dir=out,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            per_device_train_batch_size=GROUPS * GROUP,
            gradient_accumulation_steps=1,
            num_generations=GROUP,
            max_steps=steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            max_completion_length=TOKENS,
            generation_kwargs={"min_new_tokens": TOKENS},
            beta=0.0,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=scores,
            args=config,
            processing_class=tokenizer,
            callbacks=[Timed(clock)],
            train_dataset=Dataset.from_dict(rows),
        )
        trainer.train()
    print(clock.report())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
