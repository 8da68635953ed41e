"""Make the environment of the tests of OpenEnv's protocol: the real package, and the echo environment of its template.

    python -m tests.contract.openenv_env         (into .contract/openenv; does nothing where it is there already)

About 200 MB. It is apart because the package brings a web framework and an interface that nothing here needs; what is
installed is what its server and client import.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from .environments import install, make

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("TAPEREEL_OPENENV_ENVIRONMENT", ROOT / ".contract" / "openenv"))
PYTHON = FOLDER / "bin" / "python"
ECHO = FOLDER / "echo"
"""The template, filled in as `openenv init echo` does; `python -m server.app --port N` in it is the server."""
PLACES = 4
"""Sessions that the echo server takes at once."""
DONE = FOLDER / "complete"
STEPS = [
    ["--no-deps", "openenv-core==0.3.0"],
    [
        "fastapi==0.165.0",
        "uvicorn==0.54.0",
        "websockets==17.4",
        "httpx==0.28.1",
        "requests==2.34.2",
        "fastmcp==4.1.2",
        "pydantic==2.14.3",
    ],
]


def main() -> None:
    if DONE.exists():
        print(f"{FOLDER} is there already")
        return
    make(FOLDER)
    for step in STEPS:
        install(PYTHON, *step)
    (template,) = FOLDER.glob("lib/python3.*/site-packages/openenv/cli/templates/openenv_env")
    fill(template)
    DONE.touch()


def fill(template: Path) -> None:
    """Write the template out as the environment `echo`."""
    names = {
        "__ENV_NAME__": "echo",
        "__ENV_CLASS_NAME__": "Echo",
        "__ENV_TITLE_NAME__": "Echo",
        "max_concurrent_envs=1,": f"max_concurrent_envs={PLACES},",
    }
    for source in template.rglob("*.py"):
        target, text = ECHO / str(source.relative_to(template)).replace("__ENV_NAME__", "echo"), source.read_text()
        for name, value in names.items():
            text = text.replace(name, value)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
