"""Counts how real text is read that a family's own published chat template has written as an argument.

    python -m tests.agents.rendering.real_strings FOLDER...      writes real_strings.json

The folders have the templates: `trl/chat_templates` in TRL's wheel, and `vendor/llama.cpp/models/templates` and
`examples` in the source packages of llama-cpp-python and vLLM. `--all` prints the counts of all templates instead.
"""

from __future__ import annotations

import datetime
import difflib
import json
import platform
import plistlib
import re
import sys
import sysconfig
import xmlrpc.client
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tapereel.agents.rendering import Renderer
from tapereel.agents.rendering.renderer import RenderError

READ = Path(__file__).with_name("real_strings.json")
TEMPLATES = {
    "Hermes, Qwen 2.5, Qwen 3": "qwen3",
    "Llama 3.1 (JSON)": "llama3_1",
    "Qwen3-Coder, Qwen 3.5 and 3.6": "qwen3_6",
    "Nemotron 3": "nemotron_3_nano",
    "Seed-OSS": "ByteDance-Seed-OSS",
    "GLM 4.5": "glm4moe",
    "gpt-oss, as its template writes": "gptoss",
    "Mistral to v7": "tool_chat_template_mistral3",
    "Mistral v11 and later": "mistralai-Ministral-3-14B-Reasoning-2512",
    "Phi-4 mini": "tool_chat_template_phi4_mini",
    "Kimi K2": "moonshotai-Kimi-K2",
    "Kimi K3": "Kimi-K3",
    "DeepSeek V3, R1": "deepseekv3",
    "DeepSeek V3.1": "tool_chat_template_deepseekv31",
    "DeepSeek V3.2": "deepseek-ai-DeepSeek-V3.2",
    "MiniMax M2": "MiniMax-M2",
    "Granite 3": "tool_chat_template_granite",
    "Command A and R7B": "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "Hunyuan A13B, Jamba": "tool_chat_template_hunyuan_a13b",
    "Llama 4, as its template writes": "tool_chat_template_llama4_pythonic",
    "LFM2": "lfm2_v2",
    "LFM2.5, as its template writes": "lfm2_2_5",
    "Gemma 4": "gemma4_v5",
}
"""The name of a template of each family. TRL's names have no capitals and begin with no `tool`."""
LIBRARY = Path(sysconfig.get_path("stdlib"))
FILES = ("argparse", "ast", "asyncio/tasks", "csv", "dataclasses", "difflib", "email/message", "enum", "html/parser")
FILES += ("json/decoder", "logging/config", "re/_parser", "shlex", "string", "tarfile", "textwrap", "xml/dom/minidom")
MARK = re.compile(r"<[|｜]?[^<>\s='\"{}]+[|｜]?>|\[/?[A-Z_]+\]|</?[a-z_:]+>|<\|\"\|>|\]~b\]|\]~!b\[|\[e~\[")
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "</s>", "<｜end▁of▁sentence｜>", "<seed:eos>", "<|end_of_msg|>", "<eos>")
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "write-file",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "encoding": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
            "required": ["path", "text"],
        },
    },
}


