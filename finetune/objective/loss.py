"""The objective computes one loss from a stream and a recipe, in two steps.

`prepare` runs once per rollout batch, on whole groups. It computes everything that doesn't depend on the weights of the
model: which tokens enter the update, and their advantages.

`Part.loss` computes the loss of some tokens in an optimiser batch, loss = sum_t w_t l_t. The token weights w are fixed
for the whole optimiser batch. So the losses and gradients of micro-batches and ranks add up to the loss and gradient of
the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from ..data import segments
from ..data.answers import reflections, repeated
from ..data.rows import Row
from ..data.stream import BadBatch, Episode, Stream
from . import KL, Context, RewardKL, Term, TokenKL
from .kl import estimate
from .recipe import Recipe
from .surrogate import NoSurrogate
from .term import kind_name, sized

_COLUMNS = ("ref", "teacher", "anchor", "entropy", "value", "after")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A rollout batch with its advantages."""

    recipe: Recipe
    stream: Stream
    advantage: Tensor
    """(T,) float64 advantages, 0 for tokens that don't enter the update."""
    entered: Tensor
    """(T,) bool: tokens that enter the update. The loss is normalised over these tokens."""
    selected: Tensor
    """(T,) bool: tokens that keep their loss under `select.entropy_top`."""
    target: Tensor | None
    """(T,) float64 targets for the critic, or None if the recipe has no critic."""

    def part(self, episodes: Tensor | None = None, add_up: Callable[[Tensor], Tensor] = lambda x: x) -> Part:
        """Return the data for one optimiser step. `episodes` (E,) bool selects the episodes, by default all of them.

        `add_up` sums a tensor over all ranks of the step, and every rank must call it. The loss is divided by a total
        over all ranks, because the gradients of the ranks are summed, not averaged.
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
    """The part of a batch that one optimiser step trains on, with the weight of each token's loss."""

    batch: Batch
    weight: Tensor
    """(T,) float64: the weight w of each token's loss. It is 0 for tokens that are not in this part or not selected."""
    entered: Tensor
    """(T,) bool: tokens that enter the update. The loss is normalised over these tokens."""
    live: Tensor
    """(T,) bool: tokens whose loss can have a gradient. The model computes log-probs only for these tokens."""

    def loss(
        self, lp: Tensor, entropy: Tensor | None, index: Tensor, context: Context, betas: tuple[float, ...]
    ) -> Tensor:
        """Return the sum of w l over the tokens `index` (n,). `lp` (n,) are their current log-probs, with gradient.

        `entropy` (n,) are their entropies, or None. `betas` has the current coefficient of each term in the recipe's
        `coefficients`. If a token's loss depends on other tokens (the recipe isn't `local`), `index` must hold whole
        turns or episodes, because their ratio is computed from all of their tokens.
        """
        recipe, stream = self.batch.recipe, self.batch.stream
        live = self.live[index]
        if not bool(live.all()):
            lp, index = lp[live], index[live]
            entropy = None if entropy is None else entropy[live]
        a = self.batch.advantage[index].to(lp.dtype)
        anchor, importance = recipe.anchor(lp, index, stream, context)
        per_token = recipe.surrogate(lp, anchor, a, index, stream, context)
        per_token = sized(recipe.surrogate, per_token, len(index), "tokens")
        # As in TRL, the correction weighs the policy's loss and not the regularisers.
        if importance is not None and recipe.surrogate.advantages:
            per_token = importance * per_token
        parts: list[tuple[str, Term, Tensor]] = [("policy", recipe.surrogate, per_token)]
        # `betas` goes on with the coefficients of KLs in the reward. A loss of demonstrations alone passes none.
        for term, beta in zip(recipe.regulariser, betas, strict=False):
            if term.active and term.per_token:
                name = term.measure if isinstance(term, KL) else str(getattr(term, "kind", type(term).__name__))
                added = sized(term, term(lp, entropy, index, stream, beta, context), len(index), "tokens")
                parts.append((name, term, added))
                per_token = per_token + added
        w = self.weight[index].to(lp.dtype)
        keep = recipe.select.tokens(lp, a, index, stream, context)
        if keep is not None:
            w = torch.where(keep, w, torch.zeros_like(w))
        if lp.requires_grad and not per_token.requires_grad and not isinstance(recipe.surrogate, NoSurrogate):
            raise BadBatch(
                f"{kind_name(recipe.surrogate)} returned losses without a gradient: compute them from `lp`, without "
                "detach(), item() or NumPy"
            )
        for name, term, part in parts:
            context.add_part(name, value := float((w * part.detach()).sum()))
            if not isfinite(value):
                context.sums.note(term, part, w != 0, stream.episode[index], stream.episodes.tape)
        return (w * per_token).sum()


