"""All that is known of one Mooncake pool: its objects' layouts, and a directory for each.

What must live here: which objects are which model's, from any source. What must not: HTTP and ZMQ
(router.pool.master), when to ask (router.pool.follower), how ranks make a block (layouts).

A model's layout is learned. A digest does not name its model, so two models with one tokenizer
may share digests; the key's own model field decides between them, digests decide everything else:
prefixes, namespaces, fingerprints.

    one layout                  the directory has the model's name
    several (TP 2 beside TP 4)  a directory for each, named `MODEL@@LAYOUT`: a replica reads that of
                                the blocks that it stored itself, or of the layout configured for it
    several KV groups           a directory for each further group: `...@@group:1`
    several KV data types       keys do not name them (0.32.0): replicas of one layout that differ
                                find objects that they cannot read, and are credited with none

    begin_listing -> listed ... -> reconcile (in slices) -> True      or abandon_listing
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import Final

from msgspec import Struct

from policies.view import CandidateId
from router.contracts import BlockKey
from router.index.hit_length import KvLayout
from router.pool.directory import PoolDirectory
from router.pool.evidence import Assignment, Evidence
from router.pool.groups import hit, least
from router.pool.keys import GroupObjects, KeyPattern, PatternTable
from router.pool.layouts import GroupLayout, Layout, layouts_of

_NOBODY: Final = Assignment(None, {})
_ANYBODY: Final = CandidateId("")
_WIDE: Final = {"bfloat16", "float16"}  # KV data types that `auto` may stand for
_SAMPLE: Final = 20_000  # blocks of a listing that show which ranks make one (1 ms)


class PoolCounters(Struct):
    """What was learned from which source; read at scrape time."""

    num_stored: int = 0  # blocks, from engines' events
    num_objects: int = 0  # in the last listing
    num_unknown_keys: int = 0  # in the last listing: they name no block
    num_unclaimed: int = 0  # blocks in the last listing that belong to no model here
    num_events: int = 0  # of the master's stream
    num_listings: int = 0
    num_restarts: int = 0
    num_emptied: int = 0  # times that an engine had everything removed
    num_on_disk: int = 0  # blocks that turned out to be on SSD only
    num_corrections: int = 0  # blocks that verification found to be otherwise


class PoolCatalog:
    """The pool as this router knows it.

    `is_up`: the directories count: the master answers, and has not restarted since they were read.
    """

    __slots__ = (
        "_assigned",
        "_evidence",
        "_is_listing",
        "_kv_dtypes",
        "_layouts",
        "_max_blocks",
        "_models",
        "_names",
        "_reconciling",
        "_table",
        "allocated_bytes",
        "bytes_per_object",
        "capacity_bytes",
        "counters",
        "directories",
        "holds_all_known",
        "is_up",
        "layouts",
        "listed_s",
        "mixed",
        "reason",
        "wants_listing",
    )

    def __init__(self, *, max_blocks: int = 4_000_000) -> None:
        self._max_blocks = max_blocks
        self._table = PatternTable()
        self._models: dict[str, None] = {}
        self._evidence = Evidence()
        self._layouts: dict[KeyPattern, list[Layout]] = {}  # as last seen
        self._assigned: dict[str, Assignment] = {}
        self._names: dict[str, dict[str, str]] = {}  # model -> layout -> directory, if several
        self._kv_dtypes: dict[str, dict[str, str]] = {}  # model -> replica -> of its KV cache
        self._is_listing = False
        self._reconciling: Iterator[int] | None = None
        self.directories: dict[str, PoolDirectory] = {}
        self.layouts: dict[str, GroupLayout] = {}  # directory -> what makes its blocks
        self.mixed: dict[str, tuple[str, ...]] = {}
        """Directory to the KV data types of its replicas, where they differ."""
        self.bytes_per_object: float | None = None  # this and the next two: the master's figures
        self.allocated_bytes: int | None = None
        self.capacity_bytes: int | None = None
        self.listed_s: float | None = None  # when the last listing was complete
        self.holds_all_known = False
        """Nothing of what is known to be there was lost since, nor evicted ever; there is room."""
        self.counters = PoolCounters()
        self.is_up = False
        self.reason = "not asked yet"
        self.wants_listing = True

    # -- questions ---------------------------------------------------------------------------

    def directory(self, name: str) -> PoolDirectory:
        """Return a directory by its name, a base model's; a new one knows nothing yet."""
        directory = self.directories.get(name)
        if directory is None:
            directory = PoolDirectory(max_blocks=self._max_blocks)
            if self._is_listing:
                directory.begin_listing()
            self.directories[name] = directory
        return directory

    def directory_of(self, model: str, candidate: CandidateId) -> str | None:
        """Name the directory of the blocks that a candidate can read; None: not known."""
        names = self._names.get(model)
        if names is None:  # it has one layout
            return model
        assigned = self._assigned[model]
        own = assigned.own
        at = candidate if candidate in own else CandidateId(candidate.partition("#")[0])
        layout = own.get(at, assigned.default)
        return names[layout.text] if layout is not None else None

    def directories_of(self, model: str, replica: str) -> set[str]:
        """Name the directories that a replica's candidates can read; empty: not known."""
        own = self._assigned[model].own if model in self._assigned else {}
        ids = [each for each in own if each.partition("#")[0] == replica]
        names = {self.directory_of(model, each) for each in ids or [CandidateId(replica)]}
        return {name for name in names if name is not None}

    def match(self, name: str, chain: Sequence[BlockKey], groups: KvLayout | None = None) -> int:
        """Count the leading blocks of `chain` in a directory; 0 while the pool is not up.

        `groups`: the model's KV groups, where it has several. Where the pool has several and this
        is not known, every group must have a block: never more than an engine finds.
        """
        directory = self.directories.get(name)
        if not self.is_up or directory is None:
            return 0
        layout = self.layouts.get(name)
        if groups is None and (layout is None or not layout.further):
            return directory.match(chain)
        if layout is None:
            return 0
        by_group = {layout.group.number: directory}
        for number in layout.further:
            by_group[number] = self.directory(_group_name(name, number))
        return least(by_group, chain) if groups is None else hit(groups, by_group, chain)

    def on_disk(self, name: str, chain: Sequence[BlockKey]) -> Sequence[int]:
        """List the positions of blocks that were last seen on SSD only."""
        directory = self.directories.get(name)
        return directory.on_disk(chain) if directory is not None else ()

    def names(self, name: str, digest: bytes) -> list[str]:
        """Name the objects that make a block of a directory; empty: its layout is not known."""
        layout = self.layouts.get(name)
        return layout.names(digest) if layout is not None else []

    @property
    def lacks_patterns(self) -> bool:
        """Whether there is a model with blocks in the pool whose objects cannot be named yet."""
        return any(
            len(directory) and name not in self.layouts
            for name, directory in self.directories.items()
        )

    def bytes_per_block(self, name: str) -> float | None:
        """Return the bytes of a directory's block; the mean of all models in the pool."""
        layout = self.layouts.get(name)
        if self.bytes_per_object is None or layout is None:
            return None
        return self.bytes_per_object * layout.num_ranks

    # -- from engines and prompts ------------------------------------------------------------

    def add_model(
        self,
        model: str,
        hints: Collection[str],
        *,
        replica: str = "",
        layout: str | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        """Serve a base model, whose objects' model field may be one of `hints`.

        Args:
            model: Its name.
            hints: What keys may call it.
            replica: One that serves it.
            layout: Of that replica, or some fields of the layout's name; None: to be found out.
            kv_dtype: Of its KV cache; None: it does not say.
        """
        self.remove_replica(replica)
        self._models[model] = None
        self._evidence.add_model(model, hints, replica=replica, layout=layout)
        self.directory(model)
        if kv_dtype is not None:
            self._kv_dtypes.setdefault(model, {})[replica] = kv_dtype
        self._find_mixed()

    def remove_replica(self, replica: str) -> None:
        """Let go of a replica that is not there any more."""
        for dtypes in self._kv_dtypes.values():
            dtypes.pop(replica, None)
        self._find_mixed()

    def forget(self, candidate: CandidateId) -> None:
        """Forget which layout a candidate has: it is another process now."""
        self._evidence.forget(candidate)

    def stored(
        self, model: str, keys: Sequence[BlockKey], *, candidate: CandidateId = _ANYBODY
    ) -> None:
        """Note whole blocks that an engine of the model stored."""
        name = self.directory_of(model, candidate)
        layout = self.layouts.get(name or "")
        if layout is not None and layout.further:
            self.wants_listing = True  # what it stored of other groups, it does not say
        elif name is not None:
            self.directory(name).stored(keys)
        self.counters.num_stored += len(keys)
        is_news = self._evidence.stored(model, keys, candidate)
        self._want_names(model, keys)
        if layout is None or (is_news and candidate):
            self.wants_listing = True

    def named(self, model: str, keys: Sequence[BlockKey]) -> None:
        """Note that these keys are the model's, wherever the blocks are: a prompt's chain."""
        self._evidence.named(model, keys)
        self._want_names(model, keys)

    def verified(
        self,
        name: str,
        present: Collection[BlockKey],
        missing: Collection[BlockKey],
        on_disk: Collection[BlockKey] = (),
    ) -> int:
        """Note the master's answer about blocks; return how many were thought to be otherwise."""
        directory = self.directory(name)
        num_new = sum(key not in directory for key in (*present, *on_disk))
        directory.stored(present)
        num_gone = directory.removed(missing)
        self.counters.num_on_disk += directory.stored_on_disk(on_disk) if on_disk else 0
        self.counters.num_corrections += num_new + num_gone
        if num_gone:
            self.wants_listing = True  # where one was evicted, others were
        return num_new + num_gone

    def fill(self, name: str, chain: Sequence[BlockKey], asked: Sequence[int]) -> None:
        """Take blocks between two that were asked about to be on SSD where both are.

        The master evicts what was not used for longest, so whole stretches of a prompt.
        """
        on_disk = set(self.on_disk(name, chain))
        for before, behind in pairwise(asked) if on_disk else ():
            if behind - before > 1 and before in on_disk and behind in on_disk:
                between = chain[before + 1 : behind]
                self.counters.num_on_disk += self.directory(name).stored_on_disk(between)

    # -- from the master ---------------------------------------------------------------------

    def found(self) -> None:
        """Note that the master answers, and is still the same process."""
        self.is_up = True
        self.reason = ""

    def lost(self, reason: str) -> None:
        """Note that the master does not answer: engines will find nothing there either."""
        self.is_up = False
        self.reason = reason
        self.holds_all_known = False
        self.wants_listing = True

    def restarted(self) -> None:
        """Note that the master restarted, with an empty pool."""
        self.counters.num_restarts += 1
        self._layouts = {}
        self._clear()

    def emptied(self) -> None:
        """Note that all objects were removed, at an engine's word."""
        self.counters.num_emptied += 1
        self._clear()

    def _clear(self) -> None:
        self.wants_listing = True
        for directory in self.directories.values():
            directory.clear()
        for pattern in self._table.patterns:
            pattern.begin_listing()

    def object_stored(self, key: str) -> None:
        """Note an object that was stored, from the master's event stream."""
        self.counters.num_events += 1
        found = self._table.parse(key)
        if found is None:
            return
        group, bit, block = found
        claimants = self._claimants(group)
        if not claimants:
            self.wants_listing = self.wants_listing or not group.blocks
        self._place(group, block, _bits(group, block, claimants) | bit, claimants)

    def object_removed(self, key: str) -> None:
        """Note an object that was removed: its block is no longer whole."""
        self.counters.num_events += 1
        found = self._table.parse(key)
        if found is None:
            return
        group, bit, block = found
        claimants = self._claimants(group)
        self._place(group, block, _bits(group, block, claimants) & ~bit, claimants)

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
            blocks = found.group.blocks
            blocks[found.block] = blocks.get(found.block, 0) | found.bit

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

    def _want_names(self, model: str, keys: Sequence[BlockKey]) -> None:
        """Want a listing where unclaimed objects turn out to be the model's."""
        if model not in self.layouts and any(
            key in group.blocks for group in self._groups() for key in keys[:1]
        ):
            self.wants_listing = True

    def _reconcile(self, max_blocks: int) -> Iterator[int]:
        """Confirm whole blocks, slice by slice, then drop what was not confirmed."""
        for pattern in self._table.patterns:
            seen = {
                number: Counter(islice(group.blocks.values(), _SAMPLE))
                for number, group in pattern.groups.items()
                if group.blocks
            }
            if seen:
                self._layouts[pattern] = layouts_of(pattern, seen, self._layouts.get(pattern, ()))
        self._assign()
        num_unclaimed = 0
        for group in self._groups():
            claimants = self._claimants(group)
            if not claimants:
                num_unclaimed += len(group.blocks)
                continue
            blocks, group.blocks = group.blocks, {}
            items = iter(blocks.items())
            while some_items := list(islice(items, max_blocks)):
                rest = dict(some_items)
                for directory, layout in claimants:
                    whole = [block for block, bits in some_items if layout.is_whole(bits)]
                    directory.listed(whole)
                    for block in whole:
                        rest.pop(block, None)
                group.blocks.update(rest)
                yield len(some_items)
        self._is_listing = False
        for name, directory in list(self.directories.items()):
            if num_unclaimed and name in self._models and not self._assigned[name].in_use:
                directory.abandon_listing()  # its objects may be among the unclaimed
                continue
            while directory.sweep(max_blocks):
                yield max_blocks
        self.counters.num_unclaimed = num_unclaimed
        self.counters.num_listings += 1

    @property
    def clashing(self) -> tuple[str, ...]:
        """Names of layouts in use whose blocks have objects of the same names, in order.

        An engine of one finds objects of another that it cannot read.
        """
        texts: dict[GroupObjects, dict[str, int]] = {}
        for layout in self.layouts.values():
            texts.setdefault(layout.group, {})[layout.text] = layout.required
        return tuple(
            sorted(
                text
                for by_text in texts.values()
                for text, bits in by_text.items()
                if any(bits & others for other, others in by_text.items() if other != text)
            )
        )

    def _assign(self) -> None:
        """Find each model's layouts, and name a directory for each."""
        layouts = [layout for found in self._layouts.values() for layout in found]
        self._names = {}
        self.layouts = {}
        for model in self._models:
            assigned = self._evidence.assign(model, layouts, self._assigned.get(model, _NOBODY))
            self._assigned[model] = assigned
            in_use = assigned.in_use
            is_one = len(in_use) == 1
            names = {at.text: model if is_one else f"{model}@@{at.text}" for at in in_use}
            if len(in_use) > 1 or None in assigned.own.values():
                self._names[model] = names
            for layout in in_use:
                name = names[layout.text]
                for number, group in layout.groups.items():
                    is_main = group is layout.main
                    known_as = name if is_main else _group_name(name, number)
                    self.layouts[known_as] = group
                    self.directory(known_as)
        self._find_mixed()

    def _find_mixed(self) -> None:
        """Find the directories that replicas of several KV data types would share."""
        found: dict[str, set[str]] = {}
        for model, dtypes in self._kv_dtypes.items():
            for replica, dtype in dtypes.items():
                for name in self.directories_of(model, replica):
                    found.setdefault(name, set()).add(dtype)
        self.mixed = {name: tuple(sorted(each)) for name, each in found.items() if _differ(each)}

    def _place(
        self,
        group: GroupObjects,
        block: BlockKey,
        bits: int,
        claimants: Sequence[tuple[PoolDirectory, GroupLayout]],
    ) -> None:
        """Put a block where it belongs, now that these ranks have it."""
        is_claimed = False
        for directory, layout in claimants:
            if layout.is_whole(bits):
                is_claimed = True
                if block not in directory:
                    directory.stored((block,))
            elif block in directory:
                directory.removed((block,))
        group.blocks.pop(block, None)
        if bits and not is_claimed and len(group.blocks) < self._max_blocks:
            group.blocks[block] = bits

    def _groups(self) -> Iterator[GroupObjects]:
        """List the objects of every pattern and KV group."""
        for pattern in self._table.patterns:
            yield from pattern.groups.values()

    def _claimants(self, group: GroupObjects) -> list[tuple[PoolDirectory, GroupLayout]]:
        """List the directories that blocks of these objects go to."""
        return [
            (self.directories[name], layout)
            for name, layout in self.layouts.items()
            if layout.group is group
        ]


def _differ(dtypes: Collection[str]) -> bool:
    """Return whether KV caches of these cannot be one another's; `auto` may be 16 bits wide."""
    named = set(dtypes) - {"auto"}
    return len(named) > 1 or (len(dtypes) > 1 and not named <= _WIDE)


def _group_name(name: str, group: int) -> str:
    return f"{name}@@group:{group}"


def _bits(
    group: GroupObjects, block: BlockKey, claimants: Sequence[tuple[PoolDirectory, GroupLayout]]
) -> int:
    """Return which ranks have a block, those of the directories that it is in among them."""
    bits = group.blocks.get(block, 0)
    for directory, layout in claimants:
        if block in directory:
            bits |= layout.required
    return bits
