"""Checks the arguments of public functions against their annotations. The error identifies the invalid argument.

Arguments are compared, never converted, copied or consumed. Pydantic's `validate_call` isn't used, because it rejects
`range(3)` for a `Sequence[int]`, doesn't look at the items of an `Iterable[str]`, and reads a `Tape` as a document.
"""

from __future__ import annotations

import builtins
import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, wraps
from itertools import repeat
from numbers import Integral, Real
from pathlib import Path
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from pydantic import BaseModel, JsonValue, ValidationError
from typing_extensions import get_protocol_members, is_protocol

from ..errors import BadArgument, short_repr
from .extras import raise_missing
from .redact import without_secrets

TargetT = TypeVar("TargetT", bound=Callable[..., object])
Part = tuple[str, Any, Any]
"""A value in a call, as (its place in the call, value, type in the annotation)."""
MOST = 10_000_000
"""Maximum number of items in a collection. Without this limit, `range(10**9)` would fill the memory."""
_SMALL = Annotated[Any, f"a collection of at most {MOST:,} items that isn't nested too deeply"]
_PATH = Annotated[Any, "a path of a usual length that isn't empty, without NUL characters and lone surrogates"]
_VARIED = int | float | str | Path | Collection | Enum | type
"""Values that may fit although another value of the same class doesn't."""
NO_LONE = "a str without lone surrogates"
"""Describes the strings that Tapereel accepts. UTF-8 can't hold lone surrogates, so records can't hold them."""
# All other surrogates are allowed, because they stand for bytes in a file name that isn't UTF-8.
_BAD_PATH = re.compile("\\A\\Z|[\0\ud800-\udc7f\udd00-\udfff]|[^/]{256}|.{4096}", re.DOTALL)
_JSON = None | bool | float | str | list[JsonValue] | tuple[JsonValue, ...] | dict[str, JsonValue]


def check_arguments(target: TargetT) -> TargetT:
    """Decorate a public function, or the constructor and the public methods of a class, to check their arguments.

    The decorated function raises BadArgument if an argument doesn't fit its annotation, and MissingExtra if an optional
    package that it imports isn't installed. A check takes about 20
    microseconds, which is too long for a method that runs in every turn. It takes less if an argument of the same
    class was accepted before.
    """
    if isinstance(target, type):
        for name, member in list(vars(target).items()):
            if isinstance(member, FunctionType) and (name == "__init__" or name[0] != "_"):
                setattr(target, name, check_arguments(member))
        return target  # type: ignore[return-value]

    @wraps(target)
    def call(*args: Any, **kwargs: Any) -> object:
        names, hints, known = _parameters(target)
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name not in hints or (name, type(value)) in known:
                continue
            wrong = _wrong((name, value, hints[name]))
            if wrong is None:
                if not isinstance(value, _VARIED):
                    known.add((name, type(value)))
            else:
                place, found, hint = wrong
                raise BadArgument(
                    f"{_owner(target)}(): {place} is {shown(found)}; it must be "
                    f"{_expected(hint)}{_lacking(found, hint)}"
                )
        try:
            return target(*args, **kwargs)
        except ModuleNotFoundError as error:
            raise_missing(error, f"{_owner(target)}()")

    return call  # type: ignore[return-value]


def _owner(target: Callable[..., object]) -> str:
    return target.__qualname__.removesuffix(".__init__")


def shown(value: object) -> str:
    """Return a shortened form of any value, without secrets, followed by its type."""
    return f"{without_secrets(short_repr(value))} ({type(value).__qualname__})"


def wrong_fields(error: ValidationError, kind: type[BaseModel]) -> str:
    """Return what is wrong with the values of a model of the class `kind`, with the place of each value."""
    found = list[str]()
    for one in error.errors():
        place = ".".join(map(str, one["loc"]))
        if one["type"] == "extra_forbidden":
            known = _fields(kind, one["loc"][:-1])
            near = difflib.get_close_matches(str(one["loc"][-1]), known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(known)}"
            found.append(f"unknown field {place} ({shown(one['input'])}); {hint}")
        elif one["type"] == "value_error":
            found.append(f"{place}{': ' * bool(place)}{one['msg'].removeprefix('Value error, ')}")
        else:
            found.append(f"{place} is {shown(one['input'])}: {one['msg'][0].lower()}{one['msg'][1:]}")
    return "; ".join(found)


def _fields(kind: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    """Return the names of the fields of `kind`, or of the model in its field `path`."""
    for name in path:
        hint = kind.model_fields[name].annotation if name in kind.model_fields else None  # type: ignore[index]
        inner = (one for one in (hint, *get_args(hint)) if isinstance(one, type) and issubclass(one, BaseModel))
        kind = next(inner, kind)
    return list(kind.model_fields)


def _expected(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        return get_args(hint)[1]
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_expected, get_args(hint)))
    return re.sub(r"\b(?:\w+\.)+|~", "", "None" if hint is NoneType else inspect.formatannotation(hint))


