"""Engine settings, one class per `kind`, and the functions that create engines from them.

Torch is imported only when an engine needs it.
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
"""The address of a server, without user, password or key."""


class RendererConfig(Config):
    """Settings of the renderer, which turns conversations into tokens."""

    history: Literal["sampled", "template"] = "sampled"
    """`sampled`: a prompt keeps the exact token ids that the model sampled. `template`: the chat template renders each
    prompt anew."""
    special_text: Literal["split", "refuse"] = "split"
    """Control-token text in content. `split`: it becomes ordinary tokens. `refuse`: it ends the episode."""
    template_kwargs: dict[str, JsonValue] = Field(default={})
    """Arguments of the chat template, such as `{"enable_thinking": False}`."""
    end_tokens: tuple[str, ...] = ()
    """Tokens that end an answer, in addition to those of the template."""

    def make(self, tokenizer: Any) -> Renderer:
        """Create the renderer for `tokenizer`. Raises RenderError if the tokenizer has no chat template."""
        from ..rendering.renderer import Renderer

        return Renderer(
            tokenizer,
            history=self.history,
            special_text=self.special_text,
            template_kwargs=self.template_kwargs,
            end_tokens=self.end_tokens,
        )


class ScriptedConfig(Config):
    """Settings of an engine that returns written answers, without a model."""

    kind: Literal["scripted"] = "scripted"
    answers: tuple[str, ...] = ()
    """The engine returns the k-th answer for the k-th request of every conversation."""
    policy: str | None = None
    """`module:name` of a function from a Request to the answer; it replaces `answers`."""
    tokenizer: str | None = None
    """A folder with a tokenizer. The answers are then recorded as tokens too."""
    renderer: RendererConfig = RendererConfig()

    @model_validator(mode="after")
    def _one_source(self) -> ScriptedConfig:
        if bool(self.answers) == (self.policy is not None):
            raise ValueError("a scripted engine has `answers` or a `policy`, one of them")
        return self


class EmbeddedConfig(Config):
    """Settings of an engine that samples a transformers model inside this process."""

    kind: Literal["embedded"] = "embedded"
    model: str
    """A folder in Hugging Face format: model and tokenizer, with a chat template."""
    renderer: RendererConfig = RendererConfig()
    slots: int = Field(default=64, ge=1)
    """Maximum number of concurrent completions; further requests wait."""
    capacity: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and completion together. None: the model's limit, at most 4,096."""
    device: str | None = None
    """The device: `cpu`, `cuda`, `cuda:1` ...; None or `auto`: a GPU if torch finds one. In training, the engine uses
    the trainer's device, and only `trainer` has the settings `device`, `dtype` and `threads`."""
    dtype: Dtype | None = None
    """The dtype of the weights of a model that only samples. None: float32."""
    threads: int | None = Field(default=None, ge=1)
    """Number of torch threads. None: 1; one thread keeps its speed while other processes use the machine."""


class _Served(Config):
    """Shared settings of engines that serve one model and accept weight syncs in training."""

    model: str
    """A folder in Hugging Face format with the tokenizer and configuration of the served model."""
    renderer: RendererConfig = RendererConfig()
    publish: PublishWay = "reload"
    """How a weight sync reaches the servers. `reload`: all servers reload a folder. `transfer`: vLLM's weight-transfer
    routes read shared memory. `nccl`: a broadcast. `lora`: adapters (`trainer.lora`), each version under its own
    name."""
    weights_folder: str | None = None
    """The folder for new weights in training, which the servers can read. None: a temporary folder."""
    seconds: float = Field(default=600.0, gt=0)
    """Time limit of one request, in seconds."""
    patience: float = Field(default=300.0, gt=0)
    """Time limit, in seconds, for the retries of a request to a paused or full server."""
    control_seconds: float = Field(default=120.0, gt=0)
    """Time limit, in seconds, of each step of a weight sync, such as a pause or a load. No step is retried."""
    slots: int = Field(default=64, ge=1)
    """Slots of the embedded engine that samples held-out tasks in training, with evaluation.engine=own."""
    capacity: int | None = Field(default=None, ge=2)
    """Capacity of that engine, as in `EmbeddedConfig`."""


class VLLMConfig(_Served):
    """vLLM servers that serve one model. `tapereel serve model` starts a server with the required flags."""

    kind: Literal["vllm"] = "vllm"
    urls: tuple[Address, ...] = Field(min_length=1)
    """Addresses of the servers, such as `http://127.0.0.1:8000`."""
    key_variable: str | None = None
    """The environment variable with the API key of the servers."""
    nccl: NCCLConfig | None = None
    """Address and port for `publish: nccl`. None: loopback and free ports."""

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
    """SGLang servers that serve one model. No test has run against a real SGLang server yet."""

    kind: Literal["sglang"] = "sglang"
    urls: tuple[Address, ...] = Field(min_length=1)
    """Addresses of the servers, such as `http://127.0.0.1:30000`."""
    key_variable: str | None = None
    """The environment variable with the API key of the servers."""

    @model_validator(mode="after")
    def _reloads(self) -> Self:
        if self.publish != "reload":
            raise ValueError(f"publish: {self.publish} is for vLLM; SGLang servers reload a folder: publish=reload")
        return self


