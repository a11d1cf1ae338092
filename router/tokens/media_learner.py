"""How engines name images and sounds, learned from their events.

A prompt goes to an engine with an item whose name was computed, but not seen yet, or could not be
computed. The engine's events say which blocks it stored for that request, and the names of the
items in each. Where our own hash of such a block, with the event's name in it, is the event's hash,
text, tokens and name are all as we have them, and the name is the item's.

    block of the prompt      | text, item's start | item | item's end, text | ...
    known of it              its tokens, the digest of the block before
    the event says           the block's hash; [identifier, item's start less block's start], ...

Events name the session of their request, and no two requests have the same one while something is
learned from them. An engine that has the blocks already stores none, and nothing is learned then;
nor from events that name no session, or that another router follows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from router.api.openai import TokenIds
from router.contracts import BlockKey, ExtraKeys, HashContract, MediaSpan, block_key
from router.tokens.media_book import KnownMedia, MediaBook
from router.tokens.prompter import Tokens

_MAX_EXPECTED: Final = 256
_MAX_TOKENS: Final = 16_384  # of a prompt, from its first item that is learned; 64 KiB


class Unseen(NamedTuple):
    """A prompt's items that no event has named yet, by the names that they have in its tokens."""

    book: MediaBook
    items: Mapping[str, KnownMedia]


class MediaLearner:
    """Waits for the events of requests with items that no event has named yet."""

    def __init__(self) -> None:
        self._expected: OrderedDict[str, _Expected] = OrderedDict()  # by session; oldest first

    def __len__(self) -> int:
        return len(self._expected)

    def expect(
        self,
        session: str,
        unseen: Unseen,
        tokens: Tokens,
        contract: HashContract,
        extra: ExtraKeys,
    ) -> None:
        """Learn from a request's events.

        Args:
            session: As its events will name it; of this request alone.
            tokens: Its prompt.
            contract: How the engine that gets it names blocks.
            extra: Its salt. With an adapter nothing is learned: engines may name items by it, too.
        """
        if extra.lora is not None:
            return
        spans, size = tokens.media_spans(), contract.block_size
        ahead, num_full = contract.lookahead, contract.num_blocks(tokens.num_tokens)
        # From the first block whose hash has the item in it.
        blocks = [
            max(0, span.start - ahead) // size for span in spans if span.identifier in unseen.items
        ]
        blocks = [block for block in blocks if block < num_full]
        if not blocks:
            return
        first, start = blocks[0], blocks[0] * size
        end = min((blocks[-1] + 1) * size, start + _MAX_TOKENS // size * size)
        parent = tokens.digests(contract, [first - 1], extra)[0] if first else None
        self._expected[session] = _Expected(
            unseen=unseen,
            contract=contract,
            extra=extra,
            parent=parent,
            ids=tokens.ids_between(start, end + ahead),
            spans=[
                MediaSpan(name, span_start - start, span_end - start)
                for name, span_start, span_end in spans
                if span_end > start
            ],
        )
        if len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)

    def observe(
        self,
        session: str,
        parent: int | bytes | None,
        hashes: Sequence[int | bytes],
        extra_keys: Sequence[Sequence[Any] | None],
    ) -> None:
        """Take in an event of stored blocks, as it came; others than expected change nothing."""
        expected = self._expected.get(session)
        if expected is None or len(extra_keys) != len(hashes):
            return
        keys = [block_key(each) for each in hashes]
        before = None if parent is None else block_key(parent)
        if before == expected.before:
            position = 0
        elif expected.before in keys:
            position = keys.index(expected.before) + 1
        else:
            return
        for key, extra in zip(keys[position:], extra_keys[position:], strict=True):
            if not expected.take(key, extra):
                return
            if expected.is_done:
                del self._expected[session]
                return


class _Expected:
    """What is still to come of one request's blocks: those from its first item on."""

    __slots__ = (
        "_book",
        "_contract",
        "_extra",
        "_ids",
        "_offset",
        "_parent",
        "_spans",
        "_unseen",
        "before",
    )

    def __init__(
        self,
        *,
        unseen: Unseen,
        contract: HashContract,
        extra: ExtraKeys,
        parent: bytes | None,
        ids: TokenIds,
        spans: list[MediaSpan],
    ) -> None:
        self._book = unseen.book
        self._unseen = dict(unseen.items)
        self._contract = contract
        self._extra = extra
        self._ids = ids
        self._spans = spans
        self._offset = 0  # of the next block among the ids
        self._parent = parent
        self.before: BlockKey | None = None if parent is None else block_key(parent)

    def take(self, key: BlockKey, extra_keys: Sequence[Any] | None) -> bool:
        """Take in the next block; False: it is another one."""
        size = self._contract.block_size
        start, end = self._offset, self._offset + size + self._contract.lookahead
        inside = [span for span in self._spans if span.start < end and span.end > start]
        names = [each[0] for each in extra_keys or () if _is_item(each)]
        if len(names) != len(inside):
            return False
        media = [
            MediaSpan(name, span.start - start, span.end - start)
            for name, span in zip(names, inside, strict=True)
        ]
        ids = self._ids[start:end]
        [digest] = self._contract.digests(self._parent, ids, self._extra, media)
        if block_key(digest) != key:
            return False
        for name, span in zip(names, inside, strict=True):
            known = self._unseen.pop(span.identifier, None)
            if known is not None:
                self._book.learn(known, name)
        self._offset, self._parent, self.before = start + size, digest, key
        return True

    @property
    def is_done(self) -> bool:
        """Whether there is nothing more to learn."""
        return not self._unseen or self._contract.num_blocks(len(self._ids) - self._offset) == 0


def _is_item(extra_key: object) -> bool:
    """Return whether it is an item's name and place, not a salt or an adapter."""
    if not isinstance(extra_key, list | tuple) or len(extra_key) != 2:
        return False
    return isinstance(extra_key[0], str) and isinstance(extra_key[1], int)
