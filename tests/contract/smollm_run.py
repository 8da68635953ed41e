"""A real pretrained model, from a GGUF file to a trained folder, with every check that a run offers.

    python -m tests.contract.smollm_run          (after smollm_env; about 5 minutes on one core)

Leaves the run in .contract/smollm/run, where test_vllm_smollm.py looks for the trained model.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from .smollm_env import CACHE, MODEL, RUN, TRAINED

os.environ["XDG_CACHE_HOME"] = str(CACHE)  # read by what follows

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import tapereel as tr
from tapereel.cli import main
from tapereel.finetune import rows
from tapereel.tapes.common import model_folder

CLOSE = 1e-4
"""Nats by which a log-prob that an engine recorded may differ from that of a plain forward pass in float32."""
ROWS = RUN.with_name("rows.jsonl")
TASK = str(Path(__file__).resolve().parents[2] / "examples" / "first_letter.py")
SCENE = [f"--{part}={TASK}:{name}" for part, name in (("agent", "agent"), ("env", "FirstLetter"), ("tasks", "words"))]
SETTINGS = [
    "loop.groups=4",
    "loop.group_size=8",
    "loop.optimiser.lr=1e-5",
    "loop.optimiser.schedule.warmup=0",
    "evaluation.limit=8",
    "engine.capacity=128",
]


def verb(*words: str) -> None:
    began, used = time.monotonic(), time.process_time()
    code = main([*words])
    print(f"{words[0]}: {time.process_time() - used:.0f} CPU s, {time.monotonic() - began:.0f} s", flush=True)
    assert code == 0, f"tapereel {' '.join(words)}: exit code {code}"


def train(updates: int, *more: str) -> None:
    sets = [f"--set={one}" for one in (*SETTINGS, f"loop.updates={updates}")]
    verb("train", *SCENE, f"--model={MODEL}", f"--out={RUN}", *sets, *more)


def farthest(tapes: Iterable[tr.Tape], folder: Path) -> tuple[int, float]:
    """How many sampled tokens the tapes have, and the largest difference of a log-prob from that of plain
    transformers with the model in `folder`."""
    model, differences = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), [torch.zeros(0)]
    for row in (row for tape in tapes for row in rows(tape)):
        ids, own = torch.from_numpy(row.input_ids).long(), torch.from_numpy(row.own).long()
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        differences.append((logprobs[own - 1, ids[own]] - torch.from_numpy(row.old)).abs())
    joined = torch.cat(differences)
    return len(joined), float(joined.max())


def check(what: str, found: tuple[int, float]) -> None:
    print(f"{what}: {found[0]} tokens, at most {found[1]:.1e} nats from a plain forward pass", flush=True)
    assert found[0] > 20, what
    assert found[1] < CLOSE, what


if __name__ == "__main__":
    torch.set_num_threads(1)
    disable_progress_bar()
    shutil.rmtree(RUN, ignore_errors=True)
    ROWS.unlink(missing_ok=True)
    train(3)
    train(6, "--resume")
    run = tr.open(RUN)
    after = "eval-after-000006-sampled"
    check("before training", farthest(run.tapes("eval-before-sampled"), model_folder(MODEL)))
    check("after training", farthest(run.tapes(after), TRAINED))
    verb("verify", str(RUN))
    verb("replay", "model", str(RUN), "--split", after)
    verb("reproduce", str(RUN))
    verb("export", str(RUN), str(ROWS))
    sys.exit(main(["show", str(RUN)]))
