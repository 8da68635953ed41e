"""Who is let in, what a client may cost, and that nothing leaks: keys, tapes, secrets."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents.gateway import Bounds, Control
from tapereel.agents.gateway import gateway_control as control
from tapereel.agents.gateway import gateway_server as server
from tapereel.tapes.common import REWARD_LIMIT

from .lab import TOKEN, Told, books_close, served


def test_only_a_key_of_an_open_tape_opens_anything(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "tapereel.gateway")

    async def scene() -> list[str]:
        async with served(tmp_path, Told()) as there:
            tape, client = await there.begin(task="t")
            for key in (
                "",
                "x",
                client.key[:-1],
                client.key + "x",
                client.key.upper(),
                TOKEN,
                "é" * 8,
                " " + client.key,
            ):
                status, answer = await client.with_key(key).ask("hi")
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), key
                assert (await client.with_key(key)("GET", "/v1/models"))[0] == 401
            for key in ("", client.key, TOKEN[:-1], TOKEN + "x"):
                for path in (
                    "/tapereel/tapes",
                    f"/tapereel/tapes/{tape}/end",
                    f"/tapereel/tapes/{tape}/rewards",
                    "/tapereel/pause",
                ):
                    assert (await client.with_key(key)("POST", path, {}))[0] == 401, (key, path)
                assert (await client.with_key(key)("GET", f"/tapereel/tapes/{tape}"))[0] == 401
            await there.end(tape)
            status, answer = await client.ask("hi")
            assert (status, answer["error"]["code"]) == (403, "tape_ended")
            return [client.key, TOKEN]

    keys = asyncio.run(scene())
    assert len(caplog.records) == 8 * 2 + 4 * 5 + 1
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert [key for key in keys if key in said or key[:-1] in said] == []
    assert books_close(tmp_path).begun == 1


def test_what_one_tape_says_is_on_no_other(tmp_path: Path):
    async def scene() -> None:
        async with served(tmp_path, Told(lambda messages: messages[-1]["content"])) as there:
            begun = [await there.begin(task=f"task {k}") for k in range(8)]
            answers = await asyncio.gather(
                *(client.ask(f"canary {k}") for k, (_, client) in enumerate(begun) for _ in range(4))
            )
            assert [a["choices"][0]["message"]["content"] for _, a in answers] == [
                f"canary {k}" for k in range(8) for _ in range(4)
            ]
            for k, (name, _) in enumerate(begun):
                await there.end(name)
                told = there.tape(name).model_dump_json()
                assert [j for j in range(8) if f"canary {j}" in told] == [k]

    asyncio.run(scene())


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1",
        "/v1/",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/chat/completions/../../x",
        "/v1/%2e%2e/tapereel/tapes",
        "/../../../etc/passwd",
        "/tapereel/tapes/..%2f..%2fetc",
        "//v1/models/x",
        "/v1/chat/completions%00",
        "/tapereel/tapes/0000000000000000/../x",
        "/static/../server.py",
    ],
)
def test_paths_that_are_not_served_are_refused_as_openai_does(tmp_path: Path, path: str):
    async def scene() -> None:
        async with served(tmp_path, Told()) as there:
            reader, writer = await asyncio.open_connection("127.0.0.1", there.gateway.port)
            head = (
                f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode())
            answer = (await reader.read()).decode()
            writer.close()
            await writer.wait_closed()
            assert answer.split()[1] in ("404", "405"), answer
            assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] in ("not_found", "method_not_allowed")

    asyncio.run(scene())


def test_a_body_over_the_bound_is_refused_however_it_is_sent(tmp_path: Path):
    async def scene() -> None:
        async with served(tmp_path, Told(), bounds=Bounds(body=2000)) as there:
            tape, client = await there.begin(task="t")
            assert (await client.ask("x" * 500))[0] == 200
            status, answer = await client.ask("x" * 3000)
            assert (status, answer["error"]["code"]) == (413, "request_too_large")

            async def pieces() -> Any:
                for _ in range(100):
                    yield b"x" * 100

            async with client.http.post(
                f"{there.gateway.url}/chat/completions",
                data=pieces(),
                headers={"Authorization": f"Bearer {client.key}", "Content-Type": "application/json"},
            ) as chunked:
                assert chunked.status == 413
            assert (await there.admin("POST", "/tapereel/tapes", {"task": "x" * 3000}))[0] == 413
            assert (await client.ask("fine"))[0] == 200
            await there.end(tape)

    asyncio.run(scene())
    books_close(tmp_path)


def test_a_slow_client_is_let_go(tmp_path: Path):
    async def scene() -> None:
        bounds = Bounds(body_seconds=0.1, header_seconds=0.1)
        async with served(tmp_path, Told(), bounds=bounds) as there:
            _, client = await there.begin(task="t")
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {client.key}\r\n"
                "Content-Type: application/json\r\nContent-Length: 100\r\n"
            )
            for sent, said in ((head[:40], b""), ("", b""), (head + "\r\n{", b"408")):
                reader, writer = await asyncio.open_connection("127.0.0.1", there.gateway.port)
                writer.write(sent.encode())
                answer = await asyncio.wait_for(reader.read(), 60)
                assert answer.split()[1:2] == ([said] if said else []), (sent, answer)
                writer.close()
                await writer.wait_closed()

    asyncio.run(scene())


def test_bodies_that_make_no_sense_begin_and_end_nothing(tmp_path: Path):
    async def scene() -> None:
        async with served(tmp_path, Told()) as there:
            tape, client = await there.begin(task="t")
            for body in (
                b"{",
                b"[]",
                {"tasks": 1},
                {"agent": "a/../b"},
                {"agent": ""},
                {"seed": -1},
                {"attempt": "x"},
                {"budget": {"calls": 0}},
                {"budget": {"wishes": 3}},
                {"split": "../x"},
            ):
                assert (await there.admin("POST", "/tapereel/tapes", body))[0] == 400, body
            for body in (
                {"rewards": {"a": "much"}},
                {"rewards": {"a": 2 * REWARD_LIMIT}},
                {"rewards": {"a": -1e308}},
                {"rewards": 3},
                b'{"rewards": {"a": NaN}}',
                {"reward": {"a": 1}},
            ):
                assert (await there.admin("POST", f"/tapereel/tapes/{tape}/rewards", body))[0] == 400, body
            assert (await there.admin("POST", f"/tapereel/tapes/{tape}/end", {"status": "won"}))[0] == 400
            assert (await there.admin("POST", f"/tapereel/tapes/{'0' * 22}/end", {}))[0] == 404
            for body in (b"", b"{", b"\x00\xff", {"messages": 3}):
                assert (await client("POST", "/v1/chat/completions", body))[0] == 400, body
            ended = await there.end(tape)
            assert (ended["status"], ended["calls"]) == ("finished", 0)
            status, again = await there.admin("POST", f"/tapereel/tapes/{tape}/end", {})
            assert (status, again["error"]["code"]) == (409, "tape_ended")

    asyncio.run(scene())
    assert books_close(tmp_path).begun == 1


def escaped(text: str) -> str:
    """As a JSON string, each character as its number."""
    return '"' + "".join(f"\\u{ord(letter):04x}" for letter in text) + '"'


def bodies(secret: str) -> dict[str, bytes]:
    """Requests that hold it, by where."""

    def asking(content: Any, **more: Any) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode()

    def calling(**function: str) -> bytes:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", **function}}
        return json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": "", "tool_calls": [call]},
                    {"role": "tool", "tool_call_id": "1", "content": "y"},
                ]
            }
        ).encode()

    def offering(parameters: Any) -> bytes:
        return asking("x", tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])

    def form(schema: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}

    half = len(secret) // 2
    parts = [{"type": "text", "text": text} for text in (secret[:half], secret[half:])]
    return {
        "in a sentence": asking(f"my key is {secret}, yes"),
        "within a word": asking(f"xsk-tape-{secret}x"),
        "escaped": asking("SECRET").replace(b'"SECRET"', escaped(secret).encode()),
        "in parts": asking(parts),
        "a tool's argument": calling(arguments=json.dumps({"key": secret})),
        "a tool's name": calling(name=secret),
        "a schema": offering({"properties": {"a": {"default": secret}}}),
        "a name in a schema": offering({"properties": {secret: {}}}),
        "an answer's schema": asking("x", response_format=form({"enum": [secret]})),
        "a name in an answer's schema": asking("x", response_format=form({"properties": {secret: {}}})),
        "stop": asking("x", stop=[secret]),
        "a field that isn't taken": asking("x", n=secret),
    }


def test_a_key_in_a_request_never_reaches_the_tape(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("DEBUG")

    async def scene() -> list[str]:
        async with served(tmp_path, Told()) as there:
            tape, client = await there.begin(task="t")
            open_, other = await there.begin(task="t")
            ended, third = await there.begin(task="t")
            await there.end(ended)
            keys = [client.key, other.key, third.key, TOKEN]
            for key in keys:
                for where, body in bodies(key).items():
                    status, answer = await client("POST", "/v1/chat/completions", body)
                    assert status == 400, where
                    assert (key in json.dumps(answer)) is (where == "a field that isn't taken")
            for nobodys in ("secret", "sk-tape-", f"sk-tape-{'x' * 32}", client.key[:-1], TOKEN[:-1]):
                assert (await client.ask(f"my key is {nobodys}"))[0] == 200
            for path, told in (
                ("", {"task": {"public": ["x", {"a": client.key}]}}),
                ("", {"task": TOKEN}),
                (f"/{open_}/end", {"answer": f"it is {other.key}"}),
                (f"/{open_}/end", {"status": "error", "message": TOKEN}),
                (f"/{open_}/rewards", {"metrics": {client.key: 1.0}}),
            ):
                status, answer = await there.admin("POST", f"/tapereel/tapes{path}", told)
                assert (status, "recorded" in answer["error"]["message"]) == (400, True), told
            for tape_id in (tape, open_):
                await there.end(tape_id)
            return keys

    keys = asyncio.run(scene())
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert [key for key in keys if key.encode() in everything or key in caplog.text] == []


def test_tapes_that_ended_leave_little_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in (server, control):
        monkeypatch.setattr(module, "REMEMBERED", 3)

    async def scene() -> None:
        async with served(tmp_path, Told()) as there:
            for k in range(8):
                tape, client = await there.begin(task="t")
                assert (await client.ask("hi"))[0] == 200
                await there.end(tape, status=("finished", "cancelled")[k % 2])
            held = (there.gateway._sessions, there.gateway._ended, there.gateway._open, there.gateway._done)
            assert [len(one) for one in held] == [0, 3, 0, 3]

    asyncio.run(scene())


def test_so_many_tapes_are_open_at_once_and_no_more(tmp_path: Path):
    async def scene() -> None:
        async with served(tmp_path, Told(), most=2) as there:
            tape, _ = await there.begin(task="t")
            await there.begin(task="t")
            status, told = await there.admin("POST", "/tapereel/tapes", {})
            assert (status, told["error"]["code"]) == (429, "too_many_tapes")
            await there.end(tape)
            await there.begin(task="t")

    asyncio.run(scene())


def test_a_token_that_can_be_guessed_is_refused():
    with pytest.raises(ValueError, match=r"\b16\b"):
        Control("short", Told(), journal=None)
