"""Vision models in the embedded engine, against the models' own public forward on the final ids and all pixels at once.

The oracle knows nothing of places, slots or caches: it gets the ids and what the model's image processor makes of the
files."""

from __future__ import annotations

import asyncio
import copy
import io
import threading
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tapereel.agents import LLM, Completion, EmbeddedEngine, EngineError, Request, agent, rollout
from tapereel.agents.engines.embedded import Pretrained, SlotDecoder, batch, engine_caches, load_pretrained
from tapereel.agents.engines.embedded.kv_cache import UnsupportedModel
from tapereel.agents.rendering import Rendered, Renderer, Track
from tapereel.agents.setup import EmbeddedConfig, make_engine
from tapereel.agents.vision import save_tiny_vision
from tapereel.tapes import Answer, Message, Sampling, Tape
from tapereel.tapes.arrays import ints
from tapereel.tapes.places import Place

from ...embedded_lab import decoder, until
from ...picture_worlds import Corners

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm")
EXACT = 1e-4
OFF = 0.1
FILES: dict[str, bytes] = {}


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_vision(folder, request.param)
    return load_pretrained(folder)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Pretrained:
    folder = tmp_path_factory.mktemp("qwen")
    save_tiny_vision(folder, "qwen2_vl")
    return load_pretrained(folder)


def image(width: int, height: int, seed: int) -> Message:
    """A content part that names noise of this size."""
    written = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype="uint8")
    Image.fromarray(pixels).save(written, "PNG")
    name = f"{sha256(written.getvalue()).hexdigest()}.png"
    FILES[name] = written.getvalue()
    return {"type": "image", "media": name, "width": width, "height": height}


def said(*parts: str | Message) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def engine(loaded: Pretrained, **options: Any) -> EmbeddedEngine:
    renderer = Renderer(loaded.tokenizer, loaded.vision)
    return EmbeddedEngine(loaded.model, renderer, **{"version": "v0", "slots": 4, **options})


def asking(rendered: Rendered, seed: int = 0, *, key: str = "", files: Any = FILES, **sampling: Any) -> Request:
    sampling = {"max_tokens": 12, "ignore_eos": True, **sampling}
    return Request(
        messages=rendered.messages,
        prompt=rendered.ids,
        places=rendered.places,
        picture=files.__getitem__,
        sampling=Sampling(**sampling),
        seed=seed,
        cache_key=key,
    )


def oracle(loaded: Pretrained, model: Any, request: Request, ids: Sequence[int], swap: Any = None) -> torch.Tensor:
    """Log-probs of `ids` by the public forward. Sampled ids that mean a picture are read as another word with the same
    embedding, since that forward takes each of them for a picture. swap: another picture for the last one."""
    vision: Any = loaded.vision
    whole = torch.tensor([[*(request.prompt or ()), *ids]])
    names = [place.media[0] for place in request.places]
    if swap is not None:
        names[-1] = swap["media"]
    tensors: dict[str, Any] = {}
    stands = torch.zeros(whole.shape, dtype=torch.bool)
    for place in request.places:
        stands[0, place.offset : place.end] = torch.from_numpy(vision.feature_mask(place))
    marker = loaded.tokenizer.convert_tokens_to_ids(vision.marker)
    sampled = (whole == marker) & ~stands
    read = whole
    if sampled.any():
        model = copy.deepcopy(model)
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight.clone())
        model.get_input_embeddings().weight.data[0] = model.get_input_embeddings().weight.data[marker]
        assert not (whole == 0).any()
        read = torch.where(sampled, 0, whole)
    if names:
        tensors = dict(
            vision.processor(images=[Image.open(io.BytesIO(FILES[name])) for name in names], return_tensors="pt")
        )
    if vision.positions((), 1) is not None:
        tensors["mm_token_type_ids"] = stands.int()
    with torch.no_grad():
        logits = model(input_ids=read, **tensors).logits[0].float()
    found = logits.log_softmax(-1)[len(request.prompt or ()) - 1 : -1]
    return found.gather(1, torch.tensor(list(ids))[:, None])[:, 0]


def off(loaded: Pretrained, request: Request, found: Completion, model: Any = None, **more: Any) -> float:
    """The largest error of the sampled log-probs, in nats."""
    assert found.ids is not None
    exact = oracle(loaded, loaded.model if model is None else model, request, found.ids, **more)
    return float((exact - torch.tensor(found.logprobs)).abs().max())


