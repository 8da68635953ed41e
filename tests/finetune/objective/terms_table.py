"""Every term of a recipe with its kinds and constants, from the models themselves.

    python -m tests.finetune.objective.terms_table      writes the lists into docs/reference/terms.md

A test compares the page with what is found.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tapereel.finetune import Recipe
from tapereel.finetune.objective import Term
from tapereel.finetune.objective.recipe import kinds_of
from tapereel.tapes.common import write_yaml

from ...agents.rendering.templates_table import page as between

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "terms.md"
BEGIN = "<!-- made by tests/finetune/objective/terms_table.py -->\n"
NUMBERS: dict[Any, str] = {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null"}
SHOWN = ("number", "true, false")
"""Types of which a default is an example."""
BOUNDS = {Ge: ">=", Gt: ">", Le: "<=", Lt: "<"}


def terms() -> dict[str, tuple[bool, list[type[Term]]]]:
    """Field of a recipe -> (whether it is a list, the kinds that it may have)."""
    found = {}
    for name, info in Recipe.model_fields.items():
        if kinds := kinds_of(name):
            found[name] = get_origin(info.annotation) is tuple, list(kinds)
    return found


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types that a value may have, out of unions, lists and annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _leaves(get_args(annotation)[0])
    elif origin in (Union, types.UnionType, tuple):
        for part in get_args(annotation):
            yield from _leaves(part)
    elif annotation is not Ellipsis:
        yield annotation


@cache
def docstrings(cls: type[Any]) -> dict[str, str]:
    """Field -> the text below it, those of base classes included."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        if not (isinstance(one, type) and issubclass(one, Term)) or one is Term:
            continue
        module = ast.parse(inspect.getsource(sys.modules[one.__module__]))
        body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == one.__name__)
        for line, text in pairwise(body):
            if (
                isinstance(line, ast.AnnAssign)
                and isinstance(line.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                found[line.target.id] = " ".join(text.value.value.split())
    return found


def formulas(cls: type[Term]) -> tuple[str, str]:
    """(what the term is, its equations) of the module that a term stands in."""
    text = inspect.getdoc(sys.modules[cls.__module__]) or ""
    first, *blocks = text.split("\n\n")
    named, colon, told = " ".join(first.split()).partition(": ")
    if not colon or " " in named:  # a term beside others in its module says what it is itself
        first, *blocks = (inspect.getdoc(cls) or "").split("\n\n")
        told = " ".join(first.split())
    return told, "\n\n".join(inspect.cleandoc("\n" + block) for block in blocks if block.startswith("    "))


def type_of(info: FieldInfo) -> str:
    """What a constant may be, in the words of a YAML file. Empty if its default shows it."""
    bounds = [
        f"{sign} {getattr(one, name):g}"
        for one in info.metadata
        for kind, sign in BOUNDS.items()
        if isinstance(one, kind)
        for name in [kind.__name__.lower()]
    ]
    named = _type(info.annotation)
    if info.default is PydanticUndefined:
        return ", ".join([named, *bounds, "required"])
    return ", ".join(bounds if named in SHOWN else [named, *bounds])


def _type(annotation: Any) -> str:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(args[0])
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in args)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(one) for one in args)
    if origin is tuple:
        return "[" + ", ".join(_type(one) for one in args) + "]"
    if origin is dict:
        return "{" + ": ".join(_type(one) for one in args) + "}"
    if isinstance(annotation, type) and issubclass(annotation, Term):
        return "{" + ", ".join(annotation.model_fields) + "}"
    return NUMBERS[annotation]


def default_of(info: FieldInfo) -> str:
    """As it would be written in a file. Empty if it must be given."""
    if info.default is PydanticUndefined:
        return ""
    return "`" + write_yaml({"x": info.default}).strip().removeprefix("x: ") + "`"


def constants(cls: type[Term]) -> Iterator[tuple[str, str, str, str]]:
    """(name, type, default, description) of each constant but the kind that is its class."""
    told = docstrings(cls)
    for name, info in cls.model_fields.items():
        if name == "kind" and len(get_args(info.annotation)) == 1:
            continue
        yield f"`{name}`", type_of(info), default_of(info), told.get(name, "")


def within(cls: type[Term]) -> Iterator[tuple[str, type[Term]]]:
    """(name, class) of each constant that has constants of its own."""
    for name, info in cls.model_fields.items():
        for inner in _leaves(info.annotation):
            if isinstance(inner, type) and issubclass(inner, Term):
                yield name, inner


def table() -> str:
    """The part of the page that this module writes. What several terms share, such as `adaptive`, is listed once, at
    the end."""
    parts, shared = [], dict[str, type[Term]]()
    for name, (listed, kinds) in terms().items():
        told, equations = formulas(kinds[0])
        lines = [f"## {name}", "", f"{told[0].upper()}{told[1:]}{' A list.' if listed else ''}"]
        if equations:
            lines += ["", "```text", equations, "```"]
        lines.append("")
        for cls in kinds:
            if several := len(kinds) > 1:
                lines.append(f"- **{cls.model_fields['kind'].default}**: {inspect.getdoc(cls)}")
            lines += [f"{'    ' * several}- {_line(*row)}" for row in constants(cls)]
            shared |= dict(within(cls))
        parts.append("\n".join(lines) + "\n")
    for name, cls in shared.items():
        told = " ".join((inspect.getdoc(cls) or "").split())
        lines = [f"## {name}", "", told, "", *(f"- {_line(*row)}" for row in constants(cls))]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _line(name: str, type_: str, default: str, told: str) -> str:
    """One constant: `name` = default (type): description."""
    return f"{name}{f' = {default}' if default else ''}{f' ({type_})' if type_ else ''}: {told}"


def page(text: str) -> str:
    """The page with the lists in their place."""
    return between(text, table(), begin=BEGIN, name=str(PAGE))


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
