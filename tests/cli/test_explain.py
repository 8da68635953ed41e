"""`tapereel explain`: what it says of a token is what the tape, the ledger and the recipe say."""

from __future__ import annotations

import math
import re
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.finetune import rows
from tapereel.tapes.store import Store

from .lab import NEXT, SCENE, WORLD, answer_of, refusal_of, settings
from .world import EXAMPLE


def explained(capsys, run: Path, *words: str) -> list[dict[str, Any]]:
    return answer_of(capsys, "explain", str(run), *words)["tapes"]


def last_update(run: Path) -> Any:
    with Store.open(run) as store:
        return [stored.record for stored in store.run_records("use")][-1]


def own(tape: dict[str, Any]) -> list[dict[str, Any]]:
    return [token for row in tape["rows"] for token in row["tokens"] if token["own"]]


def test_advantages_are_those_of_the_groups_and_weights_those_of_the_ledger(trained: Path, capsys):
    use = last_update(trained)
    found = explained(capsys, trained, *use.info["tapes"])
    groups: dict[str, list[float]] = defaultdict(list)
    for tape in found:
        groups[tape["tape"]["group"]].append(tape["tape"]["reward"])
    assert any(len(set(rewards)) > 1 for rewards in groups.values())
    for tape in found:
        rewards = groups[tape["tape"]["group"]]
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        wanted = 0.0 if std == 0 else (tape["tape"]["reward"] - mean) / (std + 1e-9)
        assert [token["advantage"] for token in own(tape)] == pytest.approx([wanted] * len(own(tape)))
        assert sorted(tape["group_rewards"]) == sorted(rewards)
    weights = [token["weight"] for tape in found for token in own(tape)]
    assert sum(weights) == pytest.approx(1.0)  # token mean: 1/T each
    items = {(name, call): weight for name, call, _, _, weight in use.items}
    assert {(tape["tape"]["id"], token["call"]): token["weight"] for tape in found for token in own(tape)} == items


def test_tokens_are_those_of_the_tape(trained: Path, capsys):
    name = last_update(trained).info["tapes"][0]
    (found,) = explained(capsys, trained, name)
    with Store.open(trained) as store:
        tape = store.tape(name)
    (row,) = rows(tape)
    (line,) = found["rows"]
    (call,) = tape.calls
    assert [token["id"] for token in line["tokens"]] == row.input_ids.tolist()
    assert [token["position"] for token in own(found)] == row.own.tolist()
    assert [token["logprob"] for token in own(found)] == pytest.approx(list(call.logprobs or ()))
    assert {token["version"] for token in own(found)} == {call.spans[0][0]}
    assert {token["step"] for token in own(found)} == {1}
    assert {token["reward"] for token in own(found)} == {tape.reward}
    text = "".join(token["text"] for token in line["tokens"])
    assert text.startswith(f"<|user|>{tape.task}<|end|><|assistant|>")
    assert (found["forwarded"], found["repeated"], found["own"], found["unlabelled"]) == (len(row), 0, 1, 0)
    assert found["verdict"].startswith("trained on by update 2")
    assert re.search(r"; \d+ tokens? of it had a weight in the gradient of update 2", found["verdict"])
    assert found["uses"][-1] | {"trained": 1} == {
        "lineage": call.spans[0][0].split(":")[0],
        "update": 2,
        "phase": "rl",
        "recipe": "grpo",
        "trained": 1,
        "skipped": None,
    }


def test_without_a_name_the_last_tapes_of_the_last_update_are_chosen(trained: Path, capsys):
    found = explained(capsys, trained, "--n", "4")
    assert [tape["tape"]["id"] for tape in found] == last_update(trained).info["tapes"][-4:]
    assert len(explained(capsys, trained)) == 3
    assert re.search(r"--n: .*\b0\b.*\b1\b", refusal_of(capsys, "explain", str(trained), "--n", "0"))


def test_a_held_out_tape_says_so(trained: Path, capsys):
    with Store.open(trained) as store:
        name = store.summaries(split="eval-after-greedy")[0].id
    (found,) = explained(capsys, trained, name)
    assert found["verdict"] == "held out: of split 'eval-after-greedy'"
    assert (found["uses"], own(found)[0]["advantage"], own(found)[0]["weight"]) == ([], None, None)
    assert own(found)[0]["temperature"] == 0


