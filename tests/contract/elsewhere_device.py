"""Make the device of the tests that need another one than the CPU: `standin/elsewhere.cpp`, compiled for this torch.

    python -m tests.contract.elsewhere_device     (into .contract/elsewhere; does nothing where it is there already)

It takes g++ and half a minute.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("standin") / "elsewhere.cpp"
FOLDER = Path(__file__).resolve().parents[2] / ".contract" / "elsewhere"


def library() -> Path:
    """Where it is, once it was made: another place for another source or torch."""
    made_of = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:12]
    return FOLDER / f"elsewhere-{made_of}.so"


def main() -> None:
    target = library()
    if target.exists():
        print(f"{target} is there already")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    home = Path(torch.__file__).parent
    headers = [f"-I{home / 'include' / part}" for part in ("", "torch/csrc/api/include")]
    partial = target.with_suffix(".partial")
    subprocess.run(
        [
            "g++",
            "-O1",
            "-shared",
            "-fPIC",
            "-std=c++20",
            *headers,
            str(SOURCE),
            "-o",
            str(partial),
            f"-L{home}/lib",
            "-ltorch_cpu",
            "-lc10",
        ],
        check=True,
        timeout=900,
    )
    partial.replace(target)
    print(f"made {target}")


if __name__ == "__main__":
    sys.exit(main())
