"""RL fine-tuning over Hugging Face `datasets`: columns per row, advantages over the dataset, one step on a batch.

Columns, each a list aligned to `input_ids`: `labels` (-100 except for own tokens), `rewards`, `advantages`,
`old_logprobs`, `ref_logprobs`; and `group_id`, `tape_id`. A missing number is NaN: a log-prob or an advantage of a
token that isn't the agent's own, an advantage that isn't computed yet, a log-prob in the padding. The objective's terms
compute every number, as in the trainer; the functions here only move numbers between columns and tensors.

1. A log-prob stands at the index of its token. Right-aligning log-probs by their count would misplace them if the
   targets are not the last contiguous block.
2. A tape is one episode of its group, for any number of rows.
3. With a KL penalty in the reward, `rewards` and `advantages` are computed from the same shaped reward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn

from ...tapes.value import Value
from ..data.rows import IGNORED, Row
from ..data.stream import BadBatch, Episode, Episodes, Stream, Turns
from ..objective import CPG, PPO, Context, Sums, TokenKL
from ..objective import loss as objective
from ..objective.kl import estimate
from ..objective.recipe import Recipe
from ..recipes import get_recipe
from ..trainer.logprobs import forward, plan

TOKEN_COLUMNS = ("rewards", "advantages", "old_logprobs", "ref_logprobs")
"""Columns of floats, aligned to `input_ids`; `collate` pads them with NaN."""


class RLConfig(Value):
    """Settings of `rl_step` and of the pass over the dataset. An unknown key is an error."""

    algo: str = "grpo"
    """Name of a recipe whose loss of a token reads no other token: grpo, reinforce, ..."""
    use_advantages: bool = True
    """False: a token's loss is weighed by its raw reward, not by its advantage."""
    epsilon: float = Field(default=0.2, ge=0, le=1)
    """Clip range of the ratio, if the recipe clips."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL to the reference model in the loss (k3)."""
    reward_minus_kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL penalty in the reward: r - coef * sum over the episode of k3(old against ref)."""
    relu_log_p_weights: bool = False
    """True: a negative weight of a token becomes 0, so only actions above the baseline are learned."""

    def recipe(self) -> Recipe:
        """The recipe with these settings."""
        base = get_recipe(self.algo)
        changes: dict[str, Any] = {}
        if isinstance(base.surrogate, PPO | CPG):
            changes["surrogate"] = {"low": self.epsilon, "high": self.epsilon}
        if self.kl_coef:
            changes["regulariser"] = [{"kind": "kl", "estimator": "k3", "beta": self.kl_coef}]
        if self.reward_minus_kl_coef:
            changes["shape"] = [{"kind": "episode_kl", "beta": self.reward_minus_kl_coef, "estimator": "k3"}]
        if not self.use_advantages:
            changes["baseline"] = {"kind": "none"}
        if self.relu_log_p_weights:
            changes["adjust"] = [*(term.model_dump() for term in base.adjust), {"kind": "relu"}]
        return base.but(changes)


def prepare_rl_fields(
    encoding: Mapping[str, Sequence[float]],
    reward: float | None,
    old_logprobs: Sequence[float],
    ref_logprobs: Sequence[float] | None = None,
) -> dict[str, Sequence[float]]:
    """The encoding with the RL columns. A target of `labels` gets its log-prob, in order; other tokens get NaN.

    BadBatch if the number of log-probs isn't the number of targets.
    """
    labels = np.asarray(encoding["labels"])
    at = labels != IGNORED
    out = dict(encoding)
    out["rewards"] = [float("nan") if reward is None else float(reward)] * len(labels)
    out["advantages"] = [float("nan")] * len(labels)
    for name, values in (("old_logprobs", old_logprobs), ("ref_logprobs", ref_logprobs)):
        if values is not None and len(values) != int(at.sum()):
            raise BadBatch(
                f"{len(values)} {name} for {int(at.sum())} targets in `labels`: give one for each token "
                "that was sampled, from the engine that sampled it"
            )
        column = np.full(len(labels), np.nan)
        if values is not None:
            column[at] = values
        out[name] = column.tolist()
    return out


def span_labels(
    input_ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[int]:
    """Labels of authored text: a token is a target iff its characters overlap a span's. Offsets are in characters."""
    return [
        token if any(start < b and a < end for a, b in spans) else IGNORED
        for token, (start, end) in zip(input_ids, offsets, strict=True)
    ]


