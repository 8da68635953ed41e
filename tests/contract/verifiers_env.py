"""Make the environment in which VerifiersEnvironment runs environments of the real `verifiers`.

    python -m tests.contract.verifiers_env       (into .contract/verifiers; does nothing where it is there already)

About 340 MB. It is apart because the package pins an older `mcp`. `renderers` and the clients of Prime's services are
installed without their dependencies, since nothing here needs them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .environments import install, make

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TAPEREEL_VERIFIERS_ENVIRONMENT", ROOT / ".contract" / "verifiers"))
PYTHON = FOLDER / "bin" / "python"
DONE = FOLDER / "complete"
STEPS = [
    ["--no-deps", "verifiers==0.4.0", "renderers==0.1.12", "prime-sandboxes==0.5.1"],
    [
        "aiofiles==25.1.0",
        "aiohttp==3.14.5",
        "anthropic==2.14.0",
        "connectrpc==0.11.1",
        "math-verify==0.9.0",
        "mcp==2.0.0",
        "numpy==2.4.6",
        "openai==2.54.0",
        "prime-pydantic-config[toml]==0.4.3",
        "protobuf==7.36.2",
        "pyyaml",
        "rich",
        "tenacity==9.2.1",
        "tomli-w==1.2.0",
        "tqdm",
        "uvicorn==0.54.0",
    ],
    ["--no-deps", "--editable", str(ROOT)],
]


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
