"""How new weights reach servers, as a configuration describes it; and a model with fresh LoRA adapters.

Knows nothing of engines.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ....tapes.common.config import Config
from ....tapes.errors import MissingExtra

PublishWay = Literal["reload", "lora", "transfer", "nccl"]
"""How weights get to the servers. `reload`: all of them reload a folder. `transfer`: vLLM's weight-transfer routes,
with the files in shared memory. `lora`: adapters alone, each version under its own name. `nccl`: a broadcast from this
process's GPU to vLLM's."""


class AdapterConfig(Config):
    """The LoRA adapters that are trained in place of the model's own weights."""

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    """The adapters' part is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get one, as `q_proj`; none given: all linear layers but the head."""


class NCCLConfig(Config):
    """Where the trainer and the workers of vLLM servers meet."""

    address: str = "127.0.0.1"
    """Of this machine, as the workers reach it. Whoever else reaches it could take a worker's place: loopback, or a
    private network."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """That of the first server; the next ones follow, one for each. None: free ones."""


def add_adapters(model: Any, config: AdapterConfig, *, seed: int = 0) -> Any:
    """The model with fresh adapters, the same ones for a seed; they change nothing yet and are all that is trained.
    Without dropout, since what is trained must be what was sampled. MissingExtra."""
    try:
        import torch
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "peft", "lora", "training LoRA adapters") from error
    targets = list(config.targets) or "all-linear"
    wanted = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return get_peft_model(model, wanted)
