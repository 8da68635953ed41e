"""Runs of `train` whose episodes show pictures: sampled and trained log-probs, frozen towers, and later readings."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tapereel as tr
from tapereel.agents.engines.embedded import load_pretrained
from tapereel.finetune import rows
from tapereel.finetune.inspect import reproduce, requery_run
from tapereel.finetune.trainer import checkpoints
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store, read_metrics, verify

from ..trainer.seen import saved


class Look(tr.Observation):
    question: str
    pictures: tuple[tr.Picture, ...] = ()


class Scenes(tr.Environment):
    """Task k shows k pictures, then k of other sizes; task 0 is text alone."""

    async def reset(self, task: str) -> Look:
        self.n, self.turn, self.rng = int(task), 0, np.random.default_rng(int(task))
        return await self.look()

    async def look(self) -> Look:
        sides = self.rng.integers(8, 40, (self.n, 2))
        pixels = [self.rng.integers(0, 256, (int(h), int(w), 3), dtype="uint8") for h, w in sides]
        return Look(question="Where?", pictures=tuple([await tr.Picture.read(one) for one in pixels]))

    async def step(self, action: tr.Action) -> tr.Outcome:
        self.turn += 1
        reward = sum(map(ord, str(action))) % 7 / 7
        return tr.Outcome(observation=await self.look(), reward=reward, terminated=self.turn == 2)


SETTINGS: dict[str, Any] = {
    "loop.groups": 4,
    "loop.group_size": 3,
    "loop.max_lag": 0,
    "loop.sampling.max_tokens": 3,
    "loop.optimiser.lr": 1e-3,
    "loop.checkpoint_every": 1,
    "loop.keep_checkpoints": 3,
    "engine.capacity": 1024,
    "evaluation.fraction": 0,
}


def trained(folder: Path, *, family: str = "qwen2_vl", resume: bool = False, updates: int = 2, **more: Any) -> tr.Run:
    model = folder / "model"
    if not model.exists():
        saved(model, family)
    recipe = more.pop("recipe", "grpo")
    settings = {**SETTINGS, **{name.replace("__", "."): value for name, value in more.items()}}
    if "loop.optimiser" in settings:
        del settings["loop.optimiser.lr"]
    return tr.train(
        tr.ChatAgent(), Scenes, ["0", "1", "2", "3"], str(model), updates=updates, recipe=recipe,
        out=folder / "run", settings=settings, resume=resume,
    )  # fmt: skip


def moved(folder: Path) -> set[str]:
    """Names of the weights that the run's last checkpoint has other values of than its model."""
    begun = load_pretrained(folder / "model").model.state_dict()
    ended = checkpoints(folder / "run" / "checkpoints")[-1].weights()
    plain = {name.removeprefix("base_model.model.").replace(".base_layer.", "."): t for name, t in ended.items()}
    assert set(begun) <= set(plain)
    return {name for name in plain if name not in begun or not torch.equal(begun[name], plain[name])}


@pytest.mark.ledger("F93", "F94", "F95", "F98", "F11")
@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
def test_what_was_sampled_is_what_is_trained_and_read_again(family: str, tmp_path: Path) -> None:
    """Groups of text and of 1 to 3 pictures a turn in one batch."""
    trained(tmp_path, family=family)
    run = tmp_path / "run"
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "mismatch" in line]
    assert len(lines) == 2
    assert max(line["mismatch"] for line in lines) < 1e-4
    changed = moved(tmp_path)
    assert any("merger" in name or "connector" in name for name in changed)
    assert not any(part in name for name in changed for part in (".visual.blocks.", ".vision_model."))
    verdicts, reason = requery_run(run)
    assert reason is None
    assert {one.outcome for one in verdicts.verdicts} == {"verified"}
    assert reproduce(run).outcome == "verified"
    with Store.open(run) as store:
        made = [row for tape in store.tapes(split="train") for row in rows(tape)]
    assert {len(row.places) for row in made} == {0, 2, 4, 6}
    trained(tmp_path, family=family, resume=True, updates=3)
    assert [line["mismatch"] < 1e-4 for line in read_metrics(run / "metrics.jsonl") if "mismatch" in line] == [True] * 3


@pytest.mark.ledger("F96", "F97")
def test_sampled_placeholders_are_trained_as_ordinary_tokens(tmp_path: Path) -> None:
    """The output layer of the first weights prefers the placeholder at many places."""
    saved(tmp_path / "model")
    found: Any = load_pretrained(tmp_path / "model")
    pad = found.tokenizer.get_vocab()[found.vision.marker]
    with torch.no_grad():
        found.model.get_input_embeddings().weight[pad] *= 6
    found.model.save_pretrained(tmp_path / "model")
    trained(tmp_path, updates=2)
    run = tmp_path / "run"
    with Store.open(run) as store:
        made = [row for tape in store.tapes(split="train") for row in rows(tape)]
    sampled = sum(int((row.input_ids[row.own] == pad).sum()) for row in made)
    assert sampled > 10
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "mismatch" in line]
    assert max(line["mismatch"] for line in lines) < 1e-4
    assert {one.outcome for one in requery_run(run)[0].verdicts} == {"verified"}


