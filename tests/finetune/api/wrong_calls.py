"""Seeded calls of the public names with values of wrong types, and what came of each.

`python -m tapereel.tests.finetune.api.wrong_calls N` makes N of them and counts the outcomes.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import shutil
import signal
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

import tapereel as tr
from tapereel.agents import EmbeddedEngine, Limits, check_engine
from tapereel.agents.engines.embedded import load_pretrained
from tapereel.agents.episode.recorder import Recorder
from tapereel.finetune import TrainConfig
from tapereel.tapes import TapereelError, Video
from tapereel.tapes.common import load_config
from tapereel.tapes.common.progress import silent

CALLED = ("progress", "actions", "row", "source", "factory")
"""Arguments that are functions of the caller."""
SAID = {
    "source": "picture|item 0|tasks",
    "frames": "video",
    "indices": "video",
    "bodies": "records?",
    "env": "environment|Environment|function",
    "factory": "Environment",
    "task": "item 0",
    "tasks": "item 0|task",
    "public": "Task",
    "private": "Task",
}
"""Argument -> what an error calls it in its place."""
PATIENCE = 60.0
"""Seconds after which a call counts as hung."""


class Hung(BaseException):
    """A call did not return."""


class Echo(tr.Environment):
    """Its task is the word to say."""

    async def reset(self, task: str) -> str:
        self.word = task
        return f"Say {task}."

    async def step(self, action: tr.Action) -> tr.Outcome:
        return tr.Outcome("so", reward=float(str(action) == self.word), terminated=True)


class Unprintable:
    """No text of it can be made."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(5000):
        made = [made]
    return made


async def coroutine() -> None: ...


WRONG: tuple[Callable[[], object], ...] = (
    lambda: None,
    lambda: True,
    lambda: 0,
    lambda: -1,
    lambda: 3,
    lambda: 10**30,
    lambda: 10**5000,
    lambda: float("nan"),
    lambda: float("-inf"),
    lambda: 1.5,
    lambda: 1j,
    lambda: "",
    lambda: "text",
    lambda: "\ud800",
    lambda: "a\0b",
    lambda: "no_module:name",
    lambda: "x" * 70_000,
    lambda: b"bytes",
    lambda: bytearray(b"b"),
    lambda: [],
    lambda: [None],
    lambda: ["\ud800"],
    lambda: ["text", 1],
    lambda: ("a",),
    lambda: {"a"},
    lambda: {},
    lambda: {"a": object()},
    lambda: {1: 2},
    lambda: {"limits.turns": "many"},
    lambda: range(10**9),
    lambda: object(),
    Unprintable,
    lambda: int,
    lambda: Echo,
    lambda: Echo(),
    lambda: tr.ChatAgent,
    lambda: tr.ChatAgent(),
    lambda: len,
    lambda: lambda: None,
    lambda: types,
    lambda: Path("a\0b"),
    lambda: Path("nowhere"),
    lambda: Ellipsis,
    lambda: iter([1]),
    lambda: iter(["\ud800", None]),
    deep,
    coroutine,
)


@dataclass(frozen=True)
class Target:
    """One public callable, and arguments with which it does cheap work (or ends with an error that `base` has)."""

    name: str
    call: Callable[..., Any]
    right: Callable[[Path], dict[str, Any]]


async def awaited(made: Any) -> Any:
    return await made


async def first_of(steps: Any) -> Any:
    async for step in steps:
        return step


