"""Keys of token sequences with pictures, and the prefixes that two of them share."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tapereel.tapes.places import Place, keys, shared_length

RED, BLUE = ("a" * 64 + ".png",), ("b" * 64 + ".png",)


def place(media: tuple[str, ...], offset: int, length: int = 3) -> Place:
    return Place(media, "image", offset, length, (1, 2, 6))


def test_equal_ids_with_another_picture_have_other_keys() -> None:
    ids = [5, 7, 7, 7, 6]
    red, blue = keys(ids, [place(RED, 1)]), keys(ids, [place(BLUE, 1)])
    assert list(red[[0, 4]]) == [5, 6]
    assert (red[1:4] < 0).all()
    assert shared_length(red, blue, [place(RED, 1), place(BLUE, 1)]) == 1


def test_a_sampled_placeholder_is_an_ordinary_token() -> None:
    assert shared_length(keys([5, 7, 7, 7], [place(RED, 1)]), keys([5, 7, 7, 7], []), [place(RED, 1)]) == 1


def test_the_same_picture_elsewhere_has_the_same_key_and_another_grid_another_one() -> None:
    assert place(RED, 1).key == place(RED, 9).key
    assert place(RED, 1).key != place(RED, 1)._replace(grid=(1, 6, 2)).key


@given(st.integers(1, 6), st.integers(0, 12))
def test_a_shared_prefix_never_ends_inside_a_picture(offset: int, most: int) -> None:
    ids = np.arange(12)
    here = place(RED, offset)
    n = shared_length(keys(ids, [here]), keys(ids, [here]), [here], most)
    assert n <= most
    assert not here.offset < n < here.end
    assert n == (here.offset if here.offset < most < here.end else min(most, 12))
