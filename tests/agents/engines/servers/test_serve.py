"""`tapereel serve model` and `LocalServer`: the flags, who is refused, and that what was started is ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tapereel.agents import EngineError
from tapereel.agents.engines.servers import LocalServer
from tapereel.cli import main

pytestmark = pytest.mark.timeout(120)

FLAGS = [
    "--host",
    "127.0.0.1",
    "--port",
    "8123",
    "--enable-scale-out",
    "--generation-config",
    "vllm",
    "--logprobs-mode",
    "processed_logprobs",
    "--middleware",
    "tapereel_request_checks.Guard",
    "--allowed-media-domains",
    "none.invalid",
    "--limit-mm-per-prompt",
    '{"image": 256}',
]
CUDA = {"VLLM_TARGET_DEVICE": "cuda"}


def test_the_flags_that_make_answers_training_data() -> None:
    command = LocalServer("m", port=8123, environment=CUDA, options=["--dtype", "half"]).command
    assert command == [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "m",
        *FLAGS,
        "--dtype",
        "half",
    ]


def test_a_server_of_tiles_resizes_by_pillow(tmp_path: Path) -> None:
    for kind, flags in (("smolvlm", ["--mm-processor-kwargs", '{"use_fast": false}']), ("qwen2_vl", [])):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        (tmp_path / "model.safetensors").write_bytes(b"")
        command = LocalServer(tmp_path, environment=CUDA).command
        assert command[command.index('{"image": 256}') + 1 :] == flags


@pytest.mark.parametrize(
    "options",
    [
        "--host 0.0.0.0",
        "--host=0.0.0.0",
        "--hos 0.0.0.0",
        "--api-key sesame",
        "--api_key=sesame",
        "--port 1",
        "--uds /tmp/x",
        "--model other",
    ],
)
def test_options_decide_nothing_about_who_reaches_it(
    options: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["serve", "model", str(tmp_path), f"--options={options}"]) == 64
    said = capsys.readouterr().err
    assert options.replace("=", " ").split()[0] in said
    assert "sesame" not in said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--options", 'a "b'), "quotation"),
        (("--lora", "0"), "--lora"),
        (("--lora", "1000"), "512"),
        (("--patience", "0"), "--patience"),
        (("--python", "/nowhere/python"), "/nowhere/python"),
        (("--log", "/nowhere/x.log"), "/nowhere/x.log"),
        (("--host", "0.0.0.0"), "--key"),
        (("--transfer", "--no-weights"), "--no-weights"),
    ],
)
def test_what_cannot_be_served_is_refused_in_the_words_of_the_command(
    more: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["serve", "model", str(tmp_path), *more]) == 64
    assert said in capsys.readouterr().err


def test_whoever_listens_there_already_is_not_taken_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = LocalServer("m", port=other.getsockname()[1], environment=CUDA)
        with pytest.raises(EngineError, match="port=, --port"):
            asyncio.run(server.start())


HEARING = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from tapereel.cli import main
sys.exit(main())
"""
"""The command, which a shell's background would have started with two signals ignored."""


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_what_was_started_is_ended_with_it(told: signal.Signals, tmp_path: Path) -> None:
    """A server that never comes up, told to end while it is waited for."""
    python, pid = tmp_path / "python", tmp_path / "pid"
    python.write_text(f"#!/bin/sh\necho $$ > {pid}.new && mv {pid}.new {pid}\nexec sleep 600\n")
    python.chmod(0o755)
    command = [
        sys.executable,
        "-c",
        HEARING,
        "serve",
        "model",
        str(tmp_path),
        "--port",
        "0",
        "--python",
        str(python),
        "--log",
        str(tmp_path / "log"),
    ]
    serving = subprocess.Popen(command, env={**os.environ, **CUDA}, stderr=subprocess.DEVNULL)
    while not pid.exists():  # the other side is a process
        assert serving.poll() is None
        time.sleep(0.05)
    started = psutil.Process(int(pid.read_text()))
    serving.send_signal(told)
    serving.wait(60)
    assert not started.is_running() or started.status() == psutil.STATUS_ZOMBIE
