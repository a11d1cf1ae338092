"""The replicas by name, with the health of each: who is there.

What must live here: what stays with a replica's name until it is another server. What must not: who
is offered a request (router.replicas.offers), work in flight (router.replicas.fleet).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from policies.view import CandidateId, CostModel
from router.base.engines import in_order
from router.base.messages import Evacuation
from router.replicas.candidate_state import CandidateState
from router.replicas.cost_fit import CostFit, Speed
from router.replicas.health import Health, HealthRules, HealthState, ProbeFailure, Signs
from router.replicas.replica import Candidate, Lengths, Replica, ServedModel, candidates_of
from router.scheduling.conversations import Conversations

_MOST_STARTS: Final = 16
_SEVERAL_S: Final = 600.0


class Member:
    """A replica, and all that stays with its name until it is another server."""

    __slots__ = ("health", "replica", "several_s", "signs", "speed", "starts", "states")

    def __init__(self, replica: Replica, health: Health, speed: Speed) -> None:
        self.replica = replica
        self.health = health
        self.signs = Signs()
        self.speed = speed
        self.states: dict[CandidateId, CandidateState] = {}
        self.starts: deque[float] = deque(maxlen=_MOST_STARTS)  # of its processes, latest last
        self.several_s = -math.inf  # when an earlier process was back


class Serving(Struct, frozen=True):
    """The candidates that may be offered for a model."""

    candidates: tuple[Candidate, ...]
    lengths: Lengths | None  # None: of any model


class Members:
    """Replicas by name; see the module's charter.

    Args:
        order: Names; the replicas of these come first, in this order.
        conversations: Those at a candidate end when it is removed.
        on_down: Called with a replica that is dead or hangs, unless it was draining, and now.
    """

    __slots__ = ("_conversations", "_fits", "_on_down", "_order", "_prior", "by_name", "can_answer",
                 "evacuations", "is_split", "lacking", "once_changed", "replicas", "restricted",
                 "rules", "served", "serving", "states")  # fmt: skip

    def __init__(
        self,
        *,
        rules: HealthRules,
        prior: CostModel,
        order: Sequence[str],
        conversations: Conversations,
        on_down: Callable[[str, float], None],
    ) -> None:
        self.rules = rules
        self._prior = prior
        self._fits: dict[tuple[str, str], CostFit] = {}  # by model and label
        self._order = {name: position for position, name in enumerate(order)}
        self._conversations = conversations
        self._on_down = on_down
        self.by_name: dict[str, Member] = {}
        self.states: dict[CandidateId, CandidateState] = {}
        self.replicas: tuple[Replica, ...] = ()
        """All replicas: those of `order` in that order, then others as they were added."""
        self.served: dict[str, ServedModel] = {}
        """The models and adapters that they serve, by name."""
        self.serving: dict[str | None, Serving] = {}
        """What `Offers` has derived from them, by model."""
        self.is_split = False  # whether some replica has a role: prefill or decode
        self.can_answer = False  # whether some replica answers: one of role prefill does not
        self.restricted: set[str] = set()  # replicas whose health or weight restricts them
        self.evacuations: dict[str, Evacuation] = {}
        """Replicas that drain, and whose live conversations may stay there."""
        self.lacking: dict[str, set[str]] = {}
        """Routes of engines that some replicas lack, with the names of these."""
        self.once_changed: set[Callable[[], None]] = set()
        """Called once, when a candidate may have room that it did not have before."""

    def replica(self, name: str) -> Replica:
        """Find a replica; KeyError if there is none of that name."""
        return self.by_name[name].replica

    def add(self, replica: Replica) -> None:
        """Add a replica, or replace the description of the one of that name.

        Load, health, draining, sleep and pause stay with the name, unless the address is another.
        Then it is another server, and leases of the old one end without effect.
        """
        member = self.by_name.get(replica.name)
        if member is not None and member.replica.url == replica.url:
            known = member.replica
            replica = replace(
                replica,
                draining=replica.draining or known.draining,
                asleep=replica.asleep or known.asleep,
                paused=replica.paused or known.paused,
            )
        else:
            self.remove(replica.name)
            self.by_name[replica.name] = Member(
                replica, Health(self.rules), Speed(self._fit(replica))
            )
            if self._order:
                self.by_name = dict(sorted(self.by_name.items(), key=self._position))
        self._forget_lacking(replica.name)  # it may be another release now
        self._describe(replica)

    def note_start(self, name: str, started_s: float | None, now_s: float) -> bool:
        """Record when a replica's process started; return whether an earlier one is back.

        Then several engines share its address: a process that has ended does not come back.
        """
        member = self.by_name[name]
        starts = member.starts
        if started_s is None or (starts and starts[-1] == started_s):
            return False
        is_back = started_s in starts
        if is_back:
            starts.remove(started_s)
            member.several_s = now_s
        starts.append(started_s)
        return is_back

    def has_several(self, name: str, now_s: float) -> bool:
        """Return whether several engines shared a replica's address recently."""
        return now_s < self.by_name[name].several_s + _SEVERAL_S

    def remove(self, name: str) -> bool:
        """Remove a replica; its open leases end without effect. False if it was unknown."""
        member = self.by_name.pop(name, None)
        if member is None:
            return False
        self._forget_lacking(name)
        self.restricted.discard(name)
        for candidate in member.states:
            self._remove(candidate)
        self._membership_changed()
        return True

    def drain(self, name: str, *, draining: bool = True) -> None:
        """Stop (or resume) offering a replica; what runs there goes on. KeyError if unknown."""
        self._describe(replace(self.replica(name), draining=draining))

    def set_sleep(self, name: str, *, asleep: bool, paused: bool) -> None:
        """Stop (or resume) offering a replica that sleeps or is paused. KeyError if unknown."""
        self._describe(replace(self.replica(name), asleep=asleep, paused=paused))

    def set_models(self, name: str, models: tuple[ServedModel, ...]) -> None:
        """Record that a replica loaded or unloaded adapters. KeyError if unknown."""
        self._describe(replace(self.replica(name), models=models))

    def lacks(self, name: str, route: str) -> bool:
        """Record that a replica lacks a route; True: it was not known. Ignored if it is gone."""
        names = self.lacking.setdefault(route, set()) if name in self.by_name else {name}
        if name in names:
            return False
        names.add(name)
        return True

    def version(self) -> str | None:
        """Return the oldest release among the replicas; None: none says its own."""
        versions = [each.version for each in self.replicas if each.version is not None]
        return min(versions, key=in_order, default=None)

    def states_of(self, name: str) -> Collection[CandidateState]:
        """Return the candidates of a replica; one that is gone has none."""
        member = self.by_name.get(name)
        return member.states.values() if member is not None else ()

    def changed(self) -> None:
        """Call who waits for room."""
        waiting = [*self.once_changed]
        self.once_changed.clear()
        for call in waiting:
            call()

    # -- health ------------------------------------------------------------------------------

    def is_up(self, name: str, now_s: float) -> bool:
        """Return whether a replica's health lets requests be sent to it."""
        member = self.by_name.get(name)
        return member is not None and member.health.can_accept(now_s)

    def listens(self, name: str, now_s: float) -> bool:
        """Return whether a server may answer at a replica, in whatever health."""
        member = self.by_name.get(name)
        return member is not None and member.health.state(now_s) is not HealthState.DOWN

    def is_down(self, name: str) -> bool:
        """Return whether a replica is dead, hangs, or is gone."""
        member = self.by_name.get(name)
        return member is None or member.health.is_down

    def signs(self, name: str) -> Signs:
        """Return the signs of a replica's work; a replica that is gone has none."""
        member = self.by_name.get(name)
        return member.signs if member is not None else Signs()

    def probe_ok(self, name: str, now_s: float) -> None:
        """Record that a replica answered a health probe; ignored if it is gone."""
        if (member := self.by_name.get(name)) is not None:
            member.health.probe_ok(now_s)
            self.health_changed(name, True, now_s)

    def probe_failed(
        self, name: str, failure: ProbeFailure, now_s: float, *, jitter: float = 0.5
    ) -> None:
        """Record that a replica failed a health probe; ignored if it is gone."""
        if (member := self.by_name.get(name)) is not None:
            was_down = member.health.is_down
            member.health.probe_failed(failure, now_s, jitter)
            self.health_changed(name, was_down, now_s)

    def probe_excused(self, name: str) -> None:
        """Record that a probe got no answer from a replica that is active otherwise."""
        if (member := self.by_name.get(name)) is not None:
            member.health.probe_excused()

    def note_signs(self, name: str, is_stalled: bool, now_s: float) -> bool:
        """Record whether signs show that a replica has stalled; return whether that is new."""
        member = self.by_name.get(name)
        if member is None or not (is_stalled or member.health.is_stalled):
            return False
        was_stalled = member.health.is_stalled
        if is_stalled:
            member.health.stalled(member.signs.quiet_s(now_s), now_s)
        else:
            member.health.moves(now_s)
        self.health_changed(name, True, now_s)
        return was_stalled != member.health.is_stalled

    def health_changed(self, name: str, was_down: bool, now_s: float) -> None:
        """Draw what follows from a replica's health, which may have changed."""
        member = self.by_name[name]
        self.restrict(name)
        if member.health.is_down and not member.replica.is_awake:
            self.set_sleep(name, asleep=False, paused=False)  # it will say so when it is back
        if member.health.is_down and not was_down and not member.replica.draining:
            self._on_down(name, now_s)
        self.changed()

    def restrict(self, name: str) -> None:
        """Update the set of replicas that `Offers.candidates` must examine: mostly none."""
        member = self.by_name[name]
        if member.health.is_unrestricted and member.replica.weight >= 1.0:
            self.restricted.discard(name)
        else:
            self.restricted.add(name)

    # -- private -----------------------------------------------------------------------------

    def _describe(self, replica: Replica) -> None:
        """Replace the description of a known replica, and its candidates."""
        member = self.by_name[replica.name]
        member.replica = replica
        if member.speed.fit is not self._fit(replica):
            member.speed = Speed(self._fit(replica))
        candidates = {candidate.id: candidate for candidate in candidates_of(replica)}
        for gone in member.states.keys() - candidates.keys():
            del member.states[gone]
            self._remove(gone)
        for id_, candidate in candidates.items():
            state = member.states.get(id_)
            if state is None:
                state = CandidateState(candidate, member.health, member.speed)
                self.states[id_] = member.states[id_] = state
            state.candidate, state.speed = candidate, member.speed
        self.restrict(replica.name)
        self._membership_changed()

    def _fit(self, replica: Replica) -> CostFit:
        """Return what a replica's label learned; it outlives the replica."""
        label = replica.base_model, replica.cost_class
        if label not in self._fits:
            self._fits[label] = CostFit(self._prior)
        return self._fits[label]

    def _membership_changed(self) -> None:
        self.replicas = tuple(member.replica for member in self.by_name.values())
        self.is_split = any(replica.role != "both" for replica in self.replicas)
        self.can_answer = any(replica.role != "prefill" for replica in self.replicas)
        self.serving.clear()
        self.served = {}
        for replica in self.replicas:
            for model in replica.models:
                self.served.setdefault(model.id, model)
        self.changed()

    def _forget_lacking(self, name: str) -> None:
        for names in self.lacking.values():
            names.discard(name)

    def _remove(self, candidate: CandidateId) -> None:
        del self.states[candidate]
        self._conversations.remove(candidate)

    def _position(self, item: tuple[str, Member]) -> int:
        return self._order.get(item[0], len(self._order))