def targets(home: Path) -> list[Target]:
    """Every public callable of `tr` and every public method of a run, of tasks and of a store."""
    model = {"limits.turns": 1}
    scene = {"agent": tr.ChatAgent(), "env": Echo, "tasks": ["a"], "model": ["a"]}
    made = tr.run(**scene, out=home / "run", settings=model)  # type: ignore[arg-type]
    tape = made.tapes()[0]
    engine = load_pretrained(tr.save_tiny_model(home / "micro", "ab", size="micro", context=32)).model
    tasks = tr.Taskset(["a", "b"])
    store = tr.Store.open(made.path)
    found = list[Target]()

    def add(name: str, call: Callable[..., Any], /, **right: Any) -> None:
        found.append(Target(name, call, lambda out: {k: v(out) if k == "out" else v for k, v in right.items()}))

    def at(out: Path) -> Path:
        return out / "out"

    def scored(tape: tr.Tape) -> float:
        return 1.0

    async def program(task: object, endpoint: object) -> str:
        return "a"

    add("tr.run", tr.run, **scene, out=at, attempts=1, seed=0, resume=False, take_over=False, config=None,
        settings=model, progress=silent)  # fmt: skip
    add("tr.evaluate", tr.evaluate, **scene, out=at, attempts=1, k=(1,), success=1.0, seed=0, config=None,
        settings=model)  # fmt: skip
    add("tr.train", tr.train, **{**scene, "model": "no_folder"}, out=at, updates=1, recipe="grpo", take_over=False,
        config=None, settings={"evaluation.fraction": 0})  # fmt: skip
    add("tr.Program", tr.Program, program=program, name="p", follow=True, embeddings=None)
    add("tr.Rewards", tr.Rewards, sources=[scored])
    add("tr.open", tr.open, path=made.path)
    add("tr.save_tiny_model", tr.save_tiny_model, folder=home / "tiny", alphabet="ab", size="micro", seed=0, context=8)
    add("tr.Run", tr.Run, path=made.path, agent=tr.ChatAgent(), env=Echo, summary=None)
    add("tr.agent", tr.agent, function=lambda tape, llm: None)
    add("tr.delegate", tr.delegate, name="a", agent=tr.ChatAgent(), tape=tape, llm=None)
    add("check_engine", check_engine, engine=tr.ScriptedEngine(lambda request: "a"), timeout=5.0, max_tokens=4)
    add("tr.check_env", tr.check_env, factory=Echo, tasks=["a"], actions=lambda o, r: "a", episodes=1, timeout=5.0)
    add("tr.get_recipe", tr.get_recipe, name="grpo", changes=None, run=None)
    add("load_config", load_config, base=TrainConfig, file=None, sets=())
    add("tr.rollout", tr.rollout, agent=tr.ChatAgent(), env=Echo, task="a", engine=tr.ScriptedEngine(lambda r: "a"),
        seed=0, limits=Limits(), sampling=None, journal=None)  # fmt: skip
    add("tr.rows", tr.rows, tape=tape, agents=None, renderer=None)
    add("tr.ChatAgent", tr.ChatAgent, system="s", actions=(), plain=None, parse=None, tools=(), misreads=1, name="n",
        temperature=1.0, max_tokens=3)  # fmt: skip
    add("EmbeddedEngine", EmbeddedEngine, model=engine, renderer=None, version="0", slots=1,
        capacity=32, copy=True)  # fmt: skip
    add("tr.ScriptedEngine", tr.ScriptedEngine, answers=["a"], renderer=None)
    add(
        "tr.LLM",
        tr.LLM,
        recorder=Recorder(tape.begin, None, None),
        engine=None,
        seed=0,
        limits=Limits(),
        sampling=tr.Sampling(),
        retries=0,
    )
    add("tr.Outcome", tr.Outcome, observation="o", reward=1.0, terminated=False, truncated=False, metrics=None)
    add("tr.Limits", tr.Limits, turns=1, tokens=1, agent_seconds=1.0)
    add("tr.Sampling", tr.Sampling, temperature=1.0, max_tokens=3, top_p=1.0)
    add("tr.Task", tr.Task, public="a", private="b", id=None)
    add("tr.Picture", tr.Picture, media="m", width=1, height=1)
    add("tr.Picture.of", tr.Picture.of, source=b"", alt=None)
    add("Video", Video, frames=(), fps=1.0, indices=())
    add("Video.of", Video.of, frames=[], fps=1.0, indices=None)
    add("tr.Tape", tr.Tape, log=tape.log)
    add("tr.Tape.of", tr.Tape.of, bodies=tape.bodies, layers=(), parent=None, file=None)
    add("tr.Taskset", tr.Taskset, source=["a"], size=1, row=None, name="n")
    add("tr.Taskset.load", tr.Taskset.load, path=home / "none.jsonl", row=None, size=None, name="")
    add("taskset.split", lambda salt="": tasks.split(0.5, 0.5, salt=salt), salt="")
    add("taskset.cursor", tasks.cursor, seed=0, shuffle=True, start=0)
    add("tr.Store", tr.Store, path=made.path, disk=store.disk, index=None)
    add("tr.Store.create", tr.Store.create, path=home / "run", cache=False)
    add("tr.Store.open", tr.Store.open, path=made.path, write=False, cache=False)
    add("store.tape", store.tape, tape=tape.id, refresh=True)
    add("store.summaries", store.summaries, status=None, split="eval", group=None, version=None, agent=None,
        min_reward=0.0, max_reward=1.0, closed=True, task_hash=None)  # fmt: skip
    add("run.tapes", made.tapes, split=None)
    add("run.tape", made.tape, name=tape.id)
    add("run.dataset", made.dataset, split="eval", status=None, min_reward=None, agents=None, tokenizer=None,
        streaming=False)  # fmt: skip
    add("run.scores", made.scores, split=None, k=(1,), success=1.0, by=None)
    add("run.rescore", made.rescore, reward=scored, layer=None, tapes=(), split=None, tolerance=0.0)
    add("run.explain", made.explain, tape=tape.id, tokenizer=None)
    add("run.diff", made.diff, other=made.path, split=None, against_split=None)
    add("run.view", made.view, out=lambda out: out.with_suffix(".html"), tapes=(), browser=False)
    add("run.verify", made.verify, pins=())
    add("run.audit", made.audit, split=None, limit=None)
    add("run.replay", made.replay, agent=None, tapes=(), split=None)
    add("run.reproduce", made.reproduce, checkpoint=None)
    add("run.branch", made.branch, tape=tape, turn=0, n=1, agent=None, env=None, model=["a"], unverified=False)
    return found


