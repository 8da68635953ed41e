"""Tasks and scorers from reasoning-gym, which is imported at the first use.

reasoning-gym seeds item i with `seed + i`, so sets made with neighbouring seeds overlap. To keep held-out tasks out of
training, make one taskset and `split` it by hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from pydantic_core import to_jsonable_python

from ...tapes.errors import MissingExtra
from ...tapes.records import Task
from ..taskset import BadTasks, Taskset

BOARDS = ("arc_agi", "rearc")
"""Datasets whose scorers expect boards as tuples. A task is JSON and holds a board as lists, so `reasoning_scorer`
converts the lists."""
Entry = dict[str, Any]
"""An item of reasoning-gym: `question`, `answer`, `metadata`."""


def reasoning_tasks(
    name: str,
    size: int,
    seed: int = 0,
    *,
    keep: Callable[[Entry], bool] | None = None,
    question: Callable[[Entry], str] | None = None,
    draws: int | None = None,
    **config: object,
) -> Taskset:
    """Return `size` distinct tasks from the dataset `name`, made with `config`.

    The public part has `question`, and the private part has `answer` and more. `keep` selects entries. By default, all
    are kept. `question` converts an entry to the agent's question. By default, this is the entry's own question. At
    most `draws` entries are generated, by default 100 per task.
    """
    draws = 100 * size if draws is None else draws
    try:
        dataset = _gym().create_dataset(name, seed=seed, size=draws, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise BadTasks(f"reasoning-gym can't make {name!r} with {config}: {error}") from error

    def tasks() -> Iterator[Task]:
        for k in range(draws):
            entry = dataset[k]
            if keep is None or keep(entry):
                asked = entry["question"] if question is None else question(entry)
                yield _task(name, f"{name}/{seed}/{k}", entry, asked)

    return Taskset(tasks, size=size, name=name)


def reasoning_scorer(name: str) -> Callable[[str | None, Task], float]:
    """Return the dataset's own scorer, which maps an answer and its task to a score in [0, 1], with partial credit."""
    score = _score(name)

    def scored(answer: str | None, task: Task) -> float:
        private = task.private
        if not isinstance(private, dict) or "answer" not in private:
            raise BadTasks(f"task {task.id or task.hash[:12]} has no private `answer`, which {name}'s scorer needs")
        entry: Entry = {"question": "", "metadata": {}, **private}
        if name in BOARDS:
            entry["metadata"] = {key: _board(value) for key, value in entry["metadata"].items()}
        return float(score(answer, entry))

    return scored


def _board(value: Any) -> Any:
    return tuple(map(_board, value)) if isinstance(value, list) else value


def _task(name: str, task_id: str, entry: Entry, question: str) -> Task:
    # `source_index` names the draw, not the problem. If it were kept, no two entries would ever be duplicates.
    metadata = {k: v for k, v in entry["metadata"].items() if k not in ("source_index", "source_dataset")}
    private = {"dataset": name, "answer": entry["answer"], "metadata": to_jsonable_python(metadata)}
    return Task(id=task_id, public={"question": question}, private=private)


@lru_cache
def _score(name: str) -> Callable[..., float]:
    try:
        return _gym().get_score_answer_fn(name)
    except ValueError as error:
        raise BadTasks(f"reasoning-gym has no dataset {name!r}: {error}") from error


def _gym() -> Any:
    try:
        import reasoning_gym
        import reasoning_gym.factory
    except ImportError as error:
        raise MissingExtra(error.name or "reasoning-gym", "demo", "tasks of reasoning-gym") from error
    return reasoning_gym
