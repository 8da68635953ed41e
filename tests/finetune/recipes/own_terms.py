"""A recipe and terms that a user might write, outside of the package: loaded by name in test_own_terms.py."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from tapereel.finetune import Stream
from tapereel.finetune.objective import PPO, Adjust, Baseline, Context, Credit, Regulariser, Shape, Surrogate
from tapereel.finetune.objective.kl import exp
from tapereel.finetune.recipes import get_recipe


class Quadratic(Surrogate):
    """l = -r A + beta / 2 (lp - anchor)^2."""

    beta: float = Field(default=0.5, ge=0)

    @property
    def local(self) -> bool:
        return True

    def __call__(self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: object, context: Context):
        gap = lp - anchor
        context.sums.add("quadratic", gap.detach().square())
        return -exp(gap) * a + self.beta / 2 * gap.square()


class Shifted(PPO):
    """A subclass of one of the package's kinds."""

    shift: float = 0.1

    def __call__(self, lp: Tensor, anchor: Tensor, a: Tensor, index: Tensor, stream: object, context: Context):
        return super().__call__(lp, anchor, a - self.shift, index, stream, context)  # type: ignore[arg-type]


class Late(Shape):
    """A price from some length on, which says that it can't be reached."""

    start: int = 100

    def out_of_reach(self, tokens: int) -> str | None:
        return None if tokens > self.start else f"late begins at {self.start}"

    def __call__(self, x: Tensor, scored: Tensor, stream: object, context: Context) -> Tensor:
        return x


class Halved(Shape):
    def __call__(self, x: Tensor, scored: Tensor, stream: object, context: Context) -> Tensor:
        return x / 2


class Median(Baseline):
    """x minus the median of the unit's set, times scale."""

    scale: float = 1.0

    def __call__(self, x: Tensor, scored: Tensor, stream: Stream, context: Context) -> Tensor:
        y, owner = torch.zeros_like(x), self.owner(len(x), stream)
        for one in owner.unique():
            mine = scored & (owner == one)
            y[mine] = self.scale * (x[mine] - x[mine].quantile(0.5)) if mine.any() else x[mine]
        context.sums.add("median/advantage", y[scored])
        return y


class LastToken(Credit):
    """The whole advantage at an episode's last own token; with `valued`, minus the critic's value of each token."""

    valued: bool = False

    @property
    def needs_value(self) -> bool:
        return self.valued

    def __call__(self, y: Tensor, penalty: Tensor | None, stream: Stream, context: Context):
        a = torch.where(stream.following < 0, y[stream.episode], 0.0)
        return (a - stream.value.to(a), a) if stream.value is not None else (a, None)


class Doubled(Adjust):
    def __call__(self, a: Tensor, entered: Tensor, stream: object, context: Context) -> Tensor:
        return 2 * a


class Confidence(Regulariser):
    """Adds rate * lp: the opposite of imitation."""

    rate: float = 0.1

    def __call__(self, lp: Tensor, entropy: object, index: Tensor, stream: object, beta: float, context: Context):
        return beta * self.rate * lp


mine = get_recipe("grpo").but(
    name="mine",
    surrogate=Quadratic(beta=0.25),
    shape=[Halved()],
    adjust=[Doubled()],
    regulariser=[Confidence(rate=0.01)],
)
no_recipe = {"surrogate": "quadratic"}
late = get_recipe("rloo").but(name="late", shape=(Late(start=5), Halved()))
