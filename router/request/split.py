"""Split: why the prompt of a request is computed where it is answered, whatever that costs.

Where both halves go otherwise is `router.replicas.halves`.
"""

from __future__ import annotations

from router.request.job import Choice, Job


def why_here(job: Job, choice: Choice) -> str | None:
    """Return why a prompt cannot be computed elsewhere; None: it can be."""
    if job.completion is not None and len(job.completion.prompts) > 1:
        return "batch"
    if job.owner is not None:
        return "owned"  # only the replica that issued the response before has it
    if job.outline is not None:
        return "body"  # too costly to be taken apart
    if job.skips_pool:
        return "pool"
    if job.prefill is not None and job.prefill.result == "failed":
        return "failed"
    if job.prefill is not None and choice.candidate.replica.transfer == "store":
        return "done"  # a retry: the pool has it
    return None
