"""`tapereel serve gateway`: serve any engine through an OpenAI-compatible API that records every call."""

from __future__ import annotations

import argparse
import asyncio
import os

from ...agents.gateway.gateway_control import GatewayConfig, serve_gateway
from ...tapes.common.config import dump_config, load_config
from ..console import Exit, answer, say
from ..scene_arguments import (
    add_config_arguments,
    add_out_arguments,
    add_server_arguments,
    engine_settings,
    run_directory,
    variable_value,
)
from ..signals import stop_event

EXAMPLE = """
tapereel serve gateway --model runs/digits-model --out runs/gateway
tapereel serve gateway --set engine.answers='["hello"]' --port 8100 --out runs/gateway
"""
VARIABLE = "TAPEREEL_GATEWAY_TOKEN"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--model", metavar="DIR", help="folder of a model and tokenizer in Hugging Face format")
    parser.add_argument("--embeddings", metavar="URL", help="a server that makes embeddings, for requests for them")
    add_server_arguments(parser, key="--token", made=f"the value of {VARIABLE}, or a new token that is printed")
    add_out_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal."""
    embeddings = [("embeddings", args.embeddings, "--embeddings")] if args.embeddings is not None else []
    config = load_config(GatewayConfig, args.config, [*engine_settings(args), *embeddings, *args.sets])
    if args.dry_run:
        answer(args, config, dump_config(config))
        return Exit.HOLDS
    own = variable_value(args.token or (VARIABLE if os.environ.get(VARIABLE) else None))
    asyncio.run(_serve(args, config, own))
    return Exit.HOLDS


async def _serve(args: argparse.Namespace, config: GatewayConfig, own: str | None) -> None:
    """Serve until a stop signal. `own` is the token from the caller's environment, and is not printed. If `own` is
    None, a new token is created and printed."""
    stop = stop_event()
    serving = serve_gateway(config, run_directory(args), token=own, host=args.host, port=args.port, resume=args.resume)
    async with serving as gateway:
        made = None if own else gateway.token
        data = {
            "base_url": gateway.url,
            "control": f"{gateway.url.removesuffix('/v1')}/tapereel/tapes",
            "run": str(args.out),
            "token": made,
        }
        answer(args, data, f"{gateway.url}\nadmin token: {made or f'the value of {args.token or VARIABLE}'}")
        say("press Ctrl-C to stop; open tapes then end as cancelled")
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait([stopping, gateway.stopped], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if gateway.stopped.done():
            raise gateway.stopped.result().at("The gateway has ended; its tapes are on disk")
