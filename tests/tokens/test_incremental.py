"""The tree of segments: what it finds again, what it forgets, what it counts."""

from __future__ import annotations

import tracemalloc
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.openai import TokenIds
from router.base.contracts import NO_EXTRA, Algorithm, ExtraKeys, HashContract
from router.tokens import prompt_tree
from router.tokens.encoder import Framed, FramedEncoder, FramedPrompt
from router.tokens.prompt_tree import MAX_CHAINS, Boundary, Segment, SegmentTree

CONTRACT = HashContract(algorithm="xxhash", block_size=4)


class Every:
    """Boundaries every `step` bytes, each guarded by what the text has there."""

    def __init__(self, data: bytes, step: int = 10, *, guarded: bool = False) -> None:
        self._data, self._step, self._guarded = data, step, guarded

    def after(self, position: int) -> Boundary | None:
        end = position + self._step
        if end > len(self._data):
            return None
        return Boundary(end, self._data[end : end + 1] if self._guarded else b"")


def _add(tree: SegmentTree, root: Segment, data: bytes, **kind: bool) -> tuple[int, list[Segment]]:
    """Put a text in, one token per byte; return how many segments were new, and its path."""
    walk = tree.walk(root, data, Every(data, **kind))
    encoded = [array("I", list(data[new.start : new.end])) for new in walk.new]
    path = tree.commit(walk, encoded)
    assert b"".join(bytes(list(segment.ids)) for segment in path) == data
    return len(walk.new), path


def test_found_again() -> None:
    """A longer text shares what the shorter one had, but for its tail."""
    tree = SegmentTree()
    root = tree.make_root("r")

    assert _add(tree, root, b"a" * 10 + b"b" * 10 + b"cc")[0] == 3
    assert _add(tree, root, b"a" * 10 + b"b" * 10 + b"cc")[0] == 0
    assert _add(tree, root, b"a" * 10 + b"b" * 10 + b"c" * 12)[0] == 2
    assert _add(tree, root, b"a" * 10 + b"x" * 10 + b"cc")[0] == 2
    assert _add(tree, root, b"a" * 10 + b"b" * 10 + b"cc")[0] == 0
    assert len(tree) == 3 + 2 + 2


def test_tails_are_no_segments() -> None:
    """The same bytes as a tail and as a segment are two things: their tokens may differ."""
    tree = SegmentTree()
    root = tree.make_root("r")

    _add(tree, root, b"a" * 9)
    walk = tree.walk(root, b"a" * 9 + b"b", Every(b"a" * 10))

    assert len(walk.new) == 2


def test_roots_are_apart() -> None:
    """Prompts of different kinds share nothing."""
    tree = SegmentTree()

    _add(tree, tree.make_root("r"), b"a" * 25)

    assert _add(tree, tree.make_root("s"), b"a" * 25)[0] == 3


def test_guard() -> None:
    """A segment whose end was a boundary for what followed it is not one before something else."""
    tree = SegmentTree()
    root = tree.make_root("r")
    _add(tree, root, b"a" * 10 + b"<" * 10 + b"c", guarded=True)

    class Elsewhere(Every):
        def after(self, position: int) -> Boundary | None:
            return Boundary(15, b"") if position == 0 else None

    data = b"a" * 10 + b"x" * 10
    walk = tree.walk(root, data, Elsewhere(data))

    assert [(new.start, new.end) for new in walk.new] == [(0, 15), (15, 20)]


def test_least_used_goes_first_and_deepest_first() -> None:
    """Eviction takes whole ends of the prompts not used for longest, never a middle."""
    tree = SegmentTree(max_bytes=10 * prompt_tree.SEGMENT_BYTES)
    root = tree.make_root("r")
    old, new = b"o" * 35, b"n" * 35
    _add(tree, root, old)
    _add(tree, root, new)

    _add(tree, root, b"x" * 35)  # 12 segments of some 540 bytes: three must go

    assert tree.size_bytes <= 10 * prompt_tree.SEGMENT_BYTES
    assert [len(tree.walk(root, data, Every(data)).new) for data in (new, old)] == [0, 3]


def test_evicted_under_a_plan() -> None:
    """A plan that outlived its segments brings them back."""
    tree = SegmentTree(max_bytes=4 * prompt_tree.SEGMENT_BYTES)
    root = tree.make_root("r")
    data = b"a" * 20
    _add(tree, root, data)
    walk = tree.walk(root, data, Every(data))

    _add(tree, root, b"b" * 25)
    path = tree.commit(walk, [])

    assert b"".join(bytes(list(segment.ids)) for segment in path) == data
    assert tree.walk(root, data, Every(data)).new == []
    assert tree.size_bytes == sum(s.size_bytes for s in tree.segments.values())


