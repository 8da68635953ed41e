"""Mutation run: flips signs, operators, comparisons and constants of the objective, one at a time, and runs its tests.

    python benchmarks/mutate_objective.py                     every mutant of every file (20 minutes on a free core)
    python benchmarks/mutate_objective.py objective/baseline.py   of one file, or of several
    python benchmarks/mutate_objective.py --since COMMIT          of the lines that changed after it

A mutant is *killed* when a test fails. One that survives is printed with its line: a number that no test holds. Each
runs in a fork of a process that has imported the heavy libraries once; sources on disk are never touched.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.machinery
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests" / "finetune"
LIMIT = 150
"""Seconds after which a mutant that hangs counts as killed."""
ROUNDING = "anything between rounding and the smallest spread of real rewards tells a flat batch"
FILES = {
    "objective/baseline.py": "baseline",
    "objective/credit.py": "credit baseline regulariser",
    "objective/kl.py": "regulariser",
    "objective/surrogate.py": "surrogate recipes",
    "objective/weigh.py": "surrogate",
    "objective/adjust.py": "credit baseline",
    "objective/regulariser.py": "regulariser recipes",
    "objective/shape.py": "regulariser",
    "objective/anchor.py": "surrogate recipes",
    "objective/select.py": "baseline surrogate",
    "trainer/critic.py": "critic bootstrap trainer_modes",
    "objective/reward.py": "baseline",
    "objective/term.py": "sums regulariser baseline",
    "data/segments.py": "credit baseline",
    "trainer/schedule.py": "regulariser",
    "objective/loss.py": "sums bootstrap baseline regulariser surrogate recipes accumulation trainer",
    "trainer/lm_head.py": "barred score",
    "trainer/micro_batches.py": "barred micro pictures",
    "data/stream.py": "bootstrap stream credit baseline guards",
    **{
        f"recipes/{path.name}": "recipes"
        for path in sorted((ROOT / "finetune" / "recipes").glob("*.py"))
        if path.stem != "__init__"
    },
}
"""Each file, and the test files that answer for it."""
LAST = "-1 and 1 name the same dimension of two"
TUNED = "a size that was tuned, not a number of the objective"
EQUIVALENT: dict[tuple[str, str], str] = {
    ("objective/baseline.py", "if n < 2 or square <= (n * 1e-15 * max(abs(mean), 1e-300)) ** 2:"): ROUNDING,
    ("objective/adjust.py", "if n < 2 or square <= (n * 1e-15 * max(abs(mean), 1e-300)) ** 2:"): ROUNDING,
    (
        "objective/select.py",
        "quota = torch.floor(self.entropy_top * size.to(torch.float64) + 1e-9).clamp(min=1)",
    ): ROUNDING,
    (
        "objective/term.py",
        "return (self.m2 / (self.n - 1)) ** 0.5 if self.n > 1 and self.m2 > 0 else None",
    ): "one value has no squared deviation either",
    ("objective/weigh.py", "return 1.0"): "a sum has no denominator to add up",
    ("trainer/lm_head.py", "CHUNK = 1 << 22"): TUNED,
    ("trainer/lm_head.py", "BARRED = -1e9"): "its exp is 0 at any such size; a test holds the sign",
    ("trainer/lm_head.py", "lse[at] = z.logsumexp(-1)"): LAST,
    ("trainer/lm_head.py", "entropy[at] = lse[at] - ((z - lse[at, None]).exp() * z).sum(-1)"): LAST,
    ("trainer/lm_head.py", "entropy = torch.empty_like(lse) if want_entropy else lse.new_empty(0)"): "nobody reads it",
    (
        "trainer/lm_head.py",
        "scale = None if bool((temperature == 1).all()) else temperature.to(hidden.device, exact)",
    ): "dividing by 1 changes nothing",
    ("data/stream.py", "if not np.isclose(part.sum(), episode.reward, rtol=1e-6, atol=1e-6):"): ROUNDING,
    ("trainer/micro_batches.py", "MICRO_TOKENS = 2048"): TUNED,
    ("trainer/micro_batches.py", "SHARE_TOKENS = 16"): TUNED,
    ("trainer/micro_batches.py", "for row in rows[1:]:"): "a row begins as it begins itself",
}
"""Survivors that change nothing: (file, text of the mutated line) and why."""

SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def mutants(source: str) -> Iterator[tuple[int, str, ast.Module]]:
    """(line, what changed, mutated tree) for every place in turn."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    skipped = {id(n) for outer in nodes for talk in _talk(outer) for n in ast.walk(talk)}
    for i, node in enumerate(nodes):
        if id(node) in skipped:
            continue
        for change in _changes(node):
            mutated = copy.deepcopy(tree)
            twin: Any = list(ast.walk(mutated))[i]
            line = getattr(node, "lineno", 0)
            yield line, change, _apply(mutated, twin, change)


