"""A gateway that records into a run directory: an OpenAI-compatible server in front of any engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from ...tapes.errors import UsageError
from ...tapes.store.run_directory import open_run
from ..episode.limits import Limits
from ..setup.engine_config import make_engine
from ..setup.team_config import EpisodesConfig

if TYPE_CHECKING:
    from .gateway_server import Gateway

SHORTEST_TOKEN = 16
"""Minimum number of characters of an admin token; a shorter token can be guessed."""


class GatewayConfig(EpisodesConfig):
    """The engine that is served, and the defaults of each tape.

    `sampling` has the default parameters of a request; its `max_tokens` is also the maximum that a request may ask for.
    """

    split: str = "train"
    """Split of a tape whose client doesn't set one."""
    limits: Limits = Limits(seconds=3600.0)
    """Limits of a tape whose client doesn't set any."""
    idle_seconds: float = Field(default=300.0, gt=0)
    """A tape without a request for this long is ended."""
    hold_seconds: float = Field(default=60.0, ge=0)
    """How long a request waits for a weight sync before it is refused with 429."""
    max_body: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Maximum bytes of one request body."""


@asynccontextmanager
async def serve_gateway(
    config: GatewayConfig,
    out: str | Path,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int = 0,
    resume: bool = False,
) -> AsyncIterator[Gateway]:
    """Serve inside the block, and record into the run directory `out`. token: the admin token of the control routes.

    port: 0 takes a free port. Leaving the block ends open tapes as cancelled, then seals the store and closes the
    engine. Raises RunExists if `out` holds a run and `resume` is false, and UsageError if `token` is too short.
    """
    from .gateway_control import Control
    from .gateway_server import Bounds, Gateway

    if len(token) < SHORTEST_TOKEN:
        raise UsageError(f"the admin token has fewer than {SHORTEST_TOKEN} characters, so it can be guessed")
    made = await make_engine(config.engine)
    try:
        with open_run(Path(out), config, resume=resume) as directory:
            store = directory.store
            if made.publish is not None:
                store.record_weights(made.publish)
            control = Control(
                token,
                made.engine,
                journal=store.writer,
                limits=config.limits,
                sampling=config.sampling,
                idle=config.idle_seconds,
                split=config.split,
            )
            bounds = Bounds(body=config.max_body, hold_seconds=config.hold_seconds)
            async with Gateway(host, bounds=bounds, control=control).serving(port) as gateway:
                try:
                    yield gateway
                finally:
                    # Open tapes end before the server stops and the store is sealed: a sealed store takes no records,
                    # so a tape that ends later would lose its last records.
                    await control.close()
    finally:
        await made.engine.close()
