"""The parts of the adapter for verifiers that need no package. tests/contract/test_verifiers.py has the others."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from tapereel.envs.adapters.verifiers import VerifiersEnvironment, verifiers_tasks
from tapereel.tapes.errors import BadArgument, MissingExtra


@pytest.mark.parametrize("use", [VerifiersEnvironment, verifiers_tasks])
def test_without_the_package_the_error_names_the_extra(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.delitem(sys.modules, "verifiers.v1", raising=False)
    with pytest.raises(MissingExtra) as found:
        use(object())
    assert (found.value.package, found.value.extra) == ("verifiers", "verifiers")


@pytest.mark.parametrize("use", [VerifiersEnvironment, verifiers_tasks])
def test_an_environment_of_an_older_version_is_refused_by_name(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class SingleTurnEnv:
        rubric = object()

    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(BadArgument, match="SingleTurnEnv"):
        use(SingleTurnEnv())
