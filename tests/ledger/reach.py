"""Whether a test reaches what it checks as a user does, read from the text of the tests.

A test goes *through a door* where it, a fixture or a helper that it calls uses a door: what a user calls to make
episodes, updates or columns. It works *by hand* where it makes one of the records inside (`Row`, `Episode`, `Stream`,
...) and goes through no door: it shows what an object does, not that any setting leads to that object.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

DOORS = {
    "train",
    "run",
    "evaluate",
    "open",
    "main",
    "demo",
    "Loop",
    "rollout",
    "rollout_group",
    "tapereel",
}
"""Functions and classes of the package that run episodes or updates by settings or on objects of the user."""
INSIDE = {"Row", "Episode", "Episodes", "Stream", "Turns", "Context", "Batch", "Taken", "Call", "Begin", "End", "Use"}
"""Records inside. A test that makes one of them decides what the code under test would have to find out."""


class Used(NamedTuple):
    """A name of the package that a test leads to."""

    module: str
    name: str


class Module:
    """A file of the tests: its definitions, and what it imports."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path, self.root = path, root
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.defined = {name: node for node in tree.body for name in _names_of(node)}
        self.imported = {name: source for node in ast.walk(tree) for name, source in self._imports(node)}

    def _imports(self, node: ast.AST) -> Iterator[tuple[str, Used]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tapereel":
                    yield alias.asname or "tapereel", Used("", "*")
        if isinstance(node, ast.ImportFrom):
            package = list(self.path.relative_to(self.root).parts[:-1])
            above = package[: len(package) - node.level + 1] if node.level else []
            parts = above + (node.module.split(".") if node.module else [])
            if node.level or parts[:1] == ["tapereel"]:
                module = ".".join(parts[not node.level :])
                yield from ((alias.asname or alias.name, Used(module, alias.name)) for alias in node.names)

    def uses(self, name: str) -> Iterator[tuple[str, str]]:
        """(first part, rest) of each name in the definition of `name`, arguments included: they may be fixtures."""
        for node in ast.walk(self.defined[name]):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield node.value.id, node.attr
            elif isinstance(node, ast.Name | ast.arg):
                yield node.id if isinstance(node, ast.Name) else node.arg, ""


def _names_of(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    for target in (
        node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    ):
        yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name))


class Reach:
    """What the tests below `root` / tests lead to."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.module = cache(self._module)

    def _module(self, dotted: str) -> Module | None:
        path = self.root.joinpath(*dotted.split("."))
        found = [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
        return Module(self.root, found[0]) if found else None

    def used(self, file: str, test: str) -> set[Used]:
        """Names of the package in the test, in its fixtures, and in the helpers that it calls."""
        first = self.module(file.removesuffix(".py").replace("/", "."))
        assert first is not None
        todo, seen, used = [(first, test)], set(), set()
        while todo:
            module, name = todo.pop()
            if (module.path, name) in seen or name not in module.defined:
                continue
            seen.add((module.path, name))
            for head, rest in module.uses(name):
                source = module.imported.get(head)
                if source is None:
                    todo += [(place, head) for place in (module, *self._conftests(module)) if head in place.defined][:1]
                elif source.module.split(".")[0] != "tests":
                    used.add(Used(source.module, rest if source.name == "*" else source.name))
                elif (helper := self.module(f"{source.module}.{source.name}")) is not None:
                    todo.append((helper, rest))
                elif (helper := self.module(source.module)) is not None:
                    todo.append((helper, source.name))
        return used

    def _conftests(self, module: Module) -> Iterator[Module]:
        folders = module.path.relative_to(self.root).parts[:-1]
        for depth in range(len(folders), 0, -1):
            found = self.module(".".join((*folders[:depth], "conftest")))
            if found is not None:
                yield found

    def by_hand(self, file: str, test: str) -> bool:
        """Whether the test makes a record inside and goes through no door."""
        names = {used.name for used in self.used(file, test)}
        return bool(names & INSIDE) and not names & DOORS
