"""How each model family writes thoughts and calls, and what the readers make of five cases of each.

python -m tests.agents.rendering.answer_formats      writes the table into docs/how-to/tools.md
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tapereel.agents import CallsRead
from tapereel.agents.rendering import FORMATS, HermesReader
from tapereel.agents.rendering.response_reader import ResponseReader
from tapereel.agents.rendering.tool_calls import AnswerStream, CallReader

from .real_strings import READ, TEMPLATES
from .templates_table import page

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "tools.md"
JUDGED = Path(__file__).with_name("format_judges.json")
"""What vLLM and `renderers` make of the same cases. `format_judges` writes it."""
BEGIN = "<!-- made by tests/agents/rendering/answer_formats.py -->\n"

Arguments = dict[str, Any]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
ONE: Arguments = {"a": 2, "s": "y"}
OTHER: Arguments = {"a": -3, "s": "75001"}


def _objects(calls: tuple[Arguments, ...], key: str = "arguments") -> list[str]:
    return [json.dumps({"name": "add", key: call}) for call in calls]


def _hermes(*calls: Arguments) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in _objects(calls))


def _llama(*calls: Arguments) -> str:
    return "; ".join(_objects(calls, "parameters"))


def _coder(*calls: Arguments, mark: str = "tool_call", line: str = "\n") -> str:
    def body(call: Arguments) -> str:
        return "".join(f"<parameter={key}>{line}{value}{line}</parameter>\n" for key, value in call.items())

    return "\n".join(f"<{mark}>\n<function=add>\n{body(call)}</function>\n</{mark}>" for call in calls)


def _seed(*calls: Arguments) -> str:
    return _coder(*calls, mark="seed:tool_call", line="")


def _granite(*calls: Arguments) -> str:
    return f"<|tool_call|>[{', '.join(_objects(calls))}]"


def _command(*calls: Arguments) -> str:
    each = (
        json.dumps({"tool_call_id": str(k), "tool_name": "add", "parameters": call}) for k, call in enumerate(calls)
    )
    return f"<|START_ACTION|>[\n    {f',{chr(10)}    '.join(each)}\n]<|END_ACTION|>"


def _tool_calls(*calls: Arguments) -> str:
    return f"<tool_calls>[{', '.join(_objects(calls))}]</tool_calls>"


def _olmo(*calls: Arguments) -> str:
    each = ("add(" + ", ".join(f"{key}={json.dumps(value)}" for key, value in call.items()) + ")" for call in calls)
    return f"<function_calls>\n{chr(10).join(each)}\n</function_calls>"


def _glm(*calls: Arguments) -> str:
    def body(call: Arguments) -> str:
        return "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in call.items())

    return "\n".join(f"<tool_call>add\n{body(call)}</tool_call>" for call in calls)


def _harmony(*calls: Arguments) -> str:
    return "<|call|><|start|>assistant".join(
        f" to=functions.add<|channel|>commentary json<|message|>{json.dumps(call)}" for call in calls
    )


def _harmony_sampled(*calls: Arguments) -> str:
    return "<|call|><|start|>assistant".join(
        f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{json.dumps(call)}" for call in calls
    )


def _mistral(*calls: Arguments) -> str:
    return f"[TOOL_CALLS][{', '.join(_objects(calls))}]"


def _mistral_v11(*calls: Arguments) -> str:
    return "".join(f"[TOOL_CALLS]add[ARGS]{json.dumps(call)}" for call in calls)


def _phi(*calls: Arguments) -> str:
    return f"functools[{', '.join(_objects(calls))}]"


def _kimi(*calls: Arguments) -> str:
    each = (
        f"<|tool_call_begin|>functions.add:{k}<|tool_call_argument_begin|>{json.dumps(call)}<|tool_call_end|>"
        for k, call in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def _deepseek_v3(*calls: Arguments) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{json.dumps(call)}\n```<｜tool▁call▁end｜>"
        for call in calls
    )
    return f"<｜tool▁calls▁begin｜>{chr(10).join(each)}<｜tool▁calls▁end｜>"


def _deepseek_v31(*calls: Arguments) -> str:
    each = (f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{json.dumps(call)}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>"


def _minimax(*calls: Arguments) -> str:
    def body(call: Arguments) -> str:
        return "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in call.items())

    each = "\n".join(f'<invoke name="add">\n{body(call)}</invoke>' for call in calls)
    return f"<minimax:tool_call>\n{each}\n</minimax:tool_call>"


def _pythonic(*calls: Arguments) -> str:
    each = ("add(" + ", ".join(f"{key}={value!r}" for key, value in call.items()) + ")" for call in calls)
    return f"[{', '.join(each)}]"


def _lfm2(*calls: Arguments) -> str:
    return f"<|tool_call_start|>{_pythonic(*calls)}<|tool_call_end|>"


def _bare(*calls: Arguments, quote: str = '"', all: bool = True) -> str:
    """Calls in Python's syntax, but without escapes. With `all`, every value is in quotes."""

    def value(one: Any) -> str:
        return f"{quote}{one}{quote}" if all or isinstance(one, str) else str(one)

    each = ("add(" + ", ".join(f"{key}={value(one)}" for key, one in call.items()) + ")" for call in calls)
    return f"[{', '.join(each)}]"


