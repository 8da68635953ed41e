"""The simplest lean RL update without a library: logits of the agent's own positions only, and one cross-entropy."""

import torch
from update_case import CLIP, Case, apply, main, optimizer


def make(case: Case):
    model = case.model()
    optim = optimizer(model)
    ids = torch.from_numpy(case.ids())
    own = torch.from_numpy(case.own()).nonzero()[:, 0]
    token = ids[:, own].flatten()
    advantage = torch.from_numpy(case.advantages()).float().repeat_interleave(len(own))

    def update() -> float:
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, own - 1].flatten(0, 1)
        lp = -torch.nn.functional.cross_entropy(model.lm_head(hidden), token, reduction="none")
        ratio = (lp - case.old()).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        apply(model, optim, loss)
        return float(loss.detach())

    return update


if __name__ == "__main__":
    main(make)
