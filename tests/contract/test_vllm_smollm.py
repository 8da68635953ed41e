"""The trained SmolLM2 that smollm_run.py leaves: vLLM loads it, and finds the log-probs that transformers finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from .lab import run_in_vllm
from .smollm_env import TRAINED

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]

CLOSE = 1e-3
"""Nats. The kernels of vLLM's CPU build add up in another order than transformers', in 30 layers."""


def test_vllm_finds_in_the_trained_smollm_what_transformers_finds():
    if not TRAINED.exists():
        pytest.fail(f"there is no {TRAINED}; make it: python -m tests.contract.smollm_env, then smollm_run")
    chat = [{"role": "user", "content": "What is the first letter of the word apple?"}]
    ids = AutoTokenizer.from_pretrained(TRAINED).apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(TRAINED, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0]
    printed = run_in_vllm(Path(__file__).with_name("exported_run.py"), json.dumps(ids), str(TRAINED))
    (found,) = json.loads(printed.splitlines()[-1])
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=CLOSE)
