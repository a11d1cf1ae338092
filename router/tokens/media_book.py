"""What is known of one model's images: names, and the tokens that stand for each.

The processor that turns an image into tokens is the engine's. It is asked once what an image
becomes; that is remembered for the client's tenant, by the image's bytes. From then on a prompt
with it is made here. What engines count and report proves it, or ends it for a while.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from router.api.openai import TokenIds
from router.backoff import Suspension
from router.tokens.media_names import MediaItem

_MAX_BYTES: Final = 32 << 20
_ENTRY_BYTES: Final = 400
_RETRY_S: Final = 60.0  # for an image whose tokens no engine gave
_PAUSE_S: Final = (30.0, 3600.0)
_MAX_AGAINST: Final = 8


class KnownMedia(NamedTuple):
    """An image as it is in a prompt: the engine's name of it, and the tokens in its place."""

    name: str
    ids: TokenIds


class MediaBook:
    """The images of one model.

    Args:
        placeholder: The special token that the template writes for an image.
        token_id: Its id.
        model_id: What the engine calls the model: part of an image's name.

    is_proven: Whether an engine was seen to reuse blocks of an image, as predicted by its name.
    """

    __slots__ = (
        "_known",
        "_num_against",
        "_refused",
        "_size_bytes",
        "_suspension",
        "is_proven",
        "model_id",
        "placeholder",
        "token_id",
    )

    def __init__(self, placeholder: str, token_id: int, model_id: str) -> None:
        self.placeholder = placeholder
        self.token_id = token_id
        self.model_id = model_id
        self.is_proven = False
        self._known: OrderedDict[int, KnownMedia] = OrderedDict()  # least recently used first
        self._size_bytes = 0
        self._refused: OrderedDict[int, float] = OrderedDict()  # until when not to ask again
        self._num_against = 0
        self._suspension = Suspension(*_PAUSE_S)

    def is_off(self, now_s: float) -> bool:
        """Return whether images are not believed now: engines counted other tokens."""
        return self._suspension.is_on(now_s)

    def get(self, key: int) -> KnownMedia | None:
        """Look an image up; None: it is not known."""
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
        return known

    def put(self, key: int, known: KnownMedia) -> None:
        """Remember an image; the least recently used go."""
        before = self._known.pop(key, None)
        if before is not None:
            self._size_bytes -= _size(before)
        self._known[key] = known
        self._size_bytes += _size(known)
        while self._size_bytes > _MAX_BYTES:
            self._size_bytes -= _size(self._known.popitem(last=False)[1])

    def may_ask(self, key: int, now_s: float) -> bool:
        """Return whether an engine may be asked about an image: none refused to tell lately."""
        return self._refused.get(key, 0.0) <= now_s

    def refuse(self, key: int, now_s: float) -> None:
        """Note that no engine gave an image's tokens."""
        self._refused[key] = now_s + _RETRY_S
        if len(self._refused) > 1024:
            self._refused.popitem(last=False)

    def observe_count(self, is_same: bool, now_s: float) -> None:
        """Note whether an engine counted a prompt with images as it was counted here."""
        if is_same:
            self._suspension.reset()
            return
        self._suspension.begin(now_s)
        self._known.clear()
        self._size_bytes = 0

    def observe_reuse(self, is_as_predicted: bool, now_s: float) -> None:
        """Note whether an engine reused an image's blocks as predicted, or others in their place.

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
    """Digest what a client sent for an image: 0.1 ms a megabyte.

    A client's own name counts with the bytes beside it, or alone.
    """
    seed = xxh3_64_intdigest(f"{owner}\0{item.uuid or ''}".encode("utf-8", "surrogatepass"))
    if item.url is None:
        return xxh3_128_intdigest(b"", seed)
    return xxh3_128_intdigest(item.url.encode("utf-8", "surrogatepass"), seed)


def tokens_between(ids: Sequence[int], text_ids: Sequence[int], token_id: int) -> TokenIds | None:
    """Find what an engine put in the place of a prompt's one image; None: not certain.

    Args:
        ids: The engine's prompt.
        text_ids: Ours, with `token_id` where the image is.
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
    return _ENTRY_BYTES + 4 * len(known.ids)
