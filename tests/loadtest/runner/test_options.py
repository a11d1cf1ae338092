"""What may be asked of a replay, and what is kept out of sight."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.runner import ReplayError, ReplayOptions


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": 0.0}, "rate must be positive, got 0"),
        ({"timeout_s": float("nan")}, "timeout_s must be positive, got nan"),
        ({"concurrency": 0}, "concurrency must be positive, got 0"),
        ({"max_tokens": -3}, "max_tokens must be positive, got -3"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, Any], words: str) -> None:
    """Numbers out of range are named."""
    with pytest.raises(ReplayError, match=words):
        ReplayOptions(**options)


def test_keys_and_headers_are_not_shown() -> None:
    """Neither the API key nor the value of a header is in the options' repr."""
    shown = repr(ReplayOptions(api_key="sk-1", headers={"X-Key": "sk-2"}, model="tiny"))

    assert "sk-" not in shown
    assert "X-Key" in shown
    assert "model='tiny'" in shown
