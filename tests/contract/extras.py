"""Each extra in use, in an environment that has that extra alone.

    python tests/contract/extras.py                 (every extra that `dev` installs, as CI does)
    python tests/contract/extras.py EXTRA FOLDER    (one extra in this environment)

The first form makes the environments from links to the packages of its own, so nothing is installed. `.ci/newest` uses
the second form with the newest versions that pip finds. A smoke test works in FOLDER and reaches no other machine.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distributions, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import tapereel
import tapereel as tr
from tapereel.agents import RunConfig
from tapereel.agents.runs import run
from tapereel.cli import main
from tapereel.envs.adapters import ToolEnvironment
from tapereel.tapes import Answer, ToolCalls, Video
from tapereel.tapes.store import Store

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "digits.py"
SCENE = ("--agent", f"{DIGITS}:player", "--env", f"{DIGITS}:Digits", "--tasks", f"{DIGITS}:tasks")
SMALL = ("loop.updates=2", "loop.groups=2", "loop.group_size=4", "loop.sampling.max_tokens=1", "evaluation.limit=4")


def extras_of(name: str) -> set[str]:
    """The extra and those that it consists of."""
    found = {name}
    for need in requires("tapereel") or ():
        if marked(need, name) and (parts := re.match(r"tapereel\[([\w,-]+)\]", need)):
            found.update(*map(extras_of, parts[1].split(",")))
    return found


def marked(need: str, extra: str) -> bool:
    """Whether `pip install "tapereel[extra]"` takes this requirement."""
    return re.search(rf"""extra == .{extra}["']$""", need) is not None


def alone(extra: str, folder: Path) -> Path:
    """Make a virtual environment with links to what pip would install for the extra, and nothing else of this one.
    Returns its Python."""
    from packaging.requirements import Requirement

    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    todo, done = [("tapereel", name) for name in extras_of(extra)], set()
    while todo:
        todo, done = [*todo[1:], *needed(Requirement, *todo[0])] if todo[0] not in done else todo[1:], {*done, todo[0]}
    for name in {name for name, _ in done}:
        # A build leaves metadata in the checkout, which is no installation.
        (found, *_) = distributions(name=name, path=[path for path in sys.path if Path(path).resolve() != ROOT])
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))).absolute())
    return folder / "bin" / "python"


def needed(read: Any, name: str, extra: str) -> list[tuple[str, str]]:
    """(package, extra) for each requirement of a package with one of its extras, or "" for none."""
    found = [read(need) for need in requires(name) or ()]
    here = [need for need in found if need.marker is None or need.marker.evaluate({"extra": extra})]
    return [(need.name, one) for need in here if need.name != "tapereel" for one in ("", *need.extras)]


def verb(*words: str) -> None:
    """A command line, which must end well. `train` exits with 1 when a run so short learned nothing."""
    code = main([*words])
    assert code == 0 or (words[0] == "train" and code == 1), (words, code)


def trained(*settings: str, size: Literal["micro", "base"] = "micro") -> Path:
    """A run of two updates, whose tapes hold."""
    tr.save_tiny_model("model", "0123456789", size=size, context=32)
    sets = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    verb("train", *SCENE, "--model", "model", "--out", "run", *sets)
    verb("verify", "run")
    verb("reproduce", "run")
    return Path("run")


def training() -> None:
    """All modules of the package, a training, and what follows it."""
    for module in pkgutil.walk_packages(tapereel.__path__, "tapereel."):
        floor = module.name.split(".")[1]
        if floor in ("tapes", "envs", "agents", "finetune", "cli") and not module.name.endswith(
            (".__main__", ".vllm_worker")
        ):
            importlib.import_module(module.name)
    assert not {"litellm", "vllm", "peft", "bitsandbytes"} & set(sys.modules)
    folder = trained()
    verb("export", str(folder), "rows.jsonl")
    verb("view", str(folder), "--out", "page.html")
    http()


def lora() -> None:
    folder = trained("trainer.lora.rank=2")
    assert list(folder.glob("checkpoints/*/hf/adapter_config.json"))


def qlora() -> None:
    # bitsandbytes reads the narrower sizes back wrongly on a CPU.
    folder = trained("trainer.lora.rank=2", "trainer.lora.quantise=nf4", size="base")
    assert list(folder.glob("checkpoints/*/hf/adapter_config.json"))


def gguf() -> None:
    from tiny_gguf import save_tiny_gguf  # beside this script

    os.environ["XDG_CACHE_HOME"] = os.path.abspath("cache")
    save_tiny_gguf(Path("tiny.gguf"))
    verb("run", *SCENE, "--model", "tiny.gguf", "--out", "run", "--set", "sampling.max_tokens=1")


