"""Programs that send pictures as data URLs: what the model sees, what is recorded, and what is refused."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai import APIStatusError, AsyncOpenAI
from PIL import Image

from tapereel.agents import ScriptedEngine, rollout
from tapereel.agents.engines.servers import LiteLLMEngine
from tapereel.agents.gateway import Endpoint, Program, gateway_session
from tapereel.agents.replay import replay
from tapereel.tapes import Picture, Status, Tape
from tapereel.tapes.store import Store, verify
from tapereel.tapes.view import RunView

from ...toy_envs import Echo
from ..hosted import Provider, refuses
from ..picture_worlds import by_pixels, corner_of, images, square
from .lab import SHORT, Told

pytestmark = pytest.mark.timeout(120)


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def encoded(corner: int, kind: str = "PNG") -> bytes:
    written = io.BytesIO()
    Image.fromarray(square(corner)).save(written, kind, **({} if kind == "PNG" else {"quality": 95}))
    return written.getvalue()


def image(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


async def turns(task: str, endpoint: Endpoint) -> str:
    """Shows a picture for each digit of the task, each as another kind of file, in one conversation."""
    said, messages = "", list[Any]()
    async with AsyncOpenAI(**endpoint._asdict(), max_retries=0) as client:
        for k, digit in enumerate(task):
            kind = ("PNG", "JPEG", "WEBP")[k % 3]
            shown = image(data_url(encoded(int(digit), kind), kind.lower()))
            messages.append({"role": "user", "content": [text("Which quarter"), shown, text("is red?")]})
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            said += messages[-1]["content"]
    return said


def hosted(program: Any, task: str, provider: Provider, **options: Any) -> Tape:
    """An episode of a program with a model behind a real server, which answers by the pixels that it got."""

    async def play() -> Tape:
        engine = LiteLLMEngine("openai/local", base_url=provider.url, backoff=0.001, retries=0)
        try:
            return await rollout(Program(program), Echo(), task, engine=engine, sampling=SHORT, **options)
        finally:
            await engine.close()

    os.environ.setdefault("OPENAI_API_KEY", "none")
    with provider.up():
        return asyncio.run(play())


@pytest.mark.ledger("T26")
@pytest.mark.parametrize("recorded", [True, False])
def test_a_program_s_pictures_reach_the_model_and_the_tape(recorded: bool, tmp_path: Path):
    provider = Provider(says=by_pixels)
    with Store.create(tmp_path / "run") as store:
        tape = hosted(turns, "0312", provider, journal=store.writer if recorded else None)
        assert (tape.reward, tape.status) == (1.0, Status.FINISHED)
        assert [len(images(body)) for body in provider.asked] == [1, 2, 3, 4]
        assert [corner_of(shown) for shown in images(provider.asked[-1])] == [0, 3, 1, 2]
        part = tape.calls[0].messages[0]["content"][1]
        assert part == {"type": "image", "media": f"{tape.calls[0].media[0]}", "width": 40, "height": 30}
        assert [len(call.media) for call in tape.calls] == [1, 1, 1, 1]  # each picture with the call that added it
        assert tape.calls[0].media[0] == Picture.of(square(0)).name  # one identity, whatever the file was
        assert "[picture 40x30 " in str(tape[1])
        if recorded:
            assert store.media.names() == sorted(name for call in tape.calls for name in call.media)
            again = asyncio.run(replay(store.tape(tape.id), Program(turns)))
            assert again.outcome == "verified", again

            async def other(task: str, endpoint: Endpoint) -> str:
                return await turns(task[:3] + "0", endpoint)

            assert asyncio.run(replay(store.tape(tape.id), Program(other))).outcome != "verified"


@pytest.mark.parametrize("detail", [None, "auto", "low", "high"])
def test_the_detail_of_a_picture_is_on_the_call_and_reaches_a_hosted_model(detail: str | None, tmp_path: Path):
    async def once(task: str, endpoint: Endpoint) -> str:
        shown = image(data_url(encoded(2)))
        shown["image_url"] |= {"detail": detail} if detail else {}
        async with AsyncOpenAI(**endpoint._asdict(), max_retries=0) as client:
            asked: list[Any] = [{"role": "user", "content": [shown, text("Which quarter is red?")]}]
            reply = await client.chat.completions.create(model="m", messages=asked)
        return reply.choices[0].message.content or ""

    provider = Provider(says=by_pixels)
    with Store.create(tmp_path / "run") as store:
        tape = hosted(once, "2", provider, journal=store.writer)
    assert tape.reward == 1.0
    assert tape.calls[0].messages[0]["content"][0].get("detail") == detail
    assert provider.asked[0]["messages"][0]["content"][0]["image_url"].get("detail") == detail
    assert verify(tmp_path / "run").exit_code == 0


def in_responses(file: bytes) -> tuple[str, Any]:
    parts = [{"type": "input_text", "text": "Which quarter?"}, {"type": "input_image", "image_url": data_url(file)}]
    return "responses", {"model": "m", "instructions": "Look.", "input": [{"role": "user", "content": parts}]}


def in_messages(file: bytes) -> tuple[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file).decode()}
    parts = [text("Which quarter?"), {"type": "image", "source": source}]
    asked = [{"role": "user", "content": parts}]
    return "messages", {"model": "m", "system": "Look.", "max_tokens": 9, "messages": asked}


@pytest.mark.parametrize(
    ("way", "place"),
    [(in_responses, "input.0.content.1.image_url"), (in_messages, "messages.0.content.1.source")],
)
def test_the_other_dialects_show_pictures_too(way: Callable[[bytes], tuple[str, Any]], place: str):
    errors = list[str]()

    async def once(task: str, endpoint: Endpoint) -> str:
        async with aiohttp.ClientSession(headers={"x-api-key": endpoint.api_key}) as http:
            path, body = way(encoded(2)[:60])
            async with http.post(f"{endpoint.base_url}/{path}", json=body) as answer:
                errors.append(f"{answer.status} {(await answer.json())['error']['message']}")
            path, body = way(encoded(2))
            async with http.post(f"{endpoint.base_url}/{path}", json=body) as answer:
                found = await answer.json()
        return (found["output"][0]["content"] if path == "responses" else found["content"])[0]["text"]

    tape = hosted(once, "2", Provider(says=by_pixels))
    assert (tape.reward, tape.status) == (1.0, Status.FINISHED), tape.cause
    _, (_, part) = (message["content"] for message in tape.calls[0].messages)
    assert part == {"type": "image", "media": Picture.of(square(2)).name, "width": 40, "height": 30}
    assert errors[0].startswith(f"400 {place}: ")


def test_files_of_requests_are_verified_and_shown(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        tape = hosted(turns, "01", Provider(says=by_pixels), journal=store.writer)
    report = verify(tmp_path / "run")
    assert (report.verdict, report.media, report.unnamed_media) == ("holds", 2, 0)
    with RunView(tmp_path / "run") as view:
        assert view.media(tape.id) == {name for call in tape.calls for name in call.media}
        calls = [one for one in view.items(tape.id, 0)["items"] if one["t"] == "call"]  # type: ignore[union-attr]
        assert [one["media"] for one in calls] == [list(call.media) for call in tape.calls]
    (tmp_path / "run/tapes/media" / tape.calls[0].media[0]).unlink()
    (broken,) = verify(tmp_path / "run").broken
    assert tape.calls[0].media[0] in broken
    assert "gone" in broken


def test_the_file_of_a_failed_request_is_named_too(tmp_path: Path):
    with Store.create(tmp_path / "run") as store:
        tape = hosted(turns, "0", Provider([refuses(400), refuses(400)]), journal=store.writer)
    assert [call.finish for call in tape.calls] == ["error"]
    assert verify(tmp_path / "run").unnamed_media == 0


def test_a_picture_in_the_result_of_a_tool_is_shown():
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}

    async def photographer(task: str, endpoint: Endpoint) -> str:
        messages: list[Any] = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [text("done"), image(data_url(encoded(2)))]},
        ]
        async with AsyncOpenAI(**endpoint._asdict(), max_retries=0) as client:
            reply = await client.chat.completions.create(model="m", messages=messages)
        return reply.choices[0].message.content or ""

    assert hosted(photographer, "2", Provider(says=by_pixels)).reward == 1.0


def bomb(width: int = 30_000, height: int = 30_000) -> bytes:
    """A PNG of some kilobytes whose header says 900 million pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1_000_000)))


