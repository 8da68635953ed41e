"""Value: what is told and taken as a frozen pydantic model. Knows nothing of what it holds."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Value(BaseModel):
    """It doesn't change once it is made, and a field that it doesn't have is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
