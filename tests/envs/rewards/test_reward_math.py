"""Mathematics verified by the library, in a process that can be killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tapereel.envs.rewards.mathematics import MathVerifier, NotVerified, math_reward
from tapereel.tapes import MissingExtra, Task

from ..scored import failure, scores, tapes

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def verifier() -> Iterator[MathVerifier]:
    found = MathVerifier(timeout=60.0)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        (r"It is $\frac{1}{2}$.", "0.5", True),
        (r"First 7, but then \boxed{3}.", "3", True),
        ("So the answer is 12", "12", True),
        ("So the answer is 13", "12", False),
        ("I don't know", "12", False),
        ("", "12", False),
        (r"$\{1, 2\}$", r"\{2, 1\}", True),
        (r"$x^2 + 2x + 1$", "(x+1)^2", True),
        (r"\boxed{\sqrt{8}}", r"$2\sqrt{2}$", True),
    ],
)
def test_answers_are_equal_where_they_mean_the_same(verifier: MathVerifier, answer: str, reference: str, equal: bool):
    assert verifier.equal(answer, reference) is equal


def test_as_a_source_it_scores_the_last_answer_against_the_tasks(verifier: MathVerifier):
    source = math_reward(verifier=verifier)
    right, wrong = tapes([r"\boxed{\frac{2}{4}}", "2"], Task(public="1/2?", private={"answer": 0.5}))
    (none,) = tapes(["2"], Task(public="?"))
    assert [[(r.name, r.value) for r in own] for own in scores([source], right, wrong, none)] == [
        [("math", 1.0)],
        [("math", 0.0)],
        [],
    ]
    assert source.pure, "the tape alone decides"


def test_an_answer_that_takes_for_ever_is_stopped_and_the_next_one_is_checked():
    verifier = MathVerifier(timeout=60.0)
    assert verifier.equal("1", "1")
    first = verifier._process
    verifier.timeout = 0.5
    (records,) = scores([math_reward(verifier=verifier)], *tapes(["$9^{9^{9^{9}}}$"], Task(public="", private="5")))
    assert "NotVerified: '$9^{9^{9^{9}}}$'" in failure(records)
    assert "0.5 s" in failure(records)
    assert first is not None
    assert first.ended() is not None
    verifier.timeout = 60.0
    assert verifier.equal("2", "2")
    verifier.close()


def test_a_process_that_dies_is_replaced():
    verifier = MathVerifier(timeout=60.0)
    assert verifier.equal("1", "1")
    process = verifier._process
    assert process is not None
    os.kill(process._process.pid, signal.SIGKILL)
    assert process.code() == -signal.SIGKILL
    assert verifier.equal("2", "2")
    verifier.close()


def test_what_cant_be_verified_is_said(verifier: MathVerifier):
    with pytest.raises(NotVerified, match=r"'5'.*''.*reference"):
        verifier.equal("5", "")
    with pytest.raises(ValueError, match=r"timeout.*\b0\b"):
        MathVerifier(timeout=0)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    (tmp_path / "math_verify.py").write_text("raise ModuleNotFoundError('no', name='math_verify')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(MissingExtra, match=r"tapereel\[math\]"):
        MathVerifier().equal("1", "1")
    assert sys.modules.get("math_verify") is None or "site-packages" in str(sys.modules["math_verify"].__file__)
