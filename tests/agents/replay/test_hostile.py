"""A tape may come from anywhere: the code that a tape names is never run, not even Tapereel's own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import ScriptedEngine, rollout
from tapereel.agents.setup.recorded_setup import recorded_agent
from tapereel.envs import Calculator
from tapereel.envs.adapters import word_problems
from tapereel.envs.checks.reexec import reexec_run
from tapereel.finetune.run.demo_scene import calculator_agent
from tapereel.tapes.errors import UsageError
from tapereel.tapes.records import Identity
from tapereel.tapes.store import Store

CHAT = "tapereel.agents.episode.chat:ChatAgent"


@pytest.mark.parametrize(
    "parse",
    [
        "tapereel.envs.load_named:load_named",
        "tapereel.envs.adapters.calculator:read_action",
        "tapereel.cli:main",
        "evil:parse",
        3,
        None,
    ],
)
def test_an_agent_named_by_a_tape_alone_is_not_run(tmp_path: Path, parse: Any) -> None:
    with pytest.raises(UsageError, match="agent="):
        recorded_agent(tmp_path, None, Identity(name="x", cls=CHAT, config={"parse": parse}))


def test_an_environment_named_by_a_tape_alone_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.create(tmp_path / "run") as store:
        engine = ScriptedEngine(lambda request: "a1")
        asyncio.run(rollout(calculator_agent(), Calculator, word_problems(1)[0], engine=engine, journal=store.writer))
    monkeypatch.setattr(Calculator, "reset", None)
    (verdict,) = reexec_run(tmp_path / "run", jobs=1).verdicts
    assert verdict.outcome == "unverifiable"
    assert verdict.reason is not None
    assert f"{Calculator.__module__}:Calculator" in verdict.reason
