"""KV events of one rank: the changes of its blocks as vLLM reports them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from loadtest.emulator.generation import Generation
from loadtest.engine_model.blocks import Blocks, Change, Removed, Stored
from loadtest.engine_model.cpu_tier import Dropped, Offloaded
from loadtest.engine_model.window_blocks import WindowBlocks
from router.kv_events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExternalHash,
    KvEvent,
)


class EventWriter:
    """Writes the events of one cache."""

    def __init__(self, blocks: Blocks) -> None:
        self._size = blocks.block_size
        self._lookahead = blocks.lookahead
        self._full_group = blocks.num_windows if isinstance(blocks, WindowBlocks) else 0
        self._window_tokens = blocks.window if isinstance(blocks, WindowBlocks) else None

    def events(self, changes: Iterable[Change]) -> list[KvEvent]:
        """Write changes, in order; each evicted block has an event of its own."""
        events: list[KvEvent] = []
        for change in changes:
            if isinstance(change, Stored):
                events.append(self._stored(change))
            elif isinstance(change, Removed):
                group = self._full_group if change.window is None else change.window
                events += [
                    BlockRemoved(block_hashes=[_external(key)], medium="GPU", group_idx=group)
                    for key in change.keys
                ]
            else:
                events.append(AllBlocksCleared())
        return events

    def tier_events(self, changes: Iterable[Offloaded | Dropped]) -> list[KvEvent]:
        """Write changes of a CPU tier: each stored block has an event of its own, with its name.

        Source: OffloadingEventsTracker in vllm/distributed/kv_transfer/kv_connector/v1/offloading/
        events.py, 0.32.0, without `self_describing_kv_events`.
        """
        events: list[KvEvent] = []
        for change in changes:
            names: list[ExternalHash] = [_external(key) for key in change.keys]
            if isinstance(change, Dropped):
                events.append(BlockRemoved(block_hashes=names, medium="CPU", group_idx=0))
            else:
                events += [
                    BlockStored(block_hashes=[name], block_size=0, medium="CPU", group_idx=0)
                    for name in names
                ]
        return events

    def saved(self, generation: Generation, positions: Sequence[int]) -> list[KvEvent]:
        """Report blocks of a prompt as new in the shared pool."""
        size, keys = self._size, generation.keys
        return [
            BlockStored(
                block_hashes=[_external(keys[position])],
                parent_block_hash=_external(keys[position - 1]) if position else None,
                token_ids=generation.token_ids[position * size : (position + 1) * size],
                block_size=size,
                medium="cpu",
                group_idx=self._full_group,
            )
            for position in positions
        ]

    def _stored(self, change: Stored) -> BlockStored:
        generation, start, stop = change.sequence, change.start, change.stop
        assert isinstance(generation, Generation)
        size, ahead, tokens = self._size, self._lookahead, generation.token_ids
        ends = range((start + 1) * size, stop * size + 1, size)
        is_full = change.window is None
        return BlockStored(
            block_hashes=[_external(key) for key in change.keys],
            parent_block_hash=_external(generation.keys[start - 1]) if start else None,
            token_ids=tokens[start * size : stop * size],
            block_size=size,
            lora_id=generation.lora[0] if generation.lora else None,
            medium="GPU",
            lora_name=generation.lora[1] if generation.lora else None,
            extra_keys=[_extra_keys(generation, at) for at in change.positions] or None,
            group_idx=self._full_group if change.window is None else change.window,
            kv_cache_spec_kind="full_attention" if is_full else "sliding_window",
            kv_cache_spec_sliding_window=None if is_full else self._window_tokens,
            lookahead_token_ids=[tokens[end : end + ahead] for end in ends] if ahead else None,
        )


def _extra_keys(generation: Generation, position: int) -> list[Any] | None:
    """List what a block's hash covers beside tokens: the adapter, at the first block the salt."""
    names: list[Any] = [generation.lora[1]] if generation.lora else []
    if position == 0 and generation.cache_salt:
        names.append(generation.cache_salt)
    return names or None


def _external(digest: bytes) -> int:
    """Name a block as events do: by the last 64 bits of its digest."""
    return int.from_bytes(digest[-8:], "big")
