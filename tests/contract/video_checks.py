"""Native video of Qwen2.5-VL and Qwen3-VL against the models' own forwards, which read pixels of the video processors.

    .contract/video/bin/python -m pytest tests/contract/video_checks.py tests/contract/video_runs.py

Run by `test_video_checks.py` in the environment that has torchvision. The oracle knows nothing of slots or caches: it
gets final ids, all files, and which tokens the prompt has for them.
"""

from __future__ import annotations

import asyncio
import copy
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoVideoProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

from tapereel.agents import Completion, EmbeddedEngine, Request
from tapereel.agents.engines.embedded import Pretrained, load_pictures, load_pretrained
from tapereel.agents.rendering import Renderer, Track
from tapereel.agents.vision import UnsupportedVision, save_tiny_vision
from tapereel.agents.vision.families import prove_vision
from tapereel.finetune import Row
from tapereel.finetune.trainer import forward, plan, score
from tapereel.finetune.trainer.micro_batches import Pictures
from tapereel.tapes import Message, Sampling
from tapereel.tapes.places import Place

from ..agents.embedded_lab import until
from ..finetune.build import row

EXACT, OFF = 1e-4, 0.1
FILES: dict[str, bytes] = {}
FAMILY = pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])


@dataclass(frozen=True)
class Loaded:
    folder: Path
    found: Pretrained
    image_processor: Any
    video_processor: Any

    @property
    def model(self) -> Any:
        return self.found.model

    @property
    def vision(self) -> Any:
        return self.found.vision


FOLDERS: list[TemporaryDirectory[str]] = []


@cache
def loaded(family: str) -> Loaded:
    """The tiny model of a family, with processors that were loaded beside it. Copy the model before it is changed."""
    FOLDERS.append(TemporaryDirectory())
    folder = Path(FOLDERS[-1].name)
    save_tiny_vision(folder, family)  # type: ignore[arg-type]
    own = AutoVideoProcessor.from_pretrained(str(folder))
    return Loaded(
        folder, load_pretrained(folder, video="native"), AutoImageProcessor.from_pretrained(folder, backend="pil"), own
    )


@cache
def file(width: int, height: int, seed: int) -> str:
    """The name of a file with noise of this size."""
    written = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype="uint8")
    Image.fromarray(pixels).save(written, "PNG")
    name = f"{sha256(written.getvalue()).hexdigest()}.png"
    FILES[name] = written.getvalue()
    return name


def image(width: int, height: int, seed: int) -> Message:
    return {"type": "image", "media": file(width, height, seed), "width": width, "height": height}


def video(n: int, width: int, height: int, seed: int, *, fps: float = 2.0, stride: int = 3) -> Message:
    """A content part: n frames, each `stride`th of a source with that many frames in a second."""
    frames = [{"media": file(width, height, 1000 * seed + k + 7), "width": width, "height": height} for k in range(n)]
    return {"type": "video", "frames": frames, "fps": fps, "indices": [stride * k for k in range(n)]}


def said(*parts: str | Message) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def opened(name: str, files: Any) -> Any:
    return Image.open(io.BytesIO(files[name])).convert("RGB")


