"""A policy: the model that a run trains, and the engines that sample with its weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ...agents.engines.embedded.embedded_engine import EmbeddedEngine
from ...agents.engines.embedded.pretrained import (
    Attention,
    Pretrained,
    device_of,
    emptied,
    load_pretrained,
    placed,
)
from ...agents.engines.engine import TRAINING, TrainableEngine
from ...agents.engines.weights.weight_config import add_adapters
from ...agents.rendering.renderer import Renderer
from ...agents.setup.engine_config import AnyEngineConfig, CustomConfig, EmbeddedConfig, connect_to
from ...agents.vision.vision import Vision
from ...tapes.common.text import logger
from ...tapes.errors import UsageError
from ...tapes.store.run_directory import PlayerResults, Results
from ...tapes.store.store import Store
from ..loop.history import BrokenHistory, History
from ..loop.loop_config import LoopConfig
from ..trainer.checkpoint import Digest, ModelWeights
from ..trainer.ranks import Ranks
from ..trainer.updates import PolicyTrainer
from .player_config import Frozen, TrainedConfig, TrainerConfig

log = logger("train")

MOVED = 0.1
"""SmolLM2-135M learned nothing when 2 % of its weights could change in bfloat16, and slowly with 15 %."""
MERGE = (
    'python -c "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; '
    "f, m = {}, 'merged'; M.from_pretrained(f).merge_and_unload().save_pretrained(m); "
    'T.from_pretrained(f).save_pretrained(m)"'
)
"""The command that merges the adapters in a folder into their base model."""


@dataclass(frozen=True)
class Policy:
    """A model, and how to make engines with its weights. Updates change the model in place."""

    model: Any
    tokenizer: Any
    renderer: Renderer
    slots: int = 64
    capacity: int | None = None
    attention: Attention | None = None
    """The model's attention implementation in training, or None if transformers chose it."""
    autocast: torch.dtype | None = None
    """The dtype of the body's forward pass, in training and in embedded engines. None means the dtype of the
    weights."""
    offload: bool = False
    """Whether the optimiser's state is kept in main memory."""
    servers: Callable[[], Awaitable[TrainableEngine]] | None = None
    """Connects to the servers that sample for the loop. None means that an embedded engine samples."""
    empty: Any = None
    """A copy of the model without weights (`emptied`), if several processes share the weights of `model`."""
    held: ModelWeights | None = None
    """The weights, if several processes share them."""

    @property
    def vision(self) -> Vision | None:
        """How the model reads pictures, or None if it reads only text."""
        pictures = self.renderer.pictures
        return pictures if isinstance(pictures, Vision) else None

    @property
    def sees(self) -> bool:
        """Whether the model's engines accept pictures."""
        return self.vision is not None

    def copy(self, version: str) -> EmbeddedEngine:
        """Return an engine with a copy of the current weights, named `version`. Because it is a copy, the trainer can
        change the model while the engine samples."""
        model: Any = self.weights.whole()
        if sampling_attention(self.attention) != self.attention:
            model.set_attn_implementation(sampling_attention(self.attention))
        return EmbeddedEngine(
            model,
            self.renderer,
            version=version,
            slots=self.slots,
            capacity=self.capacity,
            copy=False,
            autocast=self.autocast,
        )

    @property
    def weights(self) -> ModelWeights:
        """The weights of `model`."""
        return self.held or ModelWeights(self.model)

    def computing(self, loop: LoopConfig) -> Policy:
        """Return this policy with the dtype that `loop` sets for the forward pass."""
        return replace(self, autocast=loop.optimiser.forward_dtype)

    def check_rate(self, loop: LoopConfig) -> None:
        """Log a warning if sampling rounds weights to bfloat16, and the updates of the loop are too small to change
        more than `MOVED` of them there. AdamW moves a weight by about the learning rate."""
        if self.autocast is not torch.bfloat16 or self.held is not None or hasattr(self.model, "peft_config"):
            return
        steps, settings = loop.epochs * loop.minibatches, loop.optimiser
        far = settings.lr * steps * sum(map(settings.schedule.factor, range(loop.updates)))
        matrices = [p.detach().flatten()[::101] for p in self.model.parameters() if p.requires_grad and p.ndim == 2]
        changed = sum(int(((w + far).bfloat16() != w.bfloat16()).sum()) for w in matrices)
        share = changed / max(sum(map(len, matrices)), 1)
        if loop.updates and share < MOVED:
            log.warning(
                f"loop.optimiser.lr={settings.lr:g} moves a weight by about {far:.1g} in {loop.updates} updates, and "
                f"sampling rounds weights to bfloat16 (loop.optimiser.autocast), where only {share:.0%} of them can "
                "change by that: raise lr, remove autocast, or train adapters (trainer.lora)"
            )

    async def sampler(self, version: str) -> TrainableEngine:
        """Return the engine that samples for the loop, with the current weights."""
        if self.servers is None:
            return self.copy(version)
        engine = await self.servers()
        try:
            if engine.version != version:
                await engine.sync_weights(self.weights.weights(copied=True), version)
        except BaseException:
            await engine.close()
            raise
        return engine

    def history(
        self,
        store: Store,
        lineage: str,
        directory: Path,
        make_trainer: Callable[[str], PolicyTrainer],
        loop: LoopConfig,
    ) -> History:
        """Return the policy's history for `lineage`, with checkpoints in `directory`."""
        history = History(
            store,
            lineage,
            directory,
            self.model,
            make_trainer,
            renderer=self.renderer,
            tokenizer=self.tokenizer,
            keep=loop.keep_checkpoints,
            keep_bytes=loop.keep_checkpoint_bytes,
            held=self.held,
        )
        history.delivery.autocast = self.autocast
        history.delivery.vision = self.vision
        return history


