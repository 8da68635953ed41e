"""What the tests of the embedded engine share: tiny random decoders, requests, and an oracle without a cache."""

from __future__ import annotations

import asyncio
import functools
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tapereel.agents import Completion, EmbeddedEngine, Request
from tapereel.agents.engines.embedded.sampler import as_seed, uniforms
from tapereel.agents.rendering import Renderer
from tapereel.tapes import Sampling
from tapereel.tapes.arrays import ints

torch.set_num_threads(1)

VOCABULARY = 40
END = 1

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True, "head_dim": 8}),
}


class Digits(Renderer):
    """A renderer for tests: a completion reads as its ids."""

    end_ids = (END,)

    def __init__(self) -> None:
        """It has no tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """The ids, without the one that ends a turn."""
        return " ".join(str(id) for id in ids if id != END)


@functools.cache
def decoder(family: str = "llama", seed: int = 0, **config: Any) -> PreTrainedModel:
    """Two layers, width 32, two key-value heads for four queries; random weights wide enough to disagree by seed."""
    make, cls, own = FAMILIES[family]
    torch.manual_seed(seed)
    return cls(make(**{**SHAPE, **own, **config})).eval()


def engine(model: PreTrainedModel, **options: Any) -> EmbeddedEngine:
    """An engine over a copy of `model`, whose first version is `v0`."""
    return EmbeddedEngine(model, Digits(), **{"version": "v0", "slots": 16, **options})


def ask(
    prompt: Sequence[int],
    seed: int = 0,
    *,
    key: str = "",
    stop: tuple[int, ...] = (),
    on_partial: Any = None,
    **sampling: Any,
) -> Request:
    """A request as the door of an episode makes it."""
    return Request(
        messages=(),
        prompt=ints(prompt),
        sampling=Sampling(**sampling),
        seed=seed,
        cache_key=key,
        stop_ids=stop,
        on_partial=on_partial,
    )


def prompt_of(seed: int, length: int) -> array[int]:
    """Random ids, none of which ends a turn."""
    return ints(np.random.default_rng(seed).integers(2, VOCABULARY, length).tolist())


@torch.no_grad()
def plain_logits(model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """(completion tokens, vocabulary): what the model's own forward over everything gives before each sampled id."""
    whole = torch.tensor([[*prompt, *ids]])
    return model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1].float()


def recompute(model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], temperature: float) -> torch.Tensor:
    """Log-probs of `ids` by one forward over everything, without a cache."""
    logits = plain_logits(model, prompt, ids) / (temperature or 1.0)
    return logits.log_softmax(-1).gather(1, torch.tensor(list(ids))[:, None])[:, 0]


def worst(
    model: PreTrainedModel, request: Request, completion: Completion, start: int = 0, end: int | None = None
) -> float:
    """The largest error of the recorded log-probs in [start, end), in nats."""
    assert completion.ids is not None
    assert completion.logprobs is not None
    assert request.prompt is not None
    exact = recompute(model, request.prompt, completion.ids, request.sampling.temperature)
    return float((exact - torch.tensor(completion.logprobs))[start:end].abs().max())


def assert_faithful(models: dict[str, PreTrainedModel], request: Request, completion: Completion) -> None:
    """Every token is the one that a naive loop would have drawn, and its log-prob is exact for its version."""
    ids, logprobs, prompt = completion.ids, completion.logprobs, request.prompt
    assert ids is not None
    assert logprobs is not None
    assert prompt is not None
    assert [end for _, _, end in completion.spans] == [
        *(start for _, start, _ in completion.spans[1:]),
        *([len(ids)] if ids else []),
    ]
    temperature = request.sampling.temperature
    uniform = uniforms(np.full(len(ids), as_seed(request.seed), dtype=np.uint64), np.arange(len(ids)))
    for version, start, end in completion.spans:
        assert end > start
        logits = plain_logits(models[version], prompt, ids)[start:end].double()
        p = torch.softmax(logits / (temperature or 1.0), -1)
        took = torch.tensor(ids[start:end])[:, None]
        torch.testing.assert_close(
            torch.tensor(logprobs[start:end]), p.gather(1, took)[:, 0].log().float(), rtol=0, atol=1e-4
        )
        if temperature == 0.0:
            assert bool((logits.gather(1, took)[:, 0] >= logits.amax(-1) - 1e-4).all())
        elif request.sampling.exact:
            above = p.cumsum(-1).gather(1, took)[:, 0]
            u = torch.from_numpy(uniform[start:end])
            assert bool((u <= above + 1e-5).all())
            assert bool((u >= above - p.gather(1, took)[:, 0] - 1e-5).all())


async def until(condition: Any) -> None:
    """Give the loop away until `condition()` holds."""
    for _ in range(20_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never came true")
