"""Proof, made when a model is loaded, that features at places give what the model's own forward gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...tapes.errors import UsageError
from ...tapes.places import Place
from .vision import Vision, body_inputs, whole_model

if TYPE_CHECKING:
    from torch import nn


class UnsupportedVision(UsageError, ValueError):
    """A model reads pictures otherwise than its family, or than its image processor prepares them."""


def prove_vision(model: nn.Module, vision: Vision) -> None:
    """Compare the body with features at places against the model's public forward, on two small pictures between text
    of several lengths. UnsupportedVision has the difference of the logits."""
    import io

    import torch
    from PIL import Image

    whole: Any = whole_model(model)
    processor: Any = cast(Any, vision).processor
    random, files, places, ids = np.random.default_rng(0), {}, [], [*range(40, 47)]
    for width, height in ((60, 15), (30, 90)):
        written, name = io.BytesIO(), f"{width}x{height}"
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype="uint8")).save(written, "PNG")
        found, files[name] = vision.expand(width, height), written.getvalue()
        places.append(Place((name,), "image", len(ids), len(found.ids), found.grid))
        ids += [*found.ids, *range(50, 50 + width // 10)]
    mask = np.zeros(len(ids), dtype=np.bool_)
    for place in places:
        mask[place.offset : place.end] = vision.feature_mask(place)
    tokens, seen = torch.tensor([ids], device=whole.device), torch.from_numpy(mask)[None].to(whole.device)
    positions = vision.positions(places, len(ids))
    with torch.no_grad():
        try:
            own = processor(images=[Image.open(io.BytesIO(data)) for data in files.values()], return_tensors="pt")
            kinds = {} if positions is None else {"mm_token_type_ids": seen.int()}
            expected = whole(input_ids=tokens, **own.to(whole.device), **kinds, use_cache=False).logits
            features = vision.features(model, [vision.pixels(place, files.__getitem__) for place in places])
            axes = None if positions is None else torch.from_numpy(positions)[:, None].to(whole.device)
            where = torch.where(seen, seen.cumsum(1) - 1, -1)
            inputs = body_inputs(whole.get_input_embeddings(), tokens, where, features, axes)
            made = whole.get_output_embeddings()(whole.get_decoder()(**inputs, use_cache=False).last_hidden_state)
        except (RuntimeError, ValueError, IndexError) as error:
            raise UnsupportedVision(f"{type(whole).__name__} can't read a picture: {error}; {_CAUSE}") from error
    off = float((made - expected).abs().max())
    # Relative to the range of the logits, which an untrained model has small.
    tolerance = (1e-3 if whole.dtype == torch.float32 else 0.1) * float(expected.max() - expected.min()) + 1e-6
    if not off <= tolerance:  # NaN must fail too
        raise UnsupportedVision(
            f"{type(whole).__name__}: logits behind pictures differ from those of the model's own forward by {off:.3g} "
            f"(tolerance {tolerance:.3g}); {_CAUSE}"
        )


_CAUSE = "its image processor or configuration is another model's, or this version of transformers computes otherwise"
