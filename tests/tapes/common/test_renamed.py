"""Runs of an earlier version: old paths of code and old configuration keys are read by their present names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tapereel.cli import main
from tapereel.envs.load_named import load_named
from tapereel.finetune.history.history import cpu_model
from tapereel.finetune.run.train_config import TrainConfig
from tapereel.tapes.common import renamed
from tapereel.tapes.common.config import Config, ConfigError, load_config
from tapereel.tapes.common.renamed import PATHS, current_path, translate_config
from tapereel.tapes.errors import UsageError
from tapereel.tapes.store.run_directory import recorded_settings
from tapereel.tapes.store.store import Store

RECORDED = Path(__file__).parents[2] / "recorded"

RECORDABLE = (
    "tapereel.agents.agent:Agent",
    "tapereel.agents.chat:ChatAgent",
    "tapereel.agents.gateway.control:Client",
    "tapereel.agents.gateway.control:Elsewhere",
    "tapereel.agents.gateway.program:Program",
    "tapereel.agents.judge:judge_reward",
    "tapereel.agents.judge:pairwise_reward",
    "tapereel.envs:Calculator",
    "tapereel.envs:GymEnvironment",
    "tapereel.envs:Taskset",
    "tapereel.envs.base:Environment",
    "tapereel.envs.calculator:Calculator",
    "tapereel.envs.calculator:read_action",
    "tapereel.envs.gym:GymEnvironment",
    "tapereel.envs.mcp:McpServer",
    "tapereel.envs.reasoning:reasoning_scorer",
    "tapereel.envs.remote.client:RemoteEnvironment",
    "tapereel.envs.remote.openenv:OpenEnvironment",
    "tapereel.envs.remote.proxy:Proxy",
    "tapereel.envs.rewards.files:file_reward",
    "tapereel.envs.rewards.local:local_reward",
    "tapereel.envs.rewards.mathematics:math_reward",
    "tapereel.envs.rewards.recipe:ensemble",
    "tapereel.envs.rewards.relative:ranked",
    "tapereel.envs.rewards.remote:http_reward",
    "tapereel.envs.sandbox:Sandbox",
    "tapereel.envs.tools:ToolEnvironment",
    "tapereel.envs.trl:TRLEnvironment",
    "tapereel.finetune.demo:calculator",
    "tapereel.finetune.demo:calculator_agent",
    "tapereel.finetune.trl_prompts:Ask",
    "tapereel.finetune.trl_prompts:Asked",
    "tapereel.tapes:Task.model_validate",
)
"""Paths of a587a60 that can stand on a tape or in a `config.yaml`."""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the recorded runs as the working directory, where their configurations look for `model` and tasks."""
    copy = shutil.copytree(RECORDED, tmp_path / "recorded")
    monkeypatch.chdir(copy)
    return copy


def answer_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def assert_verified(found: Any) -> None:
    assert {verdict["outcome"] for verdict in found["verdicts"]} == {"verified"}, found["verb"]


@pytest.mark.parametrize("path", RECORDABLE)
def test_every_path_that_a_run_can_hold_is_found(path: str):
    assert load_named(current_path(path)) is not None


def test_the_table_leads_to_present_modules_in_one_step():
    for old, new in PATHS.items():
        assert current_path(new) == new, f"{old} -> {new} is renamed again: name the last one"
        load_named(f"{new}:__name__" if ":" not in new else new)


@pytest.mark.parametrize("run", ["scripted", "trained"])
def test_an_old_run_verifies_shows_replays_and_executes_again(
    run: str, recorded: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["verify", run]) == 0
    with Store.open(recorded / run) as store:
        tape = next(iter(store.summaries())).id
    assert main(["show", run, tape]) == 0
    assert "calculator_problem" in capsys.readouterr().out
    for more in ((), ("--env",)):
        assert_verified(answer_of(capsys, "replay", run, *more))


def test_an_old_training_run_reproduces(recorded: Path, capsys: pytest.CaptureFixture[str]):
    """It names the processor's instructions, not its model: where the last bits differ, that can't be told."""
    code = main(["reproduce", "trained", "--json"])
    found = json.loads(capsys.readouterr().out)
    if code:
        assert (code, found["outcome"]) == (2, "unverifiable"), found
        now, then = found["reason"].rpartition("chip ")[2].removesuffix(")").split(" and not ")
        assert now == f"{then} {cpu_model()}"
    else:
        assert (found["outcome"], found["updates"]) == ("verified", 2)


def test_an_old_training_run_goes_on(recorded: Path, capsys: pytest.CaptureFixture[str]):
    """With its own file as `--config`, as the error for another configuration says."""
    assert main(["train", "--config", "trained/config.yaml", "--out", "trained", "--resume"]) == 0, capsys.readouterr()


def test_a_tape_without_a_configuration_names_its_own_agent_and_environment(
    recorded: Path, capsys: pytest.CaptureFixture[str]
):
    (recorded / "scripted/config.yaml").unlink()
    for more in ((), ("--env",)):
        assert_verified(answer_of(capsys, "replay", "scripted", *more))


def test_recorded_settings_have_the_present_names(recorded: Path):
    assert recorded_settings("trained")["env"] == current_path("tapereel.envs.calculator:Calculator")


def test_a_user_who_writes_an_old_path_gets_the_present_one():
    with pytest.raises(UsageError, match=r"no module 'tapereel.envs.calculator'; its present name is tapereel.envs"):
        load_named("tapereel.envs.calculator:Calculator")


