"""Run by the Python of the TRL environment: `trl_run.py KIND OUT`. TRL's own trainer trains a tiny model for a few
steps with our recorder, and OUT/trained.json says which token ids entered its loss.

KIND: `prompts` (questions and TRL reward functions; OUT may hold an earlier run) or `tools` (an agent and an
environment of ours, two turns).
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tapereel.agents import LLM, Agent
from tapereel.agents.engines.embedded.tiny_model import char_tokenizer, tiny_model
from tapereel.envs import Environment, Outcome
from tapereel.finetune.interchange.trl_recorder import TRLRecorder
from tapereel.tapes import Answer, Tape, Text

LETTERS = "abcd"
STEPS, GROUPS, GROUP = 3, 4, 4


class Letters(Environment[Answer]):
    """Asks for two letters, one after the other."""

    async def reset(self, task):
        self.word, self.turn = task.public["prompt"][-1]["content"] + "b", 0
        return Text(text=self.word[0])

    async def step(self, action):
        wanted, self.turn = self.word[self.turn], self.turn + 1
        reward = float(action.text.startswith(wanted))
        if self.turn == len(self.word):
            return Outcome(reward=reward, terminated=True)
        return Outcome(Text(text=self.word[self.turn]), reward=reward)


class Speaker(Agent):
    async def act(self, tape: Tape, llm: LLM):
        yield Answer(text=(await llm(tape, max_tokens=3)).text)


SCORES: dict[str, dict[str, float | None]] = {}
"""What the reward functions gave, by tape."""


def right(completions, letter, tape, **_):
    scores = [float(c[0]["content"][:1] == one) for c, one in zip(completions, letter, strict=True)]
    return told("right", tape, scores)


def brief(completions, tape, **_):
    """Has nothing to say of an empty answer."""
    return told("brief", tape, [-0.1 * len(c[0]["content"]) if c[0]["content"] else None for c in completions])


def told(name, tapes, scores):
    for tape, score in zip(tapes, scores, strict=True):
        SCORES.setdefault(tape, {})[name] = score
    return scores


def main(kind: str, out: Path) -> None:
    torch.set_num_threads(1)
    tokenizer = char_tokenizer(LETTERS)
    model = tiny_model(tokenizer, "micro", seed=0, context=64)
    data = [{"prompt": [{"role": "user", "content": x}], "letter": x} for x in LETTERS] * STEPS
    config = GRPOConfig(
        output_dir=str(out / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        per_device_train_batch_size=GROUPS * GROUP // 2,
        gradient_accumulation_steps=2,
        num_generations=GROUP,
        max_steps=STEPS,
        learning_rate=1e-2,
        max_completion_length=6,
        temperature=1.0,
        beta=0.0,
        seed=0,
        reward_weights=None if kind == "tools" else [1.0, 0.5],
    )
    world = {"agent": Speaker(), "env": Letters} if kind == "tools" else {}
    seen: list[dict] = []
    with TRLRecorder(out / "run", **world) as tapes:
        rewards = [tapes.earned] if kind == "tools" else [tapes.reward(right), tapes.reward(brief)]
        trainer = GRPOTrainer(
            model=model,
            args=config,
            train_dataset=Dataset.from_list(data),
            processing_class=tokenizer,
            reward_funcs=rewards,
            rollout_func=tapes,
        )
        loss = trainer._compute_loss

        def watched(model, inputs):
            mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            step = trainer.state.global_step
            seen.extend(
                {
                    "step": step,
                    "trained": inputs["completion_ids"][k][mask[k].bool()].tolist(),
                    "ids": [
                        i
                        for part in ("prompt", "completion")
                        for i in inputs[f"{part}_ids"][k][inputs[f"{part}_mask"][k].bool()].tolist()
                    ],
                }
                for k in range(len(mask))
            )
            return loss(model, inputs)

        trainer._compute_loss = watched
        trainer.train()
    (out / "trained.json").write_text(json.dumps(seen))
    (out / "scores.json").write_text(json.dumps(SCORES))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
