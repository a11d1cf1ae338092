"""Policies that follow the prompt's prefix, within a bound on load."""

from __future__ import annotations

from math import ceil
from typing import Annotated, ClassVar

from msgspec import Meta

from policies.hashing import clockwise
from policies.load import delay_ms, least_loaded, load_text
from policies.policy import Policy
from policies.view import Decision, ReplicaView, Snapshot


class PrefixHash(Policy, frozen=True, kw_only=True):
    """Place the prompt's first blocks on a consistent ring with bounded load (Mirrokni, Thorup,
    Zadimoghaddam, 2016). Go clockwise from `mix(first blocks)` to the first candidate with fewer
    than `ceil(load_factor x (R + 1) / n)` requests in flight. R is the number of all requests in
    flight. There is no index and no state. It reaches about 90 % of the gain of an exact index
    (kvroute's study), so it is the baseline for one. Without tokens it uses the session's hash,
    without a session the least loaded.
    """

    name: ClassVar[str] = "prefix_hash"

    load_factor: Annotated[
        float, Meta(ge=1.0, description="Highest load of a candidate, as a multiple of the mean")
    ] = 1.25
    num_points: Annotated[
        int, Meta(ge=1, le=1000, description="Virtual nodes of each candidate on the ring")
    ] = 150

    def decide(self, snapshot: Snapshot) -> Decision:
        request, replicas = snapshot.request, snapshot.replicas
        key = request.first_blocks_hash
        if key is None:
            key = request.session_hash
        if key is None:
            chosen = least_loaded(snapshot, replicas)
            return Decision(candidate=chosen.id, reason=f"no tokens; {load_text(chosen)}")
        total = sum([replica.num_requests for replica in replicas])
        bound = ceil(self.load_factor * (total + 1) / len(replicas))
        passed: set[int] = set()
        ids = tuple([replica.id for replica in replicas])
        # The least loaded has at most total / n < bound requests: the walk always ends here.
        for index in clockwise(ids, self.num_points, key):  # pragma: no branch
            if replicas[index].num_requests < bound:
                break
            passed.add(index)
        reason = f"hash of the first blocks, {len(passed)} full passed, bound {bound}"
        return Decision(candidate=replicas[index].id, reason=reason)


class LongestPrefix(Policy, frozen=True, kw_only=True):
    """Choose the longest cached prefix among candidates whose predicted delay is at most `guard_ms`
    above the lowest; equals go to the least loaded. Without the guard, one block that every prompt
    shares would send everything to the candidate that had it first.
    """

    name: ClassVar[str] = "longest_prefix"

    guard_ms: Annotated[
        float, Meta(ge=0.0, description="Delay a longer prefix may cost over the lowest, in ms")
    ] = 2000.0

    def decide(self, snapshot: Snapshot) -> Decision:
        replicas = snapshot.replicas
        bound = min(map(delay_ms, replicas)) + self.guard_ms
        within = [replica for replica in replicas if delay_ms(replica) <= bound]
        longest = max(map(_match, within))
        chosen = least_loaded(snapshot, [r for r in within if _match(r) == longest])
        num_out = len(replicas) - len(within)
        reason = (
            f"{longest[0]:,} of {snapshot.request.num_tokens:,} tokens cached, "
            f"queue {chosen.queue_ms:,.0f} ms, {num_out} over the guard"
        )
        return Decision(candidate=chosen.id, reason=reason)


def _match(replica: ReplicaView) -> tuple[int, int]:
    """Order matches: all tokens the candidate holds, then those that need no reading."""
    return replica.num_cpu_tokens, replica.num_gpu_tokens
