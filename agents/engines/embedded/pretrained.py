"""Loads a model and its tokenizer from a directory in Hugging Face format, and selects the device.

A name that isn't a directory is looked up on the hub (`tapes/common/hub.py`). No code in a model's files is ever run.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ....tapes.common.hub import NotFound, local_folder, model_folder
from ....tapes.errors import MissingExtra, UsageError, remedy
from ....tapes.store.store import check_folder

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

    from ...vision.vision import VideoTokens, Vision

Attention = Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]
"""The attention implementation of a transformers model. The flash kinds need a GPU and an extra package."""


Dtype = Literal["float32", "bfloat16"]
"""The dtype of a model's weights."""
ADAPTERS = "adapter_config.json"
"""Name of the file in which peft stores the settings of adapters, including the name of their base model."""


DIGEST_BYTES = 32
"""Length of a SHA-256 digest."""


ModelT = TypeVar("ModelT", bound="torch.nn.Module")


# bitsandbytes, which peft imports if it is installed, asks users of some CPUs for a kernel that isn't used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
LOADING: dict[str, bool] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments for transformers' `from_pretrained`. If `trust_remote_code` were missing, transformers would ask on the
terminal whether it may run the code that a model folder names."""


@dataclass(frozen=True)
class Pretrained:
    """A causal language model, with or without trained adapters (peft), its tokenizer, and its vision support."""

    model: PreTrainedModel
    """A transformers model, or a peft model with the same interface."""
    tokenizer: PreTrainedTokenizerFast
    vision: Vision | None = None
    """How the model reads pictures, or None for a text model."""
    ends: tuple[str, ...] = ()
    """The tokens that end an answer, as the model's `generation_config.json` lists them."""
    weights: Mapping[str, Tensor] | None = None
    """The weights of an empty model. None if the model has its weights."""


def load_pretrained(
    folder: str | Path,
    *,
    device: str = "cpu",
    dtype: Dtype = "float32",
    attention: Attention | None = None,
    video: VideoTokens = "frames",
    empty: bool = False,
    quantise: bool = False,
) -> Pretrained:
    """Load the model and tokenizer in `folder` to `device`, with weights in `dtype`.

    `folder` may also be a name on the hub. See `device_of` for the names of devices. Adapters stay in float32. If
    `attention` is None, transformers selects the implementation. With `empty`, the parameters of a text model take no
    memory until `fill` reads them, if the folder allows it (see `_empty`): they are on the meta device. With
    `quantise`, the language model's linear layers get weights of 4 bits (see `_in_4_bits`), made on the device.

    Raises UsageError if the folder or device is missing, if the folder has no usable model, or if the model reads more
    than text and its family is unknown or fails `prove_vision`. Raises Corrupt like `check_folder`, and MissingExtra if
    native video is used without torchvision, or `quantise` without bitsandbytes."""
    from ...vision.families import family_of, prove_vision

    if quantise:
        try:
            import bitsandbytes  # noqa: F401
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "bitsandbytes", "qlora", remedy("quantise", "quantise")) from error
    folder = model_folder(folder)
    check_folder(folder)
    tokenizer = load_tokenizer(folder)
    where = device_of(device)
    base = _base_of(Path(folder))
    model, weights = _loaded(
        Path(folder if base is None else base),
        dtype,
        attention,
        video,
        empty=empty and base is None,
        quantised=where if quantise else None,
    )
    family = family_of(model.config, folder)
    vision = None if family is None else family(model.config, tokenizer, folder, video)
    if base is not None:
        model = _adapted(model, folder)
    model = model.eval() if weights is not None else placed(model.eval(), where)
    if vision is not None:
        import torch

        # By default, cuDNN rounds inputs of float32 convolutions to 10 bits (TF32). A picture's features would then
        # depend on the other pictures in its batch, and log-probs in a replay would be off by up to 5e-4 nats.
        torch.backends.cudnn.allow_tf32 = False
        prove_vision(model, vision)
    return Pretrained(model, tokenizer, vision, end_tokens(folder, tokenizer), weights)


