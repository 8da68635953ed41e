"""Signs of why the reward of a training run doesn't climb, for `advice`.

Each sign compares numbers of the run with a threshold, and names the next step with the run's own settings. Signs don't
say the same thing twice: a sign that explains others has a lower rank, and is the one to act on first.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import JsonValue

from ..common.stats import interval, mean, variance
from ..errors import OtherVersion, TapereelError, remedy
from ..store.disk import METRICS
from ..store.run_directory import Evaluations, Results, read_metrics, recorded_settings
from ..store.store import Store
from ..store.summary import Summary

LOOP = 10
"""Minimum number of updates for a statement about their reward."""
NEWEST = 500
"""Number of newest tapes whose answers are compared."""
GONE = 0.05
"""In nats per token. If the entropy is below this value, the attempts in a group are copies of each other."""
FAR = 0.1
"""In nats per token. If the policy is farther than this from the one that sampled, the learning rate is too high."""
EARLY = 0.5
"""The same in nats for a loop of fewer than `LOOP` updates, of which it isn't known whether its reward rises."""
JUMP = 2.0
"""In nats. If an update moves each probed answer by more, and the reward doesn't rise, the learning rate is high."""
STILL = 1e-4
"""In nats. If no probed log-prob moves by this much in an update, the weights have hardly changed."""
NEAR = 0.1
"""Two rewards are close if their difference is below this share of the range of rewards."""
MOST = 0.5
"""A sign that concerns a smaller share of the run than this comes after all others."""
SELDOM = 0.2
"""If the level of the reward is below this share of its range, too few attempts succeed to learn from."""
FALLING = 0.03
"""The warm start isn't finished if its last quarter lowered the loss by more than this share."""

Lines = Sequence[Mapping[str, JsonValue]]


class Sign(NamedTuple):
    """A sign of trouble, with the next step."""

    rank: int
    """Signs with a lower rank explain signs with a higher one."""
    text: str
    share: float = 1.0
    """The share of the run that it concerns."""


class Change(NamedTuple):
    """A change of the mean reward, with its 95 % interval. It is unbounded if it isn't known."""

    value: float = 0.0
    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        return interval(*self, "+.3f")


