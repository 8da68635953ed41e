"""The attacks of `sandbox_probes.py`, as this user and as a plain one, with both backends: none reaches anything."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import plain_user, sandbox_probes

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is for Linux"), pytest.mark.timeout(600)]
ROOT = pytest.mark.skipif(os.getuid() != 0, reason="as another user, which only root can become")
CASES = [
    pytest.param(False, "bubblewrap", id="this user-bubblewrap"),
    pytest.param(True, "bubblewrap", id="plain user-bubblewrap", marks=[ROOT, pytest.mark.contract]),
    pytest.param(False, "podman", id="this user-podman", marks=pytest.mark.contract),
    pytest.param(True, "podman", id="plain user-podman", marks=[ROOT, pytest.mark.contract]),
]


@pytest.fixture(scope="module")
def plain() -> Iterator[str]:
    """A user without privileges; `useradd` gives it the subordinate ids that podman needs."""
    name = f"probe{uuid.uuid4().hex[:8]}"
    subprocess.run(["useradd", "--create-home", name], check=True)
    yield name
    subprocess.run(["userdel", "--remove", "--force", name], check=True, capture_output=True)


@functools.cache
def outcome(user: str | None, backend: str) -> dict[str, str]:
    script = [sys.executable, "-m", "tapereel.tests.attack.sandbox_probes", backend]
    command = script if user is None else [sys.executable, str(Path(plain_user.__file__)), user, *script]
    package = Path(sandbox_probes.__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(("other", "backend"), CASES)
@pytest.mark.parametrize("name", sandbox_probes.NAMES)
def test_a_snippet_reaches_nothing(name: str, other: bool, backend: str, request: pytest.FixtureRequest):
    user = request.getfixturevalue("plain") if other else None
    assert outcome(user, backend)[name] == ""
