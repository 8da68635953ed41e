"""Pictures on a server in vLLM's shapes: what is sent, and that another reading than ours is refused.

The real vLLM is asked in `tests/contract/test_vllm_pictures.py`.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from tapereel.agents import EngineError, Request
from tapereel.agents.engines.embedded import load_pictures, load_tokenizer
from tapereel.agents.engines.servers import RemoteEngine
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.rendering import Renderer
from tapereel.agents.vision import UnsupportedVision, save_tiny_vision
from tapereel.tapes import Picture, Sampling
from tapereel.tapes.messages import image_of

from ...faulty import FaultyServer, status
from ...served import Heard, servers

pytestmark = pytest.mark.timeout(60)
SIZES = ((32, 32), (33, 57))
TOKENS = (16, 28)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder = tmp_path_factory.mktemp("vision")
    save_tiny_vision(folder)
    tokenizer = load_tokenizer(folder)
    return Renderer(tokenizer, load_pictures(folder, tokenizer))


class Sighted(FaultyServer):
    """Expands markers as vLLM does. `reads` changes its answers to all requests but the probe."""

    def __init__(self, renderer: Renderer, reads: Callable[[dict[str, Any]], None] | None = None) -> None:
        super().__init__()
        self.marker = renderer.marker
        self.reads = reads

    def answer(self, body: dict[str, Any], *rest: Any, **more: Any) -> dict[str, Any]:
        found = super().answer(body, *rest, **more)
        if not body.get("content_parts"):
            return found
        # The probe shows 80x48 pixels, which take 60 tokens.
        lengths = [60] if body["request_id"] == "tapereel-probe" else list(TOKENS)
        ids, places = list[int](), list[dict[str, int]]()
        for id in body["token_ids"]:
            if id == self.marker and lengths:
                length = lengths.pop(0)
                places.append({"offset": len(ids), "length": length})
                ids += [id] * length
            else:
                ids.append(id)
        found |= {"prompt_token_ids": ids, "mm_placeholders": {"image": places}}
        if self.reads is not None and body["request_id"] != "tapereel-probe":
            self.reads(found)
        return found


def asked(renderer: Renderer) -> Request:
    noise = np.random.default_rng(0)
    shown = [Picture.of(noise.integers(0, 256, (height, width, 3)).astype("uint8")) for width, height in SIZES]
    parts = [{"type": "text", "text": "one"}, image_of(shown[0]), {"type": "text", "text": "two"}, image_of(shown[1])]
    rendered = renderer.prompt([{"role": "user", "content": parts}])
    assert tuple(place.length for place in rendered.places) == TOKENS
    return Request(
        messages=rendered.messages,
        prompt=rendered.ids,
        places=rendered.places,
        seed=1,
        sampling=Sampling(max_tokens=5),
        picture={one.name: one.data or b"" for one in shown}.__getitem__,
    )


def completed(
    server: FaultyServer, renderer: Renderer, *requests: Request, scored: Sequence[Request] = ()
) -> RemoteEngine:
    async def whole() -> RemoteEngine:
        async with server.up() as url:
            engine = await connect(servers(url), renderer, weights=True)
            try:
                for request in requests:
                    await engine.complete(request)
                for request in scored:
                    await engine.score(request.prompt or (), request.places, request.picture)
                return engine
            finally:
                await engine.close()

    return asyncio.run(whole())


def test_a_picture_is_one_marker_and_the_png_in_the_size_that_the_model_reads(renderer: Renderer) -> None:
    server, request = Sighted(renderer), asked(renderer)
    heard = Heard()
    assert "pictures" in completed(server, renderer, request, replace(request, listener=heard)).can
    assert len(heard.ids) == 5, "the places are in the first chunk of a stream"
    body = server.asked[0]
    assert body["token_ids"].count(renderer.marker) == 2
    assert body["return_token_ids"] is True
    assert {key for part in body["content_parts"] for key in part} == {"type", "url"}
    urls = [part["url"] for part in body["content_parts"]]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    sizes = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).size for url in urls]
    assert sizes == [(32, 32), (32, 56)]


def test_a_request_without_pictures_is_sent_as_before(renderer: Renderer) -> None:
    rendered = renderer.prompt([{"role": "user", "content": "no picture"}])
    server = Sighted(renderer)
    completed(server, renderer, replace(asked(renderer), prompt=rendered.ids, places=()))
    assert set(server.asked[0]) == {"model", "token_ids", "request_id", "sampling_params", "stream"}


def shifted(found: dict[str, Any]) -> None:
    found["mm_placeholders"]["image"][1]["offset"] += 1


def shorter(found: dict[str, Any]) -> None:
    found["mm_placeholders"]["image"][1]["length"] -= 1


def fewer(found: dict[str, Any]) -> None:
    found["mm_placeholders"]["image"].pop()


def more(found: dict[str, Any]) -> None:
    found["mm_placeholders"]["image"].append({"offset": 60, "length": 1})


def silent(found: dict[str, Any]) -> None:
    del found["mm_placeholders"], found["prompt_token_ids"]


def without_ids(found: dict[str, Any]) -> None:
    del found["prompt_token_ids"]


def other_ids(found: dict[str, Any]) -> None:
    found["prompt_token_ids"][-1] += 1


@pytest.mark.parametrize("reads", [shifted, shorter, fewer, more, silent, without_ids, other_ids])
def test_another_reading_is_refused_and_not_asked_again(renderer: Renderer, reads: Any) -> None:
    server, request = Sighted(renderer, reads), asked(renderer)
    with pytest.raises(EngineError, match=r"\d of 2, [0-9a-f]{64}\.png|limits\.keep_prompt") as caught:
        completed(server, renderer, request)
    assert not caught.value.retry
    with pytest.raises(EngineError, match=re.escape(str(caught.value))):
        completed(server, renderer, scored=[request])
    if reads is shifted:
        place = request.places[1]
        assert re.search(rf"\b28 .*\b{place.offset + 1}\b.*\b28 .*\b{place.offset}\b", str(caught.value))


def test_a_sampled_marker_before_a_picture_is_refused_before_it_is_sent(renderer: Renderer) -> None:
    request, server = asked(renderer), Sighted(renderer)
    assert request.prompt is not None
    last = request.places[-1]
    sampled = request.prompt[: last.offset] + array("i", [renderer.marker or 0]) + request.prompt[last.offset :]
    places = (*request.places[:-1], last.moved(1))
    with pytest.raises(EngineError, match=rf"\b{renderer.marker}\b.*\b{last.offset}\b"):
        completed(server, renderer, replace(request, prompt=sampled, places=places))
    assert server.asked == []


class Blind(FaultyServer):
    """A server of a model of text."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await (status(400)(request, body) if "content_parts" in body else super().generate(request))


