"""Counts of a checkout's structure: its size, rooms, objects, parameters, settings, errors, pinned wording and habits.

    python benchmarks/house.py                this checkout
    python benchmarks/house.py CHECKOUT       another one
    python benchmarks/house.py --places NAME  the places of one count: "pins", "parameters", or a habit

The files of an update are counted while the lab of `tests/finetune/loop` runs one, so this needs the extra `train`. The
tables of docs/project/measurements.md come from here.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("tapes", "envs", "agents", "finetune", "cli")
MANY = 8
"""Parameters from which a function is counted."""

NESTED = (
    {"TrainingRun"},
    {"Training"},
    {"Phases"},
    {"Team", "Players", "Player"},
    {"Policy"},
    {"Loop"},
    {"Rollouts"},
    {"History"},
    {"Trainer", "DistributedTrainer"},
)
"""The classes of `finetune` whose objects nest during one update, from the outside in.

Classes in one set are alternatives and count once. A set counts when `finetune`, apart from `inspect`, defines one of
its classes at the top of a module. The list is kept by hand: add a class that takes over a place here.
"""


class Habit(NamedTuple):
    """A construction of translated English."""

    pattern: str
    anchor: float
    """Its highest rate per 10,000 lines among nanochat, httpx, tinker-cookbook and TRL; at least 1."""


HABITS = {
    "where (if, when)": Habit(
        r"\b(None|UsageError|Error|raises?|True|False|BadBatch|empty|NaN)\b[^.\n]{0,30}\bwhere\b"
        r"|\bwhere (it|there|the|a|an|one|no|that|this|they|its|each) ",
        8,
    ),
    "what is ... (noun)": Habit(r"\b[Ww]hat (is|was|it|they|the|a|an|can|must|may|no|does|did|became|to) ", 9),
    "a text": Habit(r"\b(a text|texts)\b", 4),
    "that of": Habit(r"\b(that|those) of\b", 2),
    "is no X": Habit(r"\b(is|are|was) no [a-z]+", 6),
    "beside": Habit(r"\bbesides?\b", 1),
    "anew, else": Habit(r"\banew\b|, else ", 1),
    "says that": Habit(r"\b(says|tells) (that|what|which|nothing|whether|how|of)\b", 1),
    "stands in": Habit(r"\bstands? (in|on|at|there|beside|as|again|behind)\b", 1),
    "goes on": Habit(r"\bg(o|oes|oing) on\b", 1),
    "at work": Habit(r"\b(at work|under way|at hand)\b", 1),
    "all the same": Habit(r"\b(all the same|nevertheless|no such|such a|such an)\b", 1),
    "stacked ; and :": Habit(r";[^.\n]{3,60}:", 4),
    "so many": Habit(r"\b(so many|as far as|as often as|as long as)\b", 1),
}

WORDING = re.compile(r"[A-Za-z]{2,}[,;:]? [a-z]{2,}")
"""Two words of a sentence. A value, a path, a setting or a single name doesn't count."""


class Sources:
    """The parsed modules of a checkout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.package = self._parsed(*FLOORS, "__init__.py", "__main__.py")
        self.tests = self._parsed("tests")
        self.classes = {
            node.name: node
            for tree in self.package.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        }

    def _parsed(self, *below: str) -> dict[str, ast.Module]:
        listed = subprocess.check_output(["git", "ls-files", *below], cwd=self.root, text=True).split()
        names = [name for name in listed if name.endswith(".py") and (self.root / name).exists()]
        return {name: ast.parse(self.text(name)) for name in names}

    def text(self, name: str) -> str:
        return (self.root / name).read_text(encoding="utf-8")

    def lines(self, names: dict[str, ast.Module]) -> int:
        return sum(self.text(name).count("\n") for name in names)

    def derived(self, ancestors: set[str]) -> list[ast.ClassDef]:
        """The package's classes that derive from one of these, directly or through another class of the package."""

        def derives(name: str, path: tuple[str, ...]) -> bool:
            bases = [ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in self.classes[name].bases]
            inside = [base for base in bases if base in self.classes and base not in path]
            return bool(ancestors & set(bases)) or any(derives(base, (*path, base)) for base in inside)

        return [node for name, node in self.classes.items() if derives(name, (name,))]


def functions(sources: Sources, *, by_key: bool = True) -> list[tuple[int, str]]:
    """(parameters, place) of every function of the package, the largest number first.

    `self` and `cls` aren't counted. `**options: Unpack[Options]` counts as the keys of `Options` if `by_key` is
    true, and once otherwise.
    """

    def keys(annotation: ast.expr | None) -> int:
        named = re.fullmatch(r"Unpack\[(\w+)\]", ast.unparse(annotation)) if annotation is not None else None
        if not by_key or named is None or named[1] not in sources.classes:
            return 1
        return sum(isinstance(line, ast.AnnAssign) for line in sources.classes[named[1]].body)

    found = []
    for name, tree in sources.package.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                plain = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                number = sum(each.arg not in ("self", "cls") for each in plain) + (node.args.vararg is not None)
                number += keys(node.args.kwarg.annotation) if node.args.kwarg else 0
                found.append((number, f"{name}:{node.lineno} {node.name}"))
    return sorted(found, reverse=True)


def settings(sources: Sources) -> tuple[int, int]:
    """(settings, their classes): fields of the classes that derive from `Config`. A TypedDict counts as its keys."""
    typed = {node.name: node for node in sources.derived({"TypedDict"})}

    def fields(node: ast.ClassDef) -> int:
        lines = [
            line
            for line in node.body
            if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation)
        ]
        inside = [typed[name] for line in lines if (name := ast.unparse(line.annotation)) in typed]
        return len(lines) - len(inside) + sum(map(fields, inside))

    classes = sources.derived({"Config"})
    return sum(map(fields, classes)), len(classes)


