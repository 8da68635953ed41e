"""The lab: a past update under other recipes. The run's own comes out as it was recorded, bit for bit."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.finetune import History
from tapereel.finetune.inspect.lab import Experiment, LabReport, lab
from tapereel.finetune.loop.history import apply_again
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import checkpoints
from tapereel.tapes.errors import UsageError
from tapereel.tapes.records import Use
from tapereel.tapes.store import Store

from .lab import MICRO, SCENE, settings

LAST = 2


@pytest.fixture(scope="module")
def telling(trained: Path) -> int:
    """An update in which some advantage isn't 0."""
    for experiment in lab(trained, ["own"], range(LAST + 1)).experiments:
        if experiment.lines[0].mean_advantage:
            return experiment.update
    pytest.fail("no update of the run has an advantage: give it larger groups")


def uses_of(path: Path) -> list[Use]:
    with Store.open(path, cache=False) as store:
        return [stored.record for stored in store.run_records("use")]


def one(report: LabReport) -> Experiment:
    (experiment,) = report.experiments
    return experiment


def test_the_run_s_own_recipe_comes_out_as_recorded_at_every_update(trained: Path, telling: int) -> None:
    uses = {use.update: use for use in uses_of(trained)}
    report = lab(trained, ["own"], list(uses))
    assert [e.update for e in report.experiments] == sorted(uses) == list(range(LAST + 1))
    for experiment in report.experiments:
        (line,) = experiment.lines
        use = uses[experiment.update]
        assert line.recorded is True
        assert (line.loss, line.grad_norm) == (use.info["loss"], use.info["grad_norm"])
        assert line.tokens == sum(end - start for _, _, start, end, _ in use.items)
        assert line.skipped == use.info["skipped"]
        assert (line.gained, line.lost) == ((), ())
        assert len(line.pulls) == experiment.tokens
        if experiment.update == telling:
            assert line.cosine == pytest.approx(1.0)
            assert sum(map(abs, line.pulls)) == pytest.approx(1.0)


OPTIONS: list[dict[str, object]] = [
    {"pack": True, "micro_tokens": 24},
    {"micro_tokens": 3},
    {"autocast": "bfloat16", "gradient_checkpointing": True},
    {"grad_clip": 1e-3, "weight_decay": 0.1, "ema": 0.5},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: ",".join(options))
def test_it_comes_out_as_recorded_with_every_option_of_the_trainer(
    model: str, tmp_path: Path, options: dict[str, object]
) -> None:
    more = settings(*MICRO, "loop.groups=8", "loop.group_size=8", f"loop.optimiser={json.dumps(options)}")
    assert main(["train", *SCENE, "--model", model, "--out", str(tmp_path / "run"), *more]) in (0, 1)
    lines = [experiment.lines[0] for experiment in lab(tmp_path / "run", ["own"], range(LAST + 1)).experiments]
    assert [line.recorded for line in lines] == [True] * (LAST + 1)


def test_a_recipe_with_all_signs_turned_pulls_the_other_way(trained: Path, telling: int) -> None:
    with Store.open(trained, cache=False) as store:
        (name,) = {r.name for tape in store.tapes(split="train") for r in tape.rewards if r.weight}
    plain = get_recipe("grpo")
    turned = plain.but(reward={"components": {name: -1.0}})
    other = plain.but(reward={"components": {name: 1.0}})
    first, flipped, same = one(lab(trained, [plain, turned, other], [telling])).lines
    assert flipped.cosine == pytest.approx(-1.0, abs=1e-6)
    assert flipped.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)
    assert flipped.mean_advantage == pytest.approx(first.mean_advantage)
    assert flipped.pulls == pytest.approx([-p for p in first.pulls], abs=1e-7)
    assert same.pulls == first.pulls
    assert same.cosine == pytest.approx(1.0)


