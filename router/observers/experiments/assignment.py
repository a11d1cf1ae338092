"""Which variant a request belongs to: a pure function of the definition, the request and the time.

By session (`split`), a session is a point on a line of a million points, drawn by a hash that is
salted with the experiment's name. The variants' shares follow each other on the line. By time slot
(`switchback`), slots are numbered from the unix epoch. So every router assigns the same without
asking, and a session keeps its variant.

Slots of variants with equal shares are drawn in permuted blocks: each k slots in a row have each of
k variants once, in random order. So the hour of the day cancels when two slots of a block are
compared.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from itertools import accumulate
from math import floor
from typing import Final

import msgspec
from msgspec.structs import replace

from policies.hashing import draw, mix, text_hash
from router.config.experiments import UNIT, Experiment, VariantQueue
from router.records.record import AssignmentRecord
from router.request.results import Variant

_MASK: Final = (1 << 64) - 1


class Trial:
    """One run of an experiment: a definition, from a moment on.

    id: Of the definition, so it is the same on all routers that read the same file.

    Args:
        definition: A checked one.
        started_s: Unix time.
    """

    __slots__ = ("_blocks", "_ends", "_salt", "_shares", "_slot", "_variants", "definition", "id",
                 "started_s")  # fmt: skip

    def __init__(self, definition: Experiment, started_s: float) -> None:
        self.definition = definition
        self.started_s = started_s
        packed = msgspec.json.encode(definition, order="sorted")
        self.id = hashlib.blake2b(packed, digest_size=8).hexdigest()
        self._variants = [(each.name, *each.made()) for each in definition.variants]
        self._shares = list(definition.shares().values())
        points = [round(share * UNIT) for share in self._shares]
        self._ends = list(accumulate(points))
        drawn = [index for index, num in enumerate(points) if num]
        is_equal = len({points[index] for index in drawn}) == 1
        is_whole = UNIT - self._ends[-1] < len(drawn)
        self._blocks = drawn if is_equal and is_whole else []
        self._salt = text_hash(definition.name)
        self._slot: tuple[int, Variant | None, float] | None = None  # cache of the last slot

    def assign(self, model: str, digest: int | None, at_s: float) -> Variant | None:
        """Assign a request; None: the router's own policy places it, as without an experiment.

        Args:
            digest: Of its session, 64 bits at most; None: it has none.
            at_s: Unix time.
        """
        models = self.definition.models
        if at_s < self.started_s or (models and model not in models):
            return None
        if self.definition.design == "split":
            return None if digest is None else self._of_session(digest)
        slot = floor(at_s / self.definition.slot_s)
        if self._slot is None or self._slot[0] != slot:
            self._slot = slot, *self._of_slot(slot)
        _, variant, wash_out_until_s = self._slot
        if variant is None or at_s >= wash_out_until_s:
            return variant
        return replace(variant, record=replace(variant.record, not_counted="wash_out"))

    def variant_of_slot(self, slot: int) -> str | None:
        """Name the variant that has a time slot; None: none."""
        owner = self._owner_of_slot(slot)
        return None if owner is None else self._variants[owner][0]

    def _of_session(self, digest: int) -> Variant | None:
        owner = self._owner(mix(self._salt ^ digest) * UNIT >> 64)
        return None if owner is None else self._assigned(owner, f"{digest:016x}")

    def _of_slot(self, slot: int) -> tuple[Variant | None, float]:
        """Return a slot's variant, and the end of its wash-out."""
        begin_s = max(slot * self.definition.slot_s, self.started_s)
        owner = self._owner_of_slot(slot)
        is_change = begin_s == self.started_s or self._owner_of_slot(slot - 1) != owner
        until_s = begin_s + self.definition.wash_out if is_change else begin_s
        return None if owner is None else self._assigned(owner, str(slot), slot), until_s

    def _owner_of_slot(self, slot: int) -> int | None:
        if self._blocks:
            return self._blocks[place_in_block(slot, len(self._blocks), self._salt)]
        return self._owner(mix(mix(self._salt ^ 1) ^ (slot & _MASK)) * UNIT >> 64)

    def _owner(self, point: int) -> int | None:
        """Return the variant at a point of the line; None: none."""
        owner = bisect_right(self._ends, point)
        return owner if owner < len(self._ends) else None

    def _assigned(self, owner: int, unit: str, slot: int | None = None) -> Variant:
        name, policy, queue = self._variants[owner]
        queue = queue or VariantQueue()
        return Variant(
            policy=policy,
            waits=queue.mode == "on" if queue.mode is not None else None,
            fill=queue.fill,
            record=AssignmentRecord(
                experiment=self.definition.name,
                design=self.definition.design,
                arm=name,
                unit=unit,
                share=self._shares[owner],
                slot=slot,
                control=self._variants[0][0],
                trial=self.id,
            ),
        )


def place_in_block(slot: int, size: int, seed: int) -> int:
    """Draw a slot's place in the order of its block (Fisher-Yates shuffle)."""
    block, index = divmod(slot, size)
    places = list(range(size))
    for last in range(size - 1, 0, -1):
        other = draw(seed, block, last) * (last + 1) >> 64
        places[last], places[other] = places[other], places[last]
    return places[index]
