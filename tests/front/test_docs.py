"""The documents do what they say: Python blocks run, command lines parse, links lead somewhere.

A fence ```python runs with those before it in the same file; a fence ```text right after one is what it prints. In a
fence ```bash every line that calls `tapereel` must be one that the command takes.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import multiprocessing
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from tapereel.cli import command as cli
from tapereel.tests.front import snippets, sources

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    *sorted(ROOT.glob("docs/**/*.md")),
]

WHOLE = {"hello.md", "your_own_task.md", "pretrained_model.md", "reward_does_not_climb.md"}
"""Pages whose commands run too, in order with their Python, as a reader follows them."""


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


class Fence(NamedTuple):
    language: str
    line: int
    """Of the opening fence, counted from 1."""
    body: str
    follows: bool
    """True when only blank lines stand between the fence before and this one."""


def fences(text: str) -> Iterator[Fence]:
    """The fenced blocks of a Markdown text."""
    language, start, body, quiet = "", 0, [], False
    for number, line in enumerate(text.splitlines(), start=1):
        mark = re.match(r"\s*```(?!`)(\S*)\s*$", line)
        if mark and not start:
            language, start, body = mark[1], number, []
        elif mark:
            yield Fence(language, start, "\n".join(body), quiet)
            start, quiet = 0, True
        elif start:
            body.append(line)
        elif line.strip():
            quiet = False


def _blocks(path: Path) -> list[snippets.Block]:
    """(line, language, code, what it prints or None) of each block that a reader runs or saves."""
    runs = ("python", "yaml", "bash") if path.name in WHOLE else ("python",)
    blocks: list[snippets.Block] = []
    before = ""
    for fence in fences(path.read_text(encoding="utf-8")):
        if fence.language in runs:
            blocks.append((fence.line, fence.language, fence.body, None))
        elif fence.language == "text" and fence.follows and before == "python":
            blocks[-1] = (*blocks[-1][:3], fence.body)
        before = fence.language
    return blocks


def _commands(path: Path) -> Iterator[list[str]]:
    for fence in fences(path.read_text(encoding="utf-8")):
        if fence.language in ("bash", "sh", "console"):
            for line in fence.body.replace("\\\n", " ").splitlines():
                for part in re.split(r"&&|\||;", line.removeprefix("$ ")):
                    words = shlex.split(part, comments=True)
                    if words and Path(words[0]).name == "tapereel":
                        yield words[1:]


# Each document is a fork of a process that has imported what every document and conftest.py import.
FORKS = multiprocessing.get_context("forkserver")
SHARED = ["tapereel.tests.front.snippets", "pytest", "hypothesis"]
FORKS.set_forkserver_preload(SHARED)


@pytest.fixture(scope="module")
def imported() -> None:
    """The process also has what most documents import: torch and the rooms of training."""
    FORKS.set_forkserver_preload([*SHARED, "tapereel.finetune.run.train_run", "tapereel.agents.gateway"])


def played(folder: Path, *blocks: snippets.Block) -> tuple[int | None, str]:
    """(exit code, what was printed) of the blocks, which run in `folder`."""
    process = FORKS.Process(target=snippets.play, args=(blocks, folder, folder / "printed"))
    process.start()
    process.join()
    return process.exitcode, (folder / "printed").read_text()


@pytest.mark.docs
@pytest.mark.usefixtures("imported")
@pytest.mark.timeout(900)  # the tutorial trains
@pytest.mark.parametrize("path", [p for p in DOCUMENTS if _blocks(p)], ids=_name)
def test_the_python_of_a_document_runs_and_prints_what_it_says(path: Path, tmp_path: Path):
    code, printed = played(tmp_path, *_blocks(path))
    assert code == 0, printed


@pytest.mark.docs
def test_a_type_checker_accepts_the_readmes_first_programs(tmp_path: Path):
    """Found by its name, as in site-packages. openai's types refuse the dicts that its documentation shows."""
    (tmp_path / "tapereel").symlink_to(ROOT)
    code = [body for _, _, body, _ in _blocks(ROOT / "README.md") if "openai" not in body and "unchanged" not in body]
    (tmp_path / "program.py").write_text("\n".join(code))
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"include": ["program.py"]}))
    words = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.endswith("0 errors, 0 warnings, 0 informations\n"), done.stdout


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_the_command_lines_of_a_document_parse(path: Path):
    for words in _commands(path):
        if words and words[0] in cli.VERBS:
            cli.verb_parser(words[0]).parse_args(words[1:])
        else:
            cli._top_parser().parse_args(words)


