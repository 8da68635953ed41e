"""What a configuration names is found, or the refusal says what was found instead and what would do."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import Agent
from tapereel.agents.setup import load_tasks
from tapereel.agents.setup.setup import load_agent, load_env
from tapereel.envs import Environment, Taskset
from tapereel.envs.load_named import load_named
from tapereel.tapes import Task
from tapereel.tapes.errors import UsageError

from .lab import WORLD
from .world import EXAMPLE


def named(name: str) -> str:
    return f"{WORLD}:{name}"


def test_an_agent_is_an_instance_a_class_or_a_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "named_agents.py").write_text(
        "from tapereel.agents import Agent\n"
        "class Mute(Agent):\n    async def act(self, tape, llm):\n        yield\n"
        "one = Mute()\ndef make(): return Mute()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    agents = [load_agent(f"named_agents:{name}") for name in ("Mute", "one", "make")]
    assert all(isinstance(agent, Agent) for agent in agents)
    assert [agent.path for agent in agents] == ["mute"] * 3


@pytest.mark.parametrize("inside", [True, False])
def test_a_file_imports_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool):
    name = f"beside_{inside}".lower()
    (tmp_path / f"{name}_helper.py").write_text("made = 7\n")
    (tmp_path / f"{name}.py").write_text(f"from {name}_helper import made\n")
    monkeypatch.chdir(tmp_path if inside else tmp_path.parent)
    monkeypatch.setattr("sys.path", [*sys.path])
    assert load_named(f"{tmp_path / name}.py:made") == 7


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\nimport no_such_thing_at_all", r"ModuleNotFoundError: .*'no_such_thing_at_all' \(.*:2\)"),
        ("x = 1\n\nx.y", r"AttributeError: .* \(.*broken_\d.py:3\)"),
        ("x = (", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_told_with_its_line(tmp_path: Path, text: str, says: str):
    path = tmp_path / f"broken_{len(text)}.py"
    path.write_text(text)
    with pytest.raises(UsageError, match=says.replace(r"broken_\d", path.stem)):
        load_named(f"{path}:x")
    assert path.stem not in sys.modules


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("number", r":number\b.*\bint\b.*agent"),
        ("undecorated", "@agent"),
        ("make_nothing", "make_nothing.*NoneType.*agent"),
        ("Digits", r"\bDigits\b.*agent"),
        ("Picky", r"\bPicky\b.*\bsize\b"),
        ("nothing_of_the_kind", "'nothing_of_the_kind'"),
    ],
)
def test_what_is_no_agent_is_refused(name: str, says: str):
    with pytest.raises(UsageError, match=says):
        load_agent(named(name))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:agent", "'no_such_module'"),
        ("player", r"'player'.*package\.module:name"),
        ("nowhere.py:player", r"nowhere\.py"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, says: str):
    for load in (load_agent, load_env, load_tasks):
        with pytest.raises(UsageError, match=says):
            load(name)


def test_an_environment_is_a_class_or_a_factory_and_the_probe_is_closed():
    counted = load_named(named("Counted"))
    before = counted.closed
    made = [load_env(named(name))() for name in ("Counted", "make_counted")]
    assert counted.closed - before == 2  # each load tried one instance, and closed it
    assert all(isinstance(env, Environment) for env in made)
    assert made[0] is not made[1]


def test_a_close_that_needs_reset_is_refused_with_the_remedy():
    class Opens(Environment):
        async def close(self) -> None:
            self.file.close()  # type: ignore[attr-defined]

    with pytest.raises(
        UsageError, match=r"Opens\.close .*`reset`.*'file' \(.*test_references\.py:\d+\): .*`__init__`"
    ) as e:
        load_env(Opens)
    assert "can't be loaded" not in str(e.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("instance", r":instance\b.*\bDigits\b.*episode"),
        ("make_nothing", "make_nothing.*NoneType.*environment"),
        ("make_later", r"make_later\b.*async"),
        ("Picky", r"\bPicky\b.*\bsize\b"),
        ("number", r":number\b.*\bint\b.*environment"),
    ],
)
def test_what_is_no_environment_is_refused(name: str, says: str):
    with pytest.raises(UsageError, match=says):
        load_env(named(name))


@pytest.mark.parametrize(
    ("source", "count", "size"),
    [
        (named("few"), None, 2),
        (named("few"), 1, 1),
        (named("by_index"), 4, 4),
        (named("listed"), None, 3),
        (f"{EXAMPLE}:tasks", None, 100),
        ([3, 7, 3], None, 2),
    ],
)
def test_tasks_come_from_anything(source: Any, count: int | None, size: int):
    assert len(load_tasks(source, None, count)) == size


def test_rows_of_a_file_become_tasks(tmp_path: Path):
    path = tmp_path / "digits.jsonl"
    path.write_text("".join(json.dumps({"shown": k}) + "\n" for k in range(3)))
    assert list(load_tasks(str(path), named("to_task"))) == [Task(public=str(k), private=str(k + 1)) for k in range(3)]
    assert [task.private for task in load_tasks(str(path), count=1)] == [{"shown": 0}]


@pytest.mark.parametrize(
    ("source", "row", "count", "says"),
    [
        (named("few"), None, 3, r"count\b.*\b3\b.*\b2\b"),
        (named("few"), named("to_task"), None, r":few\b.*task_row.*dataset\.columns"),
        (named("few"), named("number"), None, r":number\b.*\bint\b.*\brow\b"),
        (named("by_index"), None, None, "pass `size`"),
        (named("listed_later"), None, None, r"listed_later\b.*async"),
        (named("number"), None, None, r"source\b.*\b7\b"),
        ([], None, None, "holds"),
        ([1], None, 2, r"size\b.*\b2\b"),
        ("missing.jsonl", None, None, r"missing\.jsonl"),
    ],
)
def test_what_gives_no_tasks_is_refused(source: Any, row: str | None, count: int | None, says: str):
    with pytest.raises(UsageError, match=says):
        load_tasks(source, row, count)


def test_the_tasks_of_the_example_say_the_next_digit():
    tasks = load_tasks(f"{EXAMPLE}:tasks")
    assert isinstance(tasks, Taskset)
    env = load_env(f"{EXAMPLE}:Digits")()
    shown = asyncio.run(env.reset(tasks[99]))
    assert (str(shown), tasks[99].private) == ("9" * 10, "0")
