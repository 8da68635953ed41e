"""Which extra brings an optional package, read from the installed package's own metadata."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires
from typing import NoReturn

from ..errors import MissingExtra

BUNDLES = ("dev", "demo")
"""Extras made of other extras: named only where no other brings the package."""


def extra_of(module: str) -> str | None:
    """The extra that brings the package which `module` belongs to; None for what is no optional package of ours."""
    try:
        needs = requires("tapereel") or []
    except PackageNotFoundError:  # run from a bare checkout: there is no metadata to ask
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
    """MissingExtra where the module is an optional package of ours, else the error as it was."""
    extra = extra_of(error.name or "")
    if extra is None:
        raise error
    raise MissingExtra((error.name or "").split(".")[0], extra, purpose) from error
