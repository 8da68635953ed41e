"""The real vLLM keeps answers in the form that a request demands, and its log-probs then count as unknown."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tapereel.agents import Request
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.engine import GrammarRefused
from tapereel.agents.engines.servers import LocalServer
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.rendering import Renderer
from tapereel.agents.rendering.answer_grammar import Grammar, answer_grammar
from tapereel.tapes import Sampling
from tapereel.tapes.records import Constraint

from ..agents.served import servers
from .lab import vllm_is_there
from .vllm_cpu import CONTEXT, ENVIRONMENT, OPTIONS, PYTHON

pytestmark = [pytest.mark.contract, pytest.mark.timeout(600)]
CHARS = char_tokenizer()
RENDERER = Renderer(CHARS)
SCHEMA: Any = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "n": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
    },
    "required": ["colour", "n"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "paint", "description": "paints", "parameters": SCHEMA}}


def saved(folder: Path) -> Path:
    """A random Llama with a tokenizer that can write JSON, in a shape that vLLM has kernels for."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    ids: Any = {"bos_token_id": None, "eos_token_id": CHARS.eos_token_id, "pad_token_id": CHARS.pad_token_id}
    config = LlamaConfig(
        vocab_size=len(CHARS),
        intermediate_size=128,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        **sizes,
        **ids,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    CHARS.save_pretrained(folder)
    return folder


def test_vllm_enforces_json_and_calls_and_refuses_bad_schemas(tmp_path: Path) -> None:
    vllm_is_there()
    folder = saved(tmp_path / "model")
    log = tmp_path / "vllm.log"
    local = LocalServer(folder, python=str(PYTHON), environment=ENVIRONMENT, options=OPTIONS, log=log, patience=540.0)

    async def run() -> None:
        engine = await connect(servers(local.url, model=folder), RENDERER)
        assert "grammar" in engine.can
        prompt = RENDERER.prompt([{"role": "user", "content": "go"}], [TOOL])

        def asked(grammar: Grammar, seed: int) -> Request:
            sampling = Sampling(max_tokens=400, min_tokens=3)
            return Request(messages=(), prompt=prompt.ids, grammar=grammar, seed=seed, sampling=sampling)

        def grammar_of(**demand: Any) -> Grammar:
            return answer_grammar(Constraint(**demand), [TOOL], RENDERER, prompt.text)

        forms = [grammar_of(json_schema=SCHEMA), grammar_of(tools=("paint",))]
        forms.append(grammar_of(json_schema=SCHEMA, tools=("paint",)))
        answers = await asyncio.gather(*(engine.complete(asked(form, k)) for form in forms for k in range(4)))
        complete = 0
        for k, answer in enumerate(answers):
            assert answer.enforced
            assert answer.ids
            assert np.isnan(answer.logprobs or ()).all()
            assert len(answer.logprobs or ()) == len(answer.ids)
            if answer.finish != "stop":  # white space without end
                continue
            complete += 1
            read = RENDERER.read(answer.text or "", [TOOL], ids=answer.ids)
            assert bool(read.calls) == (k // 4 == 1) or k // 4 == 2
            jsonschema.validate(read.calls[0].arguments if read.calls else json.loads(read.answer), SCHEMA)
        assert complete
        free = await engine.complete(asked((), 1))
        assert not free.enforced
        assert np.isfinite(free.logprobs or ()).all()
        with pytest.raises(GrammarRefused):
            await engine.complete(asked(grammar_of(json_schema={"type": "nonsense"}), 1))
        await engine.close()

    asyncio.run(local.start())
    try:
        asyncio.run(run())
    finally:
        local.stop()
