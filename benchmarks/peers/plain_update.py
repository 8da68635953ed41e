"""One RL update without a library: logits of every position, log_softmax, gather, clipped loss, backward."""

import torch
from update_case import CLIP, Case, apply, main, optimizer


def make(case: Case):
    model = case.model()
    optim = optimizer(model)
    ids = torch.from_numpy(case.ids())
    own = torch.from_numpy(case.own()).nonzero()[:, 0]
    advantage = torch.from_numpy(case.advantages()).float()[:, None]

    def update() -> float:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        lp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0][:, own - 1]
        ratio = (lp - case.old()).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
        apply(model, optim, loss)
        return float(loss.detach())

    return update


if __name__ == "__main__":
    main(make)
