"""Loads Python objects by name, as on a command line: `package.module:name` or `path/to/file.py:name`.

Loading imports the module, which runs its code.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from types import ModuleType

from ..tapes.errors import USE_ITS_VERSION, TapereelError, UsageError, error_message


def load_named(name: str, *, execute: bool = True) -> object:
    """Return the object called `name`. Raises UsageError if it doesn't exist.

    Modules in the working directory are found too. With `execute=False`, nothing is imported, and only modules that are
    already imported are searched. Code that merely reads a run sets `execute=False`, because the run's files must not
    decide which code runs here.
    """
    home, _, path = name.rpartition(":")
    if not home or not path:
        raise UsageError(f"{name!r} is not the name of an object; write package.module:name or file.py:name")
    if not execute and _imported(home) is None:
        raise UsageError(f"{name} is code that was not imported, and reading a run executes none: import it first")
    module = _from_file(Path(home)) if home.endswith(".py") else _from_package(home)
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError as error:
        public = [key for key in vars(module) if not key.startswith("_")]
        near = get_close_matches(path, public)
        # Names that the file defines come before names that it imports.
        own = sorted(public, key=lambda key: getattr(vars(module)[key], "__module__", None) != module.__name__)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(own[:20]) or 'no public names'}"
        raise UsageError(f"{home} has no {path!r}; {hint}") from error


def load_function(name: str, wanted: str) -> Callable[..., object]:
    """Return the function or class called `name`. Raises UsageError for any other object. In the error message,
    `wanted` describes what was expected."""
    found = load_named(name)
    if not callable(found):
        raise UsageError(f"{name} is an object of type {type(found).__qualname__}, not {wanted}")
    return found


def listed_tasks(text: str) -> Iterable[object]:
    """Return the tasks for `text`, the value of `--tasks`. It is a JSON list, or the name of an iterable or of a
    function that returns an iterable. Raises UsageError for any other text."""
    if text.lstrip()[:1] in ("[", "{", '"') or text.strip().isdigit():
        try:
            tasks = json.loads(text)
        except ValueError as error:
            raise UsageError(f"the tasks {text!r:.60} are not JSON: {error}") from error
        if not isinstance(tasks, list):
            raise UsageError(f"the tasks {text!r:.60} aren't a list; give a JSON list, as in [1, 2]")
        return tasks
    found = load_named(text)
    tasks = found() if callable(found) and not isinstance(found, Iterable) else found
    if isinstance(tasks, str | bytes) or not isinstance(tasks, Iterable):
        raise UsageError(f"the tasks {text} are {tasks!r:.60}; name a list of tasks, or a function that returns one")
    return tasks


def _imported(home: str) -> ModuleType | None:
    """Return the module with that name or file, if this process has imported it."""
    if not home.endswith(".py"):
        return sys.modules.get(home)
    known = sys.modules.get(Path(home).stem)
    return known if getattr(known, "__file__", None) == str(Path(home).resolve()) else None


def _from_package(name: str) -> ModuleType:
    here = _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except (TapereelError, KeyboardInterrupt):
        raise
    except BaseException as error:
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent is not None and (name == absent or name.startswith(f"{absent}.")):
            recorded = f"; if a run names it, {USE_ITS_VERSION}" if name.startswith("tapereel.") else ""
            raise UsageError(f"there is no module {name!r} (also searched in {here}){recorded}") from error
        raise not_loaded(name, error) from error


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    known = _imported(str(path))
    if known is not None:
        return known  # a second import would register its step kinds twice
    if sys.modules.get(path.stem) is not None:
        raise UsageError(
            f"{path} would be imported as the module {path.stem!r}, but another module has that name; rename the file"
        )
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    _look_in(Path.cwd())
    _look_in(path.parent)  # searched first, as for `python path`
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[path.stem]
        if isinstance(error, TapereelError | KeyboardInterrupt):
            raise
        raise not_loaded(str(path), error) from error
    return module


def _look_in(folder: Path) -> str:
    """Put `folder` first on the module search path, and return it as text."""
    here = str(folder)
    if here not in sys.path and not ("" in sys.path and folder == Path.cwd()):
        sys.path.insert(0, here)
    return here


def not_loaded(name: str, error: BaseException) -> UsageError:
    """Return an error that names the exception in the user's code and the line that raised it."""
    return UsageError(f"{name} can't be loaded: {raised(error)}")


def raised(error: BaseException) -> str:
    """Return the exception's class and message, and the line in the user's code that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen ")
    ]
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error_message(error)}{at}"
