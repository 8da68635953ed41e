"""Base class for immutable pydantic models that reject unknown fields, and the words for a check's result."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Standing = Literal["holds", "broken", "undecided"]
STANDINGS: tuple[Standing, ...] = ("holds", "broken", "undecided")
"""The verdicts of a check in the order of their exit codes 0, 1 and 2."""


class Value(BaseModel):
    """An immutable model that rejects unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")
