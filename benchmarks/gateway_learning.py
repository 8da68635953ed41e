"""Does a model learn from what official clients ask through Responses and through Messages?

    python benchmarks/gateway_learning.py [--api responses messages] [--seed 0 1 2] --out DIR

The task is the content of a box, which only a tool of the program sees (`gateway_client.py`). Each episode starts the
unmodified client again, with streaming. A micro model imitates a demonstrator that guesses in half of the episodes, so
it can use the tool and often doesn't. The start is the same for both APIs. Then `train` makes a few updates with the
default recipe. The reward before and after is measured by a function that uses chat completions.

Each run leaves `DIR/API-SEED.json` and is reproduced. A run that is there isn't repeated. The table of all runs is
printed as Markdown. The clients are those of `tests/contract/clients_env.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from gateway_client import MOST, PARAMETERS, QUESTION, TOOL, looked

from tapereel.agents import Request, RunConfig
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.gateway import Endpoint, Program
from tapereel.agents.runs import run
from tapereel.agents.setup import EmbeddedConfig, ScriptedConfig
from tapereel.envs import Environment, Outcome
from tapereel.finetune import LoopConfig, OptimiserConfig, TrainConfig
from tapereel.finetune.inspect import reproduce
from tapereel.finetune.run import EvaluationConfig, train
from tapereel.finetune.run.train_config import ImitationConfig
from tapereel.tapes import Answer, Sampling, Task, Text
from tapereel.tapes.store import METRICS, read_metrics

HERE = Path(__file__).resolve()
CLIENTS = Path(os.environ.get("TAPEREEL_CLIENTS_ENVIRONMENT", HERE.parents[1] / ".contract" / "clients"))
AS_TASK = "tapereel.tapes:Task.model_validate"
CONTEXT = 256
CONTENTS = "0123456789"
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
MEASURED, DEMONSTRATED = 10, 20
"""Episodes for each content, to measure a model and to demonstrate."""
WARM = 300
"""Updates of imitation, of 32 demonstrations each."""
UPDATES, GROUPS, GROUP_SIZE, EPOCHS, LR = 4, 4, 6, 4, 1e-3
"""Clients take a second to start, so each update makes several steps on few episodes."""
SAMPLING = Sampling(max_tokens=80)


class Box(Environment[Answer]):
    """What is in the box earns 1. The program gets the content, and tells it to the model only by its tool."""

    async def reset(self, task: Task) -> Text:
        self.content = str(task.public)
        return Text(text=self.content)

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=float(action.text == self.content), terminated=True)


def program(api: str) -> Program:
    """Return the agent that starts the client of this API for each episode."""
    return Program([str(CLIENTS / "bin" / "python"), str(HERE.with_name("gateway_client.py")), api], name="looker")


responses, messages = program("responses"), program("messages")


async def by_chat(content: str, endpoint: Endpoint) -> str:
    """The same program as a function, by chat completions."""
    import httpx
    from openai import AsyncOpenAI

    tools: Any = [{"type": "function", "function": {**TOOL, "parameters": PARAMETERS}}]
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    async with AsyncOpenAI(**endpoint._asdict(), http_client=httpx.AsyncClient(verify=False)) as api:
        for _ in range(MOST):
            reply: Any = (await api.chat.completions.create(model="policy", messages=said, tools=tools)).choices[0]
            if not reply.message.tool_calls:
                return reply.message.content
            said.append(reply.message)
            for call in reply.message.tool_calls:
                text, _ = looked(call.function.name, content)
                said.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return ""


chat = Program(by_chat, name="looker")


def demonstrate(request: Request) -> str:
    """Guess in half of the episodes, and otherwise use the tool."""
    rng, last = random.Random(request.seed), request.messages[-1]
    if last["role"] == "tool":
        return last["content"]
    return rng.choice(CONTENTS) if rng.random() < 0.5 else CALL


def scene(agent: str, tasks: Path) -> dict[str, Any]:
    return {"agent": f"{HERE}:{agent}", "env": f"{HERE}:Box", "tasks": str(tasks), "task_row": AS_TASK}


def warm_start(seed: int, home: Path) -> str:
    """Return the folder of the model that both APIs start from. Makes it if it isn't there."""
    told = home / "model.txt"
    if told.exists():
        return told.read_text()
    base, demonstrations = home / "base", home / "demonstrations"
    home.mkdir(parents=True, exist_ok=True)
    tasks = "".join(Task(public=content).model_dump_json() + "\n" for content in CONTENTS)
    (home / "tasks.jsonl").write_text(tasks, encoding="utf-8")
    tokenizer = char_tokenizer()
    tiny_model(tokenizer, "micro", seed=seed, context=CONTEXT).save_pretrained(base)
    tokenizer.save_pretrained(base)
    run(
        RunConfig(
            **scene("chat", home / "tasks.jsonl"),
            engine=ScriptedConfig(policy=f"{HERE}:demonstrate", tokenizer=str(base)),
            split="demo",
            seed=seed,
            attempts=DEMONSTRATED,
            sampling=SAMPLING,
        ),
        demonstrations,
    )
    config = TrainConfig(
        **scene("chat", home / "tasks.jsonl"),
        seed=seed,
        engine=EmbeddedConfig(model=str(base), capacity=CONTEXT),
        warm=ImitationConfig(tapes=str(demonstrations), updates=WARM, batch=32, optimiser=OptimiserConfig(lr=1e-2)),
        loop=LoopConfig(updates=0),
        evaluation=EvaluationConfig(fraction=0),
    )
    told.write_text(train(config, home / "imitation").model)
    return told.read_text()


