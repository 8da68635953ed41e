"""Finds models and datasets by name: a folder, a GGUF file, or a Hugging Face repository as `org/name` or
`org/name@revision`.

The hub's own library finds and downloads repositories, so its environment variables apply: `HF_HOME`, `HF_HUB_OFFLINE`,
`HF_TOKEN` and the others. Code in a repository is neither downloaded nor run. This module doesn't import torch.

transformers dequantises a GGUF file once, in a process of its own (`python -m` this module), into a folder in Hugging
Face format below `$XDG_CACHE_HOME/tapereel/gguf`. A damaged file can kill that process, but not the caller.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from ..errors import MissingExtra, UsageError
from .text import logger

log = logger("model")
_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
"""The files that a model's folder needs. Code is not downloaded, and neither are weights in other formats."""
_PINNED = re.compile(r"(.+\.gguf)@([0-9a-f]{12,64})", re.IGNORECASE)
"""A GGUF file and the SHA-256 that it must have."""
Kind = Literal["model", "dataset"]


class NotFound(UsageError):
    """A name is neither a folder nor a repository that can be reached."""


def split_name(name: str) -> tuple[str, str | None] | None:
    """Split a name on the hub into (repository, revision or None). Return None if it can't be a name on the hub."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], match[2])


def model_folder(name: str | Path) -> Path:
    """Return the folder of a model or tokenizer. `name` is this folder, a model on the hub to download if needed, or a
    GGUF file, or a folder with one, to dequantise if needed.

    Raises NotFound with the reason in one sentence if the model doesn't exist, MissingExtra if the hub's library or the
    package `gguf` isn't installed, and UsageError if a GGUF file can't be used.
    """
    if (gguf := _gguf(name)) is not None:
        return _dequantised(*gguf)
    found = Path(name).expanduser()
    if found.is_dir():
        return found
    parts = split_name(str(name))
    if parts is None:
        raise NotFound(
            f"no model folder {str(name)!r}: name a folder in Hugging Face format (model and tokenizer), "
            f"a GGUF file, or a model of the hub as org/name or org/name@revision{_nearest(found)}"
        )
    try:
        return snapshot(*parts)
    except (NotFound, MissingExtra) as error:
        if not (close := _nearest(found)):
            raise
        raise NotFound(f"{error}{close}") from error


def _nearest(missing: Path) -> str:
    """Return a question that suggests folders with similar paths, or an empty string if there are none."""
    close = " or ".join(map(str, _near(missing)))
    return f"; did you mean {close}?" if close else ""


def _near(missing: Path) -> list[Path]:
    above = [missing.parent] if missing.parent.is_dir() else _near(missing.parent)
    names = {folder: [inner.name for inner in folder.glob("*/")] for folder in above}
    return [folder / name for folder in above for name in get_close_matches(missing.name, names[folder])]


def local_folder(name: str | Path) -> Path | None:
    """Return the folder as `model_folder` does, but offline. Return None if the model isn't on this machine."""
    try:
        if (gguf := _gguf(name)) is not None:
            return _dequantised(*gguf)
    except NotFound:
        return None
    found, parts = Path(name).expanduser(), split_name(str(name))
    if found.is_dir() or parts is None:
        return found if found.is_dir() else None
    try:
        return snapshot(*parts, local=True)
    except (NotFound, MissingExtra):
        return None


@cache  # uses one commit for the whole process, even if the repository changes on the hub
def snapshot(id: str, revision: str | None, kind: Kind = "model", *, local: bool = False) -> Path:
    """Return the folder of a repository in the hub's cache. With `local`, the network isn't used. Raises NotFound or
    MissingExtra."""
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub import errors as hub
    except ImportError as error:
        raise MissingExtra(error.name or "huggingface_hub", "train", f"the {kind} {id!r} of the hub") from error
    named = id if revision is None else f"{id}@{revision}"
    try:
        found = snapshot_download(
            id,
            repo_type=kind,
            revision=revision,
            local_files_only=local,
            allow_patterns=_FILES if kind == "model" else None,
        )
        return Path(found)
    except hub.GatedRepoError as error:
        raise NotFound(
            f"the {kind} {named!r} is gated: accept its terms at https://huggingface.co/{id}, and set HF_TOKEN"
        ) from error
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.HFValidationError) as error:
        raise NotFound(
            f"{named!r} isn't a folder, and the hub doesn't have this {kind} or revision, or HF_TOKEN may not read it"
        ) from error
    except OSError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face hub can't be reached"
        raise NotFound(
            f"{named!r} isn't a folder, and the {kind} isn't in the cache {constants.HF_HUB_CACHE}, while {why}: "
            f"run `hf download {id}` on a machine with a network and copy its cache here (HF_HOME), or name a folder"
        ) from error


def pinned_name(name: str) -> str:
    """Return the name with which a run records its model. A GGUF file is named with its digest, as
    `x.gguf@<SHA-256>`, so that a resumed run doesn't continue with another file. Other names are unchanged."""
    gguf = _gguf(name)
    return name if gguf is None else f"{gguf[0]}@{gguf[1]}"


