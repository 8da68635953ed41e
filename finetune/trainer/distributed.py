"""A crew: one process rolls out, records and decides; all of them compute its updates.

Rank 0 is a training run like any other, but for its trainers, which are `Lead`s: each says to the other ranks what it
was asked, every rank does it on a share of the episodes, and what comes out is put together again. The other ranks
`follow`, which returns when rank 0 says that it is over, and raises when it is lost. They touch no run directory.

A share is whole groups, and whole families of forks; shares are of like size in tokens, and may be empty. Where weights
lie in parts over the ranks, rank 0 keeps a whole copy, which is what samples, is published and is checkpointed.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from ..data.rows import Row
from ..data.stream import BadBatch, Episode, Stream
from ..objective import Context, Sums
from ..objective import loss as objective
from ..recipes import get_recipe
from .ranks import Group, RankLost, Ranks, Sharded
from .trainer import Trainer
from .updates import Prepared, Skip, UpdateStats

_Part = tuple[Tensor, Tensor, Sums, float, Skip | None]
"""What a rank's share of a step came to: places of its tokens, their weights, metrics, loss, why it was skipped."""
Build = Callable[[str, nn.Module, Ranks], Trainer]
"""(phase, model to train, ranks) -> a fresh trainer: the same on every rank."""


@contextmanager
def launched(*, shard: bool = False, timeout: float = 1800.0) -> Iterator[Ranks]:
    """The processes that `accelerate launch` or `torchrun` started along with this one; this one alone without them.

    shard: a part of each weight per process, not a copy. timeout: seconds of silence after which a process gives up.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Ranks()
        return
    ours = not distributed.is_initialized()
    if ours:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield Sharded() if shard else Group()
    finally:
        if ours:
            distributed.destroy_process_group()


class Crew:
    """One rank's part in it."""

    def __init__(self, ranks: Ranks, model: nn.Module, build: Build) -> None:
        """`model`: with any weights; rank 0's are copied to all whenever a trainer is made."""
        self.ranks = ranks
        self.model = model
        self.build = build
        self.work = copy.deepcopy(model) if ranks.sharded else model
        """What is trained."""
        ranks.shard(self.work)
        self.trainer: Trainer
        self.held: Prepared
        self.mine = torch.zeros(0, dtype=torch.int64)
        """This rank's episodes in the batch at hand."""
        self._busy = False

    # Rank 0

    def lead(self, phase: str) -> Trainer:
        """Rank 0: a fresh trainer of `phase`, whose work all ranks share."""
        self.tell("enter", phase=phase)
        return Lead(self) if self.ranks.size > 1 else self.trainer

    def tell(self, what: str, **how: Any) -> Any:
        """Rank 0: have every rank do something; gives what this one came to."""
        self._busy = True
        self.ranks.hear((what, how))
        found = self._do(what, how)
        self._busy = False
        return found

    def end(self, result: Any) -> None:
        """Rank 0: it is over; `result` is what the others' `follow` gives."""
        self.ranks.hear(("end", result))

    @contextmanager
    def leading(self) -> Iterator[None]:
        """Rank 0: an error inside ends the others too. Nothing is said where it left them in the middle of something:
        they find out by losing this one."""
        try:
            yield
        except BaseException as error:
            if not self._busy:
                self.ranks.hear(("stop", f"{type(error).__name__}: {error}"))
            raise

    # The others

    def follow(self) -> Any:
        """Do what rank 0 says until it ends; gives its result. RankLost when it fails or goes."""
        while True:
            what, how = self.ranks.hear()
            if what == "end":
                return how
            if what == "stop":
                raise RankLost(f"rank {self.ranks.rank} of {self.ranks.size} stops, because rank 0 did: {how}")
            self._do(what, how)

    # All

    def _do(self, what: str, how: Mapping[str, Any]) -> Any:
        with self.ranks.waiting(f"the others to {what}"):
            return getattr(self, f"_{what}")(**how)

    def _enter(self, phase: str) -> None:
        self._fetch()
        self.trainer = self.build(phase, self.work, self.ranks)

    def _fetch(self) -> None:
        """Rank 0's weights, into every rank's model and what is trained."""
        self.ranks.copy(self.model)
        if self.work is not self.model:
            there = self.work.state_dict()
            with torch.no_grad():
                for name, tensor in self.ranks.part(self.model.state_dict(), there).items():
                    there[name].copy_(tensor)

    def _prepare(
        self,
        rows: Sequence[Row],
        episodes: Sequence[Episode],
        several: bool,
        batches: Sequence[int],
        demonstrations: Sequence[Row],
    ) -> list[tuple[Tensor, dict[str, Tensor | None]]]:
        """Advantages on this rank's share; gives all ranks' columns, with the places of their tokens in the whole."""
        shares = share(rows, episodes, self.ranks.size)
        own = shares[self.ranks.rank]
        names = {episodes[i].tape for i in own}
        self.mine = torch.tensor(own, dtype=torch.int64)
        mine = [row for row in rows if row.taught_by in names]
        self.held = self.trainer.prepare(
            mine,
            [episodes[i] for i in own],
            several=several,
            batches=_sizes(batches, own),
            demonstrations=self._shown(demonstrations),
        )
        self.places = _places(rows, names)
        batch = self.held.batch
        return self.ranks.everyone(
            (
                self.places,
                {
                    "advantage": batch.advantage,
                    "entered": batch.entered,
                    "selected": batch.selected,
                    "target": batch.target,
                },
            )
        )

    def _shown(self, rows: Sequence[Row]) -> Sequence[Row]:
        """This rank's share of demonstrations."""
        tapes = list(dict.fromkeys(row.tape for row in rows))[self.ranks.rank :: self.ranks.size]
        return [row for row in rows if row.tape in set(tapes)]

    def _step(self, episodes: Tensor | None, demonstrations: Sequence[Row]) -> tuple[UpdateStats, list[_Part]]:
        """One optimiser step; gives this rank's account and what all ranks came to."""
        held = replace(self.held, demonstrations=self.trainer.demonstrations_of(self._shown(demonstrations)))
        stats = self.trainer.step(held, episodes=None if episodes is None else episodes[self.mine])
        if self.work is not self.model:
            whole = self.ranks.whole(dict(self.work.state_dict()))
            self.model.load_state_dict(whole)
        return stats, self.ranks.everyone((self.places, stats.weight, stats.sums, stats.loss, stats.skipped))

    def _state(self) -> dict[str, Any]:
        return self.trainer.state_dict()

    def _load(self, state: dict[str, Any]) -> None:
        self._fetch()
        self.trainer.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class _Whole(Prepared):
    """A batch that all ranks hold their shares of."""

    number: int


