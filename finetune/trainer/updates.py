"""The values around an update. Each process gets its share of a batch, and each step returns statistics.

    the batch, on rank 0     a share for each process     every process       statistics, on rank 0

                          .-> groups 0, 3 ----> rank 0 --.
    groups 0 1 2 3 4 -----+                              +-- train_on() ----> joined
                          '-> groups 1, 2, 4 -> rank 1 --'

A share consists of whole groups, because advantages compare the attempts of a group. Forks of one turn stay together
for the same reason. Shares have similar numbers of tokens, and may be empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import torch
from torch import Tensor

from ..data.rows import Row
from ..data.stream import BadBatch, Episode, Stream
from ..objective import Context, Sums
from ..objective.loss import Batch, Part, prepare
from ..recipes import get_recipe
from .critic import CriticState


class TrainerState(TypedDict):
    """The state of a trainer, apart from the weights."""

    optimizer: dict[str, Any]
    steps: int
    updates: NotRequired[int]
    """Number of updates with a step. Checkpoints of earlier versions lack it, because schedules counted steps."""
    skips: dict[str, int]
    betas: list[float]
    moments: list[float]
    averaged: dict[str, Tensor]
    critic: CriticState | None
    others: NotRequired[dict[str, dict[str, object]]]
    """State of the reference and the teacher. A checkpoint from an earlier version lacks this key."""


Skip = Literal["log-prob", "loss", "gradient", "another rank", "nothing to train on", "critic first"]


@dataclass(kw_only=True)
class UpdateStats:
    """Results and metrics of one optimiser step."""

    step: int
    """The trainer's number of steps, including this one if it was applied (`Trainer.steps`)."""
    skipped: Skip | None
    """Why the policy's weights are unchanged, or None if they were stepped. The reason is the value that wasn't finite,
    that there was nothing to train on, or that only the critic learns yet. The last one is planned, so the step counts
    as applied."""
    loss: float
    """The loss, which is the sum of `parts`, or NaN if it isn't finite. It covers the tokens of this process, or those
    of all processes with `Processes.updates`."""
    parts: dict[str, float]
    """The loss by term: `policy` (the surrogate) and each regulariser. Empty if no token was trained on or the loss
    wasn't finite."""
    grad_norm: float
    """The gradient's norm before clipping, or NaN if the update was skipped before the norm was computed."""
    lr: float | None
    """The learning rate of the update, or None if only the critic learns yet."""
    sums: Sums
    """All metrics, each stored as a sum and a count."""
    stream: Stream
    weight: Tensor
    """(T,) float64: the weight of each own token's loss, 0 for tokens that weren't part of the step."""
    advantage: Tensor
    """(T,) float64: the advantage of each own token."""
    shown: tuple[Sequence[Row], Stream, Tensor] | None = None
    """The demonstrations that were trained on with the batch: their rows, their stream, and the weights of their
    tokens."""

    @property
    def applied(self) -> bool:
        """Whether the step trained the policy, or as planned only the critic."""
        return self.skipped in (None, "critic first")

    @property
    def mismatch(self) -> float | None:
        """Largest |log-prob now - log-prob at sampling| over the tokens that were sampled with the weights before this
        step. Only tokens that were forwarded count. None if there are none."""
        return self.sums.highs.get("mismatch")

    @property
    def ess(self) -> float | None:
        """Effective sample size, divided by the number n of tokens: (sum r)^2 / (n sum r^2) with r = exp(log-prob now -
        log-prob at sampling). It is 1 on policy."""
        if not self.sums.counts.get("ratio"):
            return None
        return self.sums["ratio"] ** 2 / self.sums["ratio/square"] / self.sums.counts["ratio"]

    def line(self) -> dict[str, object]:
        """Return the fields of the step for a line of metrics.jsonl (see docs/reference/metrics.md). Values that
        weren't measured are None or absent."""
        # Only the history reads the mean square, to tell rounding from a mismatch.
        sums = self.sums.without("mismatch/square").flat()
        values: dict[str, object] = {
            "loss": self.loss,
            **{f"loss/{name}": part for name, part in self.parts.items()},
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "skipped": self.skipped,
            "mismatch": self.mismatch,
            **{f"{name}/mean": sums.pop(name) for name in ("mismatch", "moved") if name in sums},
            "ess": self.ess,
            # The metric `tokens` isn't used here. Its sum counts a batch once for each of its steps, and its mean is
            # divided by the number of ranks.
            "tokens": round(len(self.stream) * sums.get("token/entered", 0.0)),
            # These are shares of all entered tokens. A token that isn't forwarded counts as unclipped.
            **{f"{name}/own": sums[name] * sums["token/live"] for name in sums if name.split("/")[0] == "clip"},
        }
        if spread := self.sums.std("value/target"):
            values["value/explained"] = 1 - sums["value/error"] / (spread * spread)
        return {**values, **{name: value for name, value in sums.items() if name not in (*values, "episodes")}}


