"""Things by name, as a command line gives them: `package.module:name` or `path/to/file.py:name`.

Loading runs the caller's own code, as importing it would. This module knows nothing of what the things are.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from ..tapes.console import UsageError


def load_named(name: str) -> Any:
    """The thing called `name`. Modules are looked for in the working directory too. UsageError where there is none."""
    home, _, path = name.rpartition(":")
    if not home or not path:
        raise UsageError(f"{name!r} names nothing; write package.module:name or file.py:name")
    module = _from_file(Path(home)) if home.endswith(".py") else _from_package(home)
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError as error:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise UsageError(f"{home} has no {path!r}; it has {', '.join(public[:20]) or 'nothing'}") from error


def _from_package(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise UsageError(f"there is no module {name!r} (looked in {here} too)") from error
        raise


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known  # its step classes exist once
    if known is not None:
        raise UsageError(f"{path} would be the module {path.stem!r}, which is another one already; rename the file")
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module
