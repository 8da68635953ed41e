"""The viewer's server: who may ask, what is never served, and what every answer forbids the page."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.tapes.store import Store
from tapereel.tapes.view import RunView
from tapereel.tapes.view.bundle import SCRIPTS, static_files

from .lab import Recording, episode
from .serving import ask, served

TOKEN = "0123456789abcdef0123"


@pytest.fixture(scope="module")
def guarded(run: Path):
    with served(run, token=TOKEN) as found:
        yield found


def test_every_question_has_its_address(server):
    assert ask(server, "/api/run").json["tapes"] == 13
    assert ask(server, "/api/table/0").json["n"] == 13
    assert ask(server, "/api/curve").json["points"][0]["tapes"] == 4
    assert ask(server, "/api/report").json["tokens"]["trained"] == 12
    assert ask(server, "/api/behind/0").json["tapes"][0] == "g0a0"
    assert ask(server, "/api/tape/g0a1").json["turns"] == 3
    assert len(ask(server, "/api/tape/g0a1/items/0").json["items"]) == 11
    assert len(ask(server, "/api/tape/g0a1/turns/0").json["turns"]) == 3
    assert ask(server, "/api/tape/g0a1/find?step=3").json == {"item": 6}
    assert ask(server, "/api/tape/g0a1/call?call=g0a1.2").json["from"] == 0
    assert ask(server, "/api/tape/g0a1/text/1").json["text"] == "What is 6 * 7?"
    assert ask(server, "/api/tape/g0a1/texts/0").json["pages"] == 1
    assert len(ask(server, "/api/texts?tapes=g0a0,g0a1").json) == 2
    assert "missing" in ask(server, "/api/tape/g0a1/explain").json
    rev = ask(server, "/api/run").json["rev"]
    assert ask(server, f"/api/changes?rev={rev}").json["n"] == 0
    assert ask(server, "/api/verify").json["verdict"] == "holds"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1:{port}.evil.example",
        "127.0.0.1.evil.example:{port}",
        "[::2]:{port}",
        "0.0.0.0:{port}",
        "",
        "127.0.0.1:{port}@evil.example",
    ],
)
def test_a_request_for_another_host_is_refused(server, host: str):
    answer = ask(server, "/api/run", host=host.format(port=server.port))
    assert answer.status in (400, 403)
    assert b"tapes" not in answer.body


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}", "localhost:1"]
)
def test_a_request_for_this_machine_is_answered(server, host: str):
    assert ask(server, "/api/run", host=host.format(port=server.port)).status == 200


def test_a_page_of_another_site_gets_nothing(server):
    assert ask(server, "/api/run", Sec_Fetch_Site="cross-site").status == 403
    assert ask(server, "/app.js", Sec_Fetch_Site="same-site").status == 403
    assert ask(server, "/api/run", Sec_Fetch_Site="same-origin").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/..%2fpyproject.toml",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/app.js",
        "/media/../pins.json",
        "/media/..%2f..%2fpins.json",
        "/media/%2e%2e%2fpins.json",
        "/api/../tapes",
        "/config.yaml",
        "/tapes/index.sqlite",
        "/api/tape/..%2f..%2fetc%2fpasswd",
        "/api/tape/%00",
        "/api/table/-1",
        "/api/table/99999999999",
        "/api/table/x",
        "//etc/passwd",
        "/media/" + "0" * 64,
        "/media/" + "0" * 64 + ".png",
        "/api/tape/g0a1/text/99999",
        "/api/tape/g0a1/call?call=../x",
        "/api/tape/g0a1/find?step=99999999999999999999",
        "/api/texts?tapes=nobody",
    ],
)
def test_nothing_but_the_run_is_served(server, path: str):
    answer = ask(server, path)
    assert answer.status == 404, answer
    assert "error" in answer.json
    assert b"root:" not in answer.body


@pytest.mark.parametrize("path", ["/", "/app.js", "/style.css", "/api/run", "/nothing", "/api/tape/nobody"])
def test_every_answer_forbids_the_page_all_that_it_does_not_need(server, path: str):
    headers = ask(server, path).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


def test_where_a_token_is_needed_nothing_is_told_without_it(guarded):
    assert guarded.url.endswith(f"/?token={TOKEN}")
    for path in ("/", "/app.js", "/api/run", "/media/x", "/?token=wrong", "/?token=", f"/api/run?token={TOKEN}"):
        assert ask(guarded, path, authorization="").status == 401, path
    assert ask(guarded, "/api/run", authorization="Bearer " + TOKEN[:-1]).status == 401
    assert ask(guarded, "/api/run", authorization=f"Bearer {TOKEN}").status == 200


def test_the_address_with_the_token_becomes_a_cookie_that_no_script_reads(guarded):
    answer = ask(guarded, f"/?token={TOKEN}", authorization="")
    assert (answer.status, answer.headers["Location"]) == (303, guarded.home)
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert f"Path={guarded.home};" in cookie, "a server on another port of this host must not get it"
    assert TOKEN not in cookie
    for path in (guarded.home, f"{guarded.home}api/run", f"{guarded.home}app.js"):
        assert ask(guarded, path, authorization="", Cookie=cookie.split(";")[0]).status == 200
        assert ask(guarded, path, authorization="", Cookie=cookie.split(";")[0] + "x").status == 401


def test_a_token_in_the_link_may_have_any_printable_character(run: Path):
    with served(run, token="a+b/c=d&e#f%20g?h") as server:
        assert ask(server, server.url.removeprefix(server.address), authorization="").status == 303


def test_media_are_sent_as_images_or_as_files_to_keep(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        png, svg = store.media.put(b"\x89PNG", ".png"), store.media.put(b"<svg onload='x'/>", ".svg")
        made = Recording(store, "t")
        made.look(png, svg)
        made.end()
    with served(tmp_path / "run") as server:
        ask(server, "/api/run")
        assert len(ask(server, "/api/tape/t/items/0").json["items"][1]["media"]) == 2
        answer = ask(server, f"/media/{png[6:]}")
        assert (answer.headers["Content-Type"], answer.body) == ("image/png", b"\x89PNG")
        answer = ask(server, f"/media/{svg[6:]}")
        assert answer.headers["Content-Type"] == "application/octet-stream"
        assert answer.headers["Content-Disposition"].startswith("attachment")
        (tmp_path / "run" / "tapes" / "media" / png[6:]).write_bytes(b"another")
        assert ask(server, f"/media/{png[6:]}").status == 404


def test_a_tape_that_changed_on_the_disk_is_an_error_and_not_shown(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        episode(store, "t", ["42"], 1.0)
    with served(tmp_path / "run") as server:
        ask(server, "/api/run")
        (segment,) = (tmp_path / "run" / "tapes").glob("*.jsonl")
        segment.write_bytes(segment.read_bytes().replace(b"6 * 7?", b"6 * 8?"))
        answer = ask(server, "/api/tape/t/items/0")
        assert answer.status == 500
        assert "hash" in answer.json["error"]


def test_the_command_serves_prints_its_address_and_stops_when_told(run: Path, tmp_path: Path):
    command = [sys.executable, "-m", "tapereel.cli", "view", str(run), "--no-browser", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=tmp_path) as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        assert told["url"].startswith("http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == Exit.HOLDS


def test_a_command_line_that_cant_be_meant_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    assert main(["view", str(tmp_path / "none")]) == Exit.USAGE
    assert main(["view", str(run), "--port", "99999"]) == Exit.USAGE
    assert main(["view", str(run), "--tape", "g0a0"]) == Exit.USAGE
    monkeypatch.setenv("WEAK", "short")
    assert main(["view", str(run), "--host", "0.0.0.0", "--token", "WEAK"]) == Exit.USAGE
    assert main(["view", str(run), "--token", "a-token-itself-1234"]) == Exit.USAGE
    told = capsys.readouterr().err
    assert "99999" in told
    assert "--out" in told
    assert " 16 " in told
    assert "'a-token-itself-1234'" in told


def test_what_training_tells_is_injected_and_asked_for_in_a_thread_of_its_own(run: Path):
    class Insight:
        decode = staticmethod(chr)

        def __init__(self, store: Store) -> None:
            self.forgotten = 0

        def explain(self, tape: str) -> dict:
            return {"verdict": f"seen {tape}", "advantages": {"g0a0.1": [0.5]}}

        def forget(self) -> None:
            self.forgotten += 1

    with served(run, insight=Insight) as server:
        ask(server, "/api/run")
        assert ask(server, "/api/tape/g0a0/call?call=g0a0.1").json["pieces"] is None, "nothing waits for it"
        assert ask(server, "/api/tape/g0a0/explain").json["verdict"] == "seen g0a0"
        assert ask(server, "/api/tape/g0a0/call?call=g0a0.1").json["pieces"] == ["4", "7", "\x03"]
        assert ask(server, "/api/tape/nobody/explain").status == 404


def test_the_static_files_hold_no_way_to_run_or_fetch_anything():
    forbidden = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        "createContextualFragment",
        "DOMParser",
        "srcdoc",
        "importScripts",
        "http://",
        "https://",
    )
    for name, (_, body) in static_files().items():
        text = body.decode().replace("http://www.w3.org/2000/svg", "")
        assert [word for word in forbidden if word in text] == [], name
        assert "<script>" not in text
        assert " style=" not in text
    page = static_files()["index.html"][1].decode()
    assert [name for name in SCRIPTS if f'<script defer src="{name}"></script>' not in page] == []
    assert page.count("<script") == len(SCRIPTS)


def test_the_static_files_are_declared_as_package_data():
    import tomllib

    root = Path(__file__).resolve().parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["tapereel.tapes.view"]
    folder = root / "tapes" / "view"
    declared = {path.name for pattern in patterns for path in folder.glob(pattern)}
    assert declared == set(static_files()) == {path.name for path in (folder / "static").iterdir()}


def test_the_view_needs_no_index_that_can_be_written(run: Path):
    if os.geteuid() == 0:
        with Store.open(run, cache=False) as store:
            assert len(store.summaries()) == 13
    with RunView(run) as view:
        assert view.overview()["tapes"] == 13