def together(steps: Sequence[UpdateStats]) -> UpdateStats:
    """Combine the statistics of several steps on one prepared batch. The result counts as applied if any step was. Sums
    and weights are added up, and losses and norms are averaged.

    `mismatch` and `moved` come from the first step only. They should show numerical differences between sampler and
    trainer. After the first step, they would also show the effect of training.
    """
    if len(steps) == 1:
        return steps[0]
    # A skipped step has no loss or norm that could be averaged with the others'.
    applied = [step for step in steps if step.applied]
    of = applied or steps
    sums = Sums()
    for k, step in enumerate(steps):
        sums.merge(step.sums if k == 0 else step.sums.without("mismatch", "mismatch/square", "moved"))
    # Demonstrations differ from step to step, and code that needs them reads the single steps.
    last = steps[-1]
    weight = torch.stack([step.weight for step in of]).sum(0)
    return UpdateStats(
        step=last.step,
        skipped=of[-1].skipped,
        loss=sum(step.loss for step in of) / len(of),
        parts={name: sum(step.parts.get(name, 0.0) for step in of) / len(of) for step in of for name in step.parts},
        grad_norm=sum(step.grad_norm for step in of) / len(of),
        lr=last.lr,
        sums=sums,
        stream=last.stream,
        weight=weight,
        advantage=last.advantage,
    )


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A rollout batch with its advantages, ready for one or several updates."""

    rows: Sequence[Row]
    batch: Batch
    sums: Sums
    """Metrics of the preparation, such as rewards and advantages. Each step on the batch reports them."""
    demonstrations: tuple[Sequence[Row], Part] | None = None
    """Demonstrations to imitate in addition, with the weight of each token's loss. Their loss has its own
    denominator."""

    @property
    def imitated(self) -> tuple[Sequence[Row], Stream, Tensor] | None:
        """The demonstrations' rows, their stream, and the weight of each token's loss, or None if there are no
        demonstrations."""
        if self.demonstrations is None:
            return None
        rows, part = self.demonstrations
        return rows, part.batch.stream, self.batch.recipe.imitation * part.weight


def cut_episodes(episodes: int, minibatches: int, seed: int | None, steps: int) -> list[Tensor | None]:
    """Split the episodes of one epoch into mini-batches, and return a mask (E,) bool for each. None means all episodes.

    The split depends only on `seed` and on `steps`, the number of steps so far. So it differs from epoch to epoch,
    and a resumed run has the same splits as a run that was never stopped.
    """
    if minibatches == 1:
        return [None]
    if minibatches > episodes:
        raise BadBatch(f"{episodes} episodes can't be cut into {minibatches} mini-batches: take fewer mini-batches")
    order = torch.arange(episodes)
    if seed is not None:
        # The large prime keeps pairs of seed and step apart: seed 1 at step 2 isn't seed 2 at step 1.
        order = torch.randperm(episodes, generator=torch.Generator().manual_seed(seed * 1_000_003 + steps))
    cuts: list[Tensor | None] = []
    for members in order.tensor_split(minibatches):
        mask = torch.zeros(episodes, dtype=torch.bool)
        mask[members] = True
        cuts.append(mask)
    return cuts


def cut_rows(rows: Sequence[Row], parts: int) -> list[Sequence[Row]]:
    """Split the rows into `parts` parts without splitting a tape. Without rows, all parts are empty."""
    tapes = list(dict.fromkeys(row.tape for row in rows))
    if tapes and len(tapes) < parts:
        raise BadBatch(f"{len(tapes)} demonstrations can't be cut into {parts} mini-batches: give at least {parts}")
    owner = {tape: k * parts // len(tapes) for k, tape in enumerate(tapes)}
    return [[row for row in rows if owner[row.tape] == part] for part in range(parts)]


def imitation_part(rows: Sequence[Row], add_up: Callable[[Tensor], Tensor] = lambda x: x) -> Part:
    """Return the demonstrations `rows` with the weight of each token's loss. The loss is the mean cross-entropy over
    the own tokens of the demonstrations on all ranks."""
    episodes = [Episode(tape=t, group=g, reward=None) for t, g in dict.fromkeys((r.tape, r.group) for r in rows)]
    return prepare(get_recipe("sft"), Stream.of(rows, episodes), Context(add_up=add_up)).part(add_up=add_up)


@dataclass(kw_only=True)
class Accumulated:
    """Loss and metrics of an update's micro-batches so far."""

    loss: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    skipped: Skip | None = None
    sums: Sums = field(default_factory=Sums)

    def fail(self, why: Skip) -> None:
        """Record why the update can't be applied: a number isn't finite on this rank or on another."""
        self.skipped, self.loss = why, float("nan")
        self.parts.clear()