def _lfm25(*calls: Arguments) -> str:
    return f"<|tool_call_start|>{_bare(*calls, quote=chr(39), all=False)}<|tool_call_end|>"


def _kimi_k3(*calls: Arguments) -> str:
    def body(call: Arguments) -> str:
        return "".join(
            f'<|open|>argument key="{key}" type="{"string" if isinstance(value, str) else "number"}"<|sep|>{value}'
            "<|close|>argument<|sep|>"
            for key, value in call.items()
        )

    each = (
        f'<|open|>call tool="add" index="{k + 1}"<|sep|>{body(call)}<|close|>call<|sep|>'
        for k, call in enumerate(calls)
    )
    said = "<|open|>response<|sep|><|close|>response<|sep|>"
    return f"{said}<|open|>tools<|sep|>{''.join(each)}<|close|>tools<|sep|><|close|>message<|sep|>"


def _deepseek_v32(*calls: Arguments) -> str:
    def body(call: Arguments) -> str:
        return "".join(
            f'<｜DSML｜parameter name="{key}" string="{kind}">{value}</｜DSML｜parameter>\n'
            for key, value in call.items()
            for kind in (json.dumps(isinstance(value, str)),)
        )

    each = (f'<｜DSML｜invoke name="add">\n{body(call)}</｜DSML｜invoke>\n' for call in calls)
    return f"<｜DSML｜function_calls>\n{''.join(each)}</｜DSML｜function_calls>"


def _gemma(*calls: Arguments) -> str:
    def value(one: Any) -> str:
        return f'<|"|>{one}<|"|>' if isinstance(one, str) else json.dumps(one)

    def body(call: Arguments) -> str:
        return ",".join(f"{key}:{value(one)}" for key, one in call.items())

    return "".join(f"<|tool_call>call:add{{{body(call)}}}<tool_call|>" for call in calls)


@lru_cache
def reader(format: str, raw: bool = False) -> CallReader:
    """The reader of a format in `FORMATS`."""
    template = FORMATS[format].template
    return HermesReader() if template is None else ResponseReader(template, raw=raw)


