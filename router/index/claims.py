"""Claim the blocks that requests compute, and compare predictions with what engines report.

A `Claim` marks the blocks that one request will compute, until they are stored or it has failed.
The `Audit` compares each predicted number of cached tokens with the number that the engine reports.
A wrong prediction counts against its source: the event stream or the cpu tier.
router.index.cache_view matches prompts with blocks.

A replica whose history is lost heals by its turns: requests prove blocks of lost history.
A block's hash covers all tokens before it, and an engine computes a prompt's blocks in order. While
it does, it keeps the blocks before them. So the event of a prompt's last block proves that the
engine has the whole chain. Blocks of the chain that no event showed were stored before the router
joined, and were reused.

vLLM can also announce reused blocks (`kv_cache_report_mode: full`). It is not asked to, see
docs/research/lost-history.md.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.index.block_index import BlockIndex, Speculation
from router.index.candidate_stream import CandidateStream, Trust
from router.index.running import Use


def recover(index: BlockIndex, claim: Claim) -> int:
    """Add the blocks of a claim that its candidate must have had; return how many.

    For a claim whose last block has just been stored. Each block counts as one copy. If the engine
    has more, a later match may be too short.
    """
    candidate, held = claim.candidate, index.on_gpu(claim.candidate)
    if not claim.is_new or claim.keys[-1] not in held or index.has_groups(candidate):
        return 0
    keys = [
        key
        for key in claim.keys
        if key not in held and not index.was_evicted(candidate, key, claim.num_removals)
    ]
    if keys:
        index.store(candidate, keys)
    return len(keys)


class Claim(Struct, kw_only=True):
    """Blocks that one request will compute at a candidate, until they are there or it failed."""

    candidate: CandidateId
    keys: Sequence[BlockKey]  # the whole chain
    others: Sequence[BlockKey] = ()  # of other KV groups
    speculation: Speculation | None  # of blocks not there yet; None: none, or they came
    use: Use | None = None  # None: the candidate is not known
    until_s: float | None = None  # None: its request is under way; else it waits for events
    num_held_blocks: int = 0  # on the GPU when it was made, with those being computed
    num_tier_blocks: int = 0  # with those of the cpu tier, even if it does not count
    num_removals: int = 0  # of the candidate, before it was made
    is_new: bool = False  # the GPU did not have the last block when it was made

    def end(self) -> None:
        """Release the blocks; a second time does nothing."""
        if self.speculation is not None:
            self.speculation.end()
            self.speculation = None


logger = logging.getLogger(__name__)


class Audit:
    """The trust in each candidate's predictions.

    Args:
        streams: Of the candidates, as they are now.

    `without_cpu`: the candidates whose cpu tier does not count.
    """

    __slots__ = ("_index", "_streams", "_trust", "without_cpu")

    def __init__(self, index: BlockIndex, streams: Mapping[CandidateId, CandidateStream]) -> None:
        self._index = index
        self._streams = streams
        self._trust: dict[CandidateId, Trust] = {}
        self.without_cpu: set[CandidateId] = set()

    def begin(self, candidate: CandidateId) -> None:
        """Trust a candidate that is new, or another process."""
        self._trust[candidate] = Trust()
        self.without_cpu.discard(candidate)

    def remove(self, candidate: CandidateId) -> None:
        """Drop a candidate that is gone."""
        self._trust.pop(candidate, None)
        self.without_cpu.discard(candidate)

    def trust(self, candidate: CandidateId) -> float:
        """Return the share of recent predictions that were right, recent ones counting more."""
        trust = self._trust.get(candidate)
        return 1.0 if trust is None else trust.gpu.ratio

    def cpu_trust(self, candidate: CandidateId) -> float | None:
        """Return the same for the cpu tier's part; None: it was never audited."""
        trust = self._trust.get(candidate)
        return trust.cpu.ratio if trust is not None and trust.cpu.num_audits else None

    def why_bad(self, candidate: CandidateId) -> str | None:
        """Return why predictions of an exact stream cannot be trusted; None: they can."""
        trust = self._trust.get(candidate)
        return share_right(trust.gpu.ratio) if trust is not None and trust.gpu.is_bad else None

    def was_overtaken(
        self, claim: Claim, num_reported_tokens: int, num_predicted_tokens: int = 0
    ) -> bool:
        """Return whether a prediction was right when it was made, and an eviction came later.

        By its events, the engine has since removed the first block that it lacked; or, with several
        KV groups, one that the predicted hit needed.
        """
        index, candidate = self._index, claim.candidate
        return any(
            index.was_evicted(candidate, key, claim.num_removals)
            for key in self._missing(claim, num_reported_tokens, num_predicted_tokens)
        )

    def _missing(self, claim: Claim, num_reported: int, num_predicted: int) -> Iterable[BlockKey]:
        """List blocks of which the engine lacked one, if it reused less than predicted."""
        stream = self._streams.get(claim.candidate)
        if stream is None:
            return ()
        contract = stream.contract
        missing = num_reported // contract.block_size
        if missing >= len(claim.keys):
            return ()
        num_blocks = min(num_predicted // contract.block_size, len(claim.keys))
        needed = self._index.needed_by(claim.candidate, claim.keys, num_blocks)
        num_more = 2 if claim.candidate in self._index.dropping else 1  # it dropped one that it had
        return (*claim.keys[missing : missing + num_more], *needed)

    def record(
        self,
        candidate: CandidateId,
        num_predicted_tokens: int,
        num_reported_tokens: int,
        claim: Claim | None = None,
        *,
        num_cpu_tokens: int = 0,
    ) -> None:
        """Record a prediction's outcome; a wrong one lowers the trust in what it is based on.

        Args:
            candidate: The one that answered.
            num_predicted_tokens: From all tiers.
            num_reported_tokens: By its engine.
            claim: Of the request; None: not known, all counts for the GPU.
            num_cpu_tokens: The part of the prediction that came from the cpu tier.
        """
        stream, trust = self._streams.get(candidate), self._trust.get(candidate)
        if stream is None or trust is None:
            return
        if claim is not None:
            size = stream.contract.block_size
            num_gpu_tokens = claim.num_held_blocks * size
            num_tier_tokens = max(claim.num_tier_blocks * size, num_gpu_tokens + num_cpu_tokens)
            if num_tier_tokens > num_gpu_tokens:
                self._audit_cpu(candidate, trust, num_tier_tokens == num_reported_tokens)
                if num_reported_tokens >= num_gpu_tokens:
                    return  # the GPU has the predicted blocks
        is_right = num_predicted_tokens == num_reported_tokens
        if trust.observe_gpu(is_right):
            was_read = stream.state == "exact"
            if was_read:
                stream.mark_suspect(share_right(trust.gpu.ratio))
            trust.forgive(was_read=was_read)

    def _audit_cpu(self, candidate: CandidateId, trust: Trust, right: bool) -> None:
        """Record whether the cpu tier added the blocks that it announced."""
        if not trust.observe_cpu(right):
            return
        fields = {"candidate": candidate, "right": round(trust.cpu.ratio, 2)}
        if trust.counts_cpu:
            self.without_cpu.discard(candidate)
            logger.info("its cpu tier counts again: it holds what it announced", extra=fields)
        else:
            self.without_cpu.add(candidate)
            text = "its cpu tier does not count any more: less was read from it than it announced"
            logger.warning(text, extra=fields)


def share_right(ratio: float) -> str:
    """Return how many predictions were right, in words."""
    return f"only {ratio:.0%} of recent predictions were right"