def to_dataset(rows: Sequence[Row], episodes: Sequence[Episode]) -> Dataset:
    """Rows as a Hugging Face dataset with the columns above, and `turn`, `version` and `temperature` per token."""
    reward = {episode.tape: episode.reward for episode in episodes}
    lines = []
    for row in rows:
        versions = np.full(len(row), "", dtype=object)
        versions[row.own] = [row.versions[v] if v >= 0 else "" for v in row.version]
        turn = np.full(len(row), -1, dtype=np.int32)
        turn[row.own] = row.turn
        encoding = {"input_ids": row.input_ids.tolist(), "labels": row.labels().tolist()}
        lines.append(
            {
                **prepare_rl_fields(encoding, reward[row.tape], row.old.tolist()),
                "group_id": row.group,
                "tape_id": row.tape,
                "turn": turn.tolist(),
                "version": versions.tolist(),
                "temperature": row.aligned(row.temperature).tolist(),
            }
        )
    return Dataset.from_list(lines)


def update_rewards_and_advantages(dataset: Dataset, config: RLConfig) -> Dataset:
    """The dataset with `rewards` and `advantages`, computed over its groups. The order of rows doesn't matter."""
    table = dataset.flatten_indices().data.table if dataset._indices is not None else dataset.data.table
    columns = _Columns(table)
    recipe = config.recipe()
    stream = columns.stream(with_ref=bool(config.reward_minus_kl_coef))
    batch = objective.prepare(recipe, stream, Context())
    advantage = np.full(len(columns.own), np.nan, dtype=np.float32)
    advantage[columns.own] = torch.where(batch.entered, batch.advantage, torch.nan).to(torch.float32).numpy()
    table = columns.put(table, "advantages", advantage)
    if recipe.shape:
        table = columns.put(table, "rewards", columns.shaped(recipe, stream))
    # `datasets` caches by fingerprint: without a new one, a later map would return results of the old columns.
    seal = hashlib.sha256(f"{dataset._fingerprint}{config.model_dump_json()}".encode()).hexdigest()[:16]
    return Dataset(table, fingerprint=seal)


populate_rl_data = update_rewards_and_advantages
"""The other name of the pass over the dataset."""


