"""Log-probs and gradients of rows that show pictures, against the model's own public forward of one row at a time."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tapereel.finetune import Row
from tapereel.finetune.data import BadBatch
from tapereel.finetune.trainer import forward, plan, score
from tapereel.finetune.trainer.micro_batches import Pictures

from .seen import FAMILIES, oracle, oracles, png, pretrained, sampled, shown

A, B, C = png(40, 24, 0), png(16, 16, 1), png(60, 33, 2)
LONG = "Here are the rules, which are long enough to be worth a forward pass of their own: "
FAMILY = pytest.mark.parametrize("family", FAMILIES)


def mixed(family: str) -> list[Row]:
    """Rows of several turns with 0 to 3 pictures of several sizes, and of text alone, in no order."""
    return [
        shown(family, [(["Where? ", A, " and ", B], sampled(3, 0)), ([C, " now?"], sampled(4, 1))], "a", "g"),
        shown(family, [("Where is it?", sampled(5, 2)), ("And now?", sampled(2, 3))], "b", "h"),
        shown(
            family,
            [([A, "?"], sampled(2, 4)), ("no", sampled(3, 5)), (["look ", B, " ", B, " ", A], sampled(1, 6))],
            "c",
            "i",
        ),
        shown(family, [(["text"], sampled(1, 7))], "d", "j"),
        shown(family, [(["begin ", C, " ", B, " end"], sampled(6, 8))], "e", "k"),
    ]


def scored(family: str, rows: list[Row], **how: Any) -> Tensor:
    found = pretrained(family)
    return score(found.model, rows, vision=found.vision, **how).logprob


@FAMILY
@pytest.mark.parametrize("how", [{}, {"pack": True}, {"micro_tokens": 1}, {"micro_tokens": 1, "pack": True}])
def test_log_probs_are_those_of_the_model_itself(family: str, how: dict[str, Any]) -> None:
    rows = mixed(family)
    assert (scored(family, rows, **how) - oracles(family, rows)).abs().max() < 1e-4
    order = [3, 0, 4, 2, 1]
    again = scored(family, [rows[i] for i in order], **how).split([len(rows[i].own) for i in order])
    assert (torch.cat([again[order.index(i)] for i in range(5)]) - oracles(family, rows)).abs().max() < 1e-4


@FAMILY
def test_text_alone_gives_the_body_nothing_but_ids(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pretrained(family)
    body: Any = found.model.get_decoder()
    seen: list[set[str]] = []
    monkeypatch.setattr(body, "forward", partial(_noting, seen, body.forward))
    rows = [row for row in mixed(family) if not row.places]
    assert (scored(family, rows) - oracles(family, rows)).abs().max() < 1e-4
    assert seen[0] == {"input_ids", "use_cache"}


@FAMILY
def test_packed_text_of_a_vision_model_keeps_its_boundaries(family: str) -> None:
    """Qwen's body takes positions of one axis for those of all three, and then attends across the packed rows."""
    rows = [row for row in mixed(family) if not row.places]
    assert (scored(family, rows, pack=True) - oracles(family, rows)).abs().max() < 1e-4


def _noting(seen: list[set[str]], inner: Any, *args: Any, **kwargs: Any) -> Any:
    seen.append(set(kwargs))
    return inner(*args, **kwargs)


@FAMILY
def test_another_picture_and_flat_positions_give_other_log_probs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, own = mixed(family)[0], oracle(family, mixed(family)[0])
    other = replace(one, file=lambda name: png(40, 24, 9) if name == one.places[0].media[0] else one.file(name))  # type: ignore[misc]
    assert (scored(family, [other]) - own).abs().max() > 0.1
    vision: Any = pretrained(family).vision
    if vision.positions(one.places, len(one)) is not None:
        flat = lambda places, length: np.tile(np.arange(length), (3, 1))  # noqa: E731
        monkeypatch.setattr(type(vision), "positions", lambda self, places, length: flat(places, length))
        assert (scored(family, [one]) - own).abs().max() > 0.1


