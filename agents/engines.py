"""Engines as a configuration describes them: one group of settings for each `kind`.

Torch is imported when an engine that needs it is made.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, JsonValue, model_validator

from ..envs.named import load_named
from ..tapes.config import Config
from ..tapes.console import UsageError
from ..tapes.errors import MissingExtra
from ..tapes.records import Publish
from .engine import Engine, EngineError, Request
from .scripted import Policy, ScriptedEngine

if TYPE_CHECKING:
    from .remote import RemoteEngine
    from .render import Renderer


class RendererConfig(Config):
    """How conversations become tokens."""

    history: Literal["sampled", "template"] = "sampled"
    """What the model sampled stays as it is, or every prompt is what the chat template says."""
    special_text: Literal["split", "refuse"] = "split"
    """Text of control tokens in content is broken up, or ends the episode."""
    template_kwargs: dict[str, JsonValue] = Field(default={})
    """Handed to the chat template, as in `{"enable_thinking": False}`."""
    end_tokens: tuple[str, ...] = ()
    """Tokens that end an answer, beside the template's own."""

    def make(self, tokenizer: Any) -> Renderer:
        """The renderer for that tokenizer. RenderError where it has no chat template."""
        from .render import Renderer

        return Renderer(tokenizer, history=self.history, special_text=self.special_text,
                        template_kwargs=self.template_kwargs, end_tokens=self.end_tokens)  # fmt: skip


class ScriptedConfig(Config):
    """Answers that somebody wrote."""

    kind: Literal["scripted"] = "scripted"
    answers: tuple[str, ...] = ()
    """The k-th answer is given at the k-th question of every conversation."""
    policy: str | None = None
    """In place of answers: `module:name` of a function from a Request to the answer."""
    tokenizer: str | None = None
    """A folder with a tokenizer, so that the answers are recorded as tokens too."""
    renderer: RendererConfig = RendererConfig()

    @model_validator(mode="after")
    def _one_source(self) -> ScriptedConfig:
        if bool(self.answers) == (self.policy is not None):
            raise ValueError("a scripted engine has `answers` or a `policy`, one of them")
        return self


class EmbeddedConfig(Config):
    """A transformers model, sampled inside this process."""

    kind: Literal["embedded"] = "embedded"
    model: str
    """A folder in Hugging Face format: model and tokenizer, with a chat template."""
    renderer: RendererConfig = RendererConfig()
    slots: int = Field(default=64, ge=1)
    """Completions that are sampled at once; the rest waits."""
    capacity: int | None = Field(default=None, ge=2)
    """Tokens of prompt and completion together; None: what the model allows, at most 4,096."""
    threads: int = Field(default=1, ge=1)
    """Torch threads. One is steady when anything else runs beside."""


class VLLMConfig(Config):
    """vLLM servers that serve one model. `tapereel serve` starts one with the flags that they need."""

    kind: Literal["vllm"] = "vllm"
    model: str
    """A folder in Hugging Face format with the tokenizer and configuration of the model they serve."""
    urls: tuple[str, ...] = Field(min_length=1)
    """Their addresses, as in `http://127.0.0.1:8000`."""
    renderer: RendererConfig = RendererConfig()
    key_variable: str | None = None
    """The environment variable with their API key."""
    weights_folder: str | None = None
    """Where new weights are written for them in training; a folder that they can read. None: a temporary one."""
    seconds: float = Field(default=600.0, gt=0)
    """Bound of one request."""
    patience: float = Field(default=300.0, gt=0)
    """So long, in seconds, is a server asked again that is paused or full."""
    slots: int = Field(default=64, ge=1)
    """Of the embedded engine that evaluates in training, while the servers have the loop's weights."""
    capacity: int | None = Field(default=None, ge=2)
    """Of that engine, as in an embedded one."""
    threads: int = Field(default=1, ge=1)
    """Torch threads of the trainer."""


EngineConfig = Annotated[ScriptedConfig | EmbeddedConfig | VLLMConfig, Field(discriminator="kind")]


@dataclass(frozen=True)
class Made:
    """An engine, and the weights that it samples from."""

    engine: Engine
    publish: Publish | None
    """Version and digest of its weights; None for an engine without any, or whose weights nobody here has seen."""


async def make_engine(config: ScriptedConfig | EmbeddedConfig | VLLMConfig) -> Made:
    """The engine that `config` describes. EngineError and NotTrainable of a server that can't be used."""
    if isinstance(config, ScriptedConfig):
        return Made(_scripted(config), None)
    if isinstance(config, EmbeddedConfig):
        return _embedded(config)
    return Made(await connect_to(config), None)


async def connect_to(config: VLLMConfig, *, weights: bool = False) -> RemoteEngine:
    """An engine of the servers; with `weights`, new ones can be published to them."""
    from .connect import connect
    from .pretrained import load_tokenizer

    folder = config.weights_folder
    return await connect(
        config.urls, config.renderer.make(load_tokenizer(config.model)), model_folder=Path(config.model),
        weights=weights, weights_folder=Path(folder) if folder is not None else None,
        key_variable=config.key_variable, seconds=config.seconds, patience=config.patience,
    )  # fmt: skip


def _scripted(config: ScriptedConfig) -> ScriptedEngine:
    renderer = None
    if config.tokenizer is not None:
        from .pretrained import load_tokenizer

        renderer = config.renderer.make(load_tokenizer(config.tokenizer))
    return ScriptedEngine(_policy(config), renderer=renderer)


def _policy(config: ScriptedConfig) -> Policy:
    if config.policy is not None:
        found = load_named(config.policy)
        if not callable(found):
            raise UsageError(f"{config.policy} is an object of type {type(found).__qualname__}, not a function from a "
                             "Request to an answer")  # fmt: skip
        return cast(Policy, found)
    answers = config.answers

    def in_turn(request: Request) -> str:
        k = sum(message["role"] == "assistant" for message in request.messages)
        if k >= len(answers):
            raise EngineError(f"the script has {len(answers)} answers, and one more was asked for")
        return answers[k]

    return in_turn


def _embedded(config: EmbeddedConfig) -> Made:
    from .pretrained import load_pretrained, weights_digest

    try:
        import torch

        from .embedded import EmbeddedEngine
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "torch", "train", "the embedded engine") from error
    torch.set_num_threads(config.threads)
    found = load_pretrained(config.model)
    digest = weights_digest(found.model.state_dict())
    # The weights name themselves: the same model has one version wherever it is run.
    version = f"{digest[:12]}:0"
    engine = EmbeddedEngine(found.model, config.renderer.make(found.tokenizer), version=version, slots=config.slots,
                            capacity=config.capacity, copy=False)  # fmt: skip
    return Made(engine, Publish(version=version, digest=digest, mode="start", at=time.time()))
