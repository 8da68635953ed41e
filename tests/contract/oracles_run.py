"""Run by the Python of the TRL environment: `oracles_run.py OUT`. Losses, gradients, advantages and metrics of TRL and
TorchRL, computed by their own classes, beside ours on the same tokens and weights. OUT/oracles.json has for each name
the largest difference and the largest number that was compared.
"""

import copy
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import numpy as np
import torch
from datasets import Dataset
from tensordict import TensorDict
from torchrl.objectives.llm import DAPO, CISPOLoss, GRPOLoss, MCAdvantage
from torchrl.objectives.value.functional import generalized_advantage_estimate
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.finetune import Critic, CriticTrainer, Episode, Row, Trainer, get_recipe
from tapereel.tapes import CauseType, Status

WORDS, LIMIT = 23, 32
SHARP = {"baseline": {"eps": 1e-4}}
"""TRL adds 1e-4 to a group's deviation."""
TRL = {
    "grpo": (SHARP | {"weigh": {"kind": "episode"}}, {"loss_type": "grpo"}),
    "grpo, token mean": (SHARP, {"loss_type": "bnpo"}),
    "grpo, a KL": (
        SHARP | {"regulariser": [{"kind": "kl", "estimator": "k3", "beta": 0.04}]},
        {"loss_type": "bnpo", "beta": 0.04},
    ),
    "grpo, dual clip": (SHARP | {"surrogate": {"dual": 1.3}}, {"loss_type": "bnpo", "delta": 1.3}),
    "dapo": (SHARP | {"select": {"flat": "keep"}}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": ({"weigh": {"limit": float(LIMIT)}}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "gspo": (
        SHARP,
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "cispo": (SHARP, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "sapo": (SHARP, {"loss_type": "sapo"}),
}
"""Name -> (changes to our recipe of that name, TRL's settings)."""
METRICS = {
    "clip_ratio/region_mean": "clip/own",
    "clip_ratio/low_mean": "clip/low/own",
    "clip_ratio/high_mean": "clip/high/own",
}
"""TRL's name -> ours."""
SIZES = (3, 4, 2)
REWARDS = (1.0, 0.0, 0.25, 0.5, 0.5, 0.5, 0.5, 2.0, -1.0)
FOUND: dict[str, list[float]] = {}


def note(name, ours, theirs):
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64).reshape(-1) for x in (ours, theirs))
    assert ours.shape == theirs.shape, (name, ours.shape, theirs.shape)
    FOUND[name] = [float((ours - theirs).abs().max()), float(theirs.abs().max())]


def made(seed):
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            initializer_range=0.3,
        )
    ).double()
    widen(model)
    return model.eval()


def widen(module):
    """Llama's norm goes through float32; torch's own does not."""
    for name, child in module.named_children():
        if type(child).__name__ == "LlamaRMSNorm":
            norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64)
            norm.load_state_dict(child.state_dict())
            setattr(module, name, norm)
        else:
            widen(child)


def batch(model):
    """Groups of 3, 4 (all rewards equal) and 2 episodes of 1 to 3 turns, some off policy."""
    rng, rows, episodes = np.random.default_rng(0), [], []
    groups = [g for g, n in enumerate(SIZES) for _ in range(n)]
    for i, (g, reward) in enumerate(zip(groups, REWARDS, strict=True)):
        own, turn, at = [], [], 4  # TRL pads prompts on the left, which moves the positions of shorter ones
        for k in range(int(rng.integers(1, 4))):
            n = int(rng.integers(1, 5))
            own += range(at, at + n)
            turn += [k] * n
            at += n + int(rng.integers(1, 3))
        ids = rng.integers(0, WORDS, at).astype(np.int32)
        with torch.no_grad():
            logits = model(torch.as_tensor(ids[None].astype(np.int64))).logits[0].log_softmax(-1)
        old = np.array([float(logits[p - 1, int(ids[p])]) for p in own]) + rng.normal(0, 0.25, len(own))
        n = len(own)
        rows.append(
            Row(
                tape=f"t{i}",
                group=f"g{g}",
                input_ids=ids,
                own=np.array(own, np.int32),
                old=np.minimum(old, 0).astype(np.float32),
                temperature=np.ones(n, np.float32),
                version=np.zeros(n, np.int32),
                call=np.array(turn, np.int32),
                turn=np.array(turn, np.int32),
                offset=np.arange(n, dtype=np.int32),
                calls=tuple(f"t{i}/{k}" for k in range(turn[-1] + 1)),
                agents=("agent",) * (turn[-1] + 1),
                versions=("run:0",),
            )
        )
        episodes.append(Episode(tape=f"t{i}", group=f"g{g}", reward=reward))
    return rows, episodes


