"""Each agent of an episode for itself: compared with itself in the other attempts of the group, by what it earned.

A reward component that is named `name@path` is that agent's alone; all others are everybody's. An episode with two
agents becomes two `Episode`s, whose rows hold the tokens of one agent each: so group means, deviations, weights and
counts are per agent, and no term of an objective has to know of agents. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...envs.rewards.relative import counted
from ...tapes import Tape
from .rows import Row
from .stream import BadBatch, Episode, Stream

AT = "@"


def addressed(name: str) -> str | None:
    """The path that a reward component belongs to; None where it is everybody's."""
    _, at, path = name.rpartition(AT)
    return path if at and path else None


def earned(tape: Tape) -> tuple[dict[str, NDArray[np.float64]], NDArray[np.float64] | None]:
    """(path -> rewards of each turn that are its alone, those of all agents or None where nothing is). Rewards of the
    whole episode count on its last turn."""
    turns = max(tape.turns, 1)
    alone: dict[str, NDArray[np.float64]] = {}
    shared: NDArray[np.float64] | None = None
    for reward in counted(tape):
        if not reward.weight:
            continue
        turn = min(tape.entries[reward.step].turn, turns - 1) if reward.step is not None else turns - 1
        path = addressed(reward.name)
        if path is not None:
            alone.setdefault(path, np.zeros(turns))[turn] += reward.weight * reward.value
        else:
            shared = np.zeros(turns) if shared is None else shared
            shared[turn] += reward.weight * reward.value
    return alone, shared


def rewards_of(tape: Tape, paths: Iterable[str]) -> dict[str, float | None]:
    """What each of these agents earned; None for one that nothing was said of."""
    alone, shared = earned(tape)
    return {path: _total(_sum(alone.get(path), shared)) for path in paths}


def apart(rows: Sequence[Row], episode: Episode) -> tuple[list[Row], list[Episode]]:
    """The rows of one tape, those of each agent under an `Episode` of its own; agents that said nothing have none."""
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
    """BadBatch where a reward is for an agent that nobody is: it would teach no one."""
    wanted = {path for episode in episodes for path in episode.alone}
    there = {path for row in rows for path in row.agents}
    if wanted - there and there:
        raise BadBatch(
            f"a reward is for {sorted(wanted - there)[0]!r} alone, but those who speak are "
            f"{', '.join(map(repr, sorted(there)))}: name a component `name{AT}path` by one of these"
        )


def reward_by_agent(stream: Stream) -> dict[str, float]:
    """`reward/PATH` -> mean reward of the agent's scored episodes in a batch that was taken apart."""
    found: dict[str, list[float]] = {}
    for name, reward in zip(stream.episodes.tape, stream.episodes.reward.tolist(), strict=True):
        _, apart_, path = name.partition("#")
        if apart_ and reward == reward:
            found.setdefault(path, []).append(reward)
    return {f"reward/{path}": sum(rewards) / len(rewards) for path, rewards in sorted(found.items())}


def _sum(a: NDArray[np.float64] | None, b: Sequence[float] | NDArray[np.floating] | None) -> NDArray[np.float64] | None:
    parts = [np.asarray(part, dtype=np.float64) for part in (a, b) if part is not None]
    return np.sum(parts, axis=0) if parts else None


def _total(rewards: NDArray[np.float64] | None) -> float | None:
    return None if rewards is None else float(rewards.sum())
