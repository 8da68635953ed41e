"""Weights that don't arrive: each kind of fault, in each place where a sync ends, is found in the update that it hits.

The fault is put into the sampler's own loading of weights; all else is the real loop, engine, server and HTTP. The
fifth place, vLLM, is in `tests/contract/test_vllm_delivery.py`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tapereel.agents import EmbeddedEngine
from tapereel.agents.engines.embedded import EngineServer
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.weights import AdapterConfig, add_adapters
from tapereel.envs import Outcome
from tapereel.finetune import Loop
from tapereel.finetune.loop import NotDelivered
from tapereel.tapes import Answer, Text
from tapereel.tapes.store import Store

from ..agents.engines.servers.test_remote import servers
from ..finetune.loop.lab import RENDERER, WORDS, EverySecond, history_in, loop_in, model, run, settings_of
from ..finetune.run.duet import ALTO, BASS, Score, loop_of, settings, two

State = dict[str, Tensor]
TRIES = int(os.environ.get("ATTACK_TRIES", "8"))
"""Clean updates in each place."""
CLEAN = settings_of(updates=TRIES, max_lag=1, checkpoint_every=10**6, optimiser={"lr": 3e-3}, sampler_tolerance=None)
BEGIN = 2
"""The sync that the fault hits first: the one of update 3, since syncs and updates count from 0."""


def mixed(state: State, older: State, stale: Callable[[str], bool]) -> State:
    return {name: older[name] if stale(name) else tensor for name, tensor in state.items()}


def swapped(state: State, older: State) -> State:
    def other(name: str) -> str:
        return (
            name.replace("layers.0.", "layers.x.").replace("layers.1.", "layers.0.").replace("layers.x.", "layers.1.")
        )

    return {name: state[other(name)] for name in state}


def half(state: State, older: State) -> State:
    names = sorted(name for name in state if not torch.equal(state[name], older[name]))
    return mixed(state, older, set(names[: len(names) // 2]).__contains__)


def head(state: State, older: State) -> State:
    """The tied head and embedding; of adapters, those of the last layer."""
    tied = [name for name in state if "lm_head" in name or "embed_tokens" in name]
    moved = any(not torch.equal(state[name], older[name]) for name in tied)
    return mixed(state, older, lambda name: name in tied if moved else "layers.1." in name)


def scaled(state: State, older: State) -> State:
    """Adapters with twice their scale; of a whole model, the output of attention."""
    part = "lora_B" if any("lora_B" in name for name in state) else "o_proj"
    return {name: tensor * 2 if part in name else tensor for name, tensor in state.items()}


def narrow(state: State, older: State) -> State:
    return {name: tensor.bfloat16().float() for name, tensor in state.items()}


FAULTS: dict[str, Callable[[State, State], State]] = {
    "nothing arrives": lambda state, older: older,
    "half a state dict": half,
    "swapped layers": swapped,
    "another scale": scaled,
    "another dtype": narrow,
    "a stale head": head,
    "an older version": lambda state, older: older,
    "a stale cache": lambda state, older: state,
}


class EverySecondSung(Score):
    """As `EverySecond`, for both voices."""

    async def reset(self, task: str) -> Text:
        self.earned = float(next(EverySecond.begun) % 2)
        return await super().reset(task)

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward={f"right@{ALTO}": self.earned, f"right@{BASS}": self.earned}, terminated=True)


class Saboteur:
    """In place of a decoder's `load`: from sync `BEGIN` on it loads what the fault makes of the weights."""

    def __init__(self, engine: EmbeddedEngine, kind: str, begin: int = BEGIN) -> None:
        self.engine, self.kind, self.begin = engine, kind, begin
        self.load = engine._decoder.load
        self.past = [self.copied(engine._decoder.model.state_dict())]
        engine._decoder.load = self  # type: ignore[method-assign]

    @staticmethod
    def copied(state: Mapping[str, Tensor]) -> State:
        return {name: tensor.clone() for name, tensor in state.items()}

    def __call__(self, state: Mapping[str, Tensor]) -> None:
        self.past.append(self.copied(state))
        if len(self.past) - 2 < self.begin:
            return self.load(state)
        if self.kind == "a stale cache":
            self.engine._batch.parked.clear = lambda: None  # type: ignore[method-assign]
        older = self.past[-3 if self.kind == "an older version" else -2]
        wrong = FAULTS[self.kind](self.past[-1], older)
        return self.load({name: wrong[name] for name in state})


def embedded(path: Path, kind: str) -> Loop:
    return sampled_here(path, kind, model())


def lora(path: Path, kind: str) -> Loop:
    return sampled_here(path, kind, add_adapters(model(), AdapterConfig(rank=4, alpha=8), seed=0))


def sampled_here(path: Path, kind: str, policy: Any) -> Loop:
    with Store.create(path, durability="os") as store:
        history = history_in(store, path, settings_of(), policy=policy)
        config = settings_of(updates=BEGIN + 1, max_lag=1)  # the last sync is checked too
        loop = loop_in(history, config, env=EverySecond)
        Saboteur(loop.engine, kind)  # type: ignore[arg-type]
        found(loop, "embedded")
    return loop


def player(path: Path, kind: str) -> Loop:
    config = settings(updates=4, max_lag=1)
    with Store.create(path, durability="os") as store:
        loop = loop_of(*two(store, path, config), config, env=EverySecondSung)
        Saboteur(loop.engine.engines[BASS], kind)  # type: ignore[attr-defined]
        found(loop, "embedded")
    return loop


