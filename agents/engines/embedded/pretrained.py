"""A model and its tokenizer from a directory in Hugging Face format: local files only, and no code from them; and where
it computes.

Knows nothing of engines and of training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ....tapes.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]
"""How a model of transformers computes its attention. The flash kinds take a GPU and a package of their own."""


Dtype = Literal["float32", "bfloat16"]
"""Of a model's weights."""
ADAPTERS = "adapter_config.json"
"""What peft calls the file that says which model adapters are for."""


class BadModel(UsageError):
    """A directory that holds no usable model or tokenizer; says which and why."""


@dataclass(frozen=True)
class Pretrained:
    """A causal language model, or one under trained adapters (peft), and its tokenizer."""

    model: PreTrainedModel
    """Or peft's, which is used alike."""
    tokenizer: Any


def load_pretrained(
    folder: str | Path, *, device: str = "cpu", dtype: Dtype = "float32", attention: Attention | None = None
) -> Pretrained:
    """The model and tokenizer in `folder`, on `device` (as for `device_of`), its weights in `dtype`; adapters stay in
    float32. `attention` None: as transformers chooses. UsageError where there is no such folder or device, BadModel
    where it holds none."""
    tokenizer = load_tokenizer(folder)
    where = device_of(device)
    base = _base_of(Path(folder))
    model = _loaded(folder if base is None else base, dtype, attention)
    if base is not None:
        model = _adapted(model, folder)
    return Pretrained(placed(model.eval(), where), tokenizer)


def _loaded(folder: str | Path, dtype: Dtype, attention: Attention | None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with quiet_transformers():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                local_files_only=True,
                dtype=getattr(torch, dtype),
                attn_implementation=attention,
                output_loading_info=True,
            )
        except Exception as error:  # whatever transformers makes of a broken folder
            raise BadModel(f"the model in {folder} can't be loaded: {type(error).__name__}: {_line(error)}") from error
    model, report = loaded
    missing = sorted(report["missing_keys"])
    if missing:
        raise BadModel(
            f"the model in {folder} lacks {len(missing)} weights ({', '.join(missing[:3])} ...): they would "
            "be random; save it with model.save_pretrained"
        )
    return model


def _base_of(folder: Path) -> str | None:
    """The folder of the model that the adapters in `folder` are for; None where it holds a whole model."""
    about = folder / ADAPTERS
    if not about.is_file():
        return None
    try:
        base = json.loads(about.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadModel(
            f"{about} doesn't say which model its adapters are for: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(base, str) or not Path(base).is_dir():
        raise BadModel(
            f"the adapters in {folder} are for the model in {base!r}, which is no folder here: bring it "
            f"there, or name its place as base_model_name_or_path in {about}"
        )
    return base


def _adapted(model: Any, folder: str | Path) -> Any:
    """The model under the adapters in `folder`, as they were trained: beside its weights, not merged into them."""
    try:
        from peft import PeftModel
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "peft", "lora", f"the adapters in {folder}") from error
    try:
        return PeftModel.from_pretrained(model, str(folder), local_files_only=True)
    except Exception as error:  # whatever peft makes of a broken folder
        raise BadModel(f"the adapters in {folder} can't be loaded: {type(error).__name__}: {_line(error)}") from error


def device_of(name: str) -> torch.device:
    """The device of that name, as `cpu`, `cuda` or `cuda:1`; `auto`: this process's GPU where torch finds one, else the
    CPU. UsageError where torch doesn't find it here."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"device {name!r} can't be computed on here (torch {torch.__version__}: {_line(error)}); take "
            "another one, or `auto`"
        ) from error
    if found.type == "meta":
        raise UsageError("device 'meta' computes nothing; take `cpu`, `cuda` or `auto`")
    return found


def placed(model: Any, device: torch.device) -> Any:
    """The model there, its tied weights tied."""
    model = model.to(device)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.tie_weights()
    return model


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in `folder`."""
    if not Path(folder).is_dir():
        raise UsageError(
            f"there is no model folder {str(folder)!r}; save one with model.save_pretrained and "
            "tokenizer.save_pretrained"
        )
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