def oracle(
    at: Loaded, model: Any, ids: Sequence[int], places: Sequence[Place], own: Sequence[int], files: Any
) -> Tensor:
    """Log-probs of the tokens at `own` by the public forward. Tokens there that mean a picture or video are read as
    another word with the same embedding, since that forward takes each of them for one."""
    whole = torch.tensor([list(ids)])
    kinds = torch.zeros_like(whole, dtype=torch.int)
    pads = {"image": at.model.config.image_token_id, "video": at.model.config.video_token_id}
    for place in places:
        here = slice(place.offset, place.end)
        kinds[0, here] = (whole[0, here] == pads[place.kind]) * (1 + (place.kind == "video"))
    read = whole.clone()
    for word, pad in enumerate(pads.values()):
        sampled = (whole == pad) & (kinds == 0)
        if sampled.any():
            assert not (whole == word).any()
            model = copy.deepcopy(model)
            model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight.clone())
            model.get_input_embeddings().weight.data[word] = model.get_input_embeddings().weight.data[pad]
            read = torch.where(sampled, word, read)
    inputs: dict[str, Any] = {"mm_token_type_ids": kinds} if places else {}
    pictures = [opened(place.media[0], files) for place in places if place.kind == "image"]
    if pictures:
        inputs |= dict(at.image_processor(images=pictures, return_tensors="pt"))
    videos = [place for place in places if place.kind == "video"]
    if videos:
        clips = [[opened(name, files) for name in place.media] for place in videos]
        rates = [(len(p.times) - 1) / (p.times[-1] - p.times[0]) for p in videos]
        about = [
            VideoMetadata(total_num_frames=len(clip), fps=fps, frames_indices=list(range(len(clip))))
            for clip, fps in zip(clips, rates, strict=True)
        ]
        inputs |= dict(
            at.video_processor(videos=clips, video_metadata=about, do_sample_frames=False, return_tensors="pt")
        )
        if at.model.config.model_type == "qwen2_5_vl":
            size = at.video_processor.temporal_patch_size
            inputs["second_per_grid_ts"] = torch.tensor([size / one.sampled_fps for one in about])
    with torch.no_grad():
        made = model(input_ids=read, **inputs).logits[0].float().log_softmax(-1)
    where = torch.tensor(list(own))
    return made[where - 1, whole[0, where]]


# Loading


@FAMILY
@pytest.mark.parametrize("size", [(40, 30), (16, 16), (200, 90), (7, 61), (5, 6)])
def test_tokens_are_those_of_the_processor_of_the_model(family: str, size: tuple[int, int]) -> None:
    at = loaded(family)
    kind = {"qwen2_5_vl": Qwen2_5_VLProcessor, "qwen3_vl": Qwen3VLProcessor}[family]
    whole = kind(at.image_processor, at.found.tokenizer, at.video_processor)
    for n, fps, stride in ((2, 1.0, 1), (3, 30.0, 5), (5, 0.7, 1), (6, 2.0, 3)):
        part = video(n, *size, 3, fps=fps, stride=stride)
        clip = [opened(frame["media"], FILES) for frame in part["frames"]]
        about = VideoMetadata(total_num_frames=n * stride, fps=fps, frames_indices=part["indices"])
        text = "A<|vision_start|><|video_pad|><|vision_end|>B"
        own = whole(text=[text], videos=[clip], video_metadata=[about], do_sample_frames=False, return_tensors="pt")
        times = tuple(index / fps for index in part["indices"])
        ids, grid = at.vision.expand(*size, times)
        before, after = (
            at.found.tokenizer.convert_tokens_to_ids(text) for text in ("<|vision_start|>", "<|vision_end|>")
        )
        assert own["input_ids"][0, 1:-1].tolist() == [before, *ids, after]
        assert own["video_grid_thw"][0].tolist() == list(grid)
        place = Place(tuple(frame["media"] for frame in part["frames"]), "video", 0, len(ids), grid, times)
        pixels = at.vision.pixels(place, FILES.__getitem__)
        assert torch.equal(pixels.tensors["pixel_values"], own["pixel_values_videos"])
        assert (pixels.count, pixels.patches) == (at.vision.feature_mask(place).sum(), grid[0] * grid[1] * grid[2])
        if family == "qwen2_5_vl":
            assert own["second_per_grid_ts"][0] == pytest.approx(at.vision.video.seconds(times))


