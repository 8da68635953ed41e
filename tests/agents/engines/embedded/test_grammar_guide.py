"""Answers of an untrained model keep their form, end in time, and have the model's own log-probs."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from benchmarks.forms import answers, drawn_schemas, nested_schema
from tapereel.agents import Completion, EmbeddedEngine, Request
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.grammar_guide import Guides
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.engines.engine import GrammarRefused
from tapereel.agents.rendering import Renderer
from tapereel.agents.rendering.answer_grammar import Alternative, answer_grammar
from tapereel.tapes import Sampling
from tapereel.tapes.records import Constraint

from ...families import tokenizer

CHARS = char_tokenizer()
RENDERER = Renderer(CHARS)
PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}


def engine() -> EmbeddedEngine:
    return EmbeddedEngine(tiny_model(CHARS, "micro", context=512), RENDERER, version="v:0", slots=8)


async def until(done: Callable[[], bool]) -> None:
    """Returns once it is true, and looks after each step of the engine."""
    while True:
        if done():
            return
        await asyncio.sleep(0)


def asked(seed: int, schema: Any = None, **sampling: Any) -> Request:
    ids = RENDERER.prompt([{"role": "user", "content": "who?"}]).ids
    grammar = () if schema is None else (Alternative("", schema, ""),)
    return Request(messages=(), prompt=ids, seed=seed, grammar=grammar, sampling=Sampling(**sampling))


@pytest.mark.attack
def test_a_hundred_answers_are_json_for_their_schemas():
    """A small version of benchmarks/forms.py."""
    assert answers(count=100, seed=1, max_tokens=96).cut == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_tokens_close_in_time_whatever_the_limit(seed: int):
    """Any token that is allowed may come, and the shortest answer plus a little is room enough."""
    schema = nested_schema(random.Random(seed))
    guides, rng = Guides(RENDERER, len(CHARS), RENDERER.end_ids), np.random.default_rng(seed)
    shortest = len(guides.guide((Alternative("", schema, ""),), 4096)._closing)
    for limit in (shortest, shortest + 1, shortest + 7, shortest + 60):
        guide, ids = guides.guide((Alternative("", schema, ""),), limit), list[int]()
        while not ids or ids[-1] not in RENDERER.end_ids:
            ids.append(guide.take(int(rng.choice(np.flatnonzero(guide.allowed()))), limit - len(ids)))
        assert len(ids) <= limit
        jsonschema.validate(json.loads(RENDERER.decode(ids)), schema)


def test_a_limit_below_the_shortest_answer_cuts_it_off():
    found = asyncio.run(engine().complete(asked(1, PERSON, max_tokens=5)))
    assert (found.finish, len(found.ids or ()), found.enforced) == ("length", 5, True)


def test_log_probs_are_those_of_the_model_without_the_mask():
    async def run() -> None:
        one = engine()
        for temperature in (0.0, 1.0, 0.05):
            request = asked(3, PERSON, max_tokens=64, temperature=temperature)
            found = await one.complete(request)
            assert found.ids is not None
            assert found.logprobs is not None
            assert request.prompt is not None
            if temperature != 0.05:
                own = (await one.score(request.prompt + found.ids))[len(request.prompt) - 1 :]
                assert np.allclose(found.logprobs, own, atol=1e-4)
            assert np.isfinite(found.logprobs).all()
            assert json.loads(found.text or "")
            assert sum(np.exp(found.logprobs)) < len(found.ids) - 1, "the mask makes forced tokens certain"

    asyncio.run(run())


def test_other_requests_in_the_batch_stay_free():
    async def run() -> tuple[Completion, Completion]:
        one, alone = engine(), engine()
        _, free, _ = await asyncio.gather(
            one.complete(asked(1, PERSON, max_tokens=60)),
            one.complete(asked(2, max_tokens=60)),
            one.complete(asked(3, {"type": "integer"}, max_tokens=60)),
        )
        return free, await alone.complete(asked(2, max_tokens=60))

    free, alone = asyncio.run(run())
    assert (free.ids, free.enforced) == (alone.ids, False)


def test_new_weights_leave_the_place_in_the_grammar():
    async def run() -> Completion:
        one = engine()
        asking = asyncio.ensure_future(one.complete(asked(1, PERSON, max_tokens=120)))
        await until(lambda: one.stats.sampled >= 10)
        await one.sync_weights(tiny_model(CHARS, "micro", context=512, seed=9).state_dict(), "v:1")
        return await asking

    found = asyncio.run(run())
    assert [version for version, _, _ in found.spans] == ["v:0", "v:1"]
    jsonschema.validate(json.loads(found.text or ""), PERSON)


def test_the_grammar_goes_before_min_tokens_and_ignore_eos():
    for setting in ({"min_tokens": 50}, {"ignore_eos": True}):
        found = asyncio.run(engine().complete(asked(1, {"enum": ["a"]}, max_tokens=60, **setting)))
        assert (found.finish, json.loads(found.text or "")) == ("stop", "a")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "foo"},
        {"not": {"type": "string"}},
        {"$ref": "#/x"},
        {"type": "string", "pattern": "(a"},
        {"$ref": "#"},  # fails at the first token
        {"type": "object", "properties": {f"p{k}": {"type": "integer"} for k in range(600)}},  # and at the second
        {"enum": ["x" * 70_000]},  # 4 MB of it would take 300 MB
        {"type": "integer", "multipleOf": 1_000_003},  # 275 MB and 5 seconds
        {"allOf": [{"type": "integer", "multipleOf": k} for k in (1009, 997)]},  # the same, in two parts
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_alone(schema: Any):
    async def run() -> Completion:
        one = engine()
        other = asyncio.ensure_future(one.complete(asked(1, PERSON, max_tokens=60)))
        with pytest.raises(GrammarRefused):
            await one.complete(asked(2, schema))
        return await other

    assert asyncio.run(run()).finish == "stop"


def test_few_compiled_schemas_are_kept_and_none_that_failed():
    guides = Guides(RENDERER, len(CHARS), RENDERER.end_ids)
    with pytest.raises(GrammarRefused):
        guides.guide((Alternative("", {"$ref": "#"}, ""),), 64)
    assert guides._compiled.cache_info().currsize == 0
    for k in range(17):
        guides.guide((Alternative("", {"const": k}, ""),), 64)
    assert guides._compiled.cache_info().currsize == 16


def test_a_grammar_that_grows_too_complex_fails_its_own_request(monkeypatch: pytest.MonkeyPatch):
    async def run() -> list[Any]:
        one = engine()
        bad = asyncio.ensure_future(one.complete(asked(1, PERSON, max_tokens=60)))
        good = asyncio.ensure_future(one.complete(asked(2, max_tokens=60)))
        # The grammar is compiled in a thread, so the other request may begin, and even end, before this one.
        await until(lambda: any(row.guide is not None and len(row.ids) > 0 for row in one._flights))
        guides = [row.guide for row in one._flights if row.guide is not None]
        guides[0]._matcher.consume_token(0)  # the library's error state, as after a limit of its parser
        return await asyncio.gather(bad, good, return_exceptions=True)

    bad, good = asyncio.run(run())
    assert isinstance(bad, GrammarRefused)
    assert good.finish in ("stop", "length")


TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "description": "looks", "parameters": PERSON}},
    {"type": "function", "function": {"name": "other", "description": "else", "parameters": {"type": "object"}}},
]


@pytest.mark.parametrize("family", ["qwen3", "llama3", "deepseek", "harmony"])
def test_a_familys_own_form_is_read_back(family: str):
    renderer = Renderer(tokenizer(family))
    prompt = renderer.prompt([{"role": "user", "content": "x"}], TOOLS)
    for constraint, called in (
        (Constraint(tools=("look",)), ["look"]),
        (Constraint(json_schema=PERSON), []),
        (Constraint(json_schema=PERSON, tools=("look", "other")), None),
    ):
        grammar = answer_grammar(constraint, TOOLS, renderer, prompt.text)
        if family == "harmony" and constraint.tools:
            assert not grammar, "its calls end with a token that ends the answer"
            continue
        assert grammar, constraint
        guides, rng = Guides(renderer, len(tokenizer(family)), renderer.end_ids), np.random.default_rng(1)
        guide, ids = guides.guide(grammar, 400), list[int]()
        while not ids or ids[-1] not in renderer.end_ids:
            ids.append(guide.take(int(rng.choice(np.flatnonzero(guide.allowed()))), 400 - len(ids)))
        read = renderer.read(renderer.decode(ids), TOOLS, ids=ids, prompt=prompt.text)
        if called is not None:
            assert [call.name for call in read.calls] == called, (renderer.decode(ids), read)
        value = read.calls[0].arguments if read.calls else json.loads(read.answer)
        if not read.calls or read.calls[0].name == "look":
            jsonschema.validate(value, PERSON)


def test_a_prompt_that_opens_a_thought_is_not_enforced():
    renderer = Renderer(tokenizer("qwen3"))
    constraint = Constraint(json_schema=PERSON)
    assert answer_grammar(constraint, (), renderer, "<|im_start|>assistant\n")
    assert not answer_grammar(constraint, (), renderer, "<|im_start|>assistant\n<think>\n")


def test_the_schemas_of_the_benchmark_have_strings_in_arrays_in_objects():
    assert all("array" in text and "string" in text for text in map(json.dumps, drawn_schemas(1, 20)))