def gone(path: Path, record: Any) -> None:
    path.unlink()


def flipped(path: Path, record: Any) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shorter(path: Path, record: Any) -> None:
    record["places"][0][3] -= 1


def turned(path: Path, record: Any) -> None:
    record["places"][0][4][-1] += 2


def huge(path: Path, record: Any) -> None:
    record["places"][0][4][-2:] = [10**6, 10**6]


def no_png(path: Path, record: Any) -> None:
    """Another file under the name of its own hash: no hash shows it."""
    data = b"no picture"
    name = f"{sha256(data).hexdigest()}.png"
    (path.parent / name).write_bytes(data)
    record["places"][0][0][0] = name


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
def test_a_picture_that_is_gone_or_changed_costs_the_verdict_of_its_tape_alone(family: str, tmp_path: Path) -> None:
    trained(tmp_path, family=family, updates=1)
    with Store.open(tmp_path / "run") as store:
        tapes = list(store.tapes(split="train"))
    chosen = next(tape for tape in tapes if tape.calls[0].places)
    assert verify(tmp_path / "run").broken == ()
    same = {tape.id for tape in tapes if tape.begin.task == chosen.begin.task}
    for harm in (gone, flipped, shorter, turned, huge, no_png):
        copy = tmp_path / harm.__name__
        media = copy / "tapes" / "media"
        with Store.create(copy) as store:
            shutil.copytree(tmp_path / "run" / "tapes" / "media", media, dirs_exist_ok=True)
            done = False
            for tape in tapes:
                for body in tape.bodies:
                    record = json.loads(body)
                    if tape is chosen and record.get("places") and not done:
                        done = True
                        harm(media / record["places"][0][0][0], record)
                    store.writer.append(json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode())
        verdicts = requery_run(copy, str(tmp_path / "model"))[0].verdicts
        hurt = same if harm in (gone, flipped) else {chosen.id}  # attempts of one task show the same file
        outcome = "unverifiable" if harm is gone else "diverged"
        assert {one.tape: one.outcome for one in verdicts} == {
            tape.id: outcome if tape.id in hurt else "verified" for tape in tapes
        }, harm
        (alone,) = requery_run(copy, str(tmp_path / "model"), tapes=[chosen.id])[0].verdicts
        assert alone.outcome == outcome
        assert all(
            chosen.calls[0].places[0].media[0] in str(one)
            for one in verdicts
            if harm in (gone, flipped) and one.tape in hurt
        )


NARROW = {"autocast": "bfloat16", "gradient_checkpointing": True, "micro_tokens": 300, "lr": 1e-3}
KINDS: dict[str, dict[str, Any]] = {
    "critic": {"recipe": "ppo", "loop__critic": {"body": "own"}, "trainer__freeze": "nothing"},
    "adapters": {
        "trainer__lora": {"rank": 4},
        "loop__changes": {"regulariser": [{"kind": "kl", "beta": 0.1}]},
        "loop__reference": {"model": "base", "every": 1, "decay": 0.5},
        "loop__optimiser__ema": 0.9,
    },
    "narrow": {"recipe": "ppo", "loop__critic": {"body": "policy"}, "loop__optimiser": NARROW}
    | {"loop__sampler_tolerance": 0.3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_every_kind_of_training_sees(kind: str, tmp_path: Path) -> None:
    more = dict(KINDS[kind])
    trained(tmp_path, **more)
    run = tmp_path / "run"
    lines = [line for line in read_metrics(run / "metrics.jsonl") if "mismatch" in line]
    assert max(line["mismatch"] for line in lines) < (0.3 if kind == "narrow" else 1e-4)
    assert reproduce(run).outcome == "verified"
    tower = any(".visual.blocks." in name for name in moved(tmp_path))
    assert tower == (more.get("trainer__freeze") == "nothing")


@pytest.mark.parametrize(
    ("model", "more", "why"),
    [
        ("text", {}, r"/model\b"),
        ("qwen2_vl", {"trainer__lora": {"rank": 2}}, r"trainer\.lora\b"),
    ],
)
def test_a_freeze_that_does_nothing_is_refused(model: str, more: dict[str, Any], why: str, tmp_path: Path) -> None:
    if model == "text":
        tr.save_tiny_model(tmp_path / "model", alphabet="ab", size="micro")
    with pytest.raises(UsageError, match=rf"trainer\.freeze=tower.*{why}"):
        trained(tmp_path, trainer__freeze="tower", **more)
    assert not (tmp_path / "run" / "tapes").exists()
