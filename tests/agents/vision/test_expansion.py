"""The tokens of a picture, computed from its size alone, against what the image processors make of its pixels."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tapereel.agents.engines.embedded import load_tokenizer
from tapereel.agents.vision import save_tiny_vision
from tapereel.agents.vision.families import FAMILIES
from tapereel.tapes.places import Place

LIMITS = [(1, 1), (1, 200), (200, 1), (20, 4000), (4096, 21)]
"""Width and height: one pixel, the largest ratio both ways."""
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "qwen2_vl": [{}, {"patch_size": 14, "size": {"shortest_edge": 3136, "longest_edge": 12845056}}],
    "smolvlm": [
        {},
        {"size": {"longest_edge": 40}},  # no multiple of a tile
        {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
        {"size": {"longest_edge": 4500}, "max_image_size": {"longest_edge": 1000}},  # above the processor's own limit
        {"do_image_splitting": False},
    ],
}


@pytest.fixture(scope="module", params=SETTINGS)
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoConfig

    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vision(folder, request.param)
    return FAMILIES[request.param](AutoConfig.from_pretrained(folder), load_tokenizer(folder), folder)


def with_settings(vision: Any, settings: dict[str, Any]) -> Any:
    changed = copy.copy(vision)
    changed.processor = type(vision.processor)(**{**vision.processor.to_dict(), **settings})
    return changed


def png(width: int, height: int) -> bytes:
    pixels = np.full((height, width, 3), 200, dtype="uint8")
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG", compress_level=1)
    return written.getvalue()


def place_of(vision: Any, width: int, height: int) -> Place:
    ids, grid = vision.expand(width, height)
    return Place(("a.png",), "image", 5, len(ids), grid)


@pytest.mark.ledger("F94")
def test_sizes_at_the_limits_take_the_tokens_that_the_processor_makes(vision: Any) -> None:
    for settings in SETTINGS[vision._config.model_type]:
        changed = with_settings(vision, settings)
        for size in LIMITS if settings.get("size", {}).get("longest_edge") != 4500 else [(90, 1)]:
            place = place_of(changed, *size)
            pixels = changed.pixels(place, lambda name, size=size: png(*size))  # refuses another grid or length
            assert pixels.count == changed.feature_mask(place).sum()
    vision.pixels(place_of(vision, 4096, 4096), lambda name: png(4096, 4096))


@pytest.mark.ledger("F94")
def test_any_size_takes_the_tokens_that_the_processor_makes(vision: Any) -> None:
    rng = np.random.default_rng(0)
    for settings in SETTINGS[vision._config.model_type][:2]:
        changed = with_settings(vision, settings)
        for width, height in np.exp(rng.uniform(0, np.log(180), (60, 2))).round().astype(int).tolist():
            changed.pixels(place_of(changed, width, height), lambda name, w=width, h=height: png(w, h))


@pytest.mark.ledger("F97")
def test_another_picture_size_or_processor_is_refused_by_the_file_name(vision: Any) -> None:
    place = place_of(vision, 40, 90)
    for wrong in (place._replace(length=place.length + 1), place._replace(grid=tuple(n + 2 for n in place.grid))):
        with pytest.raises(ValueError, match=r"a\.png.*grid.*tokens.*grid.*tokens"):
            vision.pixels(wrong, lambda name: png(40, 90))
    with pytest.raises(ValueError, match=r"a\.png.*grid"):
        vision.pixels(place, lambda name: png(90, 40))
    for damaged in (b"", b"GIF89a", png(40, 90)[:100]):
        with pytest.raises(ValueError, match=r"a\.png.*processed"):
            vision.pixels(place, lambda name, data=damaged: data)


def test_tiles_are_written_as_the_processor_of_the_model_writes_them(tmp_path: Path) -> None:
    from transformers import AutoConfig, Idefics3Processor

    save_tiny_vision(tmp_path, "idefics3")
    tokenizer: Any = load_tokenizer(tmp_path)
    vision: Any = FAMILIES["idefics3"](AutoConfig.from_pretrained(tmp_path), tokenizer, tmp_path)
    for longest in (16, 32, 48):
        vision = with_settings(vision, {"size": {"longest_edge": longest}})
        own = Idefics3Processor(vision.processor, copy.deepcopy(tokenizer), image_seq_len=4)
        sizes = [(30, 30), (50, 10), (10, 50)]
        images = [[Image.open(io.BytesIO(png(*size))) for size in sizes]]
        expected = own(text=["A<image>b<image><image> c"], images=images, add_special_tokens=False)["input_ids"][0]
        ids = [list(vision.expand(*size).ids) for size in sizes]
        text = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("A", "b", " c")]
        assert expected == [*text[0], *ids[0], *text[1], *ids[1], *ids[2], *text[2]]
