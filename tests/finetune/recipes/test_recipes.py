"""Every recipe: its documented equation, written out in plain loops, equals the code, loss and gradient."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from tapereel.finetune import Critic, CriticTrainer, OptimiserConfig, Recipe, Trainer, recipes
from tapereel.finetune.loop import loop_config
from tapereel.finetune.objective import KL, Context, TokenKL, Whiten
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import RECIPES, get_recipe, read
from tapereel.tapes.errors import UsageError

from ...oracles import objective as oracle
from ...oracles.recipes import EQUATIONS, GROUPS, LENGTHS, PARTS, REWARDS, TURNS, WEIGHTS, N, World, world
from ..build import batch, doubles, episode, exact, row, tiny_model

STOPPED = {"cispo", "decoupled_ppo"}
"""Recipes with a factor that carries no gradient, so that differences of the loss aren't its gradient."""


def computed(recipe: Recipe, w: World) -> tuple[float, torch.Tensor]:
    rows = [row(f"t{i}", g, turns=t) for i, (g, t) in enumerate(zip(GROUPS, TURNS, strict=True))]
    episodes = [
        episode(f"t{i}", g, reward=r, length=n, components=parts, weights=WEIGHTS)
        for i, (g, r, n, parts) in enumerate(zip(GROUPS, REWARDS, LENGTHS, PARTS, strict=True))
    ]
    stream = exact(rows, episodes, old=w.old, ref=w.ref, value=w.value, teacher=w.teacher)
    part = objective.prepare(recipe, stream, Context()).part()
    lp = doubles(w.lp).requires_grad_()
    loss = part.loss(lp, None, torch.arange(N), Context(), objective.betas(recipe))
    return loss.item(), torch.autograd.grad(loss, lp)[0]


