"""Calls and thoughts by a response template: every family's cases, no call that wasn't written, and linear work."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from tapereel.agents.rendering import FORMATS, HermesReader, Renderer, response_reader
from tapereel.agents.rendering.response_reader import ResponseReader, choose_reader
from tapereel.agents.rendering.response_templates import Format
from tapereel.agents.rendering.tool_calls import CallReader
from tapereel.tapes.errors import UsageError

from ..families import tokenizer
from .answer_formats import BEGIN, EXCEPTIONS, ONE, OTHER, PAGE, TOOLS, WRITERS, Writer, begins, found, table
from .real_strings import TOOL as WRITE_FILE
from .real_strings import counts, strings
from .real_strings import tokenizer as byte_tokenizer
from .templates_table import page

EACH = pytest.mark.parametrize("writer", WRITERS, ids=lambda one: one.title)


@EACH
def test_the_cases_of_each_family_are_read(writer: Writer) -> None:
    for case, (text, wanted) in writer.cases().items():
        got = found(writer, text)
        if (writer.title, case) in EXCEPTIONS:
            assert not got[0], "an exception may be refused, and is never a wrong call"
        else:
            assert got == (wanted, ""), case


def test_the_table_of_the_page_is_up_to_date() -> None:
    text = PAGE.read_text("utf-8")
    assert page(text, table(), begin=BEGIN, name="docs/how-to/tools.md") == text


@EACH
def test_thoughts_and_answers_are_told_apart(writer: Writer) -> None:
    text = writer.thought.format("I add them.")
    read = writer.reader.read(text + writer.write(ONE), TOOLS, prompt=writer.prompt, end=writer.end)
    assert (read.reasoning, read.answer) == ("I add them.", "")
    said = writer.said.format("It is 3.")
    for tools in (TOOLS, None):
        read = writer.reader.read(text + said, tools, prompt=writer.prompt, end="")
        assert (read.reasoning, read.answer, read.content) == ("I add them.", "It is 3.", text + said)
    assert writer.reader.read(said, TOOLS).answer == "It is 3."


@EACH
def test_an_answer_cut_off_at_any_character_makes_no_wrong_call(writer: Writer) -> None:
    for text, wanted in writer.cases().values():
        assert found(writer, text, cut=True)[0] == []
        for n in range(len(text)):
            assert found(writer, text[:n], cut=True)[0] == []
            for end in ("", writer.end):  # even if the model ended the answer there
                got, _ = found(writer, text[:n], end=end)
                assert got == wanted[: len(got)], (text[:n], got)


@EACH
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "age": 36}',
        "[1, 2, 3]",
        "[print(x) for x in y]",
        "I would call add(a=1), or not (who knows).",
        "Use <b>add</b> {1} [2].",
        "",
    ],
)
def test_an_answer_that_only_looks_like_a_call_is_an_answer(writer: Writer, text: str) -> None:
    read = writer.reader.read(text, TOOLS, end=writer.end)
    assert (read.calls, read.problem, read.content, read.chat, read.answer) == ((), "", text, (), text)


@EACH
def test_a_call_needs_an_offered_name(writer: Writer) -> None:
    text = writer.write(ONE)
    refused = writer.reader.read(text, ["mul"], end=writer.end)
    assert refused.calls == ()
    if writer.format == "llama3":  # it has no mark, so without an offered name it is text
        assert (refused.problem, refused.chat) == ("", ())
    else:
        assert "add" in refused.problem or writer.format not in ESCAPED
        assert [call["function"]["name"] for call in refused.chat] == ["add"], "a program answers by itself"
    for name in ("get-weather", "mcp.server/read", "a:b"):  # as of MCP servers
        renamed = text.replace("add", name)
        assert [call.name for call in writer.reader.read(renamed, [name], end=writer.end).calls] == [name]


ESCAPED = ["hermes", "kimi_k2", "deepseek_v3", "deepseek_v31", "mistral_v11", "command", "tool_calls"]
"""Formats of one JSON text for each call, whose end is known even if it is broken."""


@EACH
def test_one_bad_call_loses_no_other_if_its_end_is_known(writer: Writer) -> None:
    if writer.format in ("mistral", "phi4_mini", "granite", "gpt_oss", "pythonic", "lfm2", "olmo3", "llama3"):
        return  # one region, or one call for each answer
    good, bad = writer.write(ONE), writer.write(OTHER)
    at = bad.find(writer.mark)
    bad = f"{bad}junk" if at < 0 else f"{bad[:at]}junk{bad[at:]}"
    read = writer.reader.read(f"{bad}\n{good}", TOOLS, prompt="", end=writer.end)
    assert read.problem
    assert [call.arguments for call in read.calls] == ([ONE] if writer.format in ESCAPED else [])
    assert "1 of 2" in read.problem or writer.format not in ESCAPED


def template(name: str) -> dict[str, Any]:
    return json.loads(json.dumps(FORMATS[name].template))


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=add><parameter=a>2</function></tool_call>",
        "<tool_call><function=add><parameter=a>2<parameter=s>y</parameter></function></tool_call>",
        "<tool_call><function=add><parameter=s>a</function></tool_call> "
        "<tool_call><function=add><parameter=s>b</parameter></function></tool_call>",
        "<tool_call><function=add><parameter=s>Write <tool_call><function=add><parameter=a>1</parameter></function>"
        "</tool_call> so</parameter></function></tool_call>",
        "<tool_call><function=add><parameter=a>1</parameter><parameter=a>2</parameter></function></tool_call>",
        "<tool_call><function=add>2</function></tool_call>",
        "<tool_call><function=add>",
    ],
)
def test_a_call_whose_tags_are_ambiguous_is_refused(text: str) -> None:
    read = ResponseReader(template("qwen3_coder")).read(text, TOOLS)
    assert read.calls == ()
    assert read.problem


SNIPPETS = [
    *"xé5()[]{}=,'\" \n\t\\",
    *("null", "\r\n", "\\n", "\\'", "\\d", "print('a')", "', a='", '", b="', "')", ")]<|tool_call_end|>", "')]<|eot|>"),
    *("</parameter>", "<parameter=a>", "<parameter=b>\n", "</function>", "</tool_call>", "</seed:tool_call>", "</a>"),
    *("</arg_value>", "<arg_key>a</arg_key>\n<arg_value>", '<parameter name="a">', "</invoke>", "</minimax:tool_call>"),
    *(
        "</｜DSML｜parameter>",
        '<｜DSML｜parameter name="b" string="true">',
        "</｜DSML｜invoke>",
        "</｜DSML｜function_calls>",
    ),
    *(
        "<|close|>argument<|sep|>",
        '<|open|>argument key="a" type="string"<|sep|>',
        "<|close|>call<|sep|>",
        "<tool_call|>",
    ),
    *('<|"|>', '<|"|>,a:<|"|>', ")\n</function_calls>", "<think>", "</think>"),
]
"""Pieces of strings. No piece opens a call, because two calls are two calls, even if a string has one of them."""
LONE = pytest.mark.parametrize("writer", [one for one in WRITERS if not one.prompt], ids=lambda one: one.title)


@LONE
@given(st.booleans(), st.lists(st.sampled_from(SNIPPETS) | st.text(max_size=2), max_size=8).map("".join))
@settings(max_examples=40, deadline=None)
def test_no_string_is_changed(writer: Writer, last: bool, text: str) -> None:
    wanted: dict[str, Any] = {"a": 2, "s": text} if last else {"s": text, "a": 2}
    got, problem = found(writer, writer.write(wanted))
    if writer.raw or writer.format not in (*ESCAPED, "olmo3", "pythonic", "lfm2", "mistral", "granite", "llama3"):
        assert got == [wanted] or not got, "a string that can be read in two ways is refused"
        assert got or problem or "</think>" in text
    else:
        assert (got, problem) == ([wanted], "")


@LONE
def test_real_text_is_never_changed(writer: Writer) -> None:
    texts = strings()
    got = [(found(writer, writer.write({"a": 2, "s": text})), [{"a": 2, "s": text}]) for text in texts]
    assert all(calls in ([], wanted) and bool(calls) != bool(problem) for (calls, problem), wanted in got)
    refused = sum(not calls for (calls, _), _ in got)
    assert refused <= (0.65 if writer.raw else 0.05) * len(texts)


@LONE
@pytest.mark.parametrize(
    "text",
    [
        *("import os\n\nprint(1)\n", "\n\n", "", " two \n lines \r\n", "a\tb", "null", "75001", "</b></c>"),
        *(
            "x</parameter>",
            "<a>\n<parameter x>1</parameter>\n</a>\n",
            "</arg_value>",
            "x</function>",
            "</x>\n</parameter>",
        ),
    ],
)
def test_text_that_can_be_read_in_one_way_is_read(writer: Writer, text: str) -> None:
    wanted = {"a": 2, "s": text}
    assert found(writer, writer.write(wanted)) == ([wanted], "")


@pytest.mark.parametrize(
    "writer", [one for one in WRITERS if one.format in ("lfm2", "pythonic")], ids=lambda w: w.title
)
@pytest.mark.parametrize(
    ("inner", "escaped", "raw"),
    [(r"\d+", r"\d+", r"\d+"), (r"a\nb", "a\nb", None), (r"C:\new", "C:\new", None), ("a\\tb\nc", None, "a\\tb\nc")],
)
def test_a_backslash_is_an_escape_or_itself_or_refused(
    writer: Writer, inner: str, escaped: str | None, raw: str | None
) -> None:
    got, problem = found(writer, writer.write({"s": "here"}).replace("here", inner))
    wanted = raw if writer.raw else escaped
    assert got == ([] if wanted is None else [{"s": wanted}])
    assert bool(problem) == (wanted is None)


def test_arguments_in_tags_get_the_types_of_the_schema() -> None:
    properties: dict[str, Any] = {
        "i": {"type": "integer"},
        "n": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "b": {"type": "boolean"},
        "o": {"$ref": "#/$defs/Point"},
        "l": {"type": ["array", "null"]},
        "s": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "e": {"enum": [1]},
    }
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}

    def cast(**values: str) -> dict[str, Any]:
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
        text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
        return ResponseReader(template("qwen3_coder")).read(text, [tool]).calls[0].arguments

    assert cast(i="7", n="1.5", b="true", o='{"x": 1}', l="[1]", s="5", e="1") == {
        "i": 7,
        "n": 1.5,
        "b": True,
        "o": {"x": 1},
        "l": [1],
        "s": "5",
        "e": "1",
    }
    for null in ("null", "None"):
        assert cast(i="7.0", n=null, b="False", s=null) == {"i": 7, "n": None, "b": False, "s": None}
    assert cast(i="seven", n="NaN", b="1", s=" two \nlines ") == {
        "i": "seven",
        "n": "NaN",
        "b": "1",
        "s": " two \nlines ",
    }


def test_a_call_in_python_has_python_values() -> None:
    text = """[add(a=-1, s='it\\'s "so"', l=['a)]', {"b": None}], f=1.5, t=True), add()]"""
    calls = ResponseReader(template("pythonic")).read(text, TOOLS, end="<|eot_id|>").calls
    wanted = {"a": -1, "s": 'it\'s "so"', "l": ["a)]", {"b": None}], "f": 1.5, "t": True}
    assert [call.arguments for call in calls] == [wanted, {}]


