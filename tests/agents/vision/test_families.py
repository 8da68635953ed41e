"""Vision families against transformers' own processors, positions and forwards."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tapereel.agents.engines.embedded import Pretrained, load_pretrained
from tapereel.agents.vision import save_tiny_vision
from tapereel.agents.vision.vision import body_inputs
from tapereel.tapes.places import Place

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm")
TEXT = b"Where is the square"


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vision(folder, request.param)
    return load_pretrained(folder)


def png(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype="uint8")
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def prompt(vision: Any, files: dict[str, bytes], seed: int = 0) -> tuple[list[int], list[Place]]:
    """Ids with text of several lengths between the pictures; at least a token, as every chat template writes."""
    rng = np.random.default_rng(seed)
    ids, places = list(TEXT), []
    for name, data in files.items():
        found = vision.expand(*Image.open(io.BytesIO(data)).size)
        places.append(Place((name,), "image", len(ids), len(found.ids), found.grid))
        ids += [*found.ids, *rng.integers(0, 256, int(rng.integers(1, 9))).tolist()]
    return [*ids, *TEXT], places


def forward(
    loaded: Pretrained, ids: list[int], places: list[Place], files: dict[str, bytes], flat: bool = False
) -> Any:
    """Log-probs by our own path: embeddings with features at places."""
    model: Any = loaded.model
    vision = loaded.vision
    assert vision is not None
    pixels = [vision.pixels(place, files.__getitem__) for place in places]
    where, n = torch.full((1, len(ids)), -1), 0
    for place, one in zip(places, pixels, strict=True):
        mask = torch.from_numpy(vision.feature_mask(place))
        where[0, place.offset : place.end][mask] = torch.arange(n, n + one.count)
        n += one.count
    positions = None if flat else vision.positions(places, len(ids))
    inputs = body_inputs(
        model.get_input_embeddings(),
        torch.tensor([ids]),
        where,
        vision.features(model, pixels),
        None if positions is None else torch.from_numpy(positions)[:, None],
    )
    with torch.no_grad():
        states = model.get_decoder()(**inputs).last_hidden_state
        return model.get_output_embeddings()(states)[0].log_softmax(-1)


def own_forward(loaded: Pretrained, ids: list[int], places: list[Place], files: dict[str, bytes]) -> Any:
    """Log-probs of the model's public forward, with all pictures through its own image processor at once."""
    images = [Image.open(io.BytesIO(files[place.media[0]])) for place in places]
    vision: Any = loaded.vision
    tensors = vision.processor(images=images, return_tensors="pt")
    if "image_grid_thw" in tensors:
        tensors["mm_token_type_ids"] = kinds(ids, places)
    with torch.no_grad():
        made = loaded.model(input_ids=torch.tensor([ids]), **tensors)
    return made.logits[0].log_softmax(-1)


def kinds(ids: list[int], places: list[Place]) -> torch.Tensor:
    """transformers' mark of which tokens stand for a picture."""
    found = torch.zeros(1, len(ids), dtype=torch.int)
    for place in places:
        found[0, place.offset : place.end] = 1
    return found


SIZES = [(16, 16), (40, 24), (90, 33), (8, 60)]


@pytest.mark.ledger("F94")
def test_the_own_forward_of_the_model_gives_the_same_log_probs(loaded: Pretrained) -> None:
    files = {f"{i}.png": png(*size, i) for i, size in enumerate(SIZES)}
    ids, places = prompt(loaded.vision, files)
    own = own_forward(loaded, ids, places, files)
    assert (forward(loaded, ids, places, files) - own).abs().max() < 1e-4
    assert loaded.vision is not None
    if loaded.vision.positions(places, len(ids)) is not None:
        assert (forward(loaded, ids, places, files, flat=True) - own).abs().max() > 0.1
    swapped = {**files, "1.png": png(40, 24, 99)}
    assert (forward(loaded, ids, places, swapped) - own).abs().max() > 0.1


def test_positions_are_those_of_the_model(loaded: Pretrained) -> None:
    files = {f"{i}.png": png(*size, i) for i, size in enumerate(SIZES)}
    model: Any = loaded.model
    assert loaded.vision is not None
    if loaded.vision.positions([], 3) is None:
        return
    for chosen in ([], ["0.png"], ["2.png", "1.png"], list(files)):
        ids, places = prompt(loaded.vision, {name: files[name] for name in chosen}, seed=len(chosen))
        grids = torch.tensor([place.grid for place in places]) if places else None
        expected, _ = model.model.get_rope_index(torch.tensor([ids]), kinds(ids, places), grids)
        np.testing.assert_array_equal(loaded.vision.positions(places, len(ids)), expected[:, 0])


@pytest.mark.ledger("F95")
@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_three_pictures_of_several_tiles_in_one_message_are_exact(tmp_path: Path, family: Any) -> None:
    save_tiny_vision(tmp_path, family)
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(settings.read_text().replace('"longest_edge": 32', '"longest_edge": 48'))
    tiled = load_pretrained(tmp_path)
    files = {f"{i}.png": png(*size, i) for i, size in enumerate([(90, 30), (60, 80), (10, 60), (50, 50)])}
    ids, places = prompt(tiled.vision, files)
    assert [place.grid for place in places] == [(1, 3), (3, 3), (3, 1), (3, 3)]
    own = own_forward(tiled, ids, places, files)
    assert (forward(tiled, ids, places, files) - own).abs().max() < 1e-4
    assert (forward(tiled, ids, places, {**files, "2.png": png(10, 60, 99)}) - own).abs().max() > 0.1


@pytest.mark.parametrize("family", ["idefics3", "smolvlm"])
def test_a_black_picture_keeps_its_tiles(tmp_path: Path, family: Any) -> None:
    """transformers takes tiles whose values are all 0 for padding and drops them; with a mean of 0, black is 0."""
    save_tiny_vision(tmp_path, family)
    settings = tmp_path / "preprocessor_config.json"
    about = json.loads(settings.read_text())
    settings.write_text(json.dumps({**about, "image_mean": [0.0] * 3, "image_std": [1.0] * 3}))
    tiled = load_pretrained(tmp_path)
    assert tiled.vision is not None
    found = tiled.vision.expand(40, 40)
    written = io.BytesIO()
    Image.new("RGB", (40, 40)).save(written, "PNG")
    place = Place(("a.png",), "image", 0, len(found.ids), found.grid)
    pixels = tiled.vision.pixels(place, lambda name: written.getvalue())
    assert len(tiled.vision.features(tiled.model, [pixels])) == pixels.count == 20


@pytest.mark.ledger("F96")
def test_a_sampled_picture_token_is_an_ordinary_token(loaded: Pretrained) -> None:
    files = {"0.png": png(40, 24, 0), "1.png": png(24, 40, 1)}
    ids, places = prompt(loaded.vision, files)
    vision: Any = loaded.vision
    sampled = vision.expand(16, 16).ids[0]
    # The model samples the token between the pictures: the second one's tokens stand one further back.
    at = places[0].end
    longer, moved = [*ids[:at], sampled, *ids[at:]], [places[0], places[1].moved(1)]
    made, before = forward(loaded, longer, moved, files), forward(loaded, ids, places, files)
    assert (made[:at] - before[:at]).abs().max() < 1e-4
    another = forward(loaded, longer, moved, {**files, "1.png": png(24, 40, 9)})
    assert (made[: at + 1] - another[: at + 1]).abs().max() < 1e-4
    assert (made[moved[1].end :] - another[moved[1].end :]).abs().max() > 0.1
