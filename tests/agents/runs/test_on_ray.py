"""`on=ray`: what it takes, and what is refused. tests/contract/test_ray.py runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.runs.on_ray import check_hello
from tapereel.agents.runs.runner import RunConfig
from tapereel.agents.runs.worker import Hello
from tapereel.agents.setup.on_config import RayConfig
from tapereel.tapes.common.config import AT_RESUME
from tapereel.tapes.errors import UsageError

DIGITS = Path(__file__).parents[3] / "examples" / "digits.py"
HERE = Hello("one", 1, 100.0, "package", {"agent": "a", "environment": "e"}, "tokens")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("ray", RayConfig()),
        ("ray:head:6379", RayConfig(address="head:6379")),
        ({"cpus": 4}, RayConfig(cpus=4)),
        (None, None),
    ],
)
def test_a_place_is_a_word_or_has_settings(given: Any, meant: RayConfig | None):
    config = RunConfig.model_validate({"engine": {"kind": "scripted", "answers": ["a"]}, "on": given})
    assert config.on == meant
    assert config.model_dump(context=AT_RESUME)["on"] is None, "a run continues elsewhere"


@pytest.mark.parametrize("given", ["slurm", "ray:", "Ray"])
def test_another_place_is_refused(given: str):
    with pytest.raises(ValueError, match="write ray, or ray:ADDRESS"):
        RunConfig.model_validate({"engine": {"kind": "scripted", "answers": ["a"]}, "on": given})


@pytest.mark.parametrize(
    ("other", "embedded", "why"),
    [
        ({"package": "older"}, False, "another Tapereel"),
        ({"code": {"agent": "b", "environment": "e"}}, False, "another version of the agent"),
        ({"tokenizer": "others"}, False, "another tokenizer"),
        ({"machine": "two"}, True, "serves only its own machine"),
    ],
)
def test_a_worker_that_differs_is_refused(other: dict[str, Any], embedded: bool, why: str):
    with pytest.raises(UsageError, match=why):
        check_hello(HERE._replace(**other), HERE, "worker-0", embedded=embedded, until=100.1)


def test_a_worker_on_another_machine_serves_engines_of_servers(caplog: pytest.LogCaptureFixture):
    check_hello(HERE._replace(machine="two"), HERE, "worker-0", embedded=False, until=100.1)
    assert caplog.messages == []
    check_hello(HERE._replace(clock=103.0), HERE, "worker-0", embedded=False, until=100.1)
    assert "differs from this machine's by 2.9 s" in caplog.text


def test_without_ray_the_command_names_the_extra_before_anything_is_written(tmp_path: Path):
    """A module that can't be found stands in for Ray, because this environment might have it."""
    (tmp_path / "ray.py").write_text("raise ModuleNotFoundError('no ray', name='ray')")
    words = ["run", "--agent", f"{DIGITS}:player", "--env", f"{DIGITS}:Digits", "--tasks", f"{DIGITS}:tasks"]
    words += ["--set", 'engine.answers=["7"]', "--on", "ray", "--set", "on.cpus=2", "--out", "out"]
    done = subprocess.run(
        [sys.executable, "-m", "tapereel", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 64, done.stderr
    assert 'pip install "tapereel[ray]"' in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "out").exists()


def test_a_run_in_this_process_does_not_import_ray(tmp_path: Path):
    (tmp_path / "ray.py").write_text("raise AssertionError('Ray was imported')")
    words = ["run", "--agent", f"{DIGITS}:player", "--env", f"{DIGITS}:Digits", "--tasks", f"{DIGITS}:tasks"]
    words += ["--set", 'engine.answers=["7"]', "--set", "count=2", "--out", "out"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "tapereel", *words], cwd=tmp_path, env=env, capture_output=True)
    assert done.returncode == 0, done.stderr
