"""Makes the lines of metrics.jsonl. Each line has the values of one update, from the process that made the update or
applied it again.

docs/reference/metrics.md defines each name. An unknown value is None or left out, but never 0.
"""

from __future__ import annotations

import resource
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch

from ...envs.rewards.relative import counted
from ...tapes import Status, Tape
from ...tapes.common.stats import mean, mean_of
from ...tapes.records import Call, Use
from ..data.by_agent import reward_by_agent
from ..trainer.trainer import UpdateStats
from .plan import UpdateInfo
from .staleness import version_number


def imitation_line(stats: UpdateStats, uses: Sequence[Use]) -> dict[str, object]:
    """Return the line for an update on recorded tapes (SFT). `uses` are the update's records, one per epoch."""
    return {"phase": UpdateInfo.of(uses[0]).phase, "update": uses[0].update + 1, **stats.line()}


def rollout_line(
    stats: UpdateStats, uses: Sequence[Use], tapes: Sequence[Tape], seconds: float | None
) -> dict[str, object]:
    """Return the line for an update of the loop on `tapes`. `seconds` is the update's duration, or None if a recorded
    update was applied again."""
    # The reward of a fork counts only the turns after the fork, so it isn't comparable with the reward of a whole
    # episode.
    scored = [reward for tape in tapes if tape.begin.parent is None and (reward := tape.reward) is not None]
    line: dict[str, object] = {
        "phase": UpdateInfo.of(uses[0]).phase,
        "update": uses[0].update + 1,
        "reward": mean_of(scored),
        "episodes": len(tapes),
        **ends(tapes),
        **{f"component/{name}": mean for name, mean in components(tapes).items()},
        "train_seconds": seconds,
    }
    # The values of the policy cover only the tokens that entered the loss. If a name is also in `line`, the value in
    # `line` is kept, because it covers everything that was sampled for the update.
    line |= {key: value for key, value in _policy_values(stats, uses, tapes).items() if key not in line}
    return line | reward_by_agent(stats.stream)


def player_line(name: str, stats: UpdateStats, uses: Sequence[Use], tapes: Sequence[Tape]) -> dict[str, object]:
    """Return the fields that a player (another trained policy, called `name`) adds to the line of an update on
    `tapes`."""
    values = _policy_values(stats, uses, tapes)
    return {f"players/{name}/{key}": value for key, value in values.items()} | reward_by_agent(stats.stream)


def _policy_values(stats: UpdateStats, uses: Sequence[Use], tapes: Sequence[Tape]) -> dict[str, object]:
    """Return the fields for one policy: loss and objective, the lengths of answers and episodes, the ages of the
    sampled tokens, and the numbers of trained, stale and filtered tokens."""
    info = UpdateInfo.of(uses[0])
    # A player's update doesn't read the flat groups, which only the first policy accounts for.
    read = set(info.every)
    tapes = [tape for tape in tapes if tape.id in read]
    stale = sum(r[3] - r[2] for r in info.stale)
    ages = _ages(tapes, uses[0])
    return {
        **stats.line(),
        **lengths(tapes, info.agents),
        "lag": sum(age * n for age, n in ages.items()) / sum(ages.values()) if ages else None,
        "lag/max": max(ages, default=None),
        "trained_tokens": sum(end - start for one in uses for _, _, start, end, _ in one.items),
        "stale_tokens": stale,
        "stale_share": stale / own if (own := stale + len(stats.stream)) else None,
        "filtered_tokens": sum(r[3] - r[2] for r in info.filtered),
    }


def ends(tapes: Sequence[Tape]) -> dict[str, float | None]:
    """Return how episodes ended: their mean number of turns, the share that did not finish, and the share for each way
    to end early (truncated, limit or error)."""
    cut = (Status.TRUNCATED, Status.LIMIT, Status.ERROR)
    return {
        "turns": mean_of([tape.turns for tape in tapes]),
        "truncated": mean_of([tape.status is not Status.FINISHED for tape in tapes]),
        **{f"ended/{status.value}": mean_of([tape.status is status for tape in tapes]) for status in cut},
    }


def components(tapes: Iterable[Tape]) -> dict[str, float]:
    """Return the mean of each reward component and metric, without weights, over the episodes that have it. Forks don't
    count."""
    found: dict[str, list[float]] = {}
    for tape in tapes:
        if tape.begin.parent is None:
            own: dict[str, float] = {}
            for reward in counted(tape):
                own[reward.name] = own.get(reward.name, 0.0) + reward.value
            for name, value in own.items():
                found.setdefault(name, []).append(value)
    return {name: mean(values) for name, values in found.items()}


def lengths(tapes: Sequence[Tape], agents: Collection[str] | None = None) -> dict[str, float | None]:
    """Return the fields `length/...`: the numbers of tokens in answers and in episodes. With `agents`, only the tokens
    of these agents count."""
    found: dict[str, list[int]] = {"answer": [], "episode": [], "total": []}
    cut: list[bool] = []
    for tape in tapes:
        calls = [call for call in tape.calls if call.completion and (agents is None or call.by in agents)]
        answers = [len(call.completion or ()) for call in calls]
        found["answer"] += answers
        cut += [call.finish == "length" for call in calls]
        if calls and tape.begin.parent is None:
            found["episode"].append(sum(answers))
            found["total"].append(_sequence_tokens(tape, calls))
    means = {f"length/{name}": mean_of(tokens) for name, tokens in found.items()}
    most = {f"length/{name}/max": max(tokens, default=None) for name, tokens in found.items()}
    return {**means, **most, "length/answer/cut": mean_of(cut)}


def _sequence_tokens(tape: Tape, calls: Sequence[Call]) -> int:
    """Return the number of tokens in the prompts and completions of these calls. If one call continues another, the
    tokens that they share count once."""
    tokens = {call.call: tape.log.prompt_length(call) + len(call.completion or ()) for call in calls}
    continued = {call.base for call in calls if call.base is not None and call.keep == tokens.get(call.base)}
    return sum(n for call, n in tokens.items() if call not in continued)


def _ages(tapes: Sequence[Tape], use: Use) -> dict[int, int]:
    """Return the number of sampled tokens by age, which is the number of updates since the weights that sampled a
    token. Tokens that other policies sampled don't count."""
    tokens: Counter[str] = Counter()
    for tape in tapes:
        for call in tape.calls:
            for version, start, end in call.spans:
                tokens[version] += end - start
    numbers = {version: version_number(version, use.lineage) for version in tokens}
    return {use.update - number: tokens[version] for version, number in numbers.items() if number is not None}


UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes per unit of `ru_maxrss`, which counts bytes on macOS and KiB on Linux."""


def performance_line(**seconds: float) -> dict[str, float]:
    """Return `perf/NAME_seconds` for each argument, and the peak memory of the process and of its GPU in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT / 2**20
    line = {f"perf/{name}_seconds": round(value, 4) for name, value in seconds.items()}
    line["perf/memory_mib"] = round(peak, 1)
    if torch.cuda.is_available():
        line["perf/cuda_memory_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return line
