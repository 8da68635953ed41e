"""Native video without pixels: tokens, positions and refusals. `tests/contract/video_checks.py` has the rest."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tapereel.agents import EngineError, Request
from tapereel.agents.engines.embedded import Pretrained, load_pretrained
from tapereel.agents.engines.servers import Generate
from tapereel.agents.rendering import Renderer
from tapereel.agents.rendering.renderer import RenderError
from tapereel.agents.setup import EmbeddedConfig, RendererConfig, ServerConfig
from tapereel.agents.setup.engine_config import check_models
from tapereel.agents.vision import UnsupportedVision, save_tiny_vision
from tapereel.agents.vision.video import READERS, NativeVideo
from tapereel.agents.vision.vision import Expansion
from tapereel.tapes import Message, MissingExtra, Sampling
from tapereel.tapes.places import Place

SETTINGS = SimpleNamespace(merge_size=2, temporal_patch_size=2)
"""What tokens and positions read of a video processor."""


@pytest.fixture(scope="module", params=READERS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vision(folder, request.param)
    return load_pretrained(folder)


@pytest.fixture
def reader(loaded: Pretrained, monkeypatch: pytest.MonkeyPatch) -> NativeVideo:
    """How the family reads videos, in the vision of the model too."""
    made = READERS[loaded.model.config.model_type](loaded.model.config, loaded.tokenizer, SETTINGS)

    def expand(width: int, height: int, times: Sequence[float]) -> Expansion:
        """8x8 pixels a token, as the tiny processor makes of small frames."""
        grid = (-(-len(times) // 2), height // 4, width // 4)
        return Expansion(made.ids(grid, times), grid)

    # The base class asks the processor, which needs torchvision, for the grid alone.
    monkeypatch.setattr(NativeVideo, "expand", lambda self, *size: expand(*size))
    monkeypatch.setattr(loaded.vision, "video", made)
    return made


def video(n: int, width: int = 24, height: int = 16, *, fps: float = 2.0, indices: Sequence[int] = ()) -> Message:
    frames = [{"media": f"{k:064x}.png", "width": width, "height": height} for k in range(n)]
    return {"type": "video", "frames": frames, "fps": fps, "indices": [*(indices or range(n))]}


def said(*parts: Any) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


IMAGE = {"type": "image", "media": "a" * 64 + ".png", "width": 40, "height": 24}
PROMPTS = [
    ["look ", video(2), "?"],
    ["at ", IMAGE, video(5, fps=0.3), " and ", video(3, 16, 40, fps=30), "then", IMAGE],
    [video(6, fps=3.7, indices=range(0, 60, 10)), video(4, 32, 32, fps=0.11), "which? ", video(9, 16, 16), "and then?"],
]


@pytest.mark.parametrize("parts", PROMPTS)
def test_positions_are_those_of_the_model(loaded: Pretrained, reader: NativeVideo, parts: list[Any]) -> None:
    rendered = Renderer(loaded.tokenizer, loaded.vision).prompt([said(*parts)])
    model, vision = loaded.model, loaded.vision
    assert vision is not None
    kinds, grids = torch.zeros(1, len(rendered.ids), dtype=torch.int), {"image": [], "video": []}
    for place in rendered.places:
        kinds[0, place.offset : place.end] = torch.from_numpy(vision.feature_mask(place) * (1 + bool(place.times)))
        grids[place.kind].append(place.grid)
    seconds = [2 * (p.times[1] - p.times[0]) for p in rendered.places if p.times]
    more = {"second_per_grid_ts": torch.tensor(seconds)} if loaded.model.config.model_type == "qwen2_5_vl" else {}
    ids, (images, videos) = torch.tensor([list(rendered.ids)]), (torch.tensor(found) for found in grids.values())
    expected, _ = model.model.get_rope_index(ids, kinds, images if len(images) else None, videos, **more)  # type: ignore[operator]
    np.testing.assert_array_equal(vision.positions(rendered.places, len(rendered.ids)), expected[:, 0])


def test_a_video_is_one_place_with_its_frames_and_times(loaded: Pretrained, reader: NativeVideo) -> None:
    renderer = Renderer(loaded.tokenizer, loaded.vision)
    first, second = said("look ", video(5), IMAGE), said(video(2, fps=1.0))
    rendered = renderer.prompt([first, {"role": "assistant", "content": "a"}, second])
    assert [place.kind for place in rendered.places] == ["video", "image", "video"]
    place = rendered.places[0]
    assert place.media == tuple(f"{k:064x}.png" for k in range(5))
    assert place.times == (0.0, 0.5, 1.0, 1.5, 2.0)
    assert place.grid == (3, 4, 6)
    mask = loaded.vision.feature_mask(place)  # type: ignore[union-attr]
    assert (len(mask), mask.sum()) == (place.length, 3 * 2 * 3)
    text = renderer.spell(rendered.ids[place.offset : place.end])
    pads = "<|video_pad|>" * 6
    if loaded.model.config.model_type == "qwen3_vl":
        times = ("0.2", "1.2", "2.0")  # of pairs, in the mean; the last frame stands twice
        assert text == "".join(f"<{t} seconds><|vision_start|>{pads}<|vision_end|>" for t in times)
    else:
        assert text == 3 * pads
    before, after = renderer.spell(rendered.ids[: place.offset]), renderer.spell(rendered.ids[place.end :])
    assert before.endswith("look <|vision_start|>")
    assert after.startswith("<|vision_end|><|vision_start|><|image_pad|>")
    begun = renderer.track(
        renderer.prompt([first]), call="c", reply={"role": "assistant", "content": "a"}, completion=[97, 261]
    )
    assert (
        renderer.prompt([first, {"role": "assistant", "content": "a"}, second], tracks=[begun]).places
        == rendered.places
    )
    with pytest.raises(RenderError, match=r"\b3\D*\b2\D*\bvideos"):
        renderer._pictures_of((first,), rendered.text)


def test_text_that_spells_a_video_stays_text(loaded: Pretrained, reader: NativeVideo) -> None:
    renderer = Renderer(loaded.tokenizer, loaded.vision)
    words = "<|vision_start|><|video_pad|><|vision_end|>"
    rendered = renderer.prompt([said(words, video(2), words)])
    assert len(rendered.places) == 1
    outside = rendered.ids[: rendered.places[0].offset - 1] + rendered.ids[rendered.places[0].end + 1 :]
    assert reader.id not in outside


@pytest.mark.parametrize(("indices", "fps"), [((0, 1, 3), 2.0), ((0, 3, 5, 8), 7.0)])
def test_frames_that_qwen25_cant_place_are_refused_with_their_times(
    indices: tuple[int, ...], fps: float, loaded: Pretrained, reader: NativeVideo
) -> None:
    renderer, message = Renderer(loaded.tokenizer, loaded.vision), said(video(len(indices), fps=fps, indices=indices))
    if loaded.model.config.model_type == "qwen3_vl":
        assert renderer.prompt([message]).places[0].times[-1] == indices[-1] / fps
        with pytest.raises(RenderError, match=r"\[video 1 frames 24x16"):
            renderer.prompt([said(video(1))])
        return
    last = f"{indices[-1] / fps:.6g}"
    with pytest.raises(RenderError, match=rf"\[video {len(indices)} frames 24x16 .* 0, .*{last} s .*evenly"):
        renderer.prompt([message])
    assert renderer.prompt([said(video(1))]).places[0].times == (0.0,)


def test_a_video_of_other_times_has_another_key_and_a_pictures_place_keeps_its_bytes() -> None:
    from tapereel.tapes.arrays import ints
    from tapereel.tapes.records import Tokens

    one = Place(("a.png", "b.png"), "video", 1, 2, (1, 2, 4), (0.0, 0.1))
    assert one.key == one.moved(5).key
    assert one.key not in (one._replace(times=(0.0, 0.2)).key, one._replace(media=("b.png", "a.png")).key)
    picture = Place(("a.png",), "image", 3, 1, (1, 2, 2))
    written = Tokens(
        tape="t", call="c", prompt=ints([1] * 4), places=(one, picture), completion=ints([1]), tokenizer="x"
    )
    line = written.model_dump_json()
    assert '[["a.png"],"image",3,1,[1,2,2]]' in line
    assert '[["a.png","b.png"],"video",1,2,[1,2,4],[0.0,0.1]]' in line
    assert Tokens.model_validate_json(line).places == (one, picture)


def test_a_model_without_video_tokens_or_torchvision_is_refused_before_its_weights(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path / "two", "qwen2_vl")
    save_tiny_vision(tmp_path / "three", "qwen3_vl")
    for folder in tmp_path.iterdir():
        (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedVision, match=r"two\b.*'qwen2_vl'.* qwen2_5_vl, qwen3_vl "):
        load_pretrained(tmp_path / "two", video="native")
    assert importlib.util.find_spec("torchvision") is None, "the default environment has no torchvision"
    config = EmbeddedConfig(model=str(tmp_path / "three"), renderer=RendererConfig(video="native"))
    for refused in (lambda: load_pretrained(tmp_path / "three", video="native"), lambda: check_models([config])):
        with pytest.raises(MissingExtra, match=r"renderer\.video=native.*torchvision.*tapereel\[video\]"):
            refused()


def test_servers_get_no_native_videos(loaded: Pretrained, reader: NativeVideo) -> None:
    with pytest.raises(ValueError, match=r"renderer\.video=native.*vllm"):
        ServerConfig(model="m", renderer=RendererConfig(video="native"))
    renderer = Renderer(loaded.tokenizer, loaded.vision)
    shown = renderer.prompt([said("look ", video(2))])
    request = Request(
        messages=(), prompt=shown.ids, places=shown.places, picture=lambda _: b"", seed=0, sampling=Sampling()
    )
    with pytest.raises(EngineError, match=rf"{0:064x}\.png.*engine\.renderer\.video=frames"):
        Generate(renderer).body(request, model="m", request_id="r", stops=())
