"""Write a prompt's text with a mark for each image, as bytes with boundaries for the segment tree.

    bytes    text, mark, text, mark, ..., text       a mark: 0xff, a digest of the image, 0xff
    tokens   encoded, the image's own, encoded, ...

No UTF-8 text contains the byte 0xff. A mark is a segment of its own. So two prompts share the
text behind an image only if it is the same image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_128_hexdigest

from router.api.openai import TokenIds
from router.tokens.encoders import ChatEncoder
from router.tokens.incremental import Boundary, NewSegment, PromptBoundaries
from router.tokens.media import KnownMedia

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

    def __init__(self, text: MediaText, encoder: ChatEncoder) -> None:
        self._text = text
        self._encoder = encoder

    def cuts(self, data: bytes) -> MediaCuts:
        """Find the boundaries of the marked text."""
        return MediaCuts(self._text, self._encoder.cuts(data))

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        """Encode segments; pure and thread-safe. The last of `new` is the tail, and text."""
        texts = [segment for segment in new if segment.media is None]
        encoded = iter(self._encoder.encode(data, texts, suffix))
        return [
            next(encoded) if segment.media is None else self._text.media[segment.start].ids
            for segment in new
        ]
