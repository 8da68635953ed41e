"""The scores of an evaluation with their uncertainty: mean reward, pass@k, and the difference between two evaluations.

Tasks are independent, but attempts at one task are not. So every number is a mean over tasks, and its interval shows
how much the number depends on the tasks that happened to be drawn. An attempt without a reward doesn't count as a
failure. It is left out and counted separately.

    pass@k = mean over tasks of 1 - C(n - c, k) / C(n, k),   n scored attempts of the task, c of them successes

(Chen et al. 2021, arXiv 2107.03374, computed as a product, so that no factorial overflows)

1. A task with fewer than k scored attempts has no unbiased estimate. It is left out of pass@k and counted in `short`.
2. The interval of pass@k is Wilson's. Its number of trials is an effective number of tasks, p (1 - p) / (s^2 / N), but
   at least N. Here p is pass@k, N the number of tasks, and s^2 the variance of the tasks' estimates. s^2 is shrunk by
   one part in N towards its maximum, p (1 - p), because a few tasks that agree are weak evidence. With one attempt per
   task, this is exactly Wilson's interval.
3. The interval of a mean reward or a difference is the percentile bootstrap over tasks. Its tails are wider if there
   are few tasks (the "expanded percentile" of Hesterberg 2015, arXiv 1411.5279).

This module uses the standard library only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import NormalDist

from pydantic import Field

from ...tapes.common.stats import TOLERANCE, interval, mean, variance
from ...tapes.errors import TapereelError
from ...tapes.value import Value

LEVEL = 0.95
"""Confidence level of every interval."""
RESAMPLES = 2000
"""Number of resamples in a bootstrap."""


class NothingInCommon(TapereelError, ValueError):
    """The two evaluations share no scored task."""


class Interval(Value):
    """A number with its 95 % confidence interval."""

    value: float
    low: float | None
    """`low` and `high` are None if there is only one task, because then the variance over tasks is unknown."""
    high: float | None
    tasks: int
    """Number of tasks in the mean."""

    def __str__(self) -> str:
        return interval(self.value, self.low, self.high)

    @property
    def signed(self) -> str:
        """A difference as text, with its sign."""
        return interval(self.value, self.low, self.high, "+.3f")


class Difference(Interval):
    """A difference of two means over the same tasks: `first` minus `second`."""

    first: float
    second: float


class Scores(Value):
    """The scores of one evaluation."""

    tasks: int
    without: int = 0
    """Number of tasks without a scored attempt. Every mean leaves these tasks out."""
    reward: Interval | None
    """Mean over tasks of each task's mean reward for its scored attempts. None if nothing was scored."""
    pass_at: dict[int, Interval | None] = Field(default_factory=dict)
    """pass@k by k. It is None if no task has k scored attempts."""
    short: dict[int, int] = Field(default_factory=dict)
    """Number of tasks that have scored attempts, but fewer than k of them, by k."""
    success: float
    """The minimum reward that counts as a success."""
    attempts: int
    unscored: int
    """Number of attempts without a reward."""
    answers: int = 0
    """Number of answers in the episodes, with repeated ones."""
    cut: int = 0
    """Number of these answers that a limit on tokens cut off. Limits of fewer than 16 tokens don't count."""
    by_label: dict[str, Scores] = Field(default_factory=dict)
    """Scores of the tasks with each label. Empty if tasks have no labels."""


class Comparison(Value):
    """The first evaluation minus the second, paired by task, over the tasks that both scored."""

    reward: Difference
    pass_at: dict[int, Difference | None] = Field(default_factory=dict)
    only_first: int
    """Number of tasks that only the first evaluation scored. The comparison leaves these tasks out."""
    only_second: int


Rewards = Mapping[str, Sequence[float | None]]
"""The rewards of each task's attempts. None means an unscored attempt."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of the chance that at least one of k attempts succeeds.

    It is computed from n attempts with c successes. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(
            f"there is no pass@{k} of {c} successes in {n} attempts: 0 <= successes <= attempts and 1 <= k <= attempts"
        )
    return 1.0 if n - c < k else 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def check_k(k: Sequence[int], attempts: int) -> None:
    """Raise ValueError if some k is not between 1 and `attempts`."""
    if k and not 1 <= min(k) <= max(k) <= attempts:
        raise ValueError(f"pass@k for k = {', '.join(map(str, k))} takes 1 <= k <= attempts, and attempts = {attempts}")


def wilson(p: float, n: float) -> tuple[float, float]:
    """Return Wilson's interval for a share p in n independent trials. n may be an effective number."""
    z2 = NormalDist().inv_cdf((1 + LEVEL) / 2) ** 2
    centre, half = p + z2 / (2 * n), math.sqrt(z2 * (p * (1 - p) + z2 / (4 * n)) / n)
    low, high = (centre - half) / (1 + z2 / n), (centre + half) / (1 + z2 / n)
    return (0.0 if p == 0 else max(0.0, low)), (1.0 if p == 1 else min(1.0, high))


