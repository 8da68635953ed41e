"""Another user of the same machine against each command that serves: a real process of another uid."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tapereel.envs.load_named import load_named
from tapereel.tapes.common import token_for
from tapereel.tapes.common.access_token import private_file, token_path

from ..agents.engines.servers.test_hygiene import EXAMPLE, VERBS, started
from ..tapes.view.lab import training_run

NOBODY = 65534
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user"),
]
STRANGER = """
import http.client, json, os, pathlib, sys
told = json.load(sys.stdin)
said = {"uid": os.getuid(), "read": [], "answers": {}}
for path in told["files"]:
    for one in (pathlib.Path(path), *pathlib.Path(path).rglob("*")) if os.path.isdir(path) else (pathlib.Path(path),):
        try:
            one.read_bytes()
            said["read"].append(str(one))
        except OSError:
            pass
for pid in told["pids"]:
    for name in ("cmdline", "environ", "fd", "maps"):
        try:
            found = open(f"/proc/{pid}/{name}", "rb").read().decode(errors="replace")
            said["answers"][f"/proc/{name} of {pid}"] = found
        except OSError:
            pass
for port, paths in told["ports"].items():
    for method, path in paths:
        line = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
        line.request(method, path, b"{}" if method == "POST" else None, {"Content-Type": "application/json"})
        answer = line.getresponse()
        said["answers"][f"{method} {port}{path}"] = [answer.status, answer.read().decode(errors="replace")]
        line.close()
print(json.dumps(said))
"""
PATHS = {
    "view": [
        ("GET", "/"),
        ("GET", "/app.js"),
        ("GET", "/api/run"),
        ("GET", "/api/tape/g0a0/texts/0"),
        ("GET", "/?token="),
    ],
    "serve env": [("GET", "/env"), ("GET", "/health"), ("GET", "/ws"), ("GET", "/schema")],
    "serve gateway": [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/tapereel/tapes")],
    "serve model --engine embedded": [
        ("GET", "/health"),
        ("GET", "/weight_info"),
        ("POST", "/pause"),
        ("POST", "/collective_rpc"),
        ("POST", "/update_weight_version"),
        ("POST", "/inference/v1/generate"),
    ],
}


@pytest.fixture
def open_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that every user can enter, as /home/NAME is on many machines; the state of the servers is below it."""
    folder = Path(tempfile.mkdtemp(prefix="tapereel-open-"))
    folder.chmod(0o755)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    (folder / "tapereel").mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


def as_nobody(told: dict[str, Any]) -> Any:
    """What the stranger says."""
    python = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")
    assert python is not None, "the stranger needs an interpreter that every user can start"
    ran = subprocess.run(
        [python, "-I", "-c", STRANGER],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        env={},
        cwd="/",
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout)
    assert said["uid"] == NOBODY
    return said


def test_another_user_reads_nothing_of_a_private_run(open_folder: Path):
    run = training_run(open_folder / "run")
    run.chmod(0o700)
    model = open_folder / "model"
    load_named(f"{EXAMPLE}:save_model")(str(model))
    scene = {"run": str(run), "model": str(model), "new": str(open_folder / "new")}
    with ExitStack() as stack:
        ports: dict[str, list[tuple[str, str]]] = {}
        pids, tokens = [], []
        for verb, paths in PATHS.items():
            told, process = stack.enter_context(started(VERBS[verb], scene))
            url = told.get("url") or told["base_url"]
            ports[url.split(":")[2].split("/")[0]] = paths
            pids.append(process.pid)
            if verb == "view":
                tokens.append(url.split("token=")[1])
            else:
                tokens.append(told["token"] if verb == "serve gateway" else Path(told["token_file"]).read_text())
        assert all(len(token) >= 32 for token in tokens)
        states = list((open_folder / "tapereel").iterdir())
        assert len([path for path in states if path.name.startswith(os.uname().nodename)]) == 2
        said = as_nobody({"ports": ports, "pids": pids, "files": [str(open_folder / "tapereel"), str(run)]})
        # The same questions with the token are answered, so the refusals are not for another reason.
        assert token_for(f"http://127.0.0.1:{list(ports)[3]}") == tokens[3]
    assert [path for path in said["read"] if path.startswith(str(open_folder / "tapereel"))] == []
    assert [path for path in said["read"] if path.startswith(str(run))] == []
    answers = {name: answer for name, answer in said["answers"].items() if isinstance(answer, list)}
    assert len(answers) == sum(map(len, PATHS.values()))
    assert {name: answer for name, answer in answers.items() if answer[0] != 401} == {}
    assert [token for token in tokens if token in json.dumps(said)] == []
    assert any("cmdline" in name for name in said["answers"]), "command lines are public: no token may stand there"
    assert run.stat().st_mode & 0o777 == 0o700
    assert not [path for path in (open_folder / "tapereel").iterdir() if path.name.startswith(os.uname().nodename)]


def test_the_browser_is_opened_by_a_file_that_others_cant_read(open_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Command lines are public, so the link with the token must not stand in the one of the browser."""
    run = training_run(open_folder / "run")
    browser = open_folder / "browser"
    browser.write_text(f'#!/bin/sh\\necho "$@" > {open_folder}/asked\\nsleep 60\\n'.replace("\\n", "\n"))
    browser.chmod(0o755)
    words = ("view", str(run))
    monkeypatch.setenv("BROWSER", f"{browser} %s &")
    asked = ""
    with started(words, {}) as (told, _):
        while not asked:  # the test's time limit ends it
            time.sleep(0.05)
            asked = (open_folder / "asked").read_text().strip() if (open_folder / "asked").exists() else ""
        token = told["url"].split("token=")[1]
        assert asked.startswith("file://")
        assert token not in asked
        page = Path(asked.removeprefix("file://"))
        assert page.stat().st_mode & 0o777 == 0o600
        assert token in page.read_text()
        assert as_nobody({"ports": {}, "pids": [], "files": [str(page)]})["read"] == []
    assert not page.exists()


def test_a_token_file_of_another_user_is_refused(open_folder: Path):
    """Otherwise another user could choose the token that a client sends, or read it."""
    url = "http://127.0.0.1:8123"
    path = private_file(token_path(url), "x" * 32)
    assert path.stat().st_mode & 0o777 == 0o600
    assert token_for(url) == "x" * 32
    for spoil in (lambda: path.chmod(0o644), lambda: (path.chmod(0o600), os.chown(path, NOBODY, NOBODY))):
        spoil()
        with pytest.raises(PermissionError, match="mode 0600"):
            token_for(url)
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(OSError):  # noqa: PT011
        token_for(url)
    assert private_file(token_path(url), "y" * 32) == path
    assert not path.is_symlink(), "the link is replaced, not followed"


def test_a_token_is_found_by_the_printed_address_only(open_folder: Path):
    private_file(token_path("http://127.0.0.1:8123"), "x" * 32)
    assert token_for("http://127.0.0.1:8123/v1") == "x" * 32
    for other in (
        "http://localhost:8123",
        "http://[::1]:8123",
        "http://127.0.0.1:81234",
        "http://127.0.0.1:812",
        "http://127.0.0.1",
        "http://evil.example:8123",
        "http://127.0.0.1:8123@evil.example",
        "http://x:notaport",
        "http://../../tapereel:8123",
    ):
        assert token_for(other) is None, other
