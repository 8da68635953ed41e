"""Fills unset settings with the defaults of a profile, which depends on the model's size. Doesn't import torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from ...tapes.common.hub import local_folder
from ...tapes.common.text import logger
from ..engines.embedded.pretrained import ADAPTERS
from ..engines.servers.server_config import Adapters

log = logger("profile")
TINY, LIGHT, LARGE = 10_000_000, 400_000_000, 1_500_000_000
"""A model is `tiny` if it has fewer than `TINY` weights without its embeddings. It is then assumed to be made from
scratch. Other models are `light`, `small` or `large`: with fewer than `LIGHT`, fewer than `LARGE`, or more weights in
total. A CPU can train a light model."""
ConfigT = TypeVar("ConfigT", bound=BaseModel)


class Shape(NamedTuple):
    """A decoder with gated feed-forward layers.

    `body` is the number of weights without embeddings and output layer. `parameters` is the number of all weights, and
    counts tied weights once. `queries` and `keys` are the number of heads times the head size. `feed` is the width
    of the feed-forward layers. `drops` is true if the model has dropout.
    """

    body: int
    parameters: int
    layers: int
    width: int
    heads: int
    queries: int
    keys: int
    feed: int
    vocabulary: int
    drops: bool
    tower: int = 0
    """Weights in a vision model's tower, without the projector. They are part of `body`."""
    seen: tuple[int, int] = (0, 0)
    """(layers, width) of the tower."""


def shape_of(model: str | None) -> Shape | None:
    """Return the shape of a model on this machine, as read from `config.json` and the headers of its weight files.

    For adapters, this is the shape of their base model. Returns None if the model isn't on this machine, or if its
    files don't show the shape.
    """
    folder = None if model is None else local_folder(model)
    try:
        if folder is not None and (folder / ADAPTERS).is_file():
            folder = local_folder(json.loads((folder / ADAPTERS).read_text())["base_model_name_or_path"])
        if folder is None or not (folder / "config.json").is_file():
            return None
        about = json.loads((folder / "config.json").read_text())
        about = about.get("text_config", {}) | about  # in a vision model, the part that reads text
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        width, layers, heads, vocabulary = (int(about[name]) for name in names)
        size, experts = about.get("head_dim") or width // heads, about.get("num_experts_per_tok")
        queries, keys = size * heads, size * (about.get("num_key_value_heads") or heads)
        feed = about["moe_intermediate_size"] * experts if experts else about["intermediate_size"]
        tables = vocabulary * width * (1 if about.get("tie_word_embeddings", True) else 2)
        stored: dict[str, Any] = {}
        for path in filter(Path.is_file, folder.glob("*.safetensors")):
            with path.open("rb") as file:  # the format allows headers of at most 100 MB
                stored |= json.loads(file.read(min(int.from_bytes(file.read(8), "little"), 10**8)))
        others = re.compile(r"__metadata__|lm_head\.|model\.(\w+\.)?embed_tokens\.")
        body = sum(prod(one["shape"]) for name, one in stored.items() if not others.match(name))
        body = body or layers * (2 * width * (queries + keys) + 3 * width * feed + 2 * width) + width
        drops = any(value for name, value in about.items() if "drop" in name)
        inside = re.compile(r"(model\.)?(visual|vision_model)\.(?!merger|deepstack)")
        tower = sum(prod(one["shape"]) for name, one in stored.items() if inside.match(name))
        sees = about.get("vision_config", {})
        seen = (sees.get("depth", sees.get("num_hidden_layers", 0)), sees.get("embed_dim", sees.get("hidden_size", 0)))
        return Shape(body, body + tables, layers, width, heads, queries, keys, feed, vocabulary, drops, tower, seen)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError, RecursionError):
        return None  # loading the model will raise a better error


