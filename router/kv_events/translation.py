"""Engines, adapters and salts whose block digests cannot be computed here.

`Translation` maps an engine's hashes to our own digests. Such an engine has a random seed or an
unknown algorithm. Its events still carry the tokens of the stored blocks. The chain is computed
from these under our own contract, `warmroute`.

`UnknownKeys`: an event that starts a prompt with extra keys shows it, once the contract is found.
Either its first hash obeys the contract, or the digest contains something unknown. For such prompts
nothing is predicted. No text of a client is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from router.base.contracts import SALTED, BlockKey, ExtraKeys, HashContract, adapter_kind, block_key
from router.base.messages import MAX_UNKNOWN
from router.kv_events.contract_search import MAX_MISSES, StoredView, extra_of, obeys


class Translation:
    """One rank's block hashes under our own contract.

    Args:
        contract: Algorithm `warmroute`, the engine's block size.
        max_blocks: Bound, oldest out first; a dropped block cannot be removed by its hash.
    """

    __slots__ = ("_digests", "_max_blocks", "contract")

    def __init__(self, contract: HashContract, *, max_blocks: int = 1_000_000) -> None:
        self.contract = contract
        self._digests: dict[BlockKey, bytes] = {}
        self._max_blocks = max_blocks

    def stored(self, event: StoredView, lora_paths: Mapping[str, str]) -> list[BlockKey]:
        """Translate stored blocks; the keys end where translation does (an image, no tokens).

        Empty where the parent is not known (history before this router joined) or the event does
        not show it.
        """
        parent: bytes | None = None
        if event.parent_block_hash is not None:
            parent = self._digests.get(block_key(event.parent_block_hash))
            if parent is None:
                return []
        extra = extra_of(event, lora_paths)
        if extra is None or event.block_size != self.contract.block_size:
            return []
        num_blocks = _num_plain_blocks(event, extra)
        tokens = event.token_ids[: num_blocks * event.block_size]
        if event.lookahead and num_blocks:
            ahead = event.lookahead[min(num_blocks, len(event.lookahead)) - 1]
            tokens = [*tokens, *ahead[: self.contract.lookahead]]
        digests = self.contract.digests(parent, tokens, extra)
        for external, digest in zip(event.block_hashes, digests, strict=False):
            self._digests[block_key(external)] = digest
        if len(self._digests) > self._max_blocks:
            for key in list(islice(self._digests, len(self._digests) - self._max_blocks)):
                del self._digests[key]
        return [block_key(digest) for digest in digests[: len(event.block_hashes)]]

    def key_of(self, external: int | bytes) -> BlockKey | None:
        """Translate one hash, None if it was never stored here (or was dropped)."""
        digest = self._digests.get(block_key(external))
        return None if digest is None else block_key(digest)

    def forget(self, externals: Iterable[int | bytes]) -> None:
        """Drop blocks whose last copy is gone: nothing can be stored behind them any more."""
        for external in externals:
            self._digests.pop(block_key(external), None)


def _num_plain_blocks(event: StoredView, extra: ExtraKeys) -> int:
    """Count leading blocks whose extra keys `extra` explains."""
    later: Sequence[object] = [] if extra.lora is None else [extra.lora[0]]
    for position, keys in enumerate(event.extra_keys or ()):
        if position and keys and list(keys) != later:
            return position
    return len(event.block_hashes)


_NUM_CHECKS: Final = 8  # of the first events of a kind each; later one in so many
_CHECK_EVERY: Final = 64
_TAG: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MAX_PARTS: Final = 8
_MAX_NAME: Final = 512


class UnknownKeys:
    """What events of one engine have shown.

    `kinds`: `ExtraKeys.kinds`; prompts of these have blocks that are not found here.
    """

    __slots__ = ("_num_seen", "_num_unlike", "kinds")

    def __init__(self, kinds: Iterable[str] = ()) -> None:
        self.kinds = frozenset(kinds)
        self._num_seen: dict[str, int] = {}
        self._num_unlike = 0  # salted prompts in a row whose digests are not ours

    def wants(self, stored: StoredView, lora_paths: Mapping[str, str]) -> bool:
        """Return whether to examine an event that starts a prompt (tokens may be missing)."""
        kind = _kind_of(stored, lora_paths)
        if kind is None:
            return False
        num_seen = self._num_seen.get(kind, 0)
        if not num_seen and len(self._num_seen) >= MAX_UNKNOWN:
            return False
        self._num_seen[kind] = num_seen + 1
        return num_seen < _NUM_CHECKS or num_seen % _CHECK_EVERY == 0

    def examine(
        self, stored: StoredView, contract: HashContract, lora_paths: Mapping[str, str]
    ) -> str | None:
        """Examine an event with its tokens; return how a key looks that is not understood.

        None: it is understood, or was known not to be.
        """
        kind = _kind_of(stored, lora_paths)
        if kind is None or not stored.is_computable or stored.block_size != contract.block_size:
            return None
        if obeys(contract, stored, lora_paths=lora_paths):
            self.kinds -= {kind}
            if kind == SALTED:
                self._num_unlike = 0
            return None
        if kind == SALTED:  # or the digest of a prompt's embeddings, which is a text, too
            self._num_unlike += 1
        if kind in self.kinds or (kind == SALTED and self._num_unlike < MAX_MISSES):
            return None
        self.kinds |= {kind}
        return _form(stored)


def _kind_of(stored: StoredView, lora_paths: Mapping[str, str]) -> str | None:
    """Name what an event may show; None: nothing.

    An adapter whose path is not known yet says nothing, nor does an image.
    """
    keys, later = _first_two(stored)
    if any(_is_media(key, later, stored.block_size) for key in keys):
        return None
    name = stored.lora_name
    if name is None:
        name = next((text for text in _texts(keys) if text in lora_paths), None)
    if name is not None:
        return adapter_kind(name) if name in lora_paths and len(name) <= _MAX_NAME else None
    return SALTED if len(keys) == 1 and _is_salt(keys[0]) else None


def _first_two(stored: StoredView) -> tuple[list[Any], list[Any]]:
    """Return the extra keys of the first block and of the second."""
    rows = [list(row or []) for row in (stored.extra_keys or ())[:2]]
    return (*rows, [], [])[0], (*rows, [], [])[1]


def _is_media(key: Any, later: list[Any], block_size: int) -> bool:
    """Return whether a key may be an image's: its name, and where it is from the block's start.

    In the second block the image goes on, or is over.
    """
    if not _is_place(key):
        return False
    name, offset = key
    offsets = [each[1] for each in later if _is_place(each) and each[0] == name]
    return not offsets or offset - block_size in offsets


def _is_place(key: Any) -> bool:
    is_pair = isinstance(key, list | tuple) and len(key) == 2
    return is_pair and isinstance(key[0], str) and isinstance(key[1], int)


def _is_salt(key: Any) -> bool:
    """Return whether a key may be a salt: a text, or one with a tag."""
    return isinstance(key, str) or (
        isinstance(key, list | tuple) and len(key) == 2 and all(isinstance(x, str) for x in key)
    )


def _texts(keys: Sequence[Any]) -> Iterable[str]:
    for key in keys[:_MAX_PARTS]:
        if isinstance(key, str):
            yield key
        elif isinstance(key, list | tuple):
            yield from (part for part in key[:_MAX_PARTS] if isinstance(part, str))


def _form(stored: StoredView) -> str:
    """Describe the extra keys of a block: tags that all blocks of the prompt have, else types.

    A salt is in the first block alone, an image has another offset in each. So what is the same in
    the second block is neither.
    """
    first, second = _first_two(stored)
    parts = [_part(key, key in second) for key in first[:_MAX_PARTS]]
    if not parts:
        return "none in the event"
    return ", ".join([*parts, *(["..."] if len(first) > _MAX_PARTS else [])])


def _part(key: Any, is_shown: bool) -> str:
    if isinstance(key, list | tuple):
        inner = [_part(part, is_shown) for part in key[:_MAX_PARTS]]
        return f"({', '.join(inner)})"
    if is_shown and isinstance(key, str) and _TAG.fullmatch(key):
        return repr(key)
    return type(key).__name__
