"""`tapereel export`: the rows of a run's tapes as a Hugging Face dataset, in JSONL, Parquet or a dataset folder; with
`--format`, the tapes in a format of others (`interchange`).

One row per token sequence, with the classic columns (`classic.to_dataset`) and, of its tape, `reward`, `status`,
`split` and `task_hash`. Unknown numbers are null, never 0. A tape without token ids is counted, not guessed at: give
the tokenizer of the model that will be trained. Running tapes are left out. The run is only read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...finetune.interchange import FORMATS, write
from ...finetune.interchange.trace_files import nothing
from ...tapes import Tape
from ...tapes.audit.checking import check_split
from ...tapes.errors import MissingExtra, UsageError
from ...tapes.records import Status
from ...tapes.value import Value
from ..console import Exit, answer, say

if TYPE_CHECKING:
    from datasets import Dataset

EXAMPLE = """
tapereel export runs/demo demo.parquet
tapereel export runs/demo demo.jsonl --split train --status finished --min-reward 1
tapereel export runs/demo demo-dataset --tokenizer path/to/tokenizer
tapereel export runs/demo traces.jsonl --format openenv
"""


class Exported(Value):
    """What was written."""

    path: str
    tapes: int
    """Tapes with at least one row."""
    rows: int
    tokens: int
    """Tokens of all rows."""
    own_tokens: int
    """Targets: tokens of the agent."""
    without_own: int
    """Tapes with no token of the agent's own."""
    without_tokens: int
    """Tapes that recorded text and no token ids, left out for want of a tokenizer."""


def export(
    tapes: Iterable[Tape], path: str | Path, *, agents: Sequence[str] | None = None, renderer: Any | None = None
) -> Exported:
    """Write the rows of closed `tapes`; `agents`, by path, are those whose tokens are labels (None: all), `renderer`
    tokenizes tapes that recorded text only. ValueError where `path` exists or its ending is neither .jsonl, .parquet
    nor none (a dataset folder); NothingToExport, and nothing written, where no tape has a row."""
    path = Path(path)
    if path.exists():
        raise UsageError(f"{path} exists already; name another file, or remove it first")
    if path.suffix not in (".jsonl", ".parquet", ""):
        raise UsageError(f"{path}: rows go to a .jsonl or .parquet file, or to a folder without an ending")
    try:
        from ...finetune.data.provenance import episode_of
        from ...finetune.data.rows import rows
        from ...finetune.interchange.classic import to_dataset
    except ImportError as error:
        raise MissingExtra(error.name or "torch", "train", "exporting rows") from error
    kept: list[tuple[Tape, list[Any]]] = []
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
        raise nothing(path, untokenized + empty, {reason: n for reason, n in why.items() if n})
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


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory")
    parser.add_argument("out", help="a .jsonl or .parquet file, or a folder for a dataset; must not exist yet")
    parser.add_argument(
        "--format",
        default="rows",
        choices=["rows", *FORMATS],
        help="rows: token sequences with labels (the default); "
        + "; ".join(f"{name}: {made.what}" for name, made in FORMATS.items()),
    )
    parser.add_argument("--split", help="only tapes of this split (`train`, `eval`, `demo`, ...)")
    parser.add_argument(
        "--status",
        choices=[status.value for status in Status],
        metavar="STATUS",
        help="only tapes that ended so (`finished`, `truncated`, ...)",
    )
    parser.add_argument("--min-reward", type=float, metavar="R", help="only tapes with at least this reward")
    parser.add_argument(
        "--agent",
        metavar="PATH",
        action="append",
        dest="agents",
        help="only this agent's tokens are "
        "labels, as pair/guide; the others' are context; repeatable, for --format rows",
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="a saved tokenizer with a chat template, for tapes of text")


def run(args: argparse.Namespace) -> int:
    from ...tapes.store.store import Store

    if args.format != "rows":
        return _run_format(args)
    renderer = _renderer(args.tokenizer) if args.tokenizer is not None else None
    with Store.open(args.run) as store:
        check_split(store, args.split)
        tapes = store.tapes(split=args.split, status=args.status, min_reward=args.min_reward, closed=True)
        done = export(tapes, args.out, agents=args.agents, renderer=renderer)
    if done.without_tokens:
        say(f"{done.without_tokens} tapes have text but no token ids and were left out: give --tokenizer")
    answer(
        args,
        done,
        f"{done.path}: {done.rows:,} rows of {done.tapes:,} tapes, {done.tokens:,} tokens, "
        f"{done.own_tokens:,} of them the agent's own",
    )
    return Exit.HOLDS


def _run_format(args: argparse.Namespace) -> int:
    from ...tapes.store.store import Store

    if args.agents is not None:
        raise UsageError(f"--agent is for --format rows: {args.format} has the words of all agents")
    if args.tokenizer is not None:
        raise UsageError(f"--tokenizer is for --format rows: {args.format} has the tokens that were recorded, or none")
    with Store.open(args.run) as store:
        check_split(store, args.split)
        tapes = store.tapes(split=args.split, status=args.status, min_reward=args.min_reward, closed=True)
        done = write(tapes, args.out, args.format)
    for sentence in done.loses:
        say(f"not in this format: {sentence}")
    for why, n in done.left_out.items():
        say(f"{n} tapes left out: {why}")
    answer(args, done, f"{done.path}: {done.records:,} {done.format} records of {done.tapes:,} tapes")
    return Exit.HOLDS


def _has_text_only(tape: Tape) -> bool:
    tokenized = {layer.call for layer in tape.layers if layer.t == "tokens"}  # type: ignore[attr-defined]
    return any(
        (call.completion is None or call.prompt is None) and call.call not in tokenized
        for call in tape.calls
        if call.finish != "error"
    )


def _with_tape_columns(dataset: Dataset, kept: list[tuple[Tape, list[Any]]]) -> Dataset:
    def spread(value: Any) -> list[Any]:
        return [value(tape) for tape, found in kept for _ in found]

    columns = {
        "reward": spread(lambda tape: tape.reward),
        "status": spread(lambda tape: tape.status.value),
        "split": spread(lambda tape: tape.begin.split),
        "task_hash": spread(lambda tape: tape.begin.task_hash),
    }
    for name, values in columns.items():
        dataset = dataset.add_column(name, values)
    return dataset


def _write(dataset: Dataset, path: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.suffix:
        dataset.save_to_disk(str(path))
        return
    # Whoever sees the file sees all of it: it gets its name when it is whole.
    partial = path.with_name(path.name + ".partial")
    if path.suffix == ".parquet":
        dataset.to_parquet(str(partial))
    else:
        dataset.to_json(str(partial), lines=True, orient="records")
    partial.rename(path)


def _renderer(folder: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("transformers", "train", "tokenizing text") from error
    from ...agents.rendering.renderer import Renderer

    if not Path(folder).is_dir():
        raise UsageError(f"there is no tokenizer folder {folder!r}; save one with tokenizer.save_pretrained(folder)")
    try:
        return Renderer(AutoTokenizer.from_pretrained(folder, local_files_only=True))
    except (OSError, ValueError) as error:
        raise UsageError(f"the tokenizer in {folder} can't be used: {error}") from error
