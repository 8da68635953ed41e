"""Settings of engines that send requests to a server: addresses, time limits, and how servers receive new weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from ....tapes.common.config import Config, FreeAtResume
from ....tapes.common.redact import refuse_secret
from ....tapes.errors import UsageError

PublishWay = Literal["reload", "lora", "transfer", "nccl"]
"""How servers receive new weights. `reload`: every server reloads a folder. `transfer`: vLLM's weight-transfer routes
read files in shared memory. `lora`: only adapters are sent, and each version has its own name. `nccl`: this process's
GPU broadcasts to vLLM's GPUs."""


def _without_password(url: str) -> str:
    refuse_secret(url, "the address")
    return url


def _check_address(url: str) -> None:
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} isn't an address: it must begin with http:// or https://")
    refuse_secret(url, "the address")


Address = Annotated[str, AfterValidator(_without_password), FreeAtResume]
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
    """Return the addresses. A file is read now. Raises UsageError if it can't be read, names no server, or has a line
    that isn't an address."""
    if not isinstance(urls, str):
        return urls
    path = Path(urls.removeprefix(FILE))
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"engine.urls={urls}: the file of addresses can't be read: {error}") from error
    found = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith("#")}
    for number, line in found.items():
        try:
            _check_address(line)
        except ValueError as error:
            raise UsageError(f"engine.urls={urls}: line {number}: {error}") from error
    if not found:
        raise UsageError(f"engine.urls={urls}: {path} names no server: write one address a line, as http://node-1:8000")
    return tuple(found.values())


class RequestConfig(Config):
    """Settings for requests to a server."""

    key_variable: Annotated[str | None, FreeAtResume] = None
    """The environment variable that holds the API key. If it is None, no key is sent. For a hosted model, None means
    the provider's usual variable, such as `OPENAI_API_KEY`."""
    seconds: float = Field(default=600.0, gt=0)
    """Time limit for one request, in seconds."""
    patience: float = Field(default=300.0, gt=0)
    """Seconds for which a request is repeated, for example while the server is paused or full."""


class NCCLConfig(Config):
    """The address where the trainer and the vLLM servers' workers meet."""

    address: str = "127.0.0.1"
    """An address of this machine that the workers can reach. Any process that can reach it could take a worker's place,
    so use loopback or a private network."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port at which this process waits for all workers. If it is None, a free port is used."""


class ServerSettings(RequestConfig):
    """Settings for `connect`: the servers of one model, and how they receive new weights."""

    model: str
    """Where the served model's tokenizer and configuration are: a folder in Hugging Face format, or a model on the hub,
    as `org/name` or `org/name@revision`."""
    urls: Addresses = ()
    """Addresses of the servers, such as `http://127.0.0.1:8000`. With `file:PATH`, they are the lines of a file that is
    read again every ten seconds, so that servers can join and leave. If empty, the run starts vLLM on this machine,
    and stops it at the end."""
    publish: PublishWay = "reload"
    """How servers receive new weights. `reload`: all servers reload a folder. `transfer`: vLLM's weight-transfer routes
    read shared memory. `nccl`: this process broadcasts the weights. `lora`: only adapters are sent (`trainer.lora`),
    and each version has its own name."""
    weights_folder: Annotated[str | None, FreeAtResume] = None
    """The folder to which training writes new weights. The servers must be able to read it. If it is None, a temporary
    folder is used."""
    control_seconds: float = Field(default=120.0, gt=0)
    """Time limit, in seconds, for each step in a weight sync, such as a pause or a load. Only a broadcast over NCCL is
    retried, once."""
    nccl: Annotated[NCCLConfig | None, FreeAtResume] = None
    """Address and port for `publish: nccl`. If it is None, loopback and a free port are used."""
