"""Looks up in Tapereel's package metadata which extra installs an optional package."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from typing import NoReturn

from ..errors import MissingExtra

BUNDLES = ("dev", "demo")
"""Extras that consist of other extras. The message about a missing package names one of them only if no other
extra contains the package."""


def extra_of(module: str) -> str | None:
    """Return the extra that installs the package of `module`, or None if it isn't an optional dependency."""
    try:
        needs = requires("tapereel") or []
    except PackageNotFoundError:  # a bare checkout has no metadata
        needs = []
    wanted = module.split(".")[0].lower()
    found = []
    for need in needs:
        name = re.match(r"[A-Za-z0-9_.-]+", need)
        extra = re.search(r"""extra\s*==\s*["']([^"']+)["']""", need)
        if name and extra and re.sub(r"[-.]+", "_", name[0]).lower() == wanted:
            found.append(extra[1])
    return min(found, key=lambda extra: extra in BUNDLES, default=None)


def raise_missing(error: ModuleNotFoundError, purpose: str) -> NoReturn:
    """Raise MissingExtra if the module belongs to an optional dependency of Tapereel, and otherwise `error` itself."""
    extra = extra_of(error.name or "")
    if extra is None:
        raise error
    raise MissingExtra((error.name or "").split(".")[0], extra, purpose) from error
