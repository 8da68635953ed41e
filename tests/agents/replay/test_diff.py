"""`diff`: where two tapes part, what two runs made of the same tasks, and how that is told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import ScriptedEngine, rollout
from tapereel.cli import main
from tapereel.tapes import Tape, Task
from tapereel.tapes.audit.compare import diff_runs, diff_tapes
from tapereel.tapes.store import Store
from tapereel.tapes.store.summary import attempts_of

from ...cli.lab import EXAMPLE, SCENE, answer_of, refusal_of, settings
from .worlds import WORLDS, Counting, Speaker, record, word


@pytest.mark.parametrize("world", WORLDS)
def test_any_tape_differs_in_nothing_from_itself(world: str):
    tape = record(world)
    found = diff_tapes(tape, tape)
    assert (found.parting, found.settings, found.steps, found.shared) == (None, (), (), len(tape))


def test_times_and_ids_are_no_difference_and_settings_are_told_beside():
    found = diff_tapes(record("one speaker"), record("one speaker", split="eval", seed=7))
    assert found.parting is None
    assert [(s.field, s.first, s.second) for s in found.settings] == [("split", "train", "eval")]


def edited(tape: Tape, change: Any) -> Tape:
    """The tape with its records (as plain values) changed."""
    records = [json.loads(body) for body in tape.bodies]
    change(records)
    return Tape.of(json.dumps(r).encode() for r in records)


def _of(records: list[dict[str, Any]], t: str) -> list[dict[str, Any]]:
    return [r for r in records if r["t"] == t]


@pytest.mark.parametrize(
    ("field", "turn", "change"),
    [
        ("text.text", 0, lambda rs: _of(rs, "step")[2]["content"].update(text="other")),
        ("answer.text", 1, lambda rs: _of(rs, "step")[3]["content"].update(text="other")),
        ("reward.reward", 1, lambda rs: _of(rs, "reward")[1].update(value=99.0)),
        ("metric.reward", 0, lambda rs: _of(rs, "reward")[0].update(weight=0.0)),
        ("tokens[0]", 0, None),
        ("end.status", None, lambda rs: _of(rs, "end")[0].update(status="truncated")),
        ("end.cause", None, lambda rs: _of(rs, "end")[0].update(cause={"type": "turns"})),
        (
            "reward.late",
            None,
            lambda rs: rs.insert(-1, {"t": "reward", "tape": rs[0]["tape"], "name": "late", "value": 1}),
        ),
        ("step", 2, lambda rs: rs.__delitem__(slice(max(k for k, r in enumerate(rs) if r["t"] == "step"), -1))),
    ],
)
def test_the_first_difference_is_named_by_its_place_and_field(field: str, turn: int | None, change: Any):
    tape = record("one speaker", tokens=True)
    other = _with_other_token(tape) if change is None else edited(tape, change)
    for found in (diff_tapes(tape, other), diff_tapes(other, tape)):
        assert found.parting is not None
        wanted = {"metric.reward": ("metric.reward", "reward.reward")}.get(field, (field,))
        assert found.parting.field in wanted
        assert found.parting.turn == turn
        assert found.exit_code == 1
        assert found.parting.diff


def _with_other_token(tape: Tape) -> Tape:
    from tapereel.tapes.records import Call
    from tapereel.tapes.schema import parse_record

    bodies = list(tape.bodies)
    at = next(k for k, body in enumerate(bodies) if isinstance(parse_record(body), Call))
    call = parse_record(bodies[at])
    ids = call.completion[:]
    ids[0] += 1
    bodies[at] = call.model_copy(update={"completion": ids}).body()
    return Tape.of(bodies)


def test_tokens_are_compared_where_both_tapes_have_them():
    assert diff_tapes(record("one speaker"), record("one speaker", tokens=True)).parting is None


# Runs


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Twelve digits by a policy that is right, and eleven of them by one that always says 1."""
    made = tmp_path / "right", tmp_path / "one"
    policies = f"engine.policy={EXAMPLE}:counting", 'engine.answers=["1"]'
    for path, policy, count in zip(made, policies, (12, 11), strict=True):
        words = ["run", *SCENE, "--out", str(path), "--attempts", "2"]
        assert main([*words, *settings(policy, f"count={count}")]) == 0
    return made


def test_two_runs_are_compared_by_task(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]):
    right, one = map(str, runs)
    capsys.readouterr()
    assert answer_of(capsys, "diff", right, right)["counts"]["same"] == 12
    found = answer_of(capsys, "diff", right, one, code=1)
    with Store.open(right) as a, Store.open(one) as b:
        wanted = {
            task: (x[0].reward, y[0].reward)
            for task, x in attempts_of(a.summaries(closed=True)).items()
            for y in [attempts_of(b.summaries(closed=True)).get(task)]
            if y
        }
        lost = {task for task, (x, y) in wanted.items() if x != y}
        assert diff_runs(a, b).model_dump(mode="json") == found
    counts = found["counts"]
    assert counts == {
        "won": 0,
        "lost": len(lost),
        "changed": 0,
        "same": 11 - len(lost),
        "only_first": 1,
        "only_second": 0,
    }
    assert 0 < len(lost) < 11
    assert {task["task"] for task in found["tasks"] if task["change"] == "lost"} == lost
    assert found["mean_first"] == 1.0
    assert found["mean_second"] == pytest.approx((11 - len(lost)) / 11)
    first = found["tasks"][0]
    assert (first["change"], first["first"], first["second"], first["attempts"]) == ("lost", 1.0, 0.0, [2, 2])
    assert (first["parting"]["turn"], first["parting"]["second"]) == (0, "1")
    back = answer_of(capsys, "diff", one, right, code=1)["counts"]
    assert (back["won"], back["only_second"]) == (counts["lost"], counts["only_first"])
    named = [f"{run}:{tape}" for run, tape in zip((right, one), first["tapes"], strict=True)]
    part = answer_of(capsys, "diff", *named, code=1)["parting"]
    assert part == first["parting"]
    assert main(["diff", *named]) == 1
    out = capsys.readouterr().out
    assert "step 1, turn 0, " in out
    assert "player: said.text " in out


