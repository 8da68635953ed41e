"""Defaults that fit the model: a profile by its size fills the settings that the user left unset.

Doesn't import torch. docs/training.md explains the choices.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from ...tapes.common.hub import local_folder
from ...tapes.common.text import logger
from .model_shape import shape_of

log = logger("profile")
TINY, LARGE = 10_000_000, 1_500_000_000
"""Weights without embeddings below which a model counts as made from scratch; all weights from which it is `large`."""
ConfigT = TypeVar("ConfigT", bound=BaseModel)


class Setting(NamedTuple):
    """One setting in the profiles. `source`: of the values for pretrained models. `far`: the factor from which a
    user's value gives a warning. `lora`: the value with adapters on a pretrained model, where it differs."""

    key: str
    tiny: Any
    small: Any
    large: Any
    source: str
    far: float | None = None
    lora: Any = None


_LORA = "with LoRA 10 times as much: LoRA Without Regret"
PROFILES = (
    Setting("loop.optimiser.lr", 3e-4, 1e-6, 1e-6, f"TRL's GRPOConfig; {_LORA}", far=10, lora=1e-5),
    Setting("loop.optimiser.schedule", {}, {"warmup": 10}, {"warmup": 10}, "verl's DAPO on 7B"),
    Setting("loop.optimiser.gradient_checkpointing", False, True, True, "TRL's GRPOConfig"),
    Setting("loop.group_size", 16, 8, 16, "TRL's GRPOConfig: 8; DAPO: 16", far=4),
    Setting("loop.sampling.max_tokens", 64, 1024, 2048, "verl's GSM8K: 1024; DAPO on 7B: 2048", far=8),
    Setting("loop.limits.turns", 8, 10, 10, "verifiers' ToolEnv"),
    Setting("loop.limits.agent_seconds", 120.0, 600.0, 600.0, "10 turns of 2048 tokens at 34 a second"),
    Setting("loop.limits.system_seconds", 600.0, 1800.0, 1800.0, "three times the agent's seconds"),
    Setting("loop.group_deadline", 300.0, 1800.0, 1800.0, "as long as the rest of an episode may take"),
    Setting("warm.optimiser.lr", 3e-3, 2e-5, 2e-5, f"TRL's SFTConfig; {_LORA}", far=10, lora=2e-4),
    Setting("warm.optimiser.gradient_checkpointing", False, True, True, "TRL's SFTConfig"),
    Setting("engine.slots", 64, 16, 16, "a float32 KV cache of 64 times 4096 tokens fits on no GPU"),
    Setting("evaluation.every", 10, 20, 20, "verl's GRPO examples: 5 to 20"),
    Setting("evaluation.limit", 256, 128, 128, "as many episodes as an update has"),
    Setting("evaluation.engine", None, "loop", "loop", "another copy of the weights costs memory"),
)


def fitted(config: ConfigT, model: str | None, *, lora: bool = False) -> ConfigT:
    """`config` with the values of the model's profile where it sets none. Logs the profile, and each number that is
    far from it. model: a folder, or a name of the hub; None, or a model that isn't on this machine: no profile."""
    folder = None if model is None else local_folder(model)
    if folder is None:
        return config
    shape = shape_of(folder)
    size, name = (
        ("an unknown size", "small") if shape is None else (f"{shape.parameters / 1e6:,.1f} M weights", "small")
    )
    if shape is not None:
        name = "tiny" if shape.body < TINY else "large" if shape.parameters >= LARGE else "small"
    filled, far = list[str](), list[str]()
    for setting in PROFILES:
        # `run` has the limits and the sampling of the loop as its own.
        key = setting.key if "loop" in type(config).model_fields else setting.key.removeprefix("loop.")
        value = setting.lora if lora and name != "tiny" and setting.lora else getattr(setting, name)
        made, present = _put(config, key.split("."), value)
        if made is not config:
            config, filled = made, [*filled, f"{key}={value}"]
        elif present is None or not setting.far or name == "tiny":
            continue
        elif not value / setting.far * 0.999 <= present <= value * setting.far * 1.001:
            far.append(f"{key}={present:g} is far from {value:g}, the value of profile `{name}` ({setting.source})")
    if filled:
        why = f"below {TINY // 10**6} M besides embeddings: made from scratch" if name == "tiny" else "pretrained"
        log.warning(f"profile `{name}`, since {model} has {size} ({why}); it sets {', '.join(filled)}")
    for line in far:
        log.warning(line)
    return config


def _put(group: Any, path: list[str], value: Any, unset: bool = False) -> tuple[Any, Any]:
    """(the group, with `value` where it sets none; what is set there). unset: the group is a default as a whole."""
    name, *below = path
    if group is None or name not in type(group).model_fields:
        return group, None
    present, unset = getattr(group, name), unset or name not in group.model_fields_set
    if below:
        inner, found = _put(present, below, value, unset)
        return (group if inner is present else group.model_copy(update={name: inner})), found
    if not unset:
        return group, present
    made = type(present).model_validate(value) if isinstance(present, BaseModel) else value
    return group.model_copy(update={name: made}), present