class Group(Config):
    size: int = 0


class Whole(Config):
    group: Group = Group()
    name: str = ""


def test_old_keys_are_translated_in_a_record_and_refused_in_a_user_s_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(renamed, "KEYS", {"old.*.width": "players.*.size", "width": "group.size", "gone": None})
    monkeypatch.setattr(renamed, "RULES", (lambda data: data.update(name="by a rule"),))
    old = {"width": 3, "gone": 1, "old": {"a": {"width": 4}}}
    new = {"group": {"size": 3}, "old": {"a": {}}, "players": {"a": {"size": 4}}, "name": "by a rule"}
    assert translate_config(old) == new
    assert old["width"] == 3, "what is translated stays as it was"
    assert translate_config(new) == new

    path = tmp_path / "config.yaml"
    path.write_text("width: 3\n")
    with pytest.raises(ConfigError, match=r"width is now group\.size"):
        load_config(Whole, path)
    (tmp_path / "results.json").write_text("{}")
    assert load_config(Whole, path).group.size == 3


def engine(**more: Any) -> dict[str, Any]:
    old = {"kind": "embedded", "device": "auto", "dtype": "float32", "attention": None, "lora": None, "threads": 1}
    return {**old, **more}


def test_the_trainers_settings_leave_the_engine_where_it_was_trained():
    recorded = {
        "engine": engine(device="cuda:1", attention="eager"),
        "players": {
            "a": {"frozen": False, "engine": engine(lora={"rank": 2})},
            "b": {"frozen": True, "engine": engine()},
        },
        "loop": {},
    }
    found = translate_config(recorded)
    assert found["engine"] == {"kind": "embedded"}
    assert found["trainer"] == {
        "device": "cuda:1",
        "dtype": "float32",
        "attention": "eager",
        "lora": None,
        "threads": 1,
    }
    assert found["players"]["a"]["trainer"]["lora"] == {"rank": 2}
    sampling = {"kind": "embedded", "device": "auto", "dtype": "float32", "threads": 1}
    assert found["players"]["b"] == {"frozen": True, "engine": sampling}
    assert translate_config(found) == found
    alone = translate_config({"engine": engine(threads=4)})
    assert alone == {"engine": {**sampling, "threads": 4}}
    served = translate_config({"engine": engine(kind="vllm", publish="reload")})
    assert served == {"engine": {"kind": "vllm", "publish": "reload"}}


def test_a_vllm_inside_the_process_is_now_one_that_the_run_starts():
    old = {"engine": {"kind": "vllm_inprocess", "model": "m"}, "players": {}}
    assert translate_config(old) == {"engine": {"kind": "vllm", "model": "m"}, "players": {}}
    with pytest.raises(ConfigError, match=r"kind: vllm_inprocess is now kind: vllm without urls"):
        load_config(TrainConfig, None, ["agent=a:b", "env=a:b", "engine.model=m", "engine.kind=vllm_inprocess"])


def test_a_default_that_was_recorded_as_none_is_read_as_the_default():
    old = {"engine": {"kind": "embedded", "model": "m", "device": None, "dtype": None, "threads": 2}}
    assert translate_config(old) == {"engine": {"kind": "embedded", "model": "m", "threads": 2}}


def test_two_numbers_of_the_demo_are_constants_now():
    recorded = {"demonstrations": 64, "context": 64, "bad": 0.7}
    assert translate_config(recorded) == {"demonstrations": 64}
    assert translate_config({**recorded, "bad": 0.5}) == {"demonstrations": 64, "bad": 0.5}, "another run: refused"


@pytest.mark.parametrize(("old", "new"), [("true", "within"), ("false", None)])
def test_shuffled_rewards_were_a_switch(old: str, new: str | None, tmp_path: Path):
    """A record is translated. Who writes the old value gets the new one: `across` would be another experiment."""
    recorded = {"loop": {"shuffle_rewards": old == "true"}}
    assert translate_config(recorded) == {"loop": {"shuffle_rewards": new}}
    assert translate_config({"loop": {"shuffle_rewards": "across"}}) == {"loop": {"shuffle_rewards": "across"}}

    words = ["agent=a:b", "env=a:b", "tasks=a:b", "engine.model=m", "engine.kind=embedded"]
    with pytest.raises(ConfigError, match=r"loop\.shuffle_rewards.*write `within` in place of true, and null"):
        load_config(TrainConfig, None, [*words, f"loop.shuffle_rewards={old}"])
    path = tmp_path / "settings.yaml"
    path.write_text(f"loop: {{shuffle_rewards: {old}}}\n")
    with pytest.raises(ConfigError, match=r"write `within` in place of true, and null"):
        load_config(TrainConfig, path, words)


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("engine.attention=eager", r"engine\.attention is now trainer\.attention"),
        ("engine.lora.rank=2", r"engine\.lora is now trainer\.lora"),
        ("engine.device=cuda:1", r"engine\.device is now trainer\.device in training.* set trainer\.device=cuda:1"),
    ],
)
def test_a_user_who_writes_the_trainers_settings_under_engine_gets_their_place(written: str, says: str):
    words = ("agent=a:b", "env=a:b", "tasks=a:b", "engine.model=m", "engine.kind=embedded")
    with pytest.raises(ConfigError, match=says):
        load_config(TrainConfig, None, [*words, written])
