"""Whose objects are whose: what shows which layouts a model has, and which one a replica.

    configured            for the replica, see `replicas[].pool_layout`: nothing else counts
    what it stored        an engine's events name blocks; that of most of them is its own
    the only one          of its model, where it has stored nothing that is there
    what prompts have     blocks of the model's prompts, or its name in the keys: only where a
                          single layout comes into question

What can be seen of a replica over HTTP does not say how its blocks are cut.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from msgspec import Struct

from policies.view import CandidateId
from router.contracts import BlockKey
from router.pool.layouts import Layout, only_largest

_MAX_BLOCKS: Final = 4096  # of a model
_MAX_OWN: Final = 256  # that a candidate stored
_MIN_PART: Final = 8  # blocks that show a layout whose ranks another one's include, and their share
_MIN_PART_SHARE: Final = 0.9
_SAMPLE: Final = 8  # blocks of an event or a prompt that become evidence

_Blocks = OrderedDict[BlockKey, None]


class Assignment(Struct, frozen=True):
    """Which layouts of a model are in use, and by whom.

    `default` is that of candidates that are not in `own`; None: not known.
    """

    default: Layout | None
    own: Mapping[CandidateId, Layout | None]

    @property
    def in_use(self) -> list[Layout]:
        """List the layouts, each once, by name."""
        found = {layout.text: layout for layout in self.own.values() if layout is not None}
        if self.default is not None:
            found[self.default.text] = self.default
        return [found[text] for text in sorted(found)]


class Evidence:
    """What is remembered of each model's blocks, and of who stored them."""

    __slots__ = ("_blocks", "_configured", "_hints", "_own")

    def __init__(self) -> None:
        self._hints: dict[str, frozenset[str]] = {}
        self._configured: dict[str, tuple[str, str]] = {}  # replica -> its model, and its layout
        self._blocks: dict[str, _Blocks] = {}
        self._own: dict[str, dict[CandidateId, _Blocks]] = {}

    def add_model(
        self, model: str, hints: Collection[str], *, replica: str = "", layout: str | None = None
    ) -> None:
        """Note what the keys of a model may call it, and what is configured for a replica."""
        self._hints[model] = self._hints.get(model, frozenset()) | frozenset(filter(None, hints))
        self._configured.pop(replica, None)
        if layout is not None:
            self._configured[replica] = model, layout

    def named(self, model: str, keys: Sequence[BlockKey]) -> None:
        """Note that these are a model's, wherever they are."""
        _remember(self._blocks.setdefault(model, OrderedDict()), keys, _MAX_BLOCKS)

    def stored(self, model: str, keys: Sequence[BlockKey], candidate: CandidateId) -> bool:
        """Note blocks that a candidate stored; return whether a listing may now show its layout.

        Its first ones may do, and as many as show one whose ranks another one's include.
        """
        self.named(model, keys)
        own = self._own.setdefault(model, {}).setdefault(candidate, OrderedDict())
        num_before = len(own)
        _remember(own, keys, _MAX_OWN)
        return num_before == 0 or num_before < _MIN_PART <= len(own)

    def forget(self, candidate: CandidateId) -> None:
        """Forget what a candidate stored: it is another process now, or none."""
        for own in self._own.values():
            own.pop(candidate, None)

    def assign(self, model: str, layouts: Sequence[Layout], before: Assignment) -> Assignment:
        """Say which of the pool's layouts are a model's; what it had while nothing is there."""
        hints = self._hints.get(model, frozenset())
        named = [layout for layout in layouts if layout.pattern.matches(hints)]
        own: dict[CandidateId, Layout | None] = {}
        for candidate, blocks in self._own.get(model, {}).items():
            most = _most(blocks, named) or _most(blocks, layouts) or before.own.get(candidate)
            if most is not None:
                own[candidate] = most
        for replica, (its_model, wanted) in self._configured.items():
            if its_model == model:
                own[CandidateId(replica)] = _only(
                    [layout for layout in named or layouts if layout.fits(wanted)]
                ) or before.own.get(CandidateId(replica))
        stored = {layout.text: layout for layout in own.values() if layout is not None}
        if stored:
            return Assignment(_only(list(stored.values())), own)
        blocks = self._blocks.get(model, OrderedDict())
        likely = (
            [layout for layout in named if _most(blocks, [layout])]
            or [layout for layout in layouts if _most(blocks, [layout])]
            or ([] if before.default is not None else [at for at in named if _has_blocks(at)])
        )
        return Assignment(_largest(likely) if likely else before.default, own)


def _remember(blocks: _Blocks, keys: Sequence[BlockKey], limit: int) -> None:
    for key in keys[:: max(1, len(keys) // _SAMPLE)]:
        blocks[key] = None
        blocks.move_to_end(key)
    while len(blocks) > limit:
        blocks.popitem(last=False)


def _most(blocks: Collection[BlockKey], layouts: Sequence[Layout]) -> Layout | None:
    """Return the layout that has most of these blocks; None: it is not clear, or none has any.

    Blocks that several layouts have say nothing. Blocks that lost an object may look like those of
    a layout of fewer ranks, so that one has to have many of them, and nearly all.
    """
    votes, held = Counter[int](), Counter[int]()
    for key in blocks:
        having = []
        for at, layout in enumerate(layouts):
            bits = layout.main.group.blocks.get(key)
            if bits is not None:
                held[at] += 1
                if layout.main.is_whole(bits):
                    having.append(at)
        votes.update(having if len(having) == 1 else ())
    parts = [
        at
        for at, number in votes.items()
        if layouts[at].main.is_exact and number >= max(_MIN_PART, _MIN_PART_SHARE * held[at])
    ]
    found = parts or [at for at in votes if not layouts[at].main.is_exact]
    return layouts[max(found, key=lambda at: (votes[at], -at))] if found else None


def _only(layouts: Sequence[Layout]) -> Layout | None:
    return layouts[0] if len(layouts) == 1 else None


def _largest(layouts: Sequence[Layout]) -> Layout | None:
    """Return the one of a single pattern whose ranks include the others'; None: it is not clear."""
    is_one = len({id(layout.pattern) for layout in layouts}) == 1
    return only_largest(layouts) if is_one else None


def _has_blocks(layout: Layout) -> bool:
    return bool(layout.main.group.blocks)
