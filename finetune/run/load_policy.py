"""Loads the policies of a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ...agents.engines.embedded.pretrained import (
    device_of,
    emptied,
    load_pretrained,
)
from ...agents.engines.engine import TRAINING, TrainableEngine
from ...agents.engines.weights.weight_config import add_adapters
from ...agents.setup.engine_config import AnyEngineConfig, CustomConfig, EmbeddedConfig, connect_to
from ...agents.vision.vision import Vision
from ...tapes.common.text import logger
from ...tapes.errors import UsageError
from ...tapes.store.run_directory import PlayerResults, Results
from ..loop.history import BrokenHistory
from ..loop.loop_config import NO_WARM_START, LoopConfig, WarmStartConfig
from ..loop.policy import Policy
from ..objective.recipe import Recipe
from ..trainer.checkpoint import Digest
from ..trainer.distributed import Processes
from ..trainer.ranks import Ranks
from .player_config import Frozen, TrainedConfig, TrainerConfig, adapters_of
from .trainer_factory import TrainerFactory, shared

log = logger("train")

MOVED = 0.1
"""SmolLM2-135M learned nothing when 2 % of its weights could change in bfloat16, and slowly with 15 %."""
MERGE = (
    'python -c "from peft import AutoPeftModelForCausalLM as M; from transformers import AutoTokenizer as T; '
    "f, m = {}, 'merged'; M.from_pretrained(f).merge_and_unload().save_pretrained(m); "
    'T.from_pretrained(f).save_pretrained(m)"'
)
"""The command that merges the adapters in a folder into their base model."""


def load_policy(
    engine: TrainedConfig,
    trainer: TrainerConfig,
    loop: LoopConfig,
    recipe: Recipe,
    *,
    seed: int,
    warm: WarmStartConfig = NO_WARM_START,
    ranks: Ranks | None = None,
) -> Policy:
    """Load the model named by `engine` onto the device named by `trainer`, and the models that `recipe` compares it
    with. Its adapters, if any, are drawn from `seed`. `ranks` may share its weights. Raises UsageError if the models
    can't be used together."""
    ranks = ranks or Ranks()
    trainer = trainer.model_copy(update={"lora": adapters_of(engine, trainer)})
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
    model = shared(model, found, str(engine.model), device, ranks)
    trainers = TrainerFactory(
        model=model,
        empty=empty,
        renderer=renderer,
        tokenizer=found.tokenizer,
        loop=loop,
        recipe=recipe,
        warm=warm,
        ranks=ranks,
        offload=trainer.offload,
    )
    return Policy(
        weights=Processes(ranks, model, trainers.make, empty),
        renderer=renderer,
        tokenizer=found.tokenizer,
        autocast=loop.optimiser.forward_dtype,
        keep=loop.keep_checkpoints,
        slots=engine.slots,
        capacity=engine.capacity,
        attention=trainer.attention,
        servers=_connection(engine),
    )


def check_rate(model: torch.nn.Module, loop: LoopConfig) -> None:
    """Log a warning if sampling rounds weights to bfloat16, and the updates of the loop are too small to change more
    than `MOVED` of them there. AdamW moves a weight by about the learning rate. Adapters aren't checked, since their
    weights are small."""
    if loop.optimiser.forward_dtype is not torch.bfloat16 or hasattr(model, "peft_config"):
        return
    steps, settings = loop.epochs * loop.minibatches, loop.optimiser
    far = settings.lr * steps * sum(map(settings.schedule.factor, range(loop.updates)))
    matrices = [p.detach().flatten()[::101] for p in model.parameters() if p.requires_grad and p.ndim == 2]
    changed = sum(int(((w + far).bfloat16() != w.bfloat16()).sum()) for w in matrices)
    share = changed / max(sum(map(len, matrices)), 1)
    if loop.updates and share < MOVED:
        log.warning(
            f"loop.optimiser.lr={settings.lr:g} moves a weight by about {far:.1g} in {loop.updates} updates, and "
            f"sampling rounds weights to bfloat16 (loop.optimiser.autocast), where only {share:.0%} of them can "
            "change by that: raise lr, remove autocast, or train adapters (trainer.lora)"
        )


def freeze(model: torch.nn.Module, vision: Vision, what: Frozen) -> None:
    """Freeze or unfreeze the weights that encode pictures. Frozen weights have no gradient and no optimiser state, but
    they are part of checkpoints."""
    tower, *projector = vision.tower(model)
    tower.requires_grad_(what == "nothing")
    for module in projector:  # the projector may be a part of the tower
        module.requires_grad_(what != "vision")


def _connection(engine: TrainedConfig) -> Callable[[], Awaitable[TrainableEngine]] | None:
    """Return a function that makes the loop's engine. Return None if the engine is embedded, because it then samples
    with a copy of the weights."""
    if isinstance(engine, EmbeddedConfig):
        return None
    if isinstance(engine, CustomConfig):
        return partial(_make_custom, engine)
    return partial(connect_to, engine, weights=True)


async def _make_custom(engine: CustomConfig) -> TrainableEngine:
    return cast(TrainableEngine, engine.make(TRAINING, "Training"))


async def check_custom(engine: AnyEngineConfig, loop: LoopConfig, *, frozen: bool = False) -> None:
    """Make a custom engine and close it again, so that an unsuitable engine is found before anything is written. Raises
    UsageError, like `CustomConfig.make`."""
    if isinstance(engine, CustomConfig) and frozen:
        await engine.check()
    elif isinstance(engine, CustomConfig):
        await engine.check((*TRAINING, "sleep") if loop.sleep else TRAINING, "Training")


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
