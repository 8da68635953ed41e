"""The stream: the own tokens of a batch in packed 1-D columns, with tables of its episodes and turns.

A stream contains only the tokens that agents produced. It has no masks and no padding, so misaligned columns, means
over padding and 0/0 can't occur. An unknown number is NaN, so that it is noticed instead of counting as 0. Tokens are
in the order of the rows. `Stream.time` gives the order in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...tapes.errors import TapereelError
from ...tapes.status import CauseType, Status, trains
from .rows import Row

LOGPROB_SLACK = 1e-3
"""A log-prob in (0, LOGPROB_SLACK] is due to rounding and is read as 0. A larger log-prob is an error in the engine."""


class BadBatch(TapereelError, ValueError):
    """Raised if rows and episodes can't form a batch. The message names them and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One episode with its reward, as the objective uses it. An episode may have any number of rows."""

    tape: str
    """The tape's id, or `id#path` for one agent's part of the tape."""
    group: str
    reward: float | None
    """Total reward of the episode. None if the episode is unscored, which isn't the same as a reward of zero."""
    turn_rewards: Sequence[float] | NDArray[np.floating] | None = None
    """Rewards of the turns, which add up to `reward`. NaN for a turn that isn't scored, which isn't the same as 0.
    If None, the whole reward belongs to the last turn, and the others aren't scored."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Reward components by name, for recipes that weigh them differently."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weights with which the components add up to `reward`. Empty if they are unknown."""
    status: Status = Status.FINISHED
    cause: CauseType | None = None
    bootstrap: float | None = None
    """Value of the last state, if the episode was cut off. If None, the critic's value is used, or 0 without a
    critic."""
    length: int | None = None
    """Length of the episode in tokens, which a length penalty reads. If None, the own tokens in the batch are
    counted."""
    fork: str | None = None
    """For a fork, the name of the turn at which it continues its parent episode. Forks of one turn share this name."""
    alone: Mapping[str, Sequence[float] | NDArray[np.floating]] = field(default_factory=dict)
    """By the agent's path: the rewards that this agent alone gets in each turn (components `name@path`). `reward`
    includes them."""
    shared: Sequence[float] | NDArray[np.floating] | None = None
    """The rewards that all agents share in each turn. None if they share none."""
    kept_out: tuple[tuple[str, str, int, int], ...] = ()
    """Completions that a label excludes from training, each as (tape, call, start, end)."""
    pin: tuple[str, ...] = ()
    """The content of the tape as a list of digests (`provenance.Pin`). Empty if the episode doesn't come from a
    tape."""

    @property
    def trains(self) -> bool:
        """True if the episode's status allows training on it."""
        return trains(self.status, self.cause)


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Table of the E episodes of a batch, with one entry per episode."""

    tape: tuple[str, ...]
    reward: Tensor
    """(E,) float64, NaN if the episode is unscored."""
    trains: Tensor
    """(E,) bool: whether the status of the episode allows training on it."""
    cut: Tensor
    """(E,) bool: whether the episode was cut off by truncation or a limit, so that its return continues with a
    bootstrap value. An error in the agent's code counts as a regular end."""
    bootstrap: Tensor
    """(E,) float64: `Episode.bootstrap`, the value of the last state. It is 0 for a regular end, and NaN if it is
    unknown."""
    length: Tensor
    """(E,) int64 number of tokens, as in `Episode.length`."""
    group: Tensor
    """(E,) int64 index into `groups`."""
    fork: Tensor
    """(E,) int64: number of the set of episodes that a baseline compares with `by = fork`. Forks of one turn are a set,
    and so are all episodes of a group that aren't forks."""
    groups: tuple[str, ...]
    components: tuple[Mapping[str, float], ...]
    weights: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Table of the N turns of a batch, with one entry per turn. Turns are in the order of their episodes."""

    reward: Tensor
    """(N,) float64, NaN for a turn that isn't scored."""
    episode: Tensor
    """(N,) int64 index of the turn's episode."""
    numbers: Callable[[], Tensor] = field(compare=False, repr=False)
    """Function that computes `answered`. It is called only if a recipe reads `answered`."""
    place: Tensor | None = None
    """(N,) int64: the turn's number among the episode's turns with own tokens. It is set while a baseline compares
    returns, because a return is compared with returns that begin equally late. None if rewards are compared."""

    @cached_property
    def answered(self) -> Tensor:
        """(N,) int64: a number for the observation to which the agent responded in the turn. Equal observations have
        equal numbers. The number is -1 if the observation is unknown or the turn has no own tokens."""
        return self.numbers()


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The T own tokens of a batch, which are the tokens that agents produced. They are in the order of the rows."""

    token: Tensor
    """(T,) int64 token id."""
    old: Tensor
    """(T,) log-prob at sampling, NaN if it is unknown, for example in text that a person wrote."""
    temperature: Tensor
    """(T,) temperature at which the token was sampled."""
    version: Tensor
    """(T,) int64 index into `versions`: the version of the policy that sampled the token. -1 if no model sampled it."""
    call: Tensor
    """(T,) int64 index of the model call that produced the token, in `calls`."""
    turn: Tensor
    """(T,) int64 index of the token's turn in `turns`."""
    episode: Tensor
    """(T,) int64 index of the token's episode in `episodes`."""
    agent: Tensor
    """(T,) int64 index of the agent that produced the token, in `agents`."""
    episodes: Episodes
    turns: Turns
    calls: tuple[tuple[str, str], ...] = ()
    """The model calls of the batch, each as (tape id, call id)."""
    agents: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    rows: Tensor
    """(R + 1,) int64 offsets of the R rows: row i has the tokens from rows[i] to rows[i + 1] - 1."""
    ref: Tensor | None = None
    """(T,) log-prob under the reference model, or None if the recipe needs none."""
    teacher: Tensor | None = None
    """(T,) log-prob under the teacher, or None if the recipe needs none."""
    anchor: Tensor | None = None
    """(T,) log-prob under the weights before the first step on the rollout batch, or None if it wasn't computed."""
    entropy: Tensor | None = None
    """(T,) entropy of the policy before the first step on the rollout batch, or None if it wasn't computed."""
    value: Tensor | None = None
    """(T,) the critic's value of the state before the token, or None without a critic."""
    after: Tensor | None = None
    """(T,) the critic's value of the state after the token. It is only known at tokens in `ends`, and NaN elsewhere.
    None without bootstrapping."""
    fresh: Tensor | None = None
    """(T,) bool: True if the token was sampled with the weights that the update begins with. None means True for all
    tokens."""

    def __len__(self) -> int:
        return len(self.token)

    @property
    def group(self) -> Tensor:
        """(T,) int64 index into `episodes.groups`."""
        return self.episodes.group[self.episode]

    @cached_property
    def time(self) -> Tensor:
        """(T,) indices of the tokens in the order of time: by episode, then by turn, then by row and position."""
        return torch.argsort(self.turn, stable=True)

    @cached_property
    def following(self) -> Tensor:
        """(T,) int64 index of the token that comes next in the same episode, or -1 after the last one."""
        now, then = self.time[:-1], self.time[1:]
        found = torch.full_like(self.time, -1)
        found[now] = torch.where(self.episode[now] == self.episode[then], then, -1)
        return found

    @cached_property
    def openings(self) -> Tensor:
        """(K,) int64 index of the first token of each turn that has own tokens, in the order of the turns."""
        turn = self.turn[self.time]
        return self.time[torch.cat([turn[:1] == turn[:1], turn[1:] != turn[:-1]])]

    @property
    def ends(self) -> Tensor:
        """(T,) bool: whether the token is the last one of an answer. The last answer of an episode counts only if the
        episode was cut off."""
        follows = self.following
        return torch.where(follows < 0, self.episodes.cut[self.episode], self.call[follows] != self.call)

    @property
    def beyond(self) -> Tensor:
        """(E,) float64: value of each episode's last state, given or from the critic. It is 0 for a regular end, and
        NaN if it is unknown."""
        given, last = self.episodes.bootstrap, (self.following < 0).nonzero()[:, 0]
        if self.after is None:
            return given
        return torch.where(given.isnan(), given.index_copy(0, self.episode[last], self.after[last].to(given)), given)

    def having(self, **columns: Tensor | None) -> Stream:
        """Return a copy with some of the optional columns (`ref`, `teacher`, `anchor`, `entropy`, `value`, `after`,
        `fresh`) set."""
        for name, column in columns.items():
            if column is not None and column.shape != self.token.shape:
                raise BadBatch(f"column {name!r} has shape {tuple(column.shape)}, the stream {len(self)} tokens")
        return replace(self, **columns)  # type: ignore[arg-type]

    @classmethod
    def of(cls, rows: Sequence[Row], episodes: Sequence[Episode], *, dtype: torch.dtype = torch.float32) -> Stream:
        """Return the stream of the own tokens in `rows`. `row.taught_by` names the row's episode in `episodes`."""
        index = {episode.tape: i for i, episode in enumerate(episodes)}
        if len(index) != len(episodes):
            twice = next(e.tape for i, e in enumerate(episodes) if index[e.tape] != i)
            raise BadBatch(
                f"episode {twice!r} is in the batch twice: give each tape one Episode, even if it has several rows"
            )
        unknown = next((row.taught_by for row in rows if row.taught_by not in index), None)
        if unknown is not None:
            raise BadBatch(
                f"a row belongs to tape {unknown!r}, which isn't among the {len(episodes)} episodes: "
                "give the Episode of each row's tape"
            )
        sizes = np.array([len(row.own) for row in rows], dtype=np.int64)
        of_row = np.array([index[row.taught_by] for row in rows], dtype=np.int64)
        turn = _join([row.turn for row in rows], torch.int64)
        episode = np.repeat(of_row, sizes)
        turns, first = _turns(rows, of_row, turn.numpy(), episode, episodes)
        calls, agents, versions = _Interned[tuple[str, str]](), _Interned[str](), _Interned[str]()
        in_call = [row.call for row in rows]
        return cls(
            token=_looked_up([row.own for row in rows], [row.input_ids for row in rows]),
            old=_logprobs(rows, dtype),
            temperature=_join([row.temperature for row in rows], dtype),
            version=_looked_up([row.version for row in rows], [[versions(v) for v in row.versions] for row in rows]),
            call=_looked_up(in_call, [[calls((row.tape, call)) for call in row.calls] for row in rows]),
            turn=turn + torch.from_numpy(first[episode]),
            episode=torch.from_numpy(episode),
            agent=_looked_up(in_call, [[agents(agent) for agent in row.agents] for row in rows]),
            episodes=_episodes(rows, sizes, of_row, episodes),
            turns=turns,
            calls=tuple(calls.names),
            agents=tuple(agents.names),
            versions=tuple(versions.names),
            rows=torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])),
        )


