"""An environment factory by name, for `check_env`. Its errors name what was named."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from ..environment import Environment, NotAnEnvironment
from ..load_named import load_named


def named_factory(name: str) -> Callable[[], Any]:
    """The environment class or factory called `name` (`module:name` or `file.py:name`).

    Calling it raises NotAnEnvironment, with the file and line, where the named object makes no environment.
    """
    named = load_named(name)

    def make() -> Any:
        if not callable(named) or isinstance(named, Environment):
            raise NotAnEnvironment(
                f"it is {named!r:.80}, which is neither an Environment class nor a function that makes an instance"
            )
        try:
            return named()
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise NotAnEnvironment(
                f"calling it without arguments makes no environment: {type(error).__name__}: "
                f"{error} ({at.filename}:{at.lineno})"
            ) from error

    return make
