"""`tapereel train`: the loop in a directory, measured from outside, imitating first where asked, and going on after a
kill."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.cli import main
from tapereel.envs import Outcome
from tapereel.envs.load_named import load_named
from tapereel.finetune import TrainConfig
from tapereel.finetune.loop import Policy
from tapereel.finetune.recipes import get_recipe, read_recipes
from tapereel.finetune.trainer import checkpoints
from tapereel.tapes.common import load_config
from tapereel.tapes.records import Tokens, Use
from tapereel.tapes.store import Store, read_metrics

from .lab import DEADLY, MICRO, SCENE, WORLD, answer_of, killed, refusal_of, settings
from .world import EXAMPLE, Digits


def train_words(model: str, out: Path, *more: str, scene: tuple[str, ...] = SCENE) -> tuple[str, ...]:
    return ("train", *scene, "--model", model, "--out", str(out), *settings(*MICRO, *more))


def published(run: Path) -> dict[str, str]:
    """Version -> digest of the weights."""
    with Store.open(run) as store:
        return {stored.record.version: stored.record.digest for stored in store.run_records("publish")}


def test_a_run_leaves_what_its_reader_needs(trained: Path):
    found = {path.name for path in trained.iterdir()}
    assert {
        "config.yaml",
        "results.json",
        "recipes.json",
        "metrics.jsonl",
        "checkpoints",
        "tapes",
        "pins.json",
    } <= found
    assert load_config(TrainConfig, trained / "config.yaml").loop.groups == 8
    assert read_recipes(trained)["rl"] == get_recipe("grpo")
    lines = read_metrics(trained / "metrics.jsonl")
    assert [line["update"] for line in lines if line["phase"] == "rl"] == [1, 2, 3]
    assert [line["update"] for line in lines if line["phase"] == "evaluation"] == [0, 1, 2, 3]
    with Store.open(trained) as store:
        books = store.books()
        splits = {summary.split for summary in store.summaries()}
    assert books.closes
    assert books.tokens["trained"] > 0
    assert splits == {"train"} | {
        f"eval-{when}-{how}"
        for when in ("before", "update-000001", "update-000002", "after")
        for how in ("sampled", "greedy")
    }


def test_held_out_tasks_are_not_trained_on_and_their_tapes_have_the_version_they_measure(trained: Path):
    lineage = json.loads((trained / "results.json").read_text())["lineage"]
    with Store.open(trained) as store:
        train = {summary.task_hash for summary in store.summaries(split="train")}
        for when, version in (("before", 0), ("update-000001", 1), ("update-000002", 2), ("after", 3)):
            tapes = list(store.tapes(split=f"eval-{when}-sampled"))
            assert len(tapes) == 4
            versions = {span[0] for tape in tapes for call in tape.calls for span in call.spans}
            assert versions == {f"{lineage}:{version}"}
            assert not train & {tape.begin.task_hash for tape in tapes}


@pytest.mark.ledger("F86", "T05", "T53")
def test_measuring_changes_nothing(model: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secrets, "token_hex", lambda n: "00" * n)  # seeds follow from the lineage
    sync = ("loop.max_lag=0", "loop.groups=4", "loop.group_size=6")
    often = answer_of(capsys, *train_words(model, tmp_path / "often", *sync, "evaluation.every=1"))
    never = answer_of(capsys, *train_words(model, tmp_path / "never", *sync, "evaluation.every=null"))
    assert published(tmp_path / "often") == published(tmp_path / "never")
    assert len(set(published(tmp_path / "often").values())) > 1
    assert sorted(often["held_out"]["every"]) == ["1", "2"]
    assert never["held_out"]["every"] == {}
    assert often["held_out"]["after"] == never["held_out"]["after"]


class Forgetful(Digits):
    """Scores none of its first six episodes that want an even digit."""

    left = 6

    async def step(self, action: Any) -> Outcome:
        outcome = await super().step(action)
        if int(self.wanted) % 2 or not Forgetful.left:
            return outcome
        Forgetful.left -= 1
        return Outcome(terminated=True)


def test_each_line_of_the_table_is_about_the_same_tasks(model: str, tmp_path: Path, capsys):
    scene = (*SCENE[: SCENE.index("--env") + 1], f"{__name__}:Forgetful", *SCENE[SCENE.index("--env") + 2 :])
    more = ("evaluation.attempts=3", "evaluation.k=[1,3]", "loop.updates=2")
    assert main(train_words(model, tmp_path / "r", *more, scene=scene)) == 0
    printed = capsys.readouterr().out
    assert re.search(r"the [23] of 4 held-out tasks x 3 that were scored twice", " ".join(printed.split())), printed
    rows = re.findall(r"(twice|pass@\d) +(\d\.\d+) +(\d\.\d+) +([+-]\d\.\d+)", printed)
    assert [name for name, *_ in rows] == ["twice", "pass@1", "pass@3"]
    for _, before, after, change in rows:
        assert float(after) - float(before) == pytest.approx(float(change), abs=0.0011)


def test_the_summary_is_that_of_the_run(model: str, tmp_path: Path, capsys):
    found = answer_of(capsys, *train_words(model, tmp_path / "r", "evaluation.fraction=0", "loop.recipe=reinforce"))
    assert (found["recipe"], found["updates"], found["books_close"]) == ("reinforce", 3, True)
    assert found["held_out"] == {"n": 0, "tasks": 0, "every": {}, "before": None, "after": None}
    assert Path(found["model"], "config.json").is_file()
    rewards = [line["reward"] for line in read_metrics(tmp_path / "r" / "metrics.jsonl")]
    assert found["reward"] == {"first": rewards[0], "last": rewards[2]}, "the means of no common update"
    words = ("run", *SCENE, "--model", found["model"], "--set", "count=3", "--out", str(tmp_path / "e"))
    again = answer_of(capsys, *words)
    assert again["usable"] == 3


def test_a_killed_run_goes_on_where_it_was(model: str, tmp_path: Path, capsys):
    out = tmp_path / "r"
    # 4 held-out episodes, then groups of 4: the kill falls into the loop, behind its first updates.
    words = train_words(model, out, "loop.updates=6", scene=DEADLY)
    killed(38, *words)
    lineage = json.loads((out / "results.json").read_text())["lineage"]
    with Store.open(out) as store:
        uses = [(use.update, use.items) for use in store.ledger(lineage).uses]
        closed = {summary.id for summary in store.summaries(closed=True)}
    assert 0 < len(uses) < 6
    found = answer_of(capsys, *words, "--resume")
    assert (found["updates"], found["books_close"], found["lineage"]) == (6, True, lineage)
    with Store.open(out) as store:
        after = store.ledger(lineage).uses
        assert closed <= {summary.id for summary in store.summaries(closed=True)}
    assert [use.update for use in after] == list(range(6))
    assert [(use.update, use.items) for use in after][: len(uses)] == uses
    assert checkpoints(out / "checkpoints")[-1].update == 6
    assert answer_of(capsys, *words, "--resume")["updates"] == 6


def test_a_run_whose_own_update_does_not_count_is_no_success(
    model: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    """A later lead recorded the update first, and no check of the lease has shown it."""
    out, append = tmp_path / "out", Store.append_layer

    def late(store: Store, record: Any) -> None:
        if isinstance(record, Use) and record.update == 1 and record.lead is None:
            with Store.open(out, write=True) as other:
                other.writer.append(record.model_copy(update={"lead": 2}).body())
        append(store, record)

    monkeypatch.setattr(Store, "append_layer", late)
    said = refusal_of(capsys, *train_words(model, out), code=1)
    assert re.search(r"\b2 records of lead 1\b.*\bupdate 1\b", said)


def test_every_version_that_resume_applies_again_has_a_checkpoint(model: str, tmp_path: Path, capsys):
    """Without it, no one could check what that version sampled: here the kill came before two checkpoints."""
    out = tmp_path / "r"
    more = ("loop.updates=6", "loop.checkpoint_every=1", "loop.keep_checkpoints=null")
    words = train_words(model, out, *more, scene=DEADLY)
    killed(38, *words)
    newest = checkpoints(out / "checkpoints")[-2:]
    assert len(newest) == 2
    for one in newest:
        shutil.rmtree(one.path)
    found = answer_of(capsys, *words, "--resume")
    assert found["updates"] == 6
    assert [one.update for one in checkpoints(out / "checkpoints")] == [1, 2, 3, 4, 5, 6]
    verdicts = answer_of(capsys, "replay", "model", str(out))["verdicts"]
    assert {verdict["outcome"] for verdict in verdicts} == {"verified"}


def test_a_used_directory_another_configuration_and_another_model_are_refused(model: str, tmp_path: Path, capsys):
    base = tmp_path / "base"
    shutil.copytree(model, base)
    words = train_words(str(base), tmp_path / "r", "loop.updates=1")
    answer_of(capsys, *words)
    assert "`--resume`" in refusal_of(capsys, *words)
    said = refusal_of(capsys, *words, "--resume", "--set", "loop.optimiser.lr=0.5")
    assert "loop.optimiser.lr" in said
    tiny_model(char_tokenizer("0123456789"), "micro", seed=1, context=32).save_pretrained(str(base))
    assert str(base) in refusal_of(capsys, *words, "--resume", code=1)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("evaluation.fraction=0.00001",), "evaluation.fraction"),
        ((f"evaluation.tasks={EXAMPLE}:tasks",), "held-out"),
        (("loop.recipe=grop",), "'grop'"),
        (("engine.kind=scripted",), "'embedded', 'vllm'"),
        (("loop.group_sise=3",), "loop.group_size"),
        (("warm.updates=3",), "warm.tapes"),
        (("loop.forks={}",), "loop.forks"),
        (("loop.demonstrations=3",), "loop.demonstrations"),
        (("loop.rollouts=2", "loop.minibatches=2"), "minibatches=2"),
        (("loop.sampling.top_p=0.9",), "top_p=0.9"),
        (("loop.sampling.temperature=0",), "temperature=0"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_is_written(
    model: str, more: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(list(train_words(model, tmp_path / "r", *more))) in (1, 64)
    assert says in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_held_out_tasks_of_their_own(model: str, tmp_path: Path, capsys):
    words = train_words(model, tmp_path / "r", "loop.updates=1", f"evaluation.tasks={WORLD}:by_other")
    assert "'by_other'" in refusal_of(capsys, *words)
    row = f"{WORLD}:to_task"
    words = train_words(
        model,
        tmp_path / "r",
        "loop.updates=1",
        "tasks=[1, 2]",
        f"task_row={row}",
        'evaluation.tasks=["7"]',
        f"evaluation.task_row={row}",
    )
    assert main(list(words)) in (0, 1), "one update of a few episodes may find nothing to learn"
    assert "all are accounted for" in capsys.readouterr().out
    with Store.open(tmp_path / "r") as store:
        assert [tape.task for tape in store.tapes(split="eval-after-sampled")] == ["7"]
        assert {tape.task for tape in store.tapes(split="train")} == {"1", "2"}


# Warm starts


@pytest.fixture
def demonstrations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Tapes of text, right for half of the tasks."""
    out = tmp_path / "demos"
    words = ("run", *SCENE, "--set", f"engine.policy={WORLD}:half_right", "--set", "split=demo", "--out", str(out))
    assert answer_of(capsys, *words)["reward"] == 0.5
    return out


