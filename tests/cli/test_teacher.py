"""`loop.teacher` and `loop.reference` through `tapereel train`: what the policy is compared with, in training, after a
kill and in `reproduce`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents.engines.embedded import EngineServer, char_tokenizer, load_pretrained
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.cli import main
from tapereel.tapes.store import Store, read_metrics

from ..finetune.loop.hosting import in_thread
from .lab import DEADLY, SCENE, WORLD, answer_of, killed, refusal_of, settings, tapes_of

FEW = (
    "loop.groups=2",
    "loop.group_size=8",
    "loop.updates=4",
    "loop.checkpoint_every=3",
    "loop.optimiser.lr=1e-2",
    "loop.sampling.max_tokens=2",
    "loop.max_lag=0",
    "evaluation.fraction=0",
)
KL = 'loop.changes={"regulariser": [{"kind": "kl", "beta": 0.5}]}'


def saved(folder: Path, seed: int, alphabet: str = "0123456789") -> str:
    tokenizer = char_tokenizer(alphabet)
    tiny_model(tokenizer, "micro", seed=seed, context=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with another untrained model: other weights, the same tokenizer."""
    return saved(tmp_path_factory.mktemp("teacher") / "model", seed=5)


def words(model: str, out: Path, *more: str, scene: tuple[str, ...] = SCENE) -> tuple[str, ...]:
    return ("train", *scene, "--model", model, "--out", str(out), *settings(*FEW, *more))


def digests(run: Path) -> list[str]:
    """Of each version, in order."""
    with Store.open(run, cache=False) as store:
        return [stored.record.digest for stored in store.run_records("publish") if stored.record.mode != "start"]


def logits(folder: str | Path, ids: list[int]) -> torch.Tensor:
    """(vocabulary,) float64 log-probs of the next token, by a plain forward."""
    with torch.no_grad():
        return load_pretrained(folder).model(input_ids=torch.tensor([ids])).logits[0, -1].double().log_softmax(0)


@pytest.mark.timeout(900)
@pytest.mark.ledger("X13")
@pytest.mark.learning
def test_a_student_comes_to_its_teacher_and_the_run_can_be_derived_again(
    model: str, teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run"
    more = ("loop.recipe=distill", f"loop.teacher={teacher}", "loop.updates=24", "loop.groups=4")
    summary = answer_of(capsys, *words(model, out, *more))
    assert list(summary["compared"]) == ["teacher"]
    assert summary["compared"]["teacher"].startswith(f"{teacher} sha256:")
    prompts = {tuple(tape.calls[0].prompt or ()) for tape in tapes_of(out)}

    def distance(student: str) -> float:
        """Mean KL(teacher || student) after the prompts of the run."""
        total = 0.0
        for prompt in prompts:
            taught, own = logits(teacher, list(prompt)), logits(student, list(prompt))
            total += float((taught.exp() * (taught - own)).sum())
        return total / len(prompts)

    before, after = distance(model), distance(summary["model"])
    assert after < before / 2, (before, after)
    lines = read_metrics(out / "metrics.jsonl")
    assert all(line["kl/teacher/k3"] == pytest.approx(line["loss"], rel=1e-5) for line in lines)
    assert answer_of(capsys, "reproduce", str(out))["outcome"] == "verified"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("loop.recipe=distill",), "loop.teacher"),
        (("loop.recipe=distill", "loop.teacher={model}"), "loop.teacher={model}"),
        (("loop.recipe=distill", "loop.teacher={copy}"), "loop.teacher={copy}"),
        (("loop.recipe=distill", "loop.teacher={copy}", "trainer.lora.rank=2"), "loop.teacher={copy}"),
        (("loop.recipe=distill", "loop.teacher={other}"), "token 'x' is"),
        (("loop.recipe=distill", "loop.teacher={model}/nowhere"), "'{model}/nowhere'"),
        (("loop.teacher={teacher}",), "loop.teacher={teacher}"),
        (("loop.reference={teacher}",), "loop.reference={teacher}"),
        (("loop.reference=warm", KL), "loop.reference=warm"),
        (("loop.reference=none", KL), "(beta)"),
        (("loop.reference={other}", KL), "token 'x' is"),
        (
            ("loop.recipe=distill", 'loop.changes={"regulariser": [{"kind": "kl", "beta": 1.0}]}'),
            "itself",
        ),
        (
            (
                "loop.recipe=distill",
                'loop.changes={"regulariser": [{"kind": "kl", "beta": 1.0}]}',
                "loop.reference={copy}",
            ),
            "loop.reference={copy}",
        ),
        (('loop.reference={{"model": "{teacher}", "every": 2}}', KL), "every=2"),
        (('loop.reference={{"model": "base", "decay": 0.5}}', KL), "every=None"),
    ],
)
def test_a_comparison_that_can_t_teach_is_refused_before_anything_is_written(
    model: str, teacher: str, tmp_path: Path, more: Any, says: str, capsys: pytest.CaptureFixture[str]
):
    copy, other = str(tmp_path / "copy"), saved(tmp_path / "other", 3, "0123456789x")
    shutil.copytree(model, copy)
    names = {"model": model, "teacher": teacher, "copy": copy, "other": other}
    texts = [text if text == KL or "changes" in text else text.format(**names) for text in more]
    assert says.format(**names) in refusal_of(capsys, *words(model, tmp_path / "run", *texts))
    assert not (tmp_path / "run").exists()