@cache
def documents() -> dict[str, str]:
    """Recipe -> the text below it in the module of its family."""
    found: dict[str, str] = {}
    for path in Path(recipes.__file__).parent.glob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for one, below in itertools.pairwise(body):
            if isinstance(one, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[ast.unparse(one.targets[0])] = str(below.value.value)
    return found


def documented(name: str) -> tuple[str, list[str], str]:
    """(equation, numbered deviations, the whole text) below a recipe in the module of its family."""
    text = inspect.cleandoc(documents()[name])
    equation = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    return "\n".join(equation), re.findall(r"^(\d)\. ", text, re.MULTILINE), text


def test_the_configuration_knows_all_recipes_and_their_second_models() -> None:
    assert sorted(loop_config.RECIPES) == sorted(RECIPES)
    needs = {
        name: tuple(
            model
            for model, needed in (
                ("reference", recipe.needs_reference),
                ("teacher", recipe.needs_teacher),
                ("critic", recipe.needs_value),
            )
            if needed
        )
        for name, recipe in RECIPES.items()
    }
    assert {name: models for name, models in needs.items() if models} == loop_config.SECOND


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_equation_that_is_checked_is_the_one_that_is_documented(name):
    assert name in EQUATIONS, f"write {name} as a plain loop, and name it in EQUATIONS of tests/oracles/recipes.py"
    equation, deviations, text = documented(name)
    assert equation == inspect.cleandoc(EQUATIONS[name].__doc__ or ""), "edit both, and the loops below"
    assert text.startswith(f"{name}: ")
    assert "\nSource: " in text
    assert deviations == [str(k + 1) for k in range(len(deviations))]


@pytest.mark.parametrize(("name", "estimator"), [("grpo", "k3"), ("reinforce", "k3"), ("reinforce_pp_baseline", "k2")])
def test_the_documented_kl_is_added_where_beta_is_set(name, estimator):
    w = world()
    (term,) = RECIPES[name].regulariser
    assert isinstance(term, KL)
    assert term.estimator == estimator
    loss, _ = computed(RECIPES[name].but(regulariser=[{**term.model_dump(), "beta": 0.3}]), w)
    kl = sum(oracle.kl(estimator, w.lp[t], w.ref[t]) for t in range(N)) / N
    assert loss == pytest.approx(EQUATIONS[name](w) + 0.3 * kl, rel=1e-9)


@pytest.mark.ledger("T40", "T42")
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_can_be_made_by_its_name_and_takes_a_model_from_rows_to_new_weights(name):
    model = tiny_model()
    rows, episodes = batch(model=model)
    recipe = get_recipe(name, {"weigh": {"kind": "episode"}})
    critic = CriticTrainer(Critic.of(model)) if recipe.needs_value else None
    trainer = Trainer(
        model, recipe, OptimiserConfig(lr=1e-2), critic=critic, reference=tiny_model(seed=1), teacher=tiny_model(seed=2)
    )
    stats = trainer.update(rows, episodes)
    assert stats.applied
    assert math.isfinite(stats.loss)
    moved = [n for n, p in tiny_model().state_dict().items() if not torch.equal(p, model.state_dict()[n])]
    assert moved
    assert all(p.isfinite().all() for p in model.state_dict().values())


def test_a_recipe_without_any_loss_has_nothing_to_train_on():
    rows, episodes = batch()
    for regulariser in ([], [{"kind": "kl", "beta": 0.0}, {"kind": "entropy", "coefficient": 0.0}]):
        recipe = get_recipe("distill", {"regulariser": regulariser})
        assert recipe.idle
        assert Trainer(tiny_model(), recipe).update(rows, episodes).skipped == "nothing to train on"
    shown = get_recipe("distill", {"regulariser": [{"kind": "nll", "coefficient": 1.0}]})
    assert Trainer(tiny_model(), shown).update(rows, episodes, [row("demo", "demo")]).applied
    assert not RECIPES["distill"].idle
    assert not get_recipe("distill", {"regulariser": [{"kind": "aux", "coefficient": 1.0}]}).idle


def test_a_price_of_zero_needs_no_reference():
    rows, episodes = batch()
    recipe = get_recipe("grpo", {"shape": [{"kind": "episode_kl", "beta": 0.0}]})
    assert Trainer(tiny_model(), recipe).update(rows, episodes).applied


@pytest.mark.ledger("F34", "F35", "F36", "F37", "F38", "F40", "F45", "F52", "F53", "F54", "F56", "X1", "X2", "X13")
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_documented_equation_equals_the_code(name):
    w = world()
    recipe = RECIPES[name]
    loss, grad = computed(recipe, w)
    assert loss == pytest.approx(EQUATIONS[name](w), rel=1e-9)
    if name in STOPPED:
        return
    for t in range(N):
        up, down = (dataclasses.replace(w, lp=[*w.lp[:t], w.lp[t] + e, *w.lp[t + 1 :]]) for e in (1e-6, -1e-6))
        slope = (EQUATIONS[name](up) - EQUATIONS[name](down)) / 2e-6
        assert grad[t].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


@pytest.mark.ledger("X2", "T23")
def test_a_weight_without_gradient_leaves_the_score_function_alone():
    w = world()
    a = w.std(1e-9)
    _, grad = computed(RECIPES["cispo"], w)
    assert grad.tolist() == pytest.approx([-min(w.ratio(t), 5) * a[w.of[t]] / N for t in range(N)], rel=1e-9, abs=1e-15)
    _, grad = computed(RECIPES["decoupled_ppo"], w)
    assert grad.tolist() == pytest.approx([-min(w.ratio(t), 2) * a[w.of[t]] / N for t in range(N)], rel=1e-9, abs=1e-15)


@pytest.mark.ledger("F45", "F47", "T16")
def test_the_floor_of_the_batch_deviation_is_that_of_the_source():
    for name in ("ppo", "reinforce_pp", "reinforce_pp_baseline"):
        assert RECIPES[name].adjust == (Whiten(ddof=0, eps=1e-8, how="floor", centre_only=False),)


def test_clips_are_the_papers():
    clips = {name: (r.surrogate.low, r.surrogate.high) for name, r in RECIPES.items() if r.surrogate.kind == "ppo"}
    assert clips.pop("dapo") == (0.2, 0.28)
    assert clips.pop("gspo") == (3e-4, 4e-4)
    assert set(clips.values()) == {(0.2, 0.2)}


def test_the_coefficient_of_ppo_kl_moves_as_its_equation_says():
    (kl,) = get_recipe("ppo_kl").shape
    assert isinstance(kl, TokenKL)
    assert kl.adaptive is not None
    assert kl.beta == 0.15
    assert kl.adaptive.next(kl.beta, kl=0.275, episodes=500) == pytest.approx(0.15 * (1 + 0.1 * 500 / 10_000), rel=1e-9)


def test_a_recipe_prints_every_term_with_its_constants():
    text = str(RECIPES["grpo"])
    assert text.splitlines()[0] == "recipe grpo"
    terms = "score reward shape baseline credit adjust anchor surrogate regulariser select weigh"
    for term in terms.split():
        assert f"\n  {term} " in text
    assert "std(by=group, eps=1e-09, ddof=1)" in text
    assert "ppo(low=0.2, high=0.2, dual=None, per=token)" in text


def test_recipes_are_frozen_named_after_their_module_and_survive_a_round_trip():
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        assert read(recipe.model_dump()) == recipe
        assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    with pytest.raises(ValueError, match="frozen"):
        RECIPES["grpo"].name = "mine"  # type: ignore[misc]


@pytest.mark.ledger("T55")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"basline": {}}, r"'basline'.*\bbaseline\b"),
        ({"baseline": {"epsilon": 1}}, r"'baseline\.std\.epsilon'"),
        ({"surrogate": {"kind": "ppo", "clip": 0.2}}, "clip"),
        ({"baseline": {"kind": "median"}}, "baseline: .*'median'"),
        ({"weigh": {"limit": "long"}}, "weigh.limit"),
        ({"regulariser": [{"kind": "kl", "estimator": "k1", "beta": 0.1}]}, "k1.*token_kl"),
        ({"shape": [{"kind": "running"}, {"kind": "running", "centre": True}]}, r"'grpo'.*\brunning\b"),
        (
            {"shape": [{"kind": "token_kl", "beta": 1}] * 2, "credit": {"kind": "returns"}},
            r"'grpo'.*\btoken_kl\b.*\bbetas\b",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(changes, message):
    with pytest.raises(UsageError, match=message):
        get_recipe("grpo", changes)


def test_an_unknown_recipe_names_its_neighbours_and_then_every_other():
    with pytest.raises(UsageError, match=r"'grop'[^,]*\bgrpo,") as refused:
        get_recipe("grop")
    assert set(RECIPES) <= set(str(refused.value).replace(",", "").split())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"baselin": {}}, r"'baselin'.*\bbaseline\b"),
        ({"baseline": {"epsi": 1}}, r"'baseline\.std\.epsi'.*\beps\b"),
        ({"weigh": {"foo": 1}}, r"'weigh\.foo'.*\blimit\b"),
        ({"regulariser": [{"kind": "entropy", "beta": 0.1}]}, r"'regulariser\.0\.entropy\.beta'.*\bcoef"),
        ({"regulariser": [{"kind": "kl", "adaptive": {"foo": 1}}]}, r"'regulariser\.0\.kl\.adaptive\.foo'"),
        ({"surrogate": {"kind": "cispo", "hihg": 1}}, r"'surrogate\.cispo\.hihg'.*\blow, cap\b"),
    ],
)
def test_an_unknown_constant_names_those_of_its_term(changes, says):
    with pytest.raises(UsageError, match=says):
        get_recipe("grpo", changes)


def test_changes_keep_what_they_do_not_name():
    changed = get_recipe("dapo", {"surrogate": {"high": 0.3}, "weigh": {"kind": "episode"}})
    assert changed.surrogate.model_dump() == {"kind": "ppo", "low": 0.2, "high": 0.3, "dual": None, "per": "token"}
    assert changed.select.flat == "drop"
    other = get_recipe("dapo", {"surrogate": {"kind": "cispo"}})
    assert other.surrogate.model_dump() == {"kind": "cispo", "low": None, "cap": 5.0}
    assert RECIPES["dapo"].surrogate.kind == "ppo"