@FAMILY
def test_the_hash_names_the_video_processor_and_a_checkpoint_has_it_again(family: str, tmp_path: Path) -> None:
    at = loaded(family)
    tokenizer = at.found.tokenizer
    frames = load_pictures(at.folder, tokenizer)
    assert frames is not None
    assert frames.hash != at.vision.hash
    assert Renderer(tokenizer, frames).hash != Renderer(tokenizer, at.vision).hash
    hashes = set()
    for way in (frames, at.vision):
        folder = tmp_path / way.hash
        at.model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        way.save(folder)
        again = [load_pictures(folder, tokenizer, how) for how in ("frames", "native")]  # type: ignore[arg-type]
        hashes.add(tuple(one and one.hash for one in again))
    assert hashes == {(frames.hash, at.vision.hash)}
    settings = next(path for path in folder.glob("video_preprocessor_config.json"))
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "image_mean": [0.1] * 3}))
    changed = load_pictures(folder, tokenizer, "native")
    assert changed is not None
    assert changed.hash != at.vision.hash
    settings.write_text(json.dumps({"video_processor_type": "LlavaOnevisionVideoProcessor"}))
    with pytest.raises(UnsupportedVision, match=r"LlavaOnevisionVideoProcessor.*video_preprocessor_config\.json"):
        load_pictures(folder, tokenizer, "native")


@FAMILY
def test_a_model_that_reads_videos_otherwise_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = loaded(family)
    prove_vision(at.model, at.vision)
    positions = type(at.vision.video).positions
    monkeypatch.setattr(
        type(at.vision.video), "positions", lambda self, grid, times: (positions(self, grid, times)[0] * 2, 9)
    )
    with pytest.raises(UnsupportedVision, match=r"\(tolerance \d"):
        prove_vision(at.model, at.vision)


@FAMILY
def test_a_bad_frame_is_refused_by_its_name(family: str) -> None:
    at = loaded(family)
    part = video(4, 24, 16, 5)
    names = tuple(frame["media"] for frame in part["frames"])
    ids, grid = at.vision.expand(24, 16, (0.0, 1.0, 2.0, 3.0))
    place = Place(names, "video", 0, len(ids), grid, (0.0, 1.0, 2.0, 3.0))
    for data in (b"no picture", FILES[names[2]][:60]):
        with pytest.raises(ValueError, match=f"{names[2]}.*processed"):
            at.vision.pixels(place, {**FILES, names[2]: data}.__getitem__)
    with pytest.raises(ValueError, match="processed"):
        at.vision.pixels(place, {**FILES, names[2]: FILES[file(40, 16, 1)]}.__getitem__)
    with pytest.raises(ValueError, match=f"{names[-1]}.*grid"):
        at.vision.pixels(place._replace(grid=(2, 8, 8)), FILES.__getitem__)
    frames = load_pictures(at.folder, at.found.tokenizer)
    assert frames is not None
    with pytest.raises(ValueError, match="frames"):
        frames.positions([place], place.end)


# Sampling