def earned(model: str, seed: int, home: Path, out: Path) -> float:
    """Return the mean reward of new episodes, sampled at temperature 1."""
    config = RunConfig(
        **scene("chat", home / "tasks.jsonl"),
        engine=EmbeddedConfig(model=model, slots=64, capacity=CONTEXT),
        seed=seed,
        attempts=MEASURED,
        sampling=SAMPLING,
    )
    reward = run(config, out).reward
    assert reward is not None
    return reward


def measure(api: str, seed: int, out: Path) -> dict[str, Any]:
    """Train through one API, and reproduce the run."""
    home, folder = out / f"warm-{seed}", out / "runs" / f"{api}-{seed}"
    model = warm_start(seed, home)
    config = TrainConfig(
        **scene(api, home / "tasks.jsonl"),
        seed=seed,
        engine=EmbeddedConfig(model=model, capacity=CONTEXT),
        loop=LoopConfig(
            updates=UPDATES,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            epochs=EPOCHS,
            max_lag=0,
            max_concurrent=GROUP_SIZE,
            optimiser=OptimiserConfig(lr=LR),
            sampling=SAMPLING,
        ),
        evaluation=EvaluationConfig(fraction=0),
    )
    before, began, clock = earned(model, seed, home, folder / "before"), time.process_time(), time.monotonic()
    children = os.times().children_user + os.times().children_system
    summary = train(config, folder / "training")
    lines = [line for line in read_metrics(folder / "training" / METRICS) if line["phase"] == "rl"]
    return {
        "api": api,
        "seed": seed,
        "before": before,
        "after": earned(summary.model, seed, home, folder / "after"),
        "curve": [line["reward"] for line in lines],
        "episodes": sum(line["episodes"] for line in lines),
        "reproduce": reproduce(folder / "training").outcome,
        "books_close": summary.books_close,
        "cpu_seconds": round(time.process_time() - began, 1),
        "clients_cpu_seconds": round(os.times().children_user + os.times().children_system - children, 1),
        "seconds": round(time.monotonic() - clock, 1),
    }


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| API | seed | before | after | mean reward of each update | episodes | `reproduce` | CPU s, clients' |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        curve = ", ".join(f"{reward:.2f}" for reward in one["curve"])
        lines.append(
            f"| {one['api']} | {one['seed']} | {one['before']:.3f} | {one['after']:.3f} | {curve} | {one['episodes']} "
            f"| {one['reproduce']} | {one['cpu_seconds']:.0f}, {one['clients_cpu_seconds']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--api", nargs="+", choices=["responses", "messages"], default=["responses", "messages"])
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="one JSON per run, and the run directories")
    args = parser.parse_args()
    for seed in args.seed:
        for api in args.api:
            result = args.out / f"{api}-{seed}.json"
            if not result.exists():
                found = measure(api, seed, args.out.resolve())
                result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
                print(json.dumps(found), file=sys.stderr, flush=True)
    print(table([json.loads(path.read_text(encoding="utf-8")) for path in sorted(args.out.glob("*-*.json"))]))


if __name__ == "__main__":
    main()
