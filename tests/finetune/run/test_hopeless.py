"""A run that can't learn stops before its first update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tapereel as tr
from tapereel.envs.adapters import ToolEnvironment
from tapereel.tapes import Answer, Sampling
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store import Store

from .test_selection import Paid

SETTINGS = {
    "loop.groups": 1,
    "loop.group_size": 4,
    "loop.max_lag": 0,
    "loop.sampling.max_tokens": 2,
    "evaluation.fraction": 0,
}


@tr.agent
async def nucleus(tape: tr.Tape, llm: tr.LLM):
    reply = await llm(tape, sampling=Sampling(top_p=0.95, max_tokens=2))
    yield Answer(text=reply.text)


@tr.agent
async def drafts(tape: tr.Tape, llm: tr.LLM):
    """Only the answer is sampled from the distribution that its log-probs belong to."""
    await llm(tape, temperature=0.0)
    yield Answer(text=(await llm(tape)).text)


def trained(folder: Path, agent: Any, env: Any = Paid, **more: Any) -> tr.Run:
    model = tr.save_tiny_model(folder / "model", alphabet="ab", size="micro")
    more = {"recipe": "grpo", "updates": 1, "settings": SETTINGS, **more}
    return tr.train(agent, env, ["a"], model, out=folder / "run", **more)


@pytest.mark.parametrize(
    ("agent", "why"), [(nucleus, r"'nucleus'.*top_p=0\.95.*remove it"), (tr.ChatAgent(temperature=0), "temperature=0")]
)
def test_an_agent_none_of_whose_tokens_can_be_used_stops_the_run(tmp_path: Path, agent: Any, why: str):
    with pytest.raises(UsageError, match=f"'grpo'.*{why}"):
        trained(tmp_path, agent)
    with Store.open(tmp_path / "run") as store:
        assert not list(store.run_records("use")), "no update is recorded"


def test_tokens_of_any_kind_can_be_imitated_and_a_few_that_can_be_used_are_enough(tmp_path: Path):
    assert trained(tmp_path / "imitated", nucleus, recipe="sft").summary.tokens["trained"]
    assert trained(tmp_path / "few", drafts).summary.tokens["trained"]


class Unscored(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__([])


class Answered(Unscored):
    async def answered(self, text: str) -> tr.Outcome:
        return tr.Outcome(reward=len(text), terminated=True)


def test_tools_without_a_score_are_refused_where_rewards_are_needed(tmp_path: Path):
    with pytest.raises(UsageError, match=r"Unscored.*`answered`"):
        trained(tmp_path, tr.ChatAgent(), Unscored)
    assert not (tmp_path / "run").exists()
    assert trained(tmp_path / "imitated", tr.ChatAgent(), Unscored, recipe="sft").summary.updates == 1
    assert trained(tmp_path / "scored", tr.ChatAgent(), Answered).summary.updates == 1