def padded(rows, columns):
    """Prompts padded on the left, the rest on the right, as in TRL; and columns over own tokens laid out alike."""
    first = [int(row.own[0]) for row in rows]
    before, after = max(first), max(len(row) - p for row, p in zip(rows, first, strict=True))
    shape = (len(rows), after)
    out = {
        "prompt_ids": torch.zeros(len(rows), before, dtype=torch.int64),
        "prompt_mask": torch.zeros(len(rows), before, dtype=torch.int64),
        **{name: torch.zeros(shape, dtype=torch.int64) for name in ("completion_ids", "completion_mask", "tool_mask")},
        **{name: torch.zeros(shape, dtype=torch.float64) for name in columns},
    }
    for i, (row, p) in enumerate(zip(rows, first, strict=True)):
        ids = torch.as_tensor(row.input_ids.astype(np.int64))
        out["prompt_ids"][i, before - p :], out["prompt_mask"][i, before - p :] = ids[:p], 1
        out["completion_ids"][i, : len(ids) - p], out["completion_mask"][i, : len(ids) - p] = ids[p:], 1
        own = torch.as_tensor(row.own.astype(np.int64)) - p
        out["tool_mask"][i, own] = 1
        for name, column in columns.items():
            out[name][i, own] = torch.as_tensor(column[i], dtype=torch.float64)
    return out


