"""What the store's tests share: records to write, and the store's modules by package, so that mutants load too."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any


@cache
def picture_class(steps: ModuleType) -> Any:
    """An observation with references to media files, of that package's steps."""
    fields = {
        "__annotations__": {"pictures": tuple[importlib.import_module(steps.__package__ or "").MediaReference, ...]},
        "__module__": __name__,
    }
    return type("LabPictures", (steps.Observation,), fields)


class Lab:
    """The store of one package: the real one, or a copy in which something was broken on purpose."""

    def __init__(self, package: str = "tapereel.tapes") -> None:
        self.package = package
        self._names = itertools.count(1)

    def __getattr__(self, name: str) -> ModuleType:
        home = Path(importlib.import_module(self.package).__path__[0])
        found = sorted(path for path in home.rglob(f"{name}.py"))
        if not found:
            raise AttributeError(f"{self.package} has no module {name!r} in any room")
        inside = found[0].relative_to(home).with_suffix("").parts
        return importlib.import_module(".".join([self.package, *inside]))

    @property
    def Store(self) -> Any:
        return self.store.Store

    # Record bodies

    def name(self) -> str:
        return f"tape{next(self._names):04d}"

    def begin(
        self,
        tape: str,
        *,
        effect: str = "pure",
        split: str = "train",
        public: Any = None,
        parent: Any = None,
        group: str | None = None,
        at: float = 1000.0,
    ) -> bytes:
        r = self.records
        task = r.Task(public=public, private=tape)
        return r.Begin(
            tape=tape,
            task=task,
            task_hash=task.hash,
            agent=r.Identity(name="agent"),
            parent=parent,
            group=group,
            env=r.Identity(name="env", effect=effect),
            env_seed=1,
            seed=2,
            split=split,
            at=at,
        ).body()

    def look(self, tape: str, *pictures: str) -> bytes:
        """A step that refers to media files."""
        content = picture_class(self.steps)(pictures=pictures)
        return self.records.StepRecord(
            tape=tape, by="env", role="observation", kind=content.kind, content=content, at=1001.0
        ).body()

    def step(self, tape: str, text: str, *, action: bool = True) -> bytes:
        r, s = self.records, self.steps
        step = s.Answer(text=text) if action else s.Text(text=text)
        return r.StepRecord(
            tape=tape,
            by="agent" if action else "env",
            role="action" if action else "observation",
            kind=step.kind,
            content=step,
            at=1001.0,
        ).body()

    def call(self, tape: str, call: str, n: int, *, version: str | None = "main:0", logprobs: bool = True) -> bytes:
        r, a = self.records, self.arrays
        return r.Call(
            tape=tape,
            call=call,
            by="agent",
            prompt=a.ints(range(3)),
            completion=a.ints(range(n)),
            logprobs=a.floats([-0.5] * n) if logprobs else None,
            spans=((version, 0, n),) if version else (),
            at=1001.5,
        ).body()

    def reward(self, tape: str, value: float = 1.0, **more: Any) -> bytes:
        return self.records.Reward(tape=tape, value=value, **more).body()

    def end(self, tape: str, status: str = "finished", cause: str | None = None) -> bytes:
        r = self.records
        why = r.Cause(type=cause) if cause else None
        return r.End(tape=tape, status=status, cause=why, seconds=1.0, at=1002.0).body()

    def use(
        self,
        update: int,
        items: list[tuple[str, str, int, int, float]],
        *,
        lineage: str = "main",
        epoch: int = 0,
        **info: Any,
    ) -> bytes:
        return self.records.Use(lineage=lineage, update=update, epoch=epoch, items=tuple(items), info=info).body()

    def episode(self, tape: str, *, tokens: int = 4, **more: Any) -> Iterator[bytes]:
        """A whole scored episode of one turn."""
        yield self.begin(tape, **more)
        yield self.step(tape, f"see {tape}", action=False)
        yield self.call(tape, f"{tape}.1", tokens)
        yield self.step(tape, f"do {tape}")
        yield self.reward(tape)
        yield self.end(tape)


class Clock:
    """A clock that a test sets; it may go backwards."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        self.now += 0.5
        return self.now
