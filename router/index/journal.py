"""What changed in one candidate's blocks, for the routers that follow this one.

Recording is fast: the list of keys that an event touched is kept as it is. Whether they are held is
read from the index when the changes are taken. So the changes are coalesced and absolute. A block
that was stored and removed a hundred times is one key, and it is held now or it is not.

The owner has to know three consequences:

1. Changes are true at the moment they are taken. They must be published in the order taken.
2. Changes that are not whole (`max_blocks` left some pending) mix moments. An engine's position may
   be published only with whole ones. A router that resumes there applies the later batches, and
   would count copies twice.
3. Changes that are not taken for long are dropped, and the next call returns `is_lost`. Then
   publish a clear and the whole contents. Later changes are recorded from that moment on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct

from router.base.contracts import BlockKey
from router.base.messages import TierChange, pack_keys, unpack_keys
from router.index.copies import TIERS, Copies, Tier

MAX_PENDING: Final = 1 << 18
"""Keys recorded before everything is dropped: 10 MiB at most. 262,144 keys are 50 ms of a replay,
or minutes of an engine's work."""


class Changes(Struct, frozen=True, gc=False):
    """Changes of a candidate's blocks since the last ones were taken; absolute.

    `cleared`: gpu and cpu tier were cleared before `changes`. `is_whole`: nothing else is pending.
    `is_lost`: changes were dropped; `changes` is empty.
    """

    changes: tuple[TierChange, ...] = ()
    cleared: bool = False
    is_whole: bool = True
    is_lost: bool = False


_LOST: Final = Changes(is_whole=False, is_lost=True)


class Journal:
    """Records which blocks of one candidate changed."""

    __slots__ = ("_is_cleared", "_is_lost", "_lowered", "_max_pending", "_touched", "num_pending")

    def __init__(self, *, max_pending: int = MAX_PENDING) -> None:
        self._max_pending = max_pending
        self.num_pending = 0  # keys recorded, with repetitions
        self._touched: dict[Tier, deque[Sequence[BlockKey]]] = {tier: deque() for tier in TIERS}
        self._lowered: dict[Tier, set[BlockKey]] = {tier: set() for tier in TIERS}
        self._is_cleared = False
        self._is_lost = False

    # -- recording ---------------------------------------------------------------------------

    def note(self, tier: Tier, keys: Sequence[BlockKey]) -> None:
        """Record that these blocks changed; `keys` is kept and must not change later."""
        if self._is_lost:
            return
        self._touched[tier].append(keys)
        self.num_pending += len(keys)
        if self.num_pending > self._max_pending:
            self.lose()

    def lower(self, tier: Tier, keys: Iterable[BlockKey]) -> None:
        """Record blocks that had several copies and lost some.

        They may have one copy now, while followers count more.
        """
        if not self._is_lost:
            self._lowered[tier].update(keys)

    def note_again(self, change: TierChange) -> None:
        """Record blocks again that were taken and could not be published, of gpu or cpu tier."""
        assert change.tier != "pool"
        self.note(change.tier, unpack_keys(change.stored))
        if not self._is_lost:
            self._lowered[change.tier].update(key for key, count in change.copies if count == 1)

    def clear(self) -> None:
        """Record that all blocks are gone; earlier changes do not matter."""
        self._forget()
        self._is_cleared = True
        self._is_lost = False

    def lose(self) -> None:
        """Drop all changes; the next `take` returns `is_lost`."""
        self._forget()
        self._is_lost = True

    # -- taking ------------------------------------------------------------------------------

    def take(self, held: dict[Tier, Copies], max_blocks: int) -> Changes | None:
        """Remove and return the changes of at most `max_blocks` keys; None: there are none.

        Args:
            held: The blocks now.
            max_blocks: The oldest changes come first, the rest stays pending.
        """
        if self._is_lost:
            self._is_lost = self._is_cleared = False
            return _LOST
        if not self._is_cleared and not self.num_pending:
            return None
        changes = []
        for tier in TIERS:
            touched = self._draw(self._touched[tier], max_blocks)
            max_blocks -= len(touched)
            if touched:
                changes.append(_change(tier, touched, held[tier], self._lowered[tier]))
        cleared, self._is_cleared = self._is_cleared, False
        return Changes(tuple(changes), cleared=cleared, is_whole=not self.num_pending)

    def _draw(self, touched: deque[Sequence[BlockKey]], max_blocks: int) -> dict[BlockKey, None]:
        """Remove and return keys of the oldest records, each once, in their order."""
        drawn: dict[BlockKey, None] = {}
        while touched and len(drawn) < max_blocks:
            keys = touched.popleft()
            room = max_blocks - len(drawn)
            if len(keys) > room:
                touched.appendleft(keys[room:])
                keys = keys[:room]
            drawn.update(dict.fromkeys(keys))
            self.num_pending -= len(keys)
        return drawn

    def _forget(self) -> None:
        self.num_pending = 0
        for tier in TIERS:
            self._touched[tier].clear()
            self._lowered[tier].clear()


def held_change(tier: Tier, keys: Sequence[BlockKey], held: Copies) -> TierChange:
    """Return a change with those keys that are held, for a candidate's whole contents."""
    stored = [key for key in keys if key in held]
    copies = tuple((key, held[key]) for key in stored if held[key] > 1)
    return TierChange(tier, stored=pack_keys(stored), copies=copies)


def _change(
    tier: Tier, touched: dict[BlockKey, None], held: Copies, lowered: set[BlockKey]
) -> TierChange:
    stored = [key for key in touched if key in held]
    removed = [] if len(stored) == len(touched) else [key for key in touched if key not in held]
    copies = tuple((key, count) for key in stored if (count := held[key]) > 1 or key in lowered)
    if lowered:
        lowered.difference_update(touched)
    return TierChange(tier, stored=pack_keys(stored), removed=pack_keys(removed), copies=copies)
