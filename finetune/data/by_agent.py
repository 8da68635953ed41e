"""Per-agent training, which compares each agent with itself in the other attempts, by its own reward.

A reward component named `name@path` belongs to the agent at `path` alone. Every other component is shared by all
agents. An episode with two agents becomes two `Episode`s. The rows of each have only one agent's own tokens. Group
means, deviations, weights and counts are then per agent, and the objective's terms needn't know about agents.
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
    """Return the path of the agent that a reward component belongs to, or None if all agents share it."""
    _, at, path = name.rpartition(AT)
    return path if at and path else None


@dataclass(frozen=True, slots=True)
class TurnRewards:
    """The weighted rewards of one tape, laid out over its turns. A reward for the whole episode is on the last turn."""

    whole: NDArray[np.float64]
    """(turns,) the sum of all rewards in each turn."""
    alone: dict[str, NDArray[np.float64]]
    """The rewards that one agent alone gets in each turn, by the agent's path."""
    shared: NDArray[np.float64] | None
    """The rewards that all agents get in each turn. None if they get none, which isn't the same as zero."""
    components: dict[str, float]
    """The unweighted sum of each reward component, by name."""


def turn_rewards(tape: Tape) -> TurnRewards:
    """Lay out the tape's rewards over its turns, in one pass."""
    turns = max(tape.turns, 1)
    whole = np.zeros(turns)
    alone: dict[str, NDArray[np.float64]] = {}
    shared: NDArray[np.float64] | None = None
    components: dict[str, float] = {}
    for reward in counted(tape):
        components[reward.name] = components.get(reward.name, 0.0) + reward.value
        turn = min(tape.entries[reward.step].turn, turns - 1) if reward.step is not None else turns - 1
        value = reward.weight * reward.value
        whole[turn] += value
        if not reward.weight:
            continue
        path = addressed(reward.name)
        if path is not None:
            alone.setdefault(path, np.zeros(turns))[turn] += value
        else:
            shared = np.zeros(turns) if shared is None else shared
            shared[turn] += value
    return TurnRewards(whole, alone, shared, components)


def rewards_of(tape: Tape, paths: Iterable[str]) -> dict[str, float | None]:
    """Return each agent's reward, by the agent's path in `paths`. An agent without any reward has None."""
    earned = turn_rewards(tape)
    return {path: _total(_sum(earned.alone.get(path), earned.shared)) for path in paths}


def apart(rows: Sequence[Row], episode: Episode) -> tuple[list[Row], list[Episode]]:
    """Split the rows of one tape by agent. Return them with an `Episode` for each agent that has own tokens."""
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
        fork=None if episode.fork is None else f"{episode.fork}#{path}",
    )


def check_addresses(episodes: Iterable[Episode], rows: Iterable[Row]) -> None:
    """Raise BadBatch if a reward is for a path that no agent has. This reward would train no token."""
    wanted = {path for episode in episodes for path in episode.alone}
    there = {path for row in rows for path in row.agents}
    if wanted - there and there:
        raise BadBatch(
            f"a reward component is for agent {sorted(wanted - there)[0]!r} alone, but the agents of the batch are "
            f"{', '.join(map(repr, sorted(there)))}: name the component `name{AT}path` with one of these paths"
        )


def reward_by_agent(stream: Stream) -> dict[str, float]:
    """Return the mean reward of each agent's scored episodes, by `reward/agent/PATH`, in a batch split by `apart`."""
    found: dict[str, list[float]] = {}
    for name, reward in zip(stream.episodes.tape, stream.episodes.reward.tolist(), strict=True):
        _, apart_, path = name.partition("#")
        if apart_ and reward == reward:
            found.setdefault(path, []).append(reward)
    return {f"reward/agent/{path}": mean(rewards) for path, rewards in sorted(found.items())}


def _sum(a: NDArray[np.float64] | None, b: Sequence[float] | NDArray[np.floating] | None) -> NDArray[np.float64] | None:
    parts = [np.asarray(part, dtype=np.float64) for part in (a, b) if part is not None]
    return np.sum(parts, axis=0) if parts else None


def _total(rewards: NDArray[np.float64] | None) -> float | None:
    return None if rewards is None else float(rewards.sum())
