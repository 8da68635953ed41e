"""Make the environment in which TRL's own trainers train on our rows, wandb, trackio and mlflow draw a run of ours, and
TorchRL's losses stand beside ours.

    python -m tests.contract.trl_env             (into .contract/trl; does nothing where it is there already)

About 2.2 GB. It is apart because TRL and mlflow pin versions of their own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .environments import install, make

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TAPEREEL_TRL_ENVIRONMENT", ROOT / ".contract" / "trl"))
PYTHON = FOLDER / "bin" / "python"
DONE = FOLDER / "complete"
STEPS = [
    ["torch==2.13.0", "trl==1.16.0", "transformers==5.20.2", "jmespath", "pydantic", "pyyaml", "rich"],
    ["torchrl==0.14.1", "tensordict==0.14.3", "torch==2.13.0"],
    ["wandb==0.31.0", "trackio==0.43.0", "mlflow==3.17.2"],
    ["--no-deps", "--editable", str(ROOT)],
]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> None:
    made = "\n".join(map(" ".join, STEPS))
    if DONE.exists() and DONE.read_text() == made:
        print(f"{FOLDER} is there already")
        return
    DONE.unlink(missing_ok=True)
    make(FOLDER)
    for step in STEPS:
        install(PYTHON, *step)
    DONE.write_text(made)


if __name__ == "__main__":
    sys.exit(main())
