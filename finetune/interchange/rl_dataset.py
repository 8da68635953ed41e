"""RL fine-tuning on a Hugging Face dataset: advantages over the whole dataset, padded batches, and the loss of a batch.

`populate_rl_data` decides, group by group, which tokens train, and computes their advantages and weights. `collate`
pads rows to a batch. `rl_step` computes the loss for a batch.

The dataset has the columns of `rl_columns`, and null is read as NaN. The terms of the objective compute every number,
as in the trainer. The functions here only move numbers between columns and tensors.

1. A log-prob has the same index as its token. If log-probs were aligned to the end of a row instead, they would be
   wrong for a row with several answers.
2. A tape is one episode in its group, even if it has several rows. The status of the tape decides whether the episode
   trains and whether it counts in its group, as in the trainer.
3. With a KL penalty in the reward, `rewards` and `advantages` are computed from the same shaped reward.
4. A token trains if its value in `weights` is above 0. A NaN that the loss reads at one of these tokens is an error. At
   all other tokens, NaN is normal: the environment or another agent wrote them, their episode is unscored, or their
   sampling wasn't exact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from numpy.typing import NDArray
from pydantic import Field, field_validator
from torch import Tensor, nn

from ...tapes.common.stats import REWARD_LIMIT
from ...tapes.errors import TapereelError, UsageError
from ...tapes.status import CauseType, Status, trains
from ...tapes.value import Value
from ..data.rows import IGNORED, Row
from ..data.stream import BadBatch, Episode, Episodes, Stream, Turns, impossible
from ..objective import CPG, PPO, Context, EpisodeKL, Sums, TokenKL
from ..objective import loss as objective
from ..objective.kl import estimate
from ..objective.recipe import Recipe
from ..recipes import get_recipe
from ..trainer.logprobs import MICRO_TOKENS, forward, plan, score
from .rl_columns import row_rewards

TOKEN_COLUMNS = ("rewards", "advantages", "old_logprobs", "ref_logprobs", "temperature", "weights")
"""Columns with one float for each token in `input_ids`. `collate` pads them with NaN."""
REMEDY = {
    "labels": "make the rows with prepare_rl_fields or to_dataset",
    "rewards": f"score the episodes within ±{REWARD_LIMIT:g}, or leave their rows out",
    "advantages": "compute it with populate_rl_data, over the whole dataset and with the same config",
    "weights": "compute it with populate_rl_data, over the whole dataset and with the same config, or, beside "
    "advantages of your own, write 1.0 at each token that trains",
    "ref_logprobs": "fill it with fill_ref_logprobs(dataset, model, config), the reference model's log-probs, or set "
    "kl_coef and reward_minus_kl_coef to 0",
    "old_logprobs": "only log-probs of the engine that sampled, at the temperature that it sampled at, can be trained "
    "on with this recipe",
    "temperature": "give the temperature at which the tokens were sampled, as to_dataset and prepare_rl_fields do",
    "group_id": "name the attempts at one task alike",
    "tape_id": "name the rows of one episode alike",
}
"""For each column, what to do if it is missing or has an unknown value."""


class LossNotFinite(TapereelError, ArithmeticError):
    """Raised if the loss for a batch is NaN or infinite. Don't take an optimiser step with its gradient."""