def prepare(recipe: Recipe, stream: Stream, context: Context) -> Batch:
    """Return the batch with its advantages: select episodes, and apply rewards, baseline, credit and adjustments.

    This doesn't depend on the current weights of the model, so all optimiser steps on a rollout batch share one result.
    """
    advantages = recipe.surrogate.advantages
    scored = recipe.select.scored(stream, advantages, context)
    # Groups are selected before anything is compared, so a dropped group has no part in a batch's statistics.
    episodes, compared = recipe.select.episodes(scored, stream, context, by_fork=recipe.baseline.by == "fork")
    entered = episodes[stream.episode]
    # A token that no model sampled has no log-prob at sampling, so it has no ratio.
    known = stream.old.isfinite()
    if advantages:
        context.sums.add("token/authored", entered & ~known)
        entered = entered & known
    context.sums.put("episodes", float(episodes.sum()))
    tokens = float(entered.sum())
    context.sums.put("tokens", tokens)
    context.sums.put("token/entered", tokens, len(entered))
    # These metrics need no forward pass, so they also cover the tokens that the trainer doesn't forward.
    sampled = entered & known
    entropy = torch.where(sampled, -stream.old, 0.0).sum(dtype=torch.float64)  # faster than selecting them
    context.sums.put("entropy/sampled", float(entropy), int(sampled.sum()))
    if stream.ref is not None:
        context.sums.add("kl/reference/sampled", estimate("k1", stream.old, stream.ref)[sampled])
    if advantages:
        context.sums.add("reward", stream.episodes.reward[scored], extremes=True)
        context.sums.add("reward/square", stream.episodes.reward[scored].square())
        # A term's statistics cover the episodes in `trains`. Scored episodes that aren't compared are removed from it
        # here.
        table = replace(stream.episodes, trains=stream.episodes.trains & (compared | ~scored))
        if recipe.reward.components is not None:  # its weights replace the recorded ones
            table = replace(table, weights=(recipe.reward.components,) * len(compared))
        advantage, target = _advantages(recipe, replace(stream, episodes=table), compared, entered, context)
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


def prepare_batches(
    recipe: Recipe,
    rows: Sequence[Row],
    episodes: Sequence[Episode],
    stream: Stream,
    context: Context,
    sizes: Sequence[int] = (),
) -> Batch:
    """Return the batch for `stream`, which was made from `rows` and `episodes` and may contain several rollout batches.

    A term that compares over a batch (`by = batch`) compares only within one rollout batch. The token weights are
    computed once, over all rollout batches. Without a term that compares over a batch, the gradient is the same as for
    one large batch.

    `sizes` gives the number of episodes in each rollout batch, in the order of `episodes`. If it is empty, there is one
    rollout batch. Raises BadBatch if the sizes don't add up to the number of episodes.
    """
    _count_answers(rows, stream, context)
    if len(sizes) < 2:
        return prepare(recipe, stream, context)
    if sum(sizes) != len(episodes):
        raise BadBatch(
            f"rollout batches of {', '.join(map(str, sizes))} episodes add up to {sum(sizes)}, but there are "
            f"{len(episodes)} episodes: give the sizes of all batches"
        )
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[stream.episode]
    parts: list[tuple[torch.Tensor, Batch]] = []
    first = 0
    for k, size in enumerate(sizes):
        mine = owner == k
        own = episodes[first : first + size]
        first += size
        names = {episode.tape for episode in own}
        part = Stream.of([row for row in rows if row.taught_by in names], own, dtype=stream.old.dtype)
        # A rollout batch's tokens have the same order in `part` as in `stream`, so a mask selects their columns.
        columns = {name: column[mine] for name in _COLUMNS if (column := getattr(stream, name)) is not None}
        parts.append((mine, prepare(recipe, part.having(**columns), context)))
    advantage = torch.zeros(len(stream), dtype=torch.float64)
    entered, selected = (torch.zeros(len(stream), dtype=torch.bool) for _ in range(2))
    target = None if parts[0][1].target is None else torch.zeros_like(advantage)
    for mine, batch in parts:
        advantage[mine], entered[mine], selected[mine] = batch.advantage, batch.entered, batch.selected
        if target is not None and batch.target is not None:
            target[mine] = batch.target
    return Batch(recipe=recipe, stream=stream, advantage=advantage, entered=entered, selected=selected, target=target)


