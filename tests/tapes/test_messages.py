"""`Messages`: a view of a conversation behaves like a list."""

from __future__ import annotations

import itertools

import pytest

from tapereel.tapes.messages import Messages


def test_a_view_of_a_conversation_is_sliced_like_a_list() -> None:
    items = [{"role": "user", "content": str(k)} for k in range(6)]
    head = ({"role": "system", "content": "s"},)
    for view, plain in ((Messages(head, items, 4), [*head, *items[:4]]), (Messages((), items, 4), items[:4])):
        places = [None, *range(-7, 8)]
        for start, stop, step in itertools.product(places, places, (None, 1, 2, -1)):
            assert view[start:stop:step] == plain[start:stop:step]
        assert [view[k] for k in range(-len(plain), len(plain))] == [*plain, *plain]
        for k in (len(plain), -len(plain) - 1):
            with pytest.raises(IndexError):
                view[k]


def test_a_view_is_added_to_lists_as_a_list_is() -> None:
    items = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    view, more = Messages((), items, 1), [{"role": "system", "content": "s"}]
    assert more + view == [*more, items[0]]
    assert view + more == [items[0], *more]
    assert isinstance(more + view, list)
