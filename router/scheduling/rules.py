"""Decides whether a request may be sent now. Pure: no clock, no tasks, no order.

A conversation has *room* at a replica from its first turn that is sent, while it runs, and while it
pauses for less time than its blocks are worth (`conversations`). Its turns go to that replica and
nowhere else. All others go where there is room. `Rules.judge` has the cases:

 1. A conversation with room goes there; turns that overlap also elsewhere, where there is room. It
    gives up its room if contexts have outgrown the replica and it came last, and keeps its ticket.
 2. A conversation without room gets room if all contexts there, its own included, leave `1 - fill`
    of the cache free: for growth, and for visits.
 3. A request that has waited for the maximum goes anyway. It is a *visit*: the conversation has no
    room after this turn. Those that wait longest came last and are short, so a visit is fast, and
    no other conversation has to leave for it.
 4. A visit needs no wait where the replica has nothing to compute and blocks for it, if no other
    conversation waits for room, or if computing it delays the conversations there by less than a
    turn takes.
 5. A conversation that comes for single turns gains nothing from room: it is new, or its pauses are
    too long to keep any. While others wait for room, its turn is a visit as soon as turns that run
    leave space for it. Those that pause lose blocks, the longest silent first. Without this a chat
    waits for minutes behind agents, beside a replica that computes next to nothing. Class batch
    waits.
 6. The *window* is open if a replica has at most one request ready beside the one that it computes,
    or `ready_ms` of short ones, which it computes in one step. The order inside an engine cannot be
    changed, and waiting there evicts the prefix that a request counts on. For the same reason the
    engine must have free blocks, unless it is about to idle or reads back what it evicts.
 7. With a limit on inter-token latency, the answer must be fast enough.

A request without a session, or for a replica whose cache size is not known, needs no room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

from policies.view import CandidateId
from router.scheduling.conversations import Conversations
from router.scheduling.waiting import ANYWHERE, LATE, Candidates, Choice, QueueRules, Waiting, Where

PACE_SHARE: Final = 0.5
"""Part of the work at a replica's own pace that is certain: it computes short prompts together."""

IDLE_SOON_MS: Final = 60.0
"""Work below which a replica has nothing to compute: it would be idle before the router learns
that blocks are free."""


class Verdict(NamedTuple):
    """Whether a request may go, and why.

    It goes because of: room, waited_out, idle, seldom. It waits for: room, window, tbt.
    """

    goes: bool
    why: str


C = TypeVar("C", bound=Choice)


