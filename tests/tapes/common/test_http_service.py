"""The life cycle that all HTTP servers share, and the checks before a route."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import aiohttp
import pytest

from tapereel.tapes.common.http_service import HttpService, names_server, require_token, web

TOKEN = "0123456789abcdef"


class Echo(HttpService):
    body_bytes = 1000
    at_the_end: int | None = None
    """Status of a request that was sent while the service ended."""

    def routes(self) -> Iterable[web.RouteDef]:
        return [web.post("/", self._echo)]

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=await request.read())

    async def stop(self) -> None:
        self.at_the_end, _ = await asked(self, b"last")


async def asked(service: HttpService, body: bytes, **headers: str) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {service.token}", **headers}
    async with aiohttp.ClientSession() as http, http.post(service.url, data=body, headers=headers) as answer:
        return answer.status, await answer.read()


def test_a_request_passes_the_checks_and_reaches_its_route():
    async def scene() -> None:
        async with Echo("127.0.0.1", TOKEN).serving() as service:
            assert service.url == f"http://127.0.0.1:{service.port}"
            assert await asked(service, b"hello") == (200, b"hello")
            assert (await asked(service, b"hello", Authorization=""))[0] == 401
            assert (await asked(service, b"hello", Authorization=f"Bearer {TOKEN[:-1]}"))[0] == 401
            assert (await asked(service, b"hello", Host="rebound.example"))[0] == 403
            assert (await asked(service, b"x" * 1001))[0] == 413
        assert service.at_the_end == 200
        with pytest.raises(aiohttp.ClientConnectionError):
            await asked(service, b"hello")

    asyncio.run(scene())


def test_without_a_token_none_is_needed():
    async def scene() -> None:
        async with Echo("127.0.0.1", None).serving() as service:
            assert await asked(service, b"hello", Authorization="") == (200, b"hello")

    asyncio.run(scene())


def test_a_server_for_every_address_names_one_that_works_here():
    service = Echo("0.0.0.0", TOKEN)
    service.port = 80
    assert service.url == "http://127.0.0.1:80"
    assert Echo("::1", TOKEN).url == "http://[::1]:0"


def test_beyond_loopback_a_name_of_a_foreign_name_server_is_refused():
    assert names_server("192.168.1.7", "0.0.0.0", 80) is True
    assert names_server("192.168.1.7:80", "0.0.0.0", 80) is True
    assert names_server("rebound.example", "0.0.0.0", 80) is False
    assert names_server("192.168.1.7:81", "0.0.0.0", 80) is False
    assert names_server("run.example", "run.example", 80) is True


def test_beyond_loopback_a_token_is_required():
    for host in ("127.0.0.1", "::1", "localhost"):
        require_token(host, None)
    require_token("0.0.0.0", TOKEN)
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(ValueError, match="pass a token"):
            require_token(host, None)
