"""What the contract tests share: a random tiny Llama, requests to it, and the environment with the real vLLM.

The server itself is one for all of them (`conftest.py`).
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tapereel.agents import Completion, Request
from tapereel.agents.engines.servers import RemoteEngine
from tapereel.agents.engines.weights import AdapterConfig, add_adapters

from ..agents import served
from ..agents.embedded_lab import worst
from ..agents.served import Answers, Enough
from ..finetune.loop.lab import WORDS
from .vllm_cpu import CONTEXT, DONE, ENVIRONMENT, FOLDER, PYTHON

TRIES = ((400, 0.15, 8), (1200, 0.3, 8), (3600, 0.6, 8), (3600, 0.3, 1), (3600, 0.1, 1))
"""As `served.TRIES`. On a busy machine, a server with eight answers may only pause after they have ended, so the last
tries have one."""


def policy(seed: int) -> Any:
    """A random Llama in a shape that vLLM has kernels for; seeds lie far apart."""
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=WORDS.eos_token_id,
        pad_token_id=WORDS.pad_token_id,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).eval()


ADAPTERS = AdapterConfig(rank=4, alpha=8)


def adapted(seed: int) -> Any:
    """The base, `policy(0)`, with adapters that change a lot."""
    model = add_adapters(policy(0), ADAPTERS, seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model


def merged(seed: int) -> Any:
    """One plain model that is `adapted(seed)`."""
    return copy.deepcopy(adapted(seed)).merge_and_unload()


def save(folder: Path) -> None:
    """`policy(0)` and its tokenizer, as a model folder."""
    policy(0).save_pretrained(folder)
    WORDS.save_pretrained(folder)


def vllm_is_there() -> None:
    """Fails the test where nobody made the environment."""
    if not DONE.exists():
        pytest.fail(f"there is no vLLM in {FOLDER}; make it: python -m tests.contract.vllm_cpu")


def run_in_vllm(script: Path, *arguments: str, seconds: float = 540.0) -> str:
    """What a script prints that runs in the environment with vLLM; it must end well."""
    vllm_is_there()
    process = subprocess.Popen(
        [PYTHON, script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **ENVIRONMENT, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"},
    )
    try:
        printed, errors = process.communicate(timeout=seconds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine is a process of its own
        process.wait(30)
    assert process.returncode == 0, printed[-3000:] + errors[-6000:]
    return printed


def off(seed: int, request: Request, completion: Completion, start: int = 0, end: int | None = None) -> float:
    return worst(policy(seed), request, completion, start, end)


async def swap(engine: RemoteEngine, mode: Any, times: int, enough: Enough) -> tuple[list[str], Answers]:
    """As `served.swap`, with the lengths of answers that the real server needs."""
    return await served.swap(engine, policy, mode, times, enough, TRIES)
