"""A played engine: random work on a plain set of blocks, published as vLLM's events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.index.copies import TIERS, Tier
from router.kv_events.wire import AllBlocksCleared, KvEvent
from tests.engine import CONTRACT, batch, prompt, removed, stored

NUM_BLOCKS = 8  # of each prompt


def _prompts() -> list[list[int]]:
    """Prompts that share nothing, half, or all but the last block."""
    first, second = prompt(1, NUM_BLOCKS), prompt(2, NUM_BLOCKS)
    half, last = len(first) // 2, len(first) - CONTRACT.block_size
    return [
        first,
        second,
        first[:half] + prompt(3, NUM_BLOCKS)[half:],
        first[:last] + prompt(4, NUM_BLOCKS)[last:],
    ]


PROMPTS = _prompts()
CHAINS: list[list[BlockKey]] = [CONTRACT.extend(None, tokens)[0] for tokens in PROMPTS]
BLOCKS: list[BlockKey] = list(dict.fromkeys(key for chain in CHAINS for key in chain))
HASHES: dict[BlockKey, int] = {
    key: int.from_bytes(digest[-8:], "big")
    for chain, tokens in zip(CHAINS, PROMPTS, strict=True)
    for key, digest in zip(chain, CONTRACT.digests(None, tokens), strict=True)
}
_MEDIA = {"gpu": "GPU", "cpu": "CPU"}


class _Work(NamedTuple):
    """What one batch reports; no tier: everything was cleared."""

    tier: Tier | None
    stored: tuple[BlockKey, ...] = ()
    removed: tuple[BlockKey, ...] = ()


class PlayedEngine:
    """What one engine holds, and what it can still say of how that came about.

    `is_new`: no batch of this process was received yet.
    """

    def __init__(self, candidate: CandidateId) -> None:
        self.candidate = candidate
        self.restart()

    def restart(self) -> None:
        """Be another process: nothing held, nothing said."""
        self.held: dict[Tier, Counter[BlockKey]] = {tier: Counter() for tier in TIERS}
        self._buffer: dict[int, bytes] = {}
        self._next = 0
        self._done: list[_Work] = []  # by batch
        self.is_new = True

    # -- work: each returns the batch that reports it ----------------------------------------

    def compute(self, number: int, num_blocks: int, *, again: bool, tier: Tier) -> bytes:
        """Store a prompt's blocks, those it has not, or (`again`) all of them once more."""
        held = self.held[tier]
        skip = 0
        while not again and skip < num_blocks and held[CHAINS[number][skip]]:
            skip += 1
        blocks = CHAINS[number][skip:num_blocks]
        held.update(blocks)
        self._done.append(_Work(tier, stored=tuple(blocks)))
        tokens = PROMPTS[number][: num_blocks * CONTRACT.block_size]
        return self._publish(stored(tokens, skip=skip, medium=_MEDIA[tier]))

    def evict(self, blocks: Iterable[BlockKey], tier: Tier) -> bytes:
        """Remove a copy of each block, held or not."""
        blocks = list(blocks)
        for key in blocks:
            self.held[tier][key] = max(0, self.held[tier][key] - 1)
        self._done.append(_Work(tier, removed=tuple(blocks)))
        return self._publish(removed([HASHES[key] for key in blocks], medium=_MEDIA[tier]))

    def clear(self) -> bytes:
        """Reset the cache."""
        self.held = {tier: Counter() for tier in TIERS}
        self._done.append(_Work(None))
        return self._publish(AllBlocksCleared())

    # -- history -----------------------------------------------------------------------------

    @property
    def last_sequence(self) -> int:
        """Of the last batch; -1: none."""
        return self._next - 1

    def trim(self, num_batches: int) -> None:
        """Forget what was said, but for the last batches."""
        for sequence in list(self._buffer)[:-num_batches]:
            del self._buffer[sequence]

    def replay(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Say again what is still known, from `start` on."""
        for sequence, payload in self._buffer.items():
            if sequence >= start:
                yield sequence, payload

    @property
    def first_sequence(self) -> int:
        """Of the oldest batch that it can say again; where there is none, of the next."""
        return next(iter(self._buffer), self._next)

    def known(self, start: int) -> dict[Tier, set[BlockKey]]:
        """Return what a router knows of it that received every batch from `start` on, and no other.

        From 0: what it holds.
        """
        held: dict[Tier, Counter[BlockKey]] = {tier: Counter() for tier in TIERS}
        for work in self._done[start:]:
            if work.tier is None:
                held = {tier: Counter() for tier in TIERS}
                continue
            copies = held[work.tier]
            copies.update(work.stored)
            for key in work.removed:
                copies[key] = max(0, copies[key] - 1)
        known = {tier: set(+copies) for tier, copies in held.items()}
        assert start or known == {tier: set(+copies) for tier, copies in self.held.items()}
        return known

    def _publish(self, event: KvEvent) -> bytes:
        payload = batch(event)
        self._buffer[self._next] = payload
        self._next += 1
        return payload