def _loaded(
    folder: Path,
    dtype: Dtype,
    attention: Attention | None,
    video: VideoTokens,
    *,
    empty: bool,
    quantised: torch.device | None,
) -> tuple[Any, Mapping[str, Tensor] | None]:
    """Return the model in `folder`, and the weights that it lacks or None. If it is to be quantised, that is done on
    the device `quantised`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from ...vision.families import UnsupportedVision, family_of

    with quiet_transformers():
        try:
            config = AutoConfig.from_pretrained(str(folder), **LOADING)
            # The family decides, because AutoModelForCausalLM loads many vision models without their tower, and raises
            # no error.
            sees = family_of(config, folder, video) is not None
            auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
            if empty and not sees and (found := _empty(folder, config, dtype, attention)) is not None:
                return found
            loaded: Any = auto.from_pretrained(
                str(folder),
                **LOADING,
                dtype=getattr(torch, dtype),
                attn_implementation=attention,
                output_loading_info=True,
                **({} if quantised is None else _in_4_bits(auto, config, folder, dtype, quantised)),
            )
        except (UnsupportedVision, MissingExtra, UsageError):
            raise
        except Exception as error:  # transformers raises many types for a broken folder
            raise UsageError(
                f"the model in {folder} can't be loaded: {type(error).__name__}: {_line(error)}"
            ) from error
    model, report = loaded
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "support_avx512bf16_for_cpu")}
    for module in layers.values():
        # On some CPUs, bitsandbytes rounds inputs to bfloat16 if no gradient is needed. The sampler would then differ
        # from the trainer.
        module.support_avx512bf16_for_cpu = False
    _check_4_bits(layers, folder)
    missing = sorted(report["missing_keys"])
    if missing:
        raise UsageError(
            f"the model in {folder} lacks {len(missing)} weights ({', '.join(missing[:3])} ...): they would "
            "be random; save it with model.save_pretrained"
        )
    return model, None


def _in_4_bits(auto: Any, config: Any, folder: Path, dtype: Dtype, device: torch.device) -> dict[str, Any]:
    """Return the arguments by which transformers loads a model with weights of 4 bits (NF4 with doubly quantised
    scales, as in QLoRA, https://arxiv.org/abs/2305.14314). All linear layers of the language model have them, and
    neither the output layer nor a vision tower.

    Raises UsageError if most of the language model's weights aren't in linear layers, as in some mixtures of experts.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import BitsAndBytesConfig

    with init_empty_weights():
        made = auto.from_config(config, trust_remote_code=False)
    inside, linear = set(made.get_decoder().modules()), torch.nn.Linear
    layers = sum(
        p.numel() for m in inside if not isinstance(m, torch.nn.Embedding) for p in m.parameters(recurse=False)
    )
    if 2 * sum(m.weight.numel() for m in inside if isinstance(m, linear)) < layers:
        raise UsageError(
            f"{remedy('quantise', 'quantise')}: most weights of the model in {folder} aren't in linear layers, so "
            f"they would stay in {dtype}: remove it"
        )
    return {
        "device_map": {"": device},
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=getattr(torch, dtype),
            llm_int8_skip_modules=[n for n, m in made.named_modules() if isinstance(m, linear) and m not in inside],
        ),
    }


def _check_4_bits(layers: Mapping[str, Any], folder: Path) -> None:
    """Raise UsageError if bitsandbytes doesn't read back weights that it stored in 4 bits, as for some widths on a CPU.
    One layer of each shape is compared with the product of its codes and scales."""
    weights = {name: layer.weight for name, layer in layers.items() if layer.weight.device.type == "cpu"}
    if not weights:
        return
    import bitsandbytes
    import torch
    from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise

    shapes = {weight.quant_state.shape: name for name, weight in reversed(weights.items())}
    for name in reversed(shapes.values()):
        data, state = weights[name].data.view(torch.uint8).flatten(), weights[name].quant_state
        read = dequantize_4bit(weights[name].data, state).float()
        codes = torch.stack([data >> 4, data & 15], 1).flatten()[: read.numel()].int()
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
        stored = (state.code[codes] * scales.repeat_interleave(state.blocksize)[: read.numel()]).view_as(read)
        error = float((read - stored).norm() / stored.norm())
        if not error < 0.01:  # rounding to bfloat16 gives 0.002
            raise UsageError(
                f"bitsandbytes {bitsandbytes.__version__} reads back wrong weights of 4 bits for {name} of the model "
                f"in {folder}, which has {read.shape[1]} inputs: they are off by {error:.0%}. On a CPU, it does so for "
                "some widths that aren't a multiple of 64. Use a GPU, another model, or no 4 bits (remove "
                f"{remedy('quantise', 'quantise')})"
            )


def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the model in place. Raises UsageError if they have other names, or if a 4-bit weight was made
    of another weight or in another way than the model's."""
    import torch

    own = model.state_dict()
    # A part of a quantised weight's state isn't in a tensor, so it can only be compared.
    wrong = own.keys() ^ weights.keys() or {
        name
        for name, tensor in own.items()
        if tensor.shape != weights[name].shape
        or (".quant_state." in name and not torch.equal(tensor.cpu(), weights[name].cpu()))
    }
    if wrong:
        raise UsageError(f"the weights don't fit the model: {min(wrong)} is missing or differs")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])


