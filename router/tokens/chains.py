"""Hash the blocks of prompts along the tree's segments: once per contract and extra keys.

For each pair of contract and extra keys, a segment remembers its part of a chain. A block may begin
in one segment and end in the next. Chains grow with the path and are never computed twice.

    a segment's part    keys of the blocks that end in it, and the digest of the last;
                        the open tokens behind the last block;
                        the digests of all of these blocks, once they were needed;
                        the images or other items that reach into the open tokens
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Generator, Sequence
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple, cast

from router.api.openai import TokenIds
from router.base.bounded import Bounded
from router.base.contracts import BlockKey, ExtraKeys, HashContract, MediaSpan

if TYPE_CHECKING:
    from router.tokens.incremental import Segment

MAX_CHAINS = 8
"""Chains that a segment remembers: one per pair of contract and extra keys (salt, adapter)."""

_MAX_CHAIN_IDS = 4096
_CHAIN_BYTES = 400  # a chain, its list, digest and open tokens
_BLOCK_BYTES = 8  # a key, as a machine word: an int in a list takes 40, and a cache miss to copy
_STEP_TOKENS = 16_384  # hashed at once: 1.3 ms
_ChainName = tuple[HashContract, tuple[str, str] | None, bytes | None]  # adapter, digest of a salt


class SegmentChain(NamedTuple):
    """A segment's part of one chain."""

    keys: array[int]
    digest: bytes | None  # of the last full block of the path; None: there is none yet
    open_tokens: TokenIds  # behind that block, fewer than a block and its lookahead
    digests: bytes | None = None  # of the blocks of `keys`, joined; None: not needed yet
    open_media: tuple[MediaSpan, ...] = ()  # from the first open token; the last may end there


