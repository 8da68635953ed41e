"""A setting that is called as in TRL or verl is answered with ours, and the table names settings that exist."""

from __future__ import annotations

from typing import Any

import pytest

from tapereel.agents import RunConfig
from tapereel.finetune import TrainConfig
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.run import DemoConfig
from tapereel.tapes.common import ConfigError, load_config
from tapereel.tapes.common.config import config_keys

VALUES: dict[str, Any] = {
    "loop.changes.surrogate.low": 0.1,
    "loop.changes.surrogate.high": 0.3,
    "loop.changes.baseline.kind": "mean",
    "loop.changes.regulariser": [{"kind": "kl", "beta": 0.04}, {"kind": "entropy", "coefficient": 0.01}],
}


def refusal(key: str, config: Any = TrainConfig) -> str:
    with pytest.raises(ConfigError) as found:
        load_config(config, None, ["engine.kind=embedded", "engine.model=m", f"{key}=1"])
    return str(found.value)


def suggested(key: str) -> list[str]:
    (line,) = (line for line in refusal(key).splitlines() if "unknown key" in line)
    return line.partition("did you mean ")[2].removesuffix("?").split(" or ")


@pytest.mark.parametrize("name", TrainConfig.other_names)
def test_every_name_in_the_table_leads_to_settings_that_exist(name: str):
    ours = TrainConfig.other_names[name]
    assert suggested(name) == list(ours)
    assert name not in {key.rsplit(".", 1)[-1] for key in config_keys(TrainConfig)}, "it is a name of ours"
    for key in ours:
        if key.startswith("loop.changes."):
            *above, leaf = key.split(".")[2:]
            change = VALUES[key]
            get_recipe("grpo", {above[0]: {leaf: change}} if above else {leaf: change})
        else:
            assert key in config_keys(TrainConfig)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("loop.learning_rate", ["loop.optimiser.lr"]),
        ("loop.optimiser.learning_rate", ["loop.optimiser.lr"]),
        ("loop.critic.learning_rate", ["loop.critic.optimiser.lr"]),
        ("warm.learning_rate", ["warm.optimiser.lr"]),
        ("actor_rollout_ref.rollout.n", ["loop.group_size"]),
        ("algorithm.kl_ctrl.kl_coef", ["loop.changes.regulariser"]),
        ("weight_decay", ["loop.optimiser.weight_decay", "loop.critic.optimiser.weight_decay"]),
        ("temperature", ["loop.sampling.temperature", "evaluation.sampling.temperature"]),
        ("loop.grops", ["loop.groups", "loop.group_size"]),
    ],
)
def test_the_group_of_a_key_decides_which_setting_is_meant(key: str, ours: list[str]):
    assert suggested(key)[: len(ours)] == ours


@pytest.mark.parametrize("engine", ["engine", "loop.teacher", "players.left.engine"])
def test_an_earlier_name_of_servers_weights_is_one_problem_with_the_new_key(engine: str):
    sets = ["engine.kind=embedded", "engine.model=m"]
    if engine.startswith("players"):
        sets.append("players.left.agents=[a/left]")
    if engine != "engine":
        sets += [f"{engine}.kind=vllm", f"{engine}.model=m", f"{engine}.urls=[http://a]"]
    with pytest.raises(ConfigError) as found:
        load_config(TrainConfig, None, [*sets, f"{engine}.publish=lora", f"{engine}.nccl.port=1"])
    text = str(found.value)
    assert [line.partition(" (")[0].strip() for line in text.splitlines()] == [
        "2 settings are wrong:",
        f"unknown key {engine}.publish",
        f"unknown key {engine}.nccl",
    ]
    assert f"did you mean {engine}.weights?" in text
    assert f"did you mean {engine}.weights.port?" in text


@pytest.mark.parametrize("name", ["stop", "min_p", "repetition_penalty"])
def test_a_setting_of_the_engine_leads_to_the_group_that_takes_any(name: str):
    assert f"loop.sampling.extra.{name}" in refusal(f"loop.sampling.{name}")
    assert "extra" not in refusal("loop.sampling.temprature"), "this is a slip of the pen"
    found = load_config(RunConfig, None, ["engine.kind=embedded", "engine.model=m", f"sampling.extra.{name}=1"])
    assert found.sampling.extra == {name: 1}


def test_a_demo_suggests_only_settings_that_it_has():
    assert "loop.optimiser.lr" in refusal("learning_rate", DemoConfig)
    assert "engine." not in refusal("model_name_or_path", DemoConfig).split("model_name_or_path")[-1]
