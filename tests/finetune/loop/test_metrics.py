"""The lines of metrics.jsonl of runs of `train`: each value computed again from the tapes, and each name documented."""

from __future__ import annotations

import hashlib
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import tapereel as tr
from tapereel.envs.load_named import load_named
from tapereel.finetune import get_recipe
from tapereel.finetune.run import Axes, train
from tapereel.tapes.store import append_metrics, read_metrics
from tapereel.tapes.view.curves import loss_plots

from ...envs.remote.worlds import until
from ...oracles import advantages, losses, metrics
from ..run.stage import EXAMPLE, WORLD, config
from ..run.test_recorded_losses import LR, Reading

DOCS = Path(__file__).resolve().parents[3] / "docs" / "reference" / "metrics.md"
EPOCHS = 3


class Paid(tr.Environment):
    """Two components and a metric for each answer, by its text; task `f` pays each answer the same,
    `s` waits, and `n` breaks at some answers."""

    begun = waiting = 0
    """Episodes of tasks other than `s` that began, and those of `s` that are still to wait in their first turn."""

    async def reset(self, task: str) -> str:
        self.task, self.turn = task, 0
        Paid.begun += task != "s"
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        self.turn += 1
        if self.task == "s" and self.turn == 1 and Paid.waiting:
            Paid.waiting -= 1
            # With groups of 4 and a lag of 1, as many can't begin before two updates; an evaluation has 4 of them.
            await until(lambda begun=Paid.begun: Paid.begun >= begun + 16)
        if self.task == "n" and len(str(action)) % 2:
            raise OSError("no answer from the world")
        drawn = hashlib.sha256(f"{self.task} {self.turn} {action}".encode()).digest()
        if self.task == "f":
            drawn = bytes((1, 3, 0, drawn[3]))
        cut = drawn[1] % 5 == 0
        return tr.Outcome(
            "on",
            reward={"accuracy_reward": drawn[0] % 5 / 4, "format_reward": drawn[2] % 3 / 2},
            metrics={"drawn": float(drawn[3])},
            terminated=drawn[1] % 3 == 0 and not cut,
            truncated=cut,
        )


def trained(
    path: Path,
    recipe: str = "grpo",
    changes: dict[str, Any] | None = None,
    tasks: Any = ("a", "b", "f"),
    model: Path | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tr.Run:
    path.mkdir(exist_ok=True)
    model = model or tr.save_tiny_model(path / "model", alphabet="abcdo nfs", size="micro", seed=3)
    whole: dict[str, Any] = {
        "loop.updates": 1,
        "loop.groups": 3,
        "loop.group_size": 4,
        "loop.max_lag": 0,
        "loop.sampling.max_tokens": 3,
        "loop.optimiser": {"lr": LR, "grad_clip": None, "micro_tokens": 32},
        "loop.changes": changes or {},
        "loop.limits.turns": 3,
        "evaluation.fraction": 0,
        **(settings or {}),
    }
    return tr.train(tr.ChatAgent(), Paid, list(tasks), model, recipe=recipe, out=path / "run", settings=whole)


def lines_of(run: tr.Run, phase: str = "rl") -> list[dict[str, Any]]:
    lines = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["phase"] == phase]


def uses_of(run: tr.Run) -> list[Any]:
    with tr.Store.open(run.path) as store:
        return [stored.record for stored in store.run_records("use") if not stored.record.epoch]


def assert_says(line: dict[str, Any], expected: dict[str, Any], rel: float = 1e-9) -> None:
    assert {name: line.get(name) for name in expected} == pytest.approx(expected, rel=rel, abs=1e-9)


