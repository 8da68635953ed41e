"""The setting `trainer`: where and how the weights of a policy are trained, whatever samples with them."""

from __future__ import annotations

from pydantic import Field

from ...agents.engines.embedded.pretrained import Attention, Dtype
from ...agents.engines.weights.weight_config import AdapterConfig
from ...tapes.common.config import Config


class TrainerConfig(Config):
    """Where and how a policy is trained. An embedded engine samples with a copy of the policy on the same device."""

    device: str = "auto"
    """Where the model is trained: `cpu`, `cuda`, `cuda:1` ...; `auto`: a GPU where torch finds one."""
    dtype: Dtype = "float32"
    """Of the model's weights. `bfloat16` is for a model that is trained by its adapters."""
    attention: Attention | None = None
    """The attention implementation in training; None: as transformers chooses. Sampling uses `sdpa` or `eager`."""
    lora: AdapterConfig | None = None
    """Train these adapters in place of the model's own weights. With servers, `engine.publish=lora` sends them."""
    threads: int = Field(default=1, ge=1)
    """Torch threads of the process; the largest number that a policy or an embedded engine asks for holds. One thread
    keeps its speed while other work runs on the machine."""
