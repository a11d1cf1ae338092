"""The sessions' ledger: the last prompts of each conversation, and what all of its turns cost.

Requests that each go on where the one before ended are a *thread*. A client's title generator, or
sub-agents under one session id, are threads of their own. What a conversation had before is what
its threads, or its parent's, had. One that is new, and begins with a history that another one has,
was forked from that.

Bounded: the conversation that was silent for longest loses its prompts and its list of turns first,
then its totals. Its next turn is `unknown`. Every operation is O(1) in the number of conversations,
unless it says otherwise.

What must not live here: why tokens were computed (`bookkeeper`), what a turn cost (`turns`).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct

from policies.view import CandidateId
from router.api.digests import PartDigests
from router.base.bounded import Bounded
from router.base.contracts import BlockKey, HashContract
from router.index.copies import num_common_blocks
from router.observers.sessions.turns import Totals, Turn, decode_turn, encode_turn
from router.records.record import Change, Part

_LEAST_SHARE: Final = 0.5  # of the shorter prompt: so much in common is the same thread


class Thread(Struct, kw_only=True):
    """The last prompt of requests that go on from each other.

    space: Salt, adapter and model: prompts of two spaces share no block.
    keys: Of its full blocks, as `contract` names them; empty: not known.
    num_emptied: How often the candidate's cache had been emptied.
    at_s: When the last turn ended, monotonic.
    num_computed: Tokens that the candidate had computed by then, ever.
    num_pool_tokens: That the pool had of it.
    change, num_in_row: Where the last turns in a row changed.
    """

    space: int
    contract: HashContract | None
    keys: Sequence[BlockKey]
    num_tokens: int
    parts: PartDigests | None
    candidate: CandidateId
    num_emptied: int
    at_s: float
    num_computed: int = 0
    num_pool_tokens: int = 0
    change: Part | None = None
    num_in_row: int = 0

    @property
    def num_bytes(self) -> int:
        return 8 * (len(self.keys) + (len(self.parts.messages) if self.parts else 0))


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


def thread_of(
    threads: Sequence[Thread],
    keys: Sequence[BlockKey],
    num_tokens: int,
    parts: PartDigests | None,
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
            return (
                same[0]
                if len(same) == 1
                else max(same, key=lambda each: num_equal(each.parts, parts))
            )
    for thread in reversed(threads):
        if thread.contract == contract and thread.space == space:
            num_blocks = num_common_blocks(keys, thread.keys)
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


def num_equal(one: PartDigests | None, other: PartDigests) -> int:
    """Count the leading messages that two requests have in common; O(messages), by memory."""
    if one is None:
        return 0
    mine, theirs = one.messages, other.messages
    low, high = 0, min(len(mine), len(theirs))
    if mine[:high] == theirs[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if mine[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def change_of(
    thread: Thread, parts: PartDigests | None, num_common: int, size: int, num_tokens: int
) -> Change | None:
    """Find the first difference from a thread's last prompt; None: all of its blocks are there."""
    if num_common >= len(thread.keys):
        return None
    part, index, digest = _difference(thread.parts, parts, num_tokens < thread.num_tokens)
    num_in_row = thread.num_in_row + 1 if thread.change == part else 1
    return Change(
        part=part, index=index, digest=digest, offset=num_common * size, num_in_row=num_in_row
    )


def _difference(
    before: PartDigests | None, now: PartDigests | None, is_shorter: bool
) -> tuple[Part, int | None, str]:
    """Find the first part that differs, the message's index, and its digest as it is now."""
    if before is None or now is None:
        return "text", None, ""
    if before.tools != now.tools:
        part: Part = "tool_order" if before.tool_set == now.tool_set else "tools"
        return part, None, f"{now.tools:016x}"
    if before.system != now.system:
        return "system", None, f"{now.system:016x}"
    first = num_equal(before, now)
    if first >= len(before.messages):
        return "later_system" if now.last_system >= first else "template", None, ""
    digest = f"{now.messages[first]:016x}" if first < len(now.messages) else ""
    if is_shorter and len(now.messages) < len(before.messages):
        return "compacted", first + now.num_system, digest
    return "message", first + now.num_system, digest


MAX_SESSIONS: Final = 20_000
MAX_BYTES: Final = 128 << 20
"""Prompts and turns: 8 bytes a block, 40 kB for 80,000 tokens in blocks of 16; 250 a turn."""

MAX_TURNS: Final = 64
"""Turns that are kept of a session, the newest; its totals count all."""

