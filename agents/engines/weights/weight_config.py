"""The settings of LoRA adapters, and a function that adds new adapters to a model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ....tapes.common.config import Config
from ....tapes.errors import MissingExtra, UsageError, remedy

if TYPE_CHECKING:
    from peft import PeftMixedModel, PeftModel
    from transformers import PreTrainedModel


class AdapterConfig(Config):
    """Settings of the LoRA adapters that are trained instead of the model's own weights."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    """An adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of layers that get an adapter, such as `q_proj`. If empty, all linear layers except the head get one."""
    quantise: Literal["nf4"] | None = None
    """`nf4` holds the frozen weights of all linear layers except the head in 4 bits (QLoRA, bitsandbytes). They compute
    in the trainer's dtype. None keeps them in it."""


def add_adapters(model: PreTrainedModel, config: AdapterConfig, *, seed: int = 0) -> PeftModel | PeftMixedModel:
    """Return the model with new adapters as its only trainable weights. Equal seeds give equal adapters.

    New adapters don't change the model's output. They have no dropout, because the trainer would otherwise compute
    other log-probs than the model that sampled. Raises UsageError if the model lacks a target, and MissingExtra
    without torch or peft."""
    try:
        import torch
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "peft", "lora", "training LoRA adapters") from error
    targets = list(config.targets) or "all-linear"
    body = next(name for name, part in model.named_modules() if part is model.get_decoder())
    # Only the language model gets adapters, but a vision tower has layers with the same names, such as q_proj.
    outside = rf"(?!{re.escape(body)}\.).*" if model.config.get_text_config() is not model.config else None
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    names = [
        name
        for name, part in model.named_modules()
        if getattr(getattr(part, "weight", None), "ndim", 0) == 2
        and not (part is head and part.weight is table.weight)  # tied weights can't have an adapter at one end only
        and (outside is None or name.startswith(f"{body}."))
    ]
    if unknown := [t for t in config.targets if not any(f".{name}".endswith(f".{t}") for name in names)]:
        raise UsageError(
            f"{remedy('targets', 'targets')}: {', '.join(unknown)} names no layer that can have an adapter. Take "
            f"some of {', '.join(sorted({name.rpartition('.')[2] for name in names}))}, or leave it empty for all "
            "linear layers"
        )
    wanted = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=targets,
        exclude_modules=outside,
        task_type="CAUSAL_LM",
    )
    # fork_rng restores the global generators afterwards, so the caller's random numbers don't change.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, wanted)
