"""Engine settings, one class per `kind`, and the functions that create engines from them.

Torch is imported only when an engine needs it.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, cast

from pydantic import BaseModel, Discriminator, Field, JsonValue, Tag, field_validator, model_validator

from ...envs.load_named import load_function
from ...tapes.common.config import Config, Keys, translation
from ...tapes.common.config_yaml import Group
from ...tapes.common.hub import NotFound, model_folder, pinned_name
from ...tapes.common.plain_json import read_plain
from ...tapes.common.redact import names_secret
from ...tapes.errors import MissingExtra, UsageError
from ...tapes.records import Publish, Sampling
from ..engines.embedded.pretrained import Dtype
from ..engines.engine import Capability, Engine, require
from ..engines.scripted import Policy, ScriptedEngine
from ..engines.servers.server_config import (
    Adapters,
    Address,
    Broadcast,
    Reload,
    RequestConfig,
    ServerSettings,
    Transfer,
    addresses,
)
from ..vision.vision import VideoTokens

if TYPE_CHECKING:
    from torch import Tensor

    from ..engines.servers.server_engine import RemoteEngine
    from ..rendering.codec import ChatTokenizer
    from ..rendering.renderer import Renderer
    from ..vision.vision import PictureTokens

log = logging.getLogger(__name__)
ConfigT = TypeVar("ConfigT", bound=BaseModel)


class RendererConfig(Config):
    """Settings of the renderer, which turns conversations into tokens."""

    history: Literal["sampled", "template"] = "sampled"
    """`sampled`: a prompt keeps the exact token ids that the model sampled. `template`: the chat template renders each
    prompt again from its messages."""
    special_text: Literal["split", "refuse"] = "split"
    """What happens if a message contains the text of a control token, such as `<|im_end|>`. `split`: the text becomes
    ordinary tokens. `refuse`: the text ends the episode."""
    template_kwargs: dict[str, JsonValue] = Field(default={})
    """Arguments for the chat template, such as `{"enable_thinking": False}`."""
    end_tokens: tuple[str, ...] = ()
    """Tokens that end an answer, in addition to those of the template and of the model's `generation_config.json`."""
    response_template: dict[str, JsonValue] | None = None
    """How the model writes thoughts and tool calls: a `response_template` of transformers, or the path of a JSON file
    that holds one. None takes the tokenizer's own, or a known one that fits the chat template. The run records the
    template itself."""
    video: VideoTokens = "frames"
    """How the model reads a video. `frames`: each frame is a picture, preceded by its time as text. `native`: the video
    becomes the video tokens of Qwen2.5-VL or Qwen3-VL. This needs an embedded engine and the extra `video`."""

    @field_validator("response_template", mode="before")
    @classmethod
    def _read_file(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return read_plain(Path(value).read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(f"{value!r} isn't a JSON file with a response template: {error}") from error

    def make(
        self, tokenizer: ChatTokenizer, pictures: PictureTokens | None = None, ends: Sequence[str] = ()
    ) -> Renderer:
        """Create the renderer for `tokenizer`. If the model sees pictures, `pictures` makes their tokens. `ends` are
        the model's own end tokens (`Pretrained.ends`).

        Raises UsageError if the tokenizer has no chat template.
        """
        from ..rendering.renderer import Renderer

        return Renderer(
            tokenizer,
            pictures,
            history=self.history,
            special_text=self.special_text,
            template_kwargs=self.template_kwargs,
            end_tokens=(*self.end_tokens, *ends),
            response_template=self.response_template,
        )

    def load(self, folder: str | Path) -> Renderer:
        """Create the renderer for the model in `folder`, which may hold only the tokenizer."""
        from ..engines.embedded.pretrained import end_tokens, load_pictures, load_tokenizer

        tokenizer = load_tokenizer(folder)
        return self.make(tokenizer, load_pictures(folder, tokenizer, self.video), end_tokens(folder, tokenizer))


class ComputeConfig(Config):
    """Where and how a model is computed in this process."""

    device: str = "auto"
    """The device, such as `cpu`, `cuda` or `cuda:1`. `auto` is a GPU if torch finds one."""
    dtype: Dtype = "float32"
    """The dtype of the model's weights. In training, `bfloat16` is allowed only if just adapters are trained."""


class OptionsConfig(Config):
    """An engine that takes further arguments, which Tapereel passes on unchanged."""

    options: dict[str, JsonValue] = Field(default={})
    """Further arguments. `vllm`: flags for a server that the run starts, such as `{"max_model_len": 8192}`. `litellm`:
    arguments for `litellm.completion`, such as `{"reasoning_effort": "low"}`. `module:name`: arguments for the class or
    function. The run records them, so keep API keys in environment variables."""

    @model_validator(mode="after")
    def _no_keys(self) -> Self:
        refused = sorted(name for name, value in self.options.items() if names_secret(name) and isinstance(value, str))
        if refused:
            raise ValueError(
                f"options {', '.join(refused)} would be recorded with the run; the engine reads them from an "
                "environment variable: the one in key_variable, the library's own, such as HF_TOKEN, or one of yours"
            )
        return self


class RenderedConfig(Config):
    """An engine whose requests are rendered to tokens in this process."""

    renderer: RendererConfig = RendererConfig()
    """How the engine and the trainer render conversations. An engine of kind `module:name` has its own renderer."""


class SlotsConfig(RenderedConfig):
    """An engine whose model can be trained. In training, a second engine may sample with a copy of the weights."""

    slots: int = Field(default=64, ge=1)
    """Maximum number of concurrent completions in an embedded engine. Further requests wait. With another kind of
    engine, this is used only by an embedded engine of an evaluation's own."""
    capacity: int | None = Field(default=None, ge=2)
    """Maximum length of a prompt and its completion together, in tokens, in the embedded engine. None means the
    model's limit, but at most 4,096."""


class ScriptedConfig(RenderedConfig):
    """Settings of an engine that returns written answers, without a model."""

    kind: Literal["scripted"] = "scripted"
    answers: tuple[str, ...] = ()
    """In every episode, the engine answers the k-th request with the k-th answer."""
    policy: str | None = None
    """`module:name` of a function from a Request to the answer. It replaces `answers`."""
    tokenizer: str | None = None
    """A folder with a tokenizer, or its name on the hub. If it is set, the answers are recorded as tokens too."""

    @model_validator(mode="after")
    def _one_source(self) -> ScriptedConfig:
        if bool(self.answers) == (self.policy is not None):
            raise ValueError(
                f"a scripted engine has {len(self.answers)} answers and the policy {self.policy!r}: set either "
                "`answers` or `policy`"
            )
        return self


class EmbeddedConfig(SlotsConfig, ComputeConfig):
    """Settings of an engine that samples a transformers model inside this process.

    In training, the engine uses the trainer's device, and `device`, `dtype` and `threads` are set only in `trainer`.
    """

    kind: Literal["embedded"] = "embedded"
    threads: int = Field(default=1, ge=1)
    """Number of torch threads in the process. If several policies or embedded engines set it, the largest number
    applies. With one thread, the speed doesn't drop while other work runs on the machine."""
    model: str
    """A folder in Hugging Face format (model and tokenizer, with a chat template), a GGUF file, or a model on the
    Hugging Face hub as `org/name` or `org/name@revision`. If a folder of that name exists, the folder is used.

    A GGUF file needs the extra `gguf`. It is dequantised once into `$XDG_CACHE_HOME/tapereel/gguf`, rounded to
    bfloat16, and the run records its SHA-256."""


class ServerConfig(SlotsConfig, OptionsConfig, ServerSettings):
    """vLLM or SGLang servers that serve one model.

    The servers need certain flags. If `urls` is empty, the run starts vLLM itself. No
    test has run SGLang on a GPU yet.
    """

    kind: Literal["vllm", "sglang"] = "vllm"

    @model_validator(mode="after")
    def _fits_the_servers(self) -> ServerConfig:
        if self.kind == "sglang" and (not isinstance(self.weights, Reload) or not self.urls):
            raise ValueError(
                "urls is empty: name the addresses of the SGLang servers, since a run starts vLLM only"
                if isinstance(self.weights, Reload)
                else f"weights={self.weights.kind} is for vLLM, and SGLang servers reload a folder: set weights=reload"
            )
        if self.renderer.video == "native":
            raise ValueError(
                f"renderer.video=native is for an embedded engine, and {self.kind} reads videos as their frames: "
                "set renderer.video=frames"
            )
        if self.urls and self.options:
            raise ValueError(
                "options are flags of a vLLM server that the run starts, and urls names servers that run already: "
                "leave one of the two out"
            )
        if not self.urls and isinstance(self.weights, Broadcast):
            raise ValueError(
                "weights=broadcast needs servers with GPUs of their own. A server that the run starts shares the "
                "trainer's GPUs, and NCCL refuses two ranks on one GPU: set weights=transfer or weights=reload"
            )
        if not self.urls and self.key_variable is not None:
            raise ValueError(
                "key_variable is for the servers in urls, and urls is empty: name the servers, or leave key_variable "
                "out"
            )
        return self


class LiteLLMConfig(RequestConfig, OptionsConfig):
    """A hosted model from any provider that litellm supports.

    Its answers are text without log-probs. They are suitable for imitation (SFT) but not for reinforcement learning.
    """

    kind: Literal["litellm"] = "litellm"
    model: str
    """litellm's name for the model, such as `openai/gpt-4o-mini` or `anthropic/claude-sonnet-4-5`."""
    base_url: Address | None = None
    """Address of a self-hosted server. None means the provider's address."""
    seconds: float = Field(default=120.0, gt=0)
    """Time limit of one request, in seconds."""
    retries: int = Field(default=5, ge=0)
    """Maximum retries of one request after a rate limit, a timeout or a server error."""
    budget: float | None = Field(default=None, gt=0)
    """Spending limit of this process in US dollars, or None. Requests in flight at the limit still cost money."""
    prices: tuple[float, float] | None = None
    """US dollars per million prompt tokens and per million completion tokens. None means litellm's prices."""

    def cost(self, turns: int | None, tokens: int) -> str:
        """Describe the maximum cost of an episode. Each answer has `tokens` tokens, and all later turns read it."""
        if self.prices is None or turns is None:
            return f"dollars for {self.model}: unknown without {'a limit of turns' if self.prices else 'engine.prices'}"
        prompt, completion = (price / 1e6 for price in self.prices)
        most, each = turns * tokens * (completion + prompt * (turns - 1) / 2), turns * 1000 * prompt
        answers = f"{turns} answers of {tokens} tokens, and {each:.4f} for every 1,000 tokens of its prompt"
        return f"dollars for {self.model}, at most: {most:.4f} for an episode of {answers}"


class CustomConfig(SlotsConfig, OptionsConfig):
    """A user-defined engine: a class, or a function that creates an instance."""

    kind: str = Field(pattern=r"^[^:]+:[^:]+$")
    """The class or function, as `package.module:name` or `file.py:name`. It gets `options` as keyword arguments."""
    model: str | None = None
    """The trainer's model, which is a folder or a model on the hub, as for an embedded engine. It is required in
    training."""

    def make(self, needs: Iterable[Capability] = (), use: str = "This run") -> Engine:
        """Create an engine.

        Raises UsageError if `kind` names no callable that accepts `options`, or if the result isn't an Engine with the
        capabilities in `needs`. `use` names what needs them, for the error message.
        """
        factory = load_function(self.kind, "a class or a function that makes an engine (engine.kind)")
        try:
            inspect.signature(factory).bind(**self.options)
        except TypeError as error:
            raise UsageError(f"engine.options doesn't fit {self.kind}: {error}") from error
        except ValueError:
            pass  # a callable without a signature: the call below checks the arguments
        engine = factory(**self.options)
        require(engine, needs, f"{use} with engine.kind={self.kind}")
        return cast(Engine, engine)

    async def check(self, needs: Iterable[Capability] = (), use: str = "This run") -> None:
        """Create an engine and close it. Raises the same errors as `make`, before the run writes any file."""
        await self.make(needs, use).close()


def engine_kind(settings: object) -> str | None:
    """Return the tag of these settings in `EngineConfig`: `custom` if `kind` is `module:name`, otherwise `kind`."""
    kind = settings.get("kind") if isinstance(settings, dict) else getattr(settings, "kind", None)
    return "custom" if isinstance(kind, str) and ":" in kind else kind


_WAYS = {"reload": "reload", "transfer": "transfer", "nccl": "broadcast", "lora": "adapters"}
"""Values of the earlier setting `publish`, and the kinds of `weights` that they are now."""


@translation
def _weights_of_servers(settings: Group, keys: Keys, value: Any) -> tuple[Keys, Any] | None:
    """Before `weights`, three settings chose how servers receive new weights: the engine's `publish` and `nccl`, and
    the trainer's `lora`."""

    def at(path: Keys) -> Group:
        group: Any = settings
        for key in path:
            group = group.get(key) if isinstance(group, dict) else None
        return group if isinstance(group, dict) else {}

    above, name = keys[:-1], keys[-1]
    if name == "publish" and "urls" in at(above):
        return (*above, "weights", "kind"), _WAYS.get(value, value)
    if name == "nccl" and value is None and "publish" in at(above):
        return None
    if above[-1:] == ("nccl",) and "publish" in at(above[:-1]):
        return (*above[:-1], "weights", name), value
    if above[-2:] == ("trainer", "lora") and at((*above[:-2], "engine")).get("publish") == "lora":
        return (*above[:-2], "engine", "weights", name), value
    return keys, value


AnyEngineConfig = ScriptedConfig | EmbeddedConfig | ServerConfig | LiteLLMConfig | CustomConfig
EngineConfig = Annotated[
    Annotated[ScriptedConfig, Tag("scripted")]
    | Annotated[EmbeddedConfig, Tag("embedded")]
    | Annotated[ServerConfig, Tag("vllm")]
    | Annotated[ServerConfig, Tag("sglang")]
    | Annotated[LiteLLMConfig, Tag("litellm")]
    | Annotated[CustomConfig, Tag("custom")],
    Discriminator(engine_kind),
]


HOSTED = "litellm:"
"""Prefix of litellm's name for a hosted model, where a model is named. Any other name is a folder or on the hub."""


def model_settings(model: str) -> list[tuple[str, str]]:
    """Return the settings of the engine for a model that is named by one string."""
    kind, name = ("litellm", model.removeprefix(HOSTED)) if model.startswith(HOSTED) else ("embedded", model)
    return [("engine.kind", kind), ("engine.model", name)]


def check_models(engines: Iterable[AnyEngineConfig]) -> None:
    """Find the models and tokenizers of these engines, and download the ones that are only on the hub.

    This is called before torch is imported, so that a wrong name fails at once. Raises UsageError if a name matches no
    model, or if the file in `urls` can't be used. Raises MissingExtra if native video is set and torchvision is
    missing.
    """
    for engine in engines:
        name = engine.tokenizer if isinstance(engine, ScriptedConfig) else engine.model
        if name is not None and not isinstance(engine, LiteLLMConfig):
            try:
                model_folder(name)
            except NotFound as error:
                hosted = isinstance(engine, EmbeddedConfig) and name[0] not in "./~"
                raise NotFound(f"{error}. A hosted model is named {HOSTED}{name}" if hosted else str(error)) from error
        if isinstance(engine, ServerConfig):
            addresses(engine.urls)
        if isinstance(engine, RenderedConfig) and engine.renderer.video == "native":
            from ..vision.video import need_torchvision

            need_torchvision()


def pinned(config: ConfigT) -> ConfigT:
    """Return a run's configuration with each GGUF file that an engine names pinned to its content (`pinned_name`)."""
    whole: Any = config
    players = {name: player.model_copy(update=_pin(player)) for name, player in whole.players.items()}
    return config.model_copy(update=_pin(whole) | ({"players": players} if players else {}))


def _pin(policy: Any) -> dict[str, AnyEngineConfig]:
    engine: AnyEngineConfig = policy.engine
    if isinstance(engine, ScriptedConfig | LiteLLMConfig) or engine.model is None:
        return {}
    return {"engine": engine.model_copy(update={"model": pinned_name(engine.model)})}


@dataclass(frozen=True)
class LoadedEngine:
    """An engine and the identity of its weights."""

    engine: Engine
    publish: Publish | None
    """Version and digest of the weights, or None if the engine has no weights or this process can't read them."""
    weights: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """The weights that `publish` names."""


def warn_of_faults(renderer: Renderer | None, sampling: Sampling | None = None, *, tools: bool = False) -> None:
    """Log a warning for each fault that would spoil rollouts with this renderer (`Renderer.faults`) and these sampling
    settings, before the first episode. `tools` is true if it is known that tools are offered."""
    if renderer is not None:
        renderer.offered |= tools
        for fault in renderer.faults(tools=tools):
            log.warning("%s", fault)
    if sampling is not None and not sampling.exact:
        log.warning("these rollouts can't be used for RL: %s", sampling.inexact)


async def make_engine(config: AnyEngineConfig) -> LoadedEngine:
    """Create the engine that `config` describes. Raises EngineError for an unusable server."""
    if isinstance(config, ScriptedConfig):
        renderer = None if config.tokenizer is None else config.renderer.load(config.tokenizer)
        return LoadedEngine(ScriptedEngine(_script(config), renderer=renderer), None)
    if isinstance(config, EmbeddedConfig):
        return _embedded(config)
    if isinstance(config, LiteLLMConfig):
        from ..engines.servers.litellm_engine import LiteLLMEngine

        try:
            return LoadedEngine(LiteLLMEngine(config.model, **config.model_dump(exclude={"kind", "model"})), None)
        except ValueError as error:
            raise UsageError(f"engine: {error}") from error
    if isinstance(config, CustomConfig):
        return LoadedEngine(config.make(), None)
    return LoadedEngine(await connect_to(config), None)


async def connect_to(config: ServerConfig, *, weights: bool = False) -> RemoteEngine:
    """Connect to the servers, or start vLLM on this machine. With `weights`, the engine accepts weight syncs.

    Raises EngineError if vLLM doesn't start.
    """
    from ..engines.servers.connect import connect
    from ..engines.servers.launch import LocalServer, OwnServer, flags_of

    renderer = config.renderer.load(config.model)
    if config.urls:
        return await connect(config, renderer, weights=weights)
    way = config.weights if weights else None
    try:
        local = LocalServer(
            model_folder(config.model),
            control=weights,
            transfer=isinstance(way, Transfer),
            lora_rank=way.rank if isinstance(way, Adapters) else None,
            options=flags_of(config.options),
        )
    except ValueError as error:
        raise UsageError(f"engine: {error}") from error
    await local.start()
    own = OwnServer(local, seconds=config.seconds)
    return await connect(config, renderer, weights=weights, servers=[own])


def _script(config: ScriptedConfig) -> Sequence[str] | Policy:
    if config.policy is None:
        return config.answers
    return cast(Policy, load_function(config.policy, "a function from a Request to an answer"))


def _embedded(config: EmbeddedConfig) -> LoadedEngine:
    from ..engines.embedded.pretrained import load_pretrained, weights_digest

    try:
        import torch

        from ..engines.embedded.embedded_engine import EmbeddedEngine
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "torch", "train", "the embedded engine") from error
    torch.set_num_threads(config.threads)
    found = load_pretrained(config.model, device=config.device, dtype=config.dtype, video=config.renderer.video)
    weights = found.model.state_dict(keep_vars=True)
    digest = weights_digest(weights)
    # The version comes from the digest of the weights, so that the same model has the same version in every run.
    version = f"{digest[:12]}:0"
    engine = EmbeddedEngine(
        found.model,
        config.renderer.make(found.tokenizer, found.vision, found.ends),
        version=version,
        slots=config.slots,
        capacity=config.capacity,
        copy=False,
    )
    return LoadedEngine(engine, Publish(version=version, digest=digest, mode="start", at=time.time()), weights)
