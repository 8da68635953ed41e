"""A batch as the ledger speaks of it: episodes, and tokens in the order given. Plain numbers in lists."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Attempt:
    """One episode."""

    group: str
    reward: float | None
    """None: unscored."""
    turn_rewards: list[float | None]
    """They add up to the reward; all 0 where the episode is unscored. None: the turn is unscored."""
    fork: str | None = None
    trains: bool = True
    """Its status allows it."""
    bootstrap: float = 0.0
    """Value beyond the end; 0 after a terminal one."""
    length: int = 0
    components: dict[str, float] = field(default_factory=dict)


@dataclass
class Said:
    """One own token."""

    episode: int
    turn: int
    """Within the episode."""
    lp: float = -1.0
    old: float | None = -1.0
    """None: unknown."""
    ref: float = -1.0
    prox: float = -1.0
    """Log-prob under the weights that met the batch."""
    value: float = 0.0
    entropy: float = 1.0


@dataclass
class World:
    """The batch."""

    episodes: list[Attempt]
    tokens: list[Said]

    def of_episode(self, e: int) -> list[int]:
        return [t for t, token in enumerate(self.tokens) if token.episode == e]

    def in_time(self, e: int) -> list[int]:
        """An episode's tokens turn by turn, and in a turn as they are given."""
        return sorted(self.of_episode(e), key=lambda t: self.tokens[t].turn)

    def units(self, per: str) -> list[tuple[int, int]]:
        """(episode, turn) of each thing that earns a reward; turn -1: the episode as a whole."""
        if per == "episode":
            return [(e, -1) for e in range(len(self.episodes))]
        return [(e, k) for e, attempt in enumerate(self.episodes) for k in range(len(attempt.turn_rewards))]
