"""The contents of one Mooncake pool: a directory of blocks for each layout in use.

What must live here: which objects belong to which model, and what each source adds. What must not:
HTTP (router.pool.master), when to ask (router.pool.follower), what makes a block (layouts).

    a model                     the directory has the model's name
    a configured layout         `MODEL@@LAYOUT`, for the replicas with that `pool_layout`
    several KV groups           a directory for each further group: `...@@group:1`

Nothing is credited before a listing has verified the layout, nor while replicas that cannot read
each other's objects use the same names (`unreadable`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final, Literal

from msgspec import Struct

from policies.view import CandidateId
from router.base.contracts import BlockKey
from router.index.hit_length import KvLayout
from router.pool.directory import PoolDirectory, hit, least
from router.pool.layouts import Layout, Listing, collisions, find_layout
from router.pool.master import MasterFigures

SET_LAYOUT: Final = "replicas[].pool_layout: key_pattern of the replica, or some fields of it"
ONE_LAYOUT: Final = (
    '"cache_prefix" for each kind of replica, or the same "store_tp_size" for all, in '
    "kv_connector_extra_config"
)
ONE_TYPE: Final = (
    'one --kv-cache-dtype for all, or a "cache_prefix" for each in kv_connector_extra_config, '
    "named in replicas[].pool_layout"
)
_CANNOT_READ: Final = (
    "so engines find objects that they cannot read, and may try forever; none is credited"
)
_WIDE: Final = {"bfloat16", "float16"}  # KV data types that `auto` may stand for


class PoolCounters(Struct):
    """What was learned from which source; read at scrape time."""

    num_stored: int = 0  # blocks, from engines' events
    num_objects: int = 0  # in the last listing
    num_unknown_keys: int = 0  # in the last listing: they name no block
    num_unclaimed: int = 0  # blocks in the last listing that belong to no model here
    num_listings: int = 0
    num_restarts: int = 0
    num_emptied: int = 0  # times that an engine had everything removed
    num_on_disk: int = 0  # blocks that turned out to be on SSD only
    num_corrections: int = 0  # blocks whose state a verification corrected


class Unreadable(Struct, frozen=True):
    """Why no block of a directory is credited, and what to do about it.

    `engines_fail`: engines find objects that they cannot read, whatever the router does.
    """

    about: Literal["layouts", "data types"]
    text: str
    hint: str
    engines_fail: bool = False


class _Member(Struct, frozen=True):
    """A replica that uses the pool, and its directory."""

    directory: str
    kv_dtype: str | None


class PoolCatalog:
    """The pool as this router knows it.

    `is_up`: the directories count: the master answers, and has not restarted since they were read.
    """

    __slots__ = (
        "_fields",
        "_listing",
        "_max_blocks",
        "_members",
        "_not_found",
        "counters",
        "directories",
        "figures",
        "is_up",
        "layouts",
        "listed_s",
        "reason",
        "unreadable",
        "wants_listing",
    )

    def __init__(self, *, max_blocks: int = 4_000_000) -> None:
        self._max_blocks = max_blocks
        self._members: dict[str, _Member] = {}  # by replica
        self._fields: dict[str, tuple[set[str], str | None]] = {}
        """Directory to the names of its model in keys, and the configured fields."""
        self._not_found: dict[str, str] = {}  # directory -> why it has no layout
        self._listing: Listing | None = None
        self.directories: dict[str, PoolDirectory] = {}
        self.layouts: dict[str, Layout] = {}  # by directory: what a listing has verified
        self.unreadable: dict[str, Unreadable] = {}  # by directory
        self.figures: MasterFigures | None = None  # the last ones
        self.listed_s: float | None = None  # when the last listing was complete
        self.counters = PoolCounters()
        self.is_up = False
        self.reason = "not asked yet"
        self.wants_listing = True

    # -- questions ---------------------------------------------------------------------------

    def directory(self, name: str) -> PoolDirectory:
        """Return a directory by its name; create an empty one if there is none."""
        directory = self.directories.get(name)
        if directory is None:
            directory = self.directories[name] = PoolDirectory(max_blocks=self._max_blocks)
            if self._listing is not None:
                directory.begin_listing()
        return directory

    def directory_of(self, model: str, candidate: CandidateId) -> str | None:
        """Name the directory of the blocks that a candidate can read; None: it can read none."""
        member = self._members.get(candidate.partition("#")[0])
        name = member.directory if member is not None else model
        return None if name in self.unreadable else name

    def match(self, name: str, chain: Sequence[BlockKey], groups: KvLayout | None = None) -> int:
        """Count the leading blocks of `chain` in a directory; 0 while the pool is not verified.

        `groups`: the model's KV groups, if it has several. If the pool has several and they are
        unknown, every group must have a block: never more than an engine finds.
        """
        layout = self.layouts.get(name)
        if not self.is_up or layout is None:
            return 0
        directory = self.directories[name]
        if groups is None and not layout.further:
            return directory.match(chain)
        by_group = {layout.main: directory}
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
    def lacks_layouts(self) -> bool:
        """Whether a listing may show the layout of blocks that engines have reported."""
        return any(
            len(self.directory(name)) and name not in self.layouts and name not in self.unreadable
            for name in self._fields
        )

    def bytes_per_block(self, name: str) -> float | None:
        """Return the bytes of a directory's block; the mean of all models in the pool."""
        layout = self.layouts.get(name)
        per_object = self.figures.bytes_per_object if self.figures is not None else None
        return per_object * layout.num_ranks if per_object and layout is not None else None

    # -- from engines ------------------------------------------------------------------------

    def add_replica(
        self,
        replica: str,
        model: str,
        names: Collection[str],
        *,
        layout: str | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        """Add a replica, or replace what is known about it.

        Args:
            replica: Its name.
            model: Its base model.
            names: What keys may call the model.
            layout: Fields that its keys have, with ranges of numbers; None: not configured.
            kv_dtype: Of its KV cache; None: it does not report it.
        """
        directory = model if layout is None else f"{model}@@{layout}"
        known, _ = self._fields.get(directory, (set(), None))
        self._fields[directory] = known | set(filter(None, names)), layout
        self._members[replica] = _Member(directory, kv_dtype)
        self.directory(directory)
        if directory not in self.layouts:
            self.wants_listing = True  # there may be objects of it
        self._find_unreadable()

    def remove_replica(self, replica: str) -> None:
        """Remove a replica; its model's directory stays."""
        self._members.pop(replica, None)
        self._find_unreadable()

    def stored(self, model: str, keys: Sequence[BlockKey], *, replica: str) -> None:
        """Record whole blocks that a replica reports as stored in the pool."""
        self.counters.num_stored += len(keys)
        name = self.directory_of(model, CandidateId(replica))
        if name is None:
            return
        layout = self.layouts.get(name)
        if layout is None or layout.further:
            self.wants_listing = True  # events do not report the blocks of further groups
        if layout is None or not layout.further:
            self.directory(name).stored(keys)

    # -- from verification -------------------------------------------------------------------

    def verified(
        self,
        name: str,
        present: Collection[BlockKey],
        missing: Collection[BlockKey],
        on_disk: Collection[BlockKey] = (),
    ) -> int:
        """Record the master's answer about blocks; return how many it corrected."""
        directory = self.directory(name)
        num_new = sum(key not in directory for key in (*present, *on_disk))
        directory.stored(present)
        num_gone = directory.removed(missing)
        self.counters.num_on_disk += directory.stored_on_disk(on_disk) if on_disk else 0
        self.counters.num_corrections += num_new + num_gone
        if num_gone:
            self.wants_listing = True  # where one block was evicted, others were, too
        return num_new + num_gone

    def fill(self, name: str, chain: Sequence[BlockKey], asked: Sequence[int]) -> None:
        """Record blocks between two that are on SSD as on SSD, too.

        The master evicts what was not used for longest, so whole stretches of a prompt.
        """
        on_disk = set(self.on_disk(name, chain))
        for before, behind in pairwise(asked) if on_disk else ():
            if behind - before > 1 and before in on_disk and behind in on_disk:
                between = chain[before + 1 : behind]
                self.counters.num_on_disk += self.directory(name).stored_on_disk(between)

    # -- from the master ---------------------------------------------------------------------

    def found(self) -> None:
        """Record that the master answers, and is still the same process."""
        self.is_up = True
        self.reason = ""

    def lost(self, reason: str) -> None:
        """Record that the master does not answer: engines will find nothing there either."""
        self.is_up = False
        self.reason = reason
        self.wants_listing = True

    def restarted(self) -> None:
        """Record that the master restarted, with an empty pool."""
        self.counters.num_restarts += 1
        self._clear()

    def emptied(self) -> None:
        """Record that an engine had all objects removed."""
        self.counters.num_emptied += 1
        self._clear()

    def _clear(self) -> None:
        self.wants_listing = True
        for directory in self.directories.values():
            directory.clear()

    # -- listings ----------------------------------------------------------------------------

    def begin_listing(self) -> None:
        """Begin a listing; engines' events go on meanwhile."""
        self._listing = Listing()
        self.wants_listing = False
        for directory in self.directories.values():
            directory.begin_listing()

    def listed(self, keys: Iterable[str]) -> None:
        """Add some lines of the listing."""
        assert self._listing is not None
        self._listing.add(keys)

    def reconcile(self, max_blocks: int) -> Iterator[None]:
        """Apply the complete listing, in slices: yields after each.

        Confirms the whole blocks of every layout, then drops the blocks that it does not show.
        """
        listing = self._listing
        assert listing is not None
        self._find_layouts(listing)
        for directory, heads in self._heads():
            for blocks in listing.whole(heads, max_blocks):
                directory.listed(blocks)
                yield
        self._listing = None
        swept = [directory for directory, _ in self._heads()]
        for directory in self.directories.values():
            if directory not in swept:
                directory.abandon_listing()
        for directory in swept:
            while directory.sweep(max_blocks):
                yield
        self.counters.num_objects = listing.num_objects
        self.counters.num_unknown_keys = listing.num_unknown
        self.counters.num_unclaimed = listing.num_blocks_beside(
            head for _, heads in self._heads() for head in heads
        )
        self.counters.num_listings += 1

    def abandon_listing(self) -> None:
        """End a listing early: what it did not reach stays as it is."""
        self._listing = None
        self.wants_listing = True
        for directory in self.directories.values():
            directory.abandon_listing()

    def _heads(self) -> list[tuple[PoolDirectory, Sequence[str]]]:
        """List each directory whose layout is known, and the heads of a block's objects."""
        return [
            (self.directory(name if group == layout.main else _group_name(name, group)), heads)
            for name, layout in self.layouts.items()
            for group, heads in layout.heads.items()
        ]

    # -- layouts -----------------------------------------------------------------------------

    def _find_layouts(self, listing: Listing) -> None:
        """Find each directory's layout; one that has no objects now keeps its last one."""
        self._not_found = {}
        for name, (names, fields) in self._fields.items():
            found = find_layout(listing.heads, names, fields)
            if isinstance(found, str):
                self._not_found[name] = found
                self.layouts.pop(name, None)
            elif found is not None:
                self.layouts[name] = found
        self._find_unreadable()

    def _find_unreadable(self) -> None:
        """Find the directories that nothing is credited of."""
        found = {
            name: Unreadable("layouts", text, SET_LAYOUT) for name, text in self._not_found.items()
        }
        in_use = {member.directory for member in self._members.values()}
        layouts = {name: each for name, each in self.layouts.items() if name in in_use}
        for name, text in collisions(layouts).items():
            text = f"{text} has names in common with another layout, {_CANNOT_READ}"
            found[name] = Unreadable("layouts", text, ONE_LAYOUT, engines_fail=True)
        dtypes: dict[str, set[str]] = {}
        for member in self._members.values():
            if member.kv_dtype is not None:
                dtypes.setdefault(member.directory, set()).add(member.kv_dtype)
        for name, some in dtypes.items():
            if _differ(some):
                text = f"KV caches of {', '.join(sorted(some))} use the same names, {_CANNOT_READ}"
                found[name] = Unreadable("data types", text, ONE_TYPE, engines_fail=True)
        self.unreadable = found


def _differ(dtypes: Collection[str]) -> bool:
    """Return whether KV caches of these types differ; `auto` may be any type of 16 bits."""
    named = set(dtypes) - {"auto"}
    return len(named) > 1 or (len(dtypes) > 1 and not named <= _WIDE)


def _group_name(name: str, group: int) -> str:
    return f"{name}@@group:{group}"
