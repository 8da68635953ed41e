"""What a dry run says of memory, against what torch really keeps."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import tapereel as tr
from tapereel import save_tiny_model
from tapereel.agents.engines.embedded.pretrained import load_pretrained
from tapereel.agents.engines.weights.weight_config import AdapterConfig, add_adapters
from tapereel.agents.setup import profiles
from tapereel.agents.setup.profiles import shape_of
from tapereel.cli import main
from tapereel.finetune.api import estimate as module
from tapereel.finetune.api.estimate import AHEAD, PROMPT, estimate, fit_memory, free_memory, say_needs
from tapereel.finetune.loop.loop_config import RECIPES
from tapereel.finetune.recipes import RECIPES as REAL
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.run.train_config import TrainConfig
from tapereel.finetune.trainer import lm_head
from tapereel.finetune.trainer.logprobs import be_still
from tapereel.finetune.trainer.options import fitted
from tapereel.tapes.common.config import dump_config, load_config
from tapereel.tapes.store.run_directory import read_metrics

from ...toy_envs import Echo
from ..trainer.seen import png, shown
from ..trainer.seen import saved as saved_vision
from .test_choices import Say

LAYERS, TOKENS, RANK = 4, 1024, 16
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


def saved(dtype: torch.dtype, *, autocast: bool, lora: bool, checkpointing: bool) -> int:
    """Bytes that autograd keeps of one forward of the body, without the model's own weights and their casts."""
    model: Any = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    model = model.to(dtype)
    model = add_adapters(model, AdapterConfig(rank=RANK)) if lora else model
    be_still(model, checkpointing=checkpointing)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    shapes = {frozenset(p.shape) for p in model.parameters() if p.ndim == 2}
    found: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in weights and not (autocast and frozenset(tensor.shape) in shapes):
            found[place] = tensor
        return tensor

    base = model.get_base_model() if lora else model
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext(),
    ):
        base.get_decoder()(input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("dtype", "autocast", "lora"),
    [
        ("float32", False, False),
        ("float32", True, False),
        ("float32", False, True),
        ("float32", True, True),
        ("bfloat16", False, True),
        ("bfloat16", True, True),
    ],
)
def test_the_activations_are_those_that_autograd_saves(
    dtype: str, autocast: bool, lora: bool, checkpointing: bool, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    sets = [
        f"engine.model={tmp_path}",
        f"engine.capacity={TOKENS}",
        f"trainer.dtype={dtype}",
        f"loop.optimiser.micro_tokens={TOKENS}",
        f"loop.optimiser.gradient_checkpointing={checkpointing}",
        f"loop.optimiser.autocast={'bfloat16' if autocast else 'null'}",
        *([f"trainer.lora.rank={RANK}"] if lora else []),
    ]
    made = estimate(load_config(TrainConfig, None, sets))
    assert made is not None
    # The way back needs more than what is saved: gradients of one layer, which the estimate counts too.
    back = TOKENS * 4 * (3 * SHAPE["intermediate_size"] + 2 * SHAPE["hidden_size"])
    matrix = TOKENS * TOKENS * 4 * SHAPE["num_attention_heads"] if dtype == "float32" and not autocast else 0
    layers = 1 if checkpointing else LAYERS
    kept = made["GiB"]["activations"] * 2**30 - back - matrix * layers
    which: dict[str, Any] = {"autocast": autocast, "lora": lora}
    real = saved(getattr(torch, dtype), checkpointing=False, **which)
    if checkpointing:  # one layer is whole while its gradients are computed
        real = real / LAYERS + saved(getattr(torch, dtype), checkpointing=True, **which)
    assert 0.9 < kept / real < 1.25


def test_a_dry_run_prints_the_estimate_below_a_configuration_that_can_be_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 40, "hidden_size": 1024}))
    words = ["train", "--model", str(tmp_path), "--set", "loop.updates=3", "--dry-run"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    (tmp_path / "again.yaml").write_text(printed)
    read = load_config(TrainConfig, tmp_path / "again.yaml")
    made = estimate(read)
    assert made is not None
    assert sum(size for name, size in made["GiB"].items() if name != "sum") == pytest.approx(
        made["GiB"]["sum"], abs=0.01
    )
    assert f"#     sum: {made['GiB']['sum']}" in printed
    assert made["tokens"]["update"] == 8 * 8 * 10 * 256  # groups, attempts, turns, tokens of profile `light`
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"] == made


def test_a_dry_run_says_how_long_the_rest_of_a_run_will_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run"
    model = tr.save_tiny_model(tmp_path / "model", size="micro")
    settings = {"loop.groups": 1, "loop.group_size": 2, "loop.sampling.max_tokens": 2, "evaluation.fraction": 0}
    tr.train(tr.ChatAgent(), Echo, ["a"], model, updates=3, out=run, settings=settings)
    words = ["train", "--config", str(run / "config.yaml"), "--set", "loop.updates=1003", "--dry-run", "--json"]
    assert main([*words, "--out", str(run)]) == 0
    found = json.loads(capsys.readouterr().out)["seconds"]
    assert found["left"] == pytest.approx(1000 * found["update"], abs=6)
    ends = [line["perf/wall_seconds"] for line in read_metrics(run / "metrics.jsonl")]
    assert ends[0] < ends[1] < ends[2]
    assert min(ends[1] - ends[0], ends[2] - ends[1]) - 0.01 < found["update"] < ends[2]
    assert main([*words, "--out", str(tmp_path / "none")]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] is None


def test_a_full_model_costs_four_copies_and_adapters_cost_little(tmp_path: Path):
    """Weights, gradients and two optimiser states in float32; with LoRA the weights alone."""
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 40, "hidden_size": 2048}))
    full, lora = (
        estimate(fitted(load_config(TrainConfig, None, [f"engine.model={tmp_path}", *more])))
        for more in ([], ["trainer.lora={}", "trainer.dtype=bfloat16"])
    )
    assert full is not None
    assert lora is not None
    weights = full["GiB"]["weights"]
    assert full["GiB"]["optimiser"] == pytest.approx(2 * weights, rel=0.01)
    assert full["GiB"]["gradients"] == pytest.approx(weights, rel=0.05)
    assert full["GiB"]["weights of the engine"] == weights
    assert lora["GiB"]["weights"] == pytest.approx(weights / 2, rel=0.1)
    assert lora["GiB"]["optimiser"] < weights / 5


