"""What a pretrained model learns on a CPU by defaults: SmolLM2-135M-Instruct on three tasks, some minutes a run.

    python benchmarks/pretrained.py --model MODEL [--task NAME ...] [--arm NAME ...] [--seed N ...] --out DIR
                                    [--updates N] [--threads N] [--set KEY=VALUE ...] [--docs DIR]

MODEL is a folder, a GGUF file or a name on the hub. Each run is `tr.train(agent, env, tasks, model)` in a process
of its own, one after the other. Only the number of updates and the seed are set, beside what the arm and `--set` set
(`--set evaluation.greedy=true` measures that too):

    all        all weights
    lora       LoRA adapters of rank 16
    shuffled   all weights, with the rewards of an update shuffled over its groups: it mustn't rise

`DIR/runs.jsonl` gets one line for each run that ends, and a later call runs only what has no line there. The table is
printed as Markdown. `--docs` puts it into learning.md there, and draws the curves of the runs by defaults.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pretrained_report import put, table
from pretrained_tasks import SCENES

import tapereel as tr
from tapereel.tapes.common.progress import Progress
from tapereel.tapes.store.run_directory import METRICS, Results, read_metrics

if TYPE_CHECKING:
    from tapereel.finetune.run.train_run import TrainSummary

ROOT = Path(__file__).resolve().parents[1]
ARMS: dict[str, dict[str, Any]] = {
    "all": {},
    "lora": {"trainer.lora.rank": 16, "trainer.lora.alpha": 32},
    "shuffled": {"loop.shuffle_rewards": "across"},
}
UPDATES = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--task", nargs="+", choices=[*SCENES], default=[*SCENES])
    parser.add_argument("--arm", nargs="+", choices=[*ARMS], default=[*ARMS])
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="sets", help="for sweeps")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained"))
    parser.add_argument("--docs", type=Path, help="bring learning.md and first-letter.png there up to date")
    parser.add_argument("--print", action="store_true", help="print the table of what is there, and run nothing")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    lines = args.out / "runs.jsonl"
    if args.child:
        print(json.dumps(measured(args, args.task[0], args.arm[0], args.seed[0])))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in () if args.print else args.seed:
        for task in args.task:
            for arm in args.arm:
                key = {"task": task, "arm": arm, "seed": seed, "updates": args.updates, "sets": args.sets}
                if any(key.items() <= line.items() for line in read(lines)):
                    continue
                with lines.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(key | in_own_process(args, task, arm, seed)) + "\n")
                print(table(read(lines)[-1:]), file=sys.stderr, flush=True)
    print(table(read(lines)))
    if args.docs is not None:
        put(args.docs, read(lines))


def read(lines: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines.read_text("utf-8").splitlines()] if lines.exists() else []


def in_own_process(args: argparse.Namespace, task: str, arm: str, seed: int) -> dict[str, Any]:
    """One run, so that its peak memory is its own."""
    words = [sys.executable, __file__, "--child", "--model", args.model, "--task", task, "--arm", arm]
    words += ["--seed", str(seed), "--updates", str(args.updates), "--out", str(args.out), "--threads"]
    words += [str(args.threads), *(f"--set={text}" for text in args.sets)]
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    done = subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measured(args: argparse.Namespace, task: str, arm: str, seed: int) -> dict[str, Any]:
    """The run's line."""
    scene, began = SCENES[task](), time.monotonic()
    commit = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(commit, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    imports = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    settings = ARMS[arm] | dict(text.split("=", 1) for text in args.sets)
    name = "-".join([task, arm, str(seed), *(text.rpartition(".")[2] for text in args.sets)])
    out = args.out / f"{name}-{args.updates}-{time.strftime('%H%M%S')}"
    said = live()
    run = tr.train(*scene, args.model, out=out, updates=args.updates, seed=seed, settings=settings, progress=said)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return row(run.path, run.summary) | {
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "wall_seconds": round(time.monotonic() - began, 1),
        "peak_gb": round(used.ru_maxrss * 1024 / 1e9, 2),
        "imports_gb": round(imports * 1024 / 1e9, 2),
        "threads": args.threads,
        "load": os.getloadavg()[0],
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "hardware": hardware(),
        "run": str(out),
    }


def live() -> Progress:
    last = [0.0]

    def report(phase: str, done: int, of: int, note: str) -> None:
        if done == of or time.monotonic() - last[0] > 20:
            last[0] = time.monotonic()
            print(f"{phase}: {done}/{of} {note}", file=sys.stderr, flush=True)

    return report


def row(run: Path, summary: TrainSummary) -> dict[str, Any]:
    """What the run came to."""
    results = Results.read(run)
    lines = read_metrics(run / METRICS)
    rl = [line for line in lines if line["phase"] == "rl"]
    found: dict[str, Any] = {}
    for when, evaluations in (("before", results.before), ("after", results.after)):
        for name, one in (evaluations or {}).items():
            found[f"{name}_{when}"] = one.reward
            found[f"{name}_{when}_tokens"] = one.lengths.get("length/answer")
            if one.change is not None:
                found[f"{name}_change"] = one.change
    return found | {
        "curve": [line["reward"] for line in rl],
        "gradient": [line.get("grad_norm") for line in rl],
        "seconds": summary.seconds,
        "tokens": summary.tokens,
        "books_close": summary.books_close,
    }


def hardware() -> str:
    """The processor, and which matrix instructions it has."""
    about = Path("/proc/cpuinfo").read_text("utf-8") if platform.system() == "Linux" else ""
    facts = dict(line.split("\t: ", 1) for line in about.splitlines() if "\t: " in line.replace("\t\t", "\t"))
    facts = {key.strip(): value for key, value in facts.items()}
    flags = facts.get("flags", "").split()
    return ", ".join([facts.get("model name", platform.processor()), *(f for f in flags if f in KNOWN)])


KNOWN = ("amx_bf16", "avx512_bf16", "avx512f")


if __name__ == "__main__":
    main()
