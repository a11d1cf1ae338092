"""The parts of a form (multipart/form-data: audio, images): the model it names, and its fields.

Only forms that every reader reads in the same way are accepted, so that a field cannot hide:

    body        for each part: "--" boundary CRLF head CRLF CRLF content CRLF
                in the end: "--" boundary "--"
    head        lines `token: value`, one of them a Content-Disposition
    disposition `form-data`, one `name` without escapes, perhaps `filename` and `filename*`

Searching 25 MB takes 20 to 60 ms, so large forms are searched in another thread, in slices between
which the event loop runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

MAX_PARTS: Final = 1_000
"""Source: Starlette takes as many fields."""

SMALL_BYTES: Final = 1 << 20
"""Forms up to this are searched at once, in about 2 ms."""

_SLICE_BYTES: Final = 1 << 20
_MAX_HEAD_BYTES: Final = 4_096
_MAX_NAME_BYTES: Final = 512
_MAX_BOUNDARY: Final = 256
_FIELD: Final = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([^\r\n]*)")
_OPTION: Final = re.compile(
    rb';[ \t]*([A-Za-z]+\*?)[ \t]*=[ \t]*(?:"((?:[^"\\]|\\.)*)"|([^";\s]*))[ \t]*'
)
_OPTIONS_OF_PARTS: Final = frozenset({b"name", b"filename", b"filename*"})
_CHARSETS: Final = (b"utf-8", b"utf8")


class Malformed(Exception):
    """Readers may differ about the form, or vLLM refuses it."""


class FormPart(Struct, frozen=True, kw_only=True):
    """A part of a form; `start` and `end` of its content in the body."""

    name: bytes
    is_file: bool
    start: int
    end: int


def is_form(content_type: str) -> bool:
    """Return whether a body of this type is a multipart form."""
    return content_type.lstrip()[:20].lower().startswith("multipart/form-data")


def model_of_form(body: bytes, content_type: str) -> str | None:
    """Return the model that a form names; None: it names none, or not clearly."""
    found = None
    try:
        for part in parts_of_form(body, content_type):
            if part.name != b"model":
                continue
            if part.is_file or part.end - part.start > _MAX_NAME_BYTES:
                return None
            found = body[part.start : part.end]
        return found.decode() if found else None
    except (Malformed, UnicodeDecodeError):
        return None


def parts_of_form(body: bytes, content_type: str) -> Iterator[FormPart]:
    """Yield a form's parts.

    Raises:
        Malformed: the body is not such a form.
    """
    delimiter = b"\r\n--" + boundary_of(content_type)
    if not body.startswith(delimiter[2:]):
        raise Malformed("it does not begin with its boundary")
    at = len(delimiter) - 2
    for _ in range(MAX_PARTS):
        if body.startswith(b"--", at):
            return
        if not body.startswith(b"\r\n", at):
            raise Malformed("its boundary is not followed by a line end")
        head_end = body.find(b"\r\n\r\n", at, at + _MAX_HEAD_BYTES)
        if head_end < 0:
            raise Malformed("the head of a part does not end")
        name, is_file = _read_head(body[at + 2 : head_end])
        start, end = head_end + 4, _find(body, delimiter, head_end + 4)
        yield FormPart(name=name, is_file=is_file, start=start, end=end)
        at = end + len(delimiter)
    raise Malformed(f"it has more than {MAX_PARTS} parts")


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a form.

    Raises:
        Malformed: the type is another one, or has other options than a boundary and UTF-8.
    """
    kind, options = _options(content_type.encode("latin-1", "replace"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data":
        raise Malformed("it is not multipart/form-data")
    if options.get(b"charset", b"utf-8").lower() not in _CHARSETS or b"charset*" in options:
        raise Malformed("it is not in UTF-8")
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii() or b"\\" in boundary:
        raise Malformed("its Content-Type has no boundary")
    return boundary


def _read_head(head: bytes) -> tuple[bytes, bool]:
    """Return a part's name, and whether it is a file."""
    dispositions = []
    for line in head.split(b"\r\n"):
        field = _FIELD.fullmatch(line)
        if field is None:
            raise Malformed("the head of a part is not a list of header fields")
        if field[1].lower() == b"content-disposition":
            dispositions.append(field[2])
    if len(dispositions) != 1:
        raise Malformed("a part does not have one Content-Disposition")
    kind, options = _options(dispositions[0])
    name = options.pop(b"name", None)
    if kind != b"form-data" or name is None or b"\\" in name or options.keys() - _OPTIONS_OF_PARTS:
        raise Malformed("a part does not have one plain name")
    return name, bool(options)


def _options(header: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Split a header's value into its kind, in lower case, and its options.

    Raises:
        Malformed: it is not a list of different options.
    """
    at = header.find(b";") if b";" in header else len(header)
    kind = header[:at].strip(b" \t").lower()
    options: dict[bytes, bytes] = {}
    while at < len(header):
        option = _OPTION.match(header, at)
        if option is None or option[1].lower() in options:
            raise Malformed("a header has an option twice, or an unusual one")
        options[option[1].lower()] = option[3] if option[2] is None else option[2]
        at = option.end()
    return kind, options


def _find(body: bytes, delimiter: bytes, start: int) -> int:
    """Find a delimiter in slices: each holds the interpreter for 1 or 2 ms."""
    while start < len(body):
        end = body.find(delimiter, start, start + _SLICE_BYTES + len(delimiter))
        if end >= 0:
            return end
        start += _SLICE_BYTES
    raise Malformed("it is cut off")
