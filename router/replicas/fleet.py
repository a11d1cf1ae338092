"""The fleet: all replicas with their load, health and speed, in one place.

    members   who is there, and the health of each                             members.py
    load      work in flight at each candidate, and what is learned from it    members.py
    offers    which candidates can take a request now, and why there is none

The life of a request: `offers.candidates` -> `load.views` -> (policy) -> `load.admit` ->
`load.first_token` -> `load.end`.

What must live here: whom a model's requests may go to. What must not: which one to take (policies).
The errors have no address in them: clients see them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from policies.view import CandidateId, CostModel
from router.base.errors import NoReplicaAvailable, RouterError, UnknownModel
from router.index.behind import NOTHING_BEHIND, Behind
from router.index.hit_length import KvLayout
from router.replicas.candidate_state import ON_PURPOSE, CandidateState, state_of
from router.replicas.cost_fit import PRIOR
from router.replicas.deaths import Deaths
from router.replicas.health import HealthRules
from router.replicas.members import Load, Member, Members, Serving
from router.replicas.replica import Candidate, Lengths, Replica, candidates_of
from router.scheduling.conversations import Conversations

_MAX_RETRY_AFTER_S = 30.0
_SHOWN = 3  # replicas that an error names
_ADDRESS: Final = re.compile(r"^https?://\S+?:?\s+")  # that a reason begins with


def absent(waiting: Mapping[str, str], known: Container[str]) -> str:
    """List the replicas and sources that have not answered yet, with why; empty: none.

    Args:
        waiting: Why a replica is not usable (yet); those that are `known` did answer.
        known: Names of replicas.
    """
    shown = [
        f"{name} ({_ADDRESS.sub('', reason)})"
        for name, reason in waiting.items()
        if name not in known
    ]
    return _first(shown)


def no_replica(absent: str) -> NoReplicaAvailable:
    """Return the error for a fleet without any replica; `absent`: those that did not answer."""
    return NoReplicaAvailable(
        f"No replica has answered yet: {absent}." if absent else "No replica is configured."
    )


def unknown_model(model: str, served: Sequence[str], absent: str) -> RouterError:
    """Return the error for a model that no replica is known to serve."""
    if absent:  # one of these may serve it, so the client may come back
        return NoReplicaAvailable(
            f"No replica that has answered serves `{model}` "
            f"(served: {', '.join(served)}; not answered yet: {absent})."
        )
    hint = "; `models.aliases` can map claude-*" if model.startswith("claude-") else ""
    return UnknownModel(
        f"The model `{model}` does not exist (served: {', '.join(served)}{hint}).", param="model"
    )


def none_available(
    model: str | None, members: Iterable[Member], waits_s: Sequence[float], now_s: float
) -> NoReplicaAvailable:
    """Return the error for a model whose replicas are all out, draining or excluded.

    `waits_s`: until they may be tried again.
    """
    retry_after_s = min(_MAX_RETRY_AFTER_S, max(1.0, min(waits_s, default=1.0)))
    what = "replica" if model is None else f"replica of `{model}`"
    return NoReplicaAvailable(
        f"No {what} can take a request now ({states_of(model, members, now_s)}).",
        retry_after_s=retry_after_s,
    )


def states_of(model: str | None, members: Iterable[Member], now_s: float) -> str:
    """Return in which state the first replicas of a model are, and why; None: of any."""
    states = [
        _shown(member, now_s) for member in members if model is None or member.replica.serves(model)
    ]
    return _first(states)


def check_roles(replicas: Sequence[Replica], *, is_split: bool) -> None:
    """Refuse a model whose replicas cannot answer by their roles.

    `is_split`: some replica has a role.

    Raises:
        NoReplicaAvailable: the message says which role to set.
    """
    if all(replica.role == "prefill" for replica in replicas):
        raise NoReplicaAvailable(
            "Every replica has role prefill, so none can answer. Set role: decode for some."
        )
    if not is_split and (producers := _producers(replicas)):
        raise NoReplicaAvailable(
            f"Only prompts are computed at {', '.join(producers)} (kv_producer), and no "
            "replica has a role. Set role: prefill there, and role: decode at the others."
        )


def _producers(replicas: Sequence[Replica]) -> list[str]:
    """Name the replicas that show that they compute prompts for others beside them.

    None, if all do. Only versions of vLLM count that other replicas here have, too: metrics of
    another version may have other names, and that is no reason to refuse requests.
    """
    others = {replica.version for replica in replicas if replica.seems != "prefill"}
    return [r.name for r in replicas if r.seems == "prefill" and r.version in others]


def _shown(member: Member, now_s: float) -> str:
    """Return in which state a replica is, and why."""
    replica, health = member.replica, member.health
    state = state_of(replica, health, now_s)
    reason = f" ({health.reason})" if health.reason and state not in ON_PURPOSE else ""
    return f"{replica.name}: {state}{reason}"


def _first(shown: Sequence[str]) -> str:
    more = [f"and {len(shown) - _SHOWN} more"] if len(shown) > _SHOWN else []
    return ", ".join([*shown[:_SHOWN], *more])


class Offers:
    """Offers candidates to requests.

    Args:
        members: The replicas.
        waiting: Replicas and sources that have not answered yet, and why; grows and shrinks.
    """

    __slots__ = ("_members", "_waiting")

    def __init__(self, members: Members, waiting: Mapping[str, str]) -> None:
        self._members = members
        self._waiting = waiting

    def candidates(
        self,
        model: str | None,
        now_s: float,
        *,
        exclude: Collection[str] = (),
        num_tokens: int = 0,
    ) -> tuple[Candidate, ...]:
        """List the candidates that can take a request for `model` now, in the order configured.

        Args:
            model: Model or adapter id; None: any model (routes without one).
            now_s: Now.
            exclude: Names of replicas that were tried already.
            num_tokens: Of prompt and answer. Replicas that are too short are left out. If all are
                too short, the longest remain, and their engine refuses the request.

        Raises:
            UnknownModel: No replica serves it.
            NoReplicaAvailable: Some serve it, but all are out, draining or excluded.
        """
        serving = self._members.serving.get(model) or self._serving_of(model)
        offered, lengths = serving.candidates, serving.lengths
        if num_tokens and lengths is not None and not lengths.are_equal:
            offered = lengths.fitting(offered, num_tokens)
        if exclude or self._members.restricted:
            offered = self._eligible(offered, now_s, exclude)
        if not offered:
            raise self._none_available(model, now_s)
        return offered

    def prefillers(
        self, model: str | None, reader: Replica | None, now_s: float
    ) -> tuple[Candidate, ...]:
        """List the candidates that can compute a prompt for others now, in the order configured.

        None that has stalled: the replica that decodes can compute the prompt, too.

        `reader`: the replica that will read the prompt's KV. Both need the same transfer, and the
        same pool if it goes through one. None: any.
        """
        if not self._members.is_split:
            return ()
        offered = tuple(
            state.candidate
            for member in self._members.by_name.values()
            if member.replica.role == "prefill" and member.replica.is_offered
            if member.health.can_accept(now_s) or not member.health.can_accept_at_last()
            if any(served.id == model for served in member.replica.models)
            if reader is None or _can_meet(member.replica, reader)
            for state in member.states.values()
        )
        return self._eligible(offered, now_s, ()) if self._members.restricted else offered

    def draining(
        self, model: str | None, now_s: float, *, exclude: Collection[str] = ()
    ) -> tuple[Candidate, ...]:
        """List the candidates that get no new work, but may have what they were asked before."""
        return tuple(
            candidate
            for replica in self._members.replicas
            if replica.draining and replica.is_awake and replica.name not in exclude
            if model is None or replica.serves(model)
            if self._members.listens(replica.name, now_s)
            for candidate in candidates_of(replica)
        )

    def candidates_at(
        self, name: str, model: str | None, now_s: float, *, exclude: Collection[str] = ()
    ) -> tuple[Candidate, ...]:
        """List the candidates of one replica, draining or not, in whatever health.

        Raises:
            NoReplicaAvailable: it is excluded, or gone.
        """
        member = self._members.by_name.get(name) if name not in exclude else None
        if member is None:
            raise self._none_available(model, now_s)
        return candidates_of(member.replica)

    def all_lack(self, model: str | None, route: str) -> bool:
        """Return whether there are replicas that serve a model, and all of them lack a route."""
        serving = {
            replica.name
            for replica in self._members.replicas
            if replica.role != "prefill"
            if model is None or replica.serves(model)
        }
        return bool(serving) and serving <= self._members.lacking.get(route, set())

    def longest(self, model: str) -> int | None:
        """Return the tokens of the longest request that a replica takes for a model.

        None: some may take any, as far as is known.
        """
        try:
            serving = self._members.serving.get(model) or self._serving_of(model)
        except RouterError:
            return None
        return serving.lengths.longest if serving.lengths is not None else None

    def available(self, now_s: float) -> Iterator[tuple[str, int]]:
        """Yield each base model, and how many replicas take requests for it now."""
        bases = (m.id for each in self._members.replicas for m in each.models if m.parent is None)
        for name in dict.fromkeys(bases):
            try:
                yield name, len({each.replica.name for each in self.candidates(name, now_s)})
            except RouterError:
                yield name, 0

    def unserved(self, now_s: float) -> Iterator[tuple[str, str]]:
        """Yield the models and adapters that no replica takes requests for now, and why."""
        served = {
            model.id
            for each in self._members.replicas
            if each.is_offered and each.role == "both" and each.name not in self._members.restricted
            for model in each.models
        }
        for name in [each for each in self._members.served if each not in served]:
            try:
                self._serving_of(name)
            except RouterError as error:  # by their roles
                yield name, error.message
                continue
            try:
                self.candidates(name, now_s)
            except NoReplicaAvailable:
                yield name, states_of(name, self._members.by_name.values(), now_s)

    def absent(self) -> str:
        """List the replicas and sources that have not answered yet, with why; empty: none."""
        return absent(self._waiting, self._members.by_name)

    def no_replica(self) -> NoReplicaAvailable:
        """Return the error for a fleet without any replica."""
        return no_replica(self.absent())

    # -- private -----------------------------------------------------------------------------

    def _serving_of(self, model: str | None) -> Serving:
        """List a model's candidates that may be offered.

        Raises:
            UnknownModel: no replica has it, and the models of all replicas are known.
            NoReplicaAvailable: those that have it cannot answer, by their roles.
        """
        members = self._members
        known = members.serving.get(model)
        if known is not None:
            return known
        replicas = [each for each in members.replicas if model is None or each.serves(model)]
        if not replicas:
            if model is not None and all(replica.models for replica in members.replicas):
                raise self._unknown_model(model)
            return Serving((), None)  # not kept: clients may ask for any name
        check_roles(replicas, is_split=members.is_split)
        serving = members.serving[model] = Serving(
            tuple(
                state.candidate
                for replica in replicas
                if replica.is_offered and replica.role != "prefill"
                for state in members.states_of(replica.name)
            ),
            Lengths.of(model, replicas) if model is not None else None,
        )
        return serving

    def _eligible(
        self, serving: Sequence[Candidate], now_s: float, exclude: Collection[str]
    ) -> tuple[Candidate, ...]:
        """Leave out candidates that were tried, and those whose health forbids it."""
        members = self._members
        states = [members.states[c.id] for c in serving if c.replica.name not in exclude]
        offered = tuple(
            state.candidate for state in _offered(states, members.rules, now_s, members.restricted)
        )
        for name in list(members.restricted):
            members.by_name[name].health.weight(now_s)  # a slow start that is over ends here
            members.restrict(name)
        return offered

    def _unknown_model(self, model: str) -> RouterError:
        if not self._members.replicas:
            return self.no_replica()
        return unknown_model(model, [*self._members.served], self.absent())

    def _none_available(self, model: str | None, now_s: float) -> NoReplicaAvailable:
        """Return the error for "no replica", with the time after which to try again."""
        members = self._members
        if not members.replicas:
            return self.no_replica()
        waits_s = [
            members.states[candidate.id].health.retry_at_s - now_s
            for candidate in self._serving_of(model).candidates
        ]
        return none_available(model, members.by_name.values(), waits_s, now_s)


def _can_meet(prefill: Replica, decode: Replica) -> bool:
    """Return whether one replica can read the KV that the other computes."""
    if prefill.transfer != decode.transfer:
        return False
    return prefill.transfer != "store" or prefill.pool == decode.pool


def _offered(
    states: Sequence[CandidateState],
    rules: HealthRules,
    now_s: float,
    restricted: AbstractSet[str],
) -> list[CandidateState]:
    """Choose the candidates to offer, in the order given; empty if none is fit.

    1. Candidates that are fit: up, or on trial without a request.
    2. In a panic, if fewer than `panic_ratio` are fit: all that listen. Many open breakers are more
       likely wrong than right, and the few fit candidates would be overloaded.
    3. If that leaves none: those that have stalled. They may go on.
    4. A recovered candidate (slow start), while it has less than its share of the mean load. Its
       cache is cold and its engine may still warm up. It may always have one request.
    5. A candidate whose weight is less than 1, in the same way, always: capacity that may be taken
       away.

    If the last two rules leave none, all candidates of the first three are offered.

    `restricted`: the replicas that health or weight may restrict; only these are examined.
    """
    fit = [
        state
        for state in states
        if state.candidate.replica.name not in restricted or state.health.can_accept(now_s)
    ]
    if len(fit) < rules.panic_ratio * len(states):
        fit = [state for state in states if state.health.can_accept_in_panic(now_s)]
    fit = fit or [state for state in states if state.health.can_accept_at_last()]
    if not fit:
        return []
    mean_requests = sum([state.ledger.num_requests for state in fit]) / len(fit)
    return [
        state
        for state in fit
        if state.candidate.replica.name not in restricted or _has_room(state, mean_requests, now_s)
    ] or fit


def _has_room(state: CandidateState, mean_requests: float, now_s: float) -> bool:
    weight = state.health.weight(now_s) * state.candidate.replica.weight
    return weight >= 1.0 or state.ledger.num_requests < max(1.0, weight * mean_requests)


def _one_group(_: CandidateId) -> None:
    """Return that a candidate has one KV group, as far as is known."""


def _nothing_behind(_: CandidateId) -> Behind:
    """Return that there is nothing behind a candidate's cache."""
    return NOTHING_BEHIND


