"""An adaptive KL in the reward, from the settings of `train` to the numbers of metrics.jsonl, and in `Trainer`."""

from __future__ import annotations

import secrets
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tapereel as tr
from tapereel.finetune import Critic, CriticTrainer, Episode, OptimiserConfig, Row, Trainer
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.trainer import checkpoints, score
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store, read_metrics

from ...oracles import reward_kl as slow
from ..build import batch, tiny_model


class Twice(tr.Environment):
    """Two turns, each with a reward of its own."""

    async def reset(self, task: str) -> str:
        self.word, self.turn = task, 0
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        self.turn += 1
        return tr.Outcome(observation="b", reward=earned(str(action), self.word, self.turn), terminated=self.turn == 2)


def earned(text: str, word: str, turn: int) -> float:
    return text.count(word) + 0.5 * turn


SETTINGS = {
    "loop.groups": 2,
    "loop.group_size": 4,
    "loop.max_lag": 0,
    "loop.sampling.max_tokens": 3,
    "loop.optimiser.lr": 1e-2,
    "loop.checkpoint_every": 2,
    "evaluation.fraction": 0,
}
ADAPTIVE = {"kind": "token_kl", "beta": 0.15, "adaptive": {"target": 0.01, "horizon": 64}}


def trained(folder: Path, *, updates: int = 4, recipe: str = "ppo_kl", resume: bool = False, **settings: Any) -> tr.Run:
    model = folder / "model" if resume else tr.save_tiny_model(folder / "model", alphabet="ab", size="micro")
    more = {**SETTINGS, **{name.replace("__", "."): value for name, value in settings.items()}}
    return tr.train(
        tr.ChatAgent(),
        Twice,
        ["a", "b"],
        model,
        updates=updates,
        recipe=recipe,
        out=folder / "run",
        settings=more,
        resume=resume,
    )