def talk(number: int) -> list[Message]:
    """What the user says in four turns: 0 to 3 pictures of mixed sizes in each message."""
    own = 10 * number
    return [
        said("what is ", image(40, 30, own), " and ", image(16, 16, own + 1), "?"),
        said("and now?"),
        said(image(8, 60, own + 2), image(90, 33, own + 3), " or", image(24, 24, own + 4)),
        said("so ", image(33, 20, own + 5)),
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


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of pictures of each call of the tower."""
    calls: list[int] = []
    features = SlotDecoder.features

    def counted(self: SlotDecoder, pixels: Any) -> torch.Tensor:
        calls.append(len(pixels))
        return features(self, pixels)

    monkeypatch.setattr(SlotDecoder, "features", counted)
    return calls


def test_turns_with_pictures_are_exact_alone_in_ragged_batches_and_on_cached_turns(
    loaded: Pretrained, towers: list[int]
) -> None:
    sampling = engine(loaded)
    assert "pictures" in sampling.can

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(converse(sampling, number, talk(number)) for number in range(3)))

    conversations = asyncio.run(all_of_them())
    for turns in conversations:
        for turn, (request, found) in enumerate(turns):
            assert off(loaded, request, found) < EXACT
            assert turn == 0 or found.usage.cached_tokens > len(turns[turn - 1][0].prompt or ())
    assert sum(towers) == 18  # each of the pictures once, though turns show them again
    assert max(off(loaded, *turns[3], swap=image(33, 20, 77)) for turns in conversations) > OFF
    request, found = conversations[1][3]
    alone = asyncio.run(engine(loaded).complete(request))
    assert alone.ids == found.ids
    assert off(loaded, request, alone) < EXACT


def test_positions_of_the_index_would_be_off(qwen: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    request = asking(Renderer(qwen.tokenizer, qwen.vision).prompt([said(image(60, 50, 1), "a", image(20, 70, 2))]))
    assert off(qwen, request, asyncio.run(engine(qwen).complete(request))) < EXACT
    monkeypatch.setattr(type(qwen.vision), "positions", lambda self, places, length: np.tile(np.arange(length), (3, 1)))
    flat = asyncio.run(engine(qwen).complete(request))
    monkeypatch.undo()
    assert off(qwen, request, flat) > OFF


def test_sampled_tokens_that_mean_a_picture_are_words(loaded: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    vision: Any = loaded.vision
    marker = loaded.tokenizer.convert_tokens_to_ids(vision.marker)
    draw, calls = batch.draw, [0]

    def forced(logits: torch.Tensor, *more: Any) -> tuple[list[int], list[float]]:
        calls[0] += 1
        ids, logprobs = draw(logits, *more)
        if calls[0] % 3 == 2:
            ids = [marker] * len(ids)
            logprobs = logits.log_softmax(-1)[:, marker].tolist()
        return ids, logprobs

    monkeypatch.setattr(batch, "draw", forced)
    sampling = engine(loaded)
    turns = asyncio.run(converse(sampling, 2, talk(2)))
    for request, found in turns:
        assert marker in (found.ids or ())
        assert off(loaded, request, found) < EXACT
    assert turns[-1][1].usage.cached_tokens > len(turns[-2][0].prompt or ())


def test_another_picture_with_the_same_ids_reuses_no_kv(loaded: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer(loaded.tokenizer, loaded.vision)
    one, other = (renderer.prompt([said("look: ", image(40, 40, seed), " what?")]) for seed in (1, 2))
    assert one.ids == other.ids

    async def both() -> list[Completion]:
        sampling = engine(loaded)
        return [await sampling.complete(asking(shown, key="same")) for shown in (one, other, other)]

    first, second, third = asyncio.run(both())
    assert second.usage.cached_tokens == one.places[0].offset
    assert third.usage.cached_tokens == len(one.ids) - 1
    assert max(off(loaded, asking(r), c) for r, c in ((one, first), (other, second), (other, third))) < EXACT
    monkeypatch.setattr(batch, "keys", lambda ids, places: np.array(ids, dtype=np.int64))
    assert off(loaded, asking(other), asyncio.run(both())[1]) > OFF


def test_a_prefix_is_never_cut_inside_a_picture(loaded: Pretrained) -> None:
    shown = Renderer(loaded.tokenizer, loaded.vision).prompt([said("look: ", image(40, 40, 1))])
    place = shown.places[0]
    cut = asking(shown)
    prompts = [Request(**{**vars_of(cut), "prompt": shown.ids[: place.end], "cache_key": "c"})] * 2

    async def twice() -> list[Completion]:
        sampling = engine(loaded)
        return [await sampling.complete(request) for request in prompts]

    first, second = asyncio.run(twice())
    assert second.usage.cached_tokens == place.offset
    assert first.ids == second.ids
    assert off(loaded, prompts[0], second) < EXACT


def test_rows_share_a_picture_but_no_part_of_another_one(loaded: Pretrained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "SPARE", 0)  # short prompts wait for each other too
    renderer = Renderer(loaded.tokenizer, loaded.vision)
    shown = [renderer.prompt([said("look: ", image(40, 40, seed), " what?")]) for seed in (1, 2, 1, 2)]
    requests = [asking(one, seed) for seed, one in enumerate(shown)]

    async def all_of_them() -> tuple[list[Completion], EmbeddedEngine]:
        sampling = engine(loaded)
        jobs = [asyncio.ensure_future(sampling.complete(request)) for request in requests]
        await until(lambda: sampling.stats.sampled >= 16)
        await sampling.sync_weights(dict(loaded.model.state_dict()), "v1", "reprefill")
        return await asyncio.gather(*jobs), sampling

    found, sampling = asyncio.run(all_of_them())
    assert max(off(loaded, request, one) for request, one in zip(requests, found, strict=True)) < EXACT
    length, before = len(shown[0].ids), shown[0].places[0].offset
    assert sampling.stats.recomputed <= 2 * length - before + sum(one.spans[0][2] for one in found)


def vars_of(request: Request) -> dict[str, Any]:
    return {name: getattr(request, name) for name in request.__dataclass_fields__}


def test_forks_of_a_conversation_are_exact(loaded: Pretrained) -> None:
    renderer = Renderer(loaded.tokenizer, loaded.vision)
    start = [said("look: ", image(40, 40, 1), " what?"), {"role": "assistant", "content": "a square"}]
    begun = renderer.prompt(start[:1])
    branches = [[*start, said("and ", image(30, 20, seed))] for seed in (5, 6, 7)] + [[*start, said("sure?")]]

    async def forked() -> list[tuple[Request, Completion]]:
        sampling = engine(loaded)
        await sampling.complete(asking(begun, key="c"))
        requests = [asking(renderer.prompt(branch), n, key="c") for n, branch in enumerate(branches)]
        return list(zip(requests, await asyncio.gather(*map(sampling.complete, requests)), strict=True))

    for request, found in asyncio.run(forked()):
        assert found.usage.cached_tokens >= begun.places[0].end
        assert off(loaded, request, found) < EXACT


@pytest.mark.parametrize(("mode", "kept"), [("reprefill", 1 << 29), ("drain", 1 << 29), ("reprefill", 1)])
def test_new_weights_in_mid_answer_are_exact(
    loaded: Pretrained, mode: Any, kept: int, towers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_caches, "CACHE_BYTES", kept)
    monkeypatch.setattr(engine_caches, "TOWER_PATCHES", 1 << 14 if kept > 1 else 1)
    torch.manual_seed(1)
    later: Any = copy.deepcopy(loaded.model)
    with torch.no_grad():
        for weight in later.parameters():
            weight += 0.05 * torch.randn_like(weight)
    models = {"v0": loaded.model, "v1": later}
    renderer = Renderer(loaded.tokenizer, loaded.vision)
    shown = [renderer.prompt([said(image(40, 30, n), "a" * n, image(20, 20, 9))]) for n in range(3)]
    requests = [asking(rendered, n, key=f"c{n}", max_tokens=30) for n, rendered in enumerate(shown)]

    async def changed() -> tuple[list[Completion], Completion]:
        sampling = engine(loaded)
        waiting = [asyncio.ensure_future(sampling.complete(request)) for request in requests]
        await until(lambda: sampling.stats.sampled > 20)
        before = sum(towers)
        await sampling.sync_weights(later.state_dict(), "v1", mode)
        found = await asyncio.gather(*waiting)
        if kept > 1:  # three pictures and a shared one, for each version
            assert (before, sum(towers)) == (4, 8 if mode == "reprefill" else 4)
        else:
            assert set(towers) == {1}
        return found, await sampling.complete(requests[0])

    found, after = asyncio.run(changed())
    for request, completion in zip(requests, found, strict=True):
        ids = completion.ids
        assert ids is not None
        assert completion.logprobs is not None
        assert [version for version, _, _ in completion.spans] == (["v0", "v1"] if mode == "reprefill" else ["v0"])
        for version, start, end in completion.spans:
            exact = oracle(loaded, models[version], request, ids)
            assert float((exact - torch.tensor(completion.logprobs))[start:end].abs().max()) < EXACT
    assert after.spans[0][0] == "v1"
    assert off(loaded, requests[0], after, later) < EXACT


def test_a_group_that_shows_one_picture_processes_and_computes_it_once(
    loaded: Pretrained, towers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    processed: list[str] = []
    pixels = type(loaded.vision).pixels

    def counted(self: Any, place: Place, file: Any) -> Any:
        processed.append(place.media[0])
        return pixels(self, place, file)

    monkeypatch.setattr(type(loaded.vision), "pixels", counted)
    rendered = Renderer(loaded.tokenizer, loaded.vision).prompt([said("look: ", image(50, 40, 1), image(9, 9, 2))])
    requests = [asking(rendered, seed) for seed in range(8)]

    async def group() -> list[Completion]:
        sampling = engine(loaded, slots=8)
        found = await asyncio.gather(*map(sampling.complete, requests))
        await sampling.complete(requests[0])
        assert towers == [2]
        await sampling.sync_weights(loaded.model.state_dict(), "v1")
        return [*found, await sampling.complete(requests[0])]

    found = asyncio.run(group())
    assert sorted(processed) == sorted(place.media[0] for place in rendered.places)
    assert towers == [2, 2]
    assert found[0].ids == found[-1].ids
    assert max(off(loaded, *pair) for pair in zip(requests, found, strict=False)) < EXACT


def test_a_bad_picture_fails_its_own_request_alone(qwen: Pretrained) -> None:
    renderer = Renderer(qwen.tokenizer, qwen.vision)
    good = renderer.prompt([said("look: ", image(40, 40, 1))])
    name = good.places[0].media[0]
    small = FILES[image(10, 10, 1)["media"]]
    # A picture of its own for each: the engine reads no picture whose tokens it has computed for another request.
    shown = [renderer.prompt([said("look: ", image(64, 32, 4 + k))]) for k in range(5)]
    broken = [one.places[0].media[0] for one in shown]

    async def ask() -> list[Any]:
        sampling = engine(qwen)
        requests = [
            asking(good),
            asking(shown[0], files={broken[0]: small}),
            asking(shown[1], files={broken[1]: b"no picture"}),
            asking(shown[2], files={}),
            Request(**{**vars_of(asking(shown[3])), "picture": None}),
            asking(shown[4]),
        ]
        return await asyncio.gather(*map(sampling.complete, requests), return_exceptions=True)

    first, *errors, last = asyncio.run(ask())
    assert off(qwen, asking(good), first) < EXACT
    assert off(qwen, asking(shown[4]), last) < EXACT
    for error, file, word in zip(errors, broken[:4], ("grid", "processed", broken[2], "`picture`"), strict=True):
        assert isinstance(error, EngineError)
        assert file in str(error)
        assert word in str(error)
        assert name not in str(error)


def test_a_request_that_ends_while_its_picture_is_read_leaves_nothing(qwen: Pretrained) -> None:
    rendered = Renderer(qwen.tokenizer, qwen.vision).prompt([said("look: ", image(40, 40, 1))])
    partial: list[Completion] = []

    async def ended() -> str:
        sampling, reading, go = engine(qwen), asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def slow(name: str) -> bytes:
            loop.call_soon_threadsafe(reading.set)
            go.wait(30)
            return FILES[name]

        request = Request(**{**vars_of(asking(rendered)), "picture": slow, "on_partial": partial.append})
        cancelled = asyncio.ensure_future(sampling.complete(request))
        await reading.wait()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        closed = asyncio.ensure_future(sampling.complete(request))
        await asyncio.sleep(0)
        await sampling.close()
        go.set()
        with pytest.raises(EngineError) as error:
            await closed
        return str(error.value)

    assert "closed" in asyncio.run(ended())
    assert [(list(one.ids or ()), one.finish) for one in partial] == [([], "cancelled")]


def test_models_and_engines_that_cannot_see_refuse_by_name(qwen: Pretrained) -> None:
    rendered = Renderer(qwen.tokenizer, qwen.vision).prompt([said("look: ", image(16, 16, 1))])
    blind = EmbeddedEngine(decoder("qwen2", vocab_size=300), None, version="v0", slots=2)
    assert "pictures" not in blind.can
    with pytest.raises(EngineError, match=f"{rendered.places[0].media[0]}.* see"):
        asyncio.run(blind.complete(asking(rendered)))
    with pytest.raises(UnsupportedModel, match="vision_config"):
        EmbeddedEngine(qwen.model, Renderer(qwen.tokenizer), version="v0", slots=2)


def test_text_alone_is_exact_on_a_vision_model_beside_pictures(loaded: Pretrained) -> None:
    renderer = Renderer(loaded.tokenizer, loaded.vision)
    texts = [[said("no picture " * n)] for n in range(1, 4)] + [[said("one: ", image(40, 40, 3))]]
    requests = [asking(renderer.prompt(text), n, max_tokens=20) for n, text in enumerate(texts)]

    async def together() -> list[Completion]:
        return await asyncio.gather(*map(engine(loaded).complete, requests))

    for request, found in zip(requests, asyncio.run(together()), strict=True):
        assert off(loaded, request, found) < EXACT


def test_a_token_of_text_is_scored_on_a_vision_model(loaded: Pretrained) -> None:
    ids = ints(range(40, 60))
    scores = asyncio.run(engine(loaded).score(ids))
    with torch.no_grad():
        exact = loaded.model(input_ids=torch.tensor([ids.tolist()])).logits[0].log_softmax(-1)
    exact = exact[:-1].gather(1, torch.tensor(ids.tolist())[1:, None])[:, 0]
    assert float((exact - torch.tensor(scores)).abs().max()) < EXACT


def test_a_body_that_flattens_positions_beside_a_cache_is_refused(
    qwen: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    body: Any = type(qwen.model.get_decoder())
    forward = body.forward

    def flat(self: Any, *args: Any, **inputs: Any) -> Any:
        if inputs.get("use_cache") and inputs.get("position_ids") is not None:
            inputs["position_ids"] = inputs["position_ids"][:1].expand(3, -1, -1)
        return forward(self, *args, **inputs)

    engine(qwen, slots=1, capacity=2)
    monkeypatch.setattr(body, "forward", flat)
    with pytest.raises(UnsupportedModel, match="tolerance"):
        engine(qwen)


@agent
async def answering(tape: Tape, llm: LLM) -> AsyncIterator[Answer]:
    reply = await llm(tape, system="Answer with a digit.")
    yield Answer(text=reply.text)


@pytest.mark.ledger("F93", "F95")
@pytest.mark.parametrize("family", ["qwen3_vl", "idefics3"])
def test_an_engine_of_a_configuration_records_episodes_that_the_model_confirms(family: Any, tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, family)
    found, sampling = load_pretrained(tmp_path), Sampling(max_tokens=6, ignore_eos=True)

    async def play() -> list[Tape]:
        made = (await make_engine(EmbeddedConfig(model=str(tmp_path), slots=4, device="cpu"))).engine
        return await asyncio.gather(
            *(rollout(answering, Corners, task, engine=made, sampling=sampling) for task in range(4))
        )

    for tape in asyncio.run(play()):
        assert found.vision is not None
        assert tape.begin.versions["processor"] == found.vision.hash
        assert [len(tape.call_places(call)) for call in tape.calls] == [1, 2, 3]
        for call in tape.calls:
            assert call.completion is not None
            places = tape.call_places(call)
            FILES.update({place.media[0]: tape.picture(place.media[0]) for place in places})
            request = Request(messages=(), prompt=call.prompt, places=tuple(places), sampling=sampling, seed=0)
            exact = oracle(found, found.model, request, call.completion)
            assert float((exact - torch.tensor(call.logprobs)).abs().max()) < EXACT
