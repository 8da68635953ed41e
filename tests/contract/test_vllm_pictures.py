"""Pictures on the real vLLM: what it reads is what the model reads, or the answer is refused.

Each wrong request that vLLM answers with 200 is sent to it as it is; the engine's own requests have none of them.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from tapereel.agents import Completion, EngineError, Request
from tapereel.agents.engines.embedded import Pretrained, load_pretrained
from tapereel.agents.engines.servers import Generate, LocalServer, RemoteEngine
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.engines.transport import Server, ServerFailed
from tapereel.agents.engines.transport.wire import same_prompt
from tapereel.agents.rendering import Rendered, Renderer
from tapereel.agents.vision import save_tiny_vision
from tapereel.agents.vision.vision import PictureTokens
from tapereel.finetune import LoopConfig, Row
from tapereel.finetune.loop import NotDelivered, Policy
from tapereel.finetune.loop.delivery import Delivery
from tapereel.finetune.recipes import get_recipe
from tapereel.finetune.run.trainer_factory import TrainerFactory
from tapereel.finetune.trainer import Processes, Ranks, score
from tapereel.tapes import Picture, Sampling, Video
from tapereel.tapes.messages import part_of
from tapereel.tapes.places import Place

from ..agents.served import CLOSE, servers
from ..finetune.loop.lab import no_trainer
from .lab import vllm_is_there
from .vllm_cpu import ENVIRONMENT, PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

FAMILIES = os.environ.get("TAPEREEL_VISION_FAMILIES", "qwen2_5_vl,idefics3").split(",")
"""Types of models that every case is run with. Each takes a server of its own. SmolVLM's needs num2words."""
OPTIONS = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "8")
SIZES = ((32, 32), (40, 30), (33, 57), (200, 150))
"""Of pictures; the last two are resized, and take 16, 20, 28 and 234 tokens."""


@dataclass
class Sight:
    url: str
    folder: Path
    found: Pretrained
    renderer: Renderer

    def run(self, test: Callable[[RemoteEngine], Any], weights: bool = False) -> Any:
        async def whole() -> Any:
            engine = await connect(servers(self.url, model=self.folder), self.renderer, weights=weights)
            try:
                return await test(engine)
            finally:
                await engine.close()

        return asyncio.run(whole())

    def sent(self, request: Request, **changes: Any) -> Any:
        """vLLM's answer to the engine's request, with changed fields."""
        body = Generate(self.renderer).body(request, model=str(self.folder), request_id="wrong", stops=())

        async def post() -> Any:
            server = Server(self.url)
            try:
                return await server.post(Generate.route, {**body, **changes}, seconds=60.0)
            finally:
                await server.close()

        return asyncio.run(post())

    def gap(self, request: Request, completion: Completion, model: Any = None) -> float:
        """The largest difference, in nats, to a plain forward of the local model."""
        row = row_of(request, completion)
        plain = score(model or self.found.model, [row], vision=self.found.vision).logprob
        return float((plain - torch.from_numpy(row.old)).abs().max())


@pytest.fixture(scope="module", params=FAMILIES)
def sight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sight]:
    vllm_is_there()
    folder = tmp_path_factory.mktemp("vision")
    save_tiny_vision(folder, request.param)
    found = load_pretrained(folder)
    log = tmp_path_factory.mktemp("log") / "vllm.log"
    local = LocalServer(folder, python=str(PYTHON), environment=ENVIRONMENT, options=OPTIONS, log=log, patience=540.0)
    asyncio.run(local.start())
    yield Sight(local.url, folder, found, Renderer(found.tokenizer, found.vision))
    local.stop()


def pictures(*sizes: tuple[int, int], seed: int = 0) -> list[Picture]:
    noise = np.random.default_rng(seed)
    return [Picture.of(noise.integers(0, 256, (height, width, 3)).astype("uint8")) for width, height in sizes]


def files_of(*shown: Picture) -> Callable[[str], bytes]:
    return {picture.name: picture.data or b"" for picture in shown}.__getitem__


def asked(rendered: Rendered, *shown: Picture, tokens: int = 16) -> Request:
    sampling = Sampling(max_tokens=tokens, extra={"ignore_eos": True, "stop_token_ids": []})
    return Request(
        messages=rendered.messages,
        prompt=rendered.ids,
        places=rendered.places,
        seed=3,
        sampling=sampling,
        picture=files_of(*shown),
    )


def user(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part_of(part) for part in parts]
    return {"role": "user", "content": content}