_MAX_THREADS: Final = 4
_OVERTAKEN_S: Final = 0.5  # notes take 0.25 s
_MAX_ROUTING: Final = 8
_MAX_FORKED: Final = 4  # messages behind the common history: an answer, what a tool said, a task
_TURN_BYTES: Final = 48  # besides its own
_MAX_SUMS: Final = 2_000  # tenants times models
_MAX_REQUESTS: Final = 50_000  # whose session is found by the request's id


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
    title: str | None = None  # its client's own id; None: that is not shown, or not known
    home: CandidateId = CandidateId("")
    has_ended: bool = False
    routing: dict[int, None] = msgspec.field(default_factory=dict)
    children: dict[int, None] = msgspec.field(default_factory=dict)
    threads: list[Thread] = msgspec.field(default_factory=list)
    totals: Totals = msgspec.field(default_factory=Totals)
    packed: deque[bytes] = msgspec.field(default_factory=deque)
    num_bytes: int = 0  # of threads and turns

    @property
    def turns(self) -> list[Turn]:
        """List the last turns, oldest first; O(turns).

        They are booked as their causes are known, so perhaps in another order.
        """
        return self.last_turns(MAX_TURNS)

    def last_turns(self, most: int) -> list[Turn]:
        """List so many turns at most, the last ones, oldest first."""
        packed = islice(self.packed, max(0, len(self.packed) - most), None)
        return sorted(map(decode_turn, packed), key=lambda turn: turn.at)


class SumKey(NamedTuple):
    """What turns are summed by; `is_ours`: they came through this router."""

    tenant: str | None
    model: str
    is_ours: bool


class Memory(Struct, frozen=True, kw_only=True):
    """A prompt that is remembered; see `SessionLedger.remember`.

    before: Threads of the conversation and of its parent, until then.
    """

    key: int
    parent: int | None
    thread: Thread
    before: tuple[Thread, ...] = ()
    num_computed: int = 0
    tenant: str | None = None
    routing: int | None = None


