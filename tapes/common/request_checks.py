"""Checks each HTTP request before it reaches its route: Host, Origin, Sec-Fetch-Site, token and content type.

`HttpService` applies these checks to the servers in this package. `Guard` is ASGI middleware that applies them to a
vLLM server. vLLM's own API key leaves some routes open, including the routes that receive weights. `LocalServer` copies
this file to a folder, and vLLM imports the copy. For this reason, the file imports only the standard library.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import cache, lru_cache

SAFE = ("GET", "HEAD", "OPTIONS")
"""HTTP methods that change nothing."""
PRIVATE = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer. They prevent caches from keeping the answer, and pages from other origins from embedding it.
None of these headers allows CORS."""
_Message = MutableMapping[str, object]
_App = Callable[[_Message, Callable[..., object], Callable[[_Message], Awaitable[None]]], Awaitable[None]]


def refused_origin(host: Sequence[str], origin: Sequence[str], site: Sequence[str], at: str) -> str | None:
    """Return why a request with these Host, Origin and Sec-Fetch-Site headers is rejected, or None if it is accepted.

    `at` is the address on which the server listens. Without the check of Host, a web page could reach the server
    through a name that resolves to this machine (DNS rebinding). The other two headers are set by browsers, and no
    script can change them.
    """
    if len(host) != 1 or not names_server(host[0], at):
        shown = ", ".join(host)[:80]
        return f"the Host header {shown!r} doesn't name this server: use the address that it printed"
    if any(one.lower() != f"http://{host[0].lower()}" for one in origin):
        return f"a web page of the origin {origin[0][:80]!r} sent this request, and only this server's own page may"
    if any(one not in ("none", "same-origin") for one in site):
        return "a page of another site sent this request (Sec-Fetch-Site), and only this server's own page may"
    return None


def refused_change(method: str, content_type: str) -> str | None:
    """Return why a request's content type is rejected, or None if it is accepted or the request changes nothing.

    A page from another origin must ask for permission (CORS) before it can send JSON, and no server here grants it.
    """
    if method in SAFE or content_type.partition(";")[0].strip().lower() == "application/json":
        return None
    return f"{method} needs the header Content-Type: application/json, also without a body, not {content_type[:80]!r}"


def bearer(header: str | None) -> str:
    """Return the token in an Authorization header with the scheme Bearer (any case), or an empty string."""
    found = re.fullmatch(r"bearer ([\x21-\x7e]{1,1000})", header or "", re.IGNORECASE)
    return found[1] if found else ""


def same_token(sent: str, token: str) -> bool:
    """Return whether the strings are equal, in constant time. `==` would reveal how many leading characters match."""
    return hmac.compare_digest(sent.encode("utf-8", "replace"), token.encode())


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server at `host`."""
    return host.lower() == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def names_server(header: str, host: str) -> bool:
    """Return whether the `Host` header names a server that listens on this host. The port in the header isn't compared,
    because it may be forwarded.

    Only names that a foreign name server can't resolve to this machine are accepted. A loopback server accepts the
    loopback names. Other servers accept bare addresses, this machine's names, names without a dot and private domains.
    """
    found = re.fullmatch(r"(\[[0-9a-f:.]+\]|[\w.-]+)(:\d{1,5})?", header.lower())
    name = found[1].strip("[]") if found else ""
    if is_loopback(host):
        return name in {"localhost", "127.0.0.1", "::1", host.lower()}
    local = name and ("." not in name or name.endswith((".local", ".internal", ".localhost")))
    return bool(local) or name in {host.lower(), *_names_of_this_machine()} or _is_address(name)


@cache
def _names_of_this_machine() -> frozenset[str]:
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class Guard:
    """ASGI middleware that applies these checks to all routes of a vLLM server. The token is in `VLLM_API_KEY`."""

    def __init__(self, app: _App) -> None:
        self._app, self._token, self._at = app, os.environ["VLLM_API_KEY"], os.environ["TAPEREEL_GUARDED"]

    async def __call__(
        self, scope: _Message, receive: Callable[..., object], send: Callable[[_Message], Awaitable[None]]
    ) -> None:
        """Pass the request on, or reject it."""
        found = None if scope["type"] == "lifespan" else self._refused(scope)
        if found is None:
            return await self._app(scope, receive, send)
        status, why = found
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        headers = [(b"content-type", b"application/json")]
        headers += [(name.lower().encode(), value.encode()) for name, value in PRIVATE.items()]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        body = {"error": {"message": why, "code": status}}
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    def _refused(self, scope: _Message) -> tuple[int, str] | None:
        headers = scope["headers"]
        assert isinstance(headers, list | tuple)

        def sent(name: bytes) -> list[str]:
            return [value.decode("latin-1") for key, value in headers if key.lower() == name]

        why = refused_origin(sent(b"host"), sent(b"origin"), sent(b"sec-fetch-site"), self._at)
        if why is not None:
            return 403, why
        if not same_token(bearer("".join(sent(b"authorization"))), self._token):
            return 401, "a valid token is required: the API key that the server was started with"
        why = refused_change(str(scope.get("method", "GET")), "".join(sent(b"content-type")))
        return (415, why) if why is not None else None