class Rules(Generic[C]):
    """The rules, and the state of conversations and replicas that they ask for.

    Args:
        rules: The limits.
        conversations: Those with room.
        candidates: State of the replicas.
        has_blocks: Whether a replica has free blocks for a request beside the requests it has.
    """

    def __init__(
        self,
        rules: QueueRules,
        conversations: Conversations,
        candidates: Candidates,
        has_blocks: Callable[[Waiting, C], bool],
    ) -> None:
        self.limits = rules
        self._conversations = conversations
        self._candidates = candidates
        self._has_blocks = has_blocks

    def where(self, waiting: Waiting) -> Where:
        """Return where a request may go: where its conversation has room, or can have some."""
        session, found = waiting.session, self._conversations
        if session is None:
            return ANYWHERE
        if (only := found.bound_to(session)) is not None:
            return Where(only)
        num_own, home = found.num_own_tokens(session, waiting.num_tokens, 0), found.home(session)
        others = [each for each in found.rooms() if each != home]
        return Where(full=frozenset(e for e in others if not self._fits(waiting, e, num_own)))

    def judge(self, waiting: Waiting, choice: C, now_s: float, num_others: int = 0) -> Verdict:
        """Return whether a request may go to a candidate now; see the cases of the module.

        Args:
            num_others: Other requests that wait for room.
        """
        why = self._room(waiting, choice, now_s, num_others)
        if why is None:
            return Verdict(False, "room")
        if self._is_full(choice, now_s):
            return Verdict(False, "window")
        limit_ms = self.limits.tbt_ms
        if limit_ms is not None and (self.tbt_ms(waiting, choice, now_s) or 0.0) > limit_ms:
            return Verdict(False, "tbt")
        if not self._can_begin(waiting, choice, now_s):
            return Verdict(False, "window")
        return Verdict(True, why)

    def is_late(self, waiting: Waiting, now_s: float) -> bool:
        """Return whether a request has waited for the maximum."""
        longest_s = self.limits.longest_wait_s(is_batch=waiting.is_batch)
        return now_s - waiting.since_s >= LATE * longest_s

    def tbt_ms(self, waiting: Waiting, choice: C, now_s: float) -> float | None:
        """Predict the inter-token latency of a request that goes now.

        None: nothing else is in flight where it is answered, or too little is known.
        """
        candidate = waiting.answers_at or choice.view.id
        return self._candidates.tbt_ms(candidate, waiting.num_tokens, now_s)

    # Room

    def _room(self, waiting: Waiting, choice: C, now_s: float, num_others: int) -> str | None:
        """Return why a request may go, as far as room is concerned; None: it may not."""
        session, found, there = waiting.session, self._conversations, choice.view.id
        if session is None or self._candidates.room_tokens(there) is None:
            return "room"
        num_own = found.num_own_tokens(session, waiting.num_tokens, choice.view.num_gpu_tokens)
        if found.home(session) == there:
            return None if self._gives_way(session, there, num_own) else "room"
        if not (waiting.is_seldom and num_others) and self._fits(waiting, there, num_own):
            return "room"
        if self.is_late(waiting, now_s):
            return "waited_out"
        if waiting.is_seldom:
            return "seldom" if self._has_space(there, num_own) else None
        if choice.view.queue_ms >= IDLE_SOON_MS or not self._fits(waiting, there, num_own, 1.0):
            return None
        delay_s = 1e-3 * compute_ms(choice, waiting.num_tokens) * len(found.at(there).sessions)
        return "idle" if not num_others or delay_s <= found.turn_s else None

    def _fits(
        self, waiting: Waiting, there: CandidateId, num_own: int, fill: float | None = None
    ) -> bool:
        """Return whether a candidate has room for a conversation that has none.

        All but `1 - fill` of its cache, with what is behind that. A batch conversation takes no
        room from interactive ones.
        """
        most, room = self._candidates.room_tokens(there), self._conversations.at(there)
        num_used = room.num_tokens - (0 if waiting.is_batch else room.num_batch_tokens)
        if most is None or not num_used:
            return True
        in_cache = self._candidates.capacity_tokens(there) or most
        fill = fill or waiting.fill or self.limits.fill
        return num_used + num_own <= most - (1.0 - fill) * in_cache

    def _has_space(self, there: CandidateId, num_own: int) -> bool:
        """Return whether turns that run leave space for a visit; pausing conversations do not."""
        most = self._candidates.room_tokens(there)
        return most is None or self._conversations.num_running_tokens(there) + num_own <= most

    def _gives_way(self, session: int, there: CandidateId, num_own: int) -> bool:
        """Return whether a conversation gives up its room: contexts exceed it, and it came last."""
        entry, room = self._conversations.last(session), self._conversations.at(there)
        most = self._candidates.room_tokens(there)
        if entry is None or entry.num_running or most is None:
            return False
        if room.num_tokens - entry.num_kept_tokens + num_own <= most:
            return False
        others = [each for each in room.sessions.values() if each is not entry]
        own = entry.is_batch, entry.ticket_s
        return bool(others) and own >= max((each.is_batch, each.ticket_s) for each in others)

    # The window

    def _is_full(self, choice: C, now_s: float) -> bool:
        """Return whether a replica has enough requests ready.

        Work counts by the learned cost and by the replica's pace, because the learned cost of equal
        prompts can be close to nothing. Requests that were lost do not close the window for ever.
        """
        view, rules = choice.view, self.limits
        if view.num_waiting <= rules.window:
            return False
        at_pace_ms = PACE_SHARE * self._candidates.queue_at_pace_ms(view.id)
        if max(view.queue_ms, at_pace_ms) < rules.ready_ms:
            return False
        return self._candidates.num_ready(view.id, now_s) > rules.window

    def _can_begin(self, waiting: Waiting, choice: C, now_s: float) -> bool:
        """Return whether an engine has blocks for a request, or may hold it back itself.

        A late request goes too: the known state of the blocks can be wrong.
        """
        view = choice.view
        reads_pool = view.num_pool_tokens is not None and view.reads_pool
        if view.queue_ms < IDLE_SOON_MS or reads_pool or self._candidates.reads_back(view.id):
            return True
        return self.is_late(waiting, now_s) or self._has_blocks(waiting, choice)


def compute_ms(choice: Choice, num_tokens: int) -> float:
    """Predict how long a prompt occupies an engine; at least 1 ms.

    Fetching blocks does not occupy it: it computes other prompts meanwhile.
    """
    view = choice.view
    num_held = view.num_cached_tokens
    cost = view.cost
    return max(1.0, cost.prefill_ms(num_tokens - num_held, num_held) - cost.base_ms)
