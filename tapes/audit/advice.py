"""Advice: signs of trouble in a run's numbers, one sentence for each, with the next step.

Advice is printed at the end of `run` and `train`, and shown on the run's overview. It is based on summaries, metrics
and the newest tapes. A run without advice shows none of these signs, but it may still have other problems.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pydantic import JsonValue

from ..common.stats import interval, mean, variance
from ..errors import TapereelError
from ..steps import ParseError
from ..store.run_directory import Evaluations
from ..store.store import Store
from ..tape import Tape

NEWEST = 50
"""Number of newest tapes that are read to find signs that no metric shows."""
OFTEN = 0.1
"""Answers that were cut off at their token limit are reported if their share of all answers is above this value."""
MOST = 0.5
"""Answers that could not be read as an action are reported if their share of all answers is above this value."""
NEAR = 0.1
"""Answers that were cut off aren't reported if their mean reward is close to the best reward. Close means that the
difference is below this share of the rewards' range."""
FEW = 4
"""Minimum number of rewards for advice about rewards, and of answers for advice about answers."""
SHORT = 16
"""If the limit on an answer's length is below this number of tokens, it is assumed to be intended. Answers that were
cut off are then not reported."""
LOOP = 10
"""Minimum number of updates for advice about their reward. The mean rewards of the first and the last updates are
compared."""
GONE = 0.05
"""Entropy in nats per token. Below this value, the attempts in a group are copies of each other."""

Lines = Sequence[Mapping[str, JsonValue]]


def advice(
    store: Store, split: str | None = None, updates: Lines = (), held_out: Evaluations | None = None
) -> tuple[str, ...]:
    """Return advice about the closed tapes in `split`, or in all splits if it is None. It also covers the loop's
    `updates`, given as lines of the metrics, and the evaluation at the loop's end."""
    try:
        return (
            *_tapes(store, split),
            *_updates(updates),
            *_held_out(held_out if held_out and len(updates) >= LOOP else {}),
        )
    except TapereelError as error:
        return (f"The newest tapes can't be read, so nothing is said about them: {error}",)


def _tapes(store: Store, split: str | None) -> Iterator[str]:
    closed = store.summaries(split=split, closed=True)
    rewards = {s.reward for s in closed if s.trainable and s.reward is not None}
    scored = sum(s.trainable and s.reward is not None for s in closed)
    if scored >= FEW and len(rewards) == 1:
        yield (
            f"All {scored:,} rewards are {rewards.pop():g}: they don't tell a better episode from a worse one. Read "
            f"one (tapereel show RUN {closed[-1].id}): does the environment see the answer, and are the tasks neither "
            "too hard nor too easy for this model?"
        )
    newest = [store.tape(s.id, refresh=False) for s in closed[-NEWEST:]]
    offered = [tape for tape in newest if any(call.tools is not None for call in tape.calls)]
    if len(offered) >= FEW and not any(map(_called, offered)):
        yield (
            f"Tools were offered in {len(offered)} of the newest {len(newest)} episodes, and none was called. Read an "
            f"answer (tapereel show RUN {offered[-1].id}): does the model know that it has tools, does it "
            "write calls in a format that is read (docs/tools.md), and does your agent act on reply.tool_calls?"
        )
    misread = Counter(step.problem for tape in newest for step in tape if isinstance(step, ParseError))
    asked = sum(len(tape.calls) for tape in newest)
    if asked and misread.total() >= FEW and misread.total() > MOST * asked:
        problem, _ = misread.most_common(1)[0]
        yield (
            f"{misread.total() / asked:.0%} of the newest answers could not be read as an action, most often: "
            f"{problem[:200]!r}. Does the prompt show the format, and is the fault in the answer and not in your "
            "agent's `parse`?"
        )
    # A limit of a few tokens, or one that the agent sets itself (`max_tokens=1`), is meant to cut off answers.
    limits = [tape.begin.sampling.max_tokens if tape.begin.sampling else 0 for tape in newest]
    answers = [
        (call.finish == "length", tape.reward)
        for tape, limit in zip(newest, limits, strict=True)
        if limit >= SHORT
        for call in tape.calls
        if call.sampling is not None and call.sampling.max_tokens == limit
    ]
    cut = [reward for is_cut, reward in answers if is_cut]
    if len(answers) >= FEW and len(cut) > OFTEN * len(answers) and not _earns(cut, [reward for _, reward in answers]):
        yield (
            f"{len(cut) / len(answers):.0%} of the newest answers were cut off at sampling.max_tokens "
            f"({max(limits)}), so they earn what half an answer earns. Raise it (loop.sampling.max_tokens in "
            "training), or ask for shorter answers."
        )


