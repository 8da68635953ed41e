"""TapeAgents' `rl_step` on samples per model call; run by its own Python (`episode_tokens.py --tapeagents PYTHON`).

Argument: a JSON file with the samples. Micro-batches of 4 samples of like length, padded, as its collator makes them;
every sample weighs the same, which with completions of one length is the mean over tokens.
"""

import json
import sys

import torch
from tapeagents.finetune.rl import RLConfig, rl_step
from update_case import CLIP, Case, measure, optimizer

MICRO = 4


def batch_of(samples: list[dict], old: float) -> dict[str, torch.Tensor]:
    width = max(len(sample["ids"]) for sample in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.int64)
    labels, mask, weight = torch.full_like(ids, -100), torch.zeros_like(ids), torch.zeros(len(samples), width)
    for i, sample in enumerate(samples):
        n = len(sample["ids"])
        ids[i, :n] = torch.tensor(sample["ids"])
        labels[i, sample["start"] : n] = ids[i, sample["start"] : n]
        mask[i, :n] = 1
        weight[i, :n] = sample["advantage"]
    logprobs = torch.full(ids.shape, old)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "rewards": weight,
        "advantages": weight,
        "old_logprobs": logprobs,
        "ref_logprobs": logprobs,
    }


def main(path: str) -> None:
    torch.set_num_threads(1)
    with open(path) as file:
        given = json.load(file)
    samples = sorted(given.pop("samples"), key=lambda sample: len(sample["ids"]))
    case = Case(**given)
    model = case.model()
    optim = optimizer(model)
    config = RLConfig(algo="grpo", epsilon=CLIP, kl_coef=0.0)

    def update() -> float:
        optim.zero_grad()
        total = 0.0
        for at in range(0, len(samples), MICRO):
            part = samples[at : at + MICRO]
            loss = rl_step(model, batch_of(part, case.old()), config)[0] * (len(part) / len(samples))
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        return total

    print(json.dumps(measure(update, case.reps)))


if __name__ == "__main__":
    main(sys.argv[1])