def load_policy(engine: TrainedConfig, trainer: TrainerConfig, seed: int, ranks: Ranks | None = None) -> Policy:
    """Load the model named by `engine` onto the device named by `trainer`. Its adapters, if any, are drawn from
    `seed`. `ranks` may share its weights."""
    ranks = ranks or Ranks()
    device = device_of(trainer.device)
    assert engine.model is not None, "checked when the configuration is read"
    found = load_pretrained(
        engine.model,
        dtype=trainer.dtype,
        attention=trainer.attention,
        video=engine.renderer.video,
        empty=ranks.sharded and trainer.lora is None,
        **({"device": trainer.device, "quantise": True} if trainer.lora and trainer.lora.quantise else {}),
    )
    if hasattr(found.model, "peft_config"):
        raise UsageError(
            f"{engine.model} holds adapters, and a run trains a whole model or new adapters. Merge them into their "
            f"base model, and train the folder `merged`: {MERGE.format(repr(str(engine.model)))}"
        )
    renderer = engine.renderer.make(found.tokenizer, found.vision, found.ends)
    # Adapters are drawn on the CPU, because a run must begin with the same adapters on every machine, and random
    # numbers differ between devices.
    model = found.model if trainer.lora is None else add_adapters(found.model, trainer.lora, seed=seed)
    if trainer.lora is not None and (base := Path(engine.model)).is_dir():  # the adapters load from any folder
        cast(Any, model).peft_config["default"].base_model_name_or_path = str(base.resolve())
    if trainer.freeze is not None and (found.vision is None or trainer.lora is not None):
        why = "trainer.lora trains adapters alone" if found.vision else f"the model in {engine.model} reads text alone"
        raise UsageError(f"trainer.freeze={trainer.freeze} would do nothing, since {why}: remove it")
    if found.vision is not None and trainer.lora is None:
        freeze(model, found.vision, trainer.freeze or "tower")
    empty = emptied(model) if ranks.sharded else None
    return Policy(
        shared(model, found, str(engine.model), device, ranks),
        found.tokenizer,
        renderer,
        engine.slots,
        engine.capacity,
        trainer.attention,
        offload=trainer.offload,
        servers=_connection(engine, trainer),
        empty=empty,
    )


def shared(
    model: torch.nn.Module, found: Pretrained, folder: str, device: torch.device, ranks: Ranks
) -> torch.nn.Module:
    """Return the model of `found`, with or without adapters, on `device`. If the ranks share weights, it has this
    rank's part of each."""
    if found.weights is None:
        model = placed(model, device)
        if ranks.sharded and not ranks.rank:
            log.warning(
                f"each rank loads the whole model {folder} before it keeps its part: it has adapters or reads "
                "pictures, or its files name the weights differently"
            )
    ranks.shard(model, found.weights, device)
    return model


def freeze(model: torch.nn.Module, vision: Vision, what: Frozen) -> None:
    """Freeze or unfreeze the weights that encode pictures. Frozen weights have no gradient and no optimiser state, but
    they are part of checkpoints."""
    tower, *projector = vision.tower(model)
    tower.requires_grad_(what == "nothing")
    for module in projector:  # the projector may be a part of the tower
        module.requires_grad_(what != "vision")


def _connection(engine: TrainedConfig, trainer: TrainerConfig) -> Callable[[], Awaitable[TrainableEngine]] | None:
    """Return a function that makes the loop's engine. Return None if the engine is embedded, because it then samples
    with a copy of the weights."""
    if isinstance(engine, EmbeddedConfig):
        return None
    if isinstance(engine, CustomConfig):
        return partial(_make_custom, engine)
    return partial(connect_to, engine, weights=True, adapters=trainer.lora)


async def _make_custom(engine: CustomConfig) -> TrainableEngine:
    return cast(TrainableEngine, engine.make(TRAINING, "Training"))


async def check_custom(engine: AnyEngineConfig, loop: LoopConfig, *, frozen: bool = False) -> None:
    """Make a custom engine and close it again, so that an unsuitable engine is found before anything is written. Raises
    UsageError, like `CustomConfig.make`."""
    if isinstance(engine, CustomConfig) and frozen:
        await engine.check()
    elif isinstance(engine, CustomConfig):
        await engine.check((*TRAINING, "sleep") if loop.sleep else TRAINING, "Training")


def sampling_attention(attention: Attention | None) -> Attention | None:
    """Return the attention implementation for sampling in an embedded engine, if `attention` is used for training."""
    return attention if attention in (None, "eager") else "sdpa"


def check_begun(results: Results | PlayerResults, digest: Digest, run: Path, folder: str) -> None:
    """Raise BrokenHistory if the run did not begin with weights of this digest. In a new run, note the digest in
    `results`."""
    found = digest(results.base)
    if results.base is None:
        results.base = found
    if results.base != found:
        raise BrokenHistory(
            f"{run} began with weights of digest {results.base[:12]}; those in {folder} have {found[:12]} now, so the "
            "run's updates don't apply to them: put the original model back"
        )
