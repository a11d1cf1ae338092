from __future__ import annotations

import pytest

from loadtest.studies import bubble
from loadtest.studies.bubble import RULES, BubbleRun, main, report


def test_how_much_longer_it_takes_than_without_the_queue() -> None:
    """A row for each length; what a stopped run has not come to stays empty."""
    runs = [
        BubbleRun(engine="cpu-tiny", num_tokens=1_000, num_out=1, rules=rules, span_s=span_s)
        for rules, span_s in ((None, 20.0), (RULES[0], 25.0), (RULES[1], 19.9))
    ]

    found = report(runs)

    assert "| `window` 0 | `window` 1 | `window` 4 | `window` 1, `ready_ms` 100 |" in found
    assert "| `cpu-tiny` | 1,000, 1 | +25.0% | -0.5% |  |  |  |  |  |" in found


def test_short_prompts_need_more_than_one_ready(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a window of requests alone engines do less; with some work ready as much, nearly."""
    monkeypatch.setattr(bubble, "ENGINES", ("h100x4-70b",))
    monkeypatch.setattr(bubble, "PROMPTS", ((200, 1, 400),))
    runs: list[BubbleRun] = []
    bubble.run_all(runs.append)
    took_s = {one.rules: one.span_s for one in runs}

    assert took_s[RULES[1]] > 1.3 * took_s[None]
    assert took_s[RULES[5]] < 1.15 * took_s[None]
    assert main([]) == 0
    assert capsys.readouterr().out == report(runs) + "\n"
