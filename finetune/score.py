"""score: log-probs of own tokens under a model. The only place that sees prompts, padding and micro-batches.

Rows of like length are put side by side, padded on the right and cut behind their last own token. A causal model sees
nothing to its right, so that padding needs no mask and changes nothing; neither does what else is in the batch. (On a
CPU this is 1.6x faster than packing at 60 tokens a row, where block-diagonal attention costs the square of the pack.)
Hidden states are taken at own positions only, and the vocabulary is met in chunks (`head`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..tapes.errors import TapereelError
from . import head
from .rows import Row

MICRO_TOKENS = 2048
"""Tokens of a micro-batch, padding included: measured best for small models on one CPU thread, 1,000 to 4,000 alike."""


class UnsupportedModel(TapereelError, ValueError):
    """A model whose log-probs `score` can't compute exactly; names the part that is in the way."""


class Scores(NamedTuple):
    """What a model says of own tokens, in row order."""

    logprob: Tensor
    """(T,) log softmax(logits / temperature) of the token, float32 or wider."""
    entropy: Tensor | None
    """(T,) entropy of that distribution in nats; None unless asked for."""


@dataclass(frozen=True, slots=True)
class Micro:
    """Some rows as one padded batch."""

    ids: Tensor
    """(B, L) int64."""
    at: Tensor
    """(n,) int64 into the B * L positions: those that predict the tokens wanted."""
    token: Tensor
    """(n,) int64 the tokens wanted."""
    temperature: Tensor
    """(n,) float32."""
    index: Tensor
    """(n,) int64 their places in the stream of all rows."""
    there: Tensor
    """(B, L) bool: not padding."""


def plan(rows: Sequence[Row], *, live: Tensor | None = None, micro_tokens: int = MICRO_TOKENS) -> list[Micro]:
    """Micro-batches that together hold every own token once, or those of them that are `live` (T,) bool.

    Rows without such a token aren't in any. A row that is longer than `micro_tokens` is a micro-batch of its own.
    """
    start = np.concatenate([[0], np.cumsum([len(row.own) for row in rows])]).astype(np.int64)
    wanted = [np.arange(len(row.own)) for row in rows] if live is None else \
        [live[start[i]:start[i + 1]].numpy().nonzero()[0] for i in range(len(rows))]
    length = np.array([row.own[w[-1]] if len(w) else 0 for row, w in zip(rows, wanted, strict=True)], dtype=np.int64)
    order = [int(i) for i in np.argsort(length, kind="stable") if length[i]]
    micros: list[Micro] = []
    group: list[int] = []
    for i in order:
        if group and (len(group) + 1) * length[i] > micro_tokens:
            micros.append(_micro(rows, group, wanted, length, start))
            group = []
        group.append(i)
    if group:
        micros.append(_micro(rows, group, wanted, length, start))
    return micros


def _micro(rows: Sequence[Row], group: list[int], wanted: list[Any], length: Any, start: Any) -> Micro:
    width = int(length[group[-1]])
    ids = np.zeros((len(group), width), dtype=np.int64)
    at, token, temperature, index = [], [], [], []
    for j, i in enumerate(group):
        row, own = rows[i], rows[i].own[wanted[i]]
        ids[j, :length[i]] = row.input_ids[:length[i]]
        at.append(own + (j * width - 1))
        token.append(row.input_ids[own])
        temperature.append(row.temperature[wanted[i]])
        index.append(wanted[i] + start[i])
    return Micro(ids=torch.from_numpy(ids), at=_joined(at), token=_joined(token),
                 temperature=torch.from_numpy(np.concatenate(temperature)), index=_joined(index),
                 there=torch.from_numpy(np.arange(width) < length[group][:, None]))


def _joined(columns: list[Any]) -> Tensor:
    return torch.from_numpy(np.concatenate(columns)).long()


def forward(model: nn.Module, micro: Micro, *, entropy: bool = False, unit_temperature: bool = False) -> Scores:
    """Scores of a micro-batch's tokens, with gradient where it is enabled."""
    return read_out(model, states(parts(model)[0], micro), micro, entropy=entropy, unit_temperature=unit_temperature)


def read_out(model: nn.Module, hidden: Tensor, micro: Micro, *, entropy: bool = False,
             unit_temperature: bool = False) -> Scores:
    """Scores from hidden states (n, D) that `states` gave."""
    _, output = parts(model)
    temperature = torch.ones_like(micro.temperature) if unit_temperature else micro.temperature
    if not bool((temperature > 0).all()):
        raise ValueError("a token was sampled at temperature 0 (greedy): it has no distribution to score. Keep greedy "
                         "tapes out of RL data, or score with temperature 1")
    # Under autocast the body runs in the narrow dtype; the output layer and the softmax stay in that of the weights.
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = hidden.to(output.weight.dtype)
        return Scores(*head.log_probs(hidden, output.weight, output.bias, micro.token, temperature, entropy=entropy))


def states(body: nn.Module, micro: Micro) -> Tensor:
    """(n, D) the hidden states that predict the micro-batch's tokens."""
    device = next(body.parameters()).device
    hidden = body(input_ids=micro.ids.to(device), use_cache=False).last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, micro.at.to(device))


def score(model: nn.Module, rows: Sequence[Row], *, ref: bool = False, entropy: bool = False,
          unit_temperature: bool = False, micro_tokens: int = MICRO_TOKENS, live: Tensor | None = None) -> Scores:
    """Scores of all own tokens of `rows`, in row order, without gradient.

    ref: with the LoRA adapters of a peft model switched off. unit_temperature: T = 1 whatever was recorded.
    live: (T,) bool, the tokens wanted; the others are NaN.
    """
    n = sum(len(row.own) for row in rows)
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    lp = torch.full((n,), torch.nan, dtype=dtype)
    h = torch.full((n,), torch.nan, dtype=dtype) if entropy else None
    with torch.no_grad(), without_adapters(model) if ref else nullcontext():
        for micro in plan(rows, live=live, micro_tokens=micro_tokens):
            part = forward(model, micro, entropy=entropy, unit_temperature=unit_temperature)
            lp[micro.index] = part.logprob.to(lp.device)
            if h is not None and part.entropy is not None:
                h[micro.index] = part.entropy.to(h.device)
    return Scores(lp, h)


def parts(model: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """The body that gives hidden states, and the output layer. Refuses a head that does more than multiply."""
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    output = base.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise UnsupportedModel(f"the output layer of {type(base).__name__} is a {type(output).__name__}, not a Linear: "
                               "leave it out of the adapters' targets")
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = getattr(base.config, name, None)
        if value not in (None, 1, 1.0):
            raise UnsupportedModel(f"{type(base).__name__} changes its logits after the output layer ({name}={value}), "
                                   "which score doesn't know")
    return base.get_decoder(), output


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """A peft model as it was before its adapters: the reference that costs no second copy."""
    if not hasattr(model, "disable_adapter"):
        raise UnsupportedModel(f"{type(model).__name__} has no adapters to switch off: pass a reference model")
    with model.disable_adapter():  # type: ignore[operator]
        yield