def test_size_counts_chains() -> None:
    """Chains belong to the budget, dropped ones do not; forgotten segments count for nothing."""
    tree = SegmentTree()
    root = tree.make_root("r")
    _, path = _add(tree, root, b"a" * 45)

    for n in range(2 * MAX_CHAINS):
        tree.keys(path, CONTRACT, ExtraKeys(cache_salt=str(n)))
        assert tree.size_bytes == sum(s.size_bytes for s in tree.segments.values())

    assert all(segment.chains is not None and len(segment.chains) == MAX_CHAINS for segment in path)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_a_long_salt_is_not_kept(algorithm: Algorithm) -> None:
    """A client's own may be as long as a body; thousands were kept."""
    contract = HashContract(algorithm=algorithm, block_size=4)
    tree = SegmentTree()
    _, path = _add(tree, tree.make_root("r"), bytes(range(40)))
    tree.keys(path, contract, ExtraKeys(cache_salt="s"))
    tracemalloc.start()
    try:
        for number in range(20):
            tree.keys(path, contract, ExtraKeys(cache_salt=f"{number}" * 200_000))
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert size_bytes < 200_000


def test_digests_are_those_of_the_whole_chain() -> None:
    """Any blocks, of any segment, hashed once, remembered within the budget and dropped with it."""
    tree = SegmentTree()
    _, path = _add(tree, tree.make_root("r"), bytes(range(100)) * 2)
    whole = CONTRACT.digests(None, list(bytes(range(100)) * 2))
    keys = tree.keys(path, CONTRACT, NO_EXTRA)
    size_bytes = tree.size_bytes

    assert tree.digests(path, CONTRACT, NO_EXTRA, range(len(keys))) == whole
    assert tree.size_bytes == size_bytes + 16 * len(whole)
    assert tree.digests(path, CONTRACT, NO_EXTRA, [0, 7, 8, 49]) == [
        whole[position] for position in (0, 7, 8, 49)
    ]
    assert tree.digests(path, CONTRACT, NO_EXTRA, []) == []
    assert tree.size_bytes == size_bytes + 16 * len(whole)
    for number in range(MAX_CHAINS):
        tree.keys(path, CONTRACT, ExtraKeys(cache_salt=str(number)))
    assert tree.digests(path, CONTRACT, NO_EXTRA, [3]) == whole[3:4]
    recounted = sum(s.size_bytes for s in path[1:])
    assert tree.size_bytes == recounted


def test_digests_after_an_eviction() -> None:
    """A path that was evicted still knows its tokens; the budget does not count it."""
    tree = SegmentTree(max_bytes=1500)
    root = tree.make_root("r")
    _, path = _add(tree, root, b"a" * 40)
    _add(tree, root, b"b" * 40)
    size_bytes = tree.size_bytes

    assert tree.digests(path, CONTRACT, NO_EXTRA, [9]) == [CONTRACT.digests(None, [97] * 40)[9]]
    assert tree.size_bytes == size_bytes


class Spelling(FramedEncoder):
    """Makes a token of each number of a header and of each character."""

    def encode(self, parts: Sequence[Framed]) -> TokenIds:
        return array("I", [n for p in parts for n in (*p.header, *map(ord, "".join(p.texts)))])


PART = st.builds(Framed, st.lists(st.integers(0, 300)), st.lists(st.text() | st.just("x" * 400)))
PROMPTS = st.lists(PART, min_size=1).flatmap(lambda of: st.lists(st.lists(st.sampled_from(of))))


@pytest.mark.hypothesis
@given(PROMPTS)
def test_framed_prompts_are_found_by_their_parts(prompts: list[list[Framed]]) -> None:
    """Prompts that share any parts, whatever the texts are: the ids are those of a whole encode."""
    tree = SegmentTree()
    root = tree.make_root("r")
    for parts in prompts:
        prompt = FramedPrompt(parts, Spelling())
        walk = tree.walk(root, prompt.data, prompt)
        path = tree.commit(walk, prompt.encode(prompt.data, walk.new))
        assert sum((part.ids for part in path), array("I")) == Spelling().encode(parts)
