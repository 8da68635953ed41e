"""Learning-rate schedules, as pure functions of the number of updates already applied."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from ...tapes.value import Value


class Schedule(Value):
    """The learning rate is multiplied by factor(k) in update k, counted from 0.

    warm-up  (k + 1) / warmup                           for k < warmup
    then, with p = (k - warmup) / (total - warmup), at most 1:
    constant 1,  linear 1 - (1 - floor) p,  cosine floor + (1 - floor) (1 + cos(pi p)) / 2
    """

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = Field(default=0, ge=0)
    """Number of updates in the linear warm-up. All optimiser steps of an update have the same rate."""
    total: int | None = Field(default=None, gt=0)
    """Number of updates until the floor is reached. It is required except for `constant`."""
    floor: float = Field(default=0.0, ge=0, le=1)
    """The factor at update `total` and after it."""

    @model_validator(mode="after")
    def _ends(self) -> Schedule:
        if self.kind != "constant" and (self.total is None or self.total <= self.warmup):
            raise ValueError(
                f"a {self.kind} schedule needs `total` updates, more than the warm-up's {self.warmup}; got {self.total}"
            )
        return self

    @property
    def varies(self) -> bool:
        """True if the factor isn't always 1."""
        return self.kind != "constant" or self.warmup > 1

    def factor(self, k: int) -> float:
        """Return the factor for update k, counted from 0."""
        if k < self.warmup:
            return (k + 1) / self.warmup
        if self.kind == "constant" or self.total is None:
            return 1.0
        p = min((k - self.warmup) / (self.total - self.warmup), 1.0)
        if self.kind == "linear":
            return 1 - (1 - self.floor) * p
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * p)) / 2
