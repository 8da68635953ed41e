"""What an environment declares, and the messages."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapereel.envs import Calculator, Environment, GymEnvironment, Outcome
from tapereel.envs.remote import PROTOCOL, BadAnswer, Declared, Item, RemoteFault, WrongEnvironment, read_call
from tapereel.envs.remote.env_protocol import RandomState, Result, StepCall, read_answer, read_welcome
from tapereel.tapes import Action, Answer, Text
from tapereel.tapes.common import REWARD_LIMIT
from tapereel.tapes.errors import BadArgument

from .worlds import Deeds, Give, Guess, GuessNumber, Hint, Secret, Telling, making


def test_kinds_are_read_from_the_types_of_the_class():
    declared = Declared.of(GuessNumber)
    assert dict(declared.actions) == {"remote_guess": Guess, "remote_give_up": Give}
    assert dict(declared.observations) == {"remote_hint": Hint}
    assert dict(Declared.of(Telling()).observations) == {"remote_hint": Hint, "remote_secret": Secret}
    assert Declared.of(making).name == "GuessNumber"
    assert set(Declared.of(Calculator).observations) == {"calculator_problem", "calculator_result"}
    assert set(Declared.of(GymEnvironment).actions) == {"gym_action"}


class Silent(Environment[Any]):
    async def reset(self, task: Any) -> Any: ...


class Untyped(Environment):
    async def reset(self, task: Any):  # type: ignore[no-untyped-def]
        return "?"


@pytest.mark.parametrize(
    ("thing", "told"),
    [
        (Silent, r"Silent.*actions.*Environment\[.*`kinds"),
        (Untyped, r"Untyped.*observations.*`reset`.*`-> str`.*`kinds"),
        (lambda: GuessNumber(), r"lambda.*Declared\.of\("),
        (3, r"^3 .*Declared\.of\("),
    ],
)
def test_what_declares_nothing_is_refused_with_what_to_write(thing: Any, told: str):
    with pytest.raises(BadArgument, match=told):
        Declared.of(thing)


def test_two_sides_agree_by_the_fields_of_their_kinds():
    here, other = Declared.of(GuessNumber), Declared.of(Telling)
    here.agree("x", dict(here.digests), "pure")
    with pytest.raises(WrongEnvironment, match=r"observation:remote_secret \(.*\bthere\)"):
        here.agree("Telling", other.digests, "pure")
    changed = {**here.digests, "action:remote_guess": "0" * 16}
    with pytest.raises(WrongEnvironment, match=r"action:remote_guess \(.*\bfields\)"):
        here.agree("x", changed, "pure")
    with pytest.raises(WrongEnvironment, match=r"'Deeds'.*'idempotent'.*'pure'"):
        here.agree("Deeds", here.digests, Declared.of(Deeds).effect)


def test_only_a_declared_kind_becomes_a_step():
    declared = Declared.of(GuessNumber)
    assert declared.action("remote_guess", {"number": 3}) == Guess(number=3)
    for kind, content, told in [
        ("remote_hint", {"text": "", "noise": 0}, "'remote_hint'.*remote_give_up"),
        ("answer", {"text": ""}, "'answer'.*remote_give_up"),
        ("os.system", {}, r"'os\.system'.*remote_give_up"),
        ("remote_guess", {"number": "x"}, "number: "),
        ("remote_guess", {"number": 1, "more": 2}, "more: Extra"),
    ]:
        with pytest.raises(BadAnswer, match=told):
            declared.action(kind, content)


def test_a_subclass_would_arrive_as_another_class():
    class Loud(Guess, kind="remote_loud_guess"):
        pass

    assert Declared.of(GuessNumber).holds(Guess(number=1))
    assert not Declared.of(GuessNumber).holds(Loud(number=1))


@given(st.integers(0, 2**64), st.lists(st.sampled_from(["random", "gauss", "getrandbits"]), max_size=5))
def test_a_generator_goes_on_on_the_other_side(seed: int, before: list[str]):
    draw: dict[str, Callable[[random.Random], Any]] = {
        "random": lambda r: r.random(),
        "gauss": lambda r: r.gauss(0, 1),
        "getrandbits": lambda r: r.getrandbits(7),
    }
    rng = random.Random(seed)
    for name in before:
        draw[name](rng)
    other = RandomState.model_validate_json(RandomState.of(rng).encoded()).made()
    assert [draw[name](rng) for name in draw] == [draw[name](other) for name in draw]


@given(
    st.text(),
    st.floats(allow_nan=False),
    st.none()
    | st.floats(-REWARD_LIMIT, REWARD_LIMIT)
    | st.dictionaries(st.text(), st.floats(-REWARD_LIMIT, REWARD_LIMIT)),
)
def test_an_outcome_comes_back_as_it_was(text: str, noise: float, reward: Any):
    outcome = Outcome(Hint(text=text, noise=noise), reward, metrics={"m": 0.1})
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        return  # no tape can hold it either
    led = read_answer(Result.of(3, outcome).encoded())
    assert isinstance(led, Result)
    assert led.outcome(Declared.of(GuessNumber)) == outcome


def test_a_call_comes_back_as_it_was():
    call = StepCall(id=5, action=Item.of(Guess(number=3)))
    assert read_call(call.encoded()) == call


BROKEN = [
    "",
    "{",
    "[]",
    "null",
    '{"t":"eval","id":1}',
    '{"t":"result"}',
    '{"t":"result","id":0}',
    '{"t":"result","id":1,"x":2}',
    '{"t":"result","id":1e400}',
    "[" * 100_000,
    '{"t":"result","id":1}{"t":"result","id":1}',
    '{"t":"result","id":1,"reward":NaN}',
    '{"t":"result","id":1,"reward":"NaN"}',
    '{"t":"result","id":1,"reward":Infinity}',
    '{"t":"result","id":1,"reward":true}',
    '{"t":"result","id":1,"reward":{"a":NaN}}',
    '{"t":"result","id":1,"metrics":{"a":NaN}}',
    '{"t":"result","id":1,"reward":1e999}',
    '{"t":"result","id":1,"observation":{"kind":"x","content":[]}}',
    '{"t":"fault","id":1,"code":"other","message":""}',
    '{"t":"result","id":"\\ud800"}',
]


@pytest.mark.parametrize("text", BROKEN)
def test_what_is_no_message_is_refused(text: str):
    for read in (read_answer, read_call, read_welcome):
        with pytest.raises(BadAnswer, match=PROTOCOL):
            read(text)


@given(st.binary(max_size=200))
def test_bytes_never_raise_anything_else(data: bytes):
    for read in (read_answer, read_call, read_welcome):
        with pytest.raises(BadAnswer):
            read(data)


def test_a_generator_that_is_none_is_refused():
    good = RandomState.of(random.Random(0))
    for words in ("", "AAAA", "!" * 3328, good.words + "AAAA"):
        with pytest.raises(ValueError, match=r"words|base64|multiple|padding|decod"):
            good.model_copy(update={"words": words}).made()


@pytest.mark.parametrize(
    ("given_name", "expected"),
    [
        ("KeyError", "KeyError"),
        ("json.JSONDecodeError", "json.JSONDecodeError"),
        ("__import__('os')", "RemoteFault"),
        ("", "RemoteFault"),
        ("A" * 101, "RemoteFault"),
        ("StoreFailed", "StoreFailed"),
    ],
)
def test_a_fault_has_the_name_of_what_was_raised_and_is_nothing_but_a_fault(given_name: str, expected: str):
    fault = RemoteFault.named(given_name, "why")
    assert type(fault).__qualname__ == expected
    assert type(fault).__mro__[1] is RemoteFault
    assert str(fault) == "why"


def test_kinds_given_by_hand():
    declared = Declared("Elsewhere", {"answer": Answer}, {"text": Text})
    assert Declared.of(declared) is declared
    assert issubclass(declared.actions["answer"], Action)
