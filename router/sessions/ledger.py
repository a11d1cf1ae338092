"""The sessions' ledger: the last prompts of each conversation, and what all of its turns cost.

A conversation may have several *threads*: requests that each go on where the one before ended. A
client's title generator, or sub-agents under one session id, are threads of their own. What a
conversation had before is what its threads, or its parent's, had.

Bounded: the conversation that was silent for longest is forgotten first. Its next turn is
`unknown`. Every operation is O(1) in the number of conversations, unless it says otherwise.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Final

import msgspec
from msgspec import Struct

from policies.view import CandidateId
from router.api.parts import Parts
from router.contracts import BlockKey, HashContract
from router.records.computed import Cause, Change, Computed, Part

MAX_SESSIONS: Final = 20_000
MAX_BYTES: Final = 128 << 20
"""Of the last prompts' block keys: 8 bytes a block, 40 kB for 80,000 tokens in blocks of 16."""

MAX_TURNS: Final = 64
"""Turns that are kept of a session, the newest; its totals count all."""

_MAX_THREADS: Final = 4
_MAX_REQUESTS: Final = 50_000  # whose session is found by the request's id
_LEAST_SHARE: Final = 0.5  # of the shorter prompt: so much in common is the same thread

Contracts = dict[HashContract, Sequence[BlockKey]]


class Turn(Struct, frozen=True, array_like=True, kw_only=True):
    """One turn of a session. Times in milliseconds.

    at: When the request arrived, unix seconds.
    num_cached: As the engine reports; None: it does not.
    num_gpu, num_cpu, num_pool: Where these came from.
    engine_ms: What computing the prompt took, by the cost model; `saved_ms`: what caches saved.
    """

    request_id: str
    at: float
    candidate: CandidateId
    model: str
    outcome: str
    num_tokens: int
    num_cached: int | None = None
    num_gpu: int = 0
    num_cpu: int = 0
    num_pool: int = 0
    num_output: int | None = None
    computed: Computed | None = None
    router_ms: float = 0.0
    waited_ms: float = 0.0
    ttft_ms: float | None = None
    total_ms: float = 0.0
    engine_ms: float = 0.0
    saved_ms: float = 0.0
    prefill_at: CandidateId | None = None
    waited_for: str | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Turn).decode


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


class Asked(Struct, frozen=True, gc=False):
    """A request of a thread, whose prompt the thread's last one begins with."""

    request_id: str
    num_tokens: int
    num_messages: int


class Thread(Struct, kw_only=True):
    """The last prompt of requests that go on from each other.

    space: Salt, adapter and model: prompts of two spaces share no block.
    keys: Of its full blocks, as `contract` names them; empty: not known.
    epoch: Of the candidate's cache.
    at_s: When the last turn ended, monotonic.
    num_computed: Tokens that the candidate had computed by then, ever.
    num_pool_tokens: That the pool had of it.
    change, num_in_row: Where the last turns in a row changed.
    model: As the last request named it.
    asked: The last requests, the newest first.
    """

    space: int
    contract: HashContract | None
    keys: Sequence[BlockKey]
    num_tokens: int
    parts: Parts | None
    candidate: CandidateId
    epoch: int
    at_s: float
    num_computed: int
    num_pool_tokens: int = 0
    change: Part | None = None
    num_in_row: int = 0
    model: str = ""
    asked: tuple[Asked, ...] = ()

    @property
    def num_bytes(self) -> int:
        return 8 * (len(self.keys) + (len(self.parts.messages) if self.parts else 0))


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
        return [_decode(each) for each in self.packed]

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