@dataclass(frozen=True)
class Writer:
    """How a family writes an answer."""

    title: str
    format: str
    """Name in `FORMATS`."""
    write: Callable[..., str]
    end: str
    """The token that ends an answer with a call."""
    mark: str
    """A mark that ends a call, which a string may contain."""
    thought: str = "<think>\n{}\n</think>\n\n"
    prompt: str = ""
    """The end of the prompt, if it opens the thought."""
    said: str = "{}"
    """The marks around the text of an answer."""
    raw: bool = False
    """Whether the chat template writes Python's syntax without escapes."""

    @property
    def reader(self) -> CallReader:
        return reader(self.format, self.raw)

    def cases(self) -> dict[str, tuple[str, list[Arguments]]]:
        """Each case's text, and the calls in it."""
        opened = "</think>\n\n" if self.prompt else ""
        tricky = {"a": 2, "s": f'it\'s {self.mark}, "x" {{1}}'}
        return {
            "one call": (opened + self.write(ONE), [ONE]),
            "two calls": (opened + self.write(ONE, OTHER), [ONE, OTHER]),
            "thought and call": (self.thought.format("I add them.") + self.write(ONE), [ONE]),
            "call in a thought": (self.thought.format(f"I may write {self.write(ONE)} .") + "No.", []),
            "mark in a string": (opened + self.write(tricky), [tricky]),
        }

    def cut(self) -> str:
        """A call that was cut off."""
        text = self.cases()["one call"][0]
        return text[: len(text) * 2 // 3]


HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>{}"
WRITERS = (
    Writer("Hermes, Qwen 2.5, Qwen 3", "hermes", _hermes, "<|im_end|>", "</tool_call>"),
    Writer("Llama 3.1 (JSON)", "llama3", _llama, "<|eot_id|>", "<|eot_id|>"),
    Writer("Qwen3-Coder, Qwen 3.5 and 3.6", "qwen3_coder", _coder, "<|im_end|>", "</tool_call>"),
    Writer(
        "Nemotron 3",
        "qwen3_coder",
        _coder,
        "<|im_end|>",
        "</tool_call>",
        "{}\n</think>\n\n",
        "<|im_start|>assistant\n<think>\n",
    ),
    Writer(
        "Seed-OSS",
        "seed_oss",
        _seed,
        "<seed:eos>",
        "</seed:tool_call>",
        "<seed:think>{}</seed:think>",
    ),
    Writer("GLM 4.5", "glm", _glm, "<|observation|>", "</tool_call>"),
    Writer("gpt-oss, as its template writes", "gpt_oss", _harmony, "<|call|>", "<|call|>", HARMONY, said=FINAL),
    Writer("gpt-oss, as it often samples", "gpt_oss", _harmony_sampled, "<|call|>", "<|call|>", HARMONY, said=FINAL),
    Writer("Mistral to v7", "mistral", _mistral, "</s>", "</s>"),
    Writer("Mistral v11 and later", "mistral_v11", _mistral_v11, "</s>", "</s>", "[THINK]{}[/THINK]"),
    Writer("Phi-4 mini", "phi4_mini", _phi, "<|end|>", "<|end|>"),
    Writer("Kimi K2", "kimi_k2", _kimi, "<|im_end|>", "<|tool_call_end|>"),
    Writer(
        "Kimi K3",
        "kimi_k3",
        _kimi_k3,
        "<|end_of_msg|>",
        "<|close|>call<|sep|>",
        "<|open|>think<|sep|>{}<|close|>think<|sep|>",
        said="<|open|>response<|sep|>{}<|close|>response<|sep|>",
    ),
    Writer("DeepSeek V3, R1", "deepseek_v3", _deepseek_v3, "<｜end▁of▁sentence｜>", "<｜tool▁call▁end｜>"),
    Writer("DeepSeek V3.1", "deepseek_v31", _deepseek_v31, "<｜end▁of▁sentence｜>", "<｜tool▁call▁end｜>"),
    Writer("DeepSeek V3.2", "deepseek_v32", _deepseek_v32, "<｜end▁of▁sentence｜>", "</｜DSML｜invoke>"),
    Writer("MiniMax M2", "minimax_m2", _minimax, "[e~[", "</invoke>"),
    Writer("Granite 3", "granite", _granite, "<|end_of_text|>", "<|end_of_text|>"),
    Writer(
        "Command A and R7B",
        "command",
        _command,
        "<|END_OF_TURN_TOKEN|>",
        "<|END_ACTION|>",
        "<|START_THINKING|>{}<|END_THINKING|>",
        said="<|START_RESPONSE|>{}<|END_RESPONSE|>",
    ),
    Writer("Hunyuan A13B, Jamba", "tool_calls", _tool_calls, "<|eos|>", "</tool_calls>"),
    Writer("OLMo 3", "olmo3", _olmo, "<|im_end|>", ")\n</function_calls>"),
    Writer("Python lists (Llama 3.2 and 4)", "pythonic", _pythonic, "<|eot_id|>", ")]<|eot_id|>"),
    Writer("Llama 4, as its template writes", "pythonic", _bare, "<|eot|>", ")]<|eot|>", raw=True),
    Writer("LFM2", "lfm2", _lfm2, "<|im_end|>", ")]<|tool_call_end|>"),
    Writer("LFM2.5, as its template writes", "lfm2", _lfm25, "<|im_end|>", ")]<|tool_call_end|>", raw=True),
    Writer("Gemma 4", "gemma4", _gemma, "<turn|>", "<tool_call|>", "<|channel>thought\n{}<channel|>"),
)
EXCEPTIONS = {
    ("Gemma 4", "mark in a string"): "its strings have delimiters of their own, which JSON's syntax doesn't know",
    ("Llama 4, as its template writes", "mark in a string"): "nothing escapes the quotes in the string",
    ("LFM2.5, as its template writes", "mark in a string"): "nothing escapes the quote in the string",
}
"""The reason for each case that isn't read, by title and case."""


def found(writer: Writer, text: str, **more: Any) -> tuple[list[Arguments], str]:
    """The arguments of the calls that are read, and the problem."""
    more = {"end": writer.end, **more}
    read = writer.reader.read(text, TOOLS, prompt=writer.prompt, **more)
    assert all(call.name == "add" for call in read.calls)
    return [call.arguments for call in read.calls], read.problem


def begins(stream: AnswerStream, text: str, sizes: list[int], read: CallsRead) -> None:
    """Check that the pieces which a stream sends of the text are the beginning of its thoughts and of its answer."""
    at, sent = 0, {True: "", False: ""}
    for size in [*sizes, len(text)]:
        for piece in stream.feed(text[at : at + size]):
            assert piece.text
            sent[piece.thought] += piece.text
        at += size
        assert read.reasoning.startswith(sent[True]), (sent, read)
        assert read.answer.startswith(sent[False]), (sent, read)


def table() -> str:
    """The part of the page: how many of the five cases are read, and how many answers give a wrong call. The last
    column has the texts of `real_strings`."""
    real = json.loads(READ.read_text("utf-8"))
    judged = json.loads(JUDGED.read_text("utf-8"))
    versions = [f"{judge} {judged[name]['version']}" for judge, name in (("vLLM", "vllm"), ("renderers", "renderers"))]
    lines = [f"| family | Tapereel | {' | '.join(versions)} | of {real['strings']} texts |", "|---|---|---|---|---|"]
    for writer in WRITERS:
        ours = {"read": 0, "wrong": int(found(writer, writer.cut(), cut=True)[0] != [])}
        for text, wanted in writer.cases().values():
            got, problem = found(writer, text)
            ours["read"] += (got, problem) == (wanted, "")
            ours["wrong"] += any(call not in wanted for call in got)
        theirs = [judged[name]["counts"].get(writer.title) for name in ("vllm", "renderers")]
        texts = real["counts"].get(TEMPLATES.get(writer.title, ""))
        cells = [*(_cell(one) for one in (ours, *theirs)), _texts(texts) if texts else "–"]
        lines.append(f"| {writer.title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(counts: dict[str, Any] | None) -> str:
    """The count of a family's read cases, with the wrong ones in brackets. A dash if the judge didn't read them."""
    if counts is None:
        return "–"
    return f"{counts['read']} ({counts['wrong']})" if counts["wrong"] else str(counts["read"])


def _texts(counts: dict[str, int]) -> str:
    """The count of texts that are read, and of those that are refused or wrong."""
    others = [f"{counts[kind]} {kind}" for kind in ("refused", "wrong") if counts.get(kind)]
    return ", ".join([str(counts["right"]), *others])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8"), table(), begin=BEGIN, name="docs/how-to/tools.md"), "utf-8")
