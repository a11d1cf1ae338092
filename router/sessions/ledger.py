"""The sessions' ledger: the last prompts of each conversation, and what all of its turns cost.

What a conversation had before is what its threads, or its parent's, had; see `threads`.

Bounded: the conversation that was silent for longest is forgotten first. Its next turn is
`unknown`. Every operation is O(1) in the number of conversations, unless it says otherwise.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from policies.view import CandidateId
from router.api.parts import Parts
from router.contracts import BlockKey, HashContract
from router.decoding import strict
from router.records.computed import Cause, Change, Computed
from router.sessions.threads import Thread, change_of, num_shared, thread_of
from router.wire import Count, Seconds

MAX_SESSIONS: Final = 20_000
MAX_BYTES: Final = 128 << 20
"""Of the last prompts' block keys: 8 bytes a block, 40 kB for 80,000 tokens in blocks of 16."""

MAX_TURNS: Final = 64
"""Turns that are kept of a session, the newest; its totals count all."""

Milliseconds = Annotated[float, Meta(ge=-1e15, le=1e15)]
"""No NaN is in them."""

_MAX_THREADS: Final = 4
_OVERTAKEN_S: Final = 0.25  # notes take 5 ms
_MAX_REQUESTS: Final = 50_000  # whose session is found by the request's id


class Turn(Struct, frozen=True, array_like=True, kw_only=True):
    """One turn of a session. Times in milliseconds.

    at: When the request arrived, unix seconds.
    num_cached: As the engine reports; None: it does not.
    num_gpu, num_cpu, num_pool: Where these came from.
    engine_ms: What computing the prompt took, by the cost model; `saved_ms`: what caches saved.
    """

    request_id: str
    at: Seconds
    candidate: CandidateId
    model: str
    outcome: str
    num_tokens: Count
    num_cached: Count | None = None
    num_gpu: Count = 0
    num_cpu: Count = 0
    num_pool: Count = 0
    num_output: Count | None = None
    computed: Computed | None = None
    router_ms: Milliseconds = 0.0
    waited_ms: Milliseconds = 0.0
    ttft_ms: Milliseconds | None = None
    total_ms: Milliseconds = 0.0
    engine_ms: Milliseconds = 0.0
    saved_ms: Milliseconds = 0.0
    prefill_at: CandidateId | None = None
    waited_for: str | None = None


encode_turn = msgspec.msgpack.Encoder().encode
decode_turn = strict(msgspec.msgpack.Decoder(Turn).decode)


class Totals(Struct):
    """Of all turns of a session. `by_cause` has `cached`, too, from turns whose engine reports."""

    num_turns: int = 0
    num_tokens: int = 0
    num_output: int = 0
    num_gpu: int = 0
    num_cpu: int = 0
    num_pool: int = 0
    by_cause: dict[str, int] = msgspec.field(default_factory=dict)
    num_moves: int = 0
    waited_s: float = 0.0
    engine_s: float = 0.0
    saved_s: float = 0.0

    def add(self, turn: Turn) -> None:
        """Count a turn."""
        self.num_turns += 1
        self.num_tokens += turn.num_tokens
        self.num_output += turn.num_output or 0
        self.num_gpu += turn.num_gpu
        self.num_cpu += turn.num_cpu
        self.num_pool += turn.num_pool
        self.waited_s += turn.waited_ms / 1000
        self.engine_s += turn.engine_ms / 1000
        self.saved_s += turn.saved_ms / 1000
        if turn.num_cached is not None:
            _count(self.by_cause, "cached", turn.num_cached)
        if turn.computed is not None:
            self.num_moves += turn.computed.move is not None
            for cause, num_tokens in turn.computed.tokens.items():
                _count(self.by_cause, cause, num_tokens)


class Session(Struct, kw_only=True):
    """One conversation.

    routing: Digests that routing knows it by, one a model.
    children: Conversations that it started, the newest last.
    """

    key: int
    tenant: str | None
    parent: int | None
    begun: float  # unix seconds
    last: float
    model: str = ""
    home: CandidateId = CandidateId("")
    has_ended: bool = False
    routing: dict[int, None] = msgspec.field(default_factory=dict)
    children: dict[int, None] = msgspec.field(default_factory=dict)
    threads: list[Thread] = msgspec.field(default_factory=list)
    totals: Totals = msgspec.field(default_factory=Totals)
    packed: deque[bytes] = msgspec.field(default_factory=lambda: deque(maxlen=MAX_TURNS))

    @property
    def turns(self) -> list[Turn]:
        """List the last turns, oldest first; O(turns)."""
        return [decode_turn(each) for each in self.packed]

    @property
    def num_bytes(self) -> int:
        return sum([thread.num_bytes for thread in self.threads])


