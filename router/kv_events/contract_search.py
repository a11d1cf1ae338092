"""The search for an engine's hash contract, from its own events; and its verification later.

    phase        next          when
    SEARCHING    FOUND         an event that starts a prompt obeys a known contract
    SEARCHING    TRANSLATED    `MAX_MISSES` plain events obey none
    FOUND        SEARCHING     a plain event does not obey it any more: it is another engine
    TRANSLATED   SEARCHING     the engine restarts

In phase FOUND an event is verified now and then; one with extra keys shows `tagged`.

A contract taken over from another router counts as FOUND, and is verified by the first event that
can. If that fails, what is indexed stays right: a replay has proven that the engine is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from itertools import product
from typing import Any, Final

from msgspec import Struct, structs

from router.base.contracts import (
    ALGORITHMS,
    DEFAULT_SEED,
    MAX_BLOCK_SIZE,
    MAX_LOOKAHEAD,
    ExtraKeys,
    HashContract,
    block_key,
)

_MAX_SEARCHED_LOOKAHEAD: Final = 8  # if an event does not say how many there are


class StoredView(Struct, frozen=True, gc=False):
    """One BlockStored event, for the search: hashes as published, tokens of all of them.

    Of a model with several KV groups (router.kv_events.groups) `block_size` is what a hash covers;
    `span` tokens are behind the first hash where that is more. `is_sparse`: some blocks in between
    were not stored, so a hash may be of any of them. `lookahead`: the tokens behind each block that
    its hash covers; None: the event does not say.
    """

    block_hashes: Sequence[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: Sequence[int]
    block_size: int
    lora_name: str | None = None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    span: int = 0
    is_sparse: bool = False
    lookahead: Sequence[Sequence[int]] | None = None

    @property
    def lookaheads(self) -> Sequence[int]:
        """How many tokens the first hash may cover ahead, the likeliest first."""
        if self.lookahead is not None:
            return (len(self.lookahead[0]) if self.lookahead else 0,)
        if self.is_sparse:  # hashing all of its blocks again and again would take too long
            return (0,)
        num_more = len(self.token_ids) - (self.span or self.block_size)
        return range(min(max(0, num_more), _MAX_SEARCHED_LOOKAHEAD) + 1)

    def hashed_tokens(self, lookahead: int) -> Sequence[int]:
        """Return the tokens that its first hash covers; all, if it may be any block's."""
        size = self.span or self.block_size
        if self.is_sparse:
            ahead = self.lookahead[-1] if self.lookahead else ()
            return [*self.token_ids, *ahead]
        if self.lookahead:
            return [*self.token_ids[:size], *self.lookahead[0]]
        return self.token_ids[: size + lookahead]

    @property
    def is_computable(self) -> bool:
        """Whether its first hash can be computed at all: the prompt's start, tokens and size."""
        return (
            self.parent_block_hash is None
            and len(self.block_hashes) > 0
            and 0 < self.block_size <= min(len(self.token_ids), MAX_BLOCK_SIZE)
            and max(self.lookaheads) <= MAX_LOOKAHEAD
        )

    @property
    def is_plain(self) -> bool:
        """Whether nothing but tokens went into the first digest."""
        return self.lora_name is None and not (self.extra_keys and self.extra_keys[0])


def find_contract(
    stored: StoredView,
    *,
    seeds: Iterable[str] = (),
    lora_paths: Mapping[str, str] | None = None,
) -> HashContract | None:
    """Find the contract that yields this event's first hash, None if none does.

    Only an event whose parent is None can show it (a later digest needs its parent's full digest,
    events carry 64 bits of it); one with multimodal items cannot. A plain event leaves `tagged`
    open and True is returned; `obeys` on one that is not plain settles it. `seeds` are tried
    before the defaults; `lora_paths` maps adapter name to path for events that carry an adapter.
    """
    if not stored.is_computable:
        return None
    for lookahead, seed, algorithm, tagged in product(
        stored.lookaheads,
        dict.fromkeys((*seeds, DEFAULT_SEED, "0")),
        ALGORITHMS,
        (True,) if stored.is_plain else (True, False),
    ):
        contract = HashContract(
            algorithm=algorithm,
            block_size=stored.block_size,
            seed=seed,
            tagged=tagged,
            lookahead=lookahead,
        )
        if algorithm != "warmroute" and obeys(contract, stored, lora_paths=lora_paths):
            return contract
    return None


def obeys(
    contract: HashContract,
    stored: StoredView,
    *,
    lora_paths: Mapping[str, str] | None = None,
) -> bool | None:
    """Return whether the event's first hash is the contract's; None: it cannot be decided."""
    if not stored.is_computable or stored.block_size != contract.block_size:
        return None
    extra = extra_of(stored, lora_paths or {})
    if extra is None:
        return None
    first = block_key(stored.block_hashes[0])
    keys, _ = contract.extend(None, stored.hashed_tokens(contract.lookahead), extra)
    if stored.is_sparse:
        return True if first in keys else None
    if stored.lookahead is not None and contract.lookahead not in stored.lookaheads:
        return False
    if len(keys) * stored.block_size < (stored.span or stored.block_size):
        return None  # it has too few tokens behind its first block
    return keys[-1] == first


