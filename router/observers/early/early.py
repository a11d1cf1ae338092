"""Compute the known beginning of a conversation's next prompt before its client comes back.

A chat template may leave out reasoning once the next message of the user is there. Everything
behind the first reasoning that is left out is computed again then, while the user waits. All of it
but the new message is known when the answer ends, so an idle replica computes it meanwhile.

    listen  an answer passes: its bytes are kept
    ended   it has ended: the conversation waits here until its replica is idle, if its turn is over
    leased  a request is sent to a replica: what is computed early there is cut, and waits again
    run     makes the beginning, and sends what is not cached as token ids, one at a replica

Nothing is computed early while a request is in flight at the replica or waits in the queue. The
cache must have room beside the conversations that live there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from sys import maxsize
from time import monotonic
from typing import Any, Final

import orjson
from msgspec import Struct
from msgspec.structs import replace

from policies.view import CandidateId
from router.base.backoff import Suspects
from router.base.bounded import BoundedBytes
from router.base.errors import RouterError
from router.base.supervisor import described
from router.config import EarlyConfig
from router.observers.early.answer_text import AnswerText
from router.observers.early.early_results import EarlyResults
from router.observers.early.metrics import EarlyMetrics
from router.observers.early.next_prompt import MAX_BODY_BYTES, Beginning, NextPrompts
from router.records.outcome import Outcome
from router.replicas.fleet import Fleet
from router.request.headers import RequestHeaders
from router.request.observer import Facts, Observer
from router.request.plan import Placement
from router.request.relay import Passage
from router.request.results import Prompt
from router.upstream import Upstream

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.05
_READ_S: Final = 0.005  # to read answers in a look
_SETTLE_S: Final = 0.1  # meanwhile the events of the answer's own blocks come
_LONGEST_S: Final = 600.0  # that a conversation waits for an idle moment
_MOST_WAITING: Final = 256
_MOST_BYTES: Final = 64 * 1024 * 1024  # of the bodies that wait
_FILL: Final = 0.9  # of a cache, for the conversations that live there and the new blocks
_OK: Final = 200
_PIECE_MS: Final = 50.0
_LEAST_PIECE_TOKENS: Final = 256  # each piece has the whole prompt in its body
_MOST_PIECE_TOKENS: Final = 8192
_MAX_ANSWER_BYTES: Final = 1024 * 1024
_REFUSED_S: Final = (600.0, 7200.0)


class _Next(Struct, kw_only=True):
    """A conversation that waits for an idle moment of its replica."""

    session: int
    prompt: Prompt
    placement: Placement
    answer: AnswerText
    since_s: float
    size_bytes: int
    beginning: Beginning | None = None  # None: not made yet
    num_cached: int = maxsize  # of its blocks, before any was computed early
    end: int = 0  # the blocks up to it were cached or computed early

    @property
    def candidate(self) -> CandidateId:
        return self.placement.lease.candidate

    @property
    def replica(self) -> str:
        return self.placement.replica

    @property
    def model(self) -> str:
        return self.prompt.read.model or ""


class Early(Observer):
    """Has beginnings computed early.

    Args:
        num_queued: Counts the requests that wait in the queue.
    """

    def __init__(
        self,
        config: EarlyConfig,
        *,
        fleet: Fleet,
        prompts: NextPrompts,
        num_queued: Callable[[], int],
        upstream: Upstream,
        headers: RequestHeaders,
        metrics: EarlyMetrics,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._prompts = prompts
        self._num_queued = num_queued
        self._upstream = upstream
        self._headers = headers
        self._metrics = metrics
        self._results = EarlyResults(lambda kind, num: metrics.early_tokens.labels(kind).inc(num))
        self._waiting: BoundedBytes[int, _Next] = BoundedBytes(_MOST_BYTES)  # by session
        self._running: dict[str, tuple[int, asyncio.Task[None]]] = {}  # by replica
        self._refusing = Suspects(*_REFUSED_S)  # replicas
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
        if len(read.received.body or b"") > MAX_BODY_BYTES:
            return None
        if not self._results.may(read.whose.session_hash, read.model or "", monotonic()):
            return None
        text = AnswerText(read.inbound.path, is_event_stream=answer.is_event_stream)
        read.inbound.slots[self] = text
        return text.take

    def ended(self, facts: Facts) -> None:
        """Queue a conversation for an idle moment, if its turn may be over."""
        answer: AnswerText | None = facts.read.inbound.slots.pop(self, None)
        session, placement = facts.read.whose.session_hash, facts.placement
        if answer is None or placement is None or session is None:
            return
        if facts.outcome is not Outcome.OK or answer.seems_to_call:
            return
        following = _Next(
            session=session,
            prompt=facts.prompt,
            placement=placement,
            answer=answer,
            since_s=monotonic(),
            size_bytes=len(facts.read.received.body or b"") + answer.size_bytes,
        )
        for oldest in self._waiting.put(session, following):
            self._drop(oldest)
        if len(self._waiting) > _MOST_WAITING:
            self._drop(next(iter(self._waiting.values())))
        self._came.set()

    def leased(self, prompt: Prompt, placement: Placement) -> None:
        """Make way for a request that is about to be sent."""
        session = prompt.read.whose.session_hash
        if session is not None and prompt.read.request is not None:
            if (following := self._waiting.get(session)) is not None:
                self._drop(following)
            if session in self._results.awaited:
                self._judge(session, prompt, placement)
        if not self._running:
            return
        self._cut(placement.replica)
        for replica, (other, _) in list(self._running.items()):
            if other == session:
                self._cut(replica)

    def _judge(self, session: int, prompt: Prompt, placement: Placement) -> None:
        contract = self._prompts.contract(placement.lease.candidate)
        if contract is not None and prompt.tokens is not None:
            self._results.came(session, prompt.keys(contract), monotonic())

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
            if now_s - following.since_s > _LONGEST_S:
                self._drop(following)
            elif replica not in self._running and self._is_idle(following, now_s):
                following.answer.end()
                if not following.answer.is_end_of_turn:
                    self._drop(following)
                    if monotonic() - now_s > _READ_S:
                        return
                    continue
                task = tg.create_task(self._compute(following), name=f"early {replica}")
                self._running[replica] = following.session, task
                task.add_done_callback(partial(self._ended, replica))

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
        return not self._refusing.is_suspect(name, now_s)

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
            if result != "cut" and self._waiting.get(following.session) is following:
                self._drop(following)

    async def _result(self, following: _Next) -> str:
        if following.beginning is None:
            following.beginning = await self._prompts.make(
                following.prompt, following.answer, following.candidate
            )
        beginning = following.beginning
        if beginning is None:
            return "unknown"
        num_cached = self._prompts.num_cached_blocks(beginning, following.candidate)
        following.num_cached = min(following.num_cached, num_cached)
        num_tokens = (len(beginning.keys) - num_cached) * beginning.block_size
        if num_tokens < self._config.min_tokens:
            if not following.end:
                self._results.needless(following.model, monotonic())
            return "cached"
        if not self._has_room(following.candidate, num_tokens):
            return "no_room"
        self._fleet.load.set_early(following.candidate, 1)
        try:
            status = await self._send(following, beginning, num_cached)
        finally:
            self._fleet.load.set_early(following.candidate, 0)
        if status != _OK:
            logger.warning(
                "replica refuses to compute early",
                extra={"replica": following.replica, "status": status},
            )
            self._refusing.suspect(following.replica, monotonic(), monotonic())
            return "refused"
        self._refusing.succeeded(following.replica, monotonic())
        return "computed"

    def _drop(self, following: _Next) -> None:
        """Compute no more of a beginning; the prompt that comes judges what was computed."""
        self._waiting.remove(following.session)
        beginning, end = following.beginning, following.end
        if beginning is not None and end:
            done = replace(beginning, keys=beginning.keys[:end])
            num_cached = following.num_cached
            self._results.made(following.session, following.model, done, num_cached, monotonic())

    def _has_room(self, candidate: CandidateId, num_tokens: int) -> bool:
        """Return whether a cache has room beside the conversations that live there."""
        capacity = self._fleet.load.capacity_tokens(candidate)
        if capacity is None:
            return True
        num_live = self._fleet.conversations.num_tokens_at(candidate)
        return num_live + num_tokens <= _FILL * capacity

    async def _send(self, following: _Next, beginning: Beginning, num_cached: int) -> int:
        """Ask an engine to compute a beginning; return the status of its last answer.

        Piece by piece, because a step of an engine cannot be cut: a request waits for one piece.
        """
        size, num_blocks, end, status = beginning.block_size, len(beginning.keys), num_cached, _OK
        while end < num_blocks and status == _OK:
            start, end = end, min(num_blocks, end + self._num_at_once(following, end * size, size))
            self._metrics.early_tokens.labels("sent").inc((end - start) * size)
            status = await self._send_piece(following, beginning.ids[: end * size])
            if status == _OK:
                following.end = end
                self._prompts.computed(beginning, following.candidate, start, end, monotonic())
        return status

    def _num_at_once(self, following: _Next, num_before: int, block_size: int) -> int:
        """Return how many blocks a piece has behind so many tokens."""
        [view] = self._fleet.load.views([following.placement.candidate], {}, monotonic())
        token_ms = view.cost.ms_per_token + view.cost.ms_per_mtoken2 * num_before / 1e6
        num_tokens = _PIECE_MS / token_ms if token_ms > 0.0 else _MOST_PIECE_TOKENS
        num_tokens = max(_LEAST_PIECE_TOKENS, min(num_tokens, _MOST_PIECE_TOKENS))
        return max(1, round(num_tokens / block_size))

    async def _send_piece(self, following: _Next, ids: Sequence[int]) -> int:
        """Ask an engine to compute token ids; return the status of its answer."""
        read, replica = following.prompt.read, following.placement.candidate.replica
        prompt = replace(
            following.prompt, read=replace(read, inbound=replace(read.inbound, slots={}))
        )
        headers = self._headers.of(prompt, following.placement, is_as_sent=False)
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
