"""Checkpoints are directories that are either complete or absent, even after a crash.

If processes share the weights, each writes its part of the weights and of the trainer's state, into the folders
`policy` and `trainer` (torch.distributed.checkpoint). Any number of processes can read them, also a single one.

A checkpoint holds the policy in Hugging Face format and the trainer's state (optimiser, counts, reward moments, KL
coefficients, running average, critic, random numbers). Weights that this format lacks or changes, as those below
adapters, are in `policy.pt` with all others. `taught.jsonl` has the digests of every tape that was trained on.
`state.json` has the facts that the loop needs to continue the run, and that an auditor checks.

Reading a checkpoint unpickles nothing: tensors are read from safetensors or with `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ...agents.engines.embedded.pretrained import load_weights, quiet_transformers, weights_digest
from ...agents.engines.weights.weight_files import DTYPES
from ...agents.vision.vision import PictureTokens
from ...tapes.common.text import logger
from ...tapes.errors import TapereelError
from ...tapes.store.disk import REAL, read_file

log = logger("checkpoint")

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

T = TypeVar("T")
Digest = Callable[[str | None], str]
"""Function that takes the recorded digest of some weights, and returns the digest that they have (`weights_digest`)."""
STATE, TAUGHT = "state.json", "taught.jsonl"
HF, ALONE = "hf", "policy.pt"
"""The folder in Hugging Face format, and the file with the weights that one process writes if that folder isn't
enough."""
TIED = "tied"
"""Key in `state.json` of the weights that are in `hf` under another name. Its value is the other name."""
POLICY, TRAINER = "policy", "trainer"
"""Folders with the parts that several processes have written."""
PIECES = "pieces.json"
"""File with the SHA-256 of every piece of a tensor, and with the tensors that are written under another name."""
FILE_BYTES = 2**26
"""Tensors are written in files of about this size per process, because each file is prepared in memory."""
PART = "part"
_PARTIAL, _GONE = ".partial", ".gone"
"""Suffixes for a directory that is being written, and for one that is being deleted."""


class BadCheckpoint(TapereelError, ValueError):
    """Raised if a checkpoint directory can't be used. The message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One checkpoint on disk."""

    path: Path
    update: int
    """Number of optimiser updates that had been applied when the checkpoint was written."""
    state: Mapping[str, Any]
    """The content of `state.json`."""

    def trainer_state(self) -> dict[str, object]:
        """Return the trainer's state, as `Trainer.state_dict()` returned it."""
        return joined(self.rest(), read_parts(self.path / TRAINER) if self.shared else {})

    def rest(self) -> dict[str, object]:
        """Return the trainer's state without the tensors that several processes have written."""
        return self._load("trainer.pt")

    def mapped(self, name: str) -> dict[str, object]:
        """Return the content of a file such as `trainer.pt`. Its tensors are read from the file when they are used."""
        return self._load(name, mmap=True)

    def stored(self) -> dict[str, Tensor]:
        """Return the policy's parameters by name, as one process has written them. They are read from their files when
        they are used, and no digest is checked."""
        if (self.path / ALONE).exists():
            return cast("dict[str, Tensor]", self.mapped(ALONE))
        found = dict[str, Tensor]()
        for path in sorted((self.path / HF).glob("model*.safetensors")):
            try:
                with REAL.open(path):  # raises an error for a pipe, which would never end
                    found |= load_file(path)
            except (OSError, SafetensorError, TapereelError) as error:
                raise BadCheckpoint(f"{path} can't be read: {type(error).__name__}: {error}") from error
        try:
            return found | {name: found[other] for name, other in self.state.get(TIED, {}).items()}
        except (KeyError, AttributeError) as error:
            raise BadCheckpoint(f"{self.path / HF} lacks a weight that state.json names: {error}") from error

    @property
    def shared(self) -> bool:
        """Whether several processes have written their parts."""
        return (self.path / POLICY).is_dir()

    def damage(self, rank: int = 0, size: int = 1) -> list[str]:
        """Return a sentence for each piece of a tensor that isn't the saved one. Of `size` processes, each checks its
        share of the files. A checkpoint that a single process has written has no pieces."""
        folders = [folder for name in (POLICY, TRAINER) if (folder := self.path / name).is_dir()]
        return [sentence for folder in folders for sentence in damage(folder, rank, size)]

    def weights(self) -> dict[str, Tensor]:
        """Return the policy's parameters by name. Raises BadCheckpoint if their digest isn't the recorded one."""
        weights = read_parts(self.path / POLICY) if self.shared else self.stored()
        self.check(lambda recorded: weights_digest(weights, recorded))
        return weights

    def check(self, digest: Digest) -> None:
        """Raise BadCheckpoint if the `digest` of weights isn't the recorded one."""
        recorded = self.state["digest"]
        if (found := digest(recorded)) != recorded:
            raise BadCheckpoint(
                f"{self.path}: the weights have digest {found}, state.json says {recorded}: they were "
                "changed or damaged; use another checkpoint"
            )

    def taught(self) -> dict[str, tuple[str, ...]]:
        """Return the content of each tape that was trained on, by tape id: the tape's own digest, then the digests of
        its layers (labels or rewards that were added later).

        The result is empty if the checkpoint has no list. Raises BadCheckpoint if `taught.jsonl` can't be read, or its
        digest isn't the recorded one."""
        about = self.state.get("taught")
        if about is None:
            return {}
        try:
            data = read_file(self.path / TAUGHT)
        except OSError as error:
            raise BadCheckpoint(f"{self.path / TAUGHT} can't be read: {error}") from error
        found = hashlib.sha256(data).hexdigest()
        if found != about["sha256"]:
            raise BadCheckpoint(
                f"{self.path / TAUGHT} has digest {found}, state.json says {about['sha256']}: the file was changed or "
                "damaged; use another checkpoint"
            )
        return {tape: tuple(pin) for tape, *pin in map(json.loads, data.splitlines())}

    def _load(self, name: str, *, mmap: bool = False) -> dict[str, Any]:
        try:
            with REAL.open(self.path / name) as file:
                source = self.path / name if mmap else file
                return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # torch raises many types of error for a broken file
            raise BadCheckpoint(f"{self.path / name} can't be read: {type(error).__name__}: {error}") from error


