"""Remember prompts as a tree of segments, each with its tokens and its part of the hash chains.

A prompt is a path from a root: segments that end at safe boundaries, then a tail. A segment's key
is a digest of everything up to its end. So a prompt is recognised up to the first byte that differs
from all earlier prompts. A segment has its own tokens only, and its part of each chain (`chains`).

    bytes of a prompt    [0, s1) [s1, s2) ... [sn, end)     segments, then the tail (a leaf)

The tree is bounded by bytes. The least recently used segments are evicted, deepest first, so every
segment stays connected to its root. A segment that was evicted while a plan used it comes back with
the plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import orjson
from xxhash import xxh3_128_intdigest

from router.api.openai import TokenIds
from router.base.bounded import BoundedBytes
from router.tokens.chains import HashChains, SegmentChain

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
