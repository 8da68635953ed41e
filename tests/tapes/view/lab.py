"""Runs to look at, written record by record: a small training run with several ends, hostile text, and large ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tapereel.tapes import (
    Answer,
    Call,
    Cause,
    MediaReference,
    Observation,
    ParseError,
    Reasoning,
    Sampling,
    Task,
    Text,
    ToolCall,
    ToolCalls,
    ToolResult,
    ToolResults,
)
from tapereel.tapes.arrays import floats, ints
from tapereel.tapes.records import Attempt, Begin, End, Identity, Parent, Reward, StepRecord, Tools, Use
from tapereel.tapes.store import Store

WEIRD = "\u202eright to left\u202c \x1b[31mred\x1b[0m \u200b\ufeff\U000e0041"
HOSTILE = f'<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1"> [a](javascript:pwned) {WEIRD}'


class LabPhotos(Observation):
    """An observation with references to media files."""

    photos: tuple[MediaReference, ...]


class Recording:
    """One tape, written as it goes. Time stands at its place in the run."""

    def __init__(
        self,
        store: Store,
        tape: str,
        *,
        at: float = 1000.0,
        group: str | None = None,
        attempt: int = 0,
        split: str = "train",
        public: Any = None,
        task: str = "",
        agent: str = "solver",
        parent: Parent | None = None,
        answer: object = 42,
    ) -> None:
        self.store, self.tape, self.at, self.calls, self.steps = store, tape, at, 0, 0
        self.agent = agent
        self.last: Call | None = None
        given = Task(id=task, public=public, private={"answer": answer})
        self._put(
            Begin(
                tape=tape,
                task=given,
                task_hash=given.hash,
                agent=Identity(name=agent, cls="lab:Agent"),
                env=Identity(name="Sums", effect="pure"),
                env_seed=2**62 + 1,
                seed=2**62 + 3,
                group=group,
                attempt=attempt,
                split=split,
                parent=parent,
                versions={"package": "0.1.0"},
                at=at,
            )
        )

    def _put(self, record: Any) -> None:
        self.store.writer.append(record.body())

    def see(self, text: str) -> None:
        self._step("env", "observation", Text(text=text), ())

    def look(self, *pictures: str) -> None:
        """See media files."""
        self._step("env", "observation", LabPhotos(photos=pictures), ())

    def think(self, text: str) -> None:
        self._step(self.agent, "thought", Reasoning(text=text), ())

    def misread(self, problem: str) -> None:
        self._step(self.agent, "thought", ParseError(problem=problem), ())

    def _step(self, by: str, role: Any, content: Any, calls: tuple[tuple[str, int, int], ...]) -> None:
        self.at += 0.25
        self._put(
            StepRecord(tape=self.tape, by=by, role=role, kind=content.kind, content=content, calls=calls, at=self.at)
        )
        self.steps += 1

    def ask(
        self,
        heard: str,
        answer: str,
        *,
        version: str | None = "main:0",
        logprobs: list[float] | None = None,
        split: str | None = None,
        errors: tuple[str, ...] = (),
        system: str | None = None,
    ) -> Call:
        """One call: extends the one before, or begins a row anew where `split` says why."""
        self.calls += 1
        base = self.last if split is None else None
        said = base.keep_messages + len(base.new_messages) + 1 if base is not None else 0
        keep = base.keep + len(base.new_prompt or ()) + len(base.completion or ()) if base is not None else 0
        ids = ints([*map(ord, answer), 3])
        known = floats(logprobs if logprobs is not None else [-0.1 * (k % 7) for k in range(len(ids))])
        head = ({"role": "system", "content": system},) if system is not None else ()
        call = Call(
            tape=self.tape,
            call=f"{self.tape}.{self.calls}",
            by=self.agent,
            base=base.call if base else None,
            keep=keep,
            keep_messages=said,
            new_messages=(*head, {"role": "user", "content": heard}),
            new_prompt=ints(map(ord, heard)),
            completion=ids,
            logprobs=known if version else None,
            text=answer,
            split=split,
            engine="lab",
            spans=((version, 0, len(ids)),) if version else (),
            sampling=Sampling(max_tokens=64),
            seed=2**62 + 5,
            tools=Tools(hash="t" * 64, schemas=({"name": "add"},) if self.calls == 1 else None),
            attempts=(*(Attempt(seconds=0.1, error=error) for error in errors), Attempt(seconds=0.2)),
            at=self.at,
        )
        self._put(call)
        self.last = call
        return call

    def act(self, text: str, call: Call | None = None) -> int:
        """An action; gives the index of its step."""
        self._step(
            self.agent,
            "action",
            Answer(text=text),
            ((call.call, 0, len(call.completion or ())),) if call is not None else (),
        )
        return self.steps - 1

    def call_tools(self, **arguments: Any) -> None:
        """Call the tool `count`."""
        self._step(self.agent, "action", ToolCalls(calls=(ToolCall(id="0", name="count", arguments=arguments),)), ())

    def answer_tools(self, content: str, *, error: bool = False) -> None:
        result = ToolResult(id="0", name="count", content=content, error=error)
        self._step("env", "observation", ToolResults(results=(result,)), ())

    def earn(
        self,
        value: float,
        *,
        step: int | None = None,
        name: str = "right",
        weight: float = 1.0,
        layer: str | None = None,
    ) -> None:
        self._put(Reward(tape=self.tape, step=step, name=name, value=value, weight=weight, layer=layer))

    def end(self, status: str = "finished", cause: Cause | None = None) -> None:
        self._put(End(tape=self.tape, status=status, cause=cause, seconds=1.5, at=self.at + 0.5))


def episode(
    store: Store,
    tape: str,
    answers: list[str],
    reward: float | None,
    *,
    version: str = "main:0",
    status: str = "finished",
    cause: Cause | None = None,
    **more: Any,
) -> Recording:
    """A whole tape: a question, an answer for each turn, and what it earned."""
    made = Recording(store, tape, public={"question": "6 * 7"}, task="six-times-seven", **more)
    made.see("What is 6 * 7?")
    for k, answer in enumerate(answers):
        call = made.ask(f"turn {k}: what is 6 * 7?", answer, version=version)
        step = made.act(answer, call)
        if k + 1 < len(answers):
            made.see("no, again")
        elif reward is not None:
            made.earn(reward, step=step)
            made.earn(0.5, step=step, name="brevity", weight=0.0)
    made.end(status, cause)
    return made


def training_run(path: Path) -> Path:
    """Two groups of four and two updates on them; an agent's error, a crash, a fork, a running tape, held-out tapes."""
    with Store.create(path) as store:
        for g in range(2):
            for k in range(4):
                wrong = [*(["40", "41"] if k == 1 else []), "42" if k else "47"]
                episode(
                    store,
                    f"g{g}a{k}",
                    wrong,
                    1.0 if k else 0.0,
                    group=f"group-{g}",
                    attempt=k,
                    version=f"main:{g}",
                    at=2000.0 + 10 * g + k,
                )
            items = tuple((f"g{g}a{k}", f"g{g}a{k}.1", 0, 2, 0.125) for k in range(3))
            info: dict[str, Any] = {
                "phase": "rl",
                "tapes": [f"g{g}a{k}" for k in range(4)],
                "stale": [[f"g{g}a3", f"g{g}a3.1", 0, 3]],
            }
            store.append_layer(Use(lineage="main", update=g, items=items, info=info))
        broken = Recording(store, "broken", at=2030.0, public="divide", task="by-zero")
        broken.see("1 / 0?")
        broken.think("that can't be done")
        broken.ask(
            "1 / 0?",
            "inf",
            errors=("TimeoutError: no answer in 1 s",),
            version="main:1",
            logprobs=[-0.5, float("nan"), -3.0, -0.1],
            system="Be exact.",
        )
        broken.misread("write a number")
        broken.ask("write a number", "oo", split="history was rewritten", version="main:1")
        broken.end(
            "error", Cause(type="agent", error="TooManyParseErrors", message="write a number", frame="a.py:1 in b")
        )
        episode(store, "held", ["42"], None, split="eval", at=2040.0)
        episode(store, "slow", ["1"], None, status="limit", cause=Cause(type="seconds"), at=2041.0)
        store.writer.sync()
        parent = store.tape("g0a1")
        cut = parent.at_turn(1)
        fork = Recording(
            store,
            "forked",
            at=2050.0,
            public={"question": "6 * 7"},
            task="six-times-seven",
            parent=Parent(tape="g0a1", digest=cut.digest, records=len(cut.bodies), turn=1),
        )
        fork.act("42", fork.ask("and now?", "42", version="main:1"))
        fork.earn(1.0)
        fork.end()
        fork.earn(-1.0, name="second-look", layer="rescored")
        running = Recording(store, "running", at=2060.0, public="wait", task="open-ended")
        running.see("go on")
        running.act("on it", running.ask("go on", "on it", version="main:1"))
    return path


