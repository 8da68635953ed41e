"""Unmodified clients with their default settings, each with one tool. Run by the Python of `clients_env.py`.

    python clients_run.py NAME           asks the model until it calls no more tools, and prints its last answer
    python clients_run.py parsed NAME    asks for an answer with fields, and prints them
    python clients_run.py parse FILE     parses lines [KIND, JSON] with the official models

The address and the key are in the environment, as for every program behind the gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

TASK = "add some numbers"
SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def added(a: int, b: int) -> int:
    if a < 0:
        raise ValueError("a is negative")
    return a + b


def result(arguments: dict[str, int]) -> tuple[str, bool]:
    """The tool's answer, and whether it is an error."""
    try:
        return str(added(**arguments)), False
    except ValueError as error:
        return str(error), True


async def responses(stream: bool) -> str:
    import openai

    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}]
    items: list[Any] = [{"role": "user", "content": TASK}]
    async with openai.AsyncOpenAI(max_retries=0) as api:
        while True:
            asked: Any = {"model": "gpt-5", "input": items, "tools": tools}
            if stream:
                async with api.responses.stream(**asked) as events:
                    answer: Any = await events.get_final_response()
            else:
                answer = await api.responses.create(**asked)
            items += answer.output
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            for call in calls:
                text, _ = result(json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": text})


async def continued() -> str:
    """The conversation is kept by the gateway, and each request has only the newest items."""
    import openai

    tools: Any = [{"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}]
    items: list[Any] = [{"role": "user", "content": TASK}]
    previous: Any = None
    async with openai.AsyncOpenAI(max_retries=0) as api:
        while True:
            answer = await api.responses.create(model="m", input=items, tools=tools, previous_response_id=previous)
            previous = answer.id
            calls = [item for item in answer.output if item.type == "function_call"]
            if not calls:
                return answer.output_text
            texts = [(call.call_id, result(json.loads(call.arguments))[0]) for call in calls]
            items = [{"type": "function_call_output", "call_id": id, "output": text} for id, text in texts]


async def agents_sdk(stream: bool) -> str:
    import agents

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return added(a, b)

    agent = agents.Agent(name="adder", instructions="Add with the tool.", tools=[add])
    if not stream:
        return str((await agents.Runner.run(agent, TASK)).final_output)
    running = agents.Runner.run_streamed(agent, TASK)
    async for _ in running.stream_events():
        pass
    return str(running.final_output)


async def anthropic_sdk(stream: bool) -> str:
    import anthropic

    tools: Any = [{"name": "add", "input_schema": SCHEMA}]
    messages: list[Any] = [{"role": "user", "content": TASK}]
    async with anthropic.AsyncAnthropic(max_retries=0) as api:
        while True:
            asked: Any = {"model": "claude-sonnet-4-5", "max_tokens": 1000, "messages": messages, "tools": tools}
            if stream:
                async with api.messages.stream(**asked) as events:
                    answer: Any = await events.get_final_message()
            else:
                answer = await api.messages.create(**asked)
            messages.append({"role": "assistant", "content": answer.content})
            uses = [block for block in answer.content if block.type == "tool_use"]
            if not uses:
                assert answer.stop_reason == "end_turn"
                return "".join(block.text for block in answer.content if block.type == "text")
            made = [(use.id, *result(use.input)) for use in uses]
            blocks = [{"type": "tool_result", "tool_use_id": id, "content": t, "is_error": bad} for id, t, bad in made]
            messages.append({"role": "user", "content": blocks})


async def pydantic_ai(model: str, stream: bool) -> str:
    import pydantic_ai

    agent = pydantic_ai.Agent(model, instructions="Add with the tool.")

    @agent.tool_plain(retries=3)
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        try:
            return added(a, b)
        except ValueError as error:
            raise pydantic_ai.ModelRetry(str(error)) from None

    async def heard(_: Any, events: Any) -> None:
        async for _ in events:
            pass

    return (await agent.run(TASK, event_stream_handler=heard if stream else None)).output


async def parsed(client: str) -> str:
    """The client's own way to an answer with fields, as JSON."""
    import pydantic

    class Sum(pydantic.BaseModel):
        words: list[str]
        total: int

    said: Any = {"model": "m", "messages": [{"role": "user", "content": TASK}]}
    if client == "chat":
        import openai

        async with openai.AsyncOpenAI(max_retries=0) as api:
            reply = await api.chat.completions.parse(**said, response_format=Sum)
            found: Any = reply.choices[0].message.parsed
    elif client == "responses":
        import openai

        async with openai.AsyncOpenAI(max_retries=0) as api:
            found = (await api.responses.parse(model="m", input=TASK, text_format=Sum)).output_parsed
    elif client == "anthropic":
        import anthropic

        async with anthropic.AsyncAnthropic(max_retries=0) as api:
            found = (await api.messages.parse(**said, max_tokens=1000, output_format=Sum)).parsed_output
    elif client == "agents-sdk":
        import agents

        agents.set_tracing_disabled(True)
        agent = agents.Agent(name="adder", output_type=Sum)
        found = (await agents.Runner.run(agent, TASK)).final_output
    else:
        import pydantic_ai

        found = (await pydantic_ai.Agent(client, output_type=Sum).run(TASK)).output
    assert isinstance(found, Sum)
    return found.model_dump_json()


PARSED = ("chat", "responses", "anthropic", "agents-sdk", "openai:gpt-5", "anthropic:claude-sonnet-4-5")


async def langgraph(model: str, stream: bool) -> str:
    from langchain.agents import create_agent
    from langchain_core.tools import ToolException, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        try:
            return added(a, b)
        except ValueError as error:
            raise ToolException(str(error)) from None

    add.handle_tool_error = True
    agent = create_agent(model, [add], system_prompt="Add with the tool.")
    asked: Any = {"messages": [{"role": "user", "content": TASK}]}
    if not stream:
        return (await agent.ainvoke(asked))["messages"][-1].text
    said: list[Any] = [message async for message, _ in agent.astream(asked, stream_mode="messages")]
    return "".join(piece.text for piece in said if piece.id == said[-1].id)


async def smolagents(agent: str, stream: bool) -> str:
    import smolagents

    @smolagents.tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: A number.
            b: A number.
        """
        return added(a, b)

    kind = getattr(smolagents, agent)
    made = kind(tools=[add], model=smolagents.OpenAIModel("policy"), stream_outputs=stream)
    with contextlib.redirect_stdout(sys.stderr):  # where it shows each step
        return str(made.run(TASK))


async def browser_use() -> str:
    """Fill in a page's field and press its button, in the browser on the path. The page is in the environment."""
    from browser_use import Agent, BrowserProfile, ChatOpenAI

    profile = BrowserProfile(executable_path=shutil.which("chromium"), chromium_sandbox=False, headless=True)
    task = f"open {os.environ['PAGE']} and add 19 and 23"
    agent = Agent(task=task, llm=ChatOpenAI(model="gpt-4.1-mini"), browser_profile=profile)
    with contextlib.redirect_stdout(sys.stderr):  # where it logs each step
        history = await agent.run(max_steps=6)
    return str(history.final_result())


async def agency_swarm() -> str:
    from agency_swarm import Agency, Agent, function_tool

    @function_tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return added(a, b)

    agent = Agent(name="adder", instructions="Add with the tool.", tools=[add], model="gpt-4.1")
    with contextlib.redirect_stdout(sys.stderr):
        return str((await Agency(agent).get_response(TASK)).final_output)


CLIENTS: dict[str, Callable[[], Awaitable[str]]] = {
    "responses": lambda: responses(False),
    "responses-streamed": lambda: responses(True),
    "responses-continued": continued,
    "agents-sdk": lambda: agents_sdk(False),
    "agents-sdk-streamed": lambda: agents_sdk(True),
    "anthropic": lambda: anthropic_sdk(False),
    "anthropic-streamed": lambda: anthropic_sdk(True),
    "pydantic-ai-chat": lambda: pydantic_ai("openai-chat:gpt-5", False),
    "pydantic-ai-chat-streamed": lambda: pydantic_ai("openai-chat:gpt-5", True),
    "pydantic-ai": lambda: pydantic_ai("openai:gpt-5", False),
    "pydantic-ai-streamed": lambda: pydantic_ai("openai:gpt-5", True),
    "pydantic-ai-anthropic": lambda: pydantic_ai("anthropic:claude-sonnet-4-5", False),
    "langgraph": lambda: langgraph("openai:gpt-5", False),
    "langgraph-streamed": lambda: langgraph("openai:gpt-5", True),
    "langgraph-anthropic": lambda: langgraph("anthropic:claude-sonnet-4-5", False),
    "smolagents": lambda: smolagents("CodeAgent", False),
    "smolagents-streamed": lambda: smolagents("CodeAgent", True),
    "smolagents-calls": lambda: smolagents("ToolCallingAgent", False),
    "smolagents-calls-streamed": lambda: smolagents("ToolCallingAgent", True),
}
APART: dict[str, Callable[[], Awaitable[str]]] = {"browser-use": browser_use, "agency-swarm": agency_swarm}
"""Clients with an environment of their own."""


def parse(path: Path) -> None:
    import atif
    import pydantic
    from anthropic.types import Message, RawMessageStreamEvent
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent

    models: Any = {
        "chat": ChatCompletion,
        "chat-event": ChatCompletionChunk,
        "responses": Response,
        "responses-event": ResponseStreamEvent,
        "messages": Message,
        "messages-event": RawMessageStreamEvent,
        "atif": atif.Trajectory,
    }
    adapters = {kind: pydantic.TypeAdapter(model) for kind, model in models.items()}
    for line in path.read_text().splitlines():
        kind, data = json.loads(line)
        adapters[kind].validate_python(data)


if __name__ == "__main__":
    if sys.argv[1] == "parse":
        parse(Path(sys.argv[2]))
    elif sys.argv[1] == "parsed":
        print(asyncio.run(parsed(sys.argv[2])))
    else:
        print(asyncio.run((CLIENTS | APART)[sys.argv[1]]()))  # type: ignore[arg-type]
