"""The output layer's loss in one pass: its gradient against two passes, whole logits and the oracles; and which recipes
and output layers take it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tapereel.finetune import Critic, CriticTrainer, Recipe, Row
from tapereel.finetune.objective import Context
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.objective.loss import Batch
from tapereel.finetune.recipes import RECIPES, get_recipe
from tapereel.finetune.trainer import lm_head as head
from tapereel.finetune.trainer import score, trainer
from tapereel.finetune.trainer.logprobs import read_out

from ...oracles.recipes import EQUATIONS, GROUPS, LENGTHS, PARTS, REWARDS, TURNS, WEIGHTS, N, world
from ..build import VOCABULARY, batch, episode, exact, gradient, row, same, tiny_model, trainer_of
from .test_barred import barred_rows

Found = tuple[float, dict[str, Tensor]]
KL = {"kind": "kl", "beta": 0.2}
VARIANTS: dict[str, Recipe] = {
    "kl to the reference": get_recipe("grpo", {"regulariser": [KL]}),
    "two kls": get_recipe("grpo", {"regulariser": [{**KL, "estimator": "k2"}, {**KL, "to": "sampler"}]}),
    "dual clip": get_recipe("grpo", {"surrogate": {"low": 0.05, "high": 0.02, "dual": 1.1}}),
    "truncated weights": get_recipe("grpo", {"anchor": {"to": "recomputed", "weight": "truncate", "high": 1.01}}),
    "masked weights": get_recipe("grpo", {"anchor": {"to": "recomputed", "weight": "mask", "low": 0.9, "high": 1.1}}),
    "masked tokens": get_recipe("grpo", {"select": {"kl_mask": 0.01, "shift_mask": 0.02}}),
    "few tokens": get_recipe("grpo", {"select": {"entropy_top": 0.4}}),
    "model's own temperature": get_recipe("grpo", {"score": {"temperature": "one"}}),
    "per episode": get_recipe("grpo", {"surrogate": {"per": "episode"}}),
}
ENTROPY = {
    "entropy bonus": get_recipe("grpo", {"regulariser": [{"kind": "entropy", "coefficient": 0.1}]}),
    "entropy reported": get_recipe("grpo", {"score": {"entropy": True}}),
}
ALL = {**RECIPES, **VARIANTS, **ENTROPY}
MIXED = {"gspo", "minor_sft", "per episode"}
"""A token's loss depends on its whole episode. With several micro-batches, its gradient is known before the pass that
computes the weights' gradient."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK", 3 * VOCABULARY)
    monkeypatch.setattr(head, "CHUNK_ROWS", 1)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that the output layer was used with gradient: `one pass` or `two passes`, call by call."""
    taken: list[str] = []

    def seen(name: str, way: str) -> None:
        compute = getattr(head, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                taken.append(way)
            return compute(*args, **kwargs)

        monkeypatch.setattr(head, name, call)

    seen("loss_in_one_pass", "one pass")
    seen("log_probs", "two passes")
    return taken


def in_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the loss from the output layer from here on, so that it computes log-probs alone."""
    monkeypatch.setattr(trainer, "read_out", lambda *args, loss=None, **kwargs: read_out(*args, **kwargs))


def found(recipe: Recipe, model: Any, rows: Sequence[Row], episodes: Any, **options: Any) -> Found:
    critic = CriticTrainer(Critic.of(model)) if recipe.needs_value else None
    others = {"reference": tiny_model(seed=1), "teacher": tiny_model(seed=2)}
    return gradient(model, recipe, rows, episodes, critic=critic, **others, **options)


@pytest.mark.ledger("F19", "P1", "P2", "T18")
@pytest.mark.parametrize("name", sorted(ALL))
def test_each_recipe_takes_the_pass_it_can_and_gets_the_gradient_of_two_passes(name, monkeypatch, ways):
    model = tiny_model()
    rows, episodes = batch(model=model)
    rows = [dataclasses.replace(r, temperature=r.temperature * t) for r, t in zip(rows, (1, 0.7, 1.3) * 2, strict=True)]
    # The last row has a token that isn't trained on, and one row has no token of its own.
    rows[5].old[-1] = torch.nan if ALL[name].surrogate.advantages else rows[5].old[-1]
    rows.append(dataclasses.replace(row("t5", "g1", turns=(0,)), calls=(), agents=()))
    for n in (100_000, 12):
        with monkeypatch.context() as patch:
            ways.clear()
            one = found(ALL[name], model, rows, episodes, micro_tokens=n)
            alone = name not in ENTROPY and (name not in MIXED or n == 12)
            assert set(ways) == {"one pass" if alone else "two passes"}
            assert (len(ways) > 1) == (n == 12)
            in_two_passes(patch)
            same(one, found(ALL[name], model, rows, episodes, micro_tokens=n), rtol=1e-12)


def of_world(recipe: Recipe, model: Any) -> tuple[Any, list[Row], Batch, Tensor]:
    """The oracles' batch with the log-probs of `model` in place of its own, and these log-probs from whole logits."""
    w = world()
    rows = [row(f"t{i}", g, turns=t) for i, (g, t) in enumerate(zip(GROUPS, TURNS, strict=True))]
    episodes = [
        episode(f"t{i}", g, reward=r, length=n, components=parts, weights=WEIGHTS)
        for i, (g, r, n, parts) in enumerate(zip(GROUPS, REWARDS, LENGTHS, PARTS, strict=True))
    ]
    lp = torch.cat(
        [
            model(input_ids=torch.from_numpy(r.input_ids).long()[None])
            .logits[0]
            .log_softmax(-1)[r.own - 1, r.input_ids[r.own]]
            for r in rows
        ]
    )
    old = [a + 0.4 * (b - c) for a, b, c in zip(lp.tolist(), w.old, w.lp, strict=True)]
    w = dataclasses.replace(w, lp=lp.tolist(), old=[min(o, -0.01) for o in old])
    stream = exact(rows, episodes, old=w.old, ref=w.ref, value=w.value, teacher=w.teacher)
    return w, rows, objective.prepare(recipe, stream, Context()), lp


