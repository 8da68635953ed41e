"""A tape may come from anywhere: what stands on it says what to run only where that is Tapereel's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.episode.chat import ChatAgent
from tapereel.agents.setup.recorded_setup import recorded_agent
from tapereel.envs.adapters.calculator import Calculator, read_action
from tapereel.envs.checks.reexec import own_environment
from tapereel.tapes.errors import UsageError
from tapereel.tapes.records import Identity

CHAT = "tapereel.agents.episode.chat:ChatAgent"
CALCULATOR = "tapereel.envs.adapters.calculator:Calculator"


@pytest.mark.parametrize(
    "cls",
    [
        "tapereel.envs.load_named:importlib.import_module",
        "tapereel.envs.load_named:load_named",
        "tapereel.envs.adapters.gym:GymEnvironment",
        "tapereel.envs.adapters.calculator:Calculator.__init__",
        "tapereel.envs.../../evil.py:Evil",
        "os:system",
        "",
    ],
)
def test_an_environment_named_by_a_tape_alone_is_not_run(cls: str) -> None:
    assert own_environment(Identity(name="x", cls=cls, config={"name": "evil", "env": "evil:Evil-v0"})) is None


@pytest.mark.parametrize(
    "parse",
    [
        "tapereel.envs.load_named:load_named",
        "tapereel.envs.adapters.calculator:re.compile",
        "tapereel.cli:main",
        "evil:parse",
        3,
        None,
    ],
)
def test_a_parser_named_by_a_tape_alone_is_not_run(tmp_path: Path, parse: Any) -> None:
    with pytest.raises(UsageError, match="agent="):
        recorded_agent(tmp_path, None, Identity(name="x", cls=CHAT, config={"parse": parse}))


def test_the_demos_own_are_made_again_with_their_settings_and_no_others(tmp_path: Path) -> None:
    make = own_environment(Identity(name="x", cls=CALCULATOR, config={"width": 4, "max_turns": 2, "evil": "rm"}))
    assert make is not None
    made = make()
    assert isinstance(made, Calculator)
    assert (made.width, made.max_turns) == (4, 2)
    config = {"parse": "tapereel.envs.adapters.calculator:read_action", "misreads": 0, "evil": 1}
    agent = recorded_agent(tmp_path, None, Identity(name="solver", cls=CHAT, config=config))
    assert isinstance(agent, ChatAgent)
    assert (agent.parse, agent.misreads, agent.name) == (read_action, 0, "solver")
