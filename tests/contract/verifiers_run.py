"""Parts of `test_verifiers.py`, which run in the environment of `verifiers_env.py`: `python verifiers_run.py PART`."""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import verifiers.v1 as vf  # type: ignore[import-not-found]
from aiohttp import web
from mcp import Client
from reward_functions import ANSWER, FUNCTIONS, TEXTS  # type: ignore[import-not-found]

from tapereel.agents import ChatAgent, ScriptedEngine, rollout
from tapereel.cli import main
from tapereel.envs import BadTasks
from tapereel.envs.adapters.verifiers import VerifiersEnvironment, verifiers_tasks
from tapereel.tapes import Answer, Status, Tape, ToolCall, ToolCalls, ToolResults
from tapereel.tapes.errors import BadArgument
from tapereel.tapes.steps import Prompt

Said = str | tuple[str, dict[str, Any]]
"""Text, or one call."""
EPISODES: list[list[Said]] = [
    ["0.5"],
    [r"\boxed{1/2}"],
    [("box_divide", {"a": 1}), "0.5"],
    [("box_divide", {"a": 1, "b": 0}), ("box_divide", {"a": "x"}), ("box_words", {"text": "a b"}), "no"],
]


def environment(**settings: Any) -> Any:
    return vf.load_environment(vf.SingleAgentEnvConfig(taskset={"id": "verifiers_halves", "task": settings}))


tasks = verifiers_tasks(environment())
agent = ChatAgent(actions=[ToolCalls], plain=Answer)


def spoken(said: Said) -> str:
    call = None if isinstance(said, str) else {"name": said[0], "arguments": said[1]}
    return str(said) if call is None else f"<tool_call>{json.dumps(call)}</tool_call>"


def played(said: list[Said], task: int = 1, **settings: Any) -> Tape:
    inner = environment(**settings)
    script = ScriptedEngine([spoken(one) for one in said])
    return asyncio.run(rollout(agent, lambda: VerifiersEnvironment(inner), verifiers_tasks(inner)[task], engine=script))