def hostile_run(path: Path) -> Path:
    """Text that would do harm if it were ever anything but text, lines of 10 MB, and records that can't be read."""
    with Store.create(path) as store:
        made = Recording(
            store,
            "hostile",
            public={"<b>": HOSTILE},
            task=HOSTILE,
            agent="<i>agent</i>",
            group="<script>g</script>/../..",
            split="<s>",
        )
        made.see(HOSTILE)
        made.see("x" * 10_000_000)
        made.see("\x1b[2J" * 20_000)
        call = made.ask(HOSTILE, HOSTILE, version="<u>:1", split="</span><script>window.pwned = 1</script>")
        step = made.act(HOSTILE, call)
        made.earn(1.0, step=step, name="<script>window.pwned = 1</script>")
        bad = (
            b'{"t":"step","tape":"hostile","by":"env","role":"observation","kind":"text","calls":[],"content":{"text":"'
        )
        store.writer.append(bad + b"\xff\xfe broken UTF-8" + b'"},"at":1.0}')
        store.writer.append(bad + b"a lone \\ud800 surrogate" + b'"},"at":1.0}')
        store.writer.append(bad + b'__proto__"},"at":1.0,"__proto__":{"polluted":1}}')
        made.end("error", Cause(type="agent", error="<b>Error</b>", message=HOSTILE, frame="</style>:1 in x"))
        store.writer.append(b'{"t":"begin","tape":"unreadable","split":"\xff\xfe"}')
    return path


