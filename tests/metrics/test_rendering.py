"""The page of metrics is made in pieces, between which streams go on."""

from __future__ import annotations

import asyncio

import pytest

from router.metrics import Metrics, instruments


async def test_a_page_is_the_same_in_pieces_and_stops_no_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    metrics = Metrics()
    for number in range(150):
        metrics.requests.labels("chat", f"r{number}", "ok").inc()
        metrics.ttft.labels(f"r{number}").observe(number)
    whole = metrics.render()
    monkeypatch.setattr(instruments, "_SLICE_S", 0.0)
    num_turns = 0
    is_done = False

    async def count() -> None:
        nonlocal num_turns
        while not is_done:
            num_turns += 1
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as tg:
        tg.create_task(count())
        page = await metrics.render_in_turns()
        is_done = True

    assert page == whole
    assert num_turns > 20
    assert all(page.count(line) == 1 for line in page.splitlines() if line.startswith(b"#"))