def test_tapes_of_another_run_are_imitated_first(model: str, demonstrations: Path, tmp_path: Path, capsys):
    warm = (f"warm.tapes={demonstrations}", "warm.updates=4", "warm.batch=8", "warm.min_reward=1.0")
    out = tmp_path / "r"
    found = answer_of(capsys, *train_words(model, out, *warm))
    assert (found["updates"], found["books_close"]) == (3, True)
    losses = [line["loss"] for line in read_metrics(out / "metrics.jsonl") if line["phase"] == "sft"]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    with Store.open(out) as store, Store.open(demonstrations) as source:
        demos = list(store.tapes(split="demo"))
        books = store.books()
        assert len(demos) == 50
        assert {tape.reward for tape in demos} == {1.0}
        assert all(tape.digest == source.tape(tape.id).digest for tape in demos)
        assert all(sum(isinstance(layer, Tokens) for layer in tape.layers) == 1 for tape in demos)
    assert books.authored == 2 * 50  # a digit and the id that ends the turn
    assert books.authored_trained > 0
    shutil.rmtree(demonstrations)
    again = answer_of(capsys, *train_words(model, out, *warm), "--resume")
    assert again["updates"] == 3


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("warm.min_reward=2.0",), " 2 or"),
        (("warm.split=eval",), "'eval'"),
        (("warm.batch=101",), "101"),
    ],
)
def test_tapes_that_can_t_be_imitated(model: str, demonstrations: Path, more: Any, says: str, tmp_path: Path, capsys):
    warm = (f"warm.tapes={demonstrations}", "warm.updates=1", "warm.batch=8")
    assert says in refusal_of(capsys, *train_words(model, tmp_path / "r", *warm, *more))
    assert not (tmp_path / "r").exists()


