"""Compute the known beginning of a conversation's next prompt before its client comes back.

A chat template may leave out reasoning once the next message of the user is there. Everything
behind the first reasoning that is left out is computed again then, while the user waits. All of it
but the new message is known when the answer ends, so an idle replica computes it meanwhile.

    listen  an answer passes: its bytes are kept
    ended   it has ended: the conversation waits here until its replica is idle, if its turn is
            over; what was computed for it is judged by what the engine reports as cached
    leased  a request is sent to a replica: what is computed early there is cut, and waits again
    run     makes the beginning, and sends what is not cached as token ids, one at a replica

Only what the template changed is computed: the replica must have everything in front of the first
difference between the prompt and the next one. Nothing is computed early while a request is in
flight at the replica or waits in the queue. The cache must have room beside the conversations that
live there. A conversation that ended or moved to another replica or router is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import Any, Final

import orjson
from msgspec import Struct
from msgspec.structs import replace

from policies.view import CandidateId
from router.base.bounded import Bounded
from router.base.errors import RouterError
from router.base.supervisor import described
from router.observers.early.early_results import NEEDLESS, EarlyMetrics, EarlyResults
from router.observers.early.next_prompt import (
    MAX_BODY_BYTES,
    AnswerText,
    Beginning,
    Held,
    NextPrompts,
    num_common,
)
from router.records.record import Outcome
from router.replicas.fleet import Fleet
from router.request.observer import Facts, Observer
from router.request.results import Passage, Placement, Prompt
from router.request.send import RequestHeaders
from router.upstream import Upstream

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
_READ_S: Final = 0.005  # to read answers in a look
_SETTLE_S: Final = 0.1  # meanwhile the events of the answer's own blocks come
_LONGEST_S: Final = 600.0  # that a conversation waits for an idle moment
_MOST_WAITING: Final = 256
MOST_BYTES: Final = 64 * 1024 * 1024
"""Of the answers in flight, and of the bodies and answers that wait."""

_FILL: Final = 0.9  # of a cache, for the conversations that live there and the new blocks
_OK: Final = 200
_BUSY: Final = frozenset({429, 503})
BUSY_S: Final = 5.0
"""A replica that answers so is left alone for this time."""

LEAST_TOKENS: Final = 512
"""A beginning of which fewer tokens are missing is left to the request itself."""

_SPARE_BLOCKS: Final = 2  # of a hit's end, which some engines compute again
PIECE_MS: Final = 50.0
"""What the pieces of a beginning take, and so what a request waits at most."""

_MOST_GROWTH: Final = 4.0  # of a piece over the one before
_LEAST_PIECE_TOKENS: Final = 256  # each piece has the whole prompt in its body
_MOST_PIECE_TOKENS: Final = 8192
_MAX_ANSWER_BYTES: Final = 1024 * 1024
_MOST_REPLICAS: Final = 1_000


class _Next(Struct, kw_only=True):
    """A conversation that waits for an idle moment of its replica."""

    session: int
    prompt: Prompt
    placement: Placement
    answer: AnswerText
    since_s: float
    beginning: Beginning | None = None  # None: not made yet
    start: int = 0  # of its blocks, so many were cached before any was computed early
    end: int = 0  # the blocks up to it were cached or computed early; 0: none was computed

    @property
    def candidate(self) -> CandidateId:
        return self.placement.lease.candidate

    @property
    def replica(self) -> str:
        return self.placement.replica

    @property
    def model(self) -> str:
        return self.prompt.read.model or ""

    @property
    def body_bytes(self) -> int:
        return len(self.prompt.read.received.body or b"")


class Early(Observer):
    """Has beginnings computed early.

    Args:
        num_queued: Counts the requests that wait in the queue.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        prompts: NextPrompts,
        num_queued: Callable[[], int],
        upstream: Upstream,
        headers: RequestHeaders,
        metrics: EarlyMetrics,
    ) -> None:
        self._fleet = fleet
        self._prompts = prompts
        self._num_queued = num_queued
        self._upstream = upstream
        self._headers = headers
        self._metrics = metrics
        self._results = EarlyResults(lambda kind, num: metrics.early_tokens.labels(kind).inc(num))
        self.held = Held(MOST_BYTES)
        self._waiting: dict[int, _Next] = {}  # by session, the oldest first
        self._running: dict[str, tuple[int, asyncio.Task[None]]] = {}  # by replica
        self._busy_until_s: Bounded[str, float] = Bounded(_MOST_REPLICAS)  # by replica
        self._token_ms: Bounded[str, float] = Bounded(_MOST_REPLICAS)  # of pieces, by replica
        self._came = asyncio.Event()

    # ---------------------------------------------------------------- as an observer

    def listen(self, passage: Passage) -> Callable[[bytes], None] | None:
        """Read an answer that a next prompt may go on from."""
        prompt, answer = passage.prompt, passage.answer
        read = prompt.read
        if read.whose.session_hash is None or read.chat is None or read.response_id is not None:
            return None
        if answer.status != 200 or answer.is_encoded or self._fleet.members.is_split:
            return None
        if prompt.has_media or not prompt.is_matchable or prompt.original is not None:
            return None
        replica = passage.placement.candidate.replica
        if not replica.caches_prefixes or not read.chat.reads_cache:
            return None
        body = read.received.body or b""
        if len(body) > MAX_BODY_BYTES:
            return None
        if not self._results.may(read.whose.session_hash, read.model or "", monotonic()):
            return None
        is_stream = answer.is_event_stream
        text = AnswerText(
            read.inbound.path, is_event_stream=is_stream, request=body, held=self.held
        )
        read.inbound.slots[self] = text
        return text.take

    def ended(self, facts: Facts) -> None:
        """Judge what was computed for a turn, and queue its conversation for an idle moment."""
        answer: AnswerText | None = facts.read.inbound.slots.pop(self, None)
        session, placement = facts.read.whose.session_hash, facts.placement
        if placement is None or session is None:
            return
        if session in self._results.awaited and facts.is_answered:
            self._judge(session, facts, placement)
        if answer is None or answer.is_bad or answer.seems_to_call:
            return
        if facts.outcome is not Outcome.OK:
            return
        following = _Next(
            session=session,
            prompt=facts.prompt,
            placement=placement,
            answer=answer,
            since_s=monotonic(),
        )
        self._drop(session)
        while self._waiting and (
            len(self._waiting) >= _MOST_WAITING or not self.held.fits(following.body_bytes)
        ):
            self._drop(next(iter(self._waiting)))
        if self.held.take(following.body_bytes):
            self._waiting[session] = following
            self._came.set()

    def leased(self, prompt: Prompt, placement: Placement) -> None:
        """Make way for a request that is about to be sent."""
        session = prompt.read.whose.session_hash
        if session is not None and prompt.read.request is not None:
            self._drop(session)
        if not self._running:
            return
        self._cut(placement.replica)
        for replica, (other, _) in list(self._running.items()):
            if other == session:
                self._cut(replica)

    def _judge(self, session: int, facts: Facts, placement: Placement) -> None:
        """Count what was computed early as used, as far as the engine reports it as cached."""
        contract = self._prompts.contract(placement.lease.candidate)
        if contract is None or facts.prompt.tokens is None:
            return
        num_cached = facts.num_reported_cached_tokens
        if num_cached is None:
            num_cached = facts.num_predicted_cached_tokens
        keys = facts.prompt.keys(contract)
        self._results.came(session, placement.replica, keys, num_cached, monotonic())

    def _cut(self, replica: str) -> None:
        running = self._running.get(replica)
        if running is not None:
            running[1].cancel()

    # ---------------------------------------------------------------- beside requests

    async def run(self) -> None:
        """Compute what waits, whenever its replica is idle."""
        async with asyncio.TaskGroup() as tg:
            while True:
                if not self._waiting:
                    self._came.clear()
                    await self._came.wait()
                await asyncio.sleep(_LOOK_S)
                self._look(tg, monotonic())

    def _look(self, tg: asyncio.TaskGroup, now_s: float) -> None:
        """Cut what is in the way of other routers' requests; start what may start."""
        for replica in self._running:
            if self._fleet.load.num_sent(replica):
                self._cut(replica)
        for following in list(self._waiting.values()):
            replica = following.replica
            if self._is_over(following, now_s):
                if self._running.get(replica, (None,))[0] == following.session:
                    self._cut(replica)
                self._drop(following.session)
            elif replica not in self._running and self._is_idle(following, now_s):
                following.answer.end()
                if not following.answer.is_end_of_turn:
                    self._drop(following.session)
                    if monotonic() - now_s > _READ_S:
                        return
                    continue
                task = tg.create_task(self._compute(following), name=f"early {replica}")
                self._running[replica] = following.session, task
                task.add_done_callback(partial(self._ended, replica))

    def _is_over(self, following: _Next, now_s: float) -> bool:
        """Return whether nobody needs a beginning any more, at this replica."""
        if now_s - following.since_s > _LONGEST_S:
            return True
        last = self._fleet.conversations.last(following.session)
        if last is None or last.has_ended or last.num_running:
            return True
        return last.candidate != following.candidate or last.begun_s > following.since_s

    def _ended(self, replica: str, _: object) -> None:
        del self._running[replica]

    def _is_idle(self, following: _Next, now_s: float) -> bool:
        """Return whether a conversation's replica has nothing else to do."""
        if now_s - following.since_s < _SETTLE_S or self._num_queued():
            return False
        name = following.replica
        if following.candidate not in self._fleet.members.states or self._fleet.load.num_sent(name):
            return False
        replica, known = self._fleet.members.replica(name), following.placement.candidate.replica
        if replica.url != known.url or not replica.is_offered:
            return False
        if not self._fleet.members.is_up(name, now_s):
            return False
        return now_s >= self._busy_until_s.get(name, 0.0)

    async def _compute(self, following: _Next) -> None:
        """Compute the beginning of one next prompt; if that is cut, it waits again."""
        result = "failed"
        try:
            result = await self._result(following)
        except asyncio.CancelledError:
            result = "cut"
        except RouterError as exc:
            logger.debug("not computed early", extra={"error": described(exc)})
        except Exception as exc:
            logger.error("not computed early", extra={"error": described(exc)})
        finally:
            self._metrics.early.labels(result).inc()
            waits = result in ("cut", "busy")
            if not waits and self._waiting.get(following.session) is following:
                self._drop(following.session)

    async def _result(self, following: _Next) -> str:
        if following.beginning is None:
            following.beginning = await self._prompts.make(
                following.prompt, following.answer, following.candidate
            )
        beginning, contract = following.beginning, self._prompts.contract(following.candidate)
        if beginning is None or contract is None:
            return "unknown"
        num_cached = self._prompts.num_cached_blocks(beginning, following.candidate)
        num_same = num_common(following.prompt.keys(contract), beginning.keys)
        if num_cached + _SPARE_BLOCKS < max(num_same, following.end):
            return "lost"
        num_tokens = (len(beginning.keys) - num_cached) * beginning.block_size
        if num_tokens < LEAST_TOKENS:
            if not following.end:
                self._results.spend(following.model, NEEDLESS, monotonic())
            return "cached"
        if not self._has_room(following.candidate, num_tokens):
            return "no_room"
        if not following.end:
            following.start = num_cached
            self._results.spend(following.model, 1.0, monotonic())
        self._fleet.load.set_early(following.candidate, 1)
        try:
            status = await self._send(following, beginning, num_cached)
        finally:
            self._fleet.load.set_early(following.candidate, 0)
        if status == _OK:
            return "computed"
        name = following.replica
        if status in _BUSY:
            self._busy_until_s.put(name, monotonic() + BUSY_S)
            return "busy"
        logger.warning(
            "replica refuses to compute early", extra={"replica": name, "status": status}
        )
        self._results.rest(following.model, monotonic())
        return "refused"

    def _drop(self, session: int) -> None:
        """Compute no more of a beginning; the turn that comes judges what was computed."""
        following = self._waiting.pop(session, None)
        if following is None:
            return
        self.held.give(following.body_bytes)
        if following.beginning is not None and following.end:
            self._results.made(
                session,
                following.model,
                following.replica,
                keys=following.beginning.keys,
                blocks=range(following.start, following.end),
                block_size=following.beginning.block_size,
                now_s=monotonic(),
            )

    def _has_room(self, candidate: CandidateId, num_tokens: int) -> bool:
        """Return whether a cache has room beside the conversations that live there."""
        capacity = self._fleet.load.capacity_tokens(candidate)
        if capacity is None:
            return True
        num_live = self._fleet.conversations.working_set(candidate).num_expected_tokens
        return num_live + num_tokens <= _FILL * capacity

    async def _send(self, following: _Next, beginning: Beginning, num_cached: int) -> int:
        """Ask an engine to compute a beginning; return the status of its last answer.

        Piece by piece, because a step of an engine cannot be cut: a request waits for one piece.
        """
        size, num_blocks, end, status = beginning.block_size, len(beginning.keys), num_cached, _OK
        while end < num_blocks and status == _OK:
            start, end = end, min(num_blocks, end + self._num_at_once(following.replica, size))
            num_tokens, since_s = (end - start) * size, monotonic()
            self._metrics.early_tokens.labels("sent").inc(num_tokens)
            status = await self._send_piece(following, beginning.ids[: end * size])
            if status == _OK:
                self._took(following.replica, num_tokens, monotonic() - since_s)
                following.end = end
                self._prompts.computed(beginning, following.candidate, start, end, monotonic())
        return status

    def _num_at_once(self, replica: str, size: int) -> int:
        """Return how many blocks the next piece has, by what the pieces before took."""
        num_tokens = float(_LEAST_PIECE_TOKENS)
        if (token_ms := self._token_ms.get(replica)) is not None:
            num_tokens = min(PIECE_MS / token_ms, _MOST_PIECE_TOKENS)
        return max(1, round(max(num_tokens, _LEAST_PIECE_TOKENS) / size))

    def _took(self, replica: str, num_tokens: int, took_s: float) -> None:
        """Learn from a piece; the next one is at most `_MOST_GROWTH` times as long."""
        token_ms = 1e3 * took_s / num_tokens
        before = self._token_ms.get(replica, PIECE_MS / _LEAST_PIECE_TOKENS)
        self._token_ms.put(replica, max(token_ms, before / _MOST_GROWTH, 1e-6))

    async def _send_piece(self, following: _Next, ids: Sequence[int]) -> int:
        """Ask an engine to compute token ids; return the status of its answer."""
        read, replica = following.prompt.read, following.placement.candidate.replica
        prompt = replace(
            following.prompt, read=replace(read, inbound=replace(read.inbound, slots={}))
        )
        headers = self._headers.of(prompt, following.placement)
        headers["Content-Type"] = "application/json"
        headers["X-Request-Id"] = f"early-{read.request_id}"
        body: dict[str, Any] = {"model": read.model, "prompt": ids, "max_tokens": 1}
        if read.salt:
            body["cache_salt"] = read.salt
        answer = await self._upstream.open(
            replica.name,
            f"{replica.url}/v1/completions",
            method="POST",
            headers=headers,
            body=orjson.dumps(body),
        )
        try:
            await answer.gather(_MAX_ANSWER_BYTES)
            return answer.status
        finally:
            answer.close()
