"""What the guard has to know of code: whose it is, how a call was written, and which generators have no seed.

All of it is read from modules, frames and source files. Nothing is run, and nothing is known here of the guard.
"""

from __future__ import annotations

import ast
import dis
import functools
import random
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

_CALLS = frozenset(dis.opmap[name] for name in ("CALL", "PRECALL") if name in dis.opmap)
"""Instructions that call with so many arguments as their operand says."""


def homes_of(agent: Any) -> frozenset[str]:
    """Where the code of an agent lives, with its sub-agents and the functions it was given: a package is its folder,
    ending in `/`; a module alone is its file. Of Python's own modules and Tapereel's there is none."""
    found: set[str] = set()
    seen: set[int] = set()
    left = [agent]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        for thing in (one, type(one), getattr(type(one), "act", None)):
            found.update(_home(getattr(thing, "__module__", None)))
        attributes = getattr(one, "__dict__", {}).values() if callable(getattr(one, "act", None)) else ()
        left += (value for value in attributes if callable(value) or callable(getattr(value, "act", None)))
    return frozenset(found)


def _home(module: Any) -> Iterator[str]:
    parts = module.split(".") if isinstance(module, str) else []
    if not parts or parts[0] in sys.stdlib_module_names or parts[0] == __name__.partition(".")[0]:
        return
    for k in range(1, len(parts) + 1):
        found = sys.modules.get(".".join(parts[:k]))
        if found is not None and getattr(found, "__file__", None):  # no namespace, which several owners share
            folders = getattr(found, "__path__", None)
            yield from (f"{folder}/" for folder in folders) if folders is not None else (str(found.__file__),)
            return


def without_arguments(frame: FrameType, least: int) -> bool:
    """Whether the call that a frame is at passes no more than `least` arguments; False where that isn't written there,
    as in `f(*args)`."""
    code = frame.f_code.co_code
    return code[frame.f_lasti] in _CALLS and code[frame.f_lasti + 1] <= least


def without_seed(generator: random.Random, frame: FrameType) -> str | None:
    """The name by which the code in `frame` knows a generator that its own file makes as `name = random.Random()`; None
    where it can't be told that it was made so."""
    reached = chain(
        frame.f_locals.items(), frame.f_globals.items(), getattr(frame.f_locals.get("self"), "__dict__", {}).items()
    )
    names = {name for name, value in list(reached) if value is generator}
    return min(names & _unseeded(frame.f_code.co_filename), default=None)


@functools.lru_cache(maxsize=256)
def _unseeded(file: str) -> frozenset[str]:
    """Names and attributes to which a file assigns a generator without a seed, and nothing else."""
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return frozenset()  # typed into an interpreter, or no longer there: nothing can be told
    bare: set[str] = set()
    other: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {t.attr if isinstance(t, ast.Attribute) else getattr(t, "id", "") for t in targets}
            (bare if _is_bare(node.value) else other).update(names)
    return frozenset(bare - other)


def _is_bare(value: Any) -> bool:
    """Whether an expression is `Random()` or `Random(None)`."""
    if not isinstance(value, ast.Call) or value.keywords:
        return False
    name = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
    return name == "Random" and all(isinstance(arg, ast.Constant) and arg.value is None for arg in value.args)