def observe(lp: Tensor, old: Tensor, sums: Sums, fresh: Tensor | None = None) -> None:
    """Add metrics to `sums` that compare the current log-probs `lp` (n,) with the log-probs at sampling `old` (n,).

    ESS and KL are computed from them. `fresh` (n,) bool marks the tokens that were sampled with the weights before the
    update (`Stream.fresh`).

    The sums are in float64. On policy, the differences are near 0, and float32 sums over a batch would be mostly
    rounding error. The ratio is capped at e^20, so that one token with a broken log-prob can't make the sums infinite.
    """
    delta = lp.cpu().double() - old.double()
    sums.add("moved", delta.abs(), extremes=True)
    mismatch = delta.abs() if fresh is None else delta[fresh].abs()
    sums.add("mismatch", mismatch, extremes=True)
    sums.add("mismatch/square", mismatch.square())
    sums.add("kl/old", -delta)
    ratio = delta.clamp(max=20).exp()
    sums.add("ratio", ratio, extremes=True)
    sums.add("ratio/square", ratio.square())


# How processes share a batch


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a batch that one process trains on."""

    rows: Sequence[Row]
    episodes: Sequence[Episode]
    batches: Sequence[int]
    """Number of the share's episodes in each rollout batch, or () if there is only one rollout batch."""
    demonstrations: Sequence[Sequence[Row]]
    """Rows to imitate in addition, for each mini-batch."""
    places: Sequence[int]
    """Positions of the share's episodes in the batch."""
    of: int
    """Number of episodes in the batch."""

    def cuts(self, seed: int | None, steps: int) -> list[Tensor | None]:
        """The share's episodes in each mini-batch of one epoch, as masks (see `cut_episodes`).

        Every process cuts the whole batch, so that all of them have the same mini-batches.
        """
        cuts = cut_episodes(self.of, len(self.demonstrations), seed, steps)
        return [None if mask is None else mask[list(self.places)] for mask in cuts]