def test_a_broken_call_with_a_name_reaches_a_program_with_its_text() -> None:
    read = ResponseReader(template("kimi_k2")).read(
        "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{a: 2}<|tool_call_end|>", TOOLS
    )
    assert read.calls == ()
    assert read.problem
    assert [call["function"] for call in read.chat] == [{"name": "add", "arguments": "{a: 2}"}]


OTHERS: dict[str, Any] = {
    "start_anchor_pattern": r"(?:<\|turn>model\n|<tool_response\|>)",
    "fields": {
        "reasoning_content": {"open": "<|channel>thought\n", "close_pattern": r"<channel\|>\s*", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close_pattern": r"<tool_call\|>\s*",
            "repeats": True,
            "content": "json",
            "content_args": {"string_delims": [['<|"|>', '<|"|>']], "unquoted_keys": True},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"(?:<turn\|>|<\|tool_response>|<eos>)\s*|$", "content": "text"},
    },
}
LINES: dict[str, Any] = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call (?P<name>\w+)>",
            "close_pattern": r"</call>|$",
            "repeats": True,
            "content": "kv-lines",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


def test_templates_of_other_families_work_by_themselves() -> None:
    reader = ResponseReader(OTHERS)
    call = '<|tool_call>call:add{a:2,s:<|"|>it\'s "so"<|"|>}<tool_call|>'
    read = reader.read(f"<|channel>thought\nI add.<channel|>{call}", TOOLS)
    assert [one.arguments for one in read.calls] == [{"a": 2, "s": 'it\'s "so"'}]
    assert (read.reasoning, read.problem) == ("I add.", "")
    for n in range(len(call)):
        assert reader.read(call[:n], TOOLS).calls == ()
    lines = ResponseReader(LINES)
    assert [one.arguments for one in lines.read("<call add>\na: 2\ns: y\n</call>", TOOLS).calls] == [ONE]
    assert lines.read("<call add>\na: 2\nand more\n</call>", TOOLS).calls == ()
    assert lines.read("<call add>\na: 2\n", TOOLS).calls == (), "the end of the text is no closing mark"