class HashChains(ABC):
    """The chains of a tree's segments; every method runs on the loop."""

    __slots__ = ("_chain_ids", "_next_chain_id")

    def __init__(self) -> None:
        self._chain_ids: Bounded[_ChainName, int] = Bounded(_MAX_CHAIN_IDS)
        self._next_chain_id = 0

    @abstractmethod
    def _grow(self, segment: Segment, num_bytes: int) -> None:
        """Count more memory of a segment."""

    def keys(
        self, path: Sequence[Segment], contract: HashContract, extra: ExtraKeys
    ) -> Sequence[BlockKey]:
        """List the keys of the path's full blocks as an array("Q"), and hash the unknown ones."""
        chain_id = self._chain_id(contract, extra)
        before = _START
        parts: list[array[int]] = []
        for segment in path:
            before = self._chain(segment, chain_id, before, contract, extra)
            parts.append(before.keys)
        keys = array("Q")
        keys.frombytes(b"".join(parts))
        return cast("Sequence[BlockKey]", keys)

    def hashing(
        self, path: Sequence[Segment], contract: HashContract, extra: ExtraKeys
    ) -> Generator[Callable[[], SegmentChain] | None, SegmentChain, None]:
        """Hash the same blocks as `keys`, in steps of a few ms.

        Yields None when other tasks may run, or work for any thread, whose result must be sent in.
        """
        chain_id = self._chain_id(contract, extra)
        before = _START
        num_tokens = 0
        for segment in path:
            chain = segment.chains.get(chain_id) if segment.chains is not None else None
            if chain is None:
                num_tokens += len(segment.ids)
                if len(segment.ids) > _STEP_TOKENS:
                    chain = yield partial(_extended, before, segment, contract, extra)
                else:
                    chain = _extended(before, segment, contract, extra)
                self._remember_chain(segment, chain_id, chain)
            before = chain
            if num_tokens > _STEP_TOKENS:
                num_tokens = 0
                yield None

    def digests(
        self,
        path: Sequence[Segment],
        contract: HashContract,
        extra: ExtraKeys,
        positions: Sequence[int],
    ) -> list[bytes]:
        """List the full digests of some of the path's blocks, in the order asked.

        Args:
            path: From `commit`.
            contract: How to hash.
            extra: Salt and adapter of the prompt.
            positions: Block numbers, ascending; below `len(keys(path, ...))`.

        Hashes only the segments in which these blocks end (1.3 us a block), and remembers the
        digests: 32 bytes a block of the budget.
        """
        chain_id = self._chain_id(contract, extra)
        found: list[bytes] = []
        wanted = iter((*positions, -1))
        position = next(wanted)
        start, before = 0, _START
        for segment in path:
            if position < 0:
                break
            chain = self._chain(segment, chain_id, before, contract, extra)
            end = start + len(chain.keys)
            if start <= position < end:
                digests = chain.digests
                if digests is None:
                    tokens, media = _joined(before, segment)
                    digests = b"".join(contract.digests(before.digest, tokens, extra, media))
                    self._remember_digests(segment, chain_id, chain, digests)
                size = len(digests) // len(chain.keys)
                while start <= position < end:
                    offset = (position - start) * size
                    found.append(digests[offset : offset + size])
                    position = next(wanted)
            start, before = end, chain
        return found

    def _remember_digests(
        self, segment: Segment, chain_id: int, chain: SegmentChain, digests: bytes
    ) -> None:
        assert segment.chains is not None
        segment.chains[chain_id] = chain._replace(digests=digests)
        self._grow(segment, len(digests))

    def _chain_id(self, contract: HashContract, extra: ExtraKeys) -> int:
        """Return a number for the pair, as a short key; no other pair gets it."""
        salt = extra.cache_salt  # a client's own may be as long as a body
        digest = None if salt is None else sha256(salt.encode("utf-8", "surrogatepass")).digest()
        name = contract, extra.lora, digest
        known = self._chain_ids.get(name)
        if known is not None:
            return known
        self._next_chain_id += 1
        self._chain_ids.put(name, self._next_chain_id)
        return self._next_chain_id

    def _chain(
        self,
        segment: Segment,
        chain_id: int,
        before: SegmentChain,
        contract: HashContract,
        extra: ExtraKeys,
    ) -> SegmentChain:
        """Return a segment's part of a chain, and hash it if it is not known.

        Prompts with other salts and adapters may have displaced it here but not in later segments,
        because more prompts share the first segments.
        """
        chain = segment.chains.get(chain_id) if segment.chains is not None else None
        if chain is None:
            chain = _extended(before, segment, contract, extra)
            self._remember_chain(segment, chain_id, chain)
        return chain

    def _remember_chain(self, segment: Segment, chain_id: int, chain: SegmentChain) -> None:
        if segment.chains is None:
            segment.chains = {}
        grown = _BLOCK_BYTES * len(chain.keys) + _CHAIN_BYTES
        if len(segment.chains) >= MAX_CHAINS:
            dropped = segment.chains.pop(next(iter(segment.chains)))
            grown -= _BLOCK_BYTES * len(dropped.keys) + _CHAIN_BYTES + len(dropped.digests or b"")
        segment.chains[chain_id] = chain
        self._grow(segment, grown)


_START = SegmentChain(array("Q"), None, array("I"))


def _extended(
    before: SegmentChain, segment: Segment, contract: HashContract, extra: ExtraKeys
) -> SegmentChain:
    tokens, media = _joined(before, segment)
    keys, digest = contract.extend(before.digest, tokens, extra, media)
    end = len(keys) * contract.block_size
    open_media = tuple(
        MediaSpan(name, start - end, stop - end) for name, start, stop in media if stop > end
    )
    return SegmentChain(array("Q", keys), digest, tokens[end:], None, open_media)


def _joined(before: SegmentChain, segment: Segment) -> tuple[TokenIds, tuple[MediaSpan, ...]]:
    """Append a segment to the open tokens; also return the items among them."""
    tokens = before.open_tokens + segment.ids
    if segment.media is None:
        return tokens, before.open_media
    span = MediaSpan(segment.media, len(before.open_tokens), len(tokens))
    return tokens, (*before.open_media, span)
