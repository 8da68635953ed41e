"""`tapereel serve env` or `tapereel serve model` as a process of its own, which can be killed and started
again at the same address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self


class Served:
    """`with Served("file.py:Env") as server:`, as a user would start it."""

    def __init__(
        self, name: str, log: Path, *options: str, verb: str = "serve env", environment: dict[str, str] | None = None
    ) -> None:
        self.url = ""
        self._verb, self._name, self._log, self._options = verb, name, log, options
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Come up, at the same port as before if there was one."""
        port = self.url.rpartition(":")[2] or "0"
        command = [sys.executable, "-m", "tapereel.cli", *self._verb.split(), self._name, "--json", "--port", port]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._options], stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"it did not come up:\n{self._log.read_text()[-3000:]}")
        self.told = json.loads(line)
        self.url = self.told["url"]

    def hang(self) -> None:
        """Stand still, with all connections open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        """Its exit code."""
        assert self._process is not None
        self._process.send_signal(how)
        code = self._process.wait(60)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None and self._process.returncode is None:
            self.end()
