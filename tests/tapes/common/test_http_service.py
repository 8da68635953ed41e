"""The life cycle that all HTTP servers share, and the checks before a route."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import aiohttp
import pytest

from tapereel.tapes.common import HttpService
from tapereel.tapes.common.http_service import BODY, web
from tapereel.tapes.common.request_checks import names_server
from tapereel.tapes.errors import UsageError

TOKEN = "0123456789abcdef"


class Echo(HttpService):
    body_bytes = 1000
    at_the_end: int | None = None
    """Status of a request that was sent while the service ended."""

    def routes(self) -> Iterable[web.RouteDef]:
        return [web.post("/", self._echo)]

    async def _echo(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(request[BODY])

    async def stop(self) -> None:
        self.at_the_end, _ = await asked(self, b"{}")


async def asked(service: HttpService, body: bytes, **headers: str) -> tuple[int, bytes]:
    headers = {"Authorization": f"Bearer {service.token}", "Content-Type": "application/json", **headers}
    async with aiohttp.ClientSession() as http, http.post(service.url, data=body, headers=headers) as answer:
        return answer.status, await answer.read()


def test_a_request_passes_the_checks_and_reaches_its_route():
    async def scene() -> None:
        async with Echo("127.0.0.1", TOKEN).serving() as service:
            assert service.url == f"http://127.0.0.1:{service.port}"
            assert await asked(service, b'{"a": "hello"}') == (200, b'{"a": "hello"}')
            assert (await asked(service, b"{}", Authorization=""))[0] == 401
            assert (await asked(service, b"{}", Authorization=f"Bearer {TOKEN[:-1]}"))[0] == 401
            assert (await asked(service, b"{}", Host="rebound.example"))[0] == 403
            assert (await asked(service, b"x" * 1001))[0] == 413
            assert (await asked(service, b"x"))[0] == 400
            assert await asked(service, b"") == (200, b"{}")
        assert service.at_the_end == 200
        with pytest.raises(aiohttp.ClientConnectionError):
            await asked(service, b"{}")

    asyncio.run(scene())


def test_without_a_token_a_new_one_is_made_for_each_server():
    made = {Echo(host).token for host in ("127.0.0.1", "::1", "0.0.0.0", "192.0.2.1")}
    assert len(made) == 4
    assert all(len(token) >= 32 for token in made)


def test_a_server_for_every_address_names_one_that_works_here():
    service = Echo("0.0.0.0", TOKEN)
    service.port = 80
    assert service.url == "http://127.0.0.1:80"
    assert Echo("::1", TOKEN).url == "http://[::1]:0"


@pytest.mark.parametrize(
    "name",
    ["192.168.1.7", "192.168.1.7:80", "[fe80::1]:9", "run.example:1", "envs", "a.svc.cluster.local", "localhost:81"],
)
def test_beyond_loopback_names_that_only_this_network_resolves_name_the_server(name: str):
    assert names_server(name, "run.example")


@pytest.mark.parametrize(
    "name",
    ["rebound.example", "rebound.example:80", "", ":80", "a b", "x@y", "127.0.0.1.evil.example", "run.example.evil"],
)
def test_a_name_of_a_foreign_name_server_is_refused(name: str):
    assert not names_server(name, "0.0.0.0")
    assert not names_server(name, "127.0.0.1")


def test_a_loopback_server_has_loopback_names_only():
    assert names_server("127.0.0.1:9000", "127.0.0.1"), "a forwarded port"
    for name in ("192.168.1.7", "envs", "box.local", "0.0.0.0", "127.0.0.2"):
        assert not names_server(name, "127.0.0.1")


@pytest.mark.parametrize(
    "token", ["", "short", "x" * 15, "with space 0123456789", "\u00e9" * 20, "x" * 20 + "\n", "x" * 1001]
)
def test_a_token_that_can_be_guessed_or_sent_in_no_header_is_refused(token: str):
    with pytest.raises(UsageError, match=r"\b16\b"):
        Echo("127.0.0.1", token)
