"""How many answers of an untrained model are complete JSON for their schema.

    python benchmarks/forms.py --answers 1000 --max-tokens 512

Each answer has its own schema: nested objects and arrays of strings, integers and choices, drawn from the printed seed.
The model is untrained, so it would never close a string by itself. Every complete answer is checked with jsonschema.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from tapereel.agents import EmbeddedEngine, Request
from tapereel.agents.engines.embedded import char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.rendering import Renderer
from tapereel.agents.rendering.answer_grammar import Alternative
from tapereel.tapes import Sampling


def nested_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """An object with 1 to 3 fields, one of them an array of strings."""
    fields = [_field(draw, depth) for _ in range(draw.randint(0, 2))]
    fields.append({"type": "array", "items": {"type": "string"}, "minItems": draw.randint(0, 2)})
    names = [f"f{k}" for k in range(len(fields))]
    wanted = names if draw.random() < 0.5 else names[-1:]
    return {
        "type": "object",
        "properties": dict(zip(names, fields, strict=True)),
        "required": wanted,
        "additionalProperties": False,
    }


def _field(draw: random.Random, depth: int) -> dict[str, Any]:
    kind = draw.choice(("string", "integer", "number", "boolean", "enum", "short", "object", "array", "any"))
    if kind in ("object", "array") and depth:
        inner = nested_schema(draw, depth - 1)
        return inner if kind == "object" else {"type": "array", "items": inner, "maxItems": 3}
    return {
        "enum": {"enum": ["red", "green", 3, None]},
        "short": {"type": "string", "minLength": 2, "maxLength": 9, "pattern": "^[a-z]+$"},
        "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }.get(kind, {"type": kind if kind in ("integer", "number", "boolean") else "string"})


def drawn_schemas(seed: int, count: int) -> Sequence[dict[str, Any]]:
    draw = random.Random(seed)
    return [nested_schema(draw) for _ in range(count)]


@dataclass(frozen=True)
class Found:
    """What became of the answers."""

    answers: int
    cut: int
    """Number of answers that reached `max_tokens`."""
    tokens: int


def answers(count: int, seed: int, max_tokens: int, slots: int = 128) -> Found:
    """Sample the answers. Raises if a complete one isn't valid JSON for its schema."""
    tokenizer = char_tokenizer()
    renderer = Renderer(tokenizer)
    model = tiny_model(tokenizer, "micro", seed=seed, context=max_tokens + 64)
    engine = EmbeddedEngine(model, renderer, version="v:0", slots=slots)
    prompt, schemas = renderer.prompt([{"role": "user", "content": "go"}]).ids, drawn_schemas(seed, count)
    sampling = Sampling(max_tokens=max_tokens)

    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(
                engine.complete(
                    Request(messages=(), prompt=prompt, seed=k, sampling=sampling, grammar=(Alternative("", one, ""),))
                )
                for k, one in enumerate(schemas)
            )
        )

    found = asyncio.run(ask())
    for answer, schema in zip(found, schemas, strict=True):
        if answer.finish == "stop":
            jsonschema.validate(json.loads(answer.text), schema)
    return Found(count, sum(one.finish != "stop" for one in found), sum(len(one.ids) for one in found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    began = time.process_time()
    found = answers(options.answers, options.seed, options.max_tokens)
    print(f"{found}: {found.cut / found.answers:.1%} cut off, {time.process_time() - began:.0f} s of CPU")


if __name__ == "__main__":
    main()
