"""Checkpoints: a directory that is either whole or not there.

Holds the policy in Hugging Face format (so that anything can load it), the trainer's state, and `state.json`: what the
loop needs to go on and what an auditor needs to check. Nothing is unpickled: tensors are safetensors or
`torch.load(weights_only=True)`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..agents.pretrained import quiet_transformers, weights_digest
from ..tapes.errors import TapereelError

_GONE = ".gone"
"""Suffix of a directory that is being deleted."""


class BadCheckpoint(TapereelError, ValueError):
    """A checkpoint directory that can't be used; says which file and why."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint on disk."""

    path: Path
    update: int
    """Optimiser updates applied when it was written."""
    state: Mapping[str, Any]
    """`state.json`."""

    def trainer_state(self) -> dict[str, Any]:
        """What `Trainer.state_dict()` gave."""
        return torch.load(self.path / "trainer.pt", map_location="cpu", weights_only=True)

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters by name, as they were saved; the digest is checked."""
        weights = torch.load(self.path / "policy.pt", map_location="cpu", weights_only=True)
        found = weights_digest(weights)
        if found != self.state["digest"]:
            raise BadCheckpoint(f"{self.path}: the weights fold to {found}, state.json says {self.state['digest']}")
        return weights


def copied_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer that `state_dict` has, safe to hand to another thread."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def save_checkpoint(
    directory: Path, model: Any, trainer_state: Mapping[str, Any], state: Mapping[str, Any], *, update: int,
    tokenizer: Any | None = None, keep: int | None = 3,
) -> Checkpoint:  # fmt: skip
    """Write `directory/update-NNNNNN` and make it durable, then delete all but the last `keep` (None: keep all) and the
    pinned ones.

    The new one is whole before an old one goes; a crash leaves at worst a hidden directory
    (`.partial`, `.gone`), which is ignored.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"update-{update:06d}"
    partial = directory / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    weights = copied_weights(model)
    full = {**state, "update": update, "digest": weights_digest(weights)}
    torch.save(weights, partial / "policy.pt")
    torch.save(dict(trainer_state), partial / "trainer.pt")
    if hasattr(model, "save_pretrained"):
        with quiet_transformers():
            model.save_pretrained(partial / "hf")
    if tokenizer is not None:
        tokenizer.save_pretrained(partial / "hf")
    (partial / "state.json").write_text(json.dumps(full, indent=1, sort_keys=True) + "\n")
    _sync_tree(partial)
    if target.exists():
        _delete(target)
    os.rename(partial, target)
    _sync(directory)
    if keep is not None:
        for old in checkpoints(directory)[:-keep]:
            if not old.state.get("pinned"):
                _delete(old.path)
    for rest in directory.glob(f".update-*{_GONE}"):
        shutil.rmtree(rest)
    return Checkpoint(target, update, full)


def _delete(path: Path) -> None:
    """Out of sight first, in one step: a crash in the middle must not leave half a checkpoint under its name."""
    gone = path.with_name(f".{path.name}{_GONE}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def checkpoints(directory: Path) -> list[Checkpoint]:
    """The whole checkpoints under `directory`, oldest first."""
    found = []
    for path in sorted(directory.glob("update-*")) if directory.is_dir() else ():
        try:
            state = json.loads((path / "state.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise BadCheckpoint(f"{path}: state.json can't be read ({error}); delete the directory to go on without "
                                "it") from error  # fmt: skip
        found.append(Checkpoint(path, int(state["update"]), state))
    return sorted(found, key=lambda c: c.update)


def _sync_tree(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
