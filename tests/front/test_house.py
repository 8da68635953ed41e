"""The house rules that a reader can't see in any one file: packages, directions of imports, sizes, and what is lazy."""

from __future__ import annotations

import ast
import importlib
import itertools
import json
import re
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import tapereel
from benchmarks.house_places import groups, places, verbs
from tapereel.cli.remedies import REMEDIES
from tapereel.tapes.common.extras import extra_of

from ..contract import extras
from .sources import FLOORS, ROOT, imports, length, outline, text

ORDER = FLOORS[: FLOORS.index("cli")]
"""The floors that another one may import."""
HEAVY = {"torch", "transformers", "litellm", "vllm", "accelerate", "datasets", "pandas"}
LONGEST = 450
"""Statements of a file. Docstrings and comments don't count, so that the limit shortens no explanation."""


def _sources(*folders: str) -> Iterator[str]:
    for folder in folders:
        yield from sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py"))


def _modules() -> list[str]:
    return ["__init__.py", *_sources(*FLOORS)]


def _python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=cwd, capture_output=True, text=True)


def test_the_packages_in_pyproject_are_the_packages_in_the_tree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = project["tool"]["setuptools"]["packages"]
    inside = [p.parent.relative_to(ROOT) for folder in FLOORS for p in (ROOT / folder).rglob("__init__.py")]
    assert sorted(declared) == sorted(["tapereel", *(".".join(["tapereel", *p.parts]) for p in inside)])
    loose = {name for name in _sources(*FLOORS) if not (ROOT / name).with_name("__init__.py").is_file()}
    assert loose == set(), "modules in folders without __init__.py would be missing from a wheel"


def test_the_wheel_holds_the_pages_and_the_examples():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    data = project["tool"]["setuptools"]["package-data"]["tapereel"]
    packed = {path for pattern in data for path in ROOT.glob(pattern)}
    wanted = {path for path in (ROOT / "examples").iterdir() if path.is_file()}
    wanted |= {path for path in ROOT.glob("docs/**/*") if path.suffix in (".md", ".png")}
    assert wanted - packed == set()
    assert ROOT / "README.md" in packed, "pages link to it"


def test_the_sdist_holds_every_file_of_the_checkout():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout")
    rules = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    named = {name for rule, *names in filter(None, rules) if rule in ("graft", "include") for name in names}
    always = {"README.md", "LICENSE", "MANIFEST.in", "pyproject.toml", "__init__.py", "__main__.py", "py.typed"}
    assert {name.split("/")[0] for name in listed.stdout.split()} - {*FLOORS, *always} == named


def test_imports_run_one_way():
    wrong = []
    for name in _modules():
        home = name.split("/")[0]
        allowed = ORDER[: ORDER.index(home) + 1] if home in ORDER else FLOORS
        for found in imports(name):
            top, _, rest = found.dotted.partition(".")
            if top in ORDER or (top == "tapereel" and rest.split(".")[0] not in allowed and home in ORDER):
                wrong.append(f"{name}:{found.line} imports {found.dotted}")
    assert wrong == []


def test_inside_the_package_imports_are_relative():
    wrong = [
        f"{name}:{found.line}"
        for name in _modules()
        for found in imports(name)
        if not found.level and found.module.split(".")[0] == "tapereel"
    ]
    assert wrong == [], "write `from ..tapes import Tape`"


def test_tapes_and_environments_know_no_models():
    models = {"torch", "transformers", "litellm", "vllm"}
    # A reward model of transformers is loaded when it is asked, and a GGUF file is read in a process of its own.
    lazily = {"envs/rewards/local_models.py", "tapes/common/hub.py"}
    wrong = [
        f"{name}:{found.line} imports {found.dotted}"
        for name in _sources("tapes", "envs")
        if name not in lazily
        for found in imports(name)
        if found.dotted.split(".")[0] in models
    ]
    assert wrong == []


LIGHT = {
    "tapereel": {"pydantic", "numpy", "rich", "yaml"},
    "tapereel.tapes": {"numpy", "rich", "yaml"},
    "tapereel.cli": {"numpy", "rich", "yaml"},
    "tapereel.envs": {"gymnasium", "reasoning_gym"},
    "tapereel.agents": set(),
}
"""Module -> what neither it nor one above it in this table may import, in addition to `HEAVY`."""


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Module -> all loaded modules after importing it in one process, in order: each entry includes the one before."""
    code = f"""
import importlib, json, sys
loaded = {{}}
for module in {list(LIGHT)}:
    importlib.import_module(module)
    loaded[module] = sorted(sys.modules)
