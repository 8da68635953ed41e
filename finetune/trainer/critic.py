"""The critic, which gives each own token a value. Its loss, optimiser and schedule are separate from the policy's.

The value of a token is the value of the state before the token, computed from the hidden state that predicts the token.
The state after an answer has a value too. It learns the same target as the next token of the policy. If an episode was
cut off after an answer, its return continues with this value.

`Critic.of` makes a critic with its own body, which is a copy of the policy's body. `Critic.on` makes a critic that is
only a head. The head reads the policy's hidden states without gradient, which is cheaper, and these states improve with
the policy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any, NotRequired, TypedDict, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from ...agents.vision.vision import Vision, whole_model
from ..data.rows import Row
from ..data.stream import Stream
from ..objective.term import Context, Moments, Sums, Term
from .adamw import LRScheduler, adamw
from .logprobs import Micro, be_still, casting, parts, plan, reaching, states
from .options import CriticOptimiserConfig, OptimiserConfig
from .ranks import Ranks, Whole
from .router import Load, load, probabilities, routed

CLIPPED = "value/clipped"
"""Name of the metric for the share of values that the clip bounds."""


class Value(Term):
    """The critic's loss at one token. V is the token's value, v its value before the update, and R the target A + v.

        l = 1/2 max((V - R)^2, (v + clip(V - v, -c, c) - R)^2)        with clip c; without, 1/2 (V - R)^2

    The loss of the critic is the mean over the tokens that entered the update, whatever weights the recipe uses.
    """

    clip: float | None = Field(default=0.2, gt=0)
    """Largest distance from a token's old value. A value that moved further towards its target has no gradient. None
    sets no bound."""

    def __call__(self, value: Tensor, old: Tensor, target: Tensor, context: Context) -> Tensor:
        """Return the losses (n,) of the tokens with these values, old values and targets."""
        error = (value - target).square()
        if self.clip is None:
            return error / 2
        bounded = (old + (value - old).clamp(-self.clip, self.clip) - target).square()
        context.sums.add(CLIPPED, (bounded > error).detach())
        return torch.maximum(error, bounded) / 2


class Critic(nn.Module):
    """Computes the value V = mean + std * head(h) from a hidden state h. Without `normalised`, mean is 0 and std is
    1."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        body: nn.Module,
        hidden: int,
        *,
        owns_body: bool,
        normalised: bool = False,
        model: nn.Module | None = None,
        vision: Vision | None = None,
    ) -> None:
        """Make a critic that reads the hidden states of `body`, which have `hidden` dimensions.

        `model` is the model that contains `body`: the policy, or the critic's own copy of a vision model. It is None if
        the critic owns only the body. `vision` describes how `model` sees pictures, or is None for a text model.
        """
        super().__init__()
        reference = next(body.parameters())
        self.head = nn.Linear(hidden, 1, dtype=reference.dtype, device=reference.device)  # may be the meta device
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.owns_body = owns_body
        # The lists keep torch from registering the policy's body as a submodule. Its weights are saved, trained and
        # moved with the policy.
        self._body = [body]
        self._seer = [body if model is None else model]
        self.vision = vision
        if owns_body:
            self.body = self._seer[0]
        self.normalised = normalised
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("std", torch.ones((), dtype=torch.float64))

    @classmethod
    def of(cls, model: nn.Module, *, normalised: bool = False, vision: Vision | None = None) -> Critic:
        """Return a critic with a copy of the model's body. If the model has a vision tower, that is copied too."""
        body, output = parts(model)
        if vision is None:
            return cls(copy.deepcopy(body), output.in_features, owns_body=True, normalised=normalised)
        own = copy.deepcopy(model)
        body, whole = parts(own)[0], cast(Any, whole_model(own))
        whole.set_output_embeddings(nn.Identity())
        return cls(body, output.in_features, owns_body=True, normalised=normalised, model=own, vision=vision)

    @classmethod
    def on(cls, model: nn.Module, *, normalised: bool = False, vision: Vision | None = None) -> Critic:
        """Return a critic with only a head, which reads the hidden states of `model` but never trains the model."""
        body, output = parts(model)
        return cls(body, output.in_features, owns_body=False, normalised=normalised, model=model, vision=vision)

    def weights_of(self, model: nn.Module) -> Mapping[str, Tensor]:
        """Return the weights that `of` copies from `model` and a new head, by their names here. `model` may be sharded,
        and this critic may be empty."""
        source = model if self.vision is not None else parts(model)[0]
        own = {f"body.{name}": tensor for name, tensor in source.state_dict().items()}
        return Whole({**own, **{f"head.{name}": torch.zeros(p.shape) for name, p in self.head.named_parameters()}})

    @property
    def home(self) -> nn.Module:
        """The module whose weights a forward pass uses: the critic itself if it owns a body, otherwise the policy."""
        return self if self.owns_body else self.seer

    def get_decoder(self) -> nn.Module:
        """The body that computes hidden states."""
        return self._body[0]

    @property
    def seer(self) -> nn.Module:
        """The model that computes the features of pictures: the policy, or the critic's own copy of it."""
        return self._seer[0]

    def forward(self, micro: Micro) -> Tensor:
        """Return the values (n,) of the micro-batch's tokens, in float32 or wider."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.owns_body):
            h = states(self.get_decoder(), micro, self.seer)
        return self.read(h, micro)

    def read(self, h: Tensor, micro: Micro) -> Tensor:
        """Return the values (n,) of the micro-batch's tokens, in float32 or wider. `h` comes from `states`."""
        if self.vision is not None and self.owns_body:
            h = reaching(h, self.vision.tower(self.seer))
        with torch.autocast(h.device.type, enabled=False):
            raw = self.head(h.to(self.head.weight.dtype))[:, 0]
        raw = raw.to(torch.promote_types(raw.dtype, torch.float32))
        return micro.joined(raw) * self.std.to(raw.dtype) + self.mean.to(raw.dtype)

    @property
    def fresh(self) -> bool:
        """True until `begin` has set a mean and deviation."""
        return float(self.mean) == 0 and float(self.std) == 1

    def begin(self, mean: float, std: float) -> None:
        """Set the first mean and deviation of the targets. A new head outputs 0, so all values start at the mean."""
        self.mean.fill_(mean)
        self.std.fill_(std)

    @torch.no_grad()
    def rescale(self, mean: float, std: float) -> None:
        """Set a new mean and deviation of the targets, and correct the head so that no value changes (PopArt).

        Without the correction, each new scale would change all values, and so the next advantages.
        """
        old_mean, old_std = float(self.mean), float(self.std)
        self.head.weight.mul_(old_std / std)
        self.head.bias.mul_(old_std).add_(old_mean - mean).div_(std)
        self.mean.fill_(mean)
        self.std.fill_(std)


