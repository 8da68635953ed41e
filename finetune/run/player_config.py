"""The settings `engine`, `trainer` and `players` (other models, trained or frozen) of a training run.

This module doesn't import torch, so that a configuration can be checked without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ...agents.engines.embedded.pretrained import Attention
from ...agents.engines.servers.server_config import Adapters
from ...agents.engines.weights.weight_config import AdapterConfig
from ...agents.setup.engine_config import (
    AnyEngineConfig,
    ComputeConfig,
    CustomConfig,
    EmbeddedConfig,
    ServerConfig,
    engine_kind,
)
from ...agents.setup.team_config import PartnerConfig, Partners, PlayerName
from ..loop.loop_config import LoopConfig, WarmStartConfig
from ..trainer.options import OptimiserConfig

TrainedConfig = EmbeddedConfig | ServerConfig | CustomConfig
Frozen = Literal["tower", "vision", "nothing"]
"""Which part of a vision model is not trained: the tower, the tower and the projector (`vision`), or nothing."""


def kind(value: object) -> str:
    """Return the tag that selects the class of an engine's settings. It is `embedded` if no kind is set."""
    return engine_kind({"kind": "embedded", **value} if isinstance(value, dict) else value) or ""


def _trainable(value: Any) -> Any:
    if (value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)) == "litellm":
        raise ValueError(
            "a hosted model can't be trained: its answers come without token ids and log-probs, and its weights are "
            "not accessible. Record it with `tapereel run`, and imitate its tapes with a model of yours: warm.tapes=RUN"
        )
    return value


TrainedEngine = Annotated[
    Annotated[EmbeddedConfig, Tag("embedded")]
    | Annotated[ServerConfig, Tag("vllm")]
    | Annotated[ServerConfig, Tag("sglang")]
    | Annotated[CustomConfig, Tag("custom")],
    Discriminator(kind),
    BeforeValidator(_trainable),
]


class TrainerConfig(ComputeConfig):
    """Where and how a policy is trained. An embedded engine samples with a copy of the policy on the same device."""

    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads in the process, or None for torch's own number, which `OMP_NUM_THREADS` sets. If several
    policies or embedded engines set it, the largest number applies. With one thread, the speed doesn't drop while other
    work runs on the machine."""
    attention: Attention | None = None
    """The attention implementation for training. None lets transformers choose. Sampling uses `sdpa` or `eager`."""
    lora: AdapterConfig | None = None
    """Train these adapters instead of the model's own weights. With servers, `engine.weights` has them instead."""
    offload: bool = False
    """Whether the state of the optimiser is kept in main memory and copied to the device one weight at a time, for its
    step. This frees 8 bytes for each trained weight on the device, and the trained weights are the same."""
    freeze: Frozen | None = None
    """Which part of a vision model isn't trained: `tower` (the default), `vision` (tower, projector) or `nothing`."""


def adapters_of(engine: AnyEngineConfig, trainer: TrainerConfig) -> AdapterConfig | None:
    """The settings of the adapters that are trained: with servers those in `engine.weights`, otherwise `trainer.lora`.
    None if the model's own weights are trained."""
    if isinstance(engine, ServerConfig) and isinstance(engine.weights, Adapters):
        return engine.weights
    return trainer.lora


class PlayerConfig(PartnerConfig):
    """Another model that speaks in the episodes. It is frozen, or it learns with the settings in `loop`."""

    frozen: bool = False
    """If true, the player isn't trained, and its tokens are only context for other models. Any engine may be frozen."""
    optimiser: OptimiserConfig | None = None
    """Used in place of `loop.optimiser`. Unset fields come from the profile for the player's model."""
    trainer: TrainerConfig = TrainerConfig()
    """Where and how this player is trained."""

    @model_validator(mode="after")
    def _can_do_that(self) -> PlayerConfig:
        if self.frozen and self.optimiser is not None:
            raise ValueError("A frozen player can't have an optimiser: remove `optimiser` or set `frozen: false`.")
        if self.frozen and self.trainer != TrainerConfig():
            raise ValueError("A frozen player isn't trained: remove `trainer` or set `frozen: false`.")
        if not self.frozen and not isinstance(self.engine, TrainedConfig):
            raise ValueError(
                f"an engine of kind {self.engine.kind} has no weights that could be trained: set `frozen: true`, or "
                "choose a model folder (kind embedded)"
            )
        return self

    def loop_of(self, loop: LoopConfig) -> LoopConfig:
        """Return the loop's settings with the player's own optimiser."""
        return loop if self.optimiser is None else loop.model_copy(update={"optimiser": self.optimiser})


Players = Annotated[dict[PlayerName, PlayerConfig], *Partners.__metadata__]  # type: ignore[attr-defined]


