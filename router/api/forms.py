"""The model that a form names (multipart/form-data: audio, images), found without decoding it.

Only forms that every reader reads alike have a model here: one boundary, plain ASCII heads, no
escapes, no `model` that is a file. Of several parts called `model` the engine takes the last
(FastAPI on Starlette 1.10's `FormData`, python-multipart 0.0.34), and so is it here. In any other
form no model is known: where there are several to choose from, or a tenant may use only some, it
is refused.

The boundary is searched for in the bytes that are there anyway: 25 MB take 20 to 60 ms, so a large
form is looked through in another thread, in slices between which the event loop runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

MAX_PARTS: Final = 1_000
"""Starlette takes as many fields."""

SMALL_BYTES: Final = 1 << 20
"""Forms up to this are looked through at once, in some 2 ms."""

_SLICE_BYTES: Final = 1 << 20
_MAX_HEAD_BYTES: Final = 4_096
_MAX_NAME_BYTES: Final = 512

_CONTENT_TYPE: Final = re.compile(
    r"multipart/form-data(?: *; *charset=\"?utf-?8\"?)? *; *"
    r"boundary=(?:\"([A-Za-z0-9'()+_,./:=? -]{1,256})\"|([A-Za-z0-9'*+_.!#$%&^`|~-]{1,256}))"
    r"(?: *; *charset=\"?utf-?8\"?)? *",
    re.IGNORECASE,
)
_LINE: Final = re.compile(rb"([A-Za-z0-9!#$%&'*+.^_`|~-]+):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
_DISPOSITION: Final = re.compile(
    rb'form-data *; *name="([^"\\]*)"(?: *; *(filename)="[^"\\]*")?[ \t]*', re.IGNORECASE
)


class _Unclear(Exception):
    """Readers may differ about the form."""


def is_form(content_type: str) -> bool:
    """Return whether a body of this type is a multipart form."""
    return content_type.lstrip()[:20].lower().startswith("multipart/form-data")


def boundary_of(content_type: str) -> bytes | None:
    """Find what separates the parts of a form; None: it is no form, or an unusual one."""
    matched = _CONTENT_TYPE.fullmatch(content_type)
    return (matched[1] or matched[2]).encode() if matched is not None else None


def model_of_form(body: bytes, content_type: str) -> str | None:
    """Find the model that a form names; None: it names none, or not clearly."""
    boundary = boundary_of(content_type)
    if boundary is None:
        return None
    found = None
    try:
        for name, is_file, start, end in _parts(body, boundary):
            if name != b"model":
                continue
            if is_file or end - start > _MAX_NAME_BYTES:
                return None
            found = body[start:end]
        return found.decode() if found else None
    except (_Unclear, UnicodeDecodeError):
        return None


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[bytes, bool, int, int]]:
    """List a form's parts: name, whether it is a file, and where in the body its content is.

    Raises:
        _Unclear: it is none, or not one that every reader reads alike.
    """
    delimiter = b"\r\n--" + boundary
    at = len(delimiter) - 2
    if not body.startswith(delimiter[2:]):
        raise _Unclear
    for _ in range(MAX_PARTS):
        if body[at : at + 2] == b"--":
            return
        head_end = body.find(b"\r\n\r\n", at, at + _MAX_HEAD_BYTES)
        if body[at : at + 2] != b"\r\n" or head_end < 0:
            raise _Unclear
        start = head_end + 4
        end = _find(body, delimiter, start)
        if end < 0:
            raise _Unclear
        name, is_file = _head(body[at + 2 : head_end])
        yield name, is_file, start, end
        at = end + len(delimiter)
    raise _Unclear


def _find(body: bytes, delimiter: bytes, start: int) -> int:
    """Find a delimiter in slices: each holds the interpreter for a millisecond or two."""
    while start < len(body):
        end = body.find(delimiter, start, start + _SLICE_BYTES + len(delimiter))
        if end >= 0:
            return end
        start += _SLICE_BYTES
    return -1


def _head(head: bytes) -> tuple[bytes, bool]:
    """Read a part's name, and whether it is a file."""
    found: list[tuple[bytes, bool]] = []
    for line in head.split(b"\r\n"):
        field = _LINE.fullmatch(line)
        if field is None:
            raise _Unclear
        if field[1].lower() != b"content-disposition":
            continue
        disposition = _DISPOSITION.fullmatch(field[2])
        if disposition is None:
            raise _Unclear
        found.append((disposition[1], disposition[2] is not None))
    if len(found) != 1:
        raise _Unclear
    return found[0]