class _Columns:
    """The list columns of a dataset as flat arrays: `starts` (rows + 1,) are the offsets of the rows."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        for name in ("labels", "rewards", "old_logprobs", "group_id"):
            if name not in table.column_names:
                raise BadBatch(
                    f"the dataset has no column {name!r} (it has {', '.join(table.column_names)}): make its "
                    "rows with prepare_rl_fields or to_dataset"
                )
        lengths = np.diff(table.column("labels").combine_chunks().offsets.to_numpy())
        self.starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)], dtype=np.int32)
        self.lengths = lengths
        self.labels = self._values("labels")
        self.own = self.labels != IGNORED
        tapes = (
            table.column("tape_id")
            if "tape_id" in table.column_names
            else pa.chunked_array([pa.array(np.arange(len(lengths)).astype(str))])
        )
        self.tapes, self.episode = _numbered(tapes)

    def _values(self, name: str) -> NDArray[Any]:
        column = self.table.column(name).combine_chunks()
        values = column.flatten().to_numpy(zero_copy_only=False)
        if name != "labels" and len(values) != len(self.labels):
            raise BadBatch(
                f"column {name!r} has {len(values)} values in all, `labels` has {len(self.labels)}: every "
                "token column is aligned to `input_ids`"
            )
        return values

    def shaped(self, recipe: Recipe, stream: Stream) -> NDArray[np.float64]:
        """(tokens,) the shaped reward of each token's episode."""
        x, scored = stream.episodes.reward, torch.ones(len(self.tapes), dtype=torch.bool)
        for term in recipe.shape:
            if not isinstance(term, TokenKL):
                x = term(x, scored, stream, Context())
        return np.repeat(x.numpy()[self.episode], self.lengths)

    def stream(self, *, with_ref: bool) -> Stream:
        """The stream of the own tokens of all rows, with their episodes. with_ref: read `ref_logprobs` too."""
        sizes = np.diff(np.concatenate([[0], np.cumsum(self.own)])[self.starts])
        episode = torch.from_numpy(np.repeat(self.episode, sizes))
        zeros = torch.zeros(len(episode), dtype=torch.int64)
        n = len(self.tapes)
        reward, group, groups = self._rewards_and_groups()
        truth = torch.ones(n, dtype=torch.bool)
        return Stream(
            token=zeros,
            temperature=zeros,
            version=zeros,
            call=zeros,
            agent=zeros,
            turn=episode,
            episode=episode,
            old=self._own("old_logprobs"),
            ref=self._own("ref_logprobs") if with_ref else None,
            rows=torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)])),
            episodes=Episodes(
                tape=self.tapes,
                reward=torch.from_numpy(reward),
                trains=truth,
                cut=~truth,
                bootstrap=torch.zeros(n, dtype=torch.float64),
                length=torch.bincount(episode, minlength=n),
                group=torch.from_numpy(group),
                fork=torch.arange(n),
                groups=groups,
                components=(),
            ),
            turns=Turns(reward=torch.from_numpy(reward), episode=torch.arange(n)),
        )

    def _own(self, name: str) -> Tensor:
        return torch.from_numpy(self._values(name)[self.own].astype(np.float64))

    def _rewards_and_groups(self) -> tuple[NDArray[np.float64], NDArray[np.int64], tuple[str, ...]]:
        """(rewards of the episodes, indices of their groups, names of the groups). BadBatch where its rows differ."""
        rewards = self._values("rewards")
        per_row = np.full(len(self.lengths), np.nan)
        # All tokens of a row have the episode's reward, so the first one is read. An empty row has no token to read.
        per_row[self.lengths > 0] = rewards[self.starts[:-1][self.lengths > 0]]
        groups, group_of_row = _numbered(self.table.column("group_id"))
        reward, group = np.full(len(self.tapes), np.nan), np.zeros(len(self.tapes), dtype=np.int64)
        reward[self.episode], group[self.episode] = per_row, group_of_row
        differs = (group[self.episode] != group_of_row) | ~np.isclose(reward[self.episode], per_row, equal_nan=True)
        if differs.any():
            tape = self.tapes[self.episode[int(differs.argmax())]]
            raise BadBatch(
                f"the rows of tape {tape!r} disagree on its reward or group: a tape is one episode, "
                "with one reward and one group in all its rows"
            )
        return reward, group, groups

    def put(self, table: pa.Table, name: str, values: NDArray[Any]) -> pa.Table:
        """The table with column `name` set to `values` (tokens,), split into rows."""
        column = pa.ListArray.from_arrays(pa.array(self.starts), pa.array(values))
        names = table.column_names
        plain = table.replace_schema_metadata(None)
        return plain.set_column(names.index(name), name, column) if name in names else plain.append_column(name, column)


def _numbered(column: pa.ChunkedArray) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """(distinct values in the order of appearance, (rows,) index of each row's value)."""
    coded = column.combine_chunks().dictionary_encode()
    return tuple(map(str, coded.dictionary.to_pylist())), coded.indices.to_numpy().astype(np.int64)


