"""The trainers of a run, one for each phase. Settings alone decide them, so every process makes the same trainers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ...tapes.errors import UsageError
from ..history.loop_config import CriticConfig, LoopConfig, OptimiserConfig, WarmStartConfig
from ..objective.recipe import Recipe
from ..recipes import get_recipe
from ..trainer.critic import Critic, CriticTrainer, Value
from ..trainer.ranks import Ranks
from ..trainer.trainer import Trainer


def recipes_by_phase(recipe: Recipe) -> dict[str, Recipe]:
    """The recipe of each phase; `recipe` is the loop's. `sft-more`: more imitation in place of the loop (a control)."""
    sft = get_recipe("sft")
    return {"sft": sft, "sft-more": sft, "rl": recipe}


Frozen = nn.Module | Literal["adapters-off"]
"""A reference model that no update changes: a copy, or the trained model with its adapters switched off."""


def frozen(model: nn.Module) -> Frozen:
    """The model that the run begins with, for a recipe with a KL to it. Fresh adapters add nothing to the model below
    them, so with adapters that model is the reference, and no copy is kept."""
    return "adapters-off" if hasattr(model, "disable_adapter") else copy.deepcopy(model).eval()


@dataclass
class Phases:
    """Makes the trainers of a run."""

    model: nn.Module
    """It must have the base weights when `Phases` is made: the reference is copied then. Updates change it in place."""
    loop: LoopConfig
    recipe: Recipe
    """Of the loop's updates."""
    warm: WarmStartConfig

    def __post_init__(self) -> None:
        self._reference: Frozen | None = frozen(self.model) if self.recipe.needs_reference else None
        if self.loop.critic is not None and not self.recipe.needs_value:
            raise UsageError(
                f"recipe {self.recipe.name!r} takes no values, so loop.critic would do nothing: remove it, or choose "
                "a recipe with credit 'gae', as `ppo`"
            )
        self._recipes = recipes_by_phase(self.recipe)

    def trainer(self, phase: str, work: nn.Module | None = None, ranks: Ranks | None = None) -> Trainer:
        """A fresh trainer of `phase` on the model as it is now. work: a model with the same weights that is trained in
        its place, where each rank has its own (a sharded one, for example)."""
        recipe = self._recipes[phase]
        optimiser = self.warm.optimiser if phase == "sft" else self.loop.optimiser
        work = work or self.model
        return Trainer(
            work,
            recipe,
            **_settings(optimiser),
            ema=optimiser.ema,
            pack=optimiser.pack,
            reference=self._reference if recipe.needs_reference else None,
            critic=self._critic(work, ranks) if recipe.needs_value else None,
            critic_first=self._critic_config.first if recipe.needs_value else 0,
            ranks=ranks,
        )

    @property
    def _critic_config(self) -> CriticConfig:
        return self.loop.critic or CriticConfig()

    def _critic(self, work: nn.Module, ranks: Ranks | None) -> CriticTrainer:
        """A fresh critic, a copy of the policy as it is now. A resumed run makes it too, then loads its weights."""
        config = self._critic_config
        critic = (
            Critic.of(self.model, normalised=config.normalised)
            if config.body == "own"
            else Critic.on(work, normalised=config.normalised)
        )
        return CriticTrainer(
            critic,
            loss=Value(clip=config.clip),
            **_settings(config.optimiser),
            passes=config.passes,
            ranks=ranks,
        )


def _settings(optimiser: OptimiserConfig) -> dict[str, Any]:
    """The settings that a policy's trainer and a critic's have in common."""
    same = ("lr", "betas", "eps", "weight_decay", "grad_clip", "schedule", "micro_tokens", "gradient_checkpointing")
    return {
        **{name: getattr(optimiser, name) for name in same},
        "autocast": None if optimiser.autocast is None else getattr(torch, optimiser.autocast),
    }
