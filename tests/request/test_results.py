"""router.request.results: what a request keeps while its answer takes its time."""

from __future__ import annotations

import gc

from router.api.openai import ChatRequest
from tests.faults.stage import SLOW, Engines, chat, num_running, on_stage, streamed, words


async def test_what_was_parsed_is_let_go_of_before_the_answer() -> None:
    """The body stays, for another replica; its messages as objects do not."""
    async with Engines(1, time_model=SLOW) as (engine,), on_stage(engine) as stage:
        async with stage.asking(streamed(chat(words(7), max_tokens=200))) as answer:
            await stage.until(lambda: num_running(engine))
            kept = [o for o in gc.get_objects() if isinstance(o, ChatRequest)]

            assert answer.status == 200
            assert kept
            assert not [request for request in kept if "n7w1" in str(request.messages)]
