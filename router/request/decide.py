"""Decide: freeze all that a decision may depend on, and let a pure policy choose a candidate.

Deciding changes nothing: it is done again as often as something new is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from time import monotonic

from msgspec.structs import replace

from policies.policy import Policy
from policies.registry import create
from policies.view import CandidateId, RequestView, Snapshot
from router.experiments.runner import ExperimentRunner
from router.records.record import AssignmentRecord
from router.replicas.fleet import NO_MATCH, Fleet, Match
from router.replicas.halves import choose_halves
from router.replicas.ledger import NOTHING, InFront
from router.replicas.replica import Candidate, Replica
from router.replicas.sessions import Sessions, SessionView
from router.request.assign import assign, narrowed, own_of, record_of
from router.request.job import Choice, Job, Placement
from router.request.match import Matcher
from router.request.split import why_here


def candidates_for(fleet: Fleet, job: Job, now_s: float) -> Sequence[Candidate]:
    """List the candidates that a request may go to now.

    Raises:
        UnknownModel, NoReplicaAvailable: there are none.
    """
    if job.owner is not None:
        return fleet.candidates_at(job.owner, job.model, now_s, exclude=job.tried)
    return fleet.candidates(job.model, now_s, exclude=job.tried, num_tokens=job.num_needed_tokens)


class Decider:
    """Chooses candidates.

    Args:
        policy: Places prompts that are in no arm of an experiment.
        seed: For the policies' draws; fixed for the process.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        matcher: Matcher,
        sessions: Sessions,
        experiments: ExperimentRunner,
        policy: Policy,
        seed: int,
    ) -> None:
        self._fleet = fleet
        self._matcher = matcher
        self._sessions = sessions
        self._experiments = experiments
        self._policy = policy
        self._plain_policy = create("least_loaded", {})  # without a prompt nothing is cached
        self._seed = seed
        self._num_decisions: Counter[str | None] = Counter()  # by model: its policy counts alone

    def use(self, policy: Policy) -> None:
        """Place prompts by another policy, from the next decision on."""
        self._policy = policy

    def assign(self, job: Job) -> None:
        """Give a prompt its arm of an experiment; it keeps it, however often it is decided."""
        job.assigned = assign(self._experiments, job)

    def decide(self, job: Job, in_front_ms: InFront = NOTHING) -> Choice:
        """Choose a candidate among those that were not tried.

        Args:
            job: Whose.
            in_front_ms: What waits here, and goes to candidates before it.

        Raises:
            UnknownModel, NoReplicaAvailable: no replica serves the model, or none that does is up.
        """
        now_s = monotonic()
        candidates: Sequence[Candidate]
        candidates = candidates_for(self._fleet, job, now_s)
        assigned, assignment = job.assigned, None
        if assigned is not None:
            candidates, is_beyond = narrowed(assigned, candidates)
            assignment = record_of(assigned, is_beyond=is_beyond)
        policy = self._policy if job.prompt is not None else self._plain_policy
        if assigned is not None and assigned.policy is not None:
            policy = assigned.policy
        if self._fleet.is_split and job.prompt is not None:
            return self._decide_both(job, candidates, policy, in_front_ms, assignment)
        return self._choose(job, candidates, policy, now_s, in_front_ms, assignment)

    def look(self, job: Job, placement: Placement) -> Choice:
        """Look anew at the candidate of a request; what was decided stays."""
        return self._choose(job, (placement.candidate,), placement.policy, monotonic())

    def has_room(self, job: Job, choice: Choice) -> bool:
        """Return whether the engine chosen has blocks for a prompt beside what it has."""
        return self._matcher.has_room(job, choice.candidate)

    def prefill_again(self, job: Job, placement: Placement, failed: Placement) -> Choice | None:
        """Choose where a prompt is computed that failed elsewhere; None: there is no other place.

        By the policy that chose the first, among the other replicas.
        """
        now_s = monotonic()
        others = [
            candidate
            for candidate in self._prefillers(job, placement.candidate.replica, now_s)
            if candidate.replica.name != failed.candidate.replica.name
        ]
        return self._choose(job, others, failed.policy, now_s) if others else None

    def _prefillers(self, job: Job, reader: Replica, now_s: float) -> Sequence[Candidate]:
        """List the candidates that may compute a prompt for a decode replica.

        An arm's own or none: its decode replica can do without, so it need not go to another's.
        """
        prefillers = self._fleet.prefillers(job.model, reader, now_s)
        return prefillers if job.assigned is None else own_of(job.assigned, prefillers)

    def _decide_both(
        self,
        job: Job,
        candidates: Sequence[Candidate],
        policy: Policy,
        in_front_ms: InFront,
        assignment: AssignmentRecord | None,
    ) -> Choice:
        """Choose where a request is decoded and, where that is another replica, prefilled."""
        now_s = monotonic()
        choice, plan = choose_halves(
            candidates,
            lambda reader, at_s: self._prefillers(job, reader, at_s),
            policy,
            lambda some, by: self._choose(job, some, by, now_s, in_front_ms),
            lambda choice: why_here(job, choice),
        )
        return replace(choice, assignment=assignment, plan=plan)

    def _choose(
        self,
        job: Job,
        candidates: Sequence[Candidate],
        policy: Policy,
        now_s: float,
        in_front_ms: InFront = NOTHING,
        assignment: AssignmentRecord | None = None,
    ) -> Choice:
        """Freeze what is known of candidates, and have a policy choose among them."""
        found = self._matcher.match(job, candidates)
        session = (
            self._sessions.get(job.session_hash, now_s) if job.session_hash is not None else None
        )
        matches, home = found.matches, None
        if session is not None and job.prompt is not None and not job.is_matchable:
            matches, home = _with_last_turn(job, session, matches)
        views = self._fleet.views(candidates, matches, now_s, in_front_ms)
        sets = self._fleet.working_sets
        sets.expire(now_s)
        snapshot = Snapshot(
            now_s=now_s,
            number=self._num_decisions[job.model],
            seed=self._seed,
            request=RequestView(
                num_tokens=job.num_tokens,
                session_hash=job.session_hash,
                parent_session_hash=job.parent_session_hash,
                session_candidate=session.candidate if session is not None else None,
                first_blocks_hash=found.first_blocks_hash,
            ),
            replicas=views,
            num_sessions=sets.num_sessions([each.id for each in candidates], job.session_hash),
            arrivals_per_s=sets.arrivals_per_s(now_s),
        )
        decision = policy.decide(snapshot)
        index = next((i for i, c in enumerate(candidates) if c.id == decision.candidate), None)
        if index is None:
            raise RuntimeError(f"policy {policy.name!r} chose {decision.candidate!r}, not offered")
        is_guess = job.tokens is None or decision.candidate == home
        view = snapshot.replicas[index]
        if not is_guess:
            view = self._matcher.surviving(job, candidates[index], view)
        return Choice(
            candidate=candidates[index],
            view=view,
            decision=decision,
            snapshot=snapshot,
            policy=policy,
            pools=found.pools,
            assignment=assignment,
            is_guess=is_guess,
        )

    def count(self, job: Job) -> None:
        """Count a decision that was put into effect: the model's next one has another number."""
        self._num_decisions[job.model] += 1


def _with_last_turn(
    job: Job, session: SessionView, matches: dict[CandidateId, Match]
) -> tuple[dict[CandidateId, Match], CandidateId | None]:
    """Credit a session's last replica with its last prompt, if no more of this one is known.

    A guess, for prompts with unnamed media and for models without a tokenizer.

    Returns:
        The matches, and the replica that was credited. None: more is known.
    """
    home = session.candidate
    match = matches.get(home, NO_MATCH)
    num_tokens = min(session.num_tokens, job.num_tokens - 1)
    if num_tokens <= match.num_gpu_tokens:
        return matches, None
    credited = match._replace(
        num_gpu_tokens=num_tokens, num_cpu_tokens=max(match.num_cpu_tokens, num_tokens)
    )
    return {**matches, home: credited}, home
