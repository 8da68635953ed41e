"""The real vLLM server of ours: no route answers a stranger or a web page. vLLM's own key leaves routes open."""

from __future__ import annotations

import http.client
import json
import re

import pytest

from tapereel.agents.engines.servers import LocalServer
from tapereel.tapes.common import token_for

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]
OPEN_IN_VLLM = {"/health", "/pause", "/resume", "/collective_rpc", "/update_weight_version", "/reset_prefix_cache"}
"""Some of the routes for which vLLM 0.32 asks for no key."""


def ask(url: str, method: str, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_no_route_of_vllm_answers_a_stranger(vllm: LocalServer):
    right = {"Authorization": f"Bearer {token_for(vllm.url)}"}
    status, _, body = ask(vllm.url, "GET", "/openapi.json", **right)
    assert status == 200
    paths = json.loads(body)["paths"]
    assert set(paths) >= OPEN_IN_VLLM
    assert ask(vllm.url, "GET", "/health", **right)[0] == 200
    routes = [(method.upper(), re.sub(r"\{.*?\}", "x", path)) for path, found in paths.items() for method in found]
    for method, path in [
        *routes,
        ("GET", "/openapi.json"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("OPTIONS", "/pause"),
    ]:
        cases = {
            401: [{}, {"Authorization": "Bearer " + "x" * 32}],
            403: [
                {**right, "Origin": "https://evil.example"},
                {**right, "Sec_Fetch_Site": "cross-site"},
                {**right, "Host": "evil.example"},
            ],
            415: [{**right, "Content_Type": "text/plain"}] if method not in ("GET", "HEAD", "OPTIONS") else [],
        }
        for expected, changes in cases.items():
            for headers in changes:
                status, answered, body = ask(vllm.url, method, path, **headers)
                assert status == expected, (method, path, headers, body)
                assert not [name for name in answered if name.startswith("access-control")]
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Version": "13"}
    upgrade["Sec_WebSocket_Key"] = "AAAAAAAAAAAAAAAAAAAAAA=="
    assert ask(vllm.url, "GET", "/v1/realtime", **upgrade)[0] == 403
