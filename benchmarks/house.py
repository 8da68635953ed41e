"""Counts of a checkout's structure: its size, rooms, objects, parameters, settings, errors, pinned wording and habits.

    python benchmarks/house.py                this checkout
    python benchmarks/house.py CHECKOUT       another one
    python benchmarks/house.py --places NAME  the places of one count: "pins", "parameters", "upward", or a habit

The files of an update are counted while the lab of `tests/finetune/loop` runs one, and the objects in a run of `train`,
so this needs the extra `train`. The tables of docs/project/measurements.md come from here.
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
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FLOORS = ("tapes", "envs", "agents", "finetune", "cli")
MANY = 8
"""Parameters from which a function is counted."""

COMMENTED = ("finetune/loop/", "finetune/objective/", "finetune/trainer/")
"""The rooms that an update passes through, whose comments are counted apart."""


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


def upward(sources: Sources) -> list[str]:
    """The strings of `tapes` and `agents` that name something of a floor above: a setting or a verb.

    A setting is a group of `TrainConfig` with one of its fields, as `loop.max_lag`. The groups that a class of `agents`
    has too, as `engine`, count only in `tapes`. A verb is the name of a command, as `tapereel verify`. Docstrings don't
    count.
    """
    classes = sources.derived({"Config"})
    own = {id(node) for name, tree in sources.package.items() if name.startswith("agents/") for node in tree.body}

    def fields(nodes: list[ast.ClassDef]) -> set[str]:
        lines = [line for node in nodes for line in node.body if isinstance(line, ast.AnnAssign)]
        return {ast.unparse(line.target) for line in lines if "ClassVar" not in ast.unparse(line.annotation)}

    known = fields(classes)
    groups = fields([node for node in classes if node.name == "TrainConfig"])
    lower = fields([node for node in classes if id(node) in own])
    verbs = next(
        ast.literal_eval(line.value)
        for line in sources.package["cli/command.py"].body
        if isinstance(line, ast.AnnAssign) and line.value is not None and ast.unparse(line.target) == "VERBS"
    )
    found = []
    for floor, named in (("tapes", groups), ("agents", groups - lower)):
        above = re.compile(
            rf"\b(?:{'|'.join(sorted(named))})\.(?:{'|'.join(sorted(known))})\b|\btapereel (?:{'|'.join(verbs)})\b"
        )
        for name, tree in sources.package.items():
            if name.startswith(f"{floor}/"):
                said = {id(line.value) for node in ast.walk(tree) for line in _body(node) if isinstance(line, ast.Expr)}
                for node in ast.walk(tree):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                        found += [f"{name}:{node.lineno} {match}" for match in above.findall(node.value)[:1]]
    return found


def _body(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", None)
    return body if isinstance(body, list) else []


UPDATE = """
import json, sys, tempfile, threading
from pathlib import Path
root = sys.argv[1] + "/"
seen, changes, last = set(), [0, 0], [None]
def note(frame, event, argument):
    file = frame.f_code.co_filename
    ours = file.startswith(root) and frame.f_code.co_name[0] != "<"
    if event == "call" and ours:
        seen.add(file.removeprefix(root))
        if last[0] is None and frame.f_code.co_qualname == "History.update":
            last[0] = file
        elif last[0] is not None:
            changes[0] += last[0] != file
            changes[1] += last[0].rpartition("/")[0] != file.rpartition("/")[0]
            last[0] = file
    elif event == "return" and frame.f_code.co_qualname == "History.update":
        last[0] = None
from tapereel.tests.finetune.loop import lab
threading.setprofile(note)
sys.setprofile(note)
lab.run(Path(tempfile.mkdtemp()) / "run", lab.settings_of(updates=1, max_lag=0))
sys.setprofile(None)
files = sorted(file for file in seen if file.partition("/")[0] != "tests")
print(json.dumps({"counts": {"files": len(files), "changes": changes[0], "room changes": changes[1]}}))
"""

"""Runs one update of the lab, from the empty store to its last record.

Counts the files of which a function runs, and how often consecutive Python calls below `History.update` are in
different files (and rooms).
"""

OBJECTS = """
import gc, json, sys, tempfile
from functools import partial
from pathlib import Path
from types import CellType, FunctionType, MethodType
import torch
import tapereel as tr
from tapereel.finetune.loop.loop import Loop
from tapereel.finetune.trainer.trainer import Trainer
sys.path.insert(0, sys.argv[1] + "/examples")
import digits
torch.set_num_threads(1)
folder = Path(tempfile.mkdtemp())
digits.save_model(folder / "model")
FOLLOWED = (dict, list, tuple, set, CellType, FunctionType, MethodType, partial)

def ours(one):
    return type(one).__module__.startswith("tapereel.finetune.") and not isinstance(one, torch.nn.Module)

def parts(one):
    if isinstance(one, FunctionType):
        return one.__closure__ or ()
    return gc.get_referents(one)

