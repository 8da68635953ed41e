"""The first hour again: four tasks drawn by a seed, each trained from nothing by defaults alone (docs/first_hour.md).

    python benchmarks/first_hour.py --seed 20261122 --out FOLDER        (needs `pip install textarena`)

Each task has a tiny untrained model, and examples of a demonstrator that is often wrong, in TRL's prompt-completion
form. A drawn task without an entry in `SCENES` has to be written first; the draw isn't repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import tapereel as tr
from tapereel import ChatAgent, Environment, Outcome
from tapereel.envs import Taskset
from tapereel.envs.adapters.reasoning import reasoning_scorer, reasoning_tasks
from tapereel.envs.adapters.tools import ToolEnvironment
from tapereel.tapes import Answer, Task, ToolCall, ToolCalls

GENERATORS = [
    "base_conversion",
    "binary_alternation",
    "bitwise_arithmetic",
    "caesar_cipher",
    "coin_flip",
    "count_bits",
    "isomorphic_strings",
    "lcm",
    "leg_counting",
    "letter_jumble",
    "number_filtering",
    "ransom_note",
    "string_splitting",
    "word_sequence_reversal",
]
GAMES = ["Bandit-v0", "LightsOut-v0", "Mastermind-v0", "TowerOfHanoi-v0"]
TOOLS = ["extensions", "orders", "ferries"]
LISTS = (GENERATORS, GAMES, TOOLS)
Example = tuple[str, list[tuple[str, str]]]
"""The question, and (role, text) of the messages after it."""


def draw(seed: int) -> list[str]:
    """One task of each list, and one more of all lists."""
    rng = random.Random(seed)
    drawn = [rng.choice(names) for names in LISTS]
    return [*drawn, rng.choice([name for names in LISTS for name in names if name not in drawn])]


# letter_jumble and word_sequence_reversal of reasoning-gym

plain = ChatAgent(parse=lambda text: Answer(text=text))


class Words(Environment[Answer]):
    """One question, one answer, scored by the generator's own scorer."""

    async def reset(self, task: Any) -> str:
        self.task = task
        return str(task.public["question"])

    async def step(self, action: Answer) -> Outcome:
        return Outcome(reward=reasoning_scorer(self.task.private["dataset"])(action.text, self.task), terminated=True)


def jumbled(size: int, seed: int) -> Taskset:
    """Two words of 2 to 4 letters."""
    config = {"min_words": 2, "max_words": 2, "min_word_len": 2, "max_word_len": 4}
    asked = lambda entry: " ".join(entry["metadata"]["scrambled_words"])  # noqa: E731
    return reasoning_tasks("letter_jumble", size, seed, question=asked, **config)


def reversed_words(size: int, seed: int) -> Taskset:
    """Two words of at most 5 small letters."""

    def short(entry: dict[str, Any]) -> bool:
        return all(word.isalpha() and word.islower() and len(word) <= 5 for word in entry["metadata"]["words"])

    asked = lambda entry: ", ".join(entry["metadata"]["words"])  # noqa: E731
    return reasoning_tasks("word_sequence_reversal", size, seed, keep=short, question=asked, min_words=2, max_words=2)


def jumble_tasks() -> Taskset:
    """1,000 tasks."""
    return jumbled(1000, 0)


def reversal_tasks() -> Taskset:
    """1,000 tasks."""
    return reversed_words(1000, 0)


def jumble_examples(rng: random.Random) -> Iterator[Example]:
    """Half of the words are left as they were."""
    for task in jumbled(2000, 1_000_000):
        asked, right = str(task.public["question"]), str(task.private["answer"])  # type: ignore[index, call-overload]
        said = [b if rng.random() < 0.5 else a for a, b in zip(asked.split(), right.split(), strict=True)]
        yield asked, [("assistant", " ".join(said))]


def reversal_examples(rng: random.Random) -> Iterator[Example]:
    """Six in ten leave the order as it was."""
    for task in reversed_words(2000, 1_000_000):
        asked, right = str(task.public["question"]), str(task.private["answer"])  # type: ignore[index, call-overload]
        yield asked, [("assistant", right if rng.random() < 0.4 else asked)]


# LightsOut-v0 of TextArena, 3 x 3 lights and 6 moves. Its reward is the share of the lights that were put out.

SIZE, MOVES = 3, 6
CELLS = [(row, column) for row in range(SIZE) for column in range(SIZE)]


def game(seed: int) -> Any:
    """The game; None where no light is on at its start, which TextArena answers with a division by zero."""
    env = import_module("textarena").make("LightsOut-v0-raw", size=SIZE, max_turns=MOVES)
    try:
        env.reset(num_players=1, seed=seed)
    except ZeroDivisionError:
        return None
    return env


def board(env: Any) -> str:
    """`O..|.O.|..O` without the bars."""
    return "".join("O" if light else "." for row in env.state.game_state["grid"] for light in row)


class Lights(Environment[Answer]):
    """`12` presses row 1, column 2."""

    async def reset(self, task: Any) -> str:
        self.env = game(task)
        return board(self.env)

    async def step(self, action: Answer) -> Outcome:
        done, _ = self.env.step(f"[{action.text[:1]} {action.text[1:]}]")
        reward = self.env.close()[0][0] if done else None
        return Outcome(board(self.env), reward=reward, terminated=done)


def lights_tasks() -> Taskset:
    """Seeds of games."""
    return Taskset([Task.of(seed) for seed in range(1000) if game(seed)])


