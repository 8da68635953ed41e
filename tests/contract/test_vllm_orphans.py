"""The real vLLM and SIGKILL: what it leaves when it is killed, and when the process that started it is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from tapereel.agents.engines.servers.shared_memory import sweep

from .lab import vllm_is_there
from .vllm_cpu import ENVIRONMENT, OPTIONS, PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

STARTS = """
import asyncio, sys, time
from pathlib import Path
from tapereel.agents.engines.servers.launch import LocalServer
server = LocalServer(
    sys.argv[1], python=sys.argv[2], options=sys.argv[4:], log=Path(sys.argv[3]), environment=%r, patience=500.0
)
asyncio.run(server.start())
print(server._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("killed", ["the run", "all of it"])
def test_a_kill_leaves_no_process_and_no_shared_memory(
    killed: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm_is_there()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    other = SharedMemory(create=True, size=4096)  # another program's, which nobody maps when it is closed
    other.close()
    words = [str(folder), str(PYTHON), str(tmp_path / "log"), *OPTIONS]
    run = subprocess.Popen([sys.executable, "-c", STARTS % ENVIRONMENT, *words], stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        server = psutil.Process(pid)
        family = [server, *server.children(recursive=True)]
        assert any("EngineCore" in process.name() for process in family)
        (note,) = (tmp_path / "cache" / "tapereel").rglob("*.json")
        left = [Path(name) for name in json.loads(note.read_text())]
        assert left
        assert all(path.exists() for path in left)
        if killed == "all of it":
            os.killpg(pid, signal.SIGKILL)
        run.kill()
        run.wait()
        deadline = time.monotonic() + 120
        while any(process.is_running() and process.status() != "zombie" for process in family):
            assert time.monotonic() < deadline, "processes of vLLM outlive the run"
            time.sleep(0.2)
        if killed == "all of it":
            assert any(path.exists() for path in left), "then there is nothing to test"
        sweep()  # as the next start does
        assert not any(path.exists() for path in left)
        assert Path("/dev/shm", other.name).exists()
        assert not note.exists()
    finally:
        run.kill()
        run.communicate()
        other.unlink()
