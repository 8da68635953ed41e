"""What vLLM's own parsers make of answers. Run by the Python of vLLM's environment.

    python vllm_formats.py < CASES > CALLS

Each line of the input is JSON with the keys `tool` and `reasoning` (names of vLLM's parsers, or None), `text`, `marks`
(tokens of the tokenizer) and `tools`. The line of the output has the calls as [name, arguments], or why there are none.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@lru_cache(maxsize=1)
def tokenizer(marks: tuple[str, ...]) -> Any:
    """A tokenizer of bytes that knows these marks as tokens."""
    alphabet = {char: k for k, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def calls(case: dict[str, Any]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=case["tools"])
    text, words = case["text"], tokenizer(tuple(case["marks"]))
    if case["reasoning"]:
        parser = ReasoningParserManager.get_reasoning_parser(case["reasoning"])(words)
        text = parser.extract_reasoning(text, request)[1] or ""
    parser = ToolParserManager.get_tool_parser(case["tool"])(words, request.tools)
    found = parser.extract_tool_calls(text, request).tool_calls
    return [[call.function.name, json.loads(call.function.arguments)] for call in found]


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM logs to stdout
    for line in sys.stdin:
        try:
            made: Any = calls(json.loads(line))
        except Exception as error:
            made = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(made), file=answers, flush=True)
