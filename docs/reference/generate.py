"""Writes the reference that is generated from code: settings, records, verbs, errors, the path of one update and, for
mkdocstrings, the public names.

python docs/reference/generate.py            write the pages
python docs/reference/generate.py --check    write nothing; the exit code is 1 if a page isn't current
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

if TYPE_CHECKING:
    from tapereel.agents.setup.profiles import Default

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
ROOMS = ("tapes", "envs", "agents", "finetune")
WIDTH = "100"
NOTE = "<!-- Written by `python docs/reference/generate.py` from the code. -->"
ROOTS = {
    "run": "agents.runs.runner.RunConfig",
    "train": "finetune.run.train_config.TrainConfig",
    "branch": "agents.replay.branching.BranchConfig",
    "serve gateway": "agents.gateway.gateway_control.GatewayConfig",
    "demo": "finetune.run.demonstrations.DemoConfig",
    "demo --pictures": "finetune.run.demonstrations.PicturesDemoConfig",
}
"""Verb -> the class of its settings."""
UPDATE = {
    "finetune.loop.loop:Loop._update": (
        "The loop has taken a batch of finished groups. The order of the rest never changes: train, make the records "
        "durable, give the engine the new weights."
    ),
    "finetune.loop.learner:Learner.update": "Each policy of the loop makes its own update.",
    "finetune.loop.history:History.update": (
        "One policy learns from the batch. `source` turns a tape into token rows, and the plan leaves out the tokens "
        "that are too old. The result is the statistics and the `use` records."
    ),
    "finetune.trainer.distributed:Processes.updates": (
        "`on_all` runs `_updates` on every process, and rank 0 joins their statistics. A run of one process has one "
        "share."
    ),
    "finetune.trainer.distributed:Processes._updates": "Each process gets its own share of the batch from rank 0.",
    "finetune.trainer.trainer:Trainer.train_on": (
        "Advantages are computed once for the batch. Then each epoch takes one optimiser step per mini-batch."
    ),
    "finetune.trainer.trainer:Trainer.prepare": (
        "The rows become one stream of tokens with a column for each fact. The other models score it: reference, "
        "teacher and critic."
    ),
    "finetune.objective.loss:prepare": "The objective selects tokens and computes their advantages.",
    "finetune.objective.loss:_advantages": (
        "Four terms of the recipe, in order: the rewards, the baseline that they are compared with, the credit of each "
        "token, and adjustments."
    ),
    "finetune.trainer.trainer:Trainer.step": (
        "The gradient is computed, and the step is taken if all numbers are finite. The critic learns from the same "
        "batch."
    ),
    "finetune.trainer.trainer:Trainer._gradient": "The weights of the tokens are fixed before the first micro-batch.",
    "finetune.trainer.trainer:Trainer._accumulate": (
        "Micro-batch by micro-batch, the model computes log-probs, the objective the loss, and torch the gradient."
    ),
    "finetune.objective.loss:Part.loss": "The loss of a token: the surrogate, and the KL and entropy terms.",
    "finetune.loop.history:History.publish_record": (
        "After the last step, the new weights get a version and a digest. `Loop._update` writes this record with the "
        "others, and then passes the weights to the engine."
    ),
}
"""The functions from tapes to published weights, in the order in which an update first calls them: module:name -> what
to look at."""


def pages() -> dict[str, str]:
    """Path below docs/reference -> text of each generated page."""
    found = {"settings.md": settings(), "records.md": records(), "verbs.md": verbs(), "errors.md": errors()}
    found["one_update.md"] = one_update()
    return found | {f"api/{name}.md": api(name) for name in ("tapereel", *ROOMS)}


def one_update() -> str:
    """The functions of one update, whole."""
    parts, lines = [], 0
    for place, text in UPDATE.items():
        module, name = place.split(":")
        code = _source(module, name)
        lines += code.count("\n") + 1
        path = module.replace(".", "/") + ".py"
        parts += [f"## `{name}`", "", f"[`{path}`](../../{path}): {text}", "", "```python", code, "```", ""]
    top = [
        "# One update",
        "",
        NOTE,
        "",
        f"The path from tapes to published weights is {len(UPDATE)} functions in "
        f"{len({place.split(':')[0] for place in UPDATE})} files. Here they are whole, {lines} lines, in the order in "
        "which an update first calls them. [examples/flat_grpo.py](../../examples/flat_grpo.py) does the same in one "
        "file of plain torch, without records, ranks or critics. [Architecture](../project/architecture.md) shows what "
        "is around it.",
        "",
    ]
    shares = _drawn("finetune.trainer.updates", "How processes share a batch")
    servers = _drawn(
        "agents.engines.servers.connect",
        "After it, `Loop._update` calls the engine's `sync_weights`. How servers become an engine",
    )
    return "\n".join([*top, *shares, *parts, *servers]).rstrip() + "\n"


def _drawn(module: str, text: str) -> list[str]:
    """The drawing of a module, under a line of text."""
    path = module.replace(".", "/") + ".py"
    return [f"{text} (`{path}`):", "", "```", _drawing(module), "```", ""]


def _drawing(module: str) -> str:
    """The indented lines in the docstring of a module."""
    found = re.search(r"(?:^    .*\n|^\n(?=    ))+", ast.get_docstring(_tree(module), clean=False) or "", re.M)
    assert found is not None
    return dedent(found[0].strip("\n"))


def _source(module: str, name: str) -> str:
    """The code of a function or method."""
    node: ast.AST = _tree(module)
    for part in name.split("."):
        node = next(one for one in ast.iter_child_nodes(node) if getattr(one, "name", None) == part)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
    return dedent("\n".join(_text(module).splitlines()[first - 1 : node.end_lineno]))


def _text(module: str) -> str:
    return (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")


def _tree(module: str) -> ast.Module:
    return ast.parse(_text(module))


def api(name: str) -> str:
    """The public names of a package, of which the site shows signature and docstring."""
    package = importlib.import_module("tapereel" if name == "tapereel" else f"tapereel.{name}")
    top = importlib.import_module("tapereel")
    same = {one for one in package.__all__ if getattr(package, one) is getattr(top, one, None)}
    names = sorted({*package.__all__} - (same if package is not top else set()))
    also = [f"`{one}`" for one in package.__all__ if one not in names]
    rows = [f"| `{one}` | {cell(_purpose(getattr(package, one)))} | {_uses(_use_of(one))} |" for one in names]
    lines = [f"# `{package.__name__}`", "", NOTE, "", first_sentence(package.__doc__), ""]
    lines += [f"The [top level](tapereel.md) also has these names of it: {', '.join(also)}.", ""] if also else []
    lines += ["| name | purpose | used in |", "|---|---|---|", *rows, ""]
    lines += _of_a_run(top.Run) if package is top else []
    return "\n".join(lines) + "".join(f"\n::: {package.__name__}.{one}\n" for one in names)


def _of_a_run(kind: type) -> Iterator[str]:
    """The table of the attributes and methods of a `Run`."""
    yield from ("A `Run` has the answers of the command line:", "", "| name | purpose | used in |", "|---|---|---|")
    for name, value in vars(kind).items():
        if name[0] != "_":
            call = "" if isinstance(value, property) else "()"
            yield f"| `run.{name}{call}` | {cell(first_sentence(inspect.getdoc(value)))} | {_uses(_method(name))} |"
    yield ""


def _use_of(name: str) -> str:
    return rf"\b(?:tr|tapereel)\.{name}\b|\bimport\b[^\n]*\b{name}\b"


def _method(name: str) -> str:
    return rf"\b(?:run|unchanged|trained|again)\.{name}\b|\.{name}\("


@cache
def _shown_code() -> dict[Path, str]:
    """The Python of README, of each page that a person writes, and of each example, by path."""
    found = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))}
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if NOTE not in text:
            found[path] = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.M | re.S))
    return found


def _uses(pattern: str, most: int = 3) -> str:
    """Links to the first pages and examples that use a name."""
    paths = [path for path, code in _shown_code().items() if re.search(pattern, code)]
    paths.sort(key=lambda path: path.suffix == ".py")  # stable, so the pages come first
    links = [f"[{path.stem}]({os.path.relpath(path, FOLDER / 'api')})" for path in paths[:most]]
    return ", ".join(links) + (f" and {len(paths) - most} more" if len(paths) > most else "")


def _purpose(value: object) -> str:
    """The first sentence about a class or function. Other values only have the docstring of their type."""
    return first_sentence(inspect.getdoc(value)) if inspect.isclass(value) or inspect.isroutine(value) else ""


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = " ".join((text or "").strip().split("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s+(?=[A-Z`])", paragraph)[0]


def cell(text: str) -> str:
    """Text for a cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def settings() -> str:
    """Every class of settings once, with the key at which a verb has it."""
    lines = [
        "# Settings",
        "",
        NOTE,
        "",
        "Keys of `--set KEY=VALUE`, of a configuration file and of `settings=` in Python.",
    ]
    lines += ["How these combine is explained in [Configuration](configuration.md).", ""]
    lines += ["`tapereel VERB --dry-run` prints all values of a run."]
    lines += _profiles()
    places: dict[type[BaseModel], str] = {}
    for verb, path in ROOTS.items():
        module, _, name = f"tapereel.{path}".rpartition(".")
        lines += ["", f"## `{verb}`"]
        lines += _group(getattr(importlib.import_module(module), name), verb, "", places)
    return "\n".join(lines) + "\n"


