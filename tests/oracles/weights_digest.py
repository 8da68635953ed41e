"""Digests of weights, with byte strings alone: the one of today, and the one that earlier versions recorded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor


def content(tensor: Tensor) -> bytes:
    """The numbers of a tensor in order, as they are in memory."""
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def about(tensor: Tensor) -> bytes:
    return f"{tensor.dtype}|{tuple(tensor.shape)}|".encode()


def today(state: Mapping[str, Tensor]) -> str:
    """A row with at least 32 bytes is a piece. A tensor with shorter rows is one piece."""
    whole = b""
    for name in sorted(state):
        tensor = state[name]
        data, length = content(tensor), math.prod(tensor.shape[1:]) * tensor.element_size()
        pieces = [data]
        if length >= 32:
            pieces = [data[at : at + length] for at in range(0, len(data), length)]
        own = about(tensor) + b"".join(sha256(piece).digest() for piece in pieces)
        whole += name.encode() + b"|" + sha256(own).digest()
    return sha256(whole).hexdigest()


def earlier(state: Mapping[str, Tensor]) -> str:
    """All tensors in one stream, as until commit 24aceac6."""
    tensors = [name.encode() + b"|" + about(state[name]) + content(state[name]) for name in sorted(state)]
    return sha256(b"".join(tensors)).hexdigest()
