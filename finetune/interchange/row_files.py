"""The rows of tapes as a Hugging Face dataset: a JSONL file, a Parquet file or a dataset folder.

One row per token sequence, with the columns of `classic.to_dataset` and the tape's `reward`, `status`, `split` and
`task_hash`. An unknown number is null, never 0. A tape without token ids is left out and counted, unless the caller
passes a renderer of the model to train, which tokenizes its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...tapes import Tape
from ...tapes.errors import MissingExtra
from ...tapes.value import Value
from .trace_files import check_new, completed, nothing

if TYPE_CHECKING:
    from datasets import Dataset

    from ...agents.rendering.renderer import Renderer
    from ..data.rows import Row


class Exported(Value):
    """The result of an export of rows."""

    path: str
    tapes: int
    """Number of tapes with at least one row."""
    rows: int
    tokens: int
    own_tokens: int
    """Number of targets: the agent's own tokens."""
    without_own: int
    without_tokens: int
    """Number of tapes that were left out: they have text without token ids, and there is no tokenizer."""


def export(
    tapes: Iterable[Tape], path: str | Path, *, agents: Sequence[str] | None = None, renderer: Renderer | None = None
) -> Exported:
    """Write the rows of closed `tapes` to `path`.

    agents: paths of the agents whose tokens are labels; None: all. renderer: tokenizes tapes that hold only text.
    UsageError if `path` exists or has an ending other than .jsonl, .parquet or none (a dataset folder).
    NothingToExport if no tape has a row; nothing is written then.
    """
    path = Path(path)
    check_new(path, (".jsonl", ".parquet", ""), "rows")
    try:
        from ..data.provenance import episode_of
        from ..data.rows import rows
        from .classic import to_dataset
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "train", "exporting rows") from error
    kept: list[tuple[Tape, list[Row]]] = []
    empty = untokenized = 0
    for tape in tapes:
        if renderer is None and _has_text_only(tape):
            untokenized += 1
        elif found := rows(tape, agents=agents, renderer=renderer):
            kept.append((tape, found))
        else:
            empty += 1
    if not kept:
        why = {"text without token ids (give the tokenizer)": untokenized, "without a token of the agent's own": empty}
        raise nothing(path, untokenized + empty, why)
    every = [row for _, found in kept for row in found]
    dataset = to_dataset(every, [episode_of(tape) for tape, _ in kept])
    _write(_with_tape_columns(dataset, kept), path)
    return Exported(
        path=str(path),
        tapes=len(kept),
        rows=len(every),
        tokens=sum(len(row) for row in every),
        own_tokens=sum(len(row.own) for row in every),
        without_own=empty,
        without_tokens=untokenized,
    )


def _has_text_only(tape: Tape) -> bool:
    tokenized = {layer.call for layer in tape.layers if layer.t == "tokens"}  # type: ignore[attr-defined]
    return any(
        (call.completion is None or call.prompt is None) and call.call not in tokenized
        for call in tape.calls
        if call.finish != "error"
    )


def _with_tape_columns(dataset: Dataset, kept: list[tuple[Tape, list[Row]]]) -> Dataset:
    def column(value: Callable[[Tape], Any]) -> list[Any]:
        return [value(tape) for tape, found in kept for _ in found]

    columns = {
        "reward": column(lambda tape: tape.reward),
        "status": column(lambda tape: None if tape.status is None else tape.status.value),
        "split": column(lambda tape: tape.begin.split),
        "task_hash": column(lambda tape: tape.begin.task_hash),
    }
    for name, values in columns.items():
        dataset = dataset.add_column(name, values)
    return dataset


def _write(dataset: Dataset, path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    with completed(path) as partial:
        if not path.suffix:
            dataset.save_to_disk(str(partial))
        elif path.suffix == ".parquet":
            dataset.to_parquet(str(partial))
        else:
            dataset.to_json(str(partial), lines=True, orient="records")
