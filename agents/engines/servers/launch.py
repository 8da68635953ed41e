"""Starts a local vLLM server with the flags that training data requires, and stops all of its processes.

By default, the server listens on loopback. For other addresses, the caller must set an API key. On loopback, a new key
is created, because all users of the machine can connect to it. vLLM's own key check leaves some routes open, even those
that receive weights. vLLM therefore loads our middleware (`request_checks.Guard`), which requires the key on every
route, also those that receive weights, and refuses requests from web pages. The connection isn't encrypted, so use
other addresses than loopback in a private network only.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO

from pydantic import JsonValue

from ....agents.engines.engine import EngineError
from ....tapes.common import request_checks
from ....tapes.common.access_token import check_token, drop_token, new_token, private_file, token_path
from ....tapes.common.request_checks import is_loopback
from ....tapes.common.text import logger
from ....tapes.errors import remedy
from ....tapes.store.store import check_folder
from ..transport.http_channel import Server, ServerFailed, free_port
from .shared_memory import remember, sweep

log = logger("launch")

OURS = ("--host", "--port", "--uds", "--model", "--api-key")
"""vLLM flags that `options` must not contain, because `LocalServer` itself sets the model, the address and the key."""
GUARD = "tapereel_request_checks"
"""Name under which vLLM imports `request_checks`. It is a copy, since vLLM's interpreter may lack this package."""
TRANSFER = [
    "--worker-extension-cls",
    "tapereel.agents.engines.weights.vllm_worker.Extension",
    "--weight-transfer-config",
    '{"backend": "tapereel"}',
]
"""Flags that load the weight-transfer backend in `vllm_worker`."""
SIGHT = ["--allowed-media-domains", "none.invalid", "--limit-mm-per-prompt", '{"image": 256}']
"""These flags keep the server from fetching pictures from URLs, because the only allowed host, `none.invalid`, can't
exist. They also limit the number of pictures in a prompt."""
PIL = ["--mm-processor-kwargs", '{"use_fast": false}']
"""These flags make the server resize pictures with Pillow, as the local processor does. They are for families whose
pictures aren't sent in their final size (`PictureTokens.fitted`). SmolVLM's video processor refuses the option's newer
name, `backend`."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`."""
LORA_SLOTS = 4
"""Maximum number of adapters in one batch. If it is too low, completions with older versions wait for a free slot."""
_NO_VLLM = "ModuleNotFoundError: No module named 'vllm'"
_CHILD = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; it outlives exec
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that starts this server has ended")
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""A program that asks Linux for a signal when its parent process ends, and then replaces itself with the server. The
server therefore ends with its parent, even if the parent is killed by SIGKILL."""
_VERSION = """
from importlib.metadata import distributions
print(*(f"{found.name}-{found.version}" for found in distributions() if (found.name or "").startswith("vllm")))
"""


def lora_flags(rank: int) -> list[str]:
    """Return vLLM's flags for adapters of this rank. Raises ValueError if the rank is above vLLM's maximum."""
    room = next((room for room in LORA_RANKS if room >= rank), None)
    if room is None:
        raise ValueError(f"LoRA rank {rank}: vLLM serves ranks up to {LORA_RANKS[-1]}")
    return ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", str(LORA_SLOTS)]


def flags_of(options: Mapping[str, JsonValue]) -> list[str]:
    """Return options as vLLM's command line arguments, such as `--max-model-len 8192` for `{"max_model_len": 8192}`."""
    flags = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            flags += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return flags


