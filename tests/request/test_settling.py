"""What waits for events: each has its end, whatever another one does."""

from __future__ import annotations

import pytest

from router.request import settling
from router.request.settling import Settling


def test_one_that_raises_ends_no_round(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and dropped, also where it is asked at once: a request's end calls that."""
    asked: list[bool] = []

    def raises(is_last: bool) -> bool:
        raise ValueError("secret")

    def settle(is_last: bool) -> bool:
        asked.append(is_last)
        return is_last

    waiting = Settling()
    for each in (settle, raises, settle):
        waiting.add(each, until_s=2.0)
    waiting.sweep(1.0)
    waiting.sweep(3.0)
    waiting.sweep(4.0)
    monkeypatch.setattr(settling, "MAX_WAITING", 0)
    waiting.add(raises, until_s=9.0)

    assert asked == [False, False, True, True]
    assert [record.message for record in caplog.records] == ["an answer was not settled"] * 2
    assert "secret" not in caplog.text