K = TypeVar("K", bound=Hashable)


class _Interned(Generic[K]):
    """Gives each new name the next number, beginning with 0."""

    def __init__(self) -> None:
        self.names: dict[K, int] = {}

    def __call__(self, name: K) -> int:
        return self.names.setdefault(name, len(self.names))


def _join(columns: Sequence[NDArray], dtype: torch.dtype) -> Tensor:
    if not columns:
        return torch.zeros(0, dtype=dtype)
    return torch.from_numpy(np.concatenate(columns)).to(dtype)


def _looked_up(columns: Sequence[NDArray], tables: Sequence[Sequence[int] | NDArray]) -> Tensor:
    """Return the columns joined, with each entry k of column i replaced by `tables[i][k]`. Entries of -1 stay -1."""
    # One index for all rows. An index for each would be slower, and each gives up the GIL to the rollouts.
    column = _join(columns, torch.int64).numpy()
    starts = np.cumsum([0, *map(len, tables)])[:-1]
    table = np.concatenate([*tables, [-1]], dtype=np.int64, casting="unsafe")
    return torch.from_numpy(table[np.where(column < 0, -1, column + np.repeat(starts, [len(c) for c in columns]))])


def _logprobs(rows: Sequence[Row], dtype: torch.dtype) -> Tensor:
    old = _join([row.old for row in rows], dtype)
    if bool(impossible(old).any()):
        row, bad = next((row, bad) for row in rows if (bad := impossible(torch.from_numpy(row.old))).any())
        raise BadBatch(
            f"tape {row.tape!r} has a log-prob of {row.old[bad.numpy()][0]:.4g}, above 0 by more than "
            f"{LOGPROB_SLACK} or infinite: the engine that sampled it doesn't report log-probs; check the engine"
        )
    return torch.where(old > 0, torch.zeros_like(old), old)


