"""Out and in again: what a format holds comes back, and what it can't is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from tapereel.cli import main
from tapereel.cli.console import Exit
from tapereel.finetune.interchange import FORMATS, BadImport, read, write
from tapereel.finetune.interchange.formats import IMPORTS
from tapereel.tapes import ToolCalls, ToolResults
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store, verify

from .world import lines, record, tapes_of


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("world") / "run")


def there_and_back(run: Path, tmp_path: Path, format: str, ending: str = ".jsonl") -> Path:
    write(tapes_of(run), tmp_path / f"out{ending}", format)
    read(tmp_path / f"out{ending}", tmp_path / "back", format)
    return tmp_path / "back"


def nameless(value: Any) -> Any:
    """Without the ids that every tape and call has of its own."""
    if isinstance(value, dict):
        return {k: nameless(v) for k, v in value.items() if k not in ("tape", "id")}
    return [nameless(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("format", IMPORTS)
def test_what_came_in_goes_out_as_it_was(run: Path, tmp_path: Path, format: str) -> None:
    back = there_and_back(run, tmp_path, format)
    write(tapes_of(back), tmp_path / "again.jsonl", format)
    assert nameless(lines(tmp_path / "again.jsonl")) == nameless(lines(tmp_path / "out.jsonl"))
    assert lines(tmp_path / "out.jsonl")


@pytest.mark.parametrize("format", IMPORTS)
def test_imported_tapes_are_ordinary_tapes(run: Path, tmp_path: Path, format: str) -> None:
    back = there_and_back(run, tmp_path, format)
    assert verify(back).exit_code == 0
    with Store.open(back) as store:
        assert store.books().closes
        assert store.books().open == 0
    assert main(["show", str(back)]) == Exit.HOLDS


def test_calls_of_tools_come_back_as_calls(run: Path, tmp_path: Path) -> None:
    tape = next(t for t in tapes_of(there_and_back(run, tmp_path, "sft")) if t.turns == 2 and t.begin.split == "demo")
    (first, last), results = tape.actions, [s for s in tape if isinstance(s, ToolResults)]
    assert isinstance(first, ToolCalls)
    assert [(c.name, c.arguments) for c in first.calls] == [("roll", {"sides": 6})]
    assert [r.content for r in results[0].results] == ["5"]
    assert str(last) == "It is five."
    assert [m["role"] for m in tape.messages()][:2] == ["system", "user"]


@pytest.mark.parametrize("format", IMPORTS)
def test_datasets_reads_both_kinds_of_file(run: Path, tmp_path: Path, format: str) -> None:
    cache = str(tmp_path / "cache")
    for ending, reader in ((".jsonl", Dataset.from_json), (".parquet", Dataset.from_parquet)):
        write(tapes_of(run), tmp_path / f"set{ending}", format)
        found: Any = reader(str(tmp_path / f"set{ending}"), cache_dir=cache)
        assert len(found) == len(lines(tmp_path / "set.jsonl"))
        assert set(found.column_names) == set(lines(tmp_path / "set.jsonl")[0])
    read(tmp_path / "set.jsonl", tmp_path / "a", format)
    read(tmp_path / "set.parquet", tmp_path / "b", format)
    for one, other in zip(tapes_of(tmp_path / "a"), tapes_of(tmp_path / "b"), strict=True):
        assert [call.model_dump(exclude={"tape", "call", "at", "base"}) for call in one.calls] == [
            call.model_dump(exclude={"tape", "call", "at", "base"}) for call in other.calls
        ]
        assert one.reward == other.reward


def test_the_best_is_preferred_to_the_worst(run: Path, tmp_path: Path) -> None:
    tapes = tapes_of(run)
    done = write(tapes, tmp_path / "pairs.jsonl", "preference")
    rewards = {g: [t.reward for t in tapes if t.begin.group == g] for g in ("g0", "g1")}
    uneven = {g: found for g, found in rewards.items() if len(set(found)) > 1}
    pairs = lines(tmp_path / "pairs.jsonl")
    assert {pair["group"]: (pair["score_chosen"], pair["score_rejected"]) for pair in pairs} == {
        g: (max(found), min(found)) for g, found in uneven.items()
    }  # type: ignore[type-var]
    assert pairs
    assert done.tapes + sum(done.left_out.values()) == len(tapes)


def test_unknown_preferences_are_not_rewards(tmp_path: Path) -> None:
    row = {
        "prompt": [{"role": "user", "content": "?"}],
        "chosen": [{"role": "assistant", "content": "yes"}],
        "rejected": [{"role": "assistant", "content": "no"}],
    }
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    read(tmp_path / "p.jsonl", tmp_path / "run", "preference")
    chosen, rejected = tapes_of(tmp_path / "run")
    found = [(r.name, r.value) for tape in (chosen, rejected) for r in tape.rewards]
    assert found == [("preferred", 1.0), ("preferred", 0.0)]
    assert chosen.begin.group == rejected.begin.group


def test_the_command_line_says_what_is_lost_and_left_out(run: Path, tmp_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "pairs.jsonl")
    assert main(["export", str(run), out, "--format", "preference", "--json"]) == Exit.HOLDS
    said = capsys.readouterr()
    left_out = json.loads(said.out)["left_out"]
    assert left_out["in no group"] == 1
    assert all(why in said.err for why in left_out)
    assert all(sentence in said.err for sentence in FORMATS["preference"].loses)
    out = str(tmp_path / "shown.jsonl")
    assert main(["export", str(run), out, "--format", "sft"]) == Exit.HOLDS
    capsys.readouterr()
    rows = len(lines(tmp_path / "shown.jsonl"))
    words = ["import", out, str(tmp_path / "in"), "--format", "sft", "--split", "demo", "--json"]
    assert main(words) == Exit.HOLDS
    assert json.loads(capsys.readouterr().out)["tapes"] == rows
    assert {tape.begin.split for tape in tapes_of(tmp_path / "in")} == {"demo"}
    assert main(words) == Exit.HOLDS, "into a run that is there"
    assert json.loads(capsys.readouterr().out)["there"] == len(tapes_of(tmp_path / "in")) == rows


def test_what_is_there_stays(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine")
    with pytest.raises(UsageError, match=r"there\.jsonl"):
        write([], tmp_path / "there.jsonl", "sft")
    with pytest.raises(UsageError, match="csv"):
        write([], tmp_path / "x.csv", "sft")
    assert main(["export", str(run), str(tmp_path / "x.jsonl"), "--format", "sft", "--tokenizer", "t"]) == Exit.USAGE


def test_reading_a_file_again_adds_only_what_is_new_in_it(run: Path, tmp_path: Path, capsys: Any) -> None:
    """By content and how often: of two equal rows both are kept, once."""
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    other = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "no"}]}
    file = tmp_path / "rows.jsonl"

    def told(*rows: Any) -> tuple[int, int]:
        file.write_text("".join(json.dumps(one) + "\n" for one in rows))
        done = read(file, tmp_path / "into", "sft")
        return done.tapes, done.there

    assert [told(row, row), told(row, row), told(row, other, row, row), told(other, row)] == [
        (2, 0),
        (0, 2),
        (2, 2),
        (0, 2),
    ]
    assert main(["import", str(file), str(tmp_path / "into"), "--format", "sft"]) == Exit.HOLDS
    assert re.search(r"\b0\b.*\b2\b.*\bsft\b.*\b2\b", capsys.readouterr().out)
    assert read(file, tmp_path / "into", "sft", split="demo").tapes == 2, "in another split it is another tape"
    assert len(tapes_of(tmp_path / "into")) == 6


@pytest.mark.parametrize("format", IMPORTS)
def test_no_format_doubles_a_run(run: Path, tmp_path: Path, format: str) -> None:
    back = there_and_back(run, tmp_path, format)
    before = len(tapes_of(back))
    again = read(tmp_path / "out.jsonl", back, format)
    assert (again.tapes, again.there, len(tapes_of(back))) == (0, before, before)


@pytest.mark.parametrize(
    ("format", "row", "said"),
    [
        ("sft", {"prompt": "The sky is", "completion": " blue."}, [("The sky is", " blue.")]),
        (
            "sft",
            {
                "prompt": [
                    {"role": "user", "content": "hi"},
                    {"role": "assistant", "content": "yo"},
                    {"role": "user", "content": "so?"},
                ],
                "completion": [{"role": "assistant", "content": "so."}],
            },
            [("so?", "so.")],
        ),
        (
            "preference",
            {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
            [("The sky is", " blue."), ("The sky is", " green.")],
        ),
    ],
)
def test_the_standard_forms_of_trl_are_read(tmp_path: Path, format: str, row: Any, said: Any) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(row).encode())
    read(tmp_path / "rows.jsonl", tmp_path / "run", format)
    tapes = tapes_of(tmp_path / "run")
    assert [[(c.messages[-1]["content"], c.reply["content"]) for c in tape.calls] for tape in tapes] == [
        [pair] for pair in said
    ], "only the completion is to be learned"
    if format == "preference":
        assert [tape.reward for tape in tapes] == [1.0, 0.0]
        assert len({tape.begin.group for tape in tapes}) == 1


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a"},
        {"completion": "a"},
        {"text": "a"},
        {"messages": [{"role": "assistant", "content": "a"}], "prompt": "a", "completion": "b"},
    ],
)
def test_a_row_of_neither_form_says_which_there_are(tmp_path: Path, row: Any) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(BadImport, match=r"`messages`.*`prompt`.*`completion`"):
        read(tmp_path / "rows.jsonl", tmp_path / "run", "sft")
    assert not (tmp_path / "run").exists()