def engine(at: Loaded, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(at.model, Renderer(at.found.tokenizer, at.vision), **{"version": "v0", "slots": 4, **options})


def asking(rendered: Any, seed: int = 0, *, key: str = "", **sampling: Any) -> Request:
    return Request(
        messages=rendered.messages,
        prompt=rendered.ids,
        places=rendered.places,
        picture=FILES.__getitem__,
        sampling=Sampling(**{"max_tokens": 10, "ignore_eos": True, **sampling}),
        seed=seed,
        cache_key=key,
    )


def off(at: Loaded, request: Request, found: Completion, model: Any = None, files: Any = FILES, **places: Any) -> float:
    """The largest error of the sampled log-probs, in nats. places: fields that the oracle reads otherwise, of the last
    video."""
    assert found.ids is not None
    assert request.prompt is not None
    ids = [*request.prompt, *found.ids]
    own = range(len(request.prompt), len(ids))
    shown = list(request.places)
    last = max((i for i, place in enumerate(shown) if place.kind == "video"), default=0)
    if places:
        shown[last] = shown[last]._replace(**places)
    exact = oracle(at, at.model if model is None else model, ids, shown, own, files)
    return float((exact - torch.tensor(found.logprobs)).abs().max())


def talk(number: int) -> list[Message]:
    """What the user says in five turns: 0 to 3 pictures, and videos of 2 to 6 frames, of mixed sizes."""
    own = 10 * number
    return [
        said("what is ", image(40, 30, own), " and ", video(4 + number, 30, 20, own), "?"),
        said("and now?"),
        said(
            image(8, 40, own + 2), video(2, 16, 16, own + 1, fps=0.7), image(60, 33, own + 3), " or", image(24, 24, own)
        ),
        said("so ", video(3, 20, 40, own + 2, stride=7), video(5, 24, 24, own + 3, fps=30.0, stride=1)),
        said("then ", image(33, 20, own + 5)),
    ]


async def converse(sampling: EmbeddedEngine, number: int, turns: Sequence[Message]) -> list[tuple[Request, Completion]]:
    renderer, history, tracks, found = sampling.renderer, list[Message](), list[Track](), []
    assert renderer is not None
    for turn, message in enumerate(turns):
        history.append(message)
        rendered = renderer.prompt(history, tracks=tracks)
        request = asking(rendered, 100 * number + turn, key=f"c{number}", max_tokens=6 + number)
        completion = await sampling.complete(request)
        reply: Message = {"role": "assistant", "content": completion.text}
        tracks.append(renderer.track(rendered, call=str(turn), reply=reply, completion=completion.ids or ()))
        history.append(reply)
        found.append((request, completion))
    return found


@FAMILY
def test_turns_with_pictures_and_videos_are_exact_alone_in_ragged_batches_and_on_cached_turns(family: str) -> None:
    at = loaded(family)
    sampling = engine(at)

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(converse(sampling, number, talk(number)) for number in range(3)))

    conversations = asyncio.run(all_of_them())
    for turns in conversations:
        assert [place.kind for place in turns[-1][0].places] == [
            "image", "video", "image", "video", "image", "image", "video", "video", "image",
        ]  # fmt: skip
        for turn, (request, found) in enumerate(turns):
            assert off(at, request, found) < EXACT
            assert turn == 0 or found.usage.cached_tokens > len(turns[turn - 1][0].prompt or ())
    request, found = conversations[1][4]
    alone = asyncio.run(engine(at).complete(request))
    assert alone.ids == found.ids
    assert off(at, request, alone) < EXACT