def logprobs(model, inputs):
    """Of the padded batch's completions, by a forward pass of the whole."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    there = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    positions = (there.cumsum(-1) - 1).clamp(min=0)
    width = inputs["completion_ids"].shape[1]
    logits = model(input_ids=ids, attention_mask=there, position_ids=positions).logits[:, -width - 1 : -1]
    return logits.log_softmax(-1).gather(-1, inputs["completion_ids"][..., None])[..., 0]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def flat(grads, names):
    return torch.cat([grads[name].reshape(-1) for name in names])


def trl(out, model, reference, rows, episodes):
    tokenizer = char_tokenizer("abcd")
    scores = torch.tensor(REWARDS, dtype=torch.float64).split(SIZES)
    for name, (changes, settings) in TRL.items():
        scale = settings.get("scale_rewards") != "none"
        advantages = torch.cat([(x - x.mean()) / (x.std() + 1e-4 if scale else 1.0) for x in scores])
        config = GRPOConfig(
            output_dir=str(out / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            max_completion_length=LIMIT,
            temperature=1.0,
            use_bias_correction_kl=False,
            **{**settings, "beta": 0.0},
        )
        theirs_model = copy.deepcopy(model)
        trainer = GRPOTrainer(
            model=copy.deepcopy(model),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
            processing_class=tokenizer,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
        )
        trainer.beta = settings.get("beta", 0.0)  # in its settings it would load a reference model from the hub
        trainer.model.eval()
        inputs = padded(rows, {"old_per_token_logps": [row.old for row in rows]})
        with torch.no_grad():
            inputs["ref_per_token_logps"] = logprobs(reference, inputs)
        inputs |= {"advantages": advantages, "num_items_in_batch": inputs["tool_mask"].sum()}
        # TRL's own scores go through float32. The loss is the question here.
        scored = logprobs(theirs_model, inputs)
        trainer._get_per_token_logps_and_entropies = lambda *_, scored=scored, **__: (scored, 0 * scored.detach(), None)
        loss = trainer._compute_loss(theirs_model, inputs)
        theirs = gradients(theirs_model, loss)
        recipe = get_recipe(name.split(",")[0], changes)
        ours = Trainer(model, recipe, reference=reference if recipe.needs_reference else None)
        stats, grads = ours.gradient(ours.prepare(rows, episodes))
        note(f"trl/{name}/loss", stats.loss, float(loss.detach()))
        note(f"trl/{name}/gradient", flat(grads, theirs), flat(theirs, theirs))
        if name == "grpo, token mean":
            line = stats.line()
            for their_name, our_name in METRICS.items():
                note(f"trl/metric/{their_name}", line[our_name], trainer._metrics["eval"][their_name][-1])
        if name == "grpo, a KL":
            note("trl/metric/kl", stats.line()["kl/reference/k3"], trainer._metrics["eval"]["kl"][-1])


def torchrl_losses(model, rows, episodes):
    inputs = padded(rows, {"old": [row.old for row in rows]})
    mask = inputs["tool_mask"].bool()
    scores = torch.tensor(REWARDS, dtype=torch.float64).split(SIZES)
    per_episode = torch.cat([(x - x.mean()) / x.std().clamp_min(1e-6) for x in scores])
    data = TensorDict(
        {
            "advantage": per_episode[:, None, None].expand(*mask.shape, 1),
            ("tokens", "full"): inputs["completion_ids"],
            ("log_probs", "full"): inputs["old"],
        },
        [len(rows)],
    )
    for name, kind, recipe, options, changes in (
        ("grpo token_mean", GRPOLoss, "grpo", {}, {}),
        ("grpo prompt_mean", GRPOLoss, "grpo", {"aggregation": "prompt_mean"}, {"weigh": {"kind": "episode"}}),
        ("dapo", DAPO, "dapo", {"clip_epsilon": (0.2, 0.28)}, {"select": {"flat": "keep"}}),
        # Theirs has its gradient through the ratio, ours in front of the log-prob: equal where nothing is clipped.
        ("cispo", CISPOLoss, "cispo", {"clip_epsilon": (0.99, 9.0)}, {"surrogate": {"cap": 10.0}}),
    ):
        module = kind(entropy_bonus=False, **options)
        module._get_cur_log_prob = lambda *_: (logprobs(model, inputs), SimpleNamespace(mask=mask), False)
        done = module(data)
        theirs = gradients(model, done.loss_objective.sum())
        trainer = Trainer(model, get_recipe(recipe, changes))
        stats, grads = trainer.gradient(trainer.prepare(rows, episodes))
        if name != "cispo":
            note(f"torchrl/{name}/loss", stats.loss, done.loss_objective.detach())
        note(f"torchrl/{name}/gradient", flat(grads, theirs), flat(theirs, theirs))


def torchrl_advantages(model, rows, episodes):
    trainer = Trainer(model, get_recipe("grpo"))
    got = trainer.prepare(rows, episodes).batch.advantage.split([len(row.own) for row in rows])
    at = 0
    for size in SIZES:
        group = MCAdvantage(grpo_size=size, prompt_key="group", trajectory_return="sum")
        for reward in REWARDS[at : at + size]:
            steps = TensorDict(
                {
                    "group": torch.full((2,), at),
                    ("next", "reward"): torch.tensor([[0.0], [reward]], dtype=torch.float64),
                    ("next", "done"): torch.tensor([[False], [True]]),
                },
                [2],
            )
            done = group.inv(steps)
        note(f"torchrl/MCAdvantage of {size}", [float(a[0]) for a in got[at : at + size]], done["advantage"][::2])
        at += size


def torchrl_gae(rows):
    """Episodes that terminated, were truncated or met a limit; both clocks."""
    model = made(2)
    gamma, lam = (torch.tensor(x, dtype=torch.float64) for x in (0.9, 0.8))  # plain numbers become float32 there
    for clock in ("token", "turn"):
        critic = Critic.of(model)
        torch.manual_seed(3)
        torch.nn.init.normal_(critic.head.weight)
        recipe = get_recipe("ppo", {"credit": {"clock": clock, "gamma": 0.9, "lam": 0.8}, "adjust": []})
        trainer = Trainer(model, recipe, critic=CriticTrainer(critic))
        ends = [Status.FINISHED, Status.TRUNCATED, Status.LIMIT]
        episodes = []
        for i, row in enumerate(rows):
            earned = np.random.default_rng(i).normal(size=int(row.turn[-1]) + 1)
            episodes.append(
                Episode(
                    tape=row.tape,
                    group=row.group,
                    reward=earned.sum(),
                    turn_rewards=earned,
                    status=ends[i % 3],
                    cause=CauseType.TURNS if ends[i % 3] is Status.LIMIT else None,
                )
            )
        batch = trainer.prepare(rows, episodes).batch
        start = 0
        found = {"terminated": ([], []), "truncated": ([], [])}
        for i, row in enumerate(rows):
            n = len(row.own)
            values = batch.stream.value[start : start + n].double()
            advantage = batch.advantage[start : start + n]
            last = np.append(row.turn[1:] != row.turn[:-1], True)
            first = np.append(True, last[:-1])
            steps = np.arange(n) if clock == "token" else np.flatnonzero(first)
            reward = torch.zeros(n, dtype=torch.float64)
            reward[np.flatnonzero(last)] = torch.as_tensor(np.asarray(episodes[i].turn_rewards))
            if clock == "turn":
                reward = reward[np.flatnonzero(last)]
            # The value at the cut by the model itself, of the tokens up to the agent's last one.
            with torch.no_grad():
                ids = torch.as_tensor(row.input_ids[: row.own[-1] + 1].astype(np.int64))[None]
                beyond = critic.head(critic.body(ids).last_hidden_state[0, -1])
            v = values[steps]
            done = torch.zeros(len(v), 1, dtype=torch.bool)
            done[-1] = True
            finished = ends[i % 3] is Status.FINISHED
            theirs, _ = generalized_advantage_estimate(
                gamma, lam, v[:, None], torch.cat([v[1:], beyond])[:, None], reward[:, None], done, done & finished
            )
            kind = "terminated" if finished else "truncated"
            found[kind][0].append(advantage[steps])
            found[kind][1].append(theirs[:, 0])
            start += n
        for kind, (ours, theirs) in found.items():
            note(f"torchrl/GAE by {clock}, {kind}", torch.cat(ours), torch.cat(theirs))


def main(out):
    torch.set_num_threads(1)
    model, reference = made(0), made(1)
    rows, episodes = batch(model)
    trl(out, model, reference, rows, episodes)
    torchrl_losses(model, rows, episodes)
    torchrl_advantages(model, rows, episodes)
    torchrl_gae(rows)
    (out / "oracles.json").write_text(json.dumps(FOUND))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
