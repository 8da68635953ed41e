"""`Retry-After` in all the forms that servers send, and in some that they shouldn't."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from tapereel.agents.engines.transport.wire import LATEST, retry_after


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("2", 2.0),
        ("0.5", 0.5),
        ("999999999", LATEST),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 -0000", 0.0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", LATEST),
        (None, None),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("\N{SUPERSCRIPT TWO}", None),
        ("Wed, 99 Oct 2015 07:28:00 GMT", None),
        ("nan", None),
        ("inf", None),
    ],
)
def test_seconds_and_dates_are_read_and_bounded(header: str | None, seconds: float | None):
    assert retry_after(header) == seconds


def test_a_date_to_come_is_waited_for():
    at = datetime.now(UTC) + timedelta(seconds=1800)
    found = retry_after(format_datetime(at, usegmt=True))
    assert found is not None
    assert 0 < found <= 1800
