"""A policy: weights that a run trains, and what samples with them. Knows nothing of episodes and of who else plays."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..agents.adapter_config import add_adapters
from ..agents.embedded import EmbeddedEngine
from ..agents.engines import EmbeddedConfig, connect_to
from ..agents.pretrained import load_pretrained
from ..agents.render import Renderer
from ..tapes.store import Store
from .checkpoint import copied_weights
from .config import LoopConfig
from .history import BrokenHistory, History
from .player_config import TrainedConfig
from .trainer import Trainer

if TYPE_CHECKING:
    from ..agents.remote import RemoteEngine


@dataclass(frozen=True)
class Policy:
    """A model, which updates change in place."""

    model: Any
    tokenizer: Any
    renderer: Renderer
    slots: int = 64
    capacity: int | None = None
    servers: Callable[[], Awaitable[RemoteEngine]] | None = None
    """Connects to the servers that sample for the loop; None: an engine in this process does."""

    def copy(self, version: str) -> EmbeddedEngine:
        """An engine with a copy of the weights as they are now, which are called `version`."""
        return EmbeddedEngine(self.model, self.renderer, version=version, slots=self.slots, capacity=self.capacity)

    async def sampler(self, version: str) -> EmbeddedEngine | RemoteEngine:
        """The engine of the loop, with the weights as they are now."""
        if self.servers is None:
            return self.copy(version)
        engine = await self.servers()
        try:
            if engine.version != version:
                await engine.publish(copied_weights(self.model), version)
        except BaseException:
            await engine.close()
            raise
        return engine

    def history(self, store: Store, lineage: str, directory: Path, make_trainer: Callable[[str], Trainer],
                loop: LoopConfig) -> History:  # fmt: skip
        """Its history of that lineage, with checkpoints in `directory`."""
        return History(store, lineage, directory, self.model, make_trainer, renderer=self.renderer,
                       tokenizer=self.tokenizer, keep=loop.keep_checkpoints,
                       keep_bytes=loop.keep_checkpoint_bytes)  # fmt: skip


def load_policy(engine: TrainedConfig, seed: int) -> Policy:
    """The model that `engine` names, with its adapters, drawn from `seed`, where those are what is trained."""
    found = load_pretrained(engine.model)
    renderer = engine.renderer.make(found.tokenizer)
    if isinstance(engine, EmbeddedConfig):
        return Policy(found.model, found.tokenizer, renderer, engine.slots, engine.capacity)
    model = found.model if engine.lora is None else add_adapters(found.model, engine.lora, seed=seed)
    return Policy(model, found.tokenizer, renderer, engine.slots, engine.capacity,
                  partial(connect_to, engine, weights=True))  # fmt: skip


def check_begun(results: dict[str, Any], digest: str, run: Path, folder: str) -> None:
    """BrokenHistory where the run did not begin with weights of that digest; notes it in a new one's results."""
    begun = results.setdefault("base", digest)
    if begun != digest:
        raise BrokenHistory(f"{run} began with weights of digest {begun[:12]}; those in {folder} have {digest[:12]} "
                            "now: its updates don't apply to them")  # fmt: skip