def share_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean over tasks with its interval (note 2 in the module's docstring). Return None if there are no
    values.

    Each task contributes one number in [0, 1].
    """
    if not values:
        return None
    n, p = len(values), mean(values)
    most = p * (1 - p)
    spread = ((n - 1) * variance(values) + most) / n if n > 1 else most
    low, high = wilson(p, n * max(1.0, most / spread) if spread > 0 else n)
    return Interval(value=p, low=low, high=high, tasks=n)


def bootstrap(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval | None:
    """Return the mean over tasks, where each task contributes one number. Return None if there are no values.

    The interval is the expanded percentile interval of `resamples` draws. Each draw has `len(values)` values.
    """
    if not values:
        return None
    n, centre = len(values), mean(values)
    if n == 1:
        return Interval(value=centre, low=None, high=None, tasks=1)
    draw = random.Random(seed).choices
    means = sorted(mean(draw(values, k=n)) for _ in range(resamples))
    tail = NormalDist().cdf(-math.sqrt(n / (n - 1)) * _student((1 + LEVEL) / 2, n - 1))
    return Interval(value=centre, low=_quantile(means, tail), high=_quantile(means, 1 - tail), tasks=n)


def _student(q: float, freedom: int) -> float:
    """Return the approximate quantile of Student's t (Abramowitz and Stegun 26.7.5). It is 1 % too small at 3 degrees
    of freedom."""
    z = NormalDist().inv_cdf(q)
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / freedom ** (k + 1) for k, term in enumerate(terms))


def _quantile(ordered: Sequence[float], q: float) -> float:
    at = q * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def evaluate_rewards(
    rewards: Rewards,
    *,
    k: Iterable[int] = (),
    success: float = 1.0,
    seed: int = 0,
    labels: Mapping[str, str] | None = None,
) -> Scores:
    """Compute the scores from these rewards.

    `success` is the minimum reward that counts as a success. `labels` maps each task to its label in `Scores.by_label`.
    """
    known = _known(rewards)
    wanted = sorted(set(k))
    pass_at = {n: share_interval(list(_passes(known, n, success).values())) for n in wanted}
    parts: dict[str, dict[str, Sequence[float | None]]] = {}
    for task, label in (labels or {}).items():
        parts.setdefault(label, {})[task] = rewards[task]
    return Scores(
        reward=bootstrap([mean(own) for own in known.values()], seed=seed),
        pass_at=pass_at,
        short={n: sum(len(own) < n for own in known.values()) for n in wanted},
        success=success,
        tasks=len(rewards),
        without=len(rewards) - len(known),
        attempts=sum(map(len, rewards.values())),
        unscored=sum(r is None for own in rewards.values() for r in own),
        by_label={
            label: evaluate_rewards(part, k=wanted, success=success, seed=seed) for label, part in sorted(parts.items())
        },
    )


def standard_error(rewards: Rewards) -> float | None:
    """Return the standard error of the mean reward over tasks, or None if fewer than two tasks are scored."""
    means = [mean(own) for own in _known(rewards).values()]
    return math.sqrt(variance(means) / len(means)) if len(means) > 1 else None


def compare(
    first: Rewards, second: Rewards, *, k: Iterable[int] = (), success: float = 1.0, seed: int = 0
) -> Comparison:
    """Return first minus second, paired by task, with bootstrap intervals. Raises NothingInCommon if they share no
    scored task."""
    one, two = _known(first), _known(second)
    if not one.keys() & two.keys():
        raise NothingInCommon(
            f"the evaluations scored {len(one)} and {len(two)} tasks, none of them the same: compare "
            "evaluations on the same tasks"
        )

    def difference(of: Callable[[Mapping[str, Sequence[float]]], Mapping[str, float]]) -> Difference | None:
        a, b = of(one), of(two)
        both = [task for task in a if task in b]
        found = bootstrap([a[task] - b[task] for task in both], seed=seed)
        if found is None:
            return None
        first, second = (mean([of[task] for task in both]) for of in (a, b))
        return Difference.model_validate({**found.model_dump(), "first": first, "second": second})

    reward = difference(lambda known: {task: mean(own) for task, own in known.items()})
    assert reward is not None
    return Comparison(
        reward=reward,
        pass_at={n: difference(lambda known, n=n: _passes(known, n, success)) for n in sorted(set(k))},
        only_first=len(one.keys() - two.keys()),
        only_second=len(two.keys() - one.keys()),
    )


def _known(rewards: Rewards) -> dict[str, list[float]]:
    """Return the rewards of the scored attempts, for each task that has any."""
    known = {task: [r for r in own if r is not None] for task, own in rewards.items()}
    return {task: own for task, own in known.items() if own}


def _passes(known: Mapping[str, Sequence[float]], k: int, success: float) -> dict[str, float]:
    """Return pass@k for each task that has at least k scored attempts."""
    return {
        task: pass_at_k(len(own), sum(r >= success - TOLERANCE for r in own), k)
        for task, own in known.items()
        if len(own) >= k
    }
