"""Make the environment of the tests marked `contract` in which SGLang runs on a CPU.

    python -m tests.contract.sglang_cpu            (into .contract/sglang; does nothing where it is there already)

1.4 GB, of which Triton is 1.0, and 25 CPU seconds. Torch, transformers and other packages come from the environment
that runs this script. SGLang computes with its own fallbacks in PyTorch; of CUDA's parts, only the names are there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from .environments import install, make

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TAPEREEL_SGLANG_ENVIRONMENT", ROOT / ".contract" / "sglang"))
PYTHON = FOLDER / "bin" / "python"
DONE = FOLDER / "complete"
LENT = Path(torch.__file__).parents[1]
"""Where torch is. Packages of the new environment come first."""
STEPS = [
    # SGLang asks for a torch that is published for CUDA only, and for packages that need CUDA.
    "--no-deps sglang==0.5.23 torchvision==0.28.0 triton==3.9.0 apache-tvm-ffi==0.1.11 xgrammar==0.2.7 "
    "compressed-tensors==0.18.0",
    "fastapi uvloop orjson msgspec pyzmq setproctitle prometheus-client pybase64 einops watchfiles "
    "partial_json_parser sentencepiece==0.2.1 zstandard nvidia-ml-py soundfile==0.13.1 loguru gguf ipython",
]
SCHEMAS = """

# The compiled operators of a build for CUDA don't load beside torch's CPU build. The rest needs their names alone.
if not _has_ops():
    _names = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _names.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""What torchvision's `extension.py` gets at its end."""
KERNELS = """# SGLang's kernels are published for CUDA only. Without CUDA, SGLang imports their names, and calls none.
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs CUDA")

    return missing
"""
"""The module `sgl_kernel`."""
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}
OPTIONS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--max-total-tokens", "8192", "--max-running-requests", "16", "--disable-cuda-graph"),
    "--sleep-on-idle",  # otherwise a server without requests keeps a core busy
)


def main() -> None:
    made = "\n".join([str(LENT), *STEPS])
    if DONE.exists() and DONE.read_text() == made:
        print(f"{FOLDER} is there already")
        return
    DONE.unlink(missing_ok=True)
    make(FOLDER)
    (packages,) = FOLDER.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(f"{LENT}\n")
    (packages / "sgl_kernel.py").write_text(KERNELS)
    for step in STEPS:
        # What the lent packages need too has their versions.
        install(PYTHON, "--constraint", ROOT / "constraints.txt", *step.split())
    extension = packages / "torchvision" / "extension.py"
    extension.write_text(extension.read_text() + SCHEMAS)
    DONE.write_text(made)


if __name__ == "__main__":
    sys.exit(main())