def impossible(old: Tensor) -> Tensor:
    """Return a mask of the values that can't be log-probs of sampled tokens. NaN means unknown and isn't marked."""
    return (old > LOGPROB_SLACK) | old.isinf()


def _turns(
    rows: Sequence[Row], of_row: NDArray, turn: NDArray, of_token: NDArray, episodes: Sequence[Episode]
) -> tuple[Turns, NDArray]:
    """Return the table of turns, and the index in it of each episode's first turn.

    `of_row` (R,) and `of_token` (T,) are indices of episodes. `turn` (T,) is the number of each own token's turn.
    """
    counts = np.array([1 if e.turn_rewards is None else max(1, len(e.turn_rewards)) for e in episodes], dtype=np.int64)
    np.maximum.at(counts, of_token, turn + 1)
    first = np.concatenate([[0], np.cumsum(counts)])
    reward = np.full(int(first[-1]), np.nan)
    for i, episode in enumerate(episodes):
        part = reward[first[i] : first[i + 1]]
        if episode.reward is None:
            continue
        if episode.turn_rewards is None or np.isnan(given := np.asarray(episode.turn_rewards, dtype=float)).all():
            part[-1] = episode.reward
        else:
            part[: len(given)] = given
            if not math.isclose(total := np.nansum(given), episode.reward, rel_tol=2e-6, abs_tol=2e-6):
                raise BadBatch(
                    f"tape {episode.tape!r}: its turns' rewards add up to {total:g}, its reward is "
                    f"{episode.reward:g}: put what isn't a turn's own on the last turn"
                )
    owner = np.repeat(np.arange(len(episodes)), counts)
    numbers = partial(_answered, rows, first[of_row], len(owner))
    return Turns(reward=torch.from_numpy(reward), episode=torch.from_numpy(owner), numbers=numbers), first


