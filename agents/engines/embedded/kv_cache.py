"""A transformers decoder over a fixed table of KV slots.

One tensor of shape (2 * layers, slots, heads, capacity + 1, head size) holds the keys and values of all slots. A
forward uses views of a contiguous range of slots, so it needs no gather. The same method, `extend`, serves for prefill,
for reuse of a prefix, and for decoding. New tokens are right-aligned. The last token of every row is therefore in the
last column, and the model computes logits for this column only. KV of padding is written to the extra position at the
end of each slot. The mask hides this position from every query.

The cache supports full-attention decoders that give the same results with and without a cache. The constructor tests
this.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from ....tapes.errors import TapereelError, UsageError
from ...vision.vision import Pixels, Vision, body_inputs


class UnsupportedModel(TapereelError, ValueError):
    """The slot cache can't reproduce the model's attention or inputs exactly."""


def refuse_unfit(model: PreTrainedModel, vision: Vision | None = None) -> None:
    """Raise `UnsupportedModel` with the reason if the configuration alone shows that the model is unsupported."""
    config = model.config if vision is None else model.config.get_text_config()
    name = type(model).__name__

    def refuse(reason: str) -> None:
        raise UnsupportedModel(
            f"{name}: {reason}. The embedded engine runs full-attention decoders of text "
            "(Llama, Qwen2, Qwen3 and their like) and of known vision models; serve this model with vLLM instead"
        )

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder")
    towers = [key for key in ("vision_config", "audio_config") if getattr(config, key, None) is not None]
    if towers or config.get_text_config() is not config:
        refuse(f"it takes more than text ({', '.join(towers) or 'a nested text configuration'})")
    if getattr(model, "_is_stateful", False):
        refuse("its layers carry a recurrent state")
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention"}:
        refuse(f"it has layers of the kinds {sorted(kinds)}, hybrid caches are not proven")
    if not kinds and getattr(config, "sliding_window", None) is not None:
        refuse(f"it attends through a sliding window of {config.sliding_window} tokens")
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("sdpa", "eager"):
        refuse(f"attention implementation {implementation!r} ignores 4-D masks, load it with 'sdpa' or 'eager'")
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    scaling = {part.get("rope_type") for part in (rope, *rope.values()) if isinstance(part, dict)}
    if scaling & {"dynamic", "longrope"}:
        refuse("its rotary frequencies depend on the longest sequence of a batch, so cached keys go stale")


class _SlotCache(Cache):
    """The cache object that transformers' attention layers use. `aim` sets where they write and what they read."""

    def __init__(self, kv: Tensor) -> None:
        super().__init__(layers=[])
        self.kv = kv

    def aim(self, first: int, write: Tensor, attended: int) -> None:
        """Select the slots from `first` on.

        `write`, of shape (rows, columns), holds the position that each new token is written to. Reads return the first
        `attended` positions."""
        self._view = slice(first, first + write.shape[0])
        self._rows = torch.arange(first, first + write.shape[0], device=write.device)[:, None]
        self._write = write
        self._attended = attended

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store this layer's new keys and values. Returns its keys and values at all attended positions."""
        keys, values = self.kv[2 * layer_idx], self.kv[2 * layer_idx + 1]
        # All padding in a row is written to one position. Its content is undefined on a GPU, but no query reads it.
        # With autocast, the new keys have a wider dtype than the cache. Attention would round them to the cache's dtype
        # in any case.
        keys[self._rows, :, self._write] = key_states.transpose(1, 2).to(keys.dtype)
        values[self._rows, :, self._write] = value_states.transpose(1, 2).to(values.dtype)
        return keys[self._view, :, : self._attended], values[self._view, :, : self._attended]


class Seen(NamedTuple):
    """The inputs of a vision model in addition to token ids."""

    rotary: NDArray[np.int64] | None = None
    """Rotary positions of shape (axes, rows, columns), or None if a token's position is its index."""
    where: NDArray[np.int64] | None = None
    """For each token, an index into `features`, or -1 for a token without a feature. The shape is (rows, columns), and
    `features` has shape (N, levels, D). None if the tokens contain no picture."""
    features: Tensor | None = None


