"""`tapereel serve model`: start a local vLLM server, or serve the embedded engine over the same protocol.

vLLM is started with the flags that make its answers usable as training data.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...tapes.common.hub import model_folder
from ...tapes.errors import TapereelError, UsageError
from ..console import Exit, answer, at_least, given, positive, say
from ..scene_arguments import add_server_arguments, token_line, variable_value
from ..signals import stop_event

if TYPE_CHECKING:
    from ...agents.engines.servers.launch import LocalServer

NCCL = ("--weight-transfer-config", '{"backend": "nccl"}')
"""vLLM flags that let the server join a trainer's NCCL group."""

EXAMPLE = """
tapereel serve model models/qwen --port 8000
tapereel serve model models/tiny --engine embedded
tapereel serve model models/qwen --port 8000 --options '--max-model-len 8192 --gpu-memory-utilization 0.6'
"""


_VLLM_ONLY = ("no_weights", "transfer", "nccl", "lora", "options", "log", "patience", "python")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "model", metavar="NAME", help="a model folder, or a model on the Hugging Face Hub as org/name[@revision]"
    )
    parser.add_argument(
        "--engine",
        choices=("vllm", "embedded"),
        default="vllm",
        help="vLLM, or the embedded engine in this process (default vllm)",
    )
    add_server_arguments(parser, port=8000)
    parser.add_argument("--no-weights", action="store_true", help="leave out the routes that receive weights")
    parser.add_argument(
        "--transfer",
        action="store_true",
        help="also receive weights by vLLM's weight-transfer routes (engine.weights=transfer)",
    )
    parser.add_argument(
        "--nccl",
        action="store_true",
        help="also receive weights by NCCL from the trainer's GPU (engine.weights=broadcast)",
    )
    parser.add_argument(
        "--lora",
        type=at_least(1),
        metavar="RANK",
        help="receive LoRA adapters of this rank (engine.weights.kind=adapters)",
    )
    parser.add_argument("--python", default=sys.executable, help="Python interpreter that has vLLM (default: this one)")
    parser.add_argument("--log", type=Path, default=Path("vllm.log"), help="file for vLLM's output (default vllm.log)")
    parser.add_argument(
        "--patience",
        type=positive,
        default=600.0,
        metavar="S",
        help="longest start of the server in seconds (default 600)",
    )
    parser.add_argument(
        "--slots", type=int, default=64, help="concurrent completions of the embedded engine (default 64)"
    )
    parser.add_argument(
        "--device",
        default="auto",
        metavar="NAME",
        help="device of the embedded engine: cpu, cuda, cuda:1 ... (default: a GPU if there is one)",
    )
    parser.add_argument(
        "--options", default="", metavar="FLAGS", help="further flags of vLLM's server, as one quoted string"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until a stop signal."""
    from ...agents.engines.servers.launch import LocalServer

    args.model = model_folder(args.model)
    _say_faults(args.model)
    if args.engine == "embedded":
        return _embedded(args)
    if given(args, ("device", "slots")):
        raise UsageError(
            "--device and --slots are for --engine embedded; remove them. For vLLM set CUDA_VISIBLE_DEVICES in the "
            "environment, and --options '--max-num-seqs 64'"
        )
    if shutil.which(args.python) is None:
        raise UsageError(f"--python is {args.python!r}, which isn't a program; name an interpreter that has vLLM")
    if not args.log.absolute().parent.is_dir():
        raise UsageError(f"--log is {str(args.log)!r}, and its folder doesn't exist; create it, or name another file")
    if args.nccl and (args.transfer or args.no_weights):
        raise UsageError(
            "--nccl can't be combined with --transfer or --no-weights: a vLLM server has one weight-transfer "
            "backend. Give --nccl alone, or --transfer alone"
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


def _say_faults(model: str | Path) -> None:
    from ...agents.setup.engine_config import RendererConfig

    try:
        faults = RendererConfig().load(model).faults(tools=False)
    except TapereelError as error:
        faults = [f"messages can't be rendered for this model: {error}"]
    for fault in faults:
        say(fault)


async def _vllm(args: argparse.Namespace, server: LocalServer) -> int:
    """Serve vLLM until a stop signal, which may come while the server is still starting."""
    stopped = asyncio.ensure_future(stop_event().wait())
    starting = asyncio.ensure_future(server.start())
    await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        # Cancelling `start` kills the half-started server. Without the wait, the server would outlive this process.
        starting.cancel()
        await asyncio.wait([starting])
        raise KeyboardInterrupt
    starting.result()
    answer(
        args,
        {"url": server.url, "model": str(server.model), "command": server.command, "token_file": server.token_file},
        f"listening at {server.url}; output goes to {args.log}; Ctrl-C ends it\n{token_line(server.token_file)}",
    )
    ended = asyncio.ensure_future(asyncio.to_thread(server.wait))
    await asyncio.wait([ended, stopped], return_when=asyncio.FIRST_COMPLETED)
    code = Exit.HOLDS
    if ended.done():
        code = Exit.BROKEN
        say(f"the server exited by itself with code {ended.result()}:\n{server.printed()}")
    await asyncio.to_thread(server.stop)
    return code


def _embedded(args: argparse.Namespace) -> int:
    from ...agents.engines.embedded.embedded_server import EngineServer
    from ...agents.engines.embedded.pretrained import load_pretrained

    for flag in given(args, _VLLM_ONLY):
        raise UsageError(f"{flag} is only for vLLM: remove it. The embedded engine receives weights by its own routes")
    token = variable_value(args.key)
    try:
        model = load_pretrained(args.model, device=args.device).model
        server = EngineServer(model, str(args.model), host=args.host, token=token, slots=args.slots)
    except ValueError as error:
        raise UsageError(str(error)) from error

    async def serve() -> None:
        stop = stop_event()
        async with server.serving(args.port):
            answer(
                args,
                {"url": server.url, "model": args.model, "token_file": server.token_file},
                f"listening at {server.url}; Ctrl-C ends it\n{token_line(server.token_file)}",
            )
            await stop.wait()

    asyncio.run(serve())
    return Exit.HOLDS