def answers_of(run: Path, model: Path) -> list[list[slow.Answer]]:
    """The episodes of each update, from the records of the run and a plain forward pass of the model that it began
    with; every value is 0."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model).double()
    with Store.open(run) as store:
        (lineage,) = {stored.record.lineage for stored in store.run_records("use")}
        uses = [use for use in store.ledger(lineage).uses if use.epoch == 0]
        return [[_answer(store.tape(tape), base) for tape in use.info["tapes"]] for use in uses]


def _answer(tape: tr.Tape, base: Any) -> slow.Answer:
    answer = slow.Answer([], [], [], [])
    for turn, call in enumerate(tape.calls, 1):
        prompt, own = list(call.prompt), list(call.completion or ())
        with torch.no_grad():
            logits = base(input_ids=torch.tensor([[*prompt, *own]])).logits[0].log_softmax(-1)
        answer.old += list(call.logprobs or ())
        answer.ref += [float(logits[len(prompt) + k - 1, token]) for k, token in enumerate(own)]
        answer.earned += [0.0] * (len(own) - 1) + [earned(call.text or "", str(tape.begin.task.private), turn)]
    answer.value = [0.0] * len(answer.old)
    return answer


@pytest.mark.ledger("F31", "F68")
def test_ppo_with_an_adaptive_kl_in_the_reward_is_the_formula_update_by_update(tmp_path: Path) -> None:
    # A critic that doesn't learn says 0, and without whitening the advantages themselves are in the metrics.
    run = trained(
        tmp_path,
        loop__changes={"adjust": [], "shape": [ADAPTIVE]},
        loop__critic__optimiser__lr=1e-12,
        loop__critic__normalised=False,
        loop__epochs=2,
        loop__minibatches=2,
    )
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    beta, betas = 0.15, set()
    for line, answers in zip(lines, answers_of(tmp_path / "run", tmp_path / "model"), strict=True):
        wanted = slow.update(answers, beta, target=0.01, horizon=64)
        flat = [a for one in wanted.advantage for a in one]
        found: dict[str, Any] = dict(line)
        assert found["kl/reward/beta"] == pytest.approx(beta, rel=1e-6)
        assert found["kl/reward/k1"] == pytest.approx(wanted.kl, abs=1e-5)
        assert found["advantage"] == pytest.approx(statistics.fmean(flat), abs=1e-4)
        assert found["advantage/square"] == pytest.approx(statistics.fmean(a * a for a in flat), abs=1e-4)
        assert (found["advantage/min"], found["advantage/max"]) == pytest.approx((min(flat), max(flat)), abs=1e-4)
        beta = wanted.beta
        betas.add(round(beta, 9))
    assert len(betas) == 4, "four optimiser steps make one update, which moves the coefficient once"
    assert float(lines[-1]["kl/reward/k1"] or 0) > 0.01, "far enough for a penalty that matters"
    last = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    assert last.trainer_state()["betas"] == pytest.approx([beta], rel=1e-6)
    assert run.reproduce().outcome == "verified"


@pytest.mark.ledger("F31", "F44", "F68")
def test_with_a_learning_critic_advantages_targets_and_coefficient_are_the_formula_s() -> None:
    model, base = tiny_model(), tiny_model(seed=1)
    shape = [{"kind": "token_kl", "beta": 0.2, "adaptive": {"target": 0.05, "horizon": 32}}]
    recipe = get_recipe("ppo_kl", {"shape": shape})
    trainer = Trainer(
        model,
        recipe,
        OptimiserConfig(lr=1e-2),
        reference=base,
        critic=CriticTrainer(Critic.of(model), OptimiserConfig(lr=1e-2)),
    )
    beta = 0.2
    for seed in range(3):
        rows, episodes = batch(model=model, seed=seed)
        ref = score(base, rows).logprob.tolist()
        values = trainer.critic.values(rows).tolist() if trainer.critic else []
        answers = _in_time(rows, episodes, ref, values)
        wanted = slow.update([answer for _, answer in answers], beta, target=0.05, horizon=32)
        whole = [a for one in slow.whitened(wanted.advantage) for a in one]
        targets = [v for one in wanted.target for v in one]
        order = [t for places, _ in answers for t in places]
        prepared = trainer.prepare(rows, episodes, several=True)
        assert prepared.batch.target is not None
        assert prepared.batch.advantage[order].tolist() == pytest.approx(whole, abs=1e-6)
        assert prepared.batch.target[order].tolist() == pytest.approx(targets, abs=1e-6)
        trainer.step(prepared)
        trainer.step(prepared)
        beta = wanted.beta
        assert trainer.betas == [pytest.approx(beta, rel=1e-9)]


def _in_time(
    rows: list[Row], episodes: list[Episode], ref: list[float], value: list[float]
) -> list[tuple[list[int], slow.Answer]]:
    """(places in the batch, tokens) of each episode that is trained on, by turn."""
    tokens = [(row.tape, int(row.turn[k]), float(row.old[k])) for row in rows for k in range(len(row.own))]
    found = []
    for episode in episodes:
        mine = sorted((t for t, one in enumerate(tokens) if one[0] == episode.tape), key=lambda t: (tokens[t][1], t))
        answer = slow.Answer([tokens[t][2] for t in mine], [ref[t] for t in mine], [value[t] for t in mine], [])
        turns = [tokens[t][1] for t in mine]
        rewards = episode.turn_rewards
        for k, turn in enumerate(turns):
            ends = k + 1 == len(turns) or turns[k + 1] != turn
            by_turn = (
                float(rewards[turn]) if rewards is not None else float(episode.reward or 0) * (k + 1 == len(turns))
            )
            answer.earned.append(by_turn if ends else 0.0)
        found.append((mine, answer))
    return found


@pytest.mark.ledger("F68")
def test_a_run_that_was_stopped_goes_on_with_the_coefficient_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda n: "00" * n)  # seeds follow from the lineage
    changes = {"shape": [ADAPTIVE]}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    trained(straight, loop__changes=changes)
    trained(stopped, updates=2, loop__changes=changes)
    trained(stopped, loop__changes=changes, resume=True)
    states = [checkpoints(one / "run" / "checkpoints")[-1].trainer_state() for one in (straight, stopped)]
    assert states[0]["betas"] == states[1]["betas"] != [0.15]
    assert published(straight / "run") == published(stopped / "run")


def published(run: Path) -> dict[str, str]:
    """Version -> digest of the weights."""
    with Store.open(run) as store:
        return {stored.record.version: stored.record.digest for stored in store.run_records("publish")}


@pytest.mark.ledger("F57")
def test_all_of_the_entropies_chosen_is_as_none_chosen_also_off_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda n: "00" * n)
    found, lines = [], []
    for top in (None, 1.0):
        folder = tmp_path / str(top)
        # Scored at temperature 1, sampled at 0.5: every log-prob of the trainer differs from the sampler's.
        changes = {"score": {"temperature": "one"}, "shape": [ADAPTIVE], "select": {"entropy_top": top}}
        more: dict[str, Any] = {"loop__sampling__temperature": 0.5, "loop__sampler_tolerance": None}
        trained(folder, recipe="reinforce_pp", updates=2, loop__changes=changes, **more)
        found.append(published(folder / "run"))
        lines.append([dict(line, train_seconds=None) for line in read_metrics(folder / "run" / "metrics.jsonl")])
    assert max(float(line["mismatch"] or 0) for line in lines[0]) > 0.05, "off policy"
    for one, other in zip(*lines, strict=True):
        assert {k: v for k, v in one.items() if not k.startswith("perf/")} == {
            k: v for k, v in other.items() if not k.startswith("perf/")
        }
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 3


def test_a_coefficient_that_could_never_move_is_refused() -> None:
    with pytest.raises(UsageError, match=r"adaptive.*\bbeta\b"):
        get_recipe("ppo_kl", {"shape": [{**ADAPTIVE, "beta": 0.0}]})


@pytest.mark.ledger("F68")
def test_the_coefficient_of_a_skipped_update_stays() -> None:
    model = tiny_model()
    recipe = get_recipe("ppo_kl", {"shape": [{**ADAPTIVE, "adaptive": {"target": 0.05, "horizon": 32}}]})
    base = tiny_model(seed=1)
    with torch.no_grad():
        next(base.parameters()).fill_(float("nan"))
    trainer = Trainer(model, recipe, reference=base, critic=CriticTrainer(Critic.of(model)))
    assert trainer.update(*batch(model=model)).skipped is not None
    assert trainer.betas == [0.15]
    assert np.isfinite(trainer.betas).all()
