"""A taskset for verifiers with one task for each function of `reward_functions`, which is its reward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]
from reward_functions import ANSWER, FUNCTIONS  # type: ignore[import-not-found]


class Data(vf.TaskData):
    answer: str
    function: str | None = None
    """The only function of this task. None means all that return a number."""


class Scores(vf.Task[Data, vf.State, vf.TaskConfig]):
    def found(self, trace: Any) -> dict[str, Any]:
        names = [self.data.function] if self.data.function else FUNCTIONS
        every = {name: FUNCTIONS[name](trace.last_reply, self.data.answer) for name in names}
        return {name: value for name, value in every.items() if value is not None or self.data.function}

    @vf.reward(weight=0.3)
    async def rewards(self, trace: Any) -> dict[str, Any]:
        return self.found(trace)

    @vf.reward(weight=-2.0)
    async def alone(self, trace: Any) -> Any:
        return next(iter(self.found(trace).values()))

    @vf.metric
    async def metrics(self, trace: Any) -> dict[str, Any]:
        return {f"metric {name}": value for name, value in self.found(trace).items()}


class Functions(vf.Taskset[Scores, vf.TasksetConfig]):
    def load(self) -> Iterator[Scores]:
        for name in (None, "near number", "never a score"):
            yield Scores(Data(prompt="6 * 7?", answer=ANSWER, function=name), self.config.task)


__all__ = ["Functions"]
