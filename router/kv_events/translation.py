"""Engine hash -> own digest, for an engine whose digests cannot be computed.

Such an engine has a random seed or an unknown algorithm. Its events still carry the tokens of the
stored blocks. The chain is computed from these under our own contract, `warmroute`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from router.base.contracts import BlockKey, ExtraKeys, HashContract, block_key
from router.kv_events.stored_view import StoredView, extra_of


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
