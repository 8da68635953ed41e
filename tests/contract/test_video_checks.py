"""Native video of Qwen2.5-VL and Qwen3-VL, in the environment that has torchvision."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from . import video_env

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]
CHECKS = [Path(__file__).with_name(name) for name in ("video_checks.py", "video_runs.py")]


@pytest.mark.ledger("F11", "F93", "F94", "F95", "F96", "F97")
def test_native_videos_are_sampled_trained_and_compared_as_pictures_are() -> None:
    if not video_env.DONE.exists():
        pytest.fail("the environment is not there: run python -m tests.contract.video_env")
    command = [video_env.PYTHON, "-m", "pytest", "-q", *CHECKS]
    done = subprocess.run(
        command, cwd=video_env.ROOT, env=dict(os.environ), capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