def test_tapes_in_the_tokens_of_another_model_are_refused(model: str, tmp_path: Path, capsys):
    tokenizer = char_tokenizer("9876543210")
    tiny_model(tokenizer, "micro", context=32).save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    words = ("run", *SCENE, "--model", str(tmp_path / "other"), *settings("split=train"), "--out", str(tmp_path / "d"))
    answer_of(capsys, *words)
    warm = (f"warm.tapes={tmp_path / 'd'}", "warm.updates=1", "warm.batch=8")
    said = refusal_of(capsys, *train_words(model, tmp_path / "r", *warm))
    assert "tokenizer" in said


def test_a_copied_tape_that_a_kill_cut_off_is_left_out(model: str, demonstrations: Path, tmp_path: Path):
    from tapereel.agents.engines.embedded.pretrained import load_tokenizer
    from tapereel.agents.rendering.renderer import Renderer
    from tapereel.finetune.run.warm_start import bring_in, choose

    renderer = Renderer(load_tokenizer(model))
    with Store.open(demonstrations) as source:
        first, *rest = source.tapes()
    store = Store.create(tmp_path / "r")
    store.writer.append(first.bodies[0])
    store.writer.sync()
    store.abandon()
    with Store.open(tmp_path / "r", write=True) as store:
        ids = choose(demonstrations, renderer)
        assert ids == [tape.id for tape in (first, *rest)]
        assert bring_in(demonstrations, ids, store, renderer) == ids[1:]
        assert bring_in(demonstrations, ids, store, renderer) == ids[1:]
        assert store.tape(first.id).status == "crashed"
        assert store.books().closes