class Match(Struct, frozen=True, kw_only=True):
    """What the ledger has of a prompt.

    thread: Whose next turn it is. None: of none.
    source: Had the longest part of it; None: no thread had any.
    num_common: Leading tokens of that part, in whole blocks.
    change: Where it differs from its thread's last prompt.
    is_unknown: The conversation goes on, and what it had is not known.
    """

    thread: Thread | None = None
    source: Thread | None = None
    num_common: int = 0
    change: Change | None = None
    is_unknown: bool = False


class Told(Struct, frozen=True, kw_only=True):
    """A prompt that is remembered; see `Ledger.remember`.

    before: Threads of the conversation and of its parent, until then.
    """

    key: int
    parent: int | None
    thread: Thread
    before: tuple[Thread, ...] = ()
    num_computed: int = 0
    tenant: str | None = None
    routing: int | None = None


def _ignore(*_: object) -> None:
    """Tell nobody."""


class Ledger:
    """Sessions by digest. Call from one thread."""

    def __init__(self, *, max_sessions: int = MAX_SESSIONS, max_bytes: int = MAX_BYTES) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._sessions: OrderedDict[int, Session] = OrderedDict()  # silent for longest first
        self._of_request: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0
        self.num_forgotten = 0
        self.num_computed: Counter[CandidateId] = Counter()
        """Tokens that each candidate computed, ever, for any conversation."""
        self.on_remembered: Callable[[Told], None] = _ignore
        """Called with each prompt of ours that is remembered."""
        self.on_added: Callable[[int, Turn], None] = _ignore
        """Called with each turn of ours, and the session's key."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Yield the sessions, the last active first."""
        return reversed(self._sessions.values())

    def get(self, key: int) -> Session | None:
        """Find a session; None: it is not known, or not any more."""
        return self._sessions.get(key)

    def of_request(self, request_id: str) -> Session | None:
        """Find the session of a recent request."""
        key = self._of_request.get(request_id)
        return None if key is None else self._sessions.get(key)

    # -- before a request is sent ------------------------------------------------------------

    def match(
        self,
        key: int,
        parent: int | None,
        *,
        space: int,
        keys: Sequence[BlockKey],
        contract: HashContract | None,
        num_tokens: int,
        parts: Parts | None,
    ) -> Match:
        """Find what a conversation had of a prompt; changes nothing. O(log blocks) a thread.

        Args:
            key: Of the conversation.
            parent: Of the conversation that started it.
            space: See `Thread`.
            keys: Of the prompt's full blocks; empty: not known.
            contract: How they are named.
            num_tokens: Of the prompt.
            parts: Of the prompt; None: it has none.
        """
        threads, others = self.threads(key), self.threads(parent)
        size = contract.block_size if contract is not None else 1
        source, num_common = None, 0
        for other in (*threads, *others):
            if other.contract == contract and other.space == space:
                num_blocks = num_shared(keys, other.keys)
                if num_blocks > num_common:
                    source, num_common = other, num_blocks
        thread = thread_of(threads, keys, num_tokens, parts, space, contract)
        goes_on = parts is not None and parts.has_answers
        if thread is None:
            is_unknown = source is None and (goes_on or self._is_forgotten(key))
            return Match(source=source, num_common=num_common * size, is_unknown=is_unknown)
        if thread.space != space:
            return Match(thread=thread, num_common=0)
        if not keys or not thread.keys or thread.contract != contract:
            return Match(thread=thread, is_unknown=True)
        change = change_of(thread, parts, num_shared(keys, thread.keys), size, num_tokens)
        return Match(thread=thread, source=source, num_common=num_common * size, change=change)

    def _is_forgotten(self, key: int) -> bool:
        session = self._sessions.get(key)
        return session is not None and not session.threads

    # -- when it is over ---------------------------------------------------------------------

    def threads(self, key: int | None) -> Sequence[Thread]:
        """List the threads of a conversation, the last active one last."""
        session = self._sessions.get(key or 0)
        return session.threads if session is not None else ()

    def remember(
        self,
        key: int,
        parent: int | None,
        thread: Thread,
        *,
        num_computed: int,
        tenant: str | None = None,
        routing: int | None = None,
        replaces: Thread | None = None,
    ) -> None:
        """Remember a prompt that was computed: the next turn is compared with it.

        Args:
            key: Of the conversation.
            parent: Of the conversation that started it.
            thread: The prompt.
            num_computed: Tokens that its candidate computed in this turn.
            tenant: Its name.
            routing: Digest that routing knows the conversation by.
            replaces: The thread that it goes on, if there is one.
        """
        told = Told(
            key=key,
            parent=parent,
            thread=thread,
            before=(*self.threads(key), *self.threads(parent)),
            num_computed=num_computed,
            tenant=tenant,
            routing=routing,
        )
        self._remember(told, replaces)
        self.on_remembered(told)

    def learn(self, told: Told) -> None:
        """Remember a prompt that came through another router."""
        thread, threads = told.thread, self.threads(told.key)
        replaces = thread_of(
            threads, thread.keys, thread.num_tokens, thread.parts, thread.space, thread.contract
        )
        if replaces is not None and _is_overtaken(thread, replaces):
            self.num_computed[thread.candidate] += told.num_computed
        else:
            self._remember(told, replaces)

    def _remember(self, told: Told, replaces: Thread | None) -> None:
        key, parent, thread = told.key, told.parent, told.thread
        self.num_computed[thread.candidate] += told.num_computed
        thread.num_computed = self.num_computed[thread.candidate]
        session = self._sessions.pop(key, None)
        if session is None:
            now = time.time()
            session = Session(key=key, tenant=told.tenant, parent=parent, begun=now, last=now)
            above = self._sessions.get(parent or 0)
            if above is not None:
                above.children[key] = None
                if len(above.children) > MAX_TURNS:
                    del above.children[next(iter(above.children))]
        self._sessions[key] = session
        session.home, session.has_ended = thread.candidate, False
        if told.routing is not None:
            session.routing[told.routing] = None
        self._num_bytes -= session.num_bytes
        if thread.keys or thread.parts is not None:  # else nothing can be compared with it
            session.threads = [each for each in session.threads if each is not replaces]
            session.threads.append(thread)
            del session.threads[:-_MAX_THREADS]
        self._num_bytes += session.num_bytes
        self._keep_bounds()

    def add(self, key: int, turn: Turn) -> None:
        """Add a turn to its session; ignored if that is not known any more."""
        if self.learn_turn(key, turn):
            self.on_added(key, turn)

    def learn_turn(self, key: int, turn: Turn) -> bool:
        """Add a turn of any router to its session; False: that is not known (any more)."""
        session = self._sessions.get(key)
        if session is None:
            return False
        session.begun = min(session.begun, turn.at)
        session.last, session.model = turn.at + turn.total_ms / 1000, turn.model
        session.totals.add(turn)
        session.packed.append(encode_turn(turn))
        self._of_request[turn.request_id] = key
        if len(self._of_request) > _MAX_REQUESTS:
            self._of_request.popitem(last=False)
        return True

    def ended(self, key: int) -> Session | None:
        """Note that a conversation is over: its prompts are forgotten, its totals stay."""
        session = self._sessions.get(key)
        if session is not None:
            session.has_ended = True
            self._drop_prompts(session)
        return session

    def compacted(self, key: int) -> Session | None:
        """Find a conversation whose history is about to be replaced by a shorter one."""
        return self._sessions.get(key)

    def _drop_prompts(self, session: Session) -> None:
        self._num_bytes -= session.num_bytes
        session.threads = []

    def _keep_bounds(self) -> None:
        while len(self._sessions) > self._max_sessions:
            _, oldest = self._sessions.popitem(last=False)
            self._drop_prompts(oldest)
            self.num_forgotten += 1
        if self._num_bytes > self._max_bytes:
            for session in self._sessions.values():
                if session.threads:
                    self._drop_prompts(session)
                    if self._num_bytes <= 0.9 * self._max_bytes:
                        break


def _is_overtaken(thread: Thread, newer: Thread) -> bool:
    """Return whether the next turn was here before the note of this one."""
    num_blocks, is_recent = len(thread.keys), newer.at_s > thread.at_s - _OVERTAKEN_S
    is_part = 0 < num_blocks == num_shared(thread.keys, newer.keys)
    return is_recent and is_part and num_blocks < len(newer.keys)


def _count(counts: dict[str, int], name: Cause | str, num: int) -> None:
    counts[name] = counts.get(name, 0) + num
