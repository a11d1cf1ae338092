"""Find where a prompt's bytes are cut: text at safe tokens, token ids by their number."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from router.api.openai import TokenIds
from router.tokens.boundaries import Needle
from router.tokens.incremental import Boundary, NewSegment

MIN_SEGMENT_BYTES = 512
"""Boundaries nearer to the last one are skipped. About 130 tokens are encoded again at most, and a
prompt of 400 KB has about a hundred segments, not thousands."""

ID_STRIDE = 1024
"""Tokens per segment of a prompt that came as token ids."""

_NO_BOUNDARY = 1 << 62


class TextCuts:
    """The boundaries in one text's UTF-8 bytes, found lazily."""

    __slots__ = ("_data", "_found", "_min_bytes", "_needles")

    def __init__(
        self, data: bytes, needles: Sequence[Needle], min_bytes: int = MIN_SEGMENT_BYTES
    ) -> None:
        self._data = data
        self._needles = needles
        self._min_bytes = min_bytes
        self._found = [-1] * len(needles)  # the next boundary at each needle

    def after(self, position: int) -> Boundary | None:
        earliest = position + self._min_bytes
        best, guard = _NO_BOUNDARY, b""
        for index, needle in enumerate(self._needles):
            found = self._found[index]
            if found < earliest:
                start = self._data.find(needle.text, max(earliest - needle.offset, 0))
                found = self._found[index] = start + needle.offset if start >= 0 else _NO_BOUNDARY
            if found < best:
                best, guard = found, needle.guard
        return Boundary(best, guard) if best < _NO_BOUNDARY else None


class IdCuts:
    """The boundaries in the bytes of an array of token ids: one every `ID_STRIDE`."""

    __slots__ = ("_num_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def after(self, position: int) -> Boundary | None:
        end = position + 4 * ID_STRIDE
        return Boundary(end, b"") if end <= self._num_bytes else None


def slice_ids(data: bytes, new: Sequence[NewSegment]) -> list[TokenIds]:
    """Return the segments' ids from the bytes of an array of ids."""
    return [array("I", data[segment.start : segment.end]) for segment in new]
