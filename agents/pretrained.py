"""A model and its tokenizer from a directory in Hugging Face format: local files only, and no code from them.

Knows nothing of engines and of training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..tapes.console import UsageError
from ..tapes.errors import MissingExtra, TapereelError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class BadModel(TapereelError, ValueError):
    """A directory that holds no usable model or tokenizer; says which and why."""


@dataclass(frozen=True)
class Pretrained:
    """A causal language model in float32 on the CPU, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any


def load_pretrained(folder: str | Path) -> Pretrained:
    """The model and tokenizer in `folder`. UsageError where there is no such folder, BadModel where it holds none."""
    tokenizer = load_tokenizer(folder)
    import torch
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), local_files_only=True, dtype=torch.float32, output_loading_info=True)
        except Exception as error:  # whatever transformers makes of a broken folder
            raise BadModel(f"the model in {folder} can't be loaded: {type(error).__name__}: {_line(error)}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise BadModel(f"the model in {folder} lacks {len(missing)} weights ({', '.join(missing[:3])} ...): they would "
                       "be random; save it with model.save_pretrained")  # fmt: skip
    return Pretrained(model.eval(), tokenizer)


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in `folder`."""
    if not Path(folder).is_dir():
        raise UsageError(f"there is no model folder {str(folder)!r}; save one with model.save_pretrained and "
                         "tokenizer.save_pretrained")  # fmt: skip
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra(error.name or "transformers", "train", f"the model in {folder}") from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever transformers makes of a broken folder
        raise BadModel(f"the tokenizer in {folder} can't be loaded: {type(error).__name__}: {_line(error)}") from error


def weights_digest(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over the weights, by name, dtype, shape and bytes (hex). A tied weight counts under each of its names."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the progress bar that transformers shows for every file."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]} ..."
