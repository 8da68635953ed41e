"""Where the agents and environments of a run are: in its own process, or in Ray actors."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ...tapes.common.config import Config, FreeAtResume


class RayConfig(Config):
    """Workers of Ray, each with an event loop of its own."""

    address: str | None = None
    """The address of a running Ray cluster, such as `head:6379`, or `auto` for the one that this machine belongs to.
    None starts Ray on this machine, for this run alone."""
    cpus: int = Field(default=1, ge=1)
    """The number of CPUs that one worker takes. The run has as many workers as the cluster has room for."""


def _read(value: object) -> object:
    """Read `ray` and `ray:ADDRESS`."""
    if not isinstance(value, str):
        return value
    kind, colon, address = value.partition(":")
    if kind != "ray" or (colon and not address):
        raise ValueError(f"{value!r}: write ray, or ray:ADDRESS for a running cluster, as in ray:head:6379")
    return {"address": address or None}


On = Annotated[RayConfig | None, BeforeValidator(_read), FreeAtResume]
"""Where episodes run. None means this process, `ray` means workers on this machine, and `ray:ADDRESS` those of a
running cluster."""
