"""TRL's `GRPOTrainer` on the case of `whole_loop.py`; run by its own Python (`whole_loop.py --trl PYTHON`).

Arguments: the model's folder, `single` or `tool`, steps. What TRL turns on by default and the others don't have is off:
gradient checkpointing, bfloat16, logging, saving.
"""

import sys
import tempfile

import torch
from datasets import Dataset
from loop_case import GROUP, GROUPS, LR, MAX_TOKENS, RESULT, Clock, questions, reward, roll_die
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Timed(TrainerCallback):
    def __init__(self) -> None:
        self.clock: Clock | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.clock = Clock()

    def on_step_end(self, args, state, control, **kwargs):
        self.clock.tick()


def main(folder: str, kind: str, steps: int) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = len(tokenizer.encode(RESULT.format(4), add_special_tokens=False))
    sampled = calls = 0

    def scores(completions, completion_ids, **_):
        nonlocal sampled, calls
        # The ids hold the tool's results too.
        results = sum(message["role"] == "tool" for messages in completions for message in messages)
        sampled += sum(map(len, completion_ids)) - results * result
        calls += results
        return [reward(kind, messages[-1]["content"] or "") for messages in completions]

    timed = Timed()
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
            max_completion_length=MAX_TOKENS[kind],
            temperature=1.0,
            beta=0.0,
            seed=0,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=scores,
            args=config,
            processing_class=tokenizer,
            callbacks=[timed],
            tools=[roll_die] if kind == "tool" else None,
            train_dataset=Dataset.from_dict(
                {"prompt": [[{"role": "user", "content": q}] for q in questions(kind)] * 8}
            ),
        )
        trainer.train()
    if kind == "tool" and calls < 0.9 * steps * GROUPS * GROUP:
        raise SystemExit(f"only {calls} of {steps * GROUPS * GROUP} episodes called the tool")
    print(timed.clock.report(sampled))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
