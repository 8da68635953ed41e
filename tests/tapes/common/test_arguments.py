"""`check_arguments`: what fits an annotation, what doesn't, and what the error names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypedDict, Unpack

import numpy as np
import pytest
from pydantic import JsonValue

from tapereel.tapes import Action, Answer, Tape, ToolCalls
from tapereel.tapes.common.arguments import MOST, check_arguments
from tapereel.tapes.errors import BadArgument, UsageError

if TYPE_CHECKING:
    from decimal import Decimal


class Named(Protocol):
    name: str


class Options(TypedDict, total=False):
    size: int


@check_arguments
def called(
    *,
    count: int = 1,
    share: float = 0.5,
    on: bool = False,
    name: str | None = None,
    names: Sequence[str] = (),
    lazy: Iterable[str] = (),
    numbers: Collection[int] = (),
    pair: tuple[float, float] | None = None,
    settings: Mapping[str, JsonValue] | None = None,
    path: str | Path = "",
    size: Literal["small", "large"] = "small",
    kinds: Sequence[type[Action]] = (),
    call: Callable[[str], str] | None = None,
    named: Named | None = None,
    absent: Decimal | None = None,
    tape: Tape | str | None = None,
    said: Annotated[int, "a lucky number"] = 7,
    anything: Any = None,
) -> dict[str, object]:
    """What it was called with."""
    return dict(locals())


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(5000):
        made = [made]
    return made


class Quiet:
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("argument", "value", "place"),
    [
        ("count", True, "count=True"),
        ("count", 1.0, "count=1.0"),
        ("count", "1", "count='1'"),
        ("count", 2**1001, "count"),
        pytest.param("count", 10**5000, "count", id="digits"),
        ("share", "x", "share='x'"),
        ("on", 1, "on=1"),
        ("name", b"x", "name=b'x'"),
        ("name", "\ud800", "name"),
        ("names", "abc", "names='abc'"),
        ("names", ["a", None], "names[1]=None"),
        ("names", iter(["a"]), "names"),
        ("lazy", "abc", "lazy='abc'"),
        ("lazy", ["a", 3], "lazy[1]=3"),
        ("numbers", {"a"}, "numbers[0]='a'"),
        ("numbers", range(10**9), f"{MOST:,}"),
        ("numbers", range(10**30), f"{MOST:,}"),
        ("pair", (1.0,), "pair=(1.0,)"),
        ("pair", (1.0, "x"), "pair[1]='x'"),
        ("settings", {"a": {"b": [object()]}}, "settings['a']['b'][0]"),
        ("settings", {1: 2}, "key=1"),
        ("settings", {"a": deep()}, "settings['a']"),
        ("path", 3, "path=3"),
        ("path", "a\0b", "'a\\x00b'"),
        ("path", Path("a\0b"), "Path('a\\x00b')"),
        ("path", "x" * 300, "xxx...xxx"),
        ("size", "middle", "size='middle'"),
        ("kinds", [Answer, int], "kinds[1]=<class 'int'>"),
        ("call", "len", "call='len'"),
        ("named", 3, "named=3"),
        ("absent", 3.5, "absent=3.5"),
        ("tape", 3, "tape=3"),
        ("said", "x", "lucky"),
        ("count", Quiet(), "(Quiet)"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(argument: str, value: object, place: str) -> None:
    with pytest.raises(BadArgument) as caught:
        called(**{argument: value})  # type: ignore[arg-type]
    assert isinstance(caught.value, UsageError)
    assert isinstance(caught.value, TypeError)
    assert re.match(rf"called\(\): .*\b{argument}\b", str(caught.value))
    assert all(part in str(caught.value) for part in place.split("="))


def test_an_option_of_a_typed_dict_is_checked() -> None:
    @check_arguments
    def opened(**options: Unpack[Options]) -> object:
        return options

    assert opened(size=3) == {"size": 3}
    with pytest.raises(BadArgument, match=r"size\b.*'x'"):
        opened(size="x")  # type: ignore[arg-type]


def test_what_fits_arrives_as_it_is() -> None:
    given: Iterator[str] = iter(["a", "b"])
    names = ("a", "b")
    for argument, value in {
        "count": np.int64(3),
        "share": 1,
        "lazy": given,
        "numbers": range(3),
        "names": names,
        "pair": (1, 0.5),
        "settings": {"a": [1, {"b": None}], "c": (1, 2)},
        "path": "runs/\udcff",  # a file name that isn't UTF-8
        "kinds": [Answer, ToolCalls],
        "call": str,
        "named": inspect.signature(called).parameters["count"],
        "absent": __import__("decimal").Decimal(1),
        "anything": object(),
    }.items():
        assert called(**{argument: value})[argument] is value
    assert list(given) == ["a", "b"]


def test_no_secret_of_a_dict_is_quoted() -> None:
    with pytest.raises(BadArgument) as caught:
        called(count={"api_key": "abcdefgh12345678"})  # type: ignore[arg-type]
    assert "abcdefgh" not in str(caught.value)


def test_a_decorated_function_keeps_its_signature_and_python_its_errors() -> None:
    @check_arguments
    def plain(a: int, b: str = "x") -> str:
        """Its text."""
        return b * a

    assert str(inspect.signature(plain)) == "(a: 'int', b: 'str' = 'x') -> 'str'"
    assert (plain.__name__, plain.__doc__) == ("plain", "Its text.")
    for wrong in (lambda: plain(), lambda: plain(1, "x", 2), lambda: plain(1, c=2)):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=r"plain\(\)") as caught:
            wrong()
        assert not isinstance(caught.value, BadArgument)


def test_a_class_is_checked_by_its_constructor_and_its_public_methods() -> None:
    @check_arguments
    class Shop:
        def __init__(self, size: int) -> None:
            self.size = size

        def sell(self, n: int) -> int:
            return self._sell(n)

        def _sell(self, n: int) -> int:
            return self.size - n

        def __len__(self) -> int:
            return self.size

    assert Shop(3).sell(1) == 2
    with pytest.raises(BadArgument, match=r"Shop\(\): size"):
        Shop("3")  # type: ignore[arg-type]
    with pytest.raises(BadArgument, match=r"Shop.sell\(\): n"):
        Shop(3).sell("1")  # type: ignore[arg-type]


class Closed(Named, Protocol):
    def close(self) -> None: ...


def test_the_members_that_a_value_lacks_are_named() -> None:
    @check_arguments
    def take(one: Closed | None) -> None: ...

    take(None)
    with pytest.raises(BadArgument) as error:
        take(SimpleNamespace(close=print))  # type: ignore[arg-type]
    assert str(error.value).endswith("lacks name")
