"""The profiles: which one a model gets, which settings it fills, and what it says."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import tapereel as tr
from tapereel.agents import RunConfig
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.setup import profiles, shape_of
from tapereel.agents.setup.profiles import fitted as fitted_run
from tapereel.finetune import TrainConfig
from tapereel.finetune.trainer import fitted
from tapereel.tapes.common import dump_config, load_config
from tapereel.tapes.store import read_metrics

from ...finetune.run.test_experts import SETTINGS, Counted, mixture

QWEN: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""Qwen3-0.6B."""
QWEN_4B = {**QWEN, "hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


def train_config(model: Path, *sets: str) -> TrainConfig:
    return fitted(load_config(TrainConfig, None, [f"engine.model={model}", *sets]))


def test_the_size_is_that_of_the_published_models(folder: Path):
    small = shape_of(str(folder))
    assert small is not None
    assert round(small.parameters / 1e6) == 596  # Qwen3-0.6B as its card counts
    (folder / "config.json").write_text(json.dumps(QWEN_4B))
    large = shape_of(str(folder))
    assert large is not None
    assert round(large.parameters / 1e7) == 402


@pytest.mark.parametrize("tied", [True, False])
def test_saved_weights_are_counted(tmp_path: Path, tied: bool):
    model = tiny_model(char_tokenizer(), "micro")
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = type(model.lm_head.weight)(model.lm_head.weight.detach().clone())
    model.save_pretrained(str(tmp_path))
    shape = shape_of(str(tmp_path))
    assert shape is not None
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("about", ["", "[]", "{}", json.dumps({**QWEN, "hidden_size": "many"})])
def test_a_configuration_that_says_no_size_counts_as_pretrained(folder: Path, about: str):
    (folder / "config.json").write_text(about)
    assert shape_of(str(folder)) is None
    assert train_config(folder).loop.optimiser.lr == 1e-6


def test_a_profile_fills_what_is_unset_and_nothing_else(folder: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "tapereel.profile")
    made = train_config(folder, "warm.tapes=x", "warm.optimiser.betas=[0.9, 0.9]", "loop.limits.turns=4")
    assert (made.loop.optimiser.lr, made.loop.optimiser.schedule.warmup, made.loop.group_size) == (1e-6, 10, 8)
    assert (made.loop.limits.turns, made.loop.limits.agent_seconds, made.loop.sampling.max_tokens) == (4, 600, 1024)
    assert made.warm is not None
    assert (made.warm.optimiser.lr, made.warm.optimiser.betas) == (2e-5, (0.9, 0.9))
    [line] = caplog.messages
    for said in ("profile `small`", "596,042,752 weights (pretrained)", "loop.optimiser.lr=1e-06"):
        assert said in line
    (folder / "config.json").write_text(json.dumps(QWEN_4B))
    assert (train_config(folder).loop.group_size, train_config(folder).loop.sampling.max_tokens) == (16, 2048)


SMOLLM = {**QWEN, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
SMOLLM |= {"head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152}
"""SmolLM2-135M."""


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize(("lora", "rate"), [((), 1e-5), (("trainer.lora.rank=16",), 3e-4)])
def test_a_light_model_gets_an_update_that_a_cpu_can_compute(
    folder: Path, lora: tuple[str, ...], rate: float, narrow: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(profiles, "computes_bfloat16", lambda: narrow)
    (folder / "config.json").write_text(json.dumps(SMOLLM))
    made = train_config(folder, *lora)
    optimiser = made.loop.optimiser
    assert (optimiser.lr, optimiser.gradient_checkpointing, optimiser.micro_tokens) == (rate, False, 1024)
    assert (made.loop.groups, made.loop.group_size, made.loop.sampling.max_tokens) == (8, 8, 256)
    assert optimiser.schedule.warmup == 3
    # All weights under autocast learned at a fraction of the pace: docs/project/learning.md
    assert optimiser.autocast == ("bfloat16" if lora and narrow else None)
    assert train_config(folder, *lora, "loop.optimiser.autocast=null").loop.optimiser.autocast is None


@pytest.mark.parametrize(
    ("flags", "narrow"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 pni", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("model name\t: amx_bf16", False),
    ],
)
def test_the_flags_of_a_cpu_say_whether_it_computes_in_bfloat16(tmp_path: Path, flags: str, narrow: bool):
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{flags}\nbugs\t: none\n")
    assert profiles.computes_bfloat16(tmp_path / "cpuinfo") is narrow
    assert not profiles.computes_bfloat16(tmp_path / "missing")


@pytest.mark.parametrize("setting", ["loop.optimiser.lr=2e-5", "loop.sampling.max_tokens=16", "loop.groups=4"])
def test_a_setting_that_suits_a_light_model_is_not_called_far(
    folder: Path, setting: str, caplog: pytest.LogCaptureFixture
):
    (folder / "config.json").write_text(json.dumps(SMOLLM))
    train_config(folder, setting)
    assert [line for line in caplog.messages if " far " in line] == []


def test_only_a_tiny_model_sets_the_number_of_threads(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    tiny = tmp_path_factory.mktemp("tiny")
    tiny_model(char_tokenizer(), "micro").save_pretrained(str(tiny))
    assert (train_config(folder).threads, train_config(tiny).threads) == (None, 1)
    assert train_config(folder, "trainer.threads=3").threads == 3


def test_a_model_with_dropout_is_not_checkpointed(folder: Path):
    assert train_config(folder).loop.optimiser.gradient_checkpointing
    (folder / "config.json").write_text(json.dumps({**QWEN, "resid_pdrop": 0.1}))
    assert not train_config(folder).loop.optimiser.gradient_checkpointing


def test_adapters_have_learning_rates_of_their_own(folder: Path):
    made = train_config(folder, "trainer.lora.rank=8", "warm.tapes=x")
    assert made.warm is not None
    assert (made.loop.optimiser.lr, made.warm.optimiser.lr) == (1e-5, 2e-4)


CRITIC = {
    "": (1e-5, 10, True),
    "trainer.lora.rank=8": (1e-4, 10, True),
    "loop.critic.body=policy": (1e-3, 0, False),
    "loop.critic.passes=2": (1e-5, 10, True),
    "loop.critic.optimiser.betas=[0.9,0.99]": (1e-5, 10, True),
    "loop.critic.optimiser.lr=2e-5": (2e-5, 10, True),
    "loop.critic.optimiser.schedule.warmup=3": (1e-5, 3, True),
    "loop.critic.optimiser.gradient_checkpointing=false": (1e-5, 10, False),
}
"""Settings of a run with a critic on a pretrained model -> the critic's rate, warm-up and checkpointing."""


@pytest.mark.parametrize("recipe", ["recipe=ppo", "recipe=ppo_kl", "changes.credit.kind=gae"])
@pytest.mark.parametrize("setting", CRITIC)
def test_a_critic_has_a_profile(folder: Path, setting: str, recipe: str):
    critic = train_config(folder, f"loop.{recipe}", *filter(None, [setting])).loop.critic
    assert critic is not None
    found = critic.optimiser
    assert (found.lr, found.schedule.warmup, found.gradient_checkpointing) == CRITIC[setting]


def test_only_a_recipe_that_takes_values_gets_a_critic(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    assert train_config(folder).loop.critic is None
    assert train_config(folder, "loop.recipe=ppo", "loop.changes.credit.kind=returns").loop.critic is None
    assert train_config(folder, "loop.recipe=ppo", "loop.critic=null").loop.critic is None, "as older runs recorded it"
    tiny = tmp_path_factory.mktemp("tiny")
    tiny_model(char_tokenizer(), "micro").save_pretrained(str(tiny))
    for body in ("own", "policy"):
        critic = train_config(tiny, "loop.recipe=ppo", f"loop.critic.body={body}").loop.critic
        assert critic is not None
        assert (critic.optimiser.lr, critic.optimiser.schedule.warmup) == (1e-3, 0)


def test_a_recipe_of_ones_own_that_takes_values_gets_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_values.py").write_text(
        "from tapereel.finetune import get_recipe\nmine = get_recipe('ppo').but(name='mine')\n"
    )
    monkeypatch.chdir(tmp_path)
    model = mixture(tmp_path / "model")  # its config.json says no size, so it counts as pretrained
    settings = {**SETTINGS, "loop.sampling.max_tokens": 2}
    scene: Any = (tr.ChatAgent(), Counted, ["a", "b"], model)
    run = tr.train(*scene, updates=1, recipe="my_values.py:mine", out=tmp_path / "run", settings=settings)
    critic = load_config(TrainConfig, run.path / "config.yaml").loop.critic
    assert critic is not None
    assert (critic.optimiser.lr, critic.optimiser.schedule.warmup) == (1e-5, 10)
    assert read_metrics(run.path / "metrics.jsonl")[0]["value/lr"] == pytest.approx(1e-6), "it warms up"
    assert run.reproduce().verdict == "holds"
    again = tr.train(
        *scene, updates=2, recipe="my_values.py:mine", out=tmp_path / "run", settings=settings, resume=True
    )
    assert again.summary is not None


def test_a_player_has_the_profile_of_its_own_model(folder: Path, tmp_path_factory: pytest.TempPathFactory, caplog: Any):
    tiny = tmp_path_factory.mktemp("tiny")
    tiny_model(char_tokenizer(), "micro").save_pretrained(str(tiny))

    def players(*sets: str, model: Path = tiny) -> TrainConfig:
        two = [
            f'players.{name}={{"agents": ["{name}"], "engine": {{"kind": "embedded", "model": "{path}"}}}}'
            for name, path in (("small", folder), ("tiny", tiny))
        ]
        return train_config(model, 'loop.agents=["a"]', *two, *sets)

    def of(config: TrainConfig, name: str) -> tuple[float, int, bool]:
        found = config.players[name].loop_of(config.loop).optimiser
        return found.lr, found.schedule.warmup, found.gradient_checkpointing

    for model in (tiny, folder):  # whatever the run's own model is
        assert of(players(model=model), "small") == (1e-6, 10, True)
        assert of(players(model=model), "tiny") == (3e-4, 0, False)
    assert players().players["tiny"].optimiser is None
    made = players("loop.optimiser.lr=5e-6", "loop.optimiser.eps=1e-6")
    assert (of(made, "small"), of(made, "tiny")) == ((5e-6, 10, True), (5e-6, 0, False)), "what is set, wins"
    small = made.players["small"].optimiser
    assert small is not None
    assert small.eps == 1e-6
    made = players("players.small.optimiser.lr=2e-6", "players.tiny.optimiser.grad_clip=0.5")
    assert (of(made, "small"), of(made, "tiny")) == ((2e-6, 10, True), (3e-4, 0, False))
    caplog.clear()
    players("players.small.optimiser.lr=1e-3")
    assert [line.split()[0] for line in caplog.messages if " far " in line] == ["players.small.optimiser.lr=0.001"]
    critic = players("loop.recipe=ppo").loop.critic
    assert critic is not None
    assert critic.optimiser.lr == 1e-5, "the players' critics are copies of their models"
    again = TrainConfig.model_validate(players().model_dump())
    caplog.clear()
    assert fitted(again) == again, "a recorded configuration is complete"
    assert caplog.messages == []


def test_a_tiny_model_keeps_its_defaults(tmp_path: Path):
    tiny_model(char_tokenizer(), "base").save_pretrained(str(tmp_path))
    made = train_config(tmp_path, "warm.tapes=x")
    assert made.warm is not None
    assert (made.loop.optimiser.lr, made.warm.optimiser.lr) == (3e-4, 3e-3)
    assert (made.loop.group_size, made.loop.limits.turns, made.loop.sampling.max_tokens) == (16, 8, 64)
    assert made.loop.limits.agent_seconds == 120
    # Measured: docs/project/first_hour.md
    assert (made.warm.updates, made.evaluation.fraction) == (300, 0.25)
    assert (made.engine.slots, made.loop.optimiser.gradient_checkpointing, made.evaluation.engine) == (64, False, None)


def test_run_and_train_share_their_limits(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    tiny = tmp_path_factory.mktemp("tiny")
    tiny_model(char_tokenizer(), "micro").save_pretrained(str(tiny))
    for model in (folder, tiny):
        run = fitted_run(load_config(RunConfig, None, ["engine.kind=embedded", f"engine.model={model}"]))
        train = train_config(model).loop
        assert (run.limits, run.sampling) == (train.limits, train.sampling)


def test_the_recorded_configuration_does_not_depend_on_the_profile(folder: Path, tmp_path: Path, caplog: Any):
    made = train_config(folder, "loop.updates=3")
    (tmp_path / "again.yaml").write_text(dump_config(made))
    (folder / "config.json").write_text(json.dumps(QWEN_4B))
    caplog.clear()
    assert fitted(load_config(TrainConfig, tmp_path / "again.yaml")) == made
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("setting", "warns"),
    [
        ("loop.optimiser.lr=3e-4", True),
        ("loop.optimiser.lr=1e-5", False),
        ("loop.optimiser.lr=1e-8", True),
        ("loop.sampling.max_tokens=16", False),  # the task's choice
        ("loop.group_size=1", True),
        ("loop.group_size=16", False),
        ("loop.critic.optimiser.lr=1e-3", True),
        ("loop.critic.optimiser.lr=5e-5", False),
        ("loop.critic={body: policy, optimiser: {lr: 0.1}}", True),
        ("loop.critic={body: policy, optimiser: {lr: 1e-3}}", False),
    ],
)
def test_a_value_far_from_the_profile_gives_one_line(
    folder: Path, setting: str, warns: bool, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        made = train_config(folder, setting, *(["loop.recipe=ppo"] if "critic" in setting else []))
    far = [line for line in caplog.messages if " far " in line]
    assert len(far) == warns
    assert all(line.startswith(setting.split("=")[0]) and "profile `small` (" in line for line in far)
    assert f"{setting.split('=')[0]}=" not in "".join(line for line in caplog.messages if line not in far)
    assert made == load_config(made, None, [setting])
