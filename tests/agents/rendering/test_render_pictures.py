"""Pictures in prompts: identified by place, whatever tokens are sampled and whatever texts spell the marker."""

from __future__ import annotations

from typing import Any

import pytest

from tapereel.agents.rendering.renderer import Renderer, RenderError

from .seeing import QWEN, SMOL, SPECIAL, Pads, Tiles, image, say, tokenizer

FAMILIES = {"pads": (QWEN, Pads()), "tiles": (SMOL, Tiles())}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Renderer, Any]:
    template, pictures = FAMILIES[request.param]
    return Renderer(tokenizer(template), pictures), pictures


def test_each_marker_becomes_the_tokens_of_its_picture(family: tuple[Renderer, Any]) -> None:
    renderer, pictures = family
    a, b = image("a"), image("b", 90, 30)
    rendered = renderer.prompt([say("user", "look", a, "and", b, "Which?")])
    assert [place.media for place in rendered.places] == [(a["media"],), (b["media"],)]
    for place, part in zip(rendered.places, (a, b), strict=True):
        ids, grid = pictures.expand(part["width"], part["height"])
        assert (rendered.ids[place.offset : place.end], place.grid) == (ids, grid)


def test_a_renderer_of_text_refuses_pictures_as_before() -> None:
    with pytest.raises(RenderError, match="'image'; this renderer takes text only"):
        Renderer(tokenizer(QWEN)).prompt([say("user", image("a"))])


def test_a_template_without_parts_is_refused_at_the_start() -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}<|im_start|>"
    with pytest.raises(RenderError, match=r"writes the token '<\|image_pad\|>' 0 times for one picture"):
        Renderer(tokenizer(plain), Pads())
    assert SPECIAL.index("<|image_pad|>") not in Renderer(tokenizer(plain)).prompt([say("user", "x")]).ids