@contextmanager
def guarded() -> Iterator[None]:
    """Raise Hung in a call that doesn't return."""

    def hung(*_: object) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(call: Callable[..., Any], arguments: Mapping[str, Any]) -> BaseException | None:
    """The error of the call; None where it returned."""
    try:
        with guarded():
            made = call(**arguments)
            if inspect.iscoroutine(made) and made not in arguments.values():
                asyncio.run(made)
            elif inspect.isasyncgen(made):
                asyncio.run(first_of(made))
            elif isinstance(made, Iterator) and not isinstance(made, tr.Run):
                next(made, None)
    except BaseException as error:
        return error
    return None


@dataclass(frozen=True)
class Result:
    call: str
    argument: str
    value: str
    error: BaseException | None
    named: bool

    @property
    def raw(self) -> bool:
        """An error from inside: neither of Tapereel nor of a field of a model."""
        known = TapereelError | ValidationError | OSError  # an OSError quotes the path
        return self.error is not None and not isinstance(self.error, known)


def wrong_calls(n: int, seed: int, home: Path) -> Iterator[Result]:
    """`n` calls, each with one argument of a wrong type or content."""
    rng = random.Random(seed)
    known = targets(home)
    base = {one.name: str(outcome(one.call, one.right(home / "base" / one.name))) for one in known}
    for k in range(n):
        target = known[k % len(known)]
        out = home / str(k)
        arguments = target.right(out)
        name = rng.choice(list(arguments))
        value = arguments[name] = rng.choice(WRONG)()
        error = outcome(target.call, arguments)
        shutil.rmtree(out, ignore_errors=True)
        if inspect.iscoroutine(value):
            value.close()
        text = str(error)
        said = re.search(rf"\b({re.escape(name)}|{SAID.get(name, name)})\b", text) or text == base[target.name]
        shown = any(one in text for one in quoted_parts(value))
        if name in CALLED and callable(value):
            error = None  # whatever the caller's own function raises
        fitting = error is None or type(error).__name__ == "NothingToExport"  # no tape has this status or reward
        yield Result(target.name, name, quoted(value), error, bool(fitting or said or shown))


def quoted_parts(value: object) -> Iterator[str]:
    """How an error may quote the value, or an item of it: texts, and numbers."""
    for one in value if isinstance(value, list | tuple | set | dict) and len(value) < 4 else (value,):
        if isinstance(one, str | Path):
            yield repr(str(one))[:8]
            yield str(one)[:30] or "''"
        elif isinstance(one, int | float) and abs(one) < 1e40:
            yield str(one)


def quoted(value: object) -> str:
    try:
        return f"{type(value).__name__} {value!r:.40}"
    except Exception:
        return type(value).__name__


def main(n: int, seed: int) -> None:
    counts, raw = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for one in wrong_calls(n, seed, Path(folder)):
            kind = "raw" if one.raw else "returned" if one.error is None else "named" if one.named else "unnamed"
            counts[kind] += 1
            if kind in ("raw", "unnamed"):
                text = f"{kind} {one.call}({one.argument}={one.value}): {type(one.error).__name__}: {one.error!s:.150}"
                print(text.encode("unicode_escape").decode())
                raw[f"{kind} {type(one.error).__name__} {one.call}({one.argument})"] += 1
    print(dict(counts), len(raw), "distinct")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
