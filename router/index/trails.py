"""The blocks of sessions whose prompts' tokens are not known here, as engines' events name them.

What must live here: one chain a session, from events and usage. What must not: which requests are
followed, who holds the blocks (router.data_path.attribution).

An event of vLLM names the session whose request stored the blocks, and the block before them. So a
session's events, put behind one another, are the chain of its last request:

    the event's parent         the chain
    none                       begins anew
    a block of the chain       goes on behind it: all before was reused
    another block              begins anew, with that block: what was reused is named by no event.
                               How many stand before it, the answer's usage says (cached tokens),
                               which may come before the event

A chain counts while usage agrees with its length. It does not where a session has two requests at
once, a second conversation (a title, a summary), or its events did not come.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, cast

from msgspec import Struct, field

from policies.view import CandidateId
from router.contracts import BlockKey

MAX_SESSIONS: Final = 10_000
MAX_BLOCKS: Final = 4_000_000  # of all sessions, 8 bytes each


def digest_in(session: str) -> str:
    """Return the part of an event's session that names the session, not one request of it alone.

    Requests from which names of images are learned have a number of their own behind it.
    """
    return session.partition("-")[0]


class Trail(Struct):
    """One session's chain: `num_before` blocks that are not named, then `keys`."""

    keys: array[int] = field(default_factory=lambda: array("Q"))
    num_before: int | None = None  # None: not known
    block_size: int = 1
    candidate: CandidateId | None = None  # where the last of them were stored; None: no event
    num_prompt_tokens: int | None = None  # of the last prompt; None: no usage has come
    num_guessed_tokens: int = 0  # what that one had been guessed to have
    num_cached_tokens: int | None = None  # of that one; None: it is not answered yet, or not known
    num_earlier_tokens: int = 0  # of the prompt before it
    keeps_replies: bool = True  # False: a turn did not go on with the reply as it was generated
    is_foreign: bool = False  # clients name this session to engines themselves: never believed

    def expected(self) -> Sequence[BlockKey]:
        """Return those of `keys` that the next prompt is expected to begin with; none: not known.

        The last prompt, and its reply if turns go on with replies as they were generated.
        """
        keys = cast(Sequence[BlockKey], self.keys)
        if self.num_before is None or self.is_foreign:
            return ()
        num_prompt_blocks = (self.num_prompt_tokens or 0) // self.block_size - self.num_before
        if len(keys) < num_prompt_blocks:
            return ()  # an event has not come, or they are another request's
        if self.keeps_replies or self.num_prompt_tokens is None:
            return keys
        return keys[: max(0, num_prompt_blocks)]

    def put(self, parent: BlockKey | None, keys: Sequence[BlockKey]) -> None:
        """Put blocks behind `parent`; None: they are a prompt's first."""
        held = self.keys
        if parent is None:
            if self.num_before:
                del held[:]
            self.num_before = num_kept = 0
        elif held and held[-1] == parent:
            num_kept = len(held)
        else:
            try:
                num_kept = held.index(parent) + 1
            except ValueError:
                held[:] = array("Q", (parent,))
                self.num_before, num_kept = None, 1
                self.count_before()
        if num_kept < len(held):
            num_earlier_blocks = self.num_earlier_tokens // self.block_size
            is_reply = (self.num_before or 0) + num_kept >= num_earlier_blocks > 0
            if is_reply and held[num_kept] != keys[0]:
                self.keeps_replies = False
            del held[num_kept:]
        held.extend(keys)

    def count_before(self) -> None:
        """Count the blocks that are not named, once both an event and the usage have come."""
        if self.num_before is None and self.keys and self.num_cached_tokens is not None:
            num_before = self.num_cached_tokens // self.block_size - 1
            self.num_before = num_before if num_before >= 0 else None

    def forget(self) -> None:
        """Begin anew with the next blocks."""
        del self.keys[:]
        self.num_before = self.candidate = None


class Trails:
    """The chains of the sessions that are followed; the least recently asked for goes first."""

    __slots__ = ("_max_blocks", "_max_sessions", "_num_blocks", "_trails")

    def __init__(self, *, max_sessions: int = MAX_SESSIONS, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_sessions = max_sessions
        self._max_blocks = max_blocks
        self._trails: OrderedDict[str, Trail] = OrderedDict()  # by the name that engines are sent
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._trails)

    def get(self, session: str) -> Trail | None:
        """Find a session's chain; None: it is not followed."""
        return self._trails.get(session)

    def follow(self, session: str) -> Trail:
        """Follow a session: a request of it is sent."""
        trail = self._trails.setdefault(session, Trail())
        self._trails.move_to_end(session)
        trail.num_earlier_tokens = trail.num_prompt_tokens or 0
        trail.num_cached_tokens = None
        if trail.num_before is None:  # no answer has said, and the next one is another's
            self._num_blocks -= len(trail.keys)
            trail.forget()
        self._bound()
        return trail

    def stored(
        self,
        candidate: CandidateId,
        session: str,
        parent: BlockKey | None,
        keys: Sequence[BlockKey],
        block_size: int,
    ) -> None:
        """Note blocks that a session's request has stored; O(its chain) where that parts, else
        O(len(keys)).
        """
        trail = self._trails.get(digest_in(session))
        if trail is None or trail.is_foreign or not keys:
            return
        num_blocks = len(trail.keys)
        if block_size != trail.block_size:
            trail.forget()
            trail.block_size = block_size
        trail.put(parent, keys)
        trail.candidate = candidate
        self._num_blocks += len(trail.keys) - num_blocks
        self._bound()

    def answered(
        self,
        session: str,
        *,
        num_prompt_tokens: int,
        num_guessed_tokens: int,
        num_reply_tokens: int,
        num_cached_tokens: int | None,
    ) -> None:
        """Note an answer's usage; what it disproves is forgotten."""
        trail = self._trails.get(session)
        if trail is None:
            return
        trail.num_prompt_tokens = num_prompt_tokens
        trail.num_guessed_tokens = num_guessed_tokens
        trail.num_cached_tokens = num_cached_tokens
        trail.count_before()
        num_blocks = (num_prompt_tokens + num_reply_tokens) // trail.block_size
        if (trail.num_before or 0) + len(trail.keys) > num_blocks:
            self._num_blocks -= len(trail.keys)
            trail.forget()

    def _bound(self) -> None:
        while self._trails and (
            len(self._trails) > self._max_sessions or self._num_blocks > self._max_blocks
        ):
            _, trail = self._trails.popitem(last=False)
            self._num_blocks -= len(trail.keys)