class Ledger:
    """Sessions by digest. Call from one thread."""

    def __init__(self, *, max_sessions: int = MAX_SESSIONS, max_bytes: int = MAX_BYTES) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._sessions: OrderedDict[int, Session] = OrderedDict()  # silent for longest first
        self._of_request: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0
        self.num_forgotten = 0

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
        own, above = self._sessions.get(key), self._sessions.get(parent or 0)
        threads = own.threads if own is not None else []
        others = above.threads if above is not None else []
        size = contract.block_size if contract is not None else 1
        source, num_common = None, 0
        for other in (*threads, *others):
            if other.contract == contract and other.space == space:
                num_blocks = num_shared(keys, other.keys)
                if num_blocks > num_common:
                    source, num_common = other, num_blocks
        thread = _thread_of(threads, keys, num_tokens, parts, space, contract)
        goes_on = parts is not None and parts.has_answers
        if thread is None:
            is_unknown = goes_on and source is None
            return Match(source=source, num_common=num_common * size, is_unknown=is_unknown)
        if thread.space != space:
            return Match(thread=thread, num_common=0)
        if not keys or not thread.keys or thread.contract != contract:
            return Match(thread=thread, is_unknown=True)
        change = _change_of(thread, parts, num_shared(keys, thread.keys), size, num_tokens)
        return Match(thread=thread, source=source, num_common=num_common * size, change=change)

    # -- when it is over ---------------------------------------------------------------------

    def remember(
        self,
        key: int,
        parent: int | None,
        thread: Thread,
        *,
        tenant: str | None = None,
        routing: int | None = None,
        replaces: Thread | None = None,
    ) -> None:
        """Remember a prompt that was computed: the next turn is compared with it.

        Args:
            key: Of the conversation.
            parent: Of the conversation that started it.
            thread: The prompt.
            tenant: Its name.
            routing: Digest that routing knows the conversation by.
            replaces: The thread that it goes on, if there is one.
        """
        session = self._sessions.pop(key, None)
        if session is None:
            now = time.time()
            session = Session(key=key, tenant=tenant, parent=parent, begun=now, last=now)
            above = self._sessions.get(parent or 0)
            if above is not None:
                above.children[key] = None
                if len(above.children) > MAX_TURNS:
                    del above.children[next(iter(above.children))]
        self._sessions[key] = session
        session.home, session.has_ended = thread.candidate, False
        if routing is not None:
            session.routing[routing] = None
        self._num_bytes -= session.num_bytes
        session.threads = [each for each in session.threads if each is not replaces]
        session.threads.append(thread)
        del session.threads[:-_MAX_THREADS]
        self._num_bytes += session.num_bytes
        self._keep_bounds()

    def add(self, key: int, turn: Turn) -> None:
        """Add a turn to its session; ignored if that is not known any more."""
        session = self._sessions.get(key)
        if session is None:
            return
        session.begun = min(session.begun, turn.at)
        session.last, session.model = turn.at + turn.total_ms / 1000, turn.model
        session.totals.add(turn)
        session.packed.append(_encode(turn))
        self._of_request[turn.request_id] = key
        if len(self._of_request) > _MAX_REQUESTS:
            self._of_request.popitem(last=False)

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


def num_shared(one: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """Count the leading blocks that two chains share: a key stands for all before it, too."""
    low, high = 0, min(len(one), len(other))
    if high and one[high - 1] == other[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if one[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


def _thread_of(
    threads: Sequence[Thread],
    keys: Sequence[BlockKey],
    num_tokens: int,
    parts: Parts | None,
    space: int,
    contract: HashContract | None,
) -> Thread | None:
    """Find the thread that a prompt goes on: by its first message, else by most of its tokens.

    A history that was replaced by a shorter one begins again, behind the same tools and system.
    """
    if parts is not None and parts.messages:
        same = [
            each
            for each in threads
            if each.parts and each.parts.messages and each.parts.messages[0] == parts.messages[0]
        ]
        if same:
            return max(same, key=lambda each: _num_equal(each.parts, parts))
    for thread in reversed(threads):
        if thread.contract == contract and thread.space == space:
            num_blocks = num_shared(keys, thread.keys)
            if num_blocks and num_blocks >= _LEAST_SHARE * min(len(keys), len(thread.keys)):
                return thread
    if parts is None:
        return None
    for thread in reversed(threads):
        before = thread.parts
        if (
            before is not None
            and (before.tool_set, before.system) == (parts.tool_set, parts.system)
            and before.has_answers
            and num_tokens < thread.num_tokens
        ):
            return thread
    return None


def _num_equal(one: Parts | None, other: Parts) -> int:
    """Count the leading messages that two requests have in common."""
    if one is None:
        return 0
    pairs = zip(one.messages, other.messages, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _change_of(
    thread: Thread, parts: Parts | None, num_common: int, size: int, num_tokens: int
) -> Change | None:
    """Find the first difference from a thread's last prompt; None: all of its blocks are there."""
    if num_common >= len(thread.keys):
        return None
    part, index, digest = difference_of(thread.parts, parts, num_tokens < thread.num_tokens)
    num_in_row = thread.num_in_row + 1 if thread.change == part else 1
    return Change(
        part=part, index=index, digest=digest, offset=num_common * size, num_in_row=num_in_row
    )


def difference_of(
    before: Parts | None, now: Parts | None, is_shorter: bool
) -> tuple[Part, int | None, str]:
    """Find the first part that differs, the message's index, and its digest as it is now."""
    if before is None or now is None:
        return "text", None, ""
    if before.tools != now.tools:
        part: Part = "tool_order" if before.tool_set == now.tool_set else "tools"
        return part, None, f"{now.tools:016x}"
    if before.system != now.system:
        return "system", None, f"{now.system:016x}"
    first = _num_equal(before, now)
    if first >= len(before.messages):
        return "template", None, ""
    digest = f"{now.messages[first]:016x}" if first < len(now.messages) else ""
    if is_shorter and len(now.messages) < len(before.messages):
        return "compacted", first + now.num_system, digest
    return "message", first + now.num_system, digest


def _count(counts: dict[str, int], name: Cause | str, num: int) -> None:
    counts[name] = counts.get(name, 0) + num