class StepResult(NamedTuple):
    """One share's result of an optimiser step."""

    weight: Tensor
    """Weight of each own token's loss."""
    sums: Sums
    loss: float
    parts: dict[str, float]
    skipped: Skip | None

    @classmethod
    def of(cls, stats: UpdateStats) -> StepResult:
        return cls(stats.weight, stats.sums, stats.loss, stats.parts, stats.skipped)


@dataclass(frozen=True)
class Division:
    """A batch that is divided into one share for each process, or for processes that compute the same rows."""

    rows: Sequence[Row]
    episodes: Sequence[Episode]
    demonstrations: Sequence[Sequence[Row]]
    """Rows to imitate in addition, for each mini-batch."""
    shares: Sequence[Share]

    @classmethod
    def of(
        cls,
        rows: Sequence[Row],
        episodes: Sequence[Episode],
        parts: int = 1,
        *,
        minibatches: int = 1,
        batches: Sequence[int] = (),
        demonstrations: Sequence[Row] = (),
    ) -> Division:
        """Divide the batch into `parts` shares.

        Each epoch splits the episodes into `minibatches` parts of similar size. Demonstrations are split into the same
        number of parts, and no tape is split. For `batches`, see `Trainer.prepare`. Raises BadBatch if there are fewer
        episodes, or fewer demonstrations, than mini-batches.
        """
        shown, episodes = cut_rows(demonstrations, minibatches), list(episodes)
        cut_episodes(len(episodes), minibatches, None, 0)  # an error now, before other processes wait for this one
        if parts == 1:
            places = range(len(episodes))
            alone = Share(
                rows=rows, episodes=episodes, batches=batches, demonstrations=shown, places=places, of=len(episodes)
            )
            return cls(rows, episodes, shown, [alone])
        dealt = [_dealt(part, parts) for part in shown]
        shares = []
        for k, own in enumerate(share(rows, episodes, parts)):
            # By `taught_by` and not by tape: with a reward per agent, one tape makes several episodes.
            tapes = {episodes[place].tape for place in own}
            shares.append(
                Share(
                    rows=with_files([row for row in rows if row.taught_by in tapes]),
                    episodes=[episodes[place] for place in own],
                    batches=_sizes(batches, own),
                    demonstrations=[part[k] for part in dealt],
                    places=own,
                    of=len(episodes),
                )
            )
        return cls(rows, episodes, shown, shares)

    def joined(
        self,
        steps: Sequence[UpdateStats],
        results: Sequence[Sequence[StepResult]],
        advantages: Sequence[Tensor],
        imitation: float,
    ) -> list[UpdateStats]:
        """The statistics of all shares. `steps` are those of rank 0's own share, and `results` those of each share.
        `imitation` is the coefficient of the demonstrations' loss."""
        stream = Stream.of(self.rows, self.episodes)
        tapes = [{episode.tape for episode in one.episodes} for one in self.shares]
        places = [_places(self.rows, own) for own in tapes]
        advantage = _joined(len(stream), advantages[0].dtype, places, advantages)
        imitated: list[tuple[Sequence[Row], Stream, Tensor] | None] = [None] * len(self.demonstrations)
        for k, rows in enumerate(self.demonstrations):
            if rows:  # all processes divide by the number of tokens on all of them, so these are the same weights
                part = imitation_part(rows)
                imitated[k] = (rows, part.batch.stream, imitation * part.weight)
        found = []
        for k, stats in enumerate(steps):
            theirs = [of_share[k] for of_share in results]
            sums, parts = Sums(), dict[str, float]()
            for one in theirs:
                sums.merge(one.sums)
                parts.update((name, parts.get(name, 0.0) + term) for name, term in one.parts.items())
            # Only the rank that met the bad number knows the reason. The others report "another rank".
            reasons = [one.skipped for one in theirs if one.skipped not in (None, "another rank")]
            found.append(
                replace(
                    stats,
                    skipped=None if stats.skipped is None else (reasons or [stats.skipped])[0],
                    loss=sum(one.loss for one in theirs),
                    parts=parts,
                    sums=sums,
                    stream=stream,
                    weight=_joined(len(stream), torch.float64, places, [one.weight for one in theirs]),
                    advantage=advantage,
                    shown=imitated[k % len(imitated)],
                )
            )
        return found


