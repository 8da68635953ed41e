"""The forms in which a question comes, and what the model reads in the environments that show the task.

    python -m tests.envs.task_forms      writes the table into docs/how-to/tasks.md

A test compares the page with what is found.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas
from datasets import Dataset

from tapereel.agents import ChatAgent, Request, ScriptedEngine, rollout
from tapereel.agents.setup.setup import Setup
from tapereel.envs import Taskset
from tapereel.envs.adapters import ToolEnvironment, TRLEnvironment, trl_row
from tapereel.tapes import Answer, Task, ToolCalls
from tapereel.tapes.errors import UsageError
from tapereel.tapes.messages import text_of

from ..agents.rendering.templates_table import page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "tasks.md"
BEGIN = "<!-- made by tests/envs/task_forms.py -->\n"
REFUSED = "refused"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6*7?"}]
ROW = {"question": "6*7?", "answer": 42}


class Asked(ToolEnvironment):
    """Without an own `prompt`."""

    def __init__(self) -> None:
        super().__init__(())


def lines() -> Taskset:
    with TemporaryDirectory() as folder:
        (path := Path(folder) / "sums.jsonl").write_text(json.dumps(ROW))
        return Taskset.load(path)


ENVIRONMENTS: dict[str, Callable[[], Any]] = {"ToolEnvironment": Asked, "TRLEnvironment": TRLEnvironment}
FORMS: dict[str, Any] = {
    '`"6*7?"`': ["6*7?"],
    '`""`': [""],
    "`6`": [6],
    "`None`": [None],
    "chat messages": [CHAT],
    '`["6", "7"]`': [["6", "7"]],
    **{f'`{{"{key}": "6*7?", "answer": 42}}`': [{key: "6*7?", "answer": 42}] for key in ("prompt", "question")},
    '`{"problem": "6*7?", "solution": 42}`': [{"problem": "6*7?", "solution": 42}],
    '`{"input": "6*7?", "target": 42}`': [{"input": "6*7?", "target": 42}],
    '`{"messages": [...]}`': [{"messages": CHAT}],
    '`{"prompt": [...], "question": "6?"}`': [{"prompt": CHAT, "question": "6?"}],
    '`{"prompt": None, "question": "6*7?"}`': [{"prompt": None, "question": "6*7?"}],
    '`{"a": 6, "b": 7}`': [{"a": 6, "b": 7}],
    '`{"question": 6}`': [{"question": 6}],
    '`Task(public="6*7?", private=42)`': [Task(public="6*7?", private=42)],
    '`Task(public={"question": "6*7?"})`': [Task(public={"question": "6*7?"})],
    '`Task(public={"question": "6*7?", "unit": "m"})`': [Task(public={"question": "6*7?", "unit": "m"})],
    "`Task(public=[...])`": [Task.model_validate({"public": CHAT})],
    "`Task(public=6)`": [Task(public=6)],
    '`Task(private="6*7?")`': [Task(private="6*7?")],
    '`trl_row({"prompt": "6*7?", "answer": 42})`': [trl_row({"prompt": "6*7?", "answer": 42})],
    "a row of a `Dataset`": Dataset.from_list([ROW]),
    "a row of a DataFrame": pandas.DataFrame([ROW]),
    "a line of a JSONL file": lines(),
}


def read(env: Callable[[], Any], tasks: Any) -> list[str] | None:
    """What the model reads, as `role: text`. None if the run is refused before its first episode."""
    agent, asked = ChatAgent(actions=[ToolCalls], plain=Answer), list[str]()

    def policy(request: Request) -> str:
        asked.extend(f"{one['role']}: {text_of(one)}" for one in request.messages)
        return "42"

    try:
        _, setup = Setup().resolve(agent=agent, env=env, tasks=tasks)
    except UsageError:
        return None
    (task,) = setup.tasks
    asyncio.run(rollout(setup.agent, setup.env, task, engine=ScriptedEngine(policy)))
    return asked


def table() -> str:
    lines = [f"| a task | {' | '.join(f'`{name}`' for name in ENVIRONMENTS)} |", "|---|---|---|"]
    for form, tasks in FORMS.items():
        cells = [
            REFUSED if (found := read(env, tasks)) is None else "<br>".join(found) for env in ENVIRONMENTS.values()
        ]
        lines.append(f"| {form} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), table(), begin=BEGIN, name=str(PAGE)), "utf-8")