def test_people_read_a_table(trained: Path, capsys):
    assert main(["explain", str(trained), "--n", "1"]) == 0
    folded = capsys.readouterr().out
    assert "compared with its group of 8, whose rewards were" in folded
    assert "<|assistant|>" in folded
    assert main(["explain", str(trained), "--n", "1", "--context"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > len(folded.splitlines())


def test_a_row_that_split_says_why_and_what_it_costs(model: str, tmp_path: Path, capsys):
    scene = ("--agent", f"{WORLD}:changes_its_mind", "--env", f"{EXAMPLE}:Digits", "--tasks", f"{WORLD}:few")
    answer_of(capsys, "run", *scene, "--model", model, "--out", str(tmp_path / "r"), "--set", "split=train")
    found = explained(capsys, tmp_path / "r", "--n", "1")[0]
    first, second = found["rows"]
    assert first["split"] is None
    assert second["split"]
    assert found["repeated"] == second["repeated"]
    assert found["forwarded"] == len(first["tokens"]) + len(second["tokens"])
    assert found["verdict"] == "unused: no update has taken it"
    assert main(["explain", str(tmp_path / "r"), "--n", "1"]) == 0
    assert f"a new row, {second['split']}" in " ".join(capsys.readouterr().out.split())


def test_text_of_a_script_has_rows_once_it_has_a_tokenizer(model: str, tmp_path: Path, capsys):
    answer_of(capsys, "run", *SCENE, *settings(f"engine.policy={NEXT}", "count=1"), "--out", str(tmp_path / "r"))
    assert main(["explain", str(tmp_path / "r"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "tokenizer" in err
    assert '"rows": []' in out
    assert "(engine 'scripted')" in out
    assert "tokenizer" in out
    (found,) = explained(capsys, tmp_path / "r", "--tokenizer", model)
    assert [(token["text"], token["logprob"], token["version"]) for token in own(found)] == [
        ("1", None, None),
        ("<|end|>", None, None),
    ]


def test_a_tokenizer_of_another_model_is_not_used(trained: Path, tmp_path: Path, capsys):
    from tapereel.agents.engines.embedded.tiny_model import char_tokenizer

    char_tokenizer("9876543210").save_pretrained(tmp_path)
    assert main(["explain", str(trained), "--n", "1", "--tokenizer", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert str(tmp_path) in err
    assert '"text": null' in out


def test_without_the_recipe_advantages_are_not_made_up(trained: Path, tmp_path: Path, capsys):
    shutil.copytree(trained, tmp_path / "r")
    (tmp_path / "r" / "recipes.json").unlink()
    (found,) = explained(capsys, tmp_path / "r", "--n", "1")
    assert own(found)[0]["advantage"] is None
    assert own(found)[0]["weight"] > 0
    assert "recipes.json" in found["notes"][0]
    (tmp_path / "r" / "recipes.json").write_text("[]")
    assert "recipes.json" in refusal_of(capsys, "explain", str(tmp_path / "r"), "--n", "1", code=1)


def test_nothing_that_a_model_wrote_acts_on_the_terminal(tmp_path: Path, capsys):
    from tapereel.agents.engines.embedded.tiny_model import char_tokenizer

    char_tokenizer("0123456789\x1b[m\n").save_pretrained(tmp_path / "t")
    script = settings('engine.answers=["\\u001b[31m\\n"]', f"engine.tokenizer={tmp_path / 't'}", "count=1")
    answer_of(capsys, "run", *SCENE, *script, "--out", str(tmp_path / "r"))
    assert main(["explain", str(tmp_path / "r")]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[31m" not in shown
    assert "\\x1b" in shown
    assert "\\n" in shown


def test_what_is_not_there_is_refused(trained: Path, tmp_path: Path, capsys):
    assert "'zz'" in refusal_of(capsys, "explain", str(trained), "zz")
    assert str(tmp_path) in refusal_of(capsys, "explain", str(tmp_path))
