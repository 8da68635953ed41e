"""A taskset as its author would publish it for verifiers: half of a number, with a toolset, a state and a rubric.

verifiers starts the toolset as `python -m verifiers_halves`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]


class Data(vf.TaskData):
    answer: str


class Count(vf.State):
    divisions: int = 0


class Box(vf.Toolset[vf.ToolsetConfig, Count]):
    async def setup_task(self, task: Data) -> None:
        self.task = task

    @vf.tool
    def divide(self, a: int, b: int = 2) -> float:
        """Divide a by b."""
        self.state.divisions += 1
        return a / b

    @vf.tool
    async def words(self, text: str) -> list[str]:
        """Split a text, and say how long the answer is."""
        return [*text.split(), str(len(self.task.answer))]


class Settings(vf.TaskConfig):
    tools: bool = True
    fails: str = ""
    url: str | None = None


class Half(vf.Task[Data, Count, Settings]):
    async def setup(self, trace: Any, runtime: Any) -> None:
        assert self.config.fails != "setup", "no setup"
        await runtime.write("half.txt", self.data.answer.encode())

    @vf.reward(weight=2.0)
    async def exact(self, trace: Any, runtime: Any) -> float:
        assert self.config.fails != "reward", "no reward"
        return float(trace.last_reply == (await runtime.read("half.txt")).decode())

    @vf.reward(weight=-0.5)
    async def parts(self, trace: Any) -> dict[str, float]:
        return {"errors": sum("Error" in str(m.content) for m in trace.tool_messages), "long": len(trace.last_reply)}

    @vf.reward
    async def boxed(self, trace: Any) -> float:
        return vf.verify_boxed_math_answer(trace.last_reply, self.data.answer)

    @vf.metric
    async def divisions(self, trace: Any) -> float:
        return trace.state.divisions

    @vf.metric
    async def turns(self, trace: Any) -> dict[str, float]:
        called = [call.name for m in trace.assistant_messages for call in m.tool_calls or ()]
        return {
            "turns": trace.num_turns,
            "calls": len(called),
            "messages": len(trace.messages),
            "cut": trace.is_truncated,
        }

    @classmethod
    def toolsets(cls, config: Settings) -> list[Any]:
        return [Box(vf.ToolsetConfig(url=config.url))] if config.tools else []


class HalvesConfig(vf.TasksetConfig):
    task: Settings = Settings()


class Halves(vf.Taskset[Half, HalvesConfig]):
    def load(self) -> Iterator[Half]:
        for n in range(3):
            yield Half(Data(prompt=f"What is {n}/2?", system_prompt="Be brief.", answer=str(n / 2)), self.config.task)
        chat = [vf.UserMessage(content="hi"), vf.AssistantMessage(content="hello"), vf.UserMessage(content="9/2?")]
        yield Half(Data(prompt=chat, answer="4.5"), self.config.task)


__all__ = ["Halves"]

if __name__ == "__main__":
    Box.run()
