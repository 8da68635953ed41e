"""What each backend is asked for: from one request to its own words, nothing left to its defaults."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from tapereel.agents import Request
from tapereel.agents.engines.servers import Completions, Generate, SGLangGenerate
from tapereel.agents.engines.servers.litellm_engine import parameters
from tapereel.tapes import Sampling

LEDGER = json.loads((Path(__file__).parents[2] / "ledger" / "sampling.json").read_text("utf-8"))
HELLO = [{"role": "user", "content": "hello"}]


def request_of(case: dict[str, Any]) -> Request:
    return Request(messages=HELLO, prompt=array("i", [3, 90, 6, 4]), sampling=Sampling(**case["sampling"]), seed=5)


@pytest.mark.ledger("F12")
@pytest.mark.parametrize("case", LEDGER["maps"], ids=lambda case: case["name"])
def test_sampling_in_the_words_of_each_backend(case: dict[str, Any]) -> None:
    request = request_of(case)
    asked = Generate().body(request, model="m", request_id="x", stops=[6])
    assert asked == {
        "model": "m",
        "token_ids": [3, 90, 6, 4],
        "request_id": "x",
        "stream": False,
        "sampling_params": case["vllm"] | {"logprobs": 0},
    }
    asked = Completions().body(request, model="m", request_id="x", stops=[6])
    more = {
        "model": "m",
        "prompt": [3, 90, 6, 4],
        "request_id": "x",
        "stream": False,
        "echo": False,
        "logprobs": 0,
        "return_token_ids": True,
        "return_weight_versions": True,
    }
    assert asked == case["vllm"] | more
    asked = SGLangGenerate().body(request, model="m", request_id="x", stops=[6])
    assert asked == {
        "rid": "x",
        "input_ids": [3, 90, 6, 4],
        "sampling_params": case["sglang"],
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
    }
    assert parameters(request) == case["litellm"] | {"messages": HELLO}


@pytest.mark.ledger("F12")
def test_a_provider_without_seeds_is_asked_without_one() -> None:
    request = request_of({"sampling": {}})
    assert parameters(request, seed=False) == {"temperature": 1.0, "max_tokens": 512, "messages": HELLO}


@pytest.mark.ledger("F12")
def test_only_temperature_gives_rl_data() -> None:
    assert Sampling(temperature=0.5).exact
    assert Sampling(first_temperature=10.0).exact
    for other in ({"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}, {"extra": {"presence_penalty": 0.5}}):
        assert not Sampling(**other).exact  # type: ignore[arg-type]