def extra_of(stored: StoredView, lora_paths: Mapping[str, str]) -> ExtraKeys | None:
    """Rebuild the first block's extra keys from the untagged ones; None: cannot be known."""
    bare = list((stored.extra_keys or [None])[0] or [])
    lora: tuple[str, str] | None = None
    if stored.lora_name is not None:
        lora = (stored.lora_name, lora_paths.get(stored.lora_name, ""))
        if bare and bare[0] == stored.lora_name:
            bare = bare[1:]
    if len(bare) > 1 or (bare and not isinstance(bare[0], str)):
        return None  # multimodal items or prompt embeddings: wait for a plain prompt
    return ExtraKeys(lora=lora, cache_salt=bare[0] if bare else None)


MAX_MISSES: Final = 3
"""Plain events that obey none before translation: not one, for an old engine hides salts."""

VERIFY_EVERY: Final = 256
"""One in so many of the events that start a prompt is verified with tokens."""

_MAX_TAG_CHECKS: Final = 64
"""An adapter whose path is not known obeys neither way: do not check for ever."""


class Phase(Enum):
    SEARCHING = auto()
    FOUND = auto()
    TRANSLATED = auto()


class ContractSearch:
    """The contract of one rank as far as it is known.

    Args:
        guess: The contract until one is found.
        seeds: Texts to try as the engine's seed before the defaults.
        lora_paths: Adapter name to path; read at each event, the owner may change it.
    """

    __slots__ = (
        "_guess",
        "_is_tag_known",
        "_is_taken_over",
        "_lora_paths",
        "_num_tag_checks",
        "_num_until_verified",
        "_seeds",
        "contract",
        "num_misses",
        "phase",
    )

    def __init__(
        self, guess: HashContract, seeds: Sequence[str], lora_paths: Mapping[str, str]
    ) -> None:
        self._guess = self.contract = guess
        self._seeds = seeds
        self._lora_paths = lora_paths
        self.phase = Phase.SEARCHING
        self.restart()

    def restart(self) -> None:
        """Search again: the engine may be another one now. The last contract is the next guess."""
        if self.phase is Phase.TRANSLATED:
            self.contract = self._guess
        self.phase = Phase.SEARCHING
        self.num_misses = 0
        self._num_until_verified = VERIFY_EVERY
        self._is_tag_known = False
        self._num_tag_checks = 0
        self._is_taken_over = False

    def take_over(self, contract: HashContract, *, is_verified: bool) -> None:
        """Go on with a contract that another router found, or guessed."""
        self.contract = contract
        if is_verified:
            self.phase = Phase.FOUND
            self._num_until_verified = 0
            self._is_taken_over = True

    def wants(self, stored: StoredView) -> bool:
        """Return whether to examine this event, which starts a prompt (tokens may be missing)."""
        if self.phase is Phase.FOUND:
            self._num_until_verified -= 1
            may_check_tag = not self._is_tag_known and not stored.is_plain
            return self._num_until_verified <= 0 or may_check_tag
        return self.phase is Phase.SEARCHING

    def examine(self, stored: StoredView) -> bool:
        """Check the contract against an event with its tokens, or search it.

        Returns:
            True if blocks were indexed under wrong keys so far: history is needed again.
        """
        if self.phase is Phase.SEARCHING:
            return self._try(stored)
        verdict = obeys(self.contract, stored, lora_paths=self._lora_paths)
        if not stored.is_plain:
            self._check_tag(stored, verdict)
            return False
        was_taken_over, self._is_taken_over = self._is_taken_over, False
        self._num_until_verified = VERIFY_EVERY
        if verdict is False:
            self.restart()
            self.num_misses = 1
            return not was_taken_over
        return False

    def _try(self, stored: StoredView) -> bool:
        found = find_contract(stored, seeds=self._seeds, lora_paths=self._lora_paths)
        if found is not None:
            self.contract = found
            self.phase = Phase.FOUND
            self._is_tag_known = not stored.is_plain
        elif stored.is_computable and stored.is_plain and not stored.is_sparse:
            self.num_misses += 1
            if self.num_misses >= MAX_MISSES:
                self.contract = HashContract(
                    algorithm="warmroute",
                    block_size=stored.block_size,
                    lookahead=0 if stored.lookahead is None else stored.lookaheads[0],
                )
                self.phase = Phase.TRANSLATED
                return True
        return False

    def _check_tag(self, stored: StoredView, verdict: bool | None) -> None:
        """Check by a salted or adapter's event whether extra keys are tagged in digests."""
        other = structs.replace(self.contract, tagged=not self.contract.tagged)
        if verdict is False and obeys(other, stored, lora_paths=self._lora_paths):
            self.contract = other
            verdict = True
        self._num_tag_checks += 1
        self._is_tag_known = verdict is True or self._num_tag_checks >= _MAX_TAG_CHECKS
