"""Training on tapes: token rows, the stream, the objective's terms, the trainer, the training loop and its history.

Names are imported at their first use, so importing the package doesn't import torch. The package may import `agents`,
`envs` and `tapes`, and not `cli`.
"""

if __name__ == "finetune":
    raise ImportError(
        "import tapereel.finetune, not finetune: the repository root is the package `tapereel` (pip install -e .)"
    )

from typing import TYPE_CHECKING

from ..tapes.common.extras import lazy_names

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
    from .run.train_config import TrainConfig
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
    "TrainConfig",
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

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "data.provenance": "episode_of",
        "data.rows": "Row rows",
        "data.stream": "Episode Stream",
        "interchange.rl_columns": "prepare_rl_fields rl_features to_dataset",
        "interchange.rl_dataset": "RLConfig collate fill_ref_logprobs populate_rl_data rl_step "
        "update_rewards_and_advantages",
        "loop.history": "History",
        "loop.loop": "Loop",
        "loop.loop_config": "LoopConfig WarmStartConfig",
        "recipes": "RECIPES Recipe get_recipe",
        "run.evaluation": "Evaluation",
        "run.train_config": "TrainConfig",
        "run.warm_start": "warm_start",
        "trainer.critic": "Critic CriticTrainer",
        "trainer.options": "OptimiserConfig",
        "trainer.trainer": "Trainer UpdateStats",
    },
)
