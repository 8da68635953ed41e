"""`tapereel gateway`: an OpenAI-compatible server in front of any engine, which keeps what it answers on tapes."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
from pathlib import Path
from typing import Any

from pydantic import Field

from ...agents.episode.limits import Limits
from ...agents.setup.engine_config import EngineConfig, make_engine
from ...tapes.common.config import Config, add_config_arguments, dump_config, load_config
from ...tapes.errors import UsageError
from ...tapes.records import Sampling
from ...tapes.store.run_directory import open_run
from ..console import Exit, answer, check_port, say
from ..signals import told_to_end
from .run import engine_settings, run_directory

EXAMPLE = """
tapereel gateway --model runs/digits-model --out runs/gateway
tapereel gateway --set engine.answers='["hello"]' --port 8100 --out runs/gateway
"""
VARIABLE = "TAPEREEL_GATEWAY_TOKEN"


class GatewayConfig(Config):
    """What is served, and what its tapes may use."""

    engine: EngineConfig
    split: str = "train"
    """What tapes are recorded for, unless whoever begins one says otherwise."""
    sampling: Sampling = Sampling()
    """Where a program doesn't say; its `max_tokens` is the most that one may ask for."""
    limits: Limits = Limits(seconds=3600.0)
    """Of a tape, unless whoever begins it says otherwise."""
    idle_seconds: float = Field(default=300.0, gt=0)
    """Without a request, after which a tape ends by itself."""
    hold_seconds: float = Field(default=60.0, ge=0)
    """How long a request waits while weights change, before it is refused with 429."""
    max_body: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Bytes of one request."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("--model", metavar="DIR", help="a model and tokenizer in Hugging Face format")
    parser.add_argument("--port", type=int, default=0, help="where to listen (default: a free port)")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: this machine only)"
    )
    parser.add_argument(
        "--token",
        default=VARIABLE,
        metavar="VARIABLE",
        help="the environment variable with the admin "
        f"token (default: {VARIABLE}; where it isn't set, one is made and told)",
    )
    parser.add_argument("--out", metavar="DIR", help="run directory")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to end."""
    config = load_config(GatewayConfig, args.config, [*engine_settings(args), *args.sets])
    if args.dry_run:
        answer(args, config, dump_config(config))
        return Exit.HOLDS
    check_port(args.port)
    token = os.environ.get(args.token) or secrets.token_urlsafe(24)
    if len(token) < 16:
        raise UsageError(f"the token in {args.token} has fewer than 16 characters, which can be guessed")
    asyncio.run(_serve(args, config, token))
    return Exit.HOLDS


async def _serve(args: argparse.Namespace, config: GatewayConfig, token: str) -> None:
    from ...agents.gateway.gateway_control import Control
    from ...agents.gateway.gateway_server import Bounds, Gateway

    stop = told_to_end()
    made = await make_engine(config.engine)
    try:
        with open_run(Path(run_directory(args)), config, resume=args.resume) as directory:
            store = directory.store
            published = {stored.record.version for stored in store.run_records("publish")}
            if made.publish is not None and made.publish.version not in published:
                store.append_layer(made.publish)
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
            gateway = Gateway(args.host, bounds=bounds, control=control)
            async with gateway.serving(args.port):
                answer(args, _told(args, gateway.url, token), f"{gateway.url}\nadmin token: {_shown(args, token)}")
                say("press Ctrl-C to end; tapes that are open then end as cancelled")
                await stop.wait()
                await control.close()
    finally:
        await made.engine.close()


def _told(args: argparse.Namespace, url: str, token: str) -> dict[str, Any]:
    return {
        "base_url": url,
        "control": f"{url.removesuffix('/v1')}/tapereel/tapes",
        "run": str(args.out),
        "token": None if os.environ.get(args.token) else token,
    }


def _shown(args: argparse.Namespace, token: str) -> str:
    return f"that in {args.token}" if os.environ.get(args.token) else token