def test_a_world_that_breaks_for_good_stops_the_run_and_mending_it_lets_it_go_on(model: str, tmp_path: Path, capsys):
    scene = ("--agent", f"{EXAMPLE}:player", "--env", f"{WORLD}:BreaksLater", "--tasks", f"{EXAMPLE}:tasks")
    words = train_words(model, tmp_path / "r", "loop.updates=5", "evaluation.every=1", scene=scene)
    assert "the world broke" in refusal_of(capsys, *words, code=1)
    with Store.open(tmp_path / "r") as store:
        assert store.books().closes
        assert all(summary.status is not None for summary in store.summaries())
    load_named(f"{WORLD}:BreaksLater").steps = -10_000
    found = answer_of(capsys, *words, "--resume")
    assert (found["updates"], found["books_close"]) == (5, True)


@pytest.mark.ledger("F65", "F68", "F69", "F79")
def test_a_run_in_which_nothing_could_be_learned_says_so(model: str, tmp_path: Path, capsys):
    scene = ("--agent", f"{WORLD}:fails", "--env", f"{EXAMPLE}:Digits", "--tasks", f"{EXAMPLE}:tasks", "--model", model)
    assert main(["train", *scene, "--out", str(tmp_path / "r"), *settings(*MICRO, "evaluation.fraction=0")]) == 1
    out, err = capsys.readouterr()
    assert "No token was trained on, so the weights did not change" in " ".join(out.split())
    assert "improving by rollouts: 3/3 reward unscored, no token to train on" in err


