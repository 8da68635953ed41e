"""Settings of the engines that ask a server: its address, its time limits, and how it receives new weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ....tapes.common.config import Config, FreeAtResume
from ....tapes.common.redact import refuse_secret

PublishWay = Literal["reload", "lora", "transfer", "nccl"]
"""How a weight sync reaches the servers. `reload`: every server reloads a folder. `transfer`: vLLM's weight-transfer
routes read files in shared memory. `lora`: only the adapters are sent, each version under its own name. `nccl`: the GPU
of this process broadcasts to vLLM's GPUs."""


def _without_password(url: str) -> str:
    refuse_secret(url, "the address")
    return url


Address = Annotated[str, AfterValidator(_without_password), FreeAtResume]
"""The address of a server, which must not contain a user, password or key."""
Addresses = Annotated[tuple[Address, ...], FreeAtResume]
"""The addresses of any number of servers."""


class RequestConfig(Config):
    """Settings of the requests to a server."""

    key_variable: Annotated[str | None, FreeAtResume] = None
    """The environment variable with the API key. With None, no key is sent, or for a hosted model the provider's own
    variable is read, such as `OPENAI_API_KEY`."""
    seconds: float = Field(default=600.0, gt=0)
    """Time limit of one request, in seconds."""
    patience: float = Field(default=300.0, gt=0)
    """Time limit, in seconds, for retrying one request, for example to a paused or full server."""


class NCCLConfig(Config):
    """The rendezvous address of the trainer and the workers of vLLM servers."""

    address: str = "127.0.0.1"
    """Address of this machine that the workers can reach. Any process that reaches it could join in place of a worker,
    so use loopback or a private network."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port for the first server. Each further server uses the next port. With None, free ports are used."""


class ServerSettings(RequestConfig):
    """Settings of servers that serve one model, which `connect` reads."""

    model: str
    """The served model's tokenizer and configuration: a folder in Hugging Face format, or a model of the hub as
    `org/name` or `org/name@revision`."""
    urls: Addresses = ()
    """Addresses of the servers, such as `http://127.0.0.1:8000`. If empty, the run starts vLLM on this machine and
    stops it at the end."""
    publish: PublishWay = "reload"
    """How a weight sync reaches the servers. `reload`: all servers reload a folder. `transfer`: vLLM's weight-transfer
    routes read shared memory. `nccl`: this process broadcasts to them. `lora`: only adapters are sent (`trainer.lora`),
    each version under its own name."""
    weights_folder: Annotated[str | None, FreeAtResume] = None
    """The folder for new weights in training, which the servers must be able to read. With None, it is a temporary
    folder."""
    control_seconds: float = Field(default=120.0, gt=0)
    """Time limit, in seconds, of each step of a weight sync, such as a pause or a load. No step is retried."""
    nccl: Annotated[NCCLConfig | None, FreeAtResume] = None
    """Address and port for `publish: nccl`. With None, loopback and free ports are used."""
