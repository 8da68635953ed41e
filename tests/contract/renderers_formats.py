"""What the parsers of `renderers` make of answers. Run by the Python of the environment that has `renderers`.

    python renderers_formats.py < CASES > CALLS

Each line of the input is JSON with the keys `renderer` (name of a class), `text`, `prompt`, `marks` (tokens of the
tokenizer) and `tools`. The line of the output has the calls as [name, arguments], or why there are none.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any


class Tokenizer:
    """Each mark is a token, and each other character. Any token that a renderer looks up is a mark."""

    SPECIAL = re.compile(r"<[|｜][^<>]+[|｜]>")

    unk_token_id = None
    eos_token_id = 0
    name_or_path = ""

    def __init__(self, marks: list[str]) -> None:
        self.marks = ["<eos>"]
        for mark in marks:
            self.convert_tokens_to_ids(mark)

    def convert_tokens_to_ids(self, token: Any) -> Any:
        if not isinstance(token, str):
            return [self.convert_tokens_to_ids(one) for one in token]
        if token not in self.marks:
            self.marks.append(token)
        return self.marks.index(token)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        if self.SPECIAL.fullmatch(text):
            return [self.convert_tokens_to_ids(text)]
        parts = re.split("(" + "|".join(re.escape(m) for m in sorted(self.marks, key=len, reverse=True)) + ")", text)
        found: list[int] = []
        for part in parts:
            found += [self.marks.index(part)] if part in self.marks else [1000 + ord(char) for char in part]
        return found

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [ids] if isinstance(ids, int) else ids
        return "".join(chr(i - 1000) if i >= 1000 else "" if skip_special_tokens else self.marks[i] for i in ids)


def parsed(case: dict[str, Any]) -> Any:
    import renderers
    from renderers.parsing import parse_gpt_oss

    words = Tokenizer(case["marks"])
    if case["renderer"] == "GptOssRenderer":  # its class loads OpenAI's tokenizer from the network
        names = ("return", "call", "start", "end", "channel", "message", "constrain")
        tokens = {f"{name}_id": words.convert_tokens_to_ids(f"<|{name}|>") for name in names}
        return parse_gpt_oss(words, words.encode("<|start|>assistant" + case["text"]), **tokens)
    reader = getattr(renderers, case["renderer"])(words)
    prompt = words.encode(case["prompt"]) if case["prompt"] else None
    return reader.parse_response(words.encode(case["text"]), tools=case["tools"], prompt_ids=prompt)


def calls(case: dict[str, Any]) -> Any:
    made = [call for call in parsed(case).tool_calls if call.status.name == "OK"]
    return [[c.name, json.loads(c.arguments) if isinstance(c.arguments, str) else c.arguments] for c in made]


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            made: Any = calls(json.loads(line))
        except Exception as error:
            made = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(made), flush=True)
