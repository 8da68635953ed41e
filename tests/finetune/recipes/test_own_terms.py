"""Recipes and terms of a user's own: found by name, trained like the package's, recorded and read again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tapereel as tr
from tapereel.finetune import LoopConfig, OptimiserConfig, Trainer
from tapereel.finetune.objective import PPO, Context, GroupBaseline, Overlong, Surrogate, TimeCredit, Weigh, read
from tapereel.finetune.objective import loss as objective
from tapereel.finetune.recipes import BrokenRecipes, get_recipe, read_recipes, write_recipes
from tapereel.tapes.errors import UsageError

from ..build import batch, exact, gradient, same, simple, tiny_model
from .own_terms import Confidence, LastToken, Median, Quadratic, Shifted, mine

NAME = f"{Quadratic.__module__}:mine"
FILE = Path(__file__).with_name("own_terms.py")


@pytest.mark.parametrize("micro_tokens", [2048, 20])
def test_an_own_surrogate_trains_as_the_loss_written_by_hand(micro_tokens: int):
    model = tiny_model()
    rows, episodes = batch(model=model)
    loss, grads = gradient(model, mine, rows, episodes, micro_tokens=micro_tokens)
    groups = {g: torch.tensor([e.reward / 2 for e in episodes if e.group == g]).double() for g in ("g0", "g1")}
    total, by_hand = sum(len(row.own) for row in rows), torch.zeros((), dtype=torch.float64)
    for row, episode in zip(rows, episodes, strict=True):
        a = 2 * (episode.reward / 2 - groups[row.group].mean()) / (groups[row.group].std() + 1e-9)
        ids, own = torch.from_numpy(row.input_ids).long(), torch.from_numpy(row.own).long()
        lp = model(input_ids=ids[None]).logits[0].log_softmax(-1)[own - 1].gather(1, ids[own, None])[:, 0]
        gap = lp - torch.from_numpy(row.old).double()
        by_hand = by_hand + (-gap.exp() * a + 0.25 / 2 * gap**2 + 0.01 * lp).sum() / total
    by_hand.backward()
    same((loss, grads), (by_hand.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}), 1e-7)


def test_an_own_term_takes_an_update_and_reports_its_metric():
    model = tiny_model()
    rows, episodes = batch(model=model)
    before = [p.clone() for p in model.parameters()]
    stats = Trainer(model, mine, OptimiserConfig(lr=1e-2)).update(rows, episodes)
    assert stats.skipped is None
    assert stats.sums.mean("quadratic") is not None
    assert any(not torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", [NAME, f"{Path(os.path.relpath(FILE))}:mine"])
def test_a_recipe_is_found_by_module_and_by_file(name: str):
    found = get_recipe(name, {"surrogate": {"beta": 0.125}, "weigh": {"kind": "episode"}})
    assert (found.name, type(found.surrogate).__name__, found.weigh.kind) == ("mine", "Quadratic", "episode")
    assert found.surrogate.model_dump() == {"beta": 0.125}
    assert get_recipe(name).surrogate.model_dump() == {"beta": 0.25}


def test_an_own_recipe_prints_its_terms_and_is_read_from_what_a_run_records(tmp_path: Path):
    kind = f"{Quadratic.__module__}:Quadratic"
    assert f"surrogate   {kind}(beta=0.25)" in str(mine)
    plain = mine.model_dump(mode="json")
    assert plain["surrogate"] == {"beta": 0.25, "kind": kind}
    assert read(plain) == read(mine.model_dump()) == mine
    write_recipes(tmp_path, {"rl": mine})
    assert read_recipes(tmp_path) == {"rl": mine}
    assert mine.but(surrogate={"beta": 1.0}).surrogate == Quadratic(beta=1.0)
    assert mine.but(surrogate={"kind": "ppo"}).surrogate == PPO()


def test_a_subclass_of_a_kind_keeps_its_class_and_its_constants():
    recipe = get_recipe("grpo").but(surrogate=Shifted(low=0.1, shift=0.3))
    again = read(json.loads(recipe.model_dump_json()))
    assert again.surrogate == Shifted(low=0.1, shift=0.3)
    assert isinstance(again.surrogate, Shifted)


def test_an_own_baseline_and_an_own_credit_make_the_advantages_and_are_read_from_their_record():
    recipe = get_recipe("grpo").but(baseline=Median(scale=2.0), credit=LastToken())
    context = Context()
    found = objective.prepare(recipe, exact(*simple([0.0, 1.0, 5.0, 4.0, None], list("aaabb"))), context)
    assert found.advantage.tolist() == [0.0, -2.0, 0.0, 0.0, 0.0, 8.0, 0.0, 0.0, 0.0, 0.0]
    assert context.sums["median/advantage"] == 6.0
    assert read(json.loads(recipe.model_dump_json())) == recipe
    assert recipe.model_dump()["baseline"] == {"by": "group", "scale": 2.0, "kind": f"{Median.__module__}:Median"}
    batch_wide = recipe.but(baseline={"by": "batch"})
    assert batch_wide.baseline == Median(by="batch", scale=2.0)
    found = objective.prepare(batch_wide, exact(*simple([0.0, 1.0, 5.0], list("abc"))), Context())
    assert found.advantage[1::2].tolist() == [-2.0, 0.0, 8.0]
    assert recipe.but(baseline={"kind": "mean"}).baseline == GroupBaseline(kind="mean")
    assert recipe.but(credit={"kind": "gae", "lam": 0.5}).credit == TimeCredit(kind="gae", lam=0.5)


def test_an_own_credit_says_what_it_reads():
    plain, valued = (get_recipe("grpo").but(credit=LastToken(valued=valued)) for valued in (False, True))
    assert (plain.needs_value, valued.needs_value, valued.bootstraps) == (False, True, False)
    objective.check_needs(plain, reference=False, critic=False)
    with pytest.raises(objective.BadBatch):
        objective.check_needs(valued, reference=False, critic=False)
    with pytest.raises(UsageError, match="LastToken"):
        get_recipe("reinforce_pp", {"shape": [{"kind": "token_kl", "beta": 0.1}], "credit": LastToken()})


class Kindly(GroupBaseline):
    """A record would lose its constant `kind`."""


class Heavier(Weigh):
    """Its field takes no class of a user's own."""


