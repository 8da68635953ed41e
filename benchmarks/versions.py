"""The tests in a fresh environment with other versions of the packages, or another Python; prints a row of a table.

    python benchmarks/versions.py lowest tests/front tests/tapes tests/agents
    python benchmarks/versions.py newest --limit torch==2.13.0 tests
    python benchmarks/versions.py pinned --python 3.12 --without torch --at-least 1500 tests/tapes

`lowest` takes the lower bound of every package in pyproject.toml, `newest` what pip gives today, and `pinned` the
versions of constraints.txt. Packages are downloaded; the tests themselves reach no other machine. The exit code is
that of pytest, and 1 where fewer tests passed than `--at-least`.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("torch", "transformers", "numpy", "pydantic", "litellm", "openai", "mcp", "pydantic-ai-slim")
NEED = {"torch": ("torch", "accelerate", "peft", "bitsandbytes")}
"""Package -> what is left out with it. The tests refuse to run where the package is installed all the same."""


def main() -> int:
    """Make the environment, run the tests, print the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", choices=("lowest", "newest", "pinned"))
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--python", default="3.11", help="such as 3.12")
    parser.add_argument("--without", choices=list(NEED), help="install and test without this package")
    parser.add_argument("--limit", action="append", default=[], help="a constraint of pip, such as torch==2.13.0")
    parser.add_argument("--at-least", type=int, default=0, metavar="N", help="fail where fewer tests passed")
    args = parser.parse_args()
    folder = ROOT / ".contract" / f"versions-{args.versions}-{args.python}"
    shutil.rmtree(folder, ignore_errors=True)
    run(interpreter(args.python), "-m", "venv", folder)
    python = folder / "bin" / "python"
    install(python, args)
    command = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--tb=short", *args.tests]
    command += ["--without", args.without] if args.without else []
    if args.versions != "pinned":
        # Other releases warn of other things, and other packages are installed than constraints.txt names.
        pins = "tests/front/test_house.py::test_constraints_pin_all_that_the_dev_extra_installs"
        command += ["-W", "default", "--deselect", pins]
    code, last = stream(command)
    passed, failed, skipped, errors = (count(last, word) for word in ("passed", "failed", "skipped", "error"))
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    row = [commit, datetime.date.today(), args.versions, args.python, shown(python), " ".join(args.tests)]
    print("| " + " | ".join(map(str, [*row, passed, failed + errors, skipped])) + " |")
    if passed < args.at_least:
        print(f"{passed} tests passed, and {args.at_least} must: a module needs {args.without} that did not before")
        return 1
    return code


def interpreter(version: str) -> str:
    """The path of this version's Python, which is on PATH or which pyenv knows."""
    name = f"python{version}"
    # pyenv's `python3.12` works where pyenv is asked for that version, and no other program reads the variable.
    asked = os.environ | {"PYENV_VERSION": version}
    found = shutil.which(name)
    probe = [found or name, "-c", "import sys; print(sys.executable)"]
    done = subprocess.run(probe, env=asked, capture_output=True, text=True) if found else None
    if done is None or done.returncode:
        sys.exit(
            f"{name} is needed and not found on PATH: install it (`pyenv install {version}`, or your system's package)"
        )
    return done.stdout.strip()


def install(python: Path, args: argparse.Namespace) -> None:
    """The `dev` extra without what `--without` leaves out, and this checkout."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    needs, out = sorted(requirements("dev")), NEED.get(args.without, ())
    wanted = [need for need in needs if re.split(r"[^\w-]", need)[0] not in out]
    limits = folder_file(python, "limits.txt", args.limit)
    if args.versions == "lowest":
        # uv finds the versions; pip installs them, since it may know places of wheels that uv doesn't.
        run(*pip, "uv")
        asked = folder_file(python, "asked.txt", wanted)
        lowest = python.parents[1] / "lowest.txt"
        uv = [python, "-m", "uv", "pip", "compile", "--quiet", "--resolution", "lowest-direct"]
        run(*uv, "--constraint", limits, "--python-version", args.python, "--output-file", lowest, asked)
        run(*pip, "--no-deps", "--requirement", lowest)
    else:
        pins = ["--constraint", ROOT / "constraints.txt"] if args.versions == "pinned" else ["--upgrade"]
        run(*pip, *pins, "--constraint", limits, *wanted)
    run(*pip, "--no-deps", "--editable", ROOT)


def folder_file(python: Path, name: str, lines: list[str]) -> Path:
    """A file of these lines in the environment's folder."""
    path = python.parents[1] / name
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def requirements(extra: str) -> set[str]:
    """All that the extra and the base install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = set(project["dependencies"])
    for need in project["optional-dependencies"][extra]:
        inner = re.fullmatch(r"tapereel\[(.+)\]", need)
        found |= {need} if inner is None else set().union(*map(requirements, inner[1].split(",")))
    return found


def run(*words: object) -> None:
    """One command, shown; its failure ends this program."""
    print("$", *words, flush=True)
    subprocess.run(list(map(str, words)), check=True)


def stream(command: list[object]) -> tuple[int, str]:
    """Run it with its output shown; returns the exit code and the last line that counts tests."""
    print("$", *command, flush=True)
    last = ""
    with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line if re.search(r"\d+ (passed|failed|error)", line) else last
    return process.returncode, last


def count(line: str, word: str) -> int:
    """The number before the word in pytest's last line; 0 where the word is missing."""
    found = re.search(rf"(\d+) {word}", line)
    return int(found[1]) if found else 0


def shown(python: Path) -> str:
    """The versions of the packages that matter most, as installed."""
    code = f"""
from importlib.metadata import PackageNotFoundError, version
for name in {SHOWN}:
    try:
        print(name, version(name))
    except PackageNotFoundError:
        print("no", name)
"""
    return ", ".join(subprocess.check_output([str(python), "-c", code], text=True).splitlines())


if __name__ == "__main__":
    sys.exit(main())
