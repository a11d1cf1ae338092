"""What may be asked of a replay, and what is kept out of sight."""

from __future__ import annotations

from loadtest.runner import ReplayOptions


def test_keys_and_headers_are_not_shown() -> None:
    """Neither the API key nor the value of a header is in the options' repr."""
    shown = repr(ReplayOptions(api_key="sk-1", headers={"X-Key": "sk-2"}, model="tiny"))

    assert "sk-" not in shown
    assert "X-Key" in shown
    assert "model='tiny'" in shown
