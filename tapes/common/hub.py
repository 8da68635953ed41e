"""Finds models and datasets by name: a folder, or a Hugging Face repository as `org/name` or `org/name@revision`.

The hub's own library finds and downloads repositories, so its environment variables apply: `HF_HOME`, `HF_HUB_OFFLINE`,
`HF_TOKEN` and the others. Code in a repository is neither downloaded nor run. This module doesn't import torch.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Literal

from ..errors import MissingExtra, UsageError

_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?", re.ASCII)
_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.safetensors"]
"""The files that a model's folder needs. Code is not downloaded, and neither are weights in other formats."""
Kind = Literal["model", "dataset"]


class NotFound(UsageError):
    """A name is neither a folder nor a repository that can be reached."""


def split_name(name: str) -> tuple[str, str | None] | None:
    """Split a name on the hub into (repository, revision or None). Return None if it can't be a name on the hub."""
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], match[2])


def model_folder(name: str | Path) -> Path:
    """Return the folder of a model or tokenizer. `name` is this folder, or a model on the hub to download if needed.

    Raises NotFound with the reason in one sentence if the model doesn't exist, and MissingExtra if the hub's library
    isn't installed.
    """
    found = Path(name).expanduser()
    if found.is_dir():
        return found
    parts = split_name(str(name))
    if parts is None:
        raise NotFound(
            f"no model folder {str(name)!r}: name a folder in Hugging Face format (model and tokenizer), "
            f"or a model of the hub as org/name or org/name@revision{_nearest(found)}"
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
