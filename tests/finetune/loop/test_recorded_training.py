"""Training repeats the runs that commit 9dc43d5 recorded: the same tokens, log-probs, rewards and published weights."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapereel.agents.engines.embedded import load_pretrained, weights_digest
from tapereel.finetune.trainer import checkpoints, micro_batches, trainer
from tapereel.finetune.trainer.logprobs import read_out

from ...recorded.digest import digest_of, machine
from ...recorded.worlds import WORLDS, train

RECORDED = Path(__file__).parents[2] / "recorded"
NEAR = 1e-5
"""Largest difference of a log-prob, in nats, on another machine than the one that recorded the runs."""
COMMON: dict[str, Any] = {
    "loop.updates": 3,
    "loop.groups": 2,
    "loop.group_size": 3,
    "loop.max_lag": 0,
    "loop.checkpoint_every": 1,
    "loop.keep_checkpoints": None,
    "loop.sampling.max_tokens": 6,
    "loop.limits.turns": 3,
    "loop.optimiser.lr": 1e-2,
    "trainer.device": "cpu",
    "evaluation.fraction": 0,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "text": {
        **COMMON,
        "loop.changes": {"regulariser": [{"kind": "entropy", "coefficient": 0.05}]},
        "loop.minibatches": 2,
        "evaluation.fraction": 0.5,
        "evaluation.every": 2,
        "evaluation.limit": 3,
    },
    "tools": {**COMMON, "loop.recipe": "rloo"},
    "pictures": {
        **COMMON,
        "loop.recipe": "reinforce_plain",
        "loop.updates": 2,
        "loop.groups": 6,
        "loop.group_size": 1,
        "loop.max_concurrent": 1,
        "loop.sampling.max_tokens": 3,
    },
}
"""Name of a run -> the settings of `record.py` in today's words."""
ONE_PASS = ("tools", "pictures")
"""Runs whose loss and gradient the output layer now computes in one pass, a deliberate change. It computes the softmax
as exp(z - max z) / sum instead of exp(z - logsumexp z), so the last bits differ. In two passes, which the entropy bonus
of `text` still needs, they are equal."""


def recorded(name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The digest of a recorded run, and the machine that recorded it."""
    found = json.loads((RECORDED / f"{name}.json").read_text())
    return found, {key: found.pop(key) for key in machine()}


def logprobs(digest: dict[str, Any]) -> np.ndarray:
    """(n,) log-probs of all sampled tokens, in the order of the digest."""
    calls = [call for episode in digest["episodes"] for call in episode["calls"]]
    return np.concatenate([np.frombuffer(base64.b64decode(call[2]), "<f4") for call in calls])


def discrete(digest: dict[str, Any]) -> list[dict[str, Any]]:
    """The episodes without their log-probs."""
    return [{**one, "calls": [call[:2] for call in one["calls"]]} for one in digest["episodes"]]


def compare(now: dict[str, Any], then: dict[str, Any], here: dict[str, str], there: dict[str, str]) -> None:
    """Compare the digest of a training on the machine `here` with the one that was recorded `there`: bit for bit on
    equal machines, otherwise tokens and rewards exactly and log-probs within `NEAR`."""
    how = "bit for bit" if here == there else f"tokens and rewards exactly, log-probs within {NEAR:g}"
    how = f"compared {how}: recorded on {there}, trained on {here}"
    assert discrete(now) == discrete(then), how
    assert len(now["published"]) == len(then["published"]), how
    assert now["weights"].keys() == then["weights"].keys(), how
    if here == there:
        assert logprobs(now).tobytes() == logprobs(then).tobytes(), how
        assert now == then, how
    else:
        assert np.abs(logprobs(now) - logprobs(then)).max() <= NEAR, how


def trained(name: str, folder: Path, then: dict[str, Any]) -> dict[str, Any]:
    """The digest of a training now. The digest of the weights has another definition since, so a recorded one is in
    `published` if the weights have it (`weights_digest`)."""
    run = train(name, folder, SETTINGS[name])
    states = [load_pretrained(folder / "model").model.state_dict()]
    states += [one.weights() for one in checkpoints(run / "checkpoints")]
    found = digest_of(run)
    assert found["published"] == [weights_digest(state) for state in states]
    known = [weights_digest(state, recorded) for state, recorded in zip(states, then["published"], strict=True)]
    return {**found, "published": known}


@pytest.mark.parametrize("name", WORLDS)
def test_training_repeats_the_recorded_run(name: str, tmp_path: Path) -> None:
    then, there = recorded(name)
    there |= {"output layer": "two passes"} if name in ONE_PASS else {}
    compare(trained(name, tmp_path, then), then, machine(), there)


@pytest.mark.parametrize("name", ONE_PASS)
def test_in_two_passes_training_repeats_the_recorded_run_bit_for_bit(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then, there = recorded(name)
    monkeypatch.setattr(micro_batches, "SHARE_TOKENS", 64)  # another deliberate change
    monkeypatch.setattr(trainer, "read_out", lambda *args, loss=None, **kwargs: read_out(*args, **kwargs))
    compare(trained(name, tmp_path, then), then, machine(), there)


def changed(call: int, by: float) -> dict[str, Any]:
    """The recorded digest of `text` with another first value of the prompt (0), the completion (1) or the log-probs (2)
    of its first call."""
    digest, _ = recorded("text")
    calls = digest["episodes"][0]["calls"]
    values = np.frombuffer(base64.b64decode(calls[0][call]), "<f4" if call == 2 else "<i4").copy()
    values[0] += by
    calls[0][call] = base64.b64encode(values.tobytes()).decode()
    return digest


@pytest.mark.parametrize("other", ["", "torch", "transformers", "cpu"])
def test_the_comparison_fails_for_each_change_that_it_must_find(other: str) -> None:
    then, there = recorded("text")
    here = {**there, other: "another"} if other else there
    compare(then, then, here, there)
    weights = {**then, "weights": {**then["weights"], "update-000001": "0" * 64}}
    wrong = [changed(0, 1), changed(1, 1), changed(2, 1e-3), {**then, "published": then["published"][1:]}]
    rewards = json.loads(json.dumps(then))
    rewards["episodes"][0]["rewards"][0][1] += 1e-9
    for one in (*wrong, rewards):
        with pytest.raises(AssertionError):
            compare(one, then, here, there)
    for one in (changed(2, 5e-6), weights):
        if other:
            compare(one, then, here, there)
            continue
        with pytest.raises(AssertionError):
            compare(one, then, here, there)


@pytest.mark.parametrize("name", WORLDS)
def test_a_digest_is_of_the_recorded_run_in_which_every_update_moved_the_weights(name: str) -> None:
    then, _ = recorded(name)
    assert digest_of(RECORDED / name) == {**then, "weights": {}}
    assert len(set(then["published"])) == len(then["published"]) == len(then["weights"]) + 1 >= 3
    assert len(set(then["weights"].values())) == len(then["weights"])
    assert len({reward for one in then["episodes"] for _, reward in one["rewards"]}) > 2
