"""`tapereel serve gateway`: an OpenAI-compatible server in front of any engine, which records what it answers."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets

from ...agents.gateway.gateway_control import GatewayConfig, serve_gateway
from ...tapes.common.config import add_config_arguments, dump_config, load_config
from ...tapes.common.http_service import SHORTEST_TOKEN
from ...tapes.errors import UsageError
from ..console import Exit, answer, check_port, say
from ..scene_arguments import add_out_arguments, engine_settings, run_directory
from ..signals import stop_event

EXAMPLE = """
tapereel serve gateway --model runs/digits-model --out runs/gateway
tapereel serve gateway --set engine.answers='["hello"]' --port 8100 --out runs/gateway
"""
VARIABLE = "TAPEREEL_GATEWAY_TOKEN"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--model", metavar="DIR", help="folder of a model and tokenizer in Hugging Face format")
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: this machine only)"
    )
    parser.add_argument(
        "--token",
        default=VARIABLE,
        metavar="VARIABLE",
        help=f"environment variable with the admin token (default {VARIABLE}; if unset, a new token is printed)",
    )
    add_out_arguments(parser)
    add_config_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal."""
    config = load_config(GatewayConfig, args.config, [*engine_settings(args), *args.sets])
    if args.dry_run:
        answer(args, config, dump_config(config))
        return Exit.HOLDS
    check_port(args.port)
    own = os.environ.get(args.token)
    if own and len(own) < SHORTEST_TOKEN:
        raise UsageError(f"the token in {args.token} has fewer than {SHORTEST_TOKEN} characters, so it can be guessed")
    asyncio.run(_serve(args, config, own))
    return Exit.HOLDS


async def _serve(args: argparse.Namespace, config: GatewayConfig, own: str | None) -> None:
    """own: the token in the caller's environment, which is not printed; None: a new token is made and printed."""
    stop, made = stop_event(), None if own else secrets.token_urlsafe(24)
    serving = serve_gateway(
        config, run_directory(args), token=own or made or "", host=args.host, port=args.port, resume=args.resume
    )
    async with serving as gateway:
        data = {
            "base_url": gateway.url,
            "control": f"{gateway.url.removesuffix('/v1')}/tapereel/tapes",
            "run": str(args.out),
            "token": made,
        }
        answer(args, data, f"{gateway.url}\nadmin token: {made or f'the value of {args.token}'}")
        say("press Ctrl-C to stop; open tapes then end as cancelled")
        await stop.wait()