def _talk(node: ast.AST) -> list[ast.AST]:
    """Type hints, messages and raised errors: they hold no numbers of the objective."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.ImportFrom | ast.Import):
        return [node]
    hints = [getattr(node, name, None) for name in ("annotation", "returns")]
    typed = isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Annotated"
    return [*([node] if typed else []), *(hint for hint in hints if isinstance(hint, ast.AST))]


def _changes(node: ast.AST) -> list[str]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SWAPS:
        return ["operator"]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        return ["comparison"]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Invert):
        return ["sign"]
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return ["constant"]
    return []


def _apply(tree: ast.Module, node: Any, change: str) -> ast.Module:
    if change == "operator":
        node.op = SWAPS[type(node.op)]()
    elif change == "comparison":
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif change == "constant":
        value = node.value
        whole = isinstance(value, int)
        node.value = 1 - value if whole and value in (0, 1) else value + 1 if whole else value * 2 + 0.5 * (value == 0)
    else:
        swap = _Drop(node)
        tree = swap.visit(tree)
    return ast.fix_missing_locations(tree)


class _Drop(ast.NodeTransformer):
    def __init__(self, target: ast.UnaryOp) -> None:
        self.target = target

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        return node.operand if node is self.target else self.generic_visit(node)


def changed(file: Path, commit: str) -> set[int]:
    """Numbers of the lines of `file` that aren't in `commit`."""
    diff = subprocess.run(["git", "diff", "-U0", commit, "--", str(file)], capture_output=True, text=True, check=True)
    spans = re.findall(r"^@@ .* \+(\d+)(?:,(\d+))? @@", diff.stdout, re.MULTILINE)
    return {line for start, count in spans for line in range(int(start), int(start) + int(count or 1))}


def survives(file: Path, tree: ast.Module, tests: list[str]) -> bool:
    """True when every test passes on the mutant. In a fork, so that nothing is left of it."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIMIT)
        os._exit(_run(file, tree, tests))
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def _run(file: Path, tree: ast.Module, tests: list[str]) -> int:
    import pytest

    get_code = importlib.machinery.SourceFileLoader.get_code

    def mutated(self: Any, name: str) -> Any:
        return compile(tree, str(file), "exec") if self.path == str(file) else get_code(self, name)

    importlib.machinery.SourceFileLoader.get_code = mutated  # type: ignore[method-assign]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return int(
            pytest.main(
                [
                    "-x",
                    "-q",
                    "-p",
                    "no:cacheprovider",
                    "--no-header",
                    "-W",
                    "ignore::pytest.PytestAssertRewriteWarning",
                    *tests,
                ]
            )
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="below finetune/; default: all")
    parser.add_argument("--since", metavar="COMMIT", help="mutate only lines that changed after this commit")
    args = parser.parse_args()
    wanted = args.files or list(FILES)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.chdir(ROOT)
    import hypothesis.strategies  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)
    print(f"{'file':<24}{'mutants':>8}{'killed':>8}{'same':>6}{'alive':>6}{'s':>6}", flush=True)
    alive_in_all = 0
    for name in wanted:
        file = ROOT / "finetune" / name
        source = file.read_text(encoding="utf-8")
        lines = source.splitlines()
        allowed = range(1, len(lines) + 1) if args.since is None else changed(file, args.since)
        places = [(line, change, tree) for line, change, tree in mutants(source) if line in allowed]
        if not places:
            continue
        tests = [str(next(TESTS.rglob(f"test_{t}.py"))) for t in FILES[name].split()]
        if not survives(file, ast.parse(source), tests):
            sys.exit(f"{name}: its tests fail as it stands, so they can't tell a mutant from it")
        start, total, same, alive = time.monotonic(), 0, 0, []
        for line, change, tree in places:
            total += 1
            if survives(file, tree, tests):
                if (name, lines[line - 1].strip()) in EQUIVALENT:
                    same += 1
                else:
                    alive.append(f"    {name}:{line} {change}: {lines[line - 1].strip()}")
        killed = total - same - len(alive)
        print(f"{name:<24}{total:>8}{killed:>8}{same:>6}{len(alive):>6}{time.monotonic() - start:>6.0f}", flush=True)
        print("\n".join(alive), flush=True, end="\n" if alive else "")
        alive_in_all += len(alive)
    return 1 if alive_in_all else 0


if __name__ == "__main__":
    sys.exit(main())
