"""Unmodified clients with their default settings are agents: one row, every sampled token, replayed with ids."""

from __future__ import annotations

import asyncio
import json
import os
import re
import runpy
import shlex
import subprocess
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest

from tapereel.agents import Capability, Completion, EmbeddedEngine, rollout
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.gateway import Answered, Program, chat_protocol, messages_protocol, responses_protocol
from tapereel.agents.rendering import Renderer
from tapereel.agents.replay import replay
from tapereel.cli import main
from tapereel.envs import Environment, Outcome
from tapereel.finetune import rows
from tapereel.tapes import Answer, Sampling, Status, Text
from tapereel.tapes.messages import text_of
from tapereel.tapes.store import Store

from ..agents.families import tokenizer
from ..agents.gateway.lab import Told
from ..agents.rendering import seeing
from .clients_env import FOLDER, PROGRAMS, PYTHON, is_there, python_of
from .clients_run import CLIENTS, PARSED

pytestmark = [pytest.mark.contract, pytest.mark.timeout(300)]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = HERE / "clients_run.py"
RECIPES: dict[str, Program] = {
    name: value
    for name, value in runpy.run_path(str(ROOT / "examples" / "gateway_clients.py")).items()
    if isinstance(value, Program)
}
RENDERER = Renderer(tokenizer("qwen3"))
SEEING = Renderer(seeing.tokenizer(seeing.QWEN), seeing.Pads())
CHARS = char_tokenizer()
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
THOUGHT = "<think>\nI may write %s .\n</think>\n\n" % (CALL % (7, 8))


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def turns(one: str, failing: str, *two: str) -> list[str]:
    """What the model says: a call, a call that fails, two at once, and the answer."""
    return ["I call.\n" + one, failing, "\n".join(two), "done"]


def shell(tool: str, argument: str, text: str = "{}") -> list[str]:
    commands = ("echo one", "ls nothing", "echo two", "echo three")
    return turns(*(call(tool, **{argument: text.format(command)}) for command in commands))


def code(*lines: str) -> list[str]:
    return [f"Thought: I add.\n<code>\n{line}\n</code>" for line in lines]


ADDS = [
    f"{THOUGHT}I add.\n{CALL % (1, 2)}",
    THOUGHT + CALL % (-1, 2),
    CALL % (3, 4) + "\n" + CALL % (5, 6),
    f"{THOUGHT}done",
]
"""Some of these come after a thought that quotes a call."""
CODE = code("print(add(1, 2))", "print(add(-1, 2))", "print(add(3, 4), add(5, 6))", "final_answer('done')")
GOALS = turns(call("get_goal"), call("view_image", path="nothing.png"), call("get_goal"), call("get_goal"))
SCRIPTED = "const found = await tools.exec_command({{cmd: '{}'}}); text(found.output)"


class Client(NamedTuple):
    """A client, and what the model says to it."""

    agent: Program
    said: list[str] = ADDS
    results: tuple[str, ...] = ("3", "negative", "7", "11")
    """Words in the tools' results."""
    changes: str = ""
    """Words of a tool's result that may differ in each run, so that a replay diverges there."""
    rewrites: bool = False
    """Whether the client sends the model's turns back in other words, so that each turn is a row."""


SHELL = ("one", "nothing", "two", "three")


def of_its_own_model(codex: Program) -> Program:
    """Codex with the model that it takes by itself. It offers other tools to this model, one of which runs
    JavaScript, and asks for one call at a time."""
    assert not callable(codex.program)
    return Program([word.replace("--model policy", "") for word in codex.program], name="codex")


def vercel(*words: str) -> Client:
    return Client(Program(["node", str(HERE / "clients_run.mjs"), str(FOLDER), *words]))


