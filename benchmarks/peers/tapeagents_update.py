"""One RL update with TapeAgents' `rl_step`; run by its own Python (`rl_update.py --tapeagents PYTHON`)."""

import torch
from tapeagents.finetune.rl import RLConfig, rl_step
from update_case import CLIP, Case, apply, main, optimizer


def make(case: Case):
    model = case.model()
    optim = optimizer(model)
    ids = torch.from_numpy(case.ids())
    own = torch.from_numpy(case.own())
    per_token = [torch.from_numpy(x).float()[:, None].expand(ids.shape) for x in (case.rewards(), case.advantages())]
    old = torch.full(ids.shape, case.old())
    config = RLConfig(algo="grpo", epsilon=CLIP, kl_coef=0.0)

    def update() -> float:
        # `rl_step` takes two of the columns out of the batch that it is given.
        batch = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "labels": torch.where(own, ids, -100),
            "rewards": per_token[0],
            "advantages": per_token[1],
            "old_logprobs": old,
            "ref_logprobs": old,
        }
        loss, _ = rl_step(model, batch, config)
        apply(model, optim, loss)
        return float(loss.detach())

    return update


if __name__ == "__main__":
    main(make)
