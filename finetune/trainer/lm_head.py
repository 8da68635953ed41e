"""The output layer of a language model, which computes log-probs in chunks and has its own backward pass.

Only one chunk of the (tokens x vocabulary) logits is in memory at a time, because the logits of a batch would need more
memory than the model. z = h W^T / T, lp = z[token] - logsumexp z, H = logsumexp z - sum softmax(z) z.

`loss_in_one_pass` computes everything about a chunk at once: logits, log-probs, loss and gradient. The loss must be a
sum over tokens, and a token's part of it may depend only on the token's own log-prob. `log_probs` works with any loss,
but its backward pass computes each chunk again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CHUNK = 1 << 22
"""Number of logits in memory at a time, which is 16 MiB in float32."""
CHUNK_ROWS = 55
"""Least number of tokens in a chunk. Every chunk reads and writes the whole gradient of the weight, so a large
vocabulary needs larger chunks: with 152,000 ids, an update with at least 55 rows took 0.84 of the CPU time."""
BARRED = -1e9
"""Logit of a token that couldn't be sampled. It is finite, because 0 * inf would be NaN in the entropy."""

TokenLoss = Callable[[Tensor, slice | Tensor], Tensor]
"""Returns the loss () of some tokens of the batch, given their log-probs (n,), with gradient. The tokens are a slice
or have these indices."""


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
                _add_product(grad_weight, grad, hidden[at])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token: Tensor,
        temperature: Tensor | None,
        barred: Tensor | None,
        loss: TokenLoss,
    ) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(hidden.dtype, torch.float32)
        lp = torch.empty(len(token), dtype=exact, device=hidden.device)
        total = lp.new_zeros(())
        # The dtypes and their reasons are the same as in _LogProbs.
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        chunks = _chunks(len(token), len(weight))
        # All chunks use the same memory. Otherwise two of them would be in memory at a time.
        room = hidden.new_empty(chunks[0].stop if chunks else 0, len(weight))
        for at in chunks:
            z = _logits((hidden, weight, bias, temperature, barred), at, exact, room[: at.stop - at.start])
            chosen, top = z.gather(1, token[at, None]), z.amax(-1, keepdim=True)
            mass = z.sub_(top).exp_().sum(-1, keepdim=True)
            lp[at] = (chosen - (mass.log() + top))[:, 0]
            with torch.enable_grad():
                own = lp[at].clone().requires_grad_()
                part = loss(own, at)
                (slope,) = torch.autograd.grad(part, own) if part.requires_grad else (torch.zeros_like(own),)
            total += part.detach().to(total.device)
            if temperature is not None:
                slope = slope / temperature[at]
            # d lp / dz = 1[token] - softmax
            grad = z.mul_(-slope[:, None] / mass).scatter_add_(1, token[at, None], slope[:, None])
            if grad_bias is not None:
                grad_bias += grad.sum(0).to(grad_bias.dtype)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[at] = grad @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad, hidden[at])
        ctx.grads = grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), grad_bias
        ctx.mark_non_differentiable(lp)
        return lp, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd would copy a gradient that `ctx` still refers to.
        found, ctx.grads = ctx.grads, None
        scale = float(grads[1])
        return *(g if g is None or scale == 1 else g * scale for g in found), None, None, None, None


def _chunks(n: int, vocabulary: int) -> list[slice]:
    size = max(CHUNK_ROWS, CHUNK // vocabulary)
    return [slice(at, min(at + size, n)) for at in range(0, n, size)]


def _add_product(grad_weight: Tensor, grad: Tensor, hidden: Tensor) -> None:
    """Add grad^T hidden to the weight's gradient, in place if possible. A temporary of the weight's size costs more
    than the product itself."""
    if grad.dtype == grad_weight.dtype:
        grad_weight.addmm_(grad.t(), hidden)
    else:
        grad_weight += grad.t() @ hidden


def _logits(of: tuple[Any, ...], at: slice, dtype: torch.dtype, room: Tensor | None = None) -> Tensor:
    """Return the logits of a chunk. With `room`, the matrix product is written there."""
    hidden, weight, bias, temperature, barred = of
    inputs = hidden[at], weight.t()
    z = torch.mm(*inputs, out=room) if bias is None else torch.addmm(bias, *inputs, out=room)
    z = z.to(dtype)
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
    lp, h = _LogProbs.apply(hidden, weight, bias, *_placed(hidden, token, temperature, barred), entropy)  # type: ignore[misc]
    return lp, h if entropy else None


def loss_in_one_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token: Tensor,
    temperature: Tensor,
    loss: TokenLoss,
    *,
    barred: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs (n,) of the tokens, without gradient, and the sum () of `loss` over all chunks, with
    gradient.

    The gradient is computed now, chunk by chunk, so a token's loss must not depend on other tokens. The other arguments
    are the same as in `log_probs`.
    """
    return _Loss.apply(hidden, weight, bias, *_placed(hidden, token, temperature, barred), loss)  # type: ignore[misc]


def _placed(
    hidden: Tensor, token: Tensor, temperature: Tensor, barred: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the tokens, temperatures and barred ids on the device of `hidden`. The temperatures are None if all are
    1."""
    exact = torch.promote_types(hidden.dtype, torch.float32)
    scale = None if bool((temperature == 1).all()) else temperature.to(hidden.device, exact)
    return token.to(hidden.device), scale, None if barred is None else barred.to(hidden.device)