@pytest.mark.ledger("F91")
@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_offload_moves_the_moments_to_main_memory(recipe: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 40, "hidden_size": 2048}))
    sets = [f"engine.model={tmp_path}", f"loop.recipe={recipe}"]
    ways = ([], ["trainer.offload=true"], ["trainer.offload=true", "trainer.device=cpu"])
    plain, moved, on_cpu = (estimate(fitted(load_config(TrainConfig, None, [*sets, *more]))) for more in ways)
    assert plain is not None
    assert moved is not None
    assert on_cpu == plain, "the weights are in main memory too"
    kept, place = moved["GiB of main memory"], plain["GiB"]
    assert kept["optimiser"] == place["optimiser"] == pytest.approx(2 * place["weights"], rel=0.01)
    assert kept.get("critic", 0) == pytest.approx(place.get("critic", 0) / 2, abs=1e-3)
    table = 4 * SHAPE["vocab_size"] * 2048
    assert moved["GiB"]["optimiser"] == pytest.approx(2 * table / 2**30, abs=1e-3)
    assert place["sum"] - moved["GiB"]["sum"] == pytest.approx(sum(kept.values()) - 2 * table / 2**30, abs=3e-3)


def test_a_model_that_is_not_here_has_no_estimate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["train", "--model", "no-such/model", "--dry-run"]) == 0
    assert (
        "# at most: unknown, because no-such/model isn't on this machine: download it first" in capsys.readouterr().out
    )
    (tmp_path / "config.json").write_text("{}")
    assert main(["train", "--model", str(tmp_path), "--dry-run"]) == 0
    assert f"# at most: unknown, because the files of {tmp_path} don't show" in capsys.readouterr().out


SERVERS = ["engine.kind=vllm", "engine.urls=['http://127.0.0.1:1']", "processes.shard=true"]


