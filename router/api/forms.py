"""The parts of a form (multipart/form-data: audio, images): which model it names, and which fields.

A form is read as vLLM's reader does: Starlette 1.10 on python-multipart 0.0.34. Its grammar:

    delimiter   CRLF "--" boundary, then CRLF or "--"; followed by anything else it is content
    padding     spaces and tabs between boundary and CRLF
    preamble    only if it begins with CR or LF and has no "-"
    head        lines "token:value" CRLF; a folded line, or a bare LF as line end, is none
    name        quoted or not, with \\\\ and \\" escaped; the last one counts; `name*=` is ignored

Earlier releases decode `name*=` (RFC 2231), so a part has several possible names. A form in which
readers differ about the model has none here: if there are several models to choose from, or a
tenant may use only some, it is refused.

The boundary is searched for in the bytes that are there anyway: 25 MB take 20 to 60 ms, so a large
form is looked through in another thread, in slices between which the event loop runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.message import Message
from typing import Final

from msgspec import Struct

MAX_PARTS: Final = 1_000
"""Starlette takes as many fields."""

SMALL_BYTES: Final = 1 << 20
"""Forms up to this are looked through at once, in some 2 ms."""

_SLICE_BYTES: Final = 1 << 20
_MAX_HEAD_BYTES: Final = 4_096
_MAX_NAME_BYTES: Final = 512
_MAX_BOUNDARY: Final = 256
_FIELD: Final = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+): *([^\r]*)\r\n")
_CHARSETS: Final = frozenset({"utf-8", "utf8"})


class Malformed(Exception):
    """vLLM refuses the form, or readers may differ about what it is."""


class Part(Struct, frozen=True, kw_only=True):
    """A part of a form.

    name: As vLLM's reader has it; None: it has none.
    names: All that some reader may take for its name.
    start, end: Its content in the body.
    is_clear: Every reader reads its head and the delimiters around it in the same way.
    """

    name: bytes | None
    names: frozenset[bytes]
    is_file: bool
    start: int
    end: int
    is_clear: bool


def is_form(content_type: str) -> bool:
    """Return whether a body of this type is a multipart form."""
    return content_type.lstrip()[:20].lower().startswith("multipart/form-data")


def model_of_form(body: bytes, content_type: str) -> str | None:
    """Find the model that a form names; None: it names none, or not clearly."""
    found = None
    try:
        for part in parts_of_form(body, content_type):
            if not part.is_clear:
                return None
            if part.name != b"model":
                continue
            if part.is_file or part.end - part.start > _MAX_NAME_BYTES:
                return None
            found = body[part.start : part.end]
        return found.decode() if found else None
    except (Malformed, UnicodeDecodeError):
        return None


def parts_of_form(body: bytes, content_type: str) -> Iterator[Part]:
    """List a form's parts.

    Raises:
        Malformed: it is none.
    """
    delimiter = b"\r\n--" + boundary_of(content_type)
    at = body.find(b"-") if body[:1] in (b"\r", b"\n") else 0
    if at < 0 or not body.startswith(delimiter[2:], at):
        raise Malformed("it does not begin with its boundary")
    is_clear = at == 0
    at += len(delimiter) - 2
    for _ in range(MAX_PARTS):
        after = _after_delimiter(body, at)
        if after is None:
            raise Malformed("its boundary is not followed by a line end")
        if after < 0:
            return
        is_clear = is_clear and after == at + 2
        head_end = body.find(b"\r\n\r\n", after - 2, after + _MAX_HEAD_BYTES)
        if head_end < 0:
            raise Malformed("the head of a part does not end")
        start = head_end + 4
        end = _next_delimiter(body, delimiter, start)
        is_clear = is_clear and end >= 0
        yield _part(body[after : head_end + 2], start, end if end >= 0 else len(body), is_clear)
        if end < 0:
            return  # cut off: the reader drops the last part
        at = end + len(delimiter)
    raise Malformed(f"it has more than {MAX_PARTS} parts")


def boundary_of(content_type: str) -> bytes:
    """Read the boundary of a form.

    Raises:
        Malformed: the type is another one, or names anything but one boundary and UTF-8.
    """
    kind, *options = _options(content_type)
    names = [name for name, _ in options]
    given = dict(options)
    boundary = given.get("boundary", "")
    if kind[1].lower() != "multipart/form-data":
        raise Malformed("it is not multipart/form-data")
    if any("*" in name for name in names) or len(given) < len(options):
        raise Malformed("its Content-Type names something twice, or with an asterisk")
    if given.get("charset", "utf-8").lower() not in _CHARSETS:
        raise Malformed("it is not in UTF-8")
    if not 0 < len(boundary) <= _MAX_BOUNDARY or not boundary.isascii():
        raise Malformed("its Content-Type has no boundary")
    return boundary.encode()


def _after_delimiter(body: bytes, at: int) -> int | None:
    """Find where the head behind a boundary begins; -1: it was the last; None: it is none."""
    if body.startswith(b"--", at):
        return -1
    while body[at : at + 1] in (b" ", b"\t"):
        at += 1
    return at + 2 if body.startswith(b"\r\n", at) else None


def _next_delimiter(body: bytes, delimiter: bytes, start: int) -> int:
    """Find the next delimiter; -1: there is none."""
    while (found := _find(body, delimiter, start)) >= 0:
        if _after_delimiter(body, found + len(delimiter)) is not None:
            return found
        start = found + 2
    return -1


def _find(body: bytes, delimiter: bytes, start: int) -> int:
    """Find a delimiter in slices: each holds the interpreter for a millisecond or two."""
    while start < len(body):
        end = body.find(delimiter, start, start + _SLICE_BYTES + len(delimiter))
        if end >= 0:
            return end
        start += _SLICE_BYTES
    return -1


def _part(head: bytes, start: int, end: int, is_clear: bool) -> Part:
    """Read a part's head.

    Raises:
        Malformed: it is none.
    """
    dispositions = []
    at = 0
    while at < len(head):
        field = _FIELD.match(head, at)
        if field is None:
            raise Malformed("the head of a part is no list of header fields")
        at = field.end()
        if field[1].lower() == b"content-disposition":
            dispositions.append(field[2].decode("latin-1"))
    names: set[bytes] = set()
    for disposition in dispositions:
        names.update(_possible_names(disposition))
    options = _options(dispositions[-1])[1:] if dispositions else []
    given = {name: value for name, value in options if "*" not in name}
    starred = [name for name, _ in options if "*" in name and not name.startswith("filename")]
    is_clear = is_clear and len(dispositions) == 1 and not starred
    is_clear = is_clear and b"\n" not in head.replace(b"\r\n", b"")
    name = given.get("name")
    is_file = any(name.startswith("filename") for name, _ in options)
    return Part(
        name=name.encode("latin-1") if name is not None else None,
        names=frozenset(names),
        is_file=is_file,
        start=start,
        end=end,
        is_clear=is_clear and name is not None and "\\" not in name and len(names) == 1,
    )


def _possible_names(disposition: str) -> Iterator[bytes]:
    """List what readers take for a part's name, the RFC 2231 spelling decoded."""
    for name, value in _options(disposition)[1:]:
        if name == "name":
            yield value.encode("latin-1")
            yield value.replace("\\", "").encode("latin-1")
    if "*" in disposition:
        message = Message()
        message["content-type"] = disposition.replace("\n", " ")
        try:
            params = message.get_params([], unquote=True)
        except (ValueError, LookupError):
            return
        for name, given in params:
            value = given[-1] if isinstance(given, tuple) else given
            if name.lower() == "name":
                yield value.encode("utf-8", "replace")


def _options(header: str) -> list[tuple[str, str]]:
    """Split a header into its value (under the name "") and its options, in their order.

    Source: python_multipart.multipart.parse_options_header; a `;` in quotes splits nothing.
    """
    found: list[tuple[str, str]] = []
    for segment in _segments(header):
        name, is_option, value = segment.partition("=")
        if not found:
            found.append(("", segment.strip(" \t")))
            continue
        if not is_option:
            name, value = segment, ""
        value = value.strip(" \t")
        if len(value) >= 2 and value[0] == value[-1] == '"':
            value = value[1:-1].replace("\\\\", "\\").replace('\\"', '"')
        found.append((name.strip(" \t").lower(), value))
    return found


def _segments(header: str) -> Iterator[str]:
    start = at = 0
    num_quotes = 0
    while True:
        end = header.find(";", at)
        if end < 0:
            yield header[start:]
            return
        num_quotes += header.count('"', at, end) - header.count('\\"', at, end)
        at = end + 1
        if num_quotes % 2 == 0:
            yield header[start:end]
            start, num_quotes = at, 0
