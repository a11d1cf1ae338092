"""Where a replica is evacuated, its live conversations stay until they end or their time is up.

A conversation that moves without its blocks is computed again, whenever that happens. So what helps
is to let it end where it is. It moves at once if a replica that stays can have nearly all of its
prompt without computing it: from its own cache, or from the pool.

In the last quarter of the time the others move, each at its own moment: if all moved at the end,
each would wait for the prompts of the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from policies.view import NOTHING_HELD
from router.base.messages import Evacuation
from router.replicas.fleet import Fleet
from router.replicas.replica import Candidate, candidates_of
from router.request.match import Matcher
from router.request.results import Prompt, Tries

_SPREAD: Final = 0.25  # of the time
_NEARLY_ALL: Final = 0.9
_STEPS: Final = 1024


class Stays:
    """Adds the replica that is evacuated to the candidates of conversations that stay there."""

    def __init__(
        self, fleet: Fleet, matcher: Matcher, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._fleet = fleet
        self._matcher = matcher
        self._clock = clock

    def with_home(
        self, prompt: Prompt, tries: Tries, others: Sequence[Candidate], now_s: float
    ) -> Sequence[Candidate]:
        """Return the candidates of a prompt: its home is one of them if it stays there."""
        home = self._home(prompt, tries, now_s)
        if home is None or (others and self._is_elsewhere(prompt, home, others)):
            return others
        return (*others, home)

    def _home(self, prompt: Prompt, tries: Tries, now_s: float) -> Candidate | None:
        """Find where a conversation lives, if it may stay there. None: it is not evacuated."""
        session, model, fleet = prompt.read.whose.session_hash, prompt.read.model, self._fleet
        if session is None or model is None:
            return None
        fleet.conversations.expire(now_s)
        id_ = fleet.conversations.lives_at(session)
        name = "" if id_ is None else id_.partition("#")[0]
        evacuation = fleet.members.evacuations.get(name)
        if evacuation is None or self._clock() >= leaves_at(evacuation, session):
            return None
        if name in tries.replicas or not fleet.members.is_up(name, now_s):
            return None
        replica = fleet.members.replica(name)
        if not replica.is_awake or not replica.serves(model):
            return None
        return next((each for each in candidates_of(replica) if each.id == id_), None)

    def _is_elsewhere(self, prompt: Prompt, home: Candidate, others: Sequence[Candidate]) -> bool:
        """Return whether another candidate can have nearly as much of a prompt as its home."""
        if prompt.tokens is None:
            return False
        held = self._matcher.match(prompt, (*others, home)).held
        num_here = held.get(home.id, NOTHING_HELD).num_own_tokens
        found = [held.get(each.id, NOTHING_HELD).num_cached_tokens for each in others]
        num_there = max(found, default=0)
        return num_there >= _NEARLY_ALL * num_here


def leaves_at(evacuation: Evacuation, session: int) -> float:
    """Return when a conversation moves, in unix seconds."""
    spread_s = _SPREAD * (evacuation.until - evacuation.begun)
    return evacuation.until - spread_s * (session % _STEPS) / _STEPS
