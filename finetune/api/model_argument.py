"""What the `model` argument of the Python API may be, as settings of an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ...tapes.errors import UsageError

Model = str | Path | Sequence[str]
"""A folder in Hugging Face format, litellm's name of a hosted model, or a list of answers: the k-th answers the k-th
request of every episode."""


def engine_settings(model: Model | None) -> list[str]:
    """The settings `KEY=VALUE` of the engine that a `model` argument names; none for None."""
    if model is None:
        return []
    if isinstance(model, str | Path):
        kind = "embedded" if Path(model).is_dir() else "litellm"
        return [f"engine.kind={kind}", f"engine.model={json.dumps(str(model))}"]
    answers = list(model)
    if not answers or not all(isinstance(text, str) for text in answers):
        raise UsageError(f"model is {model!r:.80}: give a folder, a hosted model's name, or a list of answers (texts)")
    return ["engine.kind=scripted", f"engine.answers={json.dumps(answers)}"]