class Harness(vf.Harness[vf.HarnessConfig]):
    """The loop of their harness `null` in this process: it asks the endpoint, and calls the tools by their servers."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: Any, secret: Any, mcp_urls: Any, data: Any):  # type: ignore[no-untyped-def]
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [m.model_dump() for m in prompt]
        messages += [{"role": m["role"], "content": m["content"]} for m in chat]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=60) as http:
            while True:
                body = {"model": ctx.model, "messages": messages}
                answer = (await http.post(f"{endpoint}/chat/completions", json=body)).raise_for_status().json()
                messages.append(answer["choices"][0]["message"])
                if not messages[-1].get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in messages[-1]["tool_calls"]:
                    server, _, name = call["function"]["name"].partition("_")
                    async with Client(mcp_urls[server]) as client:
                        result = await client.call_tool(name, json.loads(call["function"]["arguments"]))
                    text = "\n".join(block.text for block in result.content)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


async def theirs(said: list[Said], task: int, loaded: Any = None) -> Any:
    """The trace of verifiers' own rollout, in which a server of ours says the same."""
    loaded = loaded or environment()
    left = list(said)

    async def completions(request: web.Request) -> web.Response:
        one, message = left.pop(0), {"role": "assistant", "content": None}
        if isinstance(one, str):
            message["content"] = one
        else:
            function = {"name": one[0], "arguments": json.dumps(one[1])}
            message["tool_calls"] = [{"id": f"c{len(left)}", "type": "function", "function": function}]
        finish = "stop" if isinstance(one, str) else "tool_calls"
        choice = {"index": 0, "finish_reason": finish, "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        return web.json_response(body)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="TAPEREEL_NO_KEY")
    config = vf.AgentConfig(model="m", client=client, runtime=vf.SubprocessConfig(), harness={"id": "null"})
    own = vf.Agent(config)
    own.harness = Harness(own.config.harness)
    try:
        async with own:
            return await own.run(list(loaded.taskset)[task])
    finally:
        await runner.cleanup()


def same() -> None:
    """Rewards, weights, metrics and the tools' results are those of verifiers' own rollout."""
    for task, said in [*((1, said) for said in EPISODES), (3, ["4.5"])]:
        trace, tape = asyncio.run(theirs(said, task)), played(said, task)
        assert trace.ok, trace.errors
        assert tape.status is Status.FINISHED, tape.cause
        wanted = {name: (reward.score, reward.weight) for name, reward in trace.rewards.items()}
        wanted |= {name: (value, 0.0) for name, value in trace.metrics.items()}
        assert {r.name: (r.value, r.weight) for r in tape.rewards} == {f"verifiers/{k}": v for k, v in wanted.items()}
        assert tape.reward is not None
        assert abs(tape.reward - trace.reward) < 1e-12
        results = [r.content for step in tape if isinstance(step, ToolResults) for r in step.results]
        assert results == [m.content for m in trace.tool_messages]
        assert isinstance(tape[0], Prompt)
        prompt = [(m["role"], m["content"]) for m in tape[0].messages]
        assert prompt == [(m.role, m.content) for m in trace.messages[: len(prompt)]]
        print(task, said, wanted)


def functions() -> None:
    """Fifty functions, as rewards and as metrics: the numbers are theirs, and those of plain Python."""
    loaded = vf.load_environment(vf.SingleAgentEnvConfig(taskset={"id": "verifiers_functions"}))
    for k, (task, only) in enumerate(zip(verifiers_tasks(loaded), (None, "near number", "never a score"), strict=True)):
        for text in TEXTS:
            trace = asyncio.run(theirs([text], k, loaded))
            engine = ScriptedEngine([text])
            tape = asyncio.run(rollout(agent, partial(VerifiersEnvironment, loaded), task, engine=engine))
            if only and FUNCTIONS[only](text, ANSWER) is None:  # verifiers takes numbers only
                assert (trace.ok, tape.status, tape.reward) == (False, Status.ERROR, None), (only, text)
                continue
            assert trace.ok, (text, trace.errors)
            found = {r.name.removeprefix("verifiers/"): (r.value, r.weight) for r in tape.rewards}
            assert found == {name: (r.score, r.weight) for name, r in trace.rewards.items()} | {
                name: (value, 0.0) for name, value in trace.metrics.items()
            }, text
            for name, function in FUNCTIONS.items() if only is None else ():
                wanted = function(text, ANSWER)
                assert (name in found) == (wanted is not None), name
                assert wanted is None or math.isclose(found[name][0], wanted, rel_tol=0, abs_tol=1e-12), (name, text)
            assert math.isclose(tape.reward or 0.0, trace.reward, rel_tol=1e-12, abs_tol=1e-12), text


def failing() -> None:
    """A failing tool is a result, and an error of the task's own code is an error of the environment."""
    tape = played(EPISODES[3])
    assert [r.error for step in tape if isinstance(step, ToolResults) for r in step.results] == [True, True, False]
    tape = played(["0.5"], fails="setup")
    assert tape.status is Status.ERROR
    assert tape.cause is not None
    assert "no setup" in tape.cause.message
    assert played(["0.5"], tools=False).reward == played(["0.5"]).reward
    tape = played(["0.5"], url="http://localhost:1/mcp")
    assert tape.status is Status.ERROR
    assert tape.cause is not None
    assert "http://localhost:1/mcp" in tape.cause.message
    tape = played(["0.5"], fails="reward")
    assert tape.status is Status.ERROR
    assert tape.reward is None
    assert any("no reward" in str(reward.evidence) for reward in tape.rewards)


def refused() -> None:
    """What this adapter doesn't have is named."""

    def why(make: Any, use: Any = VerifiersEnvironment) -> str:
        try:
            use(make())
        except (BadArgument, BadTasks) as error:
            return str(error)
        raise AssertionError("not refused")

    user = vf.resolve_env_config({"id": "user-sim", "taskset": {"id": "verifiers_halves"}})
    assert "UserSimEnv" in why(lambda: vf.load_environment(user))
    stops = {"done": {"fn": "json:loads"}}
    assert "'done' (@stop)" in why(lambda: environment(stops=stops))
    bash = vf.SingleAgentEnvConfig(taskset={"id": "verifiers_halves"}, agent={"harness": {"id": "bash"}})
    assert "'bash'" in why(lambda: vf.load_environment(bash))
    assert "str" in why(lambda: "gsm8k")
    endless = environment()
    endless.taskset.INFINITE = True
    assert "verifiers_halves" in why(lambda: endless, verifiers_tasks)
    assert len(verifiers_tasks(endless, size=2)) == 2


def commands() -> None:
    """A run by command is replayed, and `check env` finds nothing."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "environments.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```\w*\n(# halves\.py\n.*?)```", page, re.DOTALL)
    Path("halves.py").write_text(code.replace("gsm8k-v1", "verifiers_halves"))
    assert len(tasks) == 4
    assert tasks[1].expected == "0.5"
    assert "answer" not in json.dumps(tasks[1].public)
    scene = ["--env", "halves.py:env", "--tasks", "halves.py:tasks", "--agent", "halves.py:agent"]
    answers = json.dumps([spoken(("box_divide", {"a": 1})), "0.5"])
    assert main(["run", *scene, "--set", f"engine.answers={answers}", "--out", "run"]) == 0
    assert main(["replay", "env", "run"]) == 0
    acting = f"{__file__}:acts"
    assert (
        main(["check", "env", "halves.py:env", "--tasks", "halves.py:tasks", "--actions", acting, "--stall", "2"]) == 0
    )


def acts(seen: object, rng: Any) -> Any:
    if isinstance(seen, ToolResults):
        return Answer(text=rng.choice(["0.5", "no"]))
    return ToolCalls(calls=(ToolCall(id="1", name="box_divide", arguments={"a": 1, "b": rng.randint(0, 2)}),))


if __name__ == "__main__":
    {"same": same, "functions": functions, "failing": failing, "refused": refused, "commands": commands}[sys.argv[1]]()