def collate(
    features: Sequence[Mapping[str, Sequence[float]]], *, pad_id: int = 0, multiple: int = 16, side: str = "right"
) -> dict[str, Tensor]:
    """Rows as one padded batch. Padding: `labels` -100, RL columns NaN (never a valid log-prob), `attention_mask` 0."""
    longest = max(len(row["input_ids"]) for row in features)
    width = -(-longest // multiple) * multiple
    fills: dict[str, tuple[Any, torch.dtype]] = {"input_ids": (pad_id, torch.int64), "labels": (IGNORED, torch.int64)}
    fills |= {name: (float("nan"), torch.float32) for name in TOKEN_COLUMNS if name in features[0]}
    out = {name: torch.full((len(features), width), fill, dtype=dtype) for name, (fill, dtype) in fills.items()}
    out["attention_mask"] = torch.zeros(len(features), width, dtype=torch.int64)
    for i, row in enumerate(features):
        n = len(row["input_ids"])
        where = slice(0, n) if side == "right" else slice(width - n, width)
        for name, (_, dtype) in fills.items():
            out[name][i, where] = torch.as_tensor(row[name], dtype=dtype)
        out["attention_mask"][i, where] = 1
    return out


def rl_step(model: nn.Module, batch: Mapping[str, Tensor], config: RLConfig) -> tuple[Tensor, dict[str, float]]:
    """(loss with gradient, statistics) of a collated batch. The loss is the recipe's mean over the batch's own tokens.

    Statistics are means, and extremes as `name/min` and `name/max`, over own tokens. `tokens` is their number: weigh
    by it to combine batches. BadBatch if the recipe needs whole episodes, a critic, or `ref_logprobs` that are missing.
    """
    recipe = config.recipe()
    if not recipe.local or recipe.weigh.kind != "token" or recipe.select.entropy_top is not None:
        raise BadBatch(f"rl_step sees one padded batch and no episodes; recipe {recipe.name!r} needs them: use Trainer")
    objective.check_needs(recipe, reference="ref_logprobs" in batch, critic=False)
    # The first token of a row has no logits before it, so it can't be scored.
    own = (batch["labels"] != IGNORED) & (batch["attention_mask"].cumsum(-1) > 1)
    rows = [_row(batch, own, k) for k in range(len(own))]
    stream = Stream.of(rows, [Episode(tape="batch", group="batch", reward=0.0)])
    if "ref_logprobs" in batch:
        stream = stream.having(ref=batch["ref_logprobs"][own])
    micros = plan(rows)
    index = torch.cat([micro.index for micro in micros]) if micros else torch.zeros(0, dtype=torch.int64)
    scored = [forward(model, micro).logprob.cpu() for micro in micros]
    lp = torch.cat(scored)[index.argsort()] if micros else torch.zeros(0, requires_grad=True)
    weight = batch["advantages" if config.use_advantages else "rewards"][own].double()
    entered = stream.old.isfinite() & weight.isfinite()
    if config.relu_log_p_weights:
        weight = weight.clamp(min=0)
    # A NaN weight (an unscored episode, or no advantage yet) would make the whole sum NaN, so it becomes 0.
    weight = torch.where(entered, weight, torch.zeros_like(weight))
    context = Context()
    whole = objective.Batch(
        recipe=recipe, stream=stream, advantage=weight, entered=entered, selected=entered, target=None
    )
    loss = whole.part().loss(lp, None, torch.arange(len(lp)), context, objective.betas(recipe))
    _statistics(batch, own, lp.detach(), weight, stream, entered, config.epsilon, context.sums)
    return loss, {"loss": float(loss.detach()), "tokens": float(entered.sum()), **context.sums.flat()}


def _row(batch: Mapping[str, Tensor], own: Tensor, k: int) -> Row:
    """Row k of a collated batch without its padding, of the one episode `batch`."""
    there = batch["attention_mask"][k].bool()
    at = own[k][there].nonzero()[:, 0].numpy().astype(np.int32)
    zeros = np.zeros(len(at), np.int32)
    return Row(
        tape="batch",
        group="batch",
        input_ids=batch["input_ids"][k][there].numpy().astype(np.int32),
        own=at,
        old=batch["old_logprobs"][k][own[k]].numpy().astype(np.float32),
        temperature=np.ones(len(at), np.float32),
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
    entered: Tensor,
    epsilon: float,
    sums: Sums,
) -> None:
    """Add the statistics over the own tokens of this batch to `sums`."""
    sums.add("new_logprobs", lp[entered], extremes=True)
    sums.add("old_logprobs", stream.old[entered], extremes=True)
    ratio = (lp - stream.old)[entered].exp()
    sums.add("ratio_new_old", ratio, extremes=True)
    sums.add("weights", weight[entered], extremes=True)
    for name in batch.keys() & {"rewards", "advantages"}:
        known = batch[name][own][entered]
        sums.add(name, known[known.isfinite()], extremes=True)
    sums.add("surrogate", ratio * weight[entered], extremes=True)
    sums.add("surrogate/clipped", ratio.clamp(1 - epsilon, 1 + epsilon) * weight[entered], extremes=True)
    sums.add("logprob_where_weight_positive", lp[entered & (weight > 0)])
    sums.add("logprob_where_weight_negative", lp[entered & (weight < 0)])
    if stream.ref is not None and bool(stream.ref[entered].isfinite().any()):
        sums.add("ref_logprobs", stream.ref[entered], extremes=True)
        sums.add("ratio_ref_new", (stream.ref - lp)[entered].exp(), extremes=True)
        sums.add("ratio_ref_old", (stream.ref - stream.old)[entered].exp(), extremes=True)
        sums.add("kl", estimate("k3", lp, stream.ref)[entered], extremes=True)