class VLLMInProcessConfig(_Served):
    """vLLM inside this process."""

    kind: Literal["vllm_inprocess"] = "vllm_inprocess"
    options: dict[str, JsonValue] = Field(default={})
    """Arguments of vLLM's AsyncEngineArgs, such as `{"max_model_len": 8192, "gpu_memory_utilization": 0.5}`."""

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
    """A hosted model of any provider that litellm supports. Its answers are text without log-probs: they suit
    imitation (SFT) and not reinforcement learning."""

    kind: Literal["litellm"] = "litellm"
    model: str
    """litellm's name of the model, such as `openai/gpt-4o-mini` or `anthropic/claude-sonnet-4-5`."""
    base_url: Address | None = None
    """Address of a self-hosted server. None: the provider's address."""
    key_variable: str | None = None
    """The environment variable with the API key. None: the provider's variable, such as `OPENAI_API_KEY`."""
    seconds: float = Field(default=120.0, gt=0)
    """Time limit of one request, in seconds."""
    retries: int = Field(default=5, ge=0)
    """Maximum retries of one request after a rate limit, a timeout or a server error."""
    patience: float = Field(default=300.0, gt=0)
    """Time limit, in seconds, for the retries of one request."""
    budget: float | None = Field(default=None, gt=0)
    """Spending limit of this process in US dollars. Requests in flight at the limit are still paid. None: no limit."""
    prices: tuple[float, float] | None = None
    """US dollars per million prompt tokens and per million completion tokens. None: litellm's prices."""
    options: dict[str, JsonValue] = Field(default={})
    """Further arguments of litellm's `completion`, such as `{"reasoning_effort": "low"}`."""


class CustomConfig(Config):
    """A user-defined engine: a class, or a function that creates an instance."""

    kind: str = Field(pattern=r"^[^:]+:[^:]+$")
    """`package.module:name` or `file.py:name`, called with `options` as keyword arguments."""
    options: dict[str, JsonValue] = Field(default={})
    """Arguments of the class or function. The run records them: keep API keys in environment variables."""
    model: str | None = None
    """A folder in Hugging Face format with the trainer's model. Required in training."""
    renderer: RendererConfig = RendererConfig()
    """Renderer of the trainer and of an embedded engine with its weights. The custom engine has its own renderer."""
    slots: int = Field(default=64, ge=1)
    """Slots of the embedded engine that samples held-out tasks in training, with evaluation.engine=own."""
    capacity: int | None = Field(default=None, ge=2)
    """Capacity of that engine, as in `EmbeddedConfig`."""

    @model_validator(mode="after")
    def _no_keys(self) -> Self:
        _check_no_keys(self.options, "read them from an environment variable in the engine")
        return self

    def make(self, protocol: type = Engine, use: str = "This run") -> Engine:
        """Create an engine.

        Raises UsageError if `kind` names no callable that accepts `options`, IncompleteEngine if the result lacks
        members of `protocol`, which `use` needs."""
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
            pass  # a callable without a signature: the call below checks the arguments
        engine = factory(**self.options)
        require(engine, protocol, f"{use} with engine.kind={self.kind}")
        return cast(Engine, engine)

    async def check(self, protocol: type = Engine, use: str = "This run") -> None:
        """Create an engine and close it. Raises as `make` does, before the run writes any file."""
        await self.make(protocol, use).close()


def _check_no_keys(options: Mapping[str, JsonValue], instead: str) -> None:
    refused = sorted(name for name, value in options.items() if names_secret(name) and isinstance(value, str))
    if refused:
        raise ValueError(f"options {', '.join(refused)} would be recorded with the run; {instead}")


def engine_kind(settings: Any) -> str | None:
    """The tag in the union of engine settings: `custom` for `module:name`, else `kind`."""
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
    """An engine and the identity of its weights."""

    engine: Engine
    publish: Publish | None
    """Version and digest of the weights. None: the engine has no weights, or this process can't read them."""


async def make_engine(config: AnyEngineConfig) -> Made:
    """Create the engine that `config` describes. Raises EngineError or NotTrainable for an unusable server."""
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
    """Connect to the servers, or start vLLM in this process. With `weights`, the engine accepts weight syncs.

    `adapters`: the LoRA settings for `publish: lora`."""
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
        # The conversation gives the index, not a counter: concurrent episodes share this function.
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
    # The version comes from the digest of the weights: the same model has the same version in every run.
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
