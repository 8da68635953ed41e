"""The tests in a fresh environment with other versions of the packages, or another Python; prints a row of a table.

    python -m benchmarks.versions lowest tests/front tests/tapes tests/agents
    python -m benchmarks.versions newest --limit torch==2.13.0 tests
    python -m benchmarks.versions pinned --python 3.12 --without torch --at-least 1500 tests/tapes

`lowest` takes the lower bound of every package in pyproject.toml, `newest` the newest, and `pinned` the
versions of constraints.txt. Packages are downloaded; the tests themselves reach no other machine. The exit code is
that of pytest, and 1 where fewer tests passed than `--at-least`.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.contract.environments import install, make

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
    parser.add_argument("--limit", action="append", default=[], help="a constraint, such as torch==2.13.0")
    parser.add_argument("--at-least", type=int, default=0, metavar="N", help="fail where fewer tests passed")
    args = parser.parse_args()
    folder = ROOT / ".contract" / f"versions-{args.versions}-{args.python}"
    python = make(folder, args.python)
    packages(python, args)
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


def packages(python: Path, args: argparse.Namespace) -> None:
    """Install the `dev` extra without what `--without` leaves out, and this checkout."""
    needs, out = sorted(requirements("dev")), NEED.get(args.without, ())
    wanted = [need for need in needs if re.split(r"[^\w-]", need)[0] not in out]
    options = {
        "lowest": ["--resolution", "lowest-direct"],
        "newest": ["--upgrade"],
        "pinned": ["--constraint", ROOT / "constraints.txt"],
    }[args.versions]
    install(python, *options, "--constraint", folder_file(python, "limits.txt", args.limit), *wanted)
    install(python, "--no-deps", "--editable", ROOT)


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
