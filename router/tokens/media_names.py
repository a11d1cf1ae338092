"""Compute the engine's name of an image: the identifier in its block hashes.

Source: vLLM 0.32.0, multimodal/hasher.py (MultiModalHasher), multimodal/processing/inputs.py
(get_mm_hashes), multimodal/media/image.py (ImageMediaIO.load_bytes),
media/connector.py (_load_data_url). For requests without options for
the processor or for reading media:

    a client's `uuid`    is the identifier
    an image's bytes     BLAKE3 of {"image": the bytes, "model_id": what `--model` says}; the
                         bytes with {"image_mode": "RGB", "rgba_background_color": white} beside
                         them if the engine converts the picture: it is not RGB, or, from 0.33 on,
                         a PNG with a transparent colour

Every key and value has its length in front, every container its kind. Named here are PNG, JPEG,
WebP and GIF. Other items have no name here, and nothing behind them matches. Neither has an item
behind an address: it may be another picture the next time.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final, Literal, NamedTuple

from blake3 import blake3

from router.base.releases import V0_32, V0_33, Release

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