class LocalServer:
    """A vLLM server process. `async with LocalServer(folder) as url:` starts and stops it."""

    def __init__(
        self,
        model: str | Path,
        *,
        port: int = 0,
        host: str = "127.0.0.1",
        python: str = sys.executable,
        control: bool = True,
        transfer: bool = False,
        lora_rank: int | None = None,
        key_variable: str | None = None,
        options: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        patience: float = 600.0,
    ) -> None:
        """`python` is an interpreter that has vLLM. `options` are additional flags for vLLM. `control` enables the
        routes that receive weights. `transfer` adds vLLM's weight-transfer routes with Tapereel's backend. The
        interpreter then needs this package too. `lora_rank` reserves memory for adapters of this rank. `port` 0 selects
        a free port. The server's output goes to `log`, by default a temporary file. `start` fails if the server doesn't
        answer within `patience` seconds. Raises ValueError if the arguments are unsafe or contradict each other."""
        if not is_loopback(host) and key_variable is None:
            raise ValueError(
                f"a server at {host} can be reached by others: name the environment variable with its API "
                f"key ({remedy('key variable', 'key_variable=')})"
            )
        if not control and (transfer or lora_rank is not None):
            raise ValueError(
                "transfer and adapters are ways to take weights, which "
                f"{remedy('control', 'control=False')} turns off: leave one of the two out"
            )
        ours = sorted({word.partition("=")[0] for word in options if _is_ours(word)})
        if ours:
            raise ValueError(
                f"options {', '.join(ours)}: the model, the address and the variable that holds the key "
                "are arguments, since they decide who can reach the server"
            )
        if key_variable is not None and not os.environ.get(key_variable):
            raise ValueError(f"the environment variable {key_variable} with the API key is not set")
        check_folder(model)
        self.model, self.host, self.port = Path(model), host, port or free_port(host)
        self._python, self._control, self._options = python, control, tuple(options)
        self._environment, self._patience, self._key_variable = environment or {}, patience, key_variable
        self._ways = [*(TRANSFER if transfer else ()), *(lora_flags(lora_rank) if lora_rank is not None else ())]
        """Flags that let the server receive weights by `transfer` or `lora`. For `reload`, no flags are needed."""
        self._lora = lora_rank is not None
        self._key = new_token() if key_variable is None else check_token(os.environ[key_variable])
        self.token_file: str | None = None
        """The file with the running server's key, for clients of the same user. None if the caller set a key."""
        self._guard: tempfile.TemporaryDirectory[str] | None = None
        self._log_path = log
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's base address."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def command(self) -> list[str]:
        """The command line that starts the server. The API key isn't in it, because `ps` shows command lines to all
        users."""
        words = [self._python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model)]
        words += ["--host", self.host, "--port", str(self.port), "--enable-scale-out", "--generation-config", "vllm"]
        words += ["--logprobs-mode", "processed_logprobs", "--middleware", f"{GUARD}.Guard"]
        about = self.model / "config.json"
        tiled = about.is_file() and json.loads(about.read_bytes()).get("model_type") in ("idefics3", "smolvlm")
        return [*words, *SIGHT, *(PIL if tiled else ()), *self._whole_prompts, *self._ways, *self._options]

    @cached_property
    def _whole_prompts(self) -> list[str]:
        """Return flags that disable chunked prefill on vLLM's CPU build, or no flags for other builds. The CPU build
        can't rewind the random generator, so it crashes if the prompt of a request with a seed is chunked."""
        device = {**os.environ, **self._environment}.get("VLLM_TARGET_DEVICE")
        if device is None:
            asked = subprocess.run([self._python, "-c", _VERSION], capture_output=True, text=True, timeout=60.0)
            device = "cpu" if "cpu" in asked.stdout or sys.platform == "darwin" else ""
        return ["--no-enable-chunked-prefill"] if device == "cpu" else []

    async def start(self) -> str:
        """Start the server, wait until it answers, and return its address. Raises EngineError."""
        self._check_port()
        for name in sweep():
            log.warning("deleted %s, shared memory that a killed vLLM left", name)
        self._spawn()
        assert self._process is not None
        try:
            await self._up()
            remember(self._process.pid)
        except BaseException:
            self.stop()
            raise
        return self.url

    def _check_port(self) -> None:
        """Raise EngineError if the address is in use. Otherwise another server could answer there, and `_up` would
        mistake it for the new server."""
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise EngineError(
                    f"nothing can listen at {self.url} ({error.strerror}); is there a server already? "
                    f"Choose another port ({remedy('port', 'port=')}; 0 takes a free one)"
                ) from error

    def _spawn(self) -> None:
        """Start the process in a new session. It then leads a process group with all its children, and `stop` can
        signal the whole group."""
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_SERVER_DEV_MODE": "1" if self._control else "0",
            **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if self._lora else {}),
            **self._environment,
            "VLLM_API_KEY": self._key,
            "TAPEREEL_GUARDED": self.host,
        }
        # The copy is alone in its folder, because vLLM could otherwise import modules of this package by bare names.
        self._guard = tempfile.TemporaryDirectory(prefix="tapereel-vllm-")
        shutil.copy(request_checks.__file__, Path(self._guard.name) / f"{GUARD}.py")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (self._guard.name, environment.get("PYTHONPATH"))))
        if self._key_variable is None:
            self.token_file = str(private_file(token_path(self.url), self._key))
        self._log = self._log_path.open("ab") if self._log_path else tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(os.getpid()), *self.command],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        # The new session doesn't end with this process, so vLLM would keep running after an exit that skips `stop`.
        atexit.register(self.stop)

    async def _up(self) -> None:
        """Wait until `/health` answers. Raises EngineError if the process ends first, or after `patience` seconds."""
        assert self._process is not None
        server = Server(self.url, key_variable=self._key_variable)
        deadline = time.monotonic() + self._patience
        try:
            while True:
                if self._process.poll() is not None:
                    if _NO_VLLM in self.printed():
                        raise EngineError(
                            f"{self._python} has no vLLM: install the extra tapereel[vllm], or name an "
                            f"interpreter that has it ({remedy('python', 'python=')})"
                        )
                    raise EngineError(
                        f"{' '.join(self.command)}\nended with exit code {self._process.returncode}:\n{self.printed()}"
                    )
                with contextlib.suppress(ServerFailed):
                    await server.get("/health", seconds=5.0)
                    return
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"{' '.join(self.command)}\nwas not up after {self._patience:g} s:\n{self.printed()}"
                    )
                await asyncio.sleep(0.25)
        finally:
            await server.close()

    def printed(self, end: int = 4000) -> str:
        """Return the last `end` bytes that the server printed."""
        if self._log is None:
            return ""
        with open(self._log_path, "rb") if self._log_path else contextlib.nullcontext(self._log) as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - end))
            return log.read().decode(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """The exit code if the server has ended by itself, or None if it is running or wasn't started."""
        return self._process.poll() if self._process is not None else None

    def wait(self) -> int:
        """Block until the server ends by itself, and return its exit code."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.wait()

    def stop(self, grace: float = 20.0) -> None:
        """Stop the server and its child processes with SIGTERM, and after `grace` seconds with SIGKILL."""
        if self._process is None:
            return
        for signal, wait in ((15, grace), (9, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal)
            try:
                self._process.wait(wait)
            except subprocess.TimeoutExpired:
                continue
            if signal == 15:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, 9)  # engine processes can outlive their parent
            break
        self._process = None
        drop_token(self.url, self._key)
        if self._guard is not None:
            self._guard.cleanup()
        sweep()  # deletes what a killed vLLM left behind; a vLLM that exits normally leaves nothing
        atexit.unregister(self.stop)
        if self._log is not None:
            self._log.close()
            self._log = None

    async def __aenter__(self) -> str:
        return await self.start()

    async def __aexit__(self, *exc: object) -> None:
        await asyncio.to_thread(self.stop)


class OwnServer(Server):
    """A connection to a running `LocalServer`, which is stopped when the connection is closed."""

    def __init__(self, local: LocalServer, *, seconds: float) -> None:
        super().__init__(local.url, seconds=seconds)
        self._local = local

    def ended(self) -> str | None:
        """Return the exit code and last output if the server has ended, since nothing will start it again."""
        code = self._local.exit_code
        return None if code is None else f"vLLM ended with exit code {code}; it printed:\n{self._local.printed(2000)}"

    async def close(self) -> None:
        """Close the connections and stop the server."""
        await super().close()
        await asyncio.to_thread(self._local.stop)


def _is_ours(word: str) -> bool:
    """Return whether `word` is a flag in `OURS`, in any spelling that vLLM accepts, such as `--api_key=` or `--hos`."""
    name = word.partition("=")[0].replace("_", "-")
    return len(name) > len("--h") and any(flag.startswith(name) for flag in OURS)
