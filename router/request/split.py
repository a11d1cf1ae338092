"""Split: why the prompt of a request is computed where it is answered, whatever that costs.

Where it is computed otherwise says `Place.split`.
"""

from __future__ import annotations

from router.request.plan import Plan
from router.request.results import Prompt, Tries


def why_here(prompt: Prompt, tries: Tries, plan: Plan) -> str | None:
    """Return why a prompt cannot be computed elsewhere; None: it can be."""
    if prompt.read.num_prompts > 1:
        return "batch"
    if prompt.owner is not None:
        return "owned"  # only the replica that issued the response before has it
    if prompt.read.outline is not None:
        return "body"  # too costly to be taken apart
    if prompt.original is not None:
        return "pool"
    helped = tries.helped
    if helped is not None and helped.result == "failed":
        return "failed" if tries.failed_helper is None else None
    if helped is not None and plan.candidate.replica.transfer == "store":
        return "done"  # a retry: the pool has it
    return None
