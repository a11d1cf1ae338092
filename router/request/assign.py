"""A request's place in an experiment: what is compared, and which replicas are for it.

A request's session is its unit: what its client calls so, else what has the same first turn (see
router.api.sessions). A completion without a session id has nothing that stays, and takes part in
switchbacks only.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic, time

from router.experiments.assignment import Assignment
from router.experiments.runner import BEYOND, ExperimentRunner
from router.records.record import AssignmentRecord
from router.replicas.replica import Candidate
from router.request.results import Read


def assign(experiments: ExperimentRunner, read: Read) -> Assignment | None:
    """Find a prompt's variant; it keeps it, however often it is planned."""
    if experiments.is_empty or read.request is None:
        return None
    session_hash = read.session_hash
    return experiments.assign(read.model or "", session_hash, time(), monotonic())


def record_of(assignment: Assignment, *, is_beyond: bool) -> AssignmentRecord | None:
    """Write down an assignment for the record; None: the request is in no variant."""
    if assignment.arm is None:
        return None
    not_counted = assignment.not_counted
    if is_beyond and not_counted is None:
        not_counted = BEYOND
    return AssignmentRecord(
        experiment=assignment.experiment,
        design=assignment.design,
        arm=assignment.arm,
        unit=assignment.unit,
        share=assignment.share,
        slot=assignment.slot,
        is_wash_out=not_counted is not None,
        not_counted=not_counted,
        stop_reason=assignment.stop_reason,
        control=assignment.control,
        trial=assignment.trial,
    )


def own_of(assignment: Assignment, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """List the candidates that a request may use."""
    if not assignment.is_narrow:
        return candidates
    allows = assignment.allows
    return [c for c in candidates if allows(c.replica.name, c.replica.url.rstrip("/"))]


def narrowed(
    assignment: Assignment, candidates: Sequence[Candidate]
) -> tuple[Sequence[Candidate], bool]:
    """Leave out replicas that a request may not use; True: none would be left, so all stay."""
    own = own_of(assignment, candidates)
    return (own, False) if own else (candidates, True)
