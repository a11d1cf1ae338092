"""A request's variant in an experiment.

Experiments assign by session: the client's session id, or the first turn of the conversation (see
router.api.sessions). A completion without a session id takes part in switchbacks only.
"""

from __future__ import annotations

from time import time

from router.experiments.assignment import Assignment
from router.experiments.runner import ExperimentRunner
from router.records.record import AssignmentRecord
from router.request.job import Job


def assign(experiments: ExperimentRunner, job: Job) -> Assignment | None:
    """Return a prompt's variant, which stays the same however often the prompt is placed."""
    if experiments.is_empty or job.prompt is None:
        return None
    return experiments.assign(job.model or "", job.session_hash, time())


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