class ModelWeights:
    """The weights of a model that one process holds. `Processes` does the same for several processes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def weights(self, *, copied: bool = False) -> Mapping[str, Tensor]:
        """Return the current weights by name. Use `copied` if the model may change while they are used."""
        return copied_weights(self.model) if copied else self.model.state_dict()

    def digest(self, recorded: str | None = None) -> str:
        """Return the digest of the current weights (`weights_digest`)."""
        return weights_digest(self.model.state_dict(keep_vars=True), recorded)

    def digest_in(self, checkpoint: Checkpoint, recorded: str | None = None) -> str:
        """Return the digest of the weights in a checkpoint. Raises BadCheckpoint if `state.json` has another one."""
        return weights_digest(checkpoint.weights(), recorded)

    def whole(self) -> nn.Module:
        """Return a copy of the model with the current weights."""
        return copy.deepcopy(self.model)

    def save(self, folder: Path) -> dict[str, object]:
        """If processes share the weights, write them to `folder`, and the tensors of the trainer's state too. Return
        the rest of this state."""
        return {}

    def save_rest(self, folder: Path) -> dict[str, object]:
        """Write the weights to `folder`, unless its `hf` has them. Return what `state.json` must say about that."""
        if self.shared:
            return {}
        if (tied := self.tied(folder)) is not None:
            return {TIED: tied}
        torch.save(self.model.state_dict(), folder / ALONE)
        return {}

    def tied(self, folder: Path) -> dict[str, str] | None:
        """Return the weights that `folder / "hf"` has under another name, with this name. Return None if it lacks a
        weight, or may hold a converted one."""
        model: Any = self.model
        if hasattr(model, "peft_config") or getattr(model, "_weight_conversions", None):
            return None
        first, tied, state = dict[Tensor, str](), dict[str, str](), self.model.state_dict(keep_vars=True)
        there = _described(folder / HF)
        for name in sorted(state, key=lambda name: name not in there):
            tensor = state[name]
            if (DTYPES.get(str(tensor.dtype)), list(tensor.shape)) == there.get(name):
                first[tensor] = name
            elif name in there or tensor not in first:
                return None
            else:
                tied[name] = first[tensor]
        return tied

    def save_pretrained(self, folder: Path, averaged: Mapping[str, Tensor] | None = None) -> None:
        """Write the model in Hugging Face format, if it can be. With `averaged`, these weights replace its own."""
        model = self.model
        if averaged is not None:
            model = self.whole()
            model.load_state_dict(averaged, strict=False)
        if hasattr(model, "save_pretrained"):
            with quiet_transformers():
                cast("PreTrainedModel", model).save_pretrained(folder)

    @property
    def shared(self) -> bool:
        """Whether several processes share the weights."""
        return False

    def read(self, checkpoint: Checkpoint) -> None:
        """Replace the weights with those in the checkpoint."""
        load_weights(self.model, checkpoint.weights())

    def damage(self, checkpoint: Checkpoint) -> list[str]:
        """Return a sentence for each damaged piece of a tensor in the checkpoint (`Checkpoint.damage`)."""
        return checkpoint.damage()

    def call(self, function: Callable[..., T], **arguments: object) -> T:
        """Return `function(model, **arguments)`."""
        return function(self.model, **arguments)


def _described(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Return dtype and shape of each tensor in the model's files in `folder`."""
    found: dict[str, tuple[str, list[int]]] = {}
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                found[name] = (file.get_slice(name).get_dtype(), file.get_slice(name).get_shape())
    return found


