"""Predict which blocks an engine will have evicted when it schedules a request that is sent now.

`EvictionOrder` has the order in which an engine's blocks were last used, and so which are evicted
next. `Use` has the blocks of one request in it. The blocks that an engine holds and its free room
are in router.index.cache_view. Nothing here chooses where a request is sent.

An engine looks a prompt up when it schedules it. Requests in front of it take blocks meanwhile,
from the front of a queue of free blocks. A request's blocks join the end of that queue when the
request is over, the last block of its chain first. A hit takes them out of the queue. No event
shows that order, so it is derived from the requests that were sent. Source:
vllm/v1/core/{block_pool,kv_cache_utils,kv_cache_manager}.py, 0.32.0.

Each block belongs to one request: to a running one that uses it, or else to the last one that did.
Two chains have only leading blocks in common. So the blocks of a request are the rest of its chain,
from one block on. `_first` maps that block to the request, and a walk along a chain finds the
requests that its blocks belong to.

The blocks of a reply are added to their request as events bring them, each behind the one before.
If another router follows the engine, its events do not come here. Then evicted blocks of an old
conversation's last reply are charged to its prompt.

Requests that end in one step of the engine end here in any order. If one of the first few has lost
its last block, the engine is evicting that one. After a pause all streams come at once, so their
ends have no order. But each stream brings the tokens that it generated meanwhile, one event for
each, so the stream with the fewest events ended first.

An answer uses one block that is not full. It soon uses a second one if its stream is ahead of its
block events.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import chain, islice
from math import inf
from typing import Final, NamedTuple, cast

from router.base.contracts import BlockKey
from router.index.prefix import num_leading

_MAX_REPLY: Final = 65_536  # blocks; an engine may say anything
_NUM_LOOKS: Final = 4  # at the oldest: with every request that begins more leave than come
_MIN_SWEEP: Final = 256  # requests that are over, before all of them are looked at
_AT_ONCE_S: Final = 0.005  # from the first to the last of ends that came at once
_NUM_AHEAD: Final = 1  # an engine is two tokens ahead of its stream, whose first event is none


class Use:
    """One request's use of a cache.

    keys: Its chain without the first `num_cut` blocks: of one that is over they are others', and
        another router does not name them.
    start: The blocks before it belong to other requests; counted in `keys`.
    num_tokens: Of its prompt; None: not known.
    num_reply: Blocks of its reply.
    num_events: Of its stream; of these, `num_last` came last and at once.
    """

    __slots__ = (
        "_owned",
        "keys",
        "num_cut",
        "num_events",
        "num_last",
        "num_reply",
        "num_tokens",
        "start",
    )

    def __init__(
        self, keys: Sequence[BlockKey], num_tokens: int | None = None, num_cut: int = 0
    ) -> None:
        self.keys = keys
        self.num_cut = num_cut
        self.start = 0
        self.num_tokens = num_tokens
        self.num_reply = 0
        self.num_events = 0
        self.num_last = 0
        # `keys`, once they are not the prompt's: machine words, a fifth of a list of ints.
        self._owned: array[int] | None = None

    def answered(self, num_events: int) -> None:
        """Count events of the request's stream that have come at once."""
        self.num_last = num_events
        self.num_events += num_events

    def is_beyond(self, block_size: int) -> bool:
        """Return whether its stream is, or is about to be, behind the block that is not full."""
        if self.num_tokens is None or not self.num_events:
            return False
        num_tokens = self.num_tokens + self.num_events + _NUM_AHEAD
        return num_tokens > (self.num_cut + len(self.keys) + 1) * block_size

    def prolong(self, keys: Sequence[BlockKey]) -> None:
        """Add blocks of the reply."""
        owned = self._owned
        if owned is None:
            owned = self._own(self.keys)
        owned.extend(keys)
        self.num_reply += len(keys)

    def cut(self) -> None:
        """Drop the keys of other requests' blocks, if they are most of its keys.

        A thousand questions about one text of 6,000 blocks would each keep all of its keys.
        """
        if 2 * self.start > len(self.keys):
            self._own(self.keys[self.start :])
            self.num_cut += self.start
            self.start = 0

    def _own(self, keys: Sequence[BlockKey]) -> array[int]:
        owned = self._owned = array("Q", keys)
        self.keys = cast(Sequence[BlockKey], owned)
        return owned


