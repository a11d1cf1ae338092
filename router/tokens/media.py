"""Images in prompts: the items of a request, and the tokens that stand for each.

The engine's processor turns an item into tokens. An engine is asked once for an item's tokens. They
are remembered by the item's bytes, for one caller's cache. From then on a prompt with the item is
made here. Its name in block hashes is computed (`media_name`). The engines' counts prove
the tokens, or end their use for a while.

The engine's name of an image is the identifier in its block hashes. Source: vLLM 0.32.0,
multimodal/hasher.py (MultiModalHasher), multimodal/processing/inputs.py (get_mm_hashes),
multimodal/media/image.py (ImageMediaIO.load_bytes), media/connector.py (_load_data_url). For
requests without options for the processor or for reading media:

    a client's `uuid`    is the identifier
    an image's bytes     BLAKE3 of {"image": the bytes, "model_id": what `--model` says}; the
                         bytes with {"image_mode": "RGB", "rgba_background_color": white} beside
                         them if the engine converts the picture: it is not RGB, or, from 0.33 on,
                         a PNG with a transparent colour

Every key and value has its length in front, every container its kind. Named here are PNG, JPEG,
WebP and GIF. Other items have no name here, and nothing behind them matches. Neither has an item
behind an address: it may be another picture the next time.

A prompt's text has a mark for each image, as bytes with boundaries for the segment tree:

    bytes    text, mark, text, mark, ..., text       a mark: 0xff, a digest of the image, 0xff
    tokens   encoded, the image's own, encoded, ...

No UTF-8 text contains the byte 0xff. A mark is a segment of its own. So two prompts share the
text behind an image only if it is the same image.
"""

from __future__ import annotations

import base64
import binascii
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from blake3 import blake3
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest, xxh3_128_intdigest

from router.api.openai import Json, TokenIds
from router.base.backoff import Suspension
from router.base.bounded import Bounded, BoundedBytes
from router.base.engines import V0_32, V0_33, Release
from router.tokens.encoder import Framed, Part, PlainEncoder, text_of
from router.tokens.needs_engine import NeedsEngine
from router.tokens.prompt_tree import Boundary, NewSegment, PromptBoundaries

MediaKind = Literal["image", "video"]

MAX_URL_CHARS: Final = 16 << 20
"""The longest URL of an item that is named here."""

_MAX_JPEG_SEGMENTS: Final = 1_000
_SEQUENCE, _MAPPING, _LEAF = b"\x01", b"\x02", b"\x03"
_PNG: Final = b"\x89PNG\r\n\x1a\n"
_PNG_RGB: Final = 2  # its colour type, with any number of bits
_MAX_PNG_CHUNKS: Final = 1_000
_JPEG_FRAMES: Final = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class MediaItem(NamedTuple):
    """One image or video of a request.

    url: None: the client names an item that it sent before.
    uuid: The client's name for it, if it gave one.
    """

    url: str | None
    uuid: str | None
    kind: MediaKind = "image"


def name_of(item: MediaItem, data: bytes, model_id: str, release: Release = V0_32) -> str | None:
    """Compute an item's identifier; None: it is not known here. Blocking: a few ms a megabyte.

    Args:
        data: The content of its URL; see `data_of`.
        model_id: The engine's `--model`.
    """
    if item.uuid is not None:
        return item.uuid
    is_rgb = _is_rgb(data, release) if item.kind == "image" else None
    if is_rgb is None:
        return None
    model = _framed(b"model_id") + _LEAF + _framed(model_id.encode())
    image = _framed(b"image") + (_LEAF + _framed(data) if is_rgb else _converted(data))
    return blake3(_framed(b"image") + _LEAF + image + model).hexdigest()


def data_of(url: str) -> bytes | None:
    """Decode a data URL; None: it is none, or in a form that the engine refuses."""
    if len(url) > MAX_URL_CHARS or url[:5].lower() != "data:":
        return None
    described, _, data = url[5:].partition(",")
    if not data or described.rpartition(";")[1:] != (";", "base64"):
        return None
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return None


def _framed(chunk: bytes) -> bytes:
    return len(chunk).to_bytes(8, "little") + chunk


def _converted(data: bytes) -> bytes:
    """Write the bytes of a picture that the engine converts to RGB, on white if transparent."""
    white = b"".join([_LEAF + _framed((255).to_bytes(8, "little"))] * 3)
    return b"".join(
        (
            _MAPPING + (2).to_bytes(8, "little"),
            _framed(b"io_config") + _MAPPING + (2).to_bytes(8, "little"),
            _framed(b"image_mode") + _LEAF + _framed(b"RGB"),
            _framed(b"rgba_background_color") + _SEQUENCE + (3).to_bytes(8, "little") + white,
            _framed(b"data") + _LEAF + _framed(data),
        )
    )