def test_a_server_that_refuses_pictures_serves_text(renderer: Renderer, caplog: pytest.LogCaptureFixture) -> None:
    text = replace(asked(renderer), prompt=renderer.prompt([{"role": "user", "content": "a"}]).ids, places=())
    with caplog.at_level(logging.WARNING):
        assert "pictures" not in completed(Blind(), renderer, text).can
    assert "pictures" in caplog.text
    with pytest.raises(EngineError, match=r"[0-9a-f]{64}\.png.*--enable-scale-out"):
        completed(Blind(), renderer, asked(renderer))
    with pytest.raises(EngineError, match=r"[0-9a-f]{64}\.png.*--enable-scale-out"):
        completed(Blind(), renderer, scored=[asked(renderer)])


def test_a_model_whose_positions_vllm_computes_otherwise_is_refused_at_start(tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, "qwen3_vl")
    tokenizer = load_tokenizer(tmp_path)
    for interleaved in (True, False):
        config = json.loads((tmp_path / "config.json").read_text())
        config["text_config"]["rope_parameters"]["mrope_interleaved"] = interleaved
        (tmp_path / "config.json").write_text(json.dumps(config))
        renderer = Renderer(tokenizer, load_pictures(tmp_path, tokenizer))
        if interleaved:
            assert "pictures" in completed(Sighted(renderer), renderer).can
            continue
        with pytest.raises(UnsupportedVision, match=r"rope_parameters.*mrope_interleaved=true"):
            completed(Sighted(renderer), renderer)


def test_a_folder_without_a_model_or_of_another_family_reads_text(renderer: Renderer, tmp_path: Path) -> None:
    tokenizer: Any = None
    assert load_pictures(tmp_path, tokenizer) is None
    (tmp_path / "config.json").write_text('{"model_type": "gemma3", "vision_config": {}}')
    assert load_pictures(tmp_path, tokenizer) is None
