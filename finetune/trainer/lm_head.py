"""The output layer of a language model, which computes log-probs in chunks and has its own backward pass.

Only one chunk of the (tokens x vocabulary) logits is in memory at a time. The backward pass computes each chunk again,
because storing the logits of a batch would need more memory than the model. z = h W^T / T, lp = z[token] - logsumexp z,
H = logsumexp z - sum softmax(z) z.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Number of logits in memory at a time, which is 16 MiB in float32."""
BARRED = -1e9
"""Logit of a token that couldn't be sampled. It is finite, because 0 * inf would be NaN in the entropy."""


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor,
        temperature: Tensor | None,
        barred: Tensor | None,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        # The softmax is in float32 at least: in bfloat16, a log-prob near 0 has an error as large as PPO's clip range.
        exact = torch.promote_types(hidden.dtype, torch.float32)
        n = len(token)
        lse = torch.empty(n, dtype=exact, device=hidden.device)
        lp = torch.empty_like(lse)
        entropy = torch.empty_like(lse) if want_entropy else lse.new_empty(0)
        for at in _chunks(n, len(weight)):
            z = _logits((hidden, weight, bias, temperature, barred), at, exact)
            lse[at] = z.logsumexp(-1)
            lp[at] = z.gather(1, token[at, None])[:, 0] - lse[at]
            if want_entropy:
                entropy[at] = lse[at] - ((z - lse[at, None]).exp() * z).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, token, temperature, barred, lse, entropy)
        ctx.want_entropy = want_entropy
        return lp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_lp, grad_entropy = grads
        hidden, weight, bias, token, temperature, barred, lse, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # The weight's gradient is summed over chunks in float32. In bfloat16, a late chunk would be rounded away.
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for at in _chunks(len(token), len(weight)):
            z = _logits((hidden, weight, bias, temperature, barred), at, lse.dtype).sub_(lse[at, None])
            grad = z.exp()  # softmax, since z has its logsumexp subtracted
            # d lp / dz = 1[token] - softmax;  d H / dz = -softmax (log softmax + H)
            if ctx.want_entropy:
                pull = (grad_entropy[at, None] * (z + entropy[at, None])).add_(grad_lp[at, None])
                grad.mul_(pull).neg_()
            else:
                grad.mul_(-grad_lp[at, None])
            grad.scatter_add_(1, token[at, None], grad_lp[at, None])
            if temperature is not None:
                grad.div_(temperature[at, None])
            if grad_bias is not None:
                grad_bias += grad.sum(0).to(grad_bias.dtype)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[at] = grad @ weight
            if grad_weight is not None:
                # This is done in place if possible, because a temporary of the weight's size costs more than the
                # product itself.
                if grad.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad.t(), hidden[at])
                else:
                    grad_weight += grad.t() @ hidden[at]
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _chunks(n: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK // vocabulary)
    return [slice(at, min(at + size, n)) for at in range(0, n, size)]


def _logits(of: tuple[Any, ...], at: slice, dtype: torch.dtype) -> Tensor:
    hidden, weight, bias, temperature, barred = of
    z = torch.nn.functional.linear(hidden[at], weight, bias).to(dtype)
    if temperature is not None:
        z.div_(temperature[at, None])
    if barred is not None:
        here, id = barred[:, (barred[0] >= at.start) & (barred[0] < at.stop)]
        z[here - at.start, id] = BARRED
    return z


def log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token: Tensor,
    temperature: Tensor,
    *,
    entropy: bool = False,
    barred: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probs (n,) of the tokens, and the entropies (n,) of their distributions or None without `entropy`.
    Both are in float32 or wider.

    The inputs are `hidden` (n, D), the output layer's `weight` (V, D) and `bias` (V,), the ids `token` (n,), and
    `temperature` (n,), which must be positive. For `barred`, see `Micro`.
    """
    exact = torch.promote_types(hidden.dtype, torch.float32)
    scale = None if bool((temperature == 1).all()) else temperature.to(hidden.device, exact)
    barred = None if barred is None else barred.to(hidden.device)
    lp, h = _LogProbs.apply(hidden, weight, bias, token.to(hidden.device), scale, barred, entropy)  # type: ignore[misc]
    return lp, h if entropy else None
