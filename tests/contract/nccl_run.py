"""Runs in the environment with vLLM: weights for a server of `serve --nccl`, sent as if there were two GPUs.

    python nccl_run.py URL MODEL OTHER-WEIGHTS RUN SERVER-PID

Publishes by `engine.publish=nccl` in the midst of answers, trains and resumes, then has the server's workers stand
still while weights are on their way. Prints one JSON object: what was sampled and with which version, what training
came to, what was said of the server. `gloo_for_nccl` says what is not NCCL here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gloo_for_nccl
import psutil
import torch
from inprocess_run import Lab, swapped

from tapereel.agents.engines.servers.connect import connect_channels
from tapereel.agents.engines.servers.server_engine import RemoteEngine
from tapereel.agents.engines.transport.http_channel import Server
from tapereel.agents.engines.weights import weight_transfer as transfer
from tapereel.agents.engines.weights.weight_sync import PublishFailed
from tapereel.finetune.run.train_config import TrainConfig
from tapereel.finetune.run.train_run import train
from tapereel.tapes.store.verifier import verify

SCENE = Path(__file__).resolve().parents[1] / "finetune" / "loop" / "lab.py"


def send_from_here() -> None:
    """This process is where weights are sent from, whatever torch says of its GPUs."""
    gloo_for_nccl.put_in_place()
    replaced: Any = torch.cuda
    transfer.sending_device = lambda: 0
    replaced.set_device = lambda device: None
    torch.Tensor.cuda = lambda self, *_, **__: self


async def engine_of(lab: Lab, url: str, seconds: float = 120.0) -> RemoteEngine:
    return await connect_channels(
        [Server(url)], lab.renderer, model_folder=lab.model, weights=True, way="nccl", control_seconds=seconds
    )


async def in_flight(lab: Lab, url: str) -> None:
    """Answers in which the weights change."""
    engine = await engine_of(lab, url)
    for mode in ("reprefill", "abort"):
        await swapped(lab, engine, "nccl", mode)
    await engine.sync_weights(lab.base, "nccl/before training/base")
    await engine.close()


@contextmanager
def standing_still(server: int) -> Iterator[None]:
    """All that the server has started does nothing."""
    children = psutil.Process(server).children(recursive=True)
    for child in children:
        child.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for child in children:
            child.send_signal(signal.SIGCONT)


async def stood_still(lab: Lab, url: str, server: int) -> str:
    """What is said of workers that don't take what is sent; a trainer that comes after that finds the server well."""
    engine = await engine_of(lab, url, seconds=5.0)
    (sync,) = engine._syncs
    update = sync.update

    async def late(folder: Path) -> None:
        with standing_still(server):
            await update(folder)

    sync.update = late  # pyright: ignore[reportAttributeAccessIssue]
    try:
        await engine.sync_weights(lab.other, "nccl/lost")
    except PublishFailed as error:
        told = str(error)
    else:
        raise AssertionError("weights were published to workers that stood still")
    await engine.close()
    engine = await engine_of(lab, url)
    await engine.sync_weights(lab.other, "nccl/found/other")
    request = lab.ask(7)
    lab.note("found", request, await engine.complete(request))
    await engine.close()
    return told


def trained(model: str, url: str, run: str) -> dict[str, Any]:
    config = TrainConfig.model_validate(
        {
            "agent": f"{SCENE}:Speaker",
            "env": f"{SCENE}:Letters",
            "tasks": ["a", "b", "c", "d", "ab", "cd"],
            "evaluation": {"fraction": 0.34},
            "engine": {"kind": "vllm", "model": model, "urls": [url], "publish": "nccl"},
            "loop": {
                "updates": 3,
                "groups": 4,
                "group_size": 4,
                "sampling": {"max_tokens": 2},
                "max_lag": 1,
                "optimiser": {"lr": 1e-2},
                "limits": {"turns": 6, "seconds": 120.0},
                "checkpoint_every": 1,
                "keep_checkpoints": None,
            },
        }
    )
    first, again = [train(config, run, resume=resume).model_dump(mode="json") for resume in (False, True)]
    return {"trained": first, "resumed": again, "verify": verify(run).exit_code}


def main() -> None:
    url, model, other, run, server = sys.argv[1:]
    send_from_here()
    lab = Lab(None, Path(model), Path(other))
    asyncio.run(in_flight(lab, url))
    training = trained(model, url, run)
    told = asyncio.run(stood_still(lab, url, int(server)))
    print(json.dumps({"sampled": lab.sampled, "told": told, **training}))
    sys.stdout.flush()
    # A thread may wait for the workers of a group that they have left.
    os._exit(0)


if __name__ == "__main__":
    main()