def _gguf(name: str | Path) -> tuple[Path, str] | None:
    """Return (file, digest) if `name` is a GGUF file, with or without its digest, or a folder whose weights are one
    GGUF file. Raises NotFound if the file doesn't exist, and UsageError if it isn't the only one or has another
    digest."""
    pinned = _PINNED.fullmatch(str(name))
    found = Path(pinned[1] if pinned else name).expanduser()
    if found.is_dir():
        files = sorted(found.glob("*.gguf"))
        if not files or any(found.glob("*.safetensors")) or any(found.glob("*.bin")):
            return None
        if len(files) > 1:
            raise UsageError(f"{found} holds {len(files)} GGUF files: name one of them, as {files[0]}")
        found = files[0]
    elif found.suffix.lower() != ".gguf":
        return None
    if pinned and not found.exists():
        made = [one.name for one in _gguf_cache().glob(f"{pinned[2].lower()}*") if not one.suffix]
        if made:
            return found, made[0]
    if not found.is_file():
        raise NotFound(f"no GGUF file {str(found)!r}: name a file, or a folder that holds one")
    digest = _digest(found)
    if pinned and not digest.startswith(pinned[2].lower()):
        raise UsageError(
            f"{found} isn't the file that {name} names: its SHA-256 is {digest[:12]}. Put the original back"
        )
    return found, digest


def _gguf_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tapereel" / "gguf"


def _digest(file: Path) -> str:
    try:
        about = file.stat()
        return _sha256(file.absolute(), about.st_size, about.st_mtime_ns)
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror or error}") from error


@cache
def _sha256(file: Path, size: int, changed: int) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _dequantised(file: Path, digest: str) -> Path:
    """Return the folder with the model and tokenizer of a GGUF file. The first call makes it. Other processes wait
    meanwhile."""
    made = _gguf_cache() / digest
    if made.is_dir():
        return made
    for package in ("torch", "transformers", "gguf"):
        if find_spec(package) is None:
            raise MissingExtra(package, "gguf", f"the model {file}")
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with (made.parent / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if made.is_dir():
                return made
            for part in made.parent.glob("*.part"):  # of a process that was killed
                shutil.rmtree(part)
            part = made.with_suffix(".part")
            log.info(f"dequantising {file} (SHA-256 {digest[:12]}) into {made}, once")
            done = subprocess.run(
                [sys.executable, "-m", __name__, str(file.absolute()), str(part)], capture_output=True, text=True
            )
            if done.returncode or _digest(file) != digest:
                shutil.rmtree(part, ignore_errors=True)
                raise UsageError(f"{file} can't be used as a GGUF model: {_why(done)}")
            part.rename(made)
    except OSError as error:
        raise UsageError(
            f"{file} can't be dequantised into {made.parent} ({error.strerror or error}): set XDG_CACHE_HOME to a "
            "folder that you can write to"
        ) from error
    return made


def _why(done: subprocess.CompletedProcess[str]) -> str:
    if not done.returncode:
        return "it changed while it was read: wait until its download has ended"
    if done.returncode < 0:
        return f"signal {-done.returncode} ended the process that read it: too little memory, or a damaged file"
    said = " ".join((done.stderr.strip().splitlines() or ["no reason was given"])[-1].split())
    return f"{said if len(said) <= 300 else f'{said[:300]} ...'}. Is the file complete?"


def _dequantise(file: Path, folder: Path) -> None:
    """Write the model and tokenizer of a GGUF file as `save_pretrained` does. Its weights are rounded to bfloat16, the
    dtype of most published models. Dequantised weights often lie halfway between two bfloat16 numbers, where the
    smallest update would change what is sampled."""
    import torch
    import transformers

    folder.mkdir()
    link = folder / "model.gguf"  # in a folder of its own, where transformers finds no files of other models
    link.symlink_to(file)
    loading: dict[str, Any] = {"gguf_file": link.name, "local_files_only": True, "trust_remote_code": False}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **loading)
    packed: Any = getattr(transformers, "GgufConfig", None)  # since transformers 5.23, which may keep weights packed
    if packed is not None:
        loading["quantization_config"] = packed(dequantize=True)
    auto: Any = transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(folder, **loading, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(report["missing_keys"]):
        raise ValueError(f"it lacks {len(missing)} weights, such as {missing[0]}")
    if wrong := [name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]:
        raise ValueError(f"the weight {wrong[0]} has values that aren't finite")
    # transformers refuses to save a model with a GGUF quantiser.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    link.unlink()
    tokenizer.save_pretrained(folder)
    model.to(torch.bfloat16).save_pretrained(folder)
    for path in folder.iterdir():
        with path.open("rb") as written:
            os.fsync(written)


if __name__ == "__main__":
    try:
        _dequantise(Path(sys.argv[1]), Path(sys.argv[2]))
    except Exception as error:  # transformers and gguf raise many types for a broken file
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())}")
