"""What is known of one model's images and sounds: names, and the tokens that stand for each.

The processor that turns an item into tokens is the engine's. It is asked once what an item becomes;
that is remembered for the client's tenant, by the item's bytes. From then on a prompt with it is
made here. Its name is computed. What engines count and report proves it, or ends it for a
while.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from router.api.openai import TokenIds
from router.backoff import Suspension
from router.releases import V0_32, Release
from router.tokens.media_names import MediaItem, MediaKind

_MAX_BYTES: Final = 32 << 20
_ENTRY_BYTES: Final = 400
_RETRY_S: Final = 60.0  # for an item whose tokens no engine gave
_PAUSE_S: Final = (30.0, 3600.0)
_MAX_AGAINST: Final = 8


class KnownMedia(NamedTuple):
    """An item as it is in a prompt: the engine's name of it, and the tokens in its place.

    is_named: False: the name is one of ours, under which no engine has a block.
    """

    name: str
    ids: TokenIds
    is_named: bool = True


class Placeholder(NamedTuple):
    """The special token that the template writes for an item, and its id."""

    token: str
    token_id: int


class MediaBook:
    """The images and sounds of one model.

    Args:
        placeholders: By kind of item; one at least.
        model_id: What the engine calls the model: part of an item's name.
        sample_rate: Of the sound that it hears; None: not known.

    is_proven: Whether an engine was seen to reuse blocks of an item, as predicted by its name.
    """

    __slots__ = (
        "_known",
        "_num_against",
        "_refused",
        "_size_bytes",
        "_suspension",
        "_tokens",
        "is_proven",
        "model_id",
        "placeholders",
        "release",
        "sample_rate",
    )

    def __init__(
        self,
        placeholders: Mapping[MediaKind, Placeholder],
        model_id: str,
        sample_rate: int | None = None,
        release: Release = V0_32,
    ) -> None:
        self.placeholders = placeholders
        self.model_id = model_id
        self.sample_rate = sample_rate
        self.release = release
        tokens = (re.escape(each.token) for each in placeholders.values())
        self._tokens = re.compile(f"({'|'.join(tokens)})")
        self.is_proven = False
        self._known: OrderedDict[int, KnownMedia] = OrderedDict()  # least recently used first
        self._size_bytes = 0
        self._refused: OrderedDict[int, float] = OrderedDict()  # until when not to ask again
        self._num_against = 0
        self._suspension = Suspension(*_PAUSE_S)

    def is_off(self, now_s: float) -> bool:
        """Return whether items are not believed now: engines counted other tokens."""
        return self._suspension.is_on(now_s)

    def split(self, text: str, kinds: Sequence[MediaKind]) -> tuple[list[str], bool]:
        """Cut a text where placeholders are.

        Returns:
            The texts around them, one more; whether they are those of items of these kinds.
        """
        texts = self._tokens.split(text)
        return texts[::2], texts[1::2] == [self.placeholders[kind].token for kind in kinds]

    def get(self, key: int) -> KnownMedia | None:
        """Look an item up; None: it is not known."""
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
        return known

    def put(self, key: int, known: KnownMedia) -> None:
        """Remember an item; the least recently used go."""
        before = self._known.pop(key, None)
        if before is not None:
            self._size_bytes -= _size(before)
        self._known[key] = known
        self._size_bytes += _size(known)
        while self._size_bytes > _MAX_BYTES:
            self._size_bytes -= _size(self._known.popitem(last=False)[1])

    def may_ask(self, key: int, now_s: float) -> bool:
        """Return whether an engine may be asked about an item: none refused to tell lately."""
        return self._refused.get(key, 0.0) <= now_s

    def refuse(self, key: int, now_s: float) -> None:
        """Note that no engine gave an item's tokens."""
        self._refused[key] = now_s + _RETRY_S
        if len(self._refused) > 1024:
            self._refused.popitem(last=False)

    def observe_count(self, is_same: bool, now_s: float) -> None:
        """Note whether an engine counted a prompt with items as it was counted here."""
        if is_same:
            self._suspension.reset()
            return
        self._suspension.begin(now_s)
        self._known.clear()
        self._size_bytes = 0

    def observe_reuse(self, is_as_predicted: bool, now_s: float) -> None:
        """Note whether an engine reused an item's blocks as predicted, or others in their place.

        Where it never does what the names say, they are not the engine's.
        """
        if is_as_predicted:
            self.is_proven = True
            self._num_against = 0
            return
        self._num_against += 1
        if not self.is_proven and self._num_against >= _MAX_AGAINST:
            self._num_against = 0
            self.observe_count(is_same=False, now_s=now_s)


def media_key(item: MediaItem, owner: str) -> int:
    """Digest what a client sent for an item: 0.1 ms a megabyte.

    A client's own name counts with the bytes beside it, or alone.
    """
    seed = xxh3_64_intdigest(
        f"{owner}\0{item.kind}\0{item.uuid or ''}".encode("utf-8", "surrogatepass")
    )
    if item.url is None:
        return xxh3_128_intdigest(b"", seed)
    return xxh3_128_intdigest(item.url.encode("utf-8", "surrogatepass"), seed)


def tokens_between(ids: Sequence[int], text_ids: Sequence[int], token_id: int) -> TokenIds | None:
    """Find what an engine put in the place of a prompt's one item; None: not certain.

    Args:
        ids: The engine's prompt.
        text_ids: Ours, with `token_id` where the item is.
    """
    if list(text_ids).count(token_id) != 1:
        return None
    start = list(text_ids).index(token_id)
    num_behind = len(text_ids) - start - 1
    end = len(ids) - num_behind
    is_same = list(ids[:start]) == list(text_ids[:start])
    is_same &= list(ids[end:]) == list(text_ids[start + 1 :])
    return array("I", ids[start:end]) if is_same and end > start else None


def _size(known: KnownMedia) -> int:
    return _ENTRY_BYTES + len(known.name) + 4 * len(known.ids)
