"""The trainer: one update function for every recipe. It is blind to algorithms and knows nothing of tapes and loops.

Accumulation is exact: weights are fixed for the whole optimiser batch before the first micro-batch, so any split into
micro-batches, rows or ranks gives the sum of the same terms. An update that meets a number which isn't finite
(log-prob, loss, gradient norm) leaves weights and optimiser as they were, and is counted and reported. On one CPU
thread the same batches in the same order give bit-equal weights.

1. Tokens whose loss and gradient are exactly 0 (a flat group without a KL loss) are never forwarded.
2. An update without any live token isn't applied: momentum alone moves nothing.
3. Weight decay spares vectors (norms, biases).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from . import objective
from .recipes import Recipe
from .rows import Row
from .schedule import Schedule
from .score import MICRO_TOKENS, Micro, forward, plan, score
from .stream import BadBatch, Episode, Stream
from .words import KL, Context, Moments, Sums

Skip = Literal["log-prob", "loss", "gradient", "nothing to train on"]


@dataclass(kw_only=True)
class UpdateStats:
    """What one optimiser step did."""

    step: int
    """Applied updates of the trainer, this one included if it was applied."""
    skipped: Skip | None
    """None: applied. Else what wasn't finite, or that no token had a gradient; weights are as before."""
    loss: float
    """sum of w l; NaN when it wasn't finite."""
    grad_norm: float
    """Before clipping; NaN when the update was skipped before."""
    lr: float
    sums: Sums
    """Every metric as a sum and a count."""
    stream: Stream
    weight: Tensor
    """(T,) float64 what each own token's loss counted; 0 for those that took no part."""
    advantage: Tensor
    """(T,) float64."""

    @property
    def applied(self) -> bool:
        return self.skipped is None

    @property
    def mismatch(self) -> float | None:
        """Largest |log-prob now - at sampling| of a scored token; None when none was scored."""
        return self.sums.highs.get("mismatch")

    @property
    def ess(self) -> float | None:
        """Effective share of the sample: (sum r)^2 / sum r^2 / n of r = exp(now - at sampling); 1 on policy."""
        if not self.sums.counts.get("ratio"):
            return None
        return self.sums["ratio"] ** 2 / self.sums["ratio/square"] / self.sums.counts["ratio"]


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A rollout batch with its advantages, ready for one or several updates."""

    rows: Sequence[Row]
    batch: objective.Batch
    sums: Sums
    """What was counted while preparing; reported with the first update."""


@dataclass(kw_only=True)
class _Accumulated:
    """What the micro-batches of one update came to."""

    loss: float = 0.0
    skipped: Skip | None = None
    sums: Sums = field(default_factory=Sums)


class Trainer:
    """Trains `model` by `recipe`. Not safe to share between threads."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_clip: float | None = 1.0,
        schedule: Schedule | None = None,
        reference: nn.Module | Literal["adapters-off"] | None = None,
        ema: float | None = None,
        micro_tokens: int = MICRO_TOKENS,
    ) -> None:
        """reference: a frozen model, or the model itself without its LoRA adapters. ema: decay of a running average of
        the weights, kept in `averaged`. grad_clip: largest gradient norm; None: no bound."""
        objective.check_needs(recipe, reference=reference is not None, critic=False)
        self.model = model
        self.recipe = recipe
        self.lr = lr
        self.grad_clip = grad_clip
        self.schedule = schedule or Schedule()
        self.reference = reference
        self.ema = ema
        self.micro_tokens = micro_tokens
        self.moments = Moments()
        self.betas = list(objective.betas(recipe))
        self.steps = 0
        """Updates applied."""
        self.skips: dict[str, int] = {}
        """Updates skipped, by reason."""
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        vectors = [p for p in self.parameters.values() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=eps, fused=True)
        self.averaged = {name: p.detach().clone() for name, p in self.parameters.items()} if ema is not None else {}

    def update(self, rows: Sequence[Row], episodes: Sequence[Episode]) -> UpdateStats:
        """One optimiser step on one rollout batch, groups whole."""
        return self.step(self.prepare(rows, episodes))

    def updates(self, rows: Sequence[Row], episodes: Sequence[Episode], *, epochs: int = 1, minibatches: int = 1,
                seed: int | None = None) -> Iterator[UpdateStats]:
        """Several optimiser steps on one rollout batch; advantages are computed once, over the whole.

        Each epoch cuts the episodes into `minibatches` parts of like size, in an order shuffled by `seed` and the
        number of updates so far; seed None keeps the order given.
        """
        prepared = self.prepare(rows, episodes, several=epochs * minibatches > 1)
        for _ in range(epochs):
            for part in self._cut(len(episodes), minibatches, seed):
                yield self.step(prepared, episodes=part)

    def _cut(self, episodes: int, minibatches: int, seed: int | None) -> list[Tensor | None]:
        if minibatches == 1:
            return [None]
        if minibatches > episodes:
            raise BadBatch(f"{episodes} episodes can't be cut into {minibatches} mini-batches: take fewer mini-batches")
        order = torch.arange(episodes)
        if seed is not None:
            order = torch.randperm(episodes, generator=torch.Generator().manual_seed(seed * 1_000_003 + self.steps))
        cuts = []
        for members in order.tensor_split(minibatches):
            mask = torch.zeros(episodes, dtype=torch.bool)
            mask[members] = True
            cuts.append(mask)
        return cuts

    def prepare(self, rows: Sequence[Row], episodes: Sequence[Episode], *, several: bool = False) -> Prepared:
        """Advantages and everything else that is computed once per rollout batch.

        several: more than one step will follow, so that a recomputed anchor must be written down now.
        """
        recipe = self.recipe
        stream = Stream.of(rows, episodes)
        unit = recipe.score.temperature == "one"
        if recipe.needs_reference:
            stream = stream.having(ref=self._reference(rows, unit))
        top = recipe.select.entropy_top is not None
        if top or (recipe.anchor.to == "recomputed" and several):
            now = score(self.model, rows, entropy=top, unit_temperature=unit, micro_tokens=self.micro_tokens)
            stream = stream.having(anchor=now.logprob, entropy=now.entropy)
        context = Context(moments=self.moments)
        batch = objective.prepare(recipe, stream, context)
        return Prepared(rows=rows, batch=batch, sums=context.sums)

    def _reference(self, rows: Sequence[Row], unit: bool) -> Tensor:
        if isinstance(self.reference, nn.Module):
            return score(self.reference, rows, unit_temperature=unit, micro_tokens=self.micro_tokens).logprob
        return score(self.model, rows, ref=True, unit_temperature=unit, micro_tokens=self.micro_tokens).logprob

    def step(self, prepared: Prepared, *, episodes: Tensor | None = None) -> UpdateStats:
        """One optimiser step on a prepared batch, or on those of its episodes in `episodes` (E,) bool."""
        part = prepared.batch.part(episodes)
        lr = self.lr * self.schedule.factor(self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        done = self._accumulate(prepared.rows, part)
        norm = float("nan")
        if done.skipped is None:
            norm = float(nn.utils.clip_grad_norm_(self.parameters.values(), self.grad_clip or float("inf")))
            if not torch.isfinite(torch.tensor(norm)):
                done.skipped = "gradient"
        if done.skipped is None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self._after(done.sums, part)
        else:
            self.skips[done.skipped] = self.skips.get(done.skipped, 0) + 1
        self.optimizer.zero_grad(set_to_none=True)
        sums = Sums()
        sums.merge(prepared.sums)
        sums.merge(done.sums)
        return UpdateStats(step=self.steps, skipped=done.skipped, loss=done.loss, grad_norm=norm, lr=lr, sums=sums,
                           stream=prepared.batch.stream, weight=part.weight, advantage=prepared.batch.advantage)

    def _accumulate(self, rows: Sequence[Row], part: objective.Part) -> _Accumulated:
        """Gradients of the whole part, micro-batch by micro-batch; stops before the backward of a bad one."""
        done = _Accumulated()
        micros = plan(rows, live=part.live, micro_tokens=self.micro_tokens)
        if not micros:
            done.skipped = "nothing to train on"
            return done
        context = Context(sums=done.sums, moments=self.moments)
        whole = None if self.recipe.local or len(micros) == 1 else self._whole(rows, part, context, done)
        for micro in micros:
            if done.skipped is not None:
                break
            scores = self._forward(micro)
            if not bool(scores.logprob.isfinite().all()):
                done.skipped, done.loss = "log-prob", float("nan")
                break
            done.sums.add("logprob", scores.logprob.detach(), extremes=True)
            if scores.entropy is not None:
                done.sums.add("entropy", scores.entropy.detach())
            if self.recipe.surrogate.advantages:
                observe(scores.logprob.detach(), part.batch.stream.old[micro.index], done.sums)
            if whole is not None:
                tensors = [t for t in scores if t is not None]
                torch.autograd.backward(tensors, [g[micro.index] for g in whole[:len(tensors)]])
                continue
            loss = part.loss(scores.logprob, scores.entropy, micro.index, context, tuple(self.betas))
            done.loss += float(loss.detach())
            if not bool(loss.isfinite()):
                done.skipped, done.loss = "loss", float("nan")
                break
            loss.backward()
        return done

    def _whole(self, rows: Sequence[Row], part: objective.Part, context: Context, done: _Accumulated) -> list[Tensor]:
        """The loss's gradient by all log-probs (and entropies), for a recipe that compares across tokens."""
        scores = score(self.model, rows, entropy=self.recipe.needs_entropy, micro_tokens=self.micro_tokens,
                       live=part.live, unit_temperature=self.recipe.score.temperature == "one")
        index = part.live.nonzero()[:, 0]
        leaves = [t[index].requires_grad_() for t in scores if t is not None]
        loss = part.loss(leaves[0], leaves[1] if len(leaves) > 1 else None, index, context, tuple(self.betas))
        done.loss = float(loss.detach())
        if not bool(loss.isfinite()):
            bad = not bool(leaves[0].isfinite().all())
            done.skipped, done.loss = "log-prob" if bad else "loss", float("nan")
            return []
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        out = []
        for leaf, grad in zip(leaves, grads, strict=True):
            column = torch.zeros(len(part.live), dtype=leaf.dtype)
            if grad is not None:
                column[index] = grad
            out.append(column)
        return out

    def _forward(self, micro: Micro) -> Any:
        return forward(self.model, micro, entropy=self.recipe.needs_entropy,
                       unit_temperature=self.recipe.score.temperature == "one")

    def _after(self, sums: Sums, part: objective.Part) -> None:
        """What follows an applied update: the count, the controllers, the running average."""
        self.steps += 1
        episodes = len(torch.unique(part.batch.stream.episode[part.entered]))
        for i, word in enumerate(self.recipe.regulariser):
            if isinstance(word, KL) and word.adaptive is not None:
                kl = sums.mean(f"kl/{word.to}/k1")
                if kl is not None:
                    self.betas[i] = word.adaptive.next(self.betas[i], kl, episodes)
        if self.ema is not None:
            with torch.no_grad():
                for name, p in self.parameters.items():
                    self.averaged[name].lerp_(p, 1 - self.ema)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that the next update depends on: tensors, numbers and strings only."""
        moments = self.moments
        return {"optimizer": self.optimizer.state_dict(), "steps": self.steps, "skips": dict(self.skips),
                "betas": list(self.betas), "moments": [moments.n, moments.mean, moments.m2],
                "averaged": dict(self.averaged)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`, bit for bit once the model has the weights of then."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps = int(state["steps"])
        self.skips = dict(state["skips"])
        self.betas = list(state["betas"])
        self.moments.n, self.moments.mean, self.moments.m2 = state["moments"]
        if set(state["averaged"]) != set(self.averaged):
            raise BadBatch("the checkpoint and this trainer average different weights: give both the same ema")
        for name, tensor in state["averaged"].items():
            self.averaged[name].copy_(tensor)


def observe(lp: Tensor, old: Tensor, sums: Sums) -> None:
    """Adds up how far the log-probs now (n,) are from those at sampling (n,): what ESS and KL follow from."""
    delta = lp.cpu().double() - old.double()
    sums.add("mismatch", delta.abs(), extremes=True)
    sums.add("kl/old", -delta)
    ratio = delta.clamp(max=20).exp()
    sums.add("ratio", ratio, extremes=True)
    sums.add("ratio/square", ratio.square())
