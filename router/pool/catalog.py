"""All that is known of one Mooncake pool: its objects' key patterns, and a directory per model.

What must live here: which objects are which model's, from any source. What must not: HTTP and ZMQ
(router.pool.master), when to ask (router.pool.follower).

A model's pattern is learned. A digest does not name its model, so two models with one tokenizer
may share digests; the key's own model field decides between them, digests decide everything else:
prefixes, namespaces, fingerprints, groups.

    begin_listing -> listed ... -> reconcile (in slices) -> True      or abandon_listing
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from msgspec import Struct

from router.contracts import BlockKey
from router.pool.directory import PoolDirectory
from router.pool.keys import KeyPattern, PatternTable

_MAX_EVIDENCE: Final = 4096  # blocks of a model that are remembered to know its objects by
_SAMPLE: Final = 8  # blocks of an event or a prompt that become evidence


class PoolCounters(Struct):
    """What was learned from which source; read at scrape time."""

    num_stored: int = 0  # blocks, from engines' events
    num_objects: int = 0  # in the last listing
    num_unknown_keys: int = 0  # in the last listing: they name no block
    num_unclaimed: int = 0  # blocks in the last listing that belong to no model here
    num_events: int = 0  # of the master's stream
    num_listings: int = 0
    num_restarts: int = 0
    num_corrections: int = 0  # blocks that verification found to be otherwise


class PoolCatalog:
    """The pool as this router knows it.

    `is_up`: the directories count: the master answers, and has not restarted since they were read.
    """

    __slots__ = (
        "_evidence",
        "_hints",
        "_is_listing",
        "_max_blocks",
        "_reconciling",
        "_table",
        "allocated_bytes",
        "bytes_per_object",
        "capacity_bytes",
        "counters",
        "directories",
        "is_up",
        "listed_s",
        "patterns",
        "quiet_s",
        "reason",
        "wants_listing",
    )

    def __init__(self, *, max_blocks: int = 4_000_000) -> None:
        self._max_blocks = max_blocks
        self._table = PatternTable()
        self._hints: dict[str, frozenset[str]] = {}
        self._evidence: dict[str, OrderedDict[BlockKey, None]] = {}
        self._is_listing = False
        self._reconciling: Iterator[int] | None = None
        self.directories: dict[str, PoolDirectory] = {}
        self.patterns: dict[str, KeyPattern] = {}  # model -> what its objects' keys look like
        self.bytes_per_object: float | None = None  # this and the next two: the master's figures
        self.allocated_bytes: int | None = None
        self.capacity_bytes: int | None = None
        self.listed_s: float | None = None  # when the last listing was complete
        self.quiet_s: float | None = None  # nothing was evicted since; None: not known
        self.counters = PoolCounters()
        self.is_up = False
        self.reason = "not asked yet"
        self.wants_listing = True

    # -- questions ---------------------------------------------------------------------------

    def directory(self, model: str) -> PoolDirectory:
        """Return the directory of a base model; a new one knows nothing yet."""
        directory = self.directories.get(model)
        if directory is None:
            directory = PoolDirectory(max_blocks=self._max_blocks)
            if self._is_listing:
                directory.begin_listing()
            self.directories[model] = directory
        return directory

    def match(self, model: str, chain: Sequence[BlockKey]) -> int:
        """Count the leading blocks of `chain` in the pool; 0 while it is not up."""
        directory = self.directories.get(model)
        return directory.match(chain) if self.is_up and directory is not None else 0

    def names(self, model: str, digest: bytes) -> list[str]:
        """Name the objects that make a block of a model; empty: its pattern is not known."""
        pattern = self.patterns.get(model)
        return pattern.names(digest) if pattern is not None else []

    @property
    def lacks_patterns(self) -> bool:
        """Whether there is a model with blocks in the pool whose objects cannot be named yet."""
        return any(
            len(directory) and model not in self.patterns
            for model, directory in self.directories.items()
        )

    def bytes_per_block(self, model: str) -> float | None:
        """Return the bytes of a model's block; the mean of all models in the pool."""
        pattern = self.patterns.get(model)
        if self.bytes_per_object is None or pattern is None:
            return None
        return self.bytes_per_object * pattern.num_ranks

    # -- from engines and prompts ------------------------------------------------------------

    def add_model(self, model: str, hints: Collection[str]) -> None:
        """Serve a base model, whose objects' model field may be one of `hints`."""
        self._hints[model] = self._hints.get(model, frozenset()) | frozenset(filter(None, hints))
        self.directory(model)

    def stored(self, model: str, keys: Sequence[BlockKey]) -> None:
        """Note whole blocks that an engine of the model stored."""
        self.directory(model).stored(keys)
        self.counters.num_stored += len(keys)
        self.named(model, keys)
        if model not in self.patterns:
            self.wants_listing = True

    def named(self, model: str, keys: Sequence[BlockKey]) -> None:
        """Note that these keys are the model's, wherever the blocks are: a prompt's chain."""
        evidence = self._evidence.setdefault(model, OrderedDict())
        for key in keys[:: max(1, len(keys) // _SAMPLE)]:
            evidence[key] = None
            evidence.move_to_end(key)
        while len(evidence) > _MAX_EVIDENCE:
            evidence.popitem(last=False)
        if model not in self.patterns and any(
            key in pattern.blocks for pattern in self._table.patterns for key in keys[:1]
        ):
            self.wants_listing = True

    def verified(
        self, model: str, present: Collection[BlockKey], missing: Collection[BlockKey]
    ) -> int:
        """Note the master's answer about blocks; return how many were thought to be otherwise."""
        directory = self.directory(model)
        num_new = sum(key not in directory for key in present)
        directory.stored(present)
        num_gone = directory.removed(missing)
        self.counters.num_corrections += num_new + num_gone
        if num_gone:
            self.wants_listing = True  # where one was evicted, others were
        return num_new + num_gone

    # -- from the master ---------------------------------------------------------------------

    def found(self) -> None:
        """Note that the master answers, and is still the same process."""
        self.is_up = True
        self.reason = ""

    def lost(self, reason: str) -> None:
        """Note that the master does not answer: engines will find nothing there either."""
        self.is_up = False
        self.reason = reason
        self.quiet_s = None
        self.wants_listing = True

    def restarted(self) -> None:
        """Note that the master restarted, with an empty pool."""
        self.counters.num_restarts += 1
        self.wants_listing = True
        for directory in self.directories.values():
            directory.clear()
        for pattern in self._table.patterns:
            pattern.blocks = {}

    def object_stored(self, key: str) -> None:
        """Note an object that was stored, from the master's event stream."""
        self.counters.num_events += 1
        found = self._table.parse(key)
        if found is None:
            return
        pattern, bit, block = found
        directories = self._claimants(pattern)
        if not directories:
            self.wants_listing = self.wants_listing or not pattern.blocks
        elif any(block in directory for directory in directories):
            return
        bits = pattern.blocks.get(block, 0) | bit
        if directories and pattern.is_whole(bits):
            pattern.blocks.pop(block, None)
            for directory in directories:
                directory.stored((block,))
        elif len(pattern.blocks) < self._max_blocks:
            pattern.blocks[block] = bits

    def object_removed(self, key: str) -> None:
        """Note an object that was removed: its block is no longer whole."""
        self.counters.num_events += 1
        found = self._table.parse(key)
        if found is None:
            return
        pattern, bit, block = found
        bits = pattern.blocks.pop(block, 0)
        for directory in self._claimants(pattern):
            if directory.removed((block,)):
                bits = pattern.all_bits
        if bits & ~bit:
            pattern.blocks[block] = bits & ~bit

    # -- listings ----------------------------------------------------------------------------

    def begin_listing(self) -> None:
        """Begin a listing; events go on meanwhile."""
        self._is_listing = True
        self._reconciling = None
        self.wants_listing = False
        self.counters.num_objects = self.counters.num_unknown_keys = 0
        for directory in self.directories.values():
            directory.begin_listing()
        for pattern in self._table.patterns:
            pattern.begin_listing()

    def listed(self, keys: Iterable[str]) -> None:
        """Add some lines of the listing (0.9 us a key)."""
        parse, counters = self._table.parse, self.counters
        for key in keys:
            counters.num_objects += 1
            found = parse(key)
            if found is None:
                counters.num_unknown_keys += 1
                continue
            pattern, bit, block = found
            pattern.count(bit)
            pattern.blocks[block] = pattern.blocks.get(block, 0) | bit

    def reconcile(self, max_blocks: int) -> bool:
        """After the last line: apply a slice of it; return whether there is more."""
        if self._reconciling is None:
            self._reconciling = self._reconcile(max_blocks)
        if next(self._reconciling, None) is not None:
            return True
        self._reconciling = None
        return False

    def abandon_listing(self) -> None:
        """Give a listing up: what it did not reach stays as it is."""
        self._is_listing = False
        self._reconciling = None
        self.wants_listing = True
        for directory in self.directories.values():
            directory.abandon_listing()

    # -- inside ------------------------------------------------------------------------------

    def _reconcile(self, max_blocks: int) -> Iterator[int]:
        """Confirm whole blocks, slice by slice, then drop what was not confirmed."""
        for pattern in self._table.patterns:
            pattern.infer_ranks()
        self.patterns = self._claims()
        num_unclaimed = 0
        for pattern in self._table.patterns:
            directories = self._claimants(pattern)
            if not directories:
                num_unclaimed += len(pattern.blocks)
                continue
            blocks, pattern.blocks = pattern.blocks, {}
            items = iter(blocks.items())
            while some := list(islice(items, max_blocks)):
                whole = [block for block, bits in some if pattern.is_whole(bits)]
                for directory in directories:
                    directory.listed(whole)
                if len(whole) < len(some):
                    pattern.blocks.update(
                        (block, bits) for block, bits in some if not pattern.is_whole(bits)
                    )
                yield len(some)
        self._is_listing = False
        for model, directory in list(self.directories.items()):
            if num_unclaimed and model not in self.patterns:
                directory.abandon_listing()  # its objects may be among the unclaimed
                continue
            while directory.sweep(max_blocks):
                yield max_blocks
        self.counters.num_unclaimed = num_unclaimed
        self.counters.num_listings += 1

    def _claims(self) -> dict[str, KeyPattern]:
        """Find each model's pattern: by its blocks' keys, else by its own name."""
        return {
            model: best
            for model in self.directories
            if (best := self._best_pattern(model)) is not None
        }

    def _best_pattern(self, model: str) -> KeyPattern | None:
        evidence = self._evidence.get(model, ())
        hints = self._hints.get(model, frozenset())
        scored: list[tuple[bool, int, int, KeyPattern]] = []
        for pattern in self._table.patterns:
            num_known = sum(key in pattern.blocks for key in evidence)
            scored.append((pattern.matches(hints), num_known, len(pattern.blocks), pattern))
        proven = [entry for entry in scored if entry[1]]
        named = [entry for entry in scored if entry[0] and entry[2]]
        if proven:
            return max(proven, key=lambda entry: entry[:3])[3]
        if model in self.patterns:  # it has no blocks there now: its pattern stays
            return self.patterns[model]
        return named[0][3] if len(named) == 1 else None

    def _claimants(self, pattern: KeyPattern) -> list[PoolDirectory]:
        """List the directories of the models whose objects have this pattern."""
        return [
            self.directories[model] for model, theirs in self.patterns.items() if theirs is pattern
        ]