class CriticState(TypedDict):
    """The state of a critic's trainer, including the critic's weights."""

    critic: dict[str, Tensor]
    optimizer: dict[str, Any]
    steps: int
    updates: NotRequired[int]
    skips: int
    moments: list[float]


class CriticTrainer:
    """Trains a critic. Its target for a token is advantage + old value.

    Weight decay applies to all parameters of the critic. In the policy's trainer, it doesn't apply to vectors (norms,
    biases).
    """

    def __init__(
        self,
        critic: Critic,
        options: OptimiserConfig | None = None,
        *,
        loss: Value | None = None,
        passes: int = 1,
        first: int = 0,
        balance: float = 0.0,
        ranks: Ranks | None = None,
        offload: bool = False,
    ) -> None:
        """`passes` is the number of optimiser steps on each update's targets. A single step makes the critic learn too
        slowly for a short run. `first` is the number of updates at the start in which the policy doesn't learn yet.
        `balance` is the coefficient of the load-balancing loss (`router`), which is only used if the critic has its own
        body. `options.autocast` doesn't apply to the head. `ranks` are the processes that step together. With
        `offload`, the state of the optimiser is in main memory."""
        self.critic = critic
        self.ranks = ranks or Ranks()
        if critic.owns_body:
            self.ranks.shard(critic)
        self.loss = loss or Value()
        self.options = options = options or CriticOptimiserConfig()
        self.passes, self.first = passes, first
        # The policy's own loss balances the experts of a body that the critic only reads.
        self.balance = balance if critic.owns_body else 0.0
        self.moments = Moments()
        self._moved = 0.0, 1.0
        """Mean and deviation by which the first scale moved the values that this update began with."""
        self.steps = 0
        """Number of optimiser steps taken."""
        self.skips = 0
        """Number of passes that left the critic unchanged because a number wasn't finite."""
        self.parameters = [p for p in critic.parameters() if p.requires_grad]
        self.optimizer = adamw(self.parameters, options, offload=offload)
        self.scheduler = LRScheduler(self.optimizer, options)
        if critic.owns_body:
            be_still(critic.body, checkpointing=options.gradient_checkpointing)

    @property
    def learns_alone(self) -> bool:
        """Whether the policy doesn't learn yet in the present update."""
        return self.scheduler.update < self.first

    def values(self, rows: Sequence[Row]) -> Tensor:
        """Return the value (T,) of the state before each own token, without gradient."""
        n = sum(len(row.own) for row in rows)
        out = torch.empty(n, dtype=torch.promote_types(self.critic.head.weight.dtype, torch.float32))
        with torch.no_grad():
            for micro in self.ranks.rounds(self._plan(rows)):
                out[micro.index] = self._value(micro)[0]
        return out

    def valued(self, rows: Sequence[Row], stream: Stream, *, ends: bool) -> Stream:
        """Begin an update: return `stream`, which was made from `rows`, with the critic's values in the column `value`.

        If `ends` is True, the column `after` has the values of the states after answers.
        """
        self.scheduler.begin()
        self._moved = 0.0, 1.0
        if not ends:
            return stream.having(value=self.values(rows))
        longer, order = _with_ends(rows, stream.ends)
        found = self.values(longer)[order.argsort()]
        after = torch.full_like(found[: len(stream)], torch.nan)
        after[stream.ends] = found[len(stream) :]
        return stream.having(value=found[: len(stream)], after=after)

    def _plan(self, rows: Sequence[Row], live: Tensor | None = None) -> list[Micro]:
        return plan(rows, live=live, micro_tokens=self.options.micro_tokens, vision=self.critic.vision)

    def _value(self, micro: Micro, load: Load | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the values (n,) of the micro-batch's tokens, and its part of the load-balancing loss. Without `load`,
        this part is None."""

        def forward() -> tuple[Tensor, Tensor | None]:
            if load is None:
                return self.critic(micro).cpu(), None
            hidden, logits = routed(self.critic.get_decoder(), micro, self.critic.seer)
            return self.critic.read(hidden, micro).cpu(), load.loss(probabilities(logits, micro).cpu())

        with casting(self.critic, self.options.forward_dtype):
            return self.ranks.run(self.critic.home, forward)

    def update(self, rows: Sequence[Row], stream: Stream, target: Tensor, entered: Tensor) -> Sums:
        """Train the critic towards `target` (T,) on the tokens that `entered` (T,) bool marks.

        `stream` comes from `valued(rows, ...)`. Returns the metrics of the first pass, the share of clipped
        values over all passes, and whether any pass was skipped.
        """
        assert stream.value is not None, "a stream that `valued` made"
        sums, old = Sums(), stream.value
        if self.critic.normalised:
            self._rescale(target[entered], Context(sums=sums, add_up=self.ranks.add_up))
        explained(old[entered], target[entered], sums)
        if stream.after is not None:
            taught = stream.ends & (stream.following >= 0)
            follows = stream.following[taught]
            rows, order = _with_ends(rows, taught)
            pairs = ((old, stream.after[taught]), (target, target[follows]), (entered, entered[follows]))
            old, target, entered = (torch.cat(pair)[order] for pair in pairs)
        # The clip bounds what the optimiser moves, and not what the first scale has moved.
        old = old * self._moved[1] + self._moved[0]
        for k in range(self.passes):
            later = Sums()
            done = self._pass(rows, old, target, entered, later if k else sums)
            if CLIPPED in later:  # the values of the first pass are still the old ones
                sums.put(CLIPPED, later.sums[CLIPPED], later.counts[CLIPPED])
            if not done:
                first = int(self.ranks.share == 0)
                sums.put("value/skipped", first, first)
                break
        return sums

    def _pass(self, rows: Sequence[Row], old: Tensor, target: Tensor, entered: Tensor, sums: Sums) -> bool:
        """Take one optimiser step. If a number wasn't finite on some rank, change nothing and return False."""
        context = Context(sums=sums, add_up=self.ranks.add_up)
        # The tokens of all ranks, because the ranks' gradients are summed and not averaged.
        n = float(self.ranks.add_up(entered.sum(dtype=torch.float64)))
        self.optimizer.zero_grad(set_to_none=True)
        finite = True
        micros, balance = self.ranks.rounds(self._plan(rows, entered)), None
        if self.balance:
            body, seer = self.critic.get_decoder(), self.critic.seer
            balance = self.ranks.run(self.critic, partial(load, body, micros, self.ranks.add_up, seer))
        for micro in micros:
            value, aux = self._value(micro, balance)
            per_token = self.loss(value, old[micro.index].to(value.dtype), target[micro.index].to(value.dtype), context)
            sums.add("value/loss", per_token.detach())
            loss = per_token.sum() / n
            if aux is not None:
                sums.put("value/aux", float(aux.detach()), 0 if "value/aux" in sums or self.ranks.share else 1)
                loss = loss + self.balance * aux
            finite = bool(loss.isfinite())
            if self.ranks.halt(not finite):
                finite = False
                break
            loss.backward()
        finite = not self.ranks.any(not finite)
        # Without a token on any rank, momentum alone would move the critic.
        if finite and n:
            self.ranks.add_up_gradients(self.parameters)
            norm = self.ranks.clip(self.parameters, self.options.grad_clip)
            sums.put("value/grad_norm", norm)
            finite = isfinite(norm)
        if finite and n:
            sums.put("value/lr", self.scheduler.lr)
            self.scheduler.step()
            self.steps += 1
        elif not finite:
            self.skips += 1
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def _rescale(self, target: Tensor, context: Context) -> None:
        self.moments.take(*context.mean_and_square(target.double()))
        if self.moments.std is None:
            return
        # The first scale has nothing to preserve: a new head gives 0, so all values were equal.
        if self.critic.fresh:
            self.critic.begin(self.moments.mean, self.moments.std)
            self._moved = self.moments.mean, self.moments.std
        else:
            self.critic.rescale(self.moments.mean, self.moments.std)

    def state_dict(self) -> CriticState:
        """Return everything that the next update depends on, including the critic's weights."""
        return {
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "updates": self.scheduler.updates,
            "skips": self.skips,
            "moments": [self.moments.n, self.moments.mean, self.moments.m2],
        }

    def load_state_dict(self, state: CriticState) -> None:
        """Continue from `state_dict`."""
        self.critic.load_state_dict(self.ranks.part(state["critic"], self.critic.state_dict()))
        self.ranks.load(self.optimizer, state["optimizer"])
        self.steps, self.skips = int(state["steps"]), int(state["skips"])
        self.scheduler.updates = int(state.get("updates", self.steps))
        self.moments.n, self.moments.mean, self.moments.m2 = state["moments"]


def _with_ends(rows: Sequence[Row], ends: Tensor) -> tuple[list[Row], Tensor]:
    """Add a position after each token that `ends` (T,) bool marks, so that a value of the state after this token is
    computed.

    Return the longer rows, and an index for each of their own positions: 0 to T - 1 for the tokens of `rows`, and
    larger numbers for the added positions."""
    longer = list[Row]()
    for row, mine in zip(rows, ends.split([len(row.own) for row in rows]), strict=True):
        index = np.repeat(np.arange(len(row.own)), 1 + mine.numpy())
        more = row.where(index)
        # The state is read at the position before the added one, whose id is never read. So the row may end there.
        own, ids = more.own + (np.diff(index, prepend=-1) == 0), np.append(row.input_ids, np.int32(0))
        longer.append(replace(more, own=own, input_ids=ids))
    return longer, torch.cat([torch.arange(len(ends)), ends.nonzero()[:, 0]]).argsort(stable=True)


def explained(value: Tensor, target: Tensor, sums: Sums) -> None:
    """Add the sums for the explained variance, which is 1 - mean squared error / variance of the targets."""
    sums.add("value", value)
    sums.add("value/target", target)
    sums.add("value/error", (target - value).square())
    sums.add("value/target/square", target.square())
