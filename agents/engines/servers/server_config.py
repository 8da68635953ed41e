"""Settings of the engines that ask a server: its address, its time limits, and how it receives new weights."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ....tapes.common.config import Config, FreeAtResume
from ....tapes.common.redact import refuse_secret

PublishWay = Literal["reload", "lora", "transfer", "nccl"]
"""How a weight sync reaches the servers. `reload`: every server reloads a folder. `transfer`: vLLM's weight-transfer
routes, with files in shared memory. `lora`: only the adapters, each version under its own name. `nccl`: a broadcast
from the GPU of this process to vLLM's GPUs."""


def _without_password(url: str) -> str:
    refuse_secret(url, "the address")
    return url


Address = Annotated[str, AfterValidator(_without_password), FreeAtResume]
"""The address of a server, without user, password or key."""
Addresses = Annotated[tuple[Address, ...], FreeAtResume]
"""The addresses of any number of servers."""


class RequestConfig(Config):
    """Settings of the requests to a server."""

    key_variable: Annotated[str | None, FreeAtResume] = None
    """The environment variable with the API key. None: no key, or for a hosted model the provider's own variable, such
    as `OPENAI_API_KEY`."""
    seconds: float = Field(default=600.0, gt=0)
    """Time limit of one request, in seconds."""
    patience: float = Field(default=300.0, gt=0)
    """Time limit, in seconds, for the retries of one request, such as one to a paused or full server."""


class NCCLConfig(Config):
    """The rendezvous address of the trainer and the workers of vLLM servers."""

    address: str = "127.0.0.1"
    """Address of this machine that the workers can reach. Any process that reaches it could join in place of a worker:
    use loopback or a private network."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port for the first server; each further server uses the next port. None: free ports."""


class ServerSettings(RequestConfig):
    """Settings of servers that serve one model: what `connect` reads."""

    model: str
    """The served model's tokenizer and configuration: a folder in Hugging Face format, or a model of the hub as
    `org/name` or `org/name@revision`."""
    urls: Addresses = ()
    """Addresses of the servers, such as `http://127.0.0.1:8000`. Empty: the run starts vLLM on this machine, and stops
    it at its end."""
    publish: PublishWay = "reload"
    """How a weight sync reaches the servers. `reload`: all servers reload a folder. `transfer`: vLLM's weight-transfer
    routes read shared memory. `nccl`: a broadcast. `lora`: adapters (`trainer.lora`), each version under its own
    name."""
    weights_folder: Annotated[str | None, FreeAtResume] = None
    """The folder for new weights in training, which the servers can read. None: a temporary folder."""
    control_seconds: float = Field(default=120.0, gt=0)
    """Time limit, in seconds, of each step of a weight sync, such as a pause or a load. No step is retried."""
    nccl: Annotated[NCCLConfig | None, FreeAtResume] = None
    """Address and port for `publish: nccl`. None: loopback and free ports."""
