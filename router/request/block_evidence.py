"""Whether engines store the blocks that were computed here, for prompts they tokenized themselves.

A block's hash covers the ids of its prompt up to its end. Equal hashes are equal ids; equal counts
are not. What an engine made of ids that it was handed proves nothing, and is not looked at. A text
that an engine was handed before as ids has no new blocks while the engine has them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from router.contracts import BlockKey
from router.index.cache_view import CacheView
from router.request.plan import Placement
from router.request.results import Prompt
from router.tokens.hand_over import Kind

_PATIENCE_S: Final = 10.0  # events take 0.1 s, a replay of history some more
_MAX_WAITING: Final = 256


class Expected(Struct, frozen=True, kw_only=True):
    """A prompt whose last full block should be stored."""

    model: str
    kind: Kind | None
    placement: Placement
    key: BlockKey
    epoch: object
    until_s: float


class BlockEvidence:
    """Waits for the events of prompts that went as text.

    Args:
        note: Takes a prompt and whether its blocks came.
    """

    def __init__(self, caches: CacheView, note: Callable[[Expected, bool], None]) -> None:
        self._caches = caches
        self._note = note
        self._waiting: deque[Expected] = deque()

    def expect(self, prompt: Prompt, placement: Placement, kind: Kind | None, now_s: float) -> bool:
        """Wait for a chat's blocks where its prompt is computed.

        Returns False if those of that replica are not seen here: it publishes no events, or they
        are looked up in Redis.
        """
        self.sweep(now_s)
        placement = placement.prefill or placement
        candidate, claim = placement.candidate.id, placement.claim
        stream = self._caches.stream(candidate)
        if not placement.candidate.replica.publishes_events:
            return False
        if stream is None or stream.is_blind:
            return True
        if not self._caches.index.num_blocks(candidate):
            return False
        if claim is None or prompt.extra.lora is not None:
            return True
        num_held = placement.num_gpu_tokens // stream.contract.block_size
        if num_held < len(claim.keys) and len(self._waiting) < _MAX_WAITING:
            expected = Expected(
                model=prompt.model or "",
                kind=kind,
                placement=placement,
                key=claim.keys[-1],
                epoch=self._caches.index.epoch(candidate),
                until_s=now_s + _PATIENCE_S,
            )
            if not self._settle(expected, now_s):
                self._waiting.append(expected)
        return True

    def sweep(self, now_s: float) -> None:
        """Note what came, and what is overdue."""
        for _ in range(len(self._waiting)):
            expected = self._waiting.popleft()
            if not self._settle(expected, now_s):
                self._waiting.append(expected)

    def _settle(self, expected: Expected, now_s: float) -> bool:
        """Note an outcome; False: there is none yet."""
        candidate, index = expected.placement.candidate.id, self._caches.index
        stream = self._caches.stream(candidate)
        if stream is None or index.epoch(candidate) is not expected.epoch:
            return True  # its engine is another process, or its cache was cleared
        if index.holds(candidate, expected.key) or index.was_evicted(candidate, expected.key):
            self._note(expected, True)
            return True
        if now_s < expected.until_s:
            return False
        if stream.state == "exact" and not index.has_groups(candidate):
            self._note(expected, False)
        return True