def _lacking(value: object, hint: Any) -> str:
    """Return the end of an error message: the methods and attributes that `value` lacks for the protocol in `hint`.
    Return an empty string if `hint` has no protocol."""
    for kind in (hint, *get_args(hint)):
        if is_protocol(kind):
            return f", and it lacks {', '.join(_missing(value, kind))}"
    return ""


def _missing(value: object, protocol: type) -> list[str]:
    return [name for name in _members(protocol) or () if not hasattr(value, name)]


@cache
def _members(kind: Any) -> tuple[str, ...] | None:
    """Return the names that an object needs for the protocol `kind`, or None if `kind` isn't a protocol."""
    return tuple(sorted(get_protocol_members(kind))) if is_protocol(kind) else None


class _Absent(type):
    """Stands for a class that is imported only for type checkers. It recognises its instances by their class name."""

    def __instancecheck__(cls, value: object) -> bool:
        return cls.__name__ in (one.__name__ for one in type(value).__mro__)


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> type:
        return _Absent(name, (), {})


@cache
def _parameters(function: Callable[..., Any]) -> tuple[list[str], dict[str, Any], set[tuple[str, type]]]:
    """Return the names of the positional parameters, the types of all parameters that can be checked, and a set for
    the classes of accepted arguments, as (parameter, class)."""
    known, hints = _Names({**vars(builtins), **function.__globals__}), dict[str, Any]()
    parameters = inspect.signature(function).parameters.values()
    for one in parameters:
        try:
            hint = eval(one.annotation, {}, known)
        except (AttributeError, TypeError):  # `self`, or a name that only type checkers import
            continue
        hints |= get_type_hints(get_args(hint)[0]) if get_origin(hint) is Unpack else {one.name: hint}
    return [one.name for one in parameters if one.kind < one.VAR_POSITIONAL], hints, set()


@cache
def _apart(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type's class and parameters. The class is `Union` for every notation of a union."""
    kind, args = get_origin(hint) or hint, get_args(hint)
    if isinstance(hint, TypeVar):
        return _apart(hint.__bound__ or Any)
    if kind is Annotated:
        return (Union, args[:1]) if isinstance(args[1], str) else (Any, ())  # pydantic's SkipValidation
    return (Union, get_args(_JSON)) if kind is JsonValue else (Union if kind is UnionType else kind, args)


def _wrong(part: Part) -> Part | None:
    """Return the first part of `part` that doesn't fit its type, or None if everything fits."""
    place, value, hint = part
    kind, args = _apart(hint)
    if kind in (int, float) and isinstance(value, int) and value.bit_length() > 1000:
        return place, value, Annotated[Any, "a number of at most 1,000 bits"]
    if kind is Any or kind is object or (kind is type(value) and kind is not str and not args):
        return None
    if kind is Union:
        if Path in args and isinstance(value, str | Path if str in args else Path):
            return (place, value, _PATH) if _BAD_PATH.search(str(value)) else None
        nearest = part
        for one in args:
            found = _wrong((place, value, one))
            if found is None:
                return None
            nearest = found if found[2] is not one else nearest
        return nearest
    if kind is str and isinstance(value, str):
        bad = re.search("[\ud800-\udfff]", value)
        return (place, value, Annotated[Any, NO_LONE]) if bad else None
    if not _is_a(value, kind, args):
        return part
    try:
        if isinstance(value, Collection) and not isinstance(value, bytes) and len(value) > MOST:
            return place, value, _SMALL
        return next(filter(None, map(_wrong, _items(place, value, kind, args))), None)
    except (RecursionError, OverflowError):
        return place, value, _SMALL


def _is_a(value: Any, kind: Any, args: tuple[Any, ...]) -> bool:
    """Return whether `value` is of this type, regardless of the types of its items."""
    if kind is Literal:
        return any(type(value) is type(one) and value == one for one in args)
    if kind is type:
        wanted, _ = _apart(args[0])
        return isinstance(value, type) and (not isinstance(wanted, type) or issubclass(value, wanted))
    if _members(kind) is not None:
        return not _missing(value, kind)
    if kind is tuple and ... not in args and isinstance(value, tuple):
        return len(value) == len(args)
    if isinstance(value, bool | str | bytes | bytearray):  # a str isn't a sequence here, and True isn't a number
        return isinstance(value, kind) and kind is not int and not args
    return isinstance(value, {int: Integral, float: Real}.get(kind, kind))  # NumPy's numbers are among these


def _items(place: str, value: Any, kind: Any, args: tuple[Any, ...]) -> Iterator[Part]:
    """Yield the items that a collection already holds. Nothing is taken from an iterator."""
    if isinstance(value, Mapping) and len(args) == 2:
        for key, one in value.items():
            yield f"a key of {place}", key, args[0]
            yield f"{place}[{short_repr(key)}]", one, args[1]
    elif isinstance(value, Collection) and args and args[0] not in (Any, object) and not isinstance(value, str):
        hints = args if kind is tuple and ... not in args else repeat(args[0])
        yield from ((f"{place}[{k}]", one, hint) for k, (one, hint) in enumerate(zip(value, hints, strict=False)))
