"""One prompt: first the plan of its new part, then its token ids and block keys."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence

from msgspec import Struct

from router.api.openai import TokenIds
from router.base.contracts import NO_EXTRA, BlockKey, ExtraKeys, HashContract, MediaSpan
from router.tokens.chains import Chain
from router.tokens.incremental import NewSegment, Segment, SegmentTree, Walk

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
        """Take a path whose first segments, with these tokens, were known before."""
        self._tree = tree
        self._path = path
        self.num_new_tokens = 0
        for segment in path[num_known_segments:]:
            self.num_new_tokens += len(segment.ids)
        self.num_tokens = num_known_tokens + self.num_new_tokens

    @property
    def num_before_media(self) -> int:
        """Count the tokens in front of the first image or sound; all if there is none."""
        spans = self.media_spans()
        return spans[0].start if spans else self.num_tokens

    def media_spans(self) -> list[MediaSpan]:
        """List the positions of the prompt's images and sounds, from its first token."""
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
    ) -> Generator[Callable[[], Chain] | None, Chain, None]:
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