def strings() -> list[str]:
    """172 texts: pieces of the standard library, HTML, XML, property lists, differences, JSON, scripts and marks."""
    sources = [(LIBRARY / f"{name}.py").read_text("utf-8") for name in FILES]
    pieces = [
        "".join(lines[at : at + size])
        for lines in (source.splitlines(keepends=True) for source in sources)
        for at, size in ((0, 3), (12, 7), (40, 12), (90, 25), (150, 60), (200, 1))
    ]
    scripts = LIBRARY / "venv" / "scripts" / "common"
    html = (LIBRARY / "idlelib" / "help.html").read_text("utf-8")
    shell, power = ((scripts / name).read_text("utf-8") for name in ("activate", "Activate.ps1"))
    rows: Any = [{"a": 1, "b": [True, "it's"]}, "x\ty", 2.5]
    made = [
        xmlrpc.client.dumps((rows,), "run"),
        plistlib.dumps({"rows": rows}).decode(),
        "".join(difflib.unified_diff(pieces[3].splitlines(True), pieces[4].splitlines(True), "a.py", "b.py")),
        "".join(difflib.ndiff(pieces[9].splitlines(True), pieces[10].splitlines(True))),
        json.dumps({"code": pieces[1], "rows": rows}, indent=2),
    ]
    texts = [html[k : k + 700] for k in range(0, 13000, 1000)] + [shell[k : k + 300] for k in range(0, 1800, 200)]
    texts += [power[k : k + 400] for k in range(0, 6000, 600)]
    texts += [one for piece in made for one in (piece, piece.replace("\n", "\r\n"), f"\n\n{piece}\n\n")]
    texts += [
        sources[8],
        sources[8].replace("    ", "\t"),
        "\tx",
        " x ",
        "\n",
        "",
        "null",
        "None",
        "75001",
        "true",
        '"x"',
    ]
    texts += [
        "x</parameter>",
        '<a>\n<parameter name="x">1</parameter>\n</a>',
        "x</arg_value>\n",
        "</function>",
        "[1, 2]",
    ]
    texts += ['a<|"|>b', "print('a', encoding='b')", "it's", "a, b='c'", "\\d+\\.", "</tool_call>\n", "C:\\new\\"]
    return [*pieces, *texts]


def tokenizer(template: str, more: Collection[str] = ()) -> Any:
    """A tokenizer of bytes with a chat template, whose marks and `more` are tokens."""
    alphabet = {char: k for k, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = {*MARK.findall(template), "<eos>", *more, *(["</s>"] if "[TOOL_CALLS]" in template else [])}
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in sorted(marks)])
    end = next(end for end in ENDS if end in marks)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=end, bos_token="<eos>", chat_template=template)


def answer(renderer: Renderer, text: str) -> tuple[str, str, str] | None:
    """(prompt, answer, end) for a call with `text` as the template writes it, or None if the template refuses it."""
    template, arguments = renderer._template, {"path": "a.py", "text": text}
    function = {"name": "write-file", "arguments": arguments if template.takes_objects else json.dumps(arguments)}
    user, call = {"role": "user", "content": "Qx"}, {"id": "abcdefghi", "type": "function", "function": function}
    try:
        prompt = template.render([user], [TOOL])
        whole = template.render(
            [user, {"role": "assistant", "content": "", "tool_calls": [call]}], [TOOL], prompt=False
        )
    except RenderError:
        return None
    at = next((k for k, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
    at = next((mark.start() for mark in MARK.finditer(whole) if mark.start() < at < mark.end()), at)
    stop, end = max((whole.rfind(token), token) for token in map(renderer._codec.token, renderer.end_ids))
    return (prompt[:at], whole[at:stop], end) if stop >= at else (prompt[:at], whole[at:], "")


def counts(template: str, more: Collection[str] = ()) -> Counter[str]:
    """How many strings are `right`, `refused` and `wrong`, `unread` (no call and no problem), or not `written`."""
    renderer, found = Renderer(tokenizer(template, more)), Counter[str]()
    for text in strings():
        written = answer(renderer, text)
        if written is None:
            found["not written"] += 1
            continue
        prompt, said, end = written
        read = renderer.reader.read(said, [TOOL], prompt=prompt, end=end)
        calls = [(call.name, call.arguments) for call in read.calls]
        right = calls == [("write-file", {"path": "a.py", "text": text})] and not read.problem
        found["right" if right else "wrong" if calls else "refused" if read.problem else "unread"] += 1
    return found


def main(words: list[str]) -> None:
    paths = {path.stem: path for word in words for path in sorted(Path(word).glob("*.jinja"))}
    if "--all" in words:
        for name, path in paths.items():
            print(f"{name:60}", dict(counts(path.read_text("utf-8"))), flush=True)
        return
    found = {name: dict(counts(paths[name].read_text("utf-8"))) for name in TEMPLATES.values()}
    made = {"date": datetime.date.today().isoformat(), "python": platform.python_version(), "strings": len(strings())}
    READ.write_text(json.dumps({**made, "counts": found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
