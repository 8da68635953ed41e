"""Tapes as rows of a Hugging Face dataset. A row is a token sequence, and its columns hold all values for training.

These columns have one value for each token in `input_ids`: `labels` (-100 except for own tokens), `rewards`,
`advantages`, `old_logprobs`, `ref_logprobs`, `temperature`, `turn`, `version`. These columns have one value per row:
`tape_id`, `group_id`, `reward`, `status`, `cause`, `split`, `task_hash`, `overflow` (whether the episode or one of the
row's completions was cut off), `num_labels` (own tokens), and `turn_rewards` (a list over the episode's turns). A
renderer adds `text`, `prompt_text`, `output_text` and `n_predicted`. A run with pictures has `images`, a list of
`datasets.Image`.

A missing number is NaN (null in JSON), never 0. Examples are the log-prob of a token that the agent didn't produce, an
advantage that isn't computed yet, and the reward of an unscored episode. `rl_dataset` trains on these columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, Image, List, Value
from numpy.typing import NDArray

from ...tapes import NotATape, Status, Tape
from ..data.provenance import episode_of
from ..data.rows import IGNORED, Row, rows
from ..data.stream import BadBatch, Episode

if TYPE_CHECKING:
    from ...agents.rendering.renderer import Renderer

TABLE_ROWS = 1000
"""Number of rows that are converted to Arrow at once. Python lists take about twenty times the memory of Arrow."""


def rl_features(*, text: bool = False, images: bool = False) -> Features:
    """Return the type of each column. `text` adds the text columns, which need a renderer. `images` adds the pictures.

    To read a JSON file, use `Dataset.from_json(path, features=rl_features())`. Without it, a column that is null in the
    first 10 MB of the file has no type, and a later number in this column is an error.
    """
    token = {
        "input_ids": "int32",
        "labels": "int32",
        "rewards": "float64",
        "advantages": "float32",
        "old_logprobs": "float32",
        "ref_logprobs": "float32",
        "temperature": "float32",
        "turn": "int32",
        "version": "string",
        "turn_rewards": "float64",
    }
    row = {
        **dict.fromkeys(("tape_id", "group_id", "status", "cause", "split", "task_hash"), "string"),
        "reward": "float64",
        "overflow": "bool",
        "num_labels": "int32",
    }
    if text:
        row |= {"text": "string", "prompt_text": "string", "output_text": "string", "n_predicted": "int32"}
    columns = {name: [Value(kind)] for name, kind in token.items()} | {k: Value(v) for k, v in row.items()}
    return Features(columns | ({"images": List(Image())} if images else {}))


def prepare_rl_fields(
    encoding: Mapping[str, Sequence[float]],
    reward: float | None,
    old_logprobs: Sequence[float],
    ref_logprobs: Sequence[float] | None = None,
    *,
    temperature: float | Sequence[float] = 1.0,
) -> dict[str, Sequence[float]]:
    """Add the RL columns to `encoding`, which has the column `labels`, and return the result.

    There is one log-prob for each target in `labels`, in order. All other tokens get NaN. `reward` becomes the reward
    of every token. If it is None, this reward is NaN.

    `temperature` is a single value for all targets, or one value for each target. Raises BadBatch if the number of
    log-probs or temperatures isn't the number of targets.
    """
    labels = np.asarray(encoding["labels"])
    at = labels != IGNORED
    n = int(at.sum())
    out = dict(encoding)
    out["rewards"] = [float("nan") if reward is None else float(reward)] * len(labels)
    out["advantages"] = [float("nan")] * len(labels)
    temperatures = [temperature] * n if isinstance(temperature, int | float) else temperature
    columns = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "temperature": temperatures}
    for name, values in columns.items():
        if values is not None and len(values) != n:
            raise BadBatch(
                f"{len(values)} {name} for {n} targets in `labels`: give one for each token "
                "that was sampled, from the engine that sampled it"
            )
        column = np.full(len(labels), np.nan)
        if values is not None:
            column[at] = values
        out[name] = column.tolist()
    return out


def row_rewards(
    rewards: NDArray[np.float64],
    own: NDArray[np.bool_],
    starts: NDArray[np.integer],
    reward: NDArray[np.float64] | None = None,
) -> NDArray[np.float64]:
    """Return the reward of each row (rows,), which all of its values in `rewards` (tokens,) must equal. It is NaN if
    the row has no value there.

    Raises BadBatch if a row has two different values in `rewards`, or another value in `reward` (rows,). A NaN counts
    as a value only at the tokens that `own` (tokens,) bool marks. `starts` (rows + 1,) are the offsets of the rows.
    """
    read = np.flatnonzero(own | ~np.isnan(rewards))
    values, ends = rewards[read], np.searchsorted(read, starts)
    counts, found = np.diff(ends), np.full(len(starts) - 1, np.nan)
    found[counts > 0] = values[ends[:-1][counts > 0]]
    expected = np.repeat(found, counts)
    # Almost all values are equal, and `isclose` takes five times as long as `!=`.
    other = np.flatnonzero(values != expected)
    other = other[~np.isclose(values[other], expected[other], equal_nan=True)]
    if len(other):
        at = int(read[other[0]])
        k = int(np.searchsorted(starts, at, "right")) - 1
        raise BadBatch(
            f"column 'rewards' is {rewards[at]:g} in row {k}, token {at - starts[k]}, and {found[k]:g} before: a row "
            "has one reward, the same at each token"
        )
    if reward is not None and (differs := ~np.isclose(reward, found, equal_nan=True)).any():
        k = int(differs.argmax())
        raise BadBatch(
            f"column 'reward' is {reward[k]:g} in row {k}, and `rewards` says {found[k]:g}: a row has one reward, so "
            "change both columns, or remove `reward`"
        )
    return found


def span_labels(
    input_ids: Sequence[int], offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[int]:
    """Return labels for authored text. A token is a target if one of its characters is in one of the spans.

    `offsets` (of the tokens) and `spans` are pairs (start, end) in characters.
    """
    return [
        token if any(start < b and a < end for a, b in spans) else IGNORED
        for token, (start, end) in zip(input_ids, offsets, strict=True)
    ]


def to_dataset(
    items: Iterable[Tape] | Sequence[Row],
    episodes: Sequence[Episode] | None = None,
    *,
    agents: Collection[str] | None = None,
    renderer: Renderer | None = None,
) -> Dataset:
    """Return a Hugging Face dataset in memory, with the columns described at the top of this module.

    `items` are closed tapes, or rows. For rows, `episodes` must have the `Episode` of each row. For `agents` and
    `renderer`, see `records`.
    """
    if episodes is None:
        made = records(items, agents=agents, renderer=renderer)  # type: ignore[arg-type]
    else:
        of = {episode.tape: episode for episode in episodes}
        unknown = next((row.tape for row in items if row.taught_by not in of), None)  # type: ignore[union-attr]
        if unknown is not None:
            raise BadBatch(f"tape {unknown!r} of a row has no Episode: give the Episode of each row's tape")
        made = (_record(row, of[row.taught_by], renderer) for row in items)  # type: ignore[union-attr]
    return Dataset(pa.concat_tables(tables(made, text=renderer is not None)))


def records(
    tapes: Iterable[Tape],
    *,
    agents: Collection[str] | None = None,
    renderer: Renderer | None = None,
    images: bool = False,
    counts: Counter[str] | None = None,
) -> Iterator[Mapping[str, object]]:
    """Yield the rows of closed tapes one by one, as mappings from column to value. One tape is in memory at a time.

    `agents` are the paths of the agents whose tokens are labels, or None for all. `renderer` tokenizes tapes that have
    only text, and decodes the text columns. Without it, a tape that has only text is an error. `images` adds the files
    of the pictures. `counts` collects the numbers of tapes, rows and tokens. With `counts`, a tape that can't be
    tokenized is counted and left out instead of being an error.
    """
    for tape in tapes:
        if counts is not None and renderer is None and _has_text_only(tape):
            counts["without_tokens"] += 1
            continue
        if tape.status is None:
            raise NotATape(f"tape {tape.id} has not ended, so it has no reward yet: select closed tapes")
        found = rows(tape, agents=agents, renderer=renderer)
        episode = replace(episode_of(tape), reward=tape.reward)
        cut = {call.call for call in tape.calls if call.finish == "length"}
        if counts is not None:
            counts["tapes" if found else "without_own"] += 1
            counts["rows"] += len(found)
            counts["tokens"] += sum(map(len, found))
            counts["own_tokens"] += sum(len(row.own) for row in found)
        for row in found:
            names = [name for place in row.places for name in place.media]
            yield {
                **_record(row, episode, renderer, cut),
                "split": tape.begin.split,
                "task_hash": tape.begin.task_hash,
                **({"images": [{"bytes": tape.picture(name), "path": name} for name in names]} if images else {}),
            }


def _record(row: Row, episode: Episode, renderer: Renderer | None, cut: Collection[str] = ()) -> dict[str, Any]:
    versions = np.full(len(row), "", dtype=object)
    versions[row.own] = [row.versions[v] if v >= 0 else "" for v in row.version]
    turn = np.full(len(row), -1, dtype=np.int32)
    turn[row.own] = row.turn
    encoding = {"input_ids": row.input_ids.tolist(), "labels": row.labels().tolist()}
    record: dict[str, Any] = {
        **prepare_rl_fields(encoding, episode.reward, row.plain().tolist(), temperature=row.temperature.tolist()),
        "turn": turn.tolist(),
        "version": versions.tolist(),
        "turn_rewards": [] if episode.turn_rewards is None else list(map(float, episode.turn_rewards)),
        "tape_id": row.tape,
        "group_id": row.group,
        "reward": episode.reward,
        "status": episode.status.value,
        "cause": "" if episode.cause is None else episode.cause.value,
        "overflow": episode.status in (Status.TRUNCATED, Status.LIMIT) or not set(row.calls).isdisjoint(cut),
        "num_labels": len(row.own),
        "split": None,
        "task_hash": None,
    }
    if renderer is not None:
        first = int(row.own[0])
        prompt, output = renderer.spell(row.input_ids[:first].tolist()), renderer.spell(row.input_ids[first:].tolist())
        record |= {
            "text": prompt + output,
            "prompt_text": prompt,
            "output_text": output,
            "n_predicted": len(output),
        }
    return record


def tables(made: Iterable[Mapping[str, object]], *, text: bool, images: bool = False) -> Iterator[pa.Table]:
    """Yield the records `made` as Arrow tables with up to TABLE_ROWS rows each. There is always at least one table. For
    `text` and `images`, see `rl_features`."""
    schema, made = rl_features(text=text, images=images).arrow_schema, iter(made)
    while chunk := list(islice(made, TABLE_ROWS)):
        yield pa.Table.from_pylist(chunk, schema=schema)
    yield schema.empty_table()


def _has_text_only(tape: Tape) -> bool:
    tokenized = {layer.call for layer in tape.layers if layer.t == "tokens"}  # type: ignore[attr-defined]
    return any(
        (call.completion is None or call.new_prompt is None) and call.call not in tokenized
        for call in tape.calls
        if call.finish != "error"
    )
