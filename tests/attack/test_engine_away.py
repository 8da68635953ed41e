"""A model's server that goes away under `tapereel run`: a real server process behind a real port, killed and restarted.

The tries of docs/project/attacks.md: `ATTACK_TRIES=5 python -m pytest -m kill tests/attack/test_engine_away.py`.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.finetune.api import save_tiny_model
from tapereel.tapes.store import Store

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
SLOW = Path(__file__).with_name("slow_digits.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
TRIES = range(int(os.environ.get("ATTACK_TRIES", "1")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "0123456789")
    return str(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(model: str, port: int) -> subprocess.Popen[bytes]:
    """A server of the model, which listens when this returns."""
    words = [sys.executable, "-m", "tapereel", "serve", "model", model, "--engine", "embedded", "--port", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    while server.poll() is None:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return server
        time.sleep(0.1)
    raise AssertionError("the server ended")


def scene(out: Path) -> list[str]:
    words = ["run", "--agent", f"{EXAMPLE}:player", "--env", f"{SLOW}:Slow", "--tasks", f"{EXAMPLE}:tasks"]
    return [*words, "--out", str(out), "--json", "--set", "attempts=3", "--set", "concurrency=8"]


def run(out: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tapereel", *scene(out), *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def at(port: int, model: str, patience: float) -> list[str]:
    settings = (
        "engine.kind=vllm",
        f"engine.model={model}",
        f'engine.urls=["http://127.0.0.1:{port}"]',
        f"engine.patience={patience}",
    )
    return [word for setting in settings for word in ("--set", setting)]


def statuses(out: Path) -> Counter[str]:
    with Store.open(out) as store:
        return Counter(f"{s.status}:{s.cause}" if s.cause else str(s.status) for s in store.summaries())


def wait_for_episodes(out: Path, n: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if out.exists() and sum(file.read_bytes().count(b'"t":"end"') for file in out.glob("tapes/*.jsonl")) >= n:
            return
        time.sleep(0.05)
    raise AssertionError("the run recorded nothing")


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, json.loads(out) if out.strip() else {}, err


@pytest.mark.kill
@pytest.mark.parametrize("attempt", TRIES)
def test_a_server_that_is_killed_and_started_again_costs_no_episode(attempt: int, model: str, tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "run"
    server = serve(model, port)
    rolling = run(out, *at(port, model, 120))
    try:
        wait_for_episodes(out, 11)
        time.sleep(random.Random(attempt).random())
        server.kill()
        server.wait()
        time.sleep(4)
        server = serve(model, port)
        code, summary, err = ended(rolling)
    finally:
        rolling.kill()
        server.kill()
        server.wait()
    assert code == 0, err
    assert statuses(out) == {"finished": 300}
    assert (summary["episodes"], summary["scored"], summary["recorded"]) == (300, 300, 300)
    assert f"http://127.0.0.1:{port}" in err
    assert "engine.patience" in err
    assert "again" in err


@pytest.mark.kill
def test_a_server_that_stays_away_stops_the_run_and_resume_finishes_it(model: str, tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "run"
    server = serve(model, port)
    words = (*at(port, model, 3), "--set", "retries=0")
    rolling = run(out, *words)
    try:
        wait_for_episodes(out, 11)
        server.kill()
        server.wait()
        code, _, err = ended(rolling)
        assert code == 69, err
        assert " of 300 " in err
        before = statuses(out)
        assert before["error:model"] <= 8
        assert sum(before.values()) - before["finished"] <= 8, "no episode began while no server answered"
        server = serve(model, port)
        code, summary, err = ended(run(out, *words, "--resume"))
    finally:
        rolling.kill()
        server.kill()
        server.wait()
    assert code == 0, err
    after = statuses(out)
    assert after["finished"] == 300
    assert summary["scored"] == 300
    assert summary["recorded"] == 300 - before["finished"]


class Provider(BaseHTTPRequestHandler):
    """OpenAI's wire form: 20 answers, then `code` with `error` for ever."""

    code, error, asked = 401, "Incorrect API key provided", 0
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        kind = type(self)
        kind.asked += 1
        if kind.asked <= 20:
            message = {"role": "assistant", "content": "7"}
            usage = {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            body, code = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}, 200
            body["usage"] = usage
        else:
            body, code = {"error": {"message": kind.error, "type": "x", "code": kind.error}}, kind.code
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


@pytest.mark.parametrize(
    ("code", "error", "more", "expected"),
    [
        (401, "Incorrect API key provided", (), 77),
        (404, "The model `m` does not exist", (), 78),
        (402, "Insufficient Balance", (), 75),
        (429, "insufficient_quota", (), 75),
        (200, "", ("engine.budget=2.15e-4", "engine.prices=[1.0,1.0]"), 75),
        (503, "overloaded", ("engine.patience=2",), 69),
    ],
)
def test_a_hosted_model_that_refuses_every_request_stops_the_run(
    code: int,
    error: str,
    more: tuple[str, ...],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    provider = type("Answering", (Provider,), {"code": code, "error": error, "asked": 0 if code != 200 else -(10**6)})
    with ThreadingHTTPServer(("127.0.0.1", 0), provider) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = f"http://127.0.0.1:{server.server_address[1]}/v1"
            settings = ("engine.kind=litellm", "engine.model=openai/m", f"engine.base_url={address}", *more)
            words = [word for setting in settings for word in ("--set", setting)]
            exited = main([*scene(tmp_path / "run"), *words])
        finally:
            server.shutdown()
            thread.join()
    err = capsys.readouterr().err
    assert exited == expected, err
    assert " of 300 " in err
    assert "--resume" in err
    if code not in (200, 503):
        assert provider.asked <= 20 + 8, "one request for each episode in flight, and no retry"
    ends = statuses(tmp_path / "run")
    assert 8 <= ends["finished"] <= 28
    assert sum(ends.values()) <= 20 + 8 + 1