@FAMILY
def test_flat_positions_a_swapped_frame_another_video_and_another_fps_are_off(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = loaded(family)
    renderer = Renderer(at.found.tokenizer, at.vision)
    shown = [said("look ", video(6, 30, 20, 1), " what?")]
    request = asking(renderer.prompt(shown))
    found = asyncio.run(engine(at).complete(request))
    assert off(at, request, found) < EXACT
    media = request.places[0].media
    assert off(at, request, found, media=(*media[:2], file(30, 20, 99), *media[3:])) > OFF
    assert off(at, request, found, media=tuple(file(30, 20, k) for k in range(6))) > OFF
    # The same ids, where the family writes no times as text.
    other = renderer.prompt([said("look ", video(6, 30, 20, 1, fps=0.3), " what?")])
    assert (other.ids == request.prompt) == (family == "qwen2_5_vl")
    if family == "qwen2_5_vl":
        assert off(at, request, found, times=other.places[0].times) > OFF
        assert other.places[0].key != request.places[0].key
    monkeypatch.setattr(type(at.vision), "positions", lambda self, places, length: np.tile(np.arange(length), (3, 1)))
    flat = asyncio.run(engine(at).complete(request))
    monkeypatch.undo()
    assert off(at, request, flat) > OFF


@FAMILY
def test_the_same_ids_with_another_video_reuse_no_kv_and_a_prefix_never_ends_inside_one(family: str) -> None:
    at = loaded(family)
    renderer = Renderer(at.found.tokenizer, at.vision)
    one, other = (renderer.prompt([said("look: ", video(4, 24, 24, seed), " what?")]) for seed in (1, 2))
    place = one.places[0]
    assert one.ids == other.ids
    inside = replace(asking(one, key="same"), prompt=one.ids[: place.end])

    async def each() -> list[Completion]:
        sampling = engine(at)
        return [await sampling.complete(one) for one in (asking(one, key="same"), asking(other, key="same"), inside)]

    first, second, third = asyncio.run(each())
    assert [second.usage.cached_tokens, third.usage.cached_tokens] == [place.offset] * 2
    for request, found in ((asking(one), first), (asking(other), second), (inside, third)):
        assert off(at, request, found) < EXACT


@FAMILY
def test_forks_and_new_weights_in_mid_answer_are_exact(family: str) -> None:
    at = loaded(family)
    torch.manual_seed(1)
    later: Any = copy.deepcopy(at.model)
    with torch.no_grad():
        for weight in later.parameters():
            weight += 0.05 * torch.randn_like(weight)
    models = {"v0": at.model, "v1": later}
    renderer = Renderer(at.found.tokenizer, at.vision)
    start = [said("look: ", video(5, 24, 24, 1), " what?"), {"role": "assistant", "content": "a square"}]
    branches = [[*start, said("and ", video(n, 30, 20, n))] for n in (2, 3, 4)] + [[*start, said("sure?")]]
    requests = [asking(renderer.prompt(branch), n, key="c", max_tokens=30) for n, branch in enumerate(branches)]

    async def forked() -> list[Completion]:
        sampling = engine(at)
        await sampling.complete(asking(renderer.prompt(start[:1]), key="c"))
        waiting = [asyncio.ensure_future(sampling.complete(request)) for request in requests]
        before = sampling.stats.sampled
        await until(lambda: sampling.stats.sampled > before + 20)
        await sampling.sync_weights(later.state_dict(), "v1", "reprefill")
        return list(await asyncio.gather(*waiting))

    for request, found in zip(requests, asyncio.run(forked()), strict=True):
        assert found.ids is not None
        assert found.logprobs is not None
        assert request.prompt is not None
        assert [version for version, _, _ in found.spans] == ["v0", "v1"]
        ids, n = [*request.prompt, *found.ids], len(request.prompt)
        for version, begin, end in found.spans:
            exact = oracle(at, models[version], ids, request.places, range(n + begin, n + end), FILES)
            assert float((exact - torch.tensor(found.logprobs[begin:end])).abs().max()) < EXACT


# Training


def shown(family: str, turns: Sequence[tuple[Message, int]], tape: str = "a", group: str = "g", seed: int = 0) -> Row:
    """A row of turns: (what the user says, how many tokens are sampled)."""
    at = loaded(family)
    renderer, history, tracks, own = Renderer(at.found.tokenizer, at.vision), list[Message](), list[Track](), []
    for turn, (message, n) in enumerate(turns):
        history.append(message)
        rendered = renderer.prompt(history, tracks=tracks)
        ids = np.random.default_rng(100 * seed + turn).integers(2, 256, n).tolist()
        reply: Message = {"role": "assistant", "content": renderer.decode(ids)}
        tracks.append(renderer.track(rendered, call=str(turn), reply=reply, completion=ids))
        history.append(reply)
        own += range(len(rendered.ids), len(rendered.ids) + n)
    made = row(tape, group, turns=(len(own),))
    made = replace(made, input_ids=np.array(tracks[-1].ids, np.int32), own=np.array(own, np.int32))
    return replace(made, places=tracks[-1].places, file=FILES.__getitem__ if tracks[-1].places else None)


def mixed(family: str) -> list[Row]:
    """Rows of several turns with pictures and videos, of either alone, and of text alone."""
    turns = [list(zip(talk(number), (3, 2, 1, 4, 2), strict=True)) for number in range(2)]
    return [
        shown(family, turns[0], "a", "g"),
        shown(family, [(said("Where is it?"), 5), (said("And now?"), 2)], "b", "h", 1),
        shown(family, [(said(video(6, 16, 24, 5)), 2), (said("no"), 3)], "c", "i", 2),
        shown(family, [(said(image(30, 30, 4), "?"), 2)], "d", "j", 3),
        shown(family, turns[1], "e", "k", 4),
    ]


def scored(family: str, rows: list[Row], **how: Any) -> Tensor:
    at = loaded(family)
    return score(at.model, rows, vision=at.vision, **how).logprob


def oracles(family: str, rows: Sequence[Row], files: Any = FILES) -> Tensor:
    at = loaded(family)
    return torch.cat([oracle(at, at.model, r.input_ids.tolist(), r.places, r.own.tolist(), files) for r in rows])


@FAMILY
@pytest.mark.parametrize("how", [{}, {"pack": True}, {"micro_tokens": 1}, {"micro_tokens": 1, "pack": True}])
def test_log_probs_of_rows_are_those_of_the_model_itself(family: str, how: dict[str, Any]) -> None:
    rows = mixed(family)
    assert (scored(family, rows, **how) - oracles(family, rows)).abs().max() < EXACT
    order = [3, 0, 4, 2, 1]
    again = scored(family, [rows[i] for i in order], **how).split([len(rows[i].own) for i in order])
    assert (torch.cat([again[order.index(i)] for i in range(5)]) - oracles(family, rows)).abs().max() < EXACT


@FAMILY
def test_rows_with_another_frame_order_or_time_are_scored_otherwise(family: str) -> None:
    one = mixed(family)[2]
    own, place = oracles(family, [one]), one.places[0]
    swapped = place._replace(media=(place.media[1], place.media[0], *place.media[2:]))
    assert (scored(family, [replace(one, places=(swapped,))]) - own).abs().max() > OFF
    slower = place._replace(times=tuple(5 * seconds for seconds in place.times))
    if family == "qwen2_5_vl":
        assert (scored(family, [replace(one, places=(slower,))]) - own).abs().max() > OFF


@FAMILY
def test_a_shared_prefix_forwards_its_video_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "Here are the rules, which are long enough to be worth a forward pass of their own: "
    rows = [
        shown(family, [(said(long, video(4, 24, 24, 1), "?"), 3), (said(video(3, 16, 16, 2)), 2)], f"t{i}", "g", i)
        for i in range(4)
    ]
    odd = [shown(family, [(said(long, video(4, 24, 24, 10 + i), "?"), 3)], f"u{i}", "odd", i) for i in range(4)]
    micros = plan([*rows, *odd], share=True, vision=loaded(family).vision)
    ends = sorted(len(m.prefix) for m in micros if m.prefix is not None)
    assert ends[0] <= odd[0].places[0].offset
    assert ends[1] >= rows[0].places[0].end
    forwarded: list[int] = []
    features = Pictures.features
    monkeypatch.setattr(
        Pictures, "features", lambda self, model: (forwarded.append(len(self.shown)), features(self, model))[1]
    )
    assert (scored(family, [*rows, *odd]) - oracles(family, [*rows, *odd])).abs().max() < EXACT
    assert sorted(forwarded) == [2, 4]


@FAMILY
def test_rows_that_share_a_video_forward_it_once_with_the_gradient_of_copies(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [shown(family, [(said("Where? ", video(4, 24, 24, 1), "?"), 2)], f"t{i}", "g", i) for i in range(16)]
    at, counts = loaded(family), list[int]()
    features = Pictures.features
    monkeypatch.setattr(
        Pictures, "features", lambda self, model: (counts.append(len(self.shown)), features(self, model))[1]
    )

    def gradient(copied: bool) -> dict[str, Tensor]:
        model: Any = copy.deepcopy(at.model)
        budget = 1 if copied else 16 * len(rows[0]) + at.vision.patches(rows[0].places[0].grid)
        for micro in plan(rows, vision=at.vision, micro_tokens=budget):
            forward(model, micro).logprob.sum().div(32).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    once = gradient(False)
    assert counts == [1]
    each = gradient(True)
    assert counts == [1] * 17
    assert any("visual" in name for name in once)
    assert max(float((once[name] - each[name]).abs().max()) for name in each) < 1e-5