def _dealt(rows: Sequence[Row], parts: int) -> list[Sequence[Row]]:
    """The demonstrations that each share trains on. They are whole tapes."""
    tapes = list(dict.fromkeys(row.tape for row in rows))
    names = [set(tapes[k::parts]) for k in range(parts)]
    return [with_files([row for row in rows if row.tape in own]) for own in names]


def with_files(rows: Sequence[Row]) -> Sequence[Row]:
    """Return the rows with the bytes of their pictures, because only rank 0 reads the run directory. Each picture is
    included once."""
    ways = {name: row.file for row in rows for place in row.places for name in place.media}
    files = {name: file(name) for name, file in ways.items() if file is not None}
    return [replace(row, file=files.__getitem__) if row.file is not None else row for row in rows]


def share(rows: Sequence[Row], episodes: Sequence[Episode], parts: int) -> list[list[int]]:
    """Split the episodes into `parts` parts, and return the indices of each part's episodes in order.

    The episodes of a group and the forks of one turn stay together, as a family. Families are assigned from the largest
    to the smallest, each to the part with the fewest tokens so far. Ties are broken by number, so that an update
    that is applied again has the same split.
    """
    family = _families(episodes)
    index = {episode.tape: k for k, episode in enumerate(episodes)}
    tokens: dict[int, int] = dict.fromkeys(family, 0)
    for row in rows:
        tokens[family[index[row.taught_by]]] += len(row.input_ids)
    # Largest first, so that the small families can even out the loads at the end.
    load, owner = [0] * parts, dict[int, int]()
    for number in sorted(tokens, key=lambda number: (-tokens[number], number)):
        owner[number] = load.index(min(load))
        load[owner[number]] += tokens[number]
    return [[k for k, number in enumerate(family) if owner[number] == part] for part in range(parts)]


def _families(episodes: Sequence[Episode]) -> list[int]:
    """Return a family number for each episode. Episodes with the same group or the same fork have the same family, and
    so do episodes that are connected through others."""
    above = list(range(len(episodes)))  # union-find: each episode points towards the head of its family

    def head(k: int) -> int:
        while above[k] != k:
            above[k] = k = above[above[k]]  # path halving
        return k

    first: dict[tuple[str, str | None], int] = {}
    for k, episode in enumerate(episodes):
        for name in (("group", episode.group), ("fork", episode.fork)):
            if name[1] is not None:
                above[head(k)] = head(first.setdefault(name, k))
    return [head(k) for k in range(len(episodes))]


def _sizes(batches: Sequence[int], own: Sequence[int]) -> list[int]:
    """Return how many of the episodes with indices `own` are in each rollout batch. `batches` are the sizes of all
    rollout batches, in order."""
    sizes, first = [], 0
    for size in batches:
        sizes.append(sum(first <= k < first + size for k in own))
        first += size
    return sizes


def _places(rows: Sequence[Row], tapes: set[str]) -> Tensor:
    """Return the positions (t,) int64 of all own tokens of `tapes` in the stream that is made from `rows`."""
    mine = [torch.full((len(row.own),), row.taught_by in tapes, dtype=torch.bool) for row in rows]
    return torch.cat(mine).nonzero()[:, 0] if mine else torch.zeros(0, dtype=torch.int64)


def _joined(n: int, dtype: torch.dtype, places: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """Join the parts of all shares into one column (n,), each part at its places. Parts don't overlap."""
    out = torch.zeros(n, dtype=dtype)
    for at, part in zip(places, parts, strict=True):
        out[at] = part
    return out