class RLConfig(Value):
    """Settings for `rl_step` and `populate_rl_data`. An unknown key is an error."""

    algo: str = "grpo"
    """Name of a recipe in which a token's loss doesn't depend on other tokens: grpo, reinforce, dapo, sapo, ..."""
    use_advantages: bool = True
    """If true, the loss of a token uses its advantage. If false, the reward takes the place of the advantage."""
    epsilon: float | None = Field(default=None, ge=0, le=1)
    """Clip range for the ratio, in a recipe that clips. None uses the range in the recipe."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL (k3) between the policy and the reference model in the loss."""
    reward_minus_kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL penalty in the reward: r - coef * sum over the episode of k3(old against ref)."""
    relu_log_p_weights: bool = False
    """If true, a negative advantage (or reward) becomes 0, so that only actions above the baseline are learned."""
    weigh: Literal["token", "episode"] | None = None
    """With `token`, all tokens have the same weight in the loss. With `episode`, all episodes have the same weight,
    whatever their length (the mean of sequence means). None leaves this to the recipe."""

    @field_validator("algo")
    @classmethod
    def _known(cls, name: str) -> str:
        get_recipe(name)  # raises UsageError for an unknown name
        return name

    def recipe(self) -> Recipe:
        """Return the recipe with these settings. Raises BadBatch if the loss of the recipe can't be computed from one
        padded batch."""
        base = get_recipe(self.algo)
        changes: dict[str, Any] = {}
        if isinstance(base.surrogate, PPO | CPG) and self.epsilon is not None:
            changes["surrogate"] = {"low": self.epsilon, "high": self.epsilon}
        if self.kl_coef:
            others = [term for term in base.regulariser if not (term.kind == "kl" and term.to == "reference")]  # type: ignore[attr-defined]
            changes["regulariser"] = [*others, {"kind": "kl", "estimator": "k3", "beta": self.kl_coef}]
        if self.reward_minus_kl_coef:
            others = [term for term in base.shape if not isinstance(term, EpisodeKL | TokenKL)]
            kl = {"kind": "episode_kl", "beta": self.reward_minus_kl_coef, "estimator": "k3"}
            changes["shape"] = [*others, kl]
        if not self.use_advantages:
            changes |= {"reward": {"per": "episode"}, "baseline": {"kind": "none"}, "credit": {"kind": "broadcast"}}
            changes["adjust"] = []
        if self.relu_log_p_weights:
            changes["adjust"] = [*changes.get("adjust", base.adjust), {"kind": "relu"}]
        if self.weigh is not None:
            changes["weigh"] = {"kind": self.weigh}
        recipe = base.but(changes)
        objective.check_needs(recipe, reference=True, critic=False)
        elsewhere = recipe.imitates or recipe.balance or recipe.reward.components or recipe.baseline.by == "fork"
        recomputed = recipe.anchor.to == "recomputed" or recipe.select.entropy_top is not None
        if not recipe.local or elsewhere or recomputed:
            raise BadBatch(
                f"rl_step sees one padded batch and no episodes; recipe {recipe.name!r} needs them: use Trainer"
            )
        return recipe


def update_rewards_and_advantages(dataset: Dataset, config: RLConfig) -> Dataset:
    """Compute `rewards`, `advantages`, `weights` and `group_tokens`, group by group, and return the dataset with them.

    `weights` has the weight of each own token's loss, not yet divided by the number of tokens or episodes in a batch. A
    token has weight 0 and doesn't train if the status of its episode forbids training. With a recipe that uses
    advantages, it also has weight 0 if the episode has no reward or the log-prob at sampling is unknown.

    `group_tokens` is the mean number of tokens in the group's episodes. The order of rows doesn't matter. Raises
    BadBatch, with column and row, if the recipe needs an unknown value.
    """
    recipe = config.recipe()
    table = _table(dataset)
    columns = _Columns(table, recipe)
    stream = columns.stream()
    columns.check(stream)
    batch = objective.prepare(recipe, stream, Context())
    if not bool(batch.entered.any()):
        columns.check_some(stream)
    advantage = batch.advantage.to(torch.float32).masked_fill_(~batch.entered, torch.nan)
    weight = recipe.weigh(stream, batch.entered, 1.0).to(torch.float32)
    for name, values in (("advantages", advantage), ("weights", weight)):
        table = columns.put(table, name, columns.laid_out(values.numpy()))
    if recipe.shape:
        table = columns.put(table, "rewards", columns.shaped(stream))
    table = _with_column(table, "group_tokens", pa.array(columns.group_tokens(stream)))
    return _sealed(dataset, table, config.model_dump_json())


def populate_rl_data(dataset: Dataset, *columns_and_config: object, config: RLConfig | None = None) -> Dataset:
    """Call `update_rewards_and_advantages(dataset, config)`.

    TapeAgents' call with (dataset, columns, collate_fn, config) works too. Neither of the additional arguments is used.
    """
    found = config or (columns_and_config[-1] if columns_and_config else None)
    if not isinstance(found, RLConfig):
        raise UsageError(f"populate_rl_data needs an RLConfig as its last argument, got {found!r:.80}")
    return update_rewards_and_advantages(dataset, found)


def fill_ref_logprobs(
    dataset: Dataset, model: nn.Module, config: RLConfig, *, micro_tokens: int = MICRO_TOKENS
) -> Dataset:
    """Return the dataset with the column `ref_logprobs`: the log-probs of all own tokens under the reference model
    `model`.

    They are computed at the temperatures of sampling. One forward pass has at most `micro_tokens` tokens, including
    padding. During the call, the model is in evaluation mode. To use a LoRA policy without its adapters as the
    reference, call this function within `model.disable_adapter()`.
    """
    recipe = config.recipe()
    table = _table(dataset)
    if "images" in table.column_names:
        raise UsageError(
            "the dataset has pictures (column `images`), whose tokens this pass would read as text: `tapereel train` "
            "scores them. Where no row shows one, remove the column"
        )
    columns = _Columns(table, recipe)
    ids, temperature = columns.values("input_ids"), columns.values("temperature")
    if recipe.score.temperature == "recorded":
        columns.refuse("temperature", ~(columns.numbers("temperature") > 0))
    training = model.training
    model.eval()
    found = []
    try:
        for first in range(0, len(columns.lengths), 1000):
            spans = zip(columns.starts[first : first + 1000], columns.lengths[first : first + 1000], strict=False)
            rows = [_row(f"{a}", ids[a : a + n], columns.own[a : a + n], temperature[a : a + n]) for a, n in spans]
            found.append(score(model, rows, recipe.score, micro_tokens=micro_tokens).logprob.float().numpy())
    finally:
        model.train(training)
    whole = columns.laid_out(np.concatenate(found) if found else np.zeros(0, np.float32))
    return _sealed(dataset, columns.put(table, "ref_logprobs", whole), hashlib.sha256(whole.tobytes()).hexdigest())


def _table(dataset: Dataset) -> pa.Table:
    if not isinstance(dataset, Dataset):
        raise UsageError(
            f"this pass needs whole groups, and so a datasets.Dataset, not {type(dataset).__name__}: take one split of "
            "a DatasetDict, and open a run with streaming=False"
        )
    return dataset.flatten_indices().data.table if dataset._indices is not None else dataset.data.table


def _sealed(dataset: Dataset, table: pa.Table, how: str) -> Dataset:
    # `datasets` caches by fingerprint, so the changed table needs a new one. Otherwise a later map would return cached
    # results for the old columns.
    seal = hashlib.sha256(f"{dataset._fingerprint}{how}".encode()).hexdigest()[:16]
    return Dataset(table, fingerprint=seal)


class _Columns:
    """The list columns of a dataset as flat arrays of tokens. `starts` (rows + 1,) are the offsets of the rows."""

    def __init__(self, table: pa.Table, recipe: Recipe) -> None:
        self.table, self.recipe = table, recipe
        labels = self._column("labels").combine_chunks()
        lengths = np.diff(labels.offsets.to_numpy())
        self.starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)], dtype=np.int32)
        self.lengths = lengths
        self.labels = labels.flatten().to_numpy(zero_copy_only=False)
        if labels.flatten().null_count:
            raise BadBatch("column 'labels' has null among its values: write -100 for a token that isn't a target")
        self.own = self.labels != IGNORED
        # The first token of a row has no logits before it, so it can't be scored.
        self.own[self.starts[:-1][lengths > 0]] = False
        names = (
            self._column("tape_id")
            if "tape_id" in table.column_names
            else pa.array(np.arange(len(lengths)).astype(str))
        )
        self.tapes, self.episode = self._numbered("tape_id", names)

    def _column(self, name: str) -> pa.ChunkedArray:
        if name not in self.table.column_names:
            raise BadBatch(
                f"the dataset has no column {name!r} (it has {', '.join(self.table.column_names)}): {REMEDY[name]}"
            )
        return self.table.column(name)

    def _numbered(self, name: str, column: pa.ChunkedArray | pa.Array) -> tuple[tuple[str, ...], NDArray[np.int64]]:
        """Return a column's distinct values, in order of appearance, and the index (rows,) of each row's value."""
        if column.null_count:
            row = int(np.asarray(column.is_null()).argmax())
            raise BadBatch(f"column {name!r} is null in row {row}: {REMEDY[name]}")
        coded = column.dictionary_encode()
        coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
        return tuple(map(str, coded.dictionary.to_pylist())), coded.indices.to_numpy().astype(np.int64)

    def values(self, name: str) -> NDArray[Any]:
        """Return the values (tokens,) of a column with one value per token. Null becomes NaN."""
        values = self._column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)
        if len(values) != len(self.labels):
            raise BadBatch(
                f"column {name!r} has {len(values)} values in all, `labels` has {len(self.labels)}: every "
                "token column is aligned to `input_ids`"
            )
        return values.astype(np.float64) if values.dtype == object else values

    def check(self, stream: Stream) -> None:
        """Raise BadBatch for an impossible log-prob, for a missing log-prob of the reference if the recipe shapes the
        reward with it, and for a reward beyond ±REWARD_LIMIT."""
        episodes = stream.episodes
        scored = episodes.trains & ~episodes.reward.isnan()
        extreme = scored & (episodes.reward.abs() > REWARD_LIMIT)
        if bool(extreme.any()):
            self.refuse("rewards", extreme[stream.episode])
        self.refuse("old_logprobs", episodes.trains[stream.episode] & impossible(stream.old))
        if stream.ref is not None:
            self.refuse("ref_logprobs", scored[stream.episode] & stream.old.isfinite() & ~stream.ref.isfinite())

    def check_some(self, stream: Stream) -> None:
        """Raise BadBatch if no token can train because all rewards or all log-probs are unknown."""
        scored = stream.episodes.trains & ~stream.episodes.reward.isnan()
        known = stream.old.isfinite()
        empty = "rewards" if not bool(scored.any()) else "old_logprobs" if not bool(known.any()) else None
        if len(self.lengths) and not len(stream.old):
            raise BadBatch(f"column 'labels' is {IGNORED} in every row, so no token can train: {REMEDY['labels']}")
        if self.recipe.surrogate.advantages and bool(stream.episodes.trains.any()) and empty:
            raise BadBatch(f"column {empty!r} is NaN in every row whose status may train: {REMEDY[empty]}")

    def refuse(self, name: str, bad: Tensor) -> None:
        """Raise BadBatch if `bad` (own tokens,) is True anywhere. The message names the first token, and the column
        `name`."""
        if bool(bad.any()):
            at = int(self.own.nonzero()[0][int(bad.int().argmax())])
            row = int(np.searchsorted(self.starts, at, side="right")) - 1
            _refuse(name, float(self.values(name)[at]), row, at - int(self.starts[row]))

    def shaped(self, stream: Stream) -> NDArray[np.float64]:
        """Return, for each token, the reward (tokens,) of its episode, after the recipe's shapes have changed it."""
        x, scored = stream.episodes.reward, stream.episodes.trains
        for term in self.recipe.shape:
            if not isinstance(term, TokenKL):
                x = term(x, scored, stream, Context())
        return np.repeat(x.numpy()[self.episode], self.lengths)

    def group_tokens(self, stream: Stream) -> NDArray[np.float64]:
        """Return, for each row, the mean number (rows,) of tokens per episode in its group, including prompts."""
        group = stream.episodes.group.numpy()
        tokens = np.bincount(self.episode, weights=self.lengths, minlength=len(self.tapes))
        return (np.bincount(group, weights=tokens) / np.bincount(group))[group[self.episode]]

    def stream(self) -> Stream:
        """Return the stream of the own tokens in all rows, with their episodes. The reference's log-probs (`ref`) are
        only set if the recipe shapes the reward with them."""
        own = np.zeros(len(self.own) + 1, dtype=np.int64)
        np.cumsum(self.own, out=own[1:])
        bounds = own[self.starts]
        sizes = np.diff(bounds)
        episode = torch.from_numpy(np.repeat(self.episode, sizes))
        zeros = torch.zeros(len(episode), dtype=torch.int64)
        n = len(self.tapes)
        reward, group, allowed, groups = self._episodes()
        turn, turns = self._turns(reward, episode)
        truth = torch.from_numpy(allowed)
        priced = any(term.needs_reference for term in self.recipe.shape)
        return Stream(
            token=zeros,
            temperature=zeros,
            version=zeros,
            call=zeros,
            agent=zeros,
            turn=turn,
            episode=episode,
            old=self.numbers("old_logprobs"),
            ref=self.numbers("ref_logprobs") if priced else None,
            rows=torch.from_numpy(bounds),
            episodes=Episodes(
                tape=self.tapes,
                reward=torch.from_numpy(reward),
                trains=truth,
                cut=torch.zeros_like(truth),
                bootstrap=torch.zeros(n, dtype=torch.float64),
                length=torch.from_numpy(np.bincount(self.episode, sizes, minlength=n).astype(np.int64)),
                group=torch.from_numpy(group),
                fork=torch.arange(n),
                groups=groups,
                components=({},) * n,
                weights=({},) * n,
            ),
            turns=turns,
        )

    def numbers(self, name: str) -> Tensor:
        """Return the values (own tokens,) float64 of a token column at the own tokens."""
        return torch.from_numpy(self.values(name)[self.own].astype(np.float64, copy=False))

    def _episodes(self) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_], tuple[str, ...]]:
        """Return (reward, group, allowed, groups). The first three have a value for each episode: its reward, the index
        of its group, and whether its status permits training. `groups` has the names of the groups."""
        there = "reward" in self.table.column_names
        reward = self.table.column("reward").to_numpy().astype(np.float64) if there else None
        per_row = row_rewards(self.values("rewards"), self.own, self.starts, reward)
        groups, group_of_row = self._numbered("group_id", self._column("group_id"))
        allowed_row = self._allowed()
        n = len(self.tapes)
        reward, group, allowed = np.full(n, np.nan), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=bool)
        reward[self.episode], group[self.episode], allowed[self.episode] = per_row, group_of_row, allowed_row
        differs = (group[self.episode] != group_of_row) | (allowed[self.episode] != allowed_row)
        differs |= ~np.isclose(reward[self.episode], per_row, equal_nan=True)
        if differs.any():
            tape = self.tapes[self.episode[int(differs.argmax())]]
            raise BadBatch(
                f"the rows of tape {tape!r} disagree on its reward, group or status: a tape is one episode, "
                "with one reward, group and status in all its rows"
            )
        return reward, group, allowed, groups

    def _allowed(self) -> NDArray[np.bool_]:
        """Return for each row (rows,) whether its status permits training. Without a column `status`, this is True."""
        names = self.table.column_names
        if "status" not in names:
            return np.ones(len(self.lengths), dtype=bool)
        statuses = self.table.column("status").to_pylist()
        causes = self.table.column("cause").to_pylist() if "cause" in names else [None] * len(statuses)
        ends = list(zip(statuses, causes, strict=True))
        known = {}
        for end in set(ends):
            try:
                known[end] = trains(Status(end[0]), CauseType(end[1]) if end[1] else None)
            except ValueError as error:
                raise BadBatch(f"columns 'status' and 'cause' of row {ends.index(end)}: {error}") from None
        return np.fromiter(map(known.__getitem__, ends), bool, len(ends))

    def _turns(self, reward: NDArray[np.float64], episode: Tensor) -> tuple[Tensor, Turns]:
        """Return the index (own tokens,) of each own token's turn, and the table of turns. Without columns for turns,
        each episode counts as one turn."""
        n = len(self.tapes)
        if not {"turn", "turn_rewards"} <= set(self.table.column_names):
            return episode, Turns(
                reward=torch.from_numpy(reward), episode=torch.arange(n), numbers=partial(_unknown, n)
            )
        turn, of = self.values("turn")[self.own].astype(np.int64), episode.numpy()
        rows = np.zeros(n, dtype=np.int64)
        rows[self.episode] = np.arange(len(self.episode))
        lists = self.table.column("turn_rewards").combine_chunks().take(pa.array(rows))
        given = lists.value_lengths().fill_null(0).to_numpy()
        counts = np.maximum(given, 1)
        np.maximum.at(counts, of, turn + 1)
        start = np.concatenate([[0], np.cumsum(counts)])
        earned, owner = np.full(start[-1], np.nan), np.repeat(np.arange(n), counts)
        place = np.arange(given.sum()) - np.repeat(np.cumsum(given) - given, given)
        earned[np.repeat(start[:-1], given) + place] = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float64)
        earned[np.isnan(reward)[owner]] = np.nan
        whole = np.bincount(owner[~np.isnan(earned)], minlength=n) == 0
        earned[start[1:][whole] - 1] = reward[whole]  # no turn has a reward of its own
        total = np.where(np.isnan(reward), np.nan, np.bincount(owner, weights=np.nan_to_num(earned), minlength=n))
        differs = ~np.isclose(total, reward, rtol=1e-6, atol=1e-6, equal_nan=True)
        if differs.any() and self.recipe.reward.reads_turns:
            e = int(differs.argmax())
            raise BadBatch(
                f"tape {self.tapes[e]!r}: `turn_rewards` add up to {total[e]:g}, `rewards` says {reward[e]:g}: change "
                "both, or remove the column turn_rewards"
            )
        unknown = partial(_unknown, len(owner))
        turns = Turns(reward=torch.from_numpy(earned), episode=torch.from_numpy(owner), numbers=unknown)
        return torch.from_numpy(turn + start[of]), turns

    def laid_out(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return an array (tokens,) with these values at the own tokens and NaN at other tokens."""
        whole = np.full(len(self.own), np.nan, dtype=np.float32)
        whole[self.own] = values
        return whole

    def put(self, table: pa.Table, name: str, values: NDArray[Any]) -> pa.Table:
        """Return the table with `values` (tokens,), divided into rows, as the column `name`."""
        return _with_column(table, name, pa.ListArray.from_arrays(pa.array(self.starts), pa.array(values)))


def _unknown(turns: int) -> Tensor:
    """Return `Turns.answered` for a dataset: -1 everywhere, because a dataset holds no observations."""
    return torch.full((turns,), -1)


def _with_column(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    names, plain = table.column_names, table.replace_schema_metadata(None)
    return plain.set_column(names.index(name), name, column) if name in names else plain.append_column(name, column)


def _refuse(name: str, value: float, row: int, token: int) -> None:
    raise BadBatch(f"column {name!r} is {value:g} in row {row}, token {token}, which trains: {REMEDY[name]}")


def collate(
    features: Sequence[Mapping[str, Sequence[float]]], *, pad_id: int = 0, multiple: int = 16, side: str = "right"
) -> dict[str, Tensor]:
    """Pad rows to one batch. `labels` are padded with -100, `attention_mask` with 0, and RL columns with NaN, which is
    never a valid log-prob.

    The batch has an additional column `episode` (rows,). It numbers the tapes, so rows of one tape have the same
    number. None and null become NaN.
    """
    if not features or side not in ("right", "left"):
        raise BadBatch(f"{len(features)} rows padded on side {side!r}: give at least one row, and 'right' or 'left'")
    shown = next((i for i, row in enumerate(features) if len(row.get("images") or ())), None)
    if shown is not None:
        raise BadBatch(
            f"row {shown} shows pictures (column `images`), and a batch has token ids alone, which a model reads as "
            "text: `tapereel train` trains on pictures; leave such rows out here"
        )
    longest = max(len(row["input_ids"]) for row in features)
    width = -(-longest // multiple) * multiple
    fills: dict[str, tuple[Any, torch.dtype]] = {"input_ids": (pad_id, torch.int64), "labels": (IGNORED, torch.int64)}
    fills |= {name: (float("nan"), torch.float32) for name in TOKEN_COLUMNS if name in features[0]}
    out = {name: torch.full((len(features), width), fill, dtype=dtype) for name, (fill, dtype) in fills.items()}
    out["attention_mask"] = torch.zeros(len(features), width, dtype=torch.int64)
    tapes: dict[object, int] = {}
    out["episode"] = torch.tensor(
        [tapes.setdefault(row.get("tape_id", i), len(tapes)) for i, row in enumerate(features)]
    )
    for i, row in enumerate(features):
        n = len(row["input_ids"])
        where = slice(0, n) if side == "right" else slice(width - n, width)
        for name, (_, dtype) in fills.items():
            values = np.asarray(row[name], dtype=np.int64 if dtype == torch.int64 else np.float64)
            if values.shape != (n,):
                raise BadBatch(f"column {name!r} of row {i} has the shape {values.shape}, `input_ids` has {n} values")
            out[name][i, where] = torch.from_numpy(values).to(dtype)
        out["attention_mask"][i, where] = 1
    return out


def rl_step(model: nn.Module, batch: Mapping[str, Tensor], config: RLConfig) -> tuple[Tensor, dict[str, float]]:
    """Return the differentiable loss for a collated batch, and statistics. The loss is the recipe's mean over the
    tokens that train.

    The statistics are means over these tokens, and extremes as `name/min` and `name/max`. `tokens` is the number of
    these tokens, and `weight` is the divisor of the loss.

    To get the loss over several batches, multiply each batch's loss by its `weight`, and divide the sum by the sum of
    the weights. With `weigh.kind = constant`, this is only correct if all rows of an episode are in one batch.

    Raises BadBatch with column, row and token if a value that the recipe needs is unknown, and LossNotFinite if the
    loss is NaN or infinite.
    """
    recipe = config.recipe()
    batch = {name: column.detach().cpu() for name, column in batch.items() if isinstance(column, Tensor)}
    own = (batch["labels"] != IGNORED) & (batch["attention_mask"].cumsum(-1) > 1)
    weights = _known(batch, "weights", own)
    own = own & (batch["weights"] > 0)
    weights = batch["weights"][own].double()
    needed = ["temperature"] * (recipe.score.temperature == "recorded")
    weight = torch.zeros_like(weights)
    if recipe.surrogate.advantages:
        weight = _known(batch, "advantages" if config.use_advantages else "rewards", own).double()
        if not config.use_advantages:
            there = batch["attention_mask"].bool()
            starts = np.cumsum([0, *there.sum(1).tolist()])
            row_rewards(batch["rewards"][there].double().numpy(), own[there].numpy(), starts)
        needed.append("old_logprobs")
    needed += ["ref_logprobs"] * any(term.needs_reference for term in (*recipe.regulariser, recipe.surrogate))
    for name in needed:
        _known(batch, name, own)
    if bool((batch["labels"] != batch["input_ids"])[own].any()):
        raise BadBatch(
            "`labels` differ from `input_ids` at a target: a label is the token at its own place, not shifted"
        )
    blank = torch.full_like(batch["weights"], torch.nan)
    old, ref = (batch.get(name, blank) for name in ("old_logprobs", "ref_logprobs"))
    temperature = batch.get("temperature", torch.ones_like(blank))
    rows = []
    for k, there in enumerate(batch["attention_mask"].bool().numpy()):
        columns = (column[k].numpy()[there] for column in (batch["input_ids"], own, temperature, old))
        rows.append(_row("batch", *columns))
    stream = Stream.of(rows, [Episode(tape="batch", group="batch", reward=0.0)]).having(ref=ref[own])
    micros = plan(rows)
    index = torch.cat([micro.index for micro in micros]) if micros else torch.zeros(0, dtype=torch.int64)
    scored = [forward(model, micro, recipe.score, entropy=recipe.needs_entropy) for micro in micros]
    order = index.argsort()
    lp = torch.cat([one.logprob.cpu() for one in scored])[order] if micros else torch.zeros(0, requires_grad=True)
    entropies = [one.entropy.cpu() for one in scored if one.entropy is not None]
    entropy = torch.cat(entropies)[order] if entropies else None
    if config.relu_log_p_weights:
        weight = weight.clamp(min=0)
    every = torch.ones(len(lp), dtype=torch.bool)
    whole = objective.Batch(recipe=recipe, stream=stream, advantage=weight, entered=every, selected=every, target=None)
    # The weights were computed over the whole dataset, so an episode with rows in several batches keeps its weight.
    episodes = float(len(batch["episode"][own.any(-1)].unique())) if recipe.weigh.kind == "constant" else 1.0
    total = episodes if recipe.weigh.kind in ("constant", "sum") else float(weights.sum())
    part = replace(whole.part(), weight=weights / (total or 1.0))
    context = Context()
    loss = part.loss(lp, entropy, torch.arange(len(lp)), context, objective.betas(recipe))
    if not bool(loss.isfinite()):
        bad = ~lp.detach().isfinite()
        row, token = own.nonzero()[int(bad.int().argmax())].tolist()
        cause = (
            f"the model's log-prob of row {row}, token {token} is {lp[bad][0].item():g}"
            if bool(bad.any())
            else "every log-prob is finite, so a ratio or the surrogate overflows"
        )
        raise LossNotFinite(f"the loss is {loss.item():g}: {cause}; don't step, and check the weights for NaN")
    context.sums.merge(_statistics(batch, own, lp.detach(), weight, stream, recipe, config))
    return loss, {"loss": float(loss.detach()), "tokens": float(len(lp)), "weight": total, **context.sums.flat()}


def _known(batch: Mapping[str, Tensor], name: str, own: Tensor) -> Tensor:
    """Return the values of the column `name` where `own` (rows, width) is True. Raises BadBatch if the column is
    missing, a value isn't finite, a weight is negative, or a temperature isn't above 0."""
    if name not in batch:
        raise BadBatch(f"the batch has no column {name!r} (it has {', '.join(batch)}): {REMEDY[name]}")
    low = batch[name] < 0 if name == "weights" else batch[name] <= 0 if name == "temperature" else torch.tensor(False)
    bad = own & (low | ~batch[name].isfinite())
    if bool(bad.any()):
        row, token = bad.nonzero()[0].tolist()
        # Left padding shifts the tokens, so they are counted from the first token in the row.
        _refuse(name, float(batch[name][row, token]), row, int(batch["attention_mask"][row, :token].sum()))
    return batch[name][own]


def _row(
    tape: str,
    input_ids: NDArray[Any],
    own: NDArray[np.bool_],
    temperature: NDArray[Any],
    old: NDArray[Any] | None = None,
) -> Row:
    """Make a row from columns (L,) with one value per token."""
    at = own.nonzero()[0].astype(np.int32)
    zeros = np.zeros(len(at), np.int32)
    return Row(
        tape=tape,
        group=tape,
        input_ids=input_ids.astype(np.int32),
        own=at,
        old=np.full(len(at), np.nan, np.float32) if old is None else old[own].astype(np.float32),
        temperature=temperature[own].astype(np.float32),
        version=zeros - 1,
        call=zeros,
        turn=zeros,
        offset=at,
        calls=("batch",),
        agents=("batch",),
        versions=(),
    )


def _statistics(
    batch: Mapping[str, Tensor],
    own: Tensor,
    lp: Tensor,
    weight: Tensor,
    stream: Stream,
    recipe: Recipe,
    config: RLConfig,
) -> Sums:
    sums, surrogate = Sums(), recipe.surrogate
    epsilon = 0.2 if config.epsilon is None else config.epsilon
    low, high = (surrogate.low, surrogate.high) if isinstance(surrogate, PPO | CPG) else (epsilon, epsilon)
    ratio = (lp - stream.old).exp()
    values = {
        "new_logprobs": lp,
        "old_logprobs": stream.old,
        "ratio_new_old": ratio,
        "weights": weight,
        **{name: batch[name][own] for name in ("rewards", "advantages") if name in batch},
        "surrogate": ratio * weight,
        "surrogate/clipped": ratio.clamp(1 - low, 1 + high) * weight,
    }
    if stream.ref is not None and bool(stream.ref.isfinite().any()):
        values["ref_logprobs"] = stream.ref
        values["ratio_ref_new"] = (stream.ref - lp).exp()
        values["ratio_ref_old"] = (stream.ref - stream.old).exp()
        values["kl"] = estimate("k3", lp, stream.ref)
    for name, column in values.items():
        # A column that the recipe reads has no unknown values here, because they have raised an error before. Other
        # columns may have some.
        sums.add(name, column[~column.isnan()], extremes=True)
    sums.add("logprob_where_weight_positive", lp[weight > 0])
    sums.add("logprob_where_weight_negative", lp[weight < 0])
    return sums
