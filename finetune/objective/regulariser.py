"""regulariser: a part of the loss that doesn't depend on advantages.

    kl       beta * estimate(lp, reference, teacher or sampler)
    entropy  -coefficient * H,  where H is the exact entropy of the policy at the token
    nll      coefficient * cross-entropy on demonstrations, which are other rows, as a mean over their own tokens
    aux      coefficient * balance of a mixture's experts over the forwarded rows (`trainer.router`); it is also added
             over the demonstrations, times nll's coefficient, and to the loss of a critic that has its own body

The coefficient of a KL is fixed or adaptive (`kl.Adaptive`). An adaptive coefficient changes after each optimiser step.

1. k1 can't be a loss, because its expected gradient is 0. The expected gradient of k2 is the gradient of KL(pi || ref).
   For k3, it is the gradient of KL(ref || pi).
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from ..data.stream import Stream
from .kl import Adaptive, Estimator, estimate, moves
from .term import Context, Kinds, Term


class Regulariser(Term):
    """Base class of regularisers, which are added to the loss and don't use advantages. Derive from it to write your
    own."""

    per_token: ClassVar[bool] = True
    """Whether the term is a loss for each token of the rollout batch. If False, the trainer computes it separately, for
    example on demonstrations."""

    @property
    def active(self) -> bool:
        """False if the term adds exactly 0 to the loss."""
        return True

    @property
    def needs_reference(self) -> bool:
        """True if the term reads `stream.ref`, the reference model's log-probs."""
        return False

    @property
    def needs_teacher(self) -> bool:
        """True if the term reads `stream.teacher`, the teacher's log-probs."""
        return False

    @property
    def needs_entropy(self) -> bool:
        """True if the term reads `entropy`, the exact entropy of each token."""
        return False

    @property
    def first_coefficient(self) -> float:
        """The coefficient `beta` for the first update."""
        return 1.0

    def __call__(
        self, lp: Tensor, entropy: Tensor | None, index: Tensor, stream: Stream, beta: float, context: Context
    ) -> Tensor:
        """Return the values (n,) to add to the losses of the tokens `index` (n,).

        `lp` (n,) are their current log-probs, and `entropy` (n,) their entropies, or None if no term needs them. `beta`
        is the current coefficient of the term, which begins with `first_coefficient`. A token's value must not depend
        on other tokens, because the trainer calls this for parts of a batch.
        """
        raise NotImplementedError(f"{type(self).__name__} has no __call__: define what it adds to each token there")


class KL(Regulariser):
    """Keeps the policy near the reference model or the sampling weights, or moves it towards a teacher."""

    kind: Literal["kl"] = "kl"
    to: Literal["reference", "sampler", "teacher"] = "reference"
    """The policy with which the KL compares the trained policy."""
    estimator: Estimator = "k3"
    """Estimator of the KL: k2 or k3. k1 is refused, because its expected gradient as a loss is 0."""
    beta: float = Field(default=0.0, ge=0)
    """KL coefficient. With `adaptive`, it is the coefficient for the first update."""
    adaptive: Adaptive | None = None
    """Controller of the coefficient. If None, the coefficient is fixed."""

    @field_validator("estimator")
    @classmethod
    def _has_a_gradient(cls, value: Estimator) -> Estimator:
        if value == "k1":
            raise ValueError(
                "k1 as a loss has an expected gradient of 0: use k2 (gradient of KL(pi || ref)) or k3, or "
                "put k1 in the reward with shape token_kl"
            )
        return value

    _moves = field_validator("adaptive")(moves)

    @property
    def active(self) -> bool:
        return self.beta > 0

    @property
    def needs_reference(self) -> bool:
        return self.active and self.to == "reference"

    @property
    def needs_teacher(self) -> bool:
        return self.active and self.to == "teacher"

    @property
    def first_coefficient(self) -> float:
        return self.beta

    @property
    def measure(self) -> str:
        """Beginning of the names of this KL's metrics, such as `kl/reference`."""
        return f"kl/{self.to}"

    def __call__(
        self, lp: Tensor, entropy: Tensor | None, index: Tensor, stream: Stream, beta: float, context: Context
    ) -> Tensor:
        other = {"sampler": stream.old, "reference": stream.ref, "teacher": stream.teacher}[self.to]
        if other is None:
            raise ValueError(
                f"a KL to the {self.to} reads its log-probs, and there are none: pass {self.to}=... to the trainer"
            )
        other = other[index].to(lp.dtype)
        # Both are always reported, whichever estimator is the loss. The adaptive coefficient reads k1.
        with torch.no_grad():
            for kind in ("k1", "k3"):
                context.sums.add(f"{self.measure}/{kind}", estimate(kind, lp, other))
        if self.adaptive is not None:
            context.sums.put(f"{self.measure}/beta", beta)
        return beta * estimate(self.estimator, lp, other)


class Entropy(Regulariser):
    """Entropy bonus, from the exact entropy over the whole vocabulary instead of an estimate from the sampled token."""

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
        return -beta * entropy


class _Beside(Regulariser):
    """A regulariser that isn't a loss for each token of the rollout batch. The trainer computes it separately."""

    per_token: ClassVar[bool] = False
    coefficient: float = Field(default=0.0, ge=0)
    """Coefficient of the term in the loss."""

    @property
    def active(self) -> bool:
        return self.coefficient > 0

    @property
    def first_coefficient(self) -> float:
        return self.coefficient


class Demonstrations(_Beside):
    """Cross-entropy on demonstrations, which are rows that an update imitates in addition to the rollout batch."""

    kind: Literal["nll"] = "nll"


class Balance(_Beside):
    """Load-balancing loss, which keeps the experts of a mixture-of-experts model evenly used."""

    kind: Literal["aux"] = "aux"


AnyRegulariser = Annotated[Regulariser, Kinds(KL, Entropy, Demonstrations, Balance)]
