"""Engines as a configuration describes them: one group of settings for each `kind`.

Torch is imported when an engine that needs it is made.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, Discriminator, Field, JsonValue, Tag, model_validator

from ...envs.load_named import load_named
from ...tapes.common.config import Config
from ...tapes.common.redact import holds_secret, names_secret
from ...tapes.errors import MissingExtra, UsageError
from ...tapes.records import Publish
from ..engines.embedded.pretrained import Dtype
from ..engines.engine import Engine, EngineError, Request, require
from ..engines.scripted import Policy, ScriptedEngine
from ..engines.weights.weight_config import AdapterConfig, NCCLConfig, PublishWay

if TYPE_CHECKING:
    from ..engines.servers.server_engine import RemoteEngine
    from ..rendering.renderer import Renderer


def _without_password(url: str) -> str:
    if holds_secret(url):
        raise ValueError(
            "an address with a user, a password or a key would be recorded with the run; name the "
            "environment variable that holds the key instead: key_variable"
        )
    return url


Address = Annotated[str, AfterValidator(_without_password)]
"""Where a server is, without what opens it."""


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
        from ..rendering.renderer import Renderer

        return Renderer(
            tokenizer,
            history=self.history,
            special_text=self.special_text,
            template_kwargs=self.template_kwargs,
            end_tokens=self.end_tokens,
        )


class ScriptedConfig(Config):
    """Written answers, without a model."""

    kind: Literal["scripted"] = "scripted"
    answers: tuple[str, ...] = ()
    """The k-th answer is returned for the k-th request of every conversation."""
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
    device: str | None = None
    """Where the model samples: `cpu`, `cuda`, `cuda:1` ...; None or `auto`: a GPU where torch finds one. In training,
    the engine samples where the trainer is, and `device`, `dtype` and `threads` stand under `trainer` alone."""
    dtype: Dtype | None = None
    """Of the weights of a model that only samples; None: float32."""
    threads: int | None = Field(default=None, ge=1)
    """Torch threads; None: 1, which keeps its speed while other work runs on the machine."""


class _Served(Config):
    """What serves one model and takes its weights in training."""

    model: str
    """A folder in Hugging Face format with the tokenizer and configuration of the model they serve."""
    renderer: RendererConfig = RendererConfig()
    publish: PublishWay = "reload"
    """How new weights get there: all servers `reload` a folder, or vLLM takes them by its weight-`transfer` routes from
    shared memory, or over `nccl`, or with `lora` as adapters (`trainer.lora`), each version under its own name."""
    weights_folder: str | None = None
    """Where new weights are written for them in training; a folder that they can read. None: a temporary one."""
    seconds: float = Field(default=600.0, gt=0)
    """Bound of one request."""
    patience: float = Field(default=300.0, gt=0)
    """So long, in seconds, is a server asked again that is paused or full."""
    control_seconds: float = Field(default=120.0, gt=0)
    """Bound of each step of publishing, as pausing a server or loading weights there."""
    slots: int = Field(default=64, ge=1)
    """Of the embedded engine that samples held-out tasks in training, with evaluation.engine=own."""
    capacity: int | None = Field(default=None, ge=2)
    """Of that engine, as in an embedded one."""


class VLLMConfig(_Served):
    """vLLM servers that serve one model. `tapereel serve model` starts one with the flags that they need."""

    kind: Literal["vllm"] = "vllm"
    urls: tuple[Address, ...] = Field(min_length=1)
    """Their addresses, as in `http://127.0.0.1:8000`."""
    key_variable: str | None = None
    """The environment variable with their API key."""
    nccl: NCCLConfig | None = None
    """Of `publish: nccl`; None: loopback and free ports."""

    @model_validator(mode="after")
    def _nccl_is_used(self) -> VLLMConfig:
        if self.nccl is None:
            return self
        if self.publish != "nccl":
            raise ValueError(
                f"nccl says where weights are broadcast from, but publish is {self.publish!r}: set "
                "publish=nccl, or leave nccl out"
            )
        if self.nccl.port is not None and self.nccl.port + len(self.urls) - 1 > 65535:
            raise ValueError(
                f"nccl.port={self.nccl.port}: {len(self.urls)} servers take as many ports from there on, "
                "and 65535 is the last"
            )
        return self


class SGLangConfig(_Served):
    """SGLang servers that serve one model. Not run against one so far."""

    kind: Literal["sglang"] = "sglang"
    urls: tuple[Address, ...] = Field(min_length=1)
    """Their addresses, as in `http://127.0.0.1:30000`."""
    key_variable: str | None = None
    """The environment variable with their API key."""

    @model_validator(mode="after")
    def _reloads(self) -> Self:
        if self.publish != "reload":
            raise ValueError(f"publish: {self.publish} is for vLLM; SGLang servers reload a folder: publish=reload")
        return self


class VLLMInProcessConfig(_Served):
    """vLLM inside this process."""

    kind: Literal["vllm_inprocess"] = "vllm_inprocess"
    options: dict[str, JsonValue] = Field(default={})
    """Arguments of vLLM's AsyncEngineArgs, as in `{"max_model_len": 8192, "gpu_memory_utilization": 0.5}`."""

    @model_validator(mode="after")
    def _no_keys(self) -> Self:
        _check_no_keys(self.options, "set the environment variable that vLLM reads instead, as HF_TOKEN")
        return self

    @model_validator(mode="after")
    def _sees_our_gpus(self) -> VLLMInProcessConfig:
        if self.publish == "nccl":
            raise ValueError(
                "publish: nccl is between a trainer and servers that have GPUs of their own; vLLM inside "
                "this process takes the GPUs that the trainer is on, and NCCL refuses two ranks on one: "
                "publish=transfer or reload"
            )
        return self


