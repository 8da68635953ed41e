"""How each model family writes thoughts and calls, as response templates of transformers.

A renderer looks for a response template in the setting `engine.renderer.response_template`, then in the tokenizer, and
then here. `FORMATS` is searched for the first format whose marks are all in the chat template. To add a format:

    FORMATS["mine"] = Format(("<|my_call|>",), {"start_anchor": "<|assistant|>", "fields": {...}})

The keys of a response template are described in transformers' documentation ("Response parsing"). Tapereel reads the
fields `tool_calls` and `content`, and every other text field is a thought. The patterns are those of the package
`regex`. `\\G` in a pattern matches at the end of the region before. If content has no closing mark here, it ends with
the answer. A group `string` in a `tag_pattern` matches if the format says that the value is text.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class Format:
    """How one model family writes its answers."""

    marks: tuple[str, ...]
    """Text that the family's chat template contains, all of it."""
    template: Mapping[str, JsonValue] | None
    """The response template. None stands for `HermesReader`."""
    call: tuple[str, str] | None = None
    """The text before and after the arguments of a call, if the arguments are JSON. `NAME` stands for the tool's name.
    None if a call of this family can't be enforced."""
    content: tuple[str, str] = ("", "")
    """The text before and after the content of an answer."""


_NAMED: Any = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
"""The name is in the opening mark."""
_STRING = r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+\""""
_NESTED = rf"(?P<nested>[\[{{](?:{_STRING}|[^\[\]{{}}'\"]++|(?&nested))*+[\]}}])"
"""Matches a list or dict in Python's syntax."""
_THINK: Any = {"open": "<think>", "close": "</think>", "content": "text"}
_TEXT: Any = {"content": "text"}


def _thinking(anchor: str, calls: Mapping[str, Any], think: Mapping[str, Any] = _THINK) -> dict[str, Any]:
    """Return the response template for thoughts in `think`'s marks, calls, and other text as content."""
    return {
        "start_anchor": anchor,
        "fields": {"reasoning_content": think, "tool_calls": dict(calls), "content": _TEXT},
    }


def _tagged(opens: str, closes: str, begin: str, rest: str = "") -> dict[str, Any]:
    """Return the field for calls with one tag for each argument, whose values are text. The pattern of a tag is `begin`
    and `rest`. A tag ends only where another one or the end of the call follows, because a value may contain the mark
    that ends it."""
    return {
        "open_pattern": opens,
        "close_pattern": closes,
        "repeats": True,
        "content": "xml-inline",
        "content_args": {"tag_pattern": rf"{begin}{rest}(?=\s*(?:{begin}|{closes}))"},
        "transform": _NAMED,
    }


def _json(opens: str, closes: str) -> dict[str, Any]:
    """Return the field for calls whose arguments are JSON after an opening mark with the name."""
    return {
        "open_pattern": opens,
        "close_pattern": closes,
        "repeats": True,
        "content": "json",
        "transform": _NAMED,
    }


def _list(opens: str, closes: str, name: str = "name", arguments: str = "arguments") -> dict[str, Any]:
    """Return the field for calls that are a JSON list of objects with the keys `name` and `arguments`."""
    return {
        "open_pattern": opens,
        "close_pattern": closes,
        "content": "json",
        "transform": {"type": "function", "function": {"name": f"{{{name}}}", "arguments": f"{{{arguments}}}"}},
        "transform_each": True,
    }


_WORD = r"[^\s()\[\]{}=,'\"<>]+"
"""Matches a name, which need not be one in Python. Those of MCP servers have dashes."""
_NAME = rf"(?P<name>{_WORD})\("
_NEXT = rf"\)(?=\s*,\s*{_WORD}\()"
"""Ends a call in a list that has another one."""


def _python(opens: str, closes: str) -> dict[str, Any]:
    """Return the field for calls in Python's syntax. Each call is a region of its own, and `closes` ends it."""
    tag = rf"(?P<key>{_WORD})=(?P<value>{_STRING}|{_NESTED}|[-+.\w]+)(?=\s*(?:,\s*(?:{_WORD}=|\))|\)))"
    parser = {"name": "json", "args": {"string_delims": [["'", "'"]], "allow_non_json": True}}
    return _tagged(f"{opens}{_NAME}", closes, tag) | {"content_args": {"tag_pattern": tag, "value_parser": parser}}


