"""A training run of an agent with tools, for looking at: library questions, tool errors, JSON results and Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tapereel.tapes import Cause, ToolCall, ToolCalls, ToolResult, ToolResults
from tapereel.tapes.records import Use
from tapereel.tapes.store import CONFIG, METRICS, Store
from tapereel.tapes.store.run_directory import RESULTS

from .lab import Recording

BOOKS = {"Dune": (92, 86), "Emma": (17, 3), "Ulysses": (166, 12), "Walden": (41, 7), "Candide": (8, 25)}
"""Title -> (shelf, copies)."""
MARKDOWN = """## Copies of *{title}*

The catalogue says **{copies} copies** on shelf `{shelf}`.

1. `find` names the shelf
2. `count` counts its books

```python
assert count(shelf={shelf}) == {copies}
```

See [the catalogue](https://library.example/{shelf})."""
UPDATES = 6
NOTHING: dict[str, Any] = {"error": None, "metrics": {}, "reward": None, "pass_at": {}}


class Librarian(Recording):
    """One tape of an agent that looks up a book and counts its copies."""

    version = "main:0"
    heard = ""
    """The text that the next request ends with."""

    def call(self, name: str, **arguments: Any) -> None:
        """Call one tool, which the model chose in one request."""
        text = json.dumps({"name": name, "arguments": arguments})
        call = self.ask(
            self.heard, text, version=self.version, logprobs=[-0.05 * (k % 9) for k in range(len(text) + 1)]
        )
        step = ToolCalls(calls=(ToolCall(id="0", name=name, arguments=arguments),))
        self._step(self.agent, "action", step, ((call.call, 0, len(call.completion or ())),))
        self.called = name

    def result(self, content: str, *, error: bool = False) -> None:
        """Return the result of the last call."""
        self.heard = content
        result = ToolResult(id="0", name=self.called, content=content, error=error)
        self._step("env", "observation", ToolResults(results=(result,)), ())

    def say(self, text: str) -> int:
        """Answer, and return the step."""
        return self.act(text, self.ask(self.heard, text, version=self.version))


def lookup(store: Store, tape: str, title: str, kind: str, *, version: str = "main:0", **more: Any) -> None:
    """One episode. `kind` is `right`, `long`, `wrong`, `lost` (a tool fails), `limit` or `demo` (right, unscored)."""
    shelf, copies = BOOKS[title]
    question = f"How many copies of {title} does the library have?"
    made = Librarian(
        store, tape, public={"question": question}, answer=str(copies), task=title, agent="librarian", **more
    )
    made.version, made.heard = version, question
    made.see(question)
    if kind == "limit":
        made.think(f"I could look for {title} on every shelf.")
        for k in range(3):
            made.call("count", shelf=k)
            made.result("0")
        made.end("limit", Cause(type="turns"))
        return
    made.think("First the shelf, then the copies.")
    made.call("find", title=title, **({"fields": ["shelf", "room", "notes"], "exact": True} if kind == "long" else {}))
    found: dict[str, Any] = {"title": title, "shelf": shelf, "room": "B"}
    if kind == "long":
        found |= {"notes": None, "lent": False, "editions": [{"year": 1965 + k, "copies": k} for k in range(4)]}
    made.result(json.dumps(found))
    made.call("count", shelf=str(shelf) if kind == "lost" else shelf)
    if kind == "lost":
        made.result(f"KeyError: '{shelf}'", error=True)
        step = made.say("I don't know.")
    else:
        made.result(str(copies))
        words = MARKDOWN.format(title=title, shelf=shelf, copies=copies) if kind == "long" else str(copies)
        step = made.say(str(copies + 1) if kind == "wrong" else words)
    if kind != "demo":
        made.earn(float(kind in ("right", "long")), step=step)
    made.end()


def library_run(path: Path, held: tuple[str, ...] = ("right", "right", "lost", "right")) -> Path:
    """Demonstrations, six updates of two groups of four, held-out episodes of these kinds, and a few that failed."""
    titles = list(BOOKS)
    with Store.create(path) as store:
        for k in range(5):
            lookup(store, f"demo{k}", titles[k], "demo", split="demo", at=1_764_100_000.0 + k)
        for update in range(UPDATES):
            tapes = []
            for g in range(2):
                for k in range(4):
                    good = k < 1 + update // 2
                    kind = ("long" if k == 0 else "right") if good else ("wrong", "lost")[(k + g) % 2]
                    tapes.append(f"u{update}g{g}a{k}")
                    title = titles[(update + g) % 4]
                    at = 1_764_100_100.0 + 60 * update + 8 * g + k
                    lookup(
                        store,
                        tapes[-1],
                        title,
                        kind,
                        version=f"main:{update}",
                        group=f"{update}/{title}",
                        attempt=k,
                        at=at,
                    )
            items = tuple((tape, f"{tape}.1", 0, 12, 0.25) for tape in tapes)
            info: dict[str, Any] = {"phase": "rl", "tapes": tapes, "stale": []}
            store.append_layer(Use(lineage="main", update=update, items=items, info=info))
        for k, kind in enumerate(held):
            lookup(store, f"held{k}", titles[k - 1], kind, split="eval", version="main:6", at=1_764_100_600.0 + k)
        lookup(store, "endless", "Walden", "limit", version="main:6", at=1_764_100_700.0)
        broken = Librarian(
            store, "broken", public={"question": "How many?"}, task="unnamed", agent="librarian", at=1_764_100_710.0
        )
        broken.see("How many?")
        broken.misread("the arguments of count are not JSON: {'shelf': 1")
        cause = Cause(
            type="agent", error="TooManyParseErrors", message="4 answers were no call", frame="agent.py:9 in act"
        )
        broken.end("error", cause)
    lines = [
        {
            "phase": "rl",
            "update": k,
            "reward": (1 + k // 2) / 4,
            "loss": 0.1 - 0.02 * k,
            "entropy": 1.2 - 0.1 * k,
            "turns": 3,
        }
        for k in range(UPDATES)
    ]
    (path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = 0.25, sum(kind == "right" for kind in held) / 4
    before, after = ({"sampled": {**NOTHING, "mean": mean, "n": 4}} for mean in scores)
    results = {"format": 1, "lineage": "main", "before": before, "after": after, "seconds": {"rl": 41.0, "total": 60.0}}
    (path / RESULTS).write_text(json.dumps(results))
    (path / CONFIG).write_text(f"engine:\n  model: models/tiny\nloop:\n  recipe: grpo\n  updates: {UPDATES}\n")
    return path


def library_folder(path: Path) -> Path:
    """Two runs in one folder: `first-try` answers fewer held-out questions than `library`."""
    path.mkdir(parents=True)
    library_run(path / "library")
    library_run(path / "first-try", ("lost", "right", "wrong", "wrong"))
    return path