print(json.dumps(loaded))
"""
    done = _python(code, tmp_path_factory.mktemp("imported"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("module", LIGHT)
def test_importing_stays_light(module: str, imported: dict[str, list[str]]):
    assert set(imported[module]) & (HEAVY | LIGHT[module]) == set()


@pytest.mark.parametrize("folder", ORDER)
def test_a_folder_imported_as_a_top_level_package_is_refused_with_a_sentence(folder: str):
    done = _python(f"import {folder}", ROOT)
    assert done.returncode != 0
    assert f"ImportError: import tapereel.{folder}" in done.stderr


def _all_files() -> list[str]:
    return [*_modules(), *_sources("tests", "examples", "benchmarks", "docs")]


def test_a_file_is_one_idea():
    lengths = {name: length(text(name)) for name in _all_files()}
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}, "a file this long is two ideas"


def test_explanations_do_not_count_as_length():
    code = '"""A module."""\nx = 1\n"""A value."""\n\n\ndef f(): # why\n    """What."""\n    return x\n'
    assert length(code) == 3


def test_tapes_and_agents_name_no_setting_and_no_command_of_an_upper_floor():
    assert list(places(ROOT)) == [], "give the remedy by its key: `remedy` in tapes/errors.py"


def test_a_setting_and_a_command_of_an_upper_floor_are_found(tmp_path: Path):
    for name in ("finetune/run/train_config.py", "cli/command.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text(name))
    (tmp_path / "tapes").mkdir()
    (tmp_path / "tapes" / "a.py").write_text(
        '"""Read\ntapereel verify RUN."""\nx = f"set {y} loop.updates=3"\nz = loop.updates\nu = "the tape train"\n'
    )
    assert [place.split(" ")[0] for place in places(tmp_path)] == ["tapes/a.py:2:", "tapes/a.py:3:"]
    assert {"loop", "trainer", "warm", "evaluation", "processes"} <= set(groups(ROOT))
    assert {"verify", "train", "import"} <= set(verbs(ROOT))


def test_each_remedy_has_words_and_each_word_a_remedy():
    found = {
        node.args[0].value
        for path in _modules()
        for node in ast.walk(ast.parse(text(path)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("remedy", "self._times", "_name_of")
        if isinstance(node.args[0], ast.Constant)
    }
    assert found == set(REMEDIES)


def test_every_module_says_what_it_is():
    begins = re.compile(r'(#.*\n|\s)*r?"""\s*[^\s"]')
    assert [name for name in _all_files() if text(name).strip() and not begins.match(text(name))] == []


def test_every_public_function_is_typed():
    bare = [
        f"{path}:{line} {name}({', '.join(args)})"
        for path in _modules()
        for name, line, args in _untyped(outline(path).body)
    ]
    assert bare == []


def _untyped(body: list[ast.stmt]) -> Iterator[tuple[str, int, list[str]]]:
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _untyped(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            signature = node.args
            given = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs, signature.vararg, signature.kwarg]
            bare = [a.arg for a in given if a is not None and a.annotation is None and a.arg not in ("self", "cls")]
            if bare or node.returns is None:
                yield node.name, node.lineno, bare


def test_no_public_signature_has_any():
    loose = [
        f"{path}:{line} {name}: {annotation}"
        for path in _modules()
        for name, line, annotation in _annotations(outline(path).body)
        if re.search(r"\bAny\b", annotation)
    ]
    assert loose == [], "name the type: a Protocol, a TypeVar, a TypedDict, JsonValue, object"


def test_an_any_in_a_signature_is_found():
    code = """
def plain(x: Any) -> int: ...
async def late() -> list["Any"]: ...
def _private(x: Any): ...
def rest(*args: int, **options: dict[str, t.Any]): ...
class Open:
    def __init__(self, x: Any): ...
    def __call__(self) -> Any: ...
    def _own(self, x: Any): ...
    @property
    def value(self) -> "Any": ...
class _Closed:
    def method(self, x: Any): ...
if True:
    def AnyOther(x: AnyThing) -> Any: ...
"""
    found = [name for name, _, annotation in _annotations(ast.parse(code).body) if re.search(r"\bAny\b", annotation)]
    assert found == ["plain", "late", "rest", "__init__", "__call__", "value", "AnyOther"]


def _annotations(body: list[ast.stmt]) -> Iterator[tuple[str, int, str]]:
    """(function, line, annotation) of every parameter and result of the public functions, methods, constructors."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _annotations(node.body)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            yield from _annotations([inner for inner in ast.iter_child_nodes(node) if isinstance(inner, ast.stmt)])
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            not node.name.startswith("_") or node.name in ("__init__", "__call__")
        ):
            given = [part.annotation for part in ast.walk(node.args) if isinstance(part, ast.arg)]
            yield from ((node.name, node.lineno, ast.unparse(a)) for a in (*given, node.returns) if a is not None)


@pytest.mark.parametrize("module", ["tapereel", *(f"tapereel.{folder}" for folder in ORDER)])
def test_each_public_name_exists_and_there_are_few(module: str):
    package = importlib.import_module(module)
    names = package.__all__
    assert len(names) == len(set(names)) <= 32
    assert [name for name in names if not hasattr(package, name)] == []
    assert set(names) <= set(dir(package))


def test_the_front_door_tells_type_checkers_what_it_tells_python():
    (block,) = [
        n for n in outline("__init__.py").body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"
    ]
    inside = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    static = {alias.name: node.module for node in inside for alias in node.names}
    assert static == tapereel._HOME
    assert sorted(tapereel.__all__) == sorted(tapereel._HOME)
    with pytest.raises(AttributeError, match="no attribute 'Taep'"):
        _ = tapereel.Taep  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch.nn", "train"),
        ("reasoning_gym", "demo"),
        ("gymnasium", "gym"),
        ("vllm", "vllm"),
        ("litellm", "litellm"),
        ("aiohttp", "http"),
        ("mcp", "mcp"),
        ("hypothesis", "dev"),
        ("yaml", None),
        ("no_such_package", None),
    ],
)
def test_an_optional_package_belongs_to_an_extra(module: str, extra: str | None):
    assert extra_of(module) == extra


def test_a_name_that_needs_a_missing_package_says_which_extra_brings_it(tmp_path: Path):
    code = """
import sys
sys.modules["torch"] = None
import tapereel
from tapereel.tapes import MissingExtra
for get in (lambda: tapereel.get_recipe, lambda: tapereel.finetune.Trainer):
    try:
        get()
    except MissingExtra as error:
        assert error.extra == "train" and isinstance(error, ImportError)
        print(error)
"""
    done = _python(code, tmp_path)
    assert done.stdout.splitlines() == [
        f"{name} needs the package 'torch', which is not installed: pip install \"tapereel[train]\""
        for name in ("tapereel.finetune.get_recipe", "tapereel.finetune.Trainer")
    ], done.stderr


def test_training_needs_no_package_of_another_extra(tmp_path: Path):
    python, work = extras.alone("train", tmp_path / "environment"), tmp_path / "work"
    work.mkdir()
    done = subprocess.run([python, extras.__file__, "train", work], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _requirements() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line.strip() and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*", pin) for pin in pins), "NAME==VERSION, no local tag"
    return {_canonical(name): version for name, version in (pin.split("==") for pin in pins)}


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_extras_that_the_pages_name_exist():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    named = re.findall(r"tapereel\[([\w,]+)\]", "".join(page.read_text(encoding="utf-8") for page in pages))
    assert {"train", "http", "pictures"} <= {extra for names in named for extra in names.split(",")}
    assert {extra for names in named for extra in names.split(",")} - set(_requirements()) == set()


def test_each_extra_is_tried_with_the_newest_versions():
    script = (ROOT / ".ci" / "newest").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"grep -oP '(.*?)' tests/contract/extras.py", script)
    listed = subprocess.check_output(["grep", "-oP", pattern, "tests/contract/extras.py"], cwd=ROOT, text=True).split()
    assert sorted([*listed, "vllm", "dev", ""]) == sorted(_requirements())
    assert sorted(extras.SMOKES) == sorted(listed)


def test_constraints_pin_all_that_the_dev_extra_installs():
    packaging = pytest.importorskip("packaging.requirements")
    from importlib.metadata import distribution

    pins = _pins()
    assert "vllm" not in pins
    assert "tapereel" not in pins
    seen: set[tuple[str, frozenset[str]]] = set()

    def walk(name: str, extras: frozenset[str]) -> None:
        if (name, extras) in seen:
            return
        seen.add((name, extras))
        if name != "tapereel":
            assert name in pins, f"{name} is installed by the dev extra and has no version in constraints.txt"
        if name == "torch":  # what a GPU build brings along belongs to that build
            return
        for line in distribution(name).requires or ():
            need = packaging.Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                walk(_canonical(need.name), frozenset(need.extras))

    walk("tapereel", frozenset({"dev"}))
    for line in itertools.chain.from_iterable(_requirements().values()):
        need = packaging.Requirement(line)
        if _canonical(need.name) in pins:
            assert need.specifier.contains(pins[_canonical(need.name)]), f"{line} excludes the pinned version"


def test_no_test_can_reach_another_machine():
    with socket.socket() as server, pytest.raises(RuntimeError, match="this machine only"):
        server.connect(("192.0.2.1", 9))
    with pytest.raises(RuntimeError, match="this machine only"):
        socket.getaddrinfo("example.org", 80)


def test_a_test_can_reach_this_machine():
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].close())
        thread.start()
        with socket.create_connection(server.getsockname()) as client:
            assert client.recv(1) == b""
        thread.join()
