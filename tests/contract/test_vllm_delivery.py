"""Weights that don't arrive at vLLM: whole ones by a reload, and adapters. Each fault is found in the update it hits.

The faults are in what the servers are sent; vLLM, its prefix cache and its adapters are real.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tapereel.agents.engines.servers import RemoteEngine, fleet, lora_servers
from tapereel.agents.engines.weights import VLLMReload, add_adapters
from tapereel.finetune.loop import NotDelivered
from tapereel.tapes import Text
from tapereel.tapes.store import Store

from ..agents.served import Test
from ..attack.test_delivery import BEGIN, FAULTS
from ..finetune.loop.lab import EverySecond, history_in, loop_in, settings_of
from .lab import ADAPTERS, policy

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

UPDATES = int(os.environ.get("ATTACK_TRIES", "8"))
"""Clean updates by each way."""
ADAPTED = tuple(kind for kind in FAULTS if kind != "a stale cache")
"""vLLM's prefix cache knows an adapter's keys by the adapter's name, so there is none to go stale."""


class Long(EverySecond):
    """A first observation that fills a block of 128 tokens, the least that the CPU build's prefix cache holds."""

    async def reset(self, task: str) -> Text:
        await super().reset(task)
        return Text(text=task[0] * 160)


def loop_on(store: Store, path: Path, engine: RemoteEngine, way: str, **changes: Any) -> Any:
    config = settings_of(
        max_lag=1, in_flight="drain" if way == "lora" else "reprefill", sampler_tolerance=None, **changes
    )
    trained = add_adapters(policy(0), ADAPTERS, seed=0) if way == "lora" else policy(0)
    history = history_in(store, path, config, policy=trained, lineage=path.name)  # new to the server
    lines: list[dict[str, Any]] = []
    loop = loop_in(history, config, engine=engine, env=Long, on_update=lambda one: lines.append(one.metrics))
    return history, loop, lines


@pytest.mark.parametrize(("way", "kind"), [*(("reload", k) for k in FAULTS), *(("lora", k) for k in ADAPTED)])
def test_a_fault_is_found_in_the_update_that_it_hits(
    with_engine: Callable[..., Any], way: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    past: list[dict[str, Tensor]] = []
    module, name = (lora_servers, "write_adapter") if way == "lora" else (fleet, "write_weights")
    real = getattr(module, name)

    def write(state: dict[str, Tensor], *rest: Any) -> None:
        past.append({name: tensor.clone() for name, tensor in state.items()})
        if len(past) - 2 >= BEGIN and kind != "a stale cache":
            older = past[-3 if kind == "an older version" else -2]
            state = FAULTS[kind](past[-1], older)
        real(state, *rest)

    async def no_reset(sync: VLLMReload, version: str, mode: str) -> None:
        await sync._call_weights(version)

    async def test(engine: RemoteEngine) -> None:
        with Store.create(tmp_path / "run", durability="os") as store:
            # The longest beginning has a hundredth of the batch: this one is enough for a block of 128.
            size: dict[str, Any] = {"groups": 8, "group_size": 12} if kind == "a stale cache" else {}
            if way == "lora":
                size["optimiser"] = {"lr": 0.1}  # adapters so large that their rounding to bfloat16 shows
            history, loop, _ = loop_on(store, tmp_path, engine, way, **size)
            monkeypatch.setattr(module, name, write)
            await engine.sync_weights(history.model.state_dict(), history.version, loop.config.in_flight)
            if kind == "a stale cache":
                real_pause = VLLMReload.pause
                monkeypatch.setattr(VLLMReload, "finish", no_reset)
                monkeypatch.setattr(VLLMReload, "pause", lambda sync, mode: real_pause(sync, "stale_kv"))
            with pytest.raises(NotDelivered) as error:
                await loop.run()
        sentence = str(error.value)
        updates = 1 if kind == "a stale cache" else BEGIN + 1
        assert history.updates == updates, sentence
        assert re.search(rf"{re.escape(history.version)}\b.* http://", sentence), sentence
        if kind in ("nothing arrives", "an older version"):
            named = re.search(rf"\bhas {history.lineage}:(\d+)", sentence)
            assert named, sentence
            served = past[BEGIN - (kind == "an older version")]
            # An update without a token to train on leaves two versions with the same weights.
            assert all(torch.equal(tensor, served[name]) for name, tensor in past[int(named[1])].items())
        else:
            assert f": {history.lineage}:{updates - 1}. " in sentence

    with_engine(test, way)


@pytest.mark.parametrize("way", ["reload", "lora"])
def test_clean_updates_raise_no_alarm(with_engine: Callable[[Test, Any], Any], way: str, tmp_path: Path) -> None:
    async def test(engine: RemoteEngine) -> None:
        with Store.create(tmp_path / "run", durability="os") as store:
            changes = {"updates": UPDATES, "checkpoint_every": 10**6, "optimiser": {"lr": 1e-3}, "groups": 2}
            history, loop, lines = loop_on(store, tmp_path, engine, way, **changes)
            await engine.sync_weights(history.model.state_dict(), history.version, loop.config.in_flight)
            await loop.run()
        assert history.updates == len(lines) == UPDATES
        most, bound = (max(line[f"delivery/{name}"] for line in lines) for name in ("difference", "bound"))
        unmoved = sum(line["delivery/verdict"] == "unmoved" for line in lines)
        print(f"vLLM {way}: {UPDATES} updates, {unmoved} unmoved, largest difference {most:.3g}, bound {bound:.3g}")

    with_engine(test, way)
