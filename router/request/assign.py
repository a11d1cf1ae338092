"""A request's variant in an experiment.

Experiments assign by session: the client's session id, or the first turn of the conversation (see
router.api.sessions). A completion without a session id takes part in switchbacks only.
"""

from __future__ import annotations

from time import time

from router.experiments.assignment import Assignment
from router.experiments.runner import ExperimentRunner
from router.records.record import AssignmentRecord
from router.request.results import Read


def assign(experiments: ExperimentRunner, read: Read) -> Assignment | None:
    """Return a prompt's variant, which stays the same however often the prompt is planned."""
    if experiments.is_empty or read.request is None:
        return None
    return experiments.assign(read.model or "", read.session_hash, time())


def record_of(assignment: Assignment) -> AssignmentRecord:
    """Return the assignment as the decision record has it."""
    return AssignmentRecord(
        experiment=assignment.experiment,
        design=assignment.design,
        arm=assignment.arm,
        unit=assignment.unit,
        share=assignment.share,
        slot=assignment.slot,
        is_wash_out=assignment.not_counted is not None,
        not_counted=assignment.not_counted,
        stop_reason=assignment.stop_reason,
        control=assignment.control,
        trial=assignment.trial,
    )