@pytest.mark.parametrize("changes", [{"baseline": Kindly(kind="loo")}, {"weigh": Heavier()}], ids=str)
def test_a_class_that_a_record_could_not_keep_is_refused(changes: dict[str, object]):
    (term,) = changes.values()
    with pytest.raises(UsageError, match=type(term).__name__):
        get_recipe("grpo", changes)


def test_another_process_reads_the_record_of_a_script_that_defined_a_term(tmp_path: Path):
    script = tmp_path / "own_term_script.py"
    script.write_text(
        "from tapereel.finetune.objective import Surrogate\n"
        "from tapereel.finetune.recipes import get_recipe\n"
        "from tapereel.finetune.objective.recipe import read\n"
        "class Mine(Surrogate):\n    beta: float = 1.0\n"
        "    def __call__(self, lp, anchor, a, index, stream, context):\n        return -lp\n"
        "if __name__ == '__main__':\n"
        "    recipe = get_recipe('grpo').but(surrogate=Mine())\n"
        "    assert read(recipe.model_dump()) == recipe\n"
        "    print(recipe.model_dump_json())\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, env=environment)
    plain = json.loads(done.stdout)
    assert plain["surrogate"]["kind"] == "own_term_script:Mine"
    with pytest.raises(UsageError, match=r"'own_term_script:Mine'.*PYTHONPATH"):
        read(plain)
    (tmp_path / "recipes.json").write_text(json.dumps({"rl": plain}), encoding="utf-8")
    found = read_recipes(tmp_path)["rl"]
    assert isinstance(found, UsageError)
    assert "own_term_script:Mine" in str(found)
    (tmp_path / "recipes.json").write_text("[]", encoding="utf-8")
    with pytest.raises(BrokenRecipes, match=r"recipes\.json"):
        read_recipes(tmp_path)


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("no_such_module:mine", UsageError, "'no_such_module'"),
        (f"{Quadratic.__module__}:yours", UsageError, "'yours'"),
        ("no_such_file.py:mine", UsageError, r"/no_such_file\.py"),
        (f"{Quadratic.__module__}:no_recipe", UsageError, "no_recipe'.*get_recipe"),
        (f"{Quadratic.__module__}:Quadratic", UsageError, "Quadratic'.*get_recipe"),
    ],
)
def test_a_wrong_name_of_an_own_recipe_is_refused(name: str, error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        get_recipe(name)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"surrogate": {"kind": f"{Quadratic.__module__}:Confidence"}},
            r"Confidence'.*objective\.surrogate\.Surrogate",
        ),
        ({"surrogate": {"kind": f"{Quadratic.__module__}:Quadratic", "bta": 1}}, r"Quadratic\b.*\bbta\b"),
        ({"surrogate": {"kind": f"{Quadratic.__module__}:Quadratic", "beta": -1}}, r"Quadratic\b.*\bbeta\b"),
        ({"surrogate": Confidence()}, "surrogate"),
        ({"surrogate": {"kind": "nowhere:Loss"}}, "'nowhere:Loss'"),
    ],
)
def test_a_wrong_own_term_is_refused(changes: dict, says: str):
    with pytest.raises(UsageError, match=says):
        get_recipe("grpo", changes)


def test_a_class_that_no_record_could_name_is_refused():
    class Inside(Surrogate):
        pass

    class Mean(Median):
        pass

    with pytest.raises(UsageError, match=r"<locals>\.Inside"):
        get_recipe("grpo", {"surrogate": Inside()})
    with pytest.raises(UsageError):
        get_recipe("grpo", {"baseline": Mean()})


