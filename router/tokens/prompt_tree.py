"""Remember the prompts of one model as a tree of segments, with their tokens and block keys.

A prompt is a path from a root: segments that end at safe boundaries, then a tail. A segment's key
is a digest of everything up to its end. So a prompt is recognised up to the first byte that differs
from all earlier prompts. What a segment has is of its own part of the prompt only.

    bytes of a prompt    [0, s1) [s1, s2) ... [sn, end)     segments, then the tail (a leaf)
    a segment            its tokens, and its part of each chain of block keys
    a part of a chain    keys of the blocks that end in it, and the digest of the last;
                         the open tokens behind the last block;
                         the digests of all of these blocks, once they were needed;
                         the images or other items that reach into the open tokens

There is a chain for each pair of contract and extra keys. It grows with the path and is never
computed twice. A block may begin in one segment and end in the next.

The tree is bounded by bytes. The least recently used segments are evicted, deepest first, so every
segment stays connected to its root. A segment that was evicted while a plan used it comes back with
the plan.

Nothing here reads text: where a prompt may be cut is in `boundaries`, encoding in `encoder`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Generator, Sequence
from functools import partial
from hashlib import sha256
from typing import NamedTuple, Protocol, cast

import numpy as np
import orjson
from msgspec import Struct
from xxhash import xxh3_128_intdigest

from router.api.openai import TokenIds
from router.base.bounded import Bounded, BoundedBytes
from router.base.contracts import NO_EXTRA, BlockKey, ExtraKeys, HashContract, MediaSpan

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


_SEED_MASK = (1 << 64) - 1
_LEAF = 0x6C656166  # mixed into a tail's seed: it differs from a segment with the same bytes
SEGMENT_BYTES = 500  # a segment with its array and its place in the tree
JSON_STEP_IDS = 131_072  # written at once: 0.8 ms


class Boundary(NamedTuple):
    """A position where bytes may be cut.

    guard: The bytes that must follow.
    media: The identifier of the image or other item that the bytes up to there stand for.
    """

    position: int
    guard: bytes
    media: str | None = None


class PromptBoundaries(Protocol):
    """The boundaries of one prompt's bytes."""

    def after(self, position: int) -> Boundary | None:
        """Find the next boundary behind `position`; None: none before the end.

        Must depend on the bytes behind `position` alone. Positions never decrease.
        """
        ...


class Segment:
    """One node of the tree; created by `SegmentTree` alone.

    next_key, next_bytes, next_guard: The child that was used last, tried before searching.
    media: The identifier of the image or other item that its tokens stand for; None: text.
    """

    __slots__ = (
        "chains",
        "ids",
        "json",
        "key",
        "media",
        "next_bytes",
        "next_guard",
        "next_key",
        "size_bytes",
    )

    def __init__(self, key: int, ids: TokenIds, media: str | None = None) -> None:
        self.key = key
        self.ids = ids
        self.media = media
        self.next_key = 0
        self.next_bytes = 0
        self.next_guard = b""
        self.chains: dict[int, SegmentChain] | None = None
        self.json: bytes | None = None  # the ids as JSON, separated by commas; None: not needed yet
        self.size_bytes = SEGMENT_BYTES + 4 * len(ids)


class NewSegment(NamedTuple):
    """A segment still to be encoded: bytes [start, end)."""

    key: int
    start: int
    end: int
    guard: bytes
    media: str | None = None


class Walk(NamedTuple):
    """How much of a prompt is known: `path` covers the bytes before `new`, root first.

    The last of `new` is the tail. If `new` is empty, `path` ends with the tail.
    """

    path: list[Segment]
    new: list[NewSegment]


