"""Verbs are thin: they read arguments, call the library and print. What they do is for Python users too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tapereel.cli import command as cli

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 150
"""Statements of a verb's module, nested ones and docstrings included; longer ones hold logic of the library."""
PATHS = {name: ROOT / f"{module.replace('.', '/')}.py" for name, (module, _) in (cli.VERBS | cli.commands()).items()}


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", PATHS)
def test_a_verb_is_thin(name: str):
    nodes = list(ast.walk(_tree(PATHS[name])))
    assert [node.name for node in nodes if isinstance(node, ast.ClassDef)] == [], "classes belong to the library"
    assert sum(isinstance(node, ast.stmt) for node in nodes) <= LONGEST, "logic belongs to the library"


@pytest.mark.parametrize("path", sorted((ROOT / "cli").rglob("*.py")), ids=lambda path: path.name)
def test_no_module_imports_a_verb(path: Path):
    """They are loaded by name, so that one verb never pays for another's imports."""
    verbs = {path.stem for path in PATHS.values()}
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            within = not (node.module or "").startswith(("tapes", "envs", "agents", "finetune"))
            names = {alias.name for alias in node.names} | {(node.module or "").rpartition(".")[2]}
            found |= names & verbs if within else set()
    assert found - {path.stem} == set()


def test_no_library_module_knows_the_command_line():
    """`argparse` belongs to `cli`; the exception is the module of the settings' flags."""
    allowed = {"tapes/common/config.py"}
    found = set()
    for folder in ("tapes", "envs", "agents", "finetune"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(_tree(path)):
                if isinstance(node, ast.Import) and any(alias.name == "argparse" for alias in node.names):
                    found.add(str(path.relative_to(ROOT)))
    assert found <= allowed
