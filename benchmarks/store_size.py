"""Bytes per token of an episode with ids and log-probs: a segment against TapeAgents' JSON of the same calls.

python benchmarks/store_size.py [--tapeagents /path/to/venv/bin/python]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
from pathlib import Path

from tapereel.tapes import Answer, Call, Status, Task, Text
from tapereel.tapes.arrays import floats, ints
from tapereel.tapes.records import Begin, End, Identity
from tapereel.tapes.store import Store
from tapereel.tapes.tape import step_record

WORDS, PROMPT, COMPLETION = 60, 80, 80
"""Of a message, and the tokens that it stands for; a step of about 300 characters."""
HERE = Path(__file__).parent


def ours(turns: int) -> tuple[int, int]:
    """Bytes on the disk, and new tokens that they hold."""
    rng = random.Random(0)
    text = " ".join(["word"] * WORDS)
    tape = "0" * 22
    with tempfile.TemporaryDirectory() as folder:
        with Store.create(Path(folder) / "run", cache=False) as store:
            task = Task(public="q")
            begin = Begin(
                tape=tape,
                task=task,
                task_hash=task.hash,
                agent=Identity(name="a"),
                env=Identity(name="e"),
                env_seed=0,
                seed=0,
                at=0.0,
            )
            store.writer.append(begin.body())
            base = None
            length = 0
            for k in range(turns):
                store.writer.append(step_record(tape, Text(text=text), by="env").body())
                call = Call(
                    tape=tape,
                    call=f"{tape}.{k}",
                    by="a",
                    base=base,
                    keep=length,
                    keep_messages=2 * k,
                    new_messages=({"role": "user", "content": text},),
                    new_prompt=ints(rng.randrange(32_000) for _ in range(PROMPT)),
                    completion=ints(rng.randrange(32_000) for _ in range(COMPLETION)),
                    logprobs=floats(-rng.random() for _ in range(COMPLETION)),
                    text=text,
                    spans=(("main:0", 0, COMPLETION),),
                    at=1_700_000_000.0,
                )
                store.writer.append(call.body())
                step = step_record(tape, Answer(text=text), by="a", calls=((call.call, 0, COMPLETION),))
                store.writer.append(step.body())
                base, length = call.call, length + PROMPT + COMPLETION
            store.writer.append(End(tape=tape, status=Status.FINISHED, at=0.0).body())
        size = sum(path.stat().st_size for path in (Path(folder) / "run" / "tapes").glob("*.jsonl"))
    return size, turns * (PROMPT + COMPLETION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tapeagents", help="the Python of an environment with tapeagents")
    args = parser.parse_args()
    for turns in (1, 10, 50):
        size, tokens = ours(turns)
        line = f"{turns:>3} turns: {size / tokens:6.1f} bytes per token"
        if args.tapeagents:
            numbers = map(str, (turns, WORDS, PROMPT, COMPLETION))
            command = [args.tapeagents, str(HERE / "peers" / "tapeagents_size.py"), *numbers]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            peer = json.loads(out.splitlines()[-1])
            theirs = peer["bytes"] / peer["tokens"]
            line += f"; TapeAgents {theirs:7.1f}; ratio {size / tokens / theirs:.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