def _profiles() -> Iterator[str]:
    """The table of the values that depend on the model's size."""
    yield from ("", "## Profiles", "")
    yield "`run` and `train` choose these by [the model's size](../how-to/training.md#profiles), unless you set them."
    yield "The keys of `run` don't have the prefix `loop.`. Adapters are LoRA on a pretrained model."
    yield from (
        "",
        "| key | `tiny` | `light` | `small` | `large` | adapters | source |",
        "|---|---|---|---|---|---|---|",
    )
    for row in profiles():
        adapted = "" if row.adapted is None else f"`{row.adapted}`"
        adapted += f" (light: `{row.light_adapted}`)" if row.light_adapted else ""
        values = " | ".join(f"`{row.value(profile, False)}`" for profile in ("tiny", "light", "small", "large"))
        yield f"| {_profiled_key(row)} | {values} | {adapted} | {cell(row.source)} |"


def _profiled_key(row: Default) -> str:
    bodies = importlib.import_module("tapereel.finetune.trainer.options").CRITICS
    body = next((body for body, rows in bodies.items() if row in rows), None)
    return f"`{row.key}`" + (f" (`body={body}`)" if body else "")


def profiles() -> tuple[Default, ...]:
    """The settings that profiles set."""
    found = importlib.import_module("tapereel.finetune.trainer.options")
    return (*found.PROFILES, *(row for rows in found.CRITICS.values() for row in rows))