def _empty(
    folder: Path, config: Any, dtype: Dtype, attention: Attention | None
) -> tuple[Any, Mapping[str, Tensor]] | None:
    """Return the model with parameters on the meta device, and its weights, which are read from their files on access.

    Return None if the files don't have the model's weights under the model's own names, as for some mixtures of
    experts, or if some weights have another dtype than the model. Such models need transformers' own loading.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM, GenerationConfig

    weights = StoredWeights(folder)
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention, trust_remote_code=False
        )
    model.tie_weights()
    names: dict[Any, set[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, set()).add(name)
    mixed = model._keep_in_fp32_modules_strict and dtype != "float32"
    if mixed or not all(own & weights.keys() for own in names.values()):
        return None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in weights:
                buffer.copy_(weights[name])
    return model, weights


class StoredWeights(Mapping[str, "Tensor"]):
    """The weights in the safetensors files of a model folder, by name. Each is read when it is accessed, and nothing is
    kept."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._files: dict[str, Path] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            with safe_open(path, "pt") as file:
                self._files.update(dict.fromkeys(file.keys(), path))

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._files[name], "pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def emptied(model: ModelT) -> ModelT:
    """Return a copy of the model that has no weights: its parameters are on the meta device and take no memory. Buffers
    are copied."""
    import torch

    # `deepcopy` uses what it finds in this dictionary instead of copying a parameter.
    memo: dict[int, Any] = {
        id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def fill(
    model: torch.nn.Module, weights: Mapping[str, Tensor], device: torch.device, part: torch.nn.Module | None = None
) -> None:
    """Replace the parameters of an empty model with `weights` on `device`, in the parameters' dtypes. Tied weights stay
    tied. With `part`, fill only this submodule."""
    import torch

    names: dict[Any, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    made: dict[Any, Any] = {}
    for module in (model if part is None else part).modules():
        for key, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if p.is_meta:
                if p not in made:
                    value = weights[next(name for name in names[p] if name in weights)]
                    made[p] = torch.nn.Parameter(value.detach().to(device, p.dtype), p.requires_grad)
                module.register_parameter(key, made[p])


def _base_of(folder: Path) -> str | None:
    """Return the folder of the base model if `folder` holds adapters, or None if it holds a whole model."""
    about = folder / ADAPTERS
    if not about.is_file():
        return None
    try:
        base = json.loads(about.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{about} doesn't say which model its adapters are for: {type(error).__name__}: {error}"
        ) from error
    try:
        return str(model_folder(str(base)))
    except NotFound as error:
        raise UsageError(
            f"the adapters in {folder} are for the model {base!r}, which isn't here: bring it there, or name its place "
            f"as base_model_name_or_path in {about} ({error})"
        ) from error


def _adapted(model: Any, folder: str | Path) -> Any:
    """Return the model with the adapters in `folder`. They stay separate from the weights, as in training."""
    try:
        from peft import PeftModel
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "peft", "lora", f"the adapters in {folder}") from error
    try:
        return PeftModel.from_pretrained(model, str(folder), local_files_only=True)
    except Exception as error:  # peft raises many types for a broken folder
        raise UsageError(f"the adapters in {folder} can't be loaded: {type(error).__name__}: {_line(error)}") from error


def device_of(name: str) -> torch.device:
    """Return the device with this name, such as `cpu`, `cuda` or `cuda:1`. `auto` means the GPU if torch finds one, and
    otherwise the CPU. Raises UsageError if torch can't use the device."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        # Allocating a tensor resolves `cuda` to an index, and fails now if torch can't use the device.
        found = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(
            f"device {name!r} can't be computed on here (torch {torch.__version__}: {_line(error)}); take "
            "another one, or `auto`"
        ) from error
    if found.type == "meta":
        raise UsageError("device 'meta' computes nothing; take `cpu`, `cuda` or `auto`")
    return found


def placed(model: ModelT, device: torch.device) -> ModelT:
    """Move the model to `device` and tie its tied weights again."""
    model = model.to(device)
    base: Any = getattr(model, "get_base_model", lambda: model)()
    base.tie_weights()
    return model


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer in `folder`, which may also be a name on the hub.

    Raises UsageError if the folder or model doesn't exist, or its tokenizer can't be used."""
    folder = model_folder(folder)
    odd = next((path for path in sorted(folder.iterdir()) if not (path.is_file() or path.is_dir())), None)
    if odd is not None:
        raise UsageError(f"{odd} isn't a file that can be read: a pipe, a device, a socket, or a link to nothing")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra(error.name or "transformers", "train", f"the model in {folder}") from error
    try:
        return AutoTokenizer.from_pretrained(str(folder), **LOADING)
    except Exception as error:  # transformers raises many types for a broken folder
        raise UsageError(
            f"the tokenizer in {folder} can't be loaded: {type(error).__name__}: {_line(error)}"
        ) from error


def end_tokens(folder: str | Path, tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """Return the tokens that end an answer of the model in `folder`, as its `generation_config.json` lists them. Models
    such as GLM end an answer with tokens that neither the tokenizer nor the chat template names."""
    folder = model_folder(folder)
    about = Path(_base_of(folder) or folder) / "generation_config.json"
    ids = json.loads(about.read_bytes()).get("eos_token_id") if about.is_file() else None
    added = tokenizer.added_tokens_decoder
    return tuple(
        added[id].content for id in (ids if isinstance(ids, list) else [ids]) if id in added and added[id].special
    )


def vocabulary_of(folder: str | Path) -> int | None:
    """Return the number of token ids that the model in `folder` has, which may be more than its tokenizer's. None if
    the folder has only a tokenizer, or isn't on this machine."""
    found = local_folder(folder)
    about = None if found is None else Path(_base_of(found) or found) / "config.json"
    if about is None or not about.is_file():
        return None
    config = json.loads(about.read_bytes())
    size = ((config.get("text_config") or {}) | config).get("vocab_size")
    return size if isinstance(size, int) else None


def load_pictures(
    folder: str | Path, tokenizer: PreTrainedTokenizerFast, video: VideoTokens = "frames"
) -> Vision | None:
    """Return how the model in `folder` reads pictures, without loading its weights. Returns None for a text model, for
    a family that isn't in `FAMILIES`, and for a folder that has only a tokenizer. Raises UnsupportedVision and
    MissingExtra like `load_pretrained`."""
    from ...vision.families import FAMILIES

    folder = model_folder(folder)
    about = Path(_base_of(folder) or folder) / "config.json"
    if not about.is_file() or json.loads(about.read_bytes()).get("model_type") not in FAMILIES:
        return None
    config = read_config(folder)
    return FAMILIES[config.model_type](config, tokenizer, folder, video)


def read_config(folder: str | Path) -> PreTrainedConfig:
    """Return the configuration of the model in `folder`, or of the base model of the adapters there. `folder` may also
    be a name on the hub. Raises UsageError if transformers can't read it."""
    from transformers import AutoConfig

    folder = model_folder(folder)
    try:
        return AutoConfig.from_pretrained(_base_of(Path(folder)) or str(folder), **LOADING)
    except (OSError, ValueError) as error:
        raise UsageError(f"the configuration of the model in {folder} can't be read: {_line(error)}") from error


def piece_digests(tensor: Tensor) -> bytes:
    """Return the SHA-256 of each piece of a tensor, joined. The pieces are its rows along dimension 0, so that each
    process can hash the rows that it holds. A tensor with short rows is a single piece (`in_rows`)."""
    data, row = _bytes(tensor), _row_bytes(tensor)
    if not in_rows(tensor):
        return hashlib.sha256(data).digest()
    return b"".join([hashlib.sha256(data[at : at + row]).digest() for at in range(0, len(data), row)])


def in_rows(tensor: Tensor) -> bool:
    """Return whether each row is a piece. It isn't if it is shorter than its digest, as the numbers of a vector."""
    return _row_bytes(tensor) >= DIGEST_BYTES


def weights_digest(
    state: Mapping[str, Tensor],
    recorded: str | None = None,
    *,
    pieces: Callable[[Tensor], bytes] = piece_digests,
    whole: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> str:
    """Return the digest (hex) of all weights: the SHA-256 over `name|` and the digest of each tensor, in the order of
    the names.

    The digest of a tensor is the SHA-256 over `dtype|shape|` and its `piece_digests`. A tied weight is included once
    for each of its names. If the names have the same tensor object (`keep_vars`), it is hashed once.

    `recorded` is the digest that a run recorded. An earlier version may have recorded the `earlier_digest`. If it did,
    and the weights have it, it is returned. For sharded weights, `pieces` and `whole` gather a tensor's digests, and
    the tensor itself (`shared_digest`).
    """
    found = _root(state, pieces)
    if recorded in (None, found):
        return found
    return recorded if recorded == earlier_digest(state, whole) else found


def _root(state: Mapping[str, Tensor], pieces: Callable[[Tensor], bytes]) -> str:
    from torch.utils.weak import WeakTensorKeyDictionary

    # The weights are sorted by name, because the order of a state dict depends on how the model was built.
    root, known = hashlib.sha256(), WeakTensorKeyDictionary()
    for name in sorted(state):
        tensor = state[name]
        if tensor not in known:
            known[tensor] = hashlib.sha256(_about(tensor) + pieces(tensor)).digest()
        root.update(f"{name}|".encode() + known[tensor])
    return root.hexdigest()


def earlier_digest(state: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> str:
    """Return the digest that earlier versions recorded: one SHA-256 over the names, dtypes, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        digest.update(f"{name}|".encode() + _about(tensor))
        digest.update(_bytes(whole(tensor)))
    return digest.hexdigest()


def _about(tensor: Tensor) -> bytes:
    return f"{tensor.dtype}|{tuple(tensor.shape)}|".encode()


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable the progress bar that transformers shows for each file."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]} ..."
