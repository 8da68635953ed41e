"""Checkpoints: a directory that is either whole or not there.

Holds the policy in Hugging Face format (so that anything can load it), the trainer's state (optimiser, counts, reward
moments, KL coefficients, running average, critic, random numbers), `taught.jsonl`, the digest of every tape that was
trained on, and `state.json`: what the loop needs to go on and what an auditor needs to check. Nothing is unpickled:
tensors are safetensors or `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...agents.engines.embedded.pretrained import quiet_transformers, weights_digest
from ...tapes.errors import TapereelError

STATE, TAUGHT = "state.json", "taught.jsonl"
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
        return self._load("trainer.pt")

    def weights(self) -> dict[str, Tensor]:
        """The policy's parameters by name, as they were saved; the digest is checked."""
        weights = self._load("policy.pt")
        found = weights_digest(weights)
        if found != self.state["digest"]:
            raise BadCheckpoint(f"{self.path}: the weights fold to {found}, state.json says {self.state['digest']}")
        return weights

    def taught(self) -> dict[str, tuple[str, ...]]:
        """tape -> (its digest, digests of the layers it was read with), of every tape that was trained on; the file's
        own digest is checked. Empty where the checkpoint was written without."""
        about = self.state.get("taught")
        if about is None:
            return {}
        try:
            data = (self.path / TAUGHT).read_bytes()
        except OSError as error:
            raise BadCheckpoint(f"{self.path / TAUGHT} can't be read: {error}") from error
        found = hashlib.sha256(data).hexdigest()
        if found != about["sha256"]:
            raise BadCheckpoint(f"{self.path / TAUGHT} folds to {found}, state.json says {about['sha256']}")
        return {tape: tuple(pin) for tape, *pin in map(json.loads, data.splitlines())}

    def _load(self, name: str) -> dict[str, Any]:
        try:
            return torch.load(self.path / name, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever torch makes of a broken file
            raise BadCheckpoint(f"{self.path / name} can't be read: {type(error).__name__}: {error}") from error

    @property
    def bytes(self) -> int:
        """Size of all its files."""
        return sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())


def copied_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter and buffer that `state_dict` has, safe to hand to another thread."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def save_checkpoint(
    directory: Path,
    model: Any,
    trainer_state: Mapping[str, Any],
    state: Mapping[str, Any],
    *,
    update: int,
    tokenizer: Any | None = None,
    taught: Mapping[str, Sequence[str]] | None = None,
) -> Checkpoint:
    """Write `directory/update-NNNNNN` and make it durable; one that is there is replaced.

    A crash leaves at worst a hidden directory (`.partial`, `.gone`), which is ignored.
    """
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / f"update-{update:06d}"
    partial = directory / f".{target.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    weights = copied_weights(model)
    full = {**state, "update": update, "digest": weights_digest(weights)}
    if taught is not None:
        lines = "".join(json.dumps([tape, *pin]) + "\n" for tape, pin in taught.items()).encode()
        (partial / TAUGHT).write_bytes(lines)
        full["taught"] = {"tapes": len(taught), "sha256": hashlib.sha256(lines).hexdigest()}
    torch.save(weights, partial / "policy.pt")
    torch.save(dict(trainer_state), partial / "trainer.pt")
    averaged = trainer_state.get("averaged")
    for folder, one in (("hf", model), ("hf-averaged", _with(model, averaged) if averaged else None)):
        if one is not None and hasattr(one, "save_pretrained"):
            with quiet_transformers():
                one.save_pretrained(partial / folder)
        if one is not None and tokenizer is not None:
            tokenizer.save_pretrained(partial / folder)
    (partial / STATE).write_text(json.dumps(full, indent=1, sort_keys=True) + "\n")
    _sync_tree(partial)
    if target.exists():
        _delete(target)
    os.rename(partial, target)
    _sync(directory)
    return Checkpoint(target, update, full)


def _with(model: Any, weights: Mapping[str, Tensor]) -> Any:
    """A copy of the model with these weights in place of its own."""
    other = copy.deepcopy(model)
    other.load_state_dict(weights, strict=False)
    return other


def prune(directory: Path, *, keep: int | None = None, keep_bytes: int | None = None, best: int | None = None) -> None:
    """Delete the oldest checkpoints until at most the last `keep` and at most `keep_bytes` in all are left (None: no
    bound). The newest, the base (update 0), the pinned ones and that of update `best` are never deleted, so more may
    stay than was asked for."""
    found = checkpoints(directory)
    sizes = {one.path: one.bytes for one in found} if keep_bytes is not None else {}
    total = sum(sizes.values())
    for k, old in enumerate(found[:-1]):
        many = keep is not None and len(found) - k > keep
        large = keep_bytes is not None and total > keep_bytes
        if (many or large) and not (old.state.get("pinned") or old.update in (0, best)):
            _delete(old.path)
            total -= sizes.get(old.path, 0)
    for rest in directory.glob(f".update-*{_GONE}"):
        shutil.rmtree(rest)


def _delete(path: Path) -> None:
    """Out of sight first, in one step: a crash in the middle must not leave half a checkpoint under its name."""
    gone = path.with_name(f".{path.name}{_GONE}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    shutil.rmtree(gone)


def checkpoints(directory: Path) -> list[Checkpoint]:
    """The whole checkpoints under `directory`, oldest first."""
    found = map(read_checkpoint, directory.glob("update-*")) if directory.is_dir() else ()
    return sorted(found, key=lambda c: c.update)


def checkpoint_folders(run: Path) -> list[Path]:
    """Where a run has checkpoints: of its own policy first, then of its players, each in a folder of its name."""
    own = run / "checkpoints"
    return [own, *sorted({path.parent.parent for path in own.glob(f"*/update-*/{STATE}")})]


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in that directory. BadCheckpoint where there is none."""
    try:
        state = json.loads((path / STATE).read_text())
        return Checkpoint(path, int(state["update"]), state)
    except (OSError, ValueError, KeyError) as error:
        raise BadCheckpoint(
            f"{path}: state.json can't be read ({error}); delete the directory to go on without it"
        ) from error


def _sync_tree(root: Path) -> None:
    for path in [*root.rglob("*"), root]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
