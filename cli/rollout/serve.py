"""`tapereel serve`: a local vLLM server with the flags that make its answers training data, or the embedded engine over
the same protocol."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...tapes.errors import UsageError
from ..console import Exit, answer, check_port, say
from ..signals import told_to_end

if TYPE_CHECKING:
    from ...agents.engines.servers.launch import LocalServer

NCCL = ("--weight-transfer-config", '{"backend": "nccl"}')
"""What makes a vLLM server join a trainer's NCCL group."""

EXAMPLE = """
tapereel serve models/qwen --port 8000
tapereel serve models/tiny --engine embedded
tapereel serve models/qwen --port 8000 --options '--max-model-len 8192 --gpu-memory-utilization 0.6'
"""


_OF_VLLM: dict[str, Any] = {
    "no_weights": False,
    "transfer": False,
    "nccl": False,
    "lora": None,
    "options": "",
    "log": Path("vllm.log"),
    "patience": 600.0,
    "python": sys.executable,
}
"""Arguments that mean nothing to the embedded engine, as they are where nobody gives them."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments of the verb."""
    parser.add_argument("model", metavar="DIR", help="a model and tokenizer in Hugging Face format")
    parser.add_argument(
        "--engine",
        choices=("vllm", "embedded"),
        default="vllm",
        help="vLLM, or the embedded engine in this process (default: vllm)",
    )
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; beyond loopback, --key is needed")
    parser.add_argument("--key", metavar="VARIABLE", help="the environment variable that holds the API key")
    parser.add_argument(
        "--no-weights", action="store_true", help="without the routes that take new weights, which know no API key"
    )
    parser.add_argument(
        "--transfer",
        action="store_true",
        help="take weights by vLLM's weight-transfer routes too (engine.publish=transfer)",
    )
    parser.add_argument(
        "--nccl", action="store_true", help="take weights by NCCL from the trainer's GPU too (engine.publish=nccl)"
    )
    parser.add_argument(
        "--lora", type=int, metavar="RANK", help="take LoRA adapters of that rank (engine.publish=lora)"
    )
    parser.add_argument("--python", default=sys.executable, help="an interpreter with vLLM (default: this one)")
    parser.add_argument("--log", type=Path, default=Path("vllm.log"), help="what vLLM prints (default: vllm.log)")
    parser.add_argument("--patience", type=float, default=600.0, metavar="S", help="seconds it may take to come up")
    parser.add_argument("--slots", type=int, default=64, help="completions sampled at once, embedded (default: 64)")
    parser.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="where the embedded engine computes: cpu, cuda, cuda:1 ... (default: a GPU where there is one)",
    )
    parser.add_argument("--options", default="", metavar="FLAGS", help="further flags of vLLM's server, as one word")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted or told to end."""
    from ...agents.engines.servers.launch import LocalServer

    if not Path(args.model).is_dir():
        raise UsageError(f"there is no model folder {args.model!r}")
    check_port(args.port)
    if args.engine == "embedded":
        return _embedded(args)
    if args.device != "auto" or args.slots != 64:
        raise UsageError(
            "--device and --slots are for --engine embedded; vLLM takes CUDA_VISIBLE_DEVICES in its "
            "environment and --options '--max-num-seqs 64': leave them out"
        )
    if args.patience <= 0 or (args.lora is not None and args.lora < 1):
        raise UsageError("--patience (seconds) and --lora (a rank) are numbers above 0")
    if shutil.which(args.python) is None:
        raise UsageError(f"--python is {args.python!r}, which is no program here; name an interpreter that has vLLM")
    if not args.log.absolute().parent.is_dir():
        raise UsageError(f"--log is {str(args.log)!r}, whose folder isn't there")
    if args.nccl and (args.transfer or args.no_weights):
        raise UsageError(
            "a vLLM server has one backend of its weight-transfer routes, and none with --no-weights: "
            "--nccl alone, or --transfer alone"
        )
    try:
        options = [*(NCCL if args.nccl else ()), *shlex.split(args.options)]
        server = LocalServer(
            args.model,
            port=args.port,
            host=args.host,
            key_variable=args.key,
            python=args.python,
            control=not args.no_weights,
            transfer=args.transfer,
            lora_rank=args.lora,
            options=options,
            log=args.log,
            patience=args.patience,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    say(f"starting: {' '.join(server.command)}")
    return asyncio.run(_vllm(args, server))


async def _vllm(args: argparse.Namespace, server: LocalServer) -> int:
    """Serve vLLM until told to end, which may be before it is up."""
    told = asyncio.ensure_future(told_to_end().wait())
    starting = asyncio.ensure_future(server.start())
    await asyncio.wait([starting, told], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
        raise KeyboardInterrupt
    starting.result()
    answer(
        args,
        {"url": server.url, "model": str(server.model), "command": server.command},
        f"listening at {server.url}; what it prints is in {args.log}; Ctrl-C ends it",
    )
    ended = asyncio.ensure_future(asyncio.to_thread(server.wait))
    await asyncio.wait([ended, told], return_when=asyncio.FIRST_COMPLETED)
    code = Exit.HOLDS
    if ended.done():
        code = Exit.BROKEN
        say(f"the server ended by itself with exit code {ended.result()}:\n{server.printed()}")
    await asyncio.to_thread(server.stop)
    return code


def _embedded(args: argparse.Namespace) -> int:
    """Serve the embedded engine until interrupted."""
    from ...agents.engines.embedded.embedded_server import EngineServer
    from ...agents.engines.embedded.pretrained import load_pretrained

    for name, unset in _OF_VLLM.items():
        if getattr(args, name) != unset:
            raise UsageError(
                f"--{name.replace('_', '-')} is for vLLM; the embedded engine takes weights by its own "
                "routes and has nothing to set there: leave it out"
            )
    token = os.environ.get(args.key) if args.key is not None else None
    if args.key is not None and not token:
        raise UsageError(f"the environment variable {args.key} with the API key is not set")
    try:
        model = load_pretrained(args.model, device=args.device).model
        server = EngineServer(model, str(args.model), host=args.host, token=token, slots=args.slots)
    except ValueError as error:
        raise UsageError(str(error)) from error

    async def serve() -> None:
        stop = told_to_end()
        async with server.serving(args.port):
            answer(args, {"url": server.url, "model": args.model}, f"listening at {server.url}; Ctrl-C ends it")
            await stop.wait()

    asyncio.run(serve())
    return Exit.HOLDS