class Default(NamedTuple):
    """A setting, its value in each profile, and the source of the values for pretrained models."""

    key: str
    """The key in the configuration."""
    tiny: Any
    small: Any
    large: Any
    source: str
    far: float
    """A warning is logged if the user's value is off by more than this factor. 0 means no warning."""
    adapted: Any
    """The value for adapters on a pretrained model. None means that adapters have no value of their own."""
    light: Any = None
    """The value for light models. None means the value for small ones."""
    light_adapted: Any = None
    """The value for adapters on a light model. None means `adapted`."""

    def value(self, profile: str, adapters: bool) -> object:
        """Return the value in the profile, for adapters or all weights."""
        light = profile == "light"
        if adapters and profile != "tiny" and (value := (light and self.light_adapted) or self.adapted):
            return value
        if light:
            return self.small if self.light is None else self.light
        return {"tiny": self.tiny, "small": self.small, "large": self.large}[profile]


EPISODES: tuple[Default, ...] = (
    Default("sampling.max_tokens", 64, 1024, 2048, "verl's GSM8K: 1024; DAPO on 7B: 2048", 0, None, 256),
    Default("limits.turns", 8, 10, 10, "verifiers' ToolEnv", 0, None),
    Default("limits.agent_seconds", 120.0, 600.0, 600.0, "10 turns of 2048 tokens at 34 a second", 0, None),
    Default("limits.system_seconds", 600.0, 1800.0, 1800.0, "three times the agent's seconds", 0, None),
)
"""The settings of episodes."""
SLOTS = Default("engine.slots", 64, 16, 16, "a float32 KV cache of 64 times 4096 tokens fits on no GPU", 0, None)


@cache
def computes_bfloat16(about: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this machine's CPU multiplies matrices in bfloat16. On others, autocast saves no time."""
    try:
        return re.search(r"^(flags|Features)\s*:.*\b(avx512_bf16|amx_bf16|bf16)\b", about.read_text(), re.M) is not None
    except OSError:
        return False


def fitted(config: ConfigT) -> ConfigT:
    """Return the configuration of a run with each unset setting filled from the profile.

    Logs which profile applies and why. Also logs a warning for each number that is far from the profile's number.
    Hosted models and models that aren't on this machine have no profile.
    """
    return fill(config, [*EPISODES, SLOTS], config)


def fill(config: ConfigT, rows: Iterable[Default], policy: object, above: str = "") -> ConfigT:
    """Return the configuration with the unset settings in `rows` filled from the profile of the model that `policy`,
    which has an engine and perhaps a trainer, names.

    `above` is the prefix of the settings' names in log messages.
    """
    engine: Any = getattr(policy, "engine")  # noqa: B009
    trainer = getattr(policy, "trainer", None)
    model = None if engine.kind == "litellm" else getattr(engine, "model", None)
    adapted = getattr(trainer, "lora", None) is not None or isinstance(getattr(engine, "weights", None), Adapters)
    if model is None or local_folder(model) is None:
        return config
    shape = shape_of(model)
    name, size = "small", "an unknown size"
    if shape is not None:
        sizes = {"tiny": shape.body < TINY, "light": shape.parameters < LIGHT, "small": shape.parameters < LARGE}
        name = next((name for name, fits in sizes.items() if fits), "large")
        size = f"{shape.parameters:,} weights"
    filled: list[str] = []
    for row in rows:
        key, source, factor = row.key, row.source, row.far
        if "checkpointing" in key and (shape is None or shape.drops):
            continue  # the trainer refuses checkpointing for a model with dropout
        if "autocast" in key and not computes_bfloat16():
            continue
        value: Any = row.value(name, adapted)
        made, present = _put(config, key.split("."), value)
        if made != config:
            config, filled = made, [*filled, f"{above}{key}={value}"]
        elif factor and present and name != "tiny" and not value / factor * 0.999 <= present <= value * factor * 1.001:
            log.warning(f"{above}{key}={present:g} is far from {value:g}, the value of profile `{name}` ({source})")
    if filled:
        why = f"below {TINY // 10**6} M without embeddings: made from scratch" if name == "tiny" else "pretrained"
        log.info(f"profile `{name}`, since {model} has {size} ({why}); it sets {', '.join(filled)}")
    return config


def _put(group: Any, path: list[str], value: Any, unset: bool = False) -> tuple[Any, Any]:
    """Set the setting at `path` to `value` if it is unset. Return (the group, the setting's previous value).

    `unset` means that the whole group is a default, so none of its settings was set.
    """
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
