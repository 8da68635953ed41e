"""Make the environment in which TRL's own trainer runs with our recorder, and the real classes of other formats read
what we export.

    python tests/contract/trl_env.py             (into .contract/trl; does nothing where it is there already)

About 1.5 GB. It is apart because TRL and verifiers pin versions of their own. OpenEnv comes without what it depends on:
only its classes for traces are used.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TAPEREEL_TRL_ENVIRONMENT", ROOT / ".contract" / "trl"))
PYTHON = FOLDER / "bin" / "python"
DONE = FOLDER / "complete"
STEPS = [
    ["install", "--quiet", "torch==2.13.0"],
    ["install", "--quiet", "trl==1.16.0", "transformers==5.20.2", "jmespath", "pydantic", "pyyaml", "rich"],
    ["install", "--quiet", "verifiers==0.1.14"],
    ["install", "--quiet", "--no-deps", "openenv==0.10.0"],
    ["install", "--quiet", "--no-deps", "--editable", str(ROOT)],
]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
               "TOKENIZERS_PARALLELISM": "false"}  # fmt: skip


def main() -> None:
    if DONE.exists():
        print(f"{FOLDER} is there already")
        return
    venv.create(FOLDER, with_pip=True, clear=True)
    for step in STEPS:
        print("pip", *step, flush=True)
        subprocess.run([PYTHON, "-m", "pip", "--disable-pip-version-check", *step], check=True, timeout=900)
    DONE.touch()


if __name__ == "__main__":
    sys.exit(main())
