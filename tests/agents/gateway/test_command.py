"""`tapereel serve gateway` as a process: it serves, it ends in order, and killed it leaves an ordinary crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.tapes import Status
from tapereel.tapes.store import Store

from .lab import books_close


class Process:
    """A gateway of its own, whose tapes are in `run`."""

    def __init__(self, run: Path, *more: str) -> None:
        self.run = run
        words = ["serve", "gateway", "--set", 'engine.answers=["one","two"]', "--out", str(run), "--json", *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENAI_API_KEY": "sk-of-the-user-0123456789"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "tapereel.cli", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        self.told = json.loads(self.process.stdout.readline())

    def post(self, url: str, body: Any, key: str | None = None) -> Any:
        headers = {"Authorization": f"Bearer {key or self.told['token']}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    def begin(self) -> Any:
        return self.post(self.told["control"], {"task": "t"})

    def ask(self, key: str) -> str:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        answer = self.post(f"{self.told['base_url']}/chat/completions", body, key)
        return answer["choices"][0]["message"]["content"]

    def end(self, number: int) -> tuple[int, str]:
        """Exit code and stderr."""
        self.process.send_signal(number)
        _, complained = self.process.communicate(timeout=60)
        return self.process.returncode, complained


@contextmanager
def process(run: Path, *more: str) -> Iterator[Process]:
    served = Process(run, *more)
    try:
        yield served
    finally:
        if served.process.poll() is None:
            served.process.kill()
        served.process.communicate(timeout=60)


def test_it_serves_and_ends_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    with process(run) as there:
        done, left = there.begin(), there.begin()
        assert there.ask(done["key"]) == "one"
        there.post(f"{there.told['control']}/{done['tape']}/rewards", {"rewards": {"right": 1}})
        assert there.post(f"{there.told['control']}/{done['tape']}/end", {})["status"] == "finished"
        assert there.ask(left["key"]) == "one"
        code, complained = there.end(signal.SIGTERM)
    assert (code, "Traceback" in complained) == (0, False), complained
    assert books_close(run).open == 0
    with Store.open(run) as store:
        assert [tape.status for tape in store.tapes()] == [Status.FINISHED, Status.CANCELLED]
    for verb in (["verify"], ["audit"], ["show"]):
        assert main([*verb, str(run)]) == 0, capsys.readouterr()
    everything = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file()) + complained.encode()
    secrets = (done["key"], left["key"], there.told["token"], "sk-of-the-user-0123456789")
    assert [secret for secret in secrets if secret.encode() in everything] == []


@pytest.mark.kill
@pytest.mark.timeout(300)
def test_killed_it_leaves_an_ordinary_crash(tmp_path: Path):
    run = tmp_path / "run"
    with process(run) as there:
        done, left = there.begin(), there.begin()
        there.ask(done["key"])
        there.post(f"{there.told['control']}/{done['tape']}/end", {})
        there.ask(left["key"])
        there.end(signal.SIGKILL)
    with process(run, "--resume") as there:
        with pytest.raises(urllib.error.HTTPError, match="401"):
            there.ask(left["key"])
        again = there.begin()
        there.ask(again["key"])
        there.post(f"{there.told['control']}/{again['tape']}/end", {})
        assert there.end(signal.SIGTERM)[0] == 0
    books = books_close(run)
    assert (books.begun, books.ended) == (3, 3)
    with Store.open(run) as store:
        statuses = {tape.id: tape.status for tape in store.tapes()}
    assert statuses == {done["tape"]: Status.FINISHED, left["tape"]: Status.CRASHED, again["tape"]: Status.FINISHED}


def test_what_makes_no_sense_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    words = ["serve", "gateway", "--set", 'engine.answers=["x"]', "--out", str(tmp_path / "run")]
    assert main([*words, "--port", "99999"]) == 64
    monkeypatch.setenv("TAPEREEL_GATEWAY_TOKEN", "guess-me")
    assert main(words) == 64
    assert "guess-me" not in capsys.readouterr().err
    assert main([*words, "--dry-run"]) == 0
    assert not (tmp_path / "run").exists()


def test_the_address_of_embeddings_is_a_setting(capsys: pytest.CaptureFixture[str]):
    words = ["serve", "gateway", "--set", 'engine.answers=["x"]', "--out", "x", "--dry-run", "--json", "--embeddings"]
    assert main([*words, "http://localhost:1/v1"]) == 0
    assert json.loads(capsys.readouterr().out)["embeddings"] == "http://localhost:1/v1"
    assert main([*words, "localhost:1"]) == 64
    assert "--embeddings" in capsys.readouterr().err
