"""Per-agent training: an agent's reward is compared with the rewards of the same agent in the other attempts.

A reward component named `name@path` belongs to the agent at `path` alone. All agents share every other component.

An episode with two agents becomes two `Episode`s, and the rows of each train only one agent's tokens. So group means,
deviations, weights and counts are per agent, although the objective's terms don't know about agents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ...envs.rewards.relative import counted
from ...tapes import Tape
from ...tapes.common.stats import mean
from .rows import Row
from .stream import BadBatch, Episode, Stream

AT = "@"


def addressed(name: str) -> str | None:
    """Return the agent's path in a reward component's name (`name@path`), or None if all agents share the component."""
    _, at, path = name.rpartition(AT)
    return path if at and path else None


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """The rewards of one tape, per turn and multiplied by their weights. A reward for the whole episode counts in the
    last turn. The reward of a turn is NaN if nothing scored it."""

    whole: NDArray[np.float64]
    """(turns,) the sum of all rewards in each turn."""
    alone: dict[str, NDArray[np.float64]]
    """By the agent's path: (turns,) the rewards that this agent alone gets in each turn."""
    shared: NDArray[np.float64] | None
    """(turns,) the rewards that all agents share in each turn. None if there are none, which isn't the same as zero."""
    components: dict[str, float]
    """The unweighted sum of each reward component, by name."""
    weights: dict[str, float]
    """The weight of each component that has one other than 0."""


def turn_rewards(tape: Tape) -> TurnRewards:
    """Return the tape's rewards per turn, computed in one pass."""
    turns = max(tape.turns, 1)
    whole = np.full(turns, np.nan)
    alone: dict[str, NDArray[np.float64]] = {}
    shared: NDArray[np.float64] | None = None
    components: dict[str, float] = {}
    weights: dict[str, float] = {}
    for reward in counted(tape):
        components[reward.name] = components.get(reward.name, 0.0) + reward.value
        turn = min(tape.entries[reward.step].turn, turns - 1) if reward.step is not None else turns - 1
        if not reward.weight:
            continue
        weights[reward.name] = reward.weight
        path = addressed(reward.name)
        if path is not None:
            mine = alone.setdefault(path, np.full(turns, np.nan))
        else:
            mine = shared = np.full(turns, np.nan) if shared is None else shared
        for earned in (whole, mine):
            before = 0.0 if np.isnan(earned[turn]) else earned[turn]
            earned[turn] = before + reward.weight * reward.value
    return TurnRewards(whole, alone, shared, components, weights)


def rewards_of(tape: Tape, paths: Iterable[str]) -> dict[str, float | None]:
    """Return the total reward of each agent in `paths`, by the agent's path. It is None for an agent without any
    reward."""
    earned = turn_rewards(tape)
    return {path: _total(_sum(earned.alone.get(path), earned.shared)) for path in paths}


def apart(rows: Sequence[Row], episode: Episode) -> tuple[list[Row], list[Episode]]:
    """Split the rows of one tape by agent. Return the new rows, and one `Episode` for each agent that produced tokens
    in them."""
    parts: list[Row] = []
    paths: dict[str, None] = {}
    for row in rows:
        speaks = np.array(row.agents)[row.call]
        for path in dict.fromkeys(speaks.tolist()):
            paths[path] = None
            parts.append(replace(row.where(speaks == path), episode=f"{row.tape}#{path}", group=f"{row.group}#{path}"))
    return parts, [_part(episode, path) for path in paths]


def _part(episode: Episode, path: str) -> Episode:
    alone = episode.alone.get(path)
    both = _sum(None if alone is None else np.asarray(alone), episode.shared)
    return replace(
        episode,
        tape=f"{episode.tape}#{path}",
        group=f"{episode.group}#{path}",
        reward=_total(both),
        turn_rewards=both,
        weights={name: weight for name, weight in episode.weights.items() if addressed(name) in (None, path)},
        fork=None if episode.fork is None else f"{episode.fork}#{path}",
    )


def check_addresses(episodes: Iterable[Episode], rows: Iterable[Row]) -> None:
    """Raise BadBatch if a reward component names an agent that isn't in the batch. This reward would train no token."""
    wanted = {path for episode in episodes for path in episode.alone}
    there = {path for row in rows for path in row.agents}
    if wanted - there and there:
        raise BadBatch(
            f"a reward component is for agent {sorted(wanted - there)[0]!r} alone, but the agents of the batch are "
            f"{', '.join(map(repr, sorted(there)))}: name the component `name{AT}path` with one of these paths"
        )


def reward_by_agent(stream: Stream) -> dict[str, float]:
    """Return the mean reward of each agent's scored episodes, by `reward/agent/PATH`. `apart` must have split the
    batch."""
    found: dict[str, list[float]] = {}
    for name, reward in zip(stream.episodes.tape, stream.episodes.reward.tolist(), strict=True):
        _, apart_, path = name.partition("#")
        if apart_ and reward == reward:
            found.setdefault(path, []).append(reward)
    return {f"reward/agent/{path}": mean(rewards) for path, rewards in sorted(found.items())}


def _sum(a: NDArray[np.float64] | None, b: Sequence[float] | NDArray[np.floating] | None) -> NDArray[np.float64] | None:
    parts = [np.asarray(part, dtype=np.float64) for part in (a, b) if part is not None]
    return np.where(np.isnan(parts).all(axis=0), np.nan, np.nansum(parts, axis=0)) if parts else None


def _total(rewards: NDArray[np.float64] | None) -> float | None:
    return None if rewards is None else float(np.nansum(rewards))
