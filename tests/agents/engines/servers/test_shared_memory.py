"""What a killed server leaves in shared memory, with real processes, segments and semaphores."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from tapereel.agents.engines.servers.shared_memory import remember, sweep

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory with names"),
]

SERVER = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=4096)
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(f"/dev/shm/{segment.name}", f"/dev/shm/sem.{semaphore._semlock.name.strip('/')}", flush=True)
time.sleep(600)
"""


def test_what_a_killed_server_mapped_is_deleted_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    other = SharedMemory(create=True, size=4096)
    other.close()  # another program's, which no process maps
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    left: list[Path] = []
    try:
        assert server.stdout is not None
        left = [Path(name) for name in server.stdout.readline().split()]
        assert [path.exists() for path in left] == [True, True]
        remember(server.pid)
        leader = psutil.Process(server.pid)
        family = [leader, *leader.children(recursive=True)]
        assert sweep() == []
        assert all(path.exists() for path in left), "a running server keeps what it uses"
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in family):
            time.sleep(0.05)
        assert any(path.exists() for path in left), "then there is nothing to test"
        assert set(sweep()) == {str(path) for path in left}
        assert not any(path.exists() for path in left)
        assert Path("/dev/shm", other.name).exists()
        assert not list(tmp_path.rglob("*.json"))
    finally:
        server.kill()
        server.communicate()
        other.unlink()
        for path in left:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