def exceptions(sources: Sources) -> int:
    """Classes of the package that derive from an exception of Python."""
    known = {
        name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, BaseException)
    }
    return len(sources.derived(known))


def pins(sources: Sources) -> list[str]:
    """The tests that match the wording of an error: two words of a sentence in a row.

    The words are in `match=` of `pytest.raises`, or in a string that is searched for in `str(error.value)`.
    """

    def texts(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("raises"):
            parts: list[ast.AST] = [key.value for key in node.keywords if key.arg == "match"]
        elif isinstance(node, ast.Compare) and re.search(r"\bstr\(\w+\.value\)", ast.unparse(node)):
            parts = [node]
        else:
            return
        inside = [each for part in parts for each in ast.walk(part) if isinstance(each, ast.Constant)]
        yield from (each.value for each in inside if isinstance(each.value, str))

    return [
        f"{name}:{test.lineno} {test.name}"
        for name, tree in sources.tests.items()
        for test in ast.walk(tree)
        if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and test.name.startswith("test")
        if any(WORDING.search(text) for node in ast.walk(test) for text in texts(node))
    ]


def habits(sources: Sources) -> dict[str, str]:
    """Habit -> its rate per 10,000 lines of the package, and how many times the highest anchor that is."""
    text = "".join(map(sources.text, sources.package))
    rates = {name: len(re.findall(habit.pattern, text)) * 1e4 / text.count("\n") for name, habit in HABITS.items()}
    return {name: f"{rate:.1f} ({rate / HABITS[name].anchor:.1f} x)" for name, rate in rates.items()}


UPDATE = """
import json, sys, tempfile, threading
from pathlib import Path
root = sys.argv[1] + "/"
seen = set()
def note(frame, event, argument):
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(root) and frame.f_code.co_name != "<module>":
        seen.add(file.removeprefix(root))
from tapereel.tests.finetune.loop import lab
threading.setprofile(note)
sys.setprofile(note)
lab.run(Path(tempfile.mkdtemp()) / "run", lab.settings_of(updates=1, max_lag=0))
sys.setprofile(None)
print(json.dumps(sorted(file for file in seen if file.partition("/")[0] != "tests")))
"""


def executed(root: Path) -> list[str] | None:
    """The files of which one update of the lab, from the empty store to its last record, runs a function.

    None, with the reason on stderr, if the update can't be run.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder).resolve() / "tapereel"  # the checkout's folder may have another name
        package.symlink_to(root.resolve())
        env = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        command = [sys.executable, "-c", UPDATE, str(package)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        print(f"The update can't be run:\n{done.stderr}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def counts(root: Path) -> dict[str, object]:
    """Every count of a checkout."""
    sources = Sources(root)
    modules = [name for name in sources.package if "/" in name and not name.endswith("__init__.py")]
    rooms = Counter(name.rpartition("/")[0] for name in modules)
    below = [name for name in rooms if name.startswith("finetune/")]
    trained = {name: tree for name, tree in sources.package.items() if name.startswith("finetune/")}
    defined = {
        node.name
        for name, tree in trained.items()
        if not name.startswith("finetune/inspect/")
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    sizes = [number for number, _ in functions(sources)]
    update = executed(root)
    fields, classes = settings(sources)
    return {
        "modules": len(sources.package),
        "lines of package": sources.lines(sources.package),
        "lines of tests": sources.lines(sources.tests),
        "statements": sum(isinstance(n, ast.stmt) for tree in sources.package.values() for n in ast.walk(tree)),
        "comments": sum(
            line.strip().startswith("# ") and "type: ignore" not in line
            for name in sources.package
            for line in sources.text(name).splitlines()
        ),
        "rooms": len(rooms),
        "modules in the fullest room": max(rooms.values()),
        "rooms of finetune": len(below),
        "objects nested for one update": sum(bool(place & defined) for place in NESTED),
        "files executed by one update": None if update is None else len(update),
        f"functions with {MANY} or more parameters": sum(size >= MANY for size in sizes),
        "the same functions, with ** as one parameter": sum(n >= MANY for n, _ in functions(sources, by_key=False)),
        "largest number of parameters": sizes[0],
        "settings": fields,
        "settings classes": classes,
        "exception classes": exceptions(sources),
        "tests that pin wording": len(pins(sources)),
        "habits per 10,000 lines of package (times the highest anchor)": habits(sources),
    }


def places(root: Path, name: str) -> Iterator[str]:
    """The places that one count is made of."""
    sources = Sources(root)
    if name == "pins":
        yield from pins(sources)
    elif name == "parameters":
        yield from (f"{number:3d} {place}" for number, place in functions(sources) if number >= MANY)
    else:
        for file in sources.package:
            for number, line in enumerate(sources.text(file).splitlines(), start=1):
                if re.search(HABITS[name].pattern, line):
                    yield f"{file}:{number}: {line.strip()[:140]}"


def main() -> None:
    """Print the counts as JSON, or the places of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout")
    parser.add_argument("--places", choices=["pins", "parameters", *HABITS], help="list the places of one count")
    args = parser.parse_args()
    if args.places:
        print(*places(args.root, args.places), sep="\n")
    else:
        print(json.dumps(counts(args.root), indent=2))


if __name__ == "__main__":
    main()
