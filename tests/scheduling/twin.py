"""The rooms of conversations, literally: every figure is computed anew from what each one did.

`router.scheduling.conversations` keeps sums and a heap instead. Times never are beyond the hour in
which a conversation is remembered.
"""

from __future__ import annotations

from typing import Any

from router.scheduling import conversations as rules


class One:
    """Everything about one conversation."""

    def __init__(self, candidate: str, ticket_s: float, num_shared: int) -> None:
        self.candidate, self.ticket_s, self.num_shared = candidate, ticket_s, num_shared
        self.leases: list[int] = []  # tokens of the prompts in flight
        self.num_own = self.num_kept = 0
        self.cost_s = self.last_s = self.begun_s = 0.0
        self.room_until: float | None = None  # None: no room; infinite while a turn runs
        self.recent_since: float | None = None
        self.goes_on = self.is_open = self.is_batch = self.is_visit = self.has_ended = False


class Twin:
    """As `Conversations`."""

    def __init__(self) -> None:
        self.all: dict[int, One] = {}
        self.tickets: dict[int, float] = {}
        self.pause_s, self.turn_s, self.share = 5.0, 5.0, 0.2

    def at(self, candidate: str) -> tuple[int, int, set[int]]:
        there = {
            session: one
            for session, one in self.all.items()
            if one.room_until is not None and one.candidate == candidate
        }
        return (
            sum(one.num_kept for one in there.values()),
            sum(one.num_kept for one in there.values() if one.is_batch),
            set(there),
        )

    def ticket_s(self, session: int) -> float | None:
        one = self.all.get(session)
        return None if one is None else one.ticket_s

    def running(self, session: int) -> int | None:
        """Return the tokens of the oldest lease of a conversation."""
        one = self.all.get(session)
        return one.leases[0] if one is not None and one.leases else None

    end_next = running

    def hold_s(self, session: int, one: One) -> float:
        others = self.at(one.candidate)[2] - {session}
        hold_s = (1.0 if one.goes_on else self.share) * (1 + len(others)) * one.cost_s
        return 0.0 if hold_s < self.pause_s else min(hold_s, rules.PATIENCE * self.pause_s)

    def asked(self, session: int, now_s: float) -> None:
        one = self.all.get(session)
        if one is None:
            self.tickets.setdefault(session, now_s)
            return
        if not one.is_open:
            if not one.leases:
                pause_s = min(now_s - one.last_s, 30.0)
                self.pause_s += 0.05 * (pause_s - self.pause_s)
                may_return = one.room_until is not None or one.recent_since is not None
                if not one.goes_on and may_return:
                    self.share += 0.05 * (1.0 - self.share)
                one.goes_on = True
            one.is_open = True
        if one.room_until is not None and not one.leases:
            one.room_until = now_s + 600.0

    def begin(
        self,
        session: int,
        candidate: str,
        num_tokens: int,
        num_cached: int,
        now_s: float,
        *,
        cost_s: float,
        is_batch: bool,
        is_visit: bool,
    ) -> None:
        if session in self.all:
            self.asked(session, now_s)
        else:
            self.all[session] = One(candidate, self.tickets.pop(session, now_s), num_cached)
        one = self.all[session]
        one.room_until = one.recent_since = None
        num_own = max(0, num_tokens - one.num_shared)
        if one.candidate == candidate and one.leases:
            num_own += one.num_own
        one.candidate, one.num_own, one.cost_s = candidate, num_own, cost_s * num_own / num_tokens
        one.num_kept = num_own if self.hold_s(session, one) else 0
        one.is_batch, one.is_visit, one.is_open, one.has_ended = is_batch, is_visit, False, False
        one.last_s = one.begun_s = now_s
        one.leases.append(num_tokens)
        one.room_until = float("inf")

    def end(self, session: int, num_tokens: int, now_s: float, *, is_answered: bool) -> None:
        one = self.all[session]
        one.leases.remove(num_tokens)
        one.last_s = now_s
        if is_answered:
            self.turn_s += 0.05 * (now_s - one.begun_s - self.turn_s)
        if one.leases:
            one.num_own = max(0, one.num_own - max(0, num_tokens - one.num_shared))
            one.num_kept = min(one.num_kept, one.num_own)
        else:
            one.is_open = not is_answered
            self.pause(session, one, now_s)

    def pause(self, session: int, one: One, now_s: float) -> None:
        hold_s = self.hold_s(session, one)
        if not hold_s or one.is_visit or one.has_ended:
            self.leave(session)
        else:
            one.room_until = now_s + hold_s

    def left(self, session: int, now_s: float) -> None:
        one = self.all.get(session)
        if one is not None:
            if one.room_until is not None and not one.leases:
                self.pause(session, one, now_s)
            one.is_open = False

    def leave(self, session: int) -> None:
        one = self.all.get(session)
        if one is None or one.room_until is None or one.leases:
            return
        one.room_until = None
        if not one.has_ended:
            one.recent_since = one.last_s
        elif not one.goes_on:
            self.share *= 0.95

    def finish(self, session: int) -> Any:
        one = self.all.get(session)
        if one is not None and one.room_until is not None:
            one.has_ended = True
            self.leave(session)

    def expire(self, now_s: float) -> None:
        for session, one in sorted(
            self.all.items(), key=lambda each: (each[1].room_until or 0.0, each[0])
        ):
            if one.room_until is not None and one.room_until <= now_s:
                self.leave(session)
        for one in self.all.values():
            since_s = one.recent_since
            if since_s is not None and now_s - since_s > rules.PATIENCE * self.pause_s:
                one.recent_since = now_s if one.is_open else None
                if not one.is_open and not one.goes_on:
                    self.share *= 0.95