@FAMILY
def test_a_sampled_placeholder_is_an_ordinary_token(family: str) -> None:
    """By id there are more places than features, which the model's own forward refuses."""
    plain = mixed(family)[0]
    found = pretrained(family)
    assert found.vision is not None
    mask = found.vision.feature_mask(plain.places[0])
    pad = int(plain.input_ids[plain.places[0].offset + int(mask.argmax())])
    one = shown(family, [(["Where? ", A, " and ", B], [7, pad, 9, pad]), ([C, " now?"], [pad, 8, 9])])
    with pytest.raises(ValueError, match=r"do not match|divisible"):
        oracle(family, one)
    now = scored(family, [one, *mixed(family)])
    assert (now[len(one.own) :] - oracles(family, mixed(family))).abs().max() < 1e-4
    # In place of the sampled ids stands a word with the same embedding, which the model's own forward reads as text.
    model: Any = copy.deepcopy(found.model)
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = model.get_input_embeddings().weight[pad]
    ids = one.input_ids.copy()
    ids[one.own[one.input_ids[one.own] == pad]] = 0
    worded = oracle(family, replace(one, input_ids=ids), model)
    mine = score(model, [one], vision=found.vision).logprob
    assert (mine - worded).abs().max() < 1e-4


@FAMILY
def test_rows_behind_a_shared_prefix_with_a_picture_forward_it_once(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [shown(family, [([LONG, A, "?"], sampled(3, i)), ([B, "!"], sampled(2, i))], f"t{i}") for i in range(4)]
    # The same ids, another picture behind the same words: the prefix ends before it.
    odd = [shown(family, [([LONG, png(40, 24, i), "?"], sampled(3, i))], f"u{i}", "odd") for i in range(4)]
    found = pretrained(family)
    micros = plan([*rows, *odd], share=True, vision=found.vision)
    ends = {len(m.prefix) for m in micros if m.prefix is not None}
    assert ends == {rows[0].places[0].end, odd[0].places[0].offset}
    forwarded = _count_features(monkeypatch)
    assert (scored(family, [*rows, *odd]) - oracles(family, [*rows, *odd])).abs().max() < 1e-4
    assert sorted(forwarded) == [2, 4]


def _count_features(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts: list[int] = []
    inner = Pictures.features

    def features(self: Pictures, model: Any) -> Tensor:
        counts.append(len(self.shown))
        return inner(self, model)

    monkeypatch.setattr(Pictures, "features", features)
    return counts


@FAMILY
def test_a_prefix_never_ends_inside_a_picture(family: str) -> None:
    """Two attempts answer at different places; the earliest answer stands right behind the picture."""
    rows = [shown(family, [([LONG, A], sampled(2, i))], f"t{i}") for i in range(3)]
    micros = plan(rows, share=True, vision=pretrained(family).vision)
    assert [len(m.prefix) for m in micros if m.prefix is not None] == [len(LONG)]


@FAMILY
def test_64_rows_that_share_a_picture_forward_it_once_with_the_gradient_of_64(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [shown(family, [(["Where? ", A, "?"], sampled(2, i))], f"t{i}") for i in range(64)]
    vision: Any = pretrained(family).vision
    forwarded = _count_features(monkeypatch)

    def gradient(copied: bool) -> dict[str, Tensor]:
        model: Any = copy.deepcopy(pretrained(family).model)
        budget = 1 if copied else 64 * len(rows[0]) + vision.patches(rows[0].places[0].grid)
        for micro in plan(rows, vision=vision, micro_tokens=budget):
            forward(model, micro).logprob.sum().div(128).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    once = gradient(False)
    assert forwarded == [1]
    each = gradient(True)
    assert forwarded == [1] * 65
    assert any("visual" in name or "vision" in name for name in once)
    assert max(float((once[name] - each[name]).abs().max()) for name in each) < 1e-5


@FAMILY
def test_the_budget_counts_patches(family: str) -> None:
    rows = [shown(family, [([png(64, 64, i), "?"], sampled(2, i))], f"t{i}", f"g{i}") for i in range(4)]
    text = [shown(family, [("?", sampled(2, i))], f"u{i}") for i in range(4)]
    vision: Any = pretrained(family).vision
    patches, tokens = vision.patches(rows[0].places[0].grid), len(rows[0])
    pixels = vision.pixels(rows[0].places[0], rows[0].file)
    assert pixels.patches == patches

    for most, budget in ((2, 2 * (tokens + patches)), (1, 2 * tokens)):
        micros = plan([*rows, *text], vision=vision, micro_tokens=budget)
        shown_in = [len(m.pictures.shown) for m in micros if m.pictures is not None]
        assert (max(shown_in), sum(shown_in)) == (most, 4)


def test_a_picture_for_a_model_that_cant_see_is_refused() -> None:
    rows = mixed("qwen2_vl")
    with pytest.raises(BadBatch, match=r"\ba\b.*\bsee\b"):
        score(pretrained("qwen2_vl").model, rows)
    with pytest.raises(BadBatch, match=r"\ba\b.*\bfiles\b"):
        scored("qwen2_vl", [replace(rows[0], file=None)])