def copied_weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return a copy of every parameter and buffer in the model's `state_dict`. Another thread can use it while the
    model changes. A tied weight is copied once, so that a file stores it once too."""
    made: dict[Tensor, Tensor] = {}
    for tensor in (state := model.state_dict(keep_vars=True)).values():
        if tensor not in made:
            made[tensor] = tensor.detach().clone()
    return {name: made[tensor] for name, tensor in state.items()}


def write_parts(folder: Path, tensors: Mapping[str, Tensor], group: distributed.ProcessGroup | None = None) -> None:
    """Write this process's part of `tensors`, which may be sharded, to safetensors files in `folder`. A tensor with
    several names is written once. All processes of the group must call this together."""
    first: dict[Tensor, str] = {}
    tied = {name: first.setdefault(tensor, name) for name, tensor in tensors.items()}
    tensors = {name: tensor.detach() for tensor, name in first.items()}
    files, size = dict[str, int](), 0
    for name, tensor in tensors.items():
        files[name] = 1 + size // FILE_BYTES
        size += _local(tensor).nbytes
    # A rank's part may be smaller than rank 0's, so rank 0's division into files is used (see `prepare_global_plan`).
    state_dict_saver.save(
        dict(tensors),
        storage_writer=HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=files, save_distributed=True),
        process_group=group,
    )
    # Each process has the digests of its own files, whose names `HuggingFaceStorageWriter` makes.
    mine = folder.glob(f"shard-{distributed.get_rank(group) + 1:05d}-*")
    found: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(found, {file.name: dict(_digests(file)) for file in mine}, group=group)
    if distributed.get_rank(group) == 0:
        files = {name: digests for each in found for name, digests in each.items()}
        about = {"pieces": files, "tied": {name: own for name, own in tied.items() if name != own}}
        (folder / PIECES).write_text(json.dumps(about))


def _digests(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the SHA-256 of a safetensors file's header, under the name "", and then of each tensor in it."""
    with REAL.open(file) as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
        start = 8 + int.from_bytes(data[:8], "little")
        yield "", hashlib.sha256(data[:start]).hexdigest()
        for name, about in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, end = about["data_offsets"]
                yield name, hashlib.sha256(memoryview(data)[start + first : start + end]).hexdigest()


