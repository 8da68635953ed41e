"""Sequence parallelism (Ulysses): several ranks forward the same rows together, each a part of their tokens.

Outside attention, a rank holds 1/size of the tokens. Inside attention, the ranks exchange tokens for heads, so each
attends over whole rows with 1/size of the heads, and then they exchange back. Activations per rank shrink accordingly.

Sources: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv 2309.14509), and `ulysses.py` in verl. Deviations:

1. Packed rows are attended to one by one instead of through `cu_seqlens`, so torch's own attention suffices on CPU and
   GPU, and no mask over the whole pack is made.
2. Each rank computes the log-probs of its own tokens and the ranks add them up, so every rank of the group knows the
   loss of whole rows. The sum's backward pass gives each rank the gradient of its own tokens. So the gradient is summed
   over all ranks and never divided, while verl scales it by the degree.
3. Key and value heads are never repeated: the degree must divide them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn

from ...agents.engines.embedded.pretrained import read_config
from ...tapes.errors import UsageError


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: distributed.ProcessGroup) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # All ranks compute the same loss from the same sum. Adding up their gradients would count it several times.
        return grads[0], None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.contiguous()
        found = torch.empty_like(x)
        distributed.all_to_all_single(found, x, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None  # type: ignore[return-value]


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that forward the same rows together."""

    group: distributed.ProcessGroup
    size: int
    rank: int

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over these ranks. Its gradient goes to `x` on each rank, as if the loss, which all of
        them compute, was computed once."""
        return _Sum.apply(x, self.group)  # type: ignore[no-any-return]

    def exchange(self, x: Tensor) -> Tensor:
        """Send part k of dimension 1 to rank k, and join the parts that arrive along dimension 2, in order of ranks.

        With (B, heads, tokens of this rank, D), the result has this rank's heads and all tokens. With (B, all tokens,
        heads of this rank, D), it has this rank's tokens and all heads.
        """
        found: Tensor = _AllToAll.apply(x.unflatten(1, (self.size, -1)).movedim(1, 0), self.group)  # type: ignore[assignment]
        return found.movedim(0, 2).flatten(2, 3)


@dataclass(frozen=True)
class Together:
    """Tells the attention which ranks have the other parts of a micro-batch, and how long its packed rows are."""

    ranks: SequenceRanks
    lengths: Sequence[int]
    """Lengths of the packed rows, in order. Their sum is the number of tokens on all ranks."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    together: Together | None = None,
    sliding_window: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Return the output (B, tokens, heads, D) of an attention layer, in the form that transformers' registry expects.

    With `together`, tokens and heads are exchanged, and the mask is ignored, because it only knows this rank's tokens.
    Each packed row is causal instead. Without it, this is transformers' `sdpa`, for example in a sampling engine.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    sdpa: Any = sdpa_attention_forward
    if together is None:
        return sdpa(module, query, key, value, attention_mask, sliding_window=sliding_window, **options)
    whole = [together.ranks.exchange(x).split(list(together.lengths), 2) for x in (query, key, value)]
    found = []
    for q, k, v in zip(*whole, strict=True):
        mask, n = None, q.shape[2]
        if sliding_window is not None and sliding_window < n:
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril().triu(1 - sliding_window)
        found.append(sdpa(module, q, k, v, mask, **options)[0])
    return together.ranks.exchange(torch.cat(found, 1)), None


def register() -> None:
    """Make `attend` the `sdpa` of all transformers models in this process."""
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa", attend)


def check_model(folder: str, degree: int) -> None:
    """Raise UsageError unless `degree` ranks can share the attention of the model in `folder`, or of the base model of
    the adapters there. Only its configuration is read."""
    from transformers.models.auto import modeling_auto as known

    def refuse(why: str) -> NoReturn:
        raise UsageError(
            f"processes.sequence_parallel={degree} doesn't fit the model in {folder}: {why}; set another degree, or 1"
        )

    config: Any = read_config(folder)
    text: Any = config.get_text_config()
    both: Any = (known.MODEL_FOR_CAUSAL_LM_MAPPING, known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    kind = both[0].get(type(config), None) or both[1].get(type(config), None)
    layers = sorted({*(getattr(text, "layer_types", None) or ())} - {"full_attention", "sliding_attention"})
    rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    ropes = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    if layers or kind is None or kind._is_stateful:
        refuse(f"it has layers without plain attention ({', '.join(layers) or config.model_type})")
    if not (kind._supports_sdpa and kind._supports_attention_backend):
        refuse(f"transformers can't replace the attention of {kind.__name__}")
    if ropes & {"dynamic", "longrope"}:
        refuse("its rotary frequencies depend on the length of a row, and a rank knows only a part of it")
    heads = text.num_attention_heads
    for what, count in (("attention", heads), ("key/value", getattr(text, "num_key_value_heads", None) or heads)):
        if count % degree:
            refuse(f"it has {count} {what} heads, which {degree} ranks can't share evenly")
