"""Base class for immutable pydantic models that reject unknown fields, and the words of a check's result."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Standing = Literal["holds", "broken", "undecided"]
STANDINGS: tuple[Standing, ...] = ("holds", "broken", "undecided")
"""The verdict of a check by its exit code: 0, 1 and 2."""


class Value(BaseModel):
    """An immutable model; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