ALL: dict[str, Client] = {
    **{name: Client(Program([str(PYTHON), str(SCRIPT), name])) for name in CLIENTS if "smolagents" not in name},
    **{
        name: Client(Program([str(PYTHON), str(SCRIPT), name]), results=("3", "error occurred", "7", "11"))
        for name in ("agents-sdk", "agents-sdk-streamed")
    },
    "agency-swarm": Client(
        Program([str(python_of("agency-swarm")), str(SCRIPT), "agency-swarm"]), results=("3", "negative", "7", "11")
    ),
    **{
        name: Client(Program([str(PYTHON), str(SCRIPT), name]), CODE, ("3", "negative", "7 11"))
        for name in ("smolagents", "smolagents-streamed")
    },
    **{
        name: Client(
            Program([str(PYTHON), str(SCRIPT), name]),
            [f"I call.\n{turn}" for turn in (*ADDS[:3], call("final_answer", answer="done"))],
            ("3", "negative", "7\n11"),
            rewrites=True,  # as text: "Calling tools: [...]"
        )
        for name in ("smolagents-calls", "smolagents-calls-streamed")
    },
    "vercel": vercel("openai", "whole"),
    "vercel-streamed": vercel("openai", "streamed"),
    "vercel-anthropic": vercel("anthropic", "whole"),
    "vercel-anthropic-streamed": vercel("anthropic", "streamed"),
    "claude-code": Client(RECIPES["claude_code"], shell("Bash", "command"), SHELL),
    "codex": Client(RECIPES["codex"], GOALS, ("goal", "nothing.png", "goal", "goal")),
    # It writes how long a command took, and with `exec_command` a random id, into the result.
    "codex-commands": Client(RECIPES["codex"], shell("exec_command", "cmd"), SHELL, "Wall time"),
    "codex-own-model": Client(
        of_its_own_model(RECIPES["codex"]), shell("functions__exec", "input", SCRIPTED), SHELL[:3], "Wall time"
    ),
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_there():
        pytest.fail("the environment is not there or out of date: run python -m tests.contract.clients_env")
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The programs are on the path, and the folder of the user's settings is an empty one."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(PROGRAMS), str(PYTHON.parent), os.environ["PATH"]]))
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as home:  # Codex takes none in /tmp
        for name in ("HOME", "CODEX_HOME", "CLAUDE_CONFIG_DIR"):
            monkeypatch.setenv(name, home)
        yield


class Says(Told):
    """Answers the next text of `said` in each conversation, as token ids."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(lambda messages: said[sum(message["role"] == "assistant" for message in messages)])

    @property
    def renderer(self) -> Any:
        return RENDERER

    def _completion(self, text: str, *, end: bool) -> Completion:
        ids = array("i", [*self.renderer._codec._raw(text), *self.renderer.end_ids[:1]])
        spans = (("run:0", 0, len(ids)),)
        return Completion(text=text, ids=ids, logprobs=array("f", [-0.5] * len(ids)), spans=spans, finish="stop")

    @property
    def context(self) -> int | None:
        return 100_000


class Adds(Environment[Answer]):
    async def reset(self, task: str) -> Text:
        return Text(text=task)

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=float(action.text == "done"), terminated=True)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", ALL)
def test_a_client_as_it_comes_is_one_row_and_is_replayed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    agent, said, results, changes, rewrites = ALL[name]
    tape = asyncio.run(rollout(agent, Adds, "add", engine=Says(said), sampling=Sampling(max_tokens=2000)))
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0), tape.cause
    assert [RENDERER.decode(call.completion) for call in tape.calls if call.completion] == said
    told = [text_of(message) for message in tape.calls[3].messages if message["role"] in ("tool", "user")]
    told = told[-len(results) :]
    assert all(word in text for word, text in zip(results, told, strict=True)), told
    found = rows(tape)
    assert len(found) == (4 if rewrites else 1), [call.split for call in tape.calls]
    assert sum(len(row.own) for row in found) == sum(len(call.completion or ()) for call in tape.calls)
    verdict = asyncio.run(replay(tape, agent, renderer=RENDERER))
    if verdict.outcome == "verified":
        return
    assert changes, verdict
    assert verdict.outcome == "diverged", verdict
    asked = tape.calls[1].messages
    (place,) = [k for k, message in enumerate(asked) if message["role"] == "tool"]
    assert f"messages[{place}].content" in str(verdict)
    assert changes in text_of(asked[place])


class Seeing(Says):
    """A model that sees."""

    can: frozenset[Capability] = frozenset({"weights", "pictures"})

    def __init__(self, say: Callable[[list[Any]], str]) -> None:
        Told.__init__(self, say)

    @property
    def renderer(self) -> Any:
        return SEEING


class Site(BaseHTTPRequestHandler):
    """A form for two numbers, and their sum."""

    def do_GET(self) -> None:
        numbers = parse_qs(urlsplit(self.path).query)
        body = f"<p>the sum is {sum(int(n) for (n,) in numbers.values())}</p>" if numbers else FORM
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f"<title>adder</title>{body}".encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


FORM = "<form action=/sum>a <input name=a> b <input name=b> <button>add</button></form>"


def browses(messages: list[Any]) -> str:
    """Fill in the fields that the page shows, press its button, and end where the sum is. The third answer is for the
    judge that browser-use asks at the end."""
    seen = "\n".join(map(text_of, messages))
    if "<final_result>" in seen:
        return json.dumps({"reasoning": "so", "verdict": True, "failure_reason": "", "impossible_task": False})
    actions: list[Any] = [{"done": {"text": "done", "success": True}}]
    if "the sum is 42" not in seen:
        a, b, add = map(int, re.findall(r"\[(\d+)\]<(?:input|button)", text_of(messages[-1]))[-3:])
        typed = [{"input": {"index": index, "text": text}} for index, text in ((a, "19"), (b, "23"))]
        actions = [*typed, {"click": {"index": add}}]
    words = dict.fromkeys(("thinking", "evaluation_previous_goal", "memory", "next_goal"), "so")
    return json.dumps({**words, "action": actions})


def test_browser_use_as_it_comes_sees_a_page_and_acts_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The page is on this machine. Its pictures reach the model, and its penalty keeps the tokens from RL."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANONYMIZED_TELEMETRY", "false")
    monkeypatch.setenv("HOME", str(tmp_path))
    site = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    monkeypatch.setenv("PAGE", f"http://127.0.0.1:{site.server_port}/")
    agent = Program([str(python_of("browser-use")), str(SCRIPT), "browser-use"])
    tape = asyncio.run(rollout(agent, Adds, "add", engine=Seeing(browses), sampling=Sampling(max_tokens=2000)))
    site.shutdown()
    site.server_close()
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0), tape.cause
    assert [len(tape.call_places(call.call)) for call in tape.calls] == [1, 1, 2]
    assert "the sum is 42" in "\n".join(map(text_of, tape.calls[1].messages))
    assert {(call.sampling.temperature, call.sampling.exact) for call in tape.calls} == {(0.2, False)}
    assert all(call.sampling.extra == {"frequency_penalty": 0.3} for call in tape.calls)


def _commands() -> list[str]:
    page = (ROOT / "docs" / "how-to" / "gateway.md").read_text(encoding="utf-8")
    found = re.findall(r"^tapereel run --agent examples/gateway_clients\.py:(?s:.*?) --out \S+$", page, re.MULTILINE)
    return [command.replace("\\\n", "") for command in found]


COMMANDS = {command.split()[3].partition(":")[2]: command for command in _commands()}


def test_the_page_has_a_command_for_each_recipe():
    assert COMMANDS.keys() == RECIPES.keys()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_commands_of_the_page_run(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(COMMANDS[recipe])[1:]
    model, out = words.index("--model"), words.index("--out")
    words[out + 1] = str(tmp_path / "run")
    words[model : model + 2] = ["--set", "engine.policy=tests/contract/clients_model.py:adds", "--set", "count=1"]
    assert main(words) == 0
    with Store.open(tmp_path / "run") as store:
        (tape,) = store.tapes()
    assert (tape.status, tape.reward, len(tape.calls)) == (Status.FINISHED, 1.0, 2), tape.calls


class Sums(Environment[Answer]):
    async def reset(self, task: str) -> Text:
        return Text(text=task)

    async def step(self, action: Answer) -> Outcome:
        found = json.loads(action.text)
        right = all(isinstance(word, str) for word in found["words"]) and isinstance(found["total"], int)
        return Outcome(reward=float(right), terminated=True)


@pytest.mark.parametrize("client", PARSED)
def test_a_clients_answer_with_fields_is_enforced_and_replayed(client: str):
    """The model is untrained, so it would never give such an answer by itself."""
    renderer = Renderer(CHARS)
    engine = EmbeddedEngine(tiny_model(CHARS, "micro", context=4096), renderer, version="run:0", slots=2)
    agent = Program([str(PYTHON), str(SCRIPT), "parsed", client])
    tape = asyncio.run(rollout(agent, Sums, "add", engine=engine, sampling=Sampling(max_tokens=300)))
    assert (tape.status, tape.reward) == (Status.FINISHED, 1.0), tape.cause
    assert [call.constraint and call.constraint.enforced for call in tape.calls] == [True]
    verdict = asyncio.run(replay(tape, agent, renderer=renderer))
    assert verdict.outcome == "verified", verdict


def test_the_official_models_parse_every_answer_and_every_event(tmp_path: Path):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    lines = list[Any]()
    shapes: list[Any] = [
        ("one two", "stop", None, (), "a thought"),
        ("", "length", None, (), "a thought"),
        ("i add", "tool_calls", None, (call,), "a thought"),
        ("", "tool_calls", None, (call,), "a thought"),
        ("one two", "stop", None, ()),
        ("", "stop", None, ()),
        ("one", "stop", "x", ()),
        ("one", "length", None, ()),
        ("", "tool_calls", None, (call, call)),
        ("i add", "tool_calls", None, (call,)),
    ]
    for text, finish, stopped, calls, *thought in shapes:
        answer = Answered("0" * 24, text, finish, stopped, calls, *thought, prompt_tokens=3, completion_tokens=2)
        function: Any = {"type": "function", "name": "add", "parameters": {}}
        body: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        for name, dialect, asked in (
            ("responses", responses_protocol, responses_protocol.read({"input": "hi", "tools": [function]})),
            ("messages", messages_protocol, messages_protocol.read(body)),
            ("chat", chat_protocol, chat_protocol.read({"messages": body["messages"]})),
        ):
            lines.append([name, dialect.body(asked, answer)])
            stream: Any = dialect.stream(asked)
            sent = stream.begin(answer.id, 7) + (stream.thought(thought[0][:3]) if thought else b"")
            sent += (stream.text(text[:2]) if text and not thought else b"") + stream.end(answer)
            data = [line[6:] for line in sent.decode().splitlines() if line.startswith("data: {")]
            lines += [[f"{name}-event", json.loads(event)] for event in data]
    file = tmp_path / "lines.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    done = subprocess.run([PYTHON, SCRIPT, "parse", file], env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
