"""Base class for immutable pydantic models that reject unknown fields."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """An immutable model; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
