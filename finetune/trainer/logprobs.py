"""Log-probs of own tokens under a model. Only this module and `micro_batches` deal with prompts and padding.

Logits are computed only for own tokens, and in chunks (`lm_head`). A long prompt that all rows of a group share is
forwarded once. All these rows use its keys and values, and their gradient flows back through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...agents.vision.vision import Vision, body_inputs, whole_model
from ...tapes.errors import TapereelError
from ..data.rows import Row
from ..objective import Score
from . import lm_head as head
from .micro_batches import MICRO_TOKENS, Micro, plan
from .ranks import Ranks

__all__ = ["MICRO_TOKENS", "Micro", "Scores", "UnsupportedModel", "forward", "plan", "score"]


class UnsupportedModel(TapereelError, ValueError):
    """Raised for a model whose log-probs `score` can't compute exactly. The message names the part of the model that
    prevents it."""


_Inputs = dict[str, Tensor | list[Tensor]]
RECORDED = Score()
"""Scores at the recorded temperatures, with the dtype of the weights."""


class Scores(NamedTuple):
    """Log-probs and entropies of own tokens under a model, in row order."""

    logprob: Tensor
    """(T,) log softmax(logits / temperature) of the token, float32 or wider."""
    entropy: Tensor | None
    """(T,) entropy of softmax(logits / temperature) in nats, or None if it wasn't requested."""
    loss: Tensor | None = None
    """() loss of the tokens, with gradient, if it was computed together with the log-probs. These then have no
    gradient."""


def forward(model: nn.Module, micro: Micro, how: Score = RECORDED, *, entropy: bool = False) -> Scores:
    """Return the scores of a micro-batch's tokens, with gradient if gradients are enabled."""
    return read_out(model, states(parts(model)[0], micro, model), micro, how, entropy=entropy)


def read_out(
    model: nn.Module,
    hidden: Tensor,
    micro: Micro,
    how: Score,
    *,
    entropy: bool = False,
    loss: head.TokenLoss | None = None,
) -> Scores:
    """Return the scores of the micro-batch's tokens, from the hidden states (n, D) that predict them (see `states`).
    If several ranks forward the micro-batch, each has the hidden states of its own tokens, and gets all scores.

    With `loss`, the loss and its gradient are computed together with the log-probs, but only on a CPU and without
    `entropy`. On a GPU, every chunk would have to wait for the loss, which is computed on the CPU.
    """
    _, output = parts(model)
    own, mine = micro.own, micro.mine
    temperature = torch.ones_like(own.temperature) if how.temperature == "one" else own.temperature
    if not bool((temperature > 0).all()):
        raise ValueError(
            "a token was sampled at temperature 0 (greedy): it has no distribution to score. Keep greedy "
            "tapes out of RL data, or score with temperature 1"
        )
    # Under autocast the body runs in the narrow dtype. The output layer and the softmax keep the weights' dtype or a
    # wider one.
    with torch.autocast(hidden.device.type, enabled=False):
        wide = how.head == "float32"
        dtype = torch.promote_types(output.weight.dtype, torch.float32) if wide else output.weight.dtype
        weight, bias = output.weight.to(dtype), None if output.bias is None else output.bias.to(dtype)
        # With `temperature = one`, the model's own distribution is scored, including the ids that the sampler excluded.
        barred = None if how.temperature == "one" else own.barred
        inputs = hidden.to(dtype), weight, bias, own.token, temperature
        if loss is None or entropy or hidden.device.type != "cpu":
            lp, h = head.log_probs(*inputs, entropy=entropy, barred=barred)
            return Scores(micro.joined(lp), None if h is None else micro.joined(h))
        lp, total = head.loss_in_one_pass(*inputs, lambda lp, at: loss(lp, mine[at]), barred=barred)
        return Scores(micro.joined(lp), None, micro.add_up(total))


def states(body: nn.Module, micro: Micro, model: nn.Module) -> Tensor:
    """Return the hidden states (n, D) that predict the micro-batch's tokens, or this rank's of them if several ranks
    forward it. `model` computes the features of the pictures."""
    own = micro.own
    prefix, rest = inputs(body, own, model)
    if prefix is None:
        # The call has no mask and no cache. If rows are packed, restarting indices show the model where each row ends.
        hidden = body(**rest, **micro.together, use_cache=False).last_hidden_state
    else:
        # The repeated cache keeps its graph, so the gradients of all rows add up in the one prefix.
        cache = body(**prefix, use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(micro.ids))
        hidden = body(**rest, past_key_values=cache, use_cache=True).last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, own.at.to(hidden.device))


def inputs(body: nn.Module, micro: Micro, model: nn.Module) -> tuple[_Inputs | None, _Inputs]:
    """Return the body's arguments for the prefix that the rows share, and for the rest of each row."""
    device, embed = next(body.parameters()).device, cast(Any, body).get_input_embeddings()
    features = None if micro.pictures is None else micro.pictures.features(model)

    def of(ids: Tensor, rows: slice, columns: slice, packed: Tensor | None) -> _Inputs:
        where = None if micro.pictures is None else micro.pictures.where[rows, columns].to(device)
        positions = None if micro.positions is None else micro.positions[:, rows, columns].to(device)
        return body_inputs(embed, ids.to(device), where, features, positions, packed)

    packed = None if micro.packed is None else micro.packed.to(device)
    if micro.prefix is None:
        return None, of(micro.ids, slice(None), slice(None), packed)
    n = len(micro.prefix)
    return of(micro.prefix[None], slice(1), slice(n), None), of(micro.ids, slice(None), slice(n, None), packed)


