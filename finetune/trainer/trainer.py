"""The trainer, which has one update function for all recipes. Other packages handle tapes and training loops.

The gradient is accumulated exactly. Token weights are fixed before the first micro-batch of an optimiser batch, so any
split into micro-batches, rows or ranks gives the same sum. On one CPU thread, the same batches in the same order give
bit-equal weights.

If a log-prob, the loss or the gradient norm isn't finite, the update is skipped. A skip is counted and reported, and
changes neither the model nor the optimiser.

1. Tokens whose loss and gradient are exactly 0 are never forwarded. An example is a group with equal rewards, if the
   recipe has no KL loss.
2. An update in which no token has a gradient isn't applied. Otherwise momentum alone would move the weights.
3. Weight decay isn't applied to vectors (norms, biases).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from ...agents.vision.vision import Vision
from ..data.rows import Row
from ..data.stream import BadBatch, Episode, Stream
from ..objective import KL, Context, Moments, RewardKL, Sums
from ..objective import loss as objective
from ..objective.recipe import Recipe
from .adamw import LRScheduler, OffloadedAdamW, adamw
from .critic import CriticTrainer
from .lm_head import TokenLoss
from .logprobs import (
    Micro,
    Scores,
    be_still,
    casting,
    packs,
    parts,
    plan,
    reaching,
    read_out,
    score,
    score_ahead,
    shares_prefixes,
    states,
)
from .options import OptimiserConfig
from .ranks import Ranks
from .reference import OtherModel, trainable
from .router import Load, load, probabilities, routed
from .updates import Accumulated, Division, Prepared, Share, Skip, TrainerState, UpdateStats, imitation_part, observe

__all__ = ["Prepared", "Skip", "Trainer", "UpdateStats"]


class Trainer:
    """Trains `model` with `recipe`. A trainer isn't safe to share between threads."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        options: OptimiserConfig | None = None,
        *,
        reference: nn.Module | OtherModel | None = None,
        teacher: nn.Module | OtherModel | None = None,
        critic: CriticTrainer | None = None,
        ranks: Ranks | None = None,
        vision: Vision | None = None,
        offload: bool = False,
    ) -> None:
        """`reference` and `teacher` are frozen models, or `EarlierWeights` of the policy. `ranks` are the processes
        that step together. `vision` is how `model` sees pictures, or None for a text model. With `offload`, the state
        of the optimiser is in main memory."""
        objective.check_needs(
            recipe, reference=reference is not None, teacher=teacher is not None, critic=critic is not None
        )
        self.model = model
        self.vision, self.offload = vision, offload
        self.recipe = recipe
        self.options = options = options or OptimiserConfig()
        others = {"reference": reference, "teacher": teacher}
        self.others: Mapping[str, OtherModel] = {
            name: OtherModel(one) if isinstance(one, nn.Module) else one
            for name, one in others.items()
            if one is not None
        }
        self.critic = critic
        self.ranks = ranks or Ranks()
        for one in (model, *(other.model for other in self.others.values())):
            if next(one.parameters(), None) is not None:  # a teacher behind an engine has no parameters
                self.ranks.shard(one)
        self.pack = packs(model) if options.pack is None else options.pack
        self.version: str | None = None
        """Name of the current version of the weights, as in `Row.versions`. None if it is unknown."""
        self.moments = Moments()
        self.betas = list(objective.betas(recipe))
        self.steps = 0
        """Number of steps so far, including those in which only the critic learned."""
        self.skips: dict[str, int] = {}
        """Number of skipped updates, by reason."""
        self.parameters = trainable(model)
        # Decay pulls weights towards 0. Norms and biases aren't meant to be near 0, so they have none.
        matrices = [p for p in self.parameters.values() if p.ndim >= 2]
        vectors = [p for p in self.parameters.values() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = adamw([g for g in groups if g["params"]], options, offload=offload)
        self.scheduler = LRScheduler(self.optimizer, options)
        # The average starts at the present weights, so it needs no correction for a start at 0.
        kept = self.parameters if options.ema is not None else {}
        self.averaged = {name: p.detach().clone() for name, p in kept.items()}
        # With dropout, the log-probs here would differ from those at sampling.
        be_still(model, checkpointing=options.gradient_checkpointing)

    def update(
        self, rows: Sequence[Row], episodes: Sequence[Episode], demonstrations: Sequence[Row] = ()
    ) -> UpdateStats:
        """Take one optimiser step on a rollout batch, which must consist of whole groups.

        `demonstrations` are rows to imitate in addition. They are required if the recipe has an `nll` regulariser, and
        otherwise not allowed.
        """
        [whole] = Division.of(rows, episodes, demonstrations=demonstrations).shares
        [stats] = self.train_on(whole)
        return stats

    def train_on(self, share: Share, *, epochs: int = 1, seed: int | None = None) -> Iterator[UpdateStats]:
        """Make an update on this process's share of a batch, and yield each step's statistics. All processes call this
        together. Advantages are computed once, over the whole batch.

        Before an epoch is split into mini-batches, episodes are shuffled with a seed made from `seed` and the number of
        steps so far. If `seed` is None, they keep their order.
        """
        first, *later = share.demonstrations
        prepared = self.prepare(
            share.rows,
            share.episodes,
            several=epochs * len(share.demonstrations) > 1,
            batches=share.batches,
            demonstrations=first,
        )
        imitated = [prepared.demonstrations, *map(self.demonstrations_of, later)]
        # The cuts depend on `steps`, which the epoch before has raised. So each epoch has other mini-batches.
        for _ in range(epochs):
            for part, own in zip(share.cuts(seed, self.steps), imitated, strict=True):
                yield self.step(replace(prepared, demonstrations=own), episodes=part)
        self.end_update()

    def prepare(
        self,
        rows: Sequence[Row],
        episodes: Sequence[Episode],
        *,
        several: bool = False,
        batches: Sequence[int] = (),
        demonstrations: Sequence[Row] = (),
    ) -> Prepared:
        """Compute the advantages and everything else that is computed once per rollout batch.

        Pass `several=True` if more than one step will follow. A recomputed anchor is then computed now, before the
        weights change. If there are several rollout batches, `batches` gives the number of episodes in each, in order.
        A term with `by = batch` compares episodes only within one rollout batch.
        """
        recipe = self.recipe
        # All steps of the update have the learning rate that it begins with.
        self.scheduler.begin()
        stream = Stream.of(rows, episodes)
        # Only tokens that the present weights sampled can show how sampler and trainer differ. For all others, the
        # log-prob has changed because the weights have.
        present = torch.tensor([*(name == self.version for name in stream.versions), False])  # -1: no version
        stream = stream.having(fresh=None if self.version is None else present[stream.version])
        if recipe.needs_reference:
            stream = stream.having(ref=self._scored_by("reference", rows))
        if recipe.needs_teacher:
            stream = stream.having(teacher=self._scored_by("teacher", rows))
        # The critic scores the states before it learns from them, as the advantages need its values from before.
        if self.critic is not None:
            stream = self.critic.valued(rows, stream, ends=recipe.bootstraps)
        top, recomputed = recipe.select.entropy_top is not None, recipe.anchor.to == "recomputed" and several
        if top or recomputed:
            now = self._score(self.model, rows, self.vision, entropy=top)
            # The anchor is set only if the recipe asks for it, because a KL in the reward uses it if it is set.
            stream = stream.having(anchor=now.logprob if recomputed else None, entropy=now.entropy)
        # Baselines and running statistics cover the whole batch, so the terms add their sums up over all ranks.
        context = Context(moments=self.moments, add_up=self.ranks.add_up)
        batch = objective.prepare_batches(recipe.at(self.betas), rows, episodes, stream, context, batches)
        return Prepared(
            rows=rows, batch=batch, sums=context.sums, demonstrations=self.demonstrations_of(demonstrations)
        )

    def demonstrations_of(self, rows: Sequence[Row]) -> tuple[Sequence[Row], objective.Part] | None:
        """Return the demonstrations `rows` with the weight of each token's loss, or None if there are none."""
        # Their loss is a mean over their own tokens, so they don't change the token weights of the rollout batch.
        wanted = self.recipe.imitates
        if wanted != self.ranks.any(bool(rows)):
            raise BadBatch(
                f"recipe {self.recipe.name!r} has {'an' if wanted else 'no'} nll regulariser and got "
                f"{len(rows)} demonstrations: give both or neither"
            )
        return (rows, imitation_part(rows, self.ranks.add_up)) if wanted else None

    def _scored_by(self, name: str, rows: Sequence[Row]) -> Tensor:
        other = self.others[name]
        vision = self.vision if other.model is self.model else other.vision
        return other.logprobs(rows, lambda model: self._score(model, rows, vision).logprob)

    def _score(self, model: nn.Module, rows: Sequence[Row], vision: Vision | None, **options: Any) -> Scores:
        with casting(self.model, self.options.forward_dtype):
            return score(
                model,
                rows,
                self.recipe.score,
                micro_tokens=self.options.micro_tokens,
                ranks=self.ranks,
                pack=self.pack,
                vision=vision,
                **options,
            )

    def step(self, prepared: Prepared, *, episodes: Tensor | None = None) -> UpdateStats:
        """Take one optimiser step on a prepared batch. `episodes`, a bool mask (E,), limits it to these episodes."""
        batch = prepared.batch
        # While only the critic learns, the policy's gradient is computed for its metrics alone.
        part, done, norm = self._gradient(prepared, episodes, self.options.grad_clip)
        waits = self.critic is not None and self.critic.learns_alone
        lr = None if waits else self.scheduler.lr
        if done.skipped is None and waits:
            done.skipped = "critic first"
        first = done.skipped is None and self.scheduler.step()
        # The critic learns even if the policy's step was skipped: its targets don't depend on the policy's gradient.
        if self.critic is not None and batch.target is not None and batch.stream.value is not None:
            done.sums.merge(self.critic.update(prepared.rows, batch.stream, batch.target, part.entered))
        if done.skipped is None:
            self._after(prepared, done.sums, part, first)
        else:
            self.skips[done.skipped] = self.skips.get(done.skipped, 0) + 1
        self.steps += done.skipped in (None, "critic first")  # the split into mini-batches depends on it
        return self._account(prepared, part, done, norm, lr)

    def gradient(self, prepared: Prepared) -> tuple[UpdateStats, dict[str, Tensor]]:
        """Compute a step without taking it: weights, optimiser and critic don't change.

        Return the statistics of the step, and the unclipped gradient of the loss for each weight, by name.
        """
        part, done, norm = self._gradient(prepared, None, None)
        grads = {name: p.grad.detach().clone() for name, p in self.parameters.items() if p.grad is not None}
        return self._account(prepared, part, done, norm, self.scheduler.lr), grads

    def pull(self, prepared: Prepared) -> Tensor:
        """Return the gradient (T,) of the loss with respect to the log-prob of each own token.

        It is negative for a token that a step makes more likely. If the loss isn't finite, all values are NaN.
        """
        part = prepared.batch.part(None, self.ranks.add_up)
        scores = self._score_live(prepared.rows, part)
        found = self._whole(scores, part, Context(moments=self.moments), Accumulated())
        return found[0] if found else torch.full((len(part.live),), float("nan"))

    def _gradient(
        self, prepared: Prepared, episodes: Tensor | None, clip: float | None
    ) -> tuple[objective.Part, Accumulated, float]:
        """Compute the gradient of the weights. Return the part of the batch that was trained on, the loss with its
        metrics, and the gradient norm before clipping."""
        # The weight of each token is fixed here, over all ranks. The gradient is then the same for any micro-batches.
        part = prepared.batch.part(episodes, self.ranks.add_up)
        self.optimizer.zero_grad(set_to_none=True)
        done = self._accumulate(prepared.rows, part)
        done.sums.add("token/live", part.live[part.entered])
        if prepared.demonstrations is not None:
            self._add_demonstrations(prepared.demonstrations, done)
        return part, done, self._agree(done, clip)

    def _account(
        self, prepared: Prepared, part: objective.Part, done: Accumulated, norm: float, lr: float | None
    ) -> UpdateStats:
        self.optimizer.zero_grad(set_to_none=True)
        sums = Sums()
        sums.merge(prepared.sums)
        sums.merge(done.sums)
        batch = prepared.batch
        return UpdateStats(
            step=self.steps,
            skipped=done.skipped,
            loss=done.loss,
            parts=done.parts,
            grad_norm=norm,
            lr=lr,
            sums=sums,
            stream=batch.stream,
            weight=part.weight,
            advantage=batch.advantage,
            shown=prepared.imitated,
        )

    def _agree(self, done: Accumulated, clip: float | None) -> float:
        """Sum the gradient over all ranks, clip it to the norm `clip`, and return its norm before clipping.

        All ranks then agree whether to step (`done.skipped`). They must make the same collective calls in the same
        order, or some ranks would wait forever.
        """
        # A rank without live tokens still steps if another rank has some, because all must keep the same weights.
        bad = done.skipped not in (None, "nothing to train on")
        if self.ranks.any(bad):
            done.fail(done.skipped if bad and done.skipped else "another rank")
            return float("nan")
        if not self.ranks.any(done.skipped is None):
            return float("nan")
        done.skipped = None
        # Each token's weight already has the total over all ranks as its denominator, so this is a sum, not a mean.
        self.ranks.add_up_gradients(self.parameters.values())
        norm = self.ranks.clip(self.parameters.values(), clip)
        if not isfinite(norm):
            done.skipped = "gradient"
        return norm

    def _accumulate(self, rows: Sequence[Row], part: objective.Part) -> Accumulated:
        """Accumulate the gradient of `part`, micro-batch by micro-batch. If a number in a micro-batch isn't finite,
        stop before its backward pass."""
        done = Accumulated()
        # Rows of a group share their prompt, which is then forwarded once. The load of experts must count every token,
        # and ranks that forward together must make the same passes, so these don't share.
        share = not self.recipe.balance and not self.ranks.joint and shares_prefixes(self.model)
        micros = self.ranks.rounds(
            plan(
                rows,
                live=part.live,
                micro_tokens=self.options.micro_tokens,
                share=share,
                pack=self.pack and not self.recipe.balance,
                vision=self.vision,
            )
        )
        balance = self._load(micros)
        if not micros:
            done.skipped = "nothing to train on"
            return done
        context = Context(sums=done.sums, moments=self.moments, parts=done.parts)
        # If a token's loss depends on tokens in other micro-batches, the loss is computed first, from all log-probs.
        whole, ahead = None, deque[Tensor]()
        if not self.recipe.local and len(micros) > 1:
            alone = balance is None and not self.ranks.joint
            scores, kept = self._score_ahead(micros, part) if alone else (self._score_live(rows, part), [])
            whole = self._whole(scores, part, context, done)
            ahead.extend(kept)
            del kept  # so that each is freed after its backward pass
        tensors: list[Tensor] = []
        pulls: list[Tensor] | None = None
        for micro in micros:
            if done.skipped is None:
                loss = self._by_chunk(part, micro, whole)
                hidden = ahead.popleft() if ahead else None
                forward = partial(self._forward, micro, balance, done.sums, loss, hidden=hidden)
                scores, aux = self.ranks.run(self.model, forward)
                if aux is not None:
                    context.add_part("aux", float(aux.detach()))
                tensors, pulls = self._pulls(micro, scores, aux, whole, part, context, done)
            # With sharded weights, all ranks run each backward pass together. So they stop together too.
            if self.ranks.halt(done.skipped is not None):
                done.fail(done.skipped or "another rank")
                break
            torch.autograd.backward(tensors, pulls)
        return done

    def _pulls(
        self,
        micro: Micro,
        scores: Scores,
        aux: Tensor | None,
        whole: list[Tensor] | None,
        part: objective.Part,
        context: Context,
        done: Accumulated,
    ) -> tuple[list[Tensor], list[Tensor] | None]:
        """Return the tensors from which the backward pass of a micro-batch starts, and their gradients (None means 1).

        `whole` is the result of `_whole`, or None if the loss can be computed in this micro-batch. If a number isn't
        finite, this sets `done.skipped`.
        """
        if not bool(scores.logprob.isfinite().all()):
            done.skipped = "log-prob"
            return [], None
        done.sums.add("logprob", scores.logprob.detach(), extremes=True)
        if scores.entropy is not None:
            done.sums.add("entropy", scores.entropy.detach())
        if self.recipe.surrogate.advantages:
            old, fresh = part.batch.stream.old[micro.index], part.batch.stream.fresh
            observe(scores.logprob.detach(), old, done.sums, None if fresh is None else fresh[micro.index])
        others = [] if aux is None else [aux]
        if whole is None:
            # If the output layer has already computed the gradient, this call only adds the metrics.
            loss = part.loss(scores.logprob, scores.entropy, micro.index, context, tuple(self.betas))
            value = float(sum(others, loss).detach())
            done.loss += value
            if not isfinite(value):
                done.skipped = "loss"
            return [loss if scores.loss is None else scores.loss, *others], None
        if aux is not None:
            done.loss += float(aux.detach())
        if scores.loss is not None:
            return [scores.loss, *others], None
        # The loss isn't computed again. Its gradient by each log-prob is known, and backward starts from there.
        tensors = [t for t in scores if t is not None]
        pulls = [g[micro.index].to(t.device) for t, g in zip(tensors, whole, strict=True)]
        return [*tensors, *others], [*pulls, *map(torch.ones_like, others)]

    def _by_chunk(self, part: objective.Part, micro: Micro, whole: list[Tensor] | None) -> TokenLoss | None:
        """Return the loss of any chunk of the micro-batch's tokens, for `read_out`.

        Return None if a chunk has no loss by itself, because the loss of a token depends on other tokens. If `_whole`
        has already computed the gradient, `whole`, the chunk's part of it is enough.
        """
        if whole is not None:
            pull = whole[0][micro.index]
            return lambda lp, at: (pull[at] * lp).sum()
        if not self.recipe.local:
            return None
        betas = tuple(self.betas)
        # `_pulls` adds the metrics, so those of a chunk are dropped with its context.
        return lambda lp, at: part.loss(lp, None, micro.index[at], Context(moments=self.moments), betas)

    def _score_live(self, rows: Sequence[Row], part: objective.Part) -> Scores:
        """Score the tokens that have a loss, without gradient."""
        return self._score(self.model, rows, self.vision, entropy=self.recipe.needs_entropy, live=part.live)

    def _score_ahead(self, micros: Sequence[Micro], part: objective.Part) -> tuple[Scores, list[Tensor]]:
        """Do the same, and return hidden states of the first micro-batches too (`score_ahead`). What they keep in
        memory is at most what the largest micro-batch may need."""
        how, most = self.recipe.score, self.options.micro_tokens
        with casting(self.model, self.options.forward_dtype):
            entropy = self.recipe.needs_entropy
            return score_ahead(self.model, micros, len(part.live), how, entropy=entropy, most=most)

    def _whole(self, scores: Scores, part: objective.Part, context: Context, done: Accumulated) -> list[Tensor]:
        """Return the gradient of the loss with respect to all log-probs (and entropies), which are the `scores`. This
        is needed if the loss of a token depends on other tokens.

        A second pass then runs backward from these gradients, micro-batch by micro-batch. The sum is the same as with
        one graph over the whole batch, but needs only the memory of one micro-batch.
        """
        # Only live tokens were scored. The loss of the others is 0 whatever their log-prob is.
        index = part.live.nonzero()[:, 0]
        leaves = [t[index].requires_grad_() for t in scores if t is not None]
        loss = part.loss(leaves[0], leaves[1] if len(leaves) > 1 else None, index, context, tuple(self.betas))
        done.loss = float(loss.detach())
        if not bool(loss.isfinite()):
            bad = not bool(leaves[0].isfinite().all())
            done.fail("log-prob" if bad else "loss")
            return []
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        out = []
        for leaf, grad in zip(leaves, grads, strict=True):
            column = torch.zeros(len(part.live), dtype=leaf.dtype)
            if grad is not None:
                column[index] = grad
            out.append(column)
        return out

    def _load(self, micros: Sequence[Micro]) -> Load | None:
        """Return how tokens are assigned to experts, over all ranks, or None if the recipe doesn't balance experts."""
        if not self.recipe.balance:
            return None
        body = parts(self.model)[0]
        return self.ranks.run(self.model, partial(load, body, micros, self.ranks.add_up, self.model))

    def _forward(
        self,
        micro: Micro,
        load: Load | None,
        sums: Sums,
        loss: TokenLoss | None,
        *,
        demonstrations: bool = False,
        hidden: Tensor | None = None,
    ) -> tuple[Scores, Tensor | None]:
        """Return the scores of the micro-batch's tokens, and its part of the load-balancing loss or None without
        `load`. Demonstrations are scored at temperature 1, without entropy. For `loss`, see `read_out`. `hidden` are
        the hidden states, if they are known already."""
        recipe, body = self.recipe, parts(self.model)[0]
        how = recipe.score.model_copy(update={"temperature": "one"}) if demonstrations else recipe.score
        aux = None
        with casting(self.model, self.options.forward_dtype):
            if load is None:
                hidden = states(body, micro, self.model) if hidden is None else hidden
            else:
                hidden, logits = routed(body, micro, self.model)
                part, name = (
                    load.loss(probabilities(logits, micro).cpu()),
                    "demonstrations/aux" if demonstrations else "aux",
                )
                # The parts of all micro-batches and ranks add up to one loss, so together they count once.
                sums.put(name, float(part.detach()), 0 if name in sums or self.ranks.share else 1)
                aux = recipe.balance * part
            # Rows without a picture must reach the tower too. Otherwise ranks would sum different sets of gradients.
            if self.vision is not None:
                hidden = reaching(hidden, self.vision.tower(self.model))
            entropy = recipe.needs_entropy and not demonstrations
            scores = read_out(self.model, hidden, micro, how, entropy=entropy, loss=loss)
        # The columns of the stream are in main memory, so the loss is computed there.
        return Scores(scores.logprob.cpu(), *(None if t is None else t.cpu() for t in scores[1:])), aux

    def _add_demonstrations(self, demonstrations: tuple[Sequence[Row], objective.Part], done: Accumulated) -> None:
        """Add the gradient of the demonstrations. The update is then applied even if no token of the rollout batch has
        a gradient."""
        rows, part = demonstrations
        # The sums of this context are dropped, so that metrics like `ratio` describe the rollouts alone.
        scale, extra = self.recipe.imitation, Context(parts=done.parts)
        pack = self.pack and not self.recipe.balance
        found = plan(rows, live=part.live, micro_tokens=self.options.micro_tokens, pack=pack, vision=self.vision)
        micros = self.ranks.rounds(found)
        # The load is summed over all ranks, so it is computed before the check, which may stop only this rank.
        balance = self._load(micros)
        if done.skipped not in (None, "nothing to train on"):
            return
        done.skipped = None
        for micro in micros:
            loss_of = partial(self._imitation_loss, part, micro)
            forward = partial(self._forward, micro, balance, done.sums, loss_of, demonstrations=True)
            scores, aux = self.ranks.run(self.model, forward)
            done.sums.add("demonstrations/nll", -scores.logprob.detach())
            loss = loss_of(scores.logprob, slice(None)) if scores.loss is None else scores.loss
            nll = float(loss.detach())
            if aux is not None:
                loss = loss + scale * aux
                extra.add_part("aux", scale * float(aux.detach()))
            bad = not bool(loss.isfinite())
            if self.ranks.halt(bad):
                done.fail("loss" if bad else "another rank")
                return
            done.loss += float(loss.detach())
            extra.add_part("nll", nll)
            loss.backward()

    def _imitation_loss(self, part: objective.Part, micro: Micro, lp: Tensor, at: slice | Tensor) -> Tensor:
        return self.recipe.imitation * part.loss(lp, None, micro.index[at], Context(), ())

    def _after(self, prepared: Prepared, sums: Sums, part: objective.Part, first: bool) -> None:
        """Finish an applied step: change the adaptive KL coefficients, and update the average of the weights.

        A KL in the reward is measured once per batch, so its coefficient changes after the `first` step only."""
        # Each step has measured the KL loss with its own weights.
        self._adapt(KL, sums, part.entered, part.batch.stream)
        if first:
            self._adapt(RewardKL, prepared.sums, prepared.batch.entered, part.batch.stream)
        if self.options.ema is not None:
            with torch.no_grad():
                for name, p in self.parameters.items():
                    self.averaged[name].lerp_(p, 1 - self.options.ema)

    def _adapt(self, kind: type[KL | RewardKL], sums: Sums, entered: Tensor, stream: Stream) -> None:
        """Change the adaptive coefficients of this kind of KL, according to the KL (k1) that `sums` has measured.

        The change also depends on the number of episodes. An episode counts if `entered` (T,) bool marks one of its
        tokens.
        """
        for i, term in enumerate(self.recipe.coefficients):
            if isinstance(term, kind) and term.adaptive is not None:
                name = f"{term.measure}/k1"
                mine = [
                    sums.sums.get(name, 0.0),
                    sums.counts.get(name, 0.0),
                    float(len(stream.episode[entered].unique())),
                ]
                # All ranks must have the same coefficient, so they change it by the same sums.
                kl, n, episodes = self.ranks.add_up(torch.tensor(mine, dtype=torch.float64)).tolist()
                if n:
                    self.betas[i] = term.adaptive.next(self.betas[i], kl / n, int(episodes))

    def compared(self, recorded: Mapping[str, str | None]) -> dict[str, str]:
        """Return name and digest of the reference and the teacher. `recorded` has those in the record of an update that
        is applied again (see `OtherModel.described`)."""
        return {name: other.described(recorded.get(name)) for name, other in self.others.items()}

    def end_update(self) -> None:
        """Finish an update, after all of its steps: a reference that follows the policy is changed now."""
        for other in self.others.values():
            other.end_update()

    def state_dict(self) -> TrainerState:
        """Return all state that the next update depends on, except the weights.

        The state consists of tensors, numbers and strings. Its tensors are whole, even if the weights are sharded.
        """
        return self.ranks.whole(self.own_state())

    def own_state(self) -> TrainerState:
        """Return the same as `state_dict`, with this rank's part of each sharded tensor."""
        moments = self.moments
        return TrainerState(
            optimizer=self.optimizer.state_dict(),
            steps=self.steps,
            updates=self.scheduler.updates,
            skips=dict(self.skips),
            betas=list(self.betas),
            moments=[moments.n, moments.mean, moments.m2],
            averaged=dict(self.averaged),
            critic=self.critic.state_dict() if self.critic else None,
            others={name: other.state_dict() for name, other in self.others.items()},
        )

    def fill_optimizers(self) -> None:
        """Give the optimisers the state that they have after a step, so that a checkpoint can be read into it."""
        for optimizer in (self.optimizer, *([self.critic.optimizer] if self.critic else [])):
            for p in (p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state):
                home = "cpu" if isinstance(optimizer, OffloadedAdamW) else p.device
                both = {n: torch.zeros_like(p, requires_grad=False).to(home) for n in ("exp_avg", "exp_avg_sq")}
                optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=home), **both}

    def load_state_dict(self, state: TrainerState) -> None:
        """Continue from a `state_dict()`. If the model has the weights of the same time, further updates are equal bit
        for bit."""
        self.ranks.load(self.optimizer, state["optimizer"])
        self.steps = int(state["steps"])
        # Checkpoints of earlier versions counted steps, as their schedules did.
        self.scheduler.updates = int(state.get("updates", self.steps))
        self.skips = dict(state["skips"])
        self.betas = list(state["betas"])
        self.moments.n, self.moments.mean, self.moments.m2 = state["moments"]
        if set(state["averaged"]) != set(self.averaged):
            raise BadBatch(
                "the checkpoint and this trainer average different weights: use the same `ema` as the run that wrote it"
            )
        for name, tensor in self.ranks.part(state["averaged"], self.averaged).items():
            self.averaged[name].copy_(tensor)
        if self.critic is not None:
            assert state["critic"] is not None
            self.critic.load_state_dict(state["critic"])
        for name, its in state.get("others", {}).items():
            self.others[name].load_state_dict(its)