def _xml(mark: str, line: str) -> dict[str, Any]:
    """Return the field for calls with tags such as `<parameter=key>` in an element called `mark`. `line` matches what
    the family writes around a value."""
    return _tagged(
        rf"<{mark}>\s*<function=(?P<name>[^\n<>]+)>",
        rf"(?:</function>\s*)?</{mark}>",
        "<parameter=",
        rf"(?P<key>[^\n<>]+)>{line}(?P<value>.*?){line}</parameter>",
    )


FORMATS: dict[str, Format] = {
    # Qwen3-Coder, Qwen 3.5, 3.6 and 3.8, Nemotron 3
    "qwen3_coder": Format(
        ("<tool_call>", "<function=", "<parameter="),
        _thinking("<|im_start|>assistant\n", _xml("tool_call", r"\n?")),
    ),
    "seed_oss": Format(
        ("<seed:tool_call>",),
        _thinking(
            "<seed:bos>assistant\n",
            _xml("seed:tool_call", ""),
            {"open": "<seed:think>", "close": "</seed:think>", "content": "text"},
        ),
    ),
    # GLM 4.5 to 4.7
    "glm": Format(
        ("<tool_call>", "<arg_key>"),
        _thinking(
            "<|assistant|>",
            _tagged(
                r"<tool_call>(?P<name>[^\s<>]+)\s*",
                r"</tool_call>",
                "<arg_key>",
                r"(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
            ),
        ),
    ),
    # gpt-oss. The recipient is in the role, as the template writes it, or in the channel, as the model often does.
    "gpt_oss": Format(
        ("<|channel|>", "functions."),
        {
            "start_anchor": "<|start|>assistant",
            "fields": {
                "thinking": {
                    "open": "<|channel|>analysis<|message|>",
                    "close_pattern": r"<\|end\|>(?:<\|start\|>assistant)?",
                    "content": "text",
                },
                "content": {
                    "open_pattern": r"<\|channel\|>(?:final|commentary)(?: <\|constrain\|>\w+)?<\|message\|>",
                    "close_pattern": r"<\|(?:end|return)\|>(?:<\|start\|>assistant)?",
                    "content": "text",
                },
                "tool_calls": _json(
                    r"(?: to=functions\.(?P<name>[^\s<>]+)<\|channel\|>(?:commentary|analysis)"
                    r"|<\|channel\|>(?:commentary|analysis) to=functions\.(?P<name>[^\s<>]+))"
                    r"(?: ?<\|constrain\|>)?(?: ?json)?<\|message\|>",
                    r"<\|call\|>(?:<\|start\|>assistant)?",
                ),
            },
        },
        content=("<|channel|>final<|message|>", ""),
    ),
    "kimi_k2": Format(
        ("<|tool_call_argument_begin|>",),
        _thinking(
            "<|im_middle|>",
            _json(
                r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>(?:functions\.)?(?P<name>[^\s<>]+):\d+"
                r"<\|tool_call_argument_begin\|>",
                r"<\|tool_call_end\|>(?:<\|tool_calls_section_end\|>)?",
            ),
        ),
        call=(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
    ),
    "kimi_k3": Format(
        ("<|open|>", "<|close|>", "<|sep|>"),
        {
            "start_anchor": '<|open|>message role="assistant"<|sep|>',
            "fields": {
                "thinking": {"open": "<|open|>think<|sep|>", "close": "<|close|>think<|sep|>", "content": "text"},
                "tool_calls": _tagged(
                    r"(?:<\|open\|>tools<\|sep\|>)?"
                    r"<\|open\|>call tool=\"(?P<name>[^\"&]+)\"(?: index=\"\d+\")?<\|sep\|>",
                    r"<\|close\|>call<\|sep\|>(?:<\|close\|>tools<\|sep\|>)?",
                    r"<\|open\|>argument key=\"",
                    r"(?P<key>[^\"&]+)\" type=\"(?:(?P<string>string)|\w+)\"<\|sep\|>(?P<value>.*?)"
                    r"<\|close\|>argument<\|sep\|>",
                ),
                "content": {"open": "<|open|>response<|sep|>", "close": "<|close|>response<|sep|>", "content": "text"},
            },
        },
        content=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    ),
    # DeepSeek V3.2 and V4
    "deepseek_v32": Format(
        ("｜DSML｜",),
        _thinking(
            "<｜Assistant｜>",
            _tagged(
                r"(?:<｜DSML｜(?:function|tool)_calls>\s*)?<｜DSML｜invoke name=\"(?P<name>[^\"<>]+)\">",
                r"</｜DSML｜invoke>(?:\s*</｜DSML｜(?:function|tool)_calls>)?",
                r"<｜DSML｜parameter name=\"",
                r"(?P<key>[^\"]+)\" string=\"(?:(?P<string>true)|false)\">(?P<value>.*?)</｜DSML｜parameter>",
            ),
        ),
    ),
    # DeepSeek V3 and R1
    "deepseek_v3": Format(
        ("<｜tool▁call▁begin｜>", "```json"),
        _thinking(
            "<｜Assistant｜>",
            _json(
                r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\s<>]+)\n```json\n",
                r"(?:\n```)?<｜tool▁call▁end｜>(?:\n?<｜tool▁calls▁end｜>)?",
            ),
        ),
        call=(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
            "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
    ),
    "deepseek_v31": Format(
        ("<｜tool▁call▁begin｜>",),
        _thinking(
            "<｜Assistant｜>",
            _json(
                r"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?P<name>[^\s<>]+)<｜tool▁sep｜>",
                r"<｜tool▁call▁end｜>(?:<｜tool▁calls▁end｜>)?",
            ),
        ),
        call=(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
    ),
    "minimax_m2": Format(
        ("<minimax:tool_call>", "<invoke"),
        _thinking(
            "]~b]ai\n",
            _tagged(
                r"(?:<minimax:tool_call>\s*)?<invoke name=\"(?P<name>[^\"<>]+)\">",
                r"</invoke>(?:\s*</minimax:tool_call>)?",
                r"<parameter name=\"",
                r"(?P<key>[^\"]+)\">(?P<value>.*?)</parameter>",
            ),
        ),
    ),
    # Mistral from v11 on: a name and an object for each call
    "mistral_v11": Format(
        ("[TOOL_CALLS]", "[ARGS]"),
        {
            "start_anchor": "[/INST]",
            "fields": {
                "thinking": {"open": "[THINK]", "close": "[/THINK]", "content": "text"},
                "reasoning_content": _THINK,
                "tool_calls": _json(
                    r"\[TOOL_CALLS\](?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\s*\{)",
                    r"(?=\[TOOL_CALLS\])|</s>",
                ),
                "content": _TEXT,
            },
        },
        call=("[TOOL_CALLS]NAME[ARGS]", ""),
    ),
    # Mistral before v11: one list of calls
    "mistral": Format(
        ("[TOOL_CALLS]",),
        _thinking("[/INST]", _list(r"\[TOOL_CALLS\]", r"</s>")),
        call=('[TOOL_CALLS][{"name": "NAME", "arguments": ', "}]"),
    ),
    "phi4_mini": Format(
        ("<|tool|>",),
        _thinking("<|assistant|>", _list(r"functools(?=\[)|<\|tool_call\|>", r"<\|/tool_call\|>|<\|end\|>")),
        call=('<|tool_call|>[{"name": "NAME", "arguments": ', "}]<|/tool_call|>"),
    ),
    # vLLM's template for it, which asks for `functools[...]` and writes earlier calls without it
    "phi4_mini_vllm": Format(
        ("functools[",),
        _thinking(
            "<|assistant|>",
            {
                "open_pattern": r'functools\[\s*(?=\{)|\G\s*(?:,\s*)?(?=\{\s*"name")',
                "close_pattern": r'\s*\]?\s*<\|end\|>|(?=\s*,\s*\{\s*"name")',
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
        ),
        call=('functools[{"name": "NAME", "arguments": ', "}]"),
    ),
    # Granite 3. Granite 4.0 writes as Hermes does, and 4.2 as Qwen3-Coder.
    "granite": Format(
        ("<|tool_call|>", "<|start_of_role|>"),
        _thinking(
            "<|start_of_role|>assistant<|end_of_role|>",
            _list(r"(?:<\|tool_call\|>|<tool_call>)\s*(?=\[)", r"<\|end_of_text\|>"),
        ),
        call=('<|tool_call|>[{"name": "NAME", "arguments": ', "}]"),
    ),
    # Command A and Command R7B
    "command": Format(
        ("<|START_ACTION|>",),
        {
            "start_anchor": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            "fields": {
                "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>", "content": "text"},
                "tool_calls": _list(r"<\|START_ACTION\|>\s*(?=\[)", r"<\|END_ACTION\|>", "tool_name", "parameters"),
                "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>", "content": "text"},
            },
        },
        call=(
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
            "}]<|END_ACTION|>",
        ),
        content=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    # Hunyuan A13B and Jamba
    "tool_calls": Format(
        ("<tool_calls>",),
        {
            "start_anchor_pattern": r"<\|extra_0\|>|<\|bom\|><\|assistant\|>",
            "fields": {
                "reasoning_content": _THINK,
                "tool_calls": _list(r"<tool_calls>\s*(?=\[)", r"</tool_calls>"),
                "content": _TEXT,
            },
        },
        call=('<tool_calls>[{"name": "NAME", "arguments": ', "}]</tool_calls>"),
    ),
    # OLMo 3: a call in Python's syntax on each line
    "olmo3": Format(
        ("<function_calls>",),
        _thinking(
            "<|im_start|>assistant\n",
            _python(
                r"(?:<function_calls>\s*|(?<=\))\G\s+)",
                rf"\)(?=\s+{_WORD}\()|\)\s*</function_calls>",
            ),
        ),
    ),
    # Calls in Python's syntax: Llama 3.2 and Llama 4. The list of calls is the whole answer.
    "pythonic": Format(
        ("func_name1(",),
        {
            "start_anchor_pattern": r"assistant<\|(?:end_header_id|header_end)\|>\n\n",
            "fields": {
                "reasoning_content": _THINK,
                "tool_calls": _python(
                    r"\G(?:\s*(?:<\|python_start\|>)?\[|,\s*)",
                    rf"{_NEXT}|\)\](?:<\|python_end\|>)?\s*(?:<\|eot_id\|>|<\|eom_id\|>|<\|eot\|>|<\|eom\|>)",
                ),
                "content": _TEXT,
            },
        },
    ),
    "lfm2": Format(
        ("<|tool_call_start|>",),
        {
            "start_anchor": "<|im_start|>assistant\n",
            "fields": {
                "thinking": _THINK,
                "tool_calls": _python(r"(?:<\|tool_call_start\|>\[|\G,\s*)", rf"{_NEXT}|\)\]<\|tool_call_end\|>"),
                "content": _TEXT,
            },
        },
    ),
    "gemma4": Format(
        ("<|tool_call>call:",),
        {
            "start_anchor_pattern": r"<\|turn>model\n|<tool_response\|>",
            "fields": {
                "thinking": {"open": "<|channel>thought\n", "close": "<channel|>", "content": "text"},
                "tool_calls": {
                    **_json(r"<\|tool_call>call:(?P<name>[^\s{}<>]+)", r"<tool_call\|>"),
                    "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
                },
                "content": _TEXT,
            },
        },
    ),
    # Hermes, Qwen 2.5 and Qwen 3, and Llama 3 with JSON
    "hermes": Format(("<tool_call>",), None, call=('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>")),
    "llama3": Format(("parameters", "<|eot_id|>"), None, call=('{"name": "NAME", "parameters": ', "}")),
}
"""The formats by name, in the order in which they are tried."""


def format_of(chat_template: str, tokens: Collection[str] = ()) -> Format:
    """Return the first of `FORMATS` whose marks are all in the chat template, or else all among the tokenizer's added
    `tokens`, because some templates leave out the calls. If none fits, return Hermes' format."""
    for texts in (chat_template, tokens):
        for one in FORMATS.values():
            if all(mark in texts for mark in one.marks):
                return one
    return FORMATS["hermes"]