class LiteLLMConfig(Config):
    """A hosted model of any provider that litellm knows: texts, which can be imitated and not reinforced."""

    kind: Literal["litellm"] = "litellm"
    model: str
    """litellm's name for it, as in `openai/gpt-4o-mini` or `anthropic/claude-sonnet-4-5`."""
    base_url: Address | None = None
    """Where a server of one's own is; None: the provider's address."""
    key_variable: str | None = None
    """The environment variable with the API key; None: the provider's own, as `OPENAI_API_KEY`."""
    seconds: float = Field(default=120.0, gt=0)
    """Bound of one request."""
    retries: int = Field(default=5, ge=0)
    """How often one question is asked again that met a rate limit, a timeout or a failing server."""
    patience: float = Field(default=300.0, gt=0)
    """So long, in seconds, is one question asked again."""
    budget: float | None = Field(default=None, gt=0)
    """US dollars that this process may spend; requests under way when it is reached are still paid. None: no bound."""
    prices: tuple[float, float] | None = None
    """US dollars for a million prompt and completion tokens; None: as litellm knows them."""
    options: dict[str, JsonValue] = Field(default={})
    """Further arguments of litellm's `completion`, as in `{"reasoning_effort": "low"}`."""


class CustomConfig(Config):
    """An engine of your own: a class, or a function that makes an instance."""

    kind: str = Field(pattern=r"^[^:]+:[^:]+$")
    """`package.module:name` or `file.py:name`, called with `options` as keyword arguments."""
    options: dict[str, JsonValue] = Field(default={})
    """Arguments of the class or function. They are recorded with the run: keep keys in environment variables."""
    model: str | None = None
    """A folder in Hugging Face format: the model that the trainer holds. Required in training."""
    renderer: RendererConfig = RendererConfig()
    """Of the trainer and of an embedded engine with its weights; the engine brings its own renderer."""
    slots: int = Field(default=64, ge=1)
    """Of the embedded engine that samples held-out tasks in training, with evaluation.engine=own."""
    capacity: int | None = Field(default=None, ge=2)
    """Of that engine, as in an embedded one."""

    @model_validator(mode="after")
    def _no_keys(self) -> Self:
        _check_no_keys(self.options, "read them from an environment variable in the engine")
        return self

    def make(self, protocol: type = Engine, use: str = "This run") -> Engine:
        """A new engine. UsageError where `kind` names nothing that can be called with `options`, IncompleteEngine where
        the result lacks members of `protocol`, which `use` needs."""
        factory = load_named(self.kind)
        if not callable(factory):
            raise UsageError(
                f"engine.kind={self.kind} is an object of type {type(factory).__qualname__}: name a class, or a "
                "function that makes an engine"
            )
        try:
            inspect.signature(factory).bind(**self.options)
        except TypeError as error:
            raise UsageError(f"engine.options doesn't fit {self.kind}: {error}") from error
        except ValueError:
            pass  # a callable without a signature: the call itself tells
        engine = factory(**self.options)
        require(engine, protocol, f"{use} with engine.kind={self.kind}")
        return cast(Engine, engine)

    async def check(self, protocol: type = Engine, use: str = "This run") -> None:
        """Make an engine and close it: raises as `make` does, before anything is written."""
        await self.make(protocol, use).close()


def _check_no_keys(options: Mapping[str, JsonValue], instead: str) -> None:
    refused = sorted(name for name, value in options.items() if names_secret(name) and isinstance(value, str))
    if refused:
        raise ValueError(f"options {', '.join(refused)} would be recorded with the run; {instead}")


def engine_kind(settings: Any) -> str | None:
    """The tag in the union of engine settings: `custom` for `module:name`, else the kind itself."""
    kind = settings.get("kind") if isinstance(settings, dict) else getattr(settings, "kind", None)
    return "custom" if isinstance(kind, str) and ":" in kind else kind