def _count_answers(rows: Sequence[Row], stream: Stream, context: Context) -> None:
    """Add two metrics of the answers that have own tokens: repeated 4-grams, and words of reflection such as "wait"."""
    # Most answers are short, and then plain lists are faster than NumPy arrays for each row.
    tokens = stream.token.tolist()
    cuts = np.union1d(np.flatnonzero(np.diff(stream.call.numpy())) + 1, stream.rows.numpy()).tolist()
    repeats = [repeated(tokens[start:end]) for start, end in pairwise(cuts)]
    texts = [row.replies[call] for row in rows if row.replies for call in dict.fromkeys(row.call.tolist())]
    words = [reflections(text) for text in texts if text is not None]
    context.sums.put("answer/repeated", sum(repeats), len(repeats))
    context.sums.put("answer/reflections", sum(words), len(words))


def _advantages(
    recipe: Recipe, stream: Stream, compared: Tensor, entered: Tensor, context: Context
) -> tuple[Tensor, Tensor | None]:
    # `x` is one number per unit, which is an episode or a turn. `credit` turns units into tokens.
    x = recipe.reward(stream, context)
    per_turn = recipe.reward.of_turns
    if per_turn:
        x = _of_own_turns(x, stream)
    ours = compared[stream.turns.episode] if per_turn else compared
    ours = ours & ~x.isnan()
    # An unscored unit's NaN is set to 0, because a NaN in a sum over the batch would make every advantage NaN.
    x = torch.where(ours, x, torch.zeros_like(x))
    owner = stream.turns.episode if per_turn else torch.arange(len(compared))

    units, tokens = ("turns" if per_turn else "episodes", ours, owner), ("tokens", entered, stream.episode)

    def checked(term: Term, found: object, name: str, used: Tensor, episode: Tensor) -> Tensor:
        """Return what `term` has computed for each unit, and 0 where it isn't used."""
        y = sized(term, found, len(used), name)
        context.sums.note(term, y, used, episode, stream.episodes.tape)
        return torch.where(used, y, torch.zeros_like(y))

    # Rewards are shaped before the baseline compares them, so that a penalty is compared like a reward.
    for term in recipe.shape:
        if isinstance(term, RewardKL):
            term.observe(entered, stream, context)
        if not isinstance(term, TokenKL):
            x = checked(term, term(x, ours, stream, context), *units)
    penalty = None if recipe.token_penalty is None else recipe.token_penalty.penalty(stream)
    returns = segments.total(x, owner, len(compared))
    if penalty is not None:
        returns = returns + segments.total(penalty, stream.episode, len(compared))
    returns = returns[owner[ours].unique()]
    context.sums.add("return", returns, extremes=True)
    context.sums.add("return/square", returns.square())
    if per_turn and recipe.baseline.compares and recipe.credit.takes_penalty:
        # The baseline compares what turns lead to, so the credit comes first.
        advantage, target = _compared_returns(recipe, x, ours, penalty, stream, context)
        advantage = checked(recipe.baseline, advantage, *tokens)
    else:
        y = checked(recipe.baseline, recipe.baseline(x, ours, stream, context), *units)
        advantage, target = recipe.credit(y, penalty, stream, context)
        advantage = checked(recipe.credit, advantage, *tokens)
    if recipe.bootstraps:
        context.sums.add("episode/bootstrapped", (stream.episodes.cut & ~stream.beyond.isnan())[compared])
    for term in recipe.adjust:
        advantage = checked(term, term(advantage, entered, stream, context), *tokens)
    # Statistics of what the surrogate will see: after all adjustments, and only of tokens in the loss.
    own = advantage[entered]
    context.sums.add("advantage", own, extremes=True)
    context.sums.add("advantage/square", own.square())
    return advantage, target


