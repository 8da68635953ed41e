"""Runs in the environment with vLLM: an engine inside this process, asked and given weights in every way.

    python inprocess_run.py MODEL OTHER-WEIGHTS ADAPTER-WEIGHTS

Prints one JSON object: what was sampled, and with which version; the test compares it with the model's own forward.
"""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tapereel.agents.engines.embedded.pretrained import load_tokenizer
from tapereel.agents.engines.engine import Completion, EngineError, Request
from tapereel.agents.engines.servers.connect import connect_channels
from tapereel.agents.engines.servers.server_engine import RemoteEngine
from tapereel.agents.engines.servers.vllm_inprocess import InProcess
from tapereel.agents.engines.weights.weight_config import AdapterConfig
from tapereel.agents.engines.weights.weight_transfer import update_info, worker_info
from tapereel.agents.rendering.renderer import Renderer
from tapereel.tapes.records import Sampling

OPTIONS = {"enforce_eager": True, "dtype": "float32", "max_model_len": 4096, "max_num_seqs": 64}
ADAPTERS = AdapterConfig(rank=4, alpha=8)
TRIES = ((400, 0.15), (1200, 0.3), (3600, 0.6))


class Lab:
    """One engine of the process, and all that was sampled."""

    def __init__(self, channel: InProcess | None, model: Path, other: Path, adapter: Path | None = None) -> None:
        self.channel, self.model = channel, model
        self.renderer = Renderer(load_tokenizer(model))
        self.other, self.adapter = load_file(other), load_file(adapter) if adapter is not None else {}
        self.base = load_file(model / "model.safetensors")
        self.base["lm_head.weight"] = self.base["model.embed_tokens.weight"]
        self.sampled: list[dict[str, Any]] = []

    async def engine(self, way: Any) -> RemoteEngine:
        assert self.channel is not None
        return await connect_channels(
            [self.channel], self.renderer, model_folder=self.model, weights=True, way=way, adapters=ADAPTERS
        )

    def ask(
        self, seed: int, on_partial: Any = None, *, length: int = 48, temperature: float = 1.0, **extra: Any
    ) -> Request:
        messages = [{"role": "user", "content": "abcdabcd" * 4}]
        return Request(
            messages=messages,
            prompt=self.renderer.prompt(messages).ids,
            seed=seed,
            on_partial=on_partial,
            sampling=Sampling(
                temperature=temperature, max_tokens=length, extra={"ignore_eos": True, "stop_token_ids": [], **extra}
            ),
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


class Ear:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.times = 0

    def tokens(self, ids: array[int]) -> None:
        self.ids += ids
        self.times += 1

    def again(self) -> None:
        raise AssertionError("nothing failed")


async def plain(lab: Lab, engine: RemoteEngine) -> None:
    """Answers at two temperatures, the same one twice and once more for somebody who listens, one that is cancelled."""
    for k, temperature in enumerate((0.7, 1.0, 1.0)):
        request = lab.ask(min(k, 1), temperature=temperature)
        lab.note("plain", request, await engine.complete(request))
    ear, request = Ear(), lab.ask(1)
    heard = await engine.complete(replace(request, listener=ear))
    lab.note("plain", request, heard)
    assert ear.ids == list(heard.ids or ())
    assert ear.times > 1
    partial: list[Completion] = []
    request = lab.ask(3, partial.append, length=3600)
    asked = asyncio.create_task(engine.complete(request))
    await asyncio.sleep(0.5)
    asked.cancel()
    try:
        await asked
    except asyncio.CancelledError:
        lab.note("cancelled", request, partial[0])


async def swapped(lab: Lab, engine: RemoteEngine, way: str, mode: Any) -> None:
    """Answers in which the weights change."""
    for k, (length, pause) in enumerate(TRIES):
        await engine.sync_weights(lab.base, f"{way}/{mode}/{k}/base")
        requests = [lab.ask(seed, length=length) for seed in range(4)]
        asked = [asyncio.create_task(engine.complete(request)) for request in requests]
        await asyncio.sleep(pause)
        await engine.sync_weights(lab.other, f"{way}/{mode}/{k}/other", mode)
        found = await asyncio.gather(*asked)
        if any(len(completion.spans) > 1 or completion.finish == "abort" for completion in found):
            for request, completion in zip(requests, found, strict=True):
                lab.note(mode, request, completion)
            return
    raise AssertionError("no answer lived through a change of weights")


async def adapters(lab: Lab) -> None:
    engine = await lab.engine("lora")
    await engine.sync_weights(lab.adapter, "adapter/1", "drain")
    request = lab.ask(5)
    lab.note("adapter", request, await engine.complete(request))


async def refusals(lab: Lab, engine: RemoteEngine) -> list[str]:
    """What is said to requests that can't be served, and after the engine has ended."""
    told = []
    for request in (lab.ask(0, presence_penalty=7.0), lab.ask(0, repetition_penalty=-1.0)):
        try:
            await engine.complete(request)
        except EngineError as error:
            told.append(str(error))
    health = await engine.health()
    assert all(found.well for found in health.values()), health
    await engine.close()
    try:
        await engine.complete(lab.ask(0))
    except EngineError as error:
        told.append(str(error))
    assert not any(found.well for found in (await engine.health(seconds=5.0)).values())
    return told


def nccl_builders(lab: Lab) -> None:
    """What we would say over NCCL is what vLLM's classes take."""
    from vllm.distributed.weight_transfer.nccl_engine import (  # pyright: ignore[reportMissingImports]
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    info = NCCLWeightTransferInitInfo(**worker_info(address="127.0.0.1", port=29500, workers=2))
    assert (info.rank_offset, info.world_size, info.packed) == (1, 3, True)
    update = NCCLWeightTransferUpdateInfo(**update_info(list(lab.base.items())))
    assert update.dtype_names == ["float32"] * len(lab.base)
    assert [tuple(shape) for shape in update.shapes] == [tuple(tensor.shape) for tensor in lab.base.values()]


async def main() -> None:
    model, other, adapter = map(Path, sys.argv[1:4])
    channel = await InProcess.start(model, transfer=True, lora_rank=ADAPTERS.rank, options=OPTIONS)
    try:
        lab = Lab(channel, model, other, adapter)
        nccl_builders(lab)
        engine = await lab.engine("reload")
        await engine.sync_weights(lab.base, "base")
        await plain(lab, engine)
        await swapped(lab, engine, "reload", "reprefill")
        engine = await lab.engine("transfer")
        for mode in ("reprefill", "abort"):
            await swapped(lab, engine, "transfer", mode)
        await engine.sync_weights(lab.base, "base again")
        await adapters(lab)
        told = await refusals(lab, engine)
        print(
            json.dumps(
                {"sampled": lab.sampled, "told": told, "name": engine.name, "server": engine.capabilities.server}
            )
        )
    finally:
        await channel.close()


if __name__ == "__main__":
    asyncio.run(main())
