"""The modules of the package, each read and parsed once for all tests of this folder."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("tapes", "envs", "agents", "finetune", "cli")
"""Each may import from those before it, never from those after it."""


class Import(NamedTuple):
    """One imported name: `from .a import b` in tapes/x.py is (line, 1, "tapereel.tapes.a", "b")."""

    line: int
    level: int
    """Leading dots; 0 for an absolute import."""
    module: str
    """The absolute dotted name of the module after `from` or `import`."""
    name: str
    """The name after `import` of a `from` import, else empty."""

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


@cache
def files() -> tuple[str, ...]:
    """Every module below the floors, from the root."""
    listed = subprocess.run(
        ["git", "ls-files", "-c", "-o", "--exclude-standard", *FLOORS], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0 and listed.stdout:
        names = listed.stdout.split()
    else:
        names = [str(path.relative_to(ROOT)) for floor in FLOORS for path in (ROOT / floor).rglob("*.py")]
    return tuple(sorted({name for name in names if name.endswith(".py") and (ROOT / name).exists()}))


@cache
def text(name: str) -> str:
    """The content of a file, by its path from the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def outline(name: str) -> ast.Module:
    """The parsed module without the bodies of its functions: what it says of itself, its classes and signatures."""
    return _parsed(name)[0]


def imports(name: str) -> tuple[Import, ...]:
    """Every import of a module, wherever in the file, also for type checkers alone."""
    return _parsed(name)[1]


def length(source: str) -> int:
    """The number of statements of a module. Docstrings and comments don't count."""
    nodes = _statements(ast.parse(source).body)
    return sum(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in nodes)


@cache
def _parsed(name: str) -> tuple[ast.Module, tuple[Import, ...]]:
    # Bodies aren't kept: with a million more nodes, each garbage collection takes longer, and importing torch has many.
    tree = ast.parse(text(name))
    package = ["tapereel", *name.split("/")[:-1]]
    found: list[Import] = []
    for node in list(_statements(tree.body)):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, 0, alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [Import(node.lineno, node.level, module, alias.name) for alias in node.names]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = []
    return tree, tuple(found)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """All statements, those inside other statements included. Expressions, which hold none, aren't visited."""
    for node in body:
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(node, field, []))
        for part in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from _statements(part.body)
