"""Every generator of reasoning-gym makes tasks, and its scorer says of them what it says of its own entries."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tapereel.envs import BadTasks, reasoning_scorer, reasoning_tasks
from tapereel.envs.adapters.reasoning import BOARDS
from tapereel.tapes import Task

gym: Any = pytest.importorskip("reasoning_gym")

UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Have no reference answer."""


def solutions(name: str, entry: dict[str, Any]) -> list[str]:
    """Solutions of the problems that bring no answer."""
    metadata = entry["metadata"]
    if name == "rubiks_cube":
        return [metadata["example_correct_answer"]]
    if name == "propositional_logic":
        return [metadata["premises"][0]]
    if name == "graph_color":
        puzzle, colours = metadata["puzzle"], {}
        for vertex in puzzle["vertices"]:
            taken = {colours.get(a if b == vertex else b) for a, b in puzzle["edges"] if vertex in (a, b)}
            colours[vertex] = next((c for c in puzzle["color_options"] if c not in taken), puzzle["color_options"][0])
        return [json.dumps(colours)]
    return ["F+1", "{}"]


def given(score: Callable[[str | None], float], probe: str | None) -> float | str:
    """The score, or what the scorer raises at an answer that it didn't think of."""
    try:
        return score(probe)
    except Exception as error:
        return type(error).__name__


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # two of them read their data so
def test_all_of_them_load_and_score_as_they_do_themselves() -> None:
    from reasoning_gym.factory import DATASETS

    names = sorted(set(DATASETS) - {"composite"})  # which is a mixture of named others
    assert len(names) >= 100
    wrong = []
    for name in names:
        (task,) = reasoning_tasks(name, 1, seed=1)
        task = Task.model_validate_json(task.model_dump_json())  # as it comes back from a tape
        data = gym.create_dataset(name, seed=1, size=1)
        entry, ours = data[0], reasoning_scorer(name)
        probes = [entry["answer"], None, "", "0", *(solutions(name, entry) if name in UNANSWERED else [])]
        found = [given(partial(ours, task=task), probe) for probe in probes]
        wanted = [given(partial(data.score_answer, entry=entry), probe) for probe in probes]
        if found != wanted or (name not in UNANSWERED and found[0] != 1.0):
            wrong.append((name, found, wanted))
        assert (entry["answer"] is None) == (name in UNANSWERED), name
        if name in ("rubiks_cube", "propositional_logic", "graph_color"):
            assert found[-1] in (0.25, 1.0), f"{name}: a solution, if a trivial one"
    assert wrong == []
    assert set(BOARDS) < set(names)


def test_a_mixture_needs_its_parts() -> None:
    with pytest.raises(BadTasks, match=r"'composite'.*\{\}"):
        reasoning_tasks("composite", 1)
