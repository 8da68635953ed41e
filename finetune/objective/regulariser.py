"""regulariser: what is added to a token's loss whatever its advantage.

    kl       beta * estimate(lp, reference or sampler)
    entropy  -coefficient * H,  H the exact entropy of the policy at the token
    nll      coefficient * cross-entropy on demonstrations: other rows, a mean over their own tokens
    aux      coefficient * balance of a mixture's experts over the batch (`finetune.router`)

A coefficient is fixed, or a controller's: after each update  beta *= 1 + clip(kl / target - 1, -0.2, 0.2) n / horizon
with the mean k1 of the update and its n episodes.

1. k1 is refused as a loss: its expected gradient is 0. That of k2 is the gradient of KL(pi || ref), that of k3 the one
   of KL(ref || pi).
2. The adaptive factor never goes below 0, however many episodes an update has: a negative coefficient would reward
   divergence.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from ..data.stream import Stream
from .kl import Estimator, estimate
from .term import Context, Kinds, Term


class Adaptive(Term):
    """A proportional controller that keeps the KL near a target."""

    target: float = Field(gt=0)
    """The KL to keep, in nats per token."""
    horizon: float = Field(gt=0)
    """Episodes over which the coefficient may change by 20 %."""

    def next(self, beta: float, kl: float, episodes: int) -> float:
        """The coefficient of the next update."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return beta * max(0.0, 1 + error * episodes / self.horizon)


class Regulariser(Term):
    """Base class of all regularisers; derive from it to write one of your own."""

    per_token: ClassVar[bool] = True
    """True: it adds to the loss of the batch's own tokens. False: the trainer computes it elsewhere."""

    @property
    def active(self) -> bool:
        """False when it adds exactly nothing."""
        return True

    @property
    def needs_reference(self) -> bool:
        """True when it reads `stream.ref`, the reference model's log-probs."""
        return False

    @property
    def needs_entropy(self) -> bool:
        """True when it reads `entropy`, the exact entropy of each token."""
        return False

    @property
    def first_coefficient(self) -> float:
        """The coefficient `beta` of the first update."""
        return 1.0

    def __call__(
        self, lp: Tensor, entropy: Tensor | None, index: Tensor, stream: Stream, beta: float, context: Context
    ) -> Tensor:
        """(n,) to add to the losses of the tokens `index` (n,), whose log-probs now are lp (n,)."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__: define what it adds to each token there")


class KL(Regulariser):
    """Stay near the reference model, or near the weights that sampled."""

    kind: Literal["kl"] = "kl"
    to: Literal["reference", "sampler"] = "reference"
    """What the policy stays near."""
    estimator: Estimator = "k3"
    """Of the KL: k2 or k3; k1 as a loss has no gradient on average."""
    beta: float = Field(default=0.0, ge=0)
    """Coefficient, or the one that `adaptive` begins with."""
    adaptive: Adaptive | None = None
    """None: the coefficient stays."""

    @field_validator("estimator")
    @classmethod
    def _has_a_gradient(cls, value: Estimator) -> Estimator:
        if value == "k1":
            raise ValueError(
                "k1 as a loss has an expected gradient of 0: use k2 (gradient of KL(pi || ref)) or k3, or "
                "put k1 in the reward with shape token_kl"
            )
        return value

    @property
    def active(self) -> bool:
        return self.beta > 0

    @property
    def needs_reference(self) -> bool:
        return self.active and self.to == "reference"

    @property
    def first_coefficient(self) -> float:
        return self.beta

    def __call__(
        self, lp: Tensor, entropy: Tensor | None, index: Tensor, stream: Stream, beta: float, context: Context
    ) -> Tensor:
        other = stream.old if self.to == "sampler" else stream.ref
        if other is None:
            raise ValueError(
                f"a KL to the {self.to} reads its log-probs, and there are none: pass reference=... to the trainer"
            )
        other = other[index].to(lp.dtype)
        with torch.no_grad():
            for kind in ("k1", "k3"):
                context.sums.add(f"kl/{self.to}/{kind}", estimate(kind, lp, other))
        return beta * estimate(self.estimator, lp, other)


class Entropy(Regulariser):
    """Stay undecided. Exact: over the whole vocabulary, not from the sampled token."""

    kind: Literal["entropy"] = "entropy"
    coefficient: float = 0.0
    """Coefficient of the entropy, per nat."""

    @property
    def active(self) -> bool:
        return self.coefficient != 0

    @property
    def needs_entropy(self) -> bool:
        return self.active

    @property
    def first_coefficient(self) -> float:
        return self.coefficient

    def __call__(
        self, lp: Tensor, entropy: Tensor | None, index: Tensor, stream: Stream, beta: float, context: Context
    ) -> Tensor:
        if entropy is None:
            raise ValueError(
                "an entropy bonus reads the entropy of each token, and there is none: score with entropy=True"
            )
        return -self.coefficient * entropy


class _Beside(Regulariser):
    """A regulariser that adds to no own token of the batch: the trainer computes it from other tokens or logits."""

    per_token: ClassVar[bool] = False
    coefficient: float = Field(default=0.0, ge=0)
    """What the term counts."""

    @property
    def active(self) -> bool:
        return self.coefficient > 0

    @property
    def first_coefficient(self) -> float:
        return self.coefficient


class Demonstrations(_Beside):
    """Cross-entropy on demonstrations: rows beside the batch, in the same update."""

    kind: Literal["nll"] = "nll"


class Balance(_Beside):
    """Keep a mixture's experts evenly used."""

    kind: Literal["aux"] = "aux"


AnyRegulariser = Annotated[Regulariser, Kinds(KL, Entropy, Demonstrations, Balance)]