class FirstLost(NamedTuple):
    """The first block of a chain that will be gone, and how many blocks stand before it."""

    num_blocks: int
    key: BlockKey


class EvictionOrder:
    """The requests that used one candidate's cache, in the order in which it gives them up.

    `begin` and `end` take O(k log n) for k chains that this one has blocks in common with;
    `begin` now and then O(requests that are over), amortised O(1).
    """

    __slots__ = (
        "_at_once",
        "_at_once_s",
        "_first",
        "_last",
        "_max_reply",
        "_over",
        "_running",
        "_shows_replies",
        "_sweep_at",
    )

    def __init__(self, *, max_reply: int = _MAX_REPLY) -> None:
        self._max_reply = max_reply
        self._first: dict[BlockKey, Use] = {}  # by the first block that belongs to them
        self._last: dict[BlockKey, Use] = {}  # by the last block of their chain
        self._running: dict[Use, None] = {}
        self._over: dict[Use, None] = {}  # the first to be evicted first
        self._sweep_at = _MIN_SWEEP
        self._shows_replies = False  # events bring their blocks
        self._at_once: list[Use] = []  # the last to end, as in `_over`
        self._at_once_s = -inf  # when the first of them ended

    def __len__(self) -> int:
        return len(self._over)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def num_open(self, block_size: int) -> int:
        """Count the blocks that requests that run have, or will have soon, beyond their chains."""
        num_running = len(self._running)
        if not self._shows_replies:
            return num_running
        return num_running + sum([use.is_beyond(block_size) for use in self._running])

    def num_in_use(self) -> int:
        """Count the distinct blocks of the chains of requests that run."""
        return sum([len(use.keys) - use.start for use in self._running])

    def num_shared(self, keys: Sequence[BlockKey]) -> int:
        """Count the leading blocks of a chain that requests that run have in use. O(k log n)."""
        num_blocks = 0
        while num_blocks < len(keys):
            other = self._owner(keys[num_blocks], num_blocks)
            if other is None or other not in self._running:
                break
            num_blocks = _num_common(keys, 0, other, num_blocks + 1)
        return num_blocks

    def begin(
        self,
        keys: Sequence[BlockKey],
        held: Container[BlockKey],
        num_tokens: int | None = None,
        num_cut: int = 0,
    ) -> Use:
        """Begin a request that is sent: its prompt's full blocks are in use.

        `held`: what the candidate holds; who has lost everything is forgotten. `num_cut`: blocks
        that stand before these in its chain.
        """
        self._forget(list(islice(self._over, _NUM_LOOKS)), held)
        if len(self._over) >= self._sweep_at:
            # Blocks that other routers' requests keep in use are old here and never go: behind
            # a few of those nothing would be found.
            self._forget(list(self._over), held)
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._over))
        use = Use(keys, num_tokens, num_cut)
        self._take(use)
        self._running[use] = None
        if keys:
            self._last[keys[-1]] = use
        return use

    def stored(self, parent: BlockKey, keys: Sequence[BlockKey]) -> None:
        """Add blocks that the candidate has stored behind another; a reply's join its request.

        A prompt's are its own from the beginning.
        """
        use = self._last.get(parent)
        if use is None or not keys or keys[0] in self._first or use.num_reply > self._max_reply:
            return
        self._shows_replies = True
        del self._last[parent]
        self._last[keys[-1]] = use
        if use.start == len(use.keys):
            self._first[keys[0]] = use
        use.prolong(keys)

    def end(self, use: Use, now_s: float) -> None:
        """End a request, however it ended; once more has no effect."""
        if use in self._running:
            del self._running[use]
            self._leave(use, len(use.keys))
            self._take(use)
            if use.start < len(use.keys):
                self._over[use] = None
                self._last[use.keys[-1]] = use
                use.cut()
            if now_s > self._at_once_s + _AT_ONCE_S:
                self._at_once.clear()
                self._at_once_s = now_s
            self._put_before(use)

    def lost(self, num_blocks: int, held: Container[BlockKey]) -> tuple[FirstLost, ...]:
        """Return where chains will end once so many blocks are evicted.

        O(chains that lose any x requests that run): blocks that these have, too, are kept.
        """
        found = []
        for use in self._oldest_first(held):
            start = self._num_in_use(use)
            end = num_leading(use.keys, held, start)
            if end == start:
                continue
            kept = max(start, end - num_blocks)
            found.append(FirstLost(use.num_cut + kept, use.keys[kept]))
            num_blocks -= end - kept
            if num_blocks <= 0:
                break
        return tuple(found)

    def _put_before(self, use: Use) -> None:
        """Move a request before those that ended at once with it, and after it in the engine."""
        at = bisect_right(self._at_once, _num_at_once(use), key=_num_at_once)
        for later in self._at_once[at:]:
            if later in self._over:
                del self._over[later]
                self._over[later] = None
        self._at_once.insert(at, use)

    def _forget(self, uses: Iterable[Use], held: Container[BlockKey]) -> None:
        """Forget those of some requests that have lost everything."""
        for use in uses:
            if use.keys[use.start] not in held:
                self._leave(use, len(use.keys))

    def _oldest_first(self, held: Container[BlockKey]) -> Iterator[Use]:
        """Yield requests that are over and have blocks of their own left."""
        left = (use for use in self._over if use.keys[use.start] in held)
        oldest = sorted(islice(left, _NUM_LOOKS), key=lambda use: use.keys[-1] in held)
        return chain(oldest, left)

    def _take(self, use: Use) -> None:
        """Assign a request its blocks, except those that belong to a running request.

        The running request also gets the blocks that requests before it leave: it has them, too. No
        block of a chain may belong to no request, or walks along the chain end there. But blocks in
        front of those that another router has named cannot be given to its request.
        """
        keys, num_cut = use.keys, use.num_cut
        position = start = 0
        while position < len(keys):
            other = self._owner(keys[position], num_cut + position)
            if other is None:
                break
            end = _num_common(keys, num_cut, other, num_cut + position + 1)
            if other in self._over:
                self._leave(other, end - other.num_cut)
                other.cut()
            else:
                if start < position:
                    self._leave(other, max(0, num_cut + start - other.num_cut))
                start = end - num_cut
            position = end - num_cut
        use.start = start
        if start < len(keys):
            self._first[keys[start]] = use

    def _owner(self, key: BlockKey, depth: int) -> Use | None:
        """Return whose first own block this is, with so many blocks before it.

        None also of a chain in which other numbers stand before it: routers and engines may say
        anything.
        """
        use = self._first.get(key)
        return use if use is not None and use.num_cut + use.start == depth else None

    def _leave(self, use: Use, start: int) -> None:
        """Leave to a request what comes from `keys[start]` on, of one that is over perhaps none."""
        keys, first = use.keys, self._first
        if use.start < len(keys) and first.get(keys[use.start]) is use:
            del first[keys[use.start]]
        use.start = start
        if start < len(keys):
            first[keys[start]] = use
        else:
            self._over.pop(use, None)
            if keys and self._last.get(keys[-1]) is use:
                del self._last[keys[-1]]

    def _num_in_use(self, use: Use) -> int:
        """Count the leading blocks of a request that is over which others have in use."""
        start = use.start
        num_cut = use.num_cut
        for other in self._running:
            keys, at = other.keys, num_cut + start - other.num_cut
            if start < len(use.keys) and 0 <= at < len(keys) and keys[at] == use.keys[start]:
                start = _num_common(keys, other.num_cut, use, num_cut + start + 1) - num_cut
        return start


def _num_at_once(use: Use) -> float:
    """Return how many steps its stream's last events stand for; of a whole stream: not known."""
    return use.num_last if use.num_last < use.num_events else inf


def _num_common(one: Sequence[BlockKey], one_cut: int, other: Use, start: int) -> int:
    """Count the leading blocks that a chain shares with a use's, those cut off before either too.

    `start` are known to be shared.
    """
    two, two_cut = other.keys, other.num_cut
    most = min(one_cut + len(one), two_cut + len(two))
    if one[most - 1 - one_cut] == two[most - 1 - two_cut]:  # a key stands for all before it, too
        return most
    first, last = start, most - 1  # the first block that they do not share is one of these
    while first < last:
        middle = (first + last) // 2
        if one[middle - one_cut] == two[middle - two_cut]:
            first = middle + 1
        else:
            last = middle
    return first
