"""Runs in the environment with vLLM: `train` with a vLLM that the run starts, then resumed and verified.

    python started_train.py MODEL RUN WEIGHTS-FOLDER WEIGHTS

Prints one JSON object with what each of the three came to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tapereel.finetune import TrainConfig
from tapereel.finetune.run import train
from tapereel.tapes.store import verify

LAB = Path(__file__).resolve().parents[1] / "finetune" / "loop" / "lab.py"


def main() -> None:
    model, run, folder, weights = sys.argv[1:]
    config = TrainConfig.model_validate(
        {
            "agent": f"{LAB}:Speaker",
            "env": f"{LAB}:Letters",
            "tasks": ["a", "b", "c", "d", "ab", "cd"],
            "evaluation": {"fraction": 0.34},
            "engine": {
                "kind": "vllm",
                "model": model,
                "weights": weights,
                "weights_folder": folder,
                "options": {"enforce_eager": True, "dtype": "float32", "max_model_len": 4096, "max_num_seqs": 64},
            },
            "loop": {
                "updates": 3,
                "groups": 4,
                "group_size": 4,
                "sampling": {"max_tokens": 2},
                "max_lag": 1,
                "optimiser": {"lr": 1e-2},
                "limits": {"turns": 6, "agent_seconds": 120.0},
                "checkpoint_every": 1,
                "keep_checkpoints": None,
            },
        }
    )
    told = [train(config, run, resume=resume).model_dump(mode="json") for resume in (False, True)]
    print(json.dumps({"trained": told[0], "resumed": told[1], "verify": verify(run).exit_code}))


if __name__ == "__main__":
    main()