def _answered(rows: Sequence[Row], first: NDArray, turns: int) -> Tensor:
    """Return `Turns.answered` for `turns` turns. `first` (rows,) is the index of the first turn in each row's
    episode."""
    found, numbers = torch.full((turns,), -1), _Interned[str]()
    for row, start in zip(rows, first, strict=True):
        if row.observations is None:
            continue
        for turn in np.unique(row.turn).tolist():
            if (digest := row.observations.digests[turn]) is not None:
                found[start + turn] = numbers(digest)
    return found


def _episodes(rows: Sequence[Row], sizes: NDArray, of_row: NDArray, episodes: Sequence[Episode]) -> Episodes:
    groups, forks = _Interned[str](), _Interned[tuple[str, str]]()
    own = np.zeros(len(episodes), dtype=np.int64)
    np.add.at(own, of_row, sizes)
    for row, i in zip(rows, of_row, strict=True):
        if row.group != episodes[i].group:
            raise BadBatch(
                f"tape {row.tape!r} is in group {episodes[i].group!r} by its episode and in {row.group!r} "
                "by its row: group by one id"
            )
    cut = [e.status in (Status.TRUNCATED, Status.LIMIT) for e in episodes]
    given = [np.nan if e.bootstrap is None else e.bootstrap for e in episodes]
    return Episodes(
        tape=tuple(e.tape for e in episodes),
        reward=torch.tensor([np.nan if e.reward is None else e.reward for e in episodes], dtype=torch.float64),
        trains=torch.tensor([e.trains for e in episodes], dtype=torch.bool),
        cut=torch.tensor(cut, dtype=torch.bool),
        bootstrap=torch.tensor(np.where(cut, given, 0.0), dtype=torch.float64),
        length=torch.tensor(
            [n if e.length is None else e.length for e, n in zip(episodes, own, strict=True)], dtype=torch.int64
        ),
        group=torch.tensor([groups(e.group) for e in episodes], dtype=torch.int64),
        fork=torch.tensor(
            [forks(("group", e.group) if e.fork is None else ("fork", e.fork)) for e in episodes], dtype=torch.int64
        ),
        groups=tuple(groups.names),
        components=tuple(e.components for e in episodes),
        weights=tuple(e.weights for e in episodes),
    )
