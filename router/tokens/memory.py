"""Remember the prompts of one model: the plan of a prompt's new part, its tokens and block keys."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

from msgspec import Struct

from router.api.openai import TokenIds
from router.base.contracts import NO_EXTRA, BlockKey, ExtraKeys, HashContract, MediaSpan
from router.tokens.chains import SegmentChain
from router.tokens.incremental import NewSegment, PromptBoundaries, Segment, SegmentTree, Walk

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
    marked: Segment


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
                root(f"marked text{suffix}"),
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
