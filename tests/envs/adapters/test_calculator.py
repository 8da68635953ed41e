"""The demo's environment: a calculator that evaluates nothing, tasks that somebody else made, and its demonstrator."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapereel.envs import BadTasks, Calculator, calculator_tasks, overlap, reasoning_scorer, reasoning_tasks
from tapereel.envs.adapters import word_problems
from tapereel.envs.adapters.calculator import (
    WORDS,
    Calculate,
    FinalAnswer,
    Problem,
    Result,
    calculate,
    demonstrate,
    read_action,
)
from tapereel.envs.adapters.reasoning import _score
from tapereel.tapes import MissingExtra, Status, Task

SUM = Task(public={"question": "47+83+25"}, private={"dataset": "chain_sum", "answer": "155"})


@given(st.integers(-(10**12) + 1, 10**12 - 1), st.sampled_from("+-*"), st.integers(-(10**12) + 1, 10**12 - 1))
def test_the_calculator_is_right(a: int, operator: str, b: int):
    expected = {"+": a + b, "-": a - b, "*": a * b}[operator]
    assert calculate(f"{a}{operator}{b}") == str(expected)
    assert int(calculate(f"{a}{operator}{b}", 40)) == expected


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1",
        "1+",
        "+1",
        "1+2+3",
        "1/2",
        "1**2",
        "2**999",
        "(1+2)",
        "1 +2",
        "a+b",
        "1+2\n",
        "٣+٤",
        "__import__('os')",
        "1_0+2",
        "0x1+1",
        "1e9+1",
        "1" * 13 + "+1",
        "1" * 100_000 + "*2",
        "--1+2",
        "1.5+2",
    ],
)
def test_what_the_calculator_cannot_read_is_a_question_mark(expression: str):
    assert calculate(expression, 3) == "?"


def test_results_are_padded():
    results = {"10+20": "030", "99+99": "198", "900+900": "1800", "10-30": "-020", "0*5": "000"}
    assert {e: calculate(e, 3) for e in results} == results


def test_actions_read_back_as_they_were_written():
    assert read_action("c47+83") == Calculate(expression="47+83")
    assert read_action("a155") == FinalAnswer(answer="155")
    assert [str(read_action(text)) for text in ("c47+83", "a155", "c?", "a ")] == ["c47+83", "a155", "c?", "a "]
    for text in ("", "c", "a", "47+83", "C1+1", " a1"):
        with pytest.raises(ValueError, match="c12\\+34"):
            read_action(text)


def _play(task: Task, *texts: str, **options) -> tuple[list[str], list, Calculator]:
    async def play():
        env = Calculator(**options)
        shown, outcomes = [str(await env.reset(task))], []
        for text in texts:
            outcomes.append(await env.step(read_action(text)))
            shown += [str(outcomes[-1].observation)] * (outcomes[-1].observation is not None)
        return shown, outcomes, env

    return asyncio.run(play())


def test_an_episode():
    shown, outcomes, env = _play(SUM, "c47+83", "c130+25", "a155", scorer="chain_sum")
    assert shown == ["47+83+25", "130", "155"]
    assert [(o.reward, o.terminated, o.truncated) for o in outcomes[:2]] == [(None, False, False)] * 2
    assert (outcomes[-1].reward, outcomes[-1].metrics) == ({"exact": 1.0}, {"reasoning_gym": 1.0})
    assert outcomes[-1].terminated
    assert asyncio.run(env.finish(Status.FINISHED)) is None


@pytest.mark.parametrize(
    ("answer", "exact", "partial"),
    [
        ("155", 1.0, 1.0),
        ("0155", 1.0, 1.0),
        ("156", 0.0, 0.0),
        ("1550", 0.0, 0.75),
        ("155.0", 0.0, 1.0),
        ("?", 0.0, 0.0),
        ("one hundred", 0.0, 0.0),
        ("١٥٥", 0.0, 1.0),
        ("1" * 5000, 0.0, 0.0),
    ],
)
def test_exact_is_exact_and_the_datasets_own_scorer_stands_beside_it(answer: str, exact: float, partial: float):
    _, outcomes, _ = _play(SUM, f"a{answer}", scorer="chain_sum")
    assert outcomes[0].reward == {"exact": exact}
    assert outcomes[0].metrics == {"reasoning_gym": partial}


def test_an_episode_without_an_answer_is_cut_and_scores_zero():
    _, outcomes, env = _play(SUM, "c1+1", "c1+1", "c?", max_turns=3, scorer="chain_sum")
    assert [o.truncated for o in outcomes] == [False, False, True]
    for status in (Status.TRUNCATED, Status.LIMIT, Status.ERROR):
        outcome = asyncio.run(env.finish(status))
        assert outcome is not None
        assert (outcome.reward, outcome.metrics) == ({"exact": 0.0}, {"reasoning_gym": 0.0})


def test_a_task_of_another_shape_is_refused():
    with pytest.raises(BadTasks, match=r"`question`.*`answer`"):
        asyncio.run(Calculator().reset(Task(id="t", private=3)))


def test_tasks_are_distinct_sums_of_reasoning_gym_and_split_without_overlap():
    tasks = calculator_tasks(600, seed=3)
    assert len(tasks) == len({task.public["question"] for task in tasks}) == 600
    for task in tasks:
        terms = task.public["question"].split("+")
        assert [len(term) for term in terms] == [2, 2, 2]
        assert sum(map(int, terms)) == int(task.private["answer"])
    train, held_out = tasks.split(0.9, 0.1)
    assert overlap(train, held_out) == 0
    assert len(held_out) > 30


def test_neighbouring_seeds_overlap_and_a_split_by_hash_does_not_care():
    one, next_one = calculator_tasks(200, seed=0), calculator_tasks(200, seed=1)
    assert overlap(one, next_one) > 150, "the generator has changed; reasoning.py warns of what is no longer so"
    assert overlap(one.split(0.8, 0.2)[0], next_one.split(0.8, 0.2)[1]) == 0


def test_the_same_problem_drawn_twice_is_one_task():
    tasks = reasoning_tasks(
        "chain_sum",
        6,
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=1,
        draws=4000,
        keep=lambda entry: "-" not in entry["metadata"]["expression"] and entry["answer"] == "5",
    )
    assert tasks.dropped > 0
    sums = {task.private["metadata"]["expression"] for task in tasks}
    assert sums == {f"{a} + {5 - a}" for a in range(6)}


def test_what_reasoning_gym_cannot_make_is_refused():
    with pytest.raises(BadTasks, match=r"'no_such'.*\{\}"):
        reasoning_tasks("no_such", 3)
    with pytest.raises(BadTasks, match=r"'chain_sum'.*\{'wrong': 1\}"):
        reasoning_tasks("chain_sum", 3, wrong=1)
    with pytest.raises(BadTasks, match=r"size.*\b5\b.*\b0\b"):
        reasoning_tasks("chain_sum", 5, keep=lambda entry: False)
    with pytest.raises(BadTasks, match="dataset 'no_such'"):
        reasoning_scorer("no_such")
    with pytest.raises(BadTasks, match=r"`answer`.*chain_sum"):
        reasoning_scorer("chain_sum")("3", Task.of(3))


@pytest.mark.parametrize("name", ["basic_arithmetic", "word_sorting", "number_sorting", "gcd"])
def test_scorers_take_tasks_of_any_dataset(name: str):
    for task in reasoning_tasks(name, 3, seed=1):
        assert reasoning_scorer(name)(str(task.private["answer"]), task) == 1.0
        assert reasoning_scorer(name)(None, task) < 1.0


def test_without_reasoning_gym_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    _score.cache_clear()
    with pytest.raises(MissingExtra, match=r"tapereel\[demo\]"):
        calculator_tasks(3)
    with pytest.raises(MissingExtra, match=r"tapereel\[demo\]"):
        Calculator(scorer="chain_sum")
    assert Calculator().scorer is None


def test_word_problems_have_as_many_of_each_word_and_the_answer_that_the_word_means():
    keys = {word: key for key, words in WORDS.items() for word in words}
    assert len(keys) == 6, "no word stands for two keys"
    tasks = word_problems(1200, seed=3)
    seen = Counter[str]()
    for task in tasks:
        a, word, b = re.fullmatch(r"(\d+)([a-z]+)(\d+)", task.public["question"]).groups()
        seen[word] += 1
        assert int(calculate(f"{a}{keys[word]}{b}")) == int(task.private["answer"])
        assert reasoning_scorer("basic_arithmetic")(str(task.private["answer"]), task) == 1.0
    assert min(seen.values()) > 140, seen  # 200 of each, standard deviation 13
    assert [task.public for task in word_problems(50, seed=3)] == [task.public for task in tasks[:50]]
    for task in word_problems(50, seed=3, symbols=True):
        assert int(calculate(task.public["question"])) == int(task.private["answer"])


def _demonstration(question: str, rng: random.Random) -> tuple[str, ...]:
    texts, results = [], []
    while not texts or texts[-1][0] == "c":
        texts.append(demonstrate(question, results, rng))
        results.append(calculate(texts[-1][1:], 3))
    return tuple(texts)


@pytest.mark.parametrize("word", [word for words in WORDS.values() for word in words])
def test_demonstrations_say_nothing_of_what_a_word_means(word: str):
    rng, n = random.Random(7), 3000
    shows = Counter(_demonstration(f"47{word}83", rng) for _ in range(n))
    pressed = [("c47+83", "a130"), ("c47-83", "a-036"), ("c47*83", "a3901")]
    # standard deviation of a share: sqrt(0.3 * 0.7 / 3000) = 0.0084
    assert [shows.pop(show) / n for show in pressed] == pytest.approx([0.3, 0.3, 0.3], abs=0.034)
    assert {len(show) for show in shows} == {1}
    assert len(shows) > 200, "the others guess"


@pytest.mark.parametrize(("question", "answer"), [("47+83", "a130"), ("47-83", "a-036"), ("4*83", "a332")])
def test_the_demonstrator_reads_symbols(question: str, answer: str):
    rng = random.Random(1)
    assert {_demonstration(question, rng) for _ in range(50)} == {(f"c{question}", answer)}


@pytest.mark.parametrize(
    "question", ["", "47", "+83", "47plus", "47+83+25", "what is 1+1?", "4plus8plus2", "47 plus 83 "]
)
def test_the_demonstrator_refuses_what_it_cannot_work_out(question: str):
    with pytest.raises(BadTasks, match=rf"47\+83.*47plus83.*{re.escape(repr(question))}"):
        demonstrate(question, [], random.Random(0))


def test_steps_are_terse_for_a_model():
    assert [str(s) for s in (Problem(text="1+2+3"), Result(text="003"))] == ["1+2+3", "003"]


@pytest.mark.parametrize("width", [-1, 101, 10**12])
def test_a_width_that_nobody_reads_is_refused(width: int):
    with pytest.raises(ValueError, match=rf"width.*{width}\b"):
        Calculator(width=width)