def test_a_rank_holds_its_part_and_rank_0_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 40, "hidden_size": 2048}))

    def memory(ranks: int, *sets: str) -> dict[str, float]:
        found = estimate(fitted(load_config(TrainConfig, None, [f"engine.model={tmp_path}", *sets])), ranks)
        assert found is not None
        return found["GiB"]

    recipe = ["loop.recipe=ppo", "loop.optimiser.ema=0.9", 'loop.changes.regulariser=[{"kind": "kl", "beta": 0.1}]']
    one, four = memory(1, *SERVERS, *recipe), memory(4, *SERVERS, *recipe)
    shared = ("weights", "optimiser", "critic", "reference")
    assert [four[name] for name in shared] == pytest.approx([one[name] / 4 for name in shared], abs=1e-3)
    assert four["activations"] == one["activations"]
    assert memory(4, *recipe) == memory(1, *recipe), "copies, and not parts"
    alone, rank_0 = memory(1, "processes.shard=true"), memory(4, "processes.shard=true")
    assert rank_0["weights of the engine"] == alone["weights"] == pytest.approx(4 * rank_0["weights"], abs=3e-3)
    long = memory(4, *SERVERS, "processes.sequence_parallel=4", f"loop.optimiser.micro_tokens={1 << 18}")
    assert long["activations"] == memory(4, *SERVERS, f"loop.optimiser.micro_tokens={1 << 16}")["activations"]
    # With adapters, each rank first loads the whole model.
    lora = ["engine.weights.kind=adapters", "engine.weights.rank=2", "loop.optimiser.micro_tokens=64"]
    assert memory(64, *SERVERS, *lora, "engine.capacity=64").keys() == {"weights of all ranks", "sum"}
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = [word for one in SERVERS for word in ("--set", one)]
    assert main(["train", "--model", str(tmp_path), *words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "# at most, on rank 0 of 4, at the moment with the largest sum:" in printed
    assert f"#     sum: {memory(4, *SERVERS)['sum']}" in printed


@pytest.mark.parametrize(("ranks", "peak"), [(2, 2.49), (4, 1.56)])
def test_a_rank_needs_what_the_benchmark_measured(ranks: int, peak: float, tmp_path: Path):
    """benchmarks/ranks_memory.py measures peaks in multiples of the weights."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8}
    config = {**shape, "num_key_value_heads": 8, "vocab_size": 8000, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    sets = [f"engine.model={tmp_path}", "engine.capacity=64", "loop.optimiser.micro_tokens=64", *SERVERS]
    made, one = (estimate(load_config(TrainConfig, None, sets), size) for size in (ranks, 1))
    assert made is not None
    assert one is not None
    assert 1 < made["GiB"]["sum"] / one["GiB"]["weights"] / peak < 1.3


def test_the_names_of_the_recipes_are_those_of_their_module():
    assert set(RECIPES) == set(REAL)
    assert set(AHEAD) == {name for name in RECIPES if not get_recipe(name).local}


def test_a_reference_and_a_teacher_are_counted(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "teacher"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 40, "hidden_size": 2048}))

    def memory(**loop: object) -> dict[str, float]:
        sets = [f"engine.model={tmp_path}", *(f"loop.{name}={json.dumps(value)}" for name, value in loop.items())]
        found = estimate(fitted(load_config(TrainConfig, None, sets)))
        assert found is not None
        return found["GiB"]

    kl = {"regulariser": [{"kind": "kl", "beta": 0.1}]}
    weights = memory()["weights"]
    assert not {"reference", "teacher"} & memory().keys()
    assert memory(changes=kl)["reference"] == weights
    assert memory(recipe="distill", teacher=str(tmp_path / "teacher"))["teacher"] == weights
    # What is no term is refused with the recipe, and not by the estimate.
    assert "reference" not in memory(changes={"regulariser": [3], "shape": None})


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "smolvlm"])
def test_a_frozen_tower_has_no_gradient_and_a_trained_one_keeps_activations(family: str, tmp_path: Path):
    found: Any = load_pretrained(saved_vision(tmp_path, family))
    tower, *projector = found.vision.tower(found.model)
    inside = {id(p) for module in projector for p in module.parameters()}
    weights = sum(p.numel() for p in tower.parameters() if id(p) not in inside)
    shape = shape_of(str(tmp_path))
    assert shape is not None
    assert shape.tower == weights
    assert shape.parameters == sum(p.numel() for p in found.model.parameters())
    budget = 100_000
    sets = [f"engine.model={tmp_path}", f"loop.optimiser.micro_tokens={budget}"]
    frozen, free = (
        estimate(load_config(TrainConfig, None, [*sets, *more])) for more in ([], ["trainer.freeze=nothing"])
    )
    assert frozen is not None
    assert free is not None
    assert free["GiB"]["optimiser"] - frozen["GiB"]["optimiser"] == pytest.approx(2 * 4 * weights / 2**30, abs=0.001)
    # What autograd really keeps of a patch.
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    row = shown(family, [(["", png(96, 96, 0), "?"], [1])])
    seen = [found.vision.pixels(place, row.file) for place in row.places]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        features = found.vision.features(found.model, seen)
    assert features.requires_grad
    real = (sum(kept.values()) - sum(p.numel() * 4 for p in tower.parameters())) / seen[0].patches
    assert 0.5 < shape.seen[0] * shape.seen[1] * 16 * 4 / real < 2


@pytest.mark.parametrize("vocabulary", [32_000, 152_000])
def test_the_logits_are_four_chunks_of_the_output_layer(vocabulary: int, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": vocabulary}))
    made = estimate(load_config(TrainConfig, None, [f"engine.model={tmp_path}", f"engine.capacity={TOKENS}"]))
    assert made is not None
    chunk = 4 * max(lm_head.CHUNK, lm_head.CHUNK_ROWS * vocabulary)
    assert made["GiB"]["logits"] == pytest.approx(4 * chunk / 2**30, abs=1e-3)


def test_a_run_says_first_what_it_needs_and_warns_of_a_machine_with_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 40, "hidden_size": 1024}))
    sets = [f"engine.model={tmp_path}", "trainer.device=cpu", "loop.updates=12", "loop.sampling.max_tokens=16"]
    config = fitted(load_config(TrainConfig, None, [*sets, "loop.limits.turns=1", "evaluation.every=null"]))
    found, most = estimate(config, prompt=PROMPT), estimate(config)
    assert found is not None
    assert most is not None
    disk = found["GiB of disk"]
    assert found["GiB"]["sum"] < most["GiB"]["sum"]
    assert disk["checkpoint"] == pytest.approx(3 * found["GiB"]["weights"], rel=0.01), "weights and two moments"
    assert disk["run"] == pytest.approx(2 * disk["checkpoint"], rel=0.01), "a new one is written before an old one goes"
    caplog.set_level("INFO", "tapereel")
    caplog.clear()
    monkeypatch.setattr(module, "free_memory", lambda: 1 << 40)
    say_needs(config, tmp_path / "runs" / "new")
    [line] = caplog.messages
    about = found["GiB"]["sum"] * 2**30 / 1e9 + 0.4
    assert f"needs about {about:.2g} GB of memory" in line
    assert f"up to {disk['run'] * 2**30 / 1e9:.2g} GB of disk" in line
    caplog.clear()
    monkeypatch.setattr(module, "free_memory", lambda: 1 << 20)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 << 20))
    say_needs(config, tmp_path / "runs" / "new")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "WARNING"]
    memory, space = caplog.messages[1:]
    assert "0.001 GB of memory are free" in memory
    assert f"0.0021 GB of disk are free in {tmp_path}" in space


def test_this_machine_has_free_memory():
    free = free_memory()
    assert free is None or free > 1 << 26


def test_gradient_checkpointing_is_chosen_by_memory_unless_the_user_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "num_hidden_layers": 40, "hidden_size": 4096}))
    key = "loop.optimiser.gradient_checkpointing"

    def chosen(gib: float, *sets: str, run: Path | None = None) -> tuple[bool, bool]:
        """What the profile and the memory say."""
        given = load_config(TrainConfig, None, [f"engine.model={tmp_path}", "trainer.device=cpu", *sets])
        config = fitted(given)
        monkeypatch.setattr(module, "free_memory", lambda: int(gib * 2**30))
        fit = fit_memory(config, given, run)
        return config.loop.optimiser.gradient_checkpointing, fit.loop.optimiser.gradient_checkpointing

    config = load_config(TrainConfig, None, [f"engine.model={tmp_path}", "trainer.device=cpu", f"{key}=false"])
    found = estimate(fitted(config), prompt=PROMPT)
    assert found is not None
    need = found["GiB"]["sum"] / 0.8
    assert chosen(need * 1.01) == (True, False)
    assert chosen(need * 0.99) == (True, True)
    assert chosen(need * 2, f"{key}=true") == (True, True)
    assert chosen(need / 2, f"{key}=false") == (False, False)
    assert chosen(need * 2, *SERVERS[:2]) == (True, True), "the memory of servers isn't known"
    # A resumed run keeps what was chosen.
    (tmp_path / "config.yaml").write_text(dump_config(fitted(config)))
    assert chosen(need / 2, run=tmp_path) == (True, False)


def test_a_run_records_what_was_chosen_and_reproduces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A model that isn't tiny, by its layers."""
    model = save_tiny_model(tmp_path / "model", context=128)
    for place in (module, profiles):
        monkeypatch.setattr(place, "TINY", 1)
    settings = {"loop.sampling.max_tokens": 4, "loop.groups": 2, "loop.group_size": 4, "evaluation.fraction": 0}
    run = partial(tr.train, tr.ChatAgent(), Say, ["a", "b", "c", "d"], model, out=tmp_path / "run", settings=settings)
    free = module.free_memory
    monkeypatch.setattr(module, "free_memory", lambda: 1 << 20)
    made = run(updates=1)
    chosen = load_config(TrainConfig, tmp_path / "run" / "config.yaml").loop.optimiser.gradient_checkpointing
    assert chosen is True
    assert made.reproduce().outcome == "verified"
    monkeypatch.setattr(module, "free_memory", free)
    settings["loop.keep_checkpoints"] = 3  # changes no result
    assert run(updates=2, resume=True).reproduce().outcome == "verified"
