"""The report: everything given is on the page, nothing given can act on it, and it needs nothing from elsewhere."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tapereel.finetune.report.plots import Curve, Level, curve_svg, plot_curve, running_mean
from tapereel.finetune.report.report import ReportData, _parts, _shade, render_report, tape_page, write_report

from .making import played, sampled_tape
from .pages import EVIL, curve, decode, report_of


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_what_is_given_is_on_the_page(tmp_path: Path):
    write_report(tmp_path / "report.html", report_of("unmistakable"))
    page = _Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.open == []
    # title twice, subtitle, fact 3, plot title, caption, legend, level, axes 2, score 2, books 4 and bars' names, ...
    assert sum("unmistakable" in words for words in page.words) >= 20
    words = " ".join(" ".join(page.words).split())
    assert "unmistakable: 0.500" in words, "the level in the legend of the plot"
    assert "not measured" in words
    assert "1,200" in words
    assert "exact 1.000" in words


def test_text_of_others_can_not_act_on_the_page():
    text = render_report(report_of(EVIL))
    page = _Page(text)
    assert page.open == []
    assert {tag for tag, _ in page.tags} & {"script", "iframe", "object", "form", "link", "img", "a", "base"} == set()
    assert not [attribute for _, attributes in page.tags for attribute in attributes if attribute.startswith("on")]
    assert "{{ 7*7 }}" in text, "a template's syntax in a value is text"
    assert "$x_1$" in text, "mathematics in a name is text"
    assert not any(c in text for c in "\x1b\u202e")


def test_the_page_fetches_nothing_and_runs_nothing():
    text = render_report(report_of("x"))
    page = _Page(text)
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    links = [
        value
        for _, attributes in page.tags
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href", "action", "data")
    ]
    assert [link for link in links if not (link or "").startswith("#")] == []
    assert not re.findall(r"url\((?!#)|@import", text)


def test_a_report_of_little_leaves_out_what_it_lacks():
    page = _Page(render_report(ReportData(title="t")))
    assert not {"table", "svg", "details", "h2"} & {tag for tag, _ in page.tags}


def test_tokens_are_shaded_by_probability_and_stamped_where_the_version_changes():
    tape = sampled_tape("abc", logprobs=[-0.001, -0.7, -9.0, math.nan], spans=(("m:1", 0, 2), ("m:2", 2, 4)))
    text = render_report(ReportData(title="t", tapes=(tape_page(tape, "c", decode),)))
    classes = re.findall(r'<span class="tok (\w+)" title="log-prob ([^,"]*)', text)
    assert classes == [("p0", "-0.001"), ("p1", "-0.700"), ("p5", "-9.000"), ("un", "\N{EN DASH}")]
    assert re.findall(r'class="stamp">(m:\d)<', text) == ["m:1", "m:2"]
    assert [_shade(x) for x in (0.0, -0.59, -0.61, -2.9, -3.1, -99.0)] == ["p0", "p0", "p1", "p4", "p5", "p5"]


def test_a_tape_of_an_engine_without_log_probs_is_shown_as_written():
    page = tape_page(sampled_tape("abc", logprobs=None), "c", decode)
    assert "".join(token.text for token in page.steps[1].tokens) == "abc<|end|>"
    assert all(math.isnan(token.logprob) and token.version is None for token in page.steps[1].tokens)
    assert tape_page(sampled_tape("abc", logprobs=None), "c").steps[1].tokens == ()


def test_the_parts_of_a_whole_add_up_and_nothing_has_no_colour():
    parts = _parts({"a": 1.0, "b": 0.0, "c": 3.0})
    assert parts == [("c", 3.0, 0.75, 1), ("a", 1.0, 0.25, 2), ("b", 0.0, 0.0, 0)]
    assert _parts({"a": 0.0}) == [("a", 0.0, 0.0, 0)]


def test_a_curve_is_a_png_of_the_promised_size(tmp_path: Path):
    plot_curve(
        tmp_path / "curve.png",
        [curve("$a_b$"), Curve(name="one", x=(1,), y=(0.5,))],
        title="t",
        levels=[Level(name=f"l{i}", value=i / 10) for i in range(6)],
    )
    head = (tmp_path / "curve.png").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert (int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")) == (1600, 900)


def test_the_svg_takes_the_colours_of_the_page_and_is_the_same_each_time():
    svg = curve_svg([curve(), curve("b")], levels=[Level(name="l", value=0.5)])
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert {"var(--ink)", "var(--faint)", "var(--series-1)", "var(--series-2)"} <= set(re.findall(r"var\([^)]*\)", svg))
    assert re.findall(r"#[0-9a-f]{6}\b", svg) == []
    assert svg == curve_svg([curve(), curve("b")], levels=[Level(name="l", value=0.5)])


def test_rewards_from_0_to_1_are_framed_by_that_range_and_others_by_their_own():
    def frame(*values: float) -> list[str]:
        svg = curve_svg([Curve(name="c", x=tuple(range(len(values))), y=values)])
        return re.findall(r">\s*(-?[0-9.]+)\s*</text>", svg[svg.index('id="matplotlib.axis_2"') :])

    assert {"0.0", "1.0"} <= set(frame(0.4, 0.5, 0.6))
    assert "0.0" not in frame(4.0, 5.0, 6.0)


def test_an_end_with_a_cause_tells_it_in_full_inside_and_in_a_word_outside():
    tape = played("x")
    text = render_report(ReportData(title="t", tapes=(tape_page(tape, "c"),)))
    assert '<span class="pill">error (agent)</span>' in text
    assert "ended by agent: ValueError: invalid literal" in text


def test_a_running_mean_leaves_unknown_values_out():
    assert running_mean([1.0, math.nan, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]
    assert math.isnan(running_mean([math.nan], 3)[0])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"x": (1, 2), "y": (1.0,)}, "2 places and 1 values"),
        ({"x": (1,), "y": (1.0,), "mean_of": 0}, "can't be averaged over 0"),
    ],
)
def test_a_curve_that_does_not_add_up_is_refused(values, says: str):
    with pytest.raises(ValueError, match=says):
        Curve(name="c", **values)