def test_the_same_reward_by_other_words_is_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, answer in (("a", "x"), ("b", "y"), ("again", "x")):
        more = settings(f'engine.answers=["{answer}"]', "count=2")
        assert main(["run", *SCENE, "--out", str(tmp_path / name), *more]) == 0
    a, b, again = (str(tmp_path / name) for name in ("a", "b", "again"))
    capsys.readouterr()
    found = answer_of(capsys, "diff", a, b, code=1)
    assert (found["counts"]["changed"], found["mean_first"], found["mean_second"]) == (2, 0.0, 0.0)
    assert answer_of(capsys, "diff", a, again)["counts"]["same"] == 2
    found = answer_of(capsys, "diff", a, b, "--split", "eval", "--against-split", "no such split", code=1)
    assert found["counts"]["only_first"] == 2


def test_a_run_and_two_of_its_tapes_and_tapes_that_are_files(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    right = str(runs[0])
    with Store.open(right) as store:
        tapes = list(store.tapes())
    files = []
    for k in (0, 1, 2):
        files.append(tmp_path / f"{k}.json")
        files[k].write_text(tapes[k].model_dump_json())
    capsys.readouterr()
    found = answer_of(capsys, "diff", right, tapes[0].id, tapes[0].id)
    assert (found["parting"], found["same_task"]) == (None, True)
    found = answer_of(capsys, "diff", str(files[0]), f"{right}:{tapes[2].id}", code=1)
    assert found["same_task"] is False
    assert found == answer_of(capsys, "diff", str(files[0]), str(files[2]), code=1)


def test_what_is_no_pair_is_refused(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]):
    right = str(runs[0])
    capsys.readouterr()
    for words in (
        [right],
        [right] * 4,
        [right, "x"],
        [right, f"{right}:x"],
        [f"{right}:", f"{right}:"],
        [right, "zzz", "zzz"],
        [f"{right}:0", f"{right}:0", "--split", "eval"],
    ):
        refusal_of(capsys, "diff", *words)


def test_hostile_text_stays_text_in_markdown_and_in_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    evil = "<script>alert(1)</script> | **x** `y`\n\x1b[31mred\u202e"
    paths = []
    for k, model in enumerate((word, lambda request: evil)):
        engine = ScriptedEngine(model)
        tape = asyncio.run(rollout(Speaker(), Counting, Task(private=2, bare=True), engine=engine))
        paths.append(tmp_path / f"{k}.json")
        paths[k].write_text(tape.model_dump_json())
    for flags in ([], ["--markdown"]):
        capsys.readouterr()
        assert main(["diff", *map(str, paths), *flags]) == 1
        out = capsys.readouterr().out
        assert "\x1b" not in out
        assert "\u202e" not in out
        assert "\\x1b[31mred" in out or flags
    assert "<script>" not in out
    assert "\\*\\*x\\*\\*" in out
    lines = [line for line in out.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {4}


def test_losses_are_shown_before_any_number_of_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """25 tasks won and 3 lost, of which the wins are larger: the lost ones come first, each kind with its own limit."""

    async def play(store: Store, second: bool) -> None:
        for k in range(28):
            lost = k >= 25
            said = "aaaaa" if lost != second else "aa" if lost else "a"
            task = Task(public=f"task {k}", private=2, bare=True)
            await rollout(Speaker(), Counting, task, engine=ScriptedEngine([said, said]), journal=store.writer)

    runs = [str(tmp_path / name) for name in ("one", "two")]
    for run, second in zip(runs, (False, True), strict=True):
        with Store.create(run, durability="os") as store:
            asyncio.run(play(store, second))
    found = answer_of(capsys, "diff", *runs, code=1)
    assert (found["counts"]["won"], found["counts"]["lost"]) == (25, 3)
    assert [task["change"] for task in found["tasks"]] == ["lost"] * 3 + ["won"] * 25
    assert main(["diff", *runs, "--markdown"]) == 1
    out, err = capsys.readouterr()
    shown = [line.split("|")[2].strip() for line in out.splitlines() if line.startswith("| ")]
    assert [word for word in shown if word in ("won", "lost")] == ["lost"] * 3 + ["won"] * 20
    assert " 5 more " in out
    assert "diff: 28/28" in err


def test_an_id_is_found_by_looking_at_the_ids_that_start_so_alone(tmp_path: Path):
    """Whatever a run holds: SQLite is stopped by the index where the prefix ends."""
    with Store.create(tmp_path / "run", durability="os") as store:
        for _ in range(3):
            tape = asyncio.run(rollout(Speaker(), Counting, 1, engine=ScriptedEngine(["a"]), journal=store.writer))
        store.refresh()
        steps: list[int] = []
        store.index._db.set_progress_handler(lambda: steps.append(1), 1)
        assert store.index.ids(tape.id) == [tape.id]
        few = len(steps)
        more = ", ".join(f"('zz{k}', 0, '')" for k in range(3000))
        store.index._db.execute(f"insert into tapes (id, begun, task_hash) values {more}")
        steps.clear()
        assert store.index.ids(tape.id) == [tape.id]
        assert len(steps) < few + 50
        store.index._db.set_progress_handler(None, 1)
