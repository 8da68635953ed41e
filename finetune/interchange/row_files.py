"""Converts a run's tapes to the rows of a dataset: in memory, as a stream, in a JSONL or Parquet file, or in a folder.

Datasets, streams and folders are in the formats of Hugging Face `datasets`. The rows have the columns that `rl_columns`
describes. An unknown number is null in JSONL and NaN elsewhere, never 0. Datasets in memory, Parquet files and dataset
folders are converted 1,000 rows at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ...tapes import Tape
from ...tapes.audit.checking import check_split
from ...tapes.errors import MissingExtra, UsageError
from ...tapes.status import TRAINED_SPLITS
from ...tapes.store.store import Store, Where
from ...tapes.value import Value
from .record_files import check_new, completed, nothing, write_records

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

    from ...agents.rendering.renderer import Renderer


class Exported(Value):
    """The result of an export of rows."""

    path: str
    tapes: int
    """Number of tapes with at least one row."""
    rows: int
    tokens: int
    own_tokens: int
    """Number of own tokens, which are the targets."""
    without_own: int
    without_tokens: int
    """Number of tapes that were left out, because they have only text and no tokenizer was given."""


def export(
    tapes: Iterable[Tape],
    path: str | Path,
    *,
    agents: Sequence[str] | None = None,
    renderer: Renderer | None = None,
    images: bool = False,
) -> Exported:
    """Write the rows of closed `tapes` to `path`.

    `agents` are the paths of the agents whose tokens are labels, or None for all. `renderer` tokenizes tapes that have
    only text, and adds the text columns. `images` adds the files of the pictures. `path` ends in .jsonl or .parquet, or
    is a folder without an ending. Raises UsageError if `path` exists, has another ending, or is a JSONL file with
    `images`. Raises NothingToExport if no tape has a row. In these cases nothing is written.
    """
    path = Path(path)
    check_new(path, (".jsonl", ".parquet", ""), "rows")
    if images and path.suffix == ".jsonl":
        raise UsageError(
            f"{path} can't hold the run's pictures, and its rows would read as text: write .parquet or a folder"
        )
    try:
        import pyarrow as pa
        from datasets import Dataset, disable_progress_bars
        from pyarrow.parquet import ParquetWriter

        from . import rl_columns as columns
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "train", "exporting rows") from error

    disable_progress_bars()
    counts = Counter(dict.fromkeys(Exported.model_fields.keys() - {"path"}, 0))
    made = columns.records(tapes, agents=agents, renderer=renderer, images=images, counts=counts)
    made = _some(made, counts, path)
    if path.suffix == ".jsonl":
        write_records(made, path)
        return Exported(path=str(path), **counts)
    tables = columns.tables(made, text=renderer is not None, images=images)
    with completed(path) as partial:
        if path.suffix:
            features = columns.rl_features(text=renderer is not None, images=images)
            with ParquetWriter(partial, features.arrow_schema) as writer:
                for table in tables:
                    writer.write_table(table)
        else:
            Dataset(pa.concat_tables(tables)).save_to_disk(str(partial))
    return Exported(path=str(path), **counts)


def training_tapes(store: Store, where: Where) -> tuple[Iterator[Tape], Counter[str]]:
    """Return the closed tapes that match `where`, and the number of tapes that were left out of each split.

    Unless `where` names a split, the held-out tapes of a run that also has tapes to train on are left out. So a dataset
    for training doesn't contain the tasks that measure the training. A run with held-out tapes only is returned whole.
    """
    found = store.summaries(**{**where, "closed": True})
    mixed = not where.get("split") and any(one.split in TRAINED_SPLITS for one in store.summaries())
    left_out = Counter(one.split for one in found if mixed and one.split not in TRAINED_SPLITS)
    return (store.tape(one.id, refresh=False) for one in found if one.split not in left_out), left_out


def run_dataset(
    run: Path, where: Where, *, agents: Sequence[str] | None, tokenizer: str | Path | None, streaming: bool
) -> Dataset | IterableDataset:
    """Return the rows of the run's closed tapes that match `where`. For the other arguments, see `Run.dataset`."""
    try:
        import pyarrow as pa
        from datasets import Dataset, IterableDataset

        from . import rl_columns as columns
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "train", "a dataset of a run") from error

    with Store.open(run) as store:
        check_split(store, where.get("split"))
        images = bool(store.media.names())
    options = {"run": run, "where": where, "agents": agents, "tokenizer": tokenizer, "images": images}
    text = tokenizer is not None
    if streaming:
        features = columns.rl_features(text=text, images=images)
        return IterableDataset.from_generator(_run_records, features=features, gen_kwargs=options)
    return Dataset(pa.concat_tables(columns.tables(_run_records(**options), text=text, images=images)))


def _run_records(
    run: Path, where: Where, agents: Sequence[str] | None, tokenizer: str | Path | None, images: bool
) -> Iterator[Mapping[str, object]]:
    """Yield the rows of a run. This function and its arguments can be pickled, so that the workers of a data loader can
    call it."""
    from .rl_columns import records

    renderer = renderer_of(tokenizer)
    with Store.open(run) as store:
        tapes, _ = training_tapes(store, where)
        asked = {**where, "agents": agents}
        conditions = ", ".join(f"{name}={value!s}" for name, value in asked.items() if value is not None)
        made = records(tapes, agents=agents, renderer=renderer, images=images)
        yield from _some(made, Counter(), None, conditions)


def renderer_of(tokenizer: str | Path | None) -> Renderer | None:
    """Return the renderer for the tokenizer in this folder, or None if no folder is given."""
    if tokenizer is None:
        return None
    from ...agents.setup.engine_config import RendererConfig

    return RendererConfig().load(tokenizer)


def _some(
    made: Iterator[Mapping[str, object]], counts: Counter[str], path: Path | None, conditions: str = ""
) -> Iterator[Mapping[str, object]]:
    """Return the records `made`. If there are none, raise NothingToExport with the reasons in `counts`."""
    first = next(made, None)
    if first is None:
        empty, untokenized = counts["without_own"], counts["without_tokens"]
        why = {"text without token ids (give the tokenizer)": untokenized, "without a token of the agent's own": empty}
        raise nothing(path, untokenized + empty, why, conditions)
    return chain([first], made)