def lights_examples(rng: random.Random) -> Iterator[Example]:
    """Six in ten presses are part of a solution."""
    solutions: dict[frozenset[tuple[int, int]], list[tuple[int, int]]] = {}
    for chosen in product([False, True], repeat=len(CELLS)):
        lit, presses = frozenset[tuple[int, int]](), [cell for cell, take in zip(CELLS, chosen, strict=True) if take]
        for row, column in presses:
            lit ^= {(r, c) for r, c in CELLS if abs(r - row) + abs(c - column) <= 1}
        solutions[lit] = presses
    for env in filter(None, map(game, range(100_000, 102_000))):
        first = text = board(env)
        done, after = False, list[tuple[str, str]]()
        while not done:
            right = solutions[frozenset(cell for cell, light in zip(CELLS, text, strict=True) if light == "O")]
            row, column = rng.choice(right if rng.random() < 0.6 else CELLS)
            done, _ = env.step(f"[{row} {column}]")
            text = board(env)
            after += [("assistant", f"{row}{column}"), *([] if done else [("user", text)])]
        yield first, after


# The first ferry after an hour. A tool gives the ferries of a port; the tasks are a JSONL file.

PORTS = "ABCDEFGHJKLMNPQRSTUV"
TABLE = {port: sorted(random.Random(port).sample(range(10, 24), 3)) for port in PORTS}


def departures(port: str) -> str:
    """The hours at which a ferry leaves a port."""
    return " ".join(map(str, TABLE[port]))


class Ferries(ToolEnvironment):
    """One call, one answer."""

    def __init__(self) -> None:
        super().__init__([departures])

    async def answered(self, text: str) -> Outcome:
        return Outcome(reward=float(text == self.task.private["answer"]), terminated=True)  # type: ignore[index, call-overload]


def read(text: str) -> Any:
    """`?K` is a call."""
    if text.startswith("?"):
        return ToolCalls(calls=(ToolCall(id="0", name="departures", arguments={"port": text[1:]}),))
    return Answer(text=text)


traveller = ChatAgent(parse=read)


def ferry_rows() -> Iterator[dict[str, str]]:
    """Every port at every hour."""
    for port, times in TABLE.items():
        for hour in range(8, times[-1]):
            yield {"question": f"{port} after {hour:02}", "answer": str(next(h for h in times if h > hour))}


def ferry_examples(rng: random.Random) -> Iterator[Example]:
    """Six in ten ask, and half of the answers are any of the ferries. The timetable of each is another one."""
    for _ in range(1000):
        port, times = rng.choice(PORTS), sorted(rng.sample(range(10, 24), 3))
        hour = rng.randrange(8, times[-1])
        right = next(h for h in times if h > hour) if rng.random() < 0.5 else rng.choice(times)
        call = [("assistant", f"?{port}"), ("tool", " ".join(map(str, times)))] if rng.random() < 0.6 else []
        yield f"{port} after {hour:02}", [*call, ("assistant", str(right))]


class Scene(NamedTuple):
    """Names in this file, and what the tiny model needs. tasks: a name, or the rows of a JSONL file."""

    agent: str
    env: str
    tasks: str | Callable[[], Iterator[dict[str, str]]]
    examples: Callable[[random.Random], Iterator[Example]]
    alphabet: str
    context: int


SCENES = {
    "letter_jumble": Scene("plain", "Words", "jumble_tasks", jumble_examples, string.ascii_letters + " ", 64),
    "word_sequence_reversal": Scene(
        "plain", "Words", "reversal_tasks", reversal_examples, string.ascii_lowercase + ", ", 64
    ),
    "LightsOut-v0": Scene("plain", "Lights", "lights_tasks", lights_examples, "012O.", 192),
    "ferries": Scene("traveller", "Ferries", ferry_rows, ferry_examples, "0123456789 ?after" + PORTS, 128),
}


def command(*words: str) -> None:
    """Run `tapereel` and show what it prints."""
    subprocess.run([sys.executable, "-m", "tapereel.cli", *words], check=True)


def trained(name: str, scene: Scene, out: Path) -> str:
    """Make the model and the examples, train by defaults, and give a line of the log."""
    out.mkdir(parents=True)
    tr.save_tiny_model(out / "model", scene.alphabet, context=scene.context)
    with (out / "examples.jsonl").open("w") as file:
        for question, after in scene.examples(random.Random(1)):
            completion = [{"role": role, "content": text} for role, text in after]
            row = {"prompt": [{"role": "user", "content": question}], "completion": completion}
            file.write(json.dumps(row) + "\n")
    here, columns = Path(__file__).resolve(), list[str]()
    tasks = f"{here}:{scene.tasks}"
    if not isinstance(scene.tasks, str):
        tasks, columns = str(out / "tasks.jsonl"), ["--set", "dataset.columns={prompt: question, answer: answer}"]
        Path(tasks).write_text("".join(json.dumps(row) + "\n" for row in scene.tasks()))
    command("import", str(out / "examples.jsonl"), str(out / "examples"), "--format", "sft", "--split", "demo")
    began, cpu = time.monotonic(), _cpu()
    words = ["--agent", f"{here}:{scene.agent}", "--env", f"{here}:{scene.env}", "--tasks", tasks, *columns]
    model = ["--model", str(out / "model"), "--set", f"warm.tapes={out / 'examples'}"]
    command("train", *words, *model, "--out", str(out / "run"))
    return f"{name}: {time.monotonic() - began:.0f} s, {_cpu() - cpu:.0f} s of CPU"


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/first-hour"))
    parser.add_argument("--only", help="one of the drawn tasks")
    args = parser.parse_args()
    print("seed", args.seed, flush=True)
    drawn = draw(args.seed)
    print("drawn:", *drawn, f"on {os.cpu_count()} cores", flush=True)
    for name in drawn if args.only is None else [args.only]:
        line = trained(name, SCENES[name], args.out / name) if name in SCENES else f"{name}: not written yet"
        print(line, flush=True)