@pytest.mark.kill
@pytest.mark.parametrize(
    "more",
    [
        ("loop.recipe=distill", "loop.teacher={teacher}"),
        (KL, "loop.reference={teacher}"),
        (KL,),
        (KL, 'loop.reference={{"model": "base", "every": 2, "decay": 0.25}}'),
        (KL, 'loop.reference={{"model": "base", "every": 1, "decay": 0.9}}', "trainer.lora.rank=2"),
    ],
)
def test_a_killed_run_compares_with_the_same_model_as_one_that_was_never_stopped(
    model: str, teacher: str, tmp_path: Path, more: Any, capsys: pytest.CaptureFixture[str]
):
    texts = [text if text == KL else text.format(teacher=teacher) for text in more]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    one = answer_of(capsys, *words(model, whole, *texts))
    # The kill comes in the fourth update's batch, after the checkpoint of update 3.
    line = words(model, cut, *texts, scene=DEADLY)
    killed(3 * 2 * 8 + 5, *line)
    two = answer_of(capsys, *line, "--resume")
    assert digests(cut) == digests(whole)
    assert len(set(digests(whole))) == 5
    assert one["compared"] == two["compared"]
    assert answer_of(capsys, "reproduce", str(cut))["outcome"] == "verified"


@pytest.mark.parametrize(
    ("reference", "name", "near"), [((), "warm", True), (("loop.reference=base",), "base", False)], ids=["warm", "base"]
)
def test_the_reference_is_the_model_after_the_warm_start_unless_the_base_is_named(
    model: str, tmp_path: Path, reference: Any, name: str, near: bool, capsys: pytest.CaptureFixture[str]
):
    demos, out = tmp_path / "demos", tmp_path / "run"
    shown = ("--set", f"engine.policy={WORLD}:half_right", "--set", "split=demo", "--out", str(demos))
    assert main(["run", *SCENE, *shown]) == 0
    capsys.readouterr()
    warm = (f"warm.tapes={demos}", "warm.updates=4", "warm.batch=8", "warm.optimiser.lr=1e-2", "loop.updates=1")
    found = answer_of(capsys, *words(model, out, KL, *warm, *reference))
    assert found["compared"]["reference"].startswith(f"{name} sha256:")
    (line,) = (line for line in read_metrics(out / "metrics.jsonl") if line["phase"] == "rl")
    # The first update begins with the weights after the warm start.
    assert (abs(line["kl/reference/k3"]) < 1e-6) is near
    assert answer_of(capsys, "reproduce", str(out))["outcome"] == "verified"


def test_resume_refuses_another_teacher(model: str, teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, out = str(tmp_path / "teacher"), tmp_path / "run"
    shutil.copytree(teacher, folder)
    line = words(model, out, "loop.recipe=distill", f"loop.teacher={folder}")
    assert main([*line]) == 0
    shutil.rmtree(folder)
    saved(Path(folder), seed=6)
    capsys.readouterr()
    assert f"{folder} sha256:" in refusal_of(capsys, *line, "--resume", code=1)
    found = answer_of(capsys, "reproduce", str(out), code=1)
    assert (found["outcome"], found["difference"]["field"]) == ("diverged", "teacher")
    shutil.rmtree(folder)
    assert answer_of(capsys, "reproduce", str(out), code=2)["outcome"] == "unverifiable"


@pytest.fixture
def server(teacher: str) -> Iterator[str]:
    """The address of a server of the teacher."""
    with in_thread(EngineServer(load_pretrained(teacher).model, "micro").serving) as served:
        yield served.url


@pytest.mark.kill
def test_a_teacher_behind_a_server_teaches_as_in_this_process_and_is_asked_once(
    model: str, teacher: str, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    kl = 'loop.changes={"regulariser": [{"kind": "kl", "to": "teacher", "beta": 1.0}, {"kind": "kl", "beta": 0.1}]}'
    served = f'loop.teacher={{"urls": ["{server}"], "model": "{teacher}"}}'
    near, far = tmp_path / "near", tmp_path / "far"
    answer_of(capsys, *words(model, near, kl, f"loop.teacher={teacher}"))
    killed(3 * 2 * 8 + 5, *words(model, far, kl, served, scene=DEADLY))
    summary = answer_of(capsys, *words(model, far, kl, served, scene=DEADLY), "--resume")
    assert summary["compared"]["teacher"].startswith(f"vllm:{teacher} sha256:")
    said = sorted((far / "teacher").iterdir())
    assert len(said) == 4
    here, there = (read_metrics(run / "metrics.jsonl") for run in (near, far))
    for one, two in zip(here, there, strict=True):
        assert two["kl/teacher/k3"] == pytest.approx(one["kl/teacher/k3"], rel=1e-3, abs=1e-6)
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3, abs=1e-6)
        assert two["kl/reference/k3"] == pytest.approx(one["kl/reference/k3"], rel=1e-2, abs=1e-6)


def test_what_a_served_teacher_said_is_all_that_reproduce_needs(
    model: str, teacher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "run"
    with in_thread(EngineServer(load_pretrained(teacher).model, "micro").serving) as served:
        more = f'loop.teacher={{"urls": ["{served.url}"], "model": "{teacher}"}}'
        assert main([*words(model, out, "loop.recipe=distill", more)]) == 0
    capsys.readouterr()
    assert answer_of(capsys, "reproduce", str(out))["outcome"] == "verified"
    assert main(["verify", str(out)]) == 0
    (first, *_) = sorted((out / "teacher").iterdir())
    kept = first.read_bytes()
    first.write_bytes(bytes([kept[0] ^ 1]) + kept[1:])
    capsys.readouterr()
    assert main(["verify", str(out)]) != 0
    assert first.name in "".join(capsys.readouterr())
    found = answer_of(capsys, "reproduce", str(out), code=1)
    assert (found["outcome"], found["difference"]["field"]) == ("diverged", "teacher")
    first.unlink()
    found = answer_of(capsys, "reproduce", str(out), code=2)
    assert (found["outcome"], first.name in found["reason"]) == ("unverifiable", True)