def test_a_term_without_a_loss_says_what_is_missing():
    with pytest.raises(NotImplementedError, match=r"Surrogate.*__call__"):
        Surrogate()(*[torch.zeros(1)] * 4, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("recipe", "changes", "least", "most"),
    [
        ("dapo", {}, 20480 - 4096 + 1, None),
        ("dapo", {"shape": [{"kind": "overlong", "limit": 8, "buffer": 2}]}, 7, None),
        ("dr_grpo", {}, 512, 8 * 512),
        ("dr_grpo", {"weigh": {"limit": 1}}, 0, None),
        ("dr_grpo", {"weigh": {"kind": "token"}}, 0, None),
        ("grpo", {}, 0, None),
        (f"{Quadratic.__module__}:late", {}, 6, None),
    ],
)
def test_a_recipe_says_which_lengths_of_an_episode_it_fits(
    recipe: str, changes: dict[str, object], least: int, most: int | None
):
    found = get_recipe(recipe, changes)
    assert found.unfit(least) == []
    assert found.unfit(most or 10**6) == []
    assert [len(found.unfit(n)) for n in (least - 1,) if n > 0] == [1] * (least > 1)
    assert most is None or len(found.unfit(most + 1)) == 1


@pytest.mark.parametrize(
    ("recipe", "changes", "longest", "limits"),
    [
        ("dapo", None, 1000, (1000, 200, 1.0)),
        ("dapo", {"weigh": {"kind": "constant", "limit": 7}}, 1000, (1000, 200, 7.0)),
        ("dapo", {"shape": [{"kind": "overlong", "limit": 8, "buffer": 2}]}, 1000, (8, 2, 1.0)),
        ("dapo", None, 1, (1, 1, 1.0)),
        ("dapo", None, None, (20480, 4096, 1.0)),
        ("dr_grpo", None, 1000, (None, None, 1000.0)),
        ("dr_grpo", {"weigh": {"limit": 7}}, 1000, (None, None, 7.0)),
        ("dr_grpo", {"baseline": {"by": "batch"}}, 1000, (None, None, 1000.0)),
        ("dr_grpo", {"shape": [{"kind": "overlong", "limit": 8, "buffer": 2}]}, 1000, (8, 2, 1000.0)),
        ("dr_grpo", None, None, (None, None, 512.0)),
        ("reinforce", None, 1000, (None, None, 1.0)),
    ],
)
def test_length_limits_of_a_named_recipe_follow_the_longest_episode_unless_they_are_set(
    recipe: str, changes: dict[str, object] | None, longest: int | None, limits: tuple[object, ...]
):
    found = get_recipe(recipe, changes, longest=longest)
    price = next((term for term in found.shape if isinstance(term, Overlong)), None)
    assert (price and price.limit, price and price.buffer, found.weigh.limit) == limits
    assert longest is None or changes or found.unfit(longest) == []


@pytest.mark.parametrize(
    ("limits", "context", "longest"),
    [
        ({}, None, None),
        ({"turns": 3}, None, 30),
        ({"turns": 3, "calls": 2}, None, 20),
        ({"calls": 4}, None, 40),
        ({"turns": 3, "tokens": 25}, None, 25),
        ({"turns": 3, "context": 15}, None, 15),
        ({"turns": 3, "context": 15}, 14, 14),
        ({}, 14, 14),
    ],
)
def test_the_longest_episode_is_the_smallest_of_its_limits(
    limits: dict[str, int], context: int | None, longest: int | None
):
    loop = LoopConfig.model_validate({"sampling": {"max_tokens": 10}, "limits": {"turns": None, **limits}})
    assert loop.longest_episode(context) == longest


@pytest.mark.parametrize(
    ("recipe", "settings", "told"),
    [
        ("dapo", {}, None),
        ("dapo", {"loop.changes": {"shape": [{"kind": "overlong", "limit": 99, "buffer": 9}]}}, "limit 99"),
        ("dr_grpo", {}, None),
        ("dr_grpo", {"loop.changes": {"weigh": {"limit": 512}}}, "limit 512"),
        ("dr_grpo", {"loop.changes": {"weigh": {"limit": 6}}}, None),
        (f"{Quadratic.__module__}:late", {"loop.limits.turns": 2}, "late begins at 5"),
        (f"{Quadratic.__module__}:late", {}, None),
        (f"{Quadratic.__module__}:late", {"engine.capacity": 5}, "late begins at 5"),
        ("grpo", {}, None),
    ],
)
def test_a_run_says_at_its_start_which_limit_no_episode_reaches(
    recipe: str, settings: dict[str, object], told: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = tr.save_tiny_model(tmp_path / "model", alphabet="ab", size="micro")
    own = {"loop.sampling.max_tokens": 2, "loop.limits.turns": 3, "evaluation.fraction": 0, **settings}
    tr.train(tr.ChatAgent(), Never, ["a"], model, updates=0, recipe=recipe, out=tmp_path / "run", settings=own)
    found = [line for line in caplog.messages if line.startswith("recipe ")]
    assert [told in line for line in found] == ([True] if told else []), caplog.messages
    assert all(" 6 " in line or " 4 " in line or " 5 " in line for line in found)


class Never(tr.Environment):
    """No episode of it is sampled."""
