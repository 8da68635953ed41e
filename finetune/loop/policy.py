"""A policy: a model that a run trains, and everything that goes with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...agents.engines.embedded.embedded_engine import EmbeddedEngine
from ...agents.engines.embedded.pretrained import Attention
from ...agents.engines.engine import TrainableEngine
from ...agents.rendering.renderer import Renderer
from ...agents.vision.vision import Vision
from ..trainer.distributed import Processes


@dataclass(kw_only=True)
class Policy:
    """A model that is trained. It owns the weights, and knows how text and pictures become tokens for them. It makes
    the trainers and the engines. Updates change the weights in place."""

    weights: Processes
    """The weights, and the processes that hold and train them."""
    renderer: Renderer
    tokenizer: Any = None
    """Saved in checkpoints, next to the weights."""
    autocast: torch.dtype | None = None
    """The dtype of the body's forward pass, in training and in embedded engines. None means the dtype of the
    weights."""
    keep: int | None = 3
    """Number of checkpoints to keep (see `prune`)."""
    slots: int = 64
    capacity: int | None = None
    attention: Attention | None = None
    """The model's attention implementation in training, or None if transformers chose it."""
    servers: Callable[[], Awaitable[TrainableEngine]] | None = None
    """Connects to the servers that sample for the loop. None means that an embedded engine samples."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained."""
        return self.weights.model

    @property
    def vision(self) -> Vision | None:
        """How the model reads pictures, or None if it reads only text."""
        pictures = self.renderer.pictures
        return pictures if isinstance(pictures, Vision) else None

    @property
    def sees(self) -> bool:
        """Whether the model's engines accept pictures."""
        return self.vision is not None

    def copy(self, version: str) -> EmbeddedEngine:
        """Return an engine with a copy of the current weights, named `version`. Because it is a copy, the trainer can
        change the model while the engine samples."""
        model: Any = self.weights.whole()
        if sampling_attention(self.attention) != self.attention:
            model.set_attn_implementation(sampling_attention(self.attention))
        return EmbeddedEngine(
            model,
            self.renderer,
            version=version,
            slots=self.slots,
            capacity=self.capacity,
            copy=False,
            autocast=self.autocast,
        )

    async def sampler(self, version: str) -> TrainableEngine:
        """Return the engine that samples for the loop, with the current weights."""
        if self.servers is None:
            return self.copy(version)
        engine = await self.servers()
        try:
            # Servers that outlived a stopped run may have its weights already, and sending them takes minutes.
            if engine.version != version:
                await engine.sync_weights(self.weights.weights(copied=True), version)
        except BaseException:
            await engine.close()
            raise
        return engine


def sampling_attention(attention: Attention | None) -> Attention | None:
    """Return the attention implementation for sampling in an embedded engine, if `attention` is used for training."""
    return attention if attention in (None, "eager") else "sdpa"
