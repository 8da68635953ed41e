"""Training on tapes: token rows, the stream, the objective's terms, the trainer, the training loop and its history.

Names are imported at their first use, so importing the package doesn't import torch. The package may import `agents`,
`envs` and `tapes`, and not `cli`.
"""

if __name__ == "finetune":
    raise ImportError(
        "import tapereel.finetune, not finetune: the repository root is the package `tapereel` (pip install -e .)"
    )

import importlib
from typing import TYPE_CHECKING, Any

from ..tapes.common.extras import raise_missing

if TYPE_CHECKING:
    from .data.provenance import episode_of
    from .data.rows import Row, rows
    from .data.stream import Episode, Stream
    from .interchange.rl_columns import prepare_rl_fields, rl_features, to_dataset
    from .interchange.rl_dataset import (
        RLConfig,
        collate,
        fill_ref_logprobs,
        populate_rl_data,
        rl_step,
        update_rewards_and_advantages,
    )
    from .loop.history import History
    from .loop.loop import Loop
    from .loop.loop_config import LoopConfig, WarmStartConfig
    from .objective.recipe import Recipe
    from .recipes import RECIPES, get_recipe
    from .run.evaluation import Evaluation
    from .run.warm_start import warm_start
    from .trainer.critic import Critic, CriticTrainer
    from .trainer.options import OptimiserConfig
    from .trainer.trainer import Trainer, UpdateStats

__all__ = [
    "RECIPES",
    "Critic",
    "CriticTrainer",
    "Episode",
    "Evaluation",
    "History",
    "Loop",
    "LoopConfig",
    "OptimiserConfig",
    "RLConfig",
    "Recipe",
    "Row",
    "Stream",
    "Trainer",
    "UpdateStats",
    "WarmStartConfig",
    "collate",
    "episode_of",
    "fill_ref_logprobs",
    "get_recipe",
    "populate_rl_data",
    "prepare_rl_fields",
    "rl_features",
    "rl_step",
    "rows",
    "to_dataset",
    "update_rewards_and_advantages",
    "warm_start",
]

_HOME = {
    **dict.fromkeys(("prepare_rl_fields", "rl_features", "to_dataset"), "interchange.rl_columns"),
    **dict.fromkeys(
        ("RLConfig", "collate", "fill_ref_logprobs", "populate_rl_data", "rl_step", "update_rewards_and_advantages"),
        "interchange.rl_dataset",
    ),
    "episode_of": "data.provenance",
    **dict.fromkeys(("LoopConfig", "WarmStartConfig"), "loop.loop_config"),
    "Evaluation": "run.evaluation",
    "History": "loop.history",
    "Loop": "loop.loop",
    **dict.fromkeys(("RECIPES", "Recipe", "get_recipe"), "recipes"),
    "warm_start": "run.warm_start",
    **dict.fromkeys(("Episode", "Stream"), "data.stream"),
    **dict.fromkeys(("Row", "rows"), "data.rows"),
    **dict.fromkeys(("Critic", "CriticTrainer"), "trainer.critic"),
    "OptimiserConfig": "trainer.options",
    **dict.fromkeys(("Trainer", "UpdateStats"), "trainer.trainer"),
}
"""The module of this package that defines each public name."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise_missing(error, f"tapereel.finetune.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
