"""Run files: one line that describes the run (`RunInfo`), then one `TurnResult` a line.

The file is written during the run, so a crash keeps what was measured. The first line says "not
complete" until the end. It is padded with spaces, and then written over in place.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final, Self, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from loadtest.results import RUN_SCHEMA, Run, RunInfo, TurnResult

UNFINISHED: Final = "the run is still going on, or it was killed"
_PADDING: Final = 1024  # bytes by which the final first line may be longer
_FAMILY: Final = RUN_SCHEMA.partition("/")[0]
_MAX_LISTED: Final = 60

_Line = TypeVar("_Line", bound=Struct)


class RunFileError(ValueError):
    """A run file cannot be read; the message names the file, the line and the field."""


class RunWriter:
    """Writes a run as it happens; a context.

    Raises (on entry):
        FileExistsError: the file is there, and `overwrite` is not set.
        OSError: it cannot be written.
    """

    __slots__ = ("_file", "_overwrite", "_path", "_width")

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        self._path = path
        self._overwrite = overwrite
        self._file: BinaryIO
        self._width = 0

    def __enter__(self) -> Self:
        self._file = self._path.open("wb" if self._overwrite else "xb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def begin(self, info: RunInfo) -> None:
        """Write the first line: of a run that is not complete yet."""
        line = msgspec.json.encode(replace(info, is_complete=False, note=UNFINISHED))
        self._width = len(line) + _PADDING
        self._write(line.ljust(self._width) + b"\n")

    def add(self, result: TurnResult) -> None:
        """Append a turn.

        Raises:
            OSError: it could not be written, or not all of it; add nothing more.
        """
        self._write(msgspec.json.encode(result) + b"\n")

    def end(self, info: RunInfo) -> None:
        """Write the first line again, with how the run ended."""
        line = msgspec.json.encode(info)
        if len(line) > self._width:
            room = max(0, len(info.note) - (len(line) - self._width))
            line = msgspec.json.encode(replace(info, note=info.note[:room]))
        os.pwrite(self._file.fileno(), line.ljust(self._width), 0)

    def _write(self, line: bytes) -> None:
        if self._file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))


def write_run(path: Path, run: Run) -> None:
    """Write a whole run, over whatever is there."""
    with path.open("wb") as file:
        for line in (run.info, *run.turns):
            file.write(msgspec.json.encode(line) + b"\n")


def read_run(path: Path) -> Run:
    """Read a run file; a last line that was cut off is left out, and the run's note says so.

    Raises:
        RunFileError: it is no run file, of another version, or damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        info = _info(path, file.readline())
        turns = []
        for number, line, is_last in _numbered(file):
            try:
                turns.append(_decode(path, number, line, _TURN))
            except RunFileError:
                if not is_last or line.endswith(b"\n"):
                    raise
                cut = f"line {number}, the last one, is cut off"
                info = replace(
                    info, is_complete=False, note=f"{info.note}; {cut}" if info.note else cut
                )
    return Run(info=info, turns=tuple(turns))


class _Version(Struct):
    schema: str


_VERSION = msgspec.json.Decoder(_Version)
_INFO = msgspec.json.Decoder(RunInfo)
_TURN = msgspec.json.Decoder(TurnResult)


def _info(path: Path, line: bytes) -> RunInfo:
    if not line.strip():
        raise RunFileError(f"{path}: the file is empty; a run file begins with what the run was")
    try:
        schema = _VERSION.decode(line).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        schema = ""
    if schema.partition("/")[0] != _FAMILY:
        raise RunFileError(
            f"{path}, line 1: no run file of `warmroute replay` or `simulate` "
            f'(they begin with {{"schema":"{RUN_SCHEMA}",…)'
        )
    if schema != RUN_SCHEMA:
        raise RunFileError(
            f"{path}, line 1, schema: {schema!r} is another version; this one reads {RUN_SCHEMA!r}"
        )
    return _decode(path, 1, line, _INFO)


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Yield line number, line, and whether it is the last one; blank lines are left out."""
    before: tuple[int, bytes] | None = None
    for number, line in enumerate(file, 2):
        if line.strip():
            if before is not None:
                yield *before, False
            before = number, line
    if before is not None:
        yield *before, True


def _decode(path: Path, number: int, line: bytes, decoder: msgspec.json.Decoder[_Line]) -> _Line:
    try:
        return decoder.decode(line)
    except msgspec.ValidationError as exc:
        # msgspec says: Expected `float`, got `str` - at `$.ttft_s`
        what, _, where = str(exc).partition(" - at `$.")
        field = f", {where.rstrip('`')}" if where else ""
        raise RunFileError(f"{path}, line {number}{field}: {what}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        shown = line[:_MAX_LISTED].decode(errors="replace").strip()
        raise RunFileError(f"{path}, line {number}: not JSON ({exc}): {shown!r}…") from exc
