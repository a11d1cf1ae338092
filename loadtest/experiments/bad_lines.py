"""Lines of a file that are no decision records, and why.

The query engine only counts them, so files with bad lines are read again to name them.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

import msgspec
from msgspec import Struct

from router.records.record import SCHEMA

_NOT_JSON: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # brackets without end
_SHOWN: Final = 60  # characters of a value that is quoted


class RecordsError(Exception):
    """The records cannot be read as asked; the message names file, line and field."""


class BadLine(Struct, frozen=True, kw_only=True):
    """A line that is left out; `is_torn`: the last line, cut off while it was written."""

    file: str
    line: int
    reason: str
    is_torn: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class _Core(Struct, frozen=True, kw_only=True):
    """The fields that a record must have."""

    schema: int
    request_id: str
    at: float
    outcome: str
    total_ms: float


class _Version(Struct, frozen=True, kw_only=True):
    schema: int


def find(path: Path, most: int) -> list[BadLine]:
    """Return the first `most` bad lines of a file, and its torn last line.

    Raises:
        RecordsError: the file cannot be read.
    """
    core, version = msgspec.json.Decoder(_Core), msgspec.json.Decoder(_Version)
    found: list[BadLine] = []
    number, line = 0, b"\n"
    try:
        for number, line in _lines(path):
            reason = _reason(line, core, version) if line.strip() else None
            if reason is not None and (len(found) < most or not line.endswith(b"\n")):
                is_torn = not line.endswith(b"\n") and not _is_json(line)
                said = "the line is cut off" if is_torn else reason
                found.append(BadLine(file=str(path), line=number, reason=said, is_torn=is_torn))
    except (OSError, EOFError) as exc:
        raise RecordsError(f"{path}:{number}: {exc}") from exc
    return found


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with _open(path) as file:
        yield from enumerate(file, 1)


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return path.open("rb")


def _reason(
    line: bytes, core: msgspec.json.Decoder[_Core], version: msgspec.json.Decoder[_Version]
) -> str | None:
    """Return what is wrong with a line; None: it is a record."""
    try:
        schema = version.decode(line).schema
    except msgspec.ValidationError as exc:
        return f"not a decision record: {exc}"
    except _NOT_JSON as exc:
        return f"not JSON: {str(exc)[:_SHOWN]}"
    if not 1 <= schema <= SCHEMA:
        return f"field `schema`: version {schema} is unknown (this warmroute reads 1 to {SCHEMA})"
    try:
        core.decode(line)
    except _NOT_JSON as exc:
        return f"not a decision record: {exc}"
    return None


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line)
    except _NOT_JSON:
        return False
    return True
