"""Helpers to read task files with `datasets`: no progress bars, and errors that name the line.

The errors of `datasets` name neither file nor line, so `unreadable` parses a refused file again to find the fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_ROWS = "it has no rows; a task file needs at least one"


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Hide the progress bars of `datasets`, and its log of errors that it raises as well."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from datasets.utils.logging import CRITICAL, get_verbosity, set_verbosity

    verbosity, quiet = get_verbosity(), are_progress_bars_disabled()
    set_verbosity(CRITICAL)
    disable_progress_bars()
    try:
        yield
    finally:
        set_verbosity(verbosity)
        if not quiet:
            enable_progress_bars()


def unreadable(path: Path, error: Exception) -> str:
    """What is wrong with a task file, on which line, and how to repair it."""
    if path.suffix != ".parquet":
        text = path.read_bytes()
        rows = [(k, line) for k, line in enumerate(text.splitlines(), 1) if line.strip()]
        if len(rows) < (2 if path.suffix == ".csv" else 1):
            return _NO_ROWS
        # A .json file is one document, or again an object on each line.
        by_line = path.suffix == ".jsonl" or (path.suffix == ".json" and rows[0][1].lstrip().startswith(b"{"))
        fault = next((fault for k, line in (rows if by_line else ()) if (fault := _fault(line, k)) is not None), None)
        if fault is not None:
            return f"{fault}; every line must be one row, a JSON object: correct or remove the line"
        if path.suffix == ".json" and not by_line:
            return f"{_fault(text, 0, list) or error}; the file must be a JSON list of rows, or one row on each line"
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    why = next(iter(str(error).splitlines()), "") or "no reason given"
    return f"{type(error).__name__}: {why}; every row needs the same columns, each of one type"


def _fault(text: bytes, line: int, wanted: type = dict) -> str | None:
    """Why the text is not JSON of the wanted type; None if it is. line: its number in the file; 0 for the whole
    file."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        return f"line {line or error.lineno} is not JSON (column {error.colno}: {error.msg})"
    except (ValueError, RecursionError) as error:
        return f"line {line or 1} is not JSON ({type(error).__name__}: {error})"
    name = "an object" if wanted is dict else "a list"
    return None if isinstance(found, wanted) else f"line {line or 1} is not {name}"
