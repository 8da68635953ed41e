"""Runs in a process of its own, since a device can't be taken back: training there and on the CPU, side by side.

    python -m tests.contract.device_run FOLDER [DEVICE]

DEVICE is `elsewhere` (standin/elsewhere.py) or a device of torch's, as `cuda`. Prints one JSON object with what both
came to.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tapereel.agents.engines.embedded import EngineServer, load_pretrained
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.weights import AdapterConfig, add_adapters
from tapereel.cli import main as tapereel
from tapereel.finetune import Critic, CriticTrainer, OptimiserConfig, TrainConfig
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.run import train
from tapereel.finetune.trainer import EarlierWeights
from tapereel.tapes.store import Store

from ..agents.served import ask, servers
from ..finetune.build import batch, row, tiny_model, trainer_of
from ..finetune.loop.lab import RENDERER, WORDS, model

SCENE = Path(__file__).resolve().parents[1] / "finetune" / "loop" / "lab.py"
KL = {"regulariser": [{"kind": "kl", "beta": 0.5}]}
ENTROPY = {"regulariser": [{"kind": "entropy", "coefficient": 0.01}]}
SHOWN = {"regulariser": [{"kind": "nll", "coefficient": 0.3}]}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("grpo", {}, {}),
    ("gspo", {}, {}),
    ("cispo", {}, {}),
    ("grpo", KL, {}),
    ("grpo", ENTROPY, {}),
    ("grpo", SHOWN, {}),
    ("grpo", {}, {"gradient_checkpointing": True}),
    ("ppo", {}, {"critic": "own"}),
    ("ppo", {}, {"critic": "policy"}),
    ("grpo", KL, {"adapters": True}),
    ("grpo", {}, {"autocast": "bfloat16"}),
    ("ppo", {}, {"critic": "own", "offload": True}),
]


def updated(
    device: str,
    name: str,
    changes: dict[str, Any],
    *,
    critic: str | None = None,
    adapters: bool = False,
    autocast: str | None = None,
    offload: bool = False,
    **how: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three updates, and the weights after them."""
    dtype = torch.float64 if autocast is None else torch.float32
    plain, recipe = tiny_model(dtype), get_recipe(name, changes)
    rows, episodes = batch(model=tiny_model())
    made: Any = add_adapters(plain, AdapterConfig(rank=2, alpha=4)) if adapters else plain
    there = made.to(device)
    (there.get_base_model() if adapters else there).tie_weights()
    reference: Any = EarlierWeights(there, "base") if adapters else tiny_model(dtype).to(device).eval()
    value = None
    if critic is not None:
        read = Critic.of(there, normalised=True) if critic == "own" else Critic.on(there, normalised=True)
        value = CriticTrainer(read, OptimiserConfig(), passes=2, offload=offload)
    trainer = trainer_of(
        there,
        recipe,
        lr=1e-2,
        ema=0.9,
        micro_tokens=20,
        autocast=autocast,
        offload=offload,
        critic=value,
        reference=reference if recipe.needs_reference else None,
        **how,
    )
    shown = [row("demo", "demo", turns=(5,), prompt=3)] if recipe.imitates else []
    losses = []
    for _ in range(3):
        losses.append(trainer.update(rows, episodes, shown).loss)
        trainer.load_state_dict(trainer.state_dict())
    assert {p.device.type for p in trainer.parameters.values()} == {device}
    for optimizer in (trainer.optimizer, *([value.optimizer] if value else [])):
        state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
        assert {tensor.device.type for tensor in state} == {"cpu" if offload else device}
    return losses, {name: tensor.cpu() for name, tensor in there.state_dict().items()}


def compared(device: str) -> list[dict[str, Any]]:
    found = []
    for name, changes, how in CASES:
        (here, mine), (there, theirs) = (updated(where, name, changes, **how) for where in ("cpu", device))
        off = max(float((mine[key] - theirs[key]).abs().max()) for key in mine)
        found.append(
            {"case": f"{name} {changes} {how}", "here": here, "there": there, "off": off, "narrow": "autocast" in how}
        )
    return found


def trained(folder: Path, start: Path, device: str, *, offload: bool = False, **loop: Any) -> dict[str, Any]:
    """What a run on the device came to; resumed, made again from its tapes and asked again."""
    config = TrainConfig.model_validate(
        {
            "agent": f"{SCENE}:Speaker",
            "env": f"{SCENE}:Letters",
            "tasks": ["a", "b", "c", "d", "ab", "cd"],
            "evaluation": {"fraction": 0.34},
            "engine": {"kind": "embedded", "model": str(start)},
            "trainer": {"device": device, "offload": offload},
            "loop": {
                "updates": 4,
                "groups": 4,
                "group_size": 4,
                "sampling": {"max_tokens": 2},
                "max_lag": 0,
                "optimiser": {"lr": 1e-2, "gradient_checkpointing": True},
                "limits": {"turns": 6},
                "checkpoint_every": 1,
                "keep_checkpoints": None,
                **loop,
            },
        }
    )
    run = folder / device
    summary, again = [train(config, run, resume=resume) for resume in (False, True)]
    with Store.open(run) as store:
        devices = {stored.record.info["on"]["device"] for stored in store.run_records("use")}
    weights = load_pretrained(summary.model).model.state_dict()
    torch.save(weights, folder / f"{device}.pt")
    return {
        "reward": summary.reward,
        "books": summary.books_close and again.books_close,
        "updates": again.updates,
        "devices": sorted(devices),
        "reproduce": tapereel(["reproduce", str(run)]),
        "requery": tapereel(["replay", "model", str(run)]),
    }


async def served(start: Path, device: str) -> dict[str, float]:
    """What a server with its model on the device says of a token: its log-prob, and the likeliest beside it."""
    async with EngineServer(load_pretrained(start, device=device).model, "m").serving() as server:
        engine = await connect(servers(server.url, model=start), RENDERER)
        try:
            completion = await engine.complete(ask(max_tokens=4))
        finally:
            await engine.close()
        assert completion.logprobs is not None
        return {"logprob": completion.logprobs[0], "tokens": len(completion.logprobs)}


def main() -> None:
    folder, device = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "elsewhere"
    if device == "elsewhere":
        from .standin import elsewhere

        assert elsewhere.LIBRARY.exists()
    start = folder / "start"
    model().save_pretrained(start)
    WORDS.save_pretrained(start)
    runs = {where: trained(folder, start, where) for where in ("cpu", device)}
    here, there = (torch.load(folder / f"{device}.pt", weights_only=True) for device in runs)
    off = max(float((here[name] - there[name]).abs().max()) for name in here)
    critic = trained(folder / "ppo", start, device, offload=True, recipe="ppo")
    answers = [asyncio.run(served(start, where)) for where in ("cpu", device)]
    found = {"compared": compared(device), "runs": runs, "off": off, "critic": critic, "served": answers}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