NOTHING = Seen()


class SlotDecoder:
    """The model, its weights, and the KV of `slots` sequences with at most `capacity` tokens each."""

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        capacity: int,
        vision: Vision | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Take ownership of `model`. It is set to evaluation mode, and `load` overwrites its weights.

        `autocast` is the dtype in which the model's body computes, as in a trainer with the same setting. The output
        layer computes in the dtype of its weights. Raises UnsupportedModel."""
        refuse_unfit(model, vision)
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if slots < 1 or capacity < 2 or (longest is not None and capacity > longest):
            raise UsageError(
                f"slots={slots}, capacity={capacity}: there must be at least one slot of two tokens, and "
                f"the model has positions for {longest}"
            )
        self.model: Any = model.eval().requires_grad_(False)
        self.slots = slots
        self.capacity = capacity
        self._embed: Any = model.get_input_embeddings()
        self.vocabulary: int = self._embed.weight.shape[0]
        self.device: torch.device = model.device
        self.vision = vision
        self._autocast = autocast
        self._body: Any = None
        """The module for the hidden states. `_head` then computes logits from them. If `_body` is None, the model's
        forward does both."""
        self._head: Any = None
        if autocast is not None or vision is not None:
            base: Any = getattr(model, "get_base_model", lambda: model)()
            self._body, self._head = base.get_decoder(), base.get_output_embeddings()
        dtype = autocast or model.dtype
        self._lowest = torch.finfo(dtype).min
        if autocast is not None:
            # Autocast would round these weights again in every forward. Rounding them here once gives the same results.
            for module in self._body.modules():
                if isinstance(module, torch.nn.Linear):
                    module.to(autocast)
        try:
            layers, heads, size = self._geometry()
            # The memory must be zeros, because attention multiplies the value of a masked key by 0, and 0 * NaN is NaN.
            self._cache = _SlotCache(_zeros((2 * layers, slots, heads, capacity + 1, size), dtype, self.device))
            self._prove()
        except (TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UnsupportedModel):
                raise
            raise UnsupportedModel(
                f"{type(model).__name__}: a forward with a 4-D mask and a slot cache raises "
                f"{type(error).__name__}: {error}; serve this model with vLLM instead"
            ) from error

    def extend(
        self,
        first: int,
        ids: NDArray[np.int64],
        have: NDArray[np.int64],
        new: NDArray[np.int64],
        seen: Seen = NOTHING,
        at: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> Tensor:
        """Feed tokens to the slots `first, first + 1, ...`.

        `ids` has shape (rows, columns). Row i holds `new[i]` tokens, right-aligned. Before the call, `have[i]` tokens
        in the row's slot have KV. Afterwards, `have[i] + new[i]` tokens have KV, and the caller must store this number.
        `at` is a pair of index arrays (rows, columns) into `ids`. By default, it selects the last token of each row.
        Returns float32 logits (n, vocabulary) after the tokens at `at`.
        """
        columns = ids.shape[1]
        position = (have + new - columns)[:, None] + np.arange(columns)
        # Padding tokens come before the row's new tokens. Their KV goes to the extra position `capacity`, which no
        # query attends to. They get position 0, so that their queries have a valid key. Their outputs are not used.
        padding = position < have[:, None]
        write = np.where(padding, self.capacity, position)
        position[padding] = 0
        with torch.inference_mode():
            inputs = self._aimed(first, position, write, int((have + new).max())) | self._inputs(ids, seen)
            if at is None:
                return self._logits(1, **inputs)[:, -1]
            kept, column = np.unique(at[1], return_inverse=True)
            return self._logits(self._there(kept), **inputs)[at[0], column]

    def _inputs(self, ids: NDArray[np.int64], seen: Seen) -> dict[str, Any]:
        where, rotary = (None if one is None else self._there(one) for one in (seen.where, seen.rotary))
        return body_inputs(self._embed, self._there(ids), where, seen.features, rotary)

    def _there(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _aimed(
        self, first: int, position: NDArray[np.int64], write: NDArray[np.int64], attended: int
    ) -> dict[str, Any]:
        at = self._there(position)
        mask = torch.zeros(*position.shape, attended, dtype=self._cache.kv.dtype, device=self.device)
        # A row's causal mask also hides what earlier sequences left in the slot, from position `have + new` on. Masked
        # values are the lowest finite number, because a row of only -inf would give NaN.
        mask.masked_fill_(torch.arange(attended, device=self.device) > at[..., None], self._lowest)
        self._cache.aim(first, self._there(write), attended)
        return {"position_ids": at, "attention_mask": mask[:, None], "past_key_values": self._cache, "use_cache": True}

    @torch.inference_mode()
    def features(self, pixels: Sequence[Pixels]) -> Tensor:
        """Return the features of pictures, as `Vision.features` does, with the same weights and dtype as sampled
        tokens."""
        assert self.vision is not None
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            return self.vision.features(self.model, pixels)

    def _logits(self, keep: int | Tensor, **inputs: Any) -> Tensor:
        """Return float32 logits (rows, columns, vocabulary) for the columns in `keep`. An integer means the last `keep`
        columns, and 0 means all columns."""
        if self._body is None:
            return self.model(**inputs, logits_to_keep=keep).logits.float()
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None):
            hidden = self._body(**inputs).last_hidden_state
        hidden = hidden[:, -keep:] if isinstance(keep, int) else hidden[:, keep]
        return self._head(hidden.to(self._head.weight.dtype)).float()

    @torch.inference_mode()
    def score(self, ids: Sequence[int], seen: Seen = NOTHING) -> Tensor:
        """Return float32 log-probs (n - 1,) for `ids[1:]`. They come from a plain forward without cached KV."""
        at = torch.tensor(list(ids), device=self.device)
        logits = self._logits(0, **self._inputs(np.array([ids], int), seen), use_cache=False)[0, :-1]
        return logits.gather(1, at[1:, None])[:, 0] - logits.logsumexp(-1)

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the KV of the first `length` tokens from one slot to another."""
        self._cache.kv[:, target, :, :length] = self._cache.kv[:, source, :, :length]

    def park(self, slot: int, length: int) -> Tensor:
        """Return a copy of the KV of a slot's first `length` tokens. The copy survives the reuse of the slot."""
        return self._cache.kv[:, slot, :, :length].clone()

    def restore(self, slot: int, parked: Tensor, length: int) -> None:
        """Copy KV for the first `length` tokens from a parked copy into a slot."""
        self._cache.kv[:, slot, :, :length] = parked[:, :, :length]

    def wipe(self, slot: int) -> None:
        """Zero a slot that may hold NaN or infinity, including its padding position."""
        self._cache.kv[:, slot] = 0

    def release(self) -> None:
        """Free the KV and the weights. The object can't be used afterwards."""
        self._cache.kv = self._cache.kv.new_empty(0)
        # The engine may be part of a cycle of references, which Python collects much later.
        self.model = self._embed = self._body = self._head = None

    def check(self, state: Mapping[str, Tensor]) -> None:
        """Raise `UsageError` if `load` would refuse `state`."""
        own: dict[str, Tensor] = self.model.state_dict()
        extra = sorted(state.keys() - own.keys())
        if extra:
            raise UsageError(f"published weights have names that the model lacks: {_some(extra)}")
        # Tied weights share storage, so `state` needs only one of their names. If it has several, their values must be
        # equal, because otherwise the order of the copies in `load` would decide which value the model gets.
        given: dict[int, str] = {}
        for name, value in state.items():
            if value.shape != own[name].shape:
                raise UsageError(
                    f"{name}: published shape {tuple(value.shape)}, the model has {tuple(own[name].shape)}"
                )
            twin = given.setdefault(own[name].data_ptr(), name)
            if twin != name and not torch.equal(state[twin], value):
                raise UsageError(f"{twin} and {name} are tied in this model, but were published with two values")
        missing = [name for name, value in own.items() if value.data_ptr() not in given]
        if missing:
            raise UsageError(f"published weights lack {_some(missing)}; publish the whole state dict")

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy `state` into the model's weights. Raises UsageError, and copies nothing, if `state` doesn't fit the
        model.

        The slots still hold KV from the old weights, which the caller must drop or recompute."""
        self.check(state)
        own: dict[str, Tensor] = self.model.state_dict()
        # The tensors in `own` share storage with the parameters, so copying in place changes the model and keeps tied
        # weights tied.
        for name, value in state.items():
            own[name].copy_(value)

    @torch.inference_mode()
    def _geometry(self) -> tuple[int, int, int]:
        """Return (layers, key-value heads, head size), read from the tensors that the attention layers pass to a
        cache."""
        probe = DynamicCache()
        self._logits(1, input_ids=self._there(np.zeros((1, 1), dtype=np.int64)), past_key_values=probe, use_cache=True)
        shapes = {(one.keys.shape, one.values.shape) for one in probe.layers}  # type: ignore[union-attr]
        keys, values = shapes.pop()
        if shapes or keys != values:
            raise UnsupportedModel(
                f"{type(self.model).__name__}: its layers cache keys and values of different shapes ({keys}, {values} "
                f"{shapes or ''}); serve this model with vLLM instead"
            )
        return len(probe.layers), keys[1], keys[3]

    def _prove(self) -> None:
        """Raise UnsupportedModel if prefill or decoding gives other logits than the plain forward. All slots are zeroed
        afterwards."""
        n = min(7, self.capacity)
        rows = min(2, self.slots)
        ids = (np.arange(1, n + 1) * 7919 % self.vocabulary)[None].repeat(rows, 0)
        have = np.array([n - 1, (n + 1) // 2])[:rows]
        prompt, one = np.zeros((rows, int(have.max())), dtype=np.int64), np.ones(rows, dtype=np.int64)
        whole = begun = then = NOTHING
        axes = None if self.vision is None else self.vision.positions((), n)
        if self.vision is not None:
            # The first token has a feature, and rotary positions jump after it as they do after a picture.
            features = self._embed(self._there(ids[:1, 1:2])).detach()
            whole = Seen(None, np.where(np.arange(n) > 0, -1, 0)[None], features)
            begun = whole._replace(where=np.full_like(prompt, -1))
        if axes is not None:
            axes[:, 1:] += 9 * np.arange(len(axes))[:, None] + 2
            whole, then = whole._replace(rotary=axes[:, None]), Seen(axes[:, have, None])
            begun = begun._replace(rotary=np.zeros((len(axes), *prompt.shape), dtype=np.int64))
        for row, length in enumerate(have):
            prompt[row, -length:] = ids[row, :length]
            if begun.where is not None:
                begun.where[row, -length] = 0
            if begun.rotary is not None and axes is not None:
                begun.rotary[:, row, -length:] = axes[:, :length]
        with torch.inference_mode():
            plain = self._logits(0, **self._inputs(ids[:1], whole), use_cache=False)[0]
        first = self.extend(0, prompt, np.zeros_like(have), have, begun)
        second = self.extend(0, ids[np.arange(rows), have][:, None], have, one, then)
        off = max(float((first - plain[have - 1]).abs().max()), float((second - plain[have]).abs().max()))
        used = self._cache.kv[:, :rows]
        for places in (used[..., :n, :], used[..., self.capacity :, :]):  # no others, so that they stay untouched
            places.zero_()
        # The tolerance is relative to the range of the logits, because they are so small in an untrained model that an
        # absolute tolerance would not detect a wrong mask.
        tolerance = (1e-3 if self._cache.kv.dtype == torch.float32 else 0.1) * float(plain.max() - plain.min()) + 1e-6
        # With `>` instead of `not <=`, NaN would pass.
        if not off <= tolerance:
            raise UnsupportedModel(
                f"{type(self.model).__name__}: logits through the slot cache differ from the plain "
                f"forward by {off:.3g} (tolerance {tolerance:.3g}); serve this model with vLLM"
            )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU, it takes memory only as it is written to (`torch.zeros` writes all of it), so
    slots can be longer than most requests."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(AttributeError, OSError):  # only Linux has huge pages, and one would span a thousand places of a slot
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
