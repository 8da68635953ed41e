"""A mixture of experts, trained by the settings of `train`: the balance is in each loss that moves a router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import tapereel as tr
from tapereel.tapes.store import Store, read_metrics


class Counted(tr.Environment):
    async def reset(self, task: str) -> str:
        self.word = task
        return task

    async def step(self, action: tr.Action) -> tr.Outcome:
        return tr.Outcome(reward=float(str(action).count(self.word)), terminated=True)


SETTINGS: dict[str, Any] = {
    "loop.groups": 2,
    "loop.group_size": 4,
    "loop.max_lag": 0,
    "loop.sampling.max_tokens": 3,
    "evaluation.fraction": 0,
}


def mixture(folder: Path) -> Path:
    made = tr.save_tiny_model(folder, alphabet="ab", size="micro")
    config: Any = AutoConfig.from_pretrained(made)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    same = {name: getattr(config, name) for name in ("vocab_size", "max_position_embeddings", "eos_token_id")}
    experts = MixtralConfig(**sizes, **same, num_key_value_heads=2, num_local_experts=4, initializer_range=0.3)
    MixtralForCausalLM(experts).save_pretrained(made)
    return made


def balance(model: Path, run: Path, tapes: list[str]) -> float:
    """transformers' own, over the tokens that predict one of the tapes' tokens."""
    body: Any = AutoModelForCausalLM.from_pretrained(model).model
    with Store.open(run) as store:
        calls = [(store.tape(tape), store.tape(tape).calls[0]) for tape in tapes]
        rows = [[*call.prompt, *(call.completion or ())][:-1] for tape, call in calls]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        logits = body(input_ids=ids, output_router_logits=True).router_logits
        return float(load_balancing_loss_func(logits, 4, 2, mask))


@pytest.mark.ledger("F65", "F66")
def test_rollouts_demonstrations_and_the_critic_are_balanced(tmp_path: Path) -> None:
    model = mixture(tmp_path / "model")
    scene: Any = (tr.ChatAgent(), Counted, ["a", "b"], model)
    tr.train(*scene, updates=1, recipe="grpo", out=tmp_path / "shown", settings=SETTINGS)
    terms = [{"kind": "aux", "coefficient": 0.5}, {"kind": "nll", "coefficient": 0.3}]
    more = {
        "loop.changes": {"regulariser": terms},
        "loop.demonstrations": 3,
        "warm.tapes": str(tmp_path / "shown"),
        "warm.updates": 0,
        "warm.batch": 4,
    }
    run = tr.train(*scene, updates=2, recipe="ppo", out=tmp_path / "run", settings=SETTINGS | more)
    line: dict[str, Any] = dict(read_metrics(run.path / "metrics.jsonl")[0])
    with Store.open(run.path) as store:
        info = next(stored.record for stored in store.run_records("use")).info
    rollouts, shown = (balance(model, run.path, info[name]) for name in ("tapes", "shown"))
    assert rollouts != pytest.approx(shown, rel=1e-3)
    assert line["aux"] == pytest.approx(rollouts, rel=1e-4)
    assert line["demonstrations/aux"] == pytest.approx(shown, rel=1e-4)
    assert line["value/aux"] == pytest.approx(rollouts, rel=1e-4), "its body is a copy of the policy's"
    others = line["loss/policy"] + line["loss/nll"]
    assert line["loss"] - others == pytest.approx(0.5 * rollouts + 0.3 * 0.5 * shown, rel=1e-4)
    assert run.reproduce().outcome == "verified"