@pytest.mark.ledger("F19", "F34", "F52", "X1", "X2", "X13")
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_one_pass_gives_the_loss_of_the_oracle_and_the_gradient_of_whole_logits(name):
    recipe, model = RECIPES[name], tiny_model()
    w, rows, prepared, lp = of_world(recipe, model)
    critic = CriticTrainer(Critic.of(model)) if recipe.needs_value else None
    ours = trainer_of(
        model, recipe, lr=0.0, micro_tokens=20, critic=critic, reference=tiny_model(), teacher=tiny_model()
    )
    done = ours._accumulate(rows, prepared.part())
    got = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert done.loss == pytest.approx(EQUATIONS[name](w), rel=1e-9)
    model.zero_grad()
    loss = prepared.part().loss(lp, None, torch.arange(N), Context(), objective.betas(recipe))
    loss.backward(retain_graph=True)
    same((done.loss, got), (loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}), rtol=1e-10)
    if name not in ("cispo", "decoupled_ppo"):  # a factor of theirs carries no gradient
        model.zero_grad()
        lp.backward(torch.tensor([slope(name, w, t) for t in range(N)], dtype=torch.float64))
        for n, p in model.named_parameters():
            torch.testing.assert_close(got[n], p.grad, rtol=1e-5, atol=1e-7)


def slope(name: str, w: Any, t: int) -> float:
    up, down = (dataclasses.replace(w, lp=[*w.lp[:t], w.lp[t] + e, *w.lp[t + 1 :]]) for e in (1e-6, -1e-6))
    return (EQUATIONS[name](up) - EQUATIONS[name](down)) / 2e-6


def test_ids_that_the_sampler_excluded_and_demonstrations_give_the_gradient_of_two_passes(monkeypatch, ways):
    model, rows = tiny_model(), barred_rows()
    rows = [dataclasses.replace(r, old=score(model, [r]).logprob.float().numpy() - 0.05) for r in rows]
    episodes = [episode(r.tape, r.group, reward=float(i % 2)) for i, r in enumerate(rows)]
    recipe = get_recipe("grpo", {"regulariser": [{"kind": "nll", "coefficient": 0.3}]})
    shown = [row("d0", "d", turns=(5,)), row("d1", "d", turns=(2, 7))]

    def both() -> Found:
        ours = trainer_of(model, recipe, grad_clip=None, micro_tokens=90)
        stats, grads = ours.gradient(ours.prepare(rows, episodes, demonstrations=shown))
        assert stats.skipped is None
        assert stats.parts["nll"] == pytest.approx(0.3 * (stats.sums.mean("demonstrations/nll") or 0), rel=1e-9)
        return stats.loss, grads

    one = both()
    assert set(ways) == {"one pass"}
    in_two_passes(monkeypatch)
    same(one, both(), rtol=1e-12)
    assert ways[-1] == "two passes"


HEADS: dict[str, dict[str, Any]] = {
    "tied": {},
    "a matrix of its own": {"tie_word_embeddings": False},
    "frozen": {"tie_word_embeddings": False},
    "with a bias": {"tie_word_embeddings": False},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("kind", HEADS)
def test_every_output_layer_that_is_linear_takes_one_pass(kind, monkeypatch, ways):
    model = tiny_model(**HEADS[kind])
    if kind == "with a bias":
        model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCABULARY, dtype=torch.float64))
    model.lm_head.weight.requires_grad_(kind != "frozen")
    rows, episodes = batch(model=model)
    one = gradient(model, get_recipe("grpo"), rows, episodes)
    assert ways == ["one pass"]
    assert ("lm_head.weight" in one[1]) == (kind in ("a matrix of its own", "with a bias"))
    in_two_passes(monkeypatch)
    two = gradient(model, get_recipe("grpo"), rows, episodes)
    if kind != "bfloat16":
        same(one, two, rtol=1e-12)
    else:
        assert one[0] == pytest.approx(two[0], rel=1e-6)
        for name, g in one[1].items():
            torch.testing.assert_close(g, two[1][name], rtol=0.02, atol=2e-3)


def test_a_chunk_has_at_least_55_rows_however_large_the_vocabulary(monkeypatch):
    monkeypatch.undo()
    for vocabulary, rows in ((152_000, 55), (1_000_000, 55), (32_000, 131)):
        chunks = head._chunks(1000, vocabulary)
        assert [c.stop - c.start for c in chunks[:-1]] == [rows] * (999 // rows)
        assert [i for c in chunks for i in range(c.start, c.stop)] == list(range(1000))


def test_a_gradient_that_arrives_scaled_scales_and_no_token_is_no_gradient():
    weight = torch.randn(7, 4, dtype=torch.float64, requires_grad=True)
    hidden = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    token, one = torch.tensor([0, 3, 6, 3, 1]), torch.ones(5)

    def grads(n: int, scale: float) -> tuple[Tensor, ...]:
        inputs = hidden[:n], weight, None, token[:n], one[:n]
        lp, loss = head.loss_in_one_pass(*inputs, lambda lp, at: (lp * (token[at] + 1)).sum())
        assert not lp.requires_grad
        return torch.autograd.grad(scale * loss, (hidden, weight))

    for a, b in zip(grads(5, 1.0), grads(5, -0.5), strict=True):
        assert a.abs().max() > 0.1
        torch.testing.assert_close(-0.5 * a, b, rtol=1e-12, atol=0)
    assert all(not g.any() for g in grads(0, 1.0))
