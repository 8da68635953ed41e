"""Runs in a process of its own, since a device can't be taken back: training there and on the CPU, side by side.

    python -m tests.contract.device_run FOLDER

Prints one JSON object with what both came to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tapereel.agents.engines.embedded.pretrained import load_pretrained
from tapereel.agents.engines.weights.weight_config import AdapterConfig, add_adapters
from tapereel.cli import main as tapereel
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.run.train_config import TrainConfig
from tapereel.finetune.run.train_run import train
from tapereel.finetune.trainer.critic import Critic, CriticTrainer
from tapereel.finetune.trainer.trainer import Trainer
from tapereel.tapes.store.store import Store

from ..finetune.build import batch, row, tiny_model
from ..finetune.loop.lab import WORDS, model
from .standin import elsewhere

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
    ("grpo", {}, {"autocast": torch.bfloat16}),
]


def updated(
    device: str,
    name: str,
    changes: dict[str, Any],
    *,
    critic: str | None = None,
    adapters: bool = False,
    autocast: torch.dtype | None = None,
    **how: Any,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of three updates, and the weights after them."""
    dtype = torch.float64 if autocast is None else torch.float32
    plain, recipe = tiny_model(dtype), get_recipe(name, changes)
    rows, episodes = batch(model=tiny_model())
    made: Any = add_adapters(plain, AdapterConfig(rank=2, alpha=4)) if adapters else plain
    there = made.to(device)
    (there.get_base_model() if adapters else there).tie_weights()
    reference: Any = "adapters-off" if adapters else tiny_model(dtype).to(device).eval()
    value = None
    if critic is not None:
        read = Critic.of(there, normalised=True) if critic == "own" else Critic.on(there, normalised=True)
        value = CriticTrainer(read, passes=2)
    trainer = Trainer(
        there,
        recipe,
        lr=1e-2,
        critic=value,
        ema=0.9,
        micro_tokens=20,
        autocast=autocast,
        reference=reference if recipe.needs_reference else None,
        **how,
    )
    shown = [row("demo", "demo", turns=(5,), prompt=3)] if recipe.imitates else []
    losses = []
    for _ in range(3):
        losses.append(trainer.update(rows, episodes, shown).loss)
        trainer.load_state_dict(trainer.state_dict())
    assert {p.device.type for p in trainer.parameters.values()} == {device}
    return losses, {name: tensor.cpu() for name, tensor in there.state_dict().items()}


def compared() -> list[dict[str, Any]]:
    found = []
    for name, changes, how in CASES:
        (here, mine), (there, theirs) = (updated(device, name, changes, **how) for device in ("cpu", "elsewhere"))
        off = max(float((mine[key] - theirs[key]).abs().max()) for key in mine)
        found.append(
            {"case": f"{name} {changes} {how}", "here": here, "there": there, "off": off, "narrow": "autocast" in how}
        )
    return found


def trained(folder: Path, start: Path, device: str, **loop: Any) -> dict[str, Any]:
    """What a run on the device came to; resumed, made again from its tapes and asked again."""
    config = TrainConfig.model_validate(
        {
            "agent": f"{SCENE}:Speaker",
            "env": f"{SCENE}:Letters",
            "tasks": ["a", "b", "c", "d", "ab", "cd"],
            "evaluation": {"fraction": 0.34},
            "engine": {"kind": "embedded", "model": str(start)},
            "trainer": {"device": device},
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
        "requery": tapereel(["replay", str(run), "--model"]),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    assert elsewhere.LIBRARY.exists()
    start = folder / "start"
    model().save_pretrained(start)
    WORDS.save_pretrained(start)
    runs = {device: trained(folder, start, device) for device in ("cpu", "elsewhere")}
    here, there = (torch.load(folder / f"{device}.pt", weights_only=True) for device in runs)
    off = max(float((here[name] - there[name]).abs().max()) for name in here)
    critic = trained(folder / "ppo", start, "elsewhere", recipe="ppo")
    print(json.dumps({"compared": compared(), "runs": runs, "off": off, "critic": critic}))


if __name__ == "__main__":
    main()
