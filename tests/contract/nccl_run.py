"""Runs in the environment with vLLM: weights for a server of `serve --nccl`, sent as if there were two GPUs.

    python nccl_run.py URL MODEL OTHER-WEIGHTS RUN SERVER-PID SECOND-URL SECOND-PID

Publishes by `engine.weights=broadcast` in the midst of answers, trains and resumes, then has the server's workers stand
still while weights are on their way. Then a second server takes part, is killed in the midst of a broadcast, and joins
again when somebody has started it again. Prints one JSON object: what was sampled and with which version, what training
came to, what was said of the server, which groups there were. `gloo_for_nccl` says what is not NCCL here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gloo_for_nccl
import psutil
import torch
from safetensors.torch import load_file

from tapereel.agents import Completion, Request
from tapereel.agents.engines.embedded import load_tokenizer
from tapereel.agents.engines.servers import RemoteEngine
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.servers.server_config import ServerSettings
from tapereel.agents.engines.weights import PublishFailed
from tapereel.agents.engines.weights import weight_transfer as transfer
from tapereel.agents.engines.weights.weight_transfer import update_info, worker_infos
from tapereel.agents.rendering import Renderer
from tapereel.finetune import TrainConfig
from tapereel.finetune.run import train
from tapereel.tapes import Sampling
from tapereel.tapes.store import verify

SCENE = Path(__file__).resolve().parents[1] / "finetune" / "loop" / "lab.py"


TRIES = ((400, 0.15, 4), (1200, 0.3, 4), (3600, 0.6, 4), (3600, 0.3, 1), (3600, 0.2, 1), (3600, 0.1, 1), (3600, 0.0, 1))
"""Tokens of the answers, seconds until the weights change, and number of answers. On a busy machine, a server with four
answers may only pause after they have ended, so the last tries have one."""


class Lab:
    """The model, and all that was sampled."""

    def __init__(self, model: Path, other: Path) -> None:
        self.model = model
        self.renderer = Renderer(load_tokenizer(model))
        self.other = load_file(other)
        self.base = load_file(model / "model.safetensors")
        self.base["lm_head.weight"] = self.base["model.embed_tokens.weight"]
        self.sampled: list[dict[str, Any]] = []

    def ask(self, seed: int, *, length: int = 48) -> Request:
        messages = [{"role": "user", "content": "abcdabcd" * 4}]
        return Request(
            messages=messages,
            prompt=self.renderer.prompt(messages).ids,
            seed=seed,
            sampling=Sampling(max_tokens=length, extra={"ignore_eos": True, "stop_token_ids": []}),
        )

    def note(self, what: str, request: Request, completion: Completion) -> None:
        assert request.prompt is not None
        assert completion.ids is not None
        assert completion.logprobs is not None
        self.sampled.append(
            {
                "what": what,
                "prompt": request.prompt.tolist(),
                "temperature": request.sampling.temperature,
                "ids": completion.ids.tolist(),
                "logprobs": list(completion.logprobs),
                "spans": completion.spans,
                "finish": completion.finish,
                "seed": request.seed,
            }
        )


async def swapped(lab: Lab, engine: RemoteEngine, way: str, mode: Any) -> None:
    """Answers in which the weights change."""
    for k, (length, pause, number) in enumerate(TRIES):
        await engine.sync_weights(lab.base, f"{way}/{mode}/{k}/base")
        requests = [lab.ask(seed, length=length) for seed in range(number)]
        asked = [asyncio.create_task(engine.complete(request)) for request in requests]
        await asyncio.sleep(pause)
        await engine.sync_weights(lab.other, f"{way}/{mode}/{k}/other", mode)
        found = await asyncio.gather(*asked)
        if any(len(completion.spans) > 1 or completion.finish == "abort" for completion in found):
            for request, completion in zip(requests, found, strict=True):
                lab.note(mode, request, completion)
            return
    raise AssertionError("no answer lived through a change of weights")


def nccl_builders(lab: Lab) -> None:
    """What we would say over NCCL is what vLLM's classes take."""
    from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    found: Any = worker_infos(address="127.0.0.1", port=29500, workers=(2, 1))
    infos = [NCCLWeightTransferInitInfo(**info) for info in found]
    assert [(info.rank_offset, info.world_size, info.packed) for info in infos] == [(1, 4, True), (3, 4, True)]
    update = NCCLWeightTransferUpdateInfo(**update_info(list(lab.base.items())))
    assert update.dtype_names == ["float32"] * len(lab.base)
    assert [tuple(shape) for shape in update.shapes] == [tuple(tensor.shape) for tensor in lab.base.values()]


