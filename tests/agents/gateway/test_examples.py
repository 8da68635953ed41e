"""The examples of the gateway: programs that know nothing of Tapereel, recorded and replayed as they stand."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tapereel.cli import main
from tapereel.tapes.store import Store

pytestmark = pytest.mark.docs

ROOT = Path(__file__).resolve().parents[3]
SCENE = "examples/gateway_scene.py"


@pytest.mark.parametrize("program", ["gateway_openai.py", "gateway_pydantic_ai.py"])
def test_the_programs_know_nothing_of_tapereel(program: str):
    tree = ast.parse((ROOT / "examples" / program).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("tapereel") for name in imported)


@pytest.mark.parametrize(
    ("agent", "env", "tasks", "engine", "calls"),
    [
        ("speller", "Spelling", "words", 'engine.answers=["a", "b"]', 2),
        ("adder", "Sums", "sums", f"engine.policy={SCENE}:adding", 2),
    ],
)
def test_a_program_is_recorded_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agent: str, env: str, tasks: str, engine: str, calls: int
):
    if agent == "adder":
        pytest.importorskip("pydantic_ai")
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    assert (
        main(
            [
                "run",
                "--agent",
                f"{SCENE}:{agent}",
                "--env",
                f"{SCENE}:{env}",
                "--tasks",
                f"{SCENE}:{tasks}",
                "--set",
                engine,
                "--set",
                "count=1",
                "--out",
                str(run),
            ]
        )
        == 0
    )
    with Store.open(run) as store:
        tapes = list(store.tapes())
    assert sum(len(tape.calls) for tape in tapes) == calls
    assert max(tape.reward or 0.0 for tape in tapes) == 1.0
    assert main(["replay", "agent", str(run)]) == 0
    other = "adder" if agent == "speller" else "speller"
    assert main(["replay", "agent", str(run), "--agent", f"{SCENE}:{other}"]) == 2  # another agent's tapes
