"""One RL update with TorchRL's `GRPOLoss`; run by its own Python (`rl_update.py --torchrl PYTHON`).

Tokens in, right-aligned padding not needed, the assistant's tokens by mask. Without the entropy bonus, which no other
implementation computes here; it would cost more. The wrapper asks for a tokenizer and uses its padding id only.
"""

import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, models
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss
from transformers import PreTrainedTokenizerFast
from update_case import CLIP, Case, apply, main, optimizer


def make(case: Case):
    model = case.model()
    optim = optimizer(model)
    words = Tokenizer(models.WordLevel({"<pad>": 0}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True, pad_model_input=True
    )
    loss_of = GRPOLoss(policy, clip_epsilon=CLIP, entropy_bonus=False, masking_strategy="rlhf")
    ids = torch.from_numpy(case.ids())
    own = torch.from_numpy(case.own()).expand(ids.shape)
    advantage = torch.from_numpy(case.advantages()).float()[:, None, None].expand(*ids.shape, 1)

    def update() -> float:
        batch = TensorDict(
            {
                "tokens": {"full": ids},
                "log_probs": {"full": torch.full(ids.shape, case.old())},
                "advantage": advantage,
                "masks": {"all_attention_mask": torch.ones_like(own), "all_assistant_mask": own.clone()},
            },
            batch_size=[case.rows],
        )
        loss = loss_of(batch).loss_objective
        apply(model, optim, loss)
        return float(loss.detach())

    return update


if __name__ == "__main__":
    main(make)
