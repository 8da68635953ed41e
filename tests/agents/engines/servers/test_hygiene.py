"""No server of ours can be reached by others unless somebody says so and gives a token, and no secret is ever on a
tape, in a log or in an error."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web
from pydantic import Field, ValidationError

from tapereel.agents import LLM, Agent, EngineError, rollout
from tapereel.agents.engines.servers import LiteLLMEngine
from tapereel.agents.engines.transport import Server
from tapereel.cli import main
from tapereel.envs import Environment, Outcome
from tapereel.envs.load_named import load_named
from tapereel.tapes import Answer, Tape, Text
from tapereel.tapes.common import HIDDEN, Config
from tapereel.tapes.common.redact import hide, holds_secret, names_secret, without_secrets
from tapereel.tapes.store import Store

from ....cli.lab import SCENE, settings
from ....cli.world import EXAMPLE
from ...faulty import FaultyServer
from ...hosted import Provider, refuses

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model's folder, and a run to look at."""
    folder = tmp_path_factory.mktemp("hygiene")
    load_named(f"{EXAMPLE}:save_model")(str(folder / "model"))
    run = ["run", *SCENE, *settings('engine.answers=["7"]', "count=2"), "--out", str(folder / "run")]
    assert main(run) == 0
    return {"model": str(folder / "model"), "run": str(folder / "run"), "new": str(folder / "new")}


VERBS: dict[str, tuple[str, ...]] = {
    "view": ("view", "{run}", "--no-browser"),
    "serve model --engine embedded": ("serve", "model", "{model}", "--engine", "embedded", "--port", "0"),
    "serve gateway": ("serve", "gateway", "--set", 'engine.answers=["7"]', "--out", "{new}"),
    "serve env": ("serve", "env", f"{EXAMPLE}:Digits", "--port", "0"),
}
"""Every verb that serves; `serve` with vLLM is tested against a real one."""


def filled(words: tuple[str, ...], scene: dict[str, str]) -> list[str]:
    """The words of a command, folders put in."""
    return [word.format(**scene) if word[0] == "{" else word for word in words]


@contextmanager
def started(
    words: tuple[str, ...], scene: dict[str, str], log: Any = subprocess.DEVNULL
) -> Iterator[tuple[Any, psutil.Process]]:
    """The verb in a process of its own, and what it printed first; the rest goes to `log`."""
    command = [sys.executable, "-m", "tapereel.cli", *filled(words, scene)]
    process = subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline()), psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert process.stdout is not None
        process.stdout.close()


def test_every_verb_that_serves_is_tested_here() -> None:
    """A verb with these arguments listens somewhere."""
    from tapereel.cli.command import commands

    found = set()
    for name, (module, _) in commands().items():
        source = Path(__file__).parents[4] / (module.replace(".", "/") + ".py")
        if "add_server_arguments(" in source.read_text("utf-8"):
            found.add(name)
    assert found == {name.removesuffix(" --engine embedded") for name in VERBS}


@pytest.mark.parametrize("verb", VERBS)
def test_by_default_nobody_else_can_connect(verb: str, scene: dict[str, str]) -> None:
    with started(VERBS[verb], scene) as (told, process):
        assert "127.0.0.1" in json.dumps(told)
        listening = [
            at
            for one in (process, *process.children(recursive=True))
            for at in one.net_connections(kind="inet")
            if at.status == psutil.CONN_LISTEN
        ]
        assert listening
        assert all(ip_address(at.laddr.ip).is_loopback for at in listening), listening
        if verb == "serve gateway":  # which asks for its token there, too
            assert len(told["token"]) >= 16
            for url, data in ((f"{told['base_url']}/models", None), (told["control"], b"{}")):
                with pytest.raises(urllib.error.HTTPError, match=r"40[13]") as caught:
                    urllib.request.urlopen(urllib.request.Request(url, data), timeout=30)
                caught.value.close()