@cache
def profiled() -> dict[tuple[type[BaseModel], str], list[Default]]:
    """(class, field) -> the rows of the profiles that set this field."""
    root = importlib.import_module("tapereel.finetune.run.train_config").TrainConfig
    found: dict[tuple[type[BaseModel], str], list[Default]] = {}
    for row in profiles():
        owners, (*path, name) = [root], row.key.split(".")
        for part in path:
            fields = [one.model_fields[part] for one in owners if part in one.model_fields]
            owners = [*dict.fromkeys(model for field in fields for model in _models(field.annotation))]
        for owner in owners:
            if name in owner.model_fields:
                found.setdefault((owner, name), []).append(row)
    return found


def _by_profile(rows: list[Default], otherwise: str) -> str:
    """The default of a setting that profiles set."""
    keys: dict[str, list[str]] = {}
    for row in rows:
        names: dict[str, list[str]] = {}
        for name in ("tiny", "light", "small", "large"):
            names.setdefault(f"`{row.value(name, False)}`", []).append(name)
        for name, value in (("adapters", row.adapted), ("light adapters", row.light_adapted)):
            if value is not None:
                names.setdefault(f"`{value}`", []).append(name)
        shown = ", ".join(f"{value} ({', '.join(which)})" for value, which in names.items())
        keys.setdefault(shown, []).append(_profiled_key(row))
    each = [shown + f" for {' and '.join(of)}" * (len(keys) > 1) for shown, of in keys.items()]
    return f"[by profile](#profiles): {'; '.join(each)}. Otherwise {otherwise or '`{}`'}"


