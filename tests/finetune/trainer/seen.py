"""Rows that show pictures to a tiny vision model, and what the model's own public forward says of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tapereel.agents.engines.embedded import Pretrained, load_pretrained
from tapereel.agents.vision import save_tiny_vision
from tapereel.agents.vision.families import FAMILIES as KNOWN
from tapereel.finetune import Row
from tapereel.tapes.places import Place

from ..build import row

FAMILIES = tuple(KNOWN)
Part = str | bytes
"""Text of the prompt, or the PNG of a picture."""


@cache
def pretrained(family: str) -> Pretrained:
    """The tiny model of a family. Shared by tests: copy it before it is changed."""
    with TemporaryDirectory() as folder:
        save_tiny_vision(folder, family)  # type: ignore[arg-type]
        return load_pretrained(folder)


def saved(folder: Path, family: str = "qwen2_vl") -> str:
    save_tiny_vision(folder, family)  # type: ignore[arg-type]
    return str(folder)


@cache
def png(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype="uint8")
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "PNG")
    return written.getvalue()


def shown(
    family: str, turns: Sequence[tuple[Sequence[Part], Sequence[int]]], tape: str = "a", group: str = "g", **fields: Any
) -> Row:
    """A row of turns: (parts of the prompt, sampled ids)."""
    vision: Any = pretrained(family).vision
    ids, places, own, files = list[int](), list[Place](), list[int](), dict[str, bytes]()
    for parts, answer in turns:
        for part in parts:
            if isinstance(part, str):
                ids += list(part.encode())
                continue
            name = f"{sha256(part).hexdigest()}.png"
            files[name] = part
            found = vision.expand(*Image.open(io.BytesIO(part)).size)
            places.append(Place((name,), "image", len(ids), len(found.ids), found.grid))
            ids += found.ids
        own += range(len(ids), len(ids) + len(answer))
        ids += answer
    base = row(tape, group, turns=(len(own),), **fields)
    made = replace(base, input_ids=np.array(ids, np.int32), own=np.array(own, np.int32))
    return replace(made, places=tuple(places), file=files.__getitem__ if files else None)


def sampled(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


def oracle(family: str, one: Row, model: Any = None) -> Tensor:
    """(n,) log-probs of the row's own tokens by transformers alone: processor, positions, splice and forward."""
    loaded = pretrained(family)
    model, vision = model or loaded.model, loaded.vision
    assert vision is not None
    processor: Any = vision.processor  # type: ignore[attr-defined]
    ids = torch.tensor(one.input_ids.astype(np.int64))[None]
    kinds, tensors = torch.zeros_like(ids), dict[str, Any]()
    if one.places:
        assert one.file is not None
        images = [Image.open(io.BytesIO(one.file(place.media[0]))) for place in one.places]
        tensors = dict(processor(images=images, return_tensors="pt"))
        for place in one.places:
            kinds[0, place.offset : place.end] = 1
    if "image_grid_thw" in tensors:
        tensors["mm_token_type_ids"] = kinds
    with torch.no_grad():
        made = model(input_ids=ids, **tensors).logits[0].log_softmax(-1)
    return made[one.own - 1, one.input_ids[one.own]]


def oracles(family: str, rows: Sequence[Row], model: Any = None) -> Tensor:
    return torch.cat([oracle(family, one, model) for one in rows])