def count(loop):
    edges, kept, waiting = {}, {id(loop): loop}, [loop]
    while waiting:
        one = waiting.pop()
        found = [part for part in parts(one) if ours(part) or isinstance(part, (*FOLLOWED, torch.nn.Module))]
        edges[id(one)] = set(map(id, found))
        for part in found:
            if id(part) not in kept:
                kept[id(part)] = part
                if not isinstance(part, torch.nn.Module):
                    waiting.append(part)
    [model] = {id(one.model) for one in kept.values() if isinstance(one, Trainer)}
    holding = {key for key, found in edges.items() if model in found}
    holding |= {key for key, found in edges.items() if any(key in holding and type(kept[key]) is dict for key in found)}
    leading, more = set(), {model}
    while more:
        leading |= more
        more = {key for key, found in edges.items() if key not in leading and found & leading}
    return [sorted(type(kept[key]).__name__ for key in keys if ours(kept[key])) for keys in (holding, leading)]

run = Loop.run
async def watched(self):
    await run(self)
    holding, nested = count(self)
    print(json.dumps({"counts": {"holding": holding, "nested": nested}}))
Loop.run = watched
settings = {"loop.groups": 2, "loop.group_size": 4, "loop.sampling.max_tokens": 1, "evaluation.fraction": 0}
model = str(folder / "model")
tr.train(digits.player, digits.Digits, digits.tasks(), model, updates=1, out=folder / "run", settings=settings)
"""
"""Runs one update of `train`, and then follows the attributes of its `Loop`, and the objects that methods and functions
among them are bound to.

Names the objects of `finetune` that have the trained model as an attribute, and those that lead to it.
"""


def measured(root: Path, script: str) -> dict[str, Any]:
    """The counts that `script` prints about a checkout. None, with the reason on stderr, if it can't be run."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder).resolve() / "tapereel"  # the checkout's folder may have another name
        package.symlink_to(root.resolve())
        env = {**os.environ, "PYTHONPATH": folder, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        command = [sys.executable, "-c", script, str(package)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode:
        print(f"The update can't be run:\n{done.stderr}", file=sys.stderr)
        return {}
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"counts"')))["counts"]


def comments(sources: Sources, *below: str) -> tuple[int, int]:
    """(lines that are a comment, all lines) of the modules whose names begin with one of `below`."""
    lines = [
        line.strip() for name in sources.package if name.startswith(below) for line in sources.text(name).splitlines()
    ]
    return sum(line.startswith("# ") and "type: ignore" not in line for line in lines), len(lines)


def deep_imports(sources: Sources) -> tuple[int, int]:
    """(names that tests import from a module inside a room or floor, all names that tests import from the package).

    The others come from the `__init__` of a room or floor, so that they stay when a module is renamed or moved."""
    deep = every = 0
    for tree in sources.tests.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tapereel."):
                path = "/".join(str(node.module).split(".")[1:])
                if path.startswith(FLOORS):
                    modules = {f"{path}.py", *(f"{path}/{one.name}.py" for one in node.names)}
                    every += len(node.names)
                    deep += len(node.names) if f"{path}.py" in sources.package else len(modules & {*sources.package})
    return deep, every


def counts(root: Path) -> dict[str, object]:
    """Every count of a checkout."""
    sources = Sources(root)
    modules = [name for name in sources.package if "/" in name and not name.endswith("__init__.py")]
    rooms = Counter(name.rpartition("/")[0] for name in modules)
    sizes = [number for number, _ in functions(sources)]
    update, objects = measured(root, UPDATE), measured(root, OBJECTS)
    fields, classes = settings(sources)
    commented, lines = comments(sources, *COMMENTED)
    inside, every = deep_imports(sources)
    return {
        "modules": len(sources.package),
        "lines of package": sources.lines(sources.package),
        "lines of tests": sources.lines(sources.tests),
        "statements": sum(isinstance(n, ast.stmt) for tree in sources.package.values() for n in ast.walk(tree)),
        "comments": comments(sources, "")[0],
        "comments per 1,000 lines of loop, trainer and objective": round(1000 * commented / lines, 1),
        "rooms": len(rooms),
        "modules in the fullest room": max(rooms.values()),
        "rooms of finetune": sum(name.startswith("finetune/") for name in rooms),
        "objects that hold the trained model": objects.get("holding"),
        "objects nested for one update": objects.get("nested"),
        "files executed by one update": update.get("files"),
        "changes of file inside History.update": update.get("changes"),
        "changes of room inside History.update": update.get("room changes"),
        "places where tapes and agents name a floor above": len(upward(sources)),
        f"functions with {MANY} or more parameters": sum(size >= MANY for size in sizes),
        "the same functions, with ** as one parameter": sum(n >= MANY for n, _ in functions(sources, by_key=False)),
        "largest number of parameters": sizes[0],
        "settings": fields,
        "settings classes": classes,
        "exception classes": exceptions(sources),
        "imports of tests that name a module inside a room, %": round(100 * inside / every, 1),
        "tests that pin wording": len(pins(sources)),
        "habits per 10,000 lines of package (times the highest anchor)": habits(sources),
    }


def places(root: Path, name: str) -> Iterator[str]:
    """The places that one count is made of."""
    sources = Sources(root)
    if name in ("pins", "upward"):
        yield from {"pins": pins, "upward": upward}[name](sources)
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
    parser.add_argument(
        "--places", choices=["pins", "parameters", "upward", *HABITS], help="list the places of one count"
    )
    args = parser.parse_args()
    if args.places:
        print(*places(args.root, args.places), sep="\n")
    else:
        print(json.dumps(counts(args.root), indent=2))


if __name__ == "__main__":
    main()