def fleet(path: Path, kind: str) -> Loop:
    """Two servers over HTTP; the fault is in the second one."""
    path.mkdir()
    model().save_pretrained(path / "model")
    WORDS.save_pretrained(path / "model")

    async def test(store: Store) -> Loop:
        async with EngineServer(model(), "m").serving() as one, EngineServer(model(), "m").serving() as other:
            engine = await connect(servers(one.url, other.url, model=path / "model"), RENDERER, weights=True)
            history = history_in(store, path / "run", settings_of())
            loop = loop_in(history, settings_of(max_lag=1), engine=engine, env=EverySecond)
            await engine.sync_weights(history.model.state_dict(), history.version)
            Saboteur(other.engine, kind)
            # A server of this kind keeps no prefixes of its own; with one key for all requests it does, as vLLM does.
            asked = other._request
            other._request = lambda *given: replace(asked(*given), cache_key="prefixes")  # type: ignore[method-assign]
            try:
                await failing(loop, other.url)
            finally:
                await engine.close()
            return loop

    with Store.create(path / "run", durability="os") as store:
        return asyncio.run(test(store))


def found(loop: Loop, name: str) -> None:
    asyncio.run(failing(loop, name))


async def failing(loop: Loop, name: str) -> None:
    with pytest.raises(NotDelivered) as error:
        await loop.run()
    loop.error = str(error.value)  # type: ignore[attr-defined]
    assert f" {name}:" in str(error.value)
    assert "loop.sampler_tolerance" in str(error.value)


@pytest.mark.parametrize("place", [embedded, lora, player, fleet])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_found_in_the_update_that_it_hits(
    place: Callable[[Path, str], Loop], kind: str, tmp_path: Path
) -> None:
    loop = place(tmp_path / "at", kind)
    sentence: str = loop.error  # type: ignore[attr-defined]
    lineage = "bass" if place is player else "run"
    assert loop.history.updates == BEGIN + 1, sentence
    assert f"{lineage}:{BEGIN + 1} " in sentence
    if kind in ("nothing arrives", "an older version"):
        served = BEGIN - (kind == "an older version")
        assert f" {lineage}:{served}, " in sentence
    else:
        assert "known" in sentence
    assert f": {lineage}:{BEGIN}. " in sentence


@pytest.mark.parametrize("lr", [1e-7, 3e-6])
def test_updates_that_never_arrive_add_up_until_they_are_seen(lr: float, tmp_path: Path) -> None:
    """One update at 1e-7 moves no log-prob beyond the bound; the run says so and stops at the first that does."""
    config, verdicts = settings_of(updates=60, max_lag=1, optimiser={"lr": lr}, checkpoint_every=100), list[Any]()
    with Store.create(tmp_path / "run", durability="os") as store:
        history = history_in(store, tmp_path, config)
        loop = loop_in(history, config, on_update=lambda report: verdicts.append(report.metrics["delivery/verdict"]))
        loop.engine._decoder.load = lambda state: None  # type: ignore[attr-defined]
        found(loop, "embedded")
    assert " run:0, " in loop.error  # type: ignore[attr-defined]
    assert set(verdicts) <= {"unmoved"}
    assert len(verdicts) == history.updates - 1 < 10
    assert bool(verdicts) == (lr == 1e-7)


@pytest.mark.parametrize("place", ["embedded", "bfloat16", "lora", "fleet"])
def test_clean_updates_raise_no_alarm(place: str, tmp_path: Path) -> None:
    """ATTACK_TRIES=250 makes the 1,000 updates of docs/project/attacks.md."""
    if place == "fleet":
        loop, lines = asyncio.run(clean_fleet(tmp_path))
    else:
        policy = add_adapters(model(), AdapterConfig(rank=4, alpha=8), seed=0) if place == "lora" else model()
        policy = policy.bfloat16() if place == "bfloat16" else policy
        loop, reports = run(tmp_path / "run", CLEAN, policy=policy)
        lines = [report.metrics for report in reports]
    assert loop.history.updates == len(lines) == TRIES
    assert "delivered" in {line["delivery/verdict"] for line in lines}
    most, bound = (max(line[f"delivery/{name}"] for line in lines) for name in ("difference", "bound"))
    unmoved = sum(line["delivery/verdict"] == "unmoved" for line in lines)
    print(f"{place}: {len(lines)} updates, {unmoved} unmoved, largest difference {most:.3g}, largest bound {bound:.3g}")


async def clean_fleet(path: Path) -> tuple[Loop, list[dict[str, Any]]]:
    model().save_pretrained(path / "model")
    WORDS.save_pretrained(path / "model")
    lines: list[dict[str, Any]] = []
    with Store.create(path / "run", durability="os") as store:
        async with EngineServer(model(), "m").serving() as one, EngineServer(model(), "m").serving() as other:
            engine = await connect(servers(one.url, other.url, model=path / "model"), RENDERER, weights=True)
            history = history_in(store, path / "run", CLEAN)
            await engine.sync_weights(history.model.state_dict(), history.version)
            loop = loop_in(history, CLEAN, engine=engine, on_update=lambda report: lines.append(report.metrics))
            await loop.run()
            await engine.close()
    return loop, lines
