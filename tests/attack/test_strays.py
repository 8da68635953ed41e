"""Code that reaches for what it shares with other episodes ends its own at most: nothing hangs, no traceback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest

import tapereel as tr
from tapereel.agents import RunConfig, ScriptedEngine, rollout
from tapereel.agents.runs import run
from tapereel.agents.runs.runner import RunSummary
from tapereel.cli.console import Exit
from tapereel.envs.remote import RemoteEnvironment
from tapereel.tapes.common.shared_loop import FORKED
from tapereel.tapes.errors import StrayCancellation
from tapereel.tapes.store import verify

from ..envs.remote.process import Served
from .strays import FORKS, HARMLESS, REFUSED, TASKS, Player, Strays
from .test_running_loop import inside

HERE = Path(__file__).parent
ENGINE = {"kind": "scripted", "policy": f"{HERE}/strays.py:seven"}
PLACES = [
    *((place, name) for place in ("step", "act") for name in [*HARMLESS, *REFUSED]),
    *((place, name) for place in ("reset", "close", "aclose") for name in ("cancels_all", "stops_the_loop")),
    ("close", "replaces_the_factory"),
]


def rolled(path: Path, name: str, place: str) -> RunSummary:
    stray = (HARMLESS | REFUSED)[name]
    if place in ("act", "aclose"):
        agent, does = Player(place, stray), dict[int, Callable[[], Awaitable[None]]]()
    else:
        agent, does = Player(), {3: stray}
    env = type("Strays", (Strays,), {"place": place, "does": does})
    config = RunConfig.model_validate({"engine": ENGINE, "retries": 0, "concurrency": 10})
    found = run(config, path / "run", agent=agent, env=env, tasks=TASKS)
    assert verify(path / "run").exit_code == 0
    return found


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("place", "name"), PLACES)
def test_a_stray_ends_no_other_episode(
    tmp_path: Path, place: str, name: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    found = rolled(tmp_path, name, place)
    lost = 1 if name in REFUSED and place != "close" else 0
    kinds = {"act": "agent", "step": "environment"}
    assert {(end.status, end.cause): end.episodes for end in found.ends} == {
        ("finished", None): len(TASKS) - lost,
        **({("error", kinds[place]): 1} if lost else {}),
    }
    assert "Traceback" not in caplog.text + capfd.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["cancels_all", "cancels_from_a_thread", "stops_the_loop", "replaces_the_factory"])
def test_a_stray_in_a_notebook(tmp_path: Path, name: str) -> None:
    found = inside(lambda: rolled(tmp_path, name, "step"))
    assert found.scored == len(TASKS) - (name in REFUSED)


def command(path: Path, verb: str, env: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The command's result."""
    whole = [sys.executable, "-m", "tapereel.cli", verb, "--agent", f"{HERE}/strays.py:player", "--out", "run", *words]
    whole += ["--env", f"{HERE}/strays.py:{env}", "--tasks", f"{HERE}/strays.py:TASKS"]
    return finished(whole, path)


def finished(whole: list[str], path: Path) -> subprocess.CompletedProcess[str]:
    """The result of a process. Its children that live on are killed."""
    with subprocess.Popen(
        whole, cwd=path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=100)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(whole, process.returncode, out, err)


SCRIPTED = ("--json", *(word for key, value in ENGINE.items() for word in ("--set", f"engine.{key}={value}")))


@pytest.mark.timeout(150)
@pytest.mark.parametrize("more", [(), ("--set", "env_processes=2")])
def test_every_stray_in_one_run(tmp_path: Path, more: tuple[str, ...]) -> None:
    done = command(tmp_path, "run", "Shell", *SCRIPTED, *more, "--set", "retries=0")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert json.loads(done.stdout)["scored"] == len(TASKS) - len(REFUSED)


@pytest.mark.timeout(150)
def test_every_stray_in_one_training(tmp_path: Path) -> None:
    model = tr.save_tiny_model(tmp_path / "model", size="micro")
    settings = {"updates": 3, "groups": 10, "group_size": 2, "sampling.max_tokens": 2}
    words = [word for key, value in settings.items() for word in ("--set", f"loop.{key}={value}")]
    done = command(tmp_path, "train", "Shell", "--model", str(model), *words, "--set", "evaluation.fraction=0.1")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert verify(tmp_path / "run").exit_code == 0


@pytest.mark.timeout(150)
@pytest.mark.parametrize("env", ["Forks", "BlockingForks"])
def test_a_forked_child_leaves(tmp_path: Path, env: str) -> None:
    done = command(tmp_path, "run", env, *SCRIPTED)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    assert json.loads(done.stdout)["scored"] == len(TASKS)
    codes = re.findall(r"^child (-?\d+)$", done.stderr, re.MULTILINE)
    assert len(codes) >= len(TASKS) + len(FORKS)
    assert set(codes) == {str(FORKED)}


OWN_LOOP = """
import asyncio, os, sys
from tapereel.agents import ScriptedEngine, rollout
from tapereel.tests.attack.strays import CHILDREN, Forks, Player, TASKS, forks
Forks.does = {7: forks}
print(asyncio.run(rollout(Player(), Forks, TASKS[7], engine=ScriptedEngine(["7"]))).reward, CHILDREN)
"""


@pytest.mark.timeout(60)
def test_a_forked_child_leaves_in_an_event_loop_of_the_users_own(tmp_path: Path) -> None:
    done = finished([sys.executable, "-c", OWN_LOOP], tmp_path)
    assert done.stdout == f"1.0 [{FORKED}, {FORKED}]\n", done.stderr


@pytest.mark.timeout(60)
def test_a_constructor_that_cancels_its_task_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    made = 0

    def factory() -> Strays:
        nonlocal made
        made += 1
        task = asyncio.current_task() if made == 5 else None
        if task is not None:
            task.cancel()
        return Strays()

    config = RunConfig.model_validate({"engine": ENGINE})
    with pytest.raises(StrayCancellation):
        run(config, tmp_path / "run", agent=Player(), env=factory, tasks=TASKS[-8:])


@pytest.mark.timeout(120)
def test_strays_at_an_environment_server(tmp_path: Path) -> None:
    names = ("cancels_all", "cancels_from_a_thread", "stops_the_loop", "replaces_the_factory", "ends_the_executor")
    places = [list(HARMLESS | REFUSED).index(name) for name in names]
    with Served(f"{HERE}/strays.py:Strays", tmp_path / "log") as server:
        engine = ScriptedEngine(["7"] * 9)

        async def scored() -> int:
            make = partial(RemoteEnvironment, server.url, Strays)
            tapes = [await rollout(Player(), make, TASKS[k], engine=engine) for k in (*places, len(TASKS) - 1)]
            return sum(tape.reward == 1.0 for tape in tapes)

        assert asyncio.run(scored()) == len(names) + 1 - sum(name in REFUSED for name in names)
        assert server.end(signal.SIGTERM) == Exit.HOLDS
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.timeout(60)
def test_a_run_without_a_result_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "from tapereel.agents import Agent\n\n\nclass Fails(Agent):\n    async def act(self, tape, llm):\n"
        "        raise ValueError('always')\n        yield\n"
    )
    done = command(tmp_path, "run", "Strays", *SCRIPTED, "--agent", "fails.py:Fails")
    assert (done.returncode, json.loads(done.stdout)["scored"]) == (1, 0)
