"""router.pipeline: where requests go, by what, and that predictions come true."""

from __future__ import annotations

import asyncio
import random

from tests.faults.stage import (
    SLOW,
    Engines,
    chat,
    holder,
    num_running,
    on_stage,
    streamed,
    words,
)


async def test_the_second_turn_goes_to_the_holder() -> None:
    """And the prediction is what the engine reports, to the token; streaming and not."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        first = await stage.ask(chat(words(1)))
        await stage.settled(*engines)
        second = await stage.ask(streamed(chat(words(1), first.text, words(2))))

        assert second.replica == first.replica
        assert second.predicted == second.reported > 0
        await stage.until(lambda: stage.metric("warmroute_audited_total", result="exact") == 2)
        assert stage.state(first.replica) == "exact"
