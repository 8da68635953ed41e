"""LoRA adapters as a configuration describes them, and a model with fresh ones. Knows nothing of engines."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..tapes.config import Config
from ..tapes.errors import MissingExtra


class AdapterConfig(Config):
    """The LoRA adapters that are trained in place of the model's own weights."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    """The adapters' part is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get one, as `q_proj`; none given: all linear layers but the head."""


def add_adapters(model: Any, config: AdapterConfig, *, seed: int = 0) -> Any:
    """The model with fresh adapters, the same ones for a seed; they change nothing yet and are all that is trained.
    Without dropout, since what is trained must be what was sampled. MissingExtra."""
    try:
        import torch
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "peft", "lora", "training LoRA adapters") from error
    targets = list(config.targets) or "all-linear"
    wanted = LoraConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, bias="none",
                        target_modules=targets, task_type="CAUSAL_LM")  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, wanted)