class SessionLedger:
    """Sessions by digest. Call from one thread."""

    def __init__(self, *, max_sessions: int = MAX_SESSIONS, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._sessions: Bounded[int, Session] = Bounded(max_sessions)  # silent for longest first
        self._of_request: Bounded[str, int] = Bounded(_MAX_REQUESTS)
        self._of_opening: Bounded[tuple[str | None, int], int] = Bounded(max_sessions)
        """Tenant and first message -> the last conversation that began so."""
        self.sums: Bounded[SumKey, Totals] = Bounded(_MAX_SUMS)
        """All turns, those of forgotten sessions, too."""
        self.num_bytes = 0
        self.num_computed: Counter[CandidateId] = Counter()
        """Tokens that each candidate computed, ever, for any conversation."""
        self.on_remembered: Callable[[Memory], None] | None = None
        """Called with each prompt of ours that is remembered."""
        self.on_added: Callable[[int, Turn], None] | None = None
        """Called with each turn of ours, and the session's key."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        """Yield the sessions, the last active first."""
        return reversed(self._sessions.values())

    @property
    def num_forgotten(self) -> int:
        """Count the sessions that made room for others."""
        return self._sessions.num_evicted

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
        parts: PartDigests | None,
        tenant: str | None = None,
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
            tenant: Its name; only its own conversations count.
        """
        threads, others = self.threads(key), self.threads(parent)
        if parts is not None and parts.has_answers and not others and key not in self._sessions:
            others = self._origin(parts, tenant)
        size = contract.block_size if contract is not None else 1
        source, num_common = None, 0
        for other in (*threads, *others) if others else threads:
            if other.space == space and other.contract == contract:
                num_blocks = num_common_blocks(keys, other.keys)
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
        num_blocks = num_common if thread is source else num_common_blocks(keys, thread.keys)
        change = change_of(thread, parts, num_blocks, size, num_tokens)
        return Match(thread=thread, source=source, num_common=num_common * size, change=change)

    def _origin(self, parts: PartDigests, tenant: str | None) -> Sequence[Thread]:
        """List the threads that a new conversation may be forked from.

        They have its history, but for what has come since: clients do not always name a parent.
        """
        threads = self.threads(self._of_opening.get((tenant, parts.messages[0])))
        num_new = [len(parts.messages) - num_equal(each.parts, parts) for each in threads]
        return threads if min(num_new, default=_MAX_FORKED) < _MAX_FORKED else ()

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
        num_computed: int = 0,
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
        is_shared = self.on_remembered is not None
        memory = Memory(
            key=key,
            parent=parent,
            thread=thread,
            before=(*self.threads(key), *self.threads(parent)) if is_shared else (),
            num_computed=num_computed,
            tenant=tenant,
            routing=routing,
        )
        if self.on_remembered is not None:
            self.on_remembered(memory)
        self._remember(memory, replaces)

    def learn(self, memory: Memory) -> None:
        """Remember a prompt that came through another router."""
        thread, threads = memory.thread, self.threads(memory.key)
        replaces = thread_of(
            threads, thread.keys, thread.num_tokens, thread.parts, thread.space, thread.contract
        )
        if replaces is not None and _is_overtaken(thread, replaces):
            self.num_computed[thread.candidate] += memory.num_computed
            return
        self._remember(memory, replaces)

    def _remember(self, memory: Memory, replaces: Thread | None) -> None:
        key, thread, routing = memory.key, memory.thread, memory.routing
        self.num_computed[thread.candidate] += memory.num_computed
        thread.num_computed = self.num_computed[thread.candidate]
        session = self._sessions.get(key)
        if session is None:
            session = self._begun(key, memory.parent, memory.tenant)
        else:
            self._sessions.move_to_end(key)
        session.home, session.has_ended = thread.candidate, False
        if routing is not None:
            session.routing[routing] = None
            if len(session.routing) > _MAX_ROUTING:
                del session.routing[next(iter(session.routing))]
        if thread.keys or thread.parts is not None:  # else nothing can be compared with it
            kept = [each for each in session.threads if each is not replaces][1 - _MAX_THREADS :]
            grown = thread.num_bytes + sum([each.num_bytes for each in kept])
            grown -= sum([each.num_bytes for each in session.threads])
            session.threads = [*kept, thread]
            if thread.parts is not None and thread.parts.messages:
                self._of_opening.put((session.tenant, thread.parts.messages[0]), key)
            self._grow(session, grown)
        if self.num_bytes > self._max_bytes:
            self._make_room()

    def _begun(self, key: int, parent: int | None, tenant: str | None) -> Session:
        now = time.time()
        session = Session(key=key, tenant=tenant, parent=parent, begun=now, last=now)
        above = self._sessions.get(parent or 0)
        if above is not None:
            above.children[key] = None
            if len(above.children) > MAX_TURNS:
                del above.children[next(iter(above.children))]
        for oldest in self._sessions.put(key, session):
            self.num_bytes -= oldest.num_bytes
        return session

    def add(self, key: int, turn: Turn) -> None:
        """Add a turn to its session; ignored if that is not known any more."""
        if self.learn_turn(key, turn, is_ours=True) and self.on_added is not None:
            self.on_added(key, turn)

    def learn_turn(self, key: int, turn: Turn, *, is_ours: bool = False) -> bool:
        """Add a turn of any router to its session; False: that is not known (any more)."""
        session = self._sessions.get(key)
        if session is None:
            return False
        sum_key = SumKey(session.tenant, turn.model, is_ours)
        sums = self.sums.get(sum_key)
        if sums is None:
            sums = Totals()
            self.sums.put(sum_key, sums)
        sums.add(turn)
        is_first, ended = not session.totals.num_turns, turn.at + turn.total_ms / 1000
        session.begun = turn.at if is_first else min(session.begun, turn.at)
        if is_first or ended >= session.last:  # a turn may be booked after the next one
            session.last, session.model = ended, turn.model
        session.totals.add(turn)
        packed = encode_turn(turn)
        session.packed.append(packed)
        grown = len(packed) + _TURN_BYTES
        if len(session.packed) > MAX_TURNS:
            grown -= len(session.packed.popleft()) + _TURN_BYTES
        self._grow(session, grown)
        self._of_request.put(turn.request_id, key)
        return True

    def own_by_model(self) -> Iterator[tuple[str, Totals]]:
        """Sum this router's turns by model."""
        found: dict[str, Totals] = {}
        for key, sums in self.sums.items():
            if key.is_ours:
                found.setdefault(key.model, Totals()).include(sums)
        yield from found.items()

    def ended(self, key: int) -> Session | None:
        """Record that a conversation is over: its prompts are the first to go if room is short.

        They stay until then, because agents resume sessions that they have ended.
        """
        session = self._sessions.get(key)
        if session is not None:
            session.has_ended = True
        return session

    def _grow(self, session: Session, num_bytes: int) -> None:
        session.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _make_room(self) -> None:
        """Drop prompts of sessions that ended, then of those silent for longest; O(sessions)."""
        for session in [each for each in self._sessions.values() if each.has_ended]:
            if self.num_bytes <= 0.9 * self._max_bytes:
                return
            self._grow(session, -sum([thread.num_bytes for thread in session.threads]))
            session.threads = []
        for session in self._sessions.values():
            if self.num_bytes <= 0.9 * self._max_bytes:
                return
            session.threads = []
            session.packed.clear()
            self._grow(session, -session.num_bytes)


def _is_overtaken(thread: Thread, newer: Thread) -> bool:
    """Return whether the next turn was here before the note of this one."""
    num_blocks, is_recent = len(thread.keys), newer.at_s > thread.at_s - _OVERTAKEN_S
    is_part = 0 < num_blocks == num_common_blocks(thread.keys, newer.keys)
    return is_recent and is_part and num_blocks < len(newer.keys)
