"""Folders of vision models: what is loaded, what is refused, and that the image processor stays with the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tapereel.agents.engines.embedded import Pretrained, load_pretrained
from tapereel.agents.engines.weights import AdapterConfig, add_adapters
from tapereel.agents.setup import shape_of
from tapereel.agents.vision import UnsupportedVision, save_tiny_vision
from tapereel.agents.vision.families import family_of, prove_vision
from tapereel.finetune.trainer import save_checkpoint
from tapereel.tapes.errors import UsageError

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")


def changed(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def loaded(folder: Path, family: Any = "qwen2_vl") -> Pretrained:
    save_tiny_vision(folder, family)
    return load_pretrained(folder)


def test_a_model_with_an_unknown_tower_is_refused(tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    save_tiny_vision(tmp_path)
    # For gemma3, llama4, mllama and qwen3_5, transformers has classes that load the text alone.
    for kind in ("gemma3", "qwen3_5", "llama4", "mllama", "llava", "qwen2_audio", "phi4_multimodal", "chameleon"):
        (tmp_path / "config.json").write_text(CONFIG_MAPPING[kind]().to_json_string())
        with pytest.raises(UnsupportedVision, match=rf"'{kind}'.*_config.*qwen2_vl"):
            load_pretrained(tmp_path)


def test_an_encoder_is_not_dropped(tmp_path: Path) -> None:
    # For these, transformers has classes that load the decoder alone.
    from transformers import CONFIG_MAPPING

    for kind in ("whisper", "bart", "marian", "pegasus", "t5"):
        (tmp_path / "config.json").write_text(CONFIG_MAPPING[kind]().to_json_string())
        with pytest.raises(UnsupportedVision, match=kind):
            family_of(CONFIG_MAPPING[kind](), tmp_path)


def test_a_model_of_text_with_nested_settings_is_no_vision_model() -> None:
    from transformers import CONFIG_MAPPING

    for kind in ("llama", "dbrx", "mpt", "qwen3_5_text", "gemma3_text"):
        assert family_of(CONFIG_MAPPING[kind](), Path("x")) is None


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
def test_a_missing_or_foreign_image_processor_is_refused(tmp_path: Path, family: Any) -> None:
    save_tiny_vision(tmp_path, family)
    about = tmp_path / "preprocessor_config.json"
    right = about.read_text()
    for wrong in ({"image_processor_type": "CLIPImageProcessor"}, {"do_resize": False}, {"do_convert_rgb": False}):
        changed(about, **wrong)
        with pytest.raises(UnsupportedVision, match=rf"{family}.* preprocessor_config\.json"):
            load_pretrained(tmp_path)
        about.write_text(right)
    for broken in ("", "{", "[]"):
        about.write_text(broken)
        with pytest.raises(UnsupportedVision, match=r" preprocessor_config\.json"):
            load_pretrained(tmp_path)
    about.unlink()
    with pytest.raises(UnsupportedVision, match=r" preprocessor_config\.json"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_family_does_not_reproduce_is_refused_at_load(
    tmp_path: Path, family: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = loaded(tmp_path, family)
    vision: Any = found.vision
    # The model reads other positions, other features, or in another order than the family's code says.
    features = vision.features
    monkeypatch.setattr(vision, "features", lambda model, pixels: features(model, pixels).flip(0))
    with pytest.raises(UnsupportedVision, match=r" \d\S* \(tolerance \d"):
        prove_vision(found.model, vision)
    monkeypatch.setattr(vision, "features", lambda model, pixels: features(model, pixels) * float("nan"))
    with pytest.raises(UnsupportedVision, match=r" nan \(tolerance \d"):
        prove_vision(found.model, vision)
    monkeypatch.setattr(vision, "features", features)
    if vision.positions([], 1) is not None:
        positions = vision.positions
        monkeypatch.setattr(vision, "positions", lambda places, n: positions([], n))
        with pytest.raises(UnsupportedVision, match=r"\(tolerance \d"):
            prove_vision(found.model, vision)


@pytest.mark.parametrize(("family", "wrong"), [("qwen2_vl", "patch_size"), ("smolvlm", "max_image_size")])
def test_a_processor_of_a_model_with_other_patches_is_refused(tmp_path: Path, family: Any, wrong: str) -> None:
    save_tiny_vision(tmp_path, family)
    about = tmp_path / "preprocessor_config.json"
    changed(about, **{wrong: 14 if wrong == "patch_size" else {"longest_edge": 20}})
    with pytest.raises(UnsupportedVision, match=r"processors.*configuration"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_checkpoint_keeps_the_image_processor(tmp_path: Path, family: Any, adapters: bool) -> None:
    save_tiny_vision(tmp_path / "model", family)
    changed(tmp_path / "model" / "preprocessor_config.json", image_mean=[0.1, 0.2, 0.3])
    found = load_pretrained(tmp_path / "model")
    assert found.vision is not None
    model: Any = add_adapters(found.model, AdapterConfig(rank=2)) if adapters else found.model
    made = save_checkpoint(tmp_path / "run", model, {}, {}, update=1, tokenizer=found.tokenizer, pictures=found.vision)
    again = load_pretrained(made.path / "hf")
    assert again.vision is not None
    assert again.vision.hash == found.vision.hash
    about = [folder / "processor_config.json" for folder in (tmp_path / "model", made.path / "hf")]
    assert [path.exists() for path in about] == [family == "smolvlm"] * 2
    assert family != "smolvlm" or json.loads(about[0].read_text()) == json.loads(about[1].read_text())
    save_tiny_vision(tmp_path / "other", family)
    other = load_pretrained(tmp_path / "other").vision
    assert other is not None
    assert other.hash != found.vision.hash
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_leave_the_tower_as_it_is(tmp_path: Path, family: Any) -> None:
    save_tiny_vision(tmp_path, family)
    for targets in ((), ("q_proj",)):
        model: Any = add_adapters(load_pretrained(tmp_path).model, AdapterConfig(rank=2, targets=targets))
        names = {name.split(".lora_")[0] for name, weight in model.named_parameters() if weight.requires_grad}
        assert len(names) == (14 if not targets else 2)
        assert all(".language_model." in name or ".text_model." in name for name in names)
    with pytest.raises(UsageError, match=r"qkv.*names no layer"):
        add_adapters(load_pretrained(tmp_path).model, AdapterConfig(rank=2, targets=("q_proj", "qkv", "out_proj")))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_size_of_a_model_counts_its_text_and_its_tower(tmp_path: Path, family: Any) -> None:
    found = loaded(tmp_path, family)
    shape = shape_of(str(tmp_path))
    assert shape is not None
    assert shape.parameters == sum(weight.numel() for weight in found.model.parameters())
    assert (shape.layers, shape.width, shape.vocabulary) == (2, 64, len(found.tokenizer))


def test_a_vision_model_computes_convolutions_in_whole_precision(tmp_path: Path) -> None:
    torch.backends.cudnn.allow_tf32 = True
    save_tiny_vision(tmp_path)
    load_pretrained(tmp_path)
    assert not torch.backends.cudnn.allow_tf32
