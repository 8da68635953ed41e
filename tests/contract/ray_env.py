"""Make the environment in which episodes run in real Ray actors.

    python -m tests.contract.ray_env       (into .contract/ray; does nothing where it is there already)

About 220 MB. It is apart because few users need Ray. Torch and the other packages are those of this environment.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from .environments import install, make

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TAPEREEL_RAY_ENVIRONMENT", ROOT / ".contract" / "ray"))
PYTHON = FOLDER / "bin" / "python"
DONE = FOLDER / "complete"
STEPS = [["ray==2.60.0"], ["--no-deps", "--editable", str(ROOT)]]


def main() -> None:
    made = "\n".join(map(" ".join, STEPS))
    if DONE.exists() and DONE.read_text() == made:
        print(f"{FOLDER} is there already")
        return
    DONE.unlink(missing_ok=True)
    make(FOLDER)
    for step in STEPS:
        install(PYTHON, *step)
    (site,) = (FOLDER / "lib").glob("python*/site-packages")
    (site / "zz_outer.pth").write_text(sysconfig.get_path("purelib"))
    DONE.write_text(made)


if __name__ == "__main__":
    sys.exit(main())
