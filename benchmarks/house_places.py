"""Places where `tapes` and `agents` name what belongs to an upper floor: a setting, or a command.

    python benchmarks/house_places.py             this checkout
    python benchmarks/house_places.py CHECKOUT    another one

A place is a line of a string, also in an f-string or a docstring, that holds the dotted name of a setting of `train`
that the floor doesn't define (`loop.updates`), or a verb of the command line (`tapereel verify`).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

LOWER = ("tapes", "agents")
SHARED = ("engine", "players", "sampling", "limits", "renderer")
"""Groups of settings that `agents` defines itself."""


def groups(root: Path) -> list[str]:
    """The groups of settings of `train`, by their names in `TrainConfig`, without those that `agents` defines."""
    tree = ast.parse((root / "finetune/run/train_config.py").read_text(encoding="utf-8"))
    (settings,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "TrainConfig"]
    fields = [ast.unparse(line.target) for line in settings.body if isinstance(line, ast.AnnAssign)]
    return [name for name in fields if name not in (*SHARED, "other_names")]


def verbs(root: Path) -> list[str]:
    """The verbs of the command line."""
    tree = ast.parse((root / "cli/command.py").read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)]
    (table,) = [node.value for node in assigned if ast.unparse(node.target) == "VERBS"]
    return [ast.literal_eval(key) for key in table.keys if key is not None]


def places(root: Path) -> Iterator[str]:
    """The places, as FILE:LINE: TEXT."""
    settings, commands = "|".join(groups(root)), "|".join(verbs(root))
    upper = re.compile(rf"\b(?:{settings})\.[a-z_]+\b(?!\()|\btapereel (?:{commands})\b")
    for floor in LOWER:
        for path in sorted((root / floor).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    for k, line in enumerate(node.value.split("\n")):
                        if upper.search(line):
                            yield f"{path.relative_to(root)}:{node.lineno + k}: {line.strip()}"


def main() -> None:
    """Print the places and their number."""
    found = list(places(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[1]))
    print(*found, f"{len(found)} places", sep="\n")


if __name__ == "__main__":
    main()