def row_of(request: Request, completion: Completion | None = None) -> Row:
    prompt, said = list(request.prompt or ()), list(completion.ids or ()) if completion else []
    n, zeros = len(said), np.zeros(len(said), dtype=np.int32)
    return Row(
        tape="t",
        group="g",
        input_ids=np.array(prompt + said, dtype=np.int32),
        own=np.arange(len(prompt), len(prompt) + n, dtype=np.int32),
        old=np.array(completion.logprobs if completion else (), dtype=np.float32),
        temperature=np.ones(n, dtype=np.float32),
        version=zeros,
        call=zeros,
        turn=zeros,
        offset=np.arange(n, dtype=np.int32),
        calls=("c",),
        agents=("a",),
        versions=("v",),
        places=request.places,
        file=request.picture,
    )


def two_turns(sight: Sight, answer: list[int] | None = None) -> tuple[Request, Request, Completion | None]:
    """Two turns with a picture each; the second prompt holds the ids of the first answer, or those of `answer`."""
    first, second = pictures(SIZES[1], SIZES[2], seed=1)
    begin = asked(sight.renderer.prompt([user("one ", first, "?")]), first)
    completion = sight.run(lambda engine: engine.complete(begin)) if answer is None else None
    ids = list(completion.ids or ()) if completion is not None else answer or []
    reply = {"role": "assistant", "content": sight.renderer.decode(ids)}
    track = sight.renderer.track(sight.renderer.prompt(begin.messages), call="c", reply=reply, completion=ids)
    rendered = sight.renderer.prompt([*begin.messages, reply, user("two ", second, "?")], tracks=[track])
    return begin, asked(rendered, first, second), completion


def test_each_size_is_read_as_the_local_model_reads_it(sight: Sight) -> None:
    async def test(engine: RemoteEngine) -> None:
        assert "pictures" in engine.can
        for shown in (*([one] for one in pictures(*SIZES)), pictures(*SIZES[:3], seed=2)):
            request = asked(sight.renderer.prompt([user("look ", *shown, " where?")]), *shown)
            assert sight.gap(request, await engine.complete(request)) < CLOSE

    sight.run(test)


def test_a_video_is_read_as_its_frames(sight: Sight) -> None:
    frames = pictures(*[SIZES[2]] * 3, seed=4)
    video = Video.of(frames, fps=4, indices=(0, 2, 5))
    request = asked(sight.renderer.prompt([user("watch ", video, " what moves?")]), *frames)
    assert [place.media[0] for place in request.places] == [frame.name for frame in frames]
    found = sight.run(lambda engine: engine.complete(request))
    assert sight.gap(request, found) < CLOSE
    backwards = dict(
        zip([frame.name for frame in frames], [frame.data or b"" for frame in reversed(frames)], strict=True)
    )
    assert sight.gap(replace(request, picture=backwards.__getitem__), found) > 0.1


def test_two_turns_and_the_sampled_ids_of_the_first_are_kept(sight: Sight) -> None:
    begin, request, completion = two_turns(sight)
    assert completion is not None
    assert completion.ids is not None
    assert list(request.prompt or ())[len(begin.prompt or ()) :][: len(completion.ids)] == list(completion.ids)
    assert len(request.places) == 2
    found = sight.run(lambda engine: engine.complete(request))
    assert sight.gap(request, found) < CLOSE


def test_a_teacher_on_vllm_sees_as_one_in_this_process(sight: Sight, tmp_path: Path) -> None:
    _, request, _ = two_turns(sight)
    first, _ = pictures(SIZES[1], SIZES[2], seed=1)
    (other,) = pictures(SIZES[2], seed=9)
    one, two = request.places
    swapped = replace(request, places=(one, two._replace(media=(other.name,))), picture=files_of(first, other))
    completion = sight.run(lambda engine: engine.complete(request))
    text = asked(sight.renderer.prompt([user("no picture")]))
    rows = [row_of(asking, completion) for asking in (request, swapped, text)]
    loop = LoopConfig.model_validate({"teacher": {"urls": [sight.url], "model": str(sight.folder)}})
    model = sight.found.model
    factory = TrainerFactory(
        model=model,
        renderer=sight.renderer,
        tokenizer=sight.found.tokenizer,
        loop=loop,
        recipe=get_recipe("distill"),
    )
    teacher: Any = factory.make("rl", model, Ranks()).others["teacher"]
    given, _ = teacher.said(rows, tmp_path, ask=True)
    for row in given:
        plain = score(sight.found.model, [row], vision=sight.found.vision).logprob
        assert np.abs(plain.numpy() - row.teacher).max() < CLOSE
    assert np.abs(given[0].teacher - given[1].teacher).max() > 0.1


