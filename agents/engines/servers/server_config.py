"""Settings of engines that send requests to a server: addresses, time limits, and how servers receive new weights."""

from __future__ import annotations

import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from ....tapes.common.config import Config, FreeAtResume
from ....tapes.common.redact import refuse_secret
from ....tapes.common.text import logger
from ....tapes.errors import UsageError
from ..weights.weight_config import AdapterConfig

log = logger("engine")


def _check_address(url: str) -> str:
    refuse_secret(url, "the address")
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("it must begin with http:// or https://")
        if re.search(r"[\s\x00-\x1f\x7f\\?#]", url):
            raise ValueError("it has white space, a backslash, a query or a fragment")
        at = urlsplit(url)
        host = at.hostname or ""
        if ":" in host:
            ip_address(host)
        elif not re.fullmatch(r"[\w.-]{1,180}", host.encode("idna").decode(), re.ASCII):  # names a file (`token_path`)
            raise ValueError(f"{host!r} can't be the name of a machine")
        if at.port == 0 or at.netloc.endswith(":"):
            raise ValueError("its port must be from 1 to 65535")
    except ValueError as error:
        raise ValueError(f"{url[:200]!r} isn't a server's address ({error}): write http://node-1:8000") from error
    return url


Address = Annotated[str, AfterValidator(_check_address), FreeAtResume]
"""A server's address. It must not contain a user, password or key."""
FILE = "file:"
"""Prefix of `urls` if the addresses are in a file."""


def _path_of_addresses(value: str) -> str:
    if not value.startswith(FILE) or value == FILE:
        raise ValueError(f"{value!r}: write a list of addresses, or {FILE}PATH for a file with one address a line")
    return value


AddressesFile = Annotated[str, AfterValidator(_path_of_addresses)]
"""`file:PATH`: a file with one server's address on each line. Empty lines and lines that begin with # don't count."""
Addresses = Annotated[
    Annotated[tuple[Address, ...], Tag("list")] | Annotated[AddressesFile, Tag("file")],
    Discriminator(lambda value: "file" if isinstance(value, str) else "list"),
    FreeAtResume,
]
"""Any number of servers' addresses."""


def addresses(urls: Addresses) -> tuple[str, ...]:
    """Return the addresses. A file is read now. Its lines that aren't an address are named in a warning, and left out.
    Raises UsageError if the file can't be read or names no server."""
    if not isinstance(urls, str):
        return urls
    found, problem = read_addresses(urls)
    if problem is not None:
        if not found:
            raise problem
        log.warning("%s; these lines are left out", problem)
    return tuple(found)


def read_addresses(urls: AddressesFile) -> tuple[list[str], UsageError | None]:
    """Return the addresses in a file, without the lines that aren't one, and an error that names what is wrong with the
    file. The error is None if nothing is."""
    path, found, odd = Path(urls.removeprefix(FILE)), list[str](), list[str]()
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device might never end
            raise OSError(f"{path} isn't a file")
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        return [], UsageError(f"engine.urls={urls}: the file of addresses can't be read: {error}")
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            try:
                found.append(_check_address(line))
            except ValueError as error:
                odd.append(f"line {number}: {error}")
    if not found and not odd:
        odd = [f"{path} names no server: write one address a line, as http://node-1:8000"]
    return found, UsageError(f"engine.urls={urls}: {'; '.join(odd[:5])}") if odd else None


class RequestConfig(Config):
    """Settings for requests to a server."""

    key_variable: Annotated[str | None, FreeAtResume] = None
    """The environment variable that holds the API key. If it is None, no key is sent. For a hosted model, None means
    the provider's usual variable, such as `OPENAI_API_KEY`."""
    seconds: float = Field(default=600.0, gt=0)
    """Time limit for one request, in seconds."""
    patience: float = Field(default=300.0, gt=0)
    """Seconds for which a request is repeated, for example while the server is paused or full."""


class Reload(Config):
    """All servers reload a folder."""

    kind: Literal["reload"] = "reload"


class Transfer(Config):
    """The servers read shared memory, through vLLM's weight-transfer routes. They must be on this machine."""

    kind: Literal["transfer"] = "transfer"


class Adapters(AdapterConfig):
    """Only adapters are trained and sent, and each version has its own name. Completions in flight keep theirs."""

    kind: Literal["adapters"] = "adapters"


class Broadcast(Config):
    """A GPU of this process broadcasts the weights to the servers' GPUs over NCCL."""

    kind: Literal["broadcast"] = "broadcast"
    address: Annotated[str, FreeAtResume] = "127.0.0.1"
    """An address of this machine that the servers' workers can reach. Any process that can reach it could take a
    worker's place, so use loopback or a private network."""
    port: Annotated[int | None, FreeAtResume] = Field(default=None, ge=1, le=65535)
    """Port at which this process waits for all workers. If it is None, a free port is used."""


def _way(value: object) -> object:
    """Read a string as the kind of a way."""
    if isinstance(value, dict) and "kind" not in value:
        raise ValueError("it has no kind: set weights.kind to reload, transfer, adapters or broadcast")
    return {"kind": value} if isinstance(value, str) else value


Weights = Annotated[
    Annotated[Reload | Transfer | Adapters | Broadcast, Discriminator("kind")],
    BeforeValidator(_way),
]
"""How servers receive new weights. A string is the kind of a way with its defaults."""


class ServerSettings(RequestConfig):
    """Settings for `connect`: the servers of one model, and how they receive new weights."""

    model: str
    """Where the served model's tokenizer and configuration are: a folder in Hugging Face format, or a model on the hub,
    as `org/name` or `org/name@revision`."""
    urls: Addresses = ()
    """Addresses of the servers, such as `http://127.0.0.1:8000`. With `file:PATH`, they are the lines of a file that is
    read again every ten seconds, so that servers can join and leave. If empty, the run starts vLLM on this machine,
    and stops it at the end."""
    weights: Weights = Reload()
    """How servers receive new weights: `reload` a folder, `transfer` by shared memory, `adapters` alone, or `broadcast`
    over NCCL. A mapping has the way's own settings, such as {kind: adapters, rank: 16}."""
    weights_folder: Annotated[str | None, FreeAtResume] = None
    """The folder to which training writes new weights. The servers must be able to read it. If it is None, a temporary
    folder is used."""
    control_seconds: float = Field(default=120.0, gt=0)
    """Time limit, in seconds, for each step in a weight sync, such as a pause or a load. Only a broadcast over NCCL is
    retried, once."""
