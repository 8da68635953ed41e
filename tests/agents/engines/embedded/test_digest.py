"""The digest of weights: its definition, and each bit that it covers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from tapereel.agents.engines.embedded import weights_digest
from tapereel.agents.engines.embedded.pretrained import earlier_digest, in_rows, piece_digests

from ....oracles import weights_digest as slow
from .odd_weights import odd_weights


def flipped(state: Mapping[str, Tensor], name: str, at: int) -> dict[str, Tensor]:
    """The weights with another bit in byte `at` of one tensor."""
    data = state[name].contiguous().reshape(-1).view(torch.uint8).clone()
    data[at] ^= 1
    return {**state, name: data.view(state[name].dtype).reshape(state[name].shape)}


def test_the_digest_is_the_definition() -> None:
    state = odd_weights()
    assert weights_digest(state) == slow.today(state)
    assert weights_digest(dict(reversed(state.items()))) == slow.today(state)
    assert earlier_digest(state) == slow.earlier(state)
    assert weights_digest({}) == slow.today({})
    for name, tensor in state.items():
        assert weights_digest({name: tensor}) == slow.today({name: tensor}), name
        assert weights_digest({name: tensor.mT if tensor.dim() > 1 else tensor}) == slow.today(
            {name: tensor.mT if tensor.dim() > 1 else tensor}
        ), name


def test_each_bit_name_shape_and_dtype_counts() -> None:
    state = odd_weights()
    seen = [weights_digest(state)]
    for name, tensor in state.items():
        seen += [weights_digest(flipped(state, name, at)) for at in {0, tensor.nbytes - 1} if tensor.nbytes]
        rest = {other: one for other, one in state.items() if other != name}
        seen += [weights_digest(rest), weights_digest({**rest, f"{name}s": tensor})]
        seen.append(weights_digest({**rest, name: tensor.reshape(1, *tensor.shape)}))
    seen.append(weights_digest({**state, "bfloat16": state["bfloat16"].view(torch.float16)}))
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_the_digests_of_parts_are_those_of_the_whole(ranks: int) -> None:
    """However many ranks have some of the rows each."""
    tensors = [tensor for tensor in odd_weights().values() if in_rows(tensor)]
    assert len(tensors) > 4
    for tensor in tensors:
        parts = torch.chunk(tensor, ranks) if len(tensor) else [tensor]
        assert b"".join(map(piece_digests, parts)) == piece_digests(tensor)
        assert len(piece_digests(tensor)) == 32 * len(tensor)


def test_a_tied_weight_is_hashed_once() -> None:
    state = odd_weights()
    hashed: list[Tensor] = []
    found = weights_digest(state, pieces=lambda tensor: (hashed.append(tensor), piece_digests(tensor))[1])
    assert len(hashed) == len(state) - 1
    assert found == weights_digest({name: tensor.clone() for name, tensor in state.items()})


def test_a_digest_that_an_earlier_version_recorded_is_known() -> None:
    state = odd_weights()
    today, earlier = slow.today(state), slow.earlier(state)
    assert weights_digest(state, earlier) == earlier != today
    assert weights_digest(state, today) == today
    assert weights_digest(state, "0" * 64) == today
    assert weights_digest(state, today[:12]) == today
    assert weights_digest(flipped(state, "bfloat16", 3), earlier) not in (today, earlier)