@pytest.mark.ledger("F76", "F77")
def test_what_was_sampled_is_that_of_the_tapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also tokens that were too old: the first group of `s` waits in its first turn, and others overtake it."""
    monkeypatch.setattr(Paid, "waiting", 4)
    slow: dict[str, Any] = {
        "loop.max_lag": 1,
        "loop.groups": 1,
        "loop.updates": 12,
        "loop.max_concurrent": 8,
        "evaluation.fraction": 0.3,
        "loop.optimiser": {"lr": 1e-5},  # answers stay those of the untrained model, whatever the updates are made of
    }
    run = trained(tmp_path, tasks=["s", *"abcd"], settings=slow | {"evaluation.every": 4, "evaluation.attempts": 2})
    lines = lines_of(run)
    for use, line in zip(uses_of(run), lines, strict=True):
        tapes = [run.tape(tape) for tape in use.info["tapes"]]
        assert_says(line, metrics.rollouts([tape.bodies for tape in tapes], use.update, use.info["oldest"]))
        rewards = [tape.reward for tape in tapes]
        assert_says(line, {**metrics.spread("reward", rewards), **metrics.spread("return", rewards)})
    for name in ("stale_share", "lag", "length/answer/cut", "ended/truncated", "ended/limit"):
        assert len({line[name] for line in lines}) > 1, f"the test shows nothing of {name}"
    assert max(line["lag/max"] for line in lines) > 1
    for line, part in zip(
        lines_of(run, "evaluation"), ("before", "update-000004", "update-000008", "after"), strict=True
    ):
        tapes = [tape.bodies for tape in run.tapes(f"eval-{part}-sampled")]
        found = metrics.rollouts(tapes, 0, 0)
        named = [name for name in found if name.split("/")[0] in ("component", "length", "ended", "turns", "truncated")]
        assert_says(line, {f"sampled/{name}": found[name] for name in named})


@pytest.mark.ledger("F76")
def test_a_name_of_the_rollouts_is_on_their_axis_alone(tmp_path: Path) -> None:
    (line,) = lines_of(trained(tmp_path))
    rollout, train = Axes().points(line)
    assert (rollout.axis, train.axis) == ("rollout", "train")
    for name in ("reward", "component/accuracy_reward", "component/format_reward", "length/answer", "length/total"):
        assert rollout.values[f"rollout/{name}"] == line[name]
    assert not {name.removeprefix("rollout/") for name in rollout.values} & {
        name.removeprefix("train/") for name in train.values
    }
    kept = ("loss", "loss/policy", "grad_norm", "lr", "advantage", "clip/own", "entropy/sampled")
    assert {f"train/{name}" for name in kept} <= set(train.values)


def scored(
    run: tr.Run, recipe: str, changes: dict[str, Any]
) -> tuple[Reading, dict[str, Any], list[float], list[bool]]:
    """(the first update, its recipe, its advantages, its tokens that entered), by the oracles."""
    constants = get_recipe(recipe, changes).model_dump(mode="json")
    reading = Reading(run, constants)
    reading.temperature = 1.0
    with torch.no_grad():
        first, entropy = reading.scores()
    for token, lp, h in zip(reading.world.tokens, first.tolist(), entropy.tolist(), strict=True):
        token.ref = token.prox = lp
        token.entropy = h
    advantage, inside, _ = advantages.advantages(reading.world, constants)
    return reading, constants, advantage, inside


@pytest.mark.ledger("F71", "F72", "F73", "F77")
def test_values_of_tokens_are_those_of_the_models_and_clips_those_of_trl(tmp_path: Path) -> None:
    """One of three groups is flat, so its tokens aren't forwarded: what is said of all own tokens is theirs too."""
    changes = {"surrogate": {"low": 0.05, "high": 0.1}, "credit": {"gamma": 1.0}}
    run = trained(tmp_path, changes=changes, settings={"loop.epochs": EPOCHS})
    reading, _, advantage, inside = scored(run, "grpo", changes)
    (line,) = lines_of(run)
    old = [float(token.old or 0.0) for token in reading.world.tokens]
    assert all(inside)
    live = [a != 0 for a in advantage]
    assert 0 < sum(live) < len(live)
    optimizer = torch.optim.AdamW(reading.model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    steps = []
    for _ in range(EPOCHS):
        with torch.no_grad():
            steps.append(reading.scores()[0].tolist())
        reading.epoch(optimizer, advantage, inside)
    ratios = [[math.exp(lp - o) for lp, o in zip(step, old, strict=True)] for step in steps]
    trl = [metrics.clip_ratios(step, advantage, 0.05, 0.1) for step in ratios]
    for ours, theirs in (("clip", "region_mean"), ("clip/low", "low_mean"), ("clip/high", "high_mean")):
        over_all = statistics.fmean(step[theirs] for step in trl)
        assert over_all > 0
        assert_says(line, {f"{ours}/own": over_all, ours: over_all * len(live) / sum(live)}, rel=1e-6)
    spoken = [r for step in ratios for r, alive in zip(step, live, strict=True) if alive]
    now = [lp for step in steps for lp, alive in zip(step, live, strict=True) if alive]
    moved = [o - lp for step in steps for lp, o, alive in zip(step, old, live, strict=True) if alive]
    expected = {
        "token/live": sum(live) / len(live),
        "token/entered": 1.0,
        "tokens": len(live),
        "entropy/sampled": -statistics.fmean(old),
        "ess": sum(spoken) ** 2 / len(spoken) / sum(r * r for r in spoken),
        "kl/old": statistics.fmean(moved),
        **metrics.spread("ratio", spoken),
        **{name: value for name, value in metrics.spread("logprob", now).items() if name[7:] in ("", "/min", "/max")},
    }
    assert_says(line, expected, rel=2e-3)
    assert_says(line, metrics.spread("advantage", advantage), rel=1e-6)
    assert line["mismatch"] < 1e-4 < max(abs(d) for d in moved), "of the first step alone"


REGULARISED = [
    {"kind": "kl", "estimator": "k3", "beta": 0.3},
    {"kind": "kl", "to": "sampler", "estimator": "k2", "beta": 0.2},
    {"kind": "entropy", "coefficient": 0.05},
]


@pytest.mark.ledger("F77")
def test_the_terms_of_the_loss_are_those_of_the_oracles_and_add_up_to_it(tmp_path: Path) -> None:
    changes = {"regulariser": REGULARISED}
    run = trained(tmp_path, changes=changes, settings={"loop.epochs": EPOCHS})
    reading, constants, advantage, inside = scored(run, "grpo", changes)
    (line,) = lines_of(run)
    names = ("policy", "kl/reference", "kl/sampler", "entropy")
    terms = dict.fromkeys(names, 0.0)
    optimizer = torch.optim.AdamW(reading.model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    entropy = []
    for _ in range(EPOCHS):
        with torch.no_grad():
            lp, now = reading.scores()
        for token, h in zip(reading.world.tokens, now.tolist(), strict=True):
            token.entropy = h
        entropy += now.tolist()
        found = [0.0]
        for n in range(len(REGULARISED) + 1):
            some = {**constants, "regulariser": constants["regulariser"][:n]}
            found.append(losses.total(reading.world, some, advantage, inside, lp.tolist(), lp.tolist()))
        for name, before, after in zip(names, found, found[1:], strict=False):
            terms[name] += (after - before) / EPOCHS
        reading.epoch(optimizer, advantage, inside)
    assert_says(line, {f"loss/{name}": term for name, term in terms.items()}, rel=5e-3)
    assert all(abs(term) > 1e-5 for term in terms.values())
    whole = [line[name] for name in line if name.startswith("loss/")]
    assert line["loss"] == pytest.approx(sum(whole), abs=1e-6 * sum(map(abs, whole)))
    assert_says(line, {"entropy": statistics.fmean(entropy)}, rel=2e-3)
    assert line["token/live"] == 1.0, "a KL loss has a gradient at every token"
    assert_says(line, {"clip": line["clip/own"]})


def test_returns_have_shapes_and_penalties_and_the_critic_its_rate(tmp_path: Path) -> None:
    shape = [{"kind": "overlong", "limit": 6, "buffer": 3, "factor": 0.5}, {"kind": "token_kl", "beta": 0.4}]
    run = trained(
        tmp_path, "ppo", {"shape": shape}, settings={"loop.updates": 2, "loop.critic": {"optimiser": {"lr": 1e-3}}}
    )
    first, second = lines_of(run)
    use = uses_of(run)[1]
    reading = Reading(run, get_recipe("ppo", {"shape": shape}).model_dump(mode="json"))
    with torch.no_grad():
        assert abs(first["kl/reference/sampled"]) < 1e-6, "the reference is the model that sampled"
    returns = []
    for tape in map(run.tape, use.info["tapes"]):
        n = sum(len(call.completion or ()) for call in tape.calls)
        kl = 0.0
        for call in tape.calls:
            reading.calls = [([*call.prompt, *(call.completion or ())], len(call.prompt))]
            reading.temperature = 1.0
            with torch.no_grad():
                kl += sum(old - ref for old, ref in zip(call.logprobs, reading.scores()[0].tolist(), strict=True))
        returns.append(tape.reward + max(-0.5, min(0.0, -(n - 3) / 3 * 0.5)) - 0.4 * kl)
    assert_says(second, metrics.spread("return", returns), rel=1e-3)
    assert second["return"] != pytest.approx(second["reward"], abs=0.05)
    assert (second["value/lr"], second["lr"]) == (1e-3, LR)
    assert 1 - second["value/error"] / second["value/target/std"] ** 2 == pytest.approx(second["value/explained"])


def test_a_value_that_nothing_was_measured_of_is_no_zero(tmp_path: Path) -> None:
    run = trained(tmp_path, tasks=("f", "f", "f"))
    (line,) = lines_of(run)
    assert line["skipped"] == "nothing to train on"
    assert (line["token/live"], line["trained_tokens"], line["mismatch"], line["ess"]) == (0.0, 0, None, None)
    assert not {"clip", "clip/own", "entropy", "logprob", "kl/old", "loss/policy"} & set(line)
    assert line["entropy/sampled"] > 0


# The table of docs/reference/metrics.md

NEEDS = {
    "perf/cuda_memory_mib": "a GPU",
    "value/skipped": "a number of the critic that isn't finite",
}
"""Names that no run here writes, and what would."""


def rows_of(section: str) -> list[str]:
    """All names in the first column of that part of the page, the suffixed ones spelled out."""
    text = DOCS.read_text(encoding="utf-8").split(f"## {section}")[1].split("\n## ")[0]
    names: list[str] = []
    for cell in re.findall(r"^\| (`.*?) \|", text, flags=re.M):
        first, *more = re.findall(r"`([^`]+)`", cell)
        names += [first, *(f"{first}{one}" if one.startswith("/") else one for one in more)]
    return names


def pattern(name: str) -> re.Pattern[str]:
    """A word in capitals stands for any text; PATH for the agents of the run with several."""
    name = name.replace("EVAL", "(sampled|greedy)").replace("PATH", "pair/[a-z]+")
    return re.compile(re.sub(r"[A-Z]{3,}|\bK\b", ".+", name))


def mixture(folder: Path) -> Path:
    from transformers import MixtralConfig, MixtralForCausalLM

    tr.save_tiny_model(folder, alphabet="abcdo nfs", size="micro")
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    experts: dict[str, Any] = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    for old in folder.glob("*.safetensors"):
        old.unlink()
    MixtralForCausalLM(MixtralConfig(vocab_size=vocabulary, **sizes, **experts)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The lines of a run of each kind of recipe and of each option that has a metric of its own."""
    found: list[dict[str, Any]] = []

    def one(
        recipe: str = "grpo", changes: Any = None, tasks: str = "abf", settings: Any = None, experts: bool = False
    ) -> None:
        path = tmp_path_factory.mktemp("run")
        model = mixture(path / "experts") if experts else None
        run = trained(path, recipe, changes, tasks, model, settings)
        found.extend(json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines())

    adaptive = {"target": 0.1, "horizon": 100.0}
    one(
        changes={
            "regulariser": [{**term, **({"adaptive": adaptive} if "beta" in term else {})} for term in REGULARISED]
        }
    )
    measured: dict[str, Any] = {
        "evaluation.fraction": 0.4,
        "evaluation.greedy": True,
        "evaluation.attempts": 2,
        "evaluation.k": [1, 2],
    }
    one("ppo_kl", tasks="abcdf", settings=measured)
    one("ppo", {"shape": [{"kind": "episode_kl", "beta": 0.1}]})
    one("cispo", {"surrogate": {"cap": 1.01, "low": 0.01}})
    masks = {"bounds": [-9, 9], "keep": 3, "kl_mask": 0.1, "shift_mask": 0.1, "entropy_top": 0.5}
    clips = [{"kind": "clip", "low": 0.5, "high": 3.0}, {"kind": "overlong", "limit": 9, "buffer": 3}]
    bounded = {"adjust": [{"kind": "clip", "limit": 0.5}], "surrogate": {"dual": 2.0}, "select": masks, "shape": clips}
    one(changes=bounded | {"reward": {"components": {"accuracy_reward": 1.0, "format_reward": 0.5}}})
    one("dapo")
    one(changes={"select": {"mean_bounds": [0.0, 9.0]}})
    teacher = tr.save_tiny_model(
        tmp_path_factory.mktemp("teacher") / "model", alphabet="abcdo nfs", size="micro", seed=4
    )
    changes = {"regulariser": [{"kind": "kl", "to": "teacher", "estimator": "k2", "beta": 1.0, "adaptive": adaptive}]}
    one("distill", changes, settings={"loop.teacher": str(teacher)})
    one("decoupled_ppo", settings={"loop.epochs": 2})
    one("decoupled_ppo", {"anchor": {"weight": "mask", "low": 0.5, "high": 2.0}}, settings={"loop.epochs": 2})
    one(changes={"regulariser": [{"kind": "aux", "coefficient": 0.1}]}, experts=True)
    shown = tr.run(
        tr.ChatAgent(),
        Paid,
        ["a", "b", "c"],
        ["ab", "do"],
        out=tmp_path_factory.mktemp("demos") / "run",
        settings={"split": "demo", "limits.turns": 2},
    )
    imitated: dict[str, Any] = {"warm": {"tapes": str(shown.path), "updates": 1, "batch": 2}, "loop.demonstrations": 2}
    one(changes={"regulariser": [{"kind": "nll", "coefficient": 0.1}]}, tasks="abn", settings=imitated)
    models = tmp_path_factory.mktemp("models")
    load_named(f"{EXAMPLE}:save_models")(str(models))
    out = tmp_path_factory.mktemp("players") / "run"
    measured = {"fraction": 0.0, "tasks": f"{WORLD}:held_out", "every": 1}
    train(config(models, updates=1, evaluation=measured), out)
    found.extend(read_metrics(out / "metrics.jsonl"))
    return found


def documented(lines: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """(section, name) of every key."""
    for line in lines:
        yield from (("Evaluations" if line["phase"] == "evaluation" else "Updates", key) for key in line)


def test_the_table_has_every_name_that_a_run_writes_and_no_other(every: list[dict[str, Any]]) -> None:
    keys = set(documented(every))
    of_players = [key.split("/", 2)[2] for _, key in keys if key.startswith("players/")]
    assert "length/answer" in of_players
    keys |= {("Updates", key) for key in of_players}
    for section in ("Updates", "Evaluations"):
        written = {key for place, key in keys if place == section}
        known = {name: pattern(name) for name in rows_of(section)}
        missing = {key for key in written if not any(one.fullmatch(key) for one in known.values())}
        assert not missing, f"docs/reference/metrics.md has no row for {sorted(missing)}"
        idle = {name for name, one in known.items() if not any(one.fullmatch(key) for key in written)}
        assert idle == {name for name in NEEDS if name in known}, "rows that no run writes"


def test_the_overview_draws_them_for_the_policy_and_for_each_player(
    every: list[dict[str, Any]], tmp_path: Path
) -> None:
    line = next(line for line in every if "players/seeker/loss" in line)
    append_metrics(tmp_path / "metrics.jsonl", line)
    drawn = {plot.title: [curve.name for curve in plot.curves] for plot in loss_plots(tmp_path / "metrics.jsonl")}
    assert {"loss", "loss/policy", "loss of seeker", "loss/policy of seeker"} <= set(drawn["Loss"])
    assert {"length/answer", "length/total", "length/answer of seeker"} <= set(drawn["Lengths"])
    assert {"clip", "clip/low", "clip/own", "clip/own of seeker"} <= set(drawn["Clipped"])
    assert {"ended/limit", "length/answer/cut"} <= set(drawn["Cut off"])
    assert {"entropy/sampled", "entropy/sampled of seeker"} <= set(drawn["Entropy"])
    assert drawn["Tokens per second"] == ["perf/sampled_per_second", "perf/trained_per_second"]
    assert {"Components", "KL", "Age", "Stale", "Gradient norm", "Learning rate", "Flat groups"} <= set(drawn)
    assert line["length/episode"] == line["players/seeker/length/episode"] == 1.0, (
        "not the word of the other, or the judge's"
    )