ServedConfig = VLLMConfig | SGLangConfig | VLLMInProcessConfig
AnyEngineConfig = ScriptedConfig | EmbeddedConfig | ServedConfig | LiteLLMConfig | CustomConfig
EngineConfig = Annotated[
    Annotated[ScriptedConfig, Tag("scripted")]
    | Annotated[EmbeddedConfig, Tag("embedded")]
    | Annotated[VLLMConfig, Tag("vllm")]
    | Annotated[SGLangConfig, Tag("sglang")]
    | Annotated[VLLMInProcessConfig, Tag("vllm_inprocess")]
    | Annotated[LiteLLMConfig, Tag("litellm")]
    | Annotated[CustomConfig, Tag("custom")],
    Discriminator(engine_kind),
]


@dataclass(frozen=True)
class Made:
    """An engine, and the weights that it samples from."""

    engine: Engine
    publish: Publish | None
    """Version and digest of its weights; None where the engine has none, or where this process can't read them."""


async def make_engine(config: AnyEngineConfig) -> Made:
    """The engine that `config` describes. EngineError and NotTrainable of a server that can't be used."""
    if isinstance(config, ScriptedConfig):
        return Made(_scripted(config), None)
    if isinstance(config, EmbeddedConfig):
        return _embedded(config)
    if isinstance(config, LiteLLMConfig):
        return Made(_hosted(config), None)
    if isinstance(config, CustomConfig):
        return Made(config.make(), None)
    return Made(await connect_to(config), None)


async def connect_to(
    config: ServedConfig, *, weights: bool = False, adapters: AdapterConfig | None = None
) -> RemoteEngine:
    """An engine of the servers, or of vLLM in this process, which is started; with `weights`, it takes new ones.
    adapters: those that `publish: lora` sends."""
    from ..engines.embedded.pretrained import load_tokenizer
    from ..engines.servers.connect import connect, connect_channels

    folder, renderer = config.weights_folder, config.renderer.make(load_tokenizer(config.model))
    how: dict[str, Any] = {
        "model_folder": Path(config.model),
        "weights": weights,
        "patience": config.patience,
        "way": config.publish,
        "control_seconds": config.control_seconds,
        "weights_folder": Path(folder) if folder is not None else None,
        "adapters": adapters,
    }
    if not isinstance(config, VLLMInProcessConfig):
        nccl = config.nccl if isinstance(config, VLLMConfig) else None
        return await connect(
            config.urls, renderer, key_variable=config.key_variable, seconds=config.seconds, nccl=nccl, **how
        )
    from ..engines.servers.vllm_inprocess import InProcess

    rank = adapters.rank if adapters is not None else None
    channel = await InProcess.start(
        Path(config.model),
        transfer=config.publish == "transfer",
        lora_rank=rank,
        seconds=config.seconds,
        options=config.options,
    )
    return await connect_channels([channel], renderer, **how)


def _hosted(config: LiteLLMConfig) -> Engine:
    from ..engines.servers.litellm_engine import LiteLLMEngine

    settings = config.model_dump(exclude={"kind", "model"})
    try:
        return LiteLLMEngine(config.model, **settings)
    except ValueError as error:
        raise UsageError(f"engine: {error}") from error


def _scripted(config: ScriptedConfig) -> ScriptedEngine:
    renderer = None
    if config.tokenizer is not None:
        from ..engines.embedded.pretrained import load_tokenizer

        renderer = config.renderer.make(load_tokenizer(config.tokenizer))
    return ScriptedEngine(_policy(config), renderer=renderer)


def _policy(config: ScriptedConfig) -> Policy:
    if config.policy is not None:
        found = load_named(config.policy)
        if not callable(found):
            raise UsageError(
                f"{config.policy} is an object of type {type(found).__qualname__}, not a function from a "
                "Request to an answer"
            )
        return cast(Policy, found)
    answers = config.answers

    def in_turn(request: Request) -> str:
        k = sum(message["role"] == "assistant" for message in request.messages)
        if k >= len(answers):
            raise EngineError(f"the script has {len(answers)} answers, and one more was requested")
        return answers[k]

    return in_turn


def _embedded(config: EmbeddedConfig) -> Made:
    from ..engines.embedded.pretrained import load_pretrained, weights_digest

    try:
        import torch

        from ..engines.embedded.embedded_engine import EmbeddedEngine
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "torch", "train", "the embedded engine") from error
    torch.set_num_threads(config.threads or 1)
    found = load_pretrained(config.model, device=config.device or "auto", dtype=config.dtype or "float32")
    digest = weights_digest(found.model.state_dict())
    # The weights name themselves: the same model has one version wherever it is run.
    version = f"{digest[:12]}:0"
    engine = EmbeddedEngine(
        found.model,
        config.renderer.make(found.tokenizer),
        version=version,
        slots=config.slots,
        capacity=config.capacity,
        copy=False,
    )
    return Made(engine, Publish(version=version, digest=digest, mode="start", at=time.time()))
