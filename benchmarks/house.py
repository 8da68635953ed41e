"""Counts of the package's structure: files, lines, statements, rooms, settings, and the files that an update runs.

    python benchmarks/house.py             this checkout
    python benchmarks/house.py --update    also the files that one bare update of the loop executes (needs `train`)

The tables of docs/architecture.md come from here.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("tapes", "envs", "agents", "finetune", "cli")


def sources(root: Path) -> list[Path]:
    """Every module of the package."""
    listed = subprocess.run(["git", "ls-files", *FLOORS, "__init__.py", "cli.py"], cwd=root, capture_output=True)
    return [root / name for name in listed.stdout.decode().split() if name.endswith(".py")]


def counts(root: Path) -> dict[str, int]:
    """The counts that need nothing but the text."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources(root)}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    rooms = Counter(path.parent for path in trees if path.name != "__init__.py")
    return {
        "files": len(trees),
        "lines": sum(path.read_text(encoding="utf-8").count("\n") for path in trees),
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "comments": sum(
            line.strip().startswith("# ") and "type: ignore" not in line
            for path in trees
            for line in path.read_text(encoding="utf-8").splitlines()
        ),
        "rooms": len(rooms),
        "modules in the fullest room": max(rooms.values()),
        "settings": settings(list(trees.values())),
    }


def settings(trees: list[ast.Module]) -> int:
    """Fields of the classes that derive from `Config`, directly or by another one."""
    classes = {node.name: node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def configures(name: str) -> bool:
        if name not in classes:
            return name == "Config"
        return name == "Config" or any(configures(ast.unparse(base)) for base in classes[name].bases)

    return sum(
        isinstance(line, ast.AnnAssign)
        for name, node in classes.items()
        if name != "Config" and configures(name)
        for line in node.body
    )


UPDATE = """
import asyncio, json, sys, tempfile
from pathlib import Path
root = Path(sys.argv[1])
seen = set()
def note(frame, event, argument):
    file = frame.f_code.co_filename
    ours = file.startswith(str(root)) and "/tests/" not in file and "/.venv/" not in file
    if event == "call" and ours and frame.f_code.co_name != "<module>":
        seen.add(file)
from tests.finetune.loop import lab
import threading
threading.setprofile(note)
sys.setprofile(note)
lab.run(Path(tempfile.mkdtemp()) / "run", lab.settings_of(updates=1, max_lag=0))
sys.setprofile(None)
print(json.dumps(len(seen)))
"""


def executed(root: Path) -> int | None:
    """Files of which one bare update runs a function; None where the test lab can't be run."""
    done = subprocess.run([sys.executable, "-c", UPDATE, str(root)], cwd=root, capture_output=True, text=True)
    if done.returncode:
        print(f"The update can't be run:\n{done.stderr}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--update", action="store_true", help="run one update and count the files it executes")
    args = parser.parse_args()
    found: dict[str, int | None] = dict(counts(args.root))
    if args.update:
        found["files that one update executes"] = executed(args.root)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