@dataclass
class Climb:
    """The updates of a loop, its scored tapes, and its evaluation at the end."""

    store: Store
    updates: Lines
    held_out: Evaluations
    scored: Sequence[Summary]
    """The closed tapes with a reward that measures the policy, oldest first."""

    @cached_property
    def rewards(self) -> Change:
        """The change from the first to the last updates."""
        if len(self.updates) < LOOP:
            return Change()
        some = max(LOOP // 2, len(self.updates) // 4)
        before, after = (_values(part, "reward") for part in (self.updates[:some], self.updates[-some:]))
        if len(before) < 2 or len(after) < 2:
            return Change()
        error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
        t = 1.96 + 2.8 / (len(before) + len(after) - 2)  # Student's t, within 2 % from 8 degrees of freedom on
        difference = mean(after) - mean(before)
        return Change(difference, difference - t * error, difference + t * error)

    @cached_property
    def measured(self) -> tuple[Change, int]:
        """The change on held-out tasks, and the number of these tasks."""
        part = self.held_out.get("sampled")
        found = part.change if part is not None and len(self.updates) >= LOOP else None
        if not found or found["value"] is None or found["low"] is None or found["high"] is None:
            return Change(), 0
        return Change(found["value"], found["low"], found["high"]), int(found["tasks"] or 0)

    @property
    def rose(self) -> bool:
        """Whether the reward rose beyond its interval: on held-out tasks, or if these weren't measured, in training."""
        change, tasks = self.measured
        return (change if tasks else self.rewards).low > 0

    @property
    def headline(self) -> str | None:
        """A sentence if the reward is known not to have risen, without its end."""
        change, tasks = self.measured
        known = [f"in the updates by {self.rewards}"] * (self.rewards.high < math.inf)
        known += [f"on {tasks} held-out tasks by {change}"] * bool(tasks)
        if self.rose or not known or self.by_agent:
            return None
        return f"The reward did not rise beyond its interval: it changed {' and '.join(known)}"

    @cached_property
    def by_agent(self) -> bool:
        """Whether each agent has its own reward. The sum of an episode, which may be zero, then says nothing."""
        return any(key.startswith("reward/agent/") for line in self.updates for key in line)

    @cached_property
    def last(self) -> Lines:
        """The last quarter of the updates, but at least five."""
        return self.updates[-max(LOOP // 2, len(self.updates) // 4) :]

    @cached_property
    def level(self) -> float:
        """The mean reward of the last updates, or NaN if there is none."""
        return mean(_values(self.last, "reward"))

    @cached_property
    def range(self) -> tuple[float, float]:
        """The lowest and the highest reward of an episode, or NaN if there is none."""
        rewards = [summary.reward or 0.0 for summary in self.scored]
        return min(rewards, default=math.nan), max(rewards, default=math.nan)

    @property
    def place(self) -> float:
        """The level as a share of the range, or NaN if it isn't known. A success is taken to earn 1 or more."""
        worst, best = self.range
        known = best > worst and len(self.updates) >= LOOP
        return (self.level - worst) / (max(best, 1.0) - worst) if known else math.nan

    def signs(self) -> Iterator[Sign]:
        """Yield the signs, unless the reward rose: even loops that learn have few groups that differ."""
        if not self.rose:
            weights = next(self._weights(), None) if self.rewards.low <= 0 else None
            if weights is not None:
                yield weights
            if self.by_agent:
                return
            yield from self._level()
            yield from self._trend(other_rate=weights is not None)
            equal = bool(self.updates) and self.range[0] == self.range[1] <= 0
            if self.place < SELDOM or equal or self._guess:
                yield from (Sign(7, start) for start in self.starts[1:])

    def _weights(self) -> Iterator[Sign]:
        """Yield signs that call for another learning rate. They may call for opposite ones, so the first one counts."""
        trained = [line for line in self.last if line.get("trained_tokens")]
        steps = [a * b for a, b in zip(_values(trained, "grad_norm"), _values(trained, "lr"), strict=False)]
        moved = _values(trained, "delivery/moved")
        jump = max(_values(self.updates, "delivery/moved"), default=0.0)
        if steps and not any(steps):
            yield Sign(
                1,
                f"The gradient or the learning rate was zero in the last {len(steps)} updates, so the weights did not "
                f"change. See {_name_of('learning rate')} and its schedule, and what each token was "
                f"worth{remedy('explain', '')}.",
            )
        elif moved and max(moved) < STILL:
            yield Sign(
                1,
                f"The updates hardly change the policy: log-probs move by at most {max(moved):.0e} nats. Set "
                f"{self._times('learning rate', 10)}.",
            )
        elif jump > JUMP and len(self.updates) >= LOOP and not self.place > 1 - NEAR:
            lower = self._times("learning rate", 0.1)
            yield Sign(3, f"A single update moved log-probs by {jump:.2g} nats. Set {lower}.")
        # The entropy over all of the policy's own tokens. Earlier versions wrote it only for tokens with an advantage.
        surprise = _values(self.last, "entropy/sampled") or _values(self.last, "entropy")
        surprise = surprise or [-x for x in _values(self.last, "logprob")]
        if surprise and mean(surprise) < GONE and not self.place > 1 - NEAR:
            yield Sign(
                3,
                f"The entropy is gone ({mean(surprise):.3f} nats a token), so all attempts are alike. Begin again from "
                f"an earlier checkpoint with {self._times('learning rate', 0.1)}, or with a KL or entropy "
                f"term{remedy('terms', '')}.",
            )
        kl = mean(_values(trained, "kl/old") or [0.0])
        if self.rewards.high < 0:
            yield Sign(4, f"The reward fell ({self.rewards}). Set {self._times('learning rate', 0.1)}.")
        elif kl > (FAR if len(self.updates) >= LOOP else EARLY):
            lower = self._times("learning rate", 0.1)
            yield Sign(4, f"The policy is {kl:.2g} nats a token from the one that sampled. Set {lower}.")

    def _level(self) -> Iterator[Sign]:
        (worst, best), guess = self.range, self._guess
        flat = mean(_values(self.last, "group/flat") or [0.0])
        share = f"{flat:.0%} of the groups of the last {len(self.last)} updates had equal rewards, which teach nothing"
        if self.place > 1 - NEAR:
            seen = f"The reward is already {self.level:.3g}, and the best episode has {best:.3g}"
            yield Sign(2, f"{seen}. Take harder tasks.")
        elif guess:
            yield Sign(
                5,
                f"The model guesses: its answers earn {guess[0]:.3f}, and {guess[1]:.3f} if each task gets the answers "
                f"to other tasks. {self.starts[0]}",
            )
        elif self.place < SELDOM:
            success, newest = max(best, 1.0), self.scored[-NEWEST:]
            right = sum((one.reward or 0.0) >= success - NEAR * (success - worst) for one in newest) / len(newest)
            seen = f"The model is right in {right:.1%} of its newest answers (mean reward {self.level:.2g})"
            yield Sign(6, f"{seen}, too few to learn from. {f'{share}. ' if flat > MOST else ''}{self.starts[0]}")
        elif self.rewards.low <= 0 and flat > (MOST if len(self.updates) >= LOOP else 0.99) and best != worst:
            larger = self._times("group size", 4)
            yield Sign(6, f"{share}. Set {larger}, or take tasks that the model sometimes solves (curriculum).", flat)

    def _trend(self, other_rate: bool) -> Iterator[Sign]:
        n, (change, tasks) = len(self.updates), self.measured
        if tasks and self.rewards.low > 0:
            half = (change.high - change.low) / 2
            yield Sign(
                7,
                f"The reward rose in the updates ({self.rewards}), but {tasks} held-out tasks can't show less than "
                f"{half:.3f}. Set {self._times('evaluation attempts', 4)}, or hold out more tasks."
                if half > self.rewards.value
                else f"The reward rose in the updates ({self.rewards}), but not as much on held-out tasks. Train on "
                "more different tasks.",
                0.4,
            )
        if n >= LOOP:
            if not other_rate:
                yield Sign(8, f"Try {self._times('learning rate', 10)}.", 0.0)
            seen = f"The reward rose in the updates ({self.rewards}). " if self.rewards.low > 0 else ""
            further = remedy("continue", f"Continue the run to {4 * n} updates.", updates=4 * n)
            yield Sign(9, f"{seen}{further}", 0.0)

    def _setting(self, key: str) -> Any:
        found: Any = self._settings
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        try:
            return recorded_settings(self.store.path)
        except OtherVersion:
            return {}

    def _times(self, key: str, factor: float) -> str:
        """Return the setting that is named by `key` with `factor` times its present value."""
        name = _name_of(key)
        value = self._setting(name)
        known = isinstance(value, int | float) and not isinstance(value, bool)
        return f"{name}={value * factor:g} instead of {value:g}" if known else f"{name} to {factor:g} times its value"

    @cached_property
    def starts(self) -> tuple[str, ...]:
        """What would make the policy succeed more often before the loop, the best first.

        If the warm start was still lowering its loss, the model can learn these tasks from more examples. Otherwise it
        has only learned the form of an answer, and needs easier tasks too.
        """
        goal, larger = f"so that the model gets {SELDOM:.0%} right before the loop", "Take a larger model."
        tapes = _name_of("warm start tapes")
        if not self._setting(tapes):
            return f"Begin with a warm start on right examples ({tapes}).", f"Take easier tasks, {goal}.", larger
        try:
            imitated = len(Results.read(self.store.path).imitated or ())
            lines = read_metrics(self.store.path / METRICS)
        except (OSError, TapereelError):
            imitated, lines = 0, []
        examples = f"{4 * imitated:,} instead of {imitated:,}" if imitated else "four times as many"
        more = self._times("warm start updates", 4)
        longer = f"Imitate longer: only right examples ({examples}), and {more}."
        both = f"Begin with easier tasks, only right examples, and {more}, {goal}{remedy('no updates', '')}."
        losses = _values([line for line in lines if line.get("phase") == "sft"], "loss")
        quarter = len(losses) // 4
        before, after = losses[-2 * quarter : -quarter], losses[-quarter:]
        fell = mean(before) - mean(after) if quarter >= LOOP else 0.0
        if fell > FALLING * abs(mean(before or [0.0])):
            fall = f"The loss of the warm start was still falling ({fell / mean(before):.0%} in its last quarter). "
            return fall + longer, both, larger
        return both, longer, larger

    @cached_property
    def _guess(self) -> tuple[float, float] | None:
        """Return the mean reward of the newest answers, and their mean reward if each task got the answers to other
        tasks, if both are about equal.

        The reward of an answer to a task is known if an attempt at this task gave this answer. Otherwise it is taken to
        be the lowest. Returns None if too few rewards are known, or if equal answers to a task earn different rewards.
        """
        newest = [summary for summary in self.scored[-NEWEST:] if summary.parent is None]
        if len(self.updates) < LOOP or len({summary.reward for summary in newest}) < 2:
            return None
        tasks: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for summary in newest:
            actions = self.store.tape(summary.id, refresh=False).actions
            tasks[summary.task_hash][str(actions[-1]) if actions else ""].append(summary.reward or 0.0)
        earned = [rewards for answers in tasks.values() for rewards in answers.values()]
        repeated = [rewards for rewards in earned if len(rewards) > 1]
        if len(tasks) < LOOP or sum(min(rewards) < max(rewards) for rewards in repeated) > NEAR * len(repeated):
            return None
        said = Counter[str]()
        for answers in tasks.values():
            said.update({answer: len(rewards) for answer, rewards in answers.items()})
        worst, best = min(map(min, earned)), max(map(max, earned))
        own, shuffled, known = list[float](), list[float](), list[float]()
        for answers in tasks.values():
            n = sum(map(len, answers.values()))
            # How often other tasks got this answer.
            shares = {answer: (said[answer] - len(one)) / (len(newest) - n) for answer, one in answers.items()}
            known.append(sum(shares.values()))
            own.append(sum(map(sum, answers.values())) / n)
            shuffled.append(sum(shares[a] * mean(one) for a, one in answers.items()) + (1 - known[-1]) * worst)
        gains = [a - b for a, b in zip(own, shuffled, strict=True)]
        error = 1.96 * math.sqrt(variance(gains) / len(gains))
        guessed = mean(known) > MOST and mean(gains) < min(error + 1e-9, NEAR * (best - worst))
        return (mean(own), mean(shuffled)) if guessed else None


def _name_of(setting: str) -> str:
    return remedy(setting, f"the {setting}")


def _values(lines: Lines, key: str) -> list[float]:
    return [float(value) for line in lines if isinstance(value := line.get(key), int | float)]