def _group(kind: type[BaseModel], verb: str, key: str, places: dict[type[BaseModel], str]) -> Iterator[str]:
    places[kind] = heading = f"`{verb}`: `{key}` ({kind.__name__})" if key else f"`{verb}`"
    inside: list[tuple[str, type[BaseModel]]] = []
    if key:
        yield from ("", f"### {heading}")
    yield from ("", cell(first_sentence(kind.__doc__)), "", "| key | type | default | meaning |", "|---|---|---|---|")
    written = dict(_fields(kind))
    for name, info in kind.model_fields.items():
        type_, meaning = written[name]
        inside += [(f"{key}.{name}".lstrip("."), one) for one in _models(info.annotation)]
        default, rows = _default(info), profiled().get((kind, name))
        yield f"| `{name}` | {cell(type_)} | {_by_profile(rows, default) if rows else default} | {cell(meaning)} |"
    for below, one in inside:
        if one not in places:
            yield from _group(one, verb, below, places)


def _models(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


@cache
def _classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _fields(kind: type[BaseModel]) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name, (type as written, docstring)) of each field, those of base classes first."""
    for one in reversed([c for c in kind.__mro__ if issubclass(c, BaseModel) and c is not BaseModel]):
        body = _classes(Path(inspect.getfile(one)))[one.__name__].body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.AnnAssign):
                text = (
                    after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                )
                yield ast.unparse(node.target), (_type(node.annotation), inspect.cleandoc(str(text)))


def _type(node: ast.expr) -> str:
    """An annotation as written, without `Annotated` and what it adds."""
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated":
        assert isinstance(node.slice, ast.Tuple)
        return _type(node.slice.elts[0])
    return f"`{ast.unparse(node)}`"


def _default(info: object) -> str:
    value = info.get_default(call_default_factory=True)  # type: ignore[attr-defined]
    if info.is_required():  # type: ignore[attr-defined]
        return "required"
    if isinstance(value, BaseModel):
        plain = value.model_dump(mode="json", exclude_unset=True)
        return f"`{cell(str(plain))}`" if plain else ""
    return f"`{cell(repr(value))}`"


RECORDS = """# Records

<!-- note -->

A tape is a list of records, and `Tape.model_dump` returns them as they are written:

```python
import tapereel as tr


class Sums(tr.Environment):
    async def reset(self, task):
        return task

    async def step(self, action):
        return tr.Outcome(reward=float(action.text == "42"), terminated=True)


(tape,) = tr.run(tr.ChatAgent(), Sums, ["6 * 7"], model=["42"], out="runs/records")
records = tape.model_dump()["records"]
print([record["t"] for record in records])
print({key: records[1][key] for key in ("by", "role", "kind", "content")})
print(sorted(records[0]["versions"]))
```

```text
['begin', 'step', 'call', 'step', 'reward', 'end']
{'by': 'env', 'role': 'observation', 'kind': 'text', 'content': {'text': '6 * 7'}}
['conversation', 'package', 'python']
```

The fields `tape` and `call` hold ids, and `at` is a time in seconds since 1970. In JSON, `Ints` and `Floats` are the
base64 of little-endian int32 and float32 values, and NaN and infinities are strings.
[The tape store](../concepts/store.md) explains the files.

## Versions

