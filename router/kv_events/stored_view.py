"""One stored event of an engine, and the hash contract that it obeys. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any, Final

from msgspec import Struct

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
