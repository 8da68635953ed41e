"""Updates on rows that show pictures: what is frozen, and every way that a batch may be computed."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tapereel.agents import Capability, Completion, EmbeddedEngine, EngineError, Request
from tapereel.agents.engines.weights import AdapterConfig, add_adapters
from tapereel.agents.rendering import Renderer
from tapereel.finetune import Critic, CriticTrainer, Episode, LoopConfig, OptimiserConfig, Row, Trainer
from tapereel.finetune.data import BadBatch
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.run import freeze
from tapereel.finetune.run.player_config import Frozen
from tapereel.finetune.run.trainer_factory import TrainerFactory
from tapereel.finetune.trainer import EarlierWeights, Ranks, score
from tapereel.finetune.trainer.reference import OtherModel, ServedTeacher

from ..build import trainer_of
from .seen import FAMILIES, oracles, png, pretrained, sampled, shown

FAMILY = pytest.mark.parametrize("family", FAMILIES)
LONG = "Here are the rules, which are long enough to be worth a forward pass of their own: "


def batch(family: str) -> tuple[list[Row], list[Episode]]:
    """A group that shares a picture behind a long text, one whose rows differ in it, one of text; `old` as sampled."""
    rows = [
        *(shown(family, [([LONG, png(40, 24, 0), "?"], sampled(3 + k, k))], f"a{k}", "a") for k in range(3)),
        *(shown(family, [(["Where? ", png(16, 16, k)], sampled(2, k)), (["no"], [k])], f"b{k}", "b") for k in range(3)),
        *(shown(family, [(["In words?"], sampled(3, k))], f"c{k}", "c") for k in range(2)),
    ]
    found = pretrained(family)
    lp = score(found.model, rows, vision=found.vision).logprob.numpy()
    cuts = np.cumsum([0, *(len(row.own) for row in rows)])
    rows = [replace(row, old=lp[a:b]) for row, a, b in zip(rows, cuts, cuts[1:], strict=False)]
    return rows, [Episode(tape=r.tape, group=r.group, reward=float(k % 2)) for k, r in enumerate(rows)]


def free(family: str, what: Frozen = "nothing") -> Any:
    found = pretrained(family)
    model: Any = copy.deepcopy(found.model)
    assert found.vision is not None
    freeze(model, found.vision, what)
    return model


def trainer(family: str, model: Any, recipe: str = "grpo", changes: Any = None, **options: Any) -> Trainer:
    return trainer_of(model, get_recipe(recipe, changes), vision=pretrained(family).vision, **{"lr": 1e-3, **options})


def parts_of(family: str, model: Any) -> dict[str, set[str]]:
    """Names of the weights of the tower, of the projector, and of the rest."""
    vision: Any = pretrained(family).vision
    tower, *projector = vision.tower(model)
    projected = {id(p) for module in projector for p in module.parameters()}
    seen = {id(p) for p in tower.parameters()} - projected
    named = {"tower": seen, "projector": projected}
    found = {kind: {name for name, p in model.named_parameters() if id(p) in ids} for kind, ids in named.items()}
    return {**found, "text": {name for name, _ in model.named_parameters()} - found["tower"] - found["projector"]}


@FAMILY
@pytest.mark.parametrize("what", get_args(Frozen))
def test_what_is_frozen_keeps_its_bits_and_all_else_moves(family: str, what: Frozen) -> None:
    model = free(family, what)
    one = trainer(family, model)
    for _ in range(2):
        assert one.update(*batch(family)).applied
    parts = parts_of(family, model)
    before = dict(pretrained(family).model.named_parameters())
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    frozen = {"tower": parts["tower"], "vision": parts["tower"] | parts["projector"], "nothing": set()}[what]
    assert not moved & frozen
    assert moved & parts["text"]
    for kind in {"tower", "projector"} - {"tower": {"tower"}, "vision": {"tower", "projector"}, "nothing": set()}[what]:
        assert len(moved & parts[kind]) > 0.9 * len(parts[kind])
    held = {id(p) for group in one.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for name, p in model.named_parameters() if name not in frozen}
    assert {id(p) for p in one.optimizer.state} <= held
    assert all(p.grad is None for p in model.parameters())


WAYS: dict[str, dict[str, Any]] = {
    "row by row": {"micro_tokens": 1},
    "packed": {"pack": True},
    "whole": {"recipe": "cpgd"},
    "two epochs": {"epochs": 2},
    "bfloat16": {"autocast": "bfloat16"},
    "checkpointed": {"gradient_checkpointing": True},
}


def gradient(family: str, *, recipe: str = "grpo", epochs: int = 1, **options: Any) -> tuple[float, dict[str, Tensor]]:
    one = trainer(family, free(family), recipe, **options)
    rows, episodes = batch(family)
    stats, grads = one.gradient(one.prepare(rows, episodes, several=epochs > 1))
    assert stats.skipped is None
    assert stats.mismatch is not None
    return stats.mismatch, grads


@FAMILY
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_every_way_of_computing_gives_one_gradient(family: str, way: str) -> None:
    recipe = WAYS[way].get("recipe", "grpo")
    mismatch, found = gradient(family, **WAYS[way])
    if way == "bfloat16":
        assert 0 < mismatch < 0.5
        return
    _, plain = gradient(family, recipe=recipe, micro_tokens=10**6)
    assert mismatch < 1e-4
    scale = max(float(g.abs().max()) for g in plain.values())
    for name, g in plain.items():
        # Without a picture in a micro-batch a tower's gradient is 0, not None.
        assert float((g - found[name]).abs().max()) < 1e-4 * scale, name
    assert set(found) == set(plain)


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
def test_adapters_train_the_language_model_alone(family: str) -> None:
    found = pretrained(family)
    model: Any = add_adapters(copy.deepcopy(found.model), AdapterConfig(rank=4))
    assert not any("lora" in name for name in parts_of(family, model)["tower"] | parts_of(family, model)["projector"])
    rows, episodes = batch(family)
    assert (score(model, rows, vision=found.vision).logprob - oracles(family, rows)).abs().max() < 1e-4
    before = {name: p.clone() for name, p in model.named_parameters()}
    stats = trainer(family, model, lr=1e-2).update(rows, episodes)
    assert stats.mismatch is not None
    assert stats.mismatch < 1e-4
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all("lora" in name for name in moved)


@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_references_teachers_and_averages_see_the_same_pictures(family: str) -> None:
    found, rows = pretrained(family), batch(family)[0]
    other: Any = copy.deepcopy(found.model)
    with torch.no_grad():
        other.get_output_embeddings().weight.mul_(1.1)
    own = free(family)
    kl = {"regulariser": [{"kind": "kl", "beta": 0.1}]}
    for reference, model in (
        (OtherModel(other, "other", found.vision), other),
        (EarlierWeights(own, "base", {n: p.clone() for n, p in other.named_parameters()}), other),
        (EarlierWeights(own, "base"), found.model),
    ):
        one = trainer(family, own, changes=kl, reference=reference)
        ref = one.prepare(*batch(family)).batch.stream.ref
        assert ref is not None
        assert (ref - oracles(family, rows, model)).abs().max() < 1e-4
    one = trainer(family, free(family), "distill", teacher=OtherModel(other, "other", found.vision), ema=0.5)
    teacher = one.prepare(*batch(family)).batch.stream.teacher
    assert teacher is not None
    assert (teacher - oracles(family, rows, other)).abs().max() < 1e-4
    assert one.update(*batch(family)).applied
    assert set(one.averaged) == {name for name, _ in own.named_parameters()}


def test_a_teacher_that_cant_see_is_refused(tmp_path: Any) -> None:
    rows, episodes = batch("qwen2_vl")
    blind = trainer("qwen2_vl", free("qwen2_vl"), "distill", teacher=OtherModel(copy.deepcopy(free("qwen2_vl"))))
    with pytest.raises(BadBatch, match=r"\ba0\b.*\bsee\b"):
        blind.prepare(rows, episodes)
    with pytest.raises(BadBatch, match=r"\ba0\b.*[0-9a-f]{64}\.png.*loop\.teacher"):
        behind(f"{__name__}:Blind").said(rows, tmp_path, ask=True)
    given, _ = behind(f"{__name__}:Blind").said(rows[-2:], tmp_path, ask=True)
    assert [list(row.teacher) for row in given if row.teacher is not None] == [[-1.0] * 3] * 2


class Blind:
    """Scores tokens, and knows nothing of pictures."""

    name, renderer, context = "blind", None, None
    can: frozenset[Capability] = frozenset({"score"})

    async def complete(self, request: Request) -> Completion:
        raise EngineError("a teacher only scores")

    def forget(self, cache_key: str) -> None:
        """Nothing is cached."""

    async def score(self, ids: list[int]) -> list[float]:
        return [-1.0] * (len(ids) - 1)

    async def close(self) -> None:
        """Nothing is open."""


def seeing(family: str) -> EmbeddedEngine:
    """An engine of another model than the policy."""
    found = pretrained(family)
    return EmbeddedEngine(other_weights(family), Renderer(found.tokenizer, found.vision), version="other")


def other_weights(family: str) -> Any:
    model = free(family)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    return model


def behind(kind: str, family: str = "qwen2_vl") -> ServedTeacher:
    """The teacher behind an engine of this kind, as a run has it."""
    found = pretrained(family)
    options = {} if kind.endswith("Blind") else {"family": family}
    loop = LoopConfig.model_validate({"teacher": {"kind": kind, "options": options}})
    renderer = Renderer(found.tokenizer, found.vision)
    factory = TrainerFactory(
        model=found.model, renderer=renderer, tokenizer=found.tokenizer, loop=loop, recipe=get_recipe("distill")
    )
    teacher = factory.make("rl", found.model, Ranks()).others["teacher"]
    assert isinstance(teacher, ServedTeacher)
    return teacher


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_a_teacher_behind_an_engine_sees_as_one_in_this_process(family: str, tmp_path: Path) -> None:
    rows, _ = batch(family)
    teacher, other = behind(f"{__name__}:seeing", family), other_weights(family)
    given, path = teacher.said(rows, tmp_path, ask=True)
    said = np.concatenate([row.teacher for row in given if row.teacher is not None])
    assert np.abs(said - oracles(family, rows, other).numpy()).max() < 1e-4
    # The same ids with another picture are another question.
    (place,) = rows[0].places
    name, swap = "0" * 64 + ".png", png(40, 24, 9)
    rows[0] = replace(rows[0], places=(place._replace(media=(name,)),), file=lambda _: swap)
    given, swapped = teacher.said(rows, tmp_path, ask=True)
    assert swapped != path
    assert given[0].teacher is not None
    assert np.abs(given[0].teacher - oracles(family, rows[:1], other).numpy()).max() < 1e-4
    assert np.abs(given[0].teacher - said[:3]).max() > 0.1


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
@pytest.mark.parametrize("body", ["own", "policy"])
@pytest.mark.parametrize("what", ["tower", "nothing"])
def test_a_critic_sees_the_pictures(family: str, body: str, what: Frozen) -> None:
    model, vision = free(family, what), pretrained(family).vision
    critic = (Critic.of if body == "own" else Critic.on)(model, vision=vision)
    with torch.no_grad():
        critic.head.weight.normal_()
    rows, episodes = batch(family)
    own = CriticTrainer(critic, OptimiserConfig(lr=1e-3))
    values = own.values(rows)
    alone = CriticTrainer(critic, OptimiserConfig(micro_tokens=1)).values(rows)
    assert (values - alone).abs().max() < 1e-4
    other = png(40, 24, 9)
    swapped = [
        replace(row, file=(lambda name: other) if len(row.places) and row.group == "a" else row.file) for row in rows
    ]
    there = np.repeat([row.group == "a" for row in rows], [len(row.own) for row in rows])
    apart = (own.values(swapped) - values).abs()
    assert apart[there].max() > 0.1
    assert apart[~there].max() < 1e-4
    one = trainer(family, model, "ppo", critic=own, lr=0.0)
    before = {name: tensor.clone() for name, tensor in critic.state_dict().items()}
    policy = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert one.update(rows, episodes).applied
    moved = {name for name, tensor in critic.state_dict().items() if not torch.equal(tensor, before[name])}
    assert all(torch.equal(tensor, policy[name]) for name, tensor in model.state_dict().items())
    assert {"head.weight", "head.bias"} <= moved
    tower = {f"body.{name}" for name in parts_of(family, model)["tower"]}
    assert bool(moved & tower) == (body == "own" and what == "nothing")
    again = CriticTrainer(
        (Critic.of if body == "own" else Critic.on)(free(family, what), vision=vision), OptimiserConfig(lr=1e-3)
    )
    again.load_state_dict(own.state_dict())
    torch.testing.assert_close(again.values(rows), own.values(rows), rtol=0, atol=0)