These fields record which code and which weights made a tape:
"""
VERSIONS = {
    "begin": ("versions", "agent", "env"),
    "call": ("spans", "engine"),
    "tokens": ("tokenizer",),
    "publish": ("version", "digest"),
    "open": ("versions",),
}
"""Kind of record -> the fields that name a version."""
SECTIONS = {
    "On a tape": "These records form a tape, and its digest covers them.",
    "Layers": "These records refer to a tape, and may be added at any later time. The digest doesn't cover them.",
    "In a run": "These records belong to no tape.",
}


def records() -> str:
    """Every kind of record and every kind of step, with their fields."""
    module, steps = (importlib.import_module(f"tapereel.tapes.{name}") for name in ("records", "steps"))
    kinds = get_args(get_args(importlib.import_module("tapereel.tapes.schema").AnyRecord)[0])
    by_name = {kind.model_fields["t"].default: kind for kind in kinds}
    lines = [*RECORDS.replace("<!-- note -->", NOTE).splitlines(), "", "| record | field | meaning |", "|---|---|---|"]
    for name, fields in VERSIONS.items():
        lines += [f"| `{name}` | `{field}` | {_described(by_name[name])[field][1]} |" for field in fields]
    seen: set[type[BaseModel]] = {steps.Step}
    for title, text in SECTIONS.items():
        lines += ["", f"## {title}", "", text]
        for name, kind in by_name.items():
            layer = name not in module.IN_TAPE and "tape" in kind.model_fields
            if title == ("On a tape" if name in module.IN_TAPE else "Layers" if layer else "In a run"):
                lines += _record(kind, f"`{name}`", seen)
    lines += ["", "## Steps", "", "The field `content` of a `step` holds one of these, or a class of your own."]
    classes: list[Any] = [one for one in vars(steps).values() if inspect.isclass(one) and issubclass(one, steps.Step)]
    for kind in classes:
        if kind.model_fields and not issubclass(kind, steps.Unknown):  # no tape has an unknown step
            lines += _record(kind, f"`{kind.kind}` ({steps.role_of(kind.model_construct())})", seen)
    return "\n".join(lines) + "\n"


def _record(kind: type[BaseModel], heading: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    """A class with its fields, and then the classes of its fields that aren't in `seen`."""
    seen.add(kind)
    inside: list[type[BaseModel]] = []
    yield from ("", f"### {heading}", "", cell((inspect.getdoc(kind) or "").split("\n\n")[0]))
    yield from ("", "| field | type | default | meaning |", "|---|---|---|---|")
    for name, (type_, meaning) in _described(kind).items():
        inside += _models(kind.model_fields[name].annotation)
        if name != "t":
            field = kind.model_fields[name]
            yield f"| `{field.serialization_alias or name}` | {cell(type_)} | {_default(field)} | {meaning} |"
    for below in dict.fromkeys(inside):
        if below not in seen:
            yield from _record(below, f"`{below.__name__}`", seen)


def _described(kind: type[BaseModel]) -> dict[str, tuple[str, str]]:
    """Field -> (type as written, meaning). If a field has no docstring, its class or its possible values explain it."""
    found = dict(_fields(kind))
    for name, info in kind.model_fields.items():
        type_, meaning = found[name]
        values = list(info.annotation) if inspect.isclass(info.annotation) and issubclass(info.annotation, Enum) else []
        values = values or ([] if "Literal" in type_ else [v for v in get_args(info.annotation) if isinstance(v, str)])
        about = [f"`{value}`" for value in values] or [first_sentence(one.__doc__) for one in _models(info.annotation)]
        found[name] = (type_, cell(meaning or ", ".join(about)))
    return {name: found[name] for name in kind.model_fields}


def verbs() -> str:
    """The help of every verb, as wide as the variable COLUMNS says."""
    command = importlib.import_module("tapereel.cli.command")
    lines = [
        "# Verbs",
        "",
        NOTE,
        "",
        "`tapereel VERB --help` prints the same. [The command line](cli.md) explains how they",
    ]
    lines += ["are used together.", ""]
    for name in command.commands():
        verb, _, target = name.partition(" ")
        parser = command.verb_parser(verb)
        if target:
            (below,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
            parser = below.choices[target]
        help_ = "\n".join(line.rstrip() for line in parser.format_help().strip().splitlines())
        lines += [f"## {name}", "", "```text", help_, "```", ""]
    return "\n".join(lines[:-1]) + "\n"


def errors() -> str:
    """The public exception classes, from their sources: nothing is imported."""
    classes: dict[str, tuple[ast.ClassDef, str]] = {}
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        module = ".".join(("tapereel", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        classes |= {name: (node, module) for name, node in _classes(path).items()}

    def derives(name: str) -> bool:
        bases = [ast.unparse(base).rpartition(".")[2] for base in classes[name][0].bases] if name in classes else []
        return name == "TapereelError" or any(map(derives, bases))

    lines = [
        "# Errors",
        "",
        NOTE,
        "",
        "Every error of Tapereel is a `TapereelError`. The message names the value, the place,",
    ]
    lines += ["the cause and the remedy.", "", "| class | module | meaning |", "|---|---|---|"]
    for name in sorted(name for name in classes if derives(name) and not name.startswith("_")):
        node, module = classes[name]
        lines.append(f"| `{name}` | `{module}` | {cell(first_sentence(ast.get_docstring(node)))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the pages, or compare them with what they should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check, stale = parser.parse_args().check, []
    os.environ["COLUMNS"] = WIDTH
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    print("\n".join(f"docs/reference/{name} {'is out of date' if check else 'written'}" for name in stale) or "current")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
