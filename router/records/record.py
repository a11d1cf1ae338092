"""The decision record: one JSON line per request, enough to decide again and to audit.

No prompt text, no key, no session id: sessions are digests, prompts are counts. `schema` changes
when a field changes its meaning; readers ignore fields they do not know.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from policies.view import CandidateCost, CandidateId, Decision, Snapshot
from router.records.computed import Computed

SCHEMA = 2
"""1: what the pool had was one number, `snapshot.num_pool_tokens`; now it is each candidate's."""


class Try(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One attempt: where, and how it failed (None: it did not)."""

    candidate: str
    failure: str | None = None


class PrefillRecord(Struct, frozen=True, kw_only=True):
    """Where the prompt of a request was computed that a decode replica answered.

    `result`: remote, at `candidate`; local, where it was decoded; failed: at `candidate` it was
    not, so it was where it was decoded. `why` says the reason in a word. `policy` to `decision`:
    how that was chosen among the prefill replicas; None: none of them was, or an older record.
    """

    result: str
    why: str
    here_ms: float  # predicted: to have its KV where it is decoded, computed there
    there_ms: float  # and read there
    transfer: str | None = None  # store | mooncake | nixl
    candidate: CandidateId | None = None  # None: no other replica was chosen
    cost: CandidateCost | None = None  # of that, as predicted
    predicted_ms: float | None = None
    ms: float | None = None
    num_predicted_cached_tokens: int | None = None
    num_reported_cached_tokens: int | None = None
    policy: str | None = None
    policy_params: dict[str, Any] = {}
    snapshot: Snapshot | None = None
    decision: Decision | None = None

    @property
    def is_peer_to_peer(self) -> bool:
        """Whether it was computed elsewhere, and read from there."""
        return self.result == "remote" and self.transfer != "store"

    @property
    def where(self) -> str:
        """Return the replica that computed it; else the result."""
        return self.candidate or "" if self.result == "remote" else self.result


class AssignmentRecord(Struct, frozen=True, kw_only=True):
    """A request's variant, and whether the request counts.

    `unit` is what was randomised: a session's digest (split) or a time slot (switchback). Requests
    of one unit are not independent. Requests at the beginning of a slot do not count, while caches
    and queues are still the other variant's (`wash_out`).

    `trial` identifies the experiment's definition. It is the same on all routers that read the same
    file.
    """

    experiment: str
    design: str  # split | switchback; partition in older records
    arm: str
    unit: str
    share: float  # of the traffic that the variant should get at that moment
    slot: int | None = None  # switchback: number of the time slot
    not_counted: str | None = None  # why not: wash_out; others in older records
    control: str = ""  # variant that the others are compared with; "": older record
    trial: str = ""  # "": older record

    @property
    def label(self) -> str:
        """Name the experiment and the variant."""
        return f"{self.experiment}/{self.arm}"


class DecisionRecord(Struct, frozen=True, kw_only=True):
    """What was known, what was decided, what happened. Times in milliseconds."""

    schema: int = SCHEMA
    request_id: str
    at: float  # unix seconds, wall clock
    api: str
    model: str
    tenant: str | None = None  # its name; None: there is no tenants file
    session: str | None = None  # digest of the conversation, as the admin API names it
    policy: str
    policy_params: dict[str, Any] = {}  # with the name: the very policy, see `policies.create`
    assignment: AssignmentRecord | None = None  # None: in no experiment
    state: str  # exact | degraded | blind: how well the chosen replica's cache was known
    snapshot: Snapshot
    decision: Decision
    prefill: PrefillRecord | None = None  # None: prompts are not computed apart
    tries: tuple[Try, ...]
    outcome: str
    status: int
    num_prompt_tokens: int
    num_predicted_cached_tokens: int
    num_reported_cached_tokens: int | None
    computed: Computed | None = None  # why tokens were computed; None: not known
    num_completion_tokens: int | None
    router_ms: float  # without the time it waited
    service_class: str | None = None  # interactive | batch; None: it never waits (the queue is off)
    deadline_ms: float | None = None  # from arrival to first token, as asked; None: whenever
    expected_ttft_ms: float | None = None  # from its arrival, its wait included; None: no deadline
    expected_tbt_ms: float | None = None  # between its tokens; None: no limit, or not known
    waited_ms: float = 0.0  # in the router, for room
    waited_for: str | None = None  # last: window | room | tbt; None: nothing, or those before it
    released: str | None = None  # why it was sent (queue `Verdict`); None: it did not wait
    predicted_ttft_ms: float | None
    ttft_ms: float | None
    total_ms: float

    @property
    def by_policy(self) -> tuple[Snapshot, Decision] | None:
        """Return what the configured policy was asked, and what it chose; None: it was not asked.

        Where prompts are computed apart it places these; what answers them is `decode_load`'s.
        """
        prefill = self.prefill
        if prefill is None:
            return self.snapshot, self.decision
        if prefill.snapshot is None or prefill.decision is None:
            return None
        return prefill.snapshot, prefill.decision
