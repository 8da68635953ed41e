"""Digests of a user's code, so that a resumed run notices that its agent, environment or rewards have changed.

A digest covers what a function computes: its bytecode, constants and defaults, and the functions, classes and plain
values of the user's own modules that it refers to. Comments, line numbers and the code of libraries don't count.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from ...envs.loop_watch import is_user_code
from ...envs.rewards import Rewards, RewardSource
from ..episode.agent import Agent

_PACKAGE = __name__.partition(".")[0]
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))


def code_digests(agent: Agent, env: object, instance: object, *rewards: object) -> dict[str, str]:
    """Return a digest for the agent, the environment and each reward, and Python's version, on which they depend.

    `env` is the environment's factory, and `instance` an environment that it made. Each of `rewards` is a `Rewards`, or
    another object that scores tapes, or None.
    """
    found = {"python": f"{sys.version_info[0]}.{sys.version_info[1]}"}
    found["agent"] = digest_of(agent, agent._factory)
    found["environment"] = digest_of(env, instance)
    for one in (one for one in rewards if one is not None):
        for source in (*one.sources, *one.relative) if isinstance(one, Rewards) else (one,):
            found[f"reward {getattr(source, 'name', type(source).__name__)}"] = digest_of(source)
    return found


def digest_of(*things: object) -> str:
    """Return the digest of these functions, classes and objects."""
    walk = _Walk()
    walk.add(things)
    return hashlib.sha256("\n".join(walk.parts).encode(errors="surrogatepass")).hexdigest()[:16]


class _Walk:
    def __init__(self) -> None:
        self.parts: list[str] = []
        self._seen: dict[int, object] = {}
        """The visited objects by id. They are kept, because the id of a deleted object is used again."""

    def add(self, thing: Any) -> None:
        if isinstance(thing, _PLAIN):
            self.parts.append(repr(thing))
        elif isinstance(thing, set | frozenset):  # the order of a set of strings differs between processes
            self.parts += ["set", *sorted(digest_of(one) for one in thing)]
        elif isinstance(thing, tuple):  # equal constants may be one object or several
            self._add_all("tuple", *thing)
        elif id(thing) not in self._seen:
            self._seen[id(thing)] = thing
            self._add_object(thing)

    def _add_object(self, thing: Any) -> None:
        self.parts.append(type(thing).__qualname__)
        if isinstance(thing, list):
            self._add_all(*thing)
        elif isinstance(thing, Mapping):
            self._add_all(*(part for item in thing.items() for part in item))
        elif isinstance(thing, CodeType):
            self.parts += [thing.co_code.hex(), *thing.co_names, *thing.co_varnames]
            self._add_all(*thing.co_consts)
        elif isinstance(thing, FunctionType):
            self._add_function(thing)
        elif isinstance(thing, MethodType):
            self._add_all(thing.__func__, thing.__self__)
        elif isinstance(thing, partial):
            self._add_all(thing.func, thing.args, thing.keywords)
        elif isinstance(thing, staticmethod | classmethod):
            self.add(thing.__func__)
        elif isinstance(thing, property):
            self._add_all(thing.fget, thing.fset)
        elif isinstance(thing, re.Pattern):
            self._add_all(thing.pattern, thing.flags)
        elif isinstance(thing, type):
            self._add_class(thing)
        elif isinstance(thing, RewardSource):
            self._add_all(thing.score, thing.weight, thing.per)
        elif not isinstance(thing, ModuleType):
            if isinstance(thing, Agent):
                self.add(thing.identity().config)
            self.add(type(thing))
            # An object's other attributes, such as the name of a temporary folder, may differ without a change of code.
            self._add_all(*(value for value in getattr(thing, "__dict__", {}).values() if callable(value)))

    def _add_all(self, *things: object) -> None:
        for thing in things:
            self.add(thing)

    def _add_function(self, function: FunctionType) -> None:
        self.parts.append(function.__qualname__)
        self._add_all(function.__code__, function.__defaults__, function.__kwdefaults__)
        self.parts.append(re.sub(r" at 0x[0-9a-f]+", "", repr(function.__annotations__)))  # a tool's schema
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents)
            except ValueError:  # a name that isn't bound yet
                continue
        names = list(_names(function.__code__))
        for name in names:
            found = function.__globals__.get(name)
            if isinstance(found, ModuleType) and _is_own(found):
                self._add_all(*(vars(found)[key] for key in names if key in vars(found)))
            elif not callable(found) or _is_own(inspect.getmodule(found)):
                self.add(found)

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if _is_own(sys.modules.get(base.__module__)):
                self.parts.append(base.__qualname__)
                for name, value in vars(base).items():
                    if isinstance(value, FunctionType | classmethod | staticmethod) or not name.startswith("__"):
                        self.parts.append(name)
                        self.add(value)


def _names(code: CodeType) -> list[str]:
    """Return the names of globals and attributes in a function, and in the functions inside it."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return list(dict.fromkeys([*code.co_names, *inner]))


def _is_own(module: ModuleType | None) -> bool:
    """Return whether a module has the user's code, and isn't part of Python, Tapereel or an installed package."""
    if module is None:
        return True
    top, file = module.__name__.partition(".")[0], getattr(module, "__file__", None)
    return top not in sys.stdlib_module_names and top != _PACKAGE and (file is None or is_user_code(file))