PNG = encoded(0)
URL = data_url(PNG)
REFUSED: dict[str, tuple[Any, str]] = {
    "http": (image("http://127.0.0.1:1/a.png"), "messages.0.content.0.image_url.url: "),
    "https": (image("https://example.org/a.png"), "data:image/png;base64"),
    "a file": (image("file:///etc/passwd"), "data:image/png;base64"),
    "a path": (image("/etc/passwd"), "data:image/png;base64"),
    "a name on the tape": (image("media:" + "0" * 64 + ".png"), "data:image/png;base64"),
    "SVG": (image(data_url(b"<svg/>", "svg+xml")), "data:image/png;base64"),
    "GIF": (image(data_url(PNG, "gif")), "data:image/png;base64"),
    "a page": (image("data:text/html;base64,aGk="), "data:image/png;base64"),
    "not base64": (image("data:image/png,abc"), "data:image/png;base64"),
    "a parameter": (image("data:image/png;charset=utf-8;base64,aGk="), "data:image/png;base64"),
    "truncated base64": (image(URL[:-3]), " base64 ("),
    "base64 with a line break": (image(URL[:50] + "\n" + URL[50:]), " base64 ("),
    "base64 of URLs": (image("data:image/png;base64,-_-_"), " base64 ("),
    "letters": (image("data:image/png;base64,äöü="), " base64 ("),
    "half a file": (image(data_url(PNG[: len(PNG) // 2])), "decoded"),
    "no bytes": (image("data:image/png;base64,"), "empty"),
    "text": (image(data_url(b"hello, this is a text")), "b'hello, this"),
    "SVG called PNG": (image(data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>")), "<svg xmlns="),
    "a bomb": (image(data_url(bomb())), "16,777,216"),
    "a strip": (image(data_url(bomb(30_000, 1))), " 200 "),
    "another detail": ({"type": "image_url", "image_url": {"url": URL, "detail": "ultra"}}, "image_url.detail"),
    "no URL": ({"type": "image_url", "image_url": {}}, "content.0.image_url.url: Field required"),
    "a text as URL": ({"type": "image_url", "image_url": URL}, "content.0.image_url"),
    "a number as URL": (image(7), "content.0.image_url.url"),
    "a nested part": ({"type": "text", "text": [image(URL)]}, "content.0.text"),
    "a list": ([image(URL)], "content.0"),
    "our own part": ({"type": "image", "media": "0" * 64 + ".png", "width": 1, "height": 1}, "content.0"),
    "a sound": ({"type": "input_audio", "input_audio": {}}, "content.0"),
}


def test_what_is_no_picture_is_refused_and_the_program_goes_on(tmp_path: Path):
    found: dict[str, tuple[int, str]] = {}

    async def hostile(task: str, endpoint: Endpoint) -> str:
        async with AsyncOpenAI(**endpoint._asdict(), max_retries=0) as client:

            async def ask(name: str, message: Any) -> None:
                try:
                    await client.chat.completions.create(model="m", messages=[message])
                except APIStatusError as error:
                    found[name] = error.status_code, str(error.body["message"])  # type: ignore[index]

            for name, (part, _) in REFUSED.items():
                await ask(name, {"role": "user", "content": [part]})
            await ask("many", {"role": "user", "content": [image(URL)] * 1000})
            await ask("500", {"role": "user", "content": [image(URL)] * 500})
            reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return reply.choices[0].message.content or ""

    with Store.create(tmp_path / "run") as store:
        program = rollout(Program(hostile), Echo(), "x", engine=ScriptedEngine(["seen", "x"]), journal=store.writer)
        tape = asyncio.run(program)
        assert len(store.media.names()) == 1
    assert (tape.status, tape.reward, len(tape.calls)) == (Status.FINISHED, 1.0, 2)
    for name, (_, says) in REFUSED.items():
        assert found[name][0] == 400, name
        assert found[name][1].startswith("messages.0.content.0"), (name, found[name])
        assert says in found[name][1], (name, found[name])
        assert len(found[name][1]) < 500, name
    status, message = found["many"]
    assert status == 400
    assert message.startswith("messages: ")
    assert "1,000" in message
    assert " 500 " in message
    assert "500" not in found


def test_a_repeated_picture_is_decoded_once_and_the_pixels_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch):
    decoded = []

    async def read(source: Any) -> Picture:
        decoded.append(source)
        return Picture.of(square(0))

    monkeypatch.setattr(Picture, "read", read)
    asked: list[Any] = []

    async def same(task: str, endpoint: Endpoint) -> str:
        async with AsyncOpenAI(**endpoint._asdict(), max_retries=0) as client:
            for n in (1, 2, 3):
                shown = [image(URL)] * n
                asked.append(
                    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": shown}])
                )
            monkeypatch.setattr(gateway_session, "PIXELS", 3 * 40 * 30 - 1)
            shown = [image(URL), *(image(data_url(PNG + bytes([k]))) for k in range(3))]
            with pytest.raises(APIStatusError, match=r"content\.3\.image_url: .*3,599"):
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": shown}])
        return "x"

    tape = asyncio.run(rollout(Program(same), Echo(), "x", engine=ScriptedEngine(["a", "b", "c"])))
    assert (tape.status, len(asked), len(decoded)) == (Status.FINISHED, 3, 4)


def test_an_engine_that_cannot_see_is_named_with_the_picture():
    said: list[str] = []

    async def shows(task: str, endpoint: Endpoint) -> str:
        async with AsyncOpenAI(**endpoint._asdict(), max_retries=0) as client:
            try:
                await client.chat.completions.create(model="m", messages=[{"role": "user", "content": [image(URL)]}])
            except APIStatusError as error:
                said.append(f"{error.status_code} {error.body['message']}")  # type: ignore[index]
        return "x"

    asyncio.run(rollout(Program(shows), Echo(), "x", engine=Told()))
    assert said[0].startswith("400 ")
    assert "'told'" in said[0]
    assert "[picture 40x30 " in said[0]