def demo() -> None:
    from tapereel.envs.adapters.reasoning import reasoning_tasks

    assert len(reasoning_tasks("chain_sum", 3, seed=0)) == 3
    verb("demo", "--model-size", "micro", "--out", "demo", "--set", "loop.updates=2", "--set", "warm.updates=4")
    verb("verify", "demo")


def tracked(name: str) -> Callable[[], None]:
    def smoke() -> None:
        folder = trained(f"trackers=[{name}]")
        assert any(path.is_file() for path in (folder / "trackers").rglob("*"))

    return smoke


def script(name: str, wanted: str, *words: str) -> Callable[[], None]:
    """An example, which prints `wanted`."""

    def smoke() -> None:
        done = subprocess.run([sys.executable, ROOT / "examples" / name, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert re.search(wanted, done.stdout), done.stdout

    return smoke


class Provider(BaseHTTPRequestHandler):
    """OpenAI's wire form: a call of the offered tool, then its result."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        *_, last = body["messages"]
        message: dict[str, Any] = {"role": "assistant", "content": last["content"]}
        if last["role"] == "user":
            name = body["tools"][0]["function"]["name"]
            call = {"id": "1", "type": "function", "function": {"name": name, "arguments": '{"a": 2, "b": 3}'}}
            message |= {"content": None, "tool_calls": [call]}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        answer = {
            "id": "x",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [choice],
            "usage": usage,
        }
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Adds(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__([add])

    async def prompt(self, task: int) -> str:
        return "Add 2 and 3."

    async def answered(self, text: str) -> tr.Outcome:
        return tr.Outcome(reward=float(text == "5"), terminated=True)


def litellm() -> None:
    os.environ["OPENAI_API_KEY"] = "none"
    with ThreadingHTTPServer(("127.0.0.1", 0), Provider) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        engine = {"kind": "litellm", "model": "openai/m", "base_url": f"http://127.0.0.1:{server.server_port}/v1"}
        agent = tr.ChatAgent(actions=[ToolCalls], plain=Answer)
        found = run(RunConfig.model_validate({"engine": engine}), "hosted", agent=agent, env=Adds, tasks=[0])
        server.shutdown()
    assert (found.reward, found.tokens["prompt"]) == (1.0, 20), found


def http() -> None:
    """A program of the standard library asks the model through the gateway."""
    program = (
        "import json, os, urllib.request\n"
        "url, key = os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']\n"
        "body = json.dumps({'model': 'm', 'messages': [{'role': 'user', 'content': 'a'}]}).encode()\n"
        "head = {'Authorization': f'Bearer {key}', 'Content-Type': 'application/json'}\n"
        "asked = urllib.request.Request(f'{url}/chat/completions', body, head)\n"
        "print(json.load(urllib.request.urlopen(asked))['choices'][0]['message']['content'])\n"
    )
    from tapereel.agents.gateway import Program

    class Says(tr.Environment[Answer]):
        async def reset(self, task: str) -> str:
            return task

        async def step(self, action: Answer) -> tr.Outcome:
            return tr.Outcome(reward=float(action.text == "yes"), terminated=True)

    agent = Program([sys.executable, "-c", program])
    tape = asyncio.run(tr.rollout(agent, Says, "a", engine=tr.ScriptedEngine(["yes"])))
    assert (tape.reward, len(tape.calls)) == (1.0, 1), tape.cause


class Look(tr.Observation, kind="extras_look"):
    picture: tr.Picture


class Watch(tr.Observation):
    clip: Video


class Sees(tr.Environment[Answer]):
    async def reset(self, task: int) -> Look:
        return Look(picture=square(task))

    async def step(self, action: Answer) -> tr.Outcome:
        return tr.Outcome(reward=1.0, terminated=True)


class Watches(Sees):
    async def reset(self, task: int) -> Watch:  # type: ignore[override]
        return Watch(clip=Video.of([square(task + shade) for shade in (10, 60, 110, 160)], fps=2.0))


def square(shade: int) -> tr.Picture:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (28, 28), (shade, 0, 0)).save(file, "png")
    return tr.Picture.of(file.getvalue())


def pictures() -> None:
    config = RunConfig.model_validate({"engine": {"kind": "scripted", "answers": ["red"]}})
    run(config, "seen", agent=tr.ChatAgent(), env=Sees, tasks=[5])
    with Store.open("seen") as store:
        (tape,) = store.tapes()
    (step,) = [step for step in tape if isinstance(step, Look)]
    assert (step.picture.width, step.picture.height) == (28, 28)
    verb("verify", "seen")


def video() -> None:
    import torch

    if torch.version.cuda is None:
        # The index has torchvision for CUDA alone. Its Python part works once two operators have their names.
        from vllm_cpu import SCHEMAS

        spec = find_spec("torchvision")
        assert spec is not None
        assert spec.origin is not None
        extension = Path(spec.origin).with_name("extension.py")
        extension.write_text(extension.read_text() + SCHEMAS)
    from tapereel.agents.vision.tiny_vision import save_tiny_vision

    save_tiny_vision("model", "qwen2_5_vl")
    engine = {"kind": "embedded", "model": "model", "capacity": 512, "renderer": {"video": "native"}}
    config = RunConfig.model_validate({"engine": engine, "sampling": {"max_tokens": 3}})
    found = run(config, "watched", agent=tr.ChatAgent(), env=Watches, tasks=[5])
    assert found.tokens["sampled"] > 0
    verb("verify", "watched")


def mathematics() -> None:
    from tapereel.envs.rewards.mathematics import MathVerifier

    verifier = MathVerifier()
    assert verifier.equal("so it is $\\frac{2}{4}$", "1/2")
    assert not verifier.equal("3", "1/2")
    verifier.close()


def browser() -> None:
    from playwright.sync_api import sync_playwright

    verb("run", *SCENE, "--set", 'engine.answers=["7"]', "--set", "count=4", "--out", "run")
    verb("view", "run", "--out", "page.html")
    with sync_playwright() as playwright:
        found = os.environ.get("TAPEREEL_CHROMIUM") or shutil.which("chromium")
        page = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"]).new_page()
        page.goto(Path("page.html").resolve().as_uri())
        page.get_by_role("link", name="Tapes").click()
        page.wait_for_selector(".trow[data-tape]")
        assert page.locator(".trow[data-tape]").count() == 4


def verifiers() -> None:
    folder = ROOT / "tests" / "contract"
    subprocess.run(
        [sys.executable, folder / "verifiers_run.py", "failing"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        check=True,
    )


def on_ray() -> None:
    """Episodes in Ray actors of this machine."""
    roll = RunConfig.model_validate(
        {
            "agent": f"{DIGITS}:player",
            "env": f"{DIGITS}:Digits",
            "tasks": f"{DIGITS}:tasks",
            "engine": {"kind": "scripted", "answers": ["7"]},
            "count": 4,
            "on": "ray",
        }
    )
    assert run(roll, "on-ray").scored == 4


def site() -> None:
    """The site of the pages, built strictly and checked."""
    subprocess.run([sys.executable, ROOT / "docs" / "build.py"], check=True)


SMOKES: dict[str, Callable[[], object]] = {
    "train": training,
    "lora": lora,
    "gguf": gguf,
    "qlora": qlora,
    "demo": demo,
    "track": tracked("tensorboard"),
    "wandb": tracked("wandb"),
    "trackio": tracked("trackio"),
    "mlflow": tracked("mlflow"),
    "gym": script("gymnasium_blackjack.py", "200 hands"),
    "litellm": litellm,
    "http": http,
    "pictures": pictures,
    "video": video,
    "mcp": script("mcp_agent.py", r"finished 1\.0"),
    "math": mathematics,
    "browser": browser,
    "verifiers": verifiers,
    "ray": on_ray,
    "docs": site,
}
"""Extra -> its use. `vllm` is not here: it is only resolved."""


def versions(extra: str) -> str:
    """The packages that the extra names, with their versions."""
    needs = [need for need in requires("tapereel") or () if marked(need, extra)]
    names = sorted({re.split(r"[^\w.-]", need)[0] for need in needs} - {"tapereel"})
    return ", ".join(f"{name} {version(name)}" for name in names)


def every() -> int:
    """Each extra that `dev` installs, alone, two at a time. Returns 1 if one failed.

    CI's first part runs the demo in an environment that has its extra alone."""

    def tried(extra: str) -> bool:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            python, work = alone(extra, Path(folder, "environment")), Path(folder, "work")
            work.mkdir()
            done = subprocess.run([python, __file__, extra, work], capture_output=True, text=True, timeout=170)
        print(f"{extra}: exit code {done.returncode} after {time.monotonic() - began:.0f} s; {done.stdout.strip()}")
        print(done.stderr if done.returncode else "", end="", flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(tried, sorted(extras_of("dev") - {"dev", "demo"})))
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit(every())
    extra, folder = sys.argv[1:]
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false")
    os.chdir(folder)
    print(versions(extra))
    sys.stdout = sys.stderr
    SMOKES[extra]()