def _earns(cut: Sequence[float | None], every: Sequence[float | None]) -> bool:
    """Return whether the mean reward of cut-off answers (`cut`) comes near the best reward of all answers (`every`). If
    all answers were cut off, the mean must also come near 1."""
    known, scored = ([reward for reward in rewards if reward is not None] for rewards in (cut, every))
    best, worst = max([*scored, *[1.0] * (len(known) == len(scored))]), min([*scored, 0.0])
    return bool(known) and best - mean(known) < NEAR * (best - worst)


def _called(tape: Tape) -> bool:
    """Return True if any tool was called. The call is in an action, or in a later request of an external program."""
    names = {"tool_calls"}
    for call in tape.calls:
        schemas = (call.tools.schemas if call.tools is not None else None) or ()
        functions = (schema.get("function", schema) for schema in schemas)
        names |= {str(function.get("name")) for function in functions if isinstance(function, dict)}
        if any(message["role"] == "tool" for message in call.messages):
            return True
    return any(getattr(step, "original", step.kind) in names for step in tape.actions)


def _updates(lines: Lines) -> Iterator[str]:
    some = max(LOOP // 2, len(lines) // 4)
    first, last = lines[:some], lines[-some:]
    low, high = _rise(_values(first, "reward"), _values(last, "reward"))
    if low > 0:
        return  # The run learns. Even successful runs have few groups that differ and little entropy.
    known = len(lines) >= LOOP and math.isfinite(high)
    if known:
        yield (
            f"The reward did not rise beyond its interval: from the first to the last {some} updates it changed by "
            f"{interval((low + high) / 2, low, high, '+.3f')} (see docs/reward_does_not_climb.md)."
        )
    trained = [line for line in last if line.get("trained_tokens")]
    moves = [a * b for a, b in zip(_values(trained, "grad_norm"), _values(trained, "lr"), strict=False)]
    flat = _values(last, "group/flat")
    # The entropy over all of the policy's own tokens. Earlier versions wrote it only for the tokens with an advantage.
    surprise = _values(last, "entropy/sampled") or _values(last, "entropy") or [-x for x in _values(last, "logprob")]
    still = bool(moves) and not any(moves)
    alike = bool(flat) and mean(flat) > (0.5 if known else 0.99)
    gone = bool(surprise) and mean(surprise) < GONE
    if still:
        yield (
            f"The gradient or the learning rate was zero in the last {len(moves)} updates, so the weights did not "
            "change: see loop.optimiser.lr and its schedule, and what each token was worth (tapereel explain RUN TAPE)."
        )
    if alike:
        yield (
            f"{mean(flat):.0%} of the groups of the last {len(last)} updates had equal rewards, which teach nothing: "
            "take tasks that the model solves sometimes (curriculum), a larger loop.group_size, or rewards for parts "
            "of a solution."
        )
    if gone:
        yield (
            f"The entropy is gone ({mean(surprise):.3f} nats a token), so all attempts are alike: begin again from an "
            "earlier checkpoint with a lower loop.optimiser.lr, or with a KL or entropy term (loop.changes)."
        )
    if known and not (still or alike or gone):
        yield (
            "Groups differ and the weights move, so try other steps: loop.optimiser.lr ten times lower or higher, more "
            "groups an update (loop.groups), more updates, or a warm start (warm.tapes)."
        )


def _held_out(evaluations: Evaluations) -> Iterator[str]:
    part = evaluations.get("sampled")
    change = part.change if part is not None else None
    if change and change["low"] is not None and change["low"] <= 0:
        yield (
            f"On the {change['tasks']} held-out tasks the reward did not rise beyond its interval: it changed by "
            f"{interval(change['value'], change['low'], change['high'], '+.3f')}. Train longer (loop.updates, and "
            "warm.updates of a warm start) on more different tasks, and measure with more tasks (evaluation.fraction) "
            "or attempts (evaluation.attempts)."
        )


def _values(lines: Lines, key: str) -> list[float]:
    return [float(value) for line in lines if isinstance(value := line.get(key), int | float)]


def _rise(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval for the rise of the mean from `before` to `after`. It is infinite if either sequence has
    fewer than two values."""
    if len(before) < 2 or len(after) < 2:
        return -math.inf, math.inf
    error = math.sqrt(variance(before) / len(before) + variance(after) / len(after))
    t = 1.96 + 2.8 / (len(before) + len(after) - 2)  # Student's t, within 2 % from 8 degrees of freedom on
    difference = mean(after) - mean(before)
    return difference - t * error, difference + t * error
