"""Images in prompts: the items of a request, and the tokens that stand for each.

The engine's processor turns an item into tokens. An engine is asked once for an item's tokens. They
are remembered by the item's bytes, for one caller's cache. From then on a prompt with the item is
made here. Its name in block hashes is computed (`media_names`). The engines' counts prove
the tokens, or end their use for a while.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from router.api.openai import Json, TokenIds
from router.base.backoff import Suspension
from router.base.bounded import Bounded, BoundedBytes
from router.base.releases import V0_32, Release
from router.tokens.media_names import MediaItem, MediaKind
from router.tokens.needs_engine import NeedsEngine

_TEXT_PARTS: Final = frozenset(
    "text input_text output_text refusal thinking tool_reference".split()
)
MEDIA_PARTS: Final[Mapping[str, MediaKind]] = {
    "image_url": "image",
    "video_url": "video",
}
"""Types of content parts that are items. Sounds are left to the engine."""

_MAX_BYTES: Final = 32 << 20
_ENTRY_BYTES: Final = 400
_RETRY_S: Final = 60.0  # for an item whose tokens no engine gave
_MAX_REFUSED: Final = 1024
_PAUSE_S: Final = (30.0, 3600.0)


# ------------------------------------------------------------- items of a request


def has_media(messages: Sequence[Json]) -> bool:
    """Return whether a message has a part that is no text."""
    for message in messages:
        content = message.get("content")
        if type(content) is list and any(map(_is_media, content)):
            return True
    return False


def mark_media(messages: Sequence[Json], mark: str) -> list[Json]:
    """Copy messages; a message with media has `mark` as its content."""
    return [
        {**message, "content": mark} if has_media((message,)) else message for message in messages
    ]


def media_items(messages: Sequence[Json]) -> list[MediaItem]:
    """List the images and videos of a conversation, in order.

    Raises:
        NeedsEngine: an item is malformed, or there is another kind of media.
    """
    items: list[MediaItem] = []
    for message in messages:
        content = message.get("content")
        if type(content) is list:
            items += [read_item(part) for part in content if _is_media(part)]
    return items


def _is_media(part: object) -> bool:
    kind = part.get("type") if isinstance(part, dict) else "text"
    return not isinstance(kind, str) or kind not in _TEXT_PARTS


def read_item(part: dict[str, Any]) -> MediaItem:
    """Read the content part of an image or a video.

    Raises:
        NeedsEngine: it is something else, or the engine may read it differently.
    """
    field, uuid = part.get("type"), part.get("uuid")
    kind = MEDIA_PARTS.get(field) if type(field) is str else None
    if kind is None or field not in part:
        raise NeedsEngine("multimodal", "kind")
    is_named = type(uuid) is str and uuid != ""
    if uuid is not None and not is_named:
        raise NeedsEngine("multimodal", "uuid")
    item = part[field]
    if type(item) is dict:
        url: Any = item.get("url")
    elif is_named:
        url = item
    else:
        raise NeedsEngine("multimodal", "url")
    if type(url) is not str and not (is_named and url is None):
        raise NeedsEngine("multimodal", "url")
    return MediaItem(url, uuid if is_named else None, kind)


# ------------------------------------------------------------- items that are known


class KnownMedia(NamedTuple):
    """An item of a prompt: the engine's name of it, and the tokens in its place.

    is_named: False: the engine's name is unknown. The name here is one that no engine uses.
    """

    name: str
    ids: TokenIds
    is_named: bool = True

    @property
    def size_bytes(self) -> int:
        """Estimate the memory that it takes."""
        return _ENTRY_BYTES + len(self.name) + 4 * len(self.ids)


class Placeholder(NamedTuple):
    """The special token that the template writes for an item, and its id."""

    token: str
    token_id: int


class MediaBook:
    """The known images of one model, within a budget of memory.

    Args:
        placeholders: By kind of item; at least one.
        model_id: The engine's name of the model: part of an item's name.
        release: The engine's.
    """

    __slots__ = (
        "_known",
        "_refused",
        "_suspension",
        "_tokens",
        "model_id",
        "placeholders",
        "release",
    )

    def __init__(
        self,
        placeholders: Mapping[MediaKind, Placeholder],
        model_id: str,
        release: Release = V0_32,
    ) -> None:
        self.placeholders = placeholders
        self.model_id = model_id
        self.release = release
        tokens = (re.escape(each.token) for each in placeholders.values())
        self._tokens = re.compile(f"({'|'.join(tokens)})")
        self._known: BoundedBytes[int, KnownMedia] = BoundedBytes(_MAX_BYTES)
        self._refused: Bounded[int, float] = Bounded(_MAX_REFUSED)  # when to ask again
        self._suspension = Suspension(*_PAUSE_S)

    def is_off(self, now_s: float) -> bool:
        """Return whether items are not used now, because engines counted other tokens."""
        return self._suspension.is_on(now_s)

    def split(self, text: str, kinds: Sequence[MediaKind]) -> tuple[list[str], bool]:
        """Cut a text at the placeholders.

        Returns:
            The texts around the placeholders, one more; whether the placeholders are those of
            items of these kinds.
        """
        texts = self._tokens.split(text)
        return texts[::2], texts[1::2] == [self.placeholders[kind].token for kind in kinds]

    def get(self, key: int) -> KnownMedia | None:
        """Return an item by its `media_key`; None: it is not known."""
        return self._known.use(key)

    def put(self, key: int, known: KnownMedia) -> None:
        """Remember an item, and forget the least recently used ones above the budget."""
        self._known.put(key, known)

    def may_ask(self, key: int, now_s: float) -> bool:
        """Return whether to ask an engine about an item: none has refused it recently."""
        return self._refused.get(key, 0.0) <= now_s

    def refuse(self, key: int, now_s: float) -> None:
        """Record that no engine gave an item's tokens."""
        self._refused.put(key, now_s + _RETRY_S)

    def observe_count(self, is_same: bool, now_s: float) -> None:
        """Record whether an engine counted a prompt with items as it was counted here."""
        if is_same:
            self._suspension.reset()
            return
        self._suspension.begin(now_s)
        self._known.clear()


def media_key(item: MediaItem, owner: str) -> int:
    """Digest what a client sent for an item: 0.1 ms a megabyte.

    A client's own name counts together with the bytes, or alone if there are none.
    """
    seed = xxh3_64_intdigest(
        f"{owner}\0{item.kind}\0{item.uuid or ''}".encode("utf-8", "surrogatepass")
    )
    if item.url is None:
        return xxh3_128_intdigest(b"", seed)
    return xxh3_128_intdigest(item.url.encode("utf-8", "surrogatepass"), seed)


def tokens_between(ids: Sequence[int], text_ids: Sequence[int], token_id: int) -> TokenIds | None:
    """Find the engine's tokens for a prompt's one item; None: not certain.

    Args:
        ids: The engine's prompt.
        text_ids: Ours, with `token_id` in the place of the item.
    """
    ids, text_ids = list(ids), list(text_ids)
    if text_ids.count(token_id) != 1:
        return None
    start = text_ids.index(token_id)
    before, behind = text_ids[:start], text_ids[start + 1 :]
    end = len(ids) - len(behind)
    if end <= start or ids[:start] != before or ids[end:] != behind:
        return None
    return array("I", ids[start:end])
