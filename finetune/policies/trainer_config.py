"""The setting `trainer`: where and how the weights of a policy are trained, whatever samples with them."""

from __future__ import annotations

from ...agents.engines.embedded.pretrained import Attention
from ...agents.engines.weights.weight_config import AdapterConfig
from ...agents.setup.engine_config import ComputeConfig


class TrainerConfig(ComputeConfig):
    """Where and how a policy is trained. An embedded engine samples with a copy of the policy on the same device."""

    attention: Attention | None = None
    """The attention implementation in training; None: as transformers chooses. Sampling uses `sdpa` or `eager`."""
    lora: AdapterConfig | None = None
    """Train these adapters in place of the model's own weights. With servers, `engine.publish=lora` sends them."""