def damage(folder: Path, rank: int = 0, size: int = 1) -> list[str]:
    """Return a sentence for each file that `write_parts` wrote to `folder` and that is missing or differs, with the
    first tensor that differs. Of `size` processes, each checks its share of the files."""
    try:
        pieces: dict[str, dict[str, str]] = json.loads(read_file(folder / PIECES))["pieces"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{folder / PIECES} can't be read: {type(error).__name__}: {error}"]
    names = {*pieces, *(file.name for file in folder.glob("*.safetensors"))}
    found = (_changed(folder / name, pieces.get(name, {})) for name in sorted(names)[rank::size])
    return [sentence for sentence in found if sentence is not None]


def _changed(file: Path, recorded: Mapping[str, str]) -> str | None:
    try:
        for name, found in _digests(file):
            if found != recorded.get(name):  # the header comes first, so only a header that was saved is parsed
                what = f"the piece of tensor {name}" if name else "the header"
                return f"{file}: {what} was changed: it has SHA-256 {found}, {PIECES} says {recorded.get(name)}"
    except (OSError, ValueError) as error:
        return f"{file} can't be read: {type(error).__name__}: {error}"
    return None


def read_parts(
    folder: Path, tensors: Mapping[str, Tensor] | None = None, group: distributed.ProcessGroup | None = None
) -> dict[str, Tensor]:
    """Read what `write_parts` wrote. Without `tensors`, return whole tensors. With `tensors`, which may be sharded
    differently, read into them, and return those that are in the files. All processes of the group must then call this
    together. Raises BadCheckpoint if a file can't be read, or without `tensors`, if a piece was changed."""
    if tensors is None and (broken := damage(folder)):
        raise BadCheckpoint(broken[0])
    try:
        stored = cast("dict[str, TensorStorageMetadata]", _reader(folder).read_metadata().state_dict_metadata)
        if tensors is None:
            found = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in stored.items()}
        else:
            found = {name: tensor for name, tensor in tensors.items() if name in stored}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            if found:
                reader, alone = _reader(folder), tensors is None
                state_dict_loader.load(dict(found), storage_reader=reader, process_group=group, no_dist=alone)
        tied: dict[str, str] = json.loads(read_file(folder / PIECES))["tied"]
    except (OSError, ValueError, SafetensorError, CheckpointException) as error:
        raise BadCheckpoint(f"{folder} can't be read: {type(error).__name__}: {error}") from error
    if tensors is not None and (lacking := stored.keys() - found.keys()):
        raise BadCheckpoint(f"{folder} has {min(lacking)}, which this trainer lacks: use the settings of the run")
    return {**found, **{name: found[own] for name, own in tied.items()}}


def _reader(folder: Path) -> HuggingFaceStorageReader:
    return HuggingFaceStorageReader(str(folder))


def taken_apart(tree: object, path: str = "") -> tuple[object, dict[str, Tensor]]:
    """Split a tree of dicts, lists and tuples into the tree with a `{PART: name}` for each tensor, and the tensors by
    name."""
    if isinstance(tree, Tensor):
        return {PART: path}, {path: tree}
    if not isinstance(tree, dict | list | tuple):
        return tree, {}
    pairs = list(cast("Mapping[Any, object]", tree).items() if isinstance(tree, dict) else enumerate(tree))
    parts = [(key, *taken_apart(value, f"{path}/{key}")) for key, value in pairs]
    tensors = {name: tensor for _, _, own in parts for name, tensor in own.items()}
    if isinstance(tree, dict):
        return {key: rest for key, rest, _ in parts}, tensors
    return type(tree)(rest for _, rest, _ in parts), tensors


def joined(tree: T, tensors: Mapping[str, Tensor]) -> T:
    """Undo `taken_apart`."""
    return cast(T, _joined(tree, tensors))