class SegmentTree(HashChains):
    """The bounded tree of segments; every method runs on the loop.

    Args:
        max_bytes: Budget for segments, tokens and chains together (estimated).
    """

    __slots__ = ("segments",)

    def __init__(self, max_bytes: int = 512 << 20) -> None:
        super().__init__()
        self.segments: BoundedBytes[int, Segment] = BoundedBytes(max_bytes)

    def __len__(self) -> int:
        return len(self.segments)

    @property
    def size_bytes(self) -> int:
        """Estimate the memory held; at most the budget after every `commit`."""
        return self.segments.size_bytes

    def walk(self, root: Segment, data: bytes, boundaries: PromptBoundaries) -> Walk:
        """Find how much of `data` is known below `root`, and cut the rest.

        Args:
            root: From `make_root`; not part of the budget.
            data: The whole prompt.
            boundaries: Of `data`.
        """
        view = memoryview(data)
        path, position = self._descend(root, data, view, boundaries)
        key = path[-1].key
        new: list[NewSegment] = []
        boundary = boundaries.after(position)
        while boundary is not None:
            key = xxh3_128_intdigest(view[position : boundary.position], key & _SEED_MASK)
            new.append(NewSegment(key, position, *boundary))
            position = boundary.position
            boundary = boundaries.after(position)
        key = xxh3_128_intdigest(view[position:], (key ^ _LEAF) & _SEED_MASK)
        leaf = None if new else self.segments.get(key)
        if leaf is not None:
            path.append(leaf)
        else:
            new.append(NewSegment(key, position, len(data), b""))
        return Walk(path, new)

    def _descend(
        self, root: Segment, data: bytes, view: memoryview, boundaries: PromptBoundaries
    ) -> tuple[list[Segment], int]:
        """Follow known segments; return them and the position behind the last."""
        segments = self.segments
        num_bytes = len(data)
        path = [root]
        node, position = root, 0
        while True:
            child = None
            seed = node.key & _SEED_MASK
            end = position + node.next_bytes
            if (
                position < end <= num_bytes
                and xxh3_128_intdigest(view[position:end], seed) == node.next_key
                and (not node.next_guard or data.startswith(node.next_guard, end))
            ):
                child = segments.get(node.next_key)
            if child is None:
                boundary = boundaries.after(position)
                if boundary is None:
                    return path, position
                end = boundary.position
                child = segments.get(xxh3_128_intdigest(view[position:end], seed))
                if child is None:
                    return path, position
                _remember_next(node, child.key, end - position, boundary.guard)
            path.append(child)
            node, position = child, end

    def commit(self, walk: Walk, encoded: Sequence[TokenIds]) -> list[Segment]:
        """Add encoded segments; return the whole path, root first.

        Args:
            walk: From `walk`, however long ago.
            encoded: Token ids of each of `walk.new`.
        """
        path = list(walk.path)
        for new, ids in zip(walk.new, encoded, strict=True):
            segment = self.segments.get(new.key) or Segment(new.key, ids, new.media)
            if new is not walk.new[-1]:
                _remember_next(path[-1], new.key, new.end - new.start, new.guard)
            path.append(segment)
        self._touch(path)
        return path

    def _touch(self, path: list[Segment]) -> None:
        """Make the path the most recently used, its root end most of all; keep the budget."""
        move_to_end = self.segments.move_to_end
        for segment in reversed(path[1:]):
            try:
                move_to_end(segment.key)  # as nearly all can: one look-up
            except KeyError:
                self.segments.put(segment.key, segment)
        self.segments.trim()  # for what grew since

    def json(self, path: Sequence[Segment]) -> Generator[None, None, bytes]:
        """Write the path's ids as JSON numbers, separated by commas.

        Yields when other tasks may run. Only ids that were not written before are written (6 us per
        1,000). They are remembered: about 6 bytes an id of the budget.
        """
        num_ids = 0
        for segment in path:
            if segment.json is None:
                numbers = np.frombuffer(segment.ids, np.uint32)
                segment.json = orjson.dumps(numbers, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
                self._grow(segment, len(segment.json))
                num_ids += len(numbers)
                if num_ids > JSON_STEP_IDS:
                    num_ids = 0
                    yield
        return b",".join([segment.json for segment in path if segment.json])

    def _grow(self, segment: Segment, num_bytes: int) -> None:
        """Count more memory of a segment; it may have been evicted meanwhile."""
        segment.size_bytes += num_bytes
        if self.segments.get(segment.key) is segment:
            self.segments.size_bytes += num_bytes

    def make_root(self, name: str, ids: TokenIds | None = None) -> Segment:
        """Create the root of a kind of prompt; `ids` are the first tokens of each."""
        return Segment(xxh3_128_intdigest(name.encode()), ids if ids is not None else array("I"))


def _remember_next(segment: Segment, key: int, num_bytes: int, guard: bytes) -> None:
    segment.next_key, segment.next_bytes, segment.next_guard = key, num_bytes, guard


_MAX_OWNERS = 4096
EncodeNew = Callable[[bytes, Sequence[NewSegment]], list[TokenIds]]


class EncodePlan(Struct, frozen=True, kw_only=True):
    """The known part of one prompt, and the new part to encode.

    data: The prompt's bytes.
    encode_new: Returns the ids of each new segment of `data`; pure and thread-safe.
    num_new_chars: UTF-8 bytes of unknown text: the amount of work in `encode`.
    num_known_tokens: Tokens that need not be encoded.
    """

    tree: SegmentTree
    walk: Walk
    data: bytes
    encode_new: EncodeNew
    num_new_chars: int
    num_known_tokens: int

    def encode(self) -> list[TokenIds]:
        """Encode the new part: pure, thread-safe, without the GIL for most of the time.

        About 0.7 ms per 1,000 new tokens.
        """
        return self.encode_new(self.data, self.walk.new) if self.walk.new else []


class Tokens:
    """The tokens of one prompt, shared with every prompt that begins with the same bytes."""

    __slots__ = ("_path", "_tree", "num_new_tokens", "num_tokens")

    def __init__(
        self,
        tree: SegmentTree,
        path: list[Segment],
        num_known_tokens: int,
        num_known_segments: int,
    ) -> None:
        """Count the new tokens of a path, whose first segments were known before."""
        self._tree = tree
        self._path = path
        self.num_new_tokens = 0
        for segment in path[num_known_segments:]:
            self.num_new_tokens += len(segment.ids)
        self.num_tokens = num_known_tokens + self.num_new_tokens

    @property
    def num_before_media(self) -> int:
        """Count the tokens in front of the first image; all if there is none."""
        spans = self.media_spans()
        return spans[0].start if spans else self.num_tokens

    def media_spans(self) -> list[MediaSpan]:
        """List the positions of the prompt's images, from its first token."""
        spans: list[MediaSpan] = []
        end = 0
        for segment in self._path:
            start, end = end, end + len(segment.ids)
            if segment.media is not None:
                spans.append(MediaSpan(segment.media, start, end))
        return spans

    def before_tail(self) -> Tokens:
        """Return the tokens that stay the same whatever follows the text."""
        path, num_tokens = self._path[:-1], self.num_tokens - len(self._path[-1].ids)
        return Tokens(self._tree, path, num_tokens, len(path))

    def ids(self) -> list[int]:
        """List the token ids, shape (num_tokens,); O(num_tokens), for proofs and engines."""
        whole: TokenIds = array("I")
        for segment in self._path:
            whole += segment.ids
        return whole.tolist()

    def json(self) -> Generator[None, None, bytes]:
        """Write the token ids as JSON numbers, separated by commas; see `SegmentTree.json`."""
        return self._tree.json(self._path)

    def keys(self, contract: HashContract, extra: ExtraKeys = NO_EXTRA) -> Sequence[BlockKey]:
        """List the keys of the full blocks, shape (num_blocks(num_tokens),), as an array("Q").

        New blocks are hashed (about 1.3 µs each) and remembered.
        """
        return self._tree.keys(self._path, contract, extra)

    def hashing(
        self, contract: HashContract, extra: ExtraKeys
    ) -> Generator[Callable[[], SegmentChain] | None, SegmentChain, None]:
        """Hash the new part in steps; see `HashChains.hashing`."""
        return self._tree.hashing(self._path, contract, extra)

    def digests(
        self, contract: HashContract, positions: Sequence[int], extra: ExtraKeys = NO_EXTRA
    ) -> list[bytes]:
        """List the full digests of some blocks; `positions` ascend, in [0, number of keys)."""
        return self._tree.digests(self._path, contract, extra, positions)

    def is_of(self, tree: SegmentTree) -> bool:
        """Return whether these tokens are remembered in `tree`."""
        return self._tree is tree


class Roots(NamedTuple):
    """The beginnings of one owner's prompts, by their kind."""

    ids: Segment
    bare: Segment  # text without special tokens around it
    special: Segment  # text with special tokens around it
    framed: Segment  # parts that are not text alone


class PromptMemory:
    """Plans prompts from their known parts.

    Remembered parts make a long prompt 150 ms quicker. Each is remembered for its *owner* alone, so
    that no client can measure the prompts of others. An owner is any text, preferably a secret one.
    All prompts without an owner have the same owner.

    Args:
        max_bytes: Budget for remembered prompts.
        prefix: Tokens in front of text with special tokens; None: there are none.
    """

    __slots__ = ("_max_bytes", "_prefix", "_roots", "_tree")

    def __init__(self, max_bytes: int, prefix: TokenIds | None) -> None:
        self._max_bytes = max_bytes
        self._prefix = prefix
        self._tree = SegmentTree(max_bytes)
        self._roots: dict[str, Roots] = {}

    @property
    def size_bytes(self) -> int:
        """Estimate the memory held for prompts."""
        return self._tree.size_bytes

    def clear(self) -> None:
        """Forget all prompts. Plans in flight end in what is forgotten."""
        self._tree = SegmentTree(self._max_bytes)
        self._roots.clear()

    def roots(self, owner: str) -> Roots:
        """Return the beginnings of an owner's prompts; outside the budget, so bounded."""
        roots = self._roots.get(owner)
        if roots is None:
            if len(self._roots) >= _MAX_OWNERS:
                self._roots.clear()  # their keys are digests: new roots lead to the same segments
            root, suffix = self._tree.make_root, f"\0{owner}" if owner else ""
            roots = self._roots[owner] = Roots(
                root(f"ids{suffix}"),
                root(f"text{suffix}"),
                root(f"text with special tokens{suffix}", self._prefix),
                root(f"framed{suffix}"),
            )
        return roots

    def plan(
        self,
        root: Segment,
        data: bytes,
        cuts: PromptBoundaries,
        encode_new: EncodeNew,
        *,
        is_text: bool = True,
    ) -> EncodePlan:
        """Find the new part of a prompt.

        Args:
            root: One of `roots`.
            data: The prompt.
            cuts: Of `data`.
            encode_new: See `EncodePlan`.
            is_text: False: the prompt is token ids, and there is nothing to encode.
        """
        path, new = walk = self._tree.walk(root, data, cuts)
        num_known_tokens = 0
        for segment in path:
            num_known_tokens += len(segment.ids)
        return EncodePlan(
            tree=self._tree,
            walk=walk,
            data=data,
            encode_new=encode_new,
            num_new_chars=len(data) - new[0].start if new and is_text else 0,
            num_known_tokens=num_known_tokens,
        )

    def has(self, tokens: Tokens) -> bool:
        """Return whether a prompt's tokens are remembered here, and were not cleared."""
        return tokens.is_of(self._tree)
