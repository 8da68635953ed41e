"""The settings of LoRA adapters, and a function that adds new adapters to a model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import Field

from ....tapes.common.config import Config
from ....tapes.errors import MissingExtra

if TYPE_CHECKING:
    from peft import PeftMixedModel, PeftModel
    from transformers import PreTrainedModel


class AdapterConfig(Config):
    """The LoRA adapters that the trainer updates in place of the model's weights."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    """The output of an adapter is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers with an adapter, such as `q_proj`. If empty, all linear layers except the head have one."""


def add_adapters(model: PreTrainedModel, config: AdapterConfig, *, seed: int = 0) -> PeftModel | PeftMixedModel:
    """Return the model with new adapters, which are its only trainable weights. Equal seeds give equal adapters.

    New adapters don't change the model's output. They have no dropout, because the trainer must compute the log-probs
    of the model that sampled. Raises MissingExtra without torch or peft."""
    try:
        import torch
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "peft", "lora", "training LoRA adapters") from error
    targets = list(config.targets) or "all-linear"
    body = next(name for name, part in model.named_modules() if part is model.get_decoder())
    # A vision tower has layers with the same names as the language model's (q_proj). It gets no adapters.
    outside = rf"(?!{re.escape(body)}\.).*" if model.config.get_text_config() is not model.config else None
    wanted = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=targets,
        exclude_modules=outside,
        task_type="CAUSAL_LM",
    )
    # fork_rng restores the global generators, so the adapters don't change the caller's random numbers.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, wanted)
