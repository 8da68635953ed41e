"""The load-balancing loss of a mixture-of-experts model over a whole optimiser batch.

This loss keeps the experts evenly used. A recipe with the regulariser `aux` adds it to each loss that trains a router:
over rollouts, over demonstrations, and for a critic with its own body.

    aux = E sum_e f_e P_e,  f_e = assignments to expert e / rows,  P_e = mean router probability of expert e

Rows are (token, layer) pairs without padding. f and the number of rows are first counted over the whole batch, so the
losses of micro-batches and ranks add up exactly to the loss of the whole batch. f carries no gradient.

Source: Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961), as in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .logprobs import Micro, UnsupportedModel, inputs


@dataclass(frozen=True)
class Load:
    """How the tokens of a batch were assigned to experts."""

    share: Tensor
    """(E,) f, the number of assignments to each expert, divided by the number of rows. The sum over all experts is the
    number of experts that each token gets."""
    rows: float
    """Number of (token, layer) pairs in the whole batch."""

    def loss(self, probabilities: Tensor) -> Tensor:
        """Return the contribution of some rows to the loss. `probabilities` (E,) is the sum of the router probabilities
        over these rows."""
        return len(self.share) * (self.share.to(probabilities.dtype) * probabilities).sum() / self.rows


def routed(body: nn.Module, micro: Micro, model: nn.Module) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the hidden states (n, D) that predict the micro-batch's tokens to score, and each layer's router logits
    for all tokens except padding. If several ranks forward it, these are this rank's. For `model`, see `states`."""
    own = micro.own
    _, rest = inputs(body, own, model)
    out = body(**rest, **micro.together, use_cache=False, output_router_logits=True)
    hidden, logits = out.last_hidden_state, out.router_logits
    there = own.there.reshape(-1).to(hidden.device)
    at = own.at.to(hidden.device)
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, at), tuple(layer[there] for layer in logits)


def probabilities(logits: Sequence[Tensor], micro: Micro) -> Tensor:
    """Return the routers' probabilities (E,), summed over all layers and tokens of the micro-batch. `logits` are this
    rank's."""
    exact = [layer.to(torch.promote_types(layer.dtype, torch.float32)) for layer in logits]
    return micro.add_up(torch.stack([layer.softmax(-1).sum(0) for layer in exact]).sum(0))


@torch.no_grad()
def load(body: nn.Module, micros: Sequence[Micro], add_up: Callable[[Tensor], Tensor], model: nn.Module) -> Load:
    """Count how the tokens of all micro-batches on all ranks are assigned to experts. This takes an extra forward
    pass."""
    config: Any = body.config
    k = getattr(config, "num_experts_per_tok", None)
    if k is None:
        raise UnsupportedModel(
            f"{type(body).__name__} has no experts to balance: remove the `aux` regulariser from the recipe"
        )
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    # float64 counts are exact up to 2^53, but float32 would lose single assignments above 2^24.
    counts = torch.zeros(experts + 1, dtype=torch.float64)
    for micro in micros:
        _, logits = routed(body, micro, model)
        own = torch.zeros_like(counts)
        for layer in logits:
            chosen = layer.topk(k, dim=-1).indices.flatten().cpu()
            own[:-1] += torch.bincount(chosen, minlength=experts)
            own[-1] += len(layer)
        counts += micro.add_up(own)
    counts = add_up(counts)
    return Load(share=counts[:-1] / counts[-1], rows=float(counts[-1]))