def test_all_that_an_update_may_be_made_of_is_a_setting(model: str, demonstrations: Path, tmp_path: Path, capsys):
    changes = {
        "regulariser": [
            {"kind": "kl", "beta": 0.1, "adaptive": {"target": 0.01, "horizon": 64}},
            {"kind": "nll", "coefficient": 0.5},
        ]
    }
    more = (
        f"loop.changes={json.dumps(changes)}",
        "loop.epochs=2",
        "loop.minibatches=2",
        "loop.demonstrations=4",
        "loop.optimiser.ema=0.5",
        f"warm.tapes={demonstrations}",
        "warm.updates=1",
        "warm.batch=8",
        "loop.agents=[player]",
        "evaluation.fraction=0",
    )
    out = tmp_path / "r"
    found = answer_of(capsys, *train_words(model, out, *more))
    assert (found["updates"], found["books_close"]) == (3, True)
    with Store.open(out) as store:
        uses = store.ledger(found["lineage"]).uses
    assert [(use.update, use.epoch) for use in uses] == [(0, 0), *((k, e) for k in (1, 2, 3) for e in (0, 1))]
    assert all(len(use.info["shown"]) == 4 for use in uses[1:])
    last = checkpoints(out / "checkpoints")[-1]
    state = last.trainer_state()
    assert state["steps"] == 3 * 2 * 2
    assert state["betas"][0] != 0.1
    own, averaged = (load_file(last.path / folder / "model.safetensors") for folder in ("hf", "hf-averaged"))
    assert own.keys() == averaged.keys()
    assert any(not torch.equal(own[name], averaged[name]) for name in own)
    assert all(torch.equal(averaged[name], value) for name, value in state["averaged"].items() if name in averaged)
    again = answer_of(capsys, *train_words(model, out, *more), "--resume")
    assert again["tokens"] == found["tokens"]
    words = ("run", *SCENE, "--model", str(last.path / "hf-averaged"), "--set", "count=3", "--out", str(tmp_path / "e"))
    assert answer_of(capsys, *words)["usable"] == 3


def test_forks_and_flat_groups_are_settings(model: str, tmp_path: Path, capsys):
    changes = {"baseline": {"by": "fork"}, "select": {"flat": "drop"}}
    more = (
        f"loop.changes={json.dumps(changes)}",
        "loop.forks={attempts: 1, turns: 1, continuations: 2}",
        "loop.extra_groups=1",
        "evaluation.fraction=0",
    )
    assert answer_of(capsys, *train_words(model, tmp_path / "r", *more))["books_close"]
    lines = [line for line in read_metrics(tmp_path / "r" / "metrics.jsonl") if line["phase"] == "rl"]
    assert {line["filled"] for line in lines} <= {"full", "short"}
    assert all(line["groups"] + line["groups_aside"] <= 2 * (2 + 1) for line in lines)


def test_an_environment_that_changes_the_directory_moves_no_run(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "wanders.py").write_text(
        "import os\n"
        "from tapereel.envs.load_named import load_named\n"
        f"class Wanders(load_named('{EXAMPLE}:Digits')):\n"
        "    async def reset(self, task):\n"
        "        os.chdir('/')\n"
        "        return await super().reset(task)\n"
    )
    monkeypatch.chdir(tmp_path)
    scene = ("--agent", f"{EXAMPLE}:player", "--env", "wanders.py:Wanders", "--tasks", f"{EXAMPLE}:tasks")
    assert main([*train_words(model, Path("here"), "loop.updates=2", scene=scene)]) == 0
    assert os.getcwd() == "/"
    assert read_metrics(tmp_path / "here" / "metrics.jsonl")
    assert main(["verify", str(tmp_path / "here")]) == 0


def test_a_resumed_run_samples_nothing_with_weights_that_did_not_arrive(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out, sampler = tmp_path / "r", Policy.sampler
    assert main([*train_words(model, out, "loop.updates=2")]) == 0
    with Store.open(out) as store:
        before = len(store.summaries())

    async def stale(self: Policy, version: str) -> Any:
        engine: Any = await sampler(self, version)
        with torch.no_grad():
            for weights in engine._decoder.model.parameters():
                weights.mul_(1.5)
        return engine

    monkeypatch.setattr(Policy, "sampler", stale)
    assert main([*train_words(model, out, "loop.updates=3"), "--resume"]) == 1
    assert "loop.sampler_tolerance" in capsys.readouterr().err
    with Store.open(out) as store:
        assert len(store.summaries()) == before