def send_from_here() -> None:
    """This process is where weights are sent from, whatever torch says of its GPUs."""
    gloo_for_nccl.put_in_place()
    replaced: Any = torch.cuda
    transfer.sending_device = lambda: 0
    replaced.set_device = lambda device: None
    torch.Tensor.cuda = lambda self, *_, **__: self


async def engine_of(lab: Lab, *urls: str, seconds: float = 120.0) -> RemoteEngine:
    config = ServerSettings(model=str(lab.model), urls=urls, weights="broadcast", control_seconds=seconds)
    return await connect(config, lab.renderer, weights=True)


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
    await engine.sync_weights(lab.base, "nccl/before the loss")  # makes the group
    sync: Any = engine.fleet.members[0].sync
    abandon, broadcast, still = sync.abandon, transfer._broadcast, ExitStack()

    def late(*given: Any) -> None:
        still.enter_context(standing_still(server))
        broadcast(*given)

    async def awake(version: str) -> None:
        still.close()
        await abandon(version)

    transfer._broadcast, sync.abandon = late, awake
    try:
        await engine.sync_weights(lab.other, "nccl/lost")
    except PublishFailed as error:
        told = str(error)
    else:
        raise AssertionError("weights were published to workers that stood still")
    finally:
        still.close()
        transfer._broadcast = broadcast
    await engine.close()
    engine = await engine_of(lab, url)
    await engine.sync_weights(lab.other, "nccl/found/other")
    request = lab.ask(7)
    lab.note("found", request, await engine.complete(request))
    await engine.close()
    return told


async def two(lab: Lab, urls: list[str], second: int) -> list[Any]:
    """The groups in which weights come to two servers, of which the second one dies and comes back."""
    groups: list[Any] = []
    infos, broadcast = transfer.worker_infos, transfer._broadcast

    def noted(**given: Any) -> Any:
        found: Any = infos(**given)
        groups.append([found[0]["world_size"], *(info["rank_offset"] for info in found)])
        return found

    def deadly(*given: Any) -> None:
        transfer._broadcast = broadcast
        process = psutil.Process(second)
        for one in (*process.children(recursive=True), process):
            one.kill()
        broadcast(*given)

    async def sampled(version: str) -> None:
        for sampler in engine.samplers.values():
            request = lab.ask(7)
            lab.note("two", request, await sampler(request))
            assert {name for name, _, _ in lab.sampled[-1]["spans"]} == {version}

    transfer.worker_infos = noted
    engine = await engine_of(lab, *urls)
    for version, state in (("two/1/other", lab.other), ("two/2/base", lab.base)):
        await engine.sync_weights(state, version)
        await sampled(version)
    transfer._broadcast = deadly
    await engine.sync_weights(lab.other, "two/3/other")
    assert list(engine.samplers) == urls[:1]
    await sampled("two/3/other")
    await engine.sync_weights(lab.base, "two/4/base")
    await sampled("two/4/base")
    async with asyncio.timeout(240.0):
        while len(engine.samplers) < 2:  # noqa: ASYNC110  # the other process starts it again
            await asyncio.sleep(0.2)
    await sampled("two/4/base")
    await engine.sync_weights(lab.other, "two/5/other")
    assert list(engine.samplers) == urls
    await sampled("two/5/other")
    await engine.close()
    return groups


def trained(model: str, url: str, run: str) -> dict[str, Any]:
    config = TrainConfig.model_validate(
        {
            "agent": f"{SCENE}:Speaker",
            "env": f"{SCENE}:Letters",
            "tasks": ["a", "b", "c", "d", "ab", "cd"],
            "evaluation": {"fraction": 0.34},
            "engine": {"kind": "vllm", "model": model, "urls": [url], "weights": "broadcast"},
            "loop": {
                "updates": 3,
                "groups": 4,
                "group_size": 4,
                "sampling": {"max_tokens": 2},
                "max_lag": 1,
                "optimiser": {"lr": 1e-2},
                "limits": {"turns": 6, "agent_seconds": 120.0},
                "checkpoint_every": 1,
                "keep_checkpoints": None,
            },
        }
    )
    first, again = [train(config, run, resume=resume).model_dump(mode="json") for resume in (False, True)]
    return {"trained": first, "resumed": again, "verify": verify(run).exit_code}


def main() -> None:
    url, model, other, run, server, second, its = sys.argv[1:]
    send_from_here()
    lab = Lab(Path(model), Path(other))
    nccl_builders(lab)
    asyncio.run(in_flight(lab, url))
    training = trained(model, url, run)
    told = asyncio.run(stood_still(lab, url, int(server)))
    groups = asyncio.run(two(lab, [url, second], int(its)))
    print(json.dumps({"sampled": lab.sampled, "told": told, "groups": groups, **training}))
    sys.stdout.flush()
    # A thread may wait for the workers of a group that they have left.
    os._exit(0)


if __name__ == "__main__":
    main()