def check_players_of(players: Mapping[str, PlayerConfig], loop: LoopConfig, *, warm: bool) -> None:
    """Raise ValueError if the players' settings contradict the loop's."""
    if not players:
        return
    if loop.agents is None:
        raise ValueError(
            "with players, loop.agents must name the agents of the model of `engine`: set loop.agents to their paths"
        )
    for name, player in players.items():
        both = sorted({*player.agents}.intersection(loop.agents))
        if both:
            raise ValueError(
                f"{both[0]!r} is in loop.agents, so that `engine` speaks for it, and also in players.{name}: an "
                "agent has one model, so remove it from one of them"
            )
    if warm and not all(player.frozen for player in players.values()):
        raise ValueError(
            "a warm start teaches the model of `engine` alone, and players that learn would have fewer updates: "
            "imitate first, in a run for each model (loop.agents: its agents, loop.updates: 0, the others frozen), "
            "and name the resulting models as engine.model and players.NAME.engine.model"
        )


def check_engine(
    engine: AnyEngineConfig,
    trainer: TrainerConfig,
    loop: LoopConfig,
    player: str = "",
    warm: WarmStartConfig | None = None,
) -> None:
    """Raise ValueError if the settings of a trained model contradict each other.

    `player` is the model's name in `players`, or empty for the run's own model. `warm` is the model's warm start.
    """
    above = f"players.{player}." if player else ""
    name, trains = f"{above}engine", f"{above}trainer"
    if isinstance(engine, EmbeddedConfig):
        for key in (*ComputeConfig.model_fields, "threads"):
            if (value := getattr(engine, key)) != EmbeddedConfig.model_fields[key].default:
                raise ValueError(
                    f"{name}.{key} is {trains}.{key} in training, since the engine samples with a copy of the "
                    f"trained model: set {trains}.{key}={value} and remove {name}.{key}"
                )
    if isinstance(engine, CustomConfig) and engine.model is None:
        raise ValueError(
            f"{name}.model is missing: training needs the folder of the model that the trainer holds, in Hugging Face "
            f"format. {name}.kind={engine.kind} receives its weights"
        )
    if trainer.dtype != "float32" and adapters_of(engine, trainer) is None:
        raise ValueError(
            f"{trains}.dtype={trainer.dtype} rounds most of an update's small steps away: leave the weights "
            f"in float32 and forward in it (loop.optimiser.autocast), or train adapters ("
            + (f"{name}.weights.kind=adapters)" if isinstance(engine, ServerConfig) else f"{trains}.lora)")
        )
    ways = {
        "loop.optimiser": loop.optimiser,
        "loop.critic.optimiser": loop.critic and loop.critic.optimiser,
        "warm.optimiser": warm and warm.optimiser,
    }
    wide = [way for way, one in ways.items() if one is not None and one.autocast is None]
    if (trainer.attention or "").startswith("flash") and wide and trainer.dtype == "float32":
        raise ValueError(
            f"{trains}.attention={trainer.attention} has no kernels for float32: set {wide[0]}.autocast=bfloat16"
        )
    way = engine.weights if isinstance(engine, ServerConfig) else None
    if way is not None and trainer.lora is not None:
        raise ValueError(
            f"{trains}.lora trains adapters in this process, and servers get theirs by {name}.weights: "
            + (
                f"set {trains}.lora=null"
                if engine.kind == "sglang"
                else f"set {name}.weights.kind=adapters {name}.weights.rank={trainer.lora.rank}, and remove "
                f"{trains}.lora"
            )
        )
    lora = adapters_of(engine, trainer)
    started = engine.options if isinstance(engine, ServerConfig) and not engine.urls else None
    if started is not None and lora is not None and lora.quantise and started.get("quantization") != "bitsandbytes":
        raise ValueError(
            f"{name}.weights.quantise={lora.quantise} trains adapters on weights of 4 bits, and the vLLM that the run "
            f"starts would sample with all bits: set {name}.options={{quantization: bitsandbytes}}"
        )
    if isinstance(way, Adapters) and loop.in_flight != "drain":
        raise ValueError(
            f"loop.in_flight={loop.in_flight} can't be done with {name}.weights.kind=adapters: a completion keeps the "
            f"adapters that it began with. Remove loop.in_flight, or set {name}.weights=reload"
        )
    if isinstance(engine, ServerConfig) and loop.sampling.barring:
        raise ValueError(
            f"loop.sampling.min_tokens={loop.sampling.min_tokens} can't be trained on with {name}: servers don't say "
            "which end tokens they leave out, so the trainer's log-probs would be of other distributions. Sample in "
            "this process (engine.kind=embedded), or remove it; `run` and `evaluation.sampling` take it"
        )
    if engine.kind == "sglang" and loop.in_flight == "drain":
        raise ValueError(
            f"loop.in_flight=drain: {name} is SGLang, which has no pause that lets requests end; set "
            "loop.in_flight=reprefill, by which requests continue with the new weights"
        )
    if loop.sleep and (way is None or isinstance(way, Adapters)) and not isinstance(engine, CustomConfig):
        what = (
            "an engine in this process, which shares the trainer's memory"
            if way is None
            else "servers that take adapters, which must be awake for that"
        )
        raise ValueError(
            f"`loop.sleep` needs servers that reload all weights, and {name} is {what}: remove `loop.sleep`"
        )
