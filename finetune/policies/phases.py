"""The trainers of a run, phase by phase: made from its settings alone, so that every process makes the same ones.

Knows nothing of run directories, tapes and loops.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..history.loop_config import CriticConfig, LoopConfig, OptimiserConfig, WarmStartConfig
from ..objective.recipe import BadRecipe, Recipe
from ..recipes import get_recipe
from ..trainer.critic import Critic, CriticTrainer, Value
from ..trainer.ranks import Ranks
from ..trainer.trainer import Trainer


def recipes_by_phase(recipe: Recipe) -> dict[str, Recipe]:
    """What each phase trains by; `recipe` is the loop's. `sft-more`: imitation that goes on in the loop's place."""
    sft = get_recipe("sft")
    return {"sft": sft, "sft-more": sft, "rl": recipe}


Frozen = nn.Module | Literal["adapters-off"]
"""A model that nothing changes: one of its own, or the one below the adapters of what is trained."""


def frozen(model: Any) -> Frozen:
    """What a recipe may compare with: the model that the run begins with. Fresh adapters add nothing, so the model
    below them is that one, and no copy is kept."""
    return "adapters-off" if hasattr(model, "disable_adapter") else copy.deepcopy(model).eval()


@dataclass
class Phases:
    """What a run trains with."""

    model: Any
    """With the base weights, when this is made; updates change it in place."""
    loop: LoopConfig
    recipe: Recipe
    """Of the loop's updates."""
    warm: WarmStartConfig

    def __post_init__(self) -> None:
        self._reference: Frozen | None = frozen(self.model) if self.recipe.needs_reference else None
        if self.loop.critic is not None and not self.recipe.needs_value:
            raise BadRecipe(
                f"recipe {self.recipe.name!r} takes no values, so that loop.critic would do nothing: leave "
                "it out, or take a recipe with credit 'gae', as `ppo`"
            )
        self._recipes = recipes_by_phase(self.recipe)

    def trainer(self, phase: str, work: Any = None, ranks: Ranks | None = None) -> Trainer:
        """A fresh trainer of `phase` on the model as it is now. work: the model that is trained in its place, with the
        same weights, where the ranks have one of their own."""
        recipe = self._recipes[phase]
        optimiser = self.warm.optimiser if phase == "sft" else self.loop.optimiser
        work = work or self.model
        return Trainer(
            work,
            recipe,
            lr=optimiser.lr,
            betas=optimiser.betas,
            weight_decay=optimiser.weight_decay,
            grad_clip=optimiser.grad_clip,
            schedule=optimiser.schedule,
            micro_tokens=optimiser.micro_tokens,
            ema=optimiser.ema,
            **_memory(optimiser),
            reference=self._reference if recipe.needs_reference else None,
            critic=self._critic(work, ranks) if recipe.needs_value else None,
            critic_first=self._critic_config.first if recipe.needs_value else 0,
            ranks=ranks,
        )

    @property
    def _critic_config(self) -> CriticConfig:
        return self.loop.critic or CriticConfig()

    def _critic(self, work: Any, ranks: Ranks | None) -> CriticTrainer:
        """A fresh critic on the policy as it is now: a resumed run makes the same one, then loads its weights."""
        config = self._critic_config
        optimiser = config.optimiser
        critic = (
            Critic.of(self.model, normalised=config.normalised)
            if config.body == "own"
            else Critic.on(work, normalised=config.normalised)
        )
        return CriticTrainer(
            critic,
            loss=Value(clip=config.clip),
            lr=optimiser.lr,
            betas=optimiser.betas,
            weight_decay=optimiser.weight_decay,
            grad_clip=optimiser.grad_clip,
            schedule=optimiser.schedule,
            micro_tokens=optimiser.micro_tokens,
            **_memory(optimiser),
            passes=config.passes,
            ranks=ranks,
        )


def _memory(optimiser: OptimiserConfig) -> dict[str, Any]:
    """What the forward passes of a trainer keep, and in which dtype."""
    return {
        "autocast": None if optimiser.autocast is None else getattr(torch, optimiser.autocast),
        "gradient_checkpointing": optimiser.gradient_checkpointing,
    }