def test_the_runs_on_several_gpus_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Their commands with `--dry-run`, once without the model, and once with a model of its shape."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    shape = dict(zip(names, (2560, 36, 32, 8, 9728), strict=True)) | {"head_dim": 128, "vocab_size": 151_936}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    text = (ROOT / "docs" / "how-to" / "several_gpus.md").read_text(encoding="utf-8").replace("\\\n", " ")
    runs = re.findall(r"torchrun --nproc-per-node (\d) -m tapereel\.cli (train .*)", text)
    assert [ranks for ranks, _ in runs] == ["4", "8", "8"]
    monkeypatch.chdir(ROOT)
    for ranks, command in runs:
        monkeypatch.setenv("WORLD_SIZE", ranks)
        words = [*shlex.split(command.replace("$resume", "--resume")), "--dry-run"]
        assert cli.main(words) == 0
        assert "# at most: unknown, because models/qwen isn't on this machine" in capsys.readouterr().out
        assert cli.main([*words, "--set", f"engine.model={tmp_path}", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["engine"]["kind"], found["trainer"]["lora"], found["processes"]["shard"]) == ("vllm", None, True)
        assert found["estimate"]["GiB"]["sum"] < 80
        (said,) = re.findall(r"at most (\d+) GiB", text)
        assert ranks == "8" or round(found["estimate"]["GiB"]["sum"]) == int(said)


def _anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = [re.sub(r"\]\([^)]*\)", "", heading) for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_the_links_of_a_document_lead_somewhere(path: Path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.partition("#") for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    assert [page for page, _, _ in targets if page and not (path.parent / page).exists()] == []
    places = [(path.parent / page if page else path, anchor) for page, _, anchor in targets if anchor]
    assert [(page.name, anchor) for page, anchor in places if anchor not in _anchors(page)] == []


def test_every_page_has_one_place_in_the_navigation_of_the_site():
    def leaves(entry: object) -> Iterator[str]:
        match entry:
            case str():
                yield entry
            case dict():
                yield from (leaf for below in entry.values() for leaf in leaves(below))
            case list():
                yield from (leaf for below in entry for leaf in leaves(below))

    places = list(leaves(tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]))
    assert sorted(places) == sorted([*map(_name, DOCUMENTS), "examples/README.md"]), "see nav in zensical.toml"


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / "docs" / name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_reference_is_current(monkeypatch: pytest.MonkeyPatch):
    generate = _script("reference/generate.py")
    monkeypatch.setenv("COLUMNS", generate.WIDTH)
    pages = generate.pages()
    assert {"settings.md", "records.md", "verbs.md", "errors.md", "api/tapereel.md"} <= set(pages)
    stale = [name for name, text in pages.items() if (generate.FOLDER / name).read_text(encoding="utf-8") != text]
    assert stale == [], "run python docs/reference/generate.py"


MADE = re.compile(r"<!-- made by.*?<!-- until here -->|```.*?```", re.DOTALL)
"""The parts of a page that a script writes, and its code."""


@pytest.mark.parametrize(("part", "most"), [("guide", 30_000), ("project", 20_000)])
def test_a_reader_can_finish_the_pages(part: str, most: int):
    """The guide is every page of docs/ outside of docs/project that nobody generates. Its code isn't counted."""
    note = _script("reference/generate.py").NOTE
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/**/*.md"))}
    words = {
        _name(path): len(re.findall(r"\S*\w\S*", MADE.sub("", text)))
        for path, text in texts.items()
        if (part == "project") == path.is_relative_to(ROOT / "docs" / "project") and note not in text
    }
    longest = sorted(words, key=lambda name: -words[name])[:5]
    total = sum(words.values())
    assert 0 < total <= most, f"shorten the longest: {', '.join(f'{n} ({words[n]:,})' for n in longest)}"


BUILT = """<head>{}</head><body><a href="https://example.org">out</a> <a href="#here">here</a>
<img src="data:image/png;base64,AA"> <a href="../other/">a page</a>{}</body>"""


@pytest.mark.parametrize(
    ("head", "body", "wrong"),
    [
        ("", "", []),
        ('<link rel="stylesheet" href="../x.css">', "<img src='/x.css?v=1#a'>", []),
        ('<link href="https://fonts.example.org/x.css">', "", ["<link> fetches https://fonts.example.org/x.css"]),
        ('<script src="//cdn.example.org/x.js"></script>', "", ["<script> fetches //cdn.example.org/x.js"]),
        ("", '<img src="http://example.org/x.png">', ["<img> fetches http://example.org/x.png"]),
        ("", '<img src="gone.png"><a href="../gone/">', ["<img> leads to gone.png", "<a> leads to ../gone/"]),
    ],
)
def test_a_built_site_may_fetch_nothing_from_other_hosts(tmp_path: Path, head: str, body: str, wrong: list[str]):
    for name, text in {"page": BUILT.format(head, body), "other": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").write_text(text)
    (tmp_path / "x.css").write_text('a { background: url(data:image/svg+xml;x) } b { background: url("x.png") }')
    problems = _script("build.py").problems
    found = [problem.split(": ", 1)[1] for problem in problems(tmp_path)]
    assert [a.startswith(b) for a, b in zip(found, wrong, strict=True)] == [True] * len(wrong), found
    (tmp_path / "x.css").write_text("@import 'https://fonts.example.org/y.css';")
    assert problems(tmp_path)[-1] == "x.css: fetches https://fonts.example.org/y.css from another host"


def test_the_pages_that_code_names_exist():
    """In comments and docstrings by their path, and in messages joined to `DOCS`."""
    named: dict[str, str] = {}
    for folder, suffix in itertools.product((*sources.FLOORS, "tests", "benchmarks", "examples"), ("py", "yaml")):
        for path in ROOT.glob(f"{folder}/**/*.{suffix}"):
            text = path.read_text(encoding="utf-8")
            parts = re.findall(r"""\bDOCS((?: / ["'][\w.-]+["'])+)""", text)
            pages = [re.sub(r"""[ "']""", "", part).removeprefix("/") for part in parts]
            pages += re.findall(r"(?<![\w/])docs/([\w/-]+\.(?:md|png))", text)
            named |= dict.fromkeys(pages, _name(path))
    assert {"reference/cli.md", "reference/metrics.md", "tutorials/reward_does_not_climb.md"} <= set(named)
    assert {page: path for page, path in named.items() if not (ROOT / "docs" / page).is_file()} == {}


@pytest.mark.parametrize(
    ("heading", "ends"),
    [
        ("### Run it", '".[demo]" && .venv/bin/tapereel demo'),
        ("### Test it", '-e ".[dev]" && .venv/bin/python -m pytest -n 2 --dist loadfile'),
    ],
)
def test_the_readme_has_two_commands_that_start_from_nothing(heading: str, ends: str):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count(f"\n{heading}\n") == 1
    section = text.split(f"\n{heading}\n")[1].split("\n#")[0]
    (fence,) = fences(section)
    assert fence.body == f"python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt {ends}"


def test_ci_runs_the_commands_that_the_readme_gives():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (function,) = re.findall(r"^command_under\(\) \{\n.*?^\}$", script, flags=re.MULTILINE | re.DOTALL)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for part, heading in {"run": "### Run it", "suite": "### Test it"}.items():
        words = ["bash", "-c", f'{function}\ncommand_under "{heading}"']
        found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        (fence,) = fences(readme.split(f"\n{heading}\n")[1].split("\n#")[0])
        assert found == fence.body + "\n"
        (bare,) = re.findall(rf'\npart {part} \.ci/bare "\$fresh/machine" bash -ec "\$(\w+)"\n', script)
        assert f'{bare}=$(command_under "{heading}")' in script
    assert subprocess.run(["bash", "-n", ROOT / ".ci" / "run"]).returncode == 0


def test_every_mark_of_a_slow_part_has_its_turn_in_ci():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (left_out,) = re.findall(r"-m '([^']*)'", project)
    marks = re.findall(r"not (\w+)", left_out)
    assert f"for mark in {' '.join(marks)}; do" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_a_fence_is_found_with_its_line_and_its_output():
    text = "a\n```python\nx = 1\n```\n\n```text\n1\n```\nb\n```text\n2\n```\n"
    assert list(fences(text)) == [
        Fence("python", 2, "x = 1", False),
        Fence("text", 6, "1", True),
        Fence("text", 10, "2", False),
    ]


MINE = """# mine.py
import tapereel as tr


class One(tr.Environment):
    async def reset(self, task):
        return "1?"

    async def step(self, action):
        return tr.Outcome(reward=float(action.text), terminated=True)


agent, tasks = tr.ChatAgent(), [1]
"""


def test_the_blocks_of_a_page_run_in_order_and_a_failed_command_fails_it(tmp_path: Path):
    rolls = "tapereel run --agent mine.py:agent --env mine.py:One --tasks mine.py:tasks --out seen \\\n"
    rolls += "    --set engine.answers='[\"7\"]'"
    read = (7, "python", "import tapereel as tr\nprint(*[tape.reward for tape in tr.open('seen')])", "7.0")
    code, printed = played(tmp_path, (1, "python", MINE, None), (4, "bash", rolls, None), read)
    assert code == 0, printed
    for command in ("tapereel show nowhere", "ls"):
        code, printed = played(tmp_path, (3, "bash", command, None))
        assert code == 1
        assert f"line 3: `{command}`" in printed
    code, printed = played(tmp_path, (3, "python", "print(2)", "3"))
    assert code == 1
    assert "line 3: the document says" in printed
