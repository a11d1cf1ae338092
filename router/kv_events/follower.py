"""The side path of events, top to bottom: from one rank's engine into the index.

1. Wait for batches, or for the publisher to come or go.
2. Apply them in slices, so that requests are served in between.
3. Ask for history if some is missing: on connecting, and in a gap. On a quiet stream, ask whether
   any batch was missed: the engine may have restarted and published nothing yet.
4. Log a change of state.

It never fails a request: an error is counted and logged, the stream's state degrades, and requests
go on with what is known. An unexpected error ends the run, and `router.base.supervisor` starts
another, which knows nothing yet.

Health probes take part through the stream: `stream.connected()` if a replica came back or looks
like another process, `stream.disconnected(now_s)` if it is gone. The next tick acts on it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Final

from msgspec import Struct

from router.base.backoff import Backoff
from router.base.errors import ConfigError, UpstreamError
from router.index.candidate_stream import StreamReason
from router.kv_events.stream import RankStream
from router.kv_events.subscriber import EngineEvents, Message

logger = logging.getLogger(__name__)

SLICE_S: Final = 0.004
"""Longest time to apply batches before the loop gets a turn (one batch is never cut)."""


class Pace(Struct, frozen=True, kw_only=True):
    """How patiently a stream is followed."""

    tick_s: float = 1.0  # a turn without a batch takes 0.1 ms: 1,000 streams, a tenth of a core
    quiet_s: float = 10.0  # without a batch for so long, ask whether one was missed
    subscribe_s: float = 1.0  # the same after connecting: a subscription takes a moment to arrive
    min_pause_s: float = 0.5  # after a failure, doubled up to the maximum, with jitter
    max_pause_s: float = 30.0


_PATIENT: Final = Pace()


async def follow(
    stream: RankStream,
    source: EngineEvents,
    *,
    clock: Callable[[], float] = time.monotonic,
    pace: Pace = _PATIENT,
) -> None:
    """Update the index with one rank's cache until cancelled. Closes `source`."""
    follower = _Follower(stream, source, clock, pace)
    backoff = Backoff(pace.min_pause_s, pace.max_pause_s)
    try:
        while True:
            try:
                await follower.step()
                backoff.reset()
            except UpstreamError as exc:
                logger.warning(
                    "event stream failed",
                    extra={"candidate": stream.candidate, "error": exc.message},
                )
                await asyncio.sleep(backoff.next_s())
    finally:
        source.close()


class _Follower:
    """One rank's loop and what it remembers between its turns."""

    __slots__ = (
        "_backoff",
        "_clock",
        "_has_replayed",
        "_logged",
        "_pace",
        "_quiet_at_s",
        "_replay_at_s",
        "_source",
        "_stream",
    )

    def __init__(
        self,
        stream: RankStream,
        source: EngineEvents,
        clock: Callable[[], float],
        pace: Pace,
    ) -> None:
        self._stream = stream
        self._source = source
        self._pace = pace
        self._clock = clock
        self._has_replayed = True  # the last replay was answered
        self._logged = _status(stream)
        stream.opened(has_replay=source.has_replay)
        self._quiet_at_s = float("inf")  # not before it is connected
        self._replay_at_s = 0.0
        self._backoff = Backoff(pace.min_pause_s, pace.max_pause_s)

    async def step(self) -> None:
        """Run one turn: receive, apply, and replay what was missed."""
        received = await self._source.receive(self._pace.tick_s)
        self._stream.counters.num_undecodable += received.num_odd
        self._note_link(received.is_up)
        await self._apply(received.messages, self._stream.receive)
        self._log_notices()
        now_s = self._clock()
        if received.messages:
            self._quiet_at_s = now_s + self._pace.quiet_s
        elif now_s >= self._quiet_at_s:
            self._quiet_at_s = now_s + self._pace.quiet_s
            self._stream.verify()
        if self._stream.wanted_replay is not None and now_s >= self._replay_at_s:
            await self._replay()
        if received.why_unheard is not None:
            self._stream.unheard(self._clock(), received.why_unheard)
        self._stream.tick(self._clock())
        self._log_change()

    def _note_link(self, is_up: bool | None) -> None:
        if is_up:
            self._stream.connected()
            self._quiet_at_s = self._clock() + self._pace.subscribe_s
            self._replay_at_s = 0.0
        elif is_up is not None:
            self._stream.disconnected(self._clock())
            self._quiet_at_s = float("inf")

    async def _replay(self) -> None:
        """Get history, as far as it goes back; after a failure try again, later."""
        is_complete = is_answered = False
        start = self._stream.begin_replay()
        try:
            async with self._source.replay(start) as replies:
                while messages := await replies.receive():
                    await self._apply(messages, self._stream.replayed)
                is_complete = replies.is_complete
                is_answered = is_complete or replies.num_messages > 0
            if not is_answered and self._has_replayed:
                raise ValueError("no answer in time")
        except (UpstreamError, ConfigError, ValueError) as exc:
            logger.warning(
                "replay failed",
                extra={"candidate": self._stream.candidate, "error": str(exc)},
            )
        finally:
            self._stream.end_replay(is_complete=is_complete)
        self._has_replayed = is_answered
        if is_answered:
            self._backoff.reset()
        else:
            self._replay_at_s = self._clock() + self._backoff.next_s()

    async def _apply(
        self, messages: Iterable[Message], apply: Callable[[int, bytes], None]
    ) -> None:
        until_s = self._clock() + SLICE_S
        for sequence, payload in messages:
            apply(sequence, payload)
            if self._clock() >= until_s:
                await asyncio.sleep(0)
                until_s = self._clock() + SLICE_S

    def _log_notices(self) -> None:
        for text, fields in self._stream.take_notices():
            logger.warning(text, extra={"candidate": self._stream.candidate, **fields})

    def _log_change(self) -> None:
        status = _status(self._stream)
        if status == self._logged:
            return
        state, reason = self._stream.state_and_reason()
        is_idle = reason == StreamReason.NO_EVENTS  # as of each engine that has just started
        logger.log(
            logging.WARNING if state == "blind" and not is_idle else logging.INFO,
            "event stream changed",
            extra={"candidate": self._stream.candidate, "state": state, "reason": reason or None},
        )
        self._logged = status


def _status(stream: RankStream) -> tuple[object, ...]:
    return (*stream.state_and_reason(), stream.epoch, stream.contract)