@pytest.mark.parametrize("verb", VERBS)
def test_a_request_that_cannot_be_read_leaves_no_key_in_the_log(
    verb: str, scene: dict[str, str], tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w+") as log:
        with started(VERBS[verb], {**scene, "new": str(tmp_path / "new")}, log) as (told, _):
            found = re.search(r"127\.0\.0\.1:(\d+)", json.dumps(told))
            assert found is not None
            for line in (f"Authorization: Bearer {KEY}\x01", f"X : Bearer {TOKEN}", f"X: {KEY}{'x' * 9999}"):
                with socket.create_connection(("127.0.0.1", int(found[1])), 60) as raw:
                    raw.sendall(f"GET / HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n".encode())
                    assert b" 400 " in raw.recv(100)
        log.seek(0)
        said = log.read()
    assert said.count("Error handling request") == 3, said
    assert [one for one in (KEY, TOKEN, "Traceback") if one in said] == []


@pytest.mark.parametrize("verb", ["serve model --engine embedded", "serve env"])
def test_a_token_that_is_named_must_be_there_and_long_enough(
    verb: str, scene: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = filled(VERBS[verb], scene)
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    assert main([*words, "--key", "NO_SUCH_TOKEN"]) == 64
    assert "NO_SUCH_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("SHORT_TOKEN", "fifteen-letters")
    assert main([*words, "--key", "SHORT_TOKEN"]) == 64
    assert re.search(r"\b16\b.*\b15\b", capsys.readouterr().err)


KEY, TOKEN, PASSWORD = "sk-mellon4242mellon4242", "hf_opensesame0123456789", "speak-friend-42"
SECRETS = (KEY, TOKEN, PASSWORD)


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", KEY)
    monkeypatch.setenv("OTHER_TOKEN", TOKEN)
    monkeypatch.setenv("DATABASE_PASSWORD", PASSWORD)


class Leaky(Environment[Answer]):
    """Holds secrets and raises them, as libraries do."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.api_key = KEY
        self.address = f"https://user:{PASSWORD}@db.example/tasks"
        self.headers = {"Authorization": f"Bearer {TOKEN}", "Accept": "text/plain"}

    async def reset(self, task: Any) -> Text:
        if self.fails == "reset":
            raise OSError(f"401 for {self.address}, headers {self.headers}")
        return Text(text="Say something.")

    async def step(self, action: Answer) -> Outcome:
        if self.fails == "step":
            raise ValueError(f"the password {os.environ['DATABASE_PASSWORD']} was refused")
        return Outcome(reward=1.0, terminated=True)


class Careless(Agent):
    """Has a key among its settings, and quotes it when it fails."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.key = KEY
        self.hint = f"curl -H 'Authorization: Bearer {TOKEN}'"

    async def act(self, tape: Tape, llm: LLM) -> AsyncIterator[Any]:
        reply = await llm(tape)
        if self.fails:
            raise RuntimeError(f"can't reach https://user:{PASSWORD}@host with {self.key}")
        yield Answer(text=reply.text)


def everything(folder: Path) -> bytes:
    """All bytes in a run's directory."""
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def hosted(url: str) -> LiteLLMEngine:
    return LiteLLMEngine("openai/gpt-4o-mini", base_url=url, key_variable="SOME_API_KEY", retries=0, seconds=60.0)


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("debug", [False, True])
def test_no_secret_is_on_a_tape_in_a_log_or_in_an_error(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    debug: bool,
) -> None:
    caplog.set_level(logging.DEBUG if debug else logging.INFO)
    asyncio.run(hosted("http://127.0.0.1:1/v1").close())
    for handler in logging.getLogger("LiteLLM").handlers:  # it writes to what stderr was when litellm was imported
        if isinstance(handler, logging.StreamHandler):
            monkeypatch.setattr(handler, "stream", sys.stderr)
    echoed = refuses(400, f"Incorrect API key provided: {KEY}. You sent Authorization: Bearer {KEY}")
    provider = Provider([echoed])

    async def episodes(url: str) -> list[Tape]:
        made = []
        with Store.create(tmp_path / "run", durability="os") as store:
            for agent, env in (
                (Careless(), Leaky()),
                (Careless(), Leaky()),
                (Careless(True), Leaky()),
                (Careless(), Leaky("reset")),
                (Careless(), Leaky("step")),
            ):
                engine = hosted(url)
                made.append(await rollout(agent, env, task=0, engine=engine, journal=store.writer))
                await engine.close()
        return made

    with provider.up():
        tapes = asyncio.run(episodes(provider.url))
    assert [str(tape.cause.type) if tape.cause else None for tape in tapes] == [
        "model",
        None,
        "agent",
        "environment",
        "environment",
    ]
    assert provider.headers[0]["Authorization"] == f"Bearer {KEY}", "the provider must get it"
    assert HIDDEN.encode() in everything(tmp_path)
    out, err = capsys.readouterr()
    for where, text in (
        ("run", everything(tmp_path)),
        ("log", caplog.text.encode()),
        ("printed", (out + err).encode()),
        ("documents", "".join(tape.model_dump_json() for tape in tapes).encode()),
    ):
        for secret in SECRETS:
            at = text.find(secret.encode())
            assert at < 0, f"{where}: {text[max(0, at - 300) : at + 60]!r}"


async def echoes(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A fault: says who asked."""
    return web.Response(status=401, text=f"who is {request.headers['Authorization']}?")


@pytest.mark.usefixtures("secrets")
def test_a_server_that_sends_the_key_back_gets_no_further(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def test() -> str:
        async with FaultyServer([echoes]).up() as url:
            server = Server(url, key_variable="SOME_API_KEY")
            with pytest.raises(EngineError) as caught:
                await server.post("/inference/v1/generate", {"request_id": "x"})
            await server.close()
            return str(caught.value)

    said = asyncio.run(test())
    assert f"Bearer {HIDDEN}" in said
    assert KEY not in said + caplog.text


ADDRESS = f"http://someone:{PASSWORD}@127.0.0.1:1/v1"
GIVEN: dict[str, Callable[[], Any]] = {
    "Server": lambda: Server(ADDRESS),
    "LiteLLMEngine": lambda: LiteLLMEngine("openai/m", base_url=ADDRESS),
}


@pytest.mark.parametrize("what", GIVEN)
def test_an_address_with_a_password_is_refused_without_saying_it(what: str) -> None:
    with pytest.raises(ValueError, match="key_variable") as caught:
        GIVEN[what]()
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize(
    "engine",
    [
        ("engine.kind=litellm", "engine.model=openai/m", f"engine.base_url={ADDRESS}"),
        ("engine.kind=vllm", "engine.model=m", f'engine.urls=["{ADDRESS}"]'),
        ("engine.kind=vllm", "engine.model=m", f'engine.urls=["http://127.0.0.1:1/?api_key={PASSWORD}"]'),
        ("engine.kind=litellm", "engine.model=openai/m", f'engine.options={{"api_key": "{KEY}"}}'),
        ("engine.kind=litellm", "engine.model=openai/m", f'engine.options={{"api_base": "{ADDRESS}"}}'),
        ("engine.kind=vllm", "engine.model=m", f'engine.options={{"hf_token": "{TOKEN}"}}'),
        ('engine.answers=["7"]', f'rewards=["{ADDRESS}"]'),
        ('engine.answers=["7"]', f'rewards=["http://127.0.0.1:1/score?n=1&x-api-key={PASSWORD}"]'),
        ('engine.answers=["7"]', f'rewards=["https://{TOKEN}@127.0.0.1:1/score"]'),
    ],
)
def test_settings_with_secrets_are_refused_without_saying_them(
    engine: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *SCENE, *settings(*engine), "--out", str(tmp_path / "run")]) == 64
    out, err = capsys.readouterr()
    assert "variable" in err
    assert PASSWORD not in out + err
    assert KEY not in out + err
    assert TOKEN not in out + err
    assert not (tmp_path / "run").exists()


def test_an_address_with_a_secret_is_refused_in_every_group_of_settings() -> None:
    class Group(Config):
        address: str = "http://127.0.0.1:1"
        more: dict[str, list[str]] = Field(default={})

    for wrong in ({"address": ADDRESS}, {"more": {"a": ["x", ADDRESS]}}):
        with pytest.raises(ValidationError, match="key_variable"):
            Group.model_validate(wrong)
    assert Group(address=f"see {ADDRESS}").address.startswith("see"), "a text that speaks of one is a text"


def test_a_reward_models_address_with_a_secret_is_refused_on_the_command_line_too(
    capsys: pytest.CaptureFixture[str], scene: dict[str, str]
) -> None:
    assert main(["replay", "rewards", scene["run"], "--reward", ADDRESS, "--layer", "again"]) == 64
    out, err = capsys.readouterr()
    assert "http_reward(url, key_variable=...)" in err
    assert PASSWORD not in out + err


def test_which_addresses_hold_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_KEY", "plainwords")
    for url in (
        "http://u:p@h",
        "https://u:p@h:1/a",
        "http://token@h/x",
        "WSS://t@h",
        "postgres://u:p@h/db",
        "http://h/?key=a",
        "http://h/x?n=1&X-Api-Key=a#b",
        "http://h/x?api%5Fkey=a",
        "http://h/plainwords",
        f"http://h/{TOKEN}",
    ):
        assert holds_secret(url), url
    for url in (
        "http://h:1/a",
        "http://h/u:p@x",
        "http://h/x?n=1&max_tokens=5&who=me@x",
        "http://h/?key=",
        "ssh://git@h",
        "a b@c",
        "see http://u:p@h",
        "",
        "pkg.module:name",
        "file.py:key",
    ):
        assert not holds_secret(url), url


def test_what_is_a_secret_and_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_KEY", "plainwords")
    monkeypatch.setenv("SHORT_TOKEN", "true")
    monkeypatch.setenv("KEYBOARD", "qwertyuiop")
    for text, hidden in (
        ("got plainwords here", f"got {HIDDEN} here"),
        ("it is true, qwertyuiop", "it is true, qwertyuiop"),
        ("http://a:b@host/x", f"http://{HIDDEN}@host/x"),
        ("mail me@host.org about http://host:80/x@y", "mail me@host.org about http://host:80/x@y"),
        ("Authorization: Bearer abcdefgh12345", f"Authorization: Bearer {HIDDEN}"),
        ("basic dXNlcjpwYXNz== of basic arithmetic", f"basic {HIDDEN} of basic arithmetic"),
        ("/x?api_key=abc&n=1", f"/x?api_key={HIDDEN}&n=1"),
        ("/x?n=1&x-api-key=abc&monkey=b", f"/x?n=1&x-api-key={HIDDEN}&monkey=b"),
        ("sk-abcdefghijklmnop", HIDDEN),
        ("task-based and gh_pages", "task-based and gh_pages"),
    ):
        assert without_secrets(text) == hidden
        assert without_secrets(hidden) == hidden, "hiding twice changes nothing"
    assert without_secrets("x mellon y", ["mellon"]) == f"x {HIDDEN} y"
    assert [names_secret(name) for name in ("OPENAI_API_KEY", "token", "max_tokens", "monkey", "db-password")] == [
        True,
        True,
        False,
        False,
        True,
    ]
    assert hide({"api_key": "a", "n": 1, "deep": [{"token": "b", "say": "hi"}], "empty_key": ""}) == {
        "api_key": HIDDEN,
        "n": 1,
        "deep": [{"token": HIDDEN, "say": "hi"}],
        "empty_key": "",
    }
