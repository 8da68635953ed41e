"""Writes weights to safetensors files, and compares them with a model's files.

The trainer writes checkpoints with it, and the engines write the folders that servers load. Imports torch only when it
is called, and nothing that talks to a server.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}
"""The names of dtypes in a safetensors file."""


def check_weights(state: Mapping[str, Tensor], model: Path) -> None:
    """Compare the names and shapes in `state` with the safetensors files in `model`, if there are any.

    Raises ValueError with the first difference. Once a server has received weights that don't fit, it can't recover."""
    from safetensors import safe_open

    expected: dict[str, tuple[int, ...]] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            expected |= {_own(name): tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not expected:
        return
    state = described(state)
    names = {_own(name) for name in state}
    wrong = next((name for name in expected if name not in names), None)
    if wrong is not None:
        raise ValueError(f"the weights lack {wrong!r}, which the model in {model} has")
    for name, tensor in state.items():
        if tuple(tensor.shape) != (shape := expected.get(_own(name), tensor.shape)):
            raise ValueError(f"weight {name!r} has shape {tuple(tensor.shape)}; in {model} it has {shape}")


def _own(name: str) -> str:
    """Return the weight's name without the parts `model` and `language_model`. In vision models, the names in a file
    and the names in a state dict have these parts at different places."""
    return ".".join(part for part in name.split(".") if part not in ("model", "language_model"))


def write_weights(state: Mapping[str, Tensor], folder: Path, model: Path) -> None:
    """Write `state` to `folder` as safetensors, with the configuration files from `model`.

    The files are written to a hidden folder, which is renamed at the end, so `folder` is never incomplete. An existing
    `folder` is removed just before the rename, so after a crash, it may be missing."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in model.glob("*.json"):
        # The index isn't copied, because it lists weight files that exist in `model` but not in this folder.
        if not path.name.endswith(".safetensors.index.json"):
            shutil.copy2(path, partial / path.name)
    write_tensors(state, partial / "model.safetensors")
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)


def described(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors with the shapes and dtypes of `state`. If weights are only gathered when they are read, none is
    read (`GatheredWeights.like`)."""
    return getattr(state, "like", state)


def write_tensors(state: Mapping[str, Tensor], path: Path, names: Iterable[str] | None = None) -> None:
    """Write `state`, or only the tensors with these `names`, to a safetensors file. Tensors are read one at a time,
    unlike in `safetensors.torch.save_file`.

    A server gets a tied weight under each of its names. vLLM's CPU build has a packed copy of the output layer, which
    it makes again only if the file has the layer's own name.
    """
    import torch

    like = described(state)
    # Large items come first, so that each tensor is aligned.
    names = sorted(like if names is None else names, key=lambda name: (-like[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, start, end = like[name].dtype, end, end + like[name].nbytes
        header[name] = {"dtype": DTYPES[str(dtype)], "shape": list(like[name].shape), "data_offsets": [start, end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for name in names:
            tensor = state[name].detach().cpu().contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
