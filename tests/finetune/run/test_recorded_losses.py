"""The losses and gradients of `train`, computed again from the run directory by the slow oracles.

Each test trains a tiny model by the settings of a user. What is on the tapes (token ids, log-probs, rewards) and the
model's own forward pass give a `World` for each epoch; the oracles of tests/oracles give the loss of each token's
log-prob, a difference quotient its gradient, and AdamW the weights of the next epoch. So each epoch's recorded loss
and gradient norm are checked, at ratios that have moved away from 1, without an object of the trainer.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tapereel as tr
from tapereel.finetune import get_recipe
from tapereel.tapes import Answer

from ...oracles import advantages, losses
from ...oracles.world import Attempt, Said, World

LR, EPOCHS, TEMPERATURE = 0.02, 3, 0.8
STEP = 1e-4
OPTIMISER: dict[str, Any] = {"lr": LR, "grad_clip": None, "micro_tokens": 32}


class Odd(tr.Environment):
    """Pays for each answer by its text, in one or two turns, so that groups differ in all that a recipe can read."""

    async def reset(self, task: str) -> str:
        self.task, self.turn = task, 0
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        self.turn += 1
        drawn = hashlib.sha256(f"{self.task} {self.turn} {action}".encode()).digest()
        return tr.Outcome("on", reward=drawn[0] % 5 / 4, terminated=self.turn == 2 or drawn[1] % 3 == 0)


@tr.agent
async def forgetful(tape: Any, llm: Any) -> Any:
    """Each call begins anew, so a tape has a row for each turn."""
    reply = await llm(tape, messages=[{"role": "user", "content": f"{tape.task} {tape.turns}"}])
    yield Answer(text=reply.text)


def trained(
    path: Path, recipe: str, changes: dict[str, Any], agent: tr.Agent | None = None, **more: object
) -> tuple[tr.Run, dict[str, Any]]:
    """(the run, its recipe's constants): one update of three epochs, in micro-batches of about two rows."""
    path.mkdir(exist_ok=True)
    model = tr.save_tiny_model(path / "model", alphabet="abcdo n", size="micro", seed=3)
    settings = {
        "loop.updates": 1,
        "loop.groups": 3,
        "loop.group_size": 4,
        "loop.max_lag": 0,
        "loop.epochs": EPOCHS,
        "loop.sampling.max_tokens": 3,
        "loop.sampling.temperature": TEMPERATURE,
        "loop.optimiser": OPTIMISER,
        "loop.changes": changes,
        "loop.limits.turns": 2,
        "evaluation.fraction": 0,
        **more,
    }
    run = tr.train(
        agent or tr.ChatAgent(), Odd, ["a", "b", "c"], model, recipe=recipe, out=path / "run", settings=settings
    )
    longest = 2 * 3  # turns x max_tokens
    return run, get_recipe(recipe, changes, longest=longest).model_dump(mode="json")


class Reading:
    """The first update of a run, from its directory and the model that it began with."""

    def __init__(self, run: tr.Run, recipe: dict[str, Any]) -> None:
        self.recipe = recipe
        with tr.Store.open(run.path) as store:
            self.uses: list[Any] = [stored.record for stored in store.run_records("use")]
        self.temperature = 1.0 if recipe["score"]["temperature"] == "one" else TEMPERATURE
        self.model = AutoModelForCausalLM.from_pretrained(run.path.parent / "model").double().eval()
        self.calls: list[tuple[list[int], int]] = []
        """(ids of prompt and completion, number of the prompt's), a call each."""
        self.world = World([], [])
        for tape in map(run.tape, self.uses[0].info["tapes"]):
            paid = [0.0] * tape.turns
            for reward in tape.rewards:
                assert reward.step is not None
                paid[tape.entries[reward.step].turn] += reward.value
            length = sum(len(call.completion or ()) for call in tape.calls)
            for turn, call in enumerate(tape.calls):
                assert call.completion is not None
                assert call.logprobs is not None
                prompt = list(call.prompt)
                self.calls.append(([*prompt, *call.completion], len(prompt)))
                self.world.tokens += [Said(len(self.world.episodes), turn, old=old) for old in call.logprobs]
            self.world.episodes.append(Attempt(tape.begin.group, tape.reward, paid, length=length))
        with torch.no_grad():
            first, entropy = self.scores()
        for token, lp, h in zip(self.world.tokens, first.tolist(), entropy.tolist(), strict=True):
            token.ref = token.prox = lp
            token.entropy = h  # of the weights that met the batch, as `select.entropy_top` reads it
        self.bonus = any(term["kind"] == "entropy" for term in recipe["regulariser"])

    def scores(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-prob, entropy) of each own token by the weights as they are now; a forward pass for each call."""
        found = []
        for ids, prompt in self.calls:
            logits = self.model(torch.tensor([ids])).logits[0, prompt - 1 : -1] / self.temperature
            whole = logits.log_softmax(-1)
            own = whole.gather(-1, torch.tensor(ids[prompt:])[:, None])[:, 0]
            found.append((own, -(whole.exp() * whole).sum(-1)))
        return torch.cat([own for own, _ in found]), torch.cat([entropy for _, entropy in found])

    def epoch(
        self, optimizer: torch.optim.Optimizer, advantage: list[float], inside: list[bool]
    ) -> tuple[float, float]:
        """(loss, gradient norm) of an epoch by the oracles; the weights make the step."""
        lp, entropy = self.scores()
        now = lp.tolist()
        if self.bonus:
            for token, h in zip(self.world.tokens, entropy.tolist(), strict=True):
                token.entropy = h

        def total(at: list[float]) -> float:
            return losses.total(self.world, self.recipe, advantage, inside, at, now)

        def slope(t: int) -> float:
            up, down = ([*now[:t], now[t] + d, *now[t + 1 :]] for d in (STEP, -STEP))
            return (total(up) - total(down)) / (2 * STEP)

        def entropy_slope(t: int) -> float:
            token, h = self.world.tokens[t], self.world.tokens[t].entropy
            found = []
            for token.entropy in (h + STEP, h - STEP):
                found.append(total(now))
            token.entropy = h
            return (found[0] - found[1]) / (2 * STEP)

        loss, pull = total(now), torch.tensor([slope(t) for t in range(len(now))], dtype=torch.float64)
        tensors, pulls = [lp], [pull]
        if self.bonus:
            tensors.append(entropy)
            pulls.append(torch.tensor([entropy_slope(t) for t in range(len(now))], dtype=torch.float64))
        optimizer.zero_grad()
        torch.autograd.backward(tensors, pulls)
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in self.model.parameters() if p.grad is not None))
        optimizer.step()
        return loss, norm


def check(
    path: Path,
    recipe: str,
    changes: dict[str, Any] | None = None,
    rewards: bool = True,
    agent: tr.Agent | None = None,
    optimiser: dict[str, Any] = OPTIMISER,
) -> None:
    """Train, read, and compare each epoch. rewards: False for a recipe that imitates what is there."""
    run, constants = trained(path, recipe, changes or {}, agent, **{"loop.optimiser": optimiser})
    reading = Reading(run, constants)
    world = reading.world
    if rewards:
        advantage, inside, _ = advantages.advantages(world, constants)
    else:
        known = advantages.scored(world, False)
        episodes = advantages.entered(world, constants["select"], known, constants["baseline"]["by"])
        inside = [episodes[token.episode] for token in world.tokens]
        advantage = [1.0] * len(world.tokens)
    norm = 0.0
    optimizer = torch.optim.AdamW(reading.model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    assert len(reading.uses) == EPOCHS
    for use in reading.uses:
        loss, norm = reading.epoch(optimizer, advantage, inside)
        assert use.info["loss"] == pytest.approx(loss, rel=2e-3, abs=2e-6), use.epoch
        assert use.info["grad_norm"] == pytest.approx(norm, rel=2e-3), use.epoch
    assert norm > 0


@pytest.mark.ledger("F34", "F43", "F49", "F54", "T04", "T13")
def test_discounted_returns_of_turns_without_a_baseline(tmp_path: Path) -> None:
    turns = {"kind": "returns", "clock": "turn", "gamma": 0.7}
    changes = {"reward": {"per": "turn"}, "credit": turns, "adjust": [{"kind": "clip", "limit": 1.1}]}
    check(tmp_path, "reinforce_plain", changes)


@pytest.mark.ledger("F34", "F43", "F46", "X6", "T01")
def test_whitened_returns_with_a_price_of_each_token(tmp_path: Path) -> None:
    check(tmp_path, "reinforce_pp", {"shape": [{"kind": "token_kl", "beta": 0.5, "estimator": "k1"}]})


@pytest.mark.ledger("F35", "F54", "F53", "X4")
def test_leave_one_out_with_a_mean_over_episodes(tmp_path: Path) -> None:
    check(tmp_path, "rloo", {"weigh": {"kind": "episode"}})


@pytest.mark.ledger("F36", "F51", "F64", "X4")
def test_the_groups_mean_whitened_with_an_entropy_bonus(tmp_path: Path) -> None:
    bonus = [{"kind": "entropy", "coefficient": 0.05}]
    check(tmp_path, "reinforce_pp_baseline", {"regulariser": bonus, "weigh": {"kind": "group"}})
    relu = {"adjust": [{"kind": "relu"}], "regulariser": bonus, "weigh": {"kind": "turn"}}
    check(tmp_path / "relu", "reinforce_pp_baseline", relu)


@pytest.mark.ledger("F01", "F02", "F37", "F52", "F53", "T18", "T19", "T42")
def test_grpo_with_a_kl_to_the_reference(tmp_path: Path) -> None:
    check(tmp_path, "grpo", {"regulariser": [{"kind": "kl", "estimator": "k3", "beta": 0.3}]})


@pytest.mark.ledger("F40", "F48", "F63", "X1")
def test_the_batchs_spread_an_uneven_clip_and_a_kl_to_the_sampler(tmp_path: Path) -> None:
    changes = {
        "baseline": {"kind": "batch_std", "ddof": 0},
        "adjust": [{"kind": "clip", "limit": 0.8}],
        "surrogate": {"low": 0.1, "high": 0.3, "dual": 1.5},
        "regulariser": [{"kind": "kl", "to": "sampler", "estimator": "k2", "beta": 0.2}],
    }
    check(tmp_path, "grpo", changes)


@pytest.mark.ledger("F27", "F29", "F33", "F41", "T25")
def test_shaped_rewards_and_weights_of_groups(tmp_path: Path) -> None:
    changes = {
        "shape": [
            {"kind": "clip", "low": 0.3, "high": 1.2},
            {"kind": "overlong", "limit": 6, "buffer": 3, "factor": 0.5},
            {"kind": "episode_kl", "beta": 0.2, "estimator": "k2"},
        ],
        "adjust": [{"kind": "groups", "cap": 2.0}],
    }
    check(tmp_path, "grpo", changes)


@pytest.mark.ledger("F56", "F55", "T15")
def test_the_clipped_policy_gradient(tmp_path: Path) -> None:
    check(tmp_path, "cpgd")


@pytest.mark.ledger("X2", "T23")
def test_clipped_weights_in_front_of_the_score_function(tmp_path: Path) -> None:
    check(tmp_path, "cispo", {"surrogate": {"cap": 1.2}})


@pytest.mark.ledger("F52", "T03")
def test_ratios_of_whole_episodes_and_smooth_ones(tmp_path: Path) -> None:
    check(tmp_path, "gspo", {"surrogate": {"low": 0.05, "high": 0.05}})
    check(tmp_path / "sapo", "sapo")


@pytest.mark.ledger("F57", "T22", "X3", "X4")
def test_only_tokens_of_high_entropy_that_have_not_drifted(tmp_path: Path) -> None:
    select = {"entropy_top": 0.5, "kl_mask": 0.5, "shift_mask": 0.3}
    check(tmp_path, "grpo", {"select": select, "weigh": {"kind": "constant", "limit": 4}})


@pytest.mark.ledger("X5")
def test_a_few_of_each_group_are_kept_and_compared(tmp_path: Path) -> None:
    spread = {"keep": 2, "keep_how": "spread"}
    check(tmp_path, "grpo", {"select": spread, "adjust": [{"kind": "groups"}]})
    check(tmp_path / "after", "grpo", {"select": {**spread, "keep_when": "after_baseline"}})
    bounded = {"keep": 3, "bounds": [None, 1.3], "mean_bounds": [0.2, 0.6], "flat": "drop"}
    check(tmp_path / "bounded", "reinforce_pp_baseline", {"select": bounded})


@pytest.mark.ledger("X13")
def test_imitation(tmp_path: Path) -> None:
    check(tmp_path, "minor_sft", rewards=False)
    check(tmp_path / "rft", "rft", {"select": {"bounds": [1.0, None]}}, rewards=False)


@pytest.mark.ledger("F70")
def test_the_policy_stands_still_while_the_critic_warms_up(tmp_path: Path) -> None:
    run, _ = trained(tmp_path, "ppo", {}, **{"loop.critic": {"first": 2}, "loop.epochs": 1, "loop.updates": 3})
    with tr.Store.open(run.path) as store:
        names: Any = [stored.record for stored in store.run_records("publish")]
    base, one, two, three = (name.digest for name in names if name.mode != "start")
    assert base == one == two != three


@pytest.mark.ledger("P13", "F08")
def test_an_episode_in_several_rows_weighs_as_one(tmp_path: Path) -> None:
    check(
        tmp_path, "grpo", {"weigh": {"kind": "episode"}, "adjust": [{"kind": "whiten", "how": "add"}]}, agent=forgetful
    )


@pytest.mark.ledger("F03", "P3", "T44")
def test_packed_rows(tmp_path: Path) -> None:
    priced = {"shape": [{"kind": "token_kl", "beta": 0.5}], "weigh": {"kind": "episode"}}
    packed = {**OPTIMISER, "pack": True, "micro_tokens": 64}
    check(tmp_path, "reinforce_pp", priced, optimiser=packed)
    check(tmp_path / "rows", "grpo", agent=forgetful, optimiser=packed)


@pytest.mark.ledger("P1", "T06", "T40", "X4")
def test_dapo_and_dr_grpo(tmp_path: Path) -> None:
    check(tmp_path, "dr_grpo")
    check(tmp_path / "dapo", "dapo")