def test_the_setting_comes_before_the_tokenizer_and_the_table() -> None:
    def call(reader: CallReader) -> bool:
        return bool(reader.read("<call add>\na: 2\n</call>", TOOLS).calls)

    glm = "<tool_call> <arg_key>"
    assert call(choose_reader(LINES, OTHERS, glm))
    assert call(choose_reader(None, LINES, glm))
    assert not call(choose_reader(None, None, glm))
    assert isinstance(choose_reader(None, None, glm), ResponseReader)
    assert isinstance(choose_reader(None, None, "<tool_call>"), HermesReader)
    assert isinstance(choose_reader(None, None, ""), HermesReader)


LFM = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}CALLS<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}{{ tools | tojson }}"""
CALLS = """{% for c in m.tool_calls or [] %}<|tool_call_start|>[{{ c.function.name }}(
{%- for k, v in c.function.arguments.items() %}{{ k }}='{{ VALUE }}'{% endfor %})]<|tool_call_end|>{% endfor %}"""


@pytest.mark.parametrize(
    ("calls", "raw"),
    [
        ("", False),
        (CALLS.replace("VALUE", "v"), True),
        (CALLS.replace("VALUE", "v | replace('\\\\', '\\\\\\\\')"), False),
    ],
    ids=["not written", "without escapes", "with escapes"],
)
def test_a_family_is_known_by_its_vocabulary_and_writes_escapes_as_its_template_does(calls: str, raw: bool) -> None:
    words = copy.deepcopy(tokenizer("chatml"))
    words.chat_template = LFM.replace("CALLS", calls)
    assert not Renderer(words).read("<|tool_call_start|>[add(s='x')]<|tool_call_end|>", TOOLS).calls or calls
    words.add_special_tokens({"additional_special_tokens": ["<|tool_call_start|>", "<|tool_call_end|>"]})
    renderer = Renderer(words)
    for text, wanted in (("a\nb", "a\nb"), (r"a\tb", None if raw else "a\tb"), ("a\\tb\n", "a\\tb\n" if raw else None)):
        read = renderer.read(f"<|tool_call_start|>[add(s='{text}')]<|tool_call_end|>", TOOLS)
        assert [call.arguments for call in read.calls] == ([] if wanted is None else [{"s": wanted}])
        assert bool(read.problem) == (wanted is None)


def test_a_user_adds_a_format_with_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "mine", Format(("<call ",), LINES))
    assert choose_reader(None, None, "<call ").read("<call add>\na: 2\n</call>", TOOLS).calls


@pytest.mark.parametrize(
    "wrong", [{}, {"fields": {}}, {"fields": {"tool_calls": {"open": "x", "typo": 1}}}, {"fields": 1}]
)
def test_a_template_that_transformers_cannot_read_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="setting"):
        choose_reader(wrong, None, "")


MARKS = ["a", " ", "\n", "{", "}", "[", ",", '"', "<think>", "</think>", "add(", "a=1", ")]", "to=functions."]
PIECES = [
    *{piece for one in WRITERS for piece in (one.write(ONE), one.write(ONE)[:-4], one.mark, one.thought.format("x"))},
    *MARKS,
]


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.template is not None])
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=6), st.lists(st.integers(1, 9), max_size=60))
@settings(max_examples=60, deadline=None)
def test_what_a_stream_sends_begins_the_thoughts_and_the_answer(name: str, parts: list[str], sizes: list[int]) -> None:
    text, reader = "".join(parts), ResponseReader(template(name))
    for end in ("", "</s>"):
        for prompt in ("", "<think>"):
            for tools in (TOOLS, None):
                read = reader.read(text, tools, prompt=prompt, end=end)
                begins(reader.stream(tools=tools is not None, prompt=prompt), text, sizes, read)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.title)
def test_no_case_gives_a_wrong_call(writer: Writer) -> None:
    for text, wanted in [*writer.cases().values(), (writer.cut(), [])]:
        calls, _ = found(writer, text)
        assert all(call in wanted for call in calls)
    assert found(writer, writer.cut(), end="", cut=True)[0] == []


class Work:
    """Counts the characters that patterns go over."""

    done = 0


class CountedPattern:
    def __init__(self, pattern: Any) -> None:
        self.pattern = pattern

    def match(self, text: str, at: int = 0, **more: Any) -> Any:
        mark = self.pattern.match(text, at, **more)
        Work.done += mark.end() - at if mark else 1
        return mark

    def search(self, text: str, at: int = 0, *more: Any) -> Any:
        mark = self.pattern.search(text, at, *more)
        Work.done += (mark.end() if mark else more[0] if more else len(text)) - at
        return mark


@pytest.mark.parametrize("name", [name for name, one in FORMATS.items() if one.template is not None])
def test_the_work_of_reading_grows_with_the_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ResponseReader(template(name))
    for field in reader._spec.fields.values():
        field.open_re = field.open_re and CountedPattern(field.open_re)
        field.close_re = field.close_re and CountedPattern(field.close_re)
    monkeypatch.setattr(reader, "_tag", reader._tag and CountedPattern(reader._tag))
    json_end = response_reader.json_end

    def counted(text: str, at: int) -> int | None:
        end = json_end(text, at)
        lexed = regex.match(r'[\s{}\[\]"]*', text, pos=at)
        Work.done += (lexed.end() if end is None and lexed is not None else end or at) - at
        return end

    monkeypatch.setattr(response_reader, "json_end", counted)
    for writer in WRITERS:
        whole = writer.write(ONE)
        for unit in (whole, whole[: len(whole) // 2], whole[:-2], writer.mark, "<think>", "</think>", "x "):
            counts = []
            for n in (100, 400):
                Work.done = 0
                reader.read(unit * n, TOOLS, end=writer.end)
                counts.append(Work.done)
            assert counts[1] <= 4.2 * counts[0], (unit, counts)


PHI = tuple(
    f"<|{name}|>" for name in ("system", "user", "assistant", "end", "tool", "/tool", "tool_call", "/tool_call")
)
"""Control tokens of Phi-4-mini. vLLM's template doesn't write those of tools."""
WRITE = '{"name": "write-file", "arguments": {"path": "a", "text": "]<|end|>, {\\"name\\": 1}"}}'


@pytest.mark.parametrize(("name", "more"), [("vllm_phi4_mini", ()), ("vllm_phi4_mini", PHI), ("vllm_llama32_json", ())])
def test_calls_by_the_templates_that_vllm_has_for_a_model_are_read(name: str, more: tuple[str, ...]) -> None:
    template = (Path(__file__).parents[1] / "templates" / f"{name}.jinja").read_text("utf-8")
    renderer = Renderer(byte_tokenizer(template, more))
    assert renderer.faults() == []
    assert dict(counts(template, more)) == {"right": len(strings())}
    if name != "vllm_phi4_mini":
        return
    called = [("write-file", {"path": "a", "text": ']<|end|>, {"name": 1}'})]
    for text, wanted in (
        (f"functools[{WRITE}]", called),  # as the template asks for
        (f"functools[{WRITE}, {WRITE}]", called * 2),
        (WRITE, called),  # as the template writes earlier calls
        (f"<think>functools[{WRITE}]</think>No", []),
        (f"I may write {WRITE}.", []),
        (f"functools[{WRITE}"[:60], []),
        (f"functools[{WRITE}, 5]", []),
    ):
        assert [(one.name, one.arguments) for one in renderer.read(text, [WRITE_FILE]).calls] == wanted, text