def _is_rgb(data: bytes, release: Release) -> bool | None:
    """Return whether a picture is RGB for Pillow, by its first bytes; None: not certain."""
    if data.startswith(_PNG) and data[12:16] == b"IHDR" and len(data) > 25:
        if data[25] != _PNG_RGB or release < V0_33:
            return data[25] == _PNG_RGB
        return _png_is_opaque(data)
    if data.startswith(b"\xff\xd8\xff"):
        return _jpeg_is_rgb(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp_is_rgb(data)
    return False if data[:6] in (b"GIF87a", b"GIF89a") else None


def _png_is_opaque(data: bytes) -> bool | None:
    """Return whether an RGB picture has no transparent colour, a chunk before the pixels."""
    position = len(_PNG)
    for _ in range(_MAX_PNG_CHUNKS):
        kind = data[position + 4 : position + 8]
        if len(kind) < 4:
            return None
        if kind in (b"tRNS", b"IDAT"):
            return kind == b"IDAT"
        position += 12 + int.from_bytes(data[position : position + 4], "big")
    return None


def _jpeg_is_rgb(data: bytes) -> bool | None:
    """Read the number of the frame's components: 3 are RGB, 1 is grey, 4 are CMYK."""
    position = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        if data[position : position + 1] != b"\xff" or len(data) < position + 10:
            return None
        if data[position + 1] in _JPEG_FRAMES:
            return data[position + 9] == 3
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return None


def _webp_is_rgb(data: bytes) -> bool | None:
    """Read whether there is no transparency: with it, the picture is RGBA."""
    kind = data[12:16]
    if kind == b"VP8 ":
        return True
    if kind == b"VP8L" and len(data) > 24:
        return not data[24] & 0x10
    if kind == b"VP8X" and len(data) > 20:
        return not data[20] & 0x10
    return None


_TEXT_PARTS: Final = frozenset(
    "text input_text output_text refusal thinking tool_reference".split()
)
MEDIA_PARTS: Final[Mapping[str, MediaKind]] = {
    "image_url": "image",
    "video_url": "video",
}
"""Types of content parts that are items. Sounds are left to the engine."""

_UNKNOWN: Final = "this message is unknown to the router"
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


def without_media(messages: Sequence[Json]) -> list[Json]:
    """Copy messages; a message with media has only a mark as its content."""
    return [
        {**message, "content": _UNKNOWN} if has_media((message,)) else message
        for message in messages
    ]


class BeforeMedia(NamedTuple):
    """A prompt up to its first message with media, and the size of the rest."""

    parts: Sequence[Part]
    num_rest_chars: int
    num_unknown: int  # messages


def before_media(parts: Sequence[Part]) -> BeforeMedia | None:
    """Find what is the same whatever the media of `without_media` are; None: no mark is shown."""
    framed = [each for each in parts if isinstance(each, Framed)]
    marked = [index for index, each in enumerate(framed) if _UNKNOWN.encode() in each.packed]
    if marked:
        return BeforeMedia(framed[: marked[0]], sum(map(len, framed[marked[0] :])), len(marked))
    before, mark, behind = ("" if framed else text_of(parts)).partition(_UNKNOWN)
    return BeforeMedia([before], len(behind), 1 + behind.count(_UNKNOWN)) if mark else None


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


_EDGE: Final = b"\xff"


class MediaText:
    """The bytes, and the images by the position of their marks."""

    __slots__ = ("data", "ends", "media")

    def __init__(self, texts: Sequence[str], media: Sequence[KnownMedia]) -> None:
        """Join texts with images between them; there is one more text than images."""
        data = bytearray(texts[0].encode())
        self.media: dict[int, KnownMedia] = {}
        self.ends: list[tuple[int, int]] = []  # of the marks: [start, end), ascending
        for known, text in zip(media, texts[1:], strict=True):
            start = len(data)
            digest = xxh3_128_hexdigest(known.name.encode() + _EDGE + known.ids.tobytes())
            data += _EDGE + digest.encode() + _EDGE
            self.media[start] = known
            self.ends.append((start, len(data)))
            data += text.encode()
        self.data = bytes(data)


class MediaCuts:
    """The boundaries of the text, and both ends of every mark."""

    __slots__ = ("_next", "_text", "_text_cuts")

    def __init__(self, text: MediaText, text_cuts: PromptBoundaries) -> None:
        self._text = text
        self._text_cuts = text_cuts
        self._next = 0

    def after(self, position: int) -> Boundary | None:
        marks = self._text.ends
        while self._next < len(marks) and marks[self._next][0] < position:
            self._next += 1
        found = None
        if self._next < len(marks):
            start, end = marks[self._next]
            if start == position:
                return Boundary(end, b"", self._text.media[start].name)
            found = Boundary(start, _EDGE)
        cut = self._text_cuts.after(position)
        if found is None or (cut is not None and cut.position < found.position):
            return cut
        return found


class MediaEncoder:
    """Makes the ids: of the text by the model's encoder, of images their own."""

    __slots__ = ("_encoder", "_text")

    def __init__(self, text: MediaText, encoder: PlainEncoder) -> None:
        self._text = text
        self._encoder = encoder

    def cuts(self, data: bytes) -> MediaCuts:
        """Find the boundaries of the text and its marks."""
        return MediaCuts(self._text, self._encoder.cuts(data))

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        """Encode segments; pure and thread-safe. The last of `new` is the tail, and text."""
        texts = [segment for segment in new if segment.media is None]
        encoded = iter(self._encoder.encode(data, texts, suffix))
        return [
            next(encoded) if segment.media is None else self._text.media[segment.start].ids
            for segment in new
        ]
