"""The objective: from a stream and a recipe to one loss, in two halves.

`prepare` is everything that doesn't depend on the weights being trained: who enters, advantages. It is done once per
rollout batch, groups whole. `Part.loss` is the rest, for any subset of the tokens of one optimiser batch: with weights
w fixed for that batch, loss = sum_t w_t l_t over the subset, so that the losses and gradients of disjoint subsets add
up to those of the whole.

It knows nothing of models, rows, micro-batches and optimisers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.stream import BadBatch, Stream
from . import Context, TokenKL
from .recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rollout batch, ready to be trained on."""

    recipe: Recipe
    stream: Stream
    advantage: Tensor
    """(T,) float64; 0 for tokens that don't enter."""
    entered: Tensor
    """(T,) bool: tokens that are counted in T."""
    selected: Tensor
    """(T,) bool: those of them that have a loss."""
    target: Tensor | None
    """(T,) float64 what the critic should have said; None without a critic."""

    def part(self, episodes: Tensor | None = None, add_up: Callable[[Tensor], Tensor] = lambda x: x) -> Part:
        """What one optimiser step trains on: all, or the episodes in `episodes` (E,) bool.

        add_up adds a tensor up over all ranks that take the step together.
        """
        entered = self.entered if episodes is None else self.entered & episodes[self.stream.episode]
        n = self.recipe.weigh.totals(self.stream, entered)
        n = float(add_up(torch.tensor(n, dtype=torch.float64)))
        weight = self.recipe.weigh(self.stream, entered, n)
        live = entered & self.selected
        if self.recipe.idle_at_zero:
            live = live & (self.advantage != 0)
        if self.recipe.idle:
            live = torch.zeros_like(live)
        return Part(
            batch=self, weight=torch.where(self.selected, weight, torch.zeros_like(weight)), entered=entered, live=live
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """The batch of one optimiser step, with its weights fixed."""

    batch: Batch
    weight: Tensor
    """(T,) float64 w: what each token's loss counts; 0 off the selected tokens of this part."""
    entered: Tensor
    """(T,) bool: tokens counted in T."""
    live: Tensor
    """(T,) bool: tokens whose loss can have a gradient; the model needs to see no others."""

    def loss(
        self, lp: Tensor, entropy: Tensor | None, index: Tensor, context: Context, betas: tuple[float, ...]
    ) -> Tensor:
        """sum of w l over the tokens `index` (n,), whose log-probs are lp (n,).

        Where the recipe isn't local, `index` holds whole units. betas: the coefficient of each regulariser now.
        """
        recipe, stream = self.batch.recipe, self.batch.stream
        live = self.live[index]
        if not bool(live.all()):
            lp, index = lp[live], index[live]
            entropy = None if entropy is None else entropy[live]
        a = self.batch.advantage[index].to(lp.dtype)
        anchor, importance = recipe.anchor(lp, index, stream, context)
        per_token = recipe.surrogate(lp, anchor, a, index, stream, context)
        if importance is not None and recipe.surrogate.advantages:
            per_token = importance * per_token
        for term, beta in zip(recipe.regulariser, betas, strict=True):
            if term.active and term.per_token:
                per_token = per_token + term(lp, entropy, index, stream, beta, context)
        w = self.weight[index].to(lp.dtype)
        keep = recipe.select.tokens(lp, a, index, stream, context)
        if keep is not None:
            w = torch.where(keep, w, torch.zeros_like(w))
        return (w * per_token).sum()


def prepare(recipe: Recipe, stream: Stream, context: Context) -> Batch:
    """Everything of the objective that comes before the log-probs to be trained: selection, rewards to advantages."""
    advantages = recipe.surrogate.advantages
    scored = recipe.select.scored(stream, advantages, context)
    episodes = recipe.select.episodes(scored, stream, context, by_fork=recipe.baseline.by == "fork")
    entered = episodes[stream.episode]
    if advantages:
        known = stream.old.isfinite()
        context.sums.add("token/authored", entered & ~known)
        entered = entered & known
    context.sums.put("episodes", float(episodes.sum()))
    context.sums.put("tokens", float(entered.sum()))
    if advantages:
        advantage, target = _advantages(recipe, stream, scored, entered, context)
    else:
        advantage, target = torch.zeros(len(stream), dtype=torch.float64), None
    return Batch(
        recipe=recipe,
        stream=stream,
        advantage=advantage,
        entered=entered,
        target=target,
        selected=recipe.select.top_entropy(entered, stream),
    )


def _advantages(
    recipe: Recipe, stream: Stream, scored: Tensor, entered: Tensor, context: Context
) -> tuple[Tensor, Tensor | None]:
    x = recipe.reward(stream, context)
    per_turn = recipe.reward.per == "turn"
    ours = scored[stream.turns.episode] if per_turn else scored
    ours = ours & ~x.isnan()
    context.sums.add("reward", stream.episodes.reward[scored], extremes=True)
    context.sums.add("reward/square", stream.episodes.reward[scored].square())
    x = torch.where(ours, x, torch.zeros_like(x))
    for term in recipe.shape:
        if not isinstance(term, TokenKL):
            x = torch.where(ours, term(x, ours, stream, context), torch.zeros_like(x))
    y = recipe.baseline(x, ours, stream, context)
    price = None if recipe.token_price is None else recipe.token_price.price(stream)
    advantage, target = recipe.credit(y, price, stream)
    for term in recipe.adjust:
        advantage = term(advantage, entered, stream, context)
    advantage = torch.where(entered, advantage, torch.zeros_like(advantage))
    context.sums.add("advantage", advantage[entered], extremes=True)
    context.sums.add("advantage/square", advantage[entered].square())
    return advantage, target


def betas(recipe: Recipe) -> tuple[float, ...]:
    """The coefficients that the regularisers start with."""
    return tuple(term.first_coefficient for term in recipe.regulariser)


def check_needs(recipe: Recipe, *, reference: bool, critic: bool) -> None:
    """A recipe that needs a model which isn't there is refused before anything is computed."""
    if recipe.needs_reference and not reference:
        raise BadBatch(
            f"recipe {recipe.name!r} compares with a reference model: pass reference=... to the trainer, or "
            "set its beta to 0"
        )
    if recipe.needs_value and not critic:
        raise BadBatch(f"recipe {recipe.name!r} needs a value per token: pass critic=... to the trainer")