class Fleet:
    """The three parts, put together; see the module.

    Args:
        rules: When a replica's health changes.
        prior: The cost of a prompt before any was seen.
        order: Names; the replicas of these come first, in this order.
        conversations: Those that requests belong to.
        waiting: Replicas and sources that have not answered yet, and why; grows and shrinks.
        layout_of: Returns a candidate's KV groups; None: it has one, or they are not known.
        behind: Returns the blocks behind a candidate's cache.
        deaths: Informed of replicas that are dead or hang. None: nothing is recorded.
    """

    __slots__ = ("conversations", "load", "members", "offers")

    def __init__(
        self,
        *,
        rules: HealthRules | None = None,
        prior: CostModel = PRIOR,
        order: Sequence[str] = (),
        conversations: Conversations | None = None,
        waiting: Mapping[str, str] | None = None,
        layout_of: Callable[[CandidateId], KvLayout | None] = _one_group,
        behind: Callable[[CandidateId], Behind] = _nothing_behind,
        deaths: Deaths | None = None,
    ) -> None:
        self.conversations = Conversations() if conversations is None else conversations
        self.members = Members(
            rules=rules or HealthRules(),
            prior=prior,
            order=order,
            conversations=self.conversations,
            deaths=deaths,
        )
        self.offers = Offers(self.members, {} if waiting is None else waiting)
        self.load = Load(self.members, self.conversations, layout_of, behind)