def _joined(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        return tensors[tree[PART]] if PART in tree else {key: _joined(value, tensors) for key, value in tree.items()}
    return type(tree)(_joined(value, tensors) for value in tree) if isinstance(tree, list | tuple) else tree


LATER = ("others", "updates")
"""Values of a trainer's state that checkpoints of earlier versions lack."""


def _unlike(saved: Any, derived: Any, place: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (place, saved, derived) for every value that isn't equal bit for bit. A tensor is shown by its digest, and
    a sharded one by the digest of this process's part."""
    if isinstance(saved, dict) and isinstance(derived, dict):
        for key in dict.fromkeys([*saved, *(key for key in derived if key not in LATER)]):
            yield from _unlike(saved.get(key), derived.get(key), f"{place}.{key}" if place else str(key))
    elif isinstance(saved, list | tuple) and isinstance(derived, list | tuple) and len(saved) == len(derived):
        for k, (then, now) in enumerate(zip(saved, derived, strict=True)):
            yield from _unlike(then, now, f"{place}[{k}]")
    else:
        then, now = (weights_digest({"": _local(x)}) if isinstance(x, Tensor) else repr(x) for x in (saved, derived))
        if then != now:
            yield place, then, now


def unlike_state(saved: Mapping[str, object], current: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Return what differs in a trainer's state (see `_unlike`). Random numbers aren't compared, because no update draws
    any."""
    then, now = ({name: value for name, value in one.items() if name != "rng"} for one in (saved, current))
    return list(_unlike(then, now))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save_checkpoint(
    directory: Path,
    model: nn.Module,
    trainer_state: Mapping[str, object],
    state: Mapping[str, object],
    *,
    update: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    pictures: PictureTokens | None = None,
    taught: Mapping[str, Sequence[str]] | None = None,
    check: Callable[[], object] = lambda: None,
    held: ModelWeights | None = None,
) -> Checkpoint:
    """Write the checkpoint `directory/update-NNNNNN` durably, in place of any checkpoint of that name. `held` are the
    model's weights, if several processes hold them.

    All files are written and synced in a hidden directory, which is then renamed. At worst, a crash leaves a hidden
    directory (`.partial`, `.gone`), which readers ignore. `check` is called just before the rename. If `check` raises,
    the old checkpoint is kept. The rename fails if another process has called `remove_partial` meanwhile.
    """
    held = held or ModelWeights(model)
    REAL.make_folder(directory)
    target = directory / f"update-{update:06d}"
    partial = directory / f".{target.name}.{os.getpid()}{_PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    full = {**state, "update": update, "digest": held.digest()}
    if taught is not None:
        lines = "".join(json.dumps([tape, *pin]) + "\n" for tape, pin in taught.items()).encode()
        (partial / TAUGHT).write_bytes(lines)
        full["taught"] = {"tapes": len(taught), "sha256": hashlib.sha256(lines).hexdigest()}
    trainer_state = {**trainer_state, **held.save(partial)}
    torch.save(trainer_state, partial / "trainer.pt")
    averaged = cast("dict[str, Tensor] | None", trainer_state.get("averaged"))
    for folder, weights in ((HF, None), *([("hf-averaged", averaged)] if averaged else [])):
        held.save_pretrained(partial / folder, weights)
        (partial / folder / "README.md").unlink(missing_ok=True)  # peft's model card, a template with nothing filled in
        if tokenizer is not None:
            tokenizer.save_pretrained(partial / folder)
        if pictures is not None:
            pictures.save(partial / folder)
    full |= held.save_rest(partial)
    (partial / STATE).write_text(json.dumps(full, indent=1, sort_keys=True) + "\n")
    for path in (*partial.rglob("*"), partial):
        _sync(path)
    check()
    old = _set_aside(target) if target.exists() else None
    try:
        os.rename(partial, target)
    except FileNotFoundError:
        if old is not None:
            os.rename(old, target)
        check()
        raise
    if old is not None:
        shutil.rmtree(old)
    _sync(directory)  # without this, a power failure can undo the rename
    return Checkpoint(target, update, full)


def prune(directory: Path, *, keep: int | None = None, best: int | None = None) -> None:
    """Delete the oldest checkpoints until at most `keep` of them are left. None means no bound.

    Four kinds of checkpoints are never deleted: the newest one, the base (update 0), the one of update `best`, and
    pinned ones. So more checkpoints than `keep` may be left.
    """
    found = checkpoints(directory, damaged=False)
    for old in found[:-keep] if keep else ():
        if not (old.state.get("pinned") or old.update in (0, best)):
            shutil.rmtree(_set_aside(old.path))
    for rest in directory.glob(f".update-*{_GONE}"):
        shutil.rmtree(rest)


def _set_aside(path: Path) -> Path:
    """Rename a directory before it is deleted, so that a crash can't leave half a checkpoint under its old name."""
    gone = path.with_name(f".{path.name}{_GONE}")
    shutil.rmtree(gone, ignore_errors=True)
    os.rename(path, gone)
    return gone


def remove_partial(directory: Path) -> None:
    """Remove incomplete checkpoints of an earlier process. If this process still runs, it fails to complete them."""
    for partial in directory.glob(f".update-*{_PARTIAL}"):
        shutil.rmtree(partial)


def checkpoints(directory: Path, *, damaged: bool = True) -> list[Checkpoint]:
    """Return the complete checkpoints under `directory`, oldest first.

    If a state.json can't be read, raises BadCheckpoint. With `damaged=False`, the checkpoint is left out instead, and a
    warning is logged.
    """
    found: list[Checkpoint] = []
    for path in directory.glob("update-*") if directory.is_dir() else ():
        try:
            found.append(read_checkpoint(path))
        except BadCheckpoint as error:
            if damaged:
                raise
            log.warning("%s", error)
    return sorted(found, key=lambda c: c.update)


def checkpoint_folders(run: Path) -> list[Path]:
    """Return the checkpoint folders of the run's policies. Its own policy comes first, then the others by name."""
    own = run / "checkpoints"
    return [own, *sorted({path.parent.parent for path in own.glob(f"*/update-*/{STATE}")})]


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in the directory `path`. Raises BadCheckpoint if its state.json can't be read."""
    try:
        state = json.loads(read_file(path / STATE))
        return Checkpoint(path, int(state["update"]), state)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(
            f"{path / STATE} can't be read ({error}); delete its folder to continue without this checkpoint"
        ) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
