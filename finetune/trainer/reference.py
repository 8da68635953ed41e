"""The models that a recipe compares the policy with: the reference and the teacher. Both are frozen while they score.

A reference that is the policy at another moment keeps only the trainable weights of that moment. They take the place of
the policy's while it scores, so full weights, adapters and shards are one case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypedDict

import torch
from torch import Tensor, nn

from ...agents.engines.embedded.pretrained import weights_digest
from ..data.stream import BadBatch
from .ranks import Ranks


class ReferenceState(TypedDict):
    """What a checkpoint holds of a reference."""

    weights: dict[str, Tensor]
    """Whole, also where they are sharded."""
    updates: int
    """Updates of the policy since the reference was made."""


class OtherModel:
    """A model beside the policy, with the same token ids."""

    def __init__(self, model: nn.Module, name: str = "another model") -> None:
        self.model, self.name = model.eval(), name
        self.digest = weights_digest(model.state_dict())

    def __str__(self) -> str:
        return f"{self.name} sha256:{self.digest}"

    @property
    def fixed(self) -> bool:
        """True if it has the same weights in all updates."""
        return True

    def scoring(self) -> AbstractContextManager[nn.Module]:
        """The model to score with, inside."""
        return nullcontext(self.model)

    def end_update(self) -> None:
        """Called after each update of the policy, which doesn't change this model."""

    def state_dict(self) -> ReferenceState | None:
        """What a checkpoint needs; None where the configuration alone gives the model again."""
        return None

    def load_state_dict(self, state: ReferenceState | None) -> None:
        """Continues from `state_dict`."""


class EarlierWeights(OtherModel):
    """The policy with its trainable weights of another moment, or with their moving average."""

    def __init__(
        self,
        model: nn.Module,
        name: str,
        weights: Mapping[str, Tensor] | None = None,
        *,
        every: int | None = None,
        decay: float = 0.0,
        ranks: Ranks | None = None,
    ) -> None:
        """weights: by name, whole; None: those that `model` has now. After each `every` updates they become
        decay * weights + (1 - decay) * policy; None: never."""
        self.ranks = ranks or Ranks()
        self.ranks.shard(model)  # it replaces the parameters, so they are read after it
        self.model, self.name, self.every, self.decay = model, name, every, decay
        self.updates = 0
        self._saved = weights is None or every is not None
        self._policy = trainable(model)
        now = self._policy if weights is None else self.ranks.part(dict(weights), self._policy)
        self._weights = {key: now[key].detach().clone() for key in self._policy}
        self._measure()

    @property
    def fixed(self) -> bool:
        return self.every is None

    @contextmanager
    def scoring(self) -> Iterator[nn.Module]:
        self._exchange()
        try:
            yield self.model
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        # In place and one by one: an optimiser and FSDP hold these very tensors, and a second copy of all of them would
        # cost their memory.
        for key, p in self._policy.items():
            held = p.detach().clone()
            p.copy_(self._weights[key])
            self._weights[key].copy_(held)

    def _measure(self) -> None:
        self.digest = weights_digest(self.ranks.whole(self._weights))

    @torch.no_grad()
    def end_update(self) -> None:
        self.updates += 1
        if self.every is not None and self.updates % self.every == 0:
            for key, p in self._policy.items():
                self._weights[key].lerp_(p, 1 - self.decay)
            self._measure()

    def state_dict(self) -> ReferenceState | None:
        return ReferenceState(weights=self.ranks.whole(self._weights), updates=self.updates) if self._saved else None

    def load_state_dict(self, state: ReferenceState | None) -> None:
        if not self._saved:
            return
        if state is None or set(state["weights"]) != set(self._weights):
            raise BadBatch(
                f"the checkpoint doesn't have the weights of the reference {self.name!r}: use the same "
                "`loop.reference` and the same adapters as the run that wrote it"
            )
        for key, tensor in self.ranks.part(state["weights"], self._weights).items():
            self._weights[key].copy_(tensor)
        self.updates = state["updates"]
        self._measure()


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that updates change, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
