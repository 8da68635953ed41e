"""Imports that wait: a package's names, and optional packages, whose extra is looked up in Tapereel's metadata."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
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


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for the `__init__` of `package`, so that each of its names is imported at its
    first use. `homes` maps a module inside the package to its names, separated by spaces."""
    home = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> object:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(f".{home[name]}", package), name)
        except ModuleNotFoundError as error:
            raise_missing(error, f"{package}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]).get("__all__", ()), *home})
