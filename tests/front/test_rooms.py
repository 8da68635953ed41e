"""The floor plan: few modules in a room, imports one way between rooms, no circle, no file name twice."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from . import sources
from .sources import FLOORS, ROOT, files

MOST = 15
"""Modules in one folder, its `__init__` not counted."""

PLAIN_WORDS = {
    "grpo": "finetune/recipes/grpo.py",
    "loss": "finetune/objective/loss.py",
    "baseline": "finetune/objective/baseline.py",
    "recipe": "finetune/objective/recipe.py",
    "rows": "finetune/data/rows.py",
    "staleness": "finetune/loop/staleness.py",
    "trainer": "finetune/trainer/trainer.py",
    "checkpoint": "finetune/trainer/checkpoint.py",
    "distributed": "finetune/trainer/distributed.py",
    "schedule": "finetune/trainer/schedule.py",
    "metrics": "finetune/loop/metrics.py",
    "rollout": "agents/episode/rollout.py",
    "limits": "agents/episode/limits.py",
    "clock": "agents/episode/clock.py",
    "replay": "agents/replay/replayer.py",
    "pass_at_k": "agents/runs/pass_at_k.py",
    "judge": "agents/runs/judge.py",
    "sampler": "agents/engines/embedded/sampler.py",
    "kv_cache": "agents/engines/embedded/kv_cache.py",
    "vllm": "agents/engines/servers/vllm.py",
    "weight_sync": "agents/engines/weights/weight_sync.py",
    "lease": "tapes/store/lease.py",
    "gateway": "agents/gateway/gateway_server.py",
    "sandbox": "envs/adapters/sandbox.py",
    "reward": "envs/rewards/sources.py",
    "recovery": "tapes/store/recovery.py",
}
"""What a newcomer looks for -> the file; the word stands in the file's path."""


def room(name: str) -> str:
    """The folder of a module. The `__init__` of a floor is its face: it may import every room of its floor."""
    folder = name.rpartition("/")[0]
    return f"{folder} (face)" if name == f"{folder}/__init__.py" and folder in FLOORS else folder


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """module -> modules of the package that it imports, wherever in the file, also for type checkers alone."""
    return {name: frozenset(_imports(name)) for name in files()}


def _imports(name: str) -> Iterator[str]:
    for found in sources.imports(name):
        if not found.level:
            continue
        stem = "/".join(found.module.split(".")[1:])
        paths = [f"{stem}.py", f"{stem}/{found.name}.py", f"{stem}/{found.name}/__init__.py", f"{stem}/__init__.py"]
        target = next((path for path in paths if path in files()), None)
        if target is not None and target != name:
            yield target


def circles(edges: Mapping[str, frozenset[str]]) -> list[list[str]]:
    """Strongly connected parts of more than one node, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for target in edges.get(node, frozenset()):
            if target not in number:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], number[target])
        if lowest[node] == number[node]:
            part = [stack.pop()]
            while part[-1] != node:
                part.append(stack.pop())
            if len(part) > 1:
                found.append(sorted(part))

    for node in edges:
        if node not in number:
            visit(node)
    return found


def modules() -> list[str]:
    """Every module that is no `__init__`."""
    return [name for name in files() if not name.endswith("__init__.py")]


def test_a_room_has_few_modules():
    sizes = Counter(map(room, modules()))
    assert {name: size for name, size in sizes.items() if size > MOST} == {}


def test_imports_between_rooms_run_one_way():
    edges: dict[str, set[str]] = defaultdict(set)
    for name, targets in imports().items():
        edges[room(name)] |= {room(target) for target in targets} - {room(name)}
    assert circles({name: frozenset(targets) for name, targets in edges.items()}) == []


def test_floors_are_imported_downwards():
    wrong = [
        f"{name} imports {target}"
        for name, targets in imports().items()
        for target in targets
        if FLOORS.index(target.split("/")[0]) > FLOORS.index(name.split("/")[0])
    ]
    assert wrong == []


def test_no_files_import_each_other_in_a_circle():
    assert circles(imports()) == []


def test_no_file_name_stands_twice():
    names = Counter(name.rpartition("/")[2] for name in modules() if not name.endswith("__main__.py"))
    assert [name for name, times in names.items() if times > 1] == []


def test_a_plain_word_finds_its_file():
    assert [word for word, path in PLAIN_WORDS.items() if word not in path and word not in Path(path).parts] == []
    assert [path for path in PLAIN_WORDS.values() if path not in files()] == []


def test_every_room_says_what_it_is_for():
    """A folder of the package describes itself: what is in it, and what it may import."""
    short = []
    for name in files():
        if name.endswith("__init__.py"):
            text = ast.get_docstring(sources.outline(name)) or ""
            if len(text.split()) < 8:
                short.append(name)
    assert short == []


def test_the_architecture_page_names_every_room():
    text = (ROOT / "docs" / "project" / "architecture.md").read_text(encoding="utf-8")
    tree = text.split("```")[3].split()
    rooms = {name.rpartition("/")[0] for name in files()} - {""}
    assert {room for room in rooms if f"{room.rpartition('/')[2]}/" not in tree} == set()


def test_the_circle_finder_finds_circles():
    edges = {"a": frozenset("b"), "b": frozenset("c"), "c": frozenset("a"), "d": frozenset("a")}
    assert circles(edges) == [["a", "b", "c"]]
    assert circles({"a": frozenset("b"), "b": frozenset()}) == []


def test_tests_mirror_the_rooms():
    """A folder of tests below a floor is named as a room of that floor, or holds data of such a folder."""
    rooms = {name.rpartition("/")[0] for name in files()}
    folders = {
        str(path.parent.relative_to(ROOT / "tests"))
        for floor in FLOORS
        for path in (ROOT / "tests" / floor).rglob("test_*.py")
    }
    assert sorted(folders - rooms) == []