def reaching(hidden: Tensor, modules: Sequence[nn.Module]) -> Tensor:
    """Return `hidden` with the same values, but connected to every trained weight of `modules` with a gradient of 0.

    Otherwise the weights of a vision tower would have a gradient only if a micro-batch has a picture. Ranks with and
    without a picture would then sum different sets of gradients, and wait for each other until the time limit.
    """
    weights = dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
    if not weights or not torch.is_grad_enabled():
        return hidden
    return hidden + torch.stack([p.flatten()[:0].sum() for p in weights]).sum().to(hidden.dtype)


def score(
    model: nn.Module,
    rows: Sequence[Row],
    how: Score = RECORDED,
    *,
    entropy: bool = False,
    micro_tokens: int = MICRO_TOKENS,
    live: Tensor | None = None,
    ranks: Ranks | None = None,
    pack: bool = False,
    vision: Vision | None = None,
) -> Scores:
    """Return the scores of all own tokens of `rows`, in row order, without gradient.

    `live` (T,) bool marks the tokens that are scored. The scores of the others are NaN. `ranks` are the processes that
    score rows at the same time. For `pack` and `vision`, see `plan`.
    """
    ranks = ranks or Ranks()
    found = _blank(model, sum(len(row.own) for row in rows), entropy)
    with torch.no_grad():
        # Ranks that forward together must make the same passes, and each rank's groups would give others.
        share = shares_prefixes(model) and not ranks.joint
        micros = plan(rows, live=live, micro_tokens=micro_tokens, share=share, pack=pack, vision=vision)
        for micro in ranks.rounds(micros):
            _put(found, micro, ranks.run(model, partial(forward, model, micro, how, entropy=entropy)))
    return found


def score_ahead(
    model: nn.Module, micros: Sequence[Micro], n: int, how: Score, *, entropy: bool, most: int
) -> tuple[Scores, list[Tensor]]:
    """Return the scores (n,) of the micro-batches' tokens without gradient, and the hidden states (`states`) of the
    first micro-batches with gradient, so that these needn't be computed again. They have at most `most` tokens
    together, because their activations stay in memory."""
    found, kept, body = _blank(model, n, entropy), list[Tensor](), parts(model)[0]
    for micro in micros:
        most -= micro.tokens if micro.pictures is None else most + 1
        with torch.set_grad_enabled(most >= 0):
            hidden = states(body, micro, model)
        if most >= 0:
            kept.append(hidden)
        with torch.no_grad():
            _put(found, micro, read_out(model, hidden, micro, how, entropy=entropy))
    return found, kept


def _blank(model: nn.Module, n: int, entropy: bool) -> Scores:
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    lp = torch.full((n,), torch.nan, dtype=dtype)
    return Scores(lp, lp.clone() if entropy else None)


def _put(found: Scores, micro: Micro, part: Scores) -> None:
    found.logprob[micro.index] = part.logprob.to(found.logprob.device)
    if found.entropy is not None and part.entropy is not None:
        found.entropy[micro.index] = part.entropy.to(found.entropy.device)


def parts(model: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """Return the body of a model, which computes hidden states, and its output layer.

    Raises UnsupportedModel if the logits aren't just the output of a linear layer, for example if they are scaled.
    Log-probs that are computed here would then differ from the sampling engine's.
    """
    base: Any = whole_model(model)
    output = base.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise UnsupportedModel(
            f"the output layer of {type(base).__name__} is a {type(output).__name__}, not a Linear: "
            "remove it from the targets of the adapters"
        )
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(base.config.get_text_config(), name, None)
        if value not in (None, 1, 1.0):
            raise UnsupportedModel(
                f"{type(base).__name__} changes its logits after the output layer ({name}={value}), "
                "which the log-probs here leave out: use a model without it"
            )
    return base.get_decoder(), output


def vocabulary_of(model: nn.Module) -> int:
    """Return the number of token ids that the model has."""
    return parts(model)[1].out_features


def shares_prefixes(model: nn.Module) -> bool:
    """Return True if several rows can use the keys and values of one prefix. This requires a model with full attention,
    and no gradient checkpointing, which would compute the cache twice."""
    base: Any = whole_model(model)
    config = base.config.get_text_config()  # for a vision model, that of its language part
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    plain = set(kinds) == {"full_attention"} and not getattr(config, "sliding_window", None)
    return plain and not (base.training and getattr(base, f"is_{_checkpointing(base)}"))


def packs(model: nn.Module) -> bool:
    """Return True if the model runs a variable-length attention kernel on a GPU. Its rows are then packed instead of
    padded."""
    base: Any = whole_model(model)
    kind = str(getattr(base.config, "_attn_implementation", None))
    return "flash" in kind and next(base.parameters()).device.type == "cuda"


def casting(model: nn.Module, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return a context in which the model's body runs in `dtype`, or in the dtype of its weights if `dtype` is None."""
    return nullcontext() if dtype is None else torch.autocast(next(model.parameters()).device.type, dtype)


def be_still(model: nn.Module, *, checkpointing: bool) -> None:
    """Switch dropout off, because the trained distribution must be the one that was sampled from.

    Raises UnsupportedModel if `checkpointing` is True and the model has dropout, because gradient checkpointing needs
    the training mode.
    """
    if not checkpointing:
        model.eval()
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and module.p:
            raise UnsupportedModel(
                f"gradient checkpointing runs the model in training mode, where {name} drops "
                f"{module.p:.0%} of its inputs at random: set its dropout to 0"
            )
    model.train()
    name = _checkpointing(model)
    getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})


def _checkpointing(model: nn.Module) -> str:
    """Return transformers' name for gradient checkpointing. Since 5.22, the older of the two names raises a warning."""
    return "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