def test_a_sampled_marker_is_refused_before_a_picture_and_harmless_behind_the_last(sight: Sight) -> None:
    marker = sight.renderer.marker
    assert marker is not None
    begin, request, _ = two_turns(sight, [65, marker, 66])
    with pytest.raises(EngineError, match=rf"\b{marker}\b.*\b{request.places[1].offset}\b"):
        sight.run(lambda engine: engine.complete(request))
    longer = replace(begin, prompt=(begin.prompt or []) + type(request.prompt)("i", [65, marker, 66]))
    text = asked(sight.renderer.prompt([user("no picture")]))
    text = replace(text, prompt=(text.prompt or []) + type(request.prompt)("i", [65, marker, 66]))
    for one in (longer, text):
        assert sight.gap(one, sight.run(lambda engine, one=one: engine.complete(one))) < CLOSE


@pytest.mark.parametrize("wrong", ["expanded", "a marker before it", "fewer pictures", "no pictures", "another size"])
def test_what_vllm_answers_to_a_wrong_request_is_refused(sight: Sight, wrong: str) -> None:
    shown = pictures(SIZES[1], SIZES[2])
    request = asked(sight.renderer.prompt([user("a ", shown[0], " b ", shown[1])]), *shown)
    body: Any = Generate(sight.renderer).body(request, model="m", request_id="r", stops=())
    parts, ids = body["content_parts"], body["token_ids"]
    other = base64.b64encode(pictures((96, 24))[0].data or b"").decode()
    changes: dict[str, dict[str, Any]] = {
        "expanded": {"token_ids": list(request.prompt or ())},
        "a marker before it": {"token_ids": [65, sight.renderer.marker, *ids]},
        "fewer pictures": {"content_parts": parts[:1]},
        "no pictures": {"content_parts": []},
        "another size": {"content_parts": [parts[0], {**parts[1], "url": f"data:image/png;base64,{other}"}]},
    }
    found = Generate().parse(sight.sent(request, **changes[wrong]))
    with pytest.raises(EngineError, match=r"\d of 2, [0-9a-f]{64}"):
        same_prompt(request, found)
    same_prompt(request, Generate().parse(sight.sent(request)))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/x.png", "file:///etc/hostname", "nothing"])
def test_the_server_fetches_nothing(sight: Sight, url: str) -> None:
    (shown,) = pictures(SIZES[1])
    request = asked(sight.renderer.prompt([user(shown)]), shown)
    with pytest.raises(ServerFailed, match=r"allowed|local files|url|URL"):
        sight.sent(request, content_parts=[{"type": "image_url", "url": url}])


def test_new_weights_of_tower_and_text_arrive_and_other_pixels_are_found(sight: Sight) -> None:
    (shown,) = pictures(SIZES[2], seed=5)
    request = asked(sight.renderer.prompt([user("look ", shown, " and say what is there")]), shown)
    model = copy.deepcopy(sight.found.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)

    async def test(engine: RemoteEngine) -> None:
        before = await engine.complete(request)
        for trained, version in ((model, "new"), (sight.found.model, "old")):
            await engine.sync_weights(trained.state_dict(), version)
            # vLLM must have dropped the features of the picture that it computed with other weights.
            after = await engine.complete(request)
            assert sight.gap(request, after, trained) < CLOSE
            delivery = Delivery(Policy(weights=Processes(Ranks(), trained, no_trainer), renderer=sight.renderer))
            delivery.choose(["t"], lambda _: [row_of(request)])
            await delivery.check(engine, version, None)
            found: dict[str, Any] = delivery.found
            assert found["difference"] < CLOSE
            assert max(found["places"]) > request.places[0].end
        assert after.ids == before.ids
        pictures_of = sight.renderer.pictures
        assert pictures_of is not None
        dialect: Any = engine._dialect
        dialect._pictures = Inverted(pictures_of)
        with pytest.raises(NotDelivered, match="pixels"):
            await delivery.check(engine, "old", None)

    sight.run(test, weights=True)


class Inverted:
    """Other pixels in the same size: the ids, the places and the hash of the file say nothing of them."""

    def __init__(self, pictures: PictureTokens) -> None:
        self.pictures = pictures

    def fitted(self, place: Place, png: bytes) -> bytes:
        ImageOps.invert(Image.open(io.BytesIO(self.pictures.fitted(place, png)))).save(found := io.BytesIO(), "PNG")
        return found.getvalue()
