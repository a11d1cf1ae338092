"""What tests of several routers share: a conversation across them, and what they know."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.emulator.emulator import Emulator
from tests.faults.stage import SESSION, Reply, Stage, chat, words


async def turns(
    stages: Sequence[Stage],
    engines: Sequence[Emulator],
    num_turns: int = 6,
    session: int = 0,
    *,
    is_calm: bool = False,
) -> list[Reply]:
    """Have a conversation whose turns go to the routers one after the other.

    `is_calm`: each begins when every router knows that the one before is over.
    """
    texts = [words(1000 + session, num_words=150)]  # worth staying for
    replies = []
    for turn in range(num_turns):
        stage = stages[turn % len(stages)]
        reply = await stage.ask(chat(*texts), headers={"X-Session-ID": f"{SESSION}-{session}"})
        assert reply.status == 200
        replies.append(reply)
        texts += [reply.text, words(2000 + 100 * session + turn, num_words=20)]
        for each in stages:
            await each.knows(*engines)
            if is_calm:
                await each.until(lambda each=each: others_requests(each) == 0)  # type: ignore[misc]
    return replies


def exact(replies: Sequence[Reply]) -> bool:
    return all(reply.predicted == reply.reported for reply in replies)


def has_written(stage: Stage) -> bool:
    """Return whether Redis has all that this router writes, and the position of it."""
    assert stage.router.cluster.sharing is not None
    index = stage.router.caches.index
    writers = stage.router.cluster.sharing.writer.streams
    return all(
        each._base is not None and each.pending is None and not index.num_pending(each.candidate)
        for each in writers
    )


def others_requests(stage: Stage) -> int:
    return int(stage.metric("warmroute_inflight_requests_elsewhere"))