def _of_own_turns(x: Tensor, stream: Stream) -> Tensor:
    """Move each reward in `x` (N,) of a turn without own tokens to the last turn before that has some, in the same
    episode. The result is NaN where there is no reward."""
    own, scored = stream.turn[stream.openings], ~x.isnan()
    at = torch.searchsorted(own, torch.arange(len(x)), right=True) - 1
    at = torch.cat([own, own.new_full((1,), -1)])[at]  # -1 takes the last one: no own turn before
    moves = scored & (at >= 0) & (stream.turns.episode[at] == stream.turns.episode)
    earned = torch.zeros_like(x).index_add(0, at[moves], x[moves])
    return torch.where(segments.count(at[moves], len(x)) > 0, earned, torch.nan)


def _compared_returns(
    recipe: Recipe, x: Tensor, ours: Tensor, penalty: Tensor | None, stream: Stream, context: Context
) -> tuple[Tensor, Tensor | None]:
    """Return the advantages (T,) and the critic's targets if a baseline compares what turns lead to.

    The credit comes first. The return of a turn is the one of its first token, and all tokens of the turn get its
    advantage. A turn has no return if neither it nor a later turn is scored.
    """
    of_token, target = recipe.credit(x, penalty, stream, context)
    turn = stream.turn[stream.openings]
    episode = stream.turns.episode[turn]
    returns, place = torch.zeros_like(x), torch.zeros_like(stream.turns.episode)
    returns[turn] = of_token[stream.openings]
    place[turn] = torch.arange(len(turn)) - torch.searchsorted(episode, episode)
    more = torch.cat([episode[1:] == episode[:-1], episode[:1] < 0])  # another own turn follows in the episode
    has = torch.zeros_like(ours)
    has[turn] = segments.recur(ours[turn].to(x.dtype), more.to(x.dtype)) > 0
    y = recipe.baseline(returns, has, replace(stream, turns=replace(stream.turns, place=place)), context)
    y = sized(recipe.baseline, y, len(x), "turns")
    return y[stream.turn], target


def betas(recipe: Recipe) -> tuple[float, ...]:
    """Return the initial coefficient of each term in the recipe's `coefficients`."""
    return tuple(term.first_coefficient for term in recipe.coefficients)


def check_needs(recipe: Recipe, *, reference: bool, critic: bool, teacher: bool = False) -> None:
    """Raise BadBatch if the recipe needs a reference model, a teacher or a critic that the trainer doesn't have."""
    for name, needs, has in (
        ("reference", recipe.needs_reference, reference),
        ("teacher", recipe.needs_teacher, teacher),
    ):
        if needs and not has:
            raise BadBatch(
                f"recipe {recipe.name!r} reads a {name} model's log-probs, and the trainer has none: pass {name}=... "
                "to the trainer, or set the KL coefficient (beta) to 0"
            )
    if recipe.needs_value and not critic:
        raise BadBatch(
            f"recipe {recipe.name!r} needs a value per token, and the trainer has no critic: pass "
            "critic=CriticTrainer(Critic.of(model)) to the trainer (tapereel.finetune)"
        )