def test_what_other_recipes_change_is_named(trained: Path, telling: int) -> None:
    experiment = one(
        lab(
            trained,
            ["grpo", "reinforce_plain", get_recipe("grpo", {"weigh": {"kind": "episode"}})],
            [telling],
            tokens=3,
        )
    )
    first, plain, episode = experiment.lines
    assert first.dropped == plain.dropped == experiment.tokens - first.tokens
    assert plain.cosine is not None
    assert -1 <= plain.cosine < 0.999
    assert plain.clipped is None
    assert first.clipped == 0
    assert first.recorded is True, "it is the run's own, by another name"
    assert episode.recorded is None
    assert episode.pulls == pytest.approx(first.pulls), "all episodes are of one length here"
    for shift in (*plain.gained, *plain.lost):
        assert (abs(shift.pull) > abs(shift.first)) == (shift in plain.gained)
        assert shift.text
    assert 0 < len(plain.gained) <= 3
    with Store.open(trained, cache=False) as store:
        shift = plain.gained[0]
        assert (store.tape(shift.tape).call(shift.call).completion or ())[shift.offset] == shift.id


def test_gradients_are_those_of_the_pulls(trained: Path, telling: int) -> None:
    """Where a whole recipe is scaled, gradient and loss scale along, and shares stay as they are."""
    with Store.open(trained, cache=False) as store:
        (name,) = {r.name for tape in store.tapes(split="train") for r in tape.rewards if r.weight}
    base = get_recipe("grpo", {"baseline": {"kind": "mean"}})
    thrice = base.but(reward={"components": {name: 3.0}})
    first, scaled = one(lab(trained, [base, thrice], [telling])).lines
    assert scaled.grad_norm == pytest.approx(3 * (first.grad_norm or math.nan), rel=1e-5)
    assert scaled.pulls == pytest.approx(first.pulls, abs=1e-7)


def test_the_lab_leaves_the_run_as_it_is(trained: Path) -> None:
    def state() -> list[tuple[str, int, int]]:
        return sorted(
            (str(f), f.stat().st_size, f.stat().st_mtime_ns)
            for f in trained.rglob("*")
            if f.is_file() and "index.sqlite" not in f.name
        )

    before = state()
    lab(trained, ["own", "rloo"], [0, LAST])
    assert state() == before
    assert one(lab(trained, ["own", "rloo"])).update == LAST, "the loop's last, where none is named"


def test_what_isn_t_there_is_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"\b{LAST + 1}\b.*\b0\b.*\b{LAST}\b"):
        lab(trained, ["own"], [LAST + 1])
    with pytest.raises(UsageError, match="'grop'"):
        lab(trained, ["grop"])
    with pytest.raises(UsageError, match="critic"):
        lab(trained, ["ppo"])
    Store.create(tmp_path / "empty").close()
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "empty"))):
        lab(tmp_path / "empty", ["own"])


def test_the_verb_prints_a_table_or_json(
    trained: Path, telling: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("recipe: grpo\nchanges:\n  weigh:\n    kind: episode\n")
    words = [
        "explain",
        str(trained),
        "--recipe",
        str(recipe),
        "--update",
        str(telling),
    ]
    assert main([*words, "--json"]) == 0
    found: Any = json.loads(capsys.readouterr().out)
    assert found["recipes"] == ["own", "mine"]
    assert found["experiments"][0]["lines"][0]["recorded"] is True
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "yes" in out
    assert f"update {telling} (rl)" in out
    assert "computing updates under other recipes: 1/1" in err


def test_an_update_s_weights_come_from_the_nearest_checkpoint(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[int] = []

    def counted(history: History, epochs: Sequence[Use]) -> Any:
        applied.append(epochs[0].update)
        return apply_again(history, epochs)

    for module in ("loop.history", "inspect.lab"):
        monkeypatch.setattr(importlib.import_module(f"tapereel.finetune.{module}"), "apply_again", counted)
    assert [c.update for c in checkpoints(trained / "checkpoints")] == [2, 3]
    lab(trained, ["own"], [2])
    assert applied == []
    lab(trained, ["own"], [1])
    assert applied == [0]
    lab(trained, ["own"], [0, 1, 2])
    assert applied == [0, 0], "from update 0 to 1, then the checkpoint"
