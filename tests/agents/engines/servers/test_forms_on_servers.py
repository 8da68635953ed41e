"""What a vLLM is asked for an answer with a form, and that a server which can't keep one isn't asked."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any

from tapereel.agents import Request
from tapereel.agents.engines.embedded import EngineServer, char_tokenizer
from tapereel.agents.engines.embedded.tiny_model import tiny_model
from tapereel.agents.engines.servers import Completions, Generate
from tapereel.agents.engines.servers.connect import connect
from tapereel.agents.rendering import Renderer
from tapereel.agents.rendering.answer_grammar import Alternative
from tapereel.tapes import Sampling

from ...served import servers

SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
PLAIN = Alternative("", SCHEMA, "")
CALL = Alternative('<tool_call>\n{"name": "add", "arguments": ', SCHEMA, "}\n</tool_call>")


def asked(*grammar: Alternative) -> Request:
    sampling = Sampling(min_tokens=9, ignore_eos=False)
    return Request(messages=(), prompt=array("i", [1]), grammar=grammar, seed=1, sampling=sampling)


def test_json_is_a_schema_and_a_call_is_a_structural_tag():
    body: Any = Generate().body(asked(PLAIN), model="m", request_id="r", stops=(2,))
    assert body["sampling_params"]["structured_outputs"] == {"json": SCHEMA}
    assert body["sampling_params"]["min_tokens"] == 0
    assert Completions().body(asked(PLAIN), model="m", request_id="r", stops=(2,))["structured_outputs"]
    body = Generate().body(asked(PLAIN, CALL), model="m", request_id="r", stops=(2,))
    tag = json.loads(body["sampling_params"]["structured_outputs"]["structural_tag"])
    content = {"type": "json_schema", "json_schema": SCHEMA}
    before, after = ({"type": "const_string", "value": text} for text in (CALL.begin, CALL.end))
    forms = [{"type": "sequence", "elements": [content]}, {"type": "sequence", "elements": [before, content, after]}]
    assert tag == {"type": "structural_tag", "format": {"type": "or", "elements": forms}}
    free: Any = Generate().body(asked(), model="m", request_id="r", stops=(2,))
    assert "structured_outputs" not in free["sampling_params"]
    assert free["sampling_params"]["min_tokens"] == 9


def test_a_server_that_refuses_grammars_has_no_such_capability():
    chars = char_tokenizer()

    async def run() -> None:
        async with EngineServer(tiny_model(chars, "micro"), "m").serving() as server:
            engine = await connect(servers(server.url), Renderer(chars))
            assert "grammar" not in engine.can
            await engine.close()

    asyncio.run(run())
