"""Make the environment in which Qwen2.5-VL and Qwen3-VL read videos by their own video processors: torchvision, beside
the packages of the environment that runs this script.

    python -m tests.contract.video_env           (into .contract/video; does nothing where it is there already)

About 25 MB. It is apart because nothing else may come to need torchvision.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from .environments import install, make
from .vllm_cpu import SCHEMAS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TAPEREEL_VIDEO_ENVIRONMENT", ROOT / ".contract" / "video"))
PYTHON = FOLDER / "bin" / "python"
DONE = FOLDER / "complete"
# The release for torch 2.13. PyPI's build expects CUDA.
PACKAGE = "torchvision==0.28.0"
BESIDE = f"import site; site.addsitedir({os.path.realpath(sysconfig.get_path('purelib'))!r})"
"""A line of a .pth file: the other packages, with what they install in .pth files of their own."""


def main() -> None:
    made = f"{PACKAGE}\n{BESIDE}"
    if DONE.exists() and DONE.read_text() == made:
        print(f"{FOLDER} is there already")
        return
    DONE.unlink(missing_ok=True)
    make(FOLDER)
    (packages,) = FOLDER.glob("lib/python*/site-packages")
    install(PYTHON, "--no-deps", PACKAGE)
    extension = packages / "torchvision" / "extension.py"
    extension.write_text(extension.read_text() + SCHEMAS)
    (packages / "beside.pth").write_text(BESIDE)
    DONE.write_text(made)


if __name__ == "__main__":
    sys.exit(main())