class Lead(Trainer):
    """Rank 0's trainer: takes whole batches and gives whole accounts, as one process would."""

    def __init__(self, crew: Crew) -> None:
        # What it knows is its rank's trainer's; only what takes all ranks is done otherwise.
        self._crew = crew
        self._member = crew.trainer
        self._number = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_member"], name)

    def prepare(
        self,
        rows: Sequence[Row],
        episodes: Sequence[Episode],
        *,
        several: bool = False,
        batches: Sequence[int] = (),
        demonstrations: Sequence[Row] = (),
    ) -> Prepared:
        stream = Stream.of(rows, episodes)
        found = self._crew.tell(
            "prepare", rows=rows, episodes=episodes, several=several, batches=batches, demonstrations=demonstrations
        )
        columns: dict[str, Any] = {
            name: None if first is None else _joined(len(stream), first.dtype, [(p, c[name]) for p, c in found])
            for name, first in found[0][1].items()
        }
        self._number += 1
        return _Whole(
            rows=rows,
            batch=objective.Batch(recipe=self.recipe, stream=stream, **columns),
            sums=Sums(),
            demonstrations=self.demonstrations_of(demonstrations),
            number=self._number,
        )

    def demonstrations_of(self, rows: Sequence[Row]) -> tuple[Sequence[Row], objective.Part] | None:
        """All of them, with the weights that the ranks' shares have: nobody else needs to be asked."""
        if not rows:
            return None
        episodes = [Episode(tape=t, group=g, reward=None) for t, g in dict.fromkeys((r.tape, r.group) for r in rows)]
        return rows, objective.prepare(get_recipe("sft"), Stream.of(rows, episodes), Context()).part()

    def step(self, prepared: Prepared, *, episodes: Tensor | None = None) -> UpdateStats:
        if not isinstance(prepared, _Whole) or prepared.number != self._number:
            raise BadBatch("the ranks hold the batch that was prepared last: step on that one, or prepare it again")
        shown = prepared.demonstrations[0] if prepared.demonstrations is not None else ()
        stats, found = self._crew.tell("step", episodes=episodes, demonstrations=shown)
        sums = Sums()
        for _, _, part, _, _ in found:
            sums.merge(part)
        weight = _joined(len(prepared.batch.stream), torch.float64, [(p, w) for p, w, _, _, _ in found])
        reasons = [reason for *_, reason in found if reason not in (None, "another rank")]
        return replace(
            stats,
            skipped=None if stats.skipped is None else (reasons or [stats.skipped])[0],
            loss=sum(loss for _, _, _, loss, _ in found),
            sums=sums,
            stream=prepared.batch.stream,
            weight=weight,
            advantage=prepared.batch.advantage,
            shown=self._shown(prepared),
        )

    def state_dict(self) -> dict[str, Any]:
        return self._crew.tell("state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._crew.tell("load", state=state)


def share(rows: Sequence[Row], episodes: Sequence[Episode], parts: int) -> list[list[int]]:
    """The episodes of each part, in order: groups and forks of one turn stay together, the largest are given out
    first, each to the part that has the fewest tokens."""
    family = _families(episodes)
    index = {episode.tape: k for k, episode in enumerate(episodes)}
    tokens: dict[int, int] = dict.fromkeys(family, 0)
    for row in rows:
        tokens[family[index[row.taught_by]]] += len(row.input_ids)
    load, owner = [0] * parts, dict[int, int]()
    for number in sorted(tokens, key=lambda number: (-tokens[number], number)):
        owner[number] = load.index(min(load))
        load[owner[number]] += tokens[number]
    return [[k for k, number in enumerate(family) if owner[number] == part] for part in range(parts)]


def _families(episodes: Sequence[Episode]) -> list[int]:
    """For each episode a number that it shares with those it is compared with, at once or through others."""
    above = list(range(len(episodes)))

    def head(k: int) -> int:
        while above[k] != k:
            above[k] = k = above[above[k]]
        return k

    first: dict[tuple[str, str | None], int] = {}
    for k, episode in enumerate(episodes):
        for name in (("group", episode.group), ("fork", episode.fork)):
            if name[1] is not None:
                above[head(k)] = head(first.setdefault(name, k))
    return [head(k) for k in range(len(episodes))]


def _sizes(batches: Sequence[int], own: Sequence[int]) -> list[int]:
    """How many of the episodes `own` lie in each rollout batch."""
    sizes, first = [], 0
    for size in batches:
        sizes.append(sum(first <= k < first + size for k in own))
        first += size
    return sizes


def _places(rows: Sequence[Row], tapes: set[str]) -> Tensor:
    """(t,) int64: the places of the rows' own tokens, for those of `tapes`, in the stream of all rows."""
    mine = [torch.full((len(row.own),), row.taught_by in tapes, dtype=torch.bool) for row in rows]
    return torch.cat(mine).nonzero()[:, 0] if mine else torch.zeros(0, dtype=torch.int64)


def _joined(n: int, dtype: torch.dtype, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    out = torch.zeros(n, dtype=dtype)
    for places, column in parts:
        out[places] = column
    return out