def wide_run(path: Path, tapes: int) -> Path:
    """Many short tapes, each a copy of one under another name."""
    with Store.create(path.with_name("pattern")) as pattern:
        episode(pattern, "tape-000000", ["42"], 1.0)
        pattern.writer.sync()
        bodies = pattern.tape("tape-000000").bodies
    with Store.create(path, durability="os") as store:
        for k in range(tapes):
            name = f"tape-{k:06d}".encode()
            for body in bodies:
                store.writer.append(body.replace(b"tape-000000", name))
    return path


def long_run(path: Path, turns: int) -> Path:
    """One tape of `3 * turns` records and a few: an observation, a thought and an action in each turn."""
    with Store.create(path, durability="os") as store:
        made = Recording(store, "long", public="count", task="count")
        step = (
            b'{"t":"step","tape":"long","by":"%b","role":"%b","kind":"%b","calls":[],"content":{"text":"%b"},'
            b'"at":1001.5}'
        )
        for k in range(turns):
            store.writer.append(step % (b"env", b"observation", b"text", b"number %d" % k))
            store.writer.append(step % (b"solver", b"thought", b"reasoning", b"after %d comes another" % k))
            store.writer.append(step % (b"solver", b"action", b"answer", b"%d" % (k + 1)))
        made.end()
    return path


@contextmanager
def growing(path: Path) -> Iterator[Store]:
    """A run that somebody is still writing."""
    with Store.create(path) as store:
        episode(store, "first", ["42"], 1.0)
        store.writer.sync()
        yield store
