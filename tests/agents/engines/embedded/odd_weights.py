"""Weights of every kind that a digest must cover."""

from __future__ import annotations

import torch
from torch import Tensor


def odd_weights(*, float8: bool = True) -> dict[str, Tensor]:
    """Random tensors, the same at each call. The numbers of rows are not divisible by 2, 3 or 4, or smaller. Gloo can't
    gather float8."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tied = drawn(11, 16)
    return {
        "tied": tied,
        "tied again": tied,
        "bfloat16": drawn(7, 40, dtype=torch.bfloat16),
        "float64": drawn(5, 4, dtype=torch.float64),
        **({"float8": drawn(5, 40).to(torch.float8_e4m3fn)} if float8 else {}),
        "one row": drawn(1, 16),
        "two rows": drawn(2, 3, 5),
        "experts": drawn(13, 2, 3, 2),
        "bool": drawn(5, 33) > 0,
        "packed": (drawn(35, 1) * 9).to(torch.int8),
        "short rows": drawn(5, 7),
        "vector": drawn(70),
        "number": drawn(),
        "count": torch.tensor(7),
        "no rows": drawn(0, 16),
        "empty rows": drawn(5, 0),
    }
